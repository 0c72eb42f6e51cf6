// One line of attempts at a problem.
#pragma once

#include <memory>

#include "core.h"
#include "greedy.h"
#include "tree.h"

namespace lowtide {

struct Random {  // splitmix64
  uint64_t state;
  double next() {
    uint64_t z = state += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
  }
};

// A way to rank buffers, and what its failures taught it.
struct Agent {
  int32_t kind;
  Random random;
  std::unique_ptr<Tree> tree;
  std::vector<double> lessons[2];  // a weight per watched section: at the goal, and modest
  int64_t attempts = 0;

  // of the last attempt:
  Outcome outcome = Outcome::kSpent;
  int64_t capacity = 0, nodes = 0;
  bool modest = false;
  Layout layout;                  // complete, or height 0
  std::vector<int32_t> homeless;  // buffers outside the core that ended above the capacity

  void meet_core(const Core &core);

  // With a core: solve it at the capacity, then fill the rest around it.
  void attempt(const Problem &problem, const Core &core, const std::vector<int32_t> &rest,
               int64_t limit, const Clock &clock, const std::atomic<bool> &stop);

  // Without one (too many buffers alive at once): shaken greedy passes.
  void shake(const Problem &problem, const Clock &clock);

 private:
  std::vector<int32_t> rank(const Problem &core);
  void learn();
};

}  // namespace lowtide
