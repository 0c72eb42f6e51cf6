#include "tape.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <optional>
#include <string>

#include "chain.h"
#include "from_state.h"
#include "kernels.h"
#include "program.h"
#include "python.h"
#include "values.h"

namespace lowtide::tape {
namespace {

struct Noted {
  bool done = false;
  bool ready = false;  // it is about to change what it reads, and that is as it was
  at::Tensor random;
  std::vector<bool> holds;
};

struct Python {
  PyObject* hand_over;  // called with nothing
  PyObject* bring;      // called with a save's number: its bytes are here then
  PyObject* fused;      // called with a kernel's number, storages, and tensors to fill
};

// Never destroyed: as the saves.
std::atomic<bool> on{false};
bool owed = false;  // Python is to have all of it, and does not have it yet
Python python{};
auto& noted = *new std::vector<Noted>;
auto& late = *new std::vector<const Instruction*>;  // drops that could not be in their time
auto& reason = *new std::string;
std::int64_t steps = 0;  // begun so far

void run(const Instruction& one) {
  const Op& op = program.ops[static_cast<std::size_t>(one.number)];
  const Noted& seen = noted[static_cast<std::size_t>(one.number)];
  if (!seen.done) throw Unlike("an op has not run");
  std::vector<c10::Storage> storages;
  for (const int value : op.reads)
    storages.push_back(value < 0 ? op.form->nothing(storages.size()) : c10::Storage(there(value)));
  std::vector<c10::Storage> written;
  for (const Made& made : one.writes) {
    const auto place = static_cast<std::size_t>(made.place);
    Value& before = values[op.reads[place]];
    if (!before.temporary) throw Unlike("what is to be changed is somebody else's");
    before.temporary.reset();  // it is that no longer
    written.push_back(storages[place]);
  }
  std::vector<c10::IValue> stack = op.form->filled(storages);
  storages.clear();
  {
    std::optional<FromState> from;
    if (seen.random.defined()) from.emplace(op.form->device(), seen.random);
    op.form->op().callBoxed(&stack);
  }
  free_all(one.frees);
  std::int64_t place = 0;
  auto made = one.makes.begin();
  for (const c10::IValue& result : stack)
    each_tensor(result, [&](const at::Tensor& tensor) {
      if (made != one.makes.end() && made->place == place) keep(*made++, tensor.storage());
      ++place;
    });
  if (made != one.makes.end()) throw Unlike("a result is missing");
  for (std::size_t i = 0; i < written.size(); ++i) keep(one.writes[i], std::move(written[i]));
}

PyObject* none() {
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}

PyObject* tuple_of(const std::vector<PyObject*>& items) {
  PyObject* const all = PyTuple_New(static_cast<std::ptrdiff_t>(items.size()));
  for (std::size_t i = 0; i < items.size(); ++i)
    PyTuple_SetItem(all, static_cast<std::ptrdiff_t>(i), items[i]);
  return all;
}

// Python has raised: what it said goes on to whoever called.
struct Raised {};

void call_python(PyObject* what, const std::vector<PyObject*>& given) {
  PyObject* const all[] = {given.size() > 0 ? given[0] : nullptr,
                           given.size() > 1 ? given[1] : nullptr,
                           given.size() > 2 ? given[2] : nullptr};
  PyObject* const said = PyObject_CallFunctionObjArgs(what, all[0], all[1], all[2], nullptr);
  for (PyObject* const one : given) Py_DecRef(one);
  if (said == nullptr) throw Raised();
  Py_DecRef(said);
}

void run_fused(const Instruction& one) {
  std::vector<Held> inputs;
  for (const Input& input : one.inputs) inputs.push_back(there(input.value));
  std::vector<at::Tensor> outputs;
  for (const Made& made : one.makes) {
    outputs.push_back(at::empty({one.count * made.place},  // of so many bytes each
                                at::TensorOptions(program.device).dtype(at::kByte)));
  }
  if (is_here(one)) {
    launch(one, inputs, outputs);
  } else {
    std::vector<PyObject*> read, rows;
    for (const Held& input : inputs) read.push_back(THPStorage_Wrap(c10::Storage(input)));
    for (const at::Tensor& output : outputs) rows.push_back(THPVariable_Wrap(output));
    call_python(python.fused, {PyLong_FromLongLong(one.number), tuple_of(read), tuple_of(rows)});
    if (!on) throw Unlike("Python has all of it");
  }
  inputs.clear();
  free_all(one.frees);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    c10::Storage storage = outputs[i].storage();
    outputs[i].reset();
    keep(one.makes[i], std::move(storage));
  }
}

void let_go(const Instruction& one) {
  Noted& seen = noted[static_cast<std::size_t>(one.number)];
  if (!seen.done || !seen.holds[static_cast<std::size_t>(one.place)]) return;
  seen.holds[static_cast<std::size_t>(one.place)] = false;
  const Op& op = program.ops[static_cast<std::size_t>(one.number)];
  release(op.reads[static_cast<std::size_t>(op.holds[static_cast<std::size_t>(one.place)])]);
}

void carry_out(const Instruction& one) {
  switch (one.what) {
    case Do::kDrop:
      switch (drop(one)) {
        case Dropped::kLater:
          late.push_back(&one);
          break;
        case Dropped::kRefused:
          ++counts.refused;
          break;
        default:
          break;
      }
      break;
    case Do::kBring:
      call_python(python.bring, {PyLong_FromLongLong(one.number)});
      if (!on) throw Unlike("Python has all of it");
      break;
    case Do::kLetGo:
      let_go(one);
      break;
    case Do::kRun:
    case Do::kFused:
      one.what == Do::kRun ? run(one) : run_fused(one);
      counts.calls += one.calls;
  }
}

bool reads_as_rehearsed(const Op& op, const std::vector<c10::IValue>& given) {
  std::size_t at = 0;
  bool same = true;
  for (const c10::IValue& one : given)
    each_tensor(one, [&](const at::Tensor& tensor) {
      if (is_wrapped_number(tensor)) return;
      const int value = op.reads[at++];
      if (value < 0) return;
      const c10::Storage& storage = tensor.storage();
      const bool is_there = values[value].impl != nullptr || !program.is_made[value];
      same = same && is_there && binds(value, storage.unsafeGetStorageImpl(), storage);
    });
  return same;
}

bool makes_as_rehearsed(const Op& op, const c10::IValue* results, std::size_t count) {
  bool same = true;
  std::int64_t place = 0;
  auto made = op.makes.begin();
  for (std::size_t i = 0; i < count; ++i)
    each_tensor(results[i], [&](const at::Tensor& tensor) {
      if (made != op.makes.end() && made->place == place) {
        const c10::Storage& storage = tensor.storage();
        same = same && values[made->value].impl == nullptr &&
            lying.find(storage.unsafeGetStorageImpl()) == lying.end() &&  // it is new
            static_cast<std::int64_t>(storage.nbytes()) == program.bytes[made->value] &&
            binds(made->value, storage.unsafeGetStorageImpl(), storage);
        ++made;
      }
      ++place;
    });
  return same && made == op.makes.end();
}

// Where it has changed something, that is another value now.
bool writes_as_rehearsed(const Op& op, const std::vector<c10::IValue>& given) {
  std::size_t found = 0;
  std::int64_t at = 0;
  for (const c10::IValue& one : given)
    each_tensor(one, [&](const at::Tensor& tensor) {
      if (is_wrapped_number(tensor)) return;
      for (const Made& made : op.writes) {
        const c10::Storage& storage = tensor.storage();
        found += made.place == at && values[made.value].impl == nullptr &&
            static_cast<std::int64_t>(storage.nbytes()) == program.bytes[made.value] &&
            binds(made.value, storage.unsafeGetStorageImpl(), storage);
      }
      ++at;
    });
  return found == op.writes.size();
}

// The op of that number and form, unless it has run.
Op* op_of(const Form& form, std::int64_t number, Noted** seen) {
  const auto found = program.op_at.find(number);
  if (found == program.op_at.end()) return nullptr;
  const auto place = static_cast<std::size_t>(found->second);
  *seen = &noted[place];
  Op& op = program.ops[place];
  return (*seen)->done || op.form->id != form.id ? nullptr : &op;
}

void clear() {
  late.clear();
  noted.clear();
  begin_values(0);
}

}  // namespace

