// Kernels of the CPU that are written in Rust. See voltaic.h for errors, ownership and threads.
#pragma once

#include "tensor/abi.h"

extern "C" {

// ---- kernels of the CPU that are written in Rust ----

enum vt_float : int32_t { VT_FLOAT32 = 0, VT_BFLOAT16 = 1, VT_FLOAT16 = 2 }; // float16 in updates alone

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

// Keys or values of attention with a cache: the newest rows, [batch, head, dim] by strides in numbers, and all, [batch, head, slot, dim],
// dense. A number has 4 bytes, 2 (bfloat16), or 1 of a format of vt_float8, which is multiplied by `scale`.
typedef struct {
  void *rows;
  int64_t strides[2];
  void *cache;
  int32_t bytes, format;
  int64_t dim;
  float scale;
} vt_cached_rows;

// Attention of the newest token of each sequence, whose key and value go to a slot of the cache. `positions` are how many tokens of the
// sequence lie in the slots before.
typedef struct {
  int32_t dtype; // of query and out
  float scale;
  int64_t batches, heads, capacity, slot;
  const int64_t *positions;
  void *query;
  int64_t strides[2]; // of the query, by batch and head
  void *out;          // dense
  vt_cached_rows keys, values;
} vt_cached_attention;

// A convolution of images without groups or dilation, channels last in memory. Pairs are of height and width.
typedef struct {
  int32_t dtype;
  int32_t is_channels_last; // whether input or weight are so for the caller; else they are brought to it
  int64_t images, in_channels, out_channels;
  int64_t in_size[2], out_size[2], kernel[2], stride[2], padding[2];
} vt_convolution;

// A step of a chain of operators: `op` of kernels::ChainOp on two registers. Those of the inputs come first, then one for each step.
typedef struct {
  int32_t op, a, b;
  float number;
} vt_chain_step;

// `period` numbers of a vt_float, which repeat; 0: one for each row. Of an output so many are written, from a register: all, the sums
// over the rows, or the first of each row.
typedef struct {
  void *data;
  int64_t period;
  int32_t dtype, from;
} vt_chain_tensor;

typedef struct {
  const vt_chain_step *steps;
  size_t num_steps;
  const vt_chain_tensor *inputs;
  size_t num_inputs;
  const vt_chain_tensor *outputs;
  size_t num_outputs;
  int64_t len;
  int64_t row; // numbers of a row; 0 if nothing goes by rows
} vt_chain_call;

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

// A step of an optimizer: Adam (AdamW if decoupled) with the states exp_avg, exp_avg_sq and, with amsgrad, their maxima; SGD
// with a buffer if momentum is not 0; Adagrad with sums of squares; Lion with exp_avg.
enum vt_update_kind : int32_t { VT_ADAM = 0, VT_SGD = 1, VT_ADAGRAD = 2, VT_LION = 3 };
typedef struct {
  int32_t kind;
  double lr, weight_decay, beta1, beta2, eps, momentum, dampening, lr_decay;
  int32_t decoupled, amsgrad, nesterov, maximize, is_first_step;
} vt_update_rule;

// Numbers of a tensor in their order in memory; null for none.
typedef struct {
  void *data;
  int32_t dtype;
} vt_numbers;

// A parameter in a step.
typedef struct {
  int64_t len;
  vt_numbers weights, grad, states[3];
  vt_numbers rounded; // of 16 bits, written with the new weights
  double step;        // of Adam the count with this step, infinity for no correction; of Adagrad that of steps before
} vt_update;

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
  int32_t (*attend_cached)(const vt_cached_attention *attention);
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
  // What is written is memory of its own.
  int32_t (*update)(const vt_update_rule *rule, const vt_update *updates, size_t len);
  // An output of all numbers may lie where an input of its format and of all numbers does.
  int32_t (*chain)(const vt_chain_call *chain);
} vt_kernels;

// Has gradients of convolutions' weights be 0 where oneDNN leaves them unwritten; once per process.
vt_error *vt_install_convolution_grads(void);

// Puts the kernels in the place of libtorch's, once per process. They live as long as it.
vt_error *vt_install_kernels(const vt_kernels *kernels);

