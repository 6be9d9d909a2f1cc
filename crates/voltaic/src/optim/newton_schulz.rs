//! Newton-Schulz iterations, which take the singular values of a matrix to about 1.
//!
//! They work on the last two dimensions, in float32 with results rounded to a lower dtype: products have float32 sums and are rounded
//! once, as those of `torch.addmm` are.

use tch::{Kind, Tensor};

use super::param_group::NsMethod;
use crate::error::Result;

/// DeepSpeed's coefficients.
const STANDARD: (f64, f64, f64) = (3.4445, -4.775, 2.0315);

/// DeepSpeed's number of steps.
const STEPS: u64 = 5;

/// The step of the iteration by Gram matrices that begins with the matrix again.
const RESTART: u64 = 2;

/// A tensor rounded to `dtype`, in float32.
fn rounded(tensor: &Tensor, dtype: Kind) -> Result<Tensor> {
    Ok(match dtype {
        Kind::Float => tensor.shallow_clone(),
        _ => tensor.f_to_kind(dtype)?.f_to_kind(Kind::Float)?,
    })
}

fn transposed(matrix: &Tensor) -> Result<Tensor> {
    Ok(matrix.f_transpose(-2, -1)?)
}

/// Whether a matrix has more rows than columns.
fn is_tall(matrix: &Tensor) -> bool {
    let size = matrix.size();
    size.len() >= 2 && size[size.len() - 2] > size[size.len() - 1]
}

/// The iteration of `torch.optim.Muon`, in bfloat16.
pub(super) fn pytorch(matrix: &Tensor, (a, b, c): (f64, f64, f64), steps: u64, eps: f64) -> Result<Tensor> {
    let is_tall = is_tall(matrix);
    let rounded = |tensor: &Tensor| rounded(tensor, Kind::BFloat16);
    let low = matrix.f_to_kind(Kind::BFloat16)?;
    let low = if is_tall { transposed(&low)? } else { low };
    let norm = low.f_norm()?.f_clamp_min(eps)?;
    let mut x = low.f_div(&norm)?.f_to_kind(Kind::Float)?;
    for _ in 0..steps {
        let gram = rounded(&x.f_matmul(&transposed(&x)?)?)?;
        let change = gram.f_matmul(&gram)?.f_mul_scalar_(c)?.f_add_(&gram.f_mul_scalar(b)?)?;
        let change = rounded(&change)?;
        x = rounded(&change.f_matmul(&x)?.f_add_(&x.f_mul_scalar(a)?)?)?;
    }
    if is_tall { transposed(&x) } else { Ok(x) }
}

/// DeepSpeed's iterations: in bfloat16, or by Gram matrices in float16, and in float32 on a CPU.
pub(super) fn deepspeed(matrix: &Tensor, method: NsMethod) -> Result<Tensor> {
    let is_tall = is_tall(matrix);
    let wide = if is_tall { transposed(matrix)? } else { matrix.shallow_clone() };
    let size = wide.size();
    let is_square = size[size.len() - 2] == size[size.len() - 1];
    let dtype = match method {
        NsMethod::Standard => Kind::BFloat16,
        NsMethod::Gram if matrix.device() == tch::Device::Cpu => Kind::Float,
        NsMethod::Gram => Kind::Half,
    };
    let x = match method {
        NsMethod::Standard => {
            let low = wide.f_to_kind(dtype)?;
            low.f_div(&norm_of(&low)?.f_add_scalar(1e-7)?)?.f_to_kind(Kind::Float)?
        }
        NsMethod::Gram => {
            let full = wide.f_to_kind(Kind::Float)?;
            rounded(&full.f_div(&norm_of(&full)?.f_add_scalar(1e-7)?)?, dtype)?
        }
    };
    let x = match method {
        NsMethod::Gram if !is_square => by_gram_matrices(x, dtype)?,
        _ => directly(x, dtype)?,
    };
    if is_tall { transposed(&x) } else { Ok(x) }
}

/// The Frobenius norm of each matrix, with the dimensions kept.
fn norm_of(matrix: &Tensor) -> Result<Tensor> {
    Ok(matrix.f_norm_scalaropt_dim(2.0, [-2_i64, -1].as_slice(), true)?)
}

/// `X <- a X + (b A + c A A) X` with `A = X Xᵀ`.
fn directly(mut x: Tensor, dtype: Kind) -> Result<Tensor> {
    let (a, b, c) = STANDARD;
    let rounded = |tensor: &Tensor| rounded(tensor, dtype);
    for _ in 0..STEPS {
        let gram = rounded(&x.f_matmul(&transposed(&x)?)?)?;
        let change = polynomial(&gram, b, c, dtype)?;
        let product = rounded(&change.f_matmul(&x)?)?;
        x = rounded(&rounded(&x.f_mul_scalar(a)?)?.f_add_(&product)?)?;
    }
    Ok(x)
}

/// `b A + c A A`.
fn polynomial(gram: &Tensor, b: f64, c: f64, dtype: Kind) -> Result<Tensor> {
    let square = rounded(&rounded(&gram.f_mul_scalar(c)?, dtype)?.f_matmul(gram)?, dtype)?;
    rounded(&rounded(&gram.f_mul_scalar(b)?, dtype)?.f_add_(&square)?, dtype)
}

/// The same for wide matrices, on `R = X Xᵀ`, which is smaller: `X` is multiplied by the product `Q` of all steps once before the
/// restart, and once at the end.
fn by_gram_matrices(mut x: Tensor, dtype: Kind) -> Result<Tensor> {
    let (a, b, c) = STANDARD;
    let rounded = |tensor: &Tensor| rounded(tensor, dtype);
    let product = |left: &Tensor, right: &Tensor| rounded(&left.f_matmul(right)?);
    // a * value + change
    let scaled =
        |value: &Tensor, change: &Tensor| rounded(&rounded(&value.f_mul_scalar(a)?)?.f_add_(change)?);
    let mut gram = product(&x, &transposed(&x)?)?;
    let mut q: Option<Tensor> = None;
    for step in 0..STEPS {
        if step == RESTART
            && let Some(q) = q.take()
        {
            x = product(&q, &x)?;
            gram = product(&x, &transposed(&x)?)?;
        }
        let z = polynomial(&gram, b, c, dtype)?;
        q = Some(match &q {
            Some(q) => scaled(q, &product(&z, q)?)?,
            None => {
                let rows = z.size()[z.dim() - 1];
                let unit = Tensor::f_eye(rows, (Kind::Float, z.device()))?;
                rounded(&z.f_add(&unit.f_mul_scalar(a)?)?)?
            }
        });
        if step + 1 < STEPS && step + 1 != RESTART {
            let next = scaled(&gram, &product(&z, &gram)?)?;
            gram = scaled(&next, &product(&z, &next)?)?;
        }
    }
    q.map_or_else(|| Ok(x.shallow_clone()), |q| product(&q, &x))
}
