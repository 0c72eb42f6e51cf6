// Main memory as a backend, with streams whose work ends when the test says so.
#ifndef LOWTIDE_HOST_H
#define LOWTIDE_HOST_H

#include "../pool.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lowtide_host lowtide_host;

#define LOWTIDE_HOST_PAGE (64 << 10)

// At most `capacity` bytes at once.
lowtide_host *lowtide_host_open(int64_t capacity);
void lowtide_host_close(lowtide_host *host);
lowtide_pool *lowtide_host_pool(lowtide_host *host);
// Everything that `stream` has been given so far is done.
void lowtide_host_finish(lowtide_host *host, int32_t device, void *stream);
int64_t lowtide_host_bytes(lowtide_host *host);   // allocated now
int64_t lowtide_host_events(lowtide_host *host);  // recorded and not dropped
int64_t lowtide_host_shown(lowtide_host *host);   // pages in windows now
void lowtide_host_limit(lowtide_host *host, int64_t capacity);

#ifdef __cplusplus
}
#endif
#endif
