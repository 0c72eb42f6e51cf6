// An arena in pages of its own, whose blocks need not lie in one piece.
//
// A page of memory may be shown at several addresses at once.  So where no gap is large enough for a
// block, free pages from anywhere are shown side by side at addresses beyond the arena's own: a
// *window*.  What is free can always be used, whatever its order; nothing is lost to fragments but
// parts of pages.
//
//     addresses   0 ................ bytes | windows ............. span
//     page        0    1    2    3         |
//                 [A]  [  ] [B]  [  ]        C needs two pages: 1 and 3
//                                          | [1][3]
//
// Offsets beyond `bytes` are windows'.  In the map of blocks, a block in a window is a part for each
// stretch of its pages, so that no two blocks share a byte however they are addressed.  Pages without
// memory are taken by blocks that nobody has.
#ifndef LOWTIDE_PAGED_H
#define LOWTIDE_PAGED_H

#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "arena.h"

namespace lowtide {

class Paged final : public Arena {
 public:
  using Stretch = std::pair<int64_t, int64_t>;  // of pages: the first, how many

  // Of `bytes`, all without memory yet; windows have the rest of `span`.
  Paged(void *base, int64_t bytes, int64_t span, int64_t page, Stream stream);

  const int64_t span;
  const int64_t page;
  int64_t floor = 0;  // what lies below is for plans: others keep out of it where they can

  bool holds(const void *pointer) const override {
    return pointer >= base && pointer < base + span;
  }
  bool vacant(int64_t offset, int64_t bytes) const override;
  void put(int64_t offset, Block block) override;
  Block *find(int64_t offset) override;
  Block take(int64_t offset) override;

  int64_t pages_of(int64_t size) const { return (size + page - 1) / page; }
  // Whether whole pages for it would waste too much, as for a block smaller than one.
  bool is_odd(int64_t size) const;
  // Where a block fits in one piece above `floor`, or -1: an odd one in the smallest gap, others at a
  // page's start.
  int64_t fit(int64_t size, int64_t floor) const;
  // A window made before, of as many pages above `floor`, all of them free, or -1.
  int64_t fit_window(int64_t size, int64_t floor) const;
  // Free pages above `floor`, those of the smallest gaps first; fewer than asked for if there are not
  // so many.
  std::vector<int64_t> free_pages(int64_t count, int64_t floor) const;

  // Addresses for a window of these pages, where the caller is to show them; -1: none are left.
  // One that is kept stays until it is let go as often.
  int64_t add_window(const std::vector<int64_t> &pages, bool kept);
  void keep(int64_t window);
  void let_go(int64_t window);
  void forget_window(int64_t window);  // it could not be shown
  // Windows that nobody uses are gone, those that are kept only if `all`: where they were, and how
  // many pages each had.
  std::vector<Stretch> drop_windows(bool all);
  int64_t windows() const { return static_cast<int64_t>(windows_.size()); }

  // Calls `on` for each block, with its offset and the pages in which it lies.
  void each(const std::function<void(int64_t, const Block &, const std::vector<int64_t> &)> &on)
      const;

  int64_t filled() const { return filled_; }  // pages that have memory
  // Pages without memory, the lowest first.
  std::vector<Stretch> lacking(int64_t count) const;
  void fill(Stretch pages);
  void drain(int64_t page);  // it must be free, and shown in no window

 private:
  struct Window {
    std::vector<Stretch> stretches;
    int64_t pages = 0;
    int64_t kept = 0;    // by so many
    bool fresh = false;  // for the first of them, who is still to come
    bool used = false;
    Block block;
    std::multimap<int64_t, int64_t>::iterator idle;  // while nobody uses it
  };

  int64_t take_addresses(int64_t pages);  // -1: there are none
  void give_addresses(int64_t offset, int64_t pages);

  // Calls `on(offset, bytes)` for each piece of a block of `size` in the window; false: one said so.
  template <typename Call>
  static bool pieces(const Window &window, int64_t page, int64_t size, Call on);

  int64_t filled_ = 0;
  std::map<int64_t, Window> windows_;             // by offset
  std::multimap<int64_t, int64_t> idle_;          // pages -> window
  std::map<int64_t, int64_t> addresses_;          // that no window has: offset -> pages
};

}  // namespace lowtide
#endif
