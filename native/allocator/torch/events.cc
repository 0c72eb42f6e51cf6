#include "events.h"

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
  int before = 0;
  bool well = cudaGetDevice(&before) == cudaSuccess && cudaSetDevice(device) == cudaSuccess;
  if (!event) {
    event = new Event{device, nullptr, false};
    well = well && cudaEventCreateWithFlags(&event->handle, cudaEventDisableTiming) == cudaSuccess;
  }
  event->recorded = well && event->handle && cudaEventRecord(event->handle, stream) == cudaSuccess;
  (void)cudaSetDevice(before);
  if (!event->recorded) (void)cudaGetLastError();
  return event;
}

bool Events::passed(void *event) noexcept {
  const Event &asked = *static_cast<Event *>(event);
  if (!asked.recorded) return false;
  if (cudaEventQuery(asked.handle) == cudaSuccess) return true;
  (void)cudaGetLastError();  // not ready is no error; another one will show elsewhere
  return false;
}

void Events::drop(void *event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  spare_.push_back(static_cast<Event *>(event));
}

}  // namespace lowtide
