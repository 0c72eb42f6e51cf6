// The whole search: greedy passes, then rounds of tree searches that learn.
#pragma once

#include "greedy.h"

namespace lowtide {

struct Budget {
  uint64_t seed = 0;
  int64_t nodes = -1;  // placements it may try; -1: no limit
  int32_t threads = 1;
};

struct Found {
  Layout layout;
  int64_t bound = 0;  // no layout is lower
  int64_t nodes = 0;  // placements tried
};

// Packs until the layout is as low as `goal` or the bound, or the budget is
// spent.  The clock aside, the answer depends on the problem, the goal, the seed
// and the node budget alone.
Found search(const Problem &problem, int64_t goal, const Budget &budget, const Clock &clock);

}  // namespace lowtide
