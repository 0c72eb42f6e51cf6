// Ops that a planned step need not show to Python, run without it.
//
// A dispatch mode written in Python costs some ten microseconds an op. While steps go by a plan,
// most ops are of no interest: they make something new, read what they are given, and nobody is
// going to repeat them. PyTorch hands every op that a mode is to see to `PyInterpreterVTable::
// dispatch`, so that is where the gate stands: what is of interest goes on to Python, the rest
// runs at once, below the mode, just as Python would have run it.
//
// An op of interest is one that is written down (by its number in the step), that writes to a storage
// of which Python knows something (unless it has said that writes do not matter now), that draws random
// numbers from a generator of its own, that nobody has classified yet, or that has run out of memory.
// Where another mode is active as well, or a tensor has a class with dispatching of its own,
// everything goes to Python.
//
// Of what is written down, too, most is the same in every step but for whose bytes it reads. Once
// Python has seen such an op and kept its form, it is only told, after the op has run, which
// storages were read and made; any other form, and the op goes to Python as a whole again.

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>
#include <c10/core/GradMode.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/PyInterpreter.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "chain.h"
#include "form.h"
#include "known.h"
#include "links.h"
#include "memory.h"
#include "python.h"
#include "tape.h"
#include "tell.h"

namespace lowtide {
namespace {

using namespace c10;  // as in PyTorch's header, from which the forwards are made
using namespace c10::impl;

std::atomic<PyObject*> mode{nullptr};  // the one that would see ops; none: the gate is shut
std::atomic<bool> writes_pass{false};
// Dictionaries by storage: who writes to one of them is of interest. None: whoever writes. Python's to
// change, and read under its lock.
std::atomic<PyObject*> watched[2]{};
std::atomic<std::int64_t> next_number{0};
std::atomic<std::int64_t> passed{0};

bool has_class_of_its_own(const c10::IValue& given) {
  const auto is = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.key_set().has(c10::DispatchKey::Python);
  };
  if (given.isTensor()) return is(given.toTensor());
  if (given.isTensorList()) {
    for (const at::Tensor& tensor : given.toTensorList()) {
      if (is(tensor)) return true;
    }
  } else if (given.isList()) {
    for (const c10::IValue& item : given.toListRef()) {
      if (item.isTensor() && is(item.toTensor())) return true;
    }
  }
  return false;
}

class Gate final : public PyInterpreterVTable {
 public:
  explicit Gate(const PyInterpreterVTable* real) : real_(real) {}

  void dispatch(const c10::OperatorHandle& op, torch::jit::Stack* stack) const override {
    if (passes(op, stack)) return;
    chain::finish();
    real_->dispatch(op, stack);
  }

  // None: PyTorch makes a shallow copy itself.
  c10::intrusive_ptr<c10::TensorImpl> detach(const c10::TensorImpl* self) const override {
    if (is_open() && !self->key_set().has(c10::DispatchKey::Python)) return {};
    return real_->detach(self);
  }

  LOWTIDE_FORWARDS  // every other function of the interface: to `real_`

 private:
  bool passes(const c10::OperatorHandle& op, torch::jit::Stack* stack) const {
    if (!is_open()) return false;
    offer_nothing();
    chain::ask_nothing();
    if (c10::GradMode::is_enabled()) chain::look_at_hooks();
    const Known known = interest(op);
    const Kind kind = known.kind;
    if (kind == kUnknown) return false;
    const std::size_t count = op.schema().arguments().size();
    for (auto given = stack->end() - static_cast<std::ptrdiff_t>(count); given != stack->end();
         ++given) {
      if (has_class_of_its_own(*given)) return false;
    }
    if (kind == kView) return run(op, stack, count, kind);  // bytes that are not there yet, too
    const auto said = kind == kPlain ? chain::offered(op, stack, count) : chain::Said::kNo;
    if (said == chain::Said::kWaits) count_one(kind);
    if (said != chain::Said::kNo) return said == chain::Said::kWaits;
    chain::finish();
    if (kind == kWrittenWriter) return record_write(op, stack, count, known.writes);
    if (known.writes != 0 && !writes_elsewhere(*stack, count, known.writes)) return false;
    switch (kind) {
      case kRandom:
        return draw(*stack, count, [&](const at::Tensor&) { return run(op, stack, count, kind); });
      case kWritten:
        return record(op, stack, count, {});
      case kWrittenRandom:
        return draw(*stack, count,
                    [&](const at::Tensor& state) { return record(op, stack, count, state); });
      default:
        return run(op, stack, count, kind);
    }
  }

