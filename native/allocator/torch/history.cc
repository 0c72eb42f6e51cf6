#include "history.h"

#include <algorithm>

namespace lowtide {

using c10::cuda::CUDACachingAllocator::RecordContext;

void History::record(bool enabled, c10::cuda::CUDACachingAllocator::CreateContextFn recorder,
                     size_t entries, RecordContext when, bool clear) {
  const std::lock_guard<std::mutex> lock(mutex_);
  recorder_ = recorder;
  when_ = when;
  most_ = std::max<size_t>(1, entries);
  if (clear || !enabled) entries_.clear();
  if (!clock_) clock_ = std::make_unique<c10::ApproximateClockToUnixTimeConverter>();
  on_ = enabled;
}

void History::add(Entry::Action action, c10::DeviceIndex device, void *block, int64_t bytes,
                  cudaStream_t stream) {
  const bool freed = action != Entry::ALLOC;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto recorder = recorder_;
  const bool with = recorder && when_ >= (freed ? RecordContext::ALL : RecordContext::ALLOC);
  lock.unlock();
  std::shared_ptr<c10::GatheredContext> context = with ? recorder() : nullptr;
  lock.lock();
  entries_.emplace_back(action, device, reinterpret_cast<size_t>(block),
                        static_cast<size_t>(bytes), stream, c10::MempoolId_t{0, 0},
                        c10::getApproximateTime(), std::move(context));
  if (entries_.size() > most_) entries_.pop_front();
}

void History::merge(std::vector<std::vector<Entry>> &traces) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (entries_.empty()) return;
  const auto nanoseconds = clock_->makeConverter();
  for (Entry entry : entries_) {
    entry.time_.t_ = nanoseconds(entry.time_.approx_t_) / 1000;
    const size_t device = static_cast<size_t>(entry.device_);
    if (device < traces.size()) traces[device].push_back(std::move(entry));
  }
  for (auto &trace : traces)
    std::stable_sort(trace.begin(), trace.end(),
                     [](const Entry &a, const Entry &b) { return a.time_.t_ < b.time_.t_; });
}

}  // namespace lowtide
