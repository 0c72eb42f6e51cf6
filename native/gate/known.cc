#include "known.h"

#include <mutex>
#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tape.h"

namespace lowtide {
namespace {

// Never destroyed: ops may still run when the process ends.
std::shared_mutex guard;  // of the tables below, and the id
auto& kinds = *new std::unordered_map<c10::OperatorHandle, Known>;
auto& written_down = *new std::vector<std::uint64_t>;  // a bit for each op of a step
// By the op's number, the latest last: steps of several kinds may take turns.
auto& forms = *new std::unordered_map<std::int64_t, std::vector<std::shared_ptr<const Form>>>;
std::int64_t last_form = 0;  // its id
constexpr std::size_t kMostForms = 8;  // of one number

struct Offer {
  std::int64_t number = -1;
  std::optional<Form> form;
  std::int64_t known = 0;  // its id, if it has one
};
thread_local Offer offer;  // of the op that Python sees now

std::shared_ptr<const Form> form_of(const c10::OperatorHandle& op, std::int64_t number,
                                    const c10::IValue* given, std::size_t count) {
  std::shared_lock lock(guard);
  const auto found = forms.find(number);
  if (found == forms.end()) return nullptr;
  for (auto form = found->second.rbegin(); form != found->second.rend(); ++form)
    if ((*form)->op() == op && (*form)->fits(given, count)) return *form;
  return nullptr;
}

}  // namespace

Known what_is(const c10::OperatorHandle& op, std::int64_t number) {
  const auto at = static_cast<std::uint64_t>(number);
  const std::size_t word = at / 64;
  std::shared_lock lock(guard);
  const auto found = kinds.find(op);
  if (found == kinds.end()) return {};
  Known known = found->second;
  known.is_written_down = word < written_down.size() && (written_down[word] >> (at % 64) & 1);
  return known;
}

std::shared_ptr<const Form> form_or_offer(const c10::OperatorHandle& op, std::int64_t number,
                                          const c10::IValue* given, std::size_t count) {
  std::shared_ptr<const Form> form = form_of(op, number, given, count);
  if (form == nullptr) offer = {number, Form::of(op, given, count)};
  return form;
}

void offer_nothing() { offer.number = -1; }

void offer_known(std::int64_t number, const Form& form) { offer = {number, std::nullopt, form.id}; }

std::shared_ptr<const Form> tape::known_form(std::int64_t number, std::int64_t id) {
  std::shared_lock lock(guard);
  const auto found = forms.find(number);
  if (found == forms.end()) return nullptr;
  for (const auto& form : found->second)
    if (form->id == id) return form;
  return nullptr;
}

}  // namespace lowtide

using namespace lowtide;

extern "C" {

// The ops of a step that are written down, a bit for each.
void lowtide_gate_write_down(const std::uint64_t* words, std::int64_t count) {
  std::unique_lock lock(guard);
  written_down.assign(words, words + count);
}

// The op that Python has just seen in this thread, by that number, is the same the next time it
// looks the same. The id of its form, or 0: it cannot be compared.
std::int64_t lowtide_gate_keep(std::int64_t number) {
  if (offer.number == number && offer.known != 0) return offer.known;
  if (offer.number != number || !offer.form) return 0;
  auto form = std::make_shared<Form>(std::move(*offer.form));
  offer = {};
  std::unique_lock lock(guard);
  form->id = ++last_form;
  auto& known = forms[number];
  if (known.size() == kMostForms) known.erase(known.begin());
  known.push_back(std::move(form));
  return last_form;
}

// The id of the form of the op that Python sees now in this thread, by that number, if it is known.
std::int64_t lowtide_gate_known(std::int64_t number) {
  return offer.number == number ? offer.known : 0;
}

// Nobody knows what an op looked like.
void lowtide_gate_forget() {
  std::unique_lock lock(guard);
  forms.clear();
}

// What an op does: shows what it is given (1), makes something new (2), writes to what it is given, so
// that it cannot be run again if it fails (3), makes something new with random numbers (4), or makes
// something new and moves statistics along (5). `writes` has a bit for each argument that it writes to.
// False: there is no such op.
int lowtide_gate_know(const char* name, const char* overload, int kind, std::uint64_t writes) {
  const auto found = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!found) return 0;
  std::unique_lock lock(guard);
  kinds[*found] = {static_cast<Kind>(kind), writes};
  return 1;
}
}
