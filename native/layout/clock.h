// What ends a search: the clock, or someone who has already won.
#pragma once

#include <atomic>
#include <chrono>

namespace lowtide {

class Clock {
 public:
  explicit Clock(double seconds)
      : limited_(seconds >= 0),
        end_(std::chrono::steady_clock::now() +
             std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                 std::chrono::duration<double>(seconds < 0 ? 0 : (seconds > 1e8 ? 1e8 : seconds)))) {}

  bool out() const {
    if (limited_ && !out_.load(std::memory_order_relaxed) && std::chrono::steady_clock::now() >= end_)
      out_.store(true, std::memory_order_relaxed);
    return out_.load(std::memory_order_relaxed);
  }

 private:
  bool limited_;
  std::chrono::steady_clock::time_point end_;
  mutable std::atomic<bool> out_{false};
};

}  // namespace lowtide
