#include "tell.h"

#include <c10/core/Storage.h>

#include <atomic>

#include "python.h"
#include "tape.h"

namespace lowtide {
namespace {

std::atomic<PyObject*> recorder{nullptr};  // told of ops whose form is known; Python's to change

PyObject* wrapped(const std::vector<c10::Storage>& storages) {
  PyObject* const all = PyTuple_New(static_cast<std::ptrdiff_t>(storages.size()));
  for (std::size_t i = 0; i < storages.size(); ++i)
    PyTuple_SetItem(all, static_cast<std::ptrdiff_t>(i), THPStorage_Wrap(storages[i]));
  return all;
}

PyObject* numbers(const std::vector<std::int64_t>& them) {
  PyObject* const all = PyTuple_New(static_cast<std::ptrdiff_t>(them.size()));
  for (std::size_t i = 0; i < them.size(); ++i)
    PyTuple_SetItem(all, static_cast<std::ptrdiff_t>(i), PyLong_FromLongLong(them[i]));
  return all;
}

}  // namespace

void tell(const Form& form, std::int64_t number, const std::vector<c10::IValue>& given,
          const c10::IValue* results, std::size_t count, const at::Tensor& random) {
  if (tape::is_on()) {
    const Locked lock;
    if (tape::is_on()) {
      if (tape::note(form, number, given, results, count, random)) return;
      if (!tape::hand_over("an op is not as it was")) raise_soon();
    }
  }
  std::vector<c10::Storage> read, made;
  std::vector<std::int64_t> places;
  for (const c10::IValue& one : given)
    each_tensor(one, [&](const at::Tensor& tensor) {
      if (!is_wrapped_number(tensor)) read.push_back(tensor.storage());
    });
  std::int64_t place = 0;
  for (std::size_t i = 0; i < count; ++i)
    each_tensor(results[i], [&](const at::Tensor& tensor) {
      if (tensor.device() == form.device() && tensor.layout() == c10::kStrided &&
          tensor.has_storage() && !tensor._is_zerotensor() && !tensor.is_nested()) {
        made.push_back(tensor.storage());
        places.push_back(place);
      }
      ++place;
    });
  const Locked lock;
  PyObject* const told = recorder.load(std::memory_order_acquire);
  if (told == nullptr) return;
  Py_IncRef(told);
  PyObject* state = random.defined() ? THPVariable_Wrap(random) : &_Py_NoneStruct;
  if (!random.defined()) Py_IncRef(state);
  PyObject* const arguments[] = {PyLong_FromLongLong(form.id), PyLong_FromLongLong(number),
                                 wrapped(read), wrapped(made), numbers(places), state};
  PyObject* const answer =
      PyObject_CallFunctionObjArgs(told, arguments[0], arguments[1], arguments[2], arguments[3],
                                   arguments[4], arguments[5], nullptr);
  if (answer == nullptr)
    raise_soon();  // the op has run, and is not written down: then it is not made again
  else
    Py_DecRef(answer);
  for (PyObject* const one : arguments) Py_DecRef(one);
  Py_DecRef(told);
}

void raise_soon() {
  struct Raised {
    PyObject *kind, *value, *trace;
  };
  auto* const raised = new Raised;
  PyErr_Fetch(&raised->kind, &raised->value, &raised->trace);
  const auto raise = [](void* given) {
    auto* const them = static_cast<Raised*>(given);
    PyErr_Restore(them->kind, them->value, them->trace);
    delete them;
    return -1;
  };
  if (Py_AddPendingCall(raise, raised) != 0) {  // there are too many
    raise(raised);
    PyErr_WriteUnraisable(recorder.load(std::memory_order_acquire));
  }
}

}  // namespace lowtide

extern "C" {

// Whom to tell of ops that are written down and whose form is known, or nobody: something to call
// with the form's id, the op's number, the storages it read, those it may have made, where among the
// results the latter are, and the state of the generator if it draws. Python keeps it until there is
// another.
void lowtide_gate_record_by(void* told) {
  lowtide::recorder.store(static_cast<PyObject*>(told), std::memory_order_release);
}
}
