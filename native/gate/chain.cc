#include "chain.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/GradMode.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "links.h"
#include "nodes.h"
#include "python.h"
#include "steps.h"

namespace lowtide::chain {
namespace {

constexpr std::size_t kMostSteps = 32, kMostInputs = 12;

// One waits at a time, for the thread that has called its ops. Never destroyed: as the saves.
std::mutex guard;
std::atomic<bool> waits{false};
auto& waiting = *new Chain;
std::thread::id owner;
std::atomic<bool> on{false};
// Hooks of the program's are asked for saved tensors, and may do anything: no op waits until it was
// begun so often without any, since the backward of a step may come in one after it.
std::atomic<int> wary{0};
constexpr int kWary = 8;
std::atomic<std::size_t> hooks_before{0};
std::atomic<std::thread::id> first_thread{};

std::size_t hooks() { return at::SavedTensorDefaultHooks::get_tls_state().stack.size(); }

std::atomic<std::int64_t> joined{0};

// What waits: this thread's, to be run; another's only if that was broken off, to be forgotten. What a
// backward is still at, somebody refers to.
std::optional<Chain> take() {
  const std::lock_guard<std::mutex> lock(guard);
  if (!waits) return std::nullopt;
  if (owner != std::this_thread::get_id() && !wanted_of(waiting).empty()) return std::nullopt;
  waits = false;
  return std::exchange(waiting, Chain{});
}

// Where a tensor of the next step comes from; none: it does not go with the chain as it is.
std::optional<int> place_of(Chain& chain, const std::shared_ptr<const Link>& link,
                            std::size_t which, const c10::Storage& storage) {
  const Form::Look& look = link->form->looks()[which];
  for (std::size_t j = 0; j < chain.steps.size(); ++j) {
    const Step& step = chain.steps[j];
    if (step.made.unsafeGetStorageImpl() != storage.unsafeGetStorageImpl()) continue;
    if (link->is_whole[which] && look.offset == 0 && look.dtype == step.link->dtype)
      return static_cast<int>(j);
    return std::nullopt;
  }
  for (std::size_t k = 0; k < chain.inputs.size(); ++k) {
    const Input& input = chain.inputs[k];
    if (input.storage.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl() &&
        input.look() == look)
      return -1 - static_cast<int>(k);
  }
  if (chain.inputs.size() == kMostInputs) return std::nullopt;
  chain.inputs.push_back({storage, link, which});
  return -static_cast<int>(chain.inputs.size());
}

// Whether it is one more step now: one that is as large as the others, and has nothing to do with them,
// may lead to what has. Else all is as before.
bool join(Chain& chain, const std::shared_ptr<const Link>& link,
          const std::vector<c10::Storage>& given, const c10::Storage& made) {
  const std::size_t before = chain.inputs.size();
  if (!chain.steps.empty() &&
      (chain.steps.size() == kMostSteps || chain.steps.front().link->count != link->count))
    return false;
  std::vector<int> places;
  for (std::size_t i = 0; i < given.size(); ++i) {
    const std::optional<int> place = place_of(chain, link, i, given[i]);
    if (!place) break;
    places.push_back(*place);
  }
  if (places.size() != given.size()) {
    chain.inputs.resize(before, Input{});
    return false;
  }
  chain.steps.push_back({link, std::move(places), made});
  return true;
}

// Whether an op that backward calls now in this thread could wait, of a result of those sizes.
bool may_wait(c10::IntArrayRef sizes, bool is_sum) {
  return wary.load(std::memory_order_relaxed) == 0 &&
      (only_ops_look() || (is_sum && only_ops_look_at_sum(sizes)));
}

bool is_plain_memory(const c10::IValue& given) {
  if (!given.isTensor() || !given.toTensor().defined()) return false;
  const at::Tensor& tensor = given.toTensor();
  return tensor.layout() == c10::kStrided && !tensor.is_nested() && tensor.has_storage() &&
      !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

std::vector<c10::Storage> given_to(const torch::jit::Stack& stack, std::size_t count) {
  std::vector<c10::Storage> given;
  for (std::size_t i = stack.size() - count; i < stack.size(); ++i)
    each_tensor(stack[i], [&](const at::Tensor& tensor) {
      if (!is_wrapped_number(tensor)) given.push_back(tensor.storage());
    });
  return given;
}

// The first of a chain. False: another thread's waits.
bool begin(const std::shared_ptr<const Link>& link, const std::vector<c10::Storage>& given,
           const c10::Storage& made, const c10::Stream& stream) {
  Chain begun;
  if (!join(begun, link, given, made)) return false;
  begun.stream = stream;
  const std::lock_guard<std::mutex> lock(guard);
  if (waits) return false;
  waiting = std::move(begun);
  owner = std::this_thread::get_id();
  waits = true;
  return true;
}

}  // namespace

Said offered(const c10::OperatorHandle& op, torch::jit::Stack* stack, std::size_t count) {
  if (!on.load(std::memory_order_acquire) || c10::GradMode::is_enabled()) return Said::kNo;
  const Candidate candidate = candidate_of(op);
  const c10::IValue* const first = stack->data() + (stack->size() - count);
  if (!candidate.is_one || !is_plain_memory(*first) ||
      !may_wait(first->toTensor().sizes(), candidate.is_sum))
    return Said::kNo;
  bool ask = false;
  const std::shared_ptr<const Link> link = link_of(op, first, count, &ask);
  if (ask) return Said::kAsk;
  if (link == nullptr || link->number < 0 || (!waits && link->is_mostly_alone())) return Said::kNo;
  const std::vector<c10::Storage> given = given_to(*stack, count);
  const c10::Storage& whole = given[link->whole];
  const Form::Look& look = link->form->looks()[link->whole];
  if (whole.allocator() == nullptr) return Said::kNo;
  const auto bytes = static_cast<std::size_t>(link->count) * c10::elementSize(link->dtype);
  const c10::Storage made(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), c10::SymInt(static_cast<std::int64_t>(bytes)),
      at::DataPtr(nullptr, look.device), whole.allocator(), /*resizable=*/true));
  at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(made),
      c10::DispatchKeySet(c10::computeDispatchKey(link->dtype, c10::kStrided, look.device)),
      c10::scalarTypeToTypeMeta(link->dtype));
  result.unsafeGetTensorImpl()->set_sizes_and_strides(look.sizes, look.strides);
  const c10::Stream stream = current_stream(look.device);
  bool waits_now = false;
  {
    const std::lock_guard<std::mutex> lock(guard);
    if (waits && owner != std::this_thread::get_id()) return Said::kNo;
    waits_now = waits && waiting.stream == stream && join(waiting, link, given, made);
    joined += waits_now;
  }
  if (!waits_now) {
    finish();
    if (link->is_mostly_alone() || !begin(link, given, made, stream)) return Said::kNo;
  }
  torch::jit::drop(*stack, count);
  stack->emplace_back(std::move(result));
  return Said::kWaits;
}

