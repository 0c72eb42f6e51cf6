// A layout problem after preprocessing, and the reductions that make it.
#pragma once

#include <cstdint>
#include <vector>

namespace lowtide {

// Sections [begin, end).
struct Range {
  int32_t begin = 0, end = 0;
  int32_t length() const { return end - begin; }
};

// Where a buffer lives.  `tail` is empty unless the buffer wraps round the end
// of the step; then it starts at section 0.
struct Span {
  Range body, tail;
};

inline bool meet(Range x, Range y) { return x.begin < y.end && y.begin < x.end; }

inline bool meet(const Span &x, const Span &y) {
  return meet(x.body, y.body) || (x.tail.end && (meet(x.tail, y.body) || meet(x.tail, y.tail))) ||
         (y.tail.end && meet(x.body, y.tail));
}

// Buffers over sections.  A section is a set of buffers alive together that no
// larger such set contains, so that two buffers meet in time exactly when they
// meet in a section.  Sizes and offsets count units.
struct Problem {
  std::vector<int64_t> size;
  std::vector<int64_t> fixed;  // or -1
  std::vector<Span> span;
  std::vector<int64_t> load;   // per section
  std::vector<int64_t> peak;   // per buffer: the heaviest load it takes part in
  bool wraps = false;
  bool has_fixed = false;

  int32_t count() const { return static_cast<int32_t>(size.size()); }
  int32_t sections() const { return static_cast<int32_t>(load.size()); }
  int64_t width(int32_t i) const { return span[i].body.length() + span[i].tail.length(); }
};

// A stretch of time in some unit; `tail` as in Span.
struct Life {
  int64_t lower, upper, tail_upper;
};

// Time compression: sections for the buffers' lives.
Problem compress(const std::vector<Life> &lives, std::vector<int64_t> size,
                 std::vector<int64_t> fixed);

// The same buffers, fewer: those of `ids`, with sections of their own.
Problem restrict_to(const Problem &problem, const std::vector<int32_t> &ids);

// Groups of buffers such that no two of different groups ever meet.
std::vector<std::vector<int32_t>> parts(const Problem &problem);

// No layout of the problem is lower.  With fixed buffers it is stronger than
// the load: what cannot go under them has to go above.
int64_t lower_bound(const Problem &problem);

// Buffers that find room below `capacity` however all others lie below it, in
// the order in which to leave them out; they come back in reverse, after those.
std::vector<int32_t> dominated(const Problem &problem, int64_t capacity);

// For each open buffer the fixed ones it meets, in order of offset.
std::vector<std::vector<int32_t>> fixed_neighbours(const Problem &problem);

// The lowest offset >= `at` where buffer i clears `pinned`, fixed ones in order
// of offset, as far as it meets them.
int64_t settle(const Problem &problem, const std::vector<int32_t> &pinned, int32_t i, int64_t at);

// Whether two fixed buffers share bytes while both live.
bool clash(const Problem &problem);

}  // namespace lowtide
