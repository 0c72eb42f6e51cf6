#include "allocator.h"

#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <utility>

#include "guarded.h"

namespace lowtide {
namespace {

using Place = Pool::Place;

// What the caching allocator threw while the pool was asking it.
thread_local std::exception_ptr thrown;

Stream stream_of(int32_t device, cudaStream_t stream) { return {device, stream}; }

c10::Device cuda_device(int32_t device) {
  return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)};
}

struct Context {
  native::CUDAAllocator *behind;
  Events *events;
  Pages *pages;
};

Context &context_of(void *context) { return *static_cast<Context *>(context); }

void *allocate_behind(void *context, int64_t bytes, int32_t device, void *stream) {
  try {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
    return context_of(context).behind->raw_alloc_with_stream(static_cast<size_t>(bytes),
                                                             static_cast<cudaStream_t>(stream));
  } catch (...) {
    thrown = std::current_exception();
    return nullptr;
  }
}

void release_behind(void *context, void *block) { context_of(context).behind->raw_delete(block); }

void *record_event(void *context, int32_t device, void *stream) {
  return context_of(context).events->record(device, static_cast<cudaStream_t>(stream));
}

int32_t event_passed(void *context, void *event) { return context_of(context).events->passed(event); }

void wait_event(void *context, void *event) { context_of(context).events->wait(event); }

void drop_event(void *context, void *event) { context_of(context).events->drop(event); }

void *reserve(void *context, int64_t bytes, int32_t device) {
  return guarded<void *>(nullptr,
                         [&] { return context_of(context).pages->reserve(bytes, device); });
}

void give_up(void *context, void *base, int32_t device) {
  guarded(0, [&] { return context_of(context).pages->give_up(base, device), 0; });
}

int64_t fill(void *context, void *base, int64_t first, int64_t count, int32_t device) {
  return guarded<int64_t>(
      0, [&] { return context_of(context).pages->fill(base, first, count, device); });
}

void drain(void *context, void *base, int64_t first, int64_t count, int32_t device) {
  guarded(0, [&] { return context_of(context).pages->drain(base, first, count, device), 0; });
}

int32_t show(void *context, void *base, int64_t at, const int64_t *pages, int64_t count,
             int32_t device) {
  return guarded<int32_t>(
      0, [&] { return context_of(context).pages->show(base, at, pages, count, device); });
}

void hide(void *context, void *base, int64_t at, int64_t count, int32_t device) {
  guarded(0, [&] { return context_of(context).pages->hide(base, at, count, device), 0; });
}

void settle_device(void *context, int32_t device) {
  guarded(0, [&] { return context_of(context).pages->settle(device), 0; });
}

int32_t flush(void *context, int32_t device) {
  return guarded<int32_t>(0, [&] { return context_of(context).pages->flush(device); });
}

}  // namespace

Allocator &Allocator::the() {
  // Never destroyed: tensors may outlive everything else.
  static Allocator *const one = new Allocator(native::get());
  return *one;
}

Allocator::Allocator(native::CUDAAllocator *behind)
    : behind_(behind), pages_(behind), statistics_(behind) {
  const lowtide_pool_backend backend{new Context{behind, &events_, &pages_},
                                     allocate_behind,
                                     release_behind,
                                     record_event,
                                     event_passed,
                                     wait_event,
                                     drop_event,
                                     pages_.there() ? Pages::kPage : 0,
                                     Pages::kSpare,
                                     reserve,
                                     give_up,
                                     fill,
                                     drain,
                                     show,
                                     hide,
                                     settle_device,
                                     flush};
  pool_ = lowtide_pool_open(&backend);
}

std::string Allocator::objection() const {
  if (!behind_->initialized()) return "CUDA has not been started";
  if (behind_->name() != "native")
    return "PyTorch uses its " + behind_->name() + " allocator, and the pool stands before the native one";
  if (!behind_->isEnabled() || std::getenv("PYTORCH_NO_CUDA_MEMORY_CACHING"))
    return "PyTorch's caching allocator is switched off";
  if (native::get() != behind_ && native::get() != this)
    return "another allocator was put in place of PyTorch's";
  return "";
}

void Allocator::install() {
  leaving_ = false;
  native::allocator.store(this);
  c10::SetAllocator(c10::DeviceType::CUDA, this);
}

void Allocator::withdraw() {
  leaving_ = true;
  withdraw_if_done();
}

