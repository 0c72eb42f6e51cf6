// What is the same for every pass over a step.
#ifndef LOWTIDE_REMAKE_GROUND_H
#define LOWTIDE_REMAKE_GROUND_H

#include <cstddef>
#include <cstdint>
#include <vector>

#include "remake.h"

namespace lowtide {

// Rows of different lengths, flat.
class Rows {
 public:
  struct Row {
    const int32_t *first, *last;
    const int32_t *begin() const { return first; }
    const int32_t *end() const { return last; }
    int32_t operator[](std::size_t i) const { return first[i]; }
    std::size_t size() const { return static_cast<std::size_t>(last - first); }
  };

  Rows(const lowtide_remake_rows &given, int64_t count)
      : at_(given.at, given.at + count + 1), what_(given.what, given.what + given.at[count]) {}

  Row operator[](int64_t i) const {
    return {what_.data() + at_[static_cast<std::size_t>(i)],
            what_.data() + at_[static_cast<std::size_t>(i) + 1]};
  }

 private:
  std::vector<int64_t> at_;
  std::vector<int32_t> what_;
};

struct Ground {
  explicit Ground(const lowtide_remake_step &given);

  // What it takes to make each value again when all is there that lives so long: what is over by
  // the time of its next use after a while has to be made first, unless it is held.
  void seconds(const uint8_t *holds, double *found) const;

  int64_t ops, values, unseen;
  std::vector<int64_t> workspace;
  std::vector<double> again, starts;
  std::vector<int64_t> chances;
  Rows wants, writes, sources, made, appearing, overwritten, ending;
  std::vector<int64_t> size, maker, end, until, holdable;
  std::vector<uint8_t> can, after;
  Rows uses, near;
  std::vector<int64_t> made_bytes;  // of each op that runs again

 private:
  double chain(int64_t value, const uint8_t *holds, std::vector<int64_t> &seen,
               int64_t number) const;
};

}  // namespace lowtide
#endif
