#include "host.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <unordered_map>

#include "../arena.h"

namespace {

struct Event {
  std::pair<int32_t, void *> stream;
  int64_t at;
};

}  // namespace

struct lowtide_host {
  std::mutex mutex;
  int64_t capacity = 0, bytes = 0, events = 0;
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
  const lowtide_pool_backend backend{host, allocate, release, record, passed, wait, drop};
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

void lowtide_host_limit(lowtide_host *host, int64_t capacity) {
  const std::lock_guard<std::mutex> lock(host->mutex);
  host->capacity = capacity;
}
