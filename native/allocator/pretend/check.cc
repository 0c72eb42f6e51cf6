// The wrapper of torch/, checked on main memory: what it hands out, counts, hands on and leaves behind.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "../torch/allocator.h"
#include "../torch/torch.h"
#include "pretend.h"

#define CHECK(condition)                                                       \
  do {                                                                         \
    if (!(condition)) {                                                        \
      std::fprintf(stderr, "%s:%d: %s\n", __func__, __LINE__, #condition);     \
      std::abort();                                                            \
    }                                                                          \
  } while (0)

namespace {

using c10::DataPtr;
using pretend::caching;
namespace native = c10::cuda::CUDACachingAllocator;

constexpr int64_t kMiB = 1 << 20;

native::CUDAAllocator &now() { return *native::get(); }
DataPtr take(int64_t bytes) { return now().allocate(static_cast<size_t>(bytes)); }
int64_t allocated() { return now().getDeviceStats(0).allocated_bytes[0].current; }
int64_t peak() { return now().getDeviceStats(0).allocated_bytes[0].peak; }
lowtide_pool *pool() { return lowtide_torch_pool(); }
bool in_arena(const DataPtr &block) { return pool()->pool.base_of(block.get()) != nullptr; }

// A session with one lane that plans blocks of these sizes one above the other.
void start(const std::vector<int64_t> &sizes, int64_t arena) {
  CHECK(lowtide_torch_install() == nullptr);
  lowtide_pool_mode(pool(), LOWTIDE_POOL_RECORD);
  { const DataPtr block = take(512); }
  lowtide_pool_lane lane;
  lowtide_pool_mark(pool(), &lane, 1);
  CHECK(lowtide_torch_arena(lane.lane, arena));
  std::vector<int64_t> offsets;
  int64_t end = 0;
  for (const int64_t size : sizes) {
    offsets.push_back(end);
    end += (size + 511) / 512 * 512;
  }
  CHECK(lowtide_pool_plan(pool(), lane.lane, static_cast<int64_t>(sizes.size()), sizes.data(), 1,
                          offsets.data()) >= 0);
  lowtide_pool_mode(pool(), LOWTIDE_POOL_REPLAY);
}

void mark() {
  lowtide_pool_lane lane;
  lowtide_pool_mark(pool(), &lane, 1);
}

void leave() {
  lowtide_pool_stop(pool());
  lowtide_torch_withdraw();
  now().resetPeakStats(0);
  CHECK(&now() == &caching());
  CHECK(caching().blocks.empty());
}

void blocks_lie_where_planned_and_are_counted_as_what_they_are() {
  start({kMiB, 1000}, 4 * kMiB);
  CHECK(&now() != &caching());
  const int64_t before = allocated();
  CHECK(before == 0);  // the arena is empty
  CHECK(now().getDeviceStats(0).reserved_bytes[0].current == 4 * kMiB);
  DataPtr first = take(kMiB), second = take(1000), stranger = take(7 * kMiB);
  CHECK(in_arena(first) && in_arena(second) && !in_arena(stranger));
  CHECK(static_cast<char *>(second.get()) == static_cast<char *>(first.get()) + kMiB);
  CHECK(allocated() == 8 * kMiB + 1024);
  CHECK(now().getDeviceStats(0).requested_bytes[0].current == 8 * kMiB + 1000);
  CHECK(now().getDeviceStats(0).allocation[0].current == 3);
  stranger.clear();
  CHECK(allocated() == kMiB + 1024);
  CHECK(peak() == 8 * kMiB + 1024);
  first.clear();
  second.clear();
  CHECK(allocated() == 0);
  leave();
}

// Current figures, peaks and sums over time equal those of a book kept beside, whatever happens.
void statistics_are_exact(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  std::vector<int64_t> sizes;
  for (int i = 0; i < 20; ++i) sizes.push_back(pick(1, 2 * kMiB));
  start(sizes, 64 * kMiB);
  now().resetPeakStats(0);
  std::vector<std::pair<DataPtr, int64_t>> live;
  int64_t bytes = 0, most = 0, made = 0, gone = 0;
  now().resetAccumulatedStats(0);
  for (int round = 0; round < 30; ++round) {
    lowtide_pool_mode(pool(), pick(0, 3) ? LOWTIDE_POOL_REPLAY : LOWTIDE_POOL_PASS);
    for (const int64_t planned : sizes) {
      const int64_t size = pick(0, 9) ? planned : pick(1, 3 * kMiB);
      const int64_t rounded = (size + 511) / 512 * 512;
      live.emplace_back(take(size), rounded);
      bytes += rounded;
      made += rounded;
      most = std::max(most, bytes);
      while (!live.empty() && pick(0, 2) == 0) {
        const size_t i = static_cast<size_t>(pick(0, static_cast<int64_t>(live.size()) - 1));
        bytes -= live[i].second;
        gone += live[i].second;
        live.erase(live.begin() + static_cast<int64_t>(i));
      }
      const auto stat = now().getDeviceStats(0).allocated_bytes[0];
      CHECK(stat.current == bytes);
      CHECK(stat.peak == most);
      CHECK(stat.allocated == made);
      CHECK(stat.freed == gone);
    }
    mark();
    if (pick(0, 4) == 0) {
      now().resetPeakStats(0);
      most = bytes;
    }
  }
  live.clear();
  leave();
}

void the_peak_outlives_the_session_and_the_next_one() {
  start({8 * kMiB}, 8 * kMiB);
  { const DataPtr block = take(8 * kMiB), other = take(2 * kMiB); }
  CHECK(peak() == 10 * kMiB);
  lowtide_pool_stop(pool());
  lowtide_torch_withdraw();
  CHECK(&now() != &caching());  // its peak would be another
  CHECK(peak() == 10 * kMiB);
  start({kMiB}, kMiB);
  CHECK(peak() == 10 * kMiB);
  lowtide_pool_stop(pool());
  lowtide_torch_withdraw();
  { const DataPtr block = take(12 * kMiB); }
  CHECK(peak() == 12 * kMiB);
  start({kMiB}, kMiB);
  CHECK(peak() == 12 * kMiB);
  { const DataPtr block = take(kMiB); }
  CHECK(peak() == 12 * kMiB);
  leave();
}

void it_stays_until_the_last_block_is_gone() {
  start({kMiB}, 2 * kMiB);
  DataPtr block = take(kMiB);
  lowtide_pool_stop(pool());
  lowtide_torch_withdraw();
  now().resetPeakStats(0);
  CHECK(&now() != &caching());
  CHECK(caching().blocks.size() == 1);  // the arena
  now().recordStream(block, pretend::stream(5));
  block.clear();
  CHECK(caching().blocks.size() == 1);  // stream 5 may still read it
  pretend::finish(5);
  now().emptyCache();
  CHECK(caching().blocks.empty());
  leave();
}

void streams_are_recorded_where_the_block_lies() {
  start({kMiB}, 2 * kMiB);
  DataPtr planned = take(kMiB), stranger = take(3 * kMiB);
  now().recordStream(stranger, pretend::stream(5));
  CHECK(caching().recorded.count(stranger.get()) == 1);
  now().recordStream(planned, pretend::stream(5));
  void *const address = planned.get();
  planned.clear();
  mark();
  DataPtr again = take(kMiB);
  CHECK(again.get() != address);
  again.clear();
  pretend::finish(5);
  mark();
  again = take(kMiB);
  CHECK(again.get() == address);
  again.clear();
  stranger.clear();
  leave();
}

void inside_a_capture_everything_is_the_caching_allocators() {
  start({kMiB, kMiB}, 4 * kMiB);
  DataPtr touched = take(kMiB);
  now().recordStream(touched, pretend::stream(5));
  now().beginAllocateToPool(0, {1, 0}, [](cudaStream_t) { return true; });
  const int before = pretend::events;
  touched.clear();
  DataPtr captured = take(kMiB);
  CHECK(captured.get_deleter() == now().raw_deleter());
  CHECK(!in_arena(captured));
  CHECK(pretend::events == before);
  now().endAllocateToPool(0, {1, 0});
  captured.clear();
  pretend::finish(5);
  now().emptyCache();
  CHECK(allocated() == 0);
  leave();
}

void no_memory_is_thrown_as_ever() {
  start({4 * kMiB}, 4 * kMiB);
  caching().limit = 5 * kMiB;
  DataPtr planned = take(4 * kMiB);
  bool thrown = false;
  try {
    take(8 * kMiB);
  } catch (const c10::OutOfMemoryError &error) {  // what the caching allocator threw
    thrown = std::strstr(error.what(), "CUDA out of memory") != nullptr;
  }
  CHECK(thrown);
  planned.clear();
  DataPtr squeezed = take(2 * kMiB);  // the arena, in the way and empty, has gone
  CHECK(!in_arena(squeezed));
  squeezed.clear();
  caching().limit = int64_t{1} << 40;
  leave();
}

void a_storage_is_moved_without_its_owners_noticing() {
  CHECK(lowtide_torch_install() == nullptr);
  DataPtr data = caching().allocate(1000);
  std::memset(data.get(), 7, 1000);
  void *const old = data.get();
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 1000,
                                                       std::move(data), &caching(), true);
  void *home = lowtide_torch_home(2 * kMiB, 0, nullptr);
  CHECK(lowtide_torch_settle(storage.get(), home, 512) == 1);
  lowtide_pool_dismiss(pool(), home);
  CHECK(storage->data() == static_cast<char *>(home) + 512);
  CHECK(caching().blocks.count(old) == 0);
  for (int i = 0; i < 1000; ++i) CHECK(static_cast<const char *>(storage->data())[i] == 7);
  CHECK(now().shareIpcHandle(const_cast<void *>(storage->data())).offset == 512);
  size_t bytes = 0;
  CHECK(now().getBaseAllocation(const_cast<void *>(storage->data()), &bytes) == home);
  CHECK(allocated() == 1024);
  // What is not a plain block of the caching allocator stays where it is.
  static char elsewhere[64];
  auto other = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 64,
      DataPtr(elsewhere, elsewhere, [](void *) {}, c10::Device(c10::DeviceType::CUDA, 0)),
      &caching(), true);
  home = lowtide_torch_home(2 * kMiB, 0, nullptr);
  CHECK(lowtide_torch_settle(other.get(), home, 0) == 0);
  lowtide_pool_dismiss(pool(), home);
  storage.reset();
  leave();
}

