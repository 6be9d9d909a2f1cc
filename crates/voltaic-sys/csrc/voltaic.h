// The C ABI between voltaic (Rust) and libtorch (C++).
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

// ---- errors (error.cpp) -------------------------------------------------------------------------------------

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

// ---- devices and dtypes (device.cpp) ------------------------------------------------------------------------

enum vt_device_type : int32_t { VT_CPU = 0, VT_CUDA = 1, VT_HPU = 15 };

vt_error *vt_tensor_device(vt_tensor tensor, int32_t *device_type, int32_t *device_index);
// Version of the libtorch that is loaded, such as "2.11.0"; static storage.
const char *vt_libtorch_version(void);
// The number c10 gives a dtype, by the name PyTorch gives it ("float32"); -1 for an unknown name.
int32_t vt_dtype_number(const char *name);

// ---- autograd (autograd.cpp) --------------------------------------------------------------------------------

// Whether backward hands work to the engine's per-device threads. Per calling thread.
vt_error *vt_autograd_set_multithreading(int32_t enabled);
vt_error *vt_autograd_is_multithreading(int32_t *enabled);
// Drops the gradients (PyTorch's zero_grad(set_to_none=True)).
vt_error *vt_grads_clear(const vt_tensor *tensors, size_t len);
// Calls hook(data) each time a gradient has been accumulated into the leaf `tensor`, on the thread that runs
// backward. A hook that returns non-zero makes backward fail. release(data) runs when the hook goes away.
vt_error *vt_post_accumulate_grad_hook(vt_tensor tensor, int32_t (*hook)(void *data), void *data,
                                       void (*release)(void *data));
vt_error *vt_clear_post_accumulate_grad_hooks(vt_tensor tensor);

// ---- optimizer kernels (optim.cpp) --------------------------------------------------------------------------

// One update of `len` parameters by torch._fused_sgd_. momentum_buffers is null if momentum is 0; the buffers
// are written before they are read when is_first_step is set.
vt_error *vt_fused_sgd(const vt_tensor *params, const vt_tensor *grads, const vt_tensor *momentum_buffers, size_t len,
                       double lr, double weight_decay, double momentum, double dampening, int32_t nesterov,
                       int32_t maximize, int32_t is_first_step, vt_tensor grad_scale, vt_tensor found_inf);

typedef struct {
  double lr, beta1, beta2, eps, weight_decay;
  int32_t amsgrad, maximize;
  int32_t decoupled; // 1: AdamW (weight decay applied to the weights), 0: Adam (added to the gradient)
} vt_adam_options;

// One update of `len` parameters by torch._fused_adam_ or _fused_adamw_. steps are float32 scalars, already
// incremented. max_exp_avg_sqs is null unless amsgrad. grad_scale and found_inf may be null.
vt_error *vt_fused_adam(const vt_tensor *params, const vt_tensor *grads, const vt_tensor *exp_avgs,
                        const vt_tensor *exp_avg_sqs, const vt_tensor *max_exp_avg_sqs, const vt_tensor *steps,
                        size_t len, const vt_adam_options *options, vt_tensor grad_scale, vt_tensor found_inf);

vt_error *vt_foreach_add_scalar(const vt_tensor *tensors, size_t len, double value);  // in place
vt_error *vt_foreach_mul_tensor(const vt_tensor *tensors, size_t len, vt_tensor by);  // in place, 0-dim `by`
vt_error *vt_foreach_clamp(const vt_tensor *tensors, size_t len, double min, double max); // in place
// The p-norm of each tensor, stacked: shape [len], float32 or the tensors' dtype as in PyTorch.
vt_error *vt_foreach_norm(const vt_tensor *tensors, size_t len, double p, vt_tensor *norms);

// ---- random numbers (rng.cpp) -------------------------------------------------------------------------------

vt_error *vt_manual_seed(uint64_t seed);
// State of a device's default generator as a CPU uint8 tensor, as torch.get_rng_state gives it.
vt_error *vt_rng_get_state(int32_t device_type, int32_t device_index, vt_tensor *state);
vt_error *vt_rng_set_state(int32_t device_type, int32_t device_index, vt_tensor state);
// torch.randperm(len, generator=Generator().manual_seed(seed)), int64 on the CPU.
vt_error *vt_randperm(int64_t len, uint64_t seed, vt_tensor *permutation);

// ---- host memory (allocator.cpp) ----------------------------------------------------------------------------

typedef struct {
  void *(*allocate)(size_t bytes); // 64-byte aligned; null if there is no memory. Never called with 0.
  void (*release)(void *block);
  // Writes why `bytes` could not be allocated to `text`: at most `capacity` bytes, the last of them 0.
  void (*explain)(size_t bytes, char *text, size_t capacity);
} vt_allocator;

// Makes `allocator` libtorch's allocator for the CPU device. Blocks that libtorch's own allocator gave out before
// stay valid and are freed by it. `allocator` must live as long as the process.
vt_error *vt_set_cpu_allocator(const vt_allocator *allocator);
}
