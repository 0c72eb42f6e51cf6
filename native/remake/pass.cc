#include "pass.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace lowtide {
namespace {

constexpr double kSoon = 0.02;       // of the plain step: what is needed within it is made together
constexpr int64_t kMostReruns = 10;  // times the ops of the step: then it does not come to an end
constexpr double kNever = std::numeric_limits<double>::infinity();

// In the same operations as the reference, each of which has one right result.
double power(double x, int32_t quarters) {
  double found = quarters >= 4 ? x : 1.0;
  for (int32_t i = 8; i <= quarters; i += 4) found *= x;
  if (quarters & 2) found *= std::sqrt(x);
  if (quarters & 1) found *= std::sqrt(std::sqrt(x));
  return found;
}

}  // namespace

Pass::Pass(const Ground &ground, const lowtide_remake_trial &trial)
    : ground_(ground),
      trial_(trial),
      each_(at(ground.values)),
      limit_(trial.limit - ground.unseen),
      there_(trial.there, trial.there + ground.values),
      below_(trial.below, trial.below + ground.values),
      locked_(at(ground.values), 0),
      free_(at(ground.values / 64 + 1), 0),
      static_(at(ground.values)),
      cost_(at(ground.values)),
      due_(at(ground.values), kNever),
      gone_(each_),
      opening_(at(ground.ops + 2)),
      held_until_(at(ground.ops + 2)) {
  ground.seconds(trial.holds, each_.data());
  for (Value value = 0; value < ground.values; ++value) {
    if (there_[at(value)]) held_ += ground.size[at(value)];
    const double size = power(static_cast<double>(ground.size[at(value)]), trial.bytes);
    static_[at(value)] = 1 / std::max(size, 1.0);
    if (trial.weights != nullptr) static_[at(value)] *= trial.weights[value];
    set_cost(value, each_[at(value)]);
  }
}

void Pass::set_free(Value value, bool free) {
  const uint64_t bit = uint64_t{1} << (value % 64);
  uint64_t &word = free_[at(value / 64)];
  word = free ? word | bit : word & ~bit;
}

void Pass::set_cost(Value value, double cost) {
  cost_[at(value)] = power(cost, trial_.cost) * static_[at(value)];
}

void Pass::run() {
  for (Value value = 0; value < ground_.values; ++value)
    if (there_[at(value)]) arrive(value, -1);
  for (int64_t i = 0; i < ground_.ops; ++i) {
    position_ = i;
    for (const Value value : ground_.appearing[i]) take(value);
    for (const Value value : opening_[at(i)])
      if (there_[at(value)] && !locked_[at(value)]) set_free(value, true);
    move(i);
    const Rows::Row wants = ground_.wants[i];
    for (const Value value : wants) {
      have(value);
      lock(value);
    }
    int64_t more = ground_.workspace[at(i)];
    for (const Value value : ground_.writes[i]) more += ground_.size[at(value)];
    for (const Value value : ground_.overwritten[i]) more -= ground_.size[at(value)];
    make_room(more);
    for (const Value value : wants) unlock(value, i);
    for (const Value value : ground_.overwritten[i]) end(value);
    for (const Value value : ground_.writes[i]) take(value);
    for (const Value value : ground_.ending[i]) {
      if (trial_.holds[value] && there_[at(value)])
        hold(value);
      else
        end(value);
    }
    for (const Value value : held_until_[at(i)]) let_go(value);
  }
  position_ = ground_.ops;
  for (Value value = 0; value < ground_.values; ++value) {
    if (!ground_.after[at(value)] || below_[at(value)]) continue;
    have(value);
    lock(value);
  }
}

// What is there.

void Pass::take(Value value) {
  there_[at(value)] = 1;
  held_ += ground_.size[at(value)];
  arrive(value, position_);
}

