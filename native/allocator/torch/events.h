// CUDA events for the pool: made once, used again.
#ifndef LOWTIDE_TORCH_EVENTS_H
#define LOWTIDE_TORCH_EVENTS_H

#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>
#include <vector>

namespace lowtide {

// Blocks are freed in destructors, so nothing here throws: where CUDA fails (it is broken, or shutting
// down) the event never passes, and the bytes that wait for it are not handed out again.
class Events {
 public:
  // Behind all that the stream has been given so far.
  void *record(int32_t device, cudaStream_t stream) noexcept;
  bool passed(void *event) noexcept;
  void wait(void *event) noexcept;
  void drop(void *event);

 private:
  struct Event {
    int32_t device;
    cudaEvent_t handle;
    bool recorded;
  };

  std::mutex mutex_;
  std::vector<Event *> spare_;
};

}  // namespace lowtide
#endif
