// Python, told of ops that it did not see.
#ifndef LOWTIDE_TELL_H
#define LOWTIDE_TELL_H

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "form.h"

namespace lowtide {

// An op that is written down has run, without Python: a tape goes on with it, or Python is told which
// storages were read, and which may have been made, with their place among the results.
void tell(const Form& form, std::int64_t number, const std::vector<c10::IValue>& given,
          const c10::IValue* results, std::size_t count, const at::Tensor& random);

// What Python has raised just now may be a signal's: it goes on where Python can raise it.
void raise_soon();

}  // namespace lowtide
#endif
