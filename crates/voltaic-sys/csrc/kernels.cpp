// Kernels written in Rust in the place of libtorch's for the CPU. What they do not cover goes to libtorch's own, which
// also says what is wrong with a call.
#include "error.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward_cpu_dispatch.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_cpu_dispatch.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/bernoulli_cpu_dispatch.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/convolution_backward_compositeexplicitautograd_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu_backward_cpu_dispatch.h>
#include <ATen/ops/gelu_cpu_dispatch.h>
#include <ATen/ops/max_pool2d_with_indices_backward_cpu_dispatch.h>
#include <ATen/ops/max_pool2d_with_indices_cpu_dispatch.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <torch/library.h>

namespace voltaic {
namespace {

using at::Scalar;
using at::Tensor;
using c10::IntArrayRef;

vt_kernels rust{};

bool has_rust_dtype(const Tensor &tensor) {
  return tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kBFloat16;
}

int32_t dtype_of(const Tensor &tensor) { return tensor.scalar_type() == at::kFloat ? VT_FLOAT32 : VT_BFLOAT16; }

// Not a view that says conjugate or negative.
bool is_plain(const Tensor &tensor) { return tensor.layout() == at::kStrided && !tensor.is_neg() && tensor.numel() > 0; }

// Dense float32 or bfloat16 in the usual order.
bool is_simple(const Tensor &tensor) { return is_plain(tensor) && has_rust_dtype(tensor) && tensor.is_contiguous(); }

bool are_alike(const Tensor &a, const Tensor &b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes();
}

Tensor new_empty(const Tensor &like, IntArrayRef sizes) { return at::empty(sizes, like.options()); }

// ---- matrix products ----

bool is_float_matrix(const Tensor &tensor, int64_t dim) {
  return is_plain(tensor) && tensor.scalar_type() == at::kFloat && tensor.dim() == dim;
}

void set_strides(int64_t (&strides)[3], const Tensor &tensor) {
  const int64_t dim = tensor.dim();
  strides[0] = dim == 3 ? tensor.stride(0) : 0;
  strides[1] = tensor.stride(dim - 2);
  strides[2] = tensor.stride(dim - 1);
}

// Whether Rust takes a product of such tensors of `dim` dimensions, and has written it to `out`.
bool multiplies(const Tensor &a, const Tensor &b, const Tensor &out, int64_t dim, bool adds) {
  if (!is_float_matrix(out, dim))
    return false;
  vt_product product{};
  product.batches = dim == 3 ? a.size(0) : 1;
  product.rows = a.size(dim - 2);
  product.columns = b.size(dim - 1);
  product.depth = a.size(dim - 1);
  product.out = out.mutable_data_ptr<float>();
  product.a = a.const_data_ptr<float>();
  product.b = b.const_data_ptr<float>();
  set_strides(product.out_strides, out);
  set_strides(product.a_strides, a);
  set_strides(product.b_strides, b);
  product.adds = adds;
  return rust.product(&product) != 0;
}

bool fit(const Tensor &a, const Tensor &b, int64_t dim) {
  return is_float_matrix(a, dim) && is_float_matrix(b, dim) && a.size(dim - 1) == b.size(dim - 2) &&
         (dim == 2 || a.size(0) == b.size(0));
}

c10::SmallVector<int64_t, 3> product_sizes(const Tensor &a, const Tensor &b, int64_t dim) {
  c10::SmallVector<int64_t, 3> sizes(a.sizes().begin(), a.sizes().end());
  sizes[dim - 1] = b.size(dim - 1);
  return sizes;
}

// Given tensors may be views of each other.
bool may_write(const Tensor &out, const Tensor &a, const Tensor &b, int64_t dim) {
  return out.sizes() == IntArrayRef(product_sizes(a, b, dim)) && !out.is_alias_of(a) && !out.is_alias_of(b);
}

Tensor mm(const Tensor &a, const Tensor &b) {
  if (fit(a, b, 2))
    if (Tensor out = new_empty(a, product_sizes(a, b, 2)); multiplies(a, b, out, 2, false))
      return out;
  return at::cpu::mm(a, b);
}

Tensor &mm_out(const Tensor &a, const Tensor &b, Tensor &out) {
  if (fit(a, b, 2) && may_write(out, a, b, 2) && multiplies(a, b, out, 2, false))
    return out;
  return at::cpu::mm_outf(a, b, out);
}

Tensor bmm(const Tensor &a, const Tensor &b) {
  if (fit(a, b, 3))
    if (Tensor out = new_empty(a, product_sizes(a, b, 3)); multiplies(a, b, out, 3, false))
      return out;
  return at::cpu::bmm(a, b);
}

Tensor &bmm_out(const Tensor &a, const Tensor &b, Tensor &out) {
  if (fit(a, b, 3) && may_write(out, a, b, 3) && multiplies(a, b, out, 3, false))
    return out;
  return at::cpu::bmm_outf(a, b, out);
}

// self is what the product is added to: a row for all rows, or a matrix.
bool can_add(const Tensor &self, const Tensor &a, const Tensor &b, const Scalar &beta, const Scalar &alpha) {
  return fit(a, b, 2) && self.scalar_type() == at::kFloat && is_plain(self) && self.dim() >= 1 && self.dim() <= 2 &&
         self.size(-1) == b.size(1) && (self.dim() == 1 || self.size(0) == 1 || self.size(0) == a.size(0)) &&
         beta.equal(1) && alpha.equal(1);
}

Tensor addmm(const Tensor &self, const Tensor &a, const Tensor &b, const Scalar &beta, const Scalar &alpha) {
  if (can_add(self, a, b, beta, alpha)) {
    Tensor out = new_empty(a, product_sizes(a, b, 2));
    out.copy_(self);
    if (multiplies(a, b, out, 2, true))
      return out;
  }
  return at::cpu::addmm(self, a, b, beta, alpha);
}

Tensor &addmm_out(const Tensor &self, const Tensor &a, const Tensor &b, const Scalar &beta, const Scalar &alpha,
                  Tensor &out) {
  if (can_add(self, a, b, beta, alpha) && may_write(out, a, b, 2) && !out.is_alias_of(self)) {
    out.copy_(self);
    if (multiplies(a, b, out, 2, true))
      return out;
  }
  return at::cpu::addmm_outf(self, a, b, beta, alpha, out);
}

// ---- GELU ----

bool is_tanh(std::string_view approximate) { return approximate == "tanh"; }

bool is_known(std::string_view approximate) { return approximate == "none" || approximate == "tanh"; }

bool takes_gelu(const Tensor &input, std::string_view approximate) { return is_simple(input) && is_known(approximate); }

Tensor &run_gelu(const Tensor &input, std::string_view approximate, Tensor &out) {
  rust.gelu(dtype_of(input), is_tanh(approximate), input.const_data_ptr(), out.mutable_data_ptr(), input.numel());
  return out;
}

Tensor gelu(const Tensor &input, std::string_view approximate) {
  if (!takes_gelu(input, approximate))
    return at::cpu::gelu(input, approximate);
  Tensor out = new_empty(input, input.sizes());
  return run_gelu(input, approximate, out);
}

Tensor &gelu_out(const Tensor &input, std::string_view approximate, Tensor &out) {
  if (takes_gelu(input, approximate) && is_simple(out) && are_alike(out, input) && !out.is_alias_of(input))
    return run_gelu(input, approximate, out);
  return at::cpu::gelu_outf(input, approximate, out);
}

bool takes_gelu_backward(const Tensor &grad, const Tensor &input, std::string_view approximate) {
  return takes_gelu(input, approximate) && is_simple(grad) && are_alike(grad, input);
}

Tensor &run_gelu_backward(const Tensor &grad, const Tensor &input, std::string_view approximate, Tensor &out) {
  rust.gelu_backward(dtype_of(input), is_tanh(approximate), grad.const_data_ptr(), input.const_data_ptr(),
                     out.mutable_data_ptr(), input.numel());
  return out;
}

Tensor gelu_backward(const Tensor &grad, const Tensor &input, std::string_view approximate) {
  if (!takes_gelu_backward(grad, input, approximate))
    return at::cpu::gelu_backward(grad, input, approximate);
  Tensor out = new_empty(input, input.sizes());
  return run_gelu_backward(grad, input, approximate, out);
}

Tensor &gelu_backward_out(const Tensor &grad, const Tensor &input, std::string_view approximate, Tensor &out) {
  if (takes_gelu_backward(grad, input, approximate) && is_simple(out) && are_alike(out, input) &&
      !out.is_alias_of(input) && !out.is_alias_of(grad))
    return run_gelu_backward(grad, input, approximate, out);
  return at::cpu::gelu_backward_outf(grad, input, approximate, out);
}

// ---- max-pooling ----

bool are_all(IntArrayRef numbers, int64_t number) {
  return std::all_of(numbers.begin(), numbers.end(), [=](int64_t n) { return n == number; });
}

// The layout of what is computed from such images, as in libtorch.
at::MemoryFormat layout_of(const Tensor &images) { return images.suggest_memory_format(); }

bool is_dense(const Tensor &tensor, at::MemoryFormat layout) {
  return is_plain(tensor) && tensor.is_contiguous(layout);
}

// Empty for a pool that is libtorch's.
std::optional<vt_max_pool> pool_of(const Tensor &input, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                                   IntArrayRef dilation) {
  if (!has_rust_dtype(input) || (input.dim() != 3 && input.dim() != 4) || !is_dense(input, layout_of(input)) ||
      kernel.empty() || !are_all(kernel, 2) || !are_all(stride, 2) || !are_all(padding, 0) || !are_all(dilation, 1) ||
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
  rust.max_pool2d(&pool, input.const_data_ptr(), out.mutable_data_ptr(), indices.mutable_data_ptr<int64_t>());
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
  rust.max_pool2d_backward(&pool, grads.const_data_ptr(), places.const_data_ptr<int64_t>(), out.mutable_data_ptr());
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

// ---- weights of convolutions ----

bool is_channels_last(const Tensor &tensor) {
  return is_plain(tensor) && has_rust_dtype(tensor) && tensor.dim() == 4 &&
         tensor.is_contiguous(at::MemoryFormat::ChannelsLast);
}

void set_pair(int64_t (&pair)[2], IntArrayRef numbers) {
  pair[0] = numbers.front();
  pair[1] = numbers.back();
}

// Empty for a convolution whose weights have their gradient by libtorch.
std::optional<vt_convolution> taps_of(const Tensor &grad, const Tensor &input, const Tensor &weight, IntArrayRef stride,
                                      IntArrayRef padding, IntArrayRef dilation, bool transposed, int64_t groups) {
  if (!is_channels_last(input) || !is_channels_last(weight) || weight.is_contiguous() || transposed || groups != 1 ||
      !are_all(dilation, 1) || stride.empty() || padding.empty() || grad.dim() != 4 ||
      grad.scalar_type() != input.scalar_type() || weight.scalar_type() != input.scalar_type())
    return std::nullopt;
  vt_convolution call{};
  call.dtype = dtype_of(input);
  call.in_channels = input.size(1);
  call.out_channels = grad.size(1);
  set_pair(call.in_size, input.sizes().slice(2));
  set_pair(call.out_size, grad.sizes().slice(2));
  set_pair(call.kernel, weight.sizes().slice(2));
  set_pair(call.stride, stride);
  set_pair(call.padding, padding);
  return rust.convolves_by_taps(&call) != 0 ? std::optional(call) : std::nullopt;
}

// The rows, or columns, of outputs that a tap sees an input at, [first, last], and the input that it sees at the first.
struct Seen {
  int64_t first, last, input;
};

Seen seen_by(int64_t tap, const vt_convolution &call, int dim) {
  const int64_t stride = call.stride[dim], before = call.padding[dim] - tap; // outputs see input o * stride - before
  const int64_t first = before > 0 ? (before + stride - 1) / stride : 0;
  const int64_t end = call.in_size[dim] - 1 + before;
  const int64_t last = end < 0 ? -1 : std::min(call.out_size[dim] - 1, end / stride);
  return {first, last, first * stride - before};
}

// Each tap's weights are a product of the outputs' gradients and of the inputs that they see at this tap.
Tensor weight_grad_by_taps(const Tensor &grad, const Tensor &input, const vt_convolution &call) {
  const int64_t outputs = call.out_channels, inputs = call.in_channels;
  const Tensor grads = grad.contiguous(at::MemoryFormat::ChannelsLast).permute({0, 2, 3, 1});
  const Tensor pixels = input.permute({0, 2, 3, 1});
  Tensor out = at::empty({outputs, inputs, call.kernel[0], call.kernel[1]}, input.options(),
                         at::MemoryFormat::ChannelsLast);
  for (int64_t y = 0; y < call.kernel[0]; ++y)
    for (int64_t x = 0; x < call.kernel[1]; ++x) {
      Tensor tap = out.select(3, x).select(2, y);
      const Seen rows = seen_by(y, call, 0), columns = seen_by(x, call, 1);
      if (rows.first > rows.last || columns.first > columns.last) {
        tap.zero_();
        continue;
      }
      const auto part = [](const Tensor &t, int dim, int64_t first, const Seen &seen, int64_t stride) {
        return t.slice(dim, first, first + (seen.last - seen.first) * stride + 1, stride);
      };
      const Tensor a = part(part(grads, 1, rows.first, rows, 1), 2, columns.first, columns, 1);
      const Tensor b = part(part(pixels, 1, rows.input, rows, call.stride[0]), 2, columns.input, columns, call.stride[1]);
      at::mm_out(tap, a.reshape({-1, outputs}).t(), b.reshape({-1, inputs}));
    }
  return out;
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor &grad, const Tensor &input, const Tensor &weight,
                                                        at::OptionalIntArrayRef bias_sizes, IntArrayRef stride,
                                                        IntArrayRef padding, IntArrayRef dilation, bool transposed,
                                                        IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> wanted) {
  const auto by_libtorch = [&](std::array<bool, 3> wanted) {
    return at::compositeexplicitautograd::convolution_backward(grad, input, weight, bias_sizes, stride, padding,
                                                               dilation, transposed, output_padding, groups, wanted);
  };
  const auto call = wanted[1] ? taps_of(grad, input, weight, stride, padding, dilation, transposed, groups)
                              : std::optional<vt_convolution>();
  if (!call)
    return by_libtorch(wanted);
  Tensor grad_input = wanted[0] ? std::get<0>(by_libtorch({true, false, false})) : Tensor();
  Tensor grad_bias = wanted[2] ? grad.sum({0, 2, 3}) : Tensor();
  return {std::move(grad_input), weight_grad_by_taps(grad, input, *call), std::move(grad_bias)};
}

// ---- random masks ----

Tensor &bernoulli(Tensor &self, double p, std::optional<at::Generator> given) {
  if (!is_simple(self) || !(p >= 0 && p <= 1) || (given.has_value() && given->device().type() != at::kCPU))
    return at::cpu::bernoulli_(self, p, given);
  auto *generator = at::get_generator_or_default<at::CPUGeneratorImpl>(given, at::detail::getDefaultCPUGenerator());
  const std::scoped_lock lock(generator->mutex_);
  at::mt19937 engine = generator->engine();
  at::mt19937_data_pod state = engine.data();
  vt_mt19937 view{state.left_, state.next_, state.state_.data()};
  rust.bernoulli(dtype_of(self), &view, p, self.mutable_data_ptr(), self.numel());
  state.left_ = view.left;
  state.next_ = view.next;
  engine.set_data(state);
  generator->set_engine(engine);
  return self;
}

// ---- attention ----

vt_rows rows_of(const Tensor &tensor) {
  return {const_cast<void *>(tensor.const_data_ptr()), {tensor.stride(0), tensor.stride(1), tensor.stride(2)}};
}

bool is_rows(const Tensor &tensor, const Tensor &query) {
  return is_plain(tensor) && tensor.dim() == 4 && tensor.scalar_type() == query.scalar_type() &&
         tensor.stride(3) == 1 && tensor.size(0) == query.size(0) && tensor.size(1) == query.size(1) &&
         tensor.size(3) == query.size(3);
}

bool takes_attention(const Tensor &query, const Tensor &key, const Tensor &value, double dropout,
                     const std::optional<Tensor> &mask) {
  return query.dim() == 4 && has_rust_dtype(query) && is_rows(query, query) && is_rows(key, query) &&
         is_rows(value, query) && key.size(2) == value.size(2) && dropout == 0 &&
         !(mask.has_value() && mask->defined());
}

vt_attention describe(const Tensor &query, const Tensor &key, const Tensor &value, const Tensor &out,
                      const Tensor &log_sum_exp, bool is_causal, std::optional<double> scale) {
  vt_attention attention{};
  attention.dtype = dtype_of(query);
  attention.is_causal = is_causal;
  attention.scale = scale.value_or(1 / std::sqrt(static_cast<double>(query.size(3))));
  attention.batches = query.size(0);
  attention.heads = query.size(1);
  attention.queries = query.size(2);
  attention.keys = key.size(2);
  attention.dim = query.size(3);
  attention.query = rows_of(query);
  attention.key = rows_of(key);
  attention.value = rows_of(value);
  attention.out = rows_of(out);
  attention.log_sum_exp = rows_of(log_sum_exp);
  return attention;
}

// libtorch's layout: [batch, row, head, dim], seen as [batch, head, row, dim].
Tensor new_rows(const Tensor &like) {
  return new_empty(like, {like.size(0), like.size(2), like.size(1), like.size(3)}).transpose(1, 2);
}

std::tuple<Tensor, Tensor> attention(const Tensor &query, const Tensor &key, const Tensor &value, double dropout,
                                     bool is_causal, const std::optional<Tensor> &mask, std::optional<double> scale) {
  if (!takes_attention(query, key, value, dropout, mask))
    return at::cpu::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, is_causal, mask, scale);
  Tensor out = new_rows(query);
  Tensor log_sum_exp =
      at::empty({query.size(0), query.size(2), query.size(1)}, query.options().dtype(at::kFloat)).transpose(1, 2);
  const vt_attention call = describe(query, key, value, out, log_sum_exp, is_causal, scale);
  rust.attention(&call);
  return {std::move(out), std::move(log_sum_exp)};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor &grad, const Tensor &query, const Tensor &key,
                                                      const Tensor &value, const Tensor &out,
                                                      const Tensor &log_sum_exp, double dropout, bool is_causal,
                                                      const std::optional<Tensor> &mask, std::optional<double> scale) {
  if (!takes_attention(query, key, value, dropout, mask) || !is_rows(grad, query) || !is_rows(out, query) ||
      log_sum_exp.scalar_type() != at::kFloat)
    return at::cpu::_scaled_dot_product_flash_attention_for_cpu_backward(grad, query, key, value, out, log_sum_exp,
                                                                         dropout, is_causal, mask, scale);
  Tensor grad_query = new_rows(query), grad_key = new_rows(key), grad_value = new_rows(value);
  vt_attention call = describe(query, key, value, out, log_sum_exp, is_causal, scale);
  call.grad_out = rows_of(grad);
  call.grad_query = rows_of(grad_query);
  call.grad_key = rows_of(grad_key);
  call.grad_value = rows_of(grad_value);
  rust.attention_backward(&call);
  return {std::move(grad_query), std::move(grad_key), std::move(grad_value)};
}

// libtorch warns of each kernel that takes another's place, which is what is wanted here.
struct NoWarnings : c10::WarningHandler {
  void process(const c10::Warning &) override {}
};

} // namespace
} // namespace voltaic

vt_error *vt_install_kernels(const vt_kernels *kernels) {
  return voltaic::guard([&] {
    using namespace voltaic;
    rust = *kernels;
    NoWarnings silence;
    const c10::WarningUtils::WarningHandlerGuard guard(&silence);
    // holds the registrations and lives as long as the process
    auto &library = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
    if (rust.product != nullptr) {
      library.impl("mm", &mm);
      library.impl("mm.out", &mm_out);
      library.impl("bmm", &bmm);
      library.impl("bmm.out", &bmm_out);
      library.impl("addmm", &addmm);
      library.impl("addmm.out", &addmm_out);
    }
    if (rust.gelu != nullptr) {
      library.impl("gelu", &gelu);
      library.impl("gelu.out", &gelu_out);
      library.impl("gelu_backward", &gelu_backward);
      library.impl("gelu_backward.grad_input", &gelu_backward_out);
    }
    if (rust.max_pool2d != nullptr) {
      library.impl("max_pool2d_with_indices", &max_pool2d);
      library.impl("max_pool2d_with_indices.out", &max_pool2d_out);
    }
    if (rust.max_pool2d_backward != nullptr) {
      library.impl("max_pool2d_with_indices_backward", &max_pool2d_backward);
      library.impl("max_pool2d_with_indices_backward.grad_input", &max_pool2d_backward_out);
    }
    if (rust.convolves_by_taps != nullptr)
      library.impl("convolution_backward", &convolution_backward);
    if (rust.bernoulli != nullptr)
      library.impl("bernoulli_.float", &bernoulli);
    if (rust.attention != nullptr) {
      library.impl("_scaled_dot_product_flash_attention_for_cpu", &attention);
      library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", &attention_backward);
    }
  });
}
