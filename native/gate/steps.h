// The ops of a chain (chain.h) that wait, and how they run.
#ifndef LOWTIDE_STEPS_H
#define LOWTIDE_STEPS_H

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "chain.h"
#include "links.h"
#include "python.h"

namespace lowtide::chain {

struct Step {
  std::shared_ptr<const Link> link;
  std::vector<int> places;  // of its tensors: a step that makes it, or from -1 downwards an input
  c10::Storage made;        // without bytes until it has run
};

struct Input {
  c10::Storage storage;
  std::shared_ptr<const Link> link;  // of the step that is the first to read it
  std::size_t which = 0;             // ... and which of its tensors it is

  const Form::Look& look() const { return link->form->looks()[which]; }
};

struct Chain {
  std::vector<Step> steps;
  std::vector<Input> inputs;
  c10::Stream stream{c10::Stream::UNSAFE, c10::Device(c10::kCPU), 0};

  // What a step is given, in order.
  std::vector<c10::Storage> given(const Step& step) const {
    std::vector<c10::Storage> found;
    for (const int place : step.places)
      found.push_back(place >= 0 ? steps[static_cast<std::size_t>(place)].made
                                 : inputs[static_cast<std::size_t>(-1 - place)].storage);
    return found;
  }
};

struct Python {
  PyObject* make;   // called with what a chain is: its kernel is to be put
  PyObject* run;    // called with a kernel's number, what it reads, and tensors to fill
  PyObject* prove;  // called with a kernel's number, what it has made, and what the ops have
};

// Who does what is not done here, and who runs an op for which there is no memory.
inline Python python{};
inline Dispatch by_python = nullptr;
inline std::atomic<std::int64_t> kernels_run{0};

c10::Stream current_stream(c10::Device device);

// The steps whose results somebody refers to, besides the chain.
std::vector<int> wanted_of(const Chain& chain);

// What somebody refers to, besides the chain, is made.
void run(Chain chain);

}  // namespace lowtide::chain
#endif
