//! Short runs before the real one, after which everything is as it was.

use std::sync::Arc;

use tch::Tensor;

use crate::accelerator::rng;
use crate::device::Device;
use crate::error::{ConfigError, Result};
use crate::ffi;
use crate::metrics::Metric;
use crate::module::LightningModule;
use crate::nn::ModuleExt;
use crate::trainer::builder::TrainerBuilder;
use crate::trainer::config::TrainerConfig;
use crate::trainer::config::values::Limit;
use crate::trainer::trainer::Trainer;

type Tensors = Vec<(String, Tensor)>;

/// What a trial keeps, once its module is complete: the module may be made in `configure_model`.
#[derive(Default)]
pub(crate) enum Keep {
    /// No trial.
    #[default]
    Nothing,
    /// The first call to come; with the random states of now.
    First(Tensors),
    /// What it was.
    Done(Box<Kept>),
}

impl Keep {
    /// Called when the module is complete and on its device.
    pub fn take_first<M: LightningModule>(&mut self, module: &M, device: Device) -> Result<()> {
        if let Self::First(rng) = self {
            *self = Self::Done(Box::new(Kept::of(module, device, std::mem::take(rng))?));
        }
        Ok(())
    }
}

/// What a trial changes: weights, buffers, metrics, random numbers.
pub(crate) struct Kept {
    state: Tensors,
    metrics: Vec<(Arc<dyn Metric>, Tensors)>,
    rng: Tensors,
}

impl Kept {
    /// Copies are on the host, so that the trial has the device's memory for itself.
    fn of<M: LightningModule>(module: &M, device: Device, rng: Tensors) -> Result<Self> {
        let copied = module.state_dict().into_iter().map(|(fqn, tensor)| match device {
            Device::Cpu => {
                let mut copy = tensor.f_empty_like()?;
                copy.f_copy_(&tensor)?;
                Ok((fqn, copy))
            }
            _ => Ok((fqn, tensor.f_to_device(tch::Device::Cpu)?)),
        });
        let metrics = module.named_metrics().into_iter().map(|(_, metric)| {
            let state = metric.state().named()?;
            Ok((metric, state))
        });
        Ok(Self { state: copied.collect::<Result<_>>()?, metrics: metrics.collect::<Result<_>>()?, rng })
    }

    /// Puts everything back; gradients of the trial are gone.
    pub fn restore<M: LightningModule>(&self, module: &M) -> Result<()> {
        module.load_state_dict(&self.state, true)?;
        for (metric, state) in &self.metrics {
            metric.state().restore(state)?;
        }
        let parameters = module.parameters();
        ffi::clear_grads(parameters.iter().map(|parameter| parameter.tensor()))?;
        rng::set_states(&self.rng)
    }
}

impl Trainer {
    /// A trainer like this one for a short run of so many steps, or batches: no callbacks, loggers, files or schedules,
    /// and one batch per step.
    pub(crate) fn trial(
        &self,
        what: &str,
        steps: u64,
        build: impl FnOnce(TrainerBuilder) -> TrainerBuilder,
    ) -> Result<Self> {
        if self.run.world().world_size > 1 {
            let ranks = format!("{} ranks", self.run.world().world_size);
            let remedy = "search with devices=1, and give what it finds to the run with several";
            return Err(ConfigError::new(what, ranks, remedy).into());
        }
        let limit = Some(Limit::Batches(steps));
        let config = TrainerConfig {
            callbacks: Vec::new(),
            profiler: None,
            max_epochs: Some(-1),
            min_epochs: None,
            min_steps: None,
            max_time: None,
            max_steps: steps as i64,
            accumulate_grad_batches: 1,
            limit_val_batches: Some(Limit::Batches(0)),
            limit_test_batches: limit,
            limit_predict_batches: limit,
            overfit_batches: Limit::Fraction(0.0),
            barebones: true,
            logger: None,
            enable_checkpointing: None,
            enable_progress_bar: None,
            enable_model_summary: None,
            log_every_n_steps: None,
            num_sanity_val_steps: None,
            save_on_signal: false,
            detect_anomaly: false,
            ..self.config.clone()
        };
        let accelerator = Arc::clone(&self.run.accelerator);
        let mut builder = build(TrainerBuilder::default().config(config).accelerator(accelerator));
        if let Some(given) = &self.optimizers {
            builder = builder.optimizer(given.optimizer.clone(), None);
        }
        let mut trainer = builder.build()?;
        trainer.plan.drops_schedulers = true;
        trainer.run.kept = Keep::First(rng::states(self.plan.device)?);
        Ok(trainer)
    }

    /// Of a trial that has run: what its module was before; nothing if it came to an end before the module was complete.
    pub(crate) fn take_kept(&mut self) -> Option<Kept> {
        match std::mem::take(&mut self.run.kept) {
            Keep::Done(kept) => Some(*kept),
            Keep::Nothing | Keep::First(_) => None,
        }
    }
}
