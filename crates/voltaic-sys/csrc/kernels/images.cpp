// Pooling and norms of images, written in Rust, in the place of libtorch's for the CPU.
#include "kernels/kernels.h"

#include <ATen/ops/max_pool2d_with_indices_backward_cpu_dispatch.h>
#include <ATen/ops/max_pool2d_with_indices_cpu_dispatch.h>
#include <ATen/ops/native_batch_norm_backward_cpu_dispatch.h>
#include <ATen/ops/native_batch_norm_cpu_dispatch.h>

namespace voltaic {
namespace {

// ---- max-pooling ----

// The layout of what is computed from such images, as in libtorch.
at::MemoryFormat layout_of(const Tensor &images) { return images.suggest_memory_format(); }

// Empty for a pool that is libtorch's.
std::optional<vt_max_pool> pool_of(const Tensor &input, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                                   IntArrayRef dilation) {
  if (!has_rust_dtype(input) || (input.dim() != 3 && input.dim() != 4) || !is_dense(input, layout_of(input)) ||
      !is_pair(kernel) || (!stride.empty() && !is_pair(stride)) || !is_pair(padding) || !is_pair(dilation) ||
      !are_all(kernel, 2) || !are_all(stride, 2) || !are_all(padding, 0) || !are_all(dilation, 1) ||
      input.size(-1) % 2 != 0 || input.size(-2) % 2 != 0)
    return std::nullopt;
  vt_max_pool pool{};
  pool.dtype = dtype_of(input);
  pool.height = input.size(-2);
  pool.width = input.size(-1);
  pool.channels = layout_of(input) == at::MemoryFormat::ChannelsLast ? input.size(1) : 1;
  pool.images = input.numel() / (pool.height * pool.width * pool.channels);
  return pool;
}

c10::SmallVector<int64_t, 4> pooled_sizes(const Tensor &input) {
  c10::SmallVector<int64_t, 4> sizes(input.sizes().begin(), input.sizes().end());
  sizes[sizes.size() - 1] /= 2;
  sizes[sizes.size() - 2] /= 2;
  return sizes;
}

bool are_pooled(const Tensor &output, const Tensor &indices, const Tensor &input) {
  return output.sizes() == IntArrayRef(pooled_sizes(input)) && indices.sizes() == output.sizes() &&
         output.scalar_type() == input.scalar_type() && indices.scalar_type() == at::kLong;
}

void run_pool(const vt_max_pool &pool, const Tensor &input, const Tensor &out, const Tensor &indices) {
  is_done(rust.max_pool2d(&pool, input.const_data_ptr(), out.mutable_data_ptr(),
                          indices.mutable_data_ptr<int64_t>()));
}

std::tuple<Tensor, Tensor> max_pool2d(const Tensor &input, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                                      IntArrayRef dilation, bool ceil_mode) {
  const auto pool = pool_of(input, kernel, stride, padding, dilation);
  if (!pool)
    return at::cpu::max_pool2d_with_indices(input, kernel, stride, padding, dilation, ceil_mode);
  const auto sizes = pooled_sizes(input);
  Tensor out = at::empty(sizes, input.options(), layout_of(input));
  Tensor indices = at::empty(sizes, input.options().dtype(at::kLong), layout_of(input));
  run_pool(*pool, input, out, indices);
  return {std::move(out), std::move(indices)};
}

std::tuple<Tensor &, Tensor &> max_pool2d_out(const Tensor &input, IntArrayRef kernel, IntArrayRef stride,
                                              IntArrayRef padding, IntArrayRef dilation, bool ceil_mode, Tensor &out,
                                              Tensor &indices) {
  const auto pool = pool_of(input, kernel, stride, padding, dilation);
  if (!pool || !are_pooled(out, indices, input) || !is_dense(out, layout_of(input)) ||
      !is_dense(indices, layout_of(input)) || out.is_alias_of(input))
    return at::cpu::max_pool2d_with_indices_outf(input, kernel, stride, padding, dilation, ceil_mode, out, indices);
  run_pool(*pool, input, out, indices);
  return {out, indices};
}

// libtorch is faster with the usual layout. Its sum of one number, 0 + x, is kept to the sign.
bool takes_pool_backward(const std::optional<vt_max_pool> &pool, const Tensor &grad, const Tensor &input,
                         const Tensor &indices) {
  return pool.has_value() && layout_of(input) == at::MemoryFormat::ChannelsLast && is_plain(grad) &&
         are_pooled(grad, indices, input);
}

void run_pool_backward(const vt_max_pool &pool, const Tensor &grad, const Tensor &indices, const Tensor &out) {
  const Tensor grads = grad.contiguous(at::MemoryFormat::ChannelsLast);
  const Tensor places = indices.contiguous(at::MemoryFormat::ChannelsLast);
  is_done(rust.max_pool2d_backward(&pool, grads.const_data_ptr(), places.const_data_ptr<int64_t>(),
                                   out.mutable_data_ptr()));
}

Tensor max_pool2d_backward(const Tensor &grad, const Tensor &input, IntArrayRef kernel, IntArrayRef stride,
                           IntArrayRef padding, IntArrayRef dilation, bool ceil_mode, const Tensor &indices) {
  const auto pool = pool_of(input, kernel, stride, padding, dilation);
  if (!takes_pool_backward(pool, grad, input, indices))
    return at::cpu::max_pool2d_with_indices_backward(grad, input, kernel, stride, padding, dilation, ceil_mode,
                                                     indices);
  Tensor out = at::empty(input.sizes(), input.options(), at::MemoryFormat::ChannelsLast);
  run_pool_backward(*pool, grad, indices, out);
  return out;
}

Tensor &max_pool2d_backward_out(const Tensor &grad, const Tensor &input, IntArrayRef kernel, IntArrayRef stride,
                                IntArrayRef padding, IntArrayRef dilation, bool ceil_mode, const Tensor &indices,
                                Tensor &out) {
  const auto pool = pool_of(input, kernel, stride, padding, dilation);
  if (!takes_pool_backward(pool, grad, input, indices) || !are_alike(out, input) ||
      !is_dense(out, at::MemoryFormat::ChannelsLast) || out.is_alias_of(grad) || out.is_alias_of(indices))
    return at::cpu::max_pool2d_with_indices_backward_outf(grad, input, kernel, stride, padding, dilation, ceil_mode,
                                                          indices, out);
  run_pool_backward(*pool, grad, indices, out);
  return out;
}

// ---- batch norm ----

// Or none.
bool is_float_vector(const OptionalTensor &tensor, int64_t len) {
  return !tensor.has_value() || !tensor->defined() ||
         (is_simple(*tensor) && tensor->scalar_type() == at::kFloat && tensor->numel() == len);
}

float *data_or_null(const OptionalTensor &tensor) {
  return tensor.has_value() && tensor->defined() ? tensor->mutable_data_ptr<float>() : nullptr;
}

// Images with the channels last, in bfloat16 with weights in float32; layouts that mean the usual order, too, are
// libtorch's.
bool takes_batch_norm(const Tensor &input, const OptionalTensor &weight, bool training) {
  return training && is_channels_last(input) && !input.is_contiguous() && is_float_vector(weight, input.size(1)) &&
         (input.scalar_type() == at::kFloat || (weight.has_value() && weight->defined()));
}

vt_batch_norm describe(const Tensor &input, const OptionalTensor &weight, const Tensor &mean,
                       const Tensor &invstd) {
  vt_batch_norm norm{};
  norm.dtype = dtype_of(input);
  norm.channels = input.size(1);
  norm.pixels = input.numel() / norm.channels;
  norm.input = input.const_data_ptr();
  norm.weight = data_or_null(weight);
  norm.mean = mean.mutable_data_ptr<float>();
  norm.invstd = invstd.mutable_data_ptr<float>();
  return norm;
}

// With the strides that libtorch has for channels that are last, where others would do: of one column.
Tensor new_images(const Tensor &like) { return at::empty(like.sizes(), like.options(), at::MemoryFormat::ChannelsLast); }

// What batch norm is called with.
struct BatchNorm {
  const Tensor &input;
  const OptionalTensor &weight, &bias, &running_mean, &running_var;
  bool training;
  double momentum, eps;

