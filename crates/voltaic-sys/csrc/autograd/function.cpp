#include "autograd/abi.h"
#include "autograd/backward_pass.h"
#include "error.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <mutex>

namespace {

using torch::autograd::variable_list;

struct Callback final : torch::autograd::Node {
  explicit Callback(vt_autograd_callbacks callbacks) : callbacks_(callbacks) {}
  ~Callback() override { callbacks_.release(callbacks_.data); }
  Callback(const Callback &) = delete;
  Callback &operator=(const Callback &) = delete;

  std::string name() const override { return "VoltaicFunction"; }

  void save(const variable_list &tensors) {
    has_saved_ = !tensors.empty();
    for (const at::Tensor &tensor : tensors)
      saved_.emplace_back(tensor, /*is_output=*/false);
  }

  // Backward without retain_graph is done with them.
  void release_variables() override {
    const std::scoped_lock lock(mutex_);
    saved_.clear();
  }

  variable_list apply(variable_list &&grad_outputs) override {
    TORCH_CHECK(!c10::GradMode::is_enabled(), "the gradient of this function has no gradient (create_graph)");
    variable_list saved = unpacked();
    std::vector<vt_tensor> given, made(num_outputs(), nullptr);
    for (at::Tensor &grad : grad_outputs)
      given.push_back(&grad);
    for (at::Tensor &tensor : saved)
      given.push_back(&tensor);
    char text[1024] = "";
    voltaic::autograd::PassScope scope;
    const int32_t failed = callbacks_.backward(callbacks_.data, given.data(), made.data(), text, sizeof text);
    TORCH_CHECK(failed == 0, text);
    scope.finish();
    variable_list grad_inputs(num_outputs());
    for (size_t i = 0; i < made.size(); ++i)
      if (const std::unique_ptr<at::Tensor> grad(made[i]); grad != nullptr)
        grad_inputs[i] = *grad;
    return grad_inputs;
  }

private:
  variable_list unpacked() {
    const std::scoped_lock lock(mutex_);
    TORCH_CHECK(has_saved_ != saved_.empty(), torch::autograd::ERR_BACKWARD_TWICE);
    variable_list tensors;
    for (const auto &saved : saved_)
      tensors.push_back(saved.unpack(getptr()));
    return tensors;
  }

  vt_autograd_callbacks callbacks_;
  std::mutex mutex_;
  std::vector<torch::autograd::SavedVariable> saved_;
  bool has_saved_ = false;
};

variable_list to_list(const vt_tensor *tensors, size_t len) {
  variable_list list;
  for (size_t i = 0; i < len; ++i)
    list.push_back(*tensors[i]);
  return list;
}

} // namespace

int32_t vt_grad_is_enabled(void) { return c10::GradMode::is_enabled() ? 1 : 0; }

vt_error *vt_autograd_function(const vt_tensor *inputs, size_t num_inputs, const vt_tensor *outputs, size_t num_outputs,
                               const vt_tensor *saved, size_t num_saved, vt_autograd_callbacks callbacks) {
  auto node = std::shared_ptr<Callback>(new Callback(callbacks), torch::autograd::deleteNode);
  return voltaic::guard([&] {
    node->save(to_list(saved, num_saved));
    node->set_next_edges(torch::autograd::collect_next_edges(at::ArrayRef<at::Tensor>(to_list(inputs, num_inputs))));
    for (size_t i = 0; i < num_outputs; ++i) {
      TORCH_CHECK(!outputs[i]->requires_grad(), "output ", i, " has a history already");
      torch::autograd::set_history(*outputs[i], node);
    }
  });
}

vt_error *vt_backward(vt_tensor loss, int32_t retain_graph) {
  return voltaic::guard([&] { loss->backward({}, retain_graph != 0); });
}

vt_error *vt_autograd_grad(const vt_tensor *outputs, const vt_tensor *grad_outputs, size_t num_outputs,
                           const vt_tensor *inputs, size_t num_inputs, vt_tensor *grads) {
  return voltaic::guard([&] {
    const variable_list found =
        torch::autograd::grad(to_list(outputs, num_outputs), to_list(inputs, num_inputs),
                              to_list(grad_outputs, num_outputs), /*retain_graph=*/true, /*create_graph=*/false,
                              /*allow_unused=*/true);
    for (size_t i = 0; i < num_inputs; ++i)
      grads[i] = new at::Tensor(found[i]);
  });
}
