#include "pages.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <dlfcn.h>

#include <algorithm>
#include <utility>

namespace lowtide {
namespace {

struct Driver {
  CUresult (*reserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long) = nullptr;
  CUresult (*unreserve)(CUdeviceptr, size_t) = nullptr;
  CUresult (*create)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *,
                     unsigned long long) = nullptr;
  CUresult (*release)(CUmemGenericAllocationHandle) = nullptr;
  CUresult (*map)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle,
                  unsigned long long) = nullptr;
  CUresult (*unmap)(CUdeviceptr, size_t) = nullptr;
  CUresult (*allow)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t) = nullptr;
  CUresult (*granularity)(size_t *, const CUmemAllocationProp *,
                          CUmemAllocationGranularity_flags) = nullptr;
  bool there = false;

  // The driver is there wherever PyTorch runs on CUDA; elsewhere the pool has no pages.
  Driver() {
    void *const library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) return;
    there = find(library, "cuMemAddressReserve", reserve) &&
            find(library, "cuMemAddressFree", unreserve) &&
            find(library, "cuMemCreate", create) && find(library, "cuMemRelease", release) &&
            find(library, "cuMemMap", map) && find(library, "cuMemUnmap", unmap) &&
            find(library, "cuMemSetAccess", allow) &&
            find(library, "cuMemGetAllocationGranularity", granularity);
  }

  template <typename Function>
  static bool find(void *library, const char *name, Function &function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
  }
};

const Driver &driver() {
  static const Driver *const one = new Driver;
  return *one;
}

CUmemAllocationProp memory_of(int32_t device) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  return prop;
}

CUdeviceptr address(void *base, int64_t offset) {
  return reinterpret_cast<CUdeviceptr>(base) + static_cast<CUdeviceptr>(offset);
}

constexpr size_t kBytes = static_cast<size_t>(Pages::kPage);

}  // namespace

bool Pages::there() { return driver().there; }

void *Pages::reserve(int64_t bytes, int32_t device) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  const CUmemAllocationProp prop = memory_of(device);
  size_t least = 0;
  if (driver().granularity(&least, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM) != CUDA_SUCCESS ||
      !least || kBytes % least)
    return nullptr;
  CUdeviceptr base = 0;
  if (driver().reserve(&base, static_cast<size_t>(bytes), kBytes, 0, 0) != CUDA_SUCCESS)
    return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  Range &range = ranges_[reinterpret_cast<void *>(base)];
  range.bytes = bytes;
  range.device = device;
  at(device);
  return reinterpret_cast<void *>(base);
}

Pages::Device &Pages::at(int32_t device) {
  const auto index = static_cast<c10::DeviceIndex>(device);
  Device &entry = devices_[device];
  if (!entry.total) entry.total = static_cast<double>(behind_->getMemoryInfo(index).second);
  // Without pages, the caching allocator's limit is the one that was set.
  if (!entry.bytes) entry.fraction = behind_->getMemoryFraction(index);
  return entry;
}

void Pages::give_up(void *base, int32_t device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = ranges_.find(base);
  if (found == ranges_.end()) return;
  Range &range = found->second;
  for (const auto &[offset, count] : range.windows)
    driver().unmap(address(base, offset), static_cast<size_t>(count) * kBytes);
  Device &entry = devices_[device];
  const bool any = entry.bytes > 0;
  for (size_t i = 0; i < range.pages.size(); ++i) {
    if (!range.pages[i]) continue;
    driver().unmap(address(base, static_cast<int64_t>(i) * kPage), kBytes);
    driver().release(range.pages[i]);
    entry.bytes -= kPage;
  }
  driver().unreserve(address(base, 0), static_cast<size_t>(range.bytes));
  ranges_.erase(found);
  if (any) share(entry, device);
}

bool Pages::allow(void *at, int64_t bytes, int32_t device) {
  const auto by = [](int32_t reader) {
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = reader;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return access;
  };
  std::vector<CUmemAccessDesc> all{by(device)};
  for (const int32_t reader : devices_[device].readers) all.push_back(by(reader));
  return driver().allow(address(at, 0), static_cast<size_t>(bytes), all.data(), all.size()) ==
         CUDA_SUCCESS;
}

bool Pages::let_read(int32_t device, int32_t reader) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  const std::lock_guard<std::mutex> lock(mutex_);
  std::set<int32_t> &readers = devices_[device].readers;
  if (!readers.insert(reader).second || show_all(device)) return true;
  readers.erase(reader);  // or nobody would get a page any more
  return false;
}

bool Pages::any(int32_t device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(ranges_.begin(), ranges_.end(),
                     [&](const auto &range) { return range.second.device == device; });
}

bool Pages::show_all(int32_t device) {
  for (const auto &[base, range] : ranges_) {
    if (range.device != device) continue;
    const auto shown = [&, base = static_cast<char *>(base)](int64_t offset, int64_t count) {
      return allow(base + offset, count * kPage, device);
    };
    for (size_t i = 0; i < range.pages.size(); ++i)
      if (range.pages[i] && !shown(static_cast<int64_t>(i) * kPage, 1)) return false;
    for (const auto &[offset, count] : range.windows)
      if (!shown(offset, count)) return false;
  }
  return true;
}

