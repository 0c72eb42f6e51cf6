#include "search.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <memory>
#include <system_error>
#include <thread>

#include "tree.h"

namespace lowtide {
namespace {

constexpr int32_t kAgents = 4;
constexpr int64_t kBacktracks = 500;       // placements an attempt may waste
constexpr int64_t kWork = 300'000'000;     // look-ahead steps a straight dive may take
constexpr int32_t kCore = 3000;            // buffers in a tree, whose memory grows by their square,
constexpr int32_t kGrown = 4000;           // and in one that has grown
constexpr double kDecay = 0.8, kLesson = 30.0, kNoise = 0.2;
constexpr int32_t kPatience = 4;           // failed leaps before a shorter one
constexpr int32_t kStep = 5;               // a step closes a 2^kStep-th of the gap

struct Random {  // splitmix64
  uint64_t state;
  double next() {
    uint64_t z = state += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
  }
};

// The buffers that decide: those of the heaviest sections, as many sections as
// a straight dive can afford to look ahead at.
struct Core {
  std::vector<int32_t> ids;
  Problem problem;
  std::vector<int32_t> watched;
};

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

// The lowest load from which sections can be watched.
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

// 1 1 2 1 1 2 4 1 1 2 1 1 2 4 8 ...: mostly short attempts, now and then one that
// is long enough to get to the end of a tree and prove that there is nothing in it.
int64_t luby(int64_t round) {  // counted from 1
  int64_t size = 1;
  while (size < round) size = 2 * size + 1;
  while (size != round) {
    size /= 2;
    if (round > size) round -= size;
    while (size / 2 >= round) size /= 2;
  }
  return (size + 1) / 2;
}

// One line of attempts: a way to rank buffers, and what its failures taught it.
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
  Layout layout;                   // complete, or height 0
  std::vector<int32_t> homeless;   // buffers outside the core that ended above the capacity

  void meet_core(const Core &core) {
    tree = std::make_unique<Tree>(core.problem, core.watched);
    std::vector<double> weight;
    int64_t heaviest = 1;
    for (int32_t k : core.watched) heaviest = std::max(heaviest, core.problem.load[k]);
    for (int32_t k : core.watched)
      weight.push_back(static_cast<double>(core.problem.load[k]) / static_cast<double>(heaviest));
    lessons[0] = lessons[1] = weight;
  }

  double noise() { return 1.0 + (attempts ? kNoise * random.next() : 0.0); }

  static std::vector<int32_t> sorted(const std::vector<double> &score) {
    std::vector<int32_t> order(score.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t x, int32_t y) { return score[x] > score[y]; });
    return order;
  }

