// The C ABI of the pool inside PyTorch; beside it all of pool.h works on lowtide_torch_pool().
#ifndef LOWTIDE_TORCH_H
#define LOWTIDE_TORCH_H

#include <stdint.h>

#include "../pool.h"

#ifdef __cplusplus
extern "C" {
#endif

// Puts the pool before PyTorch's allocator, in mode PASS.  NULL, or why it cannot be.
const char *lowtide_torch_install(void);
// Takes it away again, as soon as no block and no peak of its own is left.
void lowtide_torch_withdraw(void);
int32_t lowtide_torch_installed(void);
lowtide_pool *lowtide_torch_pool(void);
// Bytes that PyTorch's allocator has reserved and nobody uses; what is free in arenas not counted.
int64_t lowtide_torch_cached(int32_t device);
// Whether there are private memory pools, as captured graphs have.
int32_t lowtide_torch_private(int32_t device);
// As in pool.h, in a segment of its own.
int32_t lowtide_torch_arena(int32_t lane, int64_t bytes);
// As in pool.h.  What pages take is part of what PyTorch is allowed, and told as reserved.
int32_t lowtide_torch_pages(int32_t device, void *stream, int64_t bytes);
void *lowtide_torch_home(int64_t bytes, int32_t device, void *stream);
// Moves the bytes of a storage (a c10::StorageImpl) into a home, on the current stream.
// 0: they stay, because they are not the caching allocator's.
int32_t lowtide_torch_settle(void *storage, void *home, int64_t offset);
// Gives a storage without bytes so many at an offset of the lane's arena.  0: they are in use.
int32_t lowtide_torch_adopt(void *storage, int32_t lane, int64_t offset, int64_t bytes);
// Gives a storage without bytes so many, wherever new blocks go.  0: there are none.
int32_t lowtide_torch_refill(void *storage, int64_t bytes);
// Each of two storages gets the other's bytes.  0: they are not as many.
int32_t lowtide_torch_exchange(void *one, void *other);

#ifdef __cplusplus
}
#endif
#endif
