#include "plan.h"

#include <algorithm>

namespace lowtide {
namespace {

uint64_t triple(int64_t a, int64_t b, int64_t c) {
  uint64_t mixed = 0;
  for (const int64_t size : {a, b, c})
    mixed = (mixed ^ static_cast<uint64_t>(size)) * 0x9e3779b97f4a7c15u + (mixed >> 29);
  return mixed;
}

}  // namespace

Plan::Plan(int64_t number, std::vector<int64_t> sizes_in, int32_t phases,
           std::vector<int64_t> offsets)
    : number(number), sizes(std::move(sizes_in)), phases_(phases), offsets_(std::move(offsets)) {
  for (size_t i = 2; i < sizes.size(); ++i)
    triples_[triple(sizes[i - 2], sizes[i - 1], sizes[i])].push_back(static_cast<int64_t>(i));
}

int64_t Plan::third_of(int64_t a, int64_t b, int64_t c, int64_t from) const {
  const auto found = triples_.find(triple(a, b, c));
  if (found == triples_.end()) return -1;
  const std::vector<int64_t> &places = found->second;
  const auto at = std::lower_bound(places.begin(), places.end(), from);
  return at == places.end() ? places.front() : *at;
}

Plan *Follower::find(int64_t number) {
  for (const auto &plan : plans_)
    if (plan->number == number) return plan.get();
  return nullptr;
}

void Follower::forget(int64_t number) {
  if (plan_ && plan_->number == number) reset();
  plans_.erase(std::remove_if(plans_.begin(), plans_.end(),
                              [&](const auto &plan) { return plan->number == number; }),
               plans_.end());
}

std::vector<int64_t> Follower::offsets(int64_t number) {
  const Plan *const plan = find(number);
  return plan ? plan->offsets() : std::vector<int64_t>{};
}

void Follower::reset() {
  plan_ = nullptr;
  position_ = 0;
  strangers_ = 0;
  exact_ = true;
  used_ = false;
}

Follower::Match Follower::match(const std::vector<int64_t> &sizes) {
  const int64_t size = sizes.back();
  const auto accept = [&](int64_t index) {
    position_ = index + 1;
    strangers_ = 0;
    used_ = true;
    return Match{true, plan_->offset(static_cast<size_t>(index))};
  };
  if (!plan_ && sizes.size() == 1 && !plans_.empty()) plan_ = plans_.back().get();
  if (!plan_) return {};
  if (position_ < static_cast<int64_t>(plan_->sizes.size()) &&
      plan_->sizes[static_cast<size_t>(position_)] == size)
    return accept(position_);
  if (exact_) {  // the newest first
    for (auto other = plans_.rbegin(); other != plans_.rend(); ++other) {
      const std::vector<int64_t> &planned = (*other)->sizes;
      if (planned.size() < sizes.size() ||
          !std::equal(sizes.rbegin(), sizes.rend(),
                      planned.rend() - static_cast<int64_t>(sizes.size())))
        continue;
      plan_ = other->get();
      return accept(static_cast<int64_t>(sizes.size()) - 1);
    }
  }
  exact_ = false;
  if (strangers_ < kPatience) ++strangers_;
  if (strangers_ < kPatience || sizes.size() < 3) return {};
  const size_t n = sizes.size();
  const int64_t third = plan_->third_of(sizes[n - 3], sizes[n - 2], size, position_);
  return third < 0 ? Match{} : accept(third);
}

int64_t Follower::end(const std::vector<int64_t> &sizes) {
  Plan *const followed =
      plan_ && exact_ && position_ == static_cast<int64_t>(plan_->sizes.size()) && !sizes.empty()
          ? plan_
          : nullptr;
  if (used_) plan_->turn();
  if (followed) {
    if (Plan *const before = find(last_)) before->next = followed->number;
    last_ = followed->number;
  }
  Plan *const again = plan_;
  reset();
  plan_ = again;
  if (followed)
    if (Plan *const next = find(followed->next)) plan_ = next;
  return followed ? followed->number : -1;
}

}  // namespace lowtide
