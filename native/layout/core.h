// Which buffers of a large problem the tree search gets.
#pragma once

#include "problem.h"

namespace lowtide {

// The buffers that decide: those of the heaviest sections, as many sections as
// a straight dive can afford to look ahead at.
struct Core {
  std::vector<int32_t> ids;
  Problem problem;
  std::vector<int32_t> watched;
};

// The buffers of sections with a load of at least `from`, except easy ones; false
// when a straight dive through them would cost too much.
bool affordable(const Problem &problem, const std::vector<char> &easy, int64_t from,
                std::vector<int32_t> &ids);

// The lowest load from which sections can be watched, or the highest number there is.
int64_t threshold(const Problem &problem, const std::vector<char> &easy);

Core make_core(const Problem &problem, std::vector<int32_t> ids, int64_t from);

}  // namespace lowtide
