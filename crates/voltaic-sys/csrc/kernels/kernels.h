// What the kernels' files share: the table of functions in Rust, and what they ask of tensors.
#pragma once

#include "error.h"
#include "kernels/abi.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

namespace voltaic {

using at::Scalar;
using at::Tensor;
using c10::IntArrayRef;
using OptionalTensor = std::optional<Tensor>;

// Null entries until vt_install_kernels.
extern vt_kernels rust;

// Where the results of the operator that a replay calls on this thread are to lie, with their numbers; null for anywhere.
extern thread_local const std::vector<std::pair<uint32_t, Tensor>> *wanted_results;

// Throws what the kernel that failed last on this thread says.
[[noreturn]] void throw_failure();

// Whether a kernel has computed what it was called for; else it is libtorch's. Throws if the kernel failed.
inline bool is_done(int32_t status) {
  if (C10_UNLIKELY(status == VT_KERNEL_FAILED))
    throw_failure();
  return status != VT_KERNEL_DECLINED;
}

inline bool has_rust_dtype(const Tensor &tensor) {
  return tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kBFloat16;
}

inline int32_t dtype_of(const Tensor &tensor) { return tensor.scalar_type() == at::kFloat ? VT_FLOAT32 : VT_BFLOAT16; }

// Not a view that says conjugate or negative.
inline bool is_plain(const Tensor &tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_neg() && tensor.numel() > 0;
}

inline bool is_dense(const Tensor &tensor, at::MemoryFormat layout) {
  return is_plain(tensor) && tensor.is_contiguous(layout);
}

// Dense float32 or bfloat16 in the usual order.
inline bool is_simple(const Tensor &tensor) {
  return is_dense(tensor, at::MemoryFormat::Contiguous) && has_rust_dtype(tensor);
}

// Images with the channels next to each other in memory.
inline bool is_channels_last(const Tensor &tensor) {
  return is_plain(tensor) && has_rust_dtype(tensor) && tensor.dim() == 4 &&
         tensor.is_contiguous(at::MemoryFormat::ChannelsLast);
}

inline bool are_all(IntArrayRef numbers, int64_t number) {
  return std::all_of(numbers.begin(), numbers.end(), [=](int64_t n) { return n == number; });
}

// A number for height and width, or one for both. What else is passed is an error, which libtorch's own kernel reports.
inline bool is_pair(IntArrayRef numbers) { return numbers.size() == 1 || numbers.size() == 2; }

inline bool are_alike(const Tensor &a, const Tensor &b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes();
}

// Whether no two elements lie at the same place, as far as their strides tell at once.
inline bool are_apart(const Tensor &tensor) {
  c10::SmallVector<std::pair<int64_t, int64_t>, 5> dims; // stride and size
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (tensor.size(dim) > 1)
      dims.emplace_back(tensor.stride(dim), tensor.size(dim));
  std::sort(dims.begin(), dims.end());
  int64_t extent = 1; // of what the dimensions so far span
  for (const auto &[stride, size] : dims) {
    if (stride < extent)
      return false;
    extent += stride * (size - 1);
  }
  return true;
}

inline Tensor new_empty(const Tensor &like, IntArrayRef sizes) { return at::empty(sizes, like.options()); }

// Each puts the kernels of one file in libtorch's dispatcher; see vt_kernels for those that are null.
void install_products(torch::Library &library);
void install_attention(torch::Library &library);
void install_elementwise(torch::Library &library);
void install_convolutions(torch::Library &library);
void install_convolution_grads(torch::Library &library);
void install_images(torch::Library &library);
void install_updates(torch::Library &library);

// Of a matrix or a batch of them.
inline void set_strides(int64_t (&strides)[3], const Tensor &tensor) {
  const int64_t dim = tensor.dim();
  strides[0] = dim == 3 ? tensor.stride(0) : 0;
  strides[1] = tensor.stride(dim - 2);
  strides[2] = tensor.stride(dim - 1);
}

// (a b), or out + (a b) if it adds, of matrices or batches of them, which live as long as this is used.
inline vt_product product_of(const Tensor &a, const Tensor &b, const Tensor &out, bool adds) {
  vt_product product{};
  product.batches = a.dim() == 3 ? a.size(0) : 1;
  product.rows = a.size(-2);
  product.columns = b.size(-1);
  product.depth = a.size(-1);
  product.out = out.mutable_data_ptr();
  product.a = a.const_data_ptr();
  product.b = b.const_data_ptr();
  set_strides(product.out_strides, out);
  set_strides(product.a_strides, a);
  set_strides(product.b_strides, b);
  product.adds = adds;
  return product;
}

} // namespace voltaic