void Allocator::withdraw_if_done() {
  if (!leaving_ || routed_ > 0 || !pool_->pool.idle()) return;
  for (c10::DeviceIndex device = 0; device < c10::cuda::device_count(); ++device)
    statistics_.finish(device, pool_->pool.count(device));
  if (!statistics_.unneeded()) return;  // resetPeakStats comes by again
  native::CUDAAllocator *self = this;
  if (native::allocator.compare_exchange_strong(self, behind_))
    c10::SetAllocator(c10::DeviceType::CUDA, behind_);
}

bool Allocator::off() const {
  return pool_->pool.mode() == LOWTIDE_POOL_PASS || routed_.load(std::memory_order_relaxed) > 0;
}

void *Allocator::take(size_t bytes, c10::DeviceIndex device, cudaStream_t stream) {
  Pool::Receipt receipt;
  thrown = nullptr;
  void *const block =
      pool_->pool.allocate(static_cast<int64_t>(bytes), stream_of(device, stream), &receipt);
  if (!block) {
    if (thrown) std::rethrow_exception(std::exchange(thrown, nullptr));
    TORCH_CHECK_WITH(OutOfMemoryError, false, "lowtide: no memory for ", bytes, " bytes");
  }
  thrown = nullptr;
  if (receipt.place == Place::kArena) {
    statistics_.saw_arena(device, receipt.stats);
    if (const c10::impl::PyInterpreter *interpreter = c10::impl::GPUTrace::get_trace())
      (*interpreter)
          ->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<uintptr_t>(block));
    if (history_.on())
      history_.add(History::Entry::ALLOC, device, block, static_cast<int64_t>(bytes), stream);
    if (c10::memoryProfilingEnabled()) {
      const auto stats = getDeviceStats(device);
      c10::reportMemoryUsageToProfiler(block, receipt.bytes,
                                       static_cast<size_t>(stats.allocated_bytes[0].current),
                                       static_cast<size_t>(stats.reserved_bytes[0].current),
                                       cuda_device(device));
    }
  } else if (statistics_.on()) {
    statistics_.saw_behind(device, receipt.stats, receipt.requested);
  }
  return block;
}

// Allocated past the pool: peaks are sums with what lies in arenas all the same.
void Allocator::passed_by(c10::DeviceIndex device, size_t bytes) {
  if (bytes && statistics_.on())
    statistics_.saw_behind(device, pool_->pool.count(device), static_cast<int64_t>(bytes));
}

void Allocator::give(void *block) {
  if (!block) return;
  Pool::Receipt receipt;
  switch (pool_->pool.free(block, &receipt)) {
    case Place::kArena:
      if (const c10::impl::PyInterpreter *interpreter = c10::impl::GPUTrace::get_trace())
        (*interpreter)
            ->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<uintptr_t>(block));
      if (history_.on()) {
        const auto device = static_cast<c10::DeviceIndex>(receipt.device);
        history_.add(History::Entry::FREE_REQUESTED, device, block, receipt.requested, nullptr);
        if (!receipt.pending)
          history_.add(History::Entry::FREE_COMPLETED, device, block, receipt.requested, nullptr);
      }
      if (c10::memoryProfilingEnabled()) {
        const auto stats = getDeviceStats(static_cast<c10::DeviceIndex>(receipt.device));
        c10::reportMemoryUsageToProfiler(block, -receipt.bytes,
                                         static_cast<size_t>(stats.allocated_bytes[0].current),
                                         static_cast<size_t>(stats.reserved_bytes[0].current),
                                         cuda_device(receipt.device));
      }
      break;
    case Place::kBackend:
      break;
    case Place::kNowhere:
      behind_->raw_delete(block);
      return;
  }
  if (leaving_.load(std::memory_order_relaxed)) withdraw_if_done();
}

void Allocator::give_back(void *block) { the().give(block); }

c10::DataPtr Allocator::allocate(size_t bytes) {
  const c10::DeviceIndex device = c10::cuda::current_device();
  if (bytes == 0 || off()) {
    c10::DataPtr block = behind_->allocate(bytes);
    passed_by(device, bytes);
    return block;
  }
  void *const block = take(bytes, device, c10::cuda::getCurrentCUDAStream(device));
  return {block, block, &give_back, cuda_device(device)};
}

