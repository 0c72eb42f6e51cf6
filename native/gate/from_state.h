// Random numbers that were drawn before, drawn again.
#ifndef LOWTIDE_FROM_STATE_H
#define LOWTIDE_FROM_STATE_H

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <mutex>

namespace lowtide {

// Random numbers are those that follow a state; afterwards they go on as before.
class FromState {
 public:
  FromState(c10::Device device, const at::Tensor& state)
      : generator_(at::globalContext().defaultGenerator(device)) {
    const std::lock_guard<std::mutex> lock(generator_.mutex());
    if (device.is_cuda()) {  // as in Python: to set the state would draw cuDNN a new seed
      shared_ = generator_.graphsafe_get_state();
      at::Generator other = generator_.clone();
      other.set_state(state);
      generator_.graphsafe_set_state(other);
    } else {
      before_ = generator_.get_state();
      generator_.set_state(state);
    }
  }
  ~FromState() {
    const std::lock_guard<std::mutex> lock(generator_.mutex());
    if (before_.defined())
      generator_.set_state(before_);
    else
      generator_.graphsafe_set_state(shared_);
  }
  FromState(const FromState&) = delete;
  FromState& operator=(const FromState&) = delete;

 private:
  at::Generator generator_, shared_;
  at::Tensor before_;
};

}  // namespace lowtide
#endif
