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

// tch names an HPU by its CUDA device: index VT_TCH_HPU + i is hpu:i (see voltaic-build).
#define VT_TCH_HPU 64
// 1 if this program was linked so that tch does.
int32_t vt_tch_names_hpu(void);

vt_error *vt_tensor_device(vt_tensor tensor, int32_t *device_type, int32_t *device_index);
// Version of the libtorch that the shim was compiled with, such as "2.11.0"; static storage.
const char *vt_libtorch_version(void);
// The number c10 gives a dtype, by the name PyTorch gives it ("float32"); -1 for an unknown name.
int32_t vt_dtype_number(const char *name);

// ---- back ends of devices (backend.cpp) ------------------------------------------------------------------------

// 1 if a back end of this device type is in libtorch's registries.
int32_t vt_backend_is_loaded(int32_t device_type);
vt_error *vt_backend_device_count(int32_t device_type, int32_t *devices); // 0 if there is no back end
// Waits until the device has done its work. The back end must be loaded, here and below.
vt_error *vt_backend_synchronize(int32_t device_type, int32_t device_index);
// 1 if libtorch can reach default generators of this device type.
vt_error *vt_backend_has_generators(int32_t device_type, int32_t *has_generators);
// Seeds the device's default generator alone.
vt_error *vt_backend_seed(int32_t device_type, int32_t device_index, uint64_t seed);

typedef struct {
  uint64_t total, free; // bytes of the device, all processes together
  uint64_t in_use, max_in_use;
  uint64_t num_allocs, num_frees;
} vt_backend_memory_stats;
// is_measured is 0, and stats is not written, if the back end's allocator keeps no statistics.
vt_error *vt_backend_memory(int32_t device_type, int32_t device_index, vt_backend_memory_stats *stats,
                            int32_t *is_measured);
vt_error *vt_backend_reset_peak_memory(int32_t device_type, int32_t device_index);

// ---- what operations produce, and how they run (anomaly.cpp) ------------------------------------------------------

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

// ---- autograd (autograd.cpp, autograd_function.cpp) --------------------------------------------------------------------------------

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
// Within a backward pass: calls backward without tensors when the pass is over.
vt_error *vt_at_backward_end(vt_autograd_callbacks callbacks);
// torch.autograd.grad(outputs, inputs, grad_outputs, retain_graph=True, allow_unused=True):
// grads[i] is undefined if there is none.
// Tensors written to `grads` are owned by the caller.
vt_error *vt_autograd_grad(const vt_tensor *outputs, const vt_tensor *grad_outputs, size_t num_outputs,
                           const vt_tensor *inputs, size_t num_inputs, vt_tensor *grads);

// ---- memory of tensors (storage.cpp) --------------------------------------------------------------------------

// Frees the memory of a tensor, and of all tensors that share it, which keep their sizes. `bytes` is what there was.
vt_error *vt_storage_release(vt_tensor tensor, size_t *bytes);
// Gives them memory again, whose contents are not set; nothing to do if they have as much.
vt_error *vt_storage_restore(vt_tensor tensor, size_t bytes);
// Copies values without a new version of the tensor, so that autograd goes on with what it has saved.
vt_error *vt_storage_refill(vt_tensor tensor, vt_tensor values);

// ---- autocast (autocast.cpp) ----------------------------------------------------------------------------------

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

// ---- lists of tensors and optimizer kernels (optim.cpp) -------------------------------------------------------

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
// parameter i; a sparse or complex gradient, or one of another dtype, device or shape, is unusable and left out.
vt_error *vt_list_grads_for_update(const vt_list *params, vt_list *grads, uint8_t *status);

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

// ---- distributed (c10d.cpp) -----------------------------------------------------------------------------------

typedef struct vt_store vt_store; // keys and values that all ranks see; may be used by several threads
typedef struct vt_group vt_group; // ranks that communicate; one thread at a time, and all ranks in the same order
typedef struct vt_work vt_work;   // an operation under way; keeps its tensors alive

