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

// Of Python's and PyTorch's own headers only this is needed, and Python's are not always there.
struct _object;
using PyObject = _object;
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);
extern "C" {
struct MethodDef {  // PyMethodDef
  const char* name;
  PyObject* (*call)(PyObject*, PyObject*);
  int flags;
  const char* doc;
};
extern PyObject _Py_NoneStruct;
PyObject* PyCFunction_NewEx(MethodDef*, PyObject*, PyObject*);
PyObject* PyObject_GetAttrString(PyObject*, const char*);
PyObject* PyObject_CallFunctionObjArgs(PyObject*, ...);
PyObject* PyObject_Type(PyObject*);
PyObject* PyTuple_New(std::ptrdiff_t);
int PyTuple_SetItem(PyObject*, std::ptrdiff_t, PyObject*);
PyObject* PyLong_FromLongLong(long long);
void* PyLong_AsVoidPtr(PyObject*);
PyObject* PyUnicode_FromString(const char*);
std::ptrdiff_t PyDict_Size(PyObject*);
PyObject* PyWeakref_NewRef(PyObject*, PyObject*);
PyObject* PyCapsule_New(void*, const char*, void (*)(PyObject*));
int PyCapsule_IsValid(PyObject*, const char*);
void* PyCapsule_GetPointer(PyObject*, const char*);
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
void PyErr_Clear();
}

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
constexpr std::uint8_t kPlain = 1, kEventful = 2;     // of an event: see `lowtide_saves_script`

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
};

// Never destroyed: saved tensors may outlive everything.
Python python{};
auto& kept = *new std::map<std::int64_t, Plain*>;  // by their age
std::int64_t last_age = 0;

auto& codes = *new std::vector<std::int64_t>;
auto& flags = *new std::vector<std::uint8_t>;
std::int64_t asked_code = 0;  // plus the number of a save: the code of the event that it is asked for
bool running = false;         // a step goes on as planned
bool asks_count = true;       // to be asked for a saved tensor is an event
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
  PyObject *const handle = plain->handle, *const original = plain->original;
  delete plain;
  if (original != nullptr) Py_DecRef(original);
  if (handle != nullptr) Py_DecRef(handle);
}

// Whether the event at hand may be dealt with here.
bool goes_on(std::int64_t code) {
  const auto place = static_cast<std::size_t>(next_event);
  return running && place < codes.size() && codes[place] == code && (flags[place] & kPlain) != 0;
}

// True: Python has done what there was to do, or there was nothing. False: it has raised.
bool happen(std::int64_t code) {
  if ((flags[static_cast<std::size_t>(next_event)] & kEventful) == 0) {
    ++next_event;
    return true;
  }
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
  return THPVariable_Wrap(plain.tensor);
}

// From now on it is Python's. The caller keeps the capsule. False: Python has raised.
bool become(Plain* plain) {
  if (plain->handle != nullptr) return true;
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
    if (python.adopt == nullptr) return shown(*plain);
    const std::int64_t code = asked_code + plain->number - before;
    const bool counts = asks_count;
    if (running && (!counts || goes_on(code))) {
      if (counts && !happen(code)) return nullptr;
      if (plain->handle == nullptr) return shown(*plain);
      hand_out = python.show;  // it was taken meanwhile, and the event has happened
    }
  }
  Py_IncRef(given);
  PyObject* const found =
      become(plain) ? PyObject_CallFunctionObjArgs(hand_out, plain->handle, nullptr) : nullptr;
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

// A step as it is planned: the codes of its events, and of each whether it may be dealt with here (1)
// and whether something is to be done then (2). To be asked for a save is an event of the code
// `asked` and the save's number in the step; or none, with `counts` 0.
void lowtide_saves_script(const std::int64_t* events, const std::uint8_t* what, std::int64_t count,
                          std::int64_t asked, int counts) {
  running = false;
  codes.assign(events, events + count);
  flags.assign(what, what + count);
  asked_code = asked;
  asks_count = counts != 0;
}

// The step goes on as planned, from that event on, with so many saves in it and before it.
void lowtide_saves_go(std::int64_t event, std::int64_t in_step, std::int64_t in_all_before) {
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

// All that is kept here becomes Python's. False: Python has raised.
int lowtide_saves_adopt() {
  if (python.adopt == nullptr) return 1;
  std::int64_t age = 0;
  for (auto next = kept.upper_bound(age); next != kept.end(); next = kept.upper_bound(age)) {
    age = next->first;
    PyObject* const capsule = next->second->capsule;
    Py_IncRef(capsule);
    const bool done = become(next->second);
    Py_DecRef(capsule);
    if (!done) return 0;
  }
  return 1;
}

// Saved tensors that are kept here.
std::int64_t lowtide_saves_kept() {
  std::int64_t count = 0;
  for (const auto& [age, plain] : kept) count += plain->handle == nullptr;
  return count;
}
}
