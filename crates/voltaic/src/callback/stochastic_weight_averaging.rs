//! Averages the weights of the last epochs, trained at a learning rate of their own (arXiv:1803.05407).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tch::Tensor;
use voltaic_macros::Defaults;

use super::masters::{exchange_masters, with_masters};
use crate::checkpoint::Checkpoint;
use crate::data::Stage;
use crate::device::Device;
use crate::error::{ConfigError, ConfigProblem, Result};
use crate::lightning::Callback;
use crate::module::{CheckpointRequest, HookContext};
use crate::nn::{Module, ModuleExt, has_running_statistics};
use crate::optim::{AnnealStrategy, Interval, LrSchedulerSpec, PerGroup, SwaLr};

/// An epoch: its number from 1, or a part of all epochs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum EpochStart {
    /// The epoch of this number, from 1.
    Epoch(u64),
    /// The epoch of this part of `max_epochs`, from 0.0 to 1.0.
    Fraction(f64),
}

/// What [`StochasticWeightAveraging`] averages, and how it trains meanwhile.
#[derive(Defaults, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct StochasticWeightAveragingConfig {
    /// Learning rate of the epochs that are averaged: one number, or one for each group. Must be set.
    #[default(PerGroup::All(0.0))]
    pub swa_lrs: PerGroup,
    /// Epoch to begin with: a number from 1, or a part of `max_epochs` such as 0.8.
    #[default(EpochStart::Fraction(0.8))]
    pub swa_epoch_start: EpochStart,
    /// Epochs in which the learning rate goes to `swa_lrs`.
    #[default(10)]
    pub annealing_epochs: u64,
    /// Shape of the way there: `cos` or `linear`.
    pub annealing_strategy: AnnealStrategy,
    /// Device that keeps the average; null for that of the weights.
    #[schemars(with = "Option<String>")]
    #[default(Some(Device::Cpu))]
    pub device: Option<Device>,
    /// Write the averaged weights to `swa.ckpt` beside the checkpoints when training ends.
    pub save: bool,
}

type AverageFn = Box<dyn Fn(&Tensor, &Tensor, u64) -> anyhow::Result<Tensor> + Send>;

/// Averages the weights at the beginning of each epoch from `swa_epoch_start` on, while a schedule of its own
/// ([`SwaLr`]) takes the place of the module's. After the last epoch the module has the average, and running statistics
/// of batch normalisation from a pass over the training data. Checkpoints have the weights as they are trained, and the
/// average beside them. Source: Lightning's `StochasticWeightAveraging`.
pub struct StochasticWeightAveraging {
    config: StochasticWeightAveragingConfig,
    /// `None` for an equal average.
    average_fn: Option<AverageFn>,
    /// Parameters by name; empty before the first epoch that counts.
    average: Vec<(String, Tensor)>,
    num_averaged: u64,
    latest_update_epoch: Option<u64>,
    /// Its schedule has taken the place of the module's.
    is_annealing: bool,
    /// Weights and buffers as they were trained, once the module has the average.
    trained: Vec<(String, Tensor)>,
    /// The average of a checkpoint, and the weights that were trained if its own are the average; until the fit begins.
    loaded: Option<[Vec<(String, Tensor)>; 2]>,
}

impl StochasticWeightAveraging {
    /// Averages the last fifth of all epochs, trained at this learning rate.
    ///
    /// # Errors
    /// [`ConfigError`] if a rate is not above 0.
    pub fn new(swa_lrs: impl Into<PerGroup>) -> Result<Self, ConfigError> {
        Self::from_config(StochasticWeightAveragingConfig { swa_lrs: swa_lrs.into(), ..Default::default() })
    }

