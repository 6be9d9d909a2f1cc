// Lists of tensors that are kept between calls, and how their entries lie in memory.
#pragma once

#include "tensor/abi.h"

#include <ATen/core/Tensor.h>

#include <vector>

struct vt_list {
  std::vector<at::Tensor> tensors;
};

namespace voltaic {

// Whether element i of one tensor's memory is element i of the other's. Strides of dimensions of size 1 mean nothing.
inline bool same_layout(const at::Tensor &a, const at::Tensor &b) {
  if (a.sizes() != b.sizes())
    return false;
  for (int64_t dim = 0; dim < a.dim(); ++dim)
    if (a.size(dim) != 1 && a.stride(dim) != b.stride(dim))
      return false;
  return true;
}

// Says to autograd that tensors were written to, which kernels do not.
inline void note_written(const std::vector<at::Tensor> &tensors) {
  for (const at::Tensor &tensor : tensors)
    if (tensor.defined() && !tensor.is_inference())
      tensor.unsafeGetTensorImpl()->bump_version();
}

} // namespace voltaic