void finish() {
  if (!waits.load(std::memory_order_acquire)) return;
  std::optional<Chain> chain = take();
  if (chain) run(*std::move(chain));
}

void look_at_hooks() {
  if (!on.load(std::memory_order_relaxed)) return;
  const bool is_first = first_thread.load(std::memory_order_relaxed) == std::this_thread::get_id();
  if (hooks() > (is_first ? hooks_before.load(std::memory_order_relaxed) : 0))
    wary.store(kWary, std::memory_order_relaxed);
}

void finish_or_forget() {
  try {
    finish();
  } catch (const std::exception&) {  // a backward was broken off: nobody asks for what it was to make
  }
}

bool finish_or_raise() {
  try {
    finish();
    return true;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return false;
  }
}

void fall_back_on(Dispatch dispatch) { by_python = dispatch; }

}  // namespace lowtide::chain

using namespace lowtide;

// Called with Python's lock held.
extern "C" {

// Ops wait from now on. Who makes kernels, runs those without a function, and compares what they make;
// Python keeps them until `lowtide_chain_end`.
void lowtide_chain_begin(void* make, void* run, void* prove) {
  chain::finish_or_forget();
  chain::hooks_before = chain::hooks();
  chain::first_thread = std::this_thread::get_id();
  if (chain::wary > 0) --chain::wary;
  chain::python = {static_cast<PyObject*>(make), static_cast<PyObject*>(run),
                   static_cast<PyObject*>(prove)};
  chain::on = true;
}

// What was seen of hooks was of others.
void lowtide_chain_trust() { chain::wary = 0; }

// None begins to wait any more. What another thread's backward is at, it finishes itself.
void lowtide_chain_end() {
  chain::on = false;
  chain::finish_or_forget();
  chain::python = {};
}

// What waits in this thread runs. False: it has raised.
int lowtide_chain_finish() { return chain::finish_or_raise(); }

// Whether an op that backward calls now in this thread could wait, if its result has those sizes.
int lowtide_chain_may_wait(const std::int64_t* sizes, std::int64_t count, int is_sum) {
  return !c10::GradMode::is_enabled() &&
      chain::may_wait(c10::IntArrayRef(sizes, static_cast<std::size_t>(count)), is_sum != 0);
}

// Steps that did not begin a chain, and kernels run, since this was asked.
void lowtide_chain_take_counts(std::int64_t* two) {
  two[0] = chain::joined.exchange(0);
  two[1] = chain::kernels_run.exchange(0);
}
}
