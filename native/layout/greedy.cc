#include "greedy.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <utility>

namespace lowtide {
namespace {

struct Piece {
  int64_t offset, end;
  Range range;
};

// Pieces in order of offset, in chunks so that inserting stays cheap.
class Shelf {
 public:
  void insert(const Piece &piece) {
    auto chunk = std::partition_point(chunks_.begin(), chunks_.end(), [&](const auto &c) {
      return c.front().offset <= piece.offset;
    });
    if (chunk != chunks_.begin()) --chunk;
    if (chunk == chunks_.end()) {
      chunks_.push_back({piece});
      return;
    }
    chunk->insert(std::upper_bound(chunk->begin(), chunk->end(), piece,
                                   [](const Piece &x, const Piece &y) { return x.offset < y.offset; }),
                  piece);
    if (chunk->size() < kChunk) return;
    std::vector<Piece> upper(chunk->begin() + kChunk / 2, chunk->end());
    chunk->resize(kChunk / 2);
    chunks_.insert(chunk + 1, std::move(upper));
  }

  // The offset that `fit` gives to a buffer of that size and span.
  int64_t find(const Span &span, int64_t size, Fit fit) const {
    int64_t floor = 0, best = -1, smallest = std::numeric_limits<int64_t>::max();
    for (const auto &chunk : chunks_) {
      for (const Piece &piece : chunk) {
        if (!meet(piece.range, span.body) && !meet(piece.range, span.tail)) continue;
        const int64_t gap = piece.offset - floor;
        if (gap >= size && gap < smallest) {
          if (fit == Fit::kFirst || gap == size) return floor;
          smallest = gap;
          best = floor;
        }
        floor = std::max(floor, piece.end);
      }
    }
    return best >= 0 ? best : floor;
  }

 private:
  static constexpr size_t kChunk = 512;
  std::vector<std::vector<Piece>> chunks_;
};

// Shelves over time: one for all of it and, finer and finer, one for each of many
// overlapping windows, so that a short buffer need not look at pieces that live
// elsewhere.  A level is left out where long buffers would lie in too many windows.
class Shelves {
 public:
  explicit Shelves(const Problem &problem) {
    for (int32_t stride = problem.sections() / 4; stride >= 2; stride /= 4) {
      int64_t copies = 0;
      for (const Span &span : problem.span)
        copies += 2 + (span.body.length() + span.tail.length()) / stride;
      if (copies > kCopies * problem.count()) break;
      levels_.push_back({stride, std::vector<Shelf>(problem.sections() / stride + 1)});
    }
  }

  void insert(const Span &span, int64_t offset, int64_t end) {
    for (Range range : {span.body, span.tail}) {
      if (range.length() == 0) continue;
      all_.insert({offset, end, range});
      for (Level &level : levels_) {
        // window w holds sections [w * stride, (w + 2) * stride)
        const int32_t last = (range.end - 1) / level.stride;
        for (int32_t w = std::max(0, range.begin / level.stride - 1); w <= last; ++w)
          level.windows[w].insert({offset, end, range});
      }
    }
  }

  int64_t find(const Span &span, int64_t size, Fit fit) const {
    const Shelf *shelf = &all_;
    for (const Level &level : levels_)
      if (span.tail.length() == 0 && span.body.length() <= level.stride)
        shelf = &level.windows[span.body.begin / level.stride];
    return shelf->find(span, size, fit);
  }

 private:
  struct Level {
    int32_t stride;
    std::vector<Shelf> windows;
  };
  static constexpr int64_t kCopies = 12;  // pieces a level may keep per buffer, on average
  Shelf all_;
  std::vector<Level> levels_;  // coarse to fine
};

// Free memory without an upper end, by offset and by size.
class Holes {
 public:
  Holes() { add(0, std::numeric_limits<int64_t>::max()); }

