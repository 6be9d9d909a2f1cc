//! Which kernel serves which operator, number format, shape and processor: one table, and by which measurement each row is
//! there. Where no row fits, an operator is libtorch's.
//!
//! Times beside libtorch's are those of `cargo bench -p voltaic --bench kernels`, times between kernels of this crate those of
//! `cargo bench -p voltaic-kernels`, if no other measurement is named; docs/kernels.md has them in full.

use std::fmt;

use crate::convolution::sizes::Convolution;
use crate::machine::Machine;
use crate::processor::lanes::LANES;
use crate::product::amx::has_tiles;
use crate::product::mkl::takes;
use crate::product::strips::COLUMNS;
use crate::views::Dtype;

/// A row of a table: a kernel, for a number format, processors and shapes.
struct Row<K, S> {
    kernel: K,
    dtype: Dtype,
    on: fn(&Machine) -> bool,
    of: fn(&S) -> bool,
    /// Why it is there.
    measured: &'static str,
}

use Dtype::{Bfloat16, Float32};

// ---- products of matrices ----

/// What computes a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProductKernel {
    /// AVX-512, from the columns of the right factor as they lie.
    Dots,
    /// AVX-512, from a right factor in strips.
    Strips,
    /// AMX, from numbers of float32 that are split in three.
    Split,
    /// The gemm crate.
    Gemm,
    /// The same, with the columns of the right factor as rows.
    GemmOfTurnedRight,
    /// The same, with the rows of the left factor as columns.
    GemmOfTurnedRows,
    /// The MKL, whose sums are rounded.
    Mkl,
}

/// Sizes and strides of a product's matrices; strides from row to row and from column to column.
#[derive(Debug, Clone, Copy)]
pub struct ProductShape {
    /// Products that are alike.
    pub batches: usize,
    /// Of the left factor and the result.
    pub rows: usize,
    /// Of the right factor and the result.
    pub columns: usize,
    /// Numbers to sum up.
    pub depth: usize,
    /// Strides of the result.
    pub out: [isize; 2],
    /// Of the left factor.
    pub a: [isize; 2],
    /// Of the right factor.
    pub b: [isize; 2],
}

/// Columns of a right factor that are longer, and lie in one piece, are turned before gemm, which is slow at it.
const LONG: usize = 512;
/// The same with fewer than [`MANY_ROWS`].
const LONG_FOR_FEW_ROWS: usize = 256;
/// With fewer rows it is cheaper to turn those of the left factor and of the result.
const MANY_ROWS: usize = 128;
/// With still fewer libtorch, which reads the right factor as it is, is faster.
const FEW_ROWS: usize = 16;
/// With more rows it pays to bring the right factor into an order of its own.
const MOST_ROWS_FOR_DOTS: usize = 8;
/// Numbers of the right factor from which on reading it decides.
const WORTH_DOTS: usize = 1 << 14;
/// With fewer rows, or numbers to sum up, it costs more to bring the right factor into strips than they save.
const WORTH_STRIPS: usize = 8;
/// The smallest side of a product for which it pays to split the factors.
const WORTH_SPLITTING: usize = 64;
/// The fewest multiplications for which it does.
const PRODUCTS_WORTH_SPLITTING: usize = 1 << 22;

impl ProductShape {
    /// Whether the result is rows that do not overlap, of numbers that are next to each other.
    fn writes_rows(&self) -> bool {
        let [down, right] = self.out;
        (self.columns == 1 || right == 1) && (self.rows == 1 || down >= self.columns as isize)
    }

    fn is_worth_strips(&self) -> bool {
        self.rows >= WORTH_STRIPS && self.depth >= WORTH_STRIPS && self.writes_rows()
    }

    fn is_worth_splitting(&self) -> bool {
        let shape = [self.rows, self.columns, self.depth];
        shape.iter().all(|&side| side >= WORTH_SPLITTING)
            && shape.iter().product::<usize>() >= PRODUCTS_WORTH_SPLITTING
            && self.out[1] == 1
            && self.a.contains(&1)
            && self.b.contains(&1)
    }

    /// Whether few rows are multiplied with columns that lie in one piece each, as those of a weight do in a layer.
    fn is_for_dots(&self) -> bool {
        self.batches == 1
            && self.rows <= MOST_ROWS_FOR_DOTS
            && self.columns * self.depth >= WORTH_DOTS
            && (self.a[1] == 1 && self.b[0] == 1)
            && self.b[1] >= self.depth as isize
    }

