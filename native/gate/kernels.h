// Chains of ops that run again as one kernel.
#ifndef LOWTIDE_KERNELS_H
#define LOWTIDE_KERNELS_H

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "program.h"
#include "values.h"

namespace lowtide::tape {

using Launch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                       void*, void**, void**);

struct Kernels {
  std::vector<void*> functions;  // by their numbers in the tape; null: Python runs it
  Launch launch = nullptr;
  std::int64_t threads = 1, each = 1;  // of a block, and how many elements one of them makes
};

inline auto& kernels = *new Kernels;

// Launched on the device's current stream, for so many elements, with pointers and numbers. The error.
int launch(void* function, c10::Device device, std::int64_t count,
           std::vector<std::int64_t> arguments);

// Whether it can be launched from here.
bool is_here(const Instruction& one);
void launch(const Instruction& one, const std::vector<Held>& inputs,
            const std::vector<at::Tensor>& outputs);

}  // namespace lowtide::tape
#endif
