// Products of matrices, written in Rust, in the place of libtorch's for the CPU.
#include "kernels/kernels.h"

#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/mm_cpu_dispatch.h>

namespace voltaic {
namespace {

// Null for a dtype whose products are libtorch's.
auto kernel_of(const Tensor &tensor) {
  switch (tensor.scalar_type()) {
  case at::kFloat:
    return rust.product;
  case at::kBFloat16:
    return rust.product_bf16;
  default:
    return decltype(rust.product)();
  }
}

bool is_matrix_like(const Tensor &tensor, const Tensor &a, int64_t dim) {
  return is_plain(tensor) && tensor.scalar_type() == a.scalar_type() && tensor.dim() == dim;
}

// Whether Rust takes a product of such tensors of `dim` dimensions, and has written it to `out`.
bool multiplies(const Tensor &a, const Tensor &b, const Tensor &out, int64_t dim, bool adds) {
  if (!is_matrix_like(out, a, dim))
    return false;
  const vt_product product = product_of(a, b, out, adds);
  return is_done(kernel_of(a)(&product));
}

bool fit(const Tensor &a, const Tensor &b, int64_t dim) {
  return kernel_of(a) != nullptr && is_matrix_like(a, a, dim) && is_matrix_like(b, a, dim) && a.size(dim - 1) == b.size(dim - 2) &&
         (dim == 2 || a.size(0) == b.size(0));
}

c10::SmallVector<int64_t, 3> product_sizes(const Tensor &a, const Tensor &b, int64_t dim) {
  c10::SmallVector<int64_t, 3> sizes(a.sizes().begin(), a.sizes().end());
  sizes[dim - 1] = b.size(dim - 1);
  return sizes;
}

// Given tensors may be views of each other, and their own elements one and the same.
bool may_write(const Tensor &out, const Tensor &a, const Tensor &b, int64_t dim) {
  return out.sizes() == IntArrayRef(product_sizes(a, b, dim)) && are_apart(out) && !out.is_alias_of(a) &&
         !out.is_alias_of(b);
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
  return fit(a, b, 2) && self.scalar_type() == a.scalar_type() && is_plain(self) && self.dim() >= 1 && self.dim() <= 2 &&
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

} // namespace

void install_products(torch::Library &library) {
  if (rust.product == nullptr && rust.product_bf16 == nullptr)
    return;
  library.impl("mm", &mm);
  library.impl("mm.out", &mm_out);
  library.impl("bmm", &bmm);
  library.impl("bmm.out", &bmm_out);
  library.impl("addmm", &addmm);
  library.impl("addmm.out", &addmm_out);
}

} // namespace voltaic
