#include "chain.h"

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "kernels.h"
#include "links.h"
#include "memory.h"
#include "nodes.h"
#include "python.h"
#include "tell.h"

namespace lowtide::chain {
namespace {

constexpr std::size_t kMostSteps = 32, kMostInputs = 12;
constexpr std::uintptr_t kAligned = 16;

struct Step {
  std::shared_ptr<const Link> link;
  std::vector<int> places;  // of its tensors: a step that makes it, or from -1 downwards an input
  c10::Storage made;        // without bytes until it has run
};

struct Input {
  c10::Storage storage;
  std::shared_ptr<const Link> link;  // of the step that is the first to read it
  std::size_t which = 0;             // ... and which of its tensors it is

  const Form::Look& look() const { return link->form->looks()[which]; }
};

struct Chain {
  std::vector<Step> steps;
  std::vector<Input> inputs;
  c10::Stream stream{c10::Stream::UNSAFE, c10::Device(c10::kCPU), 0};

  // What a step is given, in order.
  std::vector<c10::Storage> given(const Step& step) const {
    std::vector<c10::Storage> found;
    for (const int place : step.places)
      found.push_back(place >= 0 ? steps[static_cast<std::size_t>(place)].made
                                 : inputs[static_cast<std::size_t>(-1 - place)].storage);
    return found;
  }
};

// One waits at a time, for the thread that has called its ops.
std::mutex guard;
std::atomic<bool> waits{false};
auto& waiting = *new Chain;
std::thread::id owner;
Dispatch by_python = nullptr;

struct Python {
  PyObject* make;   // called with what a chain is: its kernel is to be put
  PyObject* run;    // called with a kernel's number, what it reads, and tensors to fill
  PyObject* prove;  // called with a kernel's number, what it has made, and what the ops have
};
Python python{};
std::atomic<bool> on{false};
std::atomic<std::int64_t> joined{0}, kernels_run{0};

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Nothing of what PyTorch does around an op: what is done is below all of that.
struct Below {
  const c10::impl::ExcludeDispatchKeyGuard without{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}) |
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset};
  const c10::NoGradGuard no_grad;
  const c10::InferenceMode no_inference{false};
};

void move_bytes(const c10::Storage& from, const c10::Storage& to) {
  c10::StorageImpl* const source = from.unsafeGetStorageImpl();
  to.unsafeGetStorageImpl()->set_data_ptr_noswap(
      source->set_data_ptr(at::DataPtr(nullptr, source->device())));
  source->set_nbytes(0);
}

// The steps whose results somebody refers to, besides the chain.
std::vector<int> wanted_of(const Chain& chain) {
  std::vector<int> found;
  for (std::size_t j = 0; j < chain.steps.size(); ++j)
    if (chain.steps[j].made.use_count() > 1) found.push_back(static_cast<int>(j));
  return found;
}

// Steps without which what is wanted cannot be made.
std::vector<bool> needed_of(const Chain& chain, const std::vector<int>& wanted) {
  std::vector<bool> needed(chain.steps.size(), false);
  for (const int one : wanted) needed[static_cast<std::size_t>(one)] = true;
  for (std::size_t j = chain.steps.size(); j-- > 0;)
    if (needed[j])
      for (const int place : chain.steps[j].places)
        if (place >= 0) needed[static_cast<std::size_t>(place)] = true;
  return needed;
}

void run_op(const Chain& chain, const Step& step) {
  std::vector<c10::IValue> stack = step.link->form->filled(chain.given(step));
  const std::vector<c10::IValue> again = stack;
  const c10::OperatorHandle& op = step.link->form->op();
  try {
    const Below below;
    op.callBoxed(&stack);
  } catch (const c10::Error& error) {
    if (!is_out_of_memory(error) || by_python == nullptr) throw;
    stack = again;
    by_python(op, &stack);  // which makes room
  }
  move_bytes(stack.at(0).toTensor().storage(), step.made);
}

// As if nobody had waited. Nothing is held for longer than it is needed.
void run_one_by_one(Chain& chain, const std::vector<int>& wanted) {
  const std::vector<bool> needed = needed_of(chain, wanted);
  std::vector<int> last(chain.inputs.size() + chain.steps.size(), -1);
  const auto at = [&](int place) -> int& {
    return last[place >= 0 ? chain.inputs.size() + static_cast<std::size_t>(place)
                           : static_cast<std::size_t>(-1 - place)];
  };
  for (std::size_t j = 0; j < chain.steps.size(); ++j)
    if (needed[j])
      for (const int place : chain.steps[j].places) at(place) = static_cast<int>(j);
  for (std::size_t j = 0; j < chain.steps.size(); ++j) {
    if (!needed[j]) continue;
    run_op(chain, chain.steps[j]);
    for (const int place : chain.steps[j].places) {
      if (at(place) != static_cast<int>(j)) continue;
      if (place < 0)
        chain.inputs[static_cast<std::size_t>(-1 - place)].storage = {};
      else
        chain.steps[static_cast<std::size_t>(place)].made = {};
    }
  }
}

