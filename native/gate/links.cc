#include "links.h"

#include <map>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

namespace lowtide::chain {
namespace {

constexpr std::size_t kMostLinks = 128;  // of one op

// Never destroyed: ops may still run when the process ends.
std::shared_mutex guard;  // of the tables
struct Links {
  std::vector<std::shared_ptr<const Link>> known;
  bool is_sum = false;
};
auto& links = *new std::unordered_map<c10::OperatorHandle, Links>;
auto& kernels = *new std::map<std::vector<std::int64_t>, Kernel>;

struct Asked {
  std::optional<c10::OperatorHandle> op;
  std::optional<Form> form;
};
thread_local Asked asked;  // about the op that Python sees now

}  // namespace

Candidate candidate_of(const c10::OperatorHandle& op) {
  std::shared_lock lock(guard);
  const auto found = links.find(op);
  if (found == links.end()) return {};
  return {true, found->second.is_sum};
}

std::shared_ptr<const Link> link_of(const c10::OperatorHandle& op, const c10::IValue* given,
                                    std::size_t count, bool* ask) {
  {
    std::shared_lock lock(guard);
    const auto found = links.find(op);
    if (found == links.end()) return nullptr;
    for (const auto& link : found->second.known)
      if (link->form->fits(given, count)) return link;
    if (found->second.known.size() == kMostLinks) return nullptr;
  }
  asked = {op, Form::of(op, given, count)};
  *ask = asked.form.has_value();
  return nullptr;
}

void ask_nothing() { asked.op.reset(); }

std::optional<Kernel> kernel_of(const std::vector<std::int64_t>& words) {
  std::shared_lock lock(guard);
  const auto found = kernels.find(words);
  if (found == kernels.end()) return std::nullopt;
  return found->second;
}

}  // namespace lowtide::chain

using namespace lowtide;
using namespace lowtide::chain;

extern "C" {

// An op of which Python says, when asked, whether it can be a link; `is_sum`: autograd adds gradients up
// by it. False: there is none.
int lowtide_chain_may_be(const char* name, const char* overload, int is_sum) {
  const auto found = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!found) return 0;
  std::unique_lock lock(guard);
  links[*found].is_sum = is_sum != 0;
  return 1;
}

// Whether Python is asked about the op by that name, which it sees in this thread.
int lowtide_chain_is_asked(const char* name, const char* overload) {
  return asked.op && asked.op->operator_name().name == name &&
      asked.op->operator_name().overload_name == overload;
}

// What it is from now on: a link by that number, or none (-1). Of what it makes the type and the
// elements; which of its tensors that lies like; and which others do, a bit for each.
void lowtide_chain_answer(std::int64_t number, std::int64_t dtype, std::int64_t count,
                          std::int64_t whole, std::uint64_t wholes) {
  if (!asked.op || !asked.form) return;
  auto link = std::make_shared<Link>();
  link->form = std::make_shared<const Form>(std::move(*asked.form));
  link->number = number;
  link->dtype = static_cast<c10::ScalarType>(dtype);
  link->count = count;
  link->whole = static_cast<std::size_t>(whole);
  for (std::size_t i = 0; i < link->form->looks().size(); ++i)
    link->is_whole.push_back((wholes >> i & 1) != 0);
  {
    std::unique_lock lock(guard);
    auto& known = links[*asked.op].known;
    if (known.size() < kMostLinks) known.push_back(std::move(link));
  }
  asked = {};
}

// A chain by its words has that kernel from now on, so far trusted.
void lowtide_chain_put(const std::int64_t* words, std::int64_t count, int trust, void* function,
                       std::int64_t number) {
  std::unique_lock lock(guard);
  kernels[std::vector<std::int64_t>(words, words + count)] = {static_cast<Trust>(trust), function,
                                                              number};
}

// Nothing is known: of ops, and of kernels.
void lowtide_chain_forget() {
  std::unique_lock lock(guard);
  for (auto& [op, those] : links) those.known.clear();
  kernels.clear();
}
}
