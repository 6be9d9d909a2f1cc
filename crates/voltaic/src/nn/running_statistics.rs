//! Running statistics of batch normalisation, taken again for weights that were set rather than trained.

use std::cell::Cell;

use crate::error::Result;
use crate::nn::module::Module;
use crate::nn::tree::ModuleExt;

thread_local! {
    static ARE_EQUAL: Cell<bool> = const { Cell::new(false) };
}

/// While this lives, all batches that batch normalisation sees in training mode on this thread have the same weight in
/// its running statistics, as with `momentum=None` in PyTorch.
#[must_use = "it ends when it is dropped"]
pub(crate) struct EqualBatches {
    before: bool,
}

impl EqualBatches {
    pub(crate) fn begin() -> Self {
        Self { before: ARE_EQUAL.replace(true) }
    }
}

impl Drop for EqualBatches {
    fn drop(&mut self) {
        ARE_EQUAL.set(self.before);
    }
}

/// Whether all batches have the same weight.
pub(super) fn are_equal() -> bool {
    ARE_EQUAL.get()
}

/// Whether a module has running statistics of batches.
pub(crate) fn has_running_statistics(module: &dyn Module) -> bool {
    module.named_buffers().iter().any(|(fqn, _)| last(fqn) == "num_batches_tracked")
}

/// Running statistics as before the first batch.
pub(crate) fn reset_running_statistics(module: &dyn Module) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    for (fqn, buffer) in module.named_buffers() {
        let mut buffer = buffer.shallow_clone();
        match last(&fqn) {
            "running_mean" | "num_batches_tracked" => drop(buffer.f_zero_()?),
            "running_var" => drop(buffer.f_fill_(1.0)?),
            _ => {}
        }
    }
    Ok(())
}

fn last(fqn: &str) -> &str {
    fqn.rsplit('.').next().unwrap_or(fqn)
}
