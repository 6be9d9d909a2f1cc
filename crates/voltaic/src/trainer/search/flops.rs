//! Counts the floating-point operations of a training batch, by recording one.

use std::sync::{Arc, Mutex};

use crate::accelerator::HpuEmulator;
use crate::callback::Callback;
use crate::data::{DataModule, Stage};
use crate::device::Device;
use crate::error::{ConfigError, Error, Result};
use crate::graph::{Capture, Flops, named_tensors, scope_by_fqn};
use crate::module::{HookContext, LightningModule};
use crate::nn::{Module, RemovableHandle};
use crate::trainer::config::TrainerConfig;
use crate::trainer::config::graph::GraphMode;
use crate::trainer::search::trial::Searcher;

/// Records a batch from before its step to after its backward pass.
#[derive(Default)]
struct Recorder {
    capture: Option<Capture>,
    /// Operators are said to be in the modules that are called.
    scopes: Option<RemovableHandle>,
    counted: Arc<Mutex<Option<Flops>>>,
}

impl Recorder {
    fn end(&mut self, module: &dyn Module) -> Result<()> {
        let Some(capture) = self.capture.take() else { return Ok(()) };
        self.scopes.take().iter().for_each(RemovableHandle::remove);
        let flops = Flops::of(&capture.end()?.graphs(&named_tensors(module))?);
        if let Ok(mut counted) = self.counted.lock() {
            counted.get_or_insert(flops);
        }
        Ok(())
    }
}

impl Callback for Recorder {
    fn on_train_batch_start(
        &mut self,
        ctx: &mut HookContext,
        _module: &mut dyn Module,
    ) -> anyhow::Result<()> {
        self.capture = Some(Capture::begin()?);
        self.scopes = Some(scope_by_fqn(ctx.module_hooks()));
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

impl Searcher<'_> {
    /// See [`Trainer::measure_flops`](crate::trainer::Trainer::measure_flops).
    pub(crate) fn measure_flops<M: LightningModule>(
        &self,
        module: &mut M,
        data: &mut dyn DataModule<Batch = M::Batch>,
    ) -> Result<Flops> {
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
        let without_graph =
            |config: &mut TrainerConfig| (config.graph, config.compile) = (GraphMode::Off, None);
        let mut trial = self.trial("measure_flops", 1, &without_graph, Some(Box::new(recorder)))?;
        let result = trial.run(module, data, Stage::Fit);
        trial.restore(module)?;
        result?;
        let counted = counted.lock().ok().and_then(|mut counted| counted.take());
        counted.ok_or_else(|| {
            ConfigError::new("measure_flops", "there is no training batch", "use data with one").into()
        })
    }

    /// The same for the model summary of a fit, which does without where operations cannot be counted.
    pub(crate) fn flops_for_summary<M: LightningModule>(
        &self,
        module: &mut M,
        data: &mut dyn DataModule<Batch = M::Batch>,
    ) -> Result<Option<Arc<Flops>>> {
        match self.measure_flops(module, data) {
            Ok(flops) => Ok(Some(Arc::new(flops))),
            Err(Error::Config(error))
                if error.problems.iter().all(|problem| problem.key == "measure_flops") =>
            {
                tracing::warn!("no operations are counted: {error}");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}
