// Convolutions of images, written in Rust, in the place of libtorch's for the CPU.
#include "kernels/kernels.h"

#include <ATen/TensorUtils.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/convolution_backward_compositeexplicitautograd_dispatch.h>
#include <ATen/ops/convolution_compositeexplicitautograd_dispatch.h>
#include <ATen/ops/mm.h>
#include <ATen/record_function.h>

namespace voltaic {
namespace {

void set_pair(int64_t (&pair)[2], IntArrayRef numbers) {
  pair[0] = numbers.front();
  pair[1] = numbers.back();
}

// What a convolution is called with.
struct Convolution {
  const Tensor &input, &weight;
  IntArrayRef stride, padding, dilation;
  bool transposed;
  int64_t groups;

  // Empty for what no kernel here computes.
  std::optional<vt_convolution> describe() const {
    if (!is_plain(input) || !is_plain(weight) || !has_rust_dtype(input) || input.dim() != 4 || weight.dim() != 4 ||
        weight.scalar_type() != input.scalar_type() || weight.size(1) != input.size(1) || transposed || groups != 1 ||
        !are_all(dilation, 1) || !is_pair(dilation) || !is_pair(stride) || !is_pair(padding))
      return std::nullopt;
    vt_convolution call{};
    call.dtype = dtype_of(input);
    call.is_channels_last = layout() == at::MemoryFormat::ChannelsLast;
    call.images = input.size(0);
    call.in_channels = input.size(1);
    call.out_channels = weight.size(0);
    set_pair(call.in_size, input.sizes().slice(2));
    set_pair(call.kernel, weight.sizes().slice(2));
    set_pair(call.stride, stride);
    set_pair(call.padding, padding);
    for (int dim = 0; dim < 2; ++dim) {
      const int64_t room = call.in_size[dim] + 2 * call.padding[dim] - call.kernel[dim];
      if (call.stride[dim] <= 0 || call.padding[dim] < 0 || room < 0)
        return std::nullopt;
      call.out_size[dim] = room / call.stride[dim] + 1;
    }
    return call;
  }

