// PyTorch's CUDA allocator with the pool in front of it.
//
// It stands where the caching allocator stood, hands what the pool does not place on to it, and
// answers for both: statistics, snapshots, streams, sharing between processes.  Arenas are blocks of
// the caching allocator, so limits, out-of-memory handling and `reserved` need nothing of ours.
//
// Blocks handed out carry `give_back` as their deleter.  The caching allocator would ignore
// record_stream for them, so this allocator stays in its place until the last of them is gone.
#ifndef LOWTIDE_TORCH_ALLOCATOR_H
#define LOWTIDE_TORCH_ALLOCATOR_H

#include <c10/core/StorageImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "../core.h"
#include "events.h"
#include "history.h"
#include "pages.h"
#include "statistics.h"

namespace lowtide {

namespace native = c10::cuda::CUDACachingAllocator;

class Allocator final : public native::CUDAAllocator {
 public:
  static Allocator &the();  // made over the allocator there is when first asked for

  // Why the pool cannot stand before this allocator; empty: it can.
  std::string objection() const;
  void install();
  void withdraw();  // as soon as nothing depends on it
  lowtide_pool *pool() { return pool_; }

  int64_t cached(int32_t device);  // reserved behind, and not in use
  bool has_private(int32_t device);
  bool set_arena(int32_t lane, int64_t bytes);
  bool set_pages(int32_t device, void *stream, int64_t bytes);
  void *home(int64_t bytes, int32_t device, void *stream);
  // Moves a storage's bytes into a home.  False: they are not the caching allocator's to move.
  bool settle(c10::StorageImpl &storage, void *home, int64_t offset);
  // Gives a storage that has no bytes some of a lane's arena.  False: they are in use.
  bool adopt(c10::StorageImpl &storage, int32_t lane, int64_t offset, int64_t bytes);
  // Gives it some as for anything new: it may know only the allocator of the time it was made.
  bool refill(c10::StorageImpl &storage, int64_t bytes);
  // Each of two storages of as many bytes gets the other's.
  static void exchange(c10::StorageImpl &one, c10::StorageImpl &other);

  // What the pool knows.
  c10::DataPtr allocate(size_t bytes) override;
  void *raw_alloc(size_t bytes) override;
  void *raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override;
  void raw_delete(void *block) override;
  void recordStream(const c10::DataPtr &block, c10::cuda::CUDAStream stream) override;
  using native::CUDAAllocator::recordStream;
  void emptyCache(c10::MempoolId_t pool = {0, 0}) override;
  void cacheInfo(c10::DeviceIndex device, size_t *largest) override;
  void *getBaseAllocation(void *block, size_t *bytes) override;
  native::ShareableHandle shareIpcHandle(void *block) override;
  native::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  native::SnapshotInfo snapshot(c10::MempoolId_t pool, bool traces) override;
  void beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                           std::function<bool(cudaStream_t)> filter) override;
  void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) override;
  void recordHistory(bool enabled, native::CreateContextFn recorder, size_t entries,
                     native::RecordContext when, bool clear,
                     const std::vector<std::string> &skip) override;

  // What only the caching allocator knows.  The deleter is that of blocks in private pools, which
  // CUDA graph trees compare with it; blocks of the pool carry give_back.
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void *to, const void *from, std::size_t bytes) const override;
  void init(int devices) override;
  bool initialized() override;
  double getMemoryFraction(c10::DeviceIndex device) override;
  void setMemoryFraction(double fraction, c10::DeviceIndex device) override;
  std::vector<native::StreamSegmentSize> getExpandableSegmentSizes(
      c10::DeviceIndex device) override;
  void enable(bool value) override;
  bool isEnabled() const override;
  void releasePool(c10::DeviceIndex device, c10::MempoolId_t pool) override;
  int getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t pool) override;
  void createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                          std::shared_ptr<native::CUDAAllocator> allocator) override;
  void setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t pool, bool use) override;
  void setNoSplit(c10::DeviceIndex device, c10::MempoolId_t pool) override;
  bool checkPoolLiveAllocations(c10::DeviceIndex device, c10::MempoolId_t pool,
                                const std::unordered_set<void *> &expected) override;
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override;
  bool isHistoryEnabled() override;
  void recordAnnotation(
      const std::vector<std::pair<std::string, std::string>> &metadata) override;
  void pushCompileContext(std::string &metadata) override;
  void popCompileContext() override;
  void setUserMetadata(const std::string &metadata) override;
  std::string getUserMetadata() override;
  void attachOutOfMemoryObserver(native::OutOfMemoryObserver observer) override;
  void attachAllocatorTraceTracker(native::AllocatorTraceTracker tracker) override;
  void enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex to) override;
  cudaError_t memcpyAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                          cudaStream_t stream, bool peer) override;
  std::shared_ptr<native::AllocatorState> getCheckpointState(c10::DeviceIndex device,
                                                             c10::MempoolId_t id) override;
  native::CheckpointDelta setCheckpointPoolState(
      c10::DeviceIndex device, std::shared_ptr<native::AllocatorState> state) override;
  std::string name() override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override;
#ifdef LOWTIDE_HAS_markCaptureBegin
  void markCaptureBegin(c10::DeviceIndex device) override;
  void markCaptureEnd(c10::DeviceIndex device) override;
#endif
#ifdef LOWTIDE_HAS_getContextForPointer
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void *block) override;
#endif
#ifdef LOWTIDE_HAS_attachOomRejectionObserver
  void attachOomRejectionObserver(native::OomRejectionObserver observer) override;
#endif
#ifdef LOWTIDE_HAS_allocateWithAddress
  c10::DataPtr allocateWithAddress(size_t bytes, void *address) override;
#endif

 private:
  explicit Allocator(native::CUDAAllocator *behind);

  static void give_back(void *block);  // the deleter
  void *take(size_t bytes, c10::DeviceIndex device, cudaStream_t stream);
  void give(void *block);
  bool off() const;
  void passed_by(c10::DeviceIndex device, size_t bytes);
  // Keeps holes of the caching allocator filled while an arena is made, so that the arena gets a
  // segment of its own and the rest of it can be trimmed away.
  std::vector<void *> plug_holes(int32_t device, void *stream, int64_t bytes);
  void withdraw_if_done();

  native::CUDAAllocator *const behind_;
  Events events_;
  Pages pages_;
  History history_;
  Statistics statistics_;
  lowtide_pool *pool_ = nullptr;
  std::atomic<bool> leaving_{false};
  std::atomic<int> routed_{0};  // captures and memory pools under way: all goes behind
};

}  // namespace lowtide
#endif
