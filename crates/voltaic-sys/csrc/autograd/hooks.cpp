#include "error.h"
#include "hpu/hpu.h"

#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace {

struct GradHook final : torch::autograd::PostAccumulateGradHook {
  GradHook(int32_t (*hook)(void *), void *data, void (*release)(void *)) : hook_(hook), data_(data), release_(release) {}
  ~GradHook() override { release_(data_); }
  GradHook(const GradHook &) = delete;
  GradHook &operator=(const GradHook &) = delete;

  void operator()(const torch::autograd::Variable &) override {
    TORCH_CHECK(hook_(data_) == 0, "a gradient hook failed");
  }

private:
  int32_t (*hook_)(void *);
  void *data_;
  void (*release_)(void *);
};

} // namespace

vt_error *vt_autograd_set_multithreading(int32_t enabled) {
  return voltaic::guard([&] {
    voltaic::hpu::reserve_hooks();
    c10::AutogradState::get_tls_state().set_multithreading_enabled(enabled != 0);
  });
}

vt_error *vt_autograd_is_multithreading(int32_t *enabled) {
  return voltaic::guard([&] { *enabled = c10::AutogradState::get_tls_state().get_multithreading_enabled() ? 1 : 0; });
}

vt_error *vt_grads_clear(const vt_tensor *tensors, size_t len) {
  return voltaic::guard([&] {
    for (size_t i = 0; i < len; ++i)
      tensors[i]->mutable_grad() = at::Tensor();
  });
}

vt_error *vt_grad_set(vt_tensor tensor, vt_tensor grad) {
  return voltaic::guard([&] { tensor->mutable_grad() = *grad; });
}

vt_error *vt_post_accumulate_grad_hook(vt_tensor tensor, int32_t (*hook)(void *data), void *data,
                                       void (*release)(void *data)) {
  auto owner = std::make_unique<GradHook>(hook, data, release);
  return voltaic::guard([&] {
    TORCH_CHECK(tensor->is_leaf() && tensor->requires_grad(), "a gradient hook needs a leaf that requires grad");
    torch::autograd::impl::set_post_acc_grad_hooks(*tensor, std::move(owner));
  });
}

vt_error *vt_clear_post_accumulate_grad_hooks(vt_tensor tensor) {
  return voltaic::guard([&] { torch::autograd::impl::set_post_acc_grad_hooks(*tensor, nullptr); });
}