  // As libtorch has it for what it computes from these.
  at::MemoryFormat layout() const {
    const bool is_last = input.suggest_memory_format() == at::MemoryFormat::ChannelsLast ||
                         weight.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
    return is_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
  }
};

// What Rust computes of a convolution, as vt_convolves.
int32_t computed_by_rust(const vt_convolution &call) {
  if (rust.convolves == nullptr)
    return 0;
  const int32_t computed = rust.convolves(&call);
  is_done(computed);
  return computed;
}

Tensor with_channels_last(const Tensor &images) { return images.contiguous(at::MemoryFormat::ChannelsLast); }

Tensor new_images(IntArrayRef sizes, const Tensor &like) {
  return at::empty(sizes, like.options(), at::MemoryFormat::ChannelsLast);
}

// In this layout, with the strides that libtorch has for it where others would do: of one channel, or of one pixel.
Tensor in_layout(const Tensor &images, at::MemoryFormat layout) {
  Tensor result = images.contiguous(layout);
  if (layout == at::MemoryFormat::Contiguous && result.is_contiguous(at::MemoryFormat::ChannelsLast))
    return result.as_strided(result.sizes(), at::detail::defaultStrides(result.sizes()));
  return result;
}

// ---- forward ----

Tensor convolution(const Tensor &input, const Tensor &weight, const OptionalTensor &bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                   int64_t groups) {
  const Convolution convolution{input, weight, stride, padding, dilation, transposed, groups};
  const auto by_libtorch = [&] {
    return at::compositeexplicitautograd::convolution(input, weight, bias, stride, padding, dilation, transposed,
                                                      output_padding, groups);
  };
  const auto call = convolution.describe();
  const bool has_bias = bias.has_value() && bias->defined();
  const bool fits = !has_bias || (is_simple(*bias) && bias->scalar_type() == input.scalar_type() && bias->dim() == 1 &&
                                  bias->size(0) == weight.size(0));
  if (!call || !fits || !(computed_by_rust(*call) & VT_OUTPUT))
    return by_libtorch();
  const Tensor images = with_channels_last(input), weights = with_channels_last(weight);
  Tensor out = new_images({call->images, call->out_channels, call->out_size[0], call->out_size[1]}, input);
  if (!is_done(rust.convolution(&*call, images.const_data_ptr(), weights.const_data_ptr(),
                                has_bias ? bias->const_data_ptr() : nullptr, out.mutable_data_ptr())))
    return by_libtorch();
  return in_layout(out, convolution.layout());
}

// ---- gradients ----

// Whether the gradient of the weights is a product for each tap.
bool is_by_taps(const Convolution &convolution, const vt_convolution &call) {
  return rust.convolves_by_taps != nullptr && is_channels_last(convolution.input) &&
         is_channels_last(convolution.weight) && !convolution.weight.is_contiguous() &&
         is_done(rust.convolves_by_taps(&call));
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

// Each tap's weights are a product of the outputs' gradients, with the channels last, and of the inputs that they see at
// this tap.
Tensor weight_grad_by_taps(const Tensor &grad, const Tensor &input, const vt_convolution &call) {
  RECORD_FUNCTION("voltaic::convolution_weight_grad (Taps)", c10::ArrayRef<const c10::IValue>{});
  const int64_t outputs = call.out_channels, inputs = call.in_channels;
  const Tensor grads = grad.permute({0, 2, 3, 1});
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
      const Tensor seen_rows = part(pixels, 1, rows.input, rows, call.stride[0]);
      const Tensor b = part(seen_rows, 2, columns.input, columns, call.stride[1]);
      at::mm_out(tap, a.reshape({-1, outputs}).t(), b.reshape({-1, inputs}));
    }
  return out;
}

// Not defined if it is libtorch's.
Tensor input_grad_by_rust(const Tensor &grad, const Tensor &weight, const vt_convolution &call) {
  Tensor out = new_images({call.images, call.in_channels, call.in_size[0], call.in_size[1]}, grad);
  const Tensor weights = with_channels_last(weight);
  const bool is_computed = is_done(rust.convolution_input_grad(&call, grad.const_data_ptr(), weights.const_data_ptr(),
                                                               out.mutable_data_ptr()));
  return is_computed ? out : Tensor();
}

// Not defined if it is libtorch's.
Tensor weight_grad_by_rust(const Tensor &grad, const Tensor &input, const vt_convolution &call) {
  Tensor out = new_images({call.out_channels, call.in_channels, call.kernel[0], call.kernel[1]}, grad);
  const Tensor images = with_channels_last(input);
  const bool is_computed = is_done(rust.convolution_weight_grad(&call, grad.const_data_ptr(), images.const_data_ptr(),
                                                                out.mutable_data_ptr()));
  return is_computed ? out : Tensor();
}

// oneDNN leaves gradients of weights unwritten where a tap sees nothing but padding, in bfloat16 with AVX-512: they are 0. A
// transposed convolution sees its outputs from each of its inputs.
void clear_unseen_taps(const Tensor &weight_grad, const Convolution &convolution, IntArrayRef grad_sizes) {
  const auto &[input, weight, stride, padding, dilation, transposed, groups] = convolution;
  const int64_t num_dims = weight.dim() - 2;
  if (!weight_grad.defined() || input.dim() != weight.dim() || grad_sizes.size() != input.sizes().size())
    return; // libtorch has not refused it, and has a meaning for it that is not known here
  const IntArrayRef seen = transposed ? grad_sizes : input.sizes(), seeing = transposed ? input.sizes() : grad_sizes;
  const auto at = [](IntArrayRef numbers, int64_t dim) { return numbers.size() == 1 ? numbers[0] : numbers[dim]; };
  for (int64_t dim = 0; dim < num_dims; ++dim) {
    const int64_t step = at(stride, dim), taps = weight.size(dim + 2);
    for (int64_t tap = 0; tap < taps; ++tap) {
      const int64_t before = at(padding, dim) - tap * at(dilation, dim); // position o sees step * o - before
      const int64_t first = before > 0 ? (before + step - 1) / step : 0;
      if (first >= seeing[dim + 2] || first * step - before >= seen[dim + 2])
        weight_grad.select(dim + 2, tap).zero_();
    }
  }
}

// libtorch's, with the weights' gradients that oneDNN does not write.
std::tuple<Tensor, Tensor, Tensor> backward_by_libtorch(const Tensor &grad, const Convolution &convolution,
                                                        at::OptionalIntArrayRef bias_sizes, IntArrayRef output_padding,
                                                        std::array<bool, 3> wanted) {
  const auto &[input, weight, stride, padding, dilation, transposed, groups] = convolution;
  auto grads = at::compositeexplicitautograd::convolution_backward(grad, input, weight, bias_sizes, stride, padding,
                                                                   dilation, transposed, output_padding, groups, wanted);
  clear_unseen_taps(std::get<1>(grads), convolution, grad.sizes());
  return grads;
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor &grad, const Tensor &input, const Tensor &weight,
                                                        at::OptionalIntArrayRef bias_sizes, IntArrayRef stride,
                                                        IntArrayRef padding, IntArrayRef dilation, bool transposed,
                                                        IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> wanted) {
  const Convolution convolution{input, weight, stride, padding, dilation, transposed, groups};
  const auto by_libtorch = [&](std::array<bool, 3> wanted) {
    return backward_by_libtorch(grad, convolution, bias_sizes, output_padding, wanted);
  };
  const auto call = convolution.describe();
  const bool fits = call && is_plain(grad) && grad.scalar_type() == input.scalar_type() && grad.dim() == 4 &&
                    grad.sizes() == IntArrayRef({call->images, call->out_channels, call->out_size[0],
                                                 call->out_size[1]});
  if (!fits)
    return by_libtorch(wanted);
  const int32_t computed = computed_by_rust(*call);
  const bool by_taps = wanted[1] && is_by_taps(convolution, *call);
  const bool tries_input = wanted[0] && computed & VT_INPUT_GRAD;
  const bool tries_weight = wanted[1] && (by_taps || computed & VT_WEIGHT_GRAD);
  if (!tries_input && !tries_weight)
    return by_libtorch(wanted);
  const Tensor grads = with_channels_last(grad);
  const auto laid_out = [&](const Tensor &tensor) {
    return tensor.defined() ? in_layout(tensor, convolution.layout()) : tensor;
  };
  Tensor grad_input, grad_weight;
  if (tries_input)
    grad_input = laid_out(input_grad_by_rust(grads, weight, *call));
  if (tries_weight)
    grad_weight = by_taps ? weight_grad_by_taps(grads, input, *call)
                          : laid_out(weight_grad_by_rust(grads, input, *call));
  const std::array<bool, 3> rest{wanted[0] && !grad_input.defined(), wanted[1] && !grad_weight.defined(), false};
  if (rest[0] || rest[1]) {
    auto others = by_libtorch(rest);
    if (rest[0])
      grad_input = std::move(std::get<0>(others));
    if (rest[1])
      grad_weight = std::move(std::get<1>(others));
  }
  return {std::move(grad_input), std::move(grad_weight), wanted[2] ? grad.sum({0, 2, 3}) : Tensor()};
}

} // namespace

void install_convolutions(torch::Library &library) {
  if (rust.convolves != nullptr)
    library.impl("convolution", &convolution);
}

void install_convolution_grads(torch::Library &library) { library.impl("convolution_backward", &convolution_backward); }

} // namespace voltaic
