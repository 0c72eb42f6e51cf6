#include "core.h"

int32_t lowtide_pool_abi(void) { return LOWTIDE_POOL_ABI; }

lowtide_pool *lowtide_pool_open(const lowtide_pool_backend *backend) {
  return new lowtide_pool(*backend);
}

void lowtide_pool_close(lowtide_pool *pool) { delete pool; }

void lowtide_pool_mode(lowtide_pool *pool, int32_t mode) { pool->pool.set_mode(mode); }

void lowtide_pool_stop(lowtide_pool *pool) { pool->pool.stop(); }

void *lowtide_pool_allocate(lowtide_pool *pool, int64_t bytes, int32_t device, void *stream) {
  return pool->pool.allocate(bytes, {device, stream});
}

int32_t lowtide_pool_free(lowtide_pool *pool, void *block) {
  return pool->pool.free(block) != lowtide::Pool::Place::kNowhere;
}

int32_t lowtide_pool_touch(lowtide_pool *pool, void *block, int32_t device, void *stream) {
  return pool->pool.touch(block, {device, stream}) == lowtide::Pool::Place::kArena;
}

void lowtide_pool_pause(lowtide_pool *pool, int32_t paused) { pool->pool.pause(paused != 0); }

int32_t lowtide_pool_guard(lowtide_pool *pool, int32_t device, void *stream, int64_t most,
                           int32_t (*sound)(void *context), void *context) {
  return pool->pool.set_guard({device, stream}, most, sound, context);
}

int64_t lowtide_pool_guarded(lowtide_pool *pool) { return pool->pool.guarded(); }

int32_t lowtide_pool_mark(lowtide_pool *pool, lowtide_pool_lane *lanes, int32_t room) {
  return pool->pool.mark(lanes, room);
}

int64_t lowtide_pool_step(lowtide_pool *pool, int32_t lane, int32_t back, int64_t room,
                          int64_t *sizes, int64_t *made, int64_t *freed, int64_t *made_ns,
                          int64_t *freed_ns, int64_t *ticks) {
  return pool->pool.step(lane, back, room, sizes, made, freed, made_ns, freed_ns, ticks);
}

int64_t lowtide_pool_plan(lowtide_pool *pool, int32_t lane, int64_t count, const int64_t *sizes,
                          int32_t phases, const int64_t *offsets) {
  return pool->pool.plan(lane, count, sizes, phases, offsets);
}

void lowtide_pool_forget(lowtide_pool *pool, int32_t lane, int64_t plan) {
  pool->pool.forget(lane, plan);
}

int32_t lowtide_pool_arena(lowtide_pool *pool, int32_t lane, int64_t bytes) {
  return pool->pool.set_arena(lane, bytes);
}

int32_t lowtide_pool_pages(lowtide_pool *pool, int32_t device, void *stream, int64_t bytes) {
  return pool->pool.set_pages({device, stream}, bytes);
}

int32_t lowtide_pool_fill(lowtide_pool *pool, int32_t lane, int64_t bytes, int64_t floor) {
  return pool->pool.fill(lane, bytes, floor);
}

int64_t lowtide_pool_lasting(lowtide_pool *pool, int32_t lane, int64_t *pages, int64_t room) {
  return pool->pool.lasting(lane, pages, room);
}

int64_t lowtide_pool_left(lowtide_pool *pool, int32_t lane, int64_t *numbers, int64_t room) {
  return pool->pool.left(lane, numbers, room);
}

int64_t lowtide_pool_free_pages(lowtide_pool *pool, int32_t device) {
  return pool->pool.free_pages(device);
}

int64_t lowtide_pool_window(lowtide_pool *pool, int32_t lane, const int64_t *pages, int64_t count) {
  return pool->pool.window(lane, pages, count);
}

void *lowtide_pool_home(lowtide_pool *pool, int64_t bytes, int32_t device, void *stream) {
  return pool->pool.home(bytes, {device, stream});
}

void *lowtide_pool_place(lowtide_pool *pool, void *home, int64_t offset, int64_t bytes) {
  return pool->pool.place(home, offset, bytes);
}

void lowtide_pool_dismiss(lowtide_pool *pool, void *home) { pool->pool.dismiss(home); }

void *lowtide_pool_base(lowtide_pool *pool, void *block) { return pool->pool.base_of(block); }

void *lowtide_pool_place_in(lowtide_pool *pool, int32_t lane, int64_t offset, int64_t bytes) {
  return pool->pool.place_in(lane, offset, bytes);
}

int64_t lowtide_pool_index(lowtide_pool *pool, int32_t lane, void *block) {
  return pool->pool.index(lane, block);
}

int64_t lowtide_pool_paged(lowtide_pool *pool, void *block) {
  return pool->pool.paged_bytes(block);
}

int64_t lowtide_pool_age(lowtide_pool *pool, void *block) { return pool->pool.age(block); }

void lowtide_pool_reclaim(lowtide_pool *pool) { pool->pool.reclaim(); }

void lowtide_pool_count(lowtide_pool *pool, int32_t device, lowtide_pool_stats *stats) {
  *stats = pool->pool.count(device);
}

int64_t lowtide_pool_map(lowtide_pool *pool, int32_t device, int64_t *numbers, int64_t room) {
  return pool->pool.map(device, numbers, room);
}
