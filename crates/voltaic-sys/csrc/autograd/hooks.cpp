#include "autograd/abi.h"
#include "autograd/backward_pass.h"
#include "error.h"
#include "hpu/hpu.h"

#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <mutex>

namespace {

// One hook of a leaf.
struct Hook {
  Hook(int32_t (*hook)(void *), void *data, void (*release)(void *)) : hook(hook), data(data), release(release) {}
  ~Hook() { release(data); }
  Hook(const Hook &) = delete;
  Hook &operator=(const Hook &) = delete;

  int32_t (*hook)(void *);
  void *data;
  void (*release)(void *);
};

// libtorch keeps one object per leaf; all hooks are behind it.
struct GradHooks final : torch::autograd::PostAccumulateGradHook {
  void operator()(const torch::autograd::Variable &leaf) override {
    if (!leaf.grad().defined())
      return; // autograd calls hooks also where a function had no gradient for the leaf
    voltaic::autograd::PassScope scope;
    for (const auto &hook : copy())
      TORCH_CHECK(hook->hook(hook->data) == 0, "a gradient hook failed");
    scope.finish();
  }

  void add(std::shared_ptr<Hook> hook) {
    const std::lock_guard<std::mutex> lock(mutex_);
    hooks_.push_back(std::move(hook));
  }

  // The hook is destroyed by the caller, outside of the lock.
  void remove(const void *data, std::shared_ptr<Hook> &removed) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::find_if(hooks_.begin(), hooks_.end(), [&](const auto &hook) { return hook->data == data; });
    if (found != hooks_.end()) {
      removed = std::move(*found);
      hooks_.erase(found);
    }
  }

private:
  // a hook may remove itself or others
  std::vector<std::shared_ptr<Hook>> copy() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return hooks_;
  }

  std::mutex mutex_;
  std::vector<std::shared_ptr<Hook>> hooks_;
};

GradHooks *hooks_of(const at::Tensor &tensor) {
  auto &hooks = torch::autograd::impl::post_acc_grad_hooks(tensor);
  if (hooks == nullptr)
    return nullptr;
  auto *ours = dynamic_cast<GradHooks *>(hooks.get());
  TORCH_CHECK(ours != nullptr, "the leaf has a gradient hook of another library");
  return ours;
}

// Owns the closure of a tensor's hook, or of the end of a backward pass.
struct Closure {
  explicit Closure(vt_autograd_callbacks callbacks) : callbacks(callbacks) {}
  ~Closure() { callbacks.release(callbacks.data); }
  Closure(const Closure &) = delete;
  Closure &operator=(const Closure &) = delete;

  void call(const vt_tensor *given, vt_tensor *made) const {
    char text[1024] = "";
    voltaic::autograd::PassScope scope;
    TORCH_CHECK(callbacks.backward(callbacks.data, given, made, text, sizeof text) == 0, text);
    scope.finish();
  }

  vt_autograd_callbacks callbacks;
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
  auto owner = std::make_shared<Hook>(hook, data, release);
  return voltaic::guard([&] {
    TORCH_CHECK(tensor->is_leaf() && tensor->requires_grad(), "a gradient hook needs a leaf that requires grad");
    if (hooks_of(*tensor) == nullptr)
      torch::autograd::impl::set_post_acc_grad_hooks(*tensor, std::make_unique<GradHooks>());
    hooks_of(*tensor)->add(std::move(owner));
  });
}

vt_error *vt_post_accumulate_grad_hook_remove(vt_tensor tensor, const void *data) {
  return voltaic::guard([&] {
    std::shared_ptr<Hook> removed;
    if (auto *hooks = hooks_of(*tensor))
      hooks->remove(data, removed); // an empty list stays: it may be at work now
  });
}

vt_error *vt_tensor_hook(vt_tensor tensor, vt_autograd_callbacks callbacks) {
  auto closure = std::make_shared<Closure>(callbacks);
  return voltaic::guard([&] {
    tensor->register_hook([closure](const at::Tensor &grad) -> at::Tensor {
      at::Tensor given = grad;
      vt_tensor pointer = &given, made = nullptr;
      closure->call(&pointer, &made);
      const std::unique_ptr<at::Tensor> replaced(made);
      return replaced != nullptr ? *replaced : at::Tensor();
    });
  });
}

vt_error *vt_base_hook(vt_tensor tensor, vt_autograd_callbacks callbacks) {
  auto closure = std::make_shared<Closure>(callbacks);
  return voltaic::guard([&] {
    if (!tensor->is_view() || !tensor->_base().requires_grad())
      return;
    const at::Tensor base(tensor->_base());
    base.register_hook([closure](const at::Tensor &grad) {
      at::Tensor given = grad;
      vt_tensor pointer = &given, made = nullptr;
      closure->call(&pointer, &made);
      delete made;
      return at::Tensor(); // it stays as it is
    });
  });
}

vt_error *vt_gradient_edge(vt_tensor tensor, size_t *node, uint32_t *output) {
  return voltaic::guard([&] {
    const torch::autograd::Edge edge = torch::autograd::impl::gradient_edge(*tensor);
    *node = reinterpret_cast<size_t>(edge.function.get());
    *output = edge.input_nr;
  });
}

vt_error *vt_at_backward_end(vt_autograd_callbacks callbacks) {
  auto closure = std::make_shared<Closure>(callbacks);
  return voltaic::guard([&] {
    voltaic::autograd::at_backward_end([closure] { closure->call(nullptr, nullptr); });
  });
}

int32_t vt_is_in_backward(void) { return voltaic::autograd::is_in_backward() ? 1 : 0; }