void *Allocator::raw_alloc(size_t bytes) {
  const c10::DeviceIndex device = c10::cuda::current_device();
  if (bytes == 0 || off()) {
    void *const block = behind_->raw_alloc(bytes);
    passed_by(device, bytes);
    return block;
  }
  return take(bytes, device, c10::cuda::getCurrentCUDAStream(device));
}

void *Allocator::raw_alloc_with_stream(size_t bytes, cudaStream_t stream) {
  const c10::DeviceIndex device = c10::cuda::current_device();
  if (bytes == 0 || off()) {
    void *const block = behind_->raw_alloc_with_stream(bytes, stream);
    passed_by(device, bytes);
    return block;
  }
  return take(bytes, device, stream);
}

void Allocator::raw_delete(void *block) { give(block); }

void Allocator::recordStream(const c10::DataPtr &block, c10::cuda::CUDAStream stream) {
  if (!block.get()) return;
  if (block.get_deleter() != &give_back) return behind_->recordStream(block, stream);
  if (pool_->pool.touch(block.get(), stream_of(stream.device_index(), stream.stream())) !=
      Place::kBackend)
    return;
  // The caching allocator looks at the deleter to know its blocks.
  c10::DataPtr own(block.get(), block.get(), behind_->raw_deleter(), block.device());
  try {
    behind_->recordStream(own, stream);
  } catch (...) {
    own.release_context();  // it is not ours to free
    throw;
  }
  own.release_context();
}

void Allocator::emptyCache(c10::MempoolId_t pool) {
  pool_->pool.reclaim();
  behind_->emptyCache(pool);
}

void Allocator::cacheInfo(c10::DeviceIndex device, size_t *largest) {
  behind_->cacheInfo(device, largest);
  *largest = std::max(*largest, static_cast<size_t>(pool_->pool.largest_gap(device)));
}

void *Allocator::getBaseAllocation(void *block, size_t *bytes) {
  if (const int64_t paged = pool_->pool.paged_bytes(block)) {
    if (bytes) *bytes = static_cast<size_t>(paged);
    return block;
  }
  void *const base = pool_->pool.base_of(block);
  return behind_->getBaseAllocation(base ? base : block, bytes);
}

native::ShareableHandle Allocator::shareIpcHandle(void *block) {
  TORCH_CHECK(!pool_->pool.paged_bytes(block),
              "lowtide: this tensor lies in pages that other processes cannot be shown: share a "
              "copy that was made before the fit began, or after it ended");
  void *const base = pool_->pool.base_of(block);
  if (!base) return behind_->shareIpcHandle(block);
  native::ShareableHandle handle = behind_->shareIpcHandle(base);
  handle.offset += static_cast<char *>(block) - static_cast<char *>(base);
  return handle;
}

native::DeviceStats Allocator::getDeviceStats(c10::DeviceIndex device) {
  return statistics_.corrected(device, pool_->pool.count(device));
}

void Allocator::resetAccumulatedStats(c10::DeviceIndex device) {
  statistics_.reset_accumulated(device, pool_->pool.count(device));
}

void Allocator::resetPeakStats(c10::DeviceIndex device) {
  statistics_.reset_peaks(device, pool_->pool.count(device));
  withdraw_if_done();
}

void Allocator::beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                                    std::function<bool(cudaStream_t)> filter) {
  behind_->beginAllocateToPool(device, pool, std::move(filter));
  if (++routed_ == 1) pool_->pool.pause(true);
}

void Allocator::endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) {
  behind_->endAllocateToPool(device, pool);
  if (routed_ == 0) return;  // begun before the pool was there
  if (--routed_ == 0) pool_->pool.pause(false);
  withdraw_if_done();
}

void Allocator::recordHistory(bool enabled, native::CreateContextFn recorder, size_t entries,
                              native::RecordContext when, bool clear,
                              const std::vector<std::string> &skip) {
  behind_->recordHistory(enabled, recorder, entries, when, clear, skip);
  history_.record(enabled, recorder, entries, when, clear);
}

std::vector<void *> Allocator::plug_holes(int32_t device, void *stream, int64_t bytes) {
  std::vector<void *> plugs;
  behind_->emptyCache();
  const native::SnapshotInfo now = behind_->snapshot({0, 0}, false);
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  for (const auto &segment : now.segments) {
    if (segment.device != device || segment.stream != stream || !segment.is_large) continue;
    if (segment.owner_private_pool_id != c10::MempoolId_t{0, 0} || segment.is_expandable) continue;
    for (const auto &block : segment.blocks) {
      if (block.active || static_cast<int64_t>(block.size) < bytes) continue;
      try {
        plugs.push_back(
            behind_->raw_alloc_with_stream(block.size, static_cast<cudaStream_t>(stream)));
      } catch (const c10::OutOfMemoryError &) {
        return plugs;  // the hole is gone
      }
    }
  }
  return plugs;
}

