// Snapshots that show what lies in arenas.
#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>

#include "allocator.h"

namespace lowtide {

native::SnapshotInfo Allocator::snapshot(c10::MempoolId_t pool, bool traces) {
  native::SnapshotInfo info = behind_->snapshot(pool, traces);
  if (traces) history_.merge(info.device_traces);
  for (c10::DeviceIndex device = 0; device < c10::cuda::device_count(); ++device) {
    std::vector<int64_t> map(static_cast<size_t>(pool_->pool.map(device, nullptr, 0)));
    const int64_t length = pool_->pool.map(device, map.data(), static_cast<int64_t>(map.size()));
    map.resize(static_cast<size_t>(std::min<int64_t>(length, static_cast<int64_t>(map.size()))));
    for (size_t i = 0; i + 2 < map.size(); i += 3 + 4 * static_cast<size_t>(map[i + 2])) {
      const size_t base = static_cast<size_t>(map[i]), bytes = static_cast<size_t>(map[i + 1]);
      const size_t blocks = static_cast<size_t>(map[i + 2]);
      if (i + 3 + 4 * blocks > map.size()) break;
      if (traces && static_cast<size_t>(device) < info.device_traces.size()) {
        auto &trace = info.device_traces[static_cast<size_t>(device)];  // blocks, not the arena
        trace.erase(std::remove_if(trace.begin(), trace.end(),
                                   [&](const auto &entry) {
                                     return entry.action_ == History::Entry::ALLOC &&
                                            entry.addr_ == base && entry.size_ == bytes;
                                   }),
                    trace.end());
      }
      for (auto &segment : info.segments) {
        if (base < segment.address || base >= segment.address + segment.total_size) continue;
        // The arena's block becomes what lies in it.
        size_t at = segment.address;
        std::vector<native::BlockInfo> split;
        for (const auto &block : segment.blocks) {
          if (at == base) {
            size_t end = base;
            segment.allocated_size -= block.size;
            segment.active_size -= block.size;
            segment.requested_size -= block.requested_size;
            const auto gap = [&](size_t to) {
              if (to <= end) return;
              native::BlockInfo empty;
              empty.size = to - end;
              split.push_back(empty);
            };
            for (size_t j = 0; j < blocks; ++j) {
              const int64_t *const row = &map[i + 3 + 4 * j];
              gap(static_cast<size_t>(row[0]));
              native::BlockInfo live;
              live.size = static_cast<size_t>(row[1]);
              live.requested_size = static_cast<size_t>(row[2]);
              live.active = true;
              live.allocated = !row[3];
              end = static_cast<size_t>(row[0]) + live.size;
              segment.active_size += live.size;
              if (live.allocated) {
                segment.allocated_size += live.size;
                segment.requested_size += live.requested_size;
              }
              split.push_back(live);
            }
            gap(base + std::max(bytes, block.size));
          } else {
            split.push_back(block);
          }
          at += block.size;
        }
        segment.blocks = std::move(split);
        break;
      }
    }
  }
  return info;
}

}  // namespace lowtide
