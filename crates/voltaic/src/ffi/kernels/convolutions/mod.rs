//! Convolutions of images with the channels last, and their gradients.

mod patches;
mod winograd;

use std::ffi::c_void;
use std::sync::OnceLock;

use voltaic_sys as sys;

use super::Shared;
use super::guard::{guard, guard_some};
use crate::ffi::mkl::has_mkl_bf16;
use crate::ffi::strip_product::has_bf16_products;
use crate::kernels::Bf16;

/// Sizes of a convolution; pairs are of rows and columns.
#[derive(Clone, Copy)]
struct Convolution {
    images: usize,
    in_channels: usize,
    out_channels: usize,
    in_size: [usize; 2],
    out_size: [usize; 2],
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
}

impl Convolution {
    fn new(call: &sys::vt_convolution) -> Self {
        let pair = |numbers: [i64; 2]| numbers.map(|number| number as usize);
        Self {
            images: call.images as usize,
            in_channels: call.in_channels as usize,
            out_channels: call.out_channels as usize,
            in_size: pair(call.in_size),
            out_size: pair(call.out_size),
            kernel: pair(call.kernel),
            stride: pair(call.stride),
            padding: pair(call.padding),
        }
    }

    fn in_len(&self) -> usize {
        self.images * self.in_size[0] * self.in_size[1] * self.in_channels
    }

    fn out_pixels(&self) -> usize {
        self.images * self.out_size[0] * self.out_size[1]
    }

    fn out_len(&self) -> usize {
        self.out_pixels() * self.out_channels
    }

    /// Numbers that one output is made of.
    fn depth(&self) -> usize {
        self.kernel[0] * self.kernel[1] * self.in_channels
    }

    fn weight_len(&self) -> usize {
        self.out_channels * self.depth()
    }
}

/// How many threads have something to do with `len`, of which `grain` is worth a thread.
fn threads_for(len: usize, grain: usize) -> usize {
    (tch::get_num_threads().max(1) as usize).min(len.div_ceil(grain))
}

/// At most `most` parts of `len`: how many, and how long each but the last. Neither is 0.
fn parts(len: usize, most: usize) -> [usize; 2] {
    let part = len.div_ceil(most);
    [len.div_ceil(part), part]
}

// ---- which ----

const ALL: i32 = sys::VT_OUTPUT | sys::VT_INPUT_GRAD | sys::VT_WEIGHT_GRAD;

/// Convolutions in bfloat16 that are products of patches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ByPatches {
    None,
    /// What oneDNN is slow at with AMX, too.
    SmallImages,
    /// What it is slower at than products from strips.
    Slower,
    All,
}

/// Convolutions of 3 x 3 that go by Winograd's tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ByTiles {
    None,
    /// Those of bfloat16 have faster ways.
    Float32,
    All,
}

/// What is computed here, as decided when kernels are installed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Choice {
    pub by_patches: ByPatches,
    /// Whether products of patches are made from strips, not by the MKL.
    pub by_strips: bool,
    pub by_tiles: ByTiles,
}

static CHOICE: OnceLock<Choice> = OnceLock::new();

impl Choice {
    /// Keeps the choice for this process; the first one stays.
    pub fn set(self) {
        CHOICE.get_or_init(|| self);
    }

    /// Whether there is anything to compute.
    pub fn is_any(self) -> bool {
        self.by_tiles != ByTiles::None || self.by_patches != ByPatches::None
    }

    /// What is computed by tiles, as `vt_convolves`.
    fn by_tiles(self, call: &sys::vt_convolution) -> i32 {
        match self.by_tiles {
            ByTiles::Float32 if call.dtype != sys::VT_FLOAT32 => 0,
            ByTiles::None => 0,
            ByTiles::Float32 | ByTiles::All => winograd::by_tiles(call),
        }
    }

    /// As `vt_convolves`: by tiles, or else by patches.
    fn computed(self, call: &sys::vt_convolution) -> i32 {
        let by_patches = match self.by_patches {
            _ if call.dtype == sys::VT_FLOAT32 => 0,
            ByPatches::None => 0,
            ByPatches::SmallImages => of_small_images(call),
            ByPatches::Slower => slower(call),
            ByPatches::All => ALL,
        };
        self.by_tiles(call) | by_patches
    }
}

/// Measured with kernels of 3 x 3 and strides of 1 and 2: below these bounds 1.4 to 3.4 times as fast as oneDNN with AMX,
/// above them 0.3 to 1.1 times.
fn of_small_images(call: &sys::vt_convolution) -> i32 {
    let (pixels, channels) = pixels_and_channels(call);
    match pixels {
        _ if call.kernel != [3, 3] => 0,
        0..=16 if channels >= 256 * 512 => ALL,
        0..=64 if channels >= 128 * 256 => sys::VT_WEIGHT_GRAD,
        _ => 0,
    }
}

/// Measured on a Zen 5 with kernels of 3 x 3 and a stride of 2, and of 1 on images of 4 x 4: within these bounds 1.17 to 1.5
/// times as fast as oneDNN, without them 0.94 to 1.05 times.
fn slower(call: &sys::vt_convolution) -> i32 {
    let (pixels, channels) = pixels_and_channels(call);
    match pixels {
        _ if call.kernel != [3, 3] || call.is_channels_last == 0 => 0,
        0..=16 if channels >= 256 * 512 => ALL,
        _ if channels >= 64 * 128 && call.stride == [2, 2] => sys::VT_WEIGHT_GRAD,
        _ => 0,
    }
}

fn choice() -> Choice {
    *CHOICE.get().expect("set before the kernels are in the dispatcher")
}

