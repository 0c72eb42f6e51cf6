// Times PyTorch's current CUDA allocator on a recorded step.
#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <utility>
#include <vector>

extern "C" {

// Makes and frees `count` blocks in the order of their ticks, `rounds` times, calling `mark` after each.
// What has no end is freed after the round.  Returns the median of nanoseconds a block.
double lowtide_cost(int64_t count, const int64_t *sizes, const int64_t *made, const int64_t *freed,
                    int32_t rounds, void (*mark)()) {
  std::vector<std::pair<int64_t, int64_t>> events;  // tick, block (made) or -block - 1 (freed)
  for (int64_t i = 0; i < count; ++i) {
    events.push_back({made[i], i});
    if (freed[i] > made[i]) events.push_back({freed[i], -i - 1});
  }
  std::sort(events.begin(), events.end());
  std::vector<c10::DataPtr> blocks(static_cast<size_t>(count));
  std::vector<double> times;
  for (int32_t round = 0; round < rounds; ++round) {
    const auto began = std::chrono::steady_clock::now();
    for (const auto &[tick, block] : events)
      if (block >= 0)
        blocks[static_cast<size_t>(block)] = c10::cuda::CUDACachingAllocator::get()->allocate(
            static_cast<size_t>(sizes[block]));
      else
        blocks[static_cast<size_t>(-block - 1)].clear();
    const auto ended = std::chrono::steady_clock::now();
    for (c10::DataPtr &block : blocks) block.clear();
    mark();
    times.push_back(std::chrono::duration<double, std::nano>(ended - began).count() / count);
  }
  std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
  return times[static_cast<size_t>(rounds / 2)];
}
}