// One step of a kernel in one pass over memory. Weights, gradients and states may have float32, bfloat16 or float16.
// `rounded` is null or has a tensor of 16 bits for each parameter, undefined for none. `steps` as in vt_update, or null for
// rules that do not count. is_done: 1, with `grads` emptied, or 0 if there is no kernel for these tensors, with nothing done.
vt_error *vt_update_lists(const vt_list *params, vt_list *grads, const vt_list *const *states, size_t num_states,
                          const vt_list *rounded, const double *steps, const vt_update_rule *rule, int32_t *is_done);

// The operator voltaic::attend_cached, which is there with the kernel of this name: output [batch, heads, 1, dim]. `query`, `key` and
// `value` are so, caches [batch, heads, slot, dim]; `slot` has one int64, `positions` one for each sequence. The inverses of scales may be
// null, or have one number. The output is the caller's.
typedef struct {
  vt_tensor query, key, value, keys, values, slot, positions, key_scale_inv, value_scale_inv;
} vt_cached_tensors;
vt_error *vt_attend_cached(const vt_cached_tensors *tensors, vt_tensor *out);

// ---- float8 ----

// Numbers of 8 bits as torch has them; casts to e4m3 end at 240.
enum vt_float8 : int32_t { VT_E4M3 = 0, VT_E5M2 = 1 };

// As vt_kernels; `dtype` is VT_FLOAT32 or VT_BFLOAT16.
typedef struct {
  int32_t (*failure)(char *text, size_t len);
  // Casts input * scale, stochastically with a seed, else to the nearest; amax is the largest magnitude of the input.
  int32_t (*cast)(int32_t dtype, const void *input, int64_t len, int32_t format, float scale, const uint64_t *seed, void *output,
                  float *amax);
  int32_t (*largest)(int32_t dtype, const void *input, int64_t len, float *amax);
  // The numbers times a power of two.
  int32_t (*widen)(int32_t format, const void *input, int64_t len, float scale, int32_t dtype, void *output);
  int32_t (*new_scale)(float amax, float before, int32_t format, int32_t margin, float *scale);
  // Rows of float32 times the rows of a matrix of codes, `depth` numbers each: output [rows, columns]. `is_known` is 0 if they are too many.
  // Null asks that.
  int32_t (*rows)(const float *input, int64_t rows, const void *codes, int64_t columns, int64_t depth, int32_t format, float *output,
                  int32_t *is_known);
  // Of bfloat16 factors with a dense result in float32; declined if the processor is not faster at it than at float32. Null asks that.
  int32_t (*product)(const vt_product *product);
} vt_float8_kernels;

// Defines the operators voltaic::fp8_*, on the CPU and emulated HPUs; once per process, before those below.
vt_error *vt_install_float8(const vt_float8_kernels *kernels);

// The scales of some tensors: [tensors] float32 twice, [rows, tensors] float32, [1] int32, all dense.
typedef struct {
  vt_tensor scale, scale_inv, amax_history, amax_history_index;
} vt_fp8_meta;

// Casts with the scale in `slot`, and if it measures writes the largest magnitude to the row of the history. `dtype` is c10's number.
// Both results are the caller's.
vt_error *vt_fp8_cast(vt_tensor input, const vt_fp8_meta *meta, int64_t slot, int32_t measures, int32_t dtype, int32_t is_stochastic,
                      vt_tensor *codes, vt_tensor *scale_inv);
// Casts with a scale from the input itself, of all or of each row.
vt_error *vt_fp8_cast_current(vt_tensor input, int32_t by_row, int32_t dtype, int64_t margin, int32_t is_stochastic, vt_tensor *codes,
                              vt_tensor *scale_inv);
// New scales from the history: its row, or with uses_max the largest of all; then the next row.
vt_error *vt_fp8_update(const vt_fp8_meta *meta, int32_t dtype, int64_t margin, int32_t uses_max);
// The numbers of codes in float32 or bfloat16, exactly.
vt_error *vt_fp8_from(vt_tensor codes, int32_t dtype, vt_tensor *numbers);
// (a b) a_scale_inv b_scale_inv + bias, of float8 matrices, or without a bias of batches of them; the inverses have one number, or one for each row of a or column of b.
// `bias` may be null.
vt_error *vt_fp8_mm(vt_tensor a, vt_tensor b, vt_tensor a_scale_inv, vt_tensor b_scale_inv, vt_tensor bias, int32_t out_dtype,
                    vt_tensor *out);

} // extern "C"
