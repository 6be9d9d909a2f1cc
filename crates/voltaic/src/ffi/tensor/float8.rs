//! Operators on float8: casts with scales, new scales, products. Autograd knows nothing of them.

use std::ptr;

use tch::{Kind, Tensor};
use voltaic_sys as sys;

use crate::dtype::DtypeNames;
use crate::error::{TorchError, TorchErrorKind};
use crate::ffi::check::check;
use crate::ffi::kernels::define_float8;
use crate::ffi::tensor::rng::take;

/// The scales of some tensors, and the largest magnitudes that were measured of them.
#[derive(Debug)]
pub struct Fp8Tensors {
    /// Factors of casts, `[tensors]` float32.
    pub scale: Tensor,
    /// Their inverses.
    pub scale_inv: Tensor,
    /// A ring of rows, `[rows, tensors]` float32.
    pub amax_history: Tensor,
    /// The row that is written to, `[1]` int32.
    pub amax_history_index: Tensor,
}

/// How numbers are cast to float8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fp8Cast {
    /// [`Kind::Float8e4m3fn`], which ends at 240 here, or [`Kind::Float8e5m2`].
    pub dtype: Kind,
    /// Rounds up or down at random, by the device's generator, so that the mean is the number; else to the nearest, ties to even.
    pub is_stochastic: bool,
}

/// Numbers in float8, and what they are multiplied by to be those that were cast: `[1]` float32, or one for each row.
#[derive(Debug)]
pub struct Fp8Tensor {
    /// The codes, contiguous.
    pub codes: Tensor,
    /// The factors.
    pub scale_inv: Tensor,
}

impl Fp8Tensor {
    /// The same, sharing memory.
    pub fn shallow_clone(&self) -> Self {
        Self { codes: self.codes.shallow_clone(), scale_inv: self.scale_inv.shallow_clone() }
    }
}

fn number_of(dtype: Kind) -> Result<i32, TorchError> {
    DtypeNames::of_kind(dtype)
        .map(|names| names.number)
        .ok_or_else(|| TorchError::new("fp8", TorchErrorKind::Other, &format!("{dtype:?} has no number")))
}

impl Fp8Tensors {
    /// The same, sharing memory.
    pub fn shallow_clone(&self) -> Self {
        Self {
            scale: self.scale.shallow_clone(),
            scale_inv: self.scale_inv.shallow_clone(),
            amax_history: self.amax_history.shallow_clone(),
            amax_history_index: self.amax_history_index.shallow_clone(),
        }
    }

    fn raw(&self) -> sys::vt_fp8_meta {
        sys::vt_fp8_meta {
            scale: self.scale.as_ptr().cast_mut(),
            scale_inv: self.scale_inv.as_ptr().cast_mut(),
            amax_history: self.amax_history.as_ptr().cast_mut(),
            amax_history_index: self.amax_history_index.as_ptr().cast_mut(),
        }
    }

    /// Casts `input` times the scale number `slot`; what is too large becomes the largest number. With `measures` the largest magnitude
    /// of `input` goes to the history.
    ///
    /// # Errors
    /// libtorch's; that a device has no such operator.
    ///
    /// Source: Habana's `cast_to_fp8_v2`.
    pub fn cast(
        &self,
        input: &Tensor,
        slot: usize,
        measures: bool,
        cast: Fp8Cast,
    ) -> Result<Fp8Tensor, TorchError> {
        define_float8()?;
        let (mut codes, mut scale_inv) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the tensors are borrowed for the call, and the shim checks their shapes; the out-pointers are valid.
        let error = unsafe {
            sys::vt_fp8_cast(
                input.as_ptr().cast_mut(),
                &self.raw(),
                slot as i64,
                measures.into(),
                number_of(cast.dtype)?,
                cast.is_stochastic.into(),
                &mut codes,
                &mut scale_inv,
            )
        };
        check("fp8_cast", error)?;
        Ok(Fp8Tensor { codes: take(codes), scale_inv: take(scale_inv) })
    }

    /// New scales for `dtype` from the row of the history that was written last, or with `uses_max` from the largest of all rows; the
    /// next row is written then.
    ///
    /// # Errors
    /// libtorch's.
    pub fn update(&self, dtype: Kind, margin: i64, uses_max: bool) -> Result<(), TorchError> {
        define_float8()?;
        // SAFETY: as above.
        let error = unsafe { sys::vt_fp8_update(&self.raw(), number_of(dtype)?, margin, uses_max.into()) };
        check("fp8_update", error)
    }
}

impl Fp8Cast {
    /// Casts with a scale that the largest magnitude of `input` itself gives, less `margin` powers of two; with `by_row` each row of a
    /// matrix has its own.
    ///
    /// # Errors
    /// libtorch's.
    pub fn with_current_scale(
        self,
        input: &Tensor,
        by_row: bool,
        margin: i64,
    ) -> Result<Fp8Tensor, TorchError> {
        define_float8()?;
        let (mut codes, mut scale_inv) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the tensor is borrowed for the call; the out-pointers are valid.
        let error = unsafe {
            sys::vt_fp8_cast_current(
                input.as_ptr().cast_mut(),
                by_row.into(),
                number_of(self.dtype)?,
                margin,
                self.is_stochastic.into(),
                &mut codes,
                &mut scale_inv,
            )
        };
        check("fp8_cast_current", error)?;
        Ok(Fp8Tensor { codes: take(codes), scale_inv: take(scale_inv) })
    }
}

/// The numbers of float8 codes in float32 or bfloat16, exactly.
///
/// # Errors
/// libtorch's.
pub fn fp8_to(codes: &Tensor, dtype: Kind) -> Result<Tensor, TorchError> {
    define_float8()?;
    let mut numbers = ptr::null_mut();
    // SAFETY: the tensor is borrowed for the call; the out-pointer is valid.
    check("fp8_from", unsafe {
        sys::vt_fp8_from(codes.as_ptr().cast_mut(), number_of(dtype)?, &mut numbers)
    })?;
    Ok(take(numbers))
}

/// `(a b) + bias` of float8 matrices `[m, k]` and `[k, n]`, or without a bias of batches of them, with their factors, in `dtype`: products are exact and summed in float32.
/// Factors are one number each, or one for each row of `a` and each column of `b`.
///
/// # Errors
/// If the shapes do not fit; libtorch's.
///
/// Source: Habana's `fp8_gemm_v2`.
pub fn fp8_mm(
    a: &Fp8Tensor,
    b: &Fp8Tensor,
    bias: Option<&Tensor>,
    dtype: Kind,
) -> Result<Tensor, TorchError> {
    define_float8()?;
    let mut out = ptr::null_mut();
    // SAFETY: the tensors are borrowed for the call; the out-pointer is valid.
    let error = unsafe {
        sys::vt_fp8_mm(
            a.codes.as_ptr().cast_mut(),
            b.codes.as_ptr().cast_mut(),
            a.scale_inv.as_ptr().cast_mut(),
            b.scale_inv.as_ptr().cast_mut(),
            bias.map_or(ptr::null_mut(), |bias| bias.as_ptr().cast_mut()),
            number_of(dtype)?,
            &mut out,
        )
    };
    check("fp8_mm", error)?;
    Ok(take(out))
}
