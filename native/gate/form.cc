#include "form.h"

#include <ATen/core/jit_type.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/ScalarOps.h>
#include <c10/core/TensorOptions.h>

#include <cstring>

namespace lowtide {
namespace {

bool is_plain_memory(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && tensor.has_storage() && !tensor._is_zerotensor() &&
      !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

bool is_number(const c10::IValue& given) {
  return given.isNone() || given.isInt() || given.isBool() || given.isDouble() ||
      given.isString() || given.isDevice();
}

bool is_list_of_numbers(const c10::IValue& given) {
  return given.isIntList() || given.isDoubleList() || given.isBoolList();
}

// None: no such number can be compared.
std::optional<c10::IValue> number_in(const at::Tensor& tensor) {
  if (!tensor.device().is_cpu() || tensor.numel() != 1) return std::nullopt;
  const void* const data = tensor.unsafeGetTensorImpl()->data();
  switch (tensor.scalar_type()) {
    case c10::kDouble: return c10::IValue(*static_cast<const double*>(data));
    case c10::kLong: return c10::IValue(*static_cast<const std::int64_t*>(data));
    case c10::kBool: return c10::IValue(*static_cast<const bool*>(data));
    default: return std::nullopt;
  }
}

bool same_bits(double one, double other) { return std::memcmp(&one, &other, sizeof one) == 0; }

bool same(const c10::IValue& one, const c10::IValue& other) {
  if (one.isNone()) return other.isNone();
  if (one.isInt()) return other.isInt() && one.toInt() == other.toInt();
  if (one.isBool()) return other.isBool() && one.toBool() == other.toBool();
  if (one.isDouble()) return other.isDouble() && same_bits(one.toDouble(), other.toDouble());
  if (one.isString())
    return other.isString() && one.toStringRef() == other.toStringRef();
  if (one.isDevice()) return other.isDevice() && one.toDevice() == other.toDevice();
  if (one.isIntList()) return other.isIntList() && one.toIntVector() == other.toIntVector();
  if (one.isBoolList()) {
    return other.isBoolList() && one.toBoolList().vec() == other.toBoolList().vec();
  }
  if (!one.isDoubleList() || !other.isDoubleList()) return false;
  const auto ours = one.toDoubleVector(), theirs = other.toDoubleVector();
  return ours.size() == theirs.size() &&
      std::memcmp(ours.data(), theirs.data(), ours.size() * sizeof(double)) == 0;
}

}  // namespace

std::optional<Form> Form::of(const c10::OperatorHandle& op, const c10::IValue* given,
                             std::size_t count) {
  Form form(op);
  for (std::size_t i = 0; i < count; ++i)
    if (!form.add(given[i])) return std::nullopt;
  if (!form.looks_.empty()) form.device_ = form.looks_.front().device;
  for (const c10::IValue& one : form.plain_)
    if (!form.device_ && one.isDevice()) form.device_ = one.toDevice();
  if (!form.device_) return std::nullopt;
  return form;
}

bool Form::add(const c10::IValue& given) {
  kinds_.push_back(Kind::kPlain);
  if (is_number(given) || is_list_of_numbers(given)) {
    plain_.push_back(given);
    return true;
  }
  if (given.isTensor()) {
    const at::Tensor& tensor = given.toTensor();
    if (!tensor.defined()) {
      plain_.emplace_back();
      return true;
    }
    if (is_wrapped_number(tensor)) {
      const auto number = number_in(tensor);
      if (number) plain_.push_back(*number);
      return number.has_value();
    }
    if (!is_plain_memory(tensor)) return false;
    kinds_.back() = Kind::kTensor;
    looks_.push_back({tensor.scalar_type(), tensor.device(), tensor.key_set(),
                      tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset()});
    return true;
  }
  if (!given.isList()) return false;
  kinds_.back() = Kind::kList;
  const c10::List<c10::IValue> items = given.toList();
  plain_.emplace_back(static_cast<std::int64_t>(items.size()));
  for (std::size_t i = 0; i < items.size(); ++i)
    if (!add(items.get(i))) return false;
  return true;
}

bool Form::fits(const c10::IValue* given, std::size_t count) const {
  At at;
  for (std::size_t i = 0; i < count; ++i)
    if (!fits(given[i], at)) return false;
  return at.kind == kinds_.size();
}

bool Form::fits(const c10::IValue& given, At& at) const {
  if (at.kind == kinds_.size()) return false;
  const Kind kind = kinds_[at.kind++];
  const bool tensor_given = given.isTensor() && given.toTensor().defined();
  const bool wrapped = tensor_given && is_wrapped_number(given.toTensor());
  if (tensor_given && !wrapped) {
    if (kind != Kind::kTensor) return false;
    const at::Tensor& tensor = given.toTensor();
    const Look& ours = looks_[at.look++];
    return tensor.key_set() == ours.keys && is_plain_memory(tensor) &&
        tensor.scalar_type() == ours.dtype && tensor.device() == ours.device &&
        tensor.sizes() == ours.sizes && tensor.strides() == ours.strides &&
        tensor.storage_offset() == ours.offset;
  }
  if (kind == Kind::kTensor) return false;
  const c10::IValue& ours = plain_[at.plain++];
  const bool list = given.isList() && !is_list_of_numbers(given);
  if (list != (kind == Kind::kList)) return false;
  if (wrapped) {
    const auto number = number_in(given.toTensor());
    return number && same(*number, ours);
  }
  if (given.isTensor()) return ours.isNone();
  if (is_number(given) || is_list_of_numbers(given)) return same(given, ours);
  if (!list) return false;
  const c10::List<c10::IValue> items = given.toList();
  if (!ours.isInt() || ours.toInt() != static_cast<std::int64_t>(items.size())) return false;
  for (std::size_t i = 0; i < items.size(); ++i)
    if (!fits(items.get(i), at)) return false;
  return true;
}

c10::Storage Form::nothing(std::size_t tensor) const {
  const Look& look = looks_.at(tensor);
  const std::size_t bytes = at::detail::computeStorageNbytes(
      look.sizes, look.strides, c10::elementSize(look.dtype), static_cast<std::size_t>(look.offset));
  return at::zeros({static_cast<std::int64_t>(bytes)},
                   at::TensorOptions(look.device).dtype(at::kByte))
      .storage();
}

std::vector<c10::IValue> Form::filled(const std::vector<c10::Storage>& storages) const {
  At at;
  std::vector<c10::IValue> given;
  const auto& arguments = op_.schema().arguments();
  for (std::size_t i = 0; at.kind < kinds_.size(); ++i)
    given.push_back(filled(arguments[i].type(), storages, at));
  return given;
}

c10::IValue Form::filled(const c10::TypePtr& type, const std::vector<c10::Storage>& storages,
                         At& at) const {
  const Kind kind = kinds_[at.kind++];
  if (kind == Kind::kTensor) {
    const c10::Storage& storage = storages.at(at.look);
    const Look& look = looks_[at.look++];
    const auto key = c10::computeDispatchKey(look.dtype, c10::kStrided, look.device);
    at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(look.dtype));
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(look.sizes, look.strides, look.offset);
    return tensor;
  }
  c10::TypePtr bare = type;
  if (const auto optional = type->cast<c10::OptionalType>()) bare = optional->getElementType();
  const c10::IValue& ours = plain_[at.plain++];
  if (kind == Kind::kPlain) {
    if (bare->kind() != c10::TypeKind::TensorType || ours.isNone()) return ours;
    at::Tensor number = at::scalar_to_tensor(ours.toScalar());  // shown to Python as a number
    number.unsafeGetTensorImpl()->set_wrapped_number(true);
    return number;
  }
  const c10::TypePtr element = bare->expectRef<c10::ListType>().getElementType();
  c10::impl::GenericList items(element);
  for (std::int64_t i = 0; i < ours.toInt(); ++i) items.push_back(filled(element, storages, at));
  return items;
}

}  // namespace lowtide
