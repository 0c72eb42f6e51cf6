// The C ABI of lowtide's pass over a step that recomputes: `_policy/remake_pass.py`, natively.
//
// What does not depend on a trial is given once (`lowtide_remake_ground`); trials on it may then be
// run, one after the other or side by side.  Rows of rows are given flat: row i is
// what[at[i]] .. what[at[i + 1]].
#ifndef LOWTIDE_REMAKE_H
#define LOWTIDE_REMAKE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Raised whenever a struct or the meaning of a field changes.
#define LOWTIDE_REMAKE_ABI 1

typedef struct {
  const int64_t *at;  // one more than there are rows
  const int64_t *what;
} lowtide_remake_rows;

typedef struct {
  int64_t ops, values;
  int64_t unseen;             // bytes that are always taken
  // Of each op.
  const int64_t *workspace;   // bytes that it takes while it runs
  const double *again;        // seconds to run it again
  const double *starts;       // when it starts in plain seconds; one more: when the last one ends
  const int64_t *chances;     // from each position on, when something can go; two more than ops
  lowtide_remake_rows wants;  // what has to be there while it runs
  lowtide_remake_rows writes;
  lowtide_remake_rows sources;      // to run it again ...
  lowtide_remake_rows made;         // ... and what that makes
  lowtide_remake_rows appearing;    // made by nobody
  lowtide_remake_rows overwritten;
  lowtide_remake_rows ending;
  // Of each value.
  const int64_t *size;
  const int64_t *maker;       // -1: none
  const int64_t *end;
  const int64_t *until;       // the use after its longest absence
  const int64_t *holdable;    // until when it may be held beyond its end, or -1
  const uint8_t *can;         // be made again
  const uint8_t *after;       // the step leaves it behind
  lowtide_remake_rows uses;
  lowtide_remake_rows near;
} lowtide_remake_step;

typedef struct {
  int64_t limit;              // bytes, those that are always taken included
  int32_t cost, bytes, distance;  // powers, in quarters
  int32_t around;
  const double *weights;      // of each value, or none
  double most_seconds;        // of what runs again
  const uint8_t *holds;       // values that are held
  const uint8_t *there;       // when the step begins
  const uint8_t *below;       // likewise
  const int64_t *from_on;     // from when on each can be dropped
  int64_t releases, fetches;  // how many: positions, ascending, and values
  const int64_t *release_at, *release, *fetch_at, *fetch;
} lowtide_remake_trial;

enum { LOWTIDE_REMAKE_DROP = 0, LOWTIDE_REMAKE_HOLD = 1, LOWTIDE_REMAKE_RERUN = 2 };

typedef struct {
  double seconds;             // of what runs again
  int64_t count;              // of what is done
  int64_t op, needed;         // where it was stuck, and the bytes that it needed
} lowtide_remake_result;

enum {
  LOWTIDE_REMAKE_OK = 0,
  LOWTIDE_REMAKE_ENOUGH = 1,  // it takes more than the most seconds
  LOWTIDE_REMAKE_STUCK = 2,
  LOWTIDE_REMAKE_NO_MEMORY = 3,
  LOWTIDE_REMAKE_FAILED = 4,  // a bug
};

int32_t lowtide_remake_abi(void);

// What was given is copied.  None: there is no memory for it.
void *lowtide_remake_ground(const lowtide_remake_step *step);
void lowtide_remake_forget(void *ground);

// One pass.  `done` gets rows of three: what, before which op, and the value, or the op that runs
// again; at most `room` of them, and all of them are counted.
int32_t lowtide_remake_run(const void *ground, const lowtide_remake_trial *trial, int64_t *done,
                           int64_t room, lowtide_remake_result *result);

#ifdef __cplusplus
}
#endif
#endif
