#include "program.h"

#include <stdexcept>

#include "tape.h"

namespace lowtide::tape {
namespace {

// The words in which Python has written a tape down.
class Reader {
 public:
  Reader(const std::int64_t* words, std::int64_t count) : next_(words), end_(words + count) {}
  std::int64_t word() {
    if (next_ == end_) throw std::out_of_range("a tape is too short");
    return *next_++;
  }
  int number() { return static_cast<int>(word()); }
  std::vector<int> numbers() {
    std::vector<int> found(static_cast<std::size_t>(word()));
    for (int& one : found) one = number();
    return found;
  }

 private:
  const std::int64_t *next_, *end_;
};

std::vector<Made> read_makes(Reader& from) {
  std::vector<Made> found(static_cast<std::size_t>(from.word()));
  for (Made& made : found) {
    made.place = from.word();
    made.value = from.number();
    made.home = from.word() != 0;
  }
  return found;
}

Instruction read_instruction(Reader& from) {
  Instruction one;
  one.what = static_cast<Do>(from.word());
  one.number = from.word();
  switch (one.what) {
    case Do::kDrop:
      one.value = from.number();
      one.sources = from.numbers();
      one.others = from.numbers();
      break;
    case Do::kFused:
      one.count = from.word();
      one.inputs.resize(static_cast<std::size_t>(from.word()));
      for (Input& input : one.inputs) {
        input.value = from.number();
        input.offset = from.word();
        input.aligned = from.word() != 0;
      }
      [[fallthrough]];
    case Do::kRun:
      one.calls = from.word();
      one.makes = read_makes(from);
      one.writes = read_makes(from);
      one.frees = from.numbers();
      break;
    case Do::kBring:
      break;
    case Do::kLetGo:
      one.place = from.number();
  }
  return one;
}

}  // namespace

Program read_program(const std::int64_t* words, std::int64_t count) {
  Reader from(words, count);
  Program found;
  for (std::int64_t i = from.word(); i > 0; --i) {
    found.bytes.push_back(from.word());
    found.is_made.push_back(false);
  }
  for (std::int64_t i = from.word(); i > 0; --i) {
    Op op;
    op.number = from.word();
    op.form = known_form(op.number, from.word());
    op.reads = from.numbers();
    op.makes = read_makes(from);
    op.writes = read_makes(from);
    op.holds = from.numbers();
    if (op.form == nullptr) throw std::out_of_range("a form is not known");
    for (const auto& all : {op.makes, op.writes})
      for (const Made& made : all) found.is_made[static_cast<std::size_t>(made.value)] = true;
    if (op.form->device().type() != c10::kCPU || found.ops.empty()) found.device = op.form->device();
    found.op_at[op.number] = static_cast<int>(found.ops.size());
    found.ops.push_back(std::move(op));
  }
  for (std::int64_t i = from.word(); i > 0; --i) {
    const std::int64_t number = from.word();
    found.value_at[number] = from.number();
  }
  for (std::int64_t i = from.word(); i > 0; --i) {
    auto& instructions = found.events[from.word()];
    for (std::int64_t j = from.word(); j > 0; --j) instructions.push_back(read_instruction(from));
  }
  return found;
}

}  // namespace lowtide::tape
