// CUDA events for the pool: made once, used again.
#ifndef LOWTIDE_TORCH_EVENTS_H
#define LOWTIDE_TORCH_EVENTS_H

#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>
#include <vector>

namespace lowtide {

class Events {
 public:
  // Behind all that the stream has been given so far.
  void *record(int32_t device, cudaStream_t stream);
  bool passed(void *event);
  void drop(void *event);

 private:
  struct Event {
    int32_t device;
    cudaEvent_t handle;
  };

  std::mutex mutex_;
  std::vector<Event *> spare_;
};

}  // namespace lowtide
#endif
