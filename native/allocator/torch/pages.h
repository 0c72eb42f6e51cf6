// Memory of a GPU in pages, by the CUDA driver; and how it and the caching allocator share the limit.
//
// Pages are none of the caching allocator's, so its own limit is always what they leave of the one that
// was set: what both have together never exceeds that.
#ifndef LOWTIDE_TORCH_PAGES_H
#define LOWTIDE_TORCH_PAGES_H

#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

namespace lowtide {

class Pages {
 public:
  static constexpr int64_t kPage = 2 << 20;
  static constexpr int64_t kSpare = 22 << 20;  // the caching allocator takes 20 MiB at once

  explicit Pages(c10::cuda::CUDACachingAllocator::CUDAAllocator *behind) : behind_(behind) {}

  bool there();  // whether the driver can do it, for all that is known before a device is named

  void *reserve(int64_t bytes, int32_t device);
  void give_up(void *base, int32_t device);
  int64_t fill(void *base, int64_t first, int64_t count, int32_t device);
  void drain(void *base, int64_t first, int64_t count, int32_t device);
  bool show(void *base, int64_t at, const int64_t *pages, int64_t count, int32_t device);
  void hide(void *base, int64_t at, int64_t count, int32_t device);
  void settle(int32_t device);
  // Whether the caching allocator has given something back.  No lock of the pool may be held: it may
  // have to wait for Python.
  bool flush(int32_t device);

  // Another device reads the pages of `device` from now on.  False: it cannot.
  bool let_read(int32_t device, int32_t reader);
  bool any(int32_t device);

  // The limit for both, as a fraction of the device's memory.
  void set_fraction(double fraction, int32_t device);
  double fraction(int32_t device);

 private:
  struct Range {
    int64_t bytes = 0;
    int32_t device = 0;
    std::vector<CUmemGenericAllocationHandle> pages;  // 0: without memory
    std::unordered_map<int64_t, int64_t> windows;     // offset -> pages
  };
  struct Device {
    double fraction = 1;    // for both, while there are pages
    int64_t bytes = 0;      // in pages
    int64_t stuck = 0;      // what the caching allocator could not give back when it was last asked
    double total = 0;       // bytes of the device
    std::set<int32_t> readers;  // other devices
  };

  bool allow(void *at, int64_t bytes, int32_t device);
  bool show_all(int32_t device);  // ... to all that may read them
  Device &at(int32_t device);
  int64_t room(const Device &entry, int32_t device);
  void share(Device &entry, int32_t device);  // tells the caching allocator what is left

  c10::cuda::CUDACachingAllocator::CUDAAllocator *const behind_;
  std::mutex mutex_;
  std::map<int32_t, Device> devices_;
  std::map<void *, Range> ranges_;
};

}  // namespace lowtide
#endif
