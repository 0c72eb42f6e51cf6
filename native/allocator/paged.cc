#include "paged.h"

#include <algorithm>
#include <cassert>

namespace lowtide {
namespace {

constexpr int kTries = 32;   // windows looked at for one that is free
constexpr int64_t kFew = 16;  // pages; and a block may waste one part in so many

}  // namespace

Paged::Paged(void *base, int64_t bytes, int64_t span, int64_t page, Stream stream)
    : Arena(base, bytes, stream), span(span), page(page) {
  addresses_[bytes] = (span - bytes) / page;
  index();
  Block nothing;
  nothing.kind = Block::Kind::kAbsent;
  nothing.bytes = bytes;
  occupy(0, std::move(nothing));
}

template <typename Call>
bool Paged::pieces(const Window &window, int64_t page, int64_t size, Call on) {
  for (const auto &[first, count] : window.stretches) {
    const int64_t bytes = std::min(size, count * page);
    if (bytes <= 0) break;
    if (!on(first * page, bytes)) return false;
    size -= bytes;
  }
  return size <= 0;
}

bool Paged::vacant(int64_t offset, int64_t size) const {
  if (offset < bytes) return Arena::vacant(offset, size);
  const auto found = windows_.find(offset);
  return found != windows_.end() && !found->second.used && found->second.pages == pages_of(size) &&
         pieces(found->second, page, size,
                [&](int64_t at, int64_t length) { return Arena::vacant(at, length); });
}

void Paged::put(int64_t offset, Block block) {
  if (offset < bytes) return Arena::put(offset, std::move(block));
  Window &window = windows_.at(offset);
  assert(!window.used);
  pieces(window, page, block.bytes, [&](int64_t at, int64_t length) {
    Block part;
    part.kind = Block::Kind::kPart;
    part.bytes = length;
    part.requested = length;
    occupy(at, std::move(part));
    return true;
  });
  idle_.erase(window.idle);
  window.used = true;
  window.block = std::move(block);
  ++count_;
}

Block *Paged::find(int64_t offset) {
  if (offset < bytes) {
    Block *const block = Arena::find(offset);
    return block && block->kind == Block::Kind::kWhole ? block : nullptr;
  }
  const auto found = windows_.find(offset);
  return found == windows_.end() || !found->second.used ? nullptr : &found->second.block;
}

Block Paged::take(int64_t offset) {
  if (offset < bytes) return Arena::take(offset);
  Window &window = windows_.at(offset);
  assert(window.used);
  pieces(window, page, window.block.bytes, [&](int64_t at, int64_t) {
    vacate(at);
    return true;
  });
  window.used = false;
  window.idle = idle_.emplace(window.pages, offset);
  --count_;
  return std::move(window.block);
}

bool Paged::is_odd(int64_t size) const {
  return size < page || (size < kFew * page && pages_of(size) * page - size > size / kFew);
}

int64_t Paged::fit(int64_t size, int64_t above) const {
  const bool odd = is_odd(size);
  for (auto gap = gaps().lower_bound({size, 0}); gap != gaps().end(); ++gap) {
    const int64_t low = std::max(gap->second, above);
    const int64_t start = odd ? low : pages_of(low) * page;
    if (start + size <= gap->second + gap->first) return start;
  }
  return -1;
}

int64_t Paged::fit_window(int64_t size, int64_t above) const {
  const auto [first, last] = idle_.equal_range(pages_of(size));
  int tries = 0;
  for (auto one = last; one != first && tries < kTries; ++tries) {
    --one;  // the youngest first
    const auto &stretches = windows_.at(one->second).stretches;
    if (std::all_of(stretches.begin(), stretches.end(),
                    [&](const Stretch &stretch) { return stretch.first * page >= above; }) &&
        vacant(one->second, size))
      return one->second;
  }
  return -1;
}

std::vector<int64_t> Paged::free_pages(int64_t count, int64_t above) const {
  std::vector<int64_t> found;
  for (auto gap = gaps().lower_bound({page, 0}); gap != gaps().end(); ++gap) {
    const int64_t end = (gap->second + gap->first) / page;
    for (int64_t one = pages_of(std::max(gap->second, above)); one < end; ++one) {
      if (static_cast<int64_t>(found.size()) >= count) return found;
      found.push_back(one);
    }
  }
  return found;
}

int64_t Paged::add_window(const std::vector<int64_t> &pages, bool kept) {
  Window window;
  window.pages = static_cast<int64_t>(pages.size());
  window.kept = kept;
  window.fresh = kept;
  for (const int64_t one : pages) {
    auto &stretches = window.stretches;
    if (!stretches.empty() && stretches.back().first + stretches.back().second == one)
      ++stretches.back().second;
    else
      stretches.push_back({one, 1});
  }
  const int64_t offset = take_addresses(window.pages);
  if (offset < 0) return -1;
  window.idle = idle_.emplace(window.pages, offset);
  windows_.emplace(offset, std::move(window));
  return offset;
}

int64_t Paged::take_addresses(int64_t pages) {
  const auto found = std::find_if(addresses_.begin(), addresses_.end(),
                                  [&](const auto &range) { return range.second >= pages; });
  if (found == addresses_.end()) return -1;
  const auto [offset, count] = *found;
  addresses_.erase(found);
  if (count > pages) addresses_[offset + pages * page] = count - pages;
  return offset;
}

void Paged::give_addresses(int64_t offset, int64_t pages) {
  const auto next = addresses_.lower_bound(offset);
  if (next != addresses_.end() && next->first == offset + pages * page) {
    pages += next->second;
    addresses_.erase(next);
  }
  const auto after = addresses_.lower_bound(offset);
  if (after != addresses_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second * page == offset) {
      before->second += pages;
      return;
    }
  }
  addresses_[offset] = pages;
}

