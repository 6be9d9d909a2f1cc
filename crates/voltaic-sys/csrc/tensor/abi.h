// Tensors: memory, autocast, lists, random numbers. See voltaic.h for errors, ownership and threads.
#pragma once

#include "voltaic.h"

extern "C" {

// ---- memory ----

// Frees the memory of a tensor, and of all tensors that share it, which keep their sizes. `bytes` is what there was.
vt_error *vt_storage_release(vt_tensor tensor, size_t *bytes);
// Gives them memory again, whose contents are not set; nothing to do if they have as much.
vt_error *vt_storage_restore(vt_tensor tensor, size_t bytes);
// Puts the memory of another tensor, which is contiguous and on the same device, in the place of theirs; it lives as long as they use it.
vt_error *vt_storage_lend(vt_tensor tensor, vt_tensor memory);
// Copies values without a new version of the tensor, so that autograd goes on with what it has saved.
vt_error *vt_storage_refill(vt_tensor tensor, vt_tensor values);
// A tensor in pinned host memory with the size and dtype of `like`, whose values are not set.
vt_error *vt_empty_pinned(vt_tensor like, vt_tensor *pinned);
// Copies values between a device and pinned host memory, in the order of the device's stream, which the caller does not wait for.
vt_error *vt_copy_async(vt_tensor to, vt_tensor from);
// Tells memories apart, and how many bytes a tensor's has; 0 after vt_storage_release.
vt_error *vt_storage_describe(vt_tensor tensor, size_t *id, size_t *bytes);
// Sets how often autograd takes a tensor for changed: backward refuses values that were saved at another count.
vt_error *vt_set_version(vt_tensor tensor, int64_t version);

// ---- autocast ----

// Whether operators on this device type cast their arguments, on the calling thread, and to what (c10's number).
vt_error *vt_autocast_get(int32_t device_type, int32_t *enabled, int32_t *dtype);
vt_error *vt_autocast_set(int32_t device_type, int32_t enabled, int32_t dtype);
// Around each region: weights that were cast are kept until the outermost one is left.
vt_error *vt_autocast_enter(void);
vt_error *vt_autocast_leave(void);
// Drops the weights that were cast on this device in the region that is open.
vt_error *vt_autocast_clear_cache(void);

enum vt_autocast_policy : uint8_t {
  VT_AUTOCAST_LOWER = 0,       // arguments go to the autocast dtype
  VT_AUTOCAST_LOWER_FIRST = 1, // the first tensor does
  VT_AUTOCAST_FP32 = 2,        // arguments go to float32
  VT_AUTOCAST_PROMOTE = 3,     // to float32 if one of them is, else to the autocast dtype
};

// Policies by operator name without "aten::" and overload, in place of those set before; where a name comes twice the
// first holds. Operators that write to their arguments are left alone. replaces_rest: operators that are not named do
// not cast, even if libtorch's own lists have them. For all threads; none of them may run an operator meanwhile.
vt_error *vt_autocast_set_lists(int32_t device_type, const char *const *names, const uint8_t *policies, size_t len,
                                int32_t replaces_rest);
// Back to libtorch's own lists.
vt_error *vt_autocast_reset_lists(int32_t device_type);
// Is told of each cast that lists set here ask for: operator without "aten::" and overload, position of the argument, and
// c10's numbers of both dtypes. Called on the thread that runs the operator; must not throw. Null for nobody.
typedef void (*vt_cast_report)(const char *op, size_t argument, int32_t from, int32_t to);
void vt_autocast_observe(vt_cast_report report);
// Calls report(data, name) with the name of each ATen operator, without "aten::" and overload; some come several times.
vt_error *vt_operator_names(void (*report)(void *data, const char *name), void *data);

// ---- lists of tensors and optimizer kernels ----

// Same number for handles of the same tensor, as long as one of them lives.
vt_error *vt_tensor_id(vt_tensor tensor, size_t *id);
// 1 if the elements fill a block of memory without gaps or overlaps, in any order; the kernels below need that.
vt_error *vt_tensor_is_dense(vt_tensor tensor, int32_t *is_dense);

// Handles that are kept between calls. Owned by the caller; adding a tensor shares it.
typedef struct vt_list vt_list;
vt_error *vt_list_new(const vt_tensor *tensors, size_t len, vt_list **list);
void vt_list_free(vt_list *list);
size_t vt_list_len(const vt_list *list);
void vt_list_clear(vt_list *list);
// A list of the entries `indices`; fails if one of them is out of range.
vt_error *vt_list_select(const vt_list *list, const size_t *indices, size_t len, vt_list **selected);
// A list of copies of the tensors, laid out as they are.
vt_error *vt_list_copies(const vt_list *list, vt_list **copies);
// Drops the gradients of the tensors in the list.
vt_error *vt_list_clear_grads(const vt_list *params);

enum vt_grad_status : uint8_t { VT_GRAD_ABSENT = 0, VT_GRAD_PRESENT = 1, VT_GRAD_UNUSABLE = 2 };

// Replaces the contents of `grads` by the gradients themselves, in order, without the absent ones.
vt_error *vt_list_grads(const vt_list *params, vt_list *grads);
// The same with an undefined tensor in place of an absent one.
vt_error *vt_list_all_grads(const vt_list *params, vt_list *grads);
// Makes `grads`, as vt_list_all_grads gave them, the gradients of `params` again. carries_over: with the values of the
// gradients that they replace.
vt_error *vt_list_bind_grads(const vt_list *params, const vt_list *grads, int32_t carries_over);
// Whether `grads`, as vt_list_all_grads gave them, are still the gradients of `params`.
vt_error *vt_list_are_grads(const vt_list *params, const vt_list *grads, int32_t *are_grads);
// The same for an update: a gradient with other strides than its parameter is replaced by a copy. status[i] tells of
// parameter i; a sparse or complex gradient, or one of another dtype, device or shape, is unusable and left out. One of
// bfloat16 or float16 is usable for a parameter of float32, and stays as it is; are_narrowed: there is one.
vt_error *vt_list_grads_for_update(const vt_list *params, vt_list *grads, uint8_t *status, int32_t *are_narrowed);
// Replaces gradients of bfloat16 and float16 of parameters of float32 by copies in float32.
vt_error *vt_list_widen_grads(const vt_list *params);

typedef struct {
  double lr, weight_decay, momentum, dampening;
  int32_t nesterov, maximize;
  vt_tensor lr_tensor; // 0-dim float64 on the CPU that the kernel reads in place of lr; may be null
} vt_sgd_options;

// One update by torch._fused_sgd_. momentum_buffers is null if momentum is 0; the buffers are written before they
// are read when is_first_step is set. Fails unless all lists have the same shapes, strides, dtypes and devices.
// Empties `grads`.
vt_error *vt_fused_sgd(const vt_list *params, vt_list *grads, const vt_list *momentum_buffers,
                       const vt_sgd_options *options, int32_t is_first_step);

typedef struct {
  double lr, beta1, beta2, eps, weight_decay;
  int32_t amsgrad, maximize;
  int32_t decoupled; // 1: AdamW (weight decay applied to the weights), 0: Adam (added to the gradient)
  vt_tensor lr_tensor; // as for SGD
} vt_adam_options;

typedef struct {
  const vt_list *exp_avgs, *exp_avg_sqs;
  const vt_list *max_exp_avg_sqs; // null unless amsgrad
  const vt_list *steps;           // float32 scalars
  vt_tensor all_steps;            // a tensor whose elements are exactly `steps`; the call increments it
} vt_adam_state;

// One update by torch._fused_adam_ or _fused_adamw_. grad_scale and found_inf may be null. Fails unless all lists
// have the same shapes, strides, dtypes and devices. Empties `grads`.
vt_error *vt_fused_adam(const vt_list *params, vt_list *grads, const vt_adam_state *state,
                        const vt_adam_options *options, vt_tensor grad_scale, vt_tensor found_inf);

vt_error *vt_list_to_float(vt_list *list); // replaces tensors of another dtype by copies in float32
vt_error *vt_foreach_copy(const vt_list *to, const vt_list *from);           // in place, casts; equal shapes
vt_error *vt_foreach_mul_tensor(const vt_list *list, vt_tensor by);          // in place, 0-dim `by`
vt_error *vt_foreach_clamp(const vt_list *list, double min, double max);     // in place
// The p-norm of each tensor, stacked: shape [len], float32 or the tensors' dtype as in PyTorch.
vt_error *vt_foreach_norm(const vt_list *list, double p, vt_tensor *norms);

// ---- random numbers ----

vt_error *vt_manual_seed(uint64_t seed);
// State of a device's default generator as a CPU uint8 tensor, as torch.get_rng_state gives it.
vt_error *vt_rng_get_state(int32_t device_type, int32_t device_index, vt_tensor *state);
vt_error *vt_rng_set_state(int32_t device_type, int32_t device_index, vt_tensor state);
// torch.randperm(len, generator=Generator().manual_seed(seed)), int64 on the CPU.
vt_error *vt_randperm(int64_t len, uint64_t seed, vt_tensor *permutation);

} // extern "C"
