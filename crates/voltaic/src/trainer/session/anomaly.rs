//! `detect_anomaly`: a loss or gradient with NaN or infinity ends the run, with the operation that made it.

use tch::Tensor;

use crate::error::{Error, Result};
use crate::ffi::AnomalyWatch;
use crate::module::Progress;
use crate::nn::Module;
use crate::strategy::Strategy;

/// An error if there is a watch and the tensor has NaN or infinity.
pub(crate) fn check_anomaly(
    watch: Option<&AnomalyWatch>,
    what: &str,
    tensor: &Tensor,
    progress: &Progress,
) -> Result<()> {
    let Some(watch) = watch else { return Ok(()) };
    let is_finite = !tensor.defined() || tensor.f_isfinite()?.f_all()?.f_int64_value(&[])? != 0; // sync point
    if is_finite {
        return Ok(());
    }
    let operation = watch.take()?;
    let (epoch, global_step) = (progress.current_epoch, progress.global_step);
    Err(Error::Anomaly { what: what.to_owned(), operation, epoch, global_step })
}

/// The same for all gradients.
pub(crate) fn check_gradients(
    watch: Option<&AnomalyWatch>,
    strategy: &dyn Strategy,
    module: &dyn Module,
    progress: &Progress,
) -> Result<()> {
    if watch.is_none() {
        return Ok(());
    }
    strategy
        .grads(module)?
        .into_iter()
        .try_for_each(|(fqn, grad)| check_anomaly(watch, &format!("the gradient of {fqn}"), &grad, progress))
}