// Connects to the server at host:port, which is made first if is_server; port 0 lets the system choose one.
vt_error *vt_store_tcp(const char *host, uint16_t port, int32_t is_server, int64_t timeout_ms, vt_store **store,
                       uint16_t *actual_port);
// The same store, with `prefix` before each key.
vt_error *vt_store_with_prefix(const vt_store *store, const char *prefix, vt_store **prefixed);
vt_error *vt_store_set(const vt_store *store, const char *key, const uint8_t *value, size_t len);
// Waits for a key; take(data, ...) gets its value, once, during the call.
vt_error *vt_store_get(const vt_store *store, const char *key, int64_t timeout_ms,
                       void (*take)(void *data, const uint8_t *value, size_t len), void *data);
vt_error *vt_store_add(const vt_store *store, const char *key, int64_t amount, int64_t *sum);
vt_error *vt_store_has(const vt_store *store, const char *key, int32_t *has);
void vt_store_free(vt_store *store);

// Gloo over `interface`, or over the interface that has `address` if that is null. Returns when all ranks are connected.
vt_error *vt_group_gloo(const vt_store *store, int32_t rank, int32_t size, int64_t timeout_ms, const char *interface,
                        const char *address, vt_group **group);
void vt_group_free(vt_group *group);

enum vt_reduce_op : int32_t {
  VT_REDUCE_SUM = 0,
  VT_REDUCE_AVG = 1,
  VT_REDUCE_MIN = 2,
  VT_REDUCE_MAX = 3,
  VT_REDUCE_PRODUCT = 4
};

// Each starts an operation on contiguous tensors. Those of an emulated HPU are reached where they are.
vt_error *vt_group_all_reduce(const vt_group *group, vt_tensor tensor, int32_t op, vt_work **work);
vt_error *vt_group_broadcast(const vt_group *group, vt_tensor tensor, int32_t root, vt_work **work);
vt_error *vt_group_all_gather(const vt_group *group, vt_tensor input, vt_tensor output, vt_work **work);
vt_error *vt_group_reduce_scatter(const vt_group *group, vt_tensor input, vt_tensor output, int32_t op,
                                  vt_work **work);
vt_error *vt_group_send(const vt_group *group, vt_tensor tensor, int32_t peer, vt_work **work);
vt_error *vt_group_recv(const vt_group *group, vt_tensor tensor, int32_t peer, vt_work **work);
// On ranks other than `root` the tensor holds anything afterwards.
vt_error *vt_group_reduce(const vt_group *group, vt_tensor tensor, int32_t root, int32_t op, vt_work **work);
// `output` is read on `root` alone: the inputs of all ranks, stacked.
vt_error *vt_group_gather(const vt_group *group, vt_tensor input, vt_tensor output, int32_t root, vt_work **work);
// `input` is read on `root` alone: what all ranks get, stacked.
vt_error *vt_group_scatter(const vt_group *group, vt_tensor input, vt_tensor output, int32_t root, vt_work **work);
// Rows of the first dimension for each rank, and from each rank; as many splits as ranks.
vt_error *vt_group_all_to_all(const vt_group *group, vt_tensor input, const int64_t *input_splits, vt_tensor output,
                              const int64_t *output_splits, vt_work **work);
vt_error *vt_group_barrier(const vt_group *group, vt_work **work);
// The sum over the ranks, at once. Its gradient is the sum over the ranks of the gradients.
vt_error *vt_group_all_reduce_sum_function(const vt_group *group, vt_tensor input, vt_tensor *output);
// Waits until the operation is done, at most as long as the group's time-out.
vt_error *vt_work_wait(vt_work *work);
// Waits first, unless that has been done.
void vt_work_free(vt_work *work);

// ---- libraries with NCCL's C interface ----

// Bytes that hold the id of a communicator of any library.
enum { VT_COLLECTIVE_ID_BYTES = 4096 };