int64_t Allocator::cached(int32_t device) {
  const native::DeviceStats stats = behind_->getDeviceStats(static_cast<c10::DeviceIndex>(device));
  return stats.reserved_bytes[0].current - stats.active_bytes[0].current;
}

bool Allocator::has_private(int32_t device) {
  const native::SnapshotInfo now = behind_->snapshot({0, 0}, false);
  return std::any_of(now.segments.begin(), now.segments.end(), [&](const auto &segment) {
    return segment.device == device && segment.owner_private_pool_id != c10::MempoolId_t{0, 0};
  });
}

bool Allocator::set_arena(int32_t lane, int64_t bytes) {
  const Stream stream = pool_->pool.stream_of(lane);
  statistics_.start(static_cast<c10::DeviceIndex>(stream.device));
  std::vector<void *> plugs;
  if (bytes) plugs = plug_holes(stream.device, stream.handle, bytes);
  const bool done = pool_->pool.set_arena(lane, bytes);
  for (void *plug : plugs) behind_->raw_delete(plug);
  statistics_.ask(static_cast<c10::DeviceIndex>(stream.device), pool_->pool.count(stream.device));
  return done;
}

bool Allocator::set_pages(int32_t device, void *stream, int64_t bytes) {
  statistics_.start(static_cast<c10::DeviceIndex>(device));
  return pool_->pool.set_pages({device, stream}, bytes);
}

void *Allocator::home(int64_t bytes, int32_t device, void *stream) {
  statistics_.start(static_cast<c10::DeviceIndex>(device));
  const std::vector<void *> plugs = plug_holes(device, stream, bytes);
  void *const base = pool_->pool.home(bytes, {device, stream});
  for (void *plug : plugs) behind_->raw_delete(plug);
  statistics_.ask(static_cast<c10::DeviceIndex>(device), pool_->pool.count(device));
  return base;
}

bool Allocator::adopt(c10::StorageImpl &storage, int32_t lane, int64_t offset, int64_t bytes) {
  if (storage.nbytes()) return false;
  void *const block = pool_->pool.place_in(lane, offset, bytes);
  if (!block) return false;
  storage.set_data_ptr_noswap({block, block, &give_back, storage.device()});
  storage.set_nbytes(static_cast<size_t>(bytes));
  return true;
}

void Allocator::exchange(c10::StorageImpl &one, c10::StorageImpl &other) {
  c10::DataPtr kept = one.set_data_ptr({nullptr, one.device()});
  kept = other.set_data_ptr(std::move(kept));
  one.set_data_ptr_noswap(std::move(kept));
}

bool Allocator::refill(c10::StorageImpl &storage, int64_t bytes) {
  if (storage.nbytes()) return false;
  const c10::cuda::CUDAGuard guard(storage.device().index());
  storage.set_data_ptr_noswap(allocate(static_cast<size_t>(bytes)));
  storage.set_nbytes(static_cast<size_t>(bytes));
  return true;
}

bool Allocator::settle(c10::StorageImpl &storage, void *home, int64_t offset) {
  const c10::DataPtr &old = storage.data_ptr();
  const int64_t bytes = static_cast<int64_t>(storage.nbytes());
  const bool ours = old.get_deleter() == &give_back;
  if (!bytes || !old.get() || old.get() != old.get_context() ||
      (!ours && old.get_deleter() != behind_->raw_deleter()))
    return false;
  const c10::Device device = old.device();
  const c10::cuda::CUDAGuard guard(device.index());
  void *const block = pool_->pool.place(home, offset, bytes);
  if (!block) return false;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device.index());
  cudaError_t status = cudaMemcpyAsync(block, old.get(), static_cast<size_t>(bytes),
                                       cudaMemcpyDeviceToDevice, stream);
  if (status == cudaSuccess) status = cudaStreamSynchronize(stream);  // the old bytes go at once
  if (status != cudaSuccess) {
    (void)cudaGetLastError();
    pool_->pool.free(block);
    return false;
  }
  storage.set_data_ptr_noswap({block, block, &give_back, device});
  return true;
}

}  // namespace lowtide