PyObject* numbers(const std::vector<std::int64_t>& them) {
  PyObject* const all = PyTuple_New(static_cast<std::ptrdiff_t>(them.size()));
  for (std::size_t i = 0; i < them.size(); ++i)
    PyTuple_SetItem(all, static_cast<std::ptrdiff_t>(i), PyLong_FromLongLong(them[i]));
  return all;
}

template <typename Things, typename Wrap>
PyObject* wrapped(const Things& them, const Wrap& wrap) {
  PyObject* const all = PyTuple_New(static_cast<std::ptrdiff_t>(them.size()));
  for (std::size_t i = 0; i < them.size(); ++i)
    PyTuple_SetItem(all, static_cast<std::ptrdiff_t>(i), wrap(them[i]));
  return all;
}

PyObject* storages(const std::vector<c10::Storage>& them) {
  return wrapped(them, [](const c10::Storage& one) { return THPStorage_Wrap(one); });
}

std::vector<c10::Storage> inputs_of(const Chain& chain) {
  std::vector<c10::Storage> found;
  for (const Input& input : chain.inputs) found.push_back(input.storage);
  return found;
}

// False: it has raised, and that is raised where it can be.
bool call_python(PyObject* what, const std::vector<PyObject*>& given) {
  PyObject* const all[] = {given.size() > 0 ? given[0] : nullptr,
                           given.size() > 1 ? given[1] : nullptr,
                           given.size() > 2 ? given[2] : nullptr};
  PyObject* const said = PyObject_CallFunctionObjArgs(what, all[0], all[1], all[2], nullptr);
  for (PyObject* const one : given) Py_DecRef(one);
  if (said == nullptr) raise_soon();
  if (said != nullptr) Py_DecRef(said);
  return said != nullptr;
}

PyObject* tensors(const std::vector<at::Tensor>& them) {
  return wrapped(them, [](const at::Tensor& one) { return THPVariable_Wrap(one); });
}

// What a kernel makes of what is wanted, as bytes; none: it cannot now, and nothing has happened.
std::vector<at::Tensor> run_kernel(const Chain& chain, const Kernel& kernel,
                                   const std::vector<int>& wanted) {
  std::vector<std::int64_t> arguments;
  for (const Input& input : chain.inputs) {
    const auto address = reinterpret_cast<std::uintptr_t>(input.storage.data()) +
        static_cast<std::uintptr_t>(input.look().offset) * c10::elementSize(input.look().dtype);
    if (input.link->is_whole[input.which] && address % kAligned != 0) return {};
    arguments.push_back(static_cast<std::int64_t>(address));
  }
  std::vector<at::Tensor> rows;
  try {
    const Below below;
    for (const int one : wanted) {
      const c10::Storage& made = chain.steps[static_cast<std::size_t>(one)].made;
      rows.push_back(at::empty({static_cast<std::int64_t>(made.nbytes())},
                               at::TensorOptions(made.device()).dtype(at::kByte)));
      arguments.push_back(
          static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(rows.back().storage().data())));
    }
  } catch (const c10::Error& error) {
    if (!is_out_of_memory(error)) throw;
    return {};
  }
  const std::int64_t count = chain.steps.front().link->count;
  if (kernel.function != nullptr) {
    arguments.push_back(0);
    arguments.push_back(count);
    const int error =
        tape::launch(kernel.function, chain.stream.device(), count, std::move(arguments));
    return error == 0 ? rows : std::vector<at::Tensor>{};
  }
  const Locked lock;
  const bool done = python.run != nullptr &&
      call_python(python.run,
                  {PyLong_FromLongLong(kernel.number), storages(inputs_of(chain)), tensors(rows)});
  return done ? rows : std::vector<at::Tensor>{};
}

// The kernel of a chain that was never seen before, if Python can make one.
std::optional<Kernel> made_kernel(const std::vector<std::int64_t>& words) {
  const Locked lock;
  if (python.make == nullptr || !call_python(python.make, {numbers(words)})) return std::nullopt;
  return kernel_of(words);
}

// What is computed: of each step the link and what it is given, the inputs by who reads them first,
// and what is wanted.
std::vector<std::int64_t> words_of(const Chain& chain, const std::vector<int>& wanted) {
  std::vector<std::int64_t> words{static_cast<std::int64_t>(chain.steps.size())};
  for (const Step& step : chain.steps) {
    words.push_back(step.link->number);
    words.push_back(static_cast<std::int64_t>(step.places.size()));
    words.insert(words.end(), step.places.begin(), step.places.end());
  }
  words.insert(words.end(), wanted.begin(), wanted.end());
  return words;
}