void a_storage_without_bytes_gets_some_of_an_arena() {
  start({kMiB}, 4 * kMiB);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0,
      DataPtr(nullptr, c10::Device(c10::DeviceType::CUDA, 0)), &caching(), true);
  CHECK(lowtide_torch_adopt(storage.get(), 0, kMiB, 1000) == 1);
  CHECK(storage->nbytes() == 1000);
  CHECK(lowtide_torch_adopt(storage.get(), 0, 2 * kMiB, 1000) == 0);  // it has some
  auto other = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0,
      DataPtr(nullptr, c10::Device(c10::DeviceType::CUDA, 0)), &caching(), true);
  CHECK(lowtide_torch_adopt(other.get(), 0, kMiB + 512, 1000) == 0);  // they are in use
  CHECK(lowtide_torch_adopt(other.get(), 0, -1, 1000) == 0);
  CHECK(other->nbytes() == 0);
  CHECK(allocated() == 1024);
  std::memset(storage->mutable_data(), 7, 1000);
  storage.reset();
  CHECK(allocated() == 0);
  leave();
}

void a_storage_gets_bytes_as_new_ones_do_whatever_allocator_it_knows() {
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0,
                                                       DataPtr(nullptr, {c10::kCUDA, 0}), &caching(),
                                                       true);
  start({kMiB, kMiB}, 4 * kMiB);
  CHECK(lowtide_torch_refill(storage.get(), kMiB) == 1);
  CHECK(storage->nbytes() == static_cast<size_t>(kMiB) && in_arena(storage->data_ptr()));
  CHECK(lowtide_torch_refill(storage.get(), kMiB) == 0);  // it has some
  std::memset(storage->mutable_data(), 7, kMiB);
  DataPtr data = caching().allocate(kMiB);
  std::memset(data.get(), 8, kMiB);
  auto other = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), kMiB,
                                                     std::move(data), &caching(), true);
  CHECK(lowtide_torch_exchange(storage.get(), other.get()) == 1);
  CHECK(!in_arena(storage->data_ptr()) && in_arena(other->data_ptr()));
  CHECK(static_cast<const char *>(storage->data())[0] == 8);
  CHECK(static_cast<const char *>(other->data())[0] == 7);
  auto smaller = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 64,
                                                       caching().allocate(64), &caching(), true);
  CHECK(lowtide_torch_exchange(storage.get(), smaller.get()) == 0);
  storage.reset();
  other.reset();
  smaller.reset();
  leave();
}

