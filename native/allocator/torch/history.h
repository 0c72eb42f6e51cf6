// What happened in arenas, for torch.cuda.memory._snapshot's history.
#ifndef LOWTIDE_TORCH_HISTORY_H
#define LOWTIDE_TORCH_HISTORY_H

#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

namespace lowtide {

class History {
 public:
  using Entry = c10::CachingDeviceAllocator::TraceEntry;

  void record(bool enabled, c10::cuda::CUDACachingAllocator::CreateContextFn recorder,
              size_t entries, c10::cuda::CUDACachingAllocator::RecordContext when, bool clear);
  bool on() const { return on_.load(std::memory_order_relaxed); }
  void add(Entry::Action action, c10::DeviceIndex device, void *block, int64_t bytes,
           cudaStream_t stream);
  // Adds its entries to those of the caching allocator, in the order of time.
  void merge(std::vector<std::vector<Entry>> &traces);

 private:
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  c10::cuda::CUDACachingAllocator::CreateContextFn recorder_ = nullptr;
  c10::cuda::CUDACachingAllocator::RecordContext when_{};
  size_t most_ = 0;
  std::deque<Entry> entries_;
  std::unique_ptr<c10::ApproximateClockToUnixTimeConverter> clock_;
};

}  // namespace lowtide
#endif
