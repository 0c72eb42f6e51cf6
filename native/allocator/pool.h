// The C ABI of lowtide's pool: the allocator that gives each allocation of a training step the
// address that was planned for it.  Torch-free; what it stands on is passed in as a backend, so the
// same code runs over CUDA (torch/) and over main memory (host/, for tests).
//
// Words: a *lane* is what one stream of one device allocates, in order; an *arena* one allocation of
// the backend that a lane's blocks lie in; a *plan* the sizes of a step in order, with an offset for
// each; a *mark* the end of a step.  In a repeating step a block may outlive the mark, so a plan has
// one or more *phases*, sets of offsets that consecutive steps use in turn.
//
// Rules, whatever the plans say and the program does:
//   1. Blocks of an arena never share a byte while they are in use.
//   2. An arena serves one stream.  A block that another stream touched keeps its bytes until an
//      event behind that stream's work has passed.
//   3. A plan is advice.  What it did not foresee goes to the backend and is counted: a step that
//      departs costs memory, never correctness.
//   4. No lock is held while the backend is called, but for its pages.
//   5. An arena goes back to the backend when it is retired and its last block is gone.
//   6. No memory is said only when nothing is left that would come back by waiting; and then the arena
//      goes as soon as it is empty, so that what did not fit beside it can be tried again without.
#ifndef LOWTIDE_POOL_H
#define LOWTIDE_POOL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Raised whenever a struct or the meaning of a field changes.
#define LOWTIDE_POOL_ABI 4

typedef struct lowtide_pool lowtide_pool;

typedef struct {
  void *context;
  void *(*allocate)(void *context, int64_t bytes, int32_t device, void *stream);  // NULL: no memory
  void (*release)(void *context, void *block);
  // An event behind all that `stream` has been given so far.
  void *(*record)(void *context, int32_t device, void *stream);
  int32_t (*passed)(void *context, void *event);  // whether it has; does not wait
  void (*wait)(void *context, void *event);       // until it has
  void (*drop)(void *context, void *event);
  // Memory in pages, for arenas whose blocks need not lie in one piece.  A page may be shown at several
  // addresses at once.  These are called with the pool's lock held, and must not call the pool.
  int64_t page;   // bytes of one; 0: there are none, and no functions for them
  int64_t spare;  // bytes that `allocate` may take besides those it is asked for
  void *(*reserve)(void *context, int64_t bytes, int32_t device);  // addresses alone; NULL: none
  void (*give_up)(void *context, void *base, int32_t device);      // with all that is shown there
  // Pages `first` and so on of the addresses at `base` get memory: how many of them.
  int64_t (*fill)(void *context, void *base, int64_t first, int64_t count, int32_t device);
  void (*drain)(void *context, void *base, int64_t first, int64_t count, int32_t device);
  // These pages are shown at offset `at`, too, side by side.  0: they cannot be.
  int32_t (*show)(void *context, void *base, int64_t at, const int64_t *pages, int64_t count,
                  int32_t device);
  void (*hide)(void *context, void *base, int64_t at, int64_t count, int32_t device);
  // Before pages are drained or hidden: until the device has done all that it was given.
  void (*settle)(void *context, int32_t device);
  // Gives back what `allocate` keeps and nobody uses.  0: there is nothing.  Called without the lock.
  int32_t (*flush)(void *context, int32_t device);
} lowtide_pool_backend;

enum {
  LOWTIDE_POOL_PASS = 0,    // everything goes to the backend, nothing is noted
  LOWTIDE_POOL_RECORD = 1,  // everything goes to the backend and is noted, with times
  LOWTIDE_POOL_REPLAY = 2,  // plans are followed; what happens is still noted, without times
};

