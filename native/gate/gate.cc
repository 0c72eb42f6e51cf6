// Ops that a planned step need not show to Python, run without it.
//
// A dispatch mode written in Python costs some ten microseconds an op. While steps go by a plan,
// most ops are of no interest: they make something new, read what they are given, and nobody is
// going to repeat them. PyTorch hands every op that a mode is to see to `PyInterpreterVTable::
// dispatch`, so that is where the gate stands: what is of interest goes on to Python, the rest
// runs at once, below the mode, just as Python would have run it.
//
// An op of interest is one that is written down (by its number in the step), that writes or draws
// random numbers, that nobody has classified yet, or that has run out of memory. Where another mode
// is active as well, or a tensor has a class with dispatching of its own, everything goes to Python.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/PyInterpreter.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using namespace c10;  // as in PyTorch's header, from which the forwards are made
using namespace c10::impl;

enum Kind : int { kUnknown = 0, kView = 1, kPlain = 2 };

// Never destroyed: ops may still run when the process ends.
std::shared_mutex guard;  // of the two below
auto& kinds = *new std::unordered_map<c10::OperatorHandle, Kind>;
auto& written_down = *new std::vector<std::uint64_t>;  // a bit for each op of a step

std::atomic<PyObject*> mode{nullptr};  // the one that would see ops; none: the gate is shut
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

bool is_out_of_memory(const c10::Error& error) {
  return dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
      std::string(error.what_without_backtrace()).find("can't allocate memory") !=
      std::string::npos;
}

class Gate final : public PyInterpreterVTable {
 public:
  explicit Gate(const PyInterpreterVTable* real) : real_(real) {}

  void dispatch(const c10::OperatorHandle& op, torch::jit::Stack* stack) const override {
    if (!passes(op, stack)) real_->dispatch(op, stack);
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
    const Kind kind = interest(op);
    if (kind == kUnknown) return false;
    const std::size_t count = op.schema().arguments().size();
    for (auto given = stack->end() - static_cast<std::ptrdiff_t>(count); given != stack->end();
         ++given) {
      if (has_class_of_its_own(*given)) return false;
    }
    return run(op, stack, count, kind);
  }

  // For the mode that is active here, and there is no other.
  static bool is_open() {
    using Modes = c10::impl::TorchDispatchModeTLS;
    PyObject* const ours = mode.load(std::memory_order_acquire);
    if (ours == nullptr || Modes::stack_len() != 1) return false;
    const auto& top = Modes::get_stack_at(0);
    return top->ptr(&top->pyinterpreter()) == ours;
  }

  // Whether Python has to see it (kUnknown), or else what it is.
  static Kind interest(const c10::OperatorHandle& op) {
    std::shared_lock lock(guard);
    const auto found = kinds.find(op);
    if (found == kinds.end()) return kUnknown;
    if (found->second == kPlain) {
      const auto number =
          static_cast<std::uint64_t>(next_number.load(std::memory_order_relaxed));
      const std::size_t word = number / 64;
      if (word < written_down.size() && (written_down[word] >> (number % 64) & 1)) return kUnknown;
    }
    return found->second;
  }

  static bool run(const c10::OperatorHandle& op, torch::jit::Stack* stack, std::size_t count,
                  Kind kind) {
    const auto first = stack->end() - static_cast<std::ptrdiff_t>(count);
    const std::vector<c10::IValue> given(first, stack->end());
    const std::size_t below = stack->size() - count;
    try {
      const c10::impl::ExcludeDispatchKeyGuard without(c10::DispatchKeySet(
          {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
      op.callBoxed(stack);
    } catch (const c10::Error& error) {
      if (!is_out_of_memory(error)) {
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

  // Ops that fail have a number, too: the program may go on after them.
  static void count_one(Kind kind) {
    if (kind == kPlain) next_number.fetch_add(1, std::memory_order_relaxed);
    passed.fetch_add(1, std::memory_order_relaxed);
  }

  const PyInterpreterVTable* const real_;
};

PyInterpreter* interpreter = nullptr;  // whose table was replaced
const PyInterpreterVTable* real = nullptr;
const PyInterpreterVTable* gate = nullptr;

}  // namespace

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

// The ops of a step that are written down, a bit for each.
void lowtide_gate_write_down(const std::uint64_t* words, std::int64_t count) {
  std::unique_lock lock(guard);
  written_down.assign(words, words + count);
}

// What an op is: of no interest. False: there is no such op.
int lowtide_gate_know(const char* name, const char* overload, int is_view) {
  const auto found = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!found) return 0;
  std::unique_lock lock(guard);
  kinds[*found] = is_view ? kView : kPlain;
  return 1;
}

// The number of the next op that makes or writes something.
void lowtide_gate_count_from(std::int64_t number) { next_number.store(number); }
std::int64_t lowtide_gate_number() { return next_number.load(); }
std::int64_t lowtide_gate_take_number() { return next_number.fetch_add(1); }

// How many ops Python has not seen, so far.
std::int64_t lowtide_gate_passed() { return passed.load(); }
}