  bool is_taken() const {
    const auto fits = [&](const OptionalTensor &tensor) { return is_float_vector(tensor, input.size(1)); };
    return takes_batch_norm(input, weight, training) && fits(bias) && fits(running_mean) && fits(running_var);
  }

  // False, with no output written, if libtorch is to compute it.
  bool run(const Tensor &out, const Tensor &mean, const Tensor &invstd) const {
    vt_batch_norm norm = describe(input, weight, mean, invstd);
    norm.bias = data_or_null(bias);
    norm.running_mean = data_or_null(running_mean);
    norm.running_var = data_or_null(running_var);
    norm.momentum = momentum;
    norm.eps = eps;
    return is_done(rust.batch_norm(&norm, out.mutable_data_ptr()));
  }
};

std::tuple<Tensor, Tensor, Tensor> batch_norm(const Tensor &input, const OptionalTensor &weight,
                                              const OptionalTensor &bias, const OptionalTensor &running_mean,
                                              const OptionalTensor &running_var, bool training, double momentum,
                                              double eps) {
  const BatchNorm norm{input, weight, bias, running_mean, running_var, training, momentum, eps};
  if (norm.is_taken()) {
    Tensor out = new_images(input);
    Tensor mean = at::empty({input.size(1)}, input.options().dtype(at::kFloat)), invstd = at::empty_like(mean);
    if (norm.run(out, mean, invstd))
      return {std::move(out), std::move(mean), std::move(invstd)};
  }
  return at::cpu::native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps);
}

std::tuple<Tensor &, Tensor &, Tensor &> batch_norm_out(const Tensor &input, const OptionalTensor &weight,
                                                        const OptionalTensor &bias, const OptionalTensor &running_mean,
                                                        const OptionalTensor &running_var, bool training,
                                                        double momentum, double eps, Tensor &out, Tensor &mean,
                                                        Tensor &invstd) {
  const BatchNorm norm{input, weight, bias, running_mean, running_var, training, momentum, eps};
  const auto is_float_vector_of = [&](const Tensor &tensor) {
    return tensor.dim() == 1 && is_float_vector(tensor, input.size(1));
  };
  if (!norm.is_taken() || !are_alike(out, input) || !is_channels_last(out) || out.is_alias_of(input) ||
      !is_float_vector_of(mean) || !is_float_vector_of(invstd) || !norm.run(out, mean, invstd))
    return at::cpu::native_batch_norm_outf(input, weight, bias, running_mean, running_var, training, momentum, eps, out,
                                           mean, invstd);
  return {out, mean, invstd};
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_backward(const Tensor &grad, const Tensor &input,
                                                       const OptionalTensor &weight,
                                                       const OptionalTensor &running_mean,
                                                       const OptionalTensor &running_var,
                                                       const OptionalTensor &mean,
                                                       const OptionalTensor &invstd, bool training, double eps,
                                                       std::array<bool, 3> wanted) {
  const auto is_saved = [&](const OptionalTensor &tensor) {
    return tensor.has_value() && tensor->defined() && is_float_vector(tensor, input.size(1));
  };
  // of one image, strides may mean channels that are last to the forward pass, and the usual order to libtorch's backward pass
  if (!takes_batch_norm(input, weight, training) || layout_of(input) != at::MemoryFormat::ChannelsLast ||
      !are_alike(grad, input) || !is_plain(grad) || !is_saved(mean) || !is_saved(invstd))
    return at::cpu::native_batch_norm_backward(grad, input, weight, running_mean, running_var, mean, invstd, training,
                                               eps, wanted);
  const Tensor grads = grad.contiguous(at::MemoryFormat::ChannelsLast);
  Tensor grad_input = wanted[0] ? new_images(input) : Tensor();
  Tensor grad_weight = at::empty_like(*mean), grad_bias = at::empty_like(*mean);
  const vt_batch_norm norm = describe(input, weight, *mean, *invstd);
  is_done(rust.batch_norm_backward(&norm, grads.const_data_ptr(), wanted[0] ? grad_input.mutable_data_ptr() : nullptr,
                                   grad_weight.mutable_data_ptr<float>(), grad_bias.mutable_data_ptr<float>()));
  return {std::move(grad_input), wanted[1] ? std::move(grad_weight) : Tensor(),
          wanted[2] ? std::move(grad_bias) : Tensor()};
}

} // namespace

void install_images(torch::Library &library) {
  if (rust.max_pool2d != nullptr) {
    library.impl("max_pool2d_with_indices", &max_pool2d);
    library.impl("max_pool2d_with_indices.out", &max_pool2d_out);
  }
  if (rust.max_pool2d_backward != nullptr) {
    library.impl("max_pool2d_with_indices_backward", &max_pool2d_backward);
    library.impl("max_pool2d_with_indices_backward.grad_input", &max_pool2d_backward_out);
  }
  if (rust.batch_norm != nullptr) {
    library.impl("native_batch_norm", &batch_norm);
    library.impl("native_batch_norm.out", &batch_norm_out);
    library.impl("native_batch_norm_backward", &batch_norm_backward);
  }
}

} // namespace voltaic
