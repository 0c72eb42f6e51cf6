// PyTorch's CUDA side on main memory, so that the wrapper is tested without a GPU: a caching allocator
// that counts exactly, and streams whose work ends when the test says so.
#ifndef LOWTIDE_PRETEND_H
#define LOWTIDE_PRETEND_H

#include <c10/cuda/CUDACachingAllocator.h>

#include <map>
#include <set>
#include <string>
#include <vector>

namespace pretend {

namespace native = c10::cuda::CUDACachingAllocator;

// Every block a segment of its own, rounded to 512.
class Caching final : public native::CUDAAllocator {
 public:
  int64_t limit = int64_t{1} << 40;
  std::map<void *, size_t> blocks;       // address -> bytes asked for
  std::set<void *> recorded;             // blocks that another stream was recorded for
  std::vector<std::string> called;       // what was only handed on
  native::DeviceStats stats;

  c10::DataPtr allocate(size_t bytes) override;
  void *raw_alloc(size_t bytes) override;
  void *raw_alloc_with_stream(size_t bytes, cudaStream_t) override { return raw_alloc(bytes); }
  void raw_delete(void *block) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void recordStream(const c10::DataPtr &block, c10::cuda::CUDAStream) override;
  using native::CUDAAllocator::recordStream;
  native::DeviceStats getDeviceStats(c10::DeviceIndex) override { return stats; }
  void resetAccumulatedStats(c10::DeviceIndex) override;
  void resetPeakStats(c10::DeviceIndex) override;
  native::SnapshotInfo snapshot(c10::MempoolId_t, bool) override;
  void *getBaseAllocation(void *block, size_t *bytes) override;
  native::ShareableHandle shareIpcHandle(void *block) override;

  void copy_data(void *to, const void *from, std::size_t bytes) const override;
  void init(int) override { called.push_back("init"); }
  bool initialized() override { return true; }
  double getMemoryFraction(c10::DeviceIndex) override { return 0.5; }
  void setMemoryFraction(double, c10::DeviceIndex) override { called.push_back("fraction"); }
  std::vector<native::StreamSegmentSize> getExpandableSegmentSizes(c10::DeviceIndex) override {
    return {};
  }
  void emptyCache(c10::MempoolId_t) override { called.push_back("emptyCache"); }
  void enable(bool) override {}
  bool isEnabled() const override { return true; }
  void cacheInfo(c10::DeviceIndex, size_t *largest) override { *largest = 1 << 20; }
  void beginAllocateToPool(c10::DeviceIndex, c10::MempoolId_t,
                           std::function<bool(cudaStream_t)>) override {
    called.push_back("begin");
  }
  void endAllocateToPool(c10::DeviceIndex, c10::MempoolId_t) override { called.push_back("end"); }
  void releasePool(c10::DeviceIndex, c10::MempoolId_t) override {}
  std::shared_ptr<void> getIpcDevPtr(std::string) override { return nullptr; }
  bool isHistoryEnabled() override { return false; }
  void recordHistory(bool, native::CreateContextFn, size_t, native::RecordContext, bool,
                     const std::vector<std::string> &) override {
    called.push_back("recordHistory");
  }
  void attachOutOfMemoryObserver(native::OutOfMemoryObserver) override {}
  void attachAllocatorTraceTracker(native::AllocatorTraceTracker) override {}
  void enablePeerAccess(c10::DeviceIndex, c10::DeviceIndex) override {}
  cudaError_t memcpyAsync(void *, int, const void *, int, size_t, cudaStream_t, bool) override {
    return cudaSuccess;
  }
  std::shared_ptr<native::AllocatorState> getCheckpointState(c10::DeviceIndex,
                                                             c10::MempoolId_t) override {
    return nullptr;
  }
  native::CheckpointDelta setCheckpointPoolState(c10::DeviceIndex,
                                                 std::shared_ptr<native::AllocatorState>) override {
    return {};
  }
  std::string name() override { return "native"; }
#ifdef LOWTIDE_HAS_attachOomRejectionObserver
  void attachOomRejectionObserver(native::OomRejectionObserver) override {}
#endif

 private:
  void count(int64_t bytes, int64_t requested, int64_t blocks);
};

Caching &caching();            // what c10::cuda::CUDACachingAllocator::get() gives at first
void use_stream(intptr_t id);  // the current one from now on
c10::cuda::CUDAStream stream(intptr_t id);
void finish(intptr_t id);      // all that the stream was given is done
extern int events;             // recorded or asked about

}  // namespace pretend
#endif
