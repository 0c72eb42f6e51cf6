// Element-wise ops of backward that run as one kernel.
//
// What such an op makes is mostly read by the next one, and by nobody else. So ops do not run when
// they are called: they wait, in a *chain*, until an op comes that is none of them. Then one kernel
// makes what somebody still refers to, and the rest is never in memory.
//
// 1. Only where nobody but ops can look at what is made, and nothing else of the program's runs in
//    between, which might change what they read (nodes.h): so nobody can tell.
// 2. Any op that does not wait itself, and does more than show what it is given, comes after all that
//    waits has run, in the same thread.
// 3. What they read is referred to meanwhile: so no plan takes its bytes, and whoever writes is an op.
//    All of it was there when the first was called: what a plan makes or brings then comes after them,
//    too, so what is held is no more than if they had run one by one.
// 4. A kernel is relied on once Python has compared what it makes, bit for bit, with what the ops have
//    made one by one. Until then, and where there is no memory, they run one by one.
#ifndef LOWTIDE_CHAIN_H
#define LOWTIDE_CHAIN_H

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstddef>

namespace lowtide::chain {

enum class Said {
  kNo,     // it runs as ever
  kWaits,  // its result is on the stack; its bytes come later
  kAsk,    // nobody knows whether it could: Python is to see it
};

// An op is called that makes something new and writes to nothing.
Said offered(const c10::OperatorHandle& op, torch::jit::Stack* stack, std::size_t count);

// What waits in this thread runs now.
void finish();

// An op is called where there are gradients: whether hooks of the program's are there for what it saves.
void look_at_hooks();

// What waits, where nobody can be thrown at, and nobody needs it.
void finish_or_forget();

// The same, for who cannot be thrown at. False: Python has raised.
bool finish_or_raise();

// Who runs an op for which there is no memory.
using Dispatch = void (*)(const c10::OperatorHandle&, torch::jit::Stack*);
void fall_back_on(Dispatch dispatch);

}  // namespace lowtide::chain
#endif