    fn has_long_columns(&self) -> bool {
        let long = if self.rows < MANY_ROWS { LONG_FOR_FEW_ROWS } else { LONG };
        let [down, right] = self.b;
        down == 1 && right != 1 && self.depth > long
    }

    /// Whether a matrix lies as the MKL takes it: its rows in one piece each, or its columns.
    fn is_for_mkl([rows, columns]: [usize; 2], [down, right]: [isize; 2]) -> bool {
        takes([rows, columns], [down as usize, right as usize])
    }
}

static PRODUCTS: [Row<ProductKernel, ProductShape>; 9] = [
    Row {
        kernel: ProductKernel::Dots,
        dtype: Float32,
        on: |machine| machine.has_strips,
        of: |shape| shape.is_for_dots(),
        measured: "Xeon with AMX, 8 tokens of a GPT-mini at a time: 29 % of the step, by the MKL 43 %",
    },
    Row {
        kernel: ProductKernel::Dots,
        dtype: Bfloat16,
        on: |machine| machine.has_strips,
        of: |shape| shape.is_for_dots(),
        measured: "Xeon with AMX, a token of a GPT-mini: 0.57 of the processor time of the step by oneDNN, 8 at a time 0.78",
    },
    Row {
        kernel: ProductKernel::Strips,
        dtype: Float32,
        on: |machine| machine.has_wide_units,
        of: ProductShape::is_worth_strips,
        measured: "Zen 5: 210 to 232 of 240 to 253 GFLOP/s, the gemm crate 190 to 220; on a Zen 4 both alike",
    },
    Row {
        kernel: ProductKernel::Split,
        dtype: Float32,
        on: |machine| machine.has_tiles,
        of: ProductShape::is_worth_splitting,
        measured: "Xeon with AMX: 1.1 to 1.8 times as fast as the MKL",
    },
    Row {
        kernel: ProductKernel::Gemm,
        dtype: Float32,
        on: |machine| !machine.keeps_intels(),
        of: |shape| !shape.has_long_columns(),
        measured: "Zen 5: 190 to 220 GFLOP/s, the MKL, which does not use its vectors of 512 bits, 100",
    },
    Row {
        kernel: ProductKernel::GemmOfTurnedRight,
        dtype: Float32,
        on: |machine| !machine.keeps_intels(),
        of: |shape| shape.has_long_columns() && shape.rows >= MANY_ROWS && shape.batches == 1,
        measured: "gemm alone reads long columns number by number: `linear 1536 to 384, 1024 rows: forward`",
    },
    Row {
        kernel: ProductKernel::GemmOfTurnedRows,
        dtype: Float32,
        on: |machine| !machine.keeps_intels(),
        of: |shape| {
            shape.has_long_columns()
                && (FEW_ROWS..MANY_ROWS).contains(&shape.rows)
                && shape.batches == 1
                && shape.out == [shape.columns as isize, 1]
                && shape.a.contains(&1)
        },
        measured: "turning few rows costs less than the columns: `linear 784 to 256, 64 rows: forward`",
    },
    Row {
        kernel: ProductKernel::Strips,
        dtype: Bfloat16,
        on: Machine::has_wide_bf16_products,
        of: ProductShape::is_worth_strips,
        measured: "Zen 5: 450 of 480 to 505 GFLOP/s, as fast as oneDNN when large, up to 11 times as fast when small",
    },
    Row {
        kernel: ProductKernel::Mkl,
        dtype: Bfloat16,
        on: |machine| machine.takes_bf16() && !machine.has_wide_bf16_products(),
        of: |shape| {
            shape.writes_rows()
                && ProductShape::is_for_mkl([shape.rows, shape.depth], shape.a)
                && ProductShape::is_for_mkl([shape.depth, shape.columns], shape.b)
        },
        measured: "oneDNN without its instructions 1 to 37 GFLOP/s, the MKL 100 (AVX2), 160 (AVX-512), 1000 (AMX)",
    },
];

/// What computes a product if there is memory for it; none if it is libtorch's, as one without numbers is.
pub fn product_kernel(dtype: Dtype, shape: &ProductShape) -> Option<ProductKernel> {
    product_kernels(dtype, shape).next()
}

