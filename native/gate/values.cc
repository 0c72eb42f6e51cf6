#include "values.h"

#include <utility>

#include "python.h"
#include "tape.h"

namespace lowtide::tape {
namespace {

auto& temporaries = *new std::vector<int>;

// It is dropped no longer: what it is made from need not be held for it.
void come_back(Value& value) {
  value.dropped = false;
  const Instruction& by = *value.dropped_by;
  value.dropped_by = nullptr;
  for (const int source : by.sources) release(source);
  for (const int other : by.others) --values[other].borrowers;
}

// Whether it has an object in Python that nobody there refers to: it counts as one that refers to it.
template <typename Slot>
bool has_lone_object(const Slot* slot) {
  if constexpr (requires { slot->has_unique_reference(); })
    return slot->has_unique_reference();
  else
    return false;  // before torch 2.10 it did not count
}

}  // namespace

void begin_values(std::size_t count) {
  temporaries.clear();
  lying.clear();
  values.clear();
  values.resize(count);
}

Held locked(const Value& value) { return value.weak ? value.weak->lock() : Held(); }

bool is_idle(const Value& value) {
  return !value.dropped && value.holders == 0 && value.saves == 0;
}

bool binds(int which, const Impl* impl, const c10::Storage& storage) {
  Value& value = values[which];
  if (value.impl != nullptr) return value.impl == impl && !value.spoilt;
  value.impl = impl;
  value.weak.emplace(storage.getWeakStorageImpl());
  if (program.bytes[which] == 0) value.empty = locked(value);
  lying[impl].push_back(which);
  return true;
}

bool acquire(int which) {
  Value& value = values[which];
  if (value.holders == 0) value.held = locked(value);
  if (!value.held) return false;
  ++value.holders;
  return true;
}

void release(int which) {
  Value& value = values[which];
  if (--value.holders > 0) return;
  const Held last = std::move(value.held);
  value.held.reset();
  if (value.saves == 0 && value.dropped) come_back(value);  // nobody wants it any more
}

void unsaved(int which) {
  Value& value = values[which];
  if (--value.saves == 0 && value.holders == 0 && value.dropped) come_back(value);
}

Held there(int which) {
  const Value& value = values[which];
  if (value.temporary) return value.temporary;
  if (value.empty) return value.empty;
  Held found = locked(value);
  if (!found || value.spoilt || value.dropped ||
      static_cast<std::int64_t>(found->nbytes()) < program.bytes[which])
    throw Unlike("a value is not there");
  return found;
}

Dropped drop(const Instruction& one) {
  Value& value = values[one.value];
  const Held bytes = locked(value);
  if (!bytes || value.dropped || (value.saves == 0 && value.holders == 0)) return Dropped::kGone;
  if (value.spoilt || !bytes->resizable() ||
      static_cast<std::int64_t>(bytes->nbytes()) != program.bytes[one.value])
    return Dropped::kRefused;
  const auto ours = static_cast<std::size_t>(value.saves) + (value.held ? 1 : 0) +
      (has_lone_object(bytes->pyobj_slot()) ? 1 : 0) + 1;
  if (bytes.use_count() > ours) return Dropped::kLater;  // others can reach it
  for (const int other : one.others)
    if (values[other].spoilt || !locked(values[other])) return Dropped::kRefused;
  for (std::size_t i = 0; i < one.sources.size(); ++i) {
    if (!values[one.sources[i]].spoilt && acquire(one.sources[i])) continue;
    while (i-- > 0) release(one.sources[i]);
    return Dropped::kRefused;
  }
  for (const int other : one.others) ++values[other].borrowers;
  bytes->set_data_ptr_noswap(at::DataPtr(nullptr, bytes->device()));
  bytes->set_nbytes(0);
  value.dropped = true;
  value.dropped_by = &one;
  ++counts.dropped;
  counts.bytes += program.bytes[one.value];
  return Dropped::kYes;
}

void keep(const Made& made, c10::Storage storage) {
  Value& value = values[made.value];
  if (!made.home) {
    value.temporary = Held::reclaim_copy(storage.unsafeGetStorageImpl());
    temporaries.push_back(made.value);
    return;
  }
  const Held bytes = locked(value);
  if (!bytes || !value.dropped) return;  // nobody wants it any more
  if (static_cast<std::int64_t>(storage.nbytes()) != program.bytes[made.value])
    throw Unlike("what was made again is of another size");
  Impl* const from = storage.unsafeGetStorageImpl();
  bytes->set_data_ptr_noswap(from->set_data_ptr(at::DataPtr(nullptr, bytes->device())));
  from->set_nbytes(0);
  bytes->set_nbytes(static_cast<std::size_t>(program.bytes[made.value]));
  come_back(value);
}

void free_all(const std::vector<int>& them) {
  for (const int one : them) values[one].temporary.reset();
}

std::vector<int> begin_temporaries() {
  return std::exchange(temporaries, {});
}

void end_temporaries(std::vector<int> outer) {
  free_all(temporaries);
  temporaries = std::move(outer);
}

}  // namespace lowtide::tape
