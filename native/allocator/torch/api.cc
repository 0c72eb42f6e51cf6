#include "torch.h"

#include "allocator.h"

using lowtide::Allocator;

const char *lowtide_torch_install(void) {
  static std::string why;
  why = Allocator::the().objection();
  if (!why.empty()) return why.c_str();
  Allocator::the().install();
  return nullptr;
}

void lowtide_torch_withdraw(void) { Allocator::the().withdraw(); }

int32_t lowtide_torch_installed(void) {
  return c10::cuda::CUDACachingAllocator::get() == &Allocator::the();
}

lowtide_pool *lowtide_torch_pool(void) { return Allocator::the().pool(); }

int64_t lowtide_torch_cached(int32_t device) { return Allocator::the().cached(device); }

int32_t lowtide_torch_private(int32_t device) { return Allocator::the().has_private(device); }

int32_t lowtide_torch_arena(int32_t lane, int64_t bytes) {
  return Allocator::the().set_arena(lane, bytes);
}

void *lowtide_torch_home(int64_t bytes, int32_t device, void *stream) {
  return Allocator::the().home(bytes, device, stream);
}

int32_t lowtide_torch_settle(void *storage, void *home, int64_t offset) {
  return Allocator::the().settle(*static_cast<c10::StorageImpl *>(storage), home, offset);
}
