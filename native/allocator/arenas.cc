// Arenas come and go: made, retired, drained, given back; and what to do when there is no memory.
#include <algorithm>

#include "core.h"

namespace lowtide {

// The backend has no memory: find some of what the pool keeps.
void *Pool::last_resort(int32_t number, int64_t bytes, Place *place) {
  const auto again = [&](Lock &lock) {
    const auto gone = drained();
    const Stream stream = lanes_[static_cast<size_t>(number)]->stream;
    lock.unlock();
    release(gone);
    void *block = backend_.allocate(backend_.context, bytes, stream.device, stream.handle);
    lock.lock();
    *place = block ? Place::kBackend : Place::kNowhere;
    return block;
  };
  Lock lock(mutex_);
  Lane &lane = *lanes_[static_cast<size_t>(number)];
  const bool waited = !waiting_.empty() && !paused_;
  if (waited) sweep(lock, true);
  int64_t offset = -1;
  if (lane.paged)
    offset = find_pages(lane, rounded(bytes));
  else if (lane.arena)
    offset = lane.arena->highest_fit(rounded(bytes));
  if (offset >= 0) {
    put(*lane.arena, offset, bytes, {});
    *place = Place::kArena;
    return lane.arena->base + offset;
  }
  bool any = waited;
  for (const auto &other : lanes_)
    if (other->arena && !other->paged && other->stream.device == lane.stream.device &&
        other->arena->empty()) {
      let_go(*other);
      any = true;
    }
  if (!lane.paged) any |= give_pages(lane.stream.device, bytes);
  if (any)
    if (void *block = again(lock)) return block;
  // The step fits nowhere beside the arena.  Without it, it may.
  ++lane.told.refused;
  for (const auto &other : lanes_)
    other->distrusted |=
        other->arena && !other->paged && other->stream.device == lane.stream.device;
  *place = Place::kNowhere;
  return nullptr;
}

// Frees the blocks whose events have passed.
void Pool::sweep(Lock &lock, bool wait) {
  if (paused_ || waiting_.empty()) return;
  std::vector<Waiting> asked;
  asked.swap(waiting_);
  lock.unlock();
  for (Waiting &waiting : asked)
    while (!waiting.events.empty()) {
      if (wait) backend_.wait(backend_.context, waiting.events.back());
      if (!backend_.passed(backend_.context, waiting.events.back())) break;
      backend_.drop(backend_.context, waiting.events.back());
      waiting.events.pop_back();
    }
  lock.lock();
  for (Waiting &waiting : asked)
    if (waiting.events.empty())
      remove(*waiting.arena, waiting.offset);
    else
      waiting_.push_back(std::move(waiting));
  const auto gone = drained();
  if (gone.empty()) return;
  lock.unlock();
  release(gone);
  lock.lock();
}

void Pool::let_go(Lane &lane) {
  if (lane.arena) lane.arena->retired = true;
  lane.arena = nullptr;
  lane.paged = nullptr;
}

std::vector<std::unique_ptr<Arena>> Pool::drained() {
  std::vector<std::unique_ptr<Arena>> gone;
  for (auto &arena : arenas_) {
    if (!arena->retired || !arena->empty()) continue;
    const auto *const paged = dynamic_cast<const Paged *>(arena.get());
    if (paged && paused_) continue;  // the device could not be waited for
    lowtide_pool_stats &counts = stats(arena->stream.device);
    if (paged) {
      counts.page_bytes -= paged->filled() * paged->page;
    } else {
      counts.arenas -= 1;
      counts.arena_bytes -= arena->bytes;
    }
    gone.push_back(std::move(arena));
  }
  arenas_.erase(std::remove(arenas_.begin(), arenas_.end(), nullptr), arenas_.end());
  return gone;
}

void Pool::release(const std::vector<std::unique_ptr<Arena>> &arenas) {
  for (const auto &arena : arenas)
    if (dynamic_cast<const Paged *>(arena.get())) {
      backend_.settle(backend_.context, arena->stream.device);
      backend_.give_up(backend_.context, arena->base, arena->stream.device);
    } else {
      backend_.release(backend_.context, arena->base);
    }
}

void Pool::reclaim() {
  Lock lock(mutex_);
  sweep(lock);
  shrink_retired();
}

Arena *Pool::add_arena(void *base, int64_t bytes, Stream stream) {
  arenas_.push_back(std::make_unique<Arena>(base, bytes, stream));
  lowtide_pool_stats &counts = stats(stream.device);
  counts.arenas += 1;
  counts.arena_bytes += bytes;
  counts.arenas_made += 1;
  counts.arenas_made_bytes += bytes;
  return arenas_.back().get();
}

bool Pool::set_arena(int32_t number, int64_t bytes) {
  Lock lock(mutex_);
  if (number < 0 || number >= static_cast<int32_t>(lanes_.size()) || bytes < 0) return false;
  Lane &lane = *lanes_[static_cast<size_t>(number)];
  if (lane.paged) return false;
  Arena *old = lane.arena;
  int64_t gone = 0;
  let_go(lane);
  if (old && old->empty()) {  // makes room for the new one
    gone = old->bytes;
    old = nullptr;
  }
  const auto drained_now = drained();
  lock.unlock();
  release(drained_now);
  void *base = nullptr;
  const auto allocate = [&](int64_t size) {
    return backend_.allocate(backend_.context, size, lane.stream.device, lane.stream.handle);
  };
  if (bytes) base = allocate(bytes);
  void *const as_before = bytes && !base && gone ? allocate(gone) : nullptr;
  lock.lock();
  if (as_before) lane.arena = add_arena(as_before, gone, lane.stream);
  if (base) {
    lane.arena = add_arena(base, bytes, lane.stream);
  } else if (bytes && std::any_of(arenas_.begin(), arenas_.end(),
                                  [&](const auto &arena) { return arena.get() == old; })) {
    old->retired = false;
    lane.arena = old;
  }
  return base || !bytes;
}

void *Pool::home(int64_t bytes, Stream stream) {
  void *base = backend_.allocate(backend_.context, bytes, stream.device, stream.handle);
  if (!base) return nullptr;
  Lock lock(mutex_);
  add_arena(base, bytes, stream);
  return base;
}

void *Pool::place(void *home, int64_t offset, int64_t bytes) {
  Lock lock(mutex_);
  Arena *const arena = arena_at(home);
  if (!arena || offset % kGrain || bytes < 1 || !arena->vacant(offset, rounded(bytes)))
    return nullptr;
  put(*arena, offset, bytes, {});
  return arena->base + offset;
}

void *Pool::place_in(int32_t number, int64_t offset, int64_t bytes) {
  Lock lock(mutex_);
  if (number < 0 || number >= static_cast<int32_t>(lanes_.size())) return nullptr;
  Arena *const arena = lanes_[static_cast<size_t>(number)]->arena;
  if (!arena || offset < 0 || offset % kGrain || bytes < 1 ||
      !arena->vacant(offset, rounded(bytes)))
    return nullptr;
  put(*arena, offset, bytes, {});
  return arena->base + offset;
}

void Pool::dismiss(void *home) {
  Lock lock(mutex_);
  if (Arena *const arena = arena_at(home)) arena->retired = true;
  const auto gone = drained();
  lock.unlock();
  release(gone);
}

int64_t Pool::largest_gap(int32_t device) {
  Lock lock(mutex_);
  int64_t largest = 0;
  for (const auto &lane : lanes_)
    if (lane->arena && lane->stream.device == device)
      largest = std::max(largest, lane->arena->largest_gap());
  return largest;
}

int64_t Pool::map(int32_t device, int64_t *numbers, int64_t room) {
  Lock lock(mutex_);
  int64_t count = 0;
  const auto add = [&](int64_t number) {
    if (count < room) numbers[count] = number;
    ++count;
  };
  for (const auto &arena : arenas_) {
    if (arena->stream.device != device) continue;
    add(reinterpret_cast<int64_t>(arena->base));
    add(arena->bytes);
    const auto there = [](const auto &one) { return one.second.kind != Block::Kind::kAbsent; };
    add(std::count_if(arena->blocks().begin(), arena->blocks().end(), there));
    for (const auto &[offset, block] : arena->blocks()) {
      if (block.kind == Block::Kind::kAbsent) continue;
      add(reinterpret_cast<int64_t>(arena->base + offset));
      add(block.bytes);
      add(block.requested);
      add(block.pending);
    }
  }
  return count;
}

}  // namespace lowtide