void run(Chain chain) {
  const std::vector<int> wanted = wanted_of(chain);
  if (wanted.empty()) return;
  std::optional<c10::StreamGuard> there;
  if (!chain.stream.device().is_cpu() && current_stream(chain.stream.device()) != chain.stream)
    there.emplace(chain.stream);
  if (chain.steps.size() == 1) {
    chain.steps.front().link->alone.fetch_add(1, std::memory_order_relaxed);
    run_one_by_one(chain, wanted);
    return;
  }
  chain.steps.front().link->alone.store(0, std::memory_order_relaxed);
  const std::vector<std::int64_t> words = words_of(chain, wanted);
  std::optional<Kernel> kernel = kernel_of(words);
  if (!kernel) kernel = made_kernel(words);
  std::vector<at::Tensor> rows;
  if (kernel && kernel->trust != Trust::kNone) rows = run_kernel(chain, *kernel, wanted);
  std::vector<c10::Storage> made;
  for (const int one : wanted) made.push_back(chain.steps[static_cast<std::size_t>(one)].made);
  if (!rows.empty() && kernel->trust == Trust::kProved) {
    for (std::size_t i = 0; i < made.size(); ++i) move_bytes(rows[i].storage(), made[i]);
    ++kernels_run;
    return;
  }
  run_one_by_one(chain, wanted);
  if (rows.empty()) return;
  const Locked lock;
  if (python.prove != nullptr)
    call_python(python.prove, {PyLong_FromLongLong(kernel->number), tensors(rows), storages(made)});
}

// The chain, if it waits for this thread, or for anybody.
std::optional<Chain> take(bool anybody) {
  const std::lock_guard<std::mutex> lock(guard);
  if (!waits || !(anybody || owner == std::this_thread::get_id())) return std::nullopt;
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

}  // namespace

Said offered(const c10::OperatorHandle& op, torch::jit::Stack* stack, std::size_t count) {
  if (!on.load(std::memory_order_acquire) || c10::GradMode::is_enabled() || !may_be_link(op) ||
      !only_ops_look())
    return Said::kNo;
  const c10::IValue* const first = stack->data() + (stack->size() - count);
  bool ask = false;
  const std::shared_ptr<const Link> link = link_of(op, first, count, &ask);
  if (ask) return Said::kAsk;
  if (link == nullptr || link->number < 0 || (!waits && link->is_mostly_alone())) return Said::kNo;
  std::vector<c10::Storage> given;
  for (std::size_t i = 0; i < count; ++i)
    each_tensor(first[i], [&](const at::Tensor& tensor) {
      if (!is_wrapped_number(tensor)) given.push_back(tensor.storage());
    });
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
  {
    const std::lock_guard<std::mutex> lock(guard);
    if (waits && owner != std::this_thread::get_id()) return Said::kNo;
    if (waits && waiting.stream == stream && join(waiting, link, given, made)) {
      torch::jit::drop(*stack, count);
      stack->emplace_back(std::move(result));
      ++joined;
      return Said::kWaits;
    }
  }
  finish();
  Chain begun;
  if (link->is_mostly_alone() || !join(begun, link, given, made)) return Said::kNo;
  begun.stream = stream;
  const std::lock_guard<std::mutex> lock(guard);
  if (waits) return Said::kNo;  // another thread's has begun
  waiting = std::move(begun);
  owner = std::this_thread::get_id();
  waits = true;
  torch::jit::drop(*stack, count);
  stack->emplace_back(std::move(result));
  return Said::kWaits;
}

void finish() {
  if (!waits.load(std::memory_order_acquire)) return;
  std::optional<Chain> chain = take(false);
  if (chain) run(*std::move(chain));
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

namespace {

// What a backward that was broken off has left, in whichever thread.
void settle() {
  std::optional<chain::Chain> left = chain::take(true);
  try {
    if (left) chain::run(*std::move(left));
  } catch (const std::exception&) {  // nobody asks for what it was to make
  }
}

}  // namespace

// Called with Python's lock held.
extern "C" {

// Ops wait from now on. Who makes kernels, runs those without a function, and compares what they make;
// Python keeps them until `lowtide_chain_end`.
void lowtide_chain_begin(void* make, void* run, void* prove) {
  settle();
  chain::python = {static_cast<PyObject*>(make), static_cast<PyObject*>(run),
                   static_cast<PyObject*>(prove)};
  chain::on = true;
}

// None waits any more, in whichever thread.
void lowtide_chain_end() {
  chain::on = false;
  settle();
  chain::python = {};
}

// What waits in this thread runs. False: it has raised.
int lowtide_chain_finish() { return chain::finish_or_raise(); }

// Whether an op that is called now, by backward in this thread, could wait.
int lowtide_chain_may_wait() { return !c10::GradMode::is_enabled() && only_ops_look(); }

// Steps that did not begin a chain, and kernels run, since this was asked.
void lowtide_chain_take_counts(std::int64_t* two) {
  two[0] = chain::joined.exchange(0);
  two[1] = chain::kernels_run.exchange(0);
}
}
