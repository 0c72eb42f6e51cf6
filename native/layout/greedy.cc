#include "greedy.h"

#include <algorithm>
#include <limits>

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

// How high each section is filled: ranges are raised, and asked for their highest.
class Skyline {
 public:
  explicit Skyline(int32_t sections) {
    while (leaves_ < sections) leaves_ *= 2;
    highest_.assign(2 * leaves_, 0);
    raised_.assign(2 * leaves_, 0);
  }

  int64_t highest(Range range) const { return ask(1, 0, leaves_, range); }
  void raise(Range range, int64_t top) { raise(1, 0, leaves_, range, top); }

 private:
  int64_t ask(int32_t node, int32_t begin, int32_t end, Range range) const {
    if (range.end <= begin || end <= range.begin) return 0;
    if (range.begin <= begin && end <= range.end) return highest_[node];
    const int32_t middle = (begin + end) / 2;
    return std::max({raised_[node], ask(2 * node, begin, middle, range),
                     ask(2 * node + 1, middle, end, range)});
  }
  void raise(int32_t node, int32_t begin, int32_t end, Range range, int64_t top) {
    if (range.end <= begin || end <= range.begin) return;
    highest_[node] = std::max(highest_[node], top);
    if (range.begin <= begin && end <= range.end) {
      raised_[node] = std::max(raised_[node], top);
      return;
    }
    const int32_t middle = (begin + end) / 2;
    raise(2 * node, begin, middle, range, top);
    raise(2 * node + 1, middle, end, range, top);
  }

  int32_t leaves_ = 1;
  std::vector<int64_t> highest_;  // in the node's sections, as raised at it or below
  std::vector<int64_t> raised_;   // all of the node's sections
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

void stack_up(const Problem &problem, const std::vector<int32_t> &order, Layout &layout) {
  Skyline skyline(problem.sections());
  auto raise = [&](int32_t i) {
    for (Range range : {problem.span[i].body, problem.span[i].tail})
      skyline.raise(range, layout.offset[i] + problem.size[i]);
  };
  for (int32_t i = 0; i < problem.count(); ++i)
    if (layout.offset[i] >= 0) raise(i);
  for (int32_t i : order) {
    if (layout.offset[i] >= 0) continue;
    const Span &span = problem.span[i];
    layout.offset[i] = std::max(skyline.highest(span.body), skyline.highest(span.tail));
    raise(i);
  }
  layout.height = height_of(problem, layout.offset);
}

}  // namespace lowtide