/// Those that can compute a product, the fastest first; the next one is for want of memory.
pub(crate) fn product_kernels(dtype: Dtype, shape: &ProductShape) -> impl Iterator<Item = ProductKernel> {
    product_kernels_on(Machine::here(), dtype, shape)
}

fn product_kernels_on(
    machine: Machine,
    dtype: Dtype,
    shape: &ProductShape,
) -> impl Iterator<Item = ProductKernel> {
    let is_empty = [shape.batches, shape.rows, shape.columns, shape.depth].contains(&0);
    let fits = move |row: &&Row<_, _>| row.dtype == dtype && (row.on)(&machine) && (row.of)(shape);
    let rows = PRODUCTS.iter().filter(move |row| !is_empty && fits(row));
    rows.map(|row| row.kernel)
}

/// Whether any products of this format are computed here.
pub fn multiplies(machine: &Machine, dtype: Dtype) -> bool {
    PRODUCTS.iter().any(|row| row.dtype == dtype && (row.on)(machine))
}

/// Whether products of float32 matrices in slices are the MKL's, or gemm's: the MKL is at its best on Intel's processors.
pub(crate) fn prefers_mkl() -> bool {
    let machine = Machine::here();
    machine.is_intel && machine.has_mkl
}

// ---- convolutions ----

/// What is computed of a convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Its output.
    Output,
    /// The gradient of its input.
    InputGrad,
    /// That of its weight.
    WeightGrad,
}

/// What computes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConvolutionKernel {
    /// Winograd's minimal filtering.
    Tiles,
    /// A product for each tap of the kernel, of images and weights with the channels last.
    Taps,
    /// Products of the patches that outputs see.
    Patches,
}

/// A part of a convolution.
struct PartOf {
    part: Part,
    sizes: Convolution,
}

/// With fewer tiles in all, transforming the weights takes longer than it saves.
const FEWEST_TILES: usize = 16;
/// Of kernels, that a tile of bfloat16 is worth transforming for.
const WEIGHTS_PER_TILE: usize = 4096;
/// Inputs and outputs with which products of tiles by AMX are faster, those that their factors are split for included: of
/// outputs and gradients of inputs, and of gradients of weights.
const CHANNELS_BY_AMX: [usize; 2] = [64, 128];

impl PartOf {
    fn is_by(&self, kernel: [usize; 2]) -> bool {
        self.sizes.kernel == kernel
    }

    /// Of an output image.
    fn pixels(&self) -> usize {
        self.sizes.out_size.iter().product()
    }

    /// Of input and output channels.
    fn pairs(&self) -> usize {
        self.sizes.in_channels * self.sizes.out_channels
    }

    /// Whether there is a formula of tiles for it, and numbers of pixels fill strips of columns.
    fn is_for_tiles(&self) -> bool {
        let Convolution { stride, padding, in_channels, out_channels, .. } = self.sizes;
        let width = if self.part == Part::Output { out_channels } else { in_channels };
        self.sizes.are_channels_last
            && self.is_by([3, 3])
            && stride == [1, 1]
            && padding[0] == padding[1]
            && padding[0] <= 2
            && [in_channels, out_channels].iter().all(|channels| *channels > 0 && channels % LANES == 0)
            && width >= COLUMNS
    }

    /// Tiles of so many rows and columns of outputs, in all images of a size.
    fn tiles(&self, size: [usize; 2], side: usize) -> usize {
        self.sizes.images * size.iter().map(|pixels| pixels.div_ceil(side)).product::<usize>()
    }

    fn has_tiles_in_float32(&self) -> bool {
        self.tiles(self.sizes.out_size, 2) >= FEWEST_TILES
    }

    /// Whether there are tiles enough, filled enough.
    fn has_tiles_in_bfloat16(&self) -> bool {
        let size = if self.part == Part::InputGrad { self.sizes.in_size } else { self.sizes.out_size };
        let fewest = match self.part {
            Part::WeightGrad => FEWEST_TILES,
            Part::Output | Part::InputGrad => FEWEST_TILES.max(self.pairs() / WEIGHTS_PER_TILE),
        };
        let tiles = self.tiles(size, 4);
        tiles >= fewest && 4 * self.sizes.images * size[0] * size[1] >= 3 * 16 * tiles
    }