// Functions of NCCL, or of HCCL and Synapse, with the types of NCCL's and Synapse's headers. Those of Synapse are null
// for NCCL, whose operations take the tensors' own memory.
typedef struct vt_collective_library {
  const char *name; // lives as long as the library
  int32_t has_average;
  void (*get_unique_id)(void), (*init_rank)(void);
  void (*all_reduce)(void), (*broadcast)(void), (*all_gather)(void), (*reduce_scatter)(void), (*reduce)(void);
  void (*send)(void), (*recv)(void), (*group_start)(void), (*group_end)(void);
  void (*async_error)(void), (*abort)(void); // may be null
  void (*destroy)(void), (*error_text)(void);
  void (*device_malloc)(void), (*device_free)(void), (*host_malloc)(void), (*host_free)(void), (*copy)(void);
  void (*stream_create)(void), (*stream_query)(void);
} vt_collective_library;

// A new id for a communicator, VT_COLLECTIVE_ID_BYTES long, to be given to all its ranks.
vt_error *vt_collective_id(const vt_collective_library *library, uint8_t *id);
// Joins the communicator; returns when all ranks have. The library is copied; it must stay loaded.
vt_error *vt_collective_join(const vt_collective_library *library, const uint8_t *id, int32_t rank, int32_t size,
                             int32_t device_type, int32_t device_index, int64_t timeout_ms, vt_group **group);

// views[i] = grad of params[i] * scale; zeros where there is no gradient.
vt_error *vt_bucket_fill(const vt_tensor *params, const vt_tensor *views, size_t len, double scale);
// The gradient of params[i] is views[i] from now on.
vt_error *vt_bucket_adopt(const vt_tensor *params, const vt_tensor *views, size_t len);
// reached[i] = 1 if backward from `root` would give leaves[i] a gradient.
vt_error *vt_reaches_leaves(vt_tensor root, const vt_tensor *leaves, size_t len, uint8_t *reached);

// ---- random numbers (rng.cpp) -------------------------------------------------------------------------------

vt_error *vt_manual_seed(uint64_t seed);
// State of a device's default generator as a CPU uint8 tensor, as torch.get_rng_state gives it.
vt_error *vt_rng_get_state(int32_t device_type, int32_t device_index, vt_tensor *state);
vt_error *vt_rng_set_state(int32_t device_type, int32_t device_index, vt_tensor state);
// torch.randperm(len, generator=Generator().manual_seed(seed)), int64 on the CPU.
vt_error *vt_randperm(int64_t len, uint64_t seed, vt_tensor *permutation);

// ---- memory (allocator.cpp) ---------------------------------------------------------------------------------

// Pools of blocks, by number: the host's, and from 1 on those of the emulated HPUs.
#define VT_HOST_POOL 0
#define VT_HPU_MAX_DEVICES 8

// Lies VT_BLOCK_HEADER_BYTES before each block; the rest of that room is the allocator's own.
typedef struct {
  void *twin; // kept with the block for the HPU back end, see vt_hpu_drop_twin; null at first
  int32_t pool;
  uint32_t magic; // VT_BLOCK_MAGIC
} vt_block_header;
#define VT_BLOCK_HEADER_BYTES 64
#define VT_BLOCK_MAGIC 0x76A17A1Cu

typedef struct {
  // A 64-byte aligned block of a pool; null if there is no memory. Never called with 0 bytes.
  void *(*allocate)(int32_t pool, size_t bytes);
  void (*release)(void *block);
  // Writes why `bytes` could not be allocated to `text`: at most `capacity` bytes, the last of them 0.
  void (*explain)(int32_t pool, size_t bytes, char *text, size_t capacity);
} vt_allocator;

// Makes `allocator` libtorch's allocator for the CPU device. Blocks that libtorch's own allocator gave out before
// stay valid and are freed by it. `allocator` must live as long as the process.
vt_error *vt_set_cpu_allocator(const vt_allocator *allocator);

