#include "core.h"

#include <algorithm>
#include <limits>

namespace lowtide {
namespace {

constexpr int64_t kWork = 300'000'000;  // look-ahead steps a straight dive may take
constexpr int32_t kCore = 3000;         // buffers in a tree: its memory grows by their square

}  // namespace

bool affordable(const Problem &problem, const std::vector<char> &easy, int64_t from,
                std::vector<int32_t> &ids) {
  std::vector<int32_t> before(problem.sections() + 1, 0);
  for (int32_t k = 0; k < problem.sections(); ++k)
    before[k + 1] = before[k] + (problem.load[k] >= from);
  ids.clear();
  int64_t steps = 0;
  for (int32_t i = 0; i < problem.count(); ++i) {
    if (problem.fixed[i] < 0 && (easy[i] || problem.peak[i] < from)) continue;
    const Span &span = problem.span[i];
    steps += before[span.body.end] - before[span.body.begin] + before[span.tail.end];
    ids.push_back(i);
  }
  const int64_t count = static_cast<int64_t>(ids.size());
  return count <= kCore && count * steps / 2 <= kWork;
}

int64_t threshold(const Problem &problem, const std::vector<char> &easy) {
  std::vector<int64_t> loads = problem.load;
  std::sort(loads.begin(), loads.end());
  loads.erase(std::unique(loads.begin(), loads.end()), loads.end());
  std::vector<int32_t> scratch;
  size_t low = 0, high = loads.size();  // the first affordable one
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (affordable(problem, easy, loads[middle], scratch))
      high = middle;
    else
      low = middle + 1;
  }
  return low < loads.size() ? loads[low] : std::numeric_limits<int64_t>::max();
}

Core make_core(const Problem &problem, std::vector<int32_t> ids, int64_t from) {
  Core core;
  core.problem = restrict_to(problem, ids);
  core.ids = std::move(ids);
  for (int32_t k = 0; k < core.problem.sections(); ++k)
    if (core.problem.load[k] >= from) core.watched.push_back(k);
  return core;
}

}  // namespace lowtide
