// The values of a step that goes by a tape, as they are: who holds them, and whose bytes are gone.
#ifndef LOWTIDE_VALUES_H
#define LOWTIDE_VALUES_H

#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "program.h"

namespace lowtide::tape {

using Impl = c10::StorageImpl;
using Held = c10::intrusive_ptr<Impl>;

struct Value {
  const Impl* impl = nullptr;
  std::optional<c10::weak_intrusive_ptr<Impl>> weak;  // so that no other has its address
  Held held, temporary;
  Held empty;  // what has no bytes is always there
  int holders = 0;
  int borrowers = 0;  // dropped values that are made from it, where Python sees that it stays
  int saves = 0;      // tensors kept here
  bool dropped = false;
  bool spoilt = false;  // written to since
  const Instruction* dropped_by = nullptr;
};

struct Counts {
  std::int64_t dropped = 0, bytes = 0, refused = 0, calls = 0;
};

// What is asked of a tape is not there, or not as it was.
struct Unlike : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Never destroyed: as the saves.
inline auto& values = *new std::vector<Value>;
inline auto& lying = *new std::unordered_map<const Impl*, std::vector<int>>;  // by their storages
inline Counts counts;

// Of a new step, so many; or of none.
void begin_values(std::size_t count);

Held locked(const Value& value);
bool is_idle(const Value& value);  // not dropped, and nothing is held for one that is

// It is that one from now on. False: it is another already, or was written to.
bool binds(int which, const Impl* impl, const c10::Storage& storage);

// Hold it, if it is still there; and let go of it.
bool acquire(int which);
void release(int which);

// The bytes of a value that is about to be read.
Held there(int which);

enum class Dropped { kYes, kGone, kRefused, kLater };
Dropped drop(const Instruction& one);

// What was made again: where it was before, or at hand for a while.
void keep(const Made& made, c10::Storage storage);
void free_all(const std::vector<int>& them);

// Those that are at hand for a while, in an event; `outer`: of one in the midst of which that happens.
std::vector<int> begin_temporaries();
void end_temporaries(std::vector<int> outer);

}  // namespace lowtide::tape
#endif
