// Calls from where nothing may be thrown: C, or the pool while its lock is held.
#ifndef LOWTIDE_TORCH_GUARDED_H
#define LOWTIDE_TORCH_GUARDED_H

namespace lowtide {

// What fails gives `otherwise`.
template <typename Result, typename Call>
Result guarded(Result otherwise, Call call) noexcept {
  try {
    return call();
  } catch (...) {
    return otherwise;
  }
}

}  // namespace lowtide
#endif
