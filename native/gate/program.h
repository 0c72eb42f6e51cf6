// A tape as Python has written it down: see tape.h.
#ifndef LOWTIDE_PROGRAM_H
#define LOWTIDE_PROGRAM_H

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "form.h"

namespace lowtide::tape {

struct Made {
  std::int64_t place;  // among the results
  int value;
  bool home;  // its bytes are those of a dropped value, and go where those were
};

struct Op {
  std::int64_t number;
  std::shared_ptr<const Form> form;
  std::vector<int> reads;    // -1: what is there does not matter
  std::vector<Made> makes;
  std::vector<Made> writes;  // what it changes becomes these: their places are among the reads
  std::vector<int> holds;  // of the reads, those that a plan holds from here on
};

struct Input {
  int value;
  std::int64_t offset;  // in bytes
  bool aligned;         // its address has to be
};

enum class Do { kDrop, kRun, kFused, kBring, kLetGo };

struct Instruction {
  Do what;
  int value = -1;           // of a drop
  std::int64_t number = 0;  // the save's, or the op's place in the tape, or the kernel's
  int place = 0;            // of what is let go, among the op's holds
  std::int64_t count = 0;   // elements
  std::int64_t calls = 0;
  std::vector<int> sources, others;  // the others are held by Python
  std::vector<Input> inputs;
  std::vector<Made> makes;  // of a kernel: with the bytes of an element in place of a place
  std::vector<Made> writes;
  std::vector<int> frees;   // nobody reads them after this
};

struct Program {
  std::vector<std::int64_t> bytes;  // of each value
  std::vector<bool> is_made;        // by an op of the tape
  std::vector<Op> ops;
  std::unordered_map<std::int64_t, int> op_at;  // by the number
  std::unordered_map<std::int64_t, int> value_at;  // by the save
  std::unordered_map<std::int64_t, std::vector<Instruction>> events;
  c10::Device device{c10::kCPU};
};

inline auto& program = *new Program;  // of the tape at hand; never destroyed: as the saves

// Throws where the words are none, or a form is not known.
Program read_program(const std::int64_t* words, std::int64_t count);

}  // namespace lowtide::tape
#endif
