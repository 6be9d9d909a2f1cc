#include "error.h"
#include "tensor/lists.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_foreach_sub.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/stack.h>

#include <memory>
#include <vector>

using voltaic::note_written;
using voltaic::same_layout;
using voltaic::to_optional;

namespace {

// The kernels walk raw memory and check none of this themselves.
void check_alike(const vt_list *params, const vt_list *others, const char *name) {
  TORCH_CHECK(params->tensors.size() == others->tensors.size(), "there are ", params->tensors.size(),
              " parameters but ", others->tensors.size(), " ", name);
  for (size_t i = 0; i < params->tensors.size(); ++i) {
    const at::Tensor &param = params->tensors[i], &other = others->tensors[i];
    TORCH_CHECK(same_layout(param, other) && param.scalar_type() == other.scalar_type() &&
                    param.device() == other.device() && param.layout() == at::kStrided &&
                    other.layout() == at::kStrided && param.is_non_overlapping_and_dense(),
                "entry ", i, " of ", name, " (", other.toString(), other.sizes(), " on ", other.device(),
                ") is not laid out as its parameter (", param.toString(), param.sizes(), " on ", param.device(), ")");
  }
}

void check_steps(const vt_list *params, const vt_list *steps) {
  TORCH_CHECK(params->tensors.size() == steps->tensors.size(), "there are ", params->tensors.size(),
              " parameters but ", steps->tensors.size(), " steps");
  for (const at::Tensor &step : steps->tensors)
    TORCH_CHECK(step.numel() == 1 && step.scalar_type() == at::kFloat, "a step count is a float32 scalar, not ",
                step.toString(), step.sizes());
}

// Calls `update` with the number, or with the tensor if there is one.
template <typename Update> void with_lr(double number, vt_tensor tensor, const Update &update) {
  if (tensor == nullptr)
    return update(number);
  const at::Tensor &lr = *tensor;
  TORCH_CHECK(lr.dim() == 0 && lr.scalar_type() == at::kDouble && lr.is_cpu(), "a learning rate is a float64 scalar on ",
              "the CPU, not ", lr.toString(), lr.sizes(), " on ", lr.device());
  update(lr);
}

// Empties the list of gradients when the update is over, so that dropping a gradient frees it.
struct ClearOnExit {
  explicit ClearOnExit(vt_list *list) : list_(list) {}
  ~ClearOnExit() { list_->tensors.clear(); }
  ClearOnExit(const ClearOnExit &) = delete;
  ClearOnExit &operator=(const ClearOnExit &) = delete;

private:
  vt_list *list_;
};

// libtorch's kernels for the CPU make a copy in the usual order of a gradient in another one, and do not use it: a row of
// the same memory is in the usual order.
void line_up(vt_list *grads) {
  for (at::Tensor &grad : grads->tensors)
    if (grad.is_cpu() && !grad.is_contiguous())
      grad = grad.as_strided({grad.numel()}, {1});
}

const std::vector<at::Tensor> &or_empty(const vt_list *list) {
  static const std::vector<at::Tensor> empty;
  return list == nullptr ? empty : list->tensors;
}

// Whether a gradient has 16 bits where its parameter has float32.
bool is_narrowed(const at::Tensor &grad, const at::Tensor &param) {
  return param.scalar_type() == at::kFloat && (grad.scalar_type() == at::kBFloat16 || grad.scalar_type() == at::kHalf);
}

} // namespace

vt_error *vt_tensor_id(vt_tensor tensor, size_t *id) {
  return voltaic::guard([&] { *id = reinterpret_cast<size_t>(tensor->unsafeGetTensorImpl()); });
}

vt_error *vt_tensor_is_dense(vt_tensor tensor, int32_t *is_dense) {
  return voltaic::guard([&] {
    *is_dense = tensor->layout() == at::kStrided && tensor->is_non_overlapping_and_dense() ? 1 : 0;
  });
}

vt_error *vt_list_new(const vt_tensor *tensors, size_t len, vt_list **list) {
  return voltaic::guard([&] {
    auto owner = std::make_unique<vt_list>();
    owner->tensors.reserve(len);
    for (size_t i = 0; i < len; ++i)
      owner->tensors.push_back(*tensors[i]);
    *list = owner.release();
  });
}

void vt_list_free(vt_list *list) { delete list; }

size_t vt_list_len(const vt_list *list) { return list->tensors.size(); }

