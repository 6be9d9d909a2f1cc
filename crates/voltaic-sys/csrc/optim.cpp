#include "error.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

using voltaic::to_list;
using voltaic::to_optional;

vt_error *vt_fused_sgd(const vt_tensor *params, const vt_tensor *grads, const vt_tensor *momentum_buffers, size_t len,
                       double lr, double weight_decay, double momentum, double dampening, int32_t nesterov,
                       int32_t maximize, int32_t is_first_step, vt_tensor grad_scale, vt_tensor found_inf) {
  return voltaic::guard([&] {
    at::NoGradGuard no_grad;
    at::_fused_sgd_(to_list(params, len), to_list(grads, len), to_list(momentum_buffers, len), weight_decay, momentum,
                    lr, dampening, nesterov != 0, maximize != 0, is_first_step != 0, to_optional(grad_scale),
                    to_optional(found_inf));
  });
}

vt_error *vt_fused_adam(const vt_tensor *params, const vt_tensor *grads, const vt_tensor *exp_avgs,
                        const vt_tensor *exp_avg_sqs, const vt_tensor *max_exp_avg_sqs, const vt_tensor *steps,
                        size_t len, const vt_adam_options *options, vt_tensor grad_scale, vt_tensor found_inf) {
  return voltaic::guard([&] {
    at::NoGradGuard no_grad;
    const vt_adam_options &o = *options;
    const auto update = [&](auto kernel) {
      kernel(to_list(params, len), to_list(grads, len), to_list(exp_avgs, len), to_list(exp_avg_sqs, len),
             to_list(max_exp_avg_sqs, len), to_list(steps, len), o.lr, o.beta1, o.beta2, o.weight_decay, o.eps,
             o.amsgrad != 0, o.maximize != 0, to_optional(grad_scale), to_optional(found_inf));
    };
    if (o.decoupled != 0)
      update([](auto &&...args) { at::_fused_adamw_(args...); });
    else
      update([](auto &&...args) { at::_fused_adam_(args...); });
  });
}

vt_error *vt_foreach_add_scalar(const vt_tensor *tensors, size_t len, double value) {
  return voltaic::guard([&] {
    at::NoGradGuard no_grad;
    at::_foreach_add_(to_list(tensors, len), value);
  });
}

vt_error *vt_foreach_mul_tensor(const vt_tensor *tensors, size_t len, vt_tensor by) {
  return voltaic::guard([&] {
    at::NoGradGuard no_grad;
    at::_foreach_mul_(to_list(tensors, len), *by);
  });
}

vt_error *vt_foreach_clamp(const vt_tensor *tensors, size_t len, double min, double max) {
  return voltaic::guard([&] {
    at::NoGradGuard no_grad;
    const auto list = to_list(tensors, len);
    at::_foreach_clamp_min_(list, min);
    at::_foreach_clamp_max_(list, max);
  });
}

vt_error *vt_foreach_norm(const vt_tensor *tensors, size_t len, double p, vt_tensor *norms) {
  return voltaic::guard([&] {
    at::NoGradGuard no_grad;
    *norms = new at::Tensor(at::stack(at::_foreach_norm(to_list(tensors, len), p)));
  });
}
