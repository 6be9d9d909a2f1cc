//! Kernels for the CPU that take the place of libtorch's where those leave time on the table: products, convolutions,
//! attention, batch norm and max-pooling with the channels last, GELU, ReLU, sums, random masks, steps of optimizers. And casts to
//! float8, which libtorch has not got with a scale and Gaudi's largest number.
//!
//! Plain loops over slices, which the compiler turns into vector instructions ([`run_vectorized`]), and products by
//! AVX-512 and AMX. Nothing here knows libtorch: what kernels need from the program that has them is its
//! [`Host`].

mod attention;
mod choice;
mod convolution;
mod element;
mod elementwise;
mod float8;
mod held;
mod host;
mod kernel;
mod machine;
mod math;
mod memory;
mod norm;
mod pool;
mod processor;
mod product;
mod random;
mod scratch;
mod threads;
mod update;
mod views;

pub use attention::cached::{CacheFormat, CachedAttention, CachedRows, attend_cached};
pub use attention::factor::{Factor, FactorOf, FactorScratch};
pub use attention::head::{AttentionHead, GradHead};
pub use attention::heads::{Attention, HeadTensor, attention, attention_backward};
pub use attention::passes::AttentionScratch;
pub use attention::rows::Rows;
pub use choice::{
    AnyRow, ConvolutionKernel, FactorKernel, InForce, Operator, Part, ProductKernel, ProductShape,
    convolution_kernel, convolves, factor_kernel, in_force, multiplies, product_kernel, rows, serves,
};
pub use convolution::convolve::{convolution, convolution_input_grad, convolution_weight_grad};
pub use convolution::patches::{Axis, Patches};
pub use convolution::sizes::Convolution;
pub use element::{Bf16, Element, F16};
pub use elementwise::chain::{Chain, ChainInput, ChainOp, ChainOutput, ChainStep};
pub use elementwise::gelu::{Gelu, GeluBackward};
pub use elementwise::operators::{add, add_up, convert, gelu, gelu_backward, relu, relu_backward};
pub use elementwise::pointwise::{
    Add, AddUp, AllFinite, Convert, Map, MapOnto, Pointwise, Relu, ReluBackward,
};
pub use float8::cast::{Float8Format, from_float8, largest_magnitude, to_float8};
pub use float8::format::{E4m3, E5m2, Float8, decode, encode, encode_stochastic};
pub use float8::scale::new_scale;
pub use held::Held;
pub use host::{Host, Memory, loaded_symbol, set_host};
pub use kernel::{Kernel, blocks};
pub use machine::{Machine, ask_for_all, choose_as};
pub use memory::{LINE, OutOfMemory, sized, zeros};
pub use norm::batch_norm::{BatchNorm, BatchNormGrads, batch_norm, batch_norm_backward};
pub use norm::loops::{BatchNormBackward, GradSums, Moments, Normalize};
pub use pool::{MaxPool2d, MaxPool2dBackward, RowPairs, max_pool2d, max_pool2d_backward};
pub use processor::amx::{has_amx, has_described_amx, has_undescribed_amx};
pub use processor::{has_avx512, has_vectors, has_wide_units, is_intel, prefetch, run_vectorized};
pub use product::amx::{Tiles, has_tiles};
pub use product::batched::{BatchedProduct, multiply_batches};
pub use product::float8::{multiplies_bf16, multiplies_float8, multiply_bf16, multiply_by_float8};
pub use product::matrix::{Matrix, MatrixMut};
pub use product::mkl::has_mkl_bf16;
pub use product::multiply::multiply;
pub use product::round::{Addend, RoundRows};
pub use product::strip::{StripFactor, has_bf16_products, multiply_by_strips};
pub use product::strips::{Packed, Strips, has_strips};
pub use product::transpose::Turn;
pub use random::{Bernoulli, Mt19937, bernoulli};
pub use scratch::{end_window, release_idle, scratch_bytes};
pub use threads::parallel_for;
pub use update::numbers::{Numbers, NumbersMut};
pub use update::pass::{Update, update};
pub use update::rules::{AdagradRule, AdamRule, LionRule, SgdRule, UpdateRule};
pub use views::{Dtype, Floats, FloatsMut, slice_mut_of, slice_of};

/// Whether the loops are compiled with optimization; without it libtorch's are much faster.
pub const IS_OPTIMIZED: bool = cfg!(optimized);