void vt_list_clear(vt_list *list) { list->tensors.clear(); }

vt_error *vt_list_select(const vt_list *list, const size_t *indices, size_t len, vt_list **selected) {
  return voltaic::guard([&] {
    auto owner = std::make_unique<vt_list>();
    owner->tensors.reserve(len);
    for (size_t i = 0; i < len; ++i)
      owner->tensors.push_back(list->tensors.at(indices[i]));
    *selected = owner.release();
  });
}

vt_error *vt_list_copies(const vt_list *list, vt_list **copies) {
  return voltaic::guard([&] {
    at::NoGradGuard no_grad;
    auto owner = std::make_unique<vt_list>();
    owner->tensors.reserve(list->tensors.size());
    for (const at::Tensor &tensor : list->tensors)
      owner->tensors.push_back(tensor.detach().clone());
    *copies = owner.release();
  });
}

vt_error *vt_list_grads(const vt_list *params, vt_list *grads) {
  return voltaic::guard([&] {
    grads->tensors.clear();
    for (const at::Tensor &param : params->tensors)
      if (const at::Tensor &grad = param.grad(); grad.defined())
        grads->tensors.push_back(grad);
  });
}

vt_error *vt_list_all_grads(const vt_list *params, vt_list *grads) {
  return voltaic::guard([&] {
    grads->tensors.clear();
    for (const at::Tensor &param : params->tensors)
      grads->tensors.push_back(param.grad());
  });
}

vt_error *vt_list_bind_grads(const vt_list *params, const vt_list *grads, int32_t carries_over) {
  return voltaic::guard([&] {
    at::NoGradGuard no_grad;
    TORCH_CHECK(params->tensors.size() == grads->tensors.size(), "there are ", params->tensors.size(),
                " parameters but ", grads->tensors.size(), " gradients");
    for (size_t i = 0; i < params->tensors.size(); ++i) {
      at::Tensor &bound = params->tensors[i].mutable_grad();
      at::Tensor grad = grads->tensors[i];
      if (bound.is_same(grad))
        continue;
      if (carries_over != 0 && bound.defined() && grad.defined())
        grad.copy_(bound);
      bound = std::move(grad);
    }
  });
}

vt_error *vt_list_are_grads(const vt_list *params, const vt_list *grads, int32_t *are_grads) {
  return voltaic::guard([&] {
    *are_grads = params->tensors.size() == grads->tensors.size();
    for (size_t i = 0; *are_grads != 0 && i < params->tensors.size(); ++i)
      *are_grads = params->tensors[i].grad().is_same(grads->tensors[i]);
  });
}

vt_error *vt_list_grads_for_update(const vt_list *params, vt_list *grads, uint8_t *status, int32_t *are_narrowed) {
  return voltaic::guard([&] {
    at::NoGradGuard no_grad;
    grads->tensors.clear();
    *are_narrowed = 0;
    for (size_t i = 0; i < params->tensors.size(); ++i) {
      const at::Tensor &param = params->tensors[i];
      const at::Tensor &grad = param.grad();
      if (!grad.defined()) {
        status[i] = VT_GRAD_ABSENT;
      } else if (grad.layout() != at::kStrided || grad.is_complex() ||
                 (grad.scalar_type() != param.scalar_type() && !is_narrowed(grad, param)) ||
                 grad.device() != param.device() || grad.sizes() != param.sizes()) {
        status[i] = VT_GRAD_UNUSABLE;
      } else {
        status[i] = VT_GRAD_PRESENT;
        grads->tensors.push_back(same_layout(grad, param) ? grad : at::empty_like(param).copy_(grad));
        if (grads->tensors.back().scalar_type() != param.scalar_type())
          *are_narrowed = 1;
      }
    }
  });
}

vt_error *vt_list_widen_grads(const vt_list *params) {
  return voltaic::guard([&] {
    at::NoGradGuard no_grad;
    for (const at::Tensor &param : params->tensors)
      if (const at::Tensor &grad = param.grad(); grad.defined() && is_narrowed(grad, param))
        param.mutable_grad() = grad.to(at::kFloat);
  });
}

vt_error *vt_list_clear_grads(const vt_list *params) {
  return voltaic::guard([&] {
    for (const at::Tensor &param : params->tensors)
      param.mutable_grad() = at::Tensor();
  });
}