// ---- the emulated HPU (hpu_*.cpp) -----------------------------------------------------------------------------

typedef struct {
  int32_t num_devices; // 1 to VT_HPU_MAX_DEVICES
  uint64_t dtypes;     // bit n is set if tensors may have the dtype that c10 numbers n
  // Writes why a dtype is refused to `text`: at most `capacity` bytes, the last of them 0.
  void (*explain_dtype)(int32_t dtype, char *text, size_t capacity);
} vt_hpu_options;

// Registers the emulator as libtorch's back end for DeviceType::HPU; once per process, after vt_set_cpu_allocator.
// Fails if there is another HPU back end.
vt_error *vt_hpu_emulator_init(const vt_hpu_options *options);
// To be called once after a library that registers an HPU back end was loaded. Fails if it registered none. Supplies
// what libtorch needs beyond what the library brings.
vt_error *vt_hpu_adopt_plugin(void);
// To be called with a block's twin, if it has one, before the block goes back to the system.
void vt_hpu_drop_twin(void *twin);
// How many results of operators had to be copied because their memory was not of the device.
uint64_t vt_hpu_copied_outputs(void);
// Calls each operator that has a CPU kernel with several made-up arguments, on the CPU and on hpu:0. report(data, name,
// null) tells of a call that gave the same bytes, report(data, name, text) of one that did not; on this thread, and an
// operator may be reported several times. Operators that take none of the arguments are not reported. Seeds libtorch.
vt_error *vt_hpu_compare_operators(void (*report)(void *data, const char *op, const char *difference), void *data);

// ---- graphs (graph_*.cpp) -------------------------------------------------------------------------------------------

// Operators of a thread, below autograd, in the order in which they ran.
typedef struct vt_recording vt_recording;

// Operators of this thread are recorded until the end; they run all the same. Backward must run on this thread.
vt_error *vt_recording_begin(void);
vt_error *vt_recording_end(vt_recording **recording);
void vt_recording_free(vt_recording *recording);
// Lets go of the memory of what outlived the recording; it cannot be made ready any more, only compared.
void vt_recording_forget_results(vt_recording *recording);
int32_t vt_recording_is_on(void);
// Operators of this thread run unrecorded from now on, or are recorded again. Gives whether they ran unrecorded before.
int32_t vt_recording_pause(int32_t pauses);
// What follows cannot be replayed; the first reason counts. Nothing if nothing is being recorded, here and below.
void vt_recording_refuse(const char *reason);
// Where the operators that follow are, for messages.
void vt_recording_set_scope(const char *scope);
// Gives the recording as JSON, during the call. What it and its peers alone hold is a constant; peers are recordings of
// the same capture, itself among them.
vt_error *vt_recording_describe(const vt_recording *recording, const vt_recording *const *peers, size_t num_peers,
                                void (*take)(void *data, const char *text), void *data);
// Hash of what a buffer holds that was there before.
uint64_t vt_recording_hash(const vt_recording *recording, size_t buffer);
// Index of the memory of a tensor among the recording's buffers; -1 if no operator touched it.
vt_error *vt_recording_buffer_of(const vt_recording *recording, vt_tensor tensor, int32_t *buffer);

#define VT_GRAPH_NOWHERE UINT64_MAX

typedef struct {
  const uint8_t *runs;            // per node: 0 if it is left out
  const uint64_t *buffer_offsets; // per buffer: its place in the arena; VT_GRAPH_NOWHERE if it keeps its memory
  const uint64_t *block_offsets;  // per block of all nodes: the same for what a kernel takes and gives back
  const uint8_t *constants;       // per buffer: 1 if nobody need hold it but the graph
  uint64_t arena_bytes;           // before each place there is room for a block header
  int32_t uses_out_variants;      // calls variants that write to given tensors where there are real ones
  const vt_tensor *inputs;        // tensors that a replay may be given others for
  size_t num_inputs;
  const vt_tensor *outputs;       // results that each replay makes in memory of their own, for the caller
  size_t num_outputs;
} vt_graph_plan;