void Pass::arrive(Value value, int64_t position) {
  if (!ground_.can[at(value)]) return;
  due_[at(value)] = next(value, position);
  set_free(value, !locked_[at(value)] && may_go(value));
  const int64_t from_on = trial_.from_on[value];
  if (position_ < from_on && from_on < ground_.ops) open_at(from_on, value);
}

bool Pass::may_go(Value value) const {
  return position_ >= trial_.from_on[value] || position_ >= ground_.end[at(value)];
}

void Pass::end(Value value) {
  if (!there_[at(value)]) return;
  there_[at(value)] = 0;
  set_free(value, false);
  held_ -= ground_.size[at(value)];
}

double Pass::next(Value value, int64_t position) const {
  const Rows::Row uses = ground_.uses[value];
  const int32_t *const use = std::upper_bound(uses.begin(), uses.end(), position);
  double due = use == uses.end() ? kNever : ground_.starts[at(*use)];
  if (trial_.around)
    for (const Value other : ground_.near[value])
      if (gone_.is(other) && ground_.maker[at(other)] > ground_.maker[at(value)])
        due = std::min(due, due_[at(other)]);
  return due;
}

void Pass::lock(Value value) {
  ++locked_[at(value)];
  set_free(value, false);
}

void Pass::unlock(Value value, int64_t position) {
  --locked_[at(value)];
  if (locked_[at(value)] || !there_[at(value)] || !ground_.can[at(value)]) return;
  const int64_t chance = ground_.chances[at(position + 1)];
  if (chance <= position_ + 1 || position_ >= ground_.end[at(value)])
    set_free(value, may_go(value));
  else if (trial_.from_on[value] < ground_.ops)
    open_at(std::max(chance, trial_.from_on[value]), value);
  due_[at(value)] = next(value, position);
}

void Pass::hold(Value value) {
  done_.push_back({LOWTIDE_REMAKE_HOLD, position_, value});
  lock(value);
  held_until_[at(ground_.holdable[at(value)])].push_back(value);
}

void Pass::let_go(Value value) {
  --locked_[at(value)];
  ++position_;  // after the op
  drop(value);
  --position_;
}

// What is swapped.

void Pass::move(int64_t position) {
  for (; releases_ < trial_.releases && trial_.release_at[releases_] <= position; ++releases_) {
    const Value value = trial_.release[releases_];
    if (trial_.release_at[releases_] < position || !there_[at(value)] || locked_[at(value)])
      continue;
    end(value);
    below_[at(value)] = 1;
  }
  for (; fetches_ < trial_.fetches && trial_.fetch_at[fetches_] <= position; ++fetches_) {
    const Value value = trial_.fetch[fetches_];
    if (trial_.fetch_at[fetches_] == position && below_[at(value)]) give_back(value);
  }
}

void Pass::give_back(Value value) {
  make_room(ground_.size[at(value)]);
  below_[at(value)] = 0;
  take(value);
}

// What goes.

void Pass::make_room(int64_t count) {
  while (held_ + count > limit_) {
    const Value value = worst();
    if (value < 0) throw Stuck{position_, held_ + count + ground_.unseen};
    drop(value);
  }
}

Pass::Value Pass::worst() const {
  const double now = ground_.starts[at(position_)];
  Value found = -1;
  double least = 0.0;
  for (std::size_t word = 0; word < free_.size(); ++word) {
    for (uint64_t left = free_[word]; left; left &= left - 1) {
      const auto value = static_cast<std::size_t>(64 * word + static_cast<std::size_t>(__builtin_ctzll(left)));
      const double distance = power(std::max(due_[value] - now, 1e-9), trial_.distance);
      const double score = cost_[value] / distance;
      if (found < 0 || score < least) {
        found = static_cast<Value>(value);
        least = score;
      }
    }
  }
  return found;
}

