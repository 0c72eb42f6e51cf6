#include "problem.h"

#include <algorithm>
#include <iterator>
#include <map>

namespace lowtide {
namespace {

constexpr int32_t kPasses = 16;                // over the buffers, to find dominated ones
constexpr int64_t kPairs = 100'000'000;        // of open and fixed buffers a bound may look at

std::vector<int32_t> pinned(const Problem &problem) {
  std::vector<int32_t> result;
  for (int32_t i = 0; i < problem.count(); ++i)
    if (problem.fixed[i] >= 0) result.push_back(i);
  std::sort(result.begin(), result.end(), [&](int32_t x, int32_t y) {
    return problem.fixed[x] != problem.fixed[y] ? problem.fixed[x] < problem.fixed[y] : x < y;
  });
  return result;
}

}  // namespace

Problem compress(const std::vector<Life> &lives, std::vector<int64_t> size,
                 std::vector<int64_t> fixed) {
  struct Event {
    int64_t time;
    bool starts;  // ends sort before starts: the bytes are free again at that moment
    bool tail;
    int32_t id;
  };
  const int32_t n = static_cast<int32_t>(lives.size());
  std::vector<Event> events;
  events.reserve(2 * lives.size());
  for (int32_t i = 0; i < n; ++i) {
    events.push_back({lives[i].lower, true, false, i});
    events.push_back({lives[i].upper, false, false, i});
    if (lives[i].tail_upper > 0) {
      events.push_back({0, true, true, i});
      events.push_back({lives[i].tail_upper, false, true, i});
    }
  }
  std::sort(events.begin(), events.end(), [](const Event &x, const Event &y) {
    if (x.time != y.time) return x.time < y.time;
    if (x.starts != y.starts) return y.starts;
    return x.id < y.id;
  });

  Problem problem;
  problem.size = std::move(size);
  problem.fixed = std::move(fixed);
  problem.span.resize(n);
  // A section is complete when the first buffer ends after one has started.
  int32_t section = 0;
  bool grown = false;
  for (const Event &event : events) {
    Span &span = problem.span[event.id];
    Range &range = event.tail ? span.tail : span.body;
    if (event.starts) {
      range.begin = section;
      grown = true;
    } else {
      if (grown) ++section;
      grown = false;
      range.end = section;
    }
  }
  for (Span &span : problem.span) {
    if (span.tail.end == 0) continue;
    if (span.tail.end >= span.body.begin) {  // it lives all round: one piece
      span = {{0, section}, {}};
    } else {
      problem.wraps = true;
    }
  }

  std::vector<int64_t> change(section + 1, 0);
  for (int32_t i = 0; i < n; ++i) {
    const Span &span = problem.span[i];
    change[span.body.begin] += problem.size[i];
    change[span.body.end] -= problem.size[i];
    change[0] += span.tail.end ? problem.size[i] : 0;
    change[span.tail.end] -= span.tail.end ? problem.size[i] : 0;
    problem.has_fixed |= problem.fixed[i] >= 0;
  }
  problem.load.resize(section);
  int64_t load = 0;
  for (int32_t k = 0; k < section; ++k) problem.load[k] = load += change[k];

  // The heaviest load of any range: table[j][k] covers sections [k, k + 2^j).
  std::vector<std::vector<int64_t>> table{problem.load};
  for (int32_t step = 1; 2 * step <= section; step *= 2) {
    const std::vector<int64_t> &last = table.back();
    std::vector<int64_t> next(last.size() - step);
    for (size_t k = 0; k < next.size(); ++k) next[k] = std::max(last[k], last[k + step]);
    table.push_back(std::move(next));
  }
  auto heaviest = [&](Range range) {
    int32_t level = 0;
    while ((2 << level) <= range.length()) ++level;
    return std::max(table[level][range.begin], table[level][range.end - (1 << level)]);
  };
  problem.peak.resize(n);
  for (int32_t i = 0; i < n; ++i) {
    problem.peak[i] = heaviest(problem.span[i].body);
    if (problem.span[i].tail.end)
      problem.peak[i] = std::max(problem.peak[i], heaviest(problem.span[i].tail));
  }
  return problem;
}

Problem restrict_to(const Problem &problem, const std::vector<int32_t> &ids) {
  std::vector<Life> lives;
  std::vector<int64_t> size, fixed;
  for (int32_t i : ids) {
    const Span &span = problem.span[i];
    lives.push_back({span.body.begin, span.body.end, span.tail.end});
    size.push_back(problem.size[i]);
    fixed.push_back(problem.fixed[i]);
  }
  return compress(lives, std::move(size), std::move(fixed));
}

std::vector<std::vector<int32_t>> parts(const Problem &problem) {
  // A border between sections that no buffer lives across parts the problem.
  const int32_t n = problem.count();
  std::vector<int32_t> change(problem.sections() + 1, 0);
  auto cross = [&](Range range) {
    if (range.length() < 2) return;
    ++change[range.begin + 1];
    --change[range.end];
  };
  for (const Span &span : problem.span) {
    cross(span.body);
    cross(span.tail);
  }
  std::vector<int32_t> part_of(problem.sections());
  int32_t part = -1, crossing = 0;
  for (int32_t k = 0; k < problem.sections(); ++k) {
    crossing += change[k];
    part_of[k] = crossing == 0 ? ++part : part;
  }
  std::vector<std::vector<int32_t>> groups(part + 1);
  // Whatever wraps ties the first part to the last.
  for (int32_t i = 0; i < n; ++i) {
    int32_t own = part_of[problem.span[i].body.begin];
    if (problem.wraps && own == part) own = 0;
    groups[own].push_back(i);
  }
  groups.erase(std::remove_if(groups.begin(), groups.end(), [](auto &group) { return group.empty(); }),
               groups.end());
  return groups;
}

std::vector<std::vector<int32_t>> fixed_neighbours(const Problem &problem) {
  std::vector<std::vector<int32_t>> result(problem.count());
  if (!problem.has_fixed) return result;
  const std::vector<int32_t> all = pinned(problem);
  for (int32_t i = 0; i < problem.count(); ++i)
    if (problem.fixed[i] < 0)
      for (int32_t j : all)
        if (meet(problem.span[i], problem.span[j])) result[i].push_back(j);
  return result;
}

int64_t settle(const Problem &problem, const std::vector<int32_t> &pinned, int32_t i, int64_t at) {
  for (int32_t j : pinned) {
    if (problem.fixed[j] >= at + problem.size[i]) break;
    if (meet(problem.span[i], problem.span[j]))
      at = std::max(at, problem.fixed[j] + problem.size[j]);
  }
  return at;
}

bool clash(const Problem &problem) {
  // Walk through the sections; those alive are kept by offset, so that only
  // neighbours can clash.
  struct Event {
    int32_t section;
    bool starts;
    int32_t id;
  };
  std::vector<Event> events;
  for (int32_t i : pinned(problem))
    for (Range range : {problem.span[i].body, problem.span[i].tail})
      if (range.length()) {
        events.push_back({range.begin, true, i});
        events.push_back({range.end, false, i});
      }
  std::sort(events.begin(), events.end(), [](const Event &x, const Event &y) {
    return x.section != y.section ? x.section < y.section : x.starts < y.starts;
  });
  std::map<int64_t, int64_t> alive;  // offset: end
  for (const Event &event : events) {
    const int64_t offset = problem.fixed[event.id], end = offset + problem.size[event.id];
    if (!event.starts) {
      alive.erase(offset);
      continue;
    }
    const auto above = alive.lower_bound(offset);
    if (above != alive.end() && above->first < end) return true;
    if (above != alive.begin() && std::prev(above)->second > offset) return true;
    alive.emplace(offset, end);
  }
  return false;
}

std::vector<int32_t> dominated(const Problem &problem, int64_t capacity) {
  struct Sum {
    int64_t size = 0, count = 0;
  };
  const int32_t n = problem.count();
  std::vector<char> out(n, 0);
  std::vector<int32_t> order;
  size_t before = 1;
  for (int32_t pass = 0; pass < kPasses && before != order.size(); ++pass) {
    before = order.size();
    // begun[k]: pieces that begin before section k; ended[k]: that end at it or before
    std::vector<Sum> begun(problem.sections() + 1), ended(problem.sections() + 1);
    for (int32_t i = 0; i < n; ++i) {
      if (out[i]) continue;
      for (Range range : {problem.span[i].body, problem.span[i].tail}) {
        if (range.length() == 0) continue;
        begun[range.begin + 1].size += problem.size[i];
        ended[range.end].size += problem.size[i];
        ++begun[range.begin + 1].count;
        ++ended[range.end].count;
      }
    }
    for (int32_t k = 0; k < problem.sections(); ++k) {
      begun[k + 1].size += begun[k].size;
      begun[k + 1].count += begun[k].count;
      ended[k + 1].size += ended[k].size;
      ended[k + 1].count += ended[k].count;
    }
    for (int32_t i = 0; i < n; ++i) {
      if (out[i] || problem.fixed[i] >= 0) continue;
      // A neighbour of size s forbids at most s + size - 1 of the offsets.
      __int128 forbidden = 0;
      const int64_t size = problem.size[i];
      for (Range range : {problem.span[i].body, problem.span[i].tail}) {
        if (range.length() == 0) continue;
        const int64_t count = begun[range.end].count - ended[range.begin].count - 1;
        forbidden += begun[range.end].size - ended[range.begin].size - size;
        forbidden += static_cast<__int128>(count) * (size - 1);
      }
      if (forbidden > capacity - size) continue;
      out[i] = 1;
      order.push_back(i);
    }
  }
  return order;
}

int64_t lower_bound(const Problem &problem) {
  int64_t highest =
      problem.load.empty() ? 0 : *std::max_element(problem.load.begin(), problem.load.end());
  if (!problem.has_fixed) return highest;
  const std::vector<int32_t> all = pinned(problem);
  for (int32_t i : all) highest = std::max(highest, problem.fixed[i] + problem.size[i]);
  if (static_cast<int64_t>(all.size()) * problem.count() > kPairs) return highest;
  // In each section, as if its buffers could be cut up: whatever may start at
  // an offset fills upwards from there.
  std::vector<std::pair<int64_t, int32_t>> start;
  for (int32_t i = 0; i < problem.count(); ++i)
    start.push_back({problem.fixed[i] >= 0 ? problem.fixed[i] : settle(problem, all, i, 0), i});
  std::sort(start.begin(), start.end());
  std::vector<int64_t> top(problem.sections(), 0);
  for (const auto &[offset, i] : start) {
    for (Range range : {problem.span[i].body, problem.span[i].tail})
      for (int32_t k = range.begin; k < range.end; ++k)
        highest = std::max(highest, top[k] = std::max(top[k], offset) + problem.size[i]);
  }
  return highest;
}

}  // namespace lowtide
