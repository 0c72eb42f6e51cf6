#include "arena.h"

#include <algorithm>
#include <cassert>

namespace lowtide {

bool Arena::vacant(int64_t offset, int64_t size) const {
  if (offset < 0 || size > bytes || offset > bytes - size) return false;
  const auto next = blocks_.lower_bound(offset);
  if (next != blocks_.end() && next->first < offset + size) return false;
  if (next == blocks_.begin()) return true;
  const auto before = std::prev(next);
  return before->first + before->second.bytes <= offset;
}

std::pair<int64_t, int64_t> Arena::gap_around(
    std::map<int64_t, Block>::const_iterator next) const {
  const int64_t end = next == blocks_.end() ? bytes : next->first;
  if (next == blocks_.begin()) return {0, end};
  const auto before = std::prev(next);
  return {before->first + before->second.bytes, end};
}

void Arena::index() {
  indexed_ = true;
  int64_t end = 0;
  for (const auto &[offset, block] : blocks_) {
    if (offset > end) gaps_.insert({offset - end, end});
    end = offset + block.bytes;
  }
  if (bytes > end) gaps_.insert({bytes - end, end});
}

void Arena::stop_indexing() {
  indexed_ = false;
  gaps_.clear();
}

int64_t Arena::highest_fit(int64_t size) {
  if (!indexed_) index();
  int64_t highest = -1;
  for (auto gap = gaps_.lower_bound({size, 0}); gap != gaps_.end(); ++gap)
    highest = std::max(highest, gap->second + gap->first - size);
  return highest;
}

int64_t Arena::largest_gap() {
  if (!indexed_) index();
  return gaps_.empty() ? 0 : gaps_.rbegin()->first;
}

void Arena::put(int64_t offset, Block block) {
  ++count_;
  occupy(offset, std::move(block));
}

Block Arena::take(int64_t offset) {
  --count_;
  return vacate(offset);
}

void Arena::occupy(int64_t offset, Block block) {
  assert(Arena::vacant(offset, block.bytes));
  const auto next = blocks_.lower_bound(offset);
  if (indexed_) {
    const auto [start, end] = gap_around(next);
    gaps_.erase({end - start, start});
    if (offset > start) gaps_.insert({offset - start, start});
    if (end > offset + block.bytes)
      gaps_.insert({end - offset - block.bytes, offset + block.bytes});
  }
  blocks_.emplace_hint(next, offset, std::move(block));
}

Block *Arena::find(int64_t offset) {
  const auto found = blocks_.find(offset);
  return found == blocks_.end() ? nullptr : &found->second;
}

Block Arena::vacate(int64_t offset) {
  const auto found = blocks_.find(offset);
  assert(found != blocks_.end());
  Block block = std::move(found->second);
  const auto next = blocks_.erase(found);
  if (indexed_) {
    const auto [start, end] = gap_around(next);
    if (offset > start) gaps_.erase({offset - start, start});
    if (end > offset + block.bytes)
      gaps_.erase({end - offset - block.bytes, offset + block.bytes});
    gaps_.insert({end - start, start});
  }
  return block;
}

}  // namespace lowtide
