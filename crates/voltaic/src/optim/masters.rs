//! Which part of an edit of a 16-bit weight its float32 master weight takes.

use tch::Tensor;

use crate::error::Result;

/// Takes an edit of a weight over to its master weight: elements that are not what the master weight rounds to. All others keep their
/// digits. Without rounding, in one dtype, every element is taken.
///
/// # Errors
/// libtorch's, if memory runs out or the sizes differ.
pub(crate) fn take_edit(master: &Tensor, weight: &Tensor) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    let mut master = master.f_detach()?;
    let weight = weight.f_detach()?.f_to_device(master.device())?;
    if weight.kind() == master.kind() {
        return Ok(master.f_copy_(&weight)?);
    }
    let is_rounded = master.f_to_kind(weight.kind())?.f_eq_tensor(&weight)?;
    let merged = master.f_where_self(&is_rounded, &weight.f_to_kind(master.kind())?)?;
    Ok(master.f_copy_(&merged)?)
}
