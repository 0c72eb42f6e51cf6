// Replays steps, recorded and random, with random interleavings, and checks that no two blocks in
// use share a byte.  Meant to run under sanitizers: fuzz SEED SECONDS [STEP...].
//
// A STEP file is what benchmarks/pool.py --steps writes of a real training step: its length in ticks,
// then a line for each allocation, size made freed (-1: it outlives all).  Sizes are scaled down.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "../host/host.h"
#include "../pool.h"

namespace {

using Random = std::mt19937_64;

constexpr int64_t kStride = 4096;  // the same bytes may be shown at several addresses

int64_t pick(Random &random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

[[noreturn]] void fail(const char *what) {
  std::fprintf(stderr, "fuzz: %s\n", what);
  std::abort();
}

struct Step {
  int64_t ticks = 0;
  std::vector<int64_t> size, made, freed;
  std::vector<int64_t> offset;  // by first fit, good enough to be followed
  int64_t height = 0;
};

Step read_step(const char *path) {
  std::ifstream file(path);
  Step step;
  if (!(file >> step.ticks)) fail("a step file cannot be read");
  for (int64_t size, made, freed; file >> size >> made >> freed;) {
    step.size.push_back(size / 1024 + 1);
    step.made.push_back(made);
    step.freed.push_back(freed);
  }
  return step;
}

void lay_out(Step &step);

Step random_step(Random &random) {
  Step step;
  std::vector<size_t> open;
  const int64_t count = pick(random, 3, 60);
  while (static_cast<int64_t>(step.size.size()) < count || !open.empty()) {
    const bool more = static_cast<int64_t>(step.size.size()) < count;
    if (more && (open.empty() || pick(random, 0, 99) < 55)) {
      open.push_back(step.size.size());
      step.size.push_back(pick(random, 1, pick(random, 0, 9) ? 64 << 10 : 3 << 20));
      step.made.push_back(step.ticks++);
      step.freed.push_back(-1);
    } else {
      const size_t i = static_cast<size_t>(pick(random, 0, static_cast<int64_t>(open.size()) - 1));
      if (pick(random, 0, 9)) step.freed[open[i]] = step.ticks++;
      open.erase(open.begin() + static_cast<int64_t>(i));
    }
  }
  lay_out(step);
  return step;
}

void lay_out(Step &step) {
  const size_t n = step.size.size();
  const auto rounded = [&](size_t i) { return (step.size[i] + 511) / 512 * 512; };
  step.offset.assign(n, -1);
  for (size_t i = 0; i < n; ++i) {
    if (step.freed[i] < 0) continue;
    int64_t at = 0;
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t j = 0; j < i; ++j)
        if (step.offset[j] >= 0 && step.freed[j] > step.made[i] &&
            at < step.offset[j] + rounded(j) && step.offset[j] < at + rounded(i)) {
          at = step.offset[j] + rounded(j);
          moved = true;
        }
    }
    step.offset[i] = at;
    step.height = std::max(step.height, at + rounded(i));
  }
}

// What is in use, by address; shared by all threads.
class Checker {
 public:
  void add(char *block, int64_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto next = used_.lower_bound(block);
    if (next != used_.end() && next->first < block + size) fail("two blocks share bytes");
    if (next != used_.begin() && std::prev(next)->first + std::prev(next)->second > block)
      fail("two blocks share bytes");
    used_[block] = size;
  }
  // Freed; but if another stream touched it, its bytes are in use until that stream is done.
  void remove(char *block, void *touched_by) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (touched_by)
      until_[touched_by].push_back(block);
    else
      used_.erase(block);
  }
  void finish(lowtide_host *host, void *stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (char *block : until_[stream]) used_.erase(block);
    until_[stream].clear();
    lowtide_host_finish(host, 0, stream);
  }

 private:
  std::mutex mutex_;
  std::map<char *, int64_t> used_;
  std::map<void *, std::vector<char *>> until_;
};

struct Taken {
  char *block;
  int64_t size;
  char mark;
  bool touched;
};

class Worker {
 public:
  Worker(lowtide_host *host, lowtide_pool *pool, Checker &checker, uint64_t seed, intptr_t stream,
         bool touches)
      : host_(host),
        pool_(pool),
        checker_(checker),
        random_(seed),
        stream_(stream),
        touches_(touches) {}
  ~Worker() {
    while (!blocks_.empty()) give(blocks_.size() - 1);
  }