// A recording made ready: its kernels are called over memory that never moves.
typedef struct vt_graph vt_graph;

// Once per recording.
vt_error *vt_graph_build(vt_recording *recording, const vt_graph_plan *plan, vt_graph **graph);
void vt_graph_free(vt_graph *graph);
// The first buffer that was there before the recording and is gone, or has other memory now; -1 if all are there.
int32_t vt_graph_gone_buffer(const vt_graph *graph);
// To be called if no buffer is gone. `inputs` stand for those of the plan, during the call; null: the recorded ones.
// `outputs` has room for those of the plan.
vt_error *vt_graph_replay(vt_graph *graph, const vt_tensor *inputs, size_t num_inputs, vt_tensor *outputs);
// The node whose result had another shape in a replay that failed than when it was recorded; -1 if there is none.
int32_t vt_graph_misfit(const vt_graph *graph);

typedef struct {
  uint64_t replays;
  uint64_t moved_results; // results that had to be copied to their place, since the kernel put them elsewhere
  uint64_t pool_blocks;   // blocks that kernels took from a pool, since the plan had none of that size for them
} vt_graph_stats;
// Counts of all replays so far.
void vt_graph_get_stats(const vt_graph *graph, vt_graph_stats *stats);

// ---- kernels of the CPU that are written in Rust (kernels*.cpp) -------------------------------------------------------

enum vt_float : int32_t { VT_FLOAT32 = 0, VT_BFLOAT16 = 1 };

// out = a b, or out += a b, of matrices of one dtype, `batches` times. Strides in elements, of batch, row and column.
typedef struct {
  int64_t batches, rows, columns, depth;
  void *out;
  const void *a, *b;
  int64_t out_strides[3], a_strides[3], b_strides[3];
  int32_t adds;
} vt_product;

// A tensor [batch, head, row, dim] with dim next to each other; strides in elements, of batch, head and row.
typedef struct {
  void *data;
  int64_t strides[3];
} vt_rows;

// grad_* are null in the forward pass. The rows of log_sum_exp are numbers.
typedef struct {
  int32_t dtype, is_causal;
  double scale;
  int64_t batches, heads, queries, keys, dim;
  vt_rows query, key, value, out, grad_out, grad_query, grad_key, grad_value;
  vt_rows log_sum_exp; // float32
} vt_attention;

// A convolution of images without groups or dilation, channels last in memory. Pairs are of height and width.
typedef struct {
  int32_t dtype;
  int32_t is_channels_last; // whether input or weight are so for the caller; else they are brought to it
  int64_t images, in_channels, out_channels;
  int64_t in_size[2], out_size[2], kernel[2], stride[2], padding[2];
} vt_convolution;

// What is computed of a convolution.
enum vt_convolves : int32_t { VT_OUTPUT = 1, VT_INPUT_GRAD = 2, VT_WEIGHT_GRAD = 4 };

// Max-pooling of `[images, height, width, channels]` by windows of 2 x 2, each element once: height and width are even.
// Where the channels are not last in memory, each plane is an image of one channel.
typedef struct {
  int32_t dtype;
  int64_t images, height, width, channels;
} vt_max_pool;

// Batch norm in training of `[pixels, channels]`. The other pointers are of float32 numbers, one for each channel, null
// where the norm has none.
typedef struct {
  int32_t dtype;
  int64_t pixels, channels;
  double momentum, eps;
  const void *input;
  const float *weight, *bias;
  float *running_mean, *running_var; // brought up to date
  float *mean, *invstd;              // of the batch; written forward, read backward
} vt_batch_norm;

// The state of libtorch's generator of the CPU: numbers left in `words` + 1, and the next one.
typedef struct {
  int32_t left;
  uint32_t next;
  uint32_t *words; // 624
} vt_mt19937;

