// One pass over a step, in order: see `_policy/remake_pass.py`, which it follows step by step.
#ifndef LOWTIDE_REMAKE_PASS_H
#define LOWTIDE_REMAKE_PASS_H

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "gone.h"
#include "ground.h"
#include "remake.h"

namespace lowtide {

struct Enough {};  // it takes too long

struct Stuck {
  int64_t op, needed;
};

class Pass {
 public:
  Pass(const Ground &ground, const lowtide_remake_trial &trial);

  void run();  // throws Enough, Stuck

  double seconds() const { return seconds_; }
  const std::vector<std::array<int64_t, 3>> &done() const { return done_; }

 private:
  using Value = int64_t;

  static std::size_t at(int64_t i) { return static_cast<std::size_t>(i); }

  void take(Value value);
  void arrive(Value value, int64_t position);
  bool may_go(Value value) const;
  void end(Value value);
  double next(Value value, int64_t position) const;
  void lock(Value value);
  void unlock(Value value, int64_t position);
  void hold(Value value);
  void let_go(Value value);
  void move(int64_t position);
  void give_back(Value value);
  void make_room(int64_t count);
  Value worst() const;  // the one to lose first, or -1
  void drop(Value value);
  bool wanted(Value value) const;
  void reckon(Value value);
  void have(Value value);
  bool is_over(Value value) const;
  void make_others(Value source);
  void rerun(Value value);
  void set_free(Value value, bool free);
  void set_cost(Value value, double cost);
  void open_at(int64_t position, Value value) { opening_[at(position)].push_back(value); }

  const Ground &ground_;
  const lowtide_remake_trial &trial_;
  std::vector<double> each_;  // to make each value again, when all is there that lives so long
  int64_t limit_, held_ = 0, position_ = 0, reruns_ = 0, looks_ = 0;
  int64_t releases_ = 0, fetches_ = 0;  // so many are done
  std::vector<uint8_t> there_, below_;
  std::vector<int32_t> locked_;
  std::vector<uint64_t> free_;   // a bit for each: there, not locked, and can be made again
  std::vector<double> static_, cost_;  // by size and weight; cost, to its power, times that
  std::vector<double> due_;      // when it is needed next, in plain seconds
  Gone gone_;
  std::vector<std::vector<Value>> opening_, held_until_;  // by position
  double seconds_ = 0.0;
  std::vector<std::array<int64_t, 3>> done_;
};

}  // namespace lowtide
#endif
