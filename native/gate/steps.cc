#include "steps.h"

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "kernels.h"
#include "memory.h"
#include "tell.h"

namespace lowtide::chain {
namespace {

constexpr std::uintptr_t kAligned = 16;

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
  Py_IncRef(what);  // it may be forgotten meanwhile
  PyObject* const said = PyObject_CallFunctionObjArgs(what, all[0], all[1], all[2], nullptr);
  Py_DecRef(what);
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
    const bool aligned = address % kAligned == 0 || !input.link->is_whole[input.which];
    if (input.storage.data() == nullptr || !aligned) return {};
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

}  // namespace

std::vector<int> wanted_of(const Chain& chain) {
  std::vector<int> found;
  for (std::size_t j = 0; j < chain.steps.size(); ++j)
    if (chain.steps[j].made.use_count() > 1) found.push_back(static_cast<int>(j));
  return found;
}

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
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

}  // namespace lowtide::chain
