#include "ground.h"

namespace lowtide {
namespace {

constexpr std::size_t kLongest = 48;  // ops that are looked at to make one value again

template <typename T>
std::vector<T> copied(const T *given, int64_t count) {
  return std::vector<T>(given, given + count);
}

}  // namespace

Ground::Ground(const lowtide_remake_step &given)
    : ops(given.ops),
      values(given.values),
      unseen(given.unseen),
      workspace(copied(given.workspace, ops)),
      again(copied(given.again, ops)),
      starts(copied(given.starts, ops + 1)),
      chances(copied(given.chances, ops + 2)),
      wants(given.wants, ops),
      writes(given.writes, ops),
      sources(given.sources, ops),
      made(given.made, ops),
      appearing(given.appearing, ops),
      overwritten(given.overwritten, ops),
      ending(given.ending, ops),
      size(copied(given.size, values)),
      maker(copied(given.maker, values)),
      end(copied(given.end, values)),
      until(copied(given.until, values)),
      holdable(copied(given.holdable, values)),
      can(copied(given.can, values)),
      after(copied(given.after, values)),
      uses(given.uses, values),
      near(given.near, values),
      made_bytes(static_cast<std::size_t>(ops), 0) {
  for (int64_t op = 0; op < ops; ++op)
    for (const int32_t value : made[op])
      made_bytes[static_cast<std::size_t>(op)] += size[static_cast<std::size_t>(value)];
}

void Ground::seconds(const uint8_t *holds, double *found) const {
  std::vector<int64_t> seen(static_cast<std::size_t>(ops), -1);
  for (int64_t value = 0; value < values; ++value)
    found[value] = maker[static_cast<std::size_t>(value)] < 0 ? 0.0 : chain(value, holds, seen, value);
}

double Ground::chain(int64_t value, const uint8_t *holds, std::vector<int64_t> &seen,
                     int64_t number) const {
  const auto index = [](int64_t i) { return static_cast<std::size_t>(i); };
  const int64_t until_then = until[index(value)];
  double sum = 0.0;
  std::size_t count = 0;
  std::vector<int64_t> stack;
  const auto add = [&](int64_t op) {
    if (seen[index(op)] == number) return;
    seen[index(op)] = number;
    sum += again[index(op)];
    ++count;
    stack.push_back(op);
  };
  add(maker[index(value)]);
  while (!stack.empty() && count < kLongest) {
    const int64_t op = stack.back();
    stack.pop_back();
    for (const int32_t source : sources[op]) {
      const bool over = !after[index(source)] && end[index(source)] <= until_then;
      if (over && !holds[source] && can[index(source)]) add(maker[index(source)]);
    }
  }
  return sum;
}

}  // namespace lowtide