// What became of one lane's last step.
typedef struct {
  int32_t lane;
  int32_t device;
  void *stream;
  int64_t allocations;
  uint64_t signature;       // of the sizes in order
  int64_t plan;             // the plan that the whole step agreed with, or -1
  int64_t planned;          // allocations that got their planned address
  int64_t displaced;        // ... whose planned bytes were still in use
  int64_t unplanned;        // ... that no plan foresaw; the others outlive the plan, outside
  int64_t arena_bytes;      // 0: the lane has no arena; of one in pages, what has memory
  int64_t page;             // bytes of a page of it; 0: it has none
  int32_t overflow;         // the step was too long to be noted whole
  int32_t refused;          // allocations for which there was no memory anywhere
} lowtide_pool_lane;

typedef struct {
  int64_t arena_bytes;      // of all arenas
  int64_t arenas;
  int64_t live_bytes;       // of blocks in arenas, rounded to 512
  int64_t live;
  int64_t pending_bytes;    // freed, but another stream may still use them
  int64_t pending;
  int64_t requested_bytes;  // what was asked for, of live blocks
  int64_t made;             // blocks ever put into arenas
  int64_t made_bytes;
  int64_t made_requested;
  int64_t arenas_made;      // arenas there ever were
  int64_t arenas_made_bytes;
  int64_t held;             // blocks of the backend that the pool handed out and that still live
  int64_t page_bytes;       // memory of arenas in pages, which are not counted as arenas
  int64_t page_calls;       // how often pages were given memory, or shown
} lowtide_pool_stats;

int32_t lowtide_pool_abi(void);
lowtide_pool *lowtide_pool_open(const lowtide_pool_backend *backend);
// Blocks still in use are the caller's to free before this; arenas go back.
void lowtide_pool_close(lowtide_pool *pool);

void lowtide_pool_mode(lowtide_pool *pool, int32_t mode);
// Back to mode PASS: plans are dropped, arenas retired, and what the last step told is forgotten.
void lowtide_pool_stop(lowtide_pool *pool);
void *lowtide_pool_allocate(lowtide_pool *pool, int64_t bytes, int32_t device, void *stream);
// 1: it is gone; 0: the block is none of the pool's.
int32_t lowtide_pool_free(lowtide_pool *pool, void *block);
// Another stream uses the block.  1: noted; 0: the block does not lie in an arena.
int32_t lowtide_pool_touch(lowtide_pool *pool, void *block, int32_t device, void *stream);
// While paused, events are neither recorded nor asked for (a capture of a CUDA graph forbids it).
void lowtide_pool_pause(lowtide_pool *pool, int32_t paused);

// Somebody is told, by `sound`, when this thread makes a block by which the device's arenas come near
// to holding `most`, or one that announces it (`guard.h`), from the next mark on.  `sound` is called
// once the block has been had, without the lock: it may call the pool.  Until it returns something
// else than 0 it is told of every such block.  NULL: nobody is told; with something to hold, steps are
// counted all the same.  0: no whole step is known by then, so it may be told too late.
int32_t lowtide_pool_guard(lowtide_pool *pool, int32_t device, void *stream, int64_t most,
                           int32_t (*sound)(void *context), void *context);
// What the arenas of its device have held at most in the step so far, seen from that stream.
int64_t lowtide_pool_guarded(lowtide_pool *pool);

// The end of a step: fills up to `room` entries, returns how many lanes there are.
int32_t lowtide_pool_mark(lowtide_pool *pool, lowtide_pool_lane *lanes, int32_t room);
// The step `back` marks ago (0: the last one ended): its allocations' sizes, the tick of the lane's
// clock (one tick an allocation or a free, from the start of the step) at which each was made and
// freed (-1: not yet), and nanoseconds since then, where times were noted.  Any array may be NULL.
// Returns the number of allocations, `ticks` the length of the step; -1: no such step.
int64_t lowtide_pool_step(lowtide_pool *pool, int32_t lane, int32_t back, int64_t room,
                          int64_t *sizes, int64_t *made, int64_t *freed, int64_t *made_ns,
                          int64_t *freed_ns, int64_t *ticks);

