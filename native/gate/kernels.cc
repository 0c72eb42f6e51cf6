#include "kernels.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace lowtide::tape {
namespace {

constexpr std::uintptr_t kAligned = 16;

}  // namespace

bool is_here(const Instruction& one) {
  return kernels.functions[static_cast<std::size_t>(one.number)] != nullptr;
}

void launch(const Instruction& one, const std::vector<Held>& inputs,
            const std::vector<at::Tensor>& outputs) {
  std::vector<std::int64_t> arguments;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const auto address =
        reinterpret_cast<std::uintptr_t>(inputs[i]->data()) + static_cast<std::uintptr_t>(one.inputs[i].offset);
    if (one.inputs[i].aligned && address % kAligned != 0) throw Unlike("a value lies elsewhere");
    arguments.push_back(static_cast<std::int64_t>(address));
  }
  for (const at::Tensor& tensor : outputs)
    arguments.push_back(static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(tensor.storage().data())));
  arguments.push_back(0);
  arguments.push_back(one.count);
  std::vector<void*> places;
  for (std::int64_t& argument : arguments) places.push_back(&argument);
  const std::int64_t block = kernels.threads * kernels.each;
  const c10::DeviceGuard here(program.device);
  const c10::impl::VirtualGuardImpl streams(program.device.type());
  void* const stream = streams.getStream(program.device).native_handle();
  const int error = kernels.launch(
      kernels.functions[static_cast<std::size_t>(one.number)],
      static_cast<unsigned>((one.count + block - 1) / block), 1, 1,
      static_cast<unsigned>(kernels.threads), 1, 1, 0, stream, places.data(), nullptr);
  if (error != 0) throw Unlike("a kernel could not be launched");
}

}  // namespace lowtide::tape