// What may still be had within the limit.
int64_t Pages::room(const Device &entry, int32_t device) {
  const auto stats = behind_->getDeviceStats(static_cast<c10::DeviceIndex>(device));
  return static_cast<int64_t>(entry.fraction * entry.total) -
         stats.reserved_bytes[0].current - entry.bytes;
}

bool Pages::flush(int32_t device) {
  const auto index = static_cast<c10::DeviceIndex>(device);
  const auto cached = [&] {
    const auto stats = behind_->getDeviceStats(index);
    return stats.reserved_bytes[0].current - stats.active_bytes[0].current;
  };
  const int64_t before = cached();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    int64_t &stuck = devices_[device].stuck;
    stuck = std::min(stuck, before);
    if (before <= stuck + kPage) return false;
  }
  behind_->emptyCache();
  const int64_t after = cached();
  const std::lock_guard<std::mutex> lock(mutex_);
  devices_[device].stuck = after;
  return after < before;
}

void Pages::share(Device &entry, int32_t device) {
  const double left = entry.fraction - static_cast<double>(entry.bytes) / entry.total;
  behind_->setMemoryFraction(entry.bytes ? std::clamp(left, 0.0, 1.0) : entry.fraction,
                             static_cast<c10::DeviceIndex>(device));
}

int64_t Pages::fill(void *base, int64_t first, int64_t count, int32_t device) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  const std::lock_guard<std::mutex> lock(mutex_);
  Range &range = ranges_.at(base);
  Device &entry = at(device);
  count = std::min(count, room(entry, device) / kPage);
  if (count <= 0) return 0;
  entry.bytes += count * kPage;  // nobody else gets it from now on
  share(entry, device);
  if (const int64_t over = -room(entry, device); over > 0) {  // ... but somebody was faster
    const int64_t less = std::min(count, (over + kPage - 1) / kPage);
    entry.bytes -= less * kPage;
    count -= less;
  }
  if (range.pages.size() < static_cast<size_t>(first + count))
    range.pages.resize(static_cast<size_t>(first + count));
  const CUmemAllocationProp prop = memory_of(device);
  int64_t done = 0;
  for (; done < count; ++done) {
    CUmemGenericAllocationHandle page = 0;
    if (driver().create(&page, kBytes, &prop, 0) != CUDA_SUCCESS) break;
    if (driver().map(address(base, (first + done) * kPage), kBytes, 0, page, 0) != CUDA_SUCCESS) {
      driver().release(page);
      break;
    }
    range.pages[static_cast<size_t>(first + done)] = page;
  }
  char *const at = static_cast<char *>(base) + first * kPage;
  if (done && !allow(at, done * kPage, device)) {
    driver().unmap(address(at, 0), static_cast<size_t>(done) * kBytes);
    for (int64_t i = 0; i < done; ++i) {
      driver().release(range.pages[static_cast<size_t>(first + i)]);
      range.pages[static_cast<size_t>(first + i)] = 0;
    }
    done = 0;
  }
  entry.bytes -= (count - done) * kPage;
  share(entry, device);
  return done;
}

void Pages::drain(void *base, int64_t first, int64_t count, int32_t device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Range &range = ranges_.at(base);
  Device &entry = devices_[device];
  for (int64_t i = first; i < first + count; ++i) {
    driver().unmap(address(base, i * kPage), kBytes);
    driver().release(range.pages[static_cast<size_t>(i)]);
    range.pages[static_cast<size_t>(i)] = 0;
    entry.bytes -= kPage;
  }
  share(entry, device);
}

bool Pages::show(void *base, int64_t at, const int64_t *pages, int64_t count, int32_t device) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  const std::lock_guard<std::mutex> lock(mutex_);
  Range &range = ranges_.at(base);
  int64_t done = 0;
  for (; done < count; ++done) {
    const CUmemGenericAllocationHandle page = range.pages[static_cast<size_t>(pages[done])];
    if (driver().map(address(base, at + done * kPage), kBytes, 0, page, 0) != CUDA_SUCCESS) break;
  }
  if (done == count && allow(static_cast<char *>(base) + at, count * kPage, device)) {
    range.windows[at] = count;
    return true;
  }
  if (done) driver().unmap(address(base, at), static_cast<size_t>(done) * kBytes);
  return false;
}

void Pages::hide(void *base, int64_t at, int64_t count, int32_t) {
  const std::lock_guard<std::mutex> lock(mutex_);
  driver().unmap(address(base, at), static_cast<size_t>(count) * kBytes);
  ranges_.at(base).windows.erase(at);
}

void Pages::settle(int32_t device) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  (void)cudaDeviceSynchronize();  // PyTorch's own may have to wait for Python
}

void Pages::set_fraction(double fraction, int32_t device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = devices_.find(device);
  if (found == devices_.end() || !found->second.bytes)
    return behind_->setMemoryFraction(fraction, static_cast<c10::DeviceIndex>(device));
  found->second.fraction = fraction;
  share(found->second, device);
}

double Pages::fraction(int32_t device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = devices_.find(device);
  if (found != devices_.end() && found->second.bytes) return found->second.fraction;
  return behind_->getMemoryFraction(static_cast<c10::DeviceIndex>(device));
}

}  // namespace lowtide
