#include "kernels.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace lowtide::tape {
namespace {

constexpr std::uintptr_t kAligned = 16;

}  // namespace

int launch(void* function, c10::Device device, std::int64_t count,
           std::vector<std::int64_t> arguments) {
  std::vector<void*> places;
  for (std::int64_t& argument : arguments) places.push_back(&argument);
  const std::int64_t block = kernels.threads * kernels.each;
  const c10::DeviceGuard here(device);
  const c10::impl::VirtualGuardImpl streams(device.type());
  void* const stream = streams.getStream(device).native_handle();
  return kernels.launch(function, static_cast<unsigned>((count + block - 1) / block), 1, 1,
                        static_cast<unsigned>(kernels.threads), 1, 1, 0, stream, places.data(),
                        nullptr);
}

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
  const int error = launch(kernels.functions[static_cast<std::size_t>(one.number)], program.device,
                           one.count, std::move(arguments));
  if (error != 0) throw Unlike("a kernel could not be launched");
}

}  // namespace lowtide::tape

// How kernels are launched: by the driver's function, with so many threads in a block, each of which
// makes so many elements.
extern "C" void lowtide_kernels_launch_by(void* launch, std::int64_t threads, std::int64_t each) {
  lowtide::tape::kernels.launch = reinterpret_cast<lowtide::tape::Launch>(launch);
  lowtide::tape::kernels.threads = threads;
  lowtide::tape::kernels.each = each;
}
