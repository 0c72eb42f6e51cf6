#include "nodes.h"

#include <c10/util/Type.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <typeindex>
#include <unordered_map>
#include <unordered_set>

namespace lowtide {
namespace {

using torch::autograd::Node;

const auto& kGenerated = *new std::string("torch::autograd::generated::");

// What a node does with the gradient that it is given.
struct Way {
  enum What : char {
    kOther,    // who knows
    kReads,    // an op reads it, whichever of its gradients are asked for
    kAffine,   // the same, unless only that of what is added is asked for: its first
    kHandsOn,  // it, or a view of it, may be what others are given
  };
  What what = kOther;
  bool broadcasts = false;  // what it makes is as large as that
};

const std::unordered_set<std::string>& readers() {
  static const auto& names = *new std::unordered_set<std::string>{
      "BmmBackward0", "ConvolutionBackward0", "CudnnBatchNormBackward0", "DivBackward0",
      "DivBackward1", "EmbeddingBackward0", "ExpBackward0", "GeluBackward0",
      "LogSoftmaxBackward0", "MaxPool2DWithIndicesBackward0", "MeanBackward0", "MeanBackward1",
      "MmBackward0", "MulBackward0", "MulBackward1", "NativeBatchNormBackward0", "NativeDropoutBackward0",
      "NativeGroupNormBackward0", "NativeLayerNormBackward0", "NegBackward0", "PowBackward0",
      "ReluBackward0", "RsqrtBackward0", "ScaledDotProductCudnnAttentionBackward0",
      "ScaledDotProductEfficientAttentionBackward0", "ScaledDotProductFlashAttentionBackward0",
      "ScaledDotProductFlashAttentionForCpuBackward0", "SelectBackward0", "SigmoidBackward0",
      "SiluBackward0", "SliceBackward0", "SoftmaxBackward0", "SplitBackward0",
      "SplitWithSizesBackward0", "TanhBackward0", "ThresholdBackward0", "UnbindBackward0"};
  return names;
}

const std::unordered_set<std::string>& handing_on() {
  static const auto& names = *new std::unordered_set<std::string>{
      "AddBackward0", "AliasBackward0", "CatBackward0", "CloneBackward0", "ExpandBackward0",
      "PermuteBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1",
      "SubBackward0", "TBackward0", "ToCopyBackward0", "TransposeBackward0", "UnsafeViewBackward0",
      "UnsqueezeBackward0", "ViewBackward0"};
  return names;
}

// Those that make gradients as large as what they are given, each by itself.
const std::unordered_set<std::string>& broadcasting() {
  static const auto& names = *new std::unordered_set<std::string>{
      "AddBackward0", "DivBackward0", "MulBackward0", "SubBackward0"};
  return names;
}

// By its class, since a function of the program's may have any name.
Way way_of(const Node& node) {
  thread_local std::unordered_map<std::type_index, Way> known;
  const std::type_index type(typeid(node));
  const auto found = known.find(type);
  if (found != known.end()) return found->second;
  const std::string name = c10::demangle(typeid(node).name());
  Way way;
  if (name.compare(0, kGenerated.size(), kGenerated) == 0) {
    const std::string own = name.substr(kGenerated.size());
    if (readers().count(own) != 0) way.what = Way::kReads;
    if (own == "AddmmBackward0") way.what = Way::kAffine;
    if (handing_on().count(own) != 0) way.what = Way::kHandsOn;
    way.broadcasts = broadcasting().count(own) != 0;
  }
  return known[type] = way;
}

constexpr int kFarthest = 12;  // nodes that hand something on to each other

bool goes_to_ops(Node& from, Node& producer, int left);

// Whether only ops look at a gradient that the node is given.
bool is_read_by_ops(Node& node, Node& producer, int left) {
  const Way::What way = way_of(node).what;
  if (way == Way::kOther || left == 0) return false;
  if (node.device() != producer.device() || node.stream() != producer.stream()) return false;
  if (way == Way::kReads) return true;
  if (way == Way::kAffine &&
      (node.next_edge(1).is_valid() || node.next_edge(2).is_valid()))
    return true;
  return goes_to_ops(node, producer, left - 1);
}

// Whether what it gives to another is summed up first, by an op, since that one is smaller.
bool is_summed_up(Node& from, const torch::autograd::Edge& to) {
  if (!way_of(from).broadcasts) return false;
  const auto& given = from.input_metadata(0);
  const auto& wanted = to.function->input_metadata(to.input_nr);
  return !given.is_nested_tensor() && !wanted.is_nested_tensor() &&
      given.shape_as_dim_vector() != wanted.shape_as_dim_vector();
}

// Likewise, at what it gives to others.
bool goes_to_ops(Node& from, Node& producer, int left) {
  for (const auto& edge : from.next_edges())
    if (edge.is_valid() && !is_summed_up(from, edge) &&
        !is_read_by_ops(*edge.function, producer, left))
      return false;
  return true;
}

}  // namespace

namespace {

// Whether nothing of the program's runs in between: all nodes are PyTorch's own, without hooks.
bool is_without_others(const std::unordered_set<Node*>& nodes) {
  thread_local std::unordered_map<std::type_index, bool> own;
  for (Node* const node : nodes) {
    const auto [found, is_new] = own.try_emplace(std::type_index(typeid(*node)), false);
    if (is_new) {
      const std::string name = c10::demangle(typeid(*node).name());
      found->second = name.compare(0, kGenerated.size(), kGenerated) == 0 ||
          name == "torch::autograd::AccumulateGrad" || name == "torch::autograd::GraphRoot" ||
          name == "torch::autograd::CopyBackwards";
    }
    if (!found->second || !node->pre_hooks().empty() || !node->tensor_pre_hooks().empty() ||
        !node->retains_grad_hooks().empty() || !node->post_hooks().empty() ||
        node->tensor_post_acc_grad_hooks() != nullptr)
      return false;
  }
  return true;
}

// Of the backward that goes on in this thread, looked at once.
bool is_plain_backward() {
  namespace autograd = torch::autograd;
  thread_local int last = -1;
  thread_local bool is_plain = false;
  const int task = autograd::get_current_graph_task_id();
  if (task == -1) return false;
  if (task != last) {
    const auto* const some = autograd::get_current_graph_task_exec_info();
    const auto* const nodes = autograd::get_current_graph_task_nodes_in_graph();
    last = task;
    // With some gradients asked for and others not, what a node is given may be what is asked for.
    is_plain = some != nullptr && some->empty() && nodes != nullptr && is_without_others(*nodes) &&
        !autograd::AnomalyMode::is_enabled();
  }
  return is_plain;
}

}  // namespace

bool only_ops_look_at_sum(c10::IntArrayRef sizes) {
  if (!is_plain_backward()) return false;
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr || way_of(*node).what == Way::kOther) return false;
  bool found = false;
  for (const auto& edge : node->next_edges()) {
    if (!edge.is_valid()) continue;
    const auto& metadata = edge.function->input_metadata(edge.input_nr);
    if (metadata.is_nested_tensor()) return false;
    const auto wanted = metadata.shape_as_dim_vector();
    if (!std::equal(wanted.begin(), wanted.end(), sizes.begin(), sizes.end())) continue;
    if (!is_read_by_ops(*edge.function, *node, kFarthest)) return false;
    found = true;
  }
  return found;
}

bool only_ops_look() {
  namespace autograd = torch::autograd;
  if (!is_plain_backward()) return false;
  const auto node = autograd::get_current_node();
  if (node == nullptr) return false;
  struct Answer {
    const Node* node = nullptr;
    std::uint64_t number = 0;
    int task = -1;
    bool yes = false;
  };
  thread_local Answer last;  // another node may lie where that one did: it has another number
  const int task = autograd::get_current_graph_task_id();
  if (last.node != node.get() || last.number != node->sequence_nr() || last.task != task) {
    const bool yes = way_of(*node).what != Way::kOther && goes_to_ops(*node, *node, kFarthest);
    last = {node.get(), node->sequence_nr(), task, yes};
  }
  return last.yes;
}

}  // namespace lowtide
