// Tensors that are saved for backward and of no interest to a plan, kept without Python.
//
// A pair of saved-tensor hooks written in Python costs some thirty microseconds a tensor, there and
// back. While steps go by a plan, most of these tensors neither leave nor are dropped, and all there
// is to do is to see that the step goes on as planned. So the hooks that PyTorch calls are the two
// functions below. A tensor whose save is *plain*, in a step that so far is the planned one, is kept
// here, as PyTorch itself would: detached, with its version. Everything else goes on to Python.
//
// What is kept here can still become Python's (`adopt`): when a step departs from its plan, or when
// memory is short, every saved tensor may have to leave.
//
// All of this happens with Python's lock held, so there is none of its own.

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "python.h"
#include "tape.h"

// Whom this works for.
struct Python {
  PyObject *tensor_type, *parameter_type;
  PyObject* check;     // called with a tensor, its version and origin, raises if it was modified
  PyObject* unpack;    // called with a handle of Python's
  PyObject* show;      // likewise, where it has been said already that it is asked for
  PyObject* pack;
  PyObject* adopt;     // called with a plain one's tensor, version, origin, original, number and
                       // whether it is the very tensor
  PyObject* happened;  // called with an event's code, if something is to be done at it
};

namespace {

constexpr const char* kName = "lowtide.plain";
constexpr int kOneArgument = 8;                       // METH_O
// Of an event: see `lowtide_saves_script`.
constexpr std::uint8_t kPlain = 1, kEventful = 2, kTaped = 4;

struct Plain {
  at::Tensor tensor;  // undefined once it has become Python's
  std::int64_t version = 0;
  std::int64_t number = 0;         // among all saves
  std::int64_t output = -1;        // which output of a node it is; -1: of none
  std::string node;                // ... and the node's name
  bool itself = false;             // the tensor is the one that was saved, not one like it
  PyObject* original = nullptr;    // a weak reference to the very tensor, if that may come back
  PyObject* handle = nullptr;      // Python's
  PyObject* capsule = nullptr;     // in which it lies
  std::int64_t age = 0;
  int value = -1;                  // of the tape, that it lies on
  std::int64_t step = 0;           // ... and the tape's step

  // The tape knows what has become of it.
  bool is_taped() const {
    return value >= 0 && handle == nullptr && lowtide::tape::is_known() &&
        step == lowtide::tape::step();
  }
  // Nobody does: a step that was to be Python's was broken off.
  bool is_lost() const {
    return value >= 0 && handle == nullptr && !is_taped() && tensor.storage().nbytes() == 0 &&
        tensor.numel() > 0;
  }
};

namespace tape = lowtide::tape;

// Never destroyed: saved tensors may outlive everything.
Python python{};
auto& kept = *new std::map<std::int64_t, Plain*>;  // by their age
std::int64_t last_age = 0;

auto& codes = *new std::vector<std::int64_t>;
auto& flags = *new std::vector<std::uint8_t>;
std::int64_t asked_code = 0;  // plus the number of a save: the code of the event that it is asked for
bool running = false;         // a step goes on as planned
bool asks_count = true;       // to be asked for a saved tensor is an event
bool attentive = false;       // Python is told of every event
std::int64_t next_event = 0;  // by its place in them
std::int64_t saves = 0;       // so far, in this step
std::int64_t before = 0;      // ... and in all steps before it

PyObject* none() {
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}

bool is_of_plain_type(PyObject* given) {
  PyObject* const type = PyObject_Type(given);
  Py_DecRef(type);
  return type == python.tensor_type || type == python.parameter_type;
}

bool has_attributes(PyObject* given) {
  PyObject* const all = PyObject_GetAttrString(given, "__dict__");
  if (all == nullptr) {
    PyErr_Clear();
    return true;
  }
  const bool has = PyDict_Size(all) != 0;
  Py_DecRef(all);
  return has;
}

// Undefined where it is of a class that may have a say.
at::Tensor tensor_of(PyObject* given) {
  if (!is_of_plain_type(given)) return {};
  PyObject* const address = PyObject_GetAttrString(given, "_cdata");
  if (address == nullptr) {
    PyErr_Clear();
    return {};
  }
  auto* const impl = static_cast<c10::TensorImpl*>(PyLong_AsVoidPtr(address));
  Py_DecRef(address);
  if (impl == nullptr) PyErr_Clear();
  if (impl == nullptr) return {};
  return at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(impl));
}