void snapshots_show_what_lies_in_arenas() {
  start({kMiB, 1000}, 4 * kMiB);
  DataPtr first = take(kMiB), second = take(1000);
  first.clear();
  const auto info = now().snapshot({0, 0}, true);
  CHECK(info.segments.size() == 1);
  const auto &segment = info.segments[0];
  CHECK(segment.total_size == static_cast<size_t>(4 * kMiB));
  CHECK(segment.allocated_size == 1024 && segment.requested_size == 1000);
  CHECK(segment.blocks.size() == 3);
  CHECK(!segment.blocks[0].allocated && segment.blocks[0].size == static_cast<size_t>(kMiB));
  CHECK(segment.blocks[1].allocated && segment.blocks[1].size == 1024);
  CHECK(!segment.blocks[2].allocated);
  second.clear();
  leave();
}

void what_it_does_not_know_is_handed_on() {
  CHECK(lowtide_torch_install() == nullptr);
  caching().called.clear();
  now().setMemoryFraction(0.5, 0);
  now().init(1);
  CHECK(now().getMemoryFraction(0) == 0.5);
  CHECK(now().name() == "native");
  CHECK((caching().called == std::vector<std::string>{"fraction", "init"}));
  size_t largest = 0;
  now().cacheInfo(0, &largest);
  CHECK(largest == static_cast<size_t>(kMiB));
  DataPtr block = take(kMiB);  // mode PASS
  CHECK(block.get_deleter() == caching().raw_deleter());
  block.clear();
  void *raw = now().raw_alloc(100);
  now().raw_delete(raw);
  leave();
}

}  // namespace

int main() {
  blocks_lie_where_planned_and_are_counted_as_what_they_are();
  for (uint64_t seed = 1; seed <= 40; ++seed) statistics_are_exact(seed);
  the_peak_outlives_the_session_and_the_next_one();
  it_stays_until_the_last_block_is_gone();
  streams_are_recorded_where_the_block_lies();
  inside_a_capture_everything_is_the_caching_allocators();
  no_memory_is_thrown_as_ever();
  a_storage_is_moved_without_its_owners_noticing();
  a_storage_without_bytes_gets_some_of_an_arena();
  a_storage_gets_bytes_as_new_ones_do_whatever_allocator_it_knows();
  snapshots_show_what_lies_in_arenas();
  what_it_does_not_know_is_handed_on();
  std::puts("checked");
}