bool is_on() { return on.load(std::memory_order_acquire); }
bool is_known() { return on || owed; }
std::int64_t step() { return steps; }

bool note(const Form& form, std::int64_t number, const std::vector<c10::IValue>& given,
          const c10::IValue* results, std::size_t count, const at::Tensor& random) {
  Noted* seen = nullptr;
  const Op* const op = op_of(form, number, &seen);
  if (op == nullptr || !(seen->ready || reads_as_rehearsed(*op, given)) ||
      !makes_as_rehearsed(*op, results, count) || !writes_as_rehearsed(*op, given))
    return false;
  seen->done = true;
  seen->random = random;
  for (const int read : op->holds)
    seen->holds.push_back(acquire(op->reads[static_cast<std::size_t>(read)]));
  return true;
}

bool may_write(const Form& form, std::int64_t number, const std::vector<c10::IValue>& given) {
  Noted* seen = nullptr;
  const Op* const op = op_of(form, number, &seen);
  if (op == nullptr || op->writes.empty() || !op->holds.empty() || !reads_as_rehearsed(*op, given))
    return false;
  seen->ready = true;
  return true;
}

bool about_to_write(const c10::StorageImpl* storage) {
  const auto found = lying.find(storage);
  if (found == lying.end()) return true;
  for (const int which : found->second) {
    const Value& value = values[which];
    if ((value.holders > 0 || value.borrowers > 0) && !value.spoilt)
      return hand_over("what a dropped value is made from is written to");
  }
  for (const int which : found->second) values[which].spoilt = true;
  return true;
}

