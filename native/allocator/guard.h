// Watches for a step that is none like those before.
#ifndef LOWTIDE_GUARD_H
#define LOWTIDE_GUARD_H

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lowtide {

// Compares the large blocks of a lane's steps, in order, with those of the one in which it began.  Small ones come
// and go with what a program prints or counts: together they are noticed by what is held.  Half of what
// the first step to be looked at leaves of `most` may be taken before that rings.
class Guard {
 public:
  using Sound = int32_t (*)(void *context);

  static constexpr int64_t kLarge = 1 << 20;

  Guard() = default;
  Guard(int32_t lane, int64_t most, Sound sound, void *context)
      : sound(sound), context(context), lane_(lane), most_(most) {}

  bool on() const { return sound != nullptr; }

  // The lane's step has ended, of blocks of these sizes.
  void end_step(int32_t lane, const std::vector<int64_t> &sizes) {
    if (!on() || lane != lane_) return;
    next_ = 0;
    if (++steps_ == 2 && most_ > peak_) most_ -= (most_ - peak_) / 2;
    if (steps_ > 1) return;
    for (const int64_t size : sizes)
      if (size >= kLarge) large_.push_back(size);
  }

  // Whether the block at hand is another one; the device's arenas will hold so many bytes with it.
  bool rings(int32_t lane, int64_t bytes, int64_t held) {
    if (!on() || steps_ == 0 || lane != lane_) return false;
    if (held > peak_) peak_ = held;
    if (held > most_) return true;
    if (bytes < kLarge) return false;
    if (next_ >= large_.size() || large_[next_] != bytes) return true;
    ++next_;
    return false;
  }

  Sound sound = nullptr;
  void *context = nullptr;

 private:
  int32_t lane_ = -1;
  int64_t most_ = 0;
  int64_t peak_ = 0;            // bytes held, so far
  int64_t steps_ = 0;           // that have ended
  std::vector<int64_t> large_;  // blocks of the first one
  size_t next_ = 0;
};

}  // namespace lowtide
#endif
