#include "statistics.h"

#include <algorithm>

namespace lowtide {
namespace {

using Stats = c10::CachingDeviceAllocator::DeviceStats;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;

constexpr std::array<size_t, 2> kTypeIndex{static_cast<size_t>(StatType::AGGREGATE),
                                           static_cast<size_t>(StatType::LARGE_POOL)};
constexpr std::array<StatArray Stats::*, 5> kColumns{
    &Stats::allocated_bytes, &Stats::active_bytes, &Stats::requested_bytes, &Stats::allocation,
    &Stats::active};
constexpr int64_t kSlack = 2 << 20;  // a block of the caching allocator may be that much larger
constexpr std::array<StatArray Stats::*, 9> kPeaks{
    &Stats::allocated_bytes, &Stats::active_bytes,   &Stats::requested_bytes,
    &Stats::allocation,      &Stats::active,         &Stats::reserved_bytes,
    &Stats::segment,         &Stats::inactive_split, &Stats::inactive_split_bytes};

}  // namespace

Statistics::Device &Statistics::at(c10::DeviceIndex device) {
  const size_t i = static_cast<size_t>(device);
  if (i >= devices_.size()) devices_.resize(i + 1);
  return devices_[i];
}

std::array<int64_t, Statistics::kFigures> Statistics::in_arenas(const lowtide_pool_stats &pool) {
  return {pool.live_bytes, pool.live_bytes + pool.pending_bytes, pool.requested_bytes, pool.live,
          pool.live + pool.pending};
}

Statistics::Figures Statistics::behind_of(const DeviceStats &stats,
                                          const lowtide_pool_stats &pool) {
  const std::array<int64_t, kFigures> arenas{pool.arena_bytes, pool.arena_bytes, pool.arena_bytes,
                                             pool.arenas, pool.arenas};
  Figures figures{};
  for (size_t type = 0; type < kTypes; ++type)
    for (size_t i = 0; i < kFigures; ++i)
      figures[type][i] = (stats.*kColumns[i])[kTypeIndex[type]].current - arenas[i];
  return figures;
}

void Statistics::start(c10::DeviceIndex device) {
  const DeviceStats stats = behind_->getDeviceStats(device);
  const std::lock_guard<std::mutex> lock(mutex_);
  Device &entry = at(device);
  if (entry.started) return;
  entry.started = true;
  on_ = true;
  entry.behind = behind_of(stats, {});
  for (size_t type = 0; type < kTypes; ++type)
    for (size_t i = 0; i < kFigures; ++i) {
      const auto peak = [&](const DeviceStats &of) {
        return (of.*kColumns[i])[kTypeIndex[type]].peak;
      };
      entry.peak[type][i] = std::max(peak(stats), entry.past ? peak(*entry.past) : 0);
    }
  for (size_t type = 0; type < kTypes; ++type) {
    const auto peak = [&](const DeviceStats &of) { return of.reserved_bytes[kTypeIndex[type]].peak; };
    entry.reserved_peak[type] = std::max(peak(stats), entry.past ? peak(*entry.past) : 0);
  }
}

bool Statistics::may_exceed(const Device &entry, const lowtide_pool_stats &pool) const {
  const auto arenas = in_arenas(pool);
  bool higher = pool.page_bytes != entry.page_bytes;
  for (size_t type = 0; type < kTypes; ++type)
    for (size_t i = 0; i < kFigures; ++i)
      higher |= entry.behind[type][i] + arenas[i] > entry.peak[type][i];
  return higher;
}

void Statistics::saw_arena(c10::DeviceIndex device, const lowtide_pool_stats &pool) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!may_exceed(at(device), pool)) return;
  }
  ask(device, pool);
}

void Statistics::saw_behind(c10::DeviceIndex device, const lowtide_pool_stats &pool,
                            int64_t bytes) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Device &entry = at(device);
    if (!entry.started) return;
    const int64_t most = bytes + kSlack;
    for (auto &figures : entry.behind) {
      for (size_t i = 0; i < 3; ++i) figures[i] += most;
      for (size_t i = 3; i < kFigures; ++i) figures[i] += 1;
    }
    if (!pool.page_bytes && !may_exceed(entry, pool)) return;
  }
  ask(device, pool);
}

void Statistics::ask(c10::DeviceIndex device, const lowtide_pool_stats &pool) {
  const DeviceStats stats = behind_->getDeviceStats(device);
  const Figures behind = behind_of(stats, pool);
  const auto arenas = in_arenas(pool);
  const std::lock_guard<std::mutex> lock(mutex_);
  Device &entry = at(device);
  entry.behind = behind;
  entry.page_bytes = pool.page_bytes;
  for (size_t type = 0; type < kTypes; ++type) {
    for (size_t i = 0; i < kFigures; ++i)
      entry.peak[type][i] = std::max(entry.peak[type][i], behind[type][i] + arenas[i]);
    entry.reserved_peak[type] =
        std::max(entry.reserved_peak[type],
                 stats.reserved_bytes[kTypeIndex[type]].current + pool.page_bytes);
  }
}