void Paged::keep(int64_t offset) {
  const auto found = windows_.find(offset);
  if (found == windows_.end()) return;
  if (found->second.fresh)
    found->second.fresh = false;
  else
    ++found->second.kept;
}

void Paged::let_go(int64_t offset) {
  const auto found = windows_.find(offset);
  if (found != windows_.end() && found->second.kept) --found->second.kept;
}

void Paged::forget_window(int64_t offset) {
  const auto found = windows_.find(offset);
  if (found == windows_.end()) return;
  idle_.erase(found->second.idle);
  give_addresses(offset, found->second.pages);
  windows_.erase(found);
}

std::vector<Paged::Stretch> Paged::drop_windows(bool all) {
  std::vector<Stretch> gone;
  for (const auto &[offset, window] : windows_)
    if (!window.used && (all || !window.kept)) gone.push_back({offset, window.pages});
  for (const auto &[offset, pages] : gone) forget_window(offset);
  return gone;
}

void Paged::each(
    const std::function<void(int64_t, const Block &, const std::vector<int64_t> &)> &on) const {
  std::vector<int64_t> pages;
  const auto add = [&](int64_t offset, int64_t size) {
    for (int64_t one = offset / page; one * page < offset + size; ++one) pages.push_back(one);
    return true;
  };
  for (const auto &[offset, block] : blocks()) {
    if (block.kind != Block::Kind::kWhole) continue;
    pages.clear();
    add(offset, block.bytes);
    on(offset, block, pages);
  }
  for (const auto &[offset, window] : windows_) {
    if (!window.used) continue;
    pages.clear();
    pieces(window, page, window.block.bytes, add);
    on(offset, window.block, pages);
  }
}

std::vector<Paged::Stretch> Paged::lacking(int64_t count) const {
  std::vector<Stretch> found;
  for (const auto &[offset, block] : blocks()) {
    if (count <= 0) break;
    if (block.kind != Block::Kind::kAbsent) continue;
    const int64_t some = std::min(count, block.bytes / page);
    found.push_back({offset / page, some});
    count -= some;
  }
  return found;
}

void Paged::fill(Stretch pages) {
  const auto [first, count] = pages;
  Block nothing = vacate(first * page);  // a stretch of pages begins where they were lacking
  const int64_t left = nothing.bytes - count * page;
  assert(nothing.kind == Block::Kind::kAbsent && left >= 0);
  filled_ += count;
  if (!left) return;
  nothing.bytes = left;
  occupy((first + count) * page, std::move(nothing));
}

void Paged::drain(int64_t one) {
  Block nothing;
  nothing.kind = Block::Kind::kAbsent;
  nothing.bytes = page;
  occupy(one * page, std::move(nothing));
  --filled_;
}

}  // namespace lowtide