// Plain memory, with a version, and of no class that has a say.
bool is_plain_memory(const at::Tensor& tensor) {
  static const c10::DispatchKeySet special({c10::DispatchKey::Python,
                                            c10::DispatchKey::FuncTorchGradWrapper,
                                            c10::DispatchKey::FuncTorchBatched,
                                            c10::DispatchKey::Functionalize});
  return tensor.layout() == c10::kStrided && tensor.has_storage() && !tensor.is_meta() &&
      !tensor.is_nested() && !tensor.is_inference() && !tensor._is_zerotensor() &&
      !tensor.key_set().has_any(special);
}

std::int64_t version_of(const at::Tensor& tensor) {
  return static_cast<std::int64_t>(tensor.unsafeGetTensorImpl()->version_counter().current_version());
}

at::Tensor detached(const at::Tensor& tensor) {
  const c10::impl::ExcludeDispatchKeyGuard without(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), false));
}

void forget(PyObject* capsule) {
  auto* const plain = static_cast<Plain*>(PyCapsule_GetPointer(capsule, kName));
  kept.erase(plain->age);
  plain->tensor.reset();
  if (plain->is_taped()) tape::unsaved(plain->value);
  PyObject *const handle = plain->handle, *const original = plain->original;
  delete plain;
  if (original != nullptr) Py_DecRef(original);
  if (handle != nullptr) Py_DecRef(handle);
}

// Whether the event at hand may be dealt with here.
bool goes_on(std::int64_t code) {
  const auto place = static_cast<std::size_t>(next_event);
  if (!running || place >= codes.size() || codes[place] != code) return false;
  return (flags[place] & kPlain) != 0 || ((flags[place] & kTaped) != 0 && tape::is_on());
}

// True: Python has done what there was to do, or there was nothing. False: it has raised.
bool happen(std::int64_t code) {
  if ((flags[static_cast<std::size_t>(next_event)] & kEventful) == 0 && !attentive)
    return tape::happen(next_event++);
  PyObject* const number = PyLong_FromLongLong(code);
  PyObject* const done = PyObject_CallFunctionObjArgs(python.happened, number, nullptr);
  Py_DecRef(number);
  if (done == nullptr) return false;
  Py_DecRef(done);
  return true;
}

// Whether a save of the tensor may be dealt with here.
bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && is_plain_memory(tensor) &&
      (python.pack == nullptr || goes_on(static_cast<std::int64_t>(tensor.nbytes())));
}

// As PyTorch itself would keep it.
std::unique_ptr<Plain> made_plain(PyObject* given, const at::Tensor& tensor) {
  auto plain = std::make_unique<Plain>();
  const auto& node = tensor.grad_fn();
  // A leaf is handed back itself, as PyTorch does: a function may look at what hangs on it.
  const bool itself = node == nullptr && (tensor.requires_grad() || has_attributes(given));
  plain->itself = itself;
  plain->tensor = itself ? tensor : detached(tensor);
  plain->version = version_of(tensor);
  if (node != nullptr) {
    plain->output = static_cast<std::int64_t>(tensor.output_nr());
    plain->node = node->name();
  } else if (!itself) {
    plain->original = PyWeakref_NewRef(given, nullptr);
  }
  return plain;
}

// False: the tape is about another tensor than this one.
bool is_put_on_tape(Plain& plain) {
  const int value = tape::value_of_save(saves);
  if (value < 0) return true;
  if (plain.itself || !tape::saved(value, plain.tensor.storage().unsafeGetStorageImpl()))
    return false;
  plain.value = value;
  plain.step = tape::step();
  return true;
}

