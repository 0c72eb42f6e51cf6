// Watches for a step that comes to hold more than those before.
#ifndef LOWTIDE_GUARD_H
#define LOWTIDE_GUARD_H

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace lowtide {

// Rings when bytes held come near to `most`; that is late.  So it rings as well at a large block that
// announces it: larger than any at its place in the steps before, by so much that the peak would be
// above with it if all that a step makes were.  Small blocks come and go with what a program prints or
// counts: they have no place.  What is known is of steps that did not come near, whether anybody heard
// or not; as long as there was none to listen to, of the last one that was only counted.
class Guard {
 public:
  using Sound = int32_t (*)(void *context);

  static constexpr int64_t kLarge = 1 << 20;

  // Steps of the lane are listened to, as far as this thread makes them, from the next one on; without
  // a sound they are only counted.  False: no whole one is known by then, so it would ring late.
  bool begin(int32_t lane, int64_t most, Sound to, void *with) {
    if (lane != lane_) *this = {};
    sound = to;
    context = with;
    lane_ = lane;
    most_ = limit_ = most;
    listens_ = false;
    thread_ = std::this_thread::get_id();
    limit();
    return ended_ > 0;  // of the first, only the end was seen
  }

  void rest() { sound = nullptr; }

  // The lane's step has ended, of blocks of these sizes.
  void end_step(int32_t lane, const std::vector<int64_t> &sizes) {
    if (lane != lane_) return;
    if (listens_ ? held_ <= limit_ : !listened_) {
      if (!listened_) {  // what was counted was watched: some of its blocks are lowtide's
        large_.clear();
        peak_ = 0;
      }
      listened_ = listens_;
      learn(sizes);
    }
    next_ = 0;
    held_ = first_ = 0;
    ++ended_;
    if (!listens_ || ended_ == 2) limit();
    listens_ = true;
  }

  // Whether the block at hand is to be told of; the device's arenas will hold so many bytes with it.
  bool rings(int32_t lane, int64_t bytes, int64_t held) {
    if (lane != lane_) return false;
    if (held_ == 0) first_ = held - bytes;
    held_ = std::max(held_, held);
    bool larger = false;
    if (bytes >= kLarge) {
      const int64_t known = next_ < large_.size() ? large_[next_] : 0;
      larger = bytes > known && above(bytes, known);
      if (!larger) ++next_;  // else it may be one that is there for once
    }
    return sound && listens_ && (held > limit_ || larger) &&
           std::this_thread::get_id() == thread_;
  }

  // Bytes held at most in the step so far.
  int64_t held() const { return held_; }

  Sound sound = nullptr;
  void *context = nullptr;

 private:
  void learn(const std::vector<int64_t> &sizes) {
    size_t place = 0;
    for (const int64_t size : sizes) {
      if (size < kLarge) continue;
      if (place == large_.size()) large_.push_back(0);
      large_[place] = std::max(large_[place], size);
      largest_ = std::max(largest_, size);
      ++place;
    }
    if (held_ <= peak_) return;
    peak_ = held_;
    stays_ = first_;
  }

  // Once a whole step is known, it rings before two more of the largest blocks would be too many, and
  // not before half of what that step leaves is taken.
  void limit() {
    if (ended_ > 1 && most_ > peak_) limit_ = most_ - std::min((most_ - peak_) / 2, 2 * largest_);
  }

  // Whether the peak would be above if all that a step makes were so much larger.
  bool above(int64_t bytes, int64_t known) const {
    if (known == 0) return true;
    if (!listened_) return bytes > largest_;
    const double times = static_cast<double>(bytes) / static_cast<double>(known);
    return static_cast<double>(stays_) + times * static_cast<double>(peak_ - stays_) >
           static_cast<double>(most_);
  }

  int32_t lane_ = -1;
  int64_t most_ = 0;
  int64_t limit_ = 0;           // beyond which it rings
  int64_t peak_ = 0;            // bytes held within it at most
  int64_t stays_ = 0;           // ... when that step began
  int64_t first_ = 0, held_ = 0;  // ... when this one began, and at most since then
  int64_t ended_ = 0;           // steps; of the first, only the end is known of what it held
  bool listens_ = false;
  bool listened_ = false;       // to the steps that are known
  std::vector<int64_t> large_;  // by place, the largest block of all steps
  int64_t largest_ = 0;
  size_t next_ = 0;
  std::thread::id thread_;
};

}  // namespace lowtide
#endif