int value_of_save(std::int64_t number) {
  const auto found = program.value_at.find(number);
  return found == program.value_at.end() ? -1 : found->second;
}

bool saved(int value, const c10::StorageImpl* storage) {
  if (value < 0 || values[value].impl != storage || values[value].spoilt || values[value].dropped)
    return false;
  ++values[value].saves;
  return true;
}

void asked(int value) {
  late.erase(std::remove_if(late.begin(), late.end(),
                            [&](const Instruction* one) { return one->value == value; }),
             late.end());
}

bool is_dropped(int value) { return values[value].dropped; }

bool happen(std::int64_t event) {
  if (!on) return true;
  const auto found = program.events.find(event);
  if (found == program.events.end() && late.empty()) return true;
  if (found != program.events.end() && !chain::finish_or_raise()) return false;
  const c10::impl::ExcludeDispatchKeyGuard without(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}) |
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset);
  const c10::NoGradGuard no_grad;
  const c10::InferenceMode no_inference(false);
  std::vector<int> outer = begin_temporaries();
  const auto end = [&] {
    if (on) end_temporaries(std::move(outer));
  };
  try {
    std::vector<const Instruction*> again;
    again.swap(late);
    for (const Instruction* const one : again) carry_out(*one);
    if (found != program.events.end())
      for (const Instruction& one : found->second) carry_out(one);
    end();
    return true;
  } catch (const Raised&) {
    end();
    return false;
  } catch (const std::exception& error) {  // out of memory, too: Python knows what to do
    end();
    return hand_over(error.what());
  }
}

bool hand_over(const char* why) {
  if (on.exchange(false)) {
    owed = true;
    reason = why;
  }
  if (!owed) return true;  // else another thread is at it, or it was broken off
  PyObject* const said = PyObject_CallFunctionObjArgs(python.hand_over, nullptr);
  if (said == nullptr) return false;
  Py_DecRef(said);
  return true;
}

}  // namespace lowtide::tape

