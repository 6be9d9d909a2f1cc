// The C ABI between voltaic (Rust) and libtorch (C++): what all of it shares. Each room has an `abi.h` of its own, so that
// a change there compiles that room again and no other.
//
// Errors:    every function that can fail returns vt_error*; null means success. The caller frees it with
//            vt_error_free. Results go through out-pointers, which are written only on success.
// Tensors:   vt_tensor is a heap-allocated at::Tensor, the same object that torch-sys calls C_tensor.
//            Arguments are borrowed for the call; a tensor written to an out-pointer is owned by the caller.
// Callbacks: may be called on any thread unless the function says otherwise, and must not unwind.
#pragma once

#include <cstddef>
#include <cstdint>

namespace at {
class Tensor;
}

extern "C" {

typedef at::Tensor *vt_tensor;
typedef struct vt_error vt_error;

enum vt_error_kind : int32_t {
  VT_ERROR_OTHER = 0,
  VT_ERROR_OUT_OF_MEMORY = 1,
  VT_ERROR_INDEX = 2,
  VT_ERROR_NOT_IMPLEMENTED = 3,
};

int32_t vt_error_kind_of(const vt_error *error);
// Text without libtorch's C++ backtrace; valid until vt_error_free.
const char *vt_error_message(const vt_error *error);
void vt_error_free(vt_error *error);

} // extern "C"
