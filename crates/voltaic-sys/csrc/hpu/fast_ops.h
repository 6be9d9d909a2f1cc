// The operators of fast.cpp, by the names of their declarations in at::_ops.
#pragma once

#include <ATen/ops/_adaptive_avg_pool2d_backward_ops.h>
#include <ATen/ops/_adaptive_avg_pool2d_ops.h>
#include <ATen/ops/_foreach_add_ops.h>
#include <ATen/ops/_foreach_mul_ops.h>
#include <ATen/ops/_foreach_norm_ops.h>
#include <ATen/ops/_fused_adam_ops.h>
#include <ATen/ops/_fused_adamw_ops.h>
#include <ATen/ops/_fused_sgd_ops.h>
#include <ATen/ops/_local_scalar_dense_ops.h>
#include <ATen/ops/_log_softmax_backward_data_ops.h>
#include <ATen/ops/_log_softmax_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_ops.h>
#include <ATen/ops/_softmax_backward_data_ops.h>
#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/abs_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addcdiv_ops.h>
#include <ATen/ops/addcmul_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/argmax_ops.h>
#include <ATen/ops/avg_pool2d_backward_ops.h>
#include <ATen/ops/avg_pool2d_ops.h>
#include <ATen/ops/baddbmm_ops.h>
#include <ATen/ops/bernoulli_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/cat_ops.h>
#include <ATen/ops/clamp_ops.h>
#include <ATen/ops/clone_ops.h>
#include <ATen/ops/convolution_backward_ops.h>
#include <ATen/ops/convolution_ops.h>
#include <ATen/ops/cos_ops.h>
#include <ATen/ops/cumsum_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/embedding_dense_backward_ops.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/eq_ops.h>
#include <ATen/ops/exp_ops.h>
#include <ATen/ops/fill_ops.h>
#include <ATen/ops/ge_ops.h>
#include <ATen/ops/gelu_backward_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/gt_ops.h>
#include <ATen/ops/index_add_ops.h>
#include <ATen/ops/index_select_ops.h>
#include <ATen/ops/lerp_ops.h>
#include <ATen/ops/log_ops.h>
#include <ATen/ops/masked_fill_ops.h>
#include <ATen/ops/max_pool2d_with_indices_backward_ops.h>
#include <ATen/ops/max_pool2d_with_indices_ops.h>
#include <ATen/ops/maximum_ops.h>
#include <ATen/ops/mean_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mse_loss_backward_ops.h>
#include <ATen/ops/mse_loss_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/native_batch_norm_backward_ops.h>
#include <ATen/ops/native_batch_norm_ops.h>
#include <ATen/ops/native_dropout_ops.h>
#include <ATen/ops/native_group_norm_backward_ops.h>
#include <ATen/ops/native_group_norm_ops.h>
#include <ATen/ops/native_layer_norm_backward_ops.h>
#include <ATen/ops/native_layer_norm_ops.h>
#include <ATen/ops/ne_ops.h>
#include <ATen/ops/neg_ops.h>
#include <ATen/ops/nll_loss_backward_ops.h>
#include <ATen/ops/nll_loss_forward_ops.h>
#include <ATen/ops/normal_ops.h>
#include <ATen/ops/pow_ops.h>
#include <ATen/ops/relu_ops.h>
#include <ATen/ops/rsqrt_ops.h>
#include <ATen/ops/sigmoid_backward_ops.h>
#include <ATen/ops/sigmoid_ops.h>
#include <ATen/ops/silu_backward_ops.h>
#include <ATen/ops/silu_ops.h>
#include <ATen/ops/sin_ops.h>
#include <ATen/ops/sqrt_ops.h>
#include <ATen/ops/sub_ops.h>
#include <ATen/ops/sum_ops.h>
#include <ATen/ops/tanh_backward_ops.h>
#include <ATen/ops/tanh_ops.h>
#include <ATen/ops/threshold_backward_ops.h>
#include <ATen/ops/uniform_ops.h>
#include <ATen/ops/where_ops.h>
#include <ATen/ops/zero_ops.h>

#define VT_HPU_FAST_OPS(X) X(add_Tensor) X(add__Tensor) X(add_out) X(mul_Tensor) X(mul__Tensor) X(mul_out) \
  X(sub_Tensor) X(sub__Tensor) X(div_Tensor) X(div__Tensor) X(relu) X(relu_) X(threshold_backward) X(addmm) X(mm) \
  X(bmm) X(baddbmm) X(gelu) X(gelu_backward) X(native_layer_norm) X(native_layer_norm_backward) X(native_batch_norm) \
  X(native_batch_norm_backward) X(convolution) X(convolution_backward) X(max_pool2d_with_indices) \
  X(max_pool2d_with_indices_backward) X(_log_softmax) X(_log_softmax_backward_data) X(_softmax) \
  X(_softmax_backward_data) X(nll_loss_forward) X(nll_loss_backward) X(sum_dim_IntList) X(sum) X(mean) X(zero_) \
  X(fill__Scalar) X(embedding) X(embedding_dense_backward) X(_scaled_dot_product_flash_attention_for_cpu) \
  X(_scaled_dot_product_flash_attention_for_cpu_backward) X(cat) X(bernoulli__float) X(_fused_adamw_) X(_fused_sgd_) \
  X(where_self) X(tanh) X(sigmoid) X(exp) X(sqrt) X(rsqrt) X(pow_Tensor_Scalar) X(index_select) X(neg) X(abs) \
  X(maximum) X(clamp) X(addcmul_) X(addcdiv_) X(lerp__Scalar) X(clone) X(normal_) X(uniform_) X(eq_Tensor) \
  X(gt_Scalar) X(argmax) X(_foreach_add__Scalar) X(_foreach_mul__Scalar) X(_foreach_add__List) \
  X(_local_scalar_dense) X(mean_dim) X(log) X(silu) X(silu_backward) X(sigmoid_backward) X(tanh_backward) \
  X(mul_Scalar) X(div__Scalar) X(mul__Scalar) X(add_Scalar) X(div_Scalar) X(masked_fill_Scalar) X(addcmul) \
  X(addcdiv) X(_fused_adam_) X(avg_pool2d) X(avg_pool2d_backward) X(native_group_norm) X(native_group_norm_backward) \
  X(mse_loss) X(mse_loss_backward) X(_adaptive_avg_pool2d) X(_adaptive_avg_pool2d_backward) X(ge_Scalar) \
  X(_foreach_norm_Scalar) X(_foreach_mul__Tensor) X(ne_Scalar) X(eq_Scalar) X(index_add_) X(cumsum) X(sin) X(cos) \
  X(native_dropout)
