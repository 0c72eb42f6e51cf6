// One pass: take the buffers in some order and put each into a gap.
#pragma once

#include "clock.h"
#include "problem.h"

namespace lowtide {

struct Layout {
  std::vector<int64_t> offset;
  int64_t height = 0;
};

enum class Fit { kBest, kFirst };

// The passes worth making: an order, see order_by, and a way to choose the gap.
struct Pass {
  const char *keys;
  Fit fit;
};
inline constexpr Pass kPasses[] = {{"TWS", Fit::kBest}, {"TSW", Fit::kBest}, {"SWT", Fit::kBest},
                                   {"WST", Fit::kBest}, {"SWT", Fit::kFirst}};

// Keys: T the heaviest load the buffer takes part in, W its width in sections,
// S its size.  Ties go to the earlier and then to the one listed first.
std::vector<int32_t> order_by(const Problem &problem, const char *keys);

// Places the buffers of `order` around those that `layout` already holds
// (offset >= 0).  False when the clock ran out before the end.
bool fill_gaps(const Problem &problem, const std::vector<int32_t> &order, Fit fit,
               const Clock &clock, Layout &layout);

// What an allocator does that knows nothing of the future, or, backwards, of the
// past: each buffer, when it starts, takes the smallest hole.  Quick; for problems
// where nothing is fixed and nothing wraps.
Layout allocate_in_time(const Problem &problem, bool backwards);

}  // namespace lowtide
