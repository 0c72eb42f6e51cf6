#include "torch.h"

#include "allocator.h"
#include "guarded.h"

using lowtide::Allocator;
using lowtide::guarded;

const char *lowtide_torch_install(void) {
  static std::string why;
  return guarded<const char *>("PyTorch's allocator raised an error", [] {
    why = Allocator::the().objection();
    if (why.empty()) Allocator::the().install();
    return why.empty() ? nullptr : why.c_str();
  });
}

void lowtide_torch_withdraw(void) {
  guarded(0, [] {
    Allocator::the().withdraw();
    return 0;
  });
}

int32_t lowtide_torch_installed(void) {
  return c10::cuda::CUDACachingAllocator::get() == &Allocator::the();
}

lowtide_pool *lowtide_torch_pool(void) { return Allocator::the().pool(); }

int64_t lowtide_torch_cached(int32_t device) {
  return guarded<int64_t>(0, [&] { return Allocator::the().cached(device); });
}

int32_t lowtide_torch_private(int32_t device) {
  return guarded<int32_t>(1, [&] { return Allocator::the().has_private(device); });
}

int32_t lowtide_torch_arena(int32_t lane, int64_t bytes) {
  return guarded<int32_t>(0, [&] { return Allocator::the().set_arena(lane, bytes); });
}

int32_t lowtide_torch_pages(int32_t device, void *stream, int64_t bytes) {
  return guarded<int32_t>(0, [&] { return Allocator::the().set_pages(device, stream, bytes); });
}

void *lowtide_torch_home(int64_t bytes, int32_t device, void *stream) {
  return guarded<void *>(nullptr, [&] { return Allocator::the().home(bytes, device, stream); });
}

int32_t lowtide_torch_adopt(void *storage, int32_t lane, int64_t offset, int64_t bytes) {
  return guarded<int32_t>(0, [&] {
    return Allocator::the().adopt(*static_cast<c10::StorageImpl *>(storage), lane, offset, bytes);
  });
}

int32_t lowtide_torch_refill(void *storage, int64_t bytes) {
  return guarded<int32_t>(0, [&] {
    return Allocator::the().refill(*static_cast<c10::StorageImpl *>(storage), bytes);
  });
}

int32_t lowtide_torch_exchange(void *one, void *other) {
  auto &first = *static_cast<c10::StorageImpl *>(one), &second = *static_cast<c10::StorageImpl *>(other);
  if (first.nbytes() != second.nbytes() || first.device() != second.device()) return 0;
  Allocator::exchange(first, second);
  return 1;
}

int32_t lowtide_torch_settle(void *storage, void *home, int64_t offset) {
  return guarded<int32_t>(0, [&] {
    return Allocator::the().settle(*static_cast<c10::StorageImpl *>(storage), home, offset);
  });
}