using namespace lowtide::tape;

// Called with Python's lock held.
extern "C" {

// A tape, in words, and who does what is not done here; Python keeps them until there are others. A
// kernel's function is null where Python runs it. False: it cannot be followed.
int lowtide_tape_put(const std::int64_t* words, std::int64_t count, void* const* functions,
                     std::int64_t how_many, void* hand_over, void* bring, void* fused) {
  try {
    program = read_program(words, count);
  } catch (const std::exception&) {
    return 0;
  }
  kernels.functions.assign(functions, functions + how_many);
  python = {static_cast<PyObject*>(hand_over), static_cast<PyObject*>(bring),
            static_cast<PyObject*>(fused)};
  return 1;
}

// A step begins that goes by it.
void lowtide_tape_begin() {
  clear();
  owed = false;
  ++steps;
  begin_values(program.bytes.size());
  noted.resize(program.ops.size());
  on = true;
}

// Nothing is left of a step: what it held is let go of.
void lowtide_tape_clear() {
  on = owed = false;
  clear();
}

// Whether a step goes by it, or has not been handed over yet.
int lowtide_tape_is_known() { return is_known(); }
// Whether it was to be handed over, and was not, or not as a whole.
int lowtide_tape_is_owed() { return owed; }
// Whether nothing is dropped or held for something that is.
int lowtide_tape_is_idle() {
  return std::all_of(values.begin(), values.end(), is_idle);
}
int lowtide_tape_happen(std::int64_t event) { return happen(event); }
int lowtide_tape_hand_over() { return hand_over("Python has asked for it"); }
const char* lowtide_tape_reason() { return reason.c_str(); }  // that it was handed over the last time
int lowtide_tape_about_to_write(void* storage) {
  return !on || about_to_write(static_cast<const c10::StorageImpl*>(storage));
}

// What it comes to, for Python to go on with.
PyObject* lowtide_tape_storage(std::int64_t value) {
  const Held found = locked(values[static_cast<std::size_t>(value)]);
  return found ? THPStorage_Wrap(c10::Storage(found)) : none();
}
std::int64_t lowtide_tape_state(std::int64_t which) {  // dropped, spoilt, held, and so many saves
  const Value& value = values[static_cast<std::size_t>(which)];
  return value.dropped | value.spoilt << 1 | (value.holders > 0) << 2 |
      static_cast<std::int64_t>(value.saves) << 3;
}
std::int64_t lowtide_tape_source(std::int64_t value, std::int64_t place) {  // of a dropped one; or -1
  if (values[static_cast<std::size_t>(value)].dropped_by == nullptr) return -1;
  const Instruction& by = *values[static_cast<std::size_t>(value)].dropped_by;
  const auto at = static_cast<std::size_t>(place), own = by.sources.size();
  if (at < own) return by.sources[at];
  return at - own < by.others.size() ? by.others[at - own] : -1;
}
int lowtide_tape_noted(std::int64_t op) { return noted[static_cast<std::size_t>(op)].done; }
PyObject* lowtide_tape_random(std::int64_t op) {
  const at::Tensor& state = noted[static_cast<std::size_t>(op)].random;
  return state.defined() ? THPVariable_Wrap(state) : none();
}
int lowtide_tape_holds(std::int64_t op, std::int64_t place) {
  const Noted& seen = noted[static_cast<std::size_t>(op)];
  return seen.done && seen.holds[static_cast<std::size_t>(place)];
}
std::int64_t lowtide_tape_late(std::int64_t place) {  // the save of a drop that is late; -1: no more
  const auto at = static_cast<std::size_t>(place);
  return at < late.size() ? late[at]->number : -1;
}
// Values dropped, their bytes, those that could not be, and ops run again, since this was asked.
void lowtide_tape_take_counts(std::int64_t* four) {
  const std::int64_t all[] = {counts.dropped, counts.bytes, counts.refused, counts.calls};
  std::copy(std::begin(all), std::end(all), four);
  counts = {};
}
}