pub(super) extern "C" fn convolves(call: *const sys::vt_convolution) -> i32 {
    guard("convolves", || {
        // SAFETY: the shim passes a description that lives during the call.
        let call = unsafe { &*call };
        choice().computed(call)
    })
}

pub(super) extern "C" fn convolves_by_taps(call: *const sys::vt_convolution) -> i32 {
    guard("convolves_by_taps", || {
        // SAFETY: as above.
        let call = unsafe { &*call };
        let has_products = call.dtype == sys::VT_FLOAT32 || has_bf16_products() || has_mkl_bf16();
        let is_by_tiles = choice().by_tiles(call) & sys::VT_WEIGHT_GRAD != 0;
        i32::from(has_products && !is_by_tiles && is_faster_by_taps(call))
    })
}

/// oneDNN is slow at the weights of many channels on small images; the taps at their border leave out work, too.
/// Measured with kernels of 3 x 3 and strides of 1 and 2: below these bounds 1.04 to 12 times as fast.
fn is_faster_by_taps(call: &sys::vt_convolution) -> bool {
    let (pixels, channels) = pixels_and_channels(call);
    call.kernel == [3, 3] && (pixels <= 16 && channels >= 256 * 256 || pixels <= 64 && channels >= 512 * 512)
}

/// Of an output image, and pairs of input and output.
fn pixels_and_channels(call: &sys::vt_convolution) -> (i64, i64) {
    (call.out_size[0] * call.out_size[1], call.in_channels * call.out_channels)
}

// ---- calls ----

/// How something is computed.
enum Way {
    Tiles,
    TilesBf16,
    PatchesBf16,
}

impl Way {
    /// Of what `convolves` promised.
    fn of(call: &sys::vt_convolution, what: i32) -> Self {
        match call.dtype {
            sys::VT_FLOAT32 => Self::Tiles,
            _ if choice().by_tiles(call) & what != 0 => Self::TilesBf16,
            _ => Self::PatchesBf16,
        }
    }
}

/// Calls `compute` with two factors, given by address and length, and the output; gives what it does.
///
/// # Safety
/// The numbers of the factors must be there, of this dtype, and written by nobody.
unsafe fn with_factors<T>(
    factors: [(*const c_void, usize); 2],
    output: *mut c_void,
    compute: impl FnOnce(&[T], &[T], Shared<T>) -> bool,
) -> bool {
    // SAFETY: as this function asks.
    let [left, right] = factors.map(|(address, len)| unsafe { numbers(address, len) });
    compute(left, right, Shared(output.cast()))
}

/// # Safety
/// The address is of `len` numbers that are there for `'a` and written by nobody.
unsafe fn numbers<'a, T>(address: *const c_void, len: usize) -> &'a [T] {
    // SAFETY: as this function asks.
    unsafe { std::slice::from_raw_parts(address.cast(), len) }
}

/// Calls a function of `winograd` or `patches` for the way: `function(convolution, left factor, right factor, ..., output)`.
macro_rules! by_way {
    ($way:expr, $function:ident($sizes:expr, $factors:expr $(, $argument:expr)*; $output:expr)) => {
        match $way {
            Way::Tiles => with_factors($factors, $output, |left, right, out| {
                winograd::$function::<f32, _, _>($sizes, left, right $(, $argument)*, out)
            }),
            Way::TilesBf16 => with_factors($factors, $output, |left, right, out| {
                winograd::$function::<Bf16, _, _>($sizes, left, right $(, $argument)*, out)
            }),
            Way::PatchesBf16 => with_factors($factors, $output, |left, right, out| {
                patches::$function($sizes, left, right $(, $argument)*, out)
            }),
        }
    };
}

pub(super) extern "C" fn convolution(
    call: *const sys::vt_convolution,
    input: *const c_void,
    weight: *const c_void,
    bias: *const c_void,
    output: *mut c_void,
) -> i32 {
    guard_some("convolution", || {
        // SAFETY: the shim passes a description and dense tensors of its dtype and sizes that live during the call, of which
        // `output` shares no memory with the others; the bias may be null.
        unsafe {
            let (sizes, way) = (Convolution::new(&*call), Way::of(&*call, sys::VT_OUTPUT));
            let factors = [(input, sizes.in_len()), (weight, sizes.weight_len())];
            let bias = (!bias.is_null()).then_some(bias);
            by_way!(way, output(&sizes, factors, bias.map(|bias| numbers(bias, sizes.out_channels)); output))
        }
    })
}

pub(super) extern "C" fn input_grad(
    call: *const sys::vt_convolution,
    grad: *const c_void,
    weight: *const c_void,
    output: *mut c_void,
) -> i32 {
    guard_some("convolution_input_grad", || {
        // SAFETY: as in `convolution`.
        unsafe {
            let (sizes, way) = (Convolution::new(&*call), Way::of(&*call, sys::VT_INPUT_GRAD));
            let factors = [(grad, sizes.out_len()), (weight, sizes.weight_len())];
            by_way!(way, input_grad(&sizes, factors; output))
        }
    })
}

pub(super) extern "C" fn weight_grad(
    call: *const sys::vt_convolution,
    grad: *const c_void,
    input: *const c_void,
    output: *mut c_void,
) -> i32 {
    guard_some("convolution_weight_grad", || {
        // SAFETY: as in `convolution`.
        unsafe {
            let (sizes, way) = (Convolution::new(&*call), Way::of(&*call, sys::VT_WEIGHT_GRAD));
            let factors = [(grad, sizes.out_len()), (input, sizes.in_len())];
            by_way!(way, weight_grad(&sizes, factors; output))
        }
    })
}
