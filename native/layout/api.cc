#include <algorithm>
#include <exception>
#include <new>
#include <numeric>
#include <thread>

#include "layout.h"
#include "search.h"

namespace lowtide {
namespace {

constexpr int64_t kMost = int64_t{1} << 62;  // every sum of sizes stays below it

int32_t pack(const lowtide_layout_problem &in, const lowtide_layout_budget &budget, int64_t *offsets,
             lowtide_layout_result &out) {
  if (in.count < 0 || in.count > (int64_t{1} << 30) || in.period < 0 || in.align < 1 || in.goal < 0)
    return LOWTIDE_LAYOUT_BAD_PROBLEM;
  const Clock clock(budget.seconds);
  const size_t n = static_cast<size_t>(in.count);
  std::vector<Life> lives(n);
  std::vector<int64_t> size(n), fixed(n);
  int64_t unit = in.align > 1 ? in.align : 0, sum = 0, highest = 0;
  for (size_t i = 0; i < n; ++i) {
    const int64_t lower = in.lower[i], upper = in.upper[i];
    if (lower < 0 || upper <= lower || in.size[i] <= 0 || in.fixed[i] < -1 ||
        in.size[i] > kMost - in.align || in.align > kMost || in.fixed[i] > kMost)
      return LOWTIDE_LAYOUT_BAD_PROBLEM;
    if (in.period && (lower >= in.period || upper - lower > in.period))
      return LOWTIDE_LAYOUT_BAD_PROBLEM;
    size[i] = (in.size[i] + in.align - 1) / in.align * in.align;
    fixed[i] = in.fixed[i];
    if (fixed[i] > 0 && fixed[i] % in.align) return LOWTIDE_LAYOUT_BAD_PROBLEM;
    if (size[i] > kMost - sum) return LOWTIDE_LAYOUT_BAD_PROBLEM;
    sum += size[i];
    highest = std::max(highest, fixed[i]);
    unit = std::gcd(unit, size[i]);
    if (fixed[i] > 0) unit = std::gcd(unit, fixed[i]);
    const bool wraps = in.period && upper > in.period;
    lives[i] = {lower, wraps ? in.period : upper, wraps ? upper - in.period : 0};
  }
  if (highest > kMost - sum) return LOWTIDE_LAYOUT_BAD_PROBLEM;
  if (unit == 0) unit = 1;
  for (size_t i = 0; i < n; ++i) {
    size[i] /= unit;
    if (fixed[i] > 0) fixed[i] /= unit;
  }
  const Problem problem = compress(lives, std::move(size), std::move(fixed));

  if (clash(problem)) return LOWTIDE_LAYOUT_CLASH;

  const int32_t cores = static_cast<int32_t>(std::max(1u, std::thread::hardware_concurrency()));
  const int32_t threads = budget.threads > 0 ? budget.threads : cores;
  const Found found =
      search(problem, in.goal / unit, {budget.seed, budget.nodes, threads}, clock);
  for (size_t i = 0; i < n; ++i) offsets[i] = found.layout.offset[i] * unit;
  out.height = found.layout.height * unit;
  out.bound = found.bound * unit;
  out.nodes = found.nodes;
  return LOWTIDE_LAYOUT_OK;
}

}  // namespace
}  // namespace lowtide

extern "C" {

int32_t lowtide_layout_abi(void) { return LOWTIDE_LAYOUT_ABI; }

int32_t lowtide_layout_pack(const lowtide_layout_problem *problem,
                            const lowtide_layout_budget *budget, int64_t *offsets,
                            lowtide_layout_result *result) {
  try {
    return lowtide::pack(*problem, *budget, offsets, *result);
  } catch (const std::bad_alloc &) {
    return LOWTIDE_LAYOUT_NO_MEMORY;
  } catch (const std::exception &) {
    return LOWTIDE_LAYOUT_FAILED;
  }
}

}  // extern "C"
