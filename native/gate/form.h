// What an op was given, but for whose bytes: the same form, and it does the same to other bytes.
#ifndef LOWTIDE_FORM_H
#define LOWTIDE_FORM_H

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace lowtide {

class Form {
 public:
  // None where something was given that cannot be compared, or nothing that says where it runs.
  static std::optional<Form> of(const c10::OperatorHandle& op, const c10::IValue* given,
                                std::size_t count);

  // Whether these are given now: all numbers to the last bit, all tensors but for their bytes.
  bool fits(const c10::IValue* given, std::size_t count) const;

  // What to give so that the same is done to other bytes: a storage for each tensor, in order.
  std::vector<c10::IValue> filled(const std::vector<c10::Storage>& storages) const;

  // Zeros, in place of bytes that do not matter to what it does: for that tensor, in order.
  c10::Storage nothing(std::size_t tensor) const;

  // How a tensor was seen.
  struct Look {
    c10::ScalarType dtype;
    c10::Device device;
    c10::DispatchKeySet keys;
    std::vector<std::int64_t> sizes, strides;
    std::int64_t offset;  // elements
    bool operator==(const Look&) const = default;
  };

  const c10::OperatorHandle& op() const { return op_; }
  const std::vector<Look>& looks() const { return looks_; }  // of the tensors, in order
  std::int64_t id = 0;  // by which Python knows it
  c10::Device device() const { return *device_; }  // of the first tensor, or else as was asked for

 private:
  explicit Form(const c10::OperatorHandle& op) : op_(op) {}

  // What was given, in order: one of these for each, and for all in a list.
  enum class Kind : char { kTensor, kPlain, kList };
  struct At {
    std::size_t kind = 0, plain = 0, look = 0;
  };

  bool add(const c10::IValue& given);
  bool fits(const c10::IValue& given, At& at) const;
  c10::IValue filled(const c10::TypePtr& type, const std::vector<c10::Storage>& storages,
                     At& at) const;

  c10::OperatorHandle op_;
  std::vector<Kind> kinds_;
  std::vector<c10::IValue> plain_;  // what are no tensors, and for lists of those their length
  std::vector<Look> looks_;
  std::optional<c10::Device> device_;
};

// A number where a tensor could be given: Python is shown the number.
inline bool is_wrapped_number(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

// The tensors that an op is given or has made, in order.
template <typename Call>
void each_tensor(const c10::IValue& given, const Call& on) {
  if (given.isTensor()) {
    if (given.toTensor().defined()) on(given.toTensor());
  } else if (given.isTensorList()) {
    for (const at::Tensor& tensor : given.toTensorList())
      if (tensor.defined()) on(tensor);
  } else if (given.isList() && !given.isIntList() && !given.isDoubleList() && !given.isBoolList()) {
    for (const c10::IValue& item : given.toListRef()) each_tensor(item, on);
  }
}

}  // namespace lowtide
#endif