// A plan for a lane: offsets[phase * count + i], or -1 where allocation i is to lie outside.
// Returns its number, or -1 if it is none (an offset that is not a multiple of 512, or beyond 2**62).
int64_t lowtide_pool_plan(lowtide_pool *pool, int32_t lane, int64_t count, const int64_t *sizes,
                          int32_t phases, const int64_t *offsets);
void lowtide_pool_forget(lowtide_pool *pool, int32_t lane, int64_t plan);
// Gives the lane an arena of `bytes` and retires the one it has.  0: no memory; the lane keeps its old
// arena, or one like it.  With bytes 0 the lane is left without one.
int32_t lowtide_pool_arena(lowtide_pool *pool, int32_t lane, int64_t bytes);
// Gives the stream's lane an arena in pages, of at most `bytes`, instead of the one it has: from now on
// all that the lane allocates lies in it, where plans say or wherever pages are free, and it grows
// as it must.  0: there are no pages.
int32_t lowtide_pool_pages(lowtide_pool *pool, int32_t device, void *stream, int64_t bytes);
// Memory for the lowest `bytes` of them, which plans use.  What they do not foresee keeps out of those
// below `floor` where it can.  0: there is not so much.
int32_t lowtide_pool_fill(lowtide_pool *pool, int32_t lane, int64_t bytes, int64_t floor);
// Pages of the lane's arena side by side: the offset at which they are, for plans.  -1: they cannot be.
int64_t lowtide_pool_window(lowtide_pool *pool, int32_t lane, const int64_t *pages, int64_t count);
// The pages, in order, in which something lies that was made before the last step, and still lives: for
// a plan to leave alone.  Returns how many there are.
int64_t lowtide_pool_lasting(lowtide_pool *pool, int32_t lane, int64_t *pages, int64_t room);
// What a lane's last step has left behind in its pages: for each block which allocation of the step
// it was, its offset, how many pages it lies in, and those.  How many numbers that makes; at most
// `room` are written.
int64_t lowtide_pool_left(lowtide_pool *pool, int32_t lane, int64_t *numbers, int64_t room);
// Bytes of whole pages that nobody uses, of those that have memory.
int64_t lowtide_pool_free_pages(lowtide_pool *pool, int32_t device);
// An arena of no lane, for blocks that `place` puts into it; it goes back with the last of them, or
// at once by `dismiss` if it has none.  Returns its base, or NULL.
void *lowtide_pool_home(lowtide_pool *pool, int64_t bytes, int32_t device, void *stream);
void *lowtide_pool_place(lowtide_pool *pool, void *home, int64_t offset, int64_t bytes);
void lowtide_pool_dismiss(lowtide_pool *pool, void *home);

// The base of the arena or home that the block lies in, or NULL.
void *lowtide_pool_base(lowtide_pool *pool, void *block);
// The bytes that the block has in pages; 0: it does not lie in pages.
int64_t lowtide_pool_paged(lowtide_pool *pool, void *block);
// How many marks ago the block was allocated; -1: it is none of the pool's, or older than it tells.
int64_t lowtide_pool_age(lowtide_pool *pool, void *block);
// Which allocation of the lane's step the block was; -1: it is none of that lane's.
int64_t lowtide_pool_index(lowtide_pool *pool, int32_t lane, void *block);
// Takes bytes of the lane's arena that no step has asked for: what it left behind is put where it would
// lie if the arena had been there.  NULL: they are in use.
void *lowtide_pool_place_in(lowtide_pool *pool, int32_t lane, int64_t offset, int64_t bytes);
// Frees what only waited for an event.
void lowtide_pool_reclaim(lowtide_pool *pool);
void lowtide_pool_count(lowtide_pool *pool, int32_t device, lowtide_pool_stats *stats);
// The blocks in arenas of `device`, by address: for each arena its base, bytes and number of blocks,
// then its blocks' address, bytes, requested bytes and whether they are pending.  For a picture.
int64_t lowtide_pool_map(lowtide_pool *pool, int32_t device, int64_t *numbers, int64_t room);

#ifdef __cplusplus
}
#endif
#endif
