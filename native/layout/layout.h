// The C ABI of lowtide's layout search.
//
// One call packs buffers, each alive during a half-open stretch of time, into
// as few bytes as it can find before the budget is spent.  The library keeps no
// state between calls; several may run at once.
#ifndef LOWTIDE_LAYOUT_H
#define LOWTIDE_LAYOUT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Raised whenever a struct or the meaning of a field changes.
#define LOWTIDE_LAYOUT_ABI 1

typedef struct {
  int64_t count;
  const int64_t *lower;  // first moment of each buffer, >= 0
  const int64_t *upper;  // first moment after it, > lower
  const int64_t *size;   // bytes, > 0
  const int64_t *fixed;  // offset already decided, or -1
  int64_t period;        // 0, or the length of a step that repeats: a buffer may
                         // then end after it, and wraps, but lives at most a period
  int64_t align;         // offsets are multiples of it, >= 1
  int64_t goal;          // stop at the first layout this high or lower; 0: the lower bound
} lowtide_layout_problem;

typedef struct {
  uint64_t seed;
  int64_t nodes;    // placements the search may try; -1: no limit
  double seconds;   // time it may take; < 0: no limit
  int32_t threads;  // never changes the answer of a run that the clock did not cut
} lowtide_layout_budget;

typedef struct {
  int64_t height;   // of the layout, counted to the aligned end of its highest buffer
  int64_t bound;    // no layout is lower than this
  int64_t nodes;    // placements tried
} lowtide_layout_result;

enum {
  LOWTIDE_LAYOUT_OK = 0,
  LOWTIDE_LAYOUT_BAD_PROBLEM = 1,   // a rule of lowtide_layout_problem is broken
  LOWTIDE_LAYOUT_CLASH = 2,         // two fixed buffers share bytes
  LOWTIDE_LAYOUT_NO_MEMORY = 3,
  LOWTIDE_LAYOUT_FAILED = 4,        // a bug
};

int32_t lowtide_layout_abi(void);

// Fills offsets[count] and result; both are untouched unless it returns OK.
int32_t lowtide_layout_pack(const lowtide_layout_problem *problem,
                            const lowtide_layout_budget *budget,
                            int64_t *offsets, lowtide_layout_result *result);

#ifdef __cplusplus
}
#endif
#endif