vt_error *vt_fused_sgd(const vt_list *params, vt_list *grads, const vt_list *momentum_buffers,
                       const vt_sgd_options *options, int32_t is_first_step) {
  return voltaic::guard([&] {
    at::NoGradGuard no_grad;
    const ClearOnExit clear(grads);
    check_alike(params, grads, "gradients");
    TORCH_CHECK((options->momentum == 0) == (momentum_buffers == nullptr),
                "momentum buffers are needed if momentum is not 0, and only then");
    if (momentum_buffers != nullptr)
      check_alike(params, momentum_buffers, "momentum buffers");
    line_up(grads);
    with_lr(options->lr, options->lr_tensor, [&](const auto &lr) {
      at::_fused_sgd_(params->tensors, grads->tensors, or_empty(momentum_buffers), options->weight_decay,
                      options->momentum, lr, options->dampening, options->nesterov != 0, options->maximize != 0,
                      is_first_step != 0);
    });
    note_written(params->tensors);
  });
}

vt_error *vt_fused_adam(const vt_list *params, vt_list *grads, const vt_adam_state *state,
                        const vt_adam_options *options, vt_tensor grad_scale, vt_tensor found_inf) {
  return voltaic::guard([&] {
    at::NoGradGuard no_grad;
    const ClearOnExit clear(grads);
    const vt_adam_options &o = *options;
    check_alike(params, grads, "gradients");
    check_alike(params, state->exp_avgs, "exp_avg");
    check_alike(params, state->exp_avg_sqs, "exp_avg_sq");
    TORCH_CHECK((o.amsgrad != 0) == (state->max_exp_avg_sqs != nullptr),
                "maxima of the second moments are needed with amsgrad, and only then");
    if (state->max_exp_avg_sqs != nullptr)
      check_alike(params, state->max_exp_avg_sqs, "max_exp_avg_sq");
    check_steps(params, state->steps);
    line_up(grads);
    state->all_steps->add_(1);
    const auto inf = to_optional(found_inf);
    const auto update = [&](auto kernel) {
      with_lr(o.lr, o.lr_tensor, [&](const auto &lr) {
        kernel(params->tensors, grads->tensors, state->exp_avgs->tensors, state->exp_avg_sqs->tensors,
               or_empty(state->max_exp_avg_sqs), state->steps->tensors, lr, o.beta1, o.beta2, o.weight_decay, o.eps,
               o.amsgrad != 0, o.maximize != 0, to_optional(grad_scale), inf);
      });
    };
    if (o.decoupled != 0)
      update([](auto &&...args) { at::_fused_adamw_(args...); });
    else
      update([](auto &&...args) { at::_fused_adam_(args...); });
    if (inf.has_value()) // a skipped update is not counted
      at::_foreach_sub_(state->steps->tensors, std::vector<at::Tensor>(state->steps->tensors.size(), *inf));
    note_written(params->tensors);
  });
}

vt_error *vt_list_to_float(vt_list *list) {
  return voltaic::guard([&] {
    at::NoGradGuard no_grad;
    for (at::Tensor &tensor : list->tensors)
      tensor = tensor.to(at::kFloat);
  });
}

vt_error *vt_foreach_copy(const vt_list *to, const vt_list *from) {
  return voltaic::guard([&] {
    at::NoGradGuard no_grad;
    TORCH_CHECK(to->tensors.size() == from->tensors.size(), "there are ", to->tensors.size(), " tensors to copy to but ",
                from->tensors.size(), " to copy from");
    if (!to->tensors.empty())
      at::_foreach_copy_(to->tensors, from->tensors);
  });
}

vt_error *vt_foreach_mul_tensor(const vt_list *list, vt_tensor by) {
  return voltaic::guard([&] {
    at::NoGradGuard no_grad;
    if (!list->tensors.empty())
      at::_foreach_mul_(list->tensors, *by);
  });
}

vt_error *vt_foreach_clamp(const vt_list *list, double min, double max) {
  return voltaic::guard([&] {
    at::NoGradGuard no_grad;
    if (list->tensors.empty())
      return;
    at::_foreach_clamp_min_(list->tensors, min);
    at::_foreach_clamp_max_(list->tensors, max);
  });
}

vt_error *vt_foreach_norm(const vt_list *list, double p, vt_tensor *norms) {
  return voltaic::guard([&] {
    at::NoGradGuard no_grad;
    TORCH_CHECK(!list->tensors.empty(), "there are no tensors");
    *norms = new at::Tensor(at::stack(at::_foreach_norm(list->tensors, p)));
  });
}
