// The tree search: is there a layout no higher than a given capacity?
//
// Any layout can be rebuilt by placing its buffers in order of offset, each as
// low as those already placed allow; so the tree branches over which buffer
// comes next.  What makes it small is the look ahead after each placement: in
// every watched section, what is still to come fills upwards from the offsets it
// could have at best, and if that ends above the capacity the branch is dead.
// Sections that kill branches gain weight, and the next attempt takes the
// buffers of heavy sections first.
#pragma once

#include <atomic>

#include "clock.h"
#include "problem.h"

namespace lowtide {

enum class Outcome { kSolved, kImpossible, kSpent };

class Tree {
 public:
  // `watched`: the sections to look ahead at, ascending.
  Tree(const Problem &problem, const std::vector<int32_t> &watched);

  // Tries at most `limit` placements, taking buffers of lower `rank` first
  // where offsets are equal.  Solved: offset() holds the layout.  Impossible:
  // no layout fits the capacity.  `stop` ends it from another thread.
  Outcome run(const std::vector<int32_t> &rank, int64_t capacity, int64_t limit, const Clock &clock,
              const std::atomic<bool> &stop);

  const std::vector<int64_t> &offset() const { return offset_; }
  const std::vector<int64_t> &kills() const { return kills_; }  // per watched section
  int64_t nodes() const { return nodes_; }
  const Span &view(int32_t i) const { return view_[i]; }  // over the watched sections

 private:
  struct Item {  // a buffer yet to be placed, and the lowest offset it can have
    int64_t offset;
    int32_t id;
  };
  // Items to place: one after another, or, when they fall into groups that
  // never meet, group after group.
  struct Frame {
    size_t begin, end;   // its items, sorted by (offset, rank)
    size_t keep;         // items_ up to here belong to it or to frames below
    size_t cursor;       // the next candidate, or the next group
    size_t groups;       // where its groups begin in groups_,
    size_t groups_end;   // and end: at the beginning unless it is split
    int64_t lowest_top;  // no candidate starts at or above it
    int64_t floor;       // the placement before: nothing comes below it,
    int32_t floor_rank;  // nor at it with a lower rank
  };

  bool before(const Item &x, const Item &y) const {
    return x.offset != y.offset ? x.offset < y.offset : rank_[x.id] < rank_[y.id];
  }
  Outcome walk(const std::vector<int32_t> &rank, int64_t capacity, int64_t limit,
               const Clock &clock, const std::atomic<bool> &stop);
  bool descend(const Frame &frame, size_t candidate);  // pushes a frame, or false: dead
  bool look_ahead(size_t begin, size_t end, int64_t &lowest_top);
  void enter(Frame frame);  // splits it if it can be

  static constexpr size_t kKept = 1 << 20;  // items kept between runs

  const Problem &problem_;
  std::vector<std::vector<int32_t>> fixed_of_;
  std::vector<Span> view_;
  std::vector<int64_t> kills_;

  std::vector<int32_t> rank_;
  int64_t capacity_ = 0, nodes_ = 0;
  std::vector<int64_t> offset_;
  std::vector<Item> items_;    // the frames' lists, one after another
  std::vector<Frame> frames_;
  std::vector<size_t> groups_;  // where each group of the split frames begins in items_
  std::vector<Item> moved_;
  std::vector<int64_t> top_;
  std::vector<int32_t> crossing_, part_of_;
};

}  // namespace lowtide