    /// oneDNN is slow at the weights of many channels on small images; the taps at their border leave out work, too.
    fn is_for_taps(&self) -> bool {
        let (pixels, pairs) = (self.pixels(), self.pairs());
        self.part == Part::WeightGrad
            && self.is_by([3, 3])
            && (pixels <= 16 && pairs >= 256 * 256 || pixels <= 64 && pairs >= 512 * 512)
    }

    fn is_for_patches_with_amx(&self) -> bool {
        let is_small = self.pixels() <= 16 && self.pairs() >= 256 * 512;
        let is_weight = self.part == Part::WeightGrad && self.pixels() <= 64 && self.pairs() >= 128 * 256;
        self.is_by([3, 3]) && (is_small || is_weight)
    }

    fn is_for_patches_from_strips(&self) -> bool {
        let is_small = self.pixels() <= 16 && self.pairs() >= 256 * 512;
        let steps = self.sizes.stride == [2, 2];
        let is_weight = self.part == Part::WeightGrad && self.pairs() >= 64 * 128 && steps;
        self.is_by([3, 3]) && self.sizes.are_channels_last && (is_small || is_weight)
    }
}

static CONVOLUTIONS: [Row<ConvolutionKernel, PartOf>; 7] = [
    Row {
        kernel: ConvolutionKernel::Tiles,
        dtype: Float32,
        on: |machine| machine.has_strips,
        of: |part| part.is_for_tiles() && part.has_tiles_in_float32(),
        measured: "16 to 512 channels, Zen 4: 1.2 to 2.4 times as fast as oneDNN, others 0.5 to 0.8 times; \
                   64 to 512 on an Intel 1.4 to 2.6, by AMX 1.7 to 3.9",
    },
    Row {
        kernel: ConvolutionKernel::Tiles,
        dtype: Bfloat16,
        on: |machine| machine.has_strips && !machine.keeps_intels(),
        of: |part| part.is_for_tiles() && part.has_tiles_in_bfloat16(),
        measured: "16 to 512 channels, Zen 4, beside oneDNN with AVX512_BF16: 1.02 to 1.5 times as fast for outputs and \
                   gradients of inputs, 1.1 to 1.9 for those of weights, others 0.5 to 1.07",
    },
    Row {
        kernel: ConvolutionKernel::Taps,
        dtype: Float32,
        on: |_| true,
        of: PartOf::is_for_taps,
        measured: "strides of 1 and 2: 1.04 to 12 times as fast",
    },
    Row {
        kernel: ConvolutionKernel::Taps,
        dtype: Bfloat16,
        on: |machine| machine.has_bf16_products || machine.has_mkl,
        of: PartOf::is_for_taps,
        measured: "strides of 1 and 2: 1.04 to 12 times as fast",
    },
    Row {
        kernel: ConvolutionKernel::Patches,
        dtype: Bfloat16,
        on: Machine::takes_bf16,
        of: |_| true,
        measured: "oneDNN without its instructions 1 to 37 GFLOP/s: Xeon with AMX withheld, 4.1 to 5.6 times as fast",
    },
    Row {
        kernel: ConvolutionKernel::Patches,
        dtype: Bfloat16,
        on: |machine| !machine.takes_bf16() && machine.has_wide_bf16_products(),
        of: PartOf::is_for_patches_from_strips,
        measured: "Zen 5, a stride of 2, and of 1 on images of 4 x 4: 1.17 to 1.5 times as fast as oneDNN, others 0.94 to 1.05",
    },
    Row {
        kernel: ConvolutionKernel::Patches,
        dtype: Bfloat16,
        on: |machine| {
            let is_taken = machine.takes_bf16() || machine.has_wide_bf16_products();
            !is_taken && machine.has_mkl && machine.has_described_amx
        },
        of: PartOf::is_for_patches_with_amx,
        measured: "strides of 1 and 2: 1.4 to 3.4 times as fast as oneDNN with AMX, others 0.3 to 1.1",
    },
];

/// What computes a part of a convolution; none if it is libtorch's, as one without numbers is. Taps are among them if tensors lie as they need it.
pub fn convolution_kernel(sizes: &Convolution, part: Part, may_be_taps: bool) -> Option<ConvolutionKernel> {
    convolution_kernel_on(Machine::here(), sizes, part, may_be_taps)
}

