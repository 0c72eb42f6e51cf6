#include "events.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>

namespace lowtide {

void *Events::record(int32_t device, cudaStream_t stream) noexcept {
  Event *event = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::find_if(spare_.rbegin(), spare_.rend(),
                                    [&](const Event *e) { return e->device == device; });
    if (found != spare_.rend()) {
      event = *found;
      spare_.erase(std::next(found).base());
    }
  }
  if (!event) event = new Event{device, nullptr, false};
  event->recorded = false;
  try {
    const c10::cuda::OptionalCUDAGuard guard(static_cast<c10::DeviceIndex>(device));
    if (!event->handle)
      C10_CUDA_CHECK(cudaEventCreateWithFlags(&event->handle, cudaEventDisableTiming));
    C10_CUDA_CHECK(cudaEventRecord(event->handle, stream));
    event->recorded = true;
  } catch (...) {
    (void)cudaGetLastError();
  }
  return event;
}

bool Events::passed(void *event) noexcept {
  const Event &asked = *static_cast<Event *>(event);
  if (!asked.recorded) return false;
  if (cudaEventQuery(asked.handle) == cudaSuccess) return true;
  (void)cudaGetLastError();  // not ready is no error; another one will show elsewhere
  return false;
}

void Events::wait(void *event) noexcept {
  const Event &asked = *static_cast<Event *>(event);
  if (asked.recorded && cudaEventSynchronize(asked.handle) != cudaSuccess) (void)cudaGetLastError();
}

void Events::drop(void *event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  spare_.push_back(static_cast<Event *>(event));
}

}  // namespace lowtide