// What became of a call. A declined one is libtorch's; a product may have written to `out` before it is declined.
enum vt_kernel_status : int32_t { VT_KERNEL_FAILED = -1, VT_KERNEL_DECLINED = 0, VT_KERNEL_DONE = 1 };

// Null where libtorch's own is to be kept. All give a vt_kernel_status, if nothing else is said; none unwinds. Matrices of
// elements are dense.
typedef struct {
  // Copies the message of the last call that failed on this thread, and gives its vt_error_kind.
  int32_t (*failure)(char *text, size_t len);
  int32_t (*product)(const vt_product *product); // of float32
  int32_t (*product_bf16)(const vt_product *product);
  int32_t (*gelu)(int32_t dtype, int32_t is_tanh, const void *input, void *output, int64_t len);
  int32_t (*gelu_backward)(int32_t dtype, int32_t is_tanh, const void *grad, const void *input, void *output,
                           int64_t len);
  // `indices` count the pixels of their image.
  int32_t (*max_pool2d)(const vt_max_pool *pool, const void *input, void *output, int64_t *indices);
  int32_t (*max_pool2d_backward)(const vt_max_pool *pool, const void *grad, const int64_t *indices, void *output);
  // The output may be the first input.
  int32_t (*relu_bf16)(const void *input, void *output, int64_t len);
  int32_t (*relu_backward_bf16)(const void *grad, const void *result, void *output, int64_t len);
  int32_t (*add_bf16)(int32_t dtype, const void *a, const void *b, void *output, int64_t len); // `dtype` of all but b
  // From this dtype to the other.
  int32_t (*convert)(int32_t dtype, const void *input, void *output, int64_t len);
  // Each element 1 with probability p, else 0.
  int32_t (*bernoulli)(int32_t dtype, vt_mt19937 *generator, double p, void *output, int64_t len);
  int32_t (*attention)(const vt_attention *attention);
  int32_t (*attention_backward)(const vt_attention *attention);
  // Whether the gradient of the weights is to be one product for each tap of the kernel: 1, 0, or VT_KERNEL_FAILED.
  int32_t (*convolves_by_taps)(const vt_convolution *convolution);
  // Which of the following are to compute a convolution, as vt_convolves, or VT_KERNEL_FAILED; null for none ever.
  int32_t (*convolves)(const vt_convolution *convolution);
  // Of dense tensors with the channels last; `bias` may be null.
  int32_t (*convolution)(const vt_convolution *convolution, const void *input, const void *weight, const void *bias,
                         void *output);
  int32_t (*convolution_input_grad)(const vt_convolution *convolution, const void *grad, const void *weight,
                                    void *output);
  int32_t (*convolution_weight_grad)(const vt_convolution *convolution, const void *grad, const void *input,
                                     void *output);
  // Declined, with nothing written but mean and invstd, where a moment is not finite.
  int32_t (*batch_norm)(const vt_batch_norm *norm, void *output);
  // `output` is null if the gradient of the input is not wanted.
  int32_t (*batch_norm_backward)(const vt_batch_norm *norm, const void *grad, void *output, float *grad_weight,
                                 float *grad_bias);
} vt_kernels;

// Puts the kernels in the place of libtorch's, once per process. They live as long as it.
vt_error *vt_install_kernels(const vt_kernels *kernels);

// ---- CUDA graphs (cuda_graph.cpp) -----------------------------------------------------------------------------------

// A graph of libtorch's CUDA library, which must be loaded.
typedef struct vt_cuda_graph vt_cuda_graph;
// Captures what this thread does on the device from now on, on a stream of its own.
vt_error *vt_cuda_graph_begin(int32_t device_index, vt_cuda_graph **graph);
// Ends the capture, on the thread that began it.
vt_error *vt_cuda_graph_end(vt_cuda_graph *graph);
// On the current stream, after the capture has ended.
vt_error *vt_cuda_graph_replay(vt_cuda_graph *graph);
void vt_cuda_graph_free(vt_cuda_graph *graph);
}
