// One allocation of the backend, and the blocks in it.
#ifndef LOWTIDE_ARENA_H
#define LOWTIDE_ARENA_H

#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace lowtide {

constexpr int64_t kGrain = 512;  // as PyTorch rounds: kernels choose by alignment

inline int64_t rounded(int64_t bytes) { return (bytes + kGrain - 1) / kGrain * kGrain; }

struct Stream {
  int32_t device = 0;
  void *handle = nullptr;
  bool operator==(const Stream &other) const {
    return device == other.device && handle == other.handle;
  }
};

// Where a block is noted: the lane, its step, and the how-manieth allocation of that step.
struct Origin {
  int32_t lane = -1;  // -1: not noted
  int64_t step = 0;
  int64_t index = 0;
};

struct Block {
  enum class Kind {
    kWhole,
    kPart,    // of a block that lies in a window (paged.h)
    kAbsent,  // no block: pages without memory
  };
  Kind kind = Kind::kWhole;
  int64_t bytes = 0;      // rounded
  int64_t requested = 0;
  Origin origin;
  bool pending = false;   // freed, but streams in `touched` may not have passed yet
  std::vector<Stream> touched;
  std::vector<void *> events;
};

class Arena {
 public:
  Arena(void *base, int64_t bytes, Stream stream)
      : base(static_cast<char *>(base)), bytes(bytes), stream(stream) {}
  virtual ~Arena() = default;

  char *const base;
  const int64_t bytes;
  const Stream stream;
  bool retired = false;  // nothing new goes in; with its last block it goes back

  virtual bool holds(const void *pointer) const {
    return pointer >= base && pointer < base + bytes;
  }
  bool empty() const { return count_ == 0; }
  // Whether no block has a byte of offset .. offset + bytes.
  virtual bool vacant(int64_t offset, int64_t bytes) const;
  // The highest offset at which `bytes` fit, or -1.  Blocks that no plan foresaw go there: one that
  // stays is then in the way of as little as can be, since plans fill the arena from below.
  int64_t highest_fit(int64_t bytes);
  int64_t largest_gap();
  virtual void put(int64_t offset, Block block);  // the place must be vacant
  virtual Block *find(int64_t offset);
  virtual Block take(int64_t offset);
  // Gaps are indexed from the first highest_fit on, until this: following a plan needs no index.
  void stop_indexing();
  const std::map<int64_t, Block> &blocks() const { return blocks_; }

 protected:
  void index();
  void occupy(int64_t offset, Block block);
  Block vacate(int64_t offset);
  const std::set<std::pair<int64_t, int64_t>> &gaps() const { return gaps_; }  // size, offset

  int64_t count_ = 0;  // of blocks that somebody has

 private:
  // The gap that offset .. end would lie in, were it empty.
  std::pair<int64_t, int64_t> gap_around(std::map<int64_t, Block>::const_iterator next) const;

  std::map<int64_t, Block> blocks_;  // by offset
  std::set<std::pair<int64_t, int64_t>> gaps_;
  bool indexed_ = false;
};

}  // namespace lowtide
#endif
