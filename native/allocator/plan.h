// Plans of a lane, and which of them a step is following.
#ifndef LOWTIDE_PLAN_H
#define LOWTIDE_PLAN_H

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace lowtide {

class Plan {
 public:
  Plan(int64_t number, std::vector<int64_t> sizes, int32_t phases, std::vector<int64_t> offsets);

  const int64_t number;
  const std::vector<int64_t> sizes;
  int32_t phase = 0;  // the one in use
  int64_t next = -1;  // the plan that followed when it was last followed to its end

  int64_t offset(size_t i) const { return offsets_[static_cast<size_t>(phase) * sizes.size() + i]; }
  const std::vector<int64_t> &offsets() const { return offsets_; }
  void turn() { phase = (phase + 1) % phases_; }
  // The first place at or after `from` where the plan has these three sizes, else the first of all:
  // the index of the third, or -1.
  int64_t third_of(int64_t a, int64_t b, int64_t c, int64_t from) const;

 private:
  const int32_t phases_;
  const std::vector<int64_t> offsets_;
  std::unordered_map<uint64_t, std::vector<int64_t>> triples_;
};

// Finds each allocation of a step in a plan, by order and size.
//
// A step begins with the plan that is expected.  At the first allocation that does not fit, another
// plan with the same beginning takes over.  If there is none, one or two strangers are let pass, and
// from the third on the step is *lost*, until three sizes in a row are found in the plan again.
class Follower {
 public:
  struct Match {
    bool found = false;
    int64_t offset = -1;  // -1: the plan puts it outside the arena
  };

  void add(std::unique_ptr<Plan> plan) { plans_.push_back(std::move(plan)); }
  void forget(int64_t number);
  std::vector<int64_t> offsets(int64_t number);  // of that plan
  bool empty() const { return plans_.empty(); }

  // `sizes` is the step so far, the allocation in question last.
  Match match(const std::vector<int64_t> &sizes);
  bool lost() const { return strangers_ >= kPatience; }
  // Ends the step of these sizes; the plan that all of it agreed with, or -1.
  int64_t end(const std::vector<int64_t> &sizes);
  void reset();  // forgets what it was following

 private:
  static constexpr int kPatience = 3;

  Plan *find(int64_t number);

  std::vector<std::unique_ptr<Plan>> plans_;
  Plan *plan_ = nullptr;     // followed, or expected
  int64_t position_ = 0;     // in it
  int strangers_ = 0;        // in a row
  bool exact_ = true;        // the step has agreed with plan_ from its start
  bool used_ = false;        // plan_ gave an address in this step
  int64_t last_ = -1;        // the plan last followed to its end
};

}  // namespace lowtide
#endif