fn convolution_kernel_on(
    machine: Machine,
    sizes: &Convolution,
    part: Part,
    may_be_taps: bool,
) -> Option<ConvolutionKernel> {
    let Convolution { images, in_channels, out_channels, .. } = *sizes;
    let sides = [sizes.in_size, sizes.out_size, sizes.kernel].concat();
    if [images, in_channels, out_channels].contains(&0) || sides.contains(&0) {
        return None;
    }
    let part = PartOf { part, sizes: *sizes };
    let fits = |row: &&Row<_, _>| {
        (may_be_taps || row.kernel != ConvolutionKernel::Taps)
            && row.dtype == sizes.dtype
            && (row.on)(&machine)
            && (row.of)(&part)
    };
    CONVOLUTIONS.iter().find(fits).map(|row| row.kernel)
}

/// Whether any convolution is computed by tiles or patches here.
pub fn convolves(machine: &Machine) -> bool {
    CONVOLUTIONS.iter().any(|row| row.kernel != ConvolutionKernel::Taps && (row.on)(machine))
}

/// Whether the products of patches are from strips, or the MKL's.
pub(crate) fn patches_are_from_strips() -> bool {
    Machine::here().has_wide_bf16_products()
}

/// Whether the products of tiles of such channels are by AMX.
pub(crate) fn tiles_are_by_amx(part: Part, channels: [usize; 2]) -> bool {
    let fewest = CHANNELS_BY_AMX[usize::from(part == Part::WeightGrad)];
    has_tiles() && channels.iter().all(|&channels| channels >= fewest)
}

// ---- attention ----

/// What attention makes of the right factor of a product before it multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FactorKernel {
    /// Strips, for AVX-512, its dot products, or AMX.
    Strips,
    /// Nothing: it is a matrix for the MKL or gemm.
    Matrix,
}

/// Without a row numbers of a format are multiplied in float32.
static FACTORS: [Row<FactorKernel, ()>; 3] = [
    Row {
        kernel: FactorKernel::Strips,
        dtype: Float32,
        on: |machine| machine.has_strips,
        of: |()| true,
        measured: "AVX-512, a head's factors made ready once: Zen 5 5150 to 1420 us, Xeon with AMX 3530 to 2220 us",
    },
    Row {
        kernel: FactorKernel::Matrix,
        dtype: Float32,
        on: |machine| !machine.has_strips,
        of: |()| true,
        measured: "without AVX-512 the MKL and gemm read a matrix as it is",
    },
    Row {
        kernel: FactorKernel::Strips,
        dtype: Bfloat16,
        on: |machine| machine.has_tiles || machine.has_fast_bf16_products(),
        of: |()| true,
        measured: "beside factors of float32: Zen 5 1.5 to 1.8 times as fast, Xeon with AMX 1.1 to 2.6 times",
    },
];

fn factor_kernel_on(machine: &Machine, dtype: Dtype) -> Option<FactorKernel> {
    FACTORS.iter().find(|row| row.dtype == dtype && (row.on)(machine)).map(|row| row.kernel)
}

/// What attention multiplies by: in a format, or in float32 where no row has it.
pub fn factor_kernel(dtype: Dtype) -> FactorKernel {
    let machine = Machine::here();
    let kernel = factor_kernel_on(&machine, dtype).or_else(|| factor_kernel_on(&machine, Float32));
    kernel.unwrap_or(FactorKernel::Matrix)
}

/// Whether attention in float32 multiplies by strips, and not by a matrix as it is.
pub(crate) fn attends_by_strips() -> bool {
    factor_kernel_on(&Machine::here(), Float32) == Some(FactorKernel::Strips)
}

/// Whether attention in bfloat16 multiplies such numbers, and not float32.
pub(crate) fn multiplies_bf16() -> bool {
    factor_kernel_on(&Machine::here(), Bfloat16).is_some()
}

// ---- operators with one kernel, for all shapes that the dispatcher passes on ----

/// An operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operator {
    /// Scaled dot product attention without mask and dropout, and its gradients.
    Attention,
    /// Batch norm in training with the channels last, and its gradients.
    BatchNorm,
    /// Windows of 2 x 2, and the gradient with the channels last.
    MaxPool2d,
    /// And its gradient.
    Gelu,
    /// And its gradient.
    Relu,
    /// A sum of two tensors.
    Add,
    /// A cast.
    Convert,
    /// A random mask.
    Bernoulli,
    /// A step of an optimizer.
    Update,
}