  std::vector<int32_t> rank(const Problem &core) {
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
      score[i] *= noise();
    }
    const std::vector<int32_t> order = sorted(score);
    std::vector<int32_t> result(order.size());
    for (size_t x = 0; x < order.size(); ++x) result[order[x]] = static_cast<int32_t>(x);
    return result;
  }

  void learn() {
    std::vector<double> &weight = lessons[modest];
    double total = 0.0;
    for (int64_t kills : tree->kills()) total += static_cast<double>(kills);
    for (size_t k = 0; k < weight.size(); ++k)
      weight[k] = weight[k] * kDecay +
                  static_cast<double>(tree->kills()[k]) / std::max(total, 1.0) * kLesson;
  }

  // With a core: solve it at the capacity, then fill the rest around it.
  void attempt(const Problem &problem, const Core &core, const std::vector<int32_t> &rest,
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

  // Without one (too many buffers alive at once): shaken greedy passes.
  void shake(const Problem &problem, const Clock &clock) {
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
};

// Runs agent(i) for each; once one calls `won`, those after it need not finish.
template <typename Work>
void run_agents(int32_t threads, Work work) {
  std::atomic<bool> stop[kAgents];
  for (auto &flag : stop) flag = false;
  auto one = [&](int32_t index) {
    if (stop[index].load(std::memory_order_relaxed)) return;
    if (work(index, stop[index]))
      for (int32_t later = index + 1; later < kAgents; ++later) stop[later] = true;
  };
  if (threads < 2) {
    for (int32_t index = 0; index < kAgents; ++index) one(index);
    return;
  }
  std::atomic<int32_t> next{0};
  std::exception_ptr failures[kAgents];
  auto loop = [&] {
    for (int32_t index; (index = next.fetch_add(1)) < kAgents;) {
      try {
        one(index);
      } catch (...) {
        failures[index] = std::current_exception();
      }
    }
  };
  std::vector<std::thread> helpers;
  try {
    for (int32_t t = 1; t < std::min(threads, kAgents); ++t) helpers.emplace_back(loop);
  } catch (const std::system_error &) {  // fewer helpers, then
  }
  loop();
  for (std::thread &helper : helpers) helper.join();
  for (const std::exception_ptr &failure : failures)
    if (failure) std::rethrow_exception(failure);
}

// One independent part of the problem.
class Part {
 public:
  Part(const Problem &whole, std::vector<int32_t> ids)
      : ids_(std::move(ids)), problem_(restrict_to(whole, ids_)), bound_(lower_bound(problem_)) {}

  int64_t bound() const { return bound_; }
  int64_t height() const { return best_.height; }
  int64_t nodes() const { return nodes_; }

  void first_layout(int64_t goal, const Clock &clock) {
    if (!problem_.has_fixed && !problem_.wraps)
      for (bool backwards : {false, true}) {
        if (best_.height && best_.height <= goal) return;
        nodes_ += problem_.count();
        keep(allocate_in_time(problem_, backwards));
      }
    for (const Pass &pass : kPasses) {
      if (best_.height && (best_.height <= goal || clock.out())) return;
      nodes_ += problem_.count();
      Layout layout{problem_.fixed, 0};
      const Clock endless(-1);  // some layout is owed
      if (fill_gaps(problem_, order_by(problem_, pass.keys), pass.fit,
                    best_.height ? clock : endless, layout))
        keep(std::move(layout));
    }
  }

  // A round of attempts at the goal, or a modest one: something better soon, half
  // of the agents trying a leap, half a step.  Modest rounds go on while they
  // succeed, else they alternate.
  void round(int64_t goal, bool only_goal, const Budget &budget, int64_t nodes_left, const Clock &clock) {
    if (agents_.empty()) prepare(goal, budget.seed);
    const bool has_core = !core_.ids.empty();
    const int64_t limit = std::min<int64_t>(
        static_cast<int64_t>(core_.ids.size()) + kBacktracks * luby(++rounds_),
        nodes_left < 0 ? std::numeric_limits<int64_t>::max() : std::max<int64_t>(nodes_left / kAgents, 1));
    const int64_t gap = best_.height - goal;
    const int64_t leap = std::max<int64_t>(1, gap >> ease_), step = std::max<int64_t>(1, gap >> kStep);
    for (int32_t index = 0; index < kAgents; ++index) {
      const bool leaps = (rounds_ + index) % 2 == 0;
      agents_[index].capacity = modest_ ? best_.height - (leaps ? leap : step) : goal;
      agents_[index].modest = modest_;
      agents_[index].nodes = 0;
    }

    bool ran[kAgents] = {};
    run_agents(budget.threads, [&](int32_t index, const std::atomic<bool> &stop) {
      Agent &agent = agents_[index];
      ran[index] = true;
      if (has_core)
        agent.attempt(problem_, core_, rest_, limit, clock, stop);
      else
        agent.shake(problem_, clock);
      return agent.layout.height && agent.layout.height <= goal;
    });

    const int64_t before = best_.height;
    std::vector<int32_t> homeless;
    for (int32_t index = 0; index < kAgents && ran[index]; ++index) {
      Agent &agent = agents_[index];
      nodes_ += agent.nodes;
      if (agent.outcome == Outcome::kImpossible) bound_ = std::max(bound_, agent.capacity + 1);
      homeless.insert(homeless.end(), agent.homeless.begin(), agent.homeless.end());
      if (agent.layout.height) keep(std::move(agent.layout));
      if (best_.height <= goal) return;
    }
    const bool better = best_.height < before;
    if (better) {
      ease_ = 1;
      waited_ = 0;
    } else if (modest_ && ++waited_ >= kPatience) {
      ease_ = gap >> ease_ > 1 ? ease_ + 1 : 1;
      waited_ = 0;
    }
    modest_ = !only_goal && (better || !modest_);
    grow(std::move(homeless));
  }

  void write(std::vector<int64_t> &offset) const {
    for (size_t x = 0; x < ids_.size(); ++x) offset[ids_[x]] = best_.offset[x];
  }

 private:
  void keep(Layout layout) {
    if (best_.height == 0 || layout.height < best_.height) best_ = std::move(layout);
  }

  void prepare(int64_t goal, uint64_t seed) {
    easy_ = dominated(problem_, goal);
    std::reverse(easy_.begin(), easy_.end());
    std::vector<char> easy(problem_.count(), 0);
    for (int32_t i : easy_) easy[i] = 1;
    from_ = threshold(problem_, easy);
    std::vector<int32_t> ids;
    const bool none = from_ == std::numeric_limits<int64_t>::max();
    if (none || !affordable(problem_, easy, from_, ids)) ids.clear();
    for (int32_t kind = 0; kind < kAgents; ++kind) {
      Agent agent{};
      agent.kind = kind;
      agent.random.state = seed * kAgents + static_cast<uint64_t>(kind);
      agents_.push_back(std::move(agent));
    }
    set_core(std::move(ids));
  }

  void set_core(std::vector<int32_t> ids) {
    core_ = make_core(problem_, std::move(ids), from_);
    std::vector<char> taken(problem_.count(), 0);
    for (int32_t i : core_.ids) taken[i] = 1;
    for (int32_t i : easy_) taken[i] = 1;
    rest_ = order_by(problem_, kPasses[0].keys);
    rest_.erase(std::remove_if(rest_.begin(), rest_.end(), [&](int32_t i) { return taken[i]; }),
                rest_.end());
    rest_.insert(rest_.end(), easy_.begin(), easy_.end());
    if (!core_.ids.empty())
      for (Agent &agent : agents_) agent.meet_core(core_);
  }

  // Buffers that found no room around the core have to be thought of with it.
  void grow(std::vector<int32_t> homeless) {
    std::sort(homeless.begin(), homeless.end());
    homeless.erase(std::unique(homeless.begin(), homeless.end()), homeless.end());
    if (homeless.empty() || core_.ids.size() + homeless.size() > kGrown) return;
    std::vector<int32_t> ids = core_.ids;
    ids.insert(ids.end(), homeless.begin(), homeless.end());
    std::sort(ids.begin(), ids.end());
    set_core(std::move(ids));
  }

  std::vector<int32_t> ids_;
  Problem problem_;
  int64_t bound_;
  Layout best_;
  int64_t nodes_ = 0;
  std::vector<Agent> agents_;
  int64_t from_ = 0;  // the load from which sections are watched
  Core core_;
  std::vector<int32_t> easy_;  // find room in any case, in this order, after all others
  std::vector<int32_t> rest_;  // outside the core, the easy ones last
  int64_t rounds_ = 0;
  bool modest_ = false;
  int32_t ease_ = 1, waited_ = 0;
};

}  // namespace

