// What is known of ops: what they do, which of a step are written down, and in what form.
#ifndef LOWTIDE_KNOWN_H
#define LOWTIDE_KNOWN_H

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "form.h"

namespace lowtide {

enum Kind : int {
  kUnknown = 0,
  kView = 1,
  kPlain = 2,
  kWriter = 3,
  kRandom = 4,
  kStatistics = 5,
  kWritten = 6,
  kWrittenRandom = 7,
  kWrittenWriter = 8
};

struct Known {
  Kind kind = kUnknown;
  std::uint64_t writes = 0;      // to which of its arguments, a bit for each
  bool is_written_down = false;  // if ops with its number are
};

// What it is, if anybody has said so.
Known what_is(const c10::OperatorHandle& op, std::int64_t number);

// The form in which it was known by that number. None, and Python may keep the one that it has.
std::shared_ptr<const Form> form_or_offer(const c10::OperatorHandle& op, std::int64_t number,
                                          const c10::IValue* given, std::size_t count);

// Python is about to see an op in this thread: by no number, or in a form that is known.
void offer_nothing();
void offer_known(std::int64_t number, const Form& form);

}  // namespace lowtide
#endif
