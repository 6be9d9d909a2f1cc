//! A batch on its way from the loader to the device.

use crate::data::{Batch, BatchIter};
use crate::error::Result;
use crate::module::{Action, LightningModule};
use crate::nn::Module;
use crate::profiler::actions;
use crate::trainer::session::guard::guarded;
use crate::trainer::session::hooks::hook_error;
use crate::trainer::session::session::Session;

impl<M: LightningModule> Session<'_, M> {
    /// The next batch of a loader; `action` is what the profiler calls that.
    pub(crate) fn next_batch(
        &self,
        batches: &mut BatchIter<M::Batch>,
        action: &str,
    ) -> Result<Option<M::Batch>> {
        if batches.size_hint().1 == Some(0) {
            return Ok(None); // fetches nothing
        }
        let _action = self.profile(action)?;
        batches.next().transpose()
    }

    /// Moves a batch to the device, in the dtype of the weights if that is not float32, with the hooks for it.
    pub(crate) fn take(&mut self, batch: M::Batch, dataloader_idx: usize) -> Result<M::Batch> {
        let _action = self.profile_strategy("batch_to_device")?;
        let (data, module, profiling) = (&mut *self.data, &mut *self.module, &self.run.facts.profiling);
        let (data_name, module_name) =
            if profiling.is_on() { (data.type_name(), Module::type_name(module)) } else { ("", "") };
        let of_data = |hook| profiling.of_data(data_name, hook);
        let of_module = |hook: &str| profiling.start(|| actions::of_module(module_name, hook));
        let (device, true_dtype) = (self.plan.device, self.plan.precision.true_dtype());
        let mut hook = "on_before_batch_transfer";
        guarded(|| {
            let batch = of_data(hook)?.around(|| data.on_before_batch_transfer(batch, dataloader_idx))?;
            let batch = of_module(hook)?.around(|| module.on_before_batch_transfer(batch, dataloader_idx))?;
            hook = "transfer_batch_to_device";
            let batch =
                of_data(hook)?.around(|| data.transfer_batch_to_device(batch, device, dataloader_idx))?;
            let batch =
                of_module(hook)?.around(|| module.transfer_batch_to_device(batch, device, dataloader_idx))?;
            let batch = match true_dtype {
                Some(dtype) => batch.to_dtype(dtype)?,
                None => batch,
            };
            hook = "on_after_batch_transfer";
            let batch = of_data(hook)?.around(|| data.on_after_batch_transfer(batch, dataloader_idx))?;
            of_module(hook)?.around(|| module.on_after_batch_transfer(batch, dataloader_idx))
        })
        .map_err(|source| hook_error(hook, &self.run.at.progress, source))
    }

    /// Begins a hook of the data module for the profiler.
    pub(crate) fn profile_data(&self, hook: &str) -> Result<Action> {
        self.run.facts.profiling.of_data(self.data.type_name(), hook)
    }
}