void Pass::drop(Value value) {
  done_.push_back({LOWTIDE_REMAKE_DROP, position_, value});
  there_[at(value)] = 0;
  set_free(value, false);
  held_ -= ground_.size[at(value)];
  if (ground_.end[at(value)] <= position_ && !wanted(value)) return;  // it was there for another
  gone_.add(value);
  for (const Value other : ground_.near[value]) {
    if (gone_.is(other))
      gone_.join(value, other);
    else if (ground_.maker[at(other)] < ground_.maker[at(value)] && there_[at(other)])
      due_[at(other)] = std::min(due_[at(other)], due_[at(value)]);
  }
  reckon(value);
}

bool Pass::wanted(Value value) const {
  const Rows::Row uses = ground_.uses[value];
  return uses.size() && uses[uses.size() - 1] >= position_;
}

void Pass::reckon(Value value) {
  if (!trial_.around) return;
  for (const Value other : ground_.near[value])
    if (!gone_.is(other))
      set_cost(other, each_[at(other)] + gone_.seconds_of(ground_.near[other]));
}

// What comes back.

void Pass::have(Value value) {
  if (there_[at(value)]) return;
  std::vector<std::pair<Value, std::size_t>> stack{{value, 0}};  // and how many of its sources are locked
  while (!stack.empty()) {
    if (++looks_ > 4 * kMostReruns * ground_.ops) throw Enough();
    const Value wanted = stack.back().first;
    std::size_t locked = stack.back().second;
    const auto sources = [&] { return ground_.sources[ground_.maker[at(wanted)]]; };
    if (below_[at(wanted)]) give_back(wanted);
    if (there_[at(wanted)]) {
      stack.pop_back();
      for (std::size_t i = 0; i < locked; ++i) unlock(sources()[i], position_ - 1);
      continue;
    }
    const Rows::Row needed = sources();
    while (locked < needed.size() && there_[at(needed[locked])]) lock(needed[locked++]);
    stack.back().second = locked;
    if (locked < needed.size()) {
      stack.emplace_back(needed[locked], 0);
      continue;
    }
    rerun(wanted);
    stack.pop_back();
    for (const Value source : needed) unlock(source, position_ - 1);
    for (const Value source : needed)
      if (is_over(source)) make_others(source);
    for (const Value source : needed)
      if (is_over(source)) drop(source);
  }
}

bool Pass::is_over(Value value) const {
  return ground_.end[at(value)] <= position_ && (free_[at(value / 64)] >> (value % 64) & 1) != 0 &&
      !wanted(value);
}

void Pass::make_others(Value source) {
  const double soon = ground_.starts[at(position_)] + kSoon * ground_.starts[at(ground_.ops)];
  for (const Value other : ground_.near[source]) {
    if (!gone_.is(other) || due_[at(other)] > soon) continue;
    const int64_t maker = ground_.maker[at(other)];
    const Rows::Row needed = ground_.sources[maker];
    bool here = std::find(needed.begin(), needed.end(), source) != needed.end();
    for (const Value one : needed) here = here && there_[at(one)];
    if (!here) continue;
    if (held_ + ground_.made_bytes[at(maker)] + ground_.workspace[at(maker)] > limit_) continue;
    for (const Value one : needed) lock(one);
    rerun(other);
    for (const Value one : needed) unlock(one, position_ - 1);
  }
}

void Pass::rerun(Value value) {
  const int64_t maker = ground_.maker[at(value)];
  const Rows::Row made = ground_.made[maker];
  make_room(ground_.made_bytes[at(maker)] + ground_.workspace[at(maker)]);
  done_.push_back({LOWTIDE_REMAKE_RERUN, position_, maker});
  seconds_ += ground_.again[at(maker)];
  if (seconds_ > trial_.most_seconds || ++reruns_ > kMostReruns * ground_.ops) throw Enough();
  for (const Value one : made) {
    if (there_[at(one)] || below_[at(one)]) continue;
    take(one);
    if (gone_.is(one)) {
      gone_.remove(one);
      reckon(one);
    }
    due_[at(one)] = next(one, position_ - 1);
  }
  for (const Value one : made)
    if (one != value && is_over(one)) drop(one);
}

}  // namespace lowtide