PyObject* pack(PyObject*, PyObject* given) {
  std::unique_ptr<Plain> made;
  try {
    const bool may_be = running || python.pack == nullptr;
    const at::Tensor tensor = may_be ? tensor_of(given) : at::Tensor();
    if (is_plain(tensor)) made = made_plain(given, tensor);
  } catch (const std::exception&) {  // Python finds out what it is
    made = nullptr;
  }
  if (made == nullptr && python.pack == nullptr) {  // nobody is there any more
    Py_IncRef(given);
    return given;
  }
  if (made != nullptr && tape::is_on() && running && !is_put_on_tape(*made)) {
    made = nullptr;
    if (!tape::hand_over("another tensor is saved")) return nullptr;
  }
  if (made == nullptr) return PyObject_CallFunctionObjArgs(python.pack, given, nullptr);
  Plain* const plain = made.release();
  const auto code = static_cast<std::int64_t>(plain->tensor.nbytes());
  plain->number = before + saves;
  plain->age = ++last_age;
  kept[plain->age] = plain;
  PyObject* const capsule = plain->capsule = PyCapsule_New(plain, kName, forget);
  if (python.pack == nullptr) return capsule;
  ++saves;
  if (happen(code)) return capsule;
  Py_DecRef(capsule);
  return nullptr;
}

PyObject* origin_of(const Plain& plain) {
  if (plain.output < 0) return none();
  PyObject* const origin = PyTuple_New(2);
  PyTuple_SetItem(origin, 0, PyLong_FromLongLong(plain.output));
  PyTuple_SetItem(origin, 1, PyUnicode_FromString(plain.node.c_str()));
  return origin;
}

// Raises what PyTorch would have raised if it was modified in place. False: it was.
bool is_unmodified(const Plain& plain) {
  if (plain.version == version_of(plain.tensor)) return true;
  PyObject* const given[] = {THPVariable_Wrap(plain.tensor), PyLong_FromLongLong(plain.version),
                             origin_of(plain)};
  PyObject* const said =
      PyObject_CallFunctionObjArgs(python.check, given[0], given[1], given[2], nullptr);
  for (PyObject* const one : given) Py_DecRef(one);
  if (said != nullptr) Py_DecRef(said);
  return said != nullptr;
}

// The very tensor if it is still there, or else one like it.
PyObject* shown(const Plain& plain) {
  if (plain.original != nullptr) {
    PyObject* const found = PyObject_CallFunctionObjArgs(plain.original, nullptr);
    if (found == nullptr || found != &_Py_NoneStruct) return found;
    Py_DecRef(found);
  }
  // Of one that may be dropped, what is handed out can be told from what is kept.
  return THPVariable_Wrap(plain.value < 0 ? plain.tensor : detached(plain.tensor));
}

// From now on it is Python's, which is `handed` all that the tape knows, or has it. The caller keeps
// the capsule. False: Python has raised.
bool become(Plain* plain, bool handed) {
  if (plain->handle != nullptr) return true;
  if (plain->is_taped() && !handed)
    return tape::hand_over("a saved tensor is to be Python's") && become(plain, true);
  if (plain->is_lost()) {
    PyErr_SetString(PyExc_RuntimeError, "a saved tensor was lost when lowtide was interrupted");
    return false;
  }
  PyObject* const tensor = THPVariable_Wrap(plain->tensor);
  PyObject* const version = PyLong_FromLongLong(plain->version);
  PyObject* const number = PyLong_FromLongLong(plain->number);
  PyObject* const origin = origin_of(*plain);
  PyObject* const original = plain->original == nullptr ? none() : plain->original;
  if (plain->original != nullptr) Py_IncRef(original);
  PyObject* const itself = PyLong_FromLongLong(plain->itself);
  PyObject* const handle = PyObject_CallFunctionObjArgs(python.adopt, tensor, version, origin,
                                                        original, number, itself, nullptr);
  for (PyObject* const one : {tensor, version, origin, original, number, itself}) Py_DecRef(one);
  if (handle == nullptr) return false;
  if (plain->handle != nullptr) {  // another thread was faster
    Py_DecRef(handle);
    return true;
  }
  plain->handle = handle;
  plain->tensor.reset();
  return true;
}

