#include "host.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "../arena.h"

namespace {

struct Event {
  std::pair<int32_t, void *> stream;
  int64_t at;
};

}  // namespace

struct Range {  // of addresses, with a file whose pages are shown there
  int64_t bytes;
  int file;
  int64_t filled;
};

struct lowtide_host {
  std::mutex mutex;
  int64_t capacity = 0, bytes = 0, events = 0, shown = 0;
  std::map<void *, Range> ranges;
  std::map<std::pair<void *, int64_t>, std::vector<int64_t>> windows;  // the pages of each
  std::unordered_map<void *, int64_t> blocks;
  std::map<std::pair<int32_t, void *>, std::pair<int64_t, int64_t>> streams;  // given, done
};

namespace {

lowtide_host &host_of(void *context) { return *static_cast<lowtide_host *>(context); }

void *allocate(void *context, int64_t bytes, int32_t, void *) {
  lowtide_host &host = host_of(context);
  const std::lock_guard<std::mutex> lock(host.mutex);
  const int64_t size = lowtide::rounded(bytes);
  if (size > host.capacity - host.bytes) return nullptr;
  void *block = std::aligned_alloc(static_cast<size_t>(lowtide::kGrain), static_cast<size_t>(size));
  if (!block) return nullptr;
  host.bytes += size;
  host.blocks[block] = size;
  return block;
}

void release(void *context, void *block) {
  lowtide_host &host = host_of(context);
  const std::lock_guard<std::mutex> lock(host.mutex);
  const auto found = host.blocks.find(block);
  if (found == host.blocks.end()) std::abort();
  host.bytes -= found->second;
  host.blocks.erase(found);
  std::free(block);
}

void *record(void *context, int32_t device, void *stream) {
  lowtide_host &host = host_of(context);
  const std::lock_guard<std::mutex> lock(host.mutex);
  ++host.events;
  return new Event{{device, stream}, ++host.streams[{device, stream}].first};
}

int32_t passed(void *context, void *event) {
  lowtide_host &host = host_of(context);
  const std::lock_guard<std::mutex> lock(host.mutex);
  const Event &asked = *static_cast<Event *>(event);
  return host.streams[asked.stream].second >= asked.at;
}

// The stream's work ends while one waits for it.
void wait(void *context, void *event) {
  lowtide_host &host = host_of(context);
  const std::lock_guard<std::mutex> lock(host.mutex);
  const Event &asked = *static_cast<Event *>(event);
  int64_t &done = host.streams[asked.stream].second;
  done = std::max(done, asked.at);
}

void drop(void *context, void *event) {
  lowtide_host &host = host_of(context);
  const std::lock_guard<std::mutex> lock(host.mutex);
  --host.events;
  delete static_cast<Event *>(event);
}

constexpr int64_t kPage = LOWTIDE_HOST_PAGE;

void *reserve(void *context, int64_t bytes, int32_t) {
  lowtide_host &host = host_of(context);
  const std::lock_guard<std::mutex> lock(host.mutex);
  void *const base = mmap(nullptr, static_cast<size_t>(bytes), PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  const int file = memfd_create("lowtide", 0);
  if (file < 0 || ftruncate(file, bytes)) std::abort();
  host.ranges[base] = {bytes, file, 0};
  return base;
}

void map_at(void *base, int64_t offset, int64_t bytes, int file, int64_t from) {
  void *const at = static_cast<char *>(base) + offset;
  const int flags = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
  if (mmap(at, static_cast<size_t>(bytes), file < 0 ? PROT_NONE : PROT_READ | PROT_WRITE,
           flags | MAP_FIXED, file, from) != at)
    std::abort();
}

void give_up(void *context, void *base, int32_t) {
  lowtide_host &host = host_of(context);
  const std::lock_guard<std::mutex> lock(host.mutex);
  const auto found = host.ranges.find(base);
  if (found == host.ranges.end()) std::abort();
  host.bytes -= found->second.filled;
  munmap(base, static_cast<size_t>(found->second.bytes));
  close(found->second.file);
  host.ranges.erase(found);
  for (auto one = host.windows.begin(); one != host.windows.end();) {
    if (one->first.first != base) {
      ++one;
      continue;
    }
    host.shown -= static_cast<int64_t>(one->second.size());
    one = host.windows.erase(one);
  }
}

int64_t fill(void *context, void *base, int64_t first, int64_t count, int32_t) {
  lowtide_host &host = host_of(context);
  const std::lock_guard<std::mutex> lock(host.mutex);
  Range &range = host.ranges.at(base);
  count = std::min(count, (host.capacity - host.bytes) / kPage);
  if (count <= 0) return 0;
  map_at(base, first * kPage, count * kPage, range.file, first * kPage);
  host.bytes += count * kPage;
  range.filled += count * kPage;
  return count;
}

void drain(void *context, void *base, int64_t first, int64_t count, int32_t) {
  lowtide_host &host = host_of(context);
  const std::lock_guard<std::mutex> lock(host.mutex);
  Range &range = host.ranges.at(base);
  for (const auto &[at, pages] : host.windows)
    for (const int64_t page : pages)
      if (at.first == base && page >= first && page < first + count) std::abort();  // still shown
  map_at(base, first * kPage, count * kPage, -1, 0);
  if (fallocate(range.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, first * kPage,
                count * kPage))
    std::abort();
  host.bytes -= count * kPage;
  range.filled -= count * kPage;
}

int32_t show(void *context, void *base, int64_t at, const int64_t *pages, int64_t count, int32_t) {
  lowtide_host &host = host_of(context);
  const std::lock_guard<std::mutex> lock(host.mutex);
  const Range &range = host.ranges.at(base);
  for (int64_t i = 0; i < count; ++i)
    map_at(base, at + i * kPage, kPage, range.file, pages[i] * kPage);
  host.shown += count;
  host.windows[{base, at}].assign(pages, pages + count);
  return 1;
}

void hide(void *context, void *base, int64_t at, int64_t count, int32_t) {
  lowtide_host &host = host_of(context);
  const std::lock_guard<std::mutex> lock(host.mutex);
  map_at(base, at, count * kPage, -1, 0);
  host.shown -= count;
  host.windows.erase({base, at});
}

void settle(void *, int32_t) {}

int32_t flush(void *, int32_t) { return 0; }

}  // namespace

lowtide_host *lowtide_host_open(int64_t capacity) {
  auto *host = new lowtide_host;
  host->capacity = capacity;
  return host;
}

void lowtide_host_close(lowtide_host *host) {
  for (const auto &[block, bytes] : host->blocks) std::free(block);
  delete host;
}

lowtide_pool *lowtide_host_pool(lowtide_host *host) {
  const lowtide_pool_backend backend{host,  allocate, release, record, passed, wait, drop, kPage, 0,
                                     reserve, give_up, fill, drain, show, hide, settle, flush};
  return lowtide_pool_open(&backend);
}

void lowtide_host_finish(lowtide_host *host, int32_t device, void *stream) {
  const std::lock_guard<std::mutex> lock(host->mutex);
  auto &[given, done] = host->streams[{device, stream}];
  done = given;
}

int64_t lowtide_host_bytes(lowtide_host *host) {
  const std::lock_guard<std::mutex> lock(host->mutex);
  return host->bytes;
}

int64_t lowtide_host_events(lowtide_host *host) {
  const std::lock_guard<std::mutex> lock(host->mutex);
  return host->events;
}

int64_t lowtide_host_shown(lowtide_host *host) {
  const std::lock_guard<std::mutex> lock(host->mutex);
  return host->shown;
}

void lowtide_host_limit(lowtide_host *host, int64_t capacity) {
  const std::lock_guard<std::mutex> lock(host->mutex);
  host->capacity = capacity;
}
