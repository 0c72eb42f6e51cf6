// What a lane allocated, step by step: the last few steps are kept.
#ifndef LOWTIDE_STEPS_H
#define LOWTIDE_STEPS_H

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace lowtide {

struct Step {
  int64_t number = -1;
  int64_t start = 0;       // the lane's tick at its start
  int64_t ticks = 0;       // its length, once it has ended
  int64_t start_ns = 0;
  uint64_t signature = 0;  // of the sizes in order
  bool overflow = false;   // longer than is kept
  std::vector<int64_t> sizes, made, freed;       // ticks since the start; freed -1: not yet
  std::vector<int64_t> made_ns, freed_ns;        // empty where times are not noted
};

class Steps {
 public:
  static constexpr int kKept = 3;            // ended ones
  static constexpr size_t kLongest = 1 << 20;

  Steps() { begin(0); }

  Step &now() { return ring_[static_cast<size_t>(number_ % kSlots)]; }
  int64_t number() const { return number_; }
  // The step `back` marks ago, 0 being the last that ended; nullptr if it is not kept.
  const Step *ended(int64_t back) const;

  // Notes an allocation and returns its index in the step, or -1 if it is not noted.
  int64_t made(int64_t size, int64_t now_ns);
  void freed(int64_t step, int64_t index, int64_t now_ns);
  void end(int64_t now_ns);

 private:
  static constexpr int kSlots = kKept + 1;

  void begin(int64_t now_ns);

  std::array<Step, kSlots> ring_;
  int64_t number_ = 0;
  int64_t tick_ = 0;
};

}  // namespace lowtide
#endif