    /// From its configuration.
    ///
    /// # Errors
    /// [`ConfigError`] with all invalid settings.
    pub fn from_config(config: StochasticWeightAveragingConfig) -> Result<Self, ConfigError> {
        let mut problems = Vec::new();
        let mut refuse = |key: &str, what: String, remedy: &'static str| {
            problems.push(ConfigProblem::new(format!("StochasticWeightAveraging.{key}"), what, remedy));
        };
        let rates = match &config.swa_lrs {
            PerGroup::All(rate) => std::slice::from_ref(rate),
            PerGroup::Each(rates) => rates,
        };
        if rates.is_empty() || rates.iter().any(|rate| !((*rate as f32).is_finite() && *rate > 0.0)) {
            let what = format!("{rates:?} is not above 0, or no number that float32 can hold");
            refuse("swa_lrs", what, "give a learning rate such as 0.05, or one for each group");
        }
        match config.swa_epoch_start {
            EpochStart::Epoch(0) => {
                refuse(
                    "swa_epoch_start",
                    "epoch 0".to_owned(),
                    "epochs count from 1 here; or give a part such as 0.8",
                );
            }
            EpochStart::Fraction(part) if !(0.0..=1.0).contains(&part) => {
                refuse(
                    "swa_epoch_start",
                    format!("{part}"),
                    "give a number from 1, or a part from 0.0 to 1.0",
                );
            }
            _ => {}
        }
        if !problems.is_empty() {
            return Err(ConfigError { problems });
        }
        Ok(Self {
            config,
            average_fn: None,
            average: Vec::new(),
            num_averaged: 0,
            latest_update_epoch: None,
            is_annealing: false,
            trained: Vec::new(),
            loaded: None,
        })
    }

    /// Takes weights in by a function of the average so far, the weights, and how often weights were taken in, in place
    /// of an equal average. Both tensors lie on the average's device.
    #[must_use]
    pub fn average_fn(
        mut self,
        average_fn: impl Fn(&Tensor, &Tensor, u64) -> anyhow::Result<Tensor> + Send + 'static,
    ) -> Self {
        self.average_fn = Some(Box::new(average_fn));
        self
    }

    /// How often weights were taken in.
    pub fn num_averaged(&self) -> u64 {
        self.num_averaged
    }

    /// The first epoch that counts, from 0.
    fn first_epoch(&self, ctx: &HookContext) -> anyhow::Result<u64> {
        let start = match (self.config.swa_epoch_start, ctx.facts().max_epochs) {
            (EpochStart::Epoch(epoch), _) => epoch,
            (EpochStart::Fraction(part), Some(max_epochs)) => (max_epochs as f64 * part) as u64,
            (EpochStart::Fraction(part), None) => anyhow::bail!(
                "StochasticWeightAveraging.swa_epoch_start={part} is a part of trainer.max_epochs, which is not limited; \
                 give the number of an epoch, or set trainer.max_epochs"
            ),
        };
        Ok(start.saturating_sub(1))
    }

    /// Puts its schedule in place of the module's.
    fn anneal(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        if let Some(active) = ctx.lr_schedulers().first() {
            let configured = &active.configured;
            let name = configured.scheduler.name();
            tracing::info!("StochasticWeightAveraging: SWALR takes the place of {name}");
            if configured.interval != Interval::Epoch || configured.frequency != 1 {
                tracing::warn!(
                    "StochasticWeightAveraging: its learning rate changes after each epoch, unlike {name}'s"
                );
            }
        }
        let StochasticWeightAveragingConfig { swa_lrs, annealing_epochs, annealing_strategy, .. } =
            &self.config;
        let schedule =
            SwaLr::new(swa_lrs.clone()).anneal_epochs(*annealing_epochs).anneal_strategy(*annealing_strategy);
        ctx.replace_lr_schedulers(vec![LrSchedulerSpec::new(schedule)])?;
        self.is_annealing = true;
        Ok(())
    }

    /// Where the average of a weight is kept.
    fn device_for(&self, weight: &Tensor) -> Result<Device> {
        self.config.device.map_or_else(|| Device::of(weight), Ok)
    }

    /// Takes the module's weights in.
    fn update(&mut self, ctx: &mut HookContext, module: &dyn Module) -> anyhow::Result<()> {
        let _no_grad = tch::no_grad_guard();
        let copied = self.num_averaged == 0;
        if copied {
            self.average.clear();
        }
        let mut weights = Vec::new();
        for (name, weight) in module.named_parameters() {
            weights.push((name, weight.lasting()?.f_detach()?));
        }
        for (index, (name, now)) in with_masters(ctx, weights)?.into_iter().enumerate() {
            let device = self.device_for(&now)?;
            let now = now.f_to_device(device.tch())?;
            if copied {
                self.average.push((name, now.copy()));
                continue;
            }
            let Some((_, average)) = self.average.get_mut(index) else { continue };
            let next = match &self.average_fn {
                Some(average_fn) => average_fn(average, &now, self.num_averaged)?,
                None => {
                    let part = now.f_sub(average)?.f_div_scalar((self.num_averaged + 1) as f64)?;
                    average.f_add(&part)?
                }
            };
            average.f_copy_(&next)?;
        }
        self.num_averaged += 1;
        Ok(())
    }
}

const AVERAGE: &str = "StochasticWeightAveraging.average.";
const CURRENT: &str = "StochasticWeightAveraging.current.";
/// Where the finished weights go.
pub(crate) const SWA_FILE: &str = "swa.ckpt";

impl Callback for StochasticWeightAveraging {
    fn state_dict(&self) -> Option<Value> {
        Some(json!({
            "n_averaged": self.num_averaged,
            "latest_update_epoch": self.latest_update_epoch,
            "is_annealing": self.is_annealing,
        }))
    }

    fn load_state_dict(&mut self, state: &Value) -> anyhow::Result<()> {
        self.num_averaged = state["n_averaged"].as_u64().unwrap_or(0);
        self.latest_update_epoch = state["latest_update_epoch"].as_u64();
        self.is_annealing = state["is_annealing"].as_bool().unwrap_or(false);
        Ok(())
    }

