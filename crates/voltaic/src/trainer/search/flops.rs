//! Counts the floating-point operations of a training batch, by recording one.

use std::sync::{Arc, Mutex};

use crate::accelerator::HpuEmulator;
use crate::callback::Callback;
use crate::data::DataModule;
use crate::device::Device;
use crate::error::{ConfigError, Error, Result};
use crate::graph::{Flops, StepCapture};
use crate::module::{HookContext, LightningModule};
use crate::nn::{Module, ModuleExt};
use crate::trainer::config::graph::GraphMode;
use crate::trainer::trainer::Trainer;

/// Records a batch from before its step to after its backward pass.
#[derive(Default)]
struct Recorder {
    capture: Option<StepCapture>,
    counted: Arc<Mutex<Option<Flops>>>,
}

impl Recorder {
    fn end(&mut self, module: &dyn Module) -> Result<()> {
        let Some(capture) = self.capture.take() else { return Ok(()) };
        let names: Vec<(String, tch::Tensor)> = module
            .named_parameters()
            .into_iter()
            .map(|(fqn, parameter)| (fqn, parameter.tensor().shallow_clone()))
            .collect();
        let flops = Flops::of(&capture.end()?.graphs(&names)?);
        if let Ok(mut counted) = self.counted.lock() {
            counted.get_or_insert(flops);
        }
        Ok(())
    }
}

impl Callback for Recorder {
    fn on_train_batch_start(
        &mut self,
        _ctx: &mut HookContext,
        _module: &mut dyn Module,
    ) -> anyhow::Result<()> {
        self.capture = Some(StepCapture::begin()?);
        Ok(())
    }

    fn on_after_backward(&mut self, _ctx: &mut HookContext, module: &dyn Module) -> anyhow::Result<()> {
        Ok(self.end(module)?)
    }

    fn on_train_batch_end(&mut self, _ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        Ok(self.end(module)?) // a step without a backward pass
    }

    fn on_exception(&mut self, _ctx: &mut HookContext, _error: &Error) {
        self.capture = None;
    }
}

impl Trainer {
    /// Counts the floating-point operations of one training batch by running it; weights, buffers, metrics and random
    /// numbers are as before then. With manual optimization it is counted up to the end of its first backward pass.
    ///
    /// # Errors
    /// As [`Trainer::fit`]; [`ConfigError`] on a device whose operators cannot be recorded, and with several ranks.
    pub fn measure_flops<M, D>(&self, module: &mut M, data: &mut D) -> Result<Flops>
    where
        M: LightningModule,
        D: DataModule<Batch = M::Batch> + ?Sized,
    {
        let is_recorded = match self.plan.device {
            Device::Cpu => true,
            Device::Hpu(_) => HpuEmulator::get().is_some(),
            Device::Cuda(_) => false,
        };
        if !is_recorded {
            let what = format!("operators are not recorded on {}", self.plan.device);
            return Err(ConfigError::new("measure_flops", what, "count them with accelerator=cpu").into());
        }
        let recorder = Recorder::default();
        let counted = recorder.counted.clone();
        let mut trainer =
            self.trial("measure_flops", 1, |builder| builder.graph(GraphMode::Off).callback(recorder))?;
        let result = trainer.fit(module, data);
        trainer.take_kept().map_or(Ok(()), |kept| kept.restore(module))?;
        result?;
        let counted = counted.lock().ok().and_then(|mut counted| counted.take());
        counted.ok_or_else(|| {
            ConfigError::new("measure_flops", "there is no training batch", "use data with one").into()
        })
    }

    /// Counts for the model summary of a fit, if it is to show operations.
    pub(crate) fn count_for_summary<M, D>(&mut self, module: &mut M, data: &mut D) -> Result<()>
    where
        M: LightningModule,
        D: DataModule<Batch = M::Batch> + ?Sized,
    {
        if !self.counts_flops {
            return Ok(());
        }
        self.run.facts.flops = match self.measure_flops(module, data) {
            Ok(flops) => Some(Arc::new(flops)),
            Err(Error::Config(error))
                if error.problems.iter().all(|problem| problem.key == "measure_flops") =>
            {
                tracing::warn!("no operations are counted: {error}");
                None
            }
            Err(error) => return Err(error),
        };
        Ok(())
    }
}
