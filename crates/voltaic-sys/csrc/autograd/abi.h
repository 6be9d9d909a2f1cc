// Autograd: hooks, functions, and how operations run. See voltaic.h for errors, ownership and threads.
#pragma once

#include "voltaic.h"

extern "C" {

// ---- what operations produce, and how they run ----

// Watches the operations of the calling thread for the first that makes NaN or infinity of arguments without. Slow.
vt_error *vt_anomaly_watch(int32_t on);
// Writes that operation's name (empty if there is none) and forgets it.
vt_error *vt_anomaly_take(char *text, size_t capacity);
// No gradients and no version counters on the calling thread until `leave` is given the guard.
vt_error *vt_inference_mode_enter(void **guard);
void vt_inference_mode_leave(void *guard);
// 0 off, 1 operations without a deterministic kernel fail, 2 they warn. Per process.
vt_error *vt_set_deterministic(int32_t mode);
vt_error *vt_deterministic(int32_t *mode);
vt_error *vt_set_cudnn_benchmark(int32_t on);

// ---- autograd ----

// Whether backward hands work to the engine's per-device threads. Per calling thread.
vt_error *vt_autograd_set_multithreading(int32_t enabled);
vt_error *vt_autograd_is_multithreading(int32_t *enabled);
// Drops the gradients (PyTorch's zero_grad(set_to_none=True)).
vt_error *vt_grads_clear(const vt_tensor *tensors, size_t len);
vt_error *vt_grad_set(vt_tensor tensor, vt_tensor grad);
// Calls hook(data) each time a gradient has been accumulated into the leaf `tensor`, on the thread that runs
// backward, after the hooks that are there. A hook that returns non-zero makes backward fail. release(data) runs when the
// hook goes away: by _remove with the same data, or with the tensor.
vt_error *vt_post_accumulate_grad_hook(vt_tensor tensor, int32_t (*hook)(void *data), void *data,
                                       void (*release)(void *data));
vt_error *vt_post_accumulate_grad_hook_remove(vt_tensor tensor, const void *data);
// Whether operators of the calling thread note how to differentiate them.
int32_t vt_grad_is_enabled(void);

typedef struct {
  // Writes the gradients of the inputs to grad_inputs, whose entries are null at first and owned by the shim then; null
  // is none. grad_outputs[i] is undefined if backward does not reach output i. Not 0: backward fails with what was
  // written to `text`, at most `capacity` bytes, the last of them 0. On the thread that runs backward, perhaps again.
  int32_t (*backward)(void *data, const vt_tensor *grad_outputs, vt_tensor *grad_inputs, char *text, size_t capacity);
  void (*release)(void *data); // when autograd's graph goes away, on any thread
  void *data;                  // owned by the shim, even if the call fails
} vt_autograd_callbacks;
// Makes `outputs`, which must have no history yet, results of a function of `inputs` with this gradient. Autograd saves the tensors in
// `saved`, which follow the gradients of the outputs in `grad_outputs`.
vt_error *vt_autograd_function(const vt_tensor *inputs, size_t num_inputs, const vt_tensor *outputs, size_t num_outputs,
                               const vt_tensor *saved, size_t num_saved, vt_autograd_callbacks callbacks);
// Calls backward with the gradient of `tensor` as its one output each time it is computed; what it gives for its one input
// takes the gradient's place, and null leaves it. Tensor.register_hook.
vt_error *vt_tensor_hook(vt_tensor tensor, vt_autograd_callbacks callbacks);
// The same with the gradient of what `tensor` is a view of, which keeps the hook if a view is changed in place; what it gives is
// left out. Nothing if `tensor` is no view.
vt_error *vt_base_hook(vt_tensor tensor, vt_autograd_callbacks callbacks);
// The address of the node that `tensor` is an output of, and which one.
vt_error *vt_gradient_edge(vt_tensor tensor, size_t *node, uint32_t *output);
// Within a backward pass: calls backward without tensors when the pass is over; within nested passes, when the outermost is.
vt_error *vt_at_backward_end(vt_autograd_callbacks callbacks);
// Adds gradients of `loss` to those of the leaves; with `retain_graph` its graph stays.
vt_error *vt_backward(vt_tensor loss, int32_t retain_graph);
// Whether this thread runs a backward pass.
int32_t vt_is_in_backward(void);

// ---- activation checkpointing ----

typedef struct {
  // Runs the code of a segment again on these inputs, with grad. Not 0: it failed with what was written to `text`, at most
  // `capacity` bytes, the last of them 0. On the thread that runs backward, perhaps again.
  int32_t (*recompute)(void *data, const vt_tensor *inputs, size_t len, char *text, size_t capacity);
  void (*release)(void *data); // when autograd's graph goes away, on any thread
  void *data;                  // owned by the shim, even if the call fails
} vt_recompute_callbacks;
// Operators by name; segments share it, and it may be freed before them.
typedef struct vt_save_policy vt_save_policy;
vt_save_policy *vt_save_policy_new(void);
// Adds the operators of a name such as aten::mm that compute new tensors, and says how many there are. Not once a segment has it.
vt_error *vt_save_policy_add(vt_save_policy *policy, const char *name, size_t *found);
void vt_save_policy_free(vt_save_policy *policy);

// Until it is left, what operators of this thread save for backward is dropped, but for trained leaves. The first that backward asks
// for brings all of them back by `recompute`. inputs_on_host: inputs on a device are copied to the host, and back for that.
// policy: operators whose results are kept, and not computed again; null for none.
typedef struct vt_segment vt_segment;
vt_error *vt_segment_enter(const vt_tensor *inputs, size_t len, int32_t inputs_on_host, const vt_save_policy *policy,
                           vt_recompute_callbacks callbacks, vt_segment **segment);
void vt_segment_leave(vt_segment *segment);
// Bytes of the storages of what was dropped so far.
int64_t vt_segment_bytes(const vt_segment *segment);
// Of the results that were kept so far.
int64_t vt_segment_saved_bytes(const vt_segment *segment);
// Whether the recomputation in progress on this thread has made all that was dropped: the rest of the code is of no use.
int32_t vt_recompute_is_complete(void);
// Whether the recomputation in progress ends by an error of the operator that saves the last tensor; gives what held before.
int32_t vt_recompute_may_end(int32_t may_end);

// Until it is left, what operators of this thread save in device memory, but for weights, goes to the host, and comes back when backward
// asks for it; each brings the one that was saved before it, too.
typedef struct vt_offload vt_offload;
vt_error *vt_offload_enter(vt_offload **offload);
void vt_offload_leave(vt_offload *offload);
// Bytes that went to the host so far.
int64_t vt_offload_bytes(const vt_offload *offload);

// ---- gradients ----

// torch.autograd.grad(outputs, inputs, grad_outputs, retain_graph=True, allow_unused=True):
// grads[i] is undefined if there is none.
// Tensors written to `grads` are owned by the caller.
vt_error *vt_autograd_grad(const vt_tensor *outputs, const vt_tensor *grad_outputs, size_t num_outputs,
                           const vt_tensor *inputs, size_t num_inputs, vt_tensor *grads);

} // extern "C"