Statistics::DeviceStats Statistics::corrected(c10::DeviceIndex device,
                                              const lowtide_pool_stats &pool) {
  DeviceStats stats = behind_->getDeviceStats(device);
  const std::lock_guard<std::mutex> lock(mutex_);
  const Device &entry = at(device);
  if (entry.past)
    for (const auto column : kPeaks)
      for (size_t type = 0; type < (stats.*column).size(); ++type)
        (stats.*column)[type].peak =
            std::max((stats.*column)[type].peak, ((*entry.past).*column)[type].peak);
  if (!pool.arenas_made && !pool.made) return stats;
  const lowtide_pool_stats &base = entry.base;
  stats.num_device_alloc += pool.page_calls - base.page_calls;
  const auto live = in_arenas(pool);
  const std::array<int64_t, kFigures> arenas{pool.arena_bytes, pool.arena_bytes, pool.arena_bytes,
                                             pool.arenas, pool.arenas};
  const int64_t bytes = pool.made_bytes - base.made_bytes, blocks = pool.made - base.made;
  const std::array<int64_t, kFigures> made{bytes, bytes, pool.made_requested - base.made_requested,
                                           blocks, blocks};
  const int64_t arena_bytes = pool.arenas_made_bytes - base.arenas_made_bytes;
  const int64_t arena_count = pool.arenas_made - base.arenas_made;
  const std::array<int64_t, kFigures> arenas_made{arena_bytes, arena_bytes, arena_bytes,
                                                  arena_count, arena_count};
  const auto live_base = in_arenas(base);
  const std::array<int64_t, kFigures> arenas_base{base.arena_bytes, base.arena_bytes,
                                                  base.arena_bytes, base.arenas, base.arenas};
  for (size_t type = 0; type < kTypes; ++type) {
    for (size_t i = 0; i < kFigures; ++i) {
      c10::CachingAllocator::Stat &stat = (stats.*kColumns[i])[kTypeIndex[type]];
      stat.current += live[i] - arenas[i];
      if (entry.started) stat.peak = std::max(entry.peak[type][i], stat.current);
      stat.allocated += made[i] - arenas_made[i];
      // What is gone is what was there and what came, less what is there.
      stat.freed += made[i] + live_base[i] - live[i] - (arenas_made[i] + arenas_base[i] - arenas[i]);
    }
    c10::CachingAllocator::Stat &reserved = stats.reserved_bytes[kTypeIndex[type]];
    reserved.current += pool.page_bytes;
    if (entry.started)
      reserved.peak = std::max({reserved.peak, entry.reserved_peak[type], reserved.current});
    const int64_t empty =
        pool.arena_bytes + pool.page_bytes - pool.live_bytes - pool.pending_bytes;
    c10::CachingAllocator::Stat &split = stats.inactive_split_bytes[kTypeIndex[type]];
    split.current += empty;
    split.peak = std::max(split.peak, split.current);
  }
  return stats;
}

void Statistics::reset_accumulated(c10::DeviceIndex device, const lowtide_pool_stats &pool) {
  behind_->resetAccumulatedStats(device);
  const std::lock_guard<std::mutex> lock(mutex_);
  at(device).base = pool;
}

void Statistics::reset_peaks(c10::DeviceIndex device, const lowtide_pool_stats &pool) {
  behind_->resetPeakStats(device);
  const DeviceStats stats = behind_->getDeviceStats(device);
  const Figures behind = behind_of(stats, pool);
  const auto arenas = in_arenas(pool);
  const std::lock_guard<std::mutex> lock(mutex_);
  Device &entry = at(device);
  entry.past.reset();
  entry.behind = behind;
  for (size_t type = 0; type < kTypes; ++type)
    for (size_t i = 0; i < kFigures; ++i) entry.peak[type][i] = behind[type][i] + arenas[i];
  for (size_t type = 0; type < kTypes; ++type)
    entry.reserved_peak[type] =
        stats.reserved_bytes[kTypeIndex[type]].current + pool.page_bytes;
}

void Statistics::finish(c10::DeviceIndex device, const lowtide_pool_stats &pool) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!at(device).started) return;
  }
  auto past = std::make_unique<DeviceStats>(corrected(device, pool));
  behind_->resetPeakStats(device);
  const std::lock_guard<std::mutex> lock(mutex_);
  Device &entry = at(device);
  entry.past = std::move(past);
  entry.started = false;
  on_ = std::any_of(devices_.begin(), devices_.end(), [](const Device &d) { return d.started; });
}

bool Statistics::unneeded() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::all_of(devices_.begin(), devices_.end(),
                     [](const Device &entry) { return !entry.started && !entry.past; });
}

}  // namespace lowtide
