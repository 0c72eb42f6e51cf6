// Values that are gone, in groups: those that would be made again together.  See `_policy/gone.py`.
#ifndef LOWTIDE_REMAKE_GONE_H
#define LOWTIDE_REMAKE_GONE_H

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "ground.h"

namespace lowtide {

class Gone {
 public:
  explicit Gone(const std::vector<double> &each)
      : each_(each), above_(each.size()), seconds_(each.size(), 0.0), is_(each.size(), 0) {
    std::iota(above_.begin(), above_.end(), 0);
  }

  bool is(int64_t value) const { return is_[static_cast<std::size_t>(value)] != 0; }

  void add(int64_t value) {
    const auto at = static_cast<std::size_t>(value);
    is_[at] = 1;
    above_[at] = static_cast<int32_t>(value);
    seconds_[at] = each_[at];
  }

  void join(int64_t one, int64_t other) {
    const int32_t first = root(static_cast<int32_t>(one));
    const int32_t second = root(static_cast<int32_t>(other));
    if (first == second) return;
    above_[static_cast<std::size_t>(second)] = first;
    seconds_[static_cast<std::size_t>(first)] += seconds_[static_cast<std::size_t>(second)];
  }

  void remove(int64_t value) {
    is_[static_cast<std::size_t>(value)] = 0;
    seconds_[static_cast<std::size_t>(root(static_cast<int32_t>(value)))] -=
        each_[static_cast<std::size_t>(value)];
  }

  // What all groups take in which one of the values is.
  double seconds_of(Rows::Row values) {
    roots_.clear();
    for (const int32_t value : values)
      if (is(value)) roots_.push_back(root(value));
    std::sort(roots_.begin(), roots_.end());
    double sum = 0.0;
    for (std::size_t i = 0; i < roots_.size(); ++i)
      if (i == 0 || roots_[i] != roots_[i - 1]) sum += seconds_[static_cast<std::size_t>(roots_[i])];
    return std::max(0.0, sum);
  }

 private:
  int32_t root(int32_t value) {
    while (above_[static_cast<std::size_t>(value)] != value) {
      int32_t &above = above_[static_cast<std::size_t>(value)];
      above = above_[static_cast<std::size_t>(above)];
      value = above;
    }
    return value;
  }

  const std::vector<double> &each_;
  std::vector<int32_t> above_;
  std::vector<double> seconds_;
  std::vector<uint8_t> is_;
  std::vector<int32_t> roots_;
};

}  // namespace lowtide
#endif