PyObject* unpack(PyObject*, PyObject* given) {
  if (PyCapsule_IsValid(given, kName) == 0)
    return PyObject_CallFunctionObjArgs(python.unpack, given, nullptr);
  auto* const plain = static_cast<Plain*>(PyCapsule_GetPointer(given, kName));
  PyObject* hand_out = python.unpack;
  if (plain->handle == nullptr) {
    if (!is_unmodified(*plain)) return nullptr;
    if (python.adopt == nullptr && !plain->is_lost()) return shown(*plain);
    if (plain->is_taped() && tape::is_on()) tape::asked(plain->value);
    const std::int64_t code = asked_code + plain->number - before;
    const bool counts = asks_count;
    if (running && (!counts || goes_on(code))) {
      if (counts && !happen(code)) return nullptr;
      const bool here =
          plain->value < 0 ||
          (plain->is_taped() && tape::is_on() && !tape::is_dropped(plain->value));
      if (plain->handle == nullptr && here) return shown(*plain);
      hand_out = python.show;  // it is Python's meanwhile or now, and the event has happened
    }
  }
  Py_IncRef(given);
  PyObject* const found =
      become(plain, false) ? PyObject_CallFunctionObjArgs(hand_out, plain->handle, nullptr) : nullptr;
  Py_DecRef(given);
  return found;
}

MethodDef pack_def{"pack", pack, kOneArgument, nullptr};
MethodDef unpack_def{"unpack", unpack, kOneArgument, nullptr};

}  // namespace

// Called with Python's lock held.
extern "C" {

// The two hooks. What is given is Python's, and lives as long as they do.
PyObject* lowtide_saves_hooks() {
  PyObject* const both = PyTuple_New(2);
  PyTuple_SetItem(both, 0, PyCFunction_NewEx(&pack_def, nullptr, nullptr));
  PyTuple_SetItem(both, 1, PyCFunction_NewEx(&unpack_def, nullptr, nullptr));
  return both;
}

// Who does what is not done here. Python keeps them until there are others; from `pack` on they may be
// none, where nobody is at work.
void lowtide_saves_work_for(const Python* others) {
  running = false;
  python = *others;
}

// A step as it is planned: the codes of its events, and of each whether it may be dealt with here (1),
// whether Python has something to do then (2), and whether it may be dealt with by the tape (4). To be asked for a save is an event of the code
// `asked` and the save's number in the step; or none, with `counts` 0.
void lowtide_saves_script(const std::int64_t* events, const std::uint8_t* what, std::int64_t count,
                          std::int64_t asked, int counts) {
  running = false;
  codes.assign(events, events + count);
  flags.assign(what, what + count);
  asked_code = asked;
  asks_count = counts != 0;
}

// The step goes on as planned, from that event on, with so many saves in it and before it; `tells`:
// Python wants to know of every event.
void lowtide_saves_go(std::int64_t event, std::int64_t in_step, std::int64_t in_all_before,
                      int tells) {
  attentive = tells != 0;
  next_event = event;
  saves = in_step;
  before = in_all_before;
  running = true;
}

// Everything goes to Python. The next event, or -1: it did already.
std::int64_t lowtide_saves_stop() {
  if (!running) return -1;
  running = false;
  return next_event;
}

// How many there were in the step when it went on as planned.
std::int64_t lowtide_saves_count() { return saves; }

// All that is kept here becomes Python's, or only what lies on values of the tape. False: Python has
// raised.
static int adopt(bool all) {
  if (python.adopt == nullptr) return 1;
  std::int64_t age = 0;
  for (auto next = kept.upper_bound(age); next != kept.end(); next = kept.upper_bound(age)) {
    age = next->first;
    if (!all && next->second->value < 0) continue;
    PyObject* const capsule = next->second->capsule;
    Py_IncRef(capsule);
    const bool done = become(next->second, !all);
    Py_DecRef(capsule);
    if (!done) return 0;
  }
  return 1;
}

int lowtide_saves_adopt() { return adopt(true); }
int lowtide_saves_adopt_taped() { return adopt(false); }

// Saved tensors that are kept here.
std::int64_t lowtide_saves_kept() {
  std::int64_t count = 0;
  for (const auto& [age, plain] : kept) count += plain->handle == nullptr;
  return count;
}
}
