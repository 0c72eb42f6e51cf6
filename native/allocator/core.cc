#include "core.h"

#include <algorithm>
#include <chrono>

namespace lowtide {
namespace {

constexpr int64_t kSmall = 1 << 20;    // a lost step's smaller blocks are left to the backend: one
                                       // that stays would lie in the way of much larger plans
constexpr int64_t kMost = int64_t{1} << 62;

}  // namespace

Pool::~Pool() {
  for (const Waiting &waiting : waiting_)
    for (void *event : waiting.events) backend_.drop(backend_.context, event);
  release(arenas_);
}

int64_t Pool::now_ns() const {
  if (mode() != LOWTIDE_POOL_RECORD) return 0;
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void Pool::set_mode(int32_t mode) {
  Lock lock(mutex_);
  mode_.store(mode, std::memory_order_relaxed);
  for (const auto &lane : lanes_) lane->follower.reset();
}

void Pool::stop() {
  Lock lock(mutex_);
  mode_.store(LOWTIDE_POOL_PASS, std::memory_order_relaxed);
  guard_ = {};
  for (const auto &lane : lanes_) {
    lane->follower = {};
    lane->told = {};
    lane->distrusted = false;
    let_go(*lane);
  }
  sweep(lock);
  shrink_retired();
  const auto gone = drained();
  lock.unlock();
  release(gone);
}

void Pool::pause(bool paused) {
  std::vector<std::pair<Arena *, int64_t>> deferred;
  Lock lock(mutex_);
  paused_ = paused;
  if (paused_) return;
  deferred.swap(deferred_);
  for (const auto &[arena, offset] : deferred) record_events(lock, arena, offset);
  const auto gone = drained();  // those in pages could not go meanwhile
  lock.unlock();
  release(gone);
}

int32_t Pool::lane_of(Stream stream) {
  for (size_t i = 0; i < lanes_.size(); ++i)
    if (lanes_[i]->stream == stream) return static_cast<int32_t>(i);
  lanes_.push_back(std::make_unique<Lane>(stream));
  return static_cast<int32_t>(lanes_.size()) - 1;
}

Arena *Pool::arena_at(const void *pointer) {
  for (const auto &arena : arenas_)
    if (arena->holds(pointer)) return arena.get();
  return nullptr;
}

// Where in its lane's arena the allocation just noted is to lie, or -1.
int64_t Pool::choose(Lane &lane, int64_t bytes) {
  const Step &step = lane.steps.now();
  Follower::Match match;
  if (!step.overflow) match = lane.follower.match(step.sizes);
  if (match.found && match.offset < 0) return -1;  // it outlives the plan
  if (!lane.arena) {
    ++lane.told.unplanned;
    return -1;
  }
  if (match.found) {
    if (!lane.paged) lane.arena->stop_indexing();
    if (lane.arena->vacant(match.offset, rounded(bytes))) {
      ++lane.told.planned;
      return match.offset;
    }
    ++lane.told.displaced;
    return -1;
  }
  ++lane.told.unplanned;
  if (lane.paged) return -1;
  const bool lost = lane.follower.lost() || lane.follower.empty() || step.overflow;
  return lost && bytes >= kSmall ? lane.arena->highest_fit(rounded(bytes)) : -1;
}

void Pool::put(Arena &arena, int64_t offset, int64_t requested, Origin origin) {
  Block block;
  block.bytes = rounded(requested);
  block.requested = requested;
  block.origin = origin;
  lowtide_pool_stats &counts = stats(arena.stream.device);
  counts.live += 1;
  counts.live_bytes += block.bytes;
  counts.requested_bytes += requested;
  counts.made += 1;
  counts.made_bytes += block.bytes;
  counts.made_requested += requested;
  arena.put(offset, std::move(block));
}

lowtide_pool_stats &Pool::stats(int32_t device) {
  const size_t i = static_cast<size_t>(std::max(device, 0));
  if (i >= stats_.size()) stats_.resize(i + 1);
  return stats_[i];
}

void *Pool::allocate(int64_t bytes, Stream stream, Receipt *receipt) {
  bool guarded = false;
  void *const block = make(bytes, stream, receipt, &guarded);
  if (!guarded || !block) return block;
  Lock lock(mutex_);
  const Guard::Sound sound = guard_.sound;
  void *const context = guard_.context;
  lock.unlock();
  if (!sound || !sound(context)) return block;
  lock.lock();
  guard_.rest();
  return block;
}

void *Pool::make(int64_t bytes, Stream stream, Receipt *receipt, bool *guarded) {
  const int64_t now = now_ns();
  Lock lock(mutex_);
  if (!waiting_.empty()) sweep(lock);
  const int32_t number = lane_of(stream);
  Lane &lane = *lanes_[static_cast<size_t>(number)];
  *guarded = guard_.rings(number, bytes, stats(stream.device).live_bytes + rounded(bytes));
  if (lane.distrusted && lane.arena && lane.arena->empty()) {
    let_go(lane);
    lane.distrusted = false;
    const auto gone = drained();
    lock.unlock();
    release(gone);
    lock.lock();
  }
  const int64_t index = lane.steps.made(bytes, now);
  const Origin origin{number, lane.steps.number(), index};
  ++lane.told.allocations;
  int64_t offset = mode() == LOWTIDE_POOL_REPLAY ? choose(lane, bytes) : -1;
  if (lane.paged && offset < 0) {
    offset = find_pages(lane, rounded(bytes));
    if (offset < 0 && !waiting_.empty() && !paused_) {
      sweep(lock, true);
      if (lane.paged) offset = find_pages(lane, rounded(bytes));
    }
    if (offset < 0) {
      lock.unlock();
      const bool more = backend_.flush(backend_.context, stream.device) != 0;
      lock.lock();
      if (more && lane.paged) offset = find_pages(lane, rounded(bytes));
    }
  }
  if (offset >= 0) {
    put(*lane.arena, offset, bytes, origin);
    if (receipt)
      *receipt = {Place::kArena, rounded(bytes), bytes,
                  false,         stream.device,  stats(stream.device)};
    return lane.arena->base + offset;
  }
  lock.unlock();
  void *block = backend_.allocate(backend_.context, bytes, stream.device, stream.handle);
  if (!block) {
    Place where = Place::kNowhere;
    block = last_resort(number, bytes, &where);
    if (where == Place::kArena || !block) {
      lock.lock();
      if (Arena *arena = block ? arena_at(block) : nullptr)
        arena->find(static_cast<char *>(block) - arena->base)->origin = origin;
      if (receipt)
        *receipt = {where, rounded(bytes), bytes, false, stream.device, stats(stream.device)};
      return block;
    }
  }
  lock.lock();
  held_[block] = origin;
  ++stats(stream.device).held;
  if (receipt) *receipt = {Place::kBackend, 0, bytes, false, stream.device, stats(stream.device)};
  return block;
}

void Pool::note_free(const Origin &origin) {
  if (origin.lane < 0) return;
  lanes_[static_cast<size_t>(origin.lane)]->steps.freed(origin.step, origin.index, now_ns());
}

// Gives the bytes of a block back to its arena.
void Pool::remove(Arena &arena, int64_t offset) {
  const Block block = arena.take(offset);
  lowtide_pool_stats &counts = stats(arena.stream.device);
  if (block.pending) {
    counts.pending -= 1;
    counts.pending_bytes -= block.bytes;
  } else {
    counts.live -= 1;
    counts.live_bytes -= block.bytes;
    counts.requested_bytes -= block.requested;
  }
  note_free(block.origin);
}

Pool::Place Pool::free(void *pointer, Receipt *receipt) {
  Lock lock(mutex_);
  Arena *const arena = arena_at(pointer);
  if (arena) {
    const int64_t offset = static_cast<char *>(pointer) - arena->base;
    Block *const block = arena->find(offset);
    if (!block || block->pending) return Place::kNowhere;
    const int64_t bytes = block->bytes, requested = block->requested;
    const int32_t device = arena->stream.device;
    if (block->touched.empty()) {
      remove(*arena, offset);
      if (receipt) *receipt = {Place::kArena, bytes, requested, false, device, stats(device)};
      if (arena->retired && arena->empty()) {
        const auto gone = drained();
        lock.unlock();
        release(gone);
      }
      return Place::kArena;
    }
    lowtide_pool_stats &counts = stats(device);
    counts.live -= 1;
    counts.live_bytes -= bytes;
    counts.requested_bytes -= block->requested;
    counts.pending += 1;
    counts.pending_bytes += bytes;
    block->pending = true;
    if (receipt) *receipt = {Place::kArena, bytes, requested, true, device, counts};
    if (paused_)
      deferred_.emplace_back(arena, offset);
    else
      record_events(lock, arena, offset);
    return Place::kArena;
  }
  const auto found = held_.find(pointer);
  if (found == held_.end()) return Place::kNowhere;
  const Origin origin = found->second;
  held_.erase(found);
  --stats(lanes_[static_cast<size_t>(origin.lane)]->stream.device).held;
  note_free(origin);
  lock.unlock();
  backend_.release(backend_.context, pointer);
  return Place::kBackend;
}

// The block is pending, so its bytes stay where they are while the lock is given up.
void Pool::record_events(Lock &lock, Arena *arena, int64_t offset) {
  const std::vector<Stream> touched = arena->find(offset)->touched;
  lock.unlock();
  Waiting waiting{arena, offset, {}};
  for (const Stream &stream : touched)
    waiting.events.push_back(backend_.record(backend_.context, stream.device, stream.handle));
  lock.lock();
  waiting_.push_back(std::move(waiting));
}

Pool::Place Pool::touch(void *pointer, Stream stream) {
  Lock lock(mutex_);
  if (Arena *const arena = arena_at(pointer)) {
    Block *const block = arena->find(static_cast<char *>(pointer) - arena->base);
    if (!block) return Place::kNowhere;
    std::vector<Stream> &touched = block->touched;
    if (!(stream == arena->stream) &&
        std::find(touched.begin(), touched.end(), stream) == touched.end())
      touched.push_back(stream);
    return Place::kArena;
  }
  return held_.count(pointer) ? Place::kBackend : Place::kNowhere;
}

bool Pool::set_guard(Stream stream, int64_t most, Guard::Sound sound, void *context) {
  Lock lock(mutex_);
  if (sound || most > 0) return guard_.begin(lane_of(stream), most, sound, context);
  guard_.rest();
  return true;
}

int64_t Pool::guarded() {
  Lock lock(mutex_);
  return guard_.held();
}

int32_t Pool::mark(lowtide_pool_lane *out, int32_t room) {
  const int64_t now = now_ns();
  Lock lock(mutex_);
  if (!waiting_.empty()) sweep(lock);
  for (size_t i = 0; i < lanes_.size(); ++i) {
    Lane &lane = *lanes_[i];
    const Step &step = lane.steps.now();
    lane.told.lane = static_cast<int32_t>(i);
    lane.told.device = lane.stream.device;
    lane.told.stream = lane.stream.handle;
    lane.told.signature = step.signature;
    lane.told.overflow = step.overflow;
    lane.told.arena_bytes = lane.arena ? lane.arena->bytes : 0;
    if (lane.paged) {
      lane.told.page = lane.paged->page;
      lane.told.arena_bytes = lane.paged->filled() * lane.paged->page;
    }
    lane.told.plan = lane.follower.end(step.sizes);
    if (step.overflow) lane.told.plan = -1;
    if (lane.told.plan >= 0) lane.distrusted = false;
    if (static_cast<int32_t>(i) < room) out[i] = lane.told;
    guard_.end_step(static_cast<int32_t>(i), step.sizes);
    lane.told = {};
    lane.steps.end(now);
  }
  return static_cast<int32_t>(lanes_.size());
}

int64_t Pool::step(int32_t number, int32_t back, int64_t room, int64_t *sizes, int64_t *made,
                   int64_t *freed, int64_t *made_ns, int64_t *freed_ns, int64_t *ticks) {
  Lock lock(mutex_);
  if (number < 0 || number >= static_cast<int32_t>(lanes_.size())) return -1;
  const Step *const step = lanes_[static_cast<size_t>(number)]->steps.ended(back);
  if (!step) return -1;
  const auto copy = [&](const std::vector<int64_t> &from, int64_t *to) {
    if (!to) return;
    for (int64_t i = 0; i < room && i < static_cast<int64_t>(step->sizes.size()); ++i)
      to[i] = i < static_cast<int64_t>(from.size()) ? from[static_cast<size_t>(i)] : -1;
  };
  copy(step->sizes, sizes);
  copy(step->made, made);
  copy(step->freed, freed);
  copy(step->made_ns, made_ns);
  copy(step->freed_ns, freed_ns);
  if (ticks) *ticks = step->ticks;
  return static_cast<int64_t>(step->sizes.size());
}

int64_t Pool::plan(int32_t number, int64_t count, const int64_t *sizes, int32_t phases,
                   const int64_t *offsets) {
  Lock lock(mutex_);
  if (number < 0 || number >= static_cast<int32_t>(lanes_.size()) || count < 1 || phases < 1)
    return -1;
  for (int64_t i = 0; i < count * phases; ++i)
    if (offsets[i] < -1 || offsets[i] > kMost || (offsets[i] > 0 && offsets[i] % kGrain)) return -1;
  Lane &lane = *lanes_[static_cast<size_t>(number)];
  if (lane.paged)
    for (int64_t i = 0; i < count * phases; ++i) lane.paged->keep(offsets[i]);
  lane.follower.add(std::make_unique<Plan>(
      next_plan_, std::vector<int64_t>(sizes, sizes + count), phases,
      std::vector<int64_t>(offsets, offsets + count * phases)));
  return next_plan_++;
}

void Pool::forget(int32_t number, int64_t plan) {
  Lock lock(mutex_);
  if (number < 0 || number >= static_cast<int32_t>(lanes_.size())) return;
  Lane &lane = *lanes_[static_cast<size_t>(number)];
  if (lane.paged)
    for (const int64_t offset : lane.follower.offsets(plan)) lane.paged->let_go(offset);
  lane.follower.forget(plan);
  if (lane.paged && lane.follower.empty()) lane.paged->floor = 0;
}

Origin Pool::origin_of(void *pointer) {
  if (Arena *const arena = arena_at(pointer)) {
    Block *const block = arena->find(static_cast<char *>(pointer) - arena->base);
    return block ? block->origin : Origin{};
  }
  const auto found = held_.find(pointer);
  return found != held_.end() ? found->second : Origin{};
}

int64_t Pool::index(int32_t lane, void *pointer) {
  Lock lock(mutex_);
  const Origin origin = origin_of(pointer);
  return lane < 0 || origin.lane != lane ? -1 : origin.index;
}

int64_t Pool::age(void *pointer) {
  Lock lock(mutex_);
  const Origin origin = origin_of(pointer);
  if (origin.lane < 0) return -1;
  return lanes_[static_cast<size_t>(origin.lane)]->steps.number() - origin.step;
}

lowtide_pool_stats Pool::count(int32_t device) {
  Lock lock(mutex_);
  return stats(device);
}

void *Pool::base_of(const void *block) {
  Lock lock(mutex_);
  Arena *const arena = arena_at(block);
  return arena ? arena->base : nullptr;
}

Stream Pool::stream_of(int32_t lane) {
  Lock lock(mutex_);
  return lanes_.at(static_cast<size_t>(lane))->stream;
}

bool Pool::idle() {
  Lock lock(mutex_);
  return arenas_.empty() && held_.empty();
}

}  // namespace lowtide
