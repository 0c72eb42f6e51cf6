// What can be part of a chain (chain.h), and the kernels of chains.
#ifndef LOWTIDE_LINKS_H
#define LOWTIDE_LINKS_H

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "form.h"

namespace lowtide::chain {

// An op on tensors that look like that.
struct Link {
  std::shared_ptr<const Form> form;
  std::int64_t number = -1;  // by which Python knows it; -1: it is none
  c10::ScalarType dtype = c10::kFloat;  // of what it makes
  std::int64_t count = 0;               // ... and its elements
  std::size_t whole = 0;                // the tensor that what it makes lies like
  std::vector<bool> is_whole;           // of the tensors, whether they lie like that
  mutable std::atomic<int> alone{0};    // chains in a row that it began, and was all of

  // Then it begins none: to wait takes the host longer.
  bool is_mostly_alone() const { return alone.load(std::memory_order_relaxed) >= 4; }
};

// Whether it is one of those ops at all, and the one by which autograd adds gradients up.
struct Candidate {
  bool is_one = false, is_sum = false;
};
Candidate candidate_of(const c10::OperatorHandle& op);

// None: nobody knows. `ask`: Python may, which sees the op now in this thread.
std::shared_ptr<const Link> link_of(const c10::OperatorHandle& op, const c10::IValue* given,
                                    std::size_t count, bool* ask);

// Python is about to see another op.
void ask_nothing();

enum class Trust : int {
  kNone = 0,      // it is not to be used
  kUnproved = 1,  // until what it makes was compared with what the ops make
  kProved = 2
};

struct Kernel {
  Trust trust = Trust::kNone;
  void* function = nullptr;  // null: Python runs it
  std::int64_t number = 0;   // by which Python knows it
};

// By what it computes. None: nobody has asked for it.
std::optional<Kernel> kernel_of(const std::vector<std::int64_t>& words);

}  // namespace lowtide::chain
#endif
