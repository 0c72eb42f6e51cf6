// Arenas in pages: how they grow, where blocks lie in them, and how they give memory back.
#include <algorithm>
#include <set>

#include "core.h"

namespace lowtide {
namespace {

constexpr int64_t kWindows = 64;            // addresses for windows, times those of the pages
constexpr int64_t kMostWindows = 1 << 14;   // at once; then those that nobody uses go

}  // namespace

bool Pool::set_pages(Stream stream, int64_t bytes) {
  const int64_t page = backend_.page;
  const int64_t most = page ? bytes / page * page : 0;
  if (most <= 0) return false;
  Lock lock(mutex_);
  shrink_retired();
  Lane &lane = *lanes_[static_cast<size_t>(lane_of(stream))];
  if (lane.paged) return true;
  const int64_t span = most * (1 + kWindows);
  void *const base = backend_.reserve(backend_.context, span, stream.device);
  if (!base) return false;
  let_go(lane);
  lane.distrusted = false;
  auto paged = std::make_unique<Paged>(base, most, span, page, stream);
  lane.arena = lane.paged = paged.get();
  arenas_.push_back(std::move(paged));
  const auto gone = drained();
  lock.unlock();
  release(gone);
  return true;
}

int64_t Pool::find_pages(Lane &lane, int64_t size) {
  Paged &paged = *lane.paged;
  if (paged.floor) {
    const int64_t offset = find_pages(paged, size, paged.floor);
    if (offset >= 0) return offset;
  }
  return find_pages(paged, size, 0);
}

// Above `floor`: in one piece, in a window that is there, or in one that is made for it.
int64_t Pool::find_pages(Paged &paged, int64_t size, int64_t floor) {
  int64_t offset = paged.fit(size, floor);
  if (offset >= 0) return offset;
  if (size >= paged.page) {
    offset = paged.fit_window(size, floor);
    if (offset >= 0) return offset;
  }
  const int64_t count = paged.pages_of(size);
  std::vector<int64_t> pages = paged.free_pages(count, floor);
  const int64_t missing = count - static_cast<int64_t>(pages.size());
  if (missing > 0) {
    const auto lacking = paged.lacking(missing);
    int64_t most = 0;
    for (const auto &stretch : lacking) most += stretch.second;
    if (most < missing || !fill(paged, lacking)) return -1;
    offset = paged.fit(size, floor);
    if (offset >= 0) return offset;
    pages = paged.free_pages(count, floor);
    if (static_cast<int64_t>(pages.size()) < count) return -1;
  }
  return show(paged, pages, false);
}

// False: there is no memory for all of them; what there was for some stays.
bool Pool::fill(Paged &paged, const std::vector<Paged::Stretch> &stretches) {
  const int32_t device = paged.stream.device;
  for (const auto &[first, count] : stretches) {
    const int64_t done = backend_.fill(backend_.context, paged.base, first, count, device);
    if (done > 0) paged.fill({first, done});
    stats(device).page_bytes += done * paged.page;
    ++stats(device).page_calls;
    if (done < count) return false;
  }
  return true;
}

int64_t Pool::show(Paged &paged, const std::vector<int64_t> &pages, bool kept) {
  if (paged.windows() >= kMostWindows) hide(paged, false);
  int64_t offset = paged.add_window(pages, kept);
  for (const bool all : {false, true}) {
    if (offset >= 0 || (all && kept)) break;
    hide(paged, all);
    offset = paged.add_window(pages, kept);
  }
  if (offset < 0) return -1;
  const auto count = static_cast<int64_t>(pages.size());
  ++stats(paged.stream.device).page_calls;
  if (backend_.show(backend_.context, paged.base, offset, pages.data(), count,
                    paged.stream.device))
    return offset;
  paged.forget_window(offset);
  return -1;
}

void Pool::hide(Paged &paged, bool all) {
  const auto gone = paged.drop_windows(all);
  if (gone.empty()) return;
  backend_.settle(backend_.context, paged.stream.device);
  for (const auto &[offset, count] : gone)
    backend_.hide(backend_.context, paged.base, offset, count, paged.stream.device);
}

// Gives the backend back what it needs, of pages that are free.  False: there is none.
bool Pool::give_pages(int32_t device, int64_t bytes) {
  bool any = false;
  bytes += backend_.spare;
  for (const auto &arena : arenas_) {
    auto *const paged = dynamic_cast<Paged *>(arena.get());
    if (!paged || paged->stream.device != device || bytes <= 0) continue;
    const int64_t given = drain(*paged, paged->pages_of(bytes));
    bytes -= given * paged->page;
    any |= given > 0;
  }
  return any;
}

// So many free pages lose their memory, or as many as there are.
int64_t Pool::drain(Paged &paged, int64_t count) {
  const int32_t device = paged.stream.device;
  std::vector<int64_t> pages = paged.free_pages(count, 0);
  if (pages.empty()) return 0;
  hide(paged, true);  // one that shows a page that is gone would show what is no more
  backend_.settle(backend_.context, device);
  std::sort(pages.begin(), pages.end());
  for (size_t i = 0, end = 0; i < pages.size(); i = end) {
    while (end < pages.size() && pages[end] == pages[i] + static_cast<int64_t>(end - i)) ++end;
    backend_.drain(backend_.context, paged.base, pages[i], static_cast<int64_t>(end - i), device);
  }
  for (const int64_t page : pages) paged.drain(page);
  stats(device).page_bytes -= static_cast<int64_t>(pages.size()) * paged.page;
  return static_cast<int64_t>(pages.size());
}

// An arena in pages that is to go keeps only the pages that are in use.
void Pool::shrink_retired() {
  if (paused_) return;
  for (const auto &arena : arenas_)
    if (auto *const paged = dynamic_cast<Paged *>(arena.get()); paged && paged->retired)
      drain(*paged, paged->filled());
}

Paged *Pool::paged_of(int32_t number) {
  const bool known = number >= 0 && number < static_cast<int32_t>(lanes_.size());
  return known ? lanes_[static_cast<size_t>(number)]->paged : nullptr;
}

bool Pool::fill(int32_t number, int64_t bytes, int64_t floor) {
  Lock lock(mutex_);
  Paged *const paged = paged_of(number);
  if (!paged || bytes > paged->bytes) return false;
  const int64_t end = paged->pages_of(bytes);
  paged->floor = paged->pages_of(std::max(bytes, floor)) * paged->page;
  auto lacking = paged->lacking(end);
  for (auto &[first, count] : lacking) count = std::clamp<int64_t>(end - first, 0, count);
  lacking.erase(std::remove_if(lacking.begin(), lacking.end(),
                               [](const auto &stretch) { return !stretch.second; }),
                lacking.end());
  return fill(*paged, lacking);
}

int64_t Pool::lasting(int32_t number, int64_t *pages, int64_t room) {
  Lock lock(mutex_);
  const Paged *const paged = paged_of(number);
  if (!paged) return 0;
  const int64_t step = lanes_[static_cast<size_t>(number)]->steps.number() - 1;
  std::set<int64_t> found;
  paged->each([&](int64_t, const Block &block, const std::vector<int64_t> &pages) {
    if (block.origin.lane < 0 || block.origin.step < step) found.insert(pages.begin(), pages.end());
  });
  for (const int64_t one : found)
    if (room-- > 0) *pages++ = one;
  return static_cast<int64_t>(found.size());
}

int64_t Pool::left(int32_t number, int64_t *numbers, int64_t room) {
  Lock lock(mutex_);
  const Paged *const paged = paged_of(number);
  if (!paged) return 0;
  const int64_t last = lanes_[static_cast<size_t>(number)]->steps.number() - 1;
  int64_t count = 0;
  const auto add = [&](int64_t one) {
    if (count < room) numbers[count] = one;
    ++count;
  };
  paged->each([&](int64_t offset, const Block &block, const std::vector<int64_t> &pages) {
    if (block.origin.lane != number || block.origin.step != last || block.pending) return;
    add(block.origin.index);
    add(offset);
    add(static_cast<int64_t>(pages.size()));
    for (const int64_t one : pages) add(one);
  });
  return count;
}

int64_t Pool::free_pages(int32_t device) {
  Lock lock(mutex_);
  int64_t count = 0;
  for (const auto &lane : lanes_)
    if (lane->paged && lane->stream.device == device)
      count += static_cast<int64_t>(lane->paged->free_pages(INT64_MAX, 0).size()) * lane->paged->page;
  return count;
}

int64_t Pool::paged_bytes(const void *block) {
  Lock lock(mutex_);
  Arena *const arena = arena_at(block);
  if (!dynamic_cast<Paged *>(arena)) return 0;
  const Block *const found = arena->find(static_cast<const char *>(block) - arena->base);
  return found ? found->bytes : 0;
}

int64_t Pool::window(int32_t number, const int64_t *pages, int64_t count) {
  Lock lock(mutex_);
  Paged *const paged = paged_of(number);
  if (!paged || count < 1) return -1;
  const std::vector<int64_t> wanted(pages, pages + count);
  std::vector<int64_t> sorted = wanted;
  std::sort(sorted.begin(), sorted.end());
  if (sorted.front() < 0 || sorted.back() >= paged->bytes / paged->page ||
      std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
    return -1;
  for (const auto &[first, some] : paged->lacking(sorted.back() + 1)) {
    const auto at = std::lower_bound(sorted.begin(), sorted.end(), first);
    if (at != sorted.end() && *at < first + some) return -1;  // it has no memory
  }
  return show(*paged, wanted, true);
}

}  // namespace lowtide
