// Kernels of the CPU that are written in Rust. See voltaic.h for errors, ownership and threads.
#pragma once

#include "voltaic.h"

extern "C" {

// ---- kernels of the CPU that are written in Rust ----

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

} // extern "C"