  // The step's allocations and frees in order, but for what chance makes of it.
  void run(const Step &step) {
    std::vector<std::pair<int64_t, std::pair<bool, size_t>>> events;
    for (size_t i = 0; i < step.size.size(); ++i) {
      events.push_back({step.made[i], {true, i}});
      if (step.freed[i] >= 0) events.push_back({step.freed[i], {false, i}});
    }
    std::sort(events.begin(), events.end());
    if (pick(random_, 0, 2) == 0)
      for (int64_t k = pick(random_, 1, 8); k > 0; --k) {
        const size_t i = static_cast<size_t>(pick(random_, 0, static_cast<int64_t>(events.size()) - 1));
        if (i + 1 < events.size()) std::swap(events[i], events[i + 1]);
      }
    std::vector<char *> where(step.size.size(), nullptr);
    for (const auto &[tick, event] : events) {
      const auto [made, i] = event;
      if (made) {
        if (pick(random_, 0, 199) == 0) continue;  // left out
        if (pick(random_, 0, 199) == 0) take(pick(random_, 1, 2 << 20));  // a stranger
        where[i] = take(step.size[i]);
      } else if (where[i]) {
        const auto found = std::find_if(blocks_.begin(), blocks_.end(),
                                        [&](const Taken &t) { return t.block == where[i]; });
        if (found != blocks_.end()) give(static_cast<size_t>(found - blocks_.begin()));
      }
      if (touches_ && !blocks_.empty() && pick(random_, 0, 49) == 0) touch();
      if (pick(random_, 0, 29) == 0) checker_.finish(host_, other());
      if (pick(random_, 0, 499) == 0) lowtide_pool_reclaim(pool_);
    }
    for (size_t i = blocks_.size(); i-- > 0;)  // what the step leaves dies sooner or later
      if (pick(random_, 0, 3) == 0) give(i);
  }

 private:
  void *other() const { return reinterpret_cast<void *>(stream_ + 100); }

  char *take(int64_t size) {
    auto *block = static_cast<char *>(
        lowtide_pool_allocate(pool_, size, 0, reinterpret_cast<void *>(stream_)));
    if (!block) return nullptr;
    checker_.add(block, size);
    const char mark = static_cast<char>(pick(random_, 1, 127));
    for (int64_t at = 0; at < size; at += kStride) block[at] = mark;
    block[size - 1] = mark;
    blocks_.push_back({block, size, mark, false});
    return block;
  }

  void touch() {
    Taken &taken =
        blocks_[static_cast<size_t>(pick(random_, 0, static_cast<int64_t>(blocks_.size()) - 1))];
    taken.touched |= lowtide_pool_touch(pool_, taken.block, 0, other()) != 0;
  }

  void give(size_t i) {
    const Taken taken = blocks_[i];
    blocks_.erase(blocks_.begin() + static_cast<int64_t>(i));
    for (int64_t at = 0; at < taken.size; at += kStride)
      if (taken.block[at] != taken.mark) fail("a block was written over");
    if (taken.block[taken.size - 1] != taken.mark) fail("a block was written over");
    checker_.remove(taken.block, taken.touched ? other() : nullptr);
    if (!lowtide_pool_free(pool_, taken.block)) fail("a block is unknown when it is freed");
  }

  lowtide_host *host_;
  lowtide_pool *pool_;
  Checker &checker_;
  Random random_;
  intptr_t stream_;
  bool touches_;
  std::vector<Taken> blocks_;
};

