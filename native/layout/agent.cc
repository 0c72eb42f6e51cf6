#include "agent.h"

#include <algorithm>
#include <cmath>

namespace lowtide {
namespace {

constexpr double kDecay = 0.8, kLesson = 30.0, kNoise = 0.2;

// Indices by descending score.
std::vector<int32_t> sorted(const std::vector<double> &score) {
  std::vector<int32_t> order(score.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t x, int32_t y) { return score[x] > score[y]; });
  return order;
}

}  // namespace

void Agent::meet_core(const Core &core) {
  tree = std::make_unique<Tree>(core.problem, core.watched);
  std::vector<double> weight;
  int64_t heaviest = 1;
  for (int32_t k : core.watched) heaviest = std::max(heaviest, core.problem.load[k]);
  for (int32_t k : core.watched)
    weight.push_back(static_cast<double>(core.problem.load[k]) / static_cast<double>(heaviest));
  lessons[0] = lessons[1] = weight;
}

void Agent::attempt(const Problem &problem, const Core &core, const std::vector<int32_t> &rest,
                    int64_t limit, const Clock &clock, const std::atomic<bool> &stop) {
  layout = {};
  homeless.clear();
  outcome = tree->run(rank(core.problem), capacity, limit, clock, stop);
  nodes = tree->nodes();
  ++attempts;
  if (outcome == Outcome::kSpent) learn();
  if (outcome != Outcome::kSolved) return;
  Layout found{std::vector<int64_t>(problem.count(), -1), 0};
  for (size_t x = 0; x < core.ids.size(); ++x) found.offset[core.ids[x]] = tree->offset()[x];
  nodes += static_cast<int64_t>(rest.size());
  if (!fill_gaps(problem, rest, Fit::kBest, clock, found)) {
    outcome = Outcome::kSpent;
    return;
  }
  for (int32_t i : rest)
    if (found.offset[i] + problem.size[i] > capacity) homeless.push_back(i);
  layout = std::move(found);
}

void Agent::shake(const Problem &problem, const Clock &clock) {
  layout = {};
  homeless.clear();
  outcome = Outcome::kSpent;
  std::vector<double> score(problem.count());
  for (int32_t i = 0; i < problem.count(); ++i) {
    const double width = static_cast<double>(problem.width(i));
    const double size = static_cast<double>(problem.size[i]);
    const double peak = static_cast<double>(problem.peak[i]);
    score[i] = (kind == 0 ? width : kind == 1 ? size : kind == 2 ? peak : width * peak) *
               (1.0 + kNoise * random.next());
  }
  ++attempts;
  nodes = problem.count();
  Layout found{problem.fixed, 0};
  if (fill_gaps(problem, sorted(score), Fit::kBest, clock, found)) layout = std::move(found);
}

std::vector<int32_t> Agent::rank(const Problem &core) {
  const std::vector<double> &weight = lessons[modest];
  std::vector<double> sum(weight.size() + 1, 0.0);
  for (size_t k = 0; k < weight.size(); ++k) sum[k + 1] = sum[k] + weight[k];
  std::vector<double> score(core.count());
  for (int32_t i = 0; i < core.count(); ++i) {
    const Span &view = tree->view(i);
    double total = 0.0, heaviest = 0.0;
    for (Range range : {view.body, view.tail}) {
      total += sum[range.end] - sum[range.begin];
      if (kind < 2)
        for (int32_t k = range.begin; k < range.end; ++k) heaviest = std::max(heaviest, weight[k]);
    }
    const double width = static_cast<double>(core.width(i));
    const double size = static_cast<double>(core.size[i]);
    score[i] = kind == 0   ? heaviest * width
               : kind == 1 ? heaviest * width * size
               : kind == 2 ? total
                           : total * std::sqrt(size);
    score[i] *= 1.0 + (attempts ? kNoise * random.next() : 0.0);
  }
  const std::vector<int32_t> order = sorted(score);
  std::vector<int32_t> result(order.size());
  for (size_t x = 0; x < order.size(); ++x) result[order[x]] = static_cast<int32_t>(x);
  return result;
}

void Agent::learn() {
  std::vector<double> &weight = lessons[modest];
  double total = 0.0;
  for (int64_t kills : tree->kills()) total += static_cast<double>(kills);
  for (size_t k = 0; k < weight.size(); ++k)
    weight[k] = weight[k] * kDecay +
                static_cast<double>(tree->kills()[k]) / std::max(total, 1.0) * kLesson;
}

}  // namespace lowtide
