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
// Makes `outputs`, which must have no history yet, results of a function of `inputs` with this gradient.
vt_error *vt_autograd_function(const vt_tensor *inputs, size_t num_inputs, const vt_tensor *outputs, size_t num_outputs,
                               vt_autograd_callbacks callbacks);
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
// Whether this thread runs a backward pass.
int32_t vt_is_in_backward(void);
// torch.autograd.grad(outputs, inputs, grad_outputs, retain_graph=True, allow_unused=True):
// grads[i] is undefined if there is none.
// Tensors written to `grads` are owned by the caller.
vt_error *vt_autograd_grad(const vt_tensor *outputs, const vt_tensor *grad_outputs, size_t num_outputs,
                           const vt_tensor *inputs, size_t num_inputs, vt_tensor *grads);

} // extern "C"