  // Whether Python knows nothing of what is written to.
  static bool writes_elsewhere(const torch::jit::Stack& stack, std::size_t count,
                               std::uint64_t writes) {
    c10::SmallVector<void*, 8> storages;
    for (std::size_t i = 0; i < count; ++i) {
      if (!(writes >> i & 1)) continue;
      each_tensor(stack[stack.size() - count + i], [&](const at::Tensor& tensor) {
        if (tensor.has_storage()) storages.push_back(tensor.storage().unsafeGetStorageImpl());
      });
    }
    const Locked lock;
    bool elsewhere = true;
    for (void* const storage : storages) {
      if (tape::is_on() && !tape::about_to_write(static_cast<c10::StorageImpl*>(storage)))
        raise_soon();
      PyObject* const key = PyLong_FromVoidPtr(storage);
      for (const auto& table : watched) {
        PyObject* const known = table.load(std::memory_order_acquire);
        const int found = known == nullptr ? 1 : PyDict_Contains(known, key);
        if (found < 0) PyErr_Clear();
        elsewhere = elsewhere && found == 0;
      }
      Py_DecRef(key);
    }
    return elsewhere;
  }

  // The device whose random numbers an op draws; none where that is not plain to see.
  static std::optional<c10::Device> draws_on(const torch::jit::Stack& stack, std::size_t count) {
    std::optional<c10::Device> device, asked;
    const c10::IValue* const first = stack.data() + (stack.size() - count);
    for (const c10::IValue* given = first; given != first + count; ++given) {
      if (given->isGenerator()) return std::nullopt;
      if (given->isDevice()) asked = given->toDevice();
      each_tensor(*given, [&](const at::Tensor& tensor) {
        if (!device || device->is_cpu()) device = tensor.device();
      });
    }
    if (asked) device = asked;
    if (device && !device->is_cpu() && !device->is_cuda()) return std::nullopt;
    return device;
  }

  // An op that draws random numbers: should it have to run again, it draws the same. `work` is given
  // the state of the generator.
  template <typename Work>
  static bool draw(const torch::jit::Stack& stack, std::size_t count, const Work& work) {
    const std::optional<c10::Device> device = draws_on(stack, count);
    if (!device) return false;
    at::Generator generator = at::globalContext().defaultGenerator(*device);
    at::Tensor state;
    {
      const c10::impl::ExcludeDispatchKeyGuard without(python_keys());
      const std::lock_guard<std::mutex> lock(generator.mutex());
      state = generator.get_state();
    }
    if (work(state)) return true;
    const c10::impl::ExcludeDispatchKeyGuard without(python_keys());
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state);
    return false;
  }

