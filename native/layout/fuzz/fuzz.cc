// Throws random problems, sound and broken, at the C ABI and checks every answer
// the slow way.  Meant to run under sanitizers: fuzz SEED SECONDS.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "../layout.h"

namespace {

struct Case {
  std::vector<int64_t> lower, upper, size, fixed;
  int64_t period = 0, align = 1, goal = 0;

  lowtide_layout_problem problem() const {
    return {static_cast<int64_t>(size.size()), lower.data(), upper.data(), size.data(),
            fixed.data(),                      period,       align,        goal};
  }
};

bool alive_together(const Case &c, size_t i, size_t j) {
  for (int64_t shift : {-c.period, int64_t{0}, c.period})
    if (c.lower[i] < c.upper[j] + shift && c.lower[j] + shift < c.upper[i]) return true;
  return false;
}

const char *flaw(const Case &c, const std::vector<int64_t> &offset,
                 const lowtide_layout_result &result) {
  int64_t height = 0;
  for (size_t i = 0; i < c.size.size(); ++i) {
    if (offset[i] < 0 || offset[i] % c.align) return "an offset is negative or unaligned";
    if (c.fixed[i] >= 0 && c.fixed[i] != offset[i]) return "a fixed buffer was moved";
    height = std::max(height, offset[i] + (c.size[i] + c.align - 1) / c.align * c.align);
    for (size_t j = 0; j < i; ++j)
      if (offset[i] < offset[j] + c.size[j] && offset[j] < offset[i] + c.size[i] &&
          alive_together(c, i, j))
        return "two buffers share bytes";
  }
  if (height != result.height) return "the height is wrong";
  if (result.bound > result.height) return "the bound is above the height";
  for (size_t i = 0; i < c.size.size(); ++i) {  // the load when i starts
    int64_t load = 0;
    for (size_t j = 0; j < c.size.size(); ++j)
      for (int64_t shift : {-c.period, int64_t{0}, c.period}) {
        if (shift && !c.period) continue;
        if (c.lower[j] + shift <= c.lower[i] && c.lower[i] < c.upper[j] + shift) {
          load += c.size[j];
          break;
        }
      }
    if (load > result.bound) return "the bound is below the load";
  }
  return nullptr;
}

int64_t pick(std::mt19937_64 &random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

Case make(std::mt19937_64 &random) {
  Case c;
  const int64_t count = pick(random, 0, pick(random, 0, 3) ? 30 : 200);
  const int64_t moments = pick(random, 1, 60);
  const int64_t largest = int64_t{1} << pick(random, 0, 40);
  c.period = pick(random, 0, 2) ? 0 : moments;
  c.align = pick(random, 0, 2) ? 1 : pick(random, 1, 600);
  c.goal = pick(random, 0, 1) ? 0 : pick(random, 0, 20 * largest);
  for (int64_t i = 0; i < count; ++i) {
    c.lower.push_back(pick(random, 0, moments - 1));
    c.upper.push_back(c.lower.back() + pick(random, 1, moments));
    c.size.push_back(pick(random, 1, largest));
    c.fixed.push_back(-1);
  }
  return c;
}

// Something no caller should pass.
void spoil(Case &c, std::mt19937_64 &random) {
  const int64_t huge[] = {INT64_MAX, INT64_MIN, int64_t{1} << 62, -1, 0, int64_t{1} << 61};
  const int64_t value = huge[pick(random, 0, 5)];
  const size_t at = c.size.empty() ? 0 : static_cast<size_t>(pick(random, 0, c.size.size() - 1));
  std::vector<int64_t> *rows[] = {&c.lower, &c.upper, &c.size, &c.fixed};
  const int64_t what = pick(random, 0, 6);
  if (what < 4 && !c.size.empty()) (*rows[what])[at] = value;
  if (what == 4) c.period = value;
  if (what == 5) c.align = value;
  if (what == 6) c.goal = value;
}

}  // namespace

int main(int argc, char **argv) {
  std::mt19937_64 random(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0);
  const double seconds = argc > 2 ? std::atof(argv[2]) : 5;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  long cases = 0, refused = 0;
  while (std::chrono::steady_clock::now() < end) {
    Case c = make(random);
    const bool spoilt = pick(random, 0, 4) == 0;
    if (spoilt) spoil(c, random);
    lowtide_layout_budget budget{random(), pick(random, 0, 20000), pick(random, 0, 1) ? -1 : 0.01,
                                 static_cast<int32_t>(pick(random, 0, 3))};
    std::vector<int64_t> offset(c.size.size(), -7);
    lowtide_layout_result result{};
    for (int turn = 0; turn < 2; ++turn) {
      const auto problem = c.problem();
      const int32_t status = lowtide_layout_pack(&problem, &budget, offset.data(), &result);
      ++cases;
      if (status != LOWTIDE_LAYOUT_OK) {
        ++refused;
        if (!spoilt) {
          std::printf("fuzz: a sound problem was refused (%d)\n", status);
          return 1;
        }
        break;
      }
      if (spoilt && (c.align > (int64_t{1} << 40) || c.period > (int64_t{1} << 40))) break;
      if (const char *what = flaw(c, offset, result)) {
        std::printf("fuzz: case %ld: %s\n", cases, what);
        return 1;
      }
      for (size_t i = 0; i < c.fixed.size(); ++i)  // and again with some of them fixed
        if (pick(random, 0, 3) == 0) c.fixed[i] = offset[i];
    }
  }
  std::printf("fuzz: %ld cases, %ld of them refused\n", cases, refused);
  return 0;
}