Found search(const Problem &problem, int64_t goal, const Budget &budget, const Clock &clock) {
  std::vector<Part> all;
  for (std::vector<int32_t> &ids : parts(problem)) all.emplace_back(problem, std::move(ids));

  Found found;
  auto tally = [&] {
    found.nodes = found.bound = found.layout.height = 0;
    for (const Part &part : all) {
      found.nodes += part.nodes();
      found.bound = std::max(found.bound, part.bound());
      found.layout.height = std::max(found.layout.height, part.height());
    }
    return std::max(found.bound, goal);
  };
  int64_t target = tally();
  for (Part &part : all) part.first_layout(target, clock);
  target = tally();
  auto spent = [&] { return clock.out() || (budget.nodes >= 0 && found.nodes >= budget.nodes); };
  while (found.layout.height > target && !spent()) {
    for (Part &part : all) {
      if (part.height() <= target || spent()) continue;
      part.round(target, goal >= found.bound, budget, budget.nodes < 0 ? -1 : budget.nodes - found.nodes, clock);
      target = tally();
    }
  }
  found.layout.offset.assign(problem.count(), 0);
  for (const Part &part : all) part.write(found.layout.offset);
  found.bound = std::min(found.bound, found.layout.height);
  return found;
}

}  // namespace lowtide
