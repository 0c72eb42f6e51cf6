#include "tree.h"

#include <algorithm>
#include <limits>

namespace lowtide {

Tree::Tree(const Problem &problem, const std::vector<int32_t> &watched)
    : problem_(problem),
      fixed_of_(fixed_neighbours(problem)),
      view_(problem.count()),
      kills_(watched.size(), 0),
      offset_(problem.count(), -1),
      top_(watched.size(), 0),
      crossing_(problem.sections() + 1, 0),
      part_of_(problem.sections(), 0) {
  // index[k]: how many watched sections come before section k
  std::vector<int32_t> index(problem.sections() + 1, 0);
  for (int32_t k : watched) index[k + 1] = 1;
  for (int32_t k = 0; k < problem.sections(); ++k) index[k + 1] += index[k];
  for (int32_t i = 0; i < problem.count(); ++i) {
    const Span &span = problem.span[i];
    view_[i].body = {index[span.body.begin], index[span.body.end]};
    view_[i].tail = {0, index[span.tail.end]};
  }
}

Outcome Tree::run(const std::vector<int32_t> &rank, int64_t capacity, int64_t limit,
                  const Clock &clock, const std::atomic<bool> &stop) {
  const Outcome outcome = walk(rank, capacity, limit, clock, stop);
  if (items_.capacity() > kKept) std::vector<Item>().swap(items_);  // others need memory, too
  return outcome;
}

Outcome Tree::walk(const std::vector<int32_t> &rank, int64_t capacity, int64_t limit,
                   const Clock &clock, const std::atomic<bool> &stop) {
  rank_ = rank;
  capacity_ = capacity;
  nodes_ = 0;
  std::fill(kills_.begin(), kills_.end(), 0);
  items_.clear();
  frames_.clear();
  groups_.clear();
  for (int32_t i = 0; i < problem_.count(); ++i) {
    const int64_t fixed = problem_.fixed[i];
    items_.push_back({fixed >= 0 ? fixed : settle(problem_, fixed_of_[i], i, 0), i});
  }
  std::sort(items_.begin(), items_.end(), [&](auto &x, auto &y) { return before(x, y); });
  Frame root{0, items_.size(), items_.size(), 0, 0, 0, 0, -1, -1};
  if (!look_ahead(0, items_.size(), root.lowest_top)) return Outcome::kImpossible;
  enter(root);

  enum { kNothing, kAlive, kDead } returned = kNothing;  // by the frame just left
  auto leave = [&](auto how) {
    groups_.resize(frames_.back().groups);
    frames_.pop_back();
    returned = how;
  };
  while (!frames_.empty()) {
    Frame &frame = frames_.back();
    items_.resize(frame.keep);
    const bool is_split = frame.groups != frame.groups_end;
    const bool complete = is_split ? frame.cursor == frame.groups_end : frame.begin == frame.end;
    if (is_split && returned == kDead) {  // one group dead: so are all
      leave(kDead);
    } else if (complete || (returned == kAlive && !is_split)) {
      leave(kAlive);
    } else if (is_split) {
      returned = kNothing;
      const size_t begin = groups_[frame.cursor++];
      const size_t end = frame.cursor < frame.groups_end ? groups_[frame.cursor] : frame.end;
      Frame group{begin, end, frame.keep, begin, groups_.size(), groups_.size(),
                  std::numeric_limits<int64_t>::max(), frame.floor, frame.floor_rank};
      for (size_t x = begin; x < end; ++x)
        group.lowest_top =
            std::min(group.lowest_top, items_[x].offset + problem_.size[items_[x].id]);
      frames_.push_back(group);
    } else {
      returned = kDead;
      const Frame parent = frame;  // frames_ may move
      size_t cursor = parent.cursor;
      while (cursor < parent.end && items_[cursor].offset < parent.lowest_top) {
        const size_t candidate = cursor++;
        const Item item = items_[candidate];
        if (item.offset == parent.floor && rank_[item.id] < parent.floor_rank) continue;
        if (nodes_ == limit || stop.load(std::memory_order_relaxed)) return Outcome::kSpent;
        if (++nodes_ % 16 == 0 && clock.out()) return Outcome::kSpent;
        frame.cursor = cursor;
        if (descend(parent, candidate)) {
          returned = kNothing;
          break;
        }
      }
      if (returned == kDead) leave(kDead);
    }
  }
  return returned == kAlive ? Outcome::kSolved : Outcome::kImpossible;
}

bool Tree::descend(const Frame &parent, size_t candidate) {
  const int32_t id = items_[candidate].id;
  const int64_t floor = items_[candidate].offset;
  const int64_t top = floor + problem_.size[id];
  const size_t begin = parent.keep;
  items_.resize(begin);
  moved_.clear();
  for (size_t x = parent.begin; x < parent.end; ++x) {
    if (x == candidate) continue;
    Item item = items_[x];
    const int64_t base = meet(problem_.span[id], problem_.span[item.id]) ? top : floor;
    if (item.offset >= base) {
      items_.push_back(item);
      continue;
    }
    if (problem_.fixed[item.id] >= 0) return false;  // it cannot give way
    item.offset = settle(problem_, fixed_of_[item.id], item.id, base);
    moved_.push_back(item);
  }
  // What stayed is still sorted; weave in what moved.
  auto earlier = [&](const Item &x, const Item &y) { return before(x, y); };
  std::sort(moved_.begin(), moved_.end(), earlier);
  const size_t stayed = items_.size();
  items_.resize(stayed + moved_.size());
  size_t from = stayed, to = items_.size(), left = moved_.size();
  while (left) {
    if (from > begin && before(moved_[left - 1], items_[from - 1]))
      items_[--to] = items_[--from];
    else
      items_[--to] = moved_[--left];
  }

  Frame child{begin, items_.size(), items_.size(), begin, 0, 0, 0, floor, rank_[id]};
  if (!look_ahead(child.begin, child.end, child.lowest_top)) return false;
  offset_[id] = floor;
  enter(child);
  return true;
}

bool Tree::look_ahead(size_t begin, size_t end, int64_t &lowest_top) {
  std::fill(top_.begin(), top_.end(), 0);
  lowest_top = std::numeric_limits<int64_t>::max();
  for (size_t x = begin; x < end; ++x) {
    const Item item = items_[x];
    const int64_t size = problem_.size[item.id];
    const Span &view = view_[item.id];
    lowest_top = std::min(lowest_top, item.offset + size);
    for (Range range : {view.body, view.tail}) {
      int64_t highest = 0;
      for (int32_t k = range.begin; k < range.end; ++k) {
        const int64_t top = std::max(top_[k], item.offset) + size;
        top_[k] = top;
        highest = std::max(highest, top);
      }
      if (highest <= capacity_) continue;
      int32_t k = range.begin;
      while (top_[k] <= capacity_) ++k;
      ++kills_[k];
      return false;
    }
    if (item.offset + size > capacity_) return false;
  }
  return true;
}

void Tree::enter(Frame frame) {
  frame.groups = frame.groups_end = groups_.size();
  frames_.push_back(frame);
  if (problem_.wraps || frame.end - frame.begin < 2) return;
  // Sections that no item lives across part those before from those after.
  int32_t first = problem_.sections(), last = 0;
  for (size_t x = frame.begin; x < frame.end; ++x) {
    const Range body = problem_.span[items_[x].id].body;
    first = std::min(first, body.begin);
    last = std::max(last, body.end);
    ++crossing_[body.begin];
    --crossing_[body.end - 1];
  }
  int32_t parts = 0, crossing = 0;
  for (int32_t k = first; k < last; ++k) {
    part_of_[k] = parts;
    crossing += crossing_[k];
    crossing_[k] = 0;
    if (crossing == 0) ++parts;
  }
  if (parts < 2) return;
  // Smallest group first; inside a group the items stay sorted.
  std::vector<size_t> members(parts, 0), next(parts, 0);
  for (size_t x = frame.begin; x < frame.end; ++x)
    ++members[part_of_[problem_.span[items_[x].id].body.begin]];
  std::vector<int32_t> order;
  for (int32_t part = 0; part < parts; ++part)
    if (members[part]) order.push_back(part);
  if (order.size() < 2) return;
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t x, int32_t y) { return members[x] < members[y]; });
  size_t at = frame.begin;
  for (int32_t part : order) {
    groups_.push_back(at);
    next[part] = at;
    at += members[part];
  }
  moved_.assign(items_.begin() + frame.begin, items_.begin() + frame.end);
  for (const Item &item : moved_)
    items_[next[part_of_[problem_.span[item.id].body.begin]]++] = item;
  frames_.back().cursor = frame.groups;
  frames_.back().groups_end = groups_.size();
}

}  // namespace lowtide
