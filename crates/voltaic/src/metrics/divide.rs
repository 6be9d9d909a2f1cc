//! Division with a value where there is none.

use tch::{Kind, Tensor};

use crate::error::Result;

/// `a / b`, and 0 where `b` is 0.
pub(super) fn safe_divide(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (a, b) = (a.f_to_kind(Kind::Float)?, b.f_to_kind(Kind::Float)?);
    let is_zero = b.f_eq(0.0)?;
    Ok(a.f_div(&b.f_masked_fill(&is_zero, 1.0)?)?.f_masked_fill(&is_zero, 0.0)?)
}