    fn on_save_checkpoint(
        &mut self,
        _ctx: &mut HookContext,
        checkpoint: &mut Checkpoint,
    ) -> anyhow::Result<()> {
        exchange_masters(checkpoint, &self.trained)?; // a resumed run trains from the weights that were trained
        if let Some(training) = &mut checkpoint.training {
            for (prefix, tensors) in [(AVERAGE, &self.average), (CURRENT, &self.trained)] {
                let tensors = tensors.iter();
                let named = tensors.map(|(name, tensor)| (format!("{prefix}{name}"), tensor.shallow_clone()));
                training.callbacks.extend(named);
            }
        }
        Ok(())
    }

    fn on_load_checkpoint(&mut self, checkpoint: &Checkpoint) -> anyhow::Result<()> {
        self.loaded = Some([AVERAGE, CURRENT].map(|prefix| checkpoint.callback_tensors(prefix)));
        Ok(())
    }

    fn setup(&mut self, _stage: Stage, _module: &mut dyn Module) -> anyhow::Result<()> {
        self.loaded = None;
        Ok(())
    }

    fn on_fit_start(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        let (optimizers, schedulers) = (ctx.optimizers().len(), ctx.lr_schedulers().len());
        anyhow::ensure!(
            optimizers == 1 && schedulers <= 1,
            "StochasticWeightAveraging with {optimizers} optimizers and {schedulers} schedules; configure one optimizer, \
             and one schedule or none"
        );
        self.first_epoch(ctx)?;
        self.average = Vec::new();
        self.trained = Vec::new();
        let Some([loaded, trained]) = self.loaded.take() else {
            (self.num_averaged, self.latest_update_epoch, self.is_annealing) = (0, None, false);
            return Ok(());
        };
        for (name, weight) in module.named_parameters() {
            if let Some((_, average)) = loaded.iter().find(|(saved, _)| *saved == name) {
                let device = self.device_for(weight.leaf())?;
                self.average.push((name, average.f_to_device(device.tch())?.copy()));
            }
        }
        if !trained.is_empty() {
            module.load_state_dict(&trained, false)?;
        }
        if self.is_annealing {
            self.anneal(ctx)?; // its position comes from the checkpoint, too
        }
        Ok(())
    }

    fn on_train_epoch_start(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        let (epoch, first) = (ctx.current_epoch(), self.first_epoch(ctx)?);
        if epoch < first {
            return Ok(());
        }
        if !self.is_annealing {
            if epoch > first {
                tracing::warn!(
                    "StochasticWeightAveraging begins in epoch {epoch}, though epoch {first} was to be the first"
                );
            }
            self.anneal(ctx)?;
        }
        if self.latest_update_epoch.is_none_or(|latest| epoch > latest) {
            self.update(ctx, module)?;
            self.latest_update_epoch = Some(epoch);
        }
        Ok(())
    }

    fn on_train_end(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        let _no_grad = tch::no_grad_guard();
        if !self.average.is_empty() {
            let state = with_masters(ctx, module.try_state_dict()?)?;
            let kept = state.into_iter().map(|(name, tensor)| {
                Ok((name, tensor.f_to_device(self.device_for(&tensor)?.tch())?.copy()))
            });
            self.trained = kept.collect::<Result<_>>()?; // a checkpoint that is written now has them
        }
        for (name, weight) in module.named_parameters() {
            if let Some((_, average)) = self.average.iter().find(|(averaged, _)| *averaged == name) {
                weight.update(|weight| Ok(weight.shallow_clone().f_copy_(average)?))?;
            }
        }
        ctx.set_master_weights(&self.average)?;
        if !self.average.is_empty() && has_running_statistics(module) {
            ctx.request_running_statistics();
        }
        Ok(())
    }

    fn on_fit_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        if self.config.save && !self.average.is_empty() && !ctx.facts().fast_dev_run {
            let path = ctx.log_dir().join("checkpoints").join(SWA_FILE);
            ctx.request_checkpoint(CheckpointRequest {
                path,
                weights_only: true,
                link_to: None,
                then_remove: Vec::new(),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_make_no_sense_are_refused_together() {
        let config = StochasticWeightAveragingConfig {
            swa_epoch_start: EpochStart::Fraction(1.5),
            ..Default::default()
        };
        let problems = StochasticWeightAveraging::from_config(config).err().unwrap().problems;
        let keys: Vec<&str> = problems.iter().map(|problem| problem.key.as_str()).collect();
        let expected = ["swa_lrs", "swa_epoch_start"];
        assert_eq!(keys, expected.map(|key| format!("StochasticWeightAveraging.{key}")));
        assert!(StochasticWeightAveraging::new(vec![0.1, -0.1]).is_err());
    }
}