  // The smallest hole that holds `size`, the lowest of equal ones.
  int64_t take(int64_t size) {
    const auto [length, offset] = *by_size_.lower_bound({size, 0});
    const int64_t end = offset + length;
    remove(offset, end);
    if (offset + size < end) add(offset + size, end);
    return offset;
  }

  void give_back(int64_t offset, int64_t size) {
    int64_t end = offset + size;
    const auto above = by_offset_.lower_bound(offset);  // there is one: the last is endless
    const bool joins = above->first == end;
    if (above != by_offset_.begin() && std::prev(above)->second == offset) {
      const auto [begin, middle] = *std::prev(above);
      remove(begin, middle);
      offset = begin;
    }
    if (joins) {
      const int64_t begin = end;
      end = by_offset_.find(begin)->second;
      remove(begin, end);
    }
    add(offset, end);
  }

 private:
  void add(int64_t offset, int64_t end) {
    by_offset_.emplace(offset, end);
    by_size_.emplace(end - offset, offset);
  }
  void remove(int64_t offset, int64_t end) {
    by_offset_.erase(offset);
    by_size_.erase({end - offset, offset});
  }

  std::map<int64_t, int64_t> by_offset_;
  std::set<std::pair<int64_t, int64_t>> by_size_;
};

int64_t height_of(const Problem &problem, const std::vector<int64_t> &offset) {
  int64_t height = 0;
  for (int32_t i = 0; i < problem.count(); ++i)
    height = std::max(height, offset[i] + problem.size[i]);
  return height;
}

}  // namespace

std::vector<int32_t> order_by(const Problem &problem, const char *keys) {
  std::vector<int32_t> order(problem.count());
  for (int32_t i = 0; i < problem.count(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](int32_t x, int32_t y) {
    for (const char *key = keys; *key; ++key) {
      const int64_t a = *key == 'T' ? problem.peak[x] : *key == 'W' ? problem.width(x) : problem.size[x];
      const int64_t b = *key == 'T' ? problem.peak[y] : *key == 'W' ? problem.width(y) : problem.size[y];
      if (a != b) return a > b;
    }
    const int32_t a = problem.span[x].body.begin, b = problem.span[y].body.begin;
    return a != b ? a < b : x < y;
  });
  return order;
}

bool fill_gaps(const Problem &problem, const std::vector<int32_t> &order, Fit fit,
               const Clock &clock, Layout &layout) {
  Shelves shelves(problem);
  for (int32_t i = 0; i < problem.count(); ++i)
    if (layout.offset[i] >= 0)
      shelves.insert(problem.span[i], layout.offset[i], layout.offset[i] + problem.size[i]);
  int32_t done = 0;
  for (int32_t i : order) {
    if (layout.offset[i] >= 0) continue;
    if (++done % 64 == 0 && clock.out()) return false;
    layout.offset[i] = shelves.find(problem.span[i], problem.size[i], fit);
    shelves.insert(problem.span[i], layout.offset[i], layout.offset[i] + problem.size[i]);
  }
  layout.height = height_of(problem, layout.offset);
  return true;
}

Layout allocate_in_time(const Problem &problem, bool backwards) {
  Layout layout{std::vector<int64_t>(problem.count(), -1), 0};
  const int32_t last = problem.sections();
  std::vector<std::vector<int32_t>> starts(last + 1), ends(last + 1);
  for (int32_t i = 0; i < problem.count(); ++i) {
    const Range body = problem.span[i].body;
    starts[backwards ? last - body.end : body.begin].push_back(i);
    ends[backwards ? last - body.begin : body.end].push_back(i);
  }
  Holes holes;
  for (int32_t k = 0; k < last; ++k) {
    for (int32_t i : ends[k]) holes.give_back(layout.offset[i], problem.size[i]);
    for (int32_t i : starts[k]) layout.offset[i] = holes.take(problem.size[i]);
  }
  layout.height = height_of(problem, layout.offset);
  return layout;
}

}  // namespace lowtide