/// Microseconds, libtorch's and these, with a gradient those of both: attention of 4 x 6 heads of 256 keys of 64, images
/// `[32, 64, 32, 32]` (norm) and `[64, 64, 24, 24]` (pooling), all else `[1024, 1536]`.
static OPERATORS: [Row<Operator, ()>; 14] = [
    operator(
        Operator::Attention,
        Float32,
        "Zen 5: 5150, 11790 to 1420, 3500; Xeon with AMX: 3530, 8290 to 2220, 4740",
    ),
    operator(
        Operator::Attention,
        Bfloat16,
        "Zen 5: 5570, 11620 to 970, 2000; Xeon with AMX: 1440, 9390 to 1040, 1930",
    ),
    operator(Operator::BatchNorm, Float32, "Zen 5: 689, 965 to 347, 542; Xeon: 1180, 1560 to 938, 1440"),
    operator(Operator::BatchNorm, Bfloat16, "Zen 5: 600, 1030 to 249, 333; Xeon: 895, 1420 to 540, 743"),
    operator(Operator::MaxPool2d, Float32, "Zen 5: 473, 641 to 233, 250; Xeon: 714, 924 to 586, 590"),
    operator(Operator::MaxPool2d, Bfloat16, "Zen 5: 493, 1090 to 252, 245; Xeon: 737, 1250 to 385, 396"),
    operator(Operator::Gelu, Float32, "Zen 5: 2050, 2170 to 352, 488; Xeon: 2470, 2690 to 512, 705"),
    operator(Operator::Gelu, Bfloat16, "Zen 5: 2200, 2170 to 572, 743; Xeon: 2740, 2890 to 742, 959"),
    operator(Operator::Relu, Bfloat16, "Zen 5: 216, 260 to 57, 92; Xeon: 321, 454 to 212, 338"),
    operator(Operator::Add, Bfloat16, "Zen 5: 258 to 121; Xeon: 367 to 322, with one of float32 979 to 535"),
    operator(Operator::Convert, Bfloat16, "Xeon: 327 to 323 from the cache, from memory 0.7 of the time"),
    operator(
        Operator::Bernoulli,
        Float32,
        "Zen 4: 9138 to 867; where libtorch draws by the MKL, masks are its own",
    ),
    operator(
        Operator::Bernoulli,
        Bfloat16,
        "Zen 4: 9179 to 847; where libtorch draws by the MKL, masks are its own",
    ),
    Row {
        kernel: Operator::Update,
        dtype: Float32,
        on: |machine| cfg!(target_arch = "x86_64") && machine.has_vectors, // rounds as libtorch's loops for AVX2
        of: |()| true,
        measured: "Zen 3: as fast as libtorch in float32; with gradients and weights of bfloat16 beside 86 to 120, libtorch and casts 311 to 338 ms for 1e8 weights",
    },
];

const fn operator(kernel: Operator, dtype: Dtype, measured: &'static str) -> Row<Operator, ()> {
    Row { kernel, dtype, on: |machine| machine.has_vectors, of: |()| true, measured }
}

/// Whether an operator is computed here.
pub fn serves(machine: &Machine, operator: Operator) -> bool {
    OPERATORS.iter().any(|row| row.kernel == operator && (row.on)(machine))
}

// ---- what is in force ----

/// A row of the tables that serves something on a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InForce {
    /// `products`, `convolutions`, `factors of attention` or `operators`.
    pub what: &'static str,
    /// The number format.
    pub dtype: Dtype,
    /// The kernel, for `operators` the operator.
    pub kernel: String,
    /// Why it is there.
    pub measured: &'static str,
}

impl fmt::Display for InForce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {:?} by {}: {}", self.what, self.dtype, self.kernel, self.measured)
    }
}

/// The rows of the tables that serve something on a machine, in the order in which they are asked.
pub fn in_force(machine: &Machine) -> Vec<InForce> {
    rows().into_iter().filter(|row| row.serves(machine)).map(|row| row.entry).collect()
}

/// A row of any of the tables.
#[derive(Debug, Clone)]
pub struct AnyRow {
    /// What it says.
    pub entry: InForce,
    on: fn(&Machine) -> bool,
}

impl AnyRow {
    /// Whether it serves something on a machine.
    pub fn serves(&self, machine: &Machine) -> bool {
        (self.on)(machine)
    }
}

