#include <algorithm>
#include <exception>
#include <new>

#include "ground.h"
#include "pass.h"
#include "remake.h"

extern "C" {

int32_t lowtide_remake_abi(void) { return LOWTIDE_REMAKE_ABI; }

void *lowtide_remake_ground(const lowtide_remake_step *step) {
  try {
    return new lowtide::Ground(*step);
  } catch (const std::exception &) {
    return nullptr;
  }
}

void lowtide_remake_forget(void *ground) { delete static_cast<lowtide::Ground *>(ground); }

int32_t lowtide_remake_run(const void *ground, const lowtide_remake_trial *trial, int64_t *done,
                           int64_t room, lowtide_remake_result *result) {
  try {
    lowtide::Pass pass(*static_cast<const lowtide::Ground *>(ground), *trial);
    pass.run();
    const auto &rows = pass.done();
    result->seconds = pass.seconds();
    result->count = static_cast<int64_t>(rows.size());
    for (int64_t i = 0; i < std::min(room, result->count); ++i)
      std::copy(rows[static_cast<std::size_t>(i)].begin(), rows[static_cast<std::size_t>(i)].end(),
                done + 3 * i);
    return LOWTIDE_REMAKE_OK;
  } catch (const lowtide::Enough &) {
    return LOWTIDE_REMAKE_ENOUGH;
  } catch (const lowtide::Stuck &stuck) {
    result->op = stuck.op;
    result->needed = stuck.needed;
    return LOWTIDE_REMAKE_STUCK;
  } catch (const std::bad_alloc &) {
    return LOWTIDE_REMAKE_NO_MEMORY;
  } catch (const std::exception &) {
    return LOWTIDE_REMAKE_FAILED;
  }
}

}  // extern "C"
