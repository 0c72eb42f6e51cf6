#include "events.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>

namespace lowtide {

void *Events::record(int32_t device, cudaStream_t stream) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
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
  if (!event) {
    event = new Event{device, nullptr};
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&event->handle, cudaEventDisableTiming));
  }
  C10_CUDA_CHECK(cudaEventRecord(event->handle, stream));
  return event;
}

bool Events::passed(void *event) {
  const cudaError_t status = cudaEventQuery(static_cast<Event *>(event)->handle);
  if (status == cudaSuccess) return true;
  if (status == cudaErrorNotReady) {
    (void)cudaGetLastError();  // it is no error
    return false;
  }
  C10_CUDA_CHECK(status);
  return false;
}

void Events::drop(void *event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  spare_.push_back(static_cast<Event *>(event));
}

}  // namespace lowtide
