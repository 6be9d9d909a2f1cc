// Operators element by element and random masks, written in Rust, in the place of libtorch's for the CPU.
#include "kernels/kernels.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/_to_copy_native.h>
#include <ATen/ops/add_cpu_dispatch.h>
#include <ATen/ops/bernoulli_cpu_dispatch.h>
#include <ATen/ops/gelu_backward_cpu_dispatch.h>
#include <ATen/ops/gelu_cpu_dispatch.h>
#include <ATen/ops/relu_cpu_dispatch.h>
#include <ATen/ops/threshold_backward_cpu_dispatch.h>

namespace voltaic {
namespace {

// ---- GELU ----

bool is_tanh(std::string_view approximate) { return approximate == "tanh"; }

bool is_known(std::string_view approximate) { return approximate == "none" || approximate == "tanh"; }

bool takes_gelu(const Tensor &input, std::string_view approximate) { return is_simple(input) && is_known(approximate); }

Tensor &run_gelu(const Tensor &input, std::string_view approximate, Tensor &out) {
  is_done(rust.gelu(dtype_of(input), is_tanh(approximate), input.const_data_ptr(), out.mutable_data_ptr(),
                    input.numel()));
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
  is_done(rust.gelu_backward(dtype_of(input), is_tanh(approximate), grad.const_data_ptr(), input.const_data_ptr(),
                             out.mutable_data_ptr(), input.numel()));
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

// ---- ReLU and sums in bfloat16 ----

// Dense float32 or bfloat16 in any order.
bool is_row(const Tensor &tensor) {
  return is_plain(tensor) && has_rust_dtype(tensor) && tensor.is_non_overlapping_and_dense();
}

// Of these dtypes; those of float32 alone are libtorch's, which keep up with memory.
bool is_bf16_row(const Tensor &tensor) { return tensor.scalar_type() == at::kBFloat16 && is_row(tensor); }

// Their elements follow each other in the same order.
bool are_parallel(const Tensor &a, const Tensor &b) { return a.sizes() == b.sizes() && a.strides() == b.strides(); }

// Whether Rust may write to `out`: memory of its own, or that of the first input.
bool may_write(const Tensor &out, const Tensor &first, const Tensor &second) {
  return is_plain(out) && out.scalar_type() == first.scalar_type() && are_parallel(first, out) &&
         !out.is_alias_of(second) &&
         (!out.is_alias_of(first) || out.const_data_ptr() == first.const_data_ptr());
}

// A new tensor for what is computed from such elements, as libtorch lays it out: in its usual strides, or with the
// channels last, if theirs may be read so.
Tensor new_row(const Tensor &like) {
  if (like.is_contiguous())
    return new_empty(like, like.sizes());
  if (like.is_contiguous(at::MemoryFormat::ChannelsLast))
    return at::empty(like.sizes(), like.options(), at::MemoryFormat::ChannelsLast);
  return at::empty_like(like);
}

Tensor relu(const Tensor &input) {
  if (!is_bf16_row(input))
    return at::cpu::relu(input);
  Tensor out = new_row(input);
  is_done(rust.relu_bf16(input.const_data_ptr(), out.mutable_data_ptr(), input.numel()));
  return out;
}

Tensor &relu_(Tensor &self) {
  if (!is_bf16_row(self))
    return at::cpu::relu_(self);
  is_done(rust.relu_bf16(self.const_data_ptr(), self.mutable_data_ptr(), self.numel()));
  return self;
}

bool takes_relu_backward(const Tensor &grad, const Tensor &output, const Scalar &threshold) {
  return is_bf16_row(grad) && is_bf16_row(output) && are_parallel(grad, output) && threshold.equal(0);
}

Tensor &run_relu_backward(const Tensor &grad, const Tensor &output, Tensor &out) {
  is_done(rust.relu_backward_bf16(grad.const_data_ptr(), output.const_data_ptr(), out.mutable_data_ptr(), grad.numel()));
  return out;
}

Tensor threshold_backward(const Tensor &grad, const Tensor &output, const Scalar &threshold) {
  if (!takes_relu_backward(grad, output, threshold))
    return at::cpu::threshold_backward(grad, output, threshold);
  Tensor out = new_row(grad);
  return run_relu_backward(grad, output, out);
}

Tensor &threshold_backward_out(const Tensor &grad, const Tensor &output, const Scalar &threshold, Tensor &out) {
  if (takes_relu_backward(grad, output, threshold) && may_write(out, grad, output))
    return run_relu_backward(grad, output, out);
  return at::cpu::threshold_backward_outf(grad, output, threshold, out);
}

bool takes_add(const Tensor &a, const Tensor &b, const Scalar &alpha) {
  return is_row(a) && is_bf16_row(b) && are_parallel(a, b) && alpha.equal(1);
}

Tensor &run_add(const Tensor &a, const Tensor &b, Tensor &out) {
  is_done(rust.add_bf16(dtype_of(a), a.const_data_ptr(), b.const_data_ptr(), out.mutable_data_ptr(), a.numel()));
  return out;
}

// Whether a float32 comes second, which Rust takes first.
bool has_wide_second(const Tensor &a, const Tensor &b) {
  return a.scalar_type() == at::kBFloat16 && b.scalar_type() == at::kFloat;
}

Tensor add(const Tensor &a, const Tensor &b, const Scalar &alpha) {
  const bool turns = has_wide_second(a, b);
  const Tensor &first = turns ? b : a, &second = turns ? a : b;
  if (!takes_add(first, second, alpha))
    return at::cpu::add(a, b, alpha);
  Tensor out = new_row(first);
  return run_add(first, second, out);
}

Tensor &add_(Tensor &self, const Tensor &other, const Scalar &alpha) {
  if (takes_add(self, other, alpha) && may_write(self, self, other))
    return run_add(self, other, self);
  return at::cpu::add_(self, other, alpha);
}

Tensor &add_out(const Tensor &a, const Tensor &b, const Scalar &alpha, Tensor &out) {
  const bool turns = has_wide_second(a, b);
  const Tensor &first = turns ? b : a, &second = turns ? a : b;
  if (takes_add(first, second, alpha) && may_write(out, first, second))
    return run_add(first, second, out);
  return at::cpu::add_outf(a, b, alpha, out);
}

// ---- casts ----

bool converts(const Tensor &self, const Tensor &out) {
  return is_row(out) && out.scalar_type() != self.scalar_type() && are_parallel(self, out) && !out.is_alias_of(self);
}

Tensor &run_convert(const Tensor &self, Tensor &out) {
  is_done(rust.convert(dtype_of(self), self.const_data_ptr(), out.mutable_data_ptr(), self.numel()));
  return out;
}

Tensor to_copy(const Tensor &self, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
               std::optional<at::Device> device, std::optional<bool> pins, bool non_blocking,
               std::optional<at::MemoryFormat> format) {
  const bool stays = layout.value_or(at::kStrided) == at::kStrided && device.value_or(self.device()) == self.device() &&
                     !pins.value_or(false) &&
                     format.value_or(at::MemoryFormat::Preserve) == at::MemoryFormat::Preserve;
  if (stays && dtype.has_value() && is_row(self))
    if (*dtype == (self.scalar_type() == at::kFloat ? at::kBFloat16 : at::kFloat))
      if (Tensor out = at::empty_like(self, self.options().dtype(*dtype)); converts(self, out))
        return run_convert(self, out);
  return at::native::_to_copy(self, dtype, layout, device, pins, non_blocking, format);
}

Tensor &to_copy_out(const Tensor &self, bool non_blocking, std::optional<at::MemoryFormat> format, Tensor &out) {
  if (is_row(self) && converts(self, out))
    return run_convert(self, out);
  return at::native::_to_copy_out(self, non_blocking, format, out);
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
  is_done(rust.bernoulli(dtype_of(self), &view, p, self.mutable_data_ptr(), self.numel()));
  state.left_ = view.left;
  state.next_ = view.next;
  engine.set_data(state);
  generator->set_engine(engine);
  return self;
}

} // namespace

void install_elementwise(torch::Library &library) {
  if (rust.gelu != nullptr) {
    library.impl("gelu", &gelu);
    library.impl("gelu.out", &gelu_out);
    library.impl("gelu_backward", &gelu_backward);
    library.impl("gelu_backward.grad_input", &gelu_backward_out);
  }
  if (rust.relu_bf16 != nullptr) {
    library.impl("relu", &relu);
    library.impl("relu_", &relu_);
  }
  if (rust.relu_backward_bf16 != nullptr) {
    library.impl("threshold_backward", &threshold_backward);
    library.impl("threshold_backward.grad_input", &threshold_backward_out);
  }
  if (rust.add_bf16 != nullptr) {
    library.impl("add.Tensor", &add);
    library.impl("add_.Tensor", &add_);
    library.impl("add.out", &add_out);
  }
  if (rust.convert != nullptr) {
    library.impl("_to_copy", &to_copy);
    library.impl("_to_copy.out", &to_copy_out);
  }
  if (rust.bernoulli != nullptr)
    library.impl("bernoulli_.float", &bernoulli);
}

} // namespace voltaic
