#include "search.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <system_error>
#include <thread>

#include "agent.h"

namespace lowtide {
namespace {

constexpr int32_t kAgents = 4;
constexpr int64_t kBacktracks = 500;  // placements an attempt may waste
constexpr size_t kGrown = 4000;       // buffers in a core that has grown
constexpr int32_t kPatience = 4;      // failed leaps before a shorter one
constexpr int32_t kStep = 5;          // a step closes a 2^kStep-th of the gap

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

// Runs work(i) for each agent; once it returns true, those after need not finish.
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
  void round(int64_t goal, bool only_goal, const Budget &budget, int64_t nodes_left,
             const Clock &clock) {
    if (agents_.empty()) prepare(goal, budget.seed);
    const bool has_core = !core_.ids.empty();
    int64_t limit = static_cast<int64_t>(core_.ids.size()) + kBacktracks * luby(++rounds_);
    if (nodes_left >= 0) limit = std::min(limit, std::max<int64_t>(nodes_left / kAgents, 1));
    const int64_t gap = best_.height - goal;
    const int64_t leap = std::max<int64_t>(1, gap >> ease_);
    const int64_t step = std::max<int64_t>(1, gap >> kStep);
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
      const int64_t left = budget.nodes < 0 ? -1 : budget.nodes - found.nodes;
      part.round(target, goal >= found.bound, budget, left, clock);
      target = tally();
    }
  }
  found.layout.offset.assign(problem.count(), 0);
  for (const Part &part : all) part.write(found.layout.offset);
  found.bound = std::min(found.bound, found.layout.height);
  return found;
}

}  // namespace lowtide
