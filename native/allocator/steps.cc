#include "steps.h"

namespace lowtide {

const Step *Steps::ended(int64_t back) const {
  if (back < 0 || back >= kKept || back >= number_) return nullptr;
  return &ring_[static_cast<size_t>((number_ - 1 - back) % kSlots)];
}

int64_t Steps::made(int64_t size, int64_t now_ns) {
  Step &step = now();
  const int64_t tick = tick_++ - step.start;
  step.signature = (step.signature ^ static_cast<uint64_t>(size)) * 0x9e3779b97f4a7c15u;
  step.signature ^= step.signature >> 31;
  if (step.sizes.size() >= kLongest) {
    step.overflow = true;
    return -1;
  }
  step.sizes.push_back(size);
  step.made.push_back(tick);
  step.freed.push_back(-1);
  if (now_ns) {
    step.made_ns.push_back(now_ns - step.start_ns);
    step.freed_ns.push_back(-1);
  }
  return static_cast<int64_t>(step.sizes.size()) - 1;
}

void Steps::freed(int64_t number, int64_t index, int64_t now_ns) {
  const int64_t tick = tick_++;
  if (index < 0 || number <= number_ - kSlots) return;
  Step &step = ring_[static_cast<size_t>(number % kSlots)];
  const size_t i = static_cast<size_t>(index);
  step.freed[i] = tick - step.start;
  if (now_ns && i < step.freed_ns.size()) step.freed_ns[i] = now_ns - step.start_ns;
}

void Steps::end(int64_t now_ns) {
  now().ticks = tick_ - now().start;
  ++number_;
  begin(now_ns);
}

void Steps::begin(int64_t now_ns) {
  Step &step = now();  // its vectors keep their room
  step.number = number_;
  step.start = tick_;
  step.ticks = 0;
  step.start_ns = now_ns;
  step.signature = 0;
  step.overflow = false;
  for (auto *column : {&step.sizes, &step.made, &step.freed, &step.made_ns, &step.freed_ns})
    column->clear();
}

}  // namespace lowtide