/// All rows of the tables, in the order in which they are asked.
pub fn rows() -> Vec<AnyRow> {
    fn of<K: fmt::Debug, S>(what: &'static str, rows: &[Row<K, S>]) -> Vec<AnyRow> {
        let entry = |row: &Row<K, S>| InForce {
            what,
            dtype: row.dtype,
            kernel: format!("{:?}", row.kernel),
            measured: row.measured,
        };
        rows.iter().map(|row| AnyRow { entry: entry(row), on: row.on }).collect()
    }
    let all = [
        of("products", &PRODUCTS),
        of("convolutions", &CONVOLUTIONS),
        of("factors of attention", &FACTORS),
        of("operators", &OPERATORS),
    ];
    all.concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Machine = Machine {
        has_vectors: true,
        is_intel: false,
        has_strips: false,
        has_wide_units: false,
        has_bf16_products: false,
        has_tiles: false,
        has_described_amx: false,
        has_mkl: true,
        asks_for_all: false,
    };
    const HASWELL: Machine = Machine { is_intel: true, ..NONE };
    const ZEN_3: Machine = NONE;
    const ZEN_4: Machine = Machine { has_strips: true, has_bf16_products: true, ..NONE };
    const ZEN_5: Machine = Machine { has_wide_units: true, ..ZEN_4 };
    const XEON: Machine = Machine {
        is_intel: true,
        has_strips: true,
        has_bf16_products: true,
        has_tiles: true,
        has_described_amx: true,
        ..NONE
    };
    const XEON_WITHOUT_DESCRIPTION: Machine = Machine { has_described_amx: false, ..XEON };
    const ARM: Machine = Machine { has_mkl: false, ..NONE };

    fn product(machine: Machine, dtype: Dtype, [rows, columns, depth]: [usize; 3]) -> Option<ProductKernel> {
        let out = [columns as isize, 1];
        let (a, b) = ([depth as isize, 1], [1, depth as isize]);
        let shape = ProductShape { batches: 1, rows, columns, depth, out, a, b };
        product_kernels_on(machine, dtype, &shape).next()
    }

    #[test]
    fn products_of_a_layer_are_by_what_is_fastest_at_them() {
        use ProductKernel::*;
        let [small, few, layer, large] = [[64, 10, 200], [4, 256, 784], [64, 256, 784], [1024, 384, 1536]];
        for (machine, dtype, expected) in [
            (HASWELL, Float32, [None; 4]),
            (HASWELL, Bfloat16, [Some(Mkl); 4]),
            (ZEN_3, Float32, [Some(Gemm), None, Some(GemmOfTurnedRows), Some(GemmOfTurnedRight)]),
            (ZEN_3, Bfloat16, [Some(Mkl); 4]),
            (ZEN_4, Float32, [Some(Gemm), Some(Dots), Some(GemmOfTurnedRows), Some(GemmOfTurnedRight)]),
            (ZEN_4, Bfloat16, [None, Some(Dots), None, None]),
            (ZEN_5, Float32, [Some(Strips), Some(Dots), Some(Strips), Some(Strips)]),
            (ZEN_5, Bfloat16, [Some(Strips), Some(Dots), Some(Strips), Some(Strips)]),
            (XEON, Float32, [None, Some(Dots), Some(Split), Some(Split)]),
            (XEON, Bfloat16, [None, Some(Dots), None, None]),
            (XEON_WITHOUT_DESCRIPTION, Float32, [None, Some(Dots), Some(Split), Some(Split)]),
            (XEON_WITHOUT_DESCRIPTION, Bfloat16, [Some(Mkl), Some(Dots), Some(Mkl), Some(Mkl)]),
            (ARM, Float32, [Some(Gemm), None, Some(GemmOfTurnedRows), Some(GemmOfTurnedRight)]),
            (ARM, Bfloat16, [None; 4]),
        ] {
            let found = [small, few, layer, large].map(|shape| product(machine, dtype, shape));
            assert_eq!(found, expected, "{dtype:?} on {machine:?}");
            let is_any = expected.iter().any(Option::is_some);
            assert_eq!(multiplies(&machine, dtype), is_any, "{dtype:?} on {machine:?}");
        }
    }

    #[test]
    fn what_has_no_numbers_is_libtorchs() {
        let all = Machine { has_wide_units: true, asks_for_all: true, ..XEON };
        for machine in [HASWELL, ZEN_3, ZEN_4, ZEN_5, XEON, XEON_WITHOUT_DESCRIPTION, ARM, all] {
            for dtype in [Float32, Bfloat16] {
                for side in 0..4 {
                    let mut sizes = [9; 4];
                    sizes[side] = 0;
                    let [batches, rows, columns, depth] = sizes;
                    let (out, a, b) = ([columns as isize, 1], [depth as isize, 1], [1, depth as isize]);
                    let shape = ProductShape { batches, rows, columns, depth, out, a, b };
                    assert_eq!(product_kernels_on(machine, dtype, &shape).next(), None, "{shape:?}");
                }
                for side in 0..6 {
                    let mut sizes = [512, 512, 2, 4, 4, 3];
                    sizes[side] = 0;
                    let [in_channels, out_channels, images, size, out_size, kernel] = sizes;
                    let sizes = Convolution {
                        dtype,
                        are_channels_last: true,
                        images,
                        in_channels,
                        out_channels,
                        in_size: [4, size],
                        out_size: [4, out_size],
                        kernel: [3, kernel],
                        stride: [1, 1],
                        padding: [1, 1],
                    };
                    for part in [Part::Output, Part::InputGrad, Part::WeightGrad] {
                        assert_eq!(convolution_kernel_on(machine, &sizes, part, true), None, "{sizes:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn convolutions_of_resnet_are_by_what_is_fastest_at_them() {
        use ConvolutionKernel::*;
        let sizes = |dtype, [channels, out_channels, side, stride]: [usize; 4]| Convolution {
            dtype,
            are_channels_last: true,
            images: 32,
            in_channels: channels,
            out_channels,
            in_size: [side; 2],
            out_size: [side / stride; 2],
            kernel: [3, 3],
            stride: [stride; 2],
            padding: [1, 1],
        };
        let layers = [[64, 64, 32, 1], [256, 256, 8, 1], [256, 512, 8, 2], [512, 512, 4, 1]];
        let (tiles, taps, patches) = (Some(Tiles), Some(Taps), Some(Patches));
        for (machine, dtype, outputs, weights) in [
            (HASWELL, Float32, [None; 4], [None, None, taps, taps]),
            (HASWELL, Bfloat16, [patches; 4], [patches, patches, taps, taps]),
            (ZEN_4, Float32, [tiles, tiles, None, tiles], [tiles, tiles, taps, tiles]),
            (ZEN_4, Bfloat16, [tiles, tiles, None, None], [tiles, tiles, taps, tiles]),
            (ZEN_5, Bfloat16, [tiles, tiles, patches, patches], [tiles, tiles, taps, tiles]),
            (XEON, Float32, [tiles, tiles, None, tiles], [tiles, tiles, taps, tiles]),
            (XEON, Bfloat16, [None, None, patches, patches], [None, patches, taps, taps]),
            (XEON_WITHOUT_DESCRIPTION, Bfloat16, [patches; 4], [patches, patches, taps, taps]),
            (ARM, Float32, [None; 4], [None, None, taps, taps]),
            (ARM, Bfloat16, [None; 4], [None; 4]),
        ] {
            let kernel = |part, layer| convolution_kernel_on(machine, &sizes(dtype, layer), part, true);
            assert_eq!(layers.map(|layer| kernel(Part::Output, layer)), outputs, "{dtype:?} on {machine:?}");
            assert_eq!(
                layers.map(|layer| kernel(Part::WeightGrad, layer)),
                weights,
                "{dtype:?} on {machine:?}"
            );
        }
    }

    #[test]
    fn each_row_says_by_which_measurement_it_is_there() {
        let rows = in_force(&Machine { has_tiles: true, has_described_amx: true, ..ZEN_5 });
        assert!(rows.len() > 5 && rows.iter().all(|row| row.measured.len() > 20), "{rows:?}");
    }

    #[test]
    fn attention_multiplies_what_is_fastest_at_it() {
        use FactorKernel::*;
        for (machine, float32, bfloat16) in [
            (HASWELL, Matrix, None),
            (ZEN_3, Matrix, None),
            (ZEN_4, Strips, Some(Strips)),
            (ZEN_5, Strips, Some(Strips)),
            (XEON, Strips, Some(Strips)),
            (Machine { has_tiles: false, ..XEON }, Strips, None),
            (ARM, Matrix, None),
        ] {
            assert_eq!(factor_kernel_on(&machine, Float32), Some(float32), "{machine:?}");
            assert_eq!(factor_kernel_on(&machine, Bfloat16), bfloat16, "{machine:?}");
        }
    }
}