void run_case(Random &random, const std::vector<Step> &recorded) {
  // Where memory is short the pool waits for other streams, and the checker would not know.
  const bool ample = pick(random, 0, 3) != 0;
  lowtide_host *host = lowtide_host_open(ample ? int64_t{1} << 34 : int64_t{24} << 20);
  lowtide_pool *pool = lowtide_host_pool(host);
  std::vector<Step> steps;
  for (int64_t i = pick(random, 1, 3); i > 0; --i)
    steps.push_back(recorded.empty() || pick(random, 0, 1)
                        ? random_step(random)
                        : recorded[static_cast<size_t>(
                              pick(random, 0, static_cast<int64_t>(recorded.size()) - 1))]);
  Checker checker;
  {
    std::vector<std::unique_ptr<Worker>> workers;
    const int64_t threads = pick(random, 1, 3);
    for (int64_t i = 0; i < threads; ++i)  // two may share a stream
      workers.push_back(std::make_unique<Worker>(host, pool, checker, random(), i / 2 + 1, ample));
    lowtide_pool_mode(pool, LOWTIDE_POOL_RECORD);
    const bool paged = pick(random, 0, 1) != 0;
    if (paged)
      for (intptr_t stream = 1; stream <= 2; ++stream)
        if (pick(random, 0, 3))
          lowtide_pool_pages(pool, 0, reinterpret_cast<void *>(stream),
                             (ample ? 1 << 15 : pick(random, 1, 256)) * LOWTIDE_HOST_PAGE);
    for (int64_t round = 0; round < 8; ++round) {
      std::vector<std::thread> running;
      for (auto &worker : workers) {
        const Step &step = steps[static_cast<size_t>(
            pick(random, 0, static_cast<int64_t>(steps.size()) - 1))];
        running.emplace_back([&worker, &step] { worker->run(step); });
      }
      if (pick(random, 0, 3) == 0) {
        lowtide_pool_pause(pool, 1);
        std::this_thread::yield();
        lowtide_pool_pause(pool, 0);
      }
      if (round > 3 && pick(random, 0, 3) == 0)  // while they run
        lowtide_pool_arena(pool, 0, pick(random, 0, 1) * pick(random, 1, 4096) * 4096);
      if (round > 3 && pick(random, 0, 5) == 0) lowtide_pool_forget(pool, 0, pick(random, 0, 3));
      for (std::thread &thread : running) thread.join();
      lowtide_pool_lane lanes[8];
      const int32_t count = std::min(8, lowtide_pool_mark(pool, lanes, 8));
      if (round == 2) lowtide_pool_mode(pool, LOWTIDE_POOL_REPLAY);
      if (round >= 2 && round <= 5)
        for (int32_t lane = 0; lane < count; ++lane) {
          const Step &step = steps[static_cast<size_t>(round) % steps.size()];
          const int64_t height = step.height;
          std::vector<int64_t> offset = step.offset;
          if (pick(random, 0, 4) == 0)  // nonsense
            for (int64_t &at : offset) at = pick(random, 0, 4000) * 512;
          for (int64_t &at : offset)
            if (paged && pick(random, 0, 3) == 0) {
              std::vector<int64_t> pages;
              for (int64_t page = pick(random, 0, 40); pages.size() < 8; page += pick(random, 1, 5))
                pages.push_back(page);
              at = lowtide_pool_window(pool, lane, pages.data(), pick(random, 1, 8));
            }
          if (paged && pick(random, 0, 1)) lowtide_pool_fill(pool, lane, height, height);
          const int64_t count = static_cast<int64_t>(offset.size());
          const int32_t phases = static_cast<int32_t>(pick(random, 1, 2));
          if (phases == 2)
            for (int64_t i = 0; i < count; ++i)
              offset.push_back(offset[static_cast<size_t>(i)]);
          lowtide_pool_plan(pool, lane, count, step.size.data(), phases, offset.data());
          if (lanes[lane].arena_bytes < height || pick(random, 0, 3) == 0)
            lowtide_pool_arena(pool, lane, (height + 4095) / 4096 * 4096);
        }
    }
    lowtide_pool_stop(pool);
  }
  for (intptr_t stream = 0; stream < 4; ++stream)
    checker.finish(host, reinterpret_cast<void *>(stream + 100));
  lowtide_pool_reclaim(pool);
  if (lowtide_host_bytes(host) || lowtide_host_events(host)) fail("something was not given back");
  lowtide_pool_close(pool);
  lowtide_host_close(host);
}

}  // namespace

int main(int argc, char **argv) {
  const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  const double seconds = argc > 2 ? std::strtod(argv[2], nullptr) : 5;
  std::vector<Step> recorded;
  for (int i = 3; i < argc; ++i) {
    recorded.push_back(read_step(argv[i]));
    lay_out(recorded.back());
  }
  Random random(seed);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  int64_t cases = 0;
  for (; std::chrono::steady_clock::now() < end; ++cases) run_case(random, recorded);
  std::printf("fuzz: %lld cases\n", static_cast<long long>(cases));
}