  static c10::DispatchKeySet python_keys() {
    return c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});
  }

  // An op that is written down; with the state of the generator, if it draws.
  static bool record(const c10::OperatorHandle& op, torch::jit::Stack* stack, std::size_t count,
                     const at::Tensor& random) {
    const std::int64_t number = next_number.load(std::memory_order_relaxed);
    const c10::IValue* const first = stack->data() + (stack->size() - count);
    const std::shared_ptr<const Form> form = form_or_offer(op, number, first, count);
    if (form == nullptr) return false;
    const std::vector<c10::IValue> given(first, first + count);
    if (!run(op, stack, count, random.defined() ? kRandom : kPlain)) return false;
    tell(op, *form, number, given, *stack, random);
    return true;
  }

  // One that changes what it is given. Before it runs, all is to be had that is made from that: so
  // Python sees it, unless a tape knows that there is nothing.
  static bool record_write(const c10::OperatorHandle& op, torch::jit::Stack* stack,
                           std::size_t count, std::uint64_t writes) {
    const std::int64_t number = next_number.load(std::memory_order_relaxed);
    const c10::IValue* const first = stack->data() + (stack->size() - count);
    const std::shared_ptr<const Form> form = form_or_offer(op, number, first, count);
    if (form == nullptr) return false;
    offer_known(number, *form);
    const std::vector<c10::IValue> given(first, first + count);
    {
      const Locked lock;
      if (!tape::is_on() || !tape::may_write(*form, number, given)) return false;
    }
    if (!writes_elsewhere(*stack, count, writes) || !tape::is_on()) return false;
    if (!run(op, stack, count, kWriter)) return false;
    tell(op, *form, number, given, *stack, {});
    return true;
  }

  // For the mode that is active here, and there is no other.
  static bool is_open() {
    using Modes = c10::impl::TorchDispatchModeTLS;
    PyObject* const ours = mode.load(std::memory_order_acquire);
    if (ours == nullptr || Modes::stack_len() != 1) return false;
    const auto& top = Modes::get_stack_at(0);
    return top->ptr(&top->pyinterpreter()) == ours;
  }

  static void tell(const c10::OperatorHandle& op, const Form& form, std::int64_t number,
                   const std::vector<c10::IValue>& given, const torch::jit::Stack& stack,
                   const at::Tensor& random) {
    const std::size_t count = op.schema().returns().size();
    lowtide::tell(form, number, given, stack.data() + (stack.size() - count), count, random);
  }

  // What it is, if anybody knows, and what it writes to, if that is of interest.
  static Known interest(const c10::OperatorHandle& op) {
    Known known = what_is(op, next_number.load(std::memory_order_relaxed));
    if (known.kind == kWriter && writes_pass.load(std::memory_order_relaxed)) known.writes = 0;
    if (known.writes != 0 && watched[0].load(std::memory_order_relaxed) == nullptr) return {};
    if (known.kind == kView || !known.is_written_down || !c10::GradMode::is_enabled()) return known;
    switch (known.kind) {
      case kPlain:
      case kStatistics:  // which nobody makes anything from that is known
        return {kWritten, known.writes};
      case kRandom:
        return {kWrittenRandom};
      case kWriter:
        return {kWrittenWriter, known.writes};
      default:
        return {};
    }
  }

  static bool run(const c10::OperatorHandle& op, torch::jit::Stack* stack, std::size_t count,
                  Kind kind) {
    const auto first = stack->end() - static_cast<std::ptrdiff_t>(count);
    const c10::SmallVector<c10::IValue, 12> given(first, stack->end());
    const std::size_t below = stack->size() - count;
    try {
      const c10::impl::ExcludeDispatchKeyGuard without(python_keys());
      op.callBoxed(stack);
    } catch (const c10::Error& error) {
      if (kind == kWriter || !is_out_of_memory(error)) {  // half of it may be written
        count_one(kind);
        throw;
      }
      stack->resize(below);
      stack->insert(stack->end(), given.begin(), given.end());
      return false;  // Python makes room
    } catch (...) {
      count_one(kind);
      throw;
    }
    count_one(kind);
    return true;
  }

  // Ops that fail have a number, too: the program may go on after them. Without gradients, as in
  // backward and in optimizers, nothing is written down, and nothing has a number.
  static void count_one(Kind kind) {
    if (kind != kView && c10::GradMode::is_enabled())
      next_number.fetch_add(1, std::memory_order_relaxed);
    passed.fetch_add(1, std::memory_order_relaxed);
  }

  const PyInterpreterVTable* const real_;
};

PyInterpreter* interpreter = nullptr;  // whose table was replaced
const PyInterpreterVTable* real = nullptr;
const PyInterpreterVTable* gate = nullptr;

}  // namespace
}  // namespace lowtide

using namespace lowtide;

extern "C" {

// Until `lowtide_gate_close` ops go to Python only if they are of interest to `seeing`, a mode that
// is on the stack now. False: it is not.
int lowtide_gate_open(void* seeing) {
  using Modes = c10::impl::TorchDispatchModeTLS;
  if (Modes::stack_len() < 1) return 0;
  if (gate == nullptr) {
    interpreter = &Modes::get_stack_at(Modes::stack_len() - 1)->pyinterpreter();
    real = interpreter->vtable_;
    gate = new Gate(real);  // for good: a thread may still be in it
    chain::fall_back_on([](const c10::OperatorHandle& op, torch::jit::Stack* stack) {
      real->dispatch(op, stack);
    });
  }
  interpreter->vtable_ = gate;
  mode.store(static_cast<PyObject*>(seeing), std::memory_order_release);
  return 1;
}

// All ops go to Python again.
void lowtide_gate_close() { mode.store(nullptr, std::memory_order_release); }

// PyTorch is as it was before the first `lowtide_gate_open`.
void lowtide_gate_leave() {
  if (gate != nullptr) interpreter->vtable_ = real;
}
int lowtide_gate_is_there() { return gate != nullptr && interpreter->vtable_ == gate; }

// Whether ops that write are of no interest either, from now on.
void lowtide_gate_let_write(int pass) { writes_pass.store(pass != 0); }

// Who writes to a storage by which something is known in one of these is of interest, others are not;
// with none, all are. Python keeps them until there are others.
void lowtide_gate_watch(void* some, void* others) {
  watched[1].store(static_cast<PyObject*>(others), std::memory_order_release);
  watched[0].store(static_cast<PyObject*>(some), std::memory_order_release);
}

// The number of the next op that makes or writes something where there are gradients.
void lowtide_gate_count_from(std::int64_t number) { next_number.store(number); }
std::int64_t lowtide_gate_number() { return next_number.load(); }
std::int64_t lowtide_gate_take_number() { return next_number.fetch_add(1); }

// How many ops Python has not seen, so far.
std::int64_t lowtide_gate_passed() { return passed.load(); }
}
