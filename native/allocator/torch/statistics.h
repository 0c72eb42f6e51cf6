// The caching allocator's statistics, corrected by what lies in arenas.
//
// To the caching allocator an arena is one block, always in use.  In truth it is as full as its
// blocks make it.  Current figures are corrected when asked for.  Peaks are peaks of sums: after each
// block put into an arena, the sum with an upper bound of what is allocated behind is compared with
// the peak, and only where it may be exceeded the caching allocator is asked.
#ifndef LOWTIDE_TORCH_STATISTICS_H
#define LOWTIDE_TORCH_STATISTICS_H

#include <c10/cuda/CUDACachingAllocator.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "../pool.h"

namespace lowtide {

class Statistics {
 public:
  using DeviceStats = c10::CachingDeviceAllocator::DeviceStats;

  explicit Statistics(c10::cuda::CUDACachingAllocator::CUDAAllocator *behind) : behind_(behind) {}

  // Before the first arena of a device is made.
  void start(c10::DeviceIndex device);
  bool on() const { return on_.load(std::memory_order_relaxed); }  // for any device
  // A block was put into an arena / one of `bytes` was allocated behind.
  void saw_arena(c10::DeviceIndex device, const lowtide_pool_stats &pool);
  void saw_behind(c10::DeviceIndex device, const lowtide_pool_stats &pool, int64_t bytes);
  // Asks what is in use behind, and raises the peaks to the sums.
  void ask(c10::DeviceIndex device, const lowtide_pool_stats &pool);

  DeviceStats corrected(c10::DeviceIndex device, const lowtide_pool_stats &pool);
  void reset_accumulated(c10::DeviceIndex device, const lowtide_pool_stats &pool);
  void reset_peaks(c10::DeviceIndex device, const lowtide_pool_stats &pool);
  // The last arena is gone: the caching allocator counts alone again, from peaks of its own.
  void finish(c10::DeviceIndex device, const lowtide_pool_stats &pool);
  // Whether its peaks are the true ones on every device.
  bool unneeded();

 private:
  // allocated bytes, active bytes, requested bytes, allocations, active blocks
  static constexpr size_t kFigures = 5;
  static constexpr size_t kTypes = 2;  // aggregate, large pool: arenas are large blocks
  using Figures = std::array<std::array<int64_t, kFigures>, kTypes>;
  struct Device {
    bool started = false;
    Figures behind{};  // upper bounds of what is in use behind, arenas taken off
    Figures peak{};
    std::array<int64_t, kTypes> reserved_peak{};  // with pages
    int64_t page_bytes = 0;                       // when it was last asked
    lowtide_pool_stats base{};  // when accumulated figures were last reset
    std::unique_ptr<DeviceStats> past;  // peaks from before `finish`
  };

  Device &at(c10::DeviceIndex device);
  bool may_exceed(const Device &entry, const lowtide_pool_stats &pool) const;
  static Figures behind_of(const DeviceStats &stats, const lowtide_pool_stats &pool);
  static std::array<int64_t, kFigures> in_arenas(const lowtide_pool_stats &pool);

  c10::cuda::CUDACachingAllocator::CUDAAllocator *const behind_;
  std::atomic<bool> on_{false};
  std::mutex mutex_;  // never held while the caching allocator is asked
  std::vector<Device> devices_;
};

}  // namespace lowtide
#endif
