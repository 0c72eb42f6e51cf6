#include "pretend.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdlib>
#include <cstring>
#include <mutex>

namespace pretend {
namespace {

struct Event {
  intptr_t stream = 0;
  int64_t at = 0;
};

std::mutex mutex;
std::map<intptr_t, std::pair<int64_t, int64_t>> progress;  // given, done
thread_local intptr_t current = 0;

void delete_block(void *block) { caching().raw_delete(block); }

}  // namespace

int events = 0;

Caching &caching() {
  static Caching *const one = new Caching;
  return *one;
}

c10::cuda::CUDAStream stream(intptr_t id) {
  return c10::cuda::CUDAStream(c10::cuda::CUDAStream::UNCHECKED,
                               c10::Stream(c10::Stream::UNSAFE,
                                           c10::Device(c10::DeviceType::CUDA, 0), id));
}

void use_stream(intptr_t id) { current = id; }

void finish(intptr_t id) {
  const std::lock_guard<std::mutex> lock(mutex);
  progress[id].second = progress[id].first;
}

void Caching::count(int64_t bytes, int64_t requested, int64_t number) {
  for (const size_t type : {size_t{0}, size_t{2}}) {
    const auto change = [&](c10::CachingAllocator::Stat &stat, int64_t amount) {
      if (amount >= 0)
        stat.increase(static_cast<size_t>(amount));
      else
        stat.decrease(static_cast<size_t>(-amount));
    };
    change(stats.allocated_bytes[type], bytes);
    change(stats.active_bytes[type], bytes);
    change(stats.reserved_bytes[type], bytes);
    change(stats.requested_bytes[type], requested);
    change(stats.allocation[type], number);
    change(stats.active[type], number);
  }
}

void *Caching::raw_alloc(size_t bytes) {
  const int64_t size = (static_cast<int64_t>(bytes) + 511) / 512 * 512;
  TORCH_CHECK_WITH(OutOfMemoryError, stats.reserved_bytes[0].current + size <= limit,
                   "CUDA out of memory");
  void *block = std::aligned_alloc(512, static_cast<size_t>(size));
  blocks[block] = bytes;
  count(size, static_cast<int64_t>(bytes), 1);
  return block;
}

c10::DataPtr Caching::allocate(size_t bytes) {
  void *block = bytes ? raw_alloc(bytes) : nullptr;
  return {block, block, &delete_block, c10::Device(c10::DeviceType::CUDA, 0)};
}

void Caching::raw_delete(void *block) {
  if (!block) return;
  const auto found = blocks.find(block);
  TORCH_CHECK(found != blocks.end(), "invalid device pointer");
  const int64_t bytes = static_cast<int64_t>(found->second);
  count(-((bytes + 511) / 512 * 512), -bytes, -1);
  blocks.erase(found);
  recorded.erase(block);
  std::free(block);
}

c10::DeleterFnPtr Caching::raw_deleter() const { return &delete_block; }

void Caching::recordStream(const c10::DataPtr &block, c10::cuda::CUDAStream) {
  if (block.get_deleter() == &delete_block) recorded.insert(block.get());  // as PyTorch does
}

void Caching::resetAccumulatedStats(c10::DeviceIndex) {
  for (auto *column : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes,
                       &stats.requested_bytes, &stats.allocation, &stats.active})
    for (auto &stat : *column) stat.reset_accumulated();
}

void Caching::resetPeakStats(c10::DeviceIndex) {
  for (auto *column : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes,
                       &stats.requested_bytes, &stats.allocation, &stats.active})
    for (auto &stat : *column) stat.reset_peak();
}

native::SnapshotInfo Caching::snapshot(c10::MempoolId_t, bool) {
  native::SnapshotInfo info;
  info.device_traces.resize(1);
  for (const auto &[block, bytes] : blocks) {
    native::SegmentInfo segment;
    segment.address = reinterpret_cast<size_t>(block);
    segment.total_size = (bytes + 511) / 512 * 512;
    segment.allocated_size = segment.active_size = segment.total_size;
    segment.requested_size = bytes;
    segment.is_large = true;
    native::BlockInfo one;
    one.size = segment.total_size;
    one.requested_size = bytes;
    one.allocated = one.active = true;
    segment.blocks.push_back(one);
    info.segments.push_back(segment);
  }
  return info;
}

void *Caching::getBaseAllocation(void *block, size_t *bytes) {
  TORCH_CHECK(blocks.count(block), "invalid device pointer");
  if (bytes) *bytes = (blocks[block] + 511) / 512 * 512;
  return block;
}

native::ShareableHandle Caching::shareIpcHandle(void *block) {
  TORCH_CHECK(blocks.count(block), "invalid device pointer");
  return {0, "handle"};
}

void Caching::copy_data(void *to, const void *from, std::size_t bytes) const {
  std::memcpy(to, from, bytes);
}

}  // namespace pretend

namespace c10::cuda {

namespace CUDACachingAllocator {
std::atomic<CUDAAllocator *> allocator{&pretend::caching()};
}

DeviceIndex device_count() noexcept { return 1; }
DeviceIndex current_device() { return 0; }
DeviceIndex ExchangeDevice(DeviceIndex) { return 0; }
cudaError_t GetDevice(DeviceIndex *device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t SetDevice(DeviceIndex, bool) { return cudaSuccess; }
cudaError_t MaybeSetDevice(DeviceIndex) { return cudaSuccess; }
void c10_cuda_check_implementation(int32_t error, const char *, const char *, uint32_t, bool) {
  TORCH_CHECK(error == cudaSuccess, "CUDA error ", error);
}

cudaStream_t CUDAStream::stream() const { return reinterpret_cast<cudaStream_t>(stream_.id()); }
bool CUDAStream::query() const { return true; }
void CUDAStream::synchronize() const {}
CUDAStream getCurrentCUDAStream(DeviceIndex) { return pretend::stream(pretend::current); }
CUDAStream getDefaultCUDAStream(DeviceIndex) { return pretend::stream(0); }
CUDAStream getStreamFromPool(const bool, DeviceIndex) { return pretend::stream(1); }
CUDAStream getStreamFromPool(const int, DeviceIndex) { return pretend::stream(1); }
void setCurrentCUDAStream(CUDAStream stream) { pretend::current = stream.id(); }

}  // namespace c10::cuda

extern "C" {

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int) {
  *event = reinterpret_cast<cudaEvent_t>(new pretend::Event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(pretend::mutex);
  ++pretend::events;
  const intptr_t id = reinterpret_cast<intptr_t>(stream);
  *reinterpret_cast<pretend::Event *>(event) = {id, ++pretend::progress[id].first};
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::lock_guard<std::mutex> lock(pretend::mutex);
  ++pretend::events;
  const auto &asked = *reinterpret_cast<pretend::Event *>(event);
  return pretend::progress[asked.stream].second >= asked.at ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const std::lock_guard<std::mutex> lock(pretend::mutex);
  const auto &asked = *reinterpret_cast<pretend::Event *>(event);
  int64_t &done = pretend::progress[asked.stream].second;
  done = std::max(done, asked.at);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *, cudaEvent_t, cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t) { return "pretended"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  *free = *total = size_t{1} << 40;
  return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t bytes, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned int) { return cudaSuccess; }
}
