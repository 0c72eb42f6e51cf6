// The pool: what pool.h promises, as a class.  Every member function may be called by any thread.
#ifndef LOWTIDE_CORE_H
#define LOWTIDE_CORE_H

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "arena.h"
#include "guard.h"
#include "paged.h"
#include "plan.h"
#include "pool.h"
#include "steps.h"

namespace lowtide {

class Pool {
 public:
  enum class Place { kArena, kBackend, kNowhere };
  struct Receipt {
    Place place = Place::kNowhere;
    int64_t bytes = 0;         // that the block takes in its arena
    int64_t requested = 0;
    bool pending = false;      // freed, but another stream may still use it
    int32_t device = 0;
    lowtide_pool_stats stats{};  // of the device, afterwards
  };

  explicit Pool(const lowtide_pool_backend &backend) : backend_(backend) {}
  ~Pool();

  void set_mode(int32_t mode);
  int32_t mode() const { return mode_.load(std::memory_order_relaxed); }
  void stop();
  void pause(bool paused);

  // nullptr: there is no memory.
  void *allocate(int64_t bytes, Stream stream, Receipt *receipt = nullptr);
  // kNowhere: the block is none of the pool's.
  Place free(void *block, Receipt *receipt = nullptr);
  Place touch(void *block, Stream stream);

  bool set_guard(Stream stream, int64_t most, Guard::Sound sound, void *context);
  int64_t guarded();
  int32_t mark(lowtide_pool_lane *lanes, int32_t room);
  int64_t step(int32_t lane, int32_t back, int64_t room, int64_t *sizes, int64_t *made,
               int64_t *freed, int64_t *made_ns, int64_t *freed_ns, int64_t *ticks);
  int64_t plan(int32_t lane, int64_t count, const int64_t *sizes, int32_t phases,
               const int64_t *offsets);
  void forget(int32_t lane, int64_t plan);
  bool set_arena(int32_t lane, int64_t bytes);
  bool set_pages(Stream stream, int64_t bytes);
  bool fill(int32_t lane, int64_t bytes, int64_t floor);
  int64_t lasting(int32_t lane, int64_t *pages, int64_t room);
  int64_t left(int32_t lane, int64_t *numbers, int64_t room);
  int64_t free_pages(int32_t device);
  int64_t window(int32_t lane, const int64_t *pages, int64_t count);

  void *home(int64_t bytes, Stream stream);
  void *place(void *home, int64_t offset, int64_t bytes);
  void dismiss(void *home);

  int64_t age(void *block);
  int64_t index(int32_t lane, void *block);
  void *place_in(int32_t lane, int64_t offset, int64_t bytes);
  void reclaim();
  lowtide_pool_stats count(int32_t device);
  // Whether the block lies in an arena: that arena's base.
  void *base_of(const void *block);
  // Bytes of the block, if it lies in pages; 0: it does not.
  int64_t paged_bytes(const void *block);
  int64_t largest_gap(int32_t device);
  int64_t map(int32_t device, int64_t *numbers, int64_t room);
  Stream stream_of(int32_t lane);
  // No arena, and no block of the backend that would come back through `free`.
  bool idle();

 private:
  struct Lane {
    explicit Lane(Stream stream) : stream(stream) {}
    const Stream stream;
    Arena *arena = nullptr;
    Paged *paged = nullptr;         // the same, if it is one in pages
    bool distrusted = false;        // something did not fit beside the arena: it goes when it is empty
    Steps steps;
    Follower follower;
    lowtide_pool_lane told{};       // of the step so far
  };
  struct Waiting {
    Arena *arena;
    int64_t offset;
    std::vector<void *> events;
  };
  using Lock = std::unique_lock<std::mutex>;

  // As `allocate` does, but nobody is told: `guarded` says whether somebody is to be.
  void *make(int64_t bytes, Stream stream, Receipt *receipt, bool *guarded);
  int32_t lane_of(Stream stream);
  Arena *arena_at(const void *pointer);
  Origin origin_of(void *pointer);
  int64_t choose(Lane &lane, int64_t bytes);
  void put(Arena &arena, int64_t offset, int64_t requested, Origin origin);
  void remove(Arena &arena, int64_t offset);
  void note_free(const Origin &origin);
  void record_events(Lock &lock, Arena *arena, int64_t offset);
  void sweep(Lock &lock, bool wait = false);
  // Takes drained arenas off the list; they are the caller's to release, unlocked.
  std::vector<std::unique_ptr<Arena>> drained();
  void release(const std::vector<std::unique_ptr<Arena>> &arenas);
  void let_go(Lane &lane);  // its arena is retired
  // Where in its pages a block of the lane can lie, or -1; memory and windows are added as needed.
  int64_t find_pages(Lane &lane, int64_t size);
  int64_t find_pages(Paged &paged, int64_t size, int64_t floor);
  bool fill(Paged &paged, const std::vector<Paged::Stretch> &stretches);
  Paged *paged_of(int32_t lane);
  bool give_pages(int32_t device, int64_t bytes);
  int64_t drain(Paged &paged, int64_t count);
  void shrink_retired();
  int64_t show(Paged &paged, const std::vector<int64_t> &pages, bool kept);
  void hide(Paged &paged, bool all);
  Arena *add_arena(void *base, int64_t bytes, Stream stream);
  void *last_resort(int32_t lane, int64_t bytes, Place *place);
  lowtide_pool_stats &stats(int32_t device);
  int64_t now_ns() const;

  const lowtide_pool_backend backend_;
  std::atomic<int32_t> mode_{LOWTIDE_POOL_PASS};
  std::mutex mutex_;
  bool paused_ = false;
  Guard guard_;
  int64_t next_plan_ = 0;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<std::unique_ptr<Arena>> arenas_;
  std::unordered_map<void *, Origin> held_;             // blocks of the backend
  std::vector<Waiting> waiting_;                        // events have been recorded
  std::vector<std::pair<Arena *, int64_t>> deferred_;   // freed while paused: no events yet
  std::vector<lowtide_pool_stats> stats_;  // by device
};

}  // namespace lowtide

struct lowtide_pool {
  explicit lowtide_pool(const lowtide_pool_backend &backend) : pool(backend) {}
  lowtide::Pool pool;
};

#endif
