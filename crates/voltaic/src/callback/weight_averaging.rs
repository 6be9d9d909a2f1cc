//! Keeps an average of the weights, which validation and the finished model use.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tch::Tensor;
use voltaic_macros::Defaults;

use super::masters::{exchange_masters, with_masters};
use crate::checkpoint::{Checkpoint, Shard, callback_name};
use crate::data::Stage;
use crate::device::Device;
use crate::error::{ConfigError, ConfigProblem, Result};
use crate::lightning::Callback;
use crate::module::HookContext;
use crate::nn::{Module, ModuleExt};

/// When an equal average of the weights is taken.
#[derive(Defaults, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct WeightAveragingConfig {
    /// Take the weights in after every so many optimizer steps; 0 for never.
    #[default(1)]
    pub update_every_n_steps: u64,
    /// Optimizer step, from 0, from which on they are taken in.
    pub update_starting_at_step: Option<u64>,
    /// Epoch, from 0, from which on they are taken in at each end of an epoch; never unless set.
    pub update_starting_at_epoch: Option<u64>,
    /// Average buffers, such as running means, too.
    #[default(true)]
    pub use_buffers: bool,
    /// Device that keeps the average; that of the weights unless set.
    #[schemars(with = "Option<String>")]
    pub device: Option<Device>,
}

/// When and how fast an exponential moving average of the weights follows them.
#[derive(Defaults, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EmaWeightAveragingConfig {
    /// Part of the old average that an update keeps.
    #[default(0.999)]
    pub decay: f64,
    /// Take the weights in after every so many optimizer steps; 0 for never.
    #[default(1)]
    pub update_every_n_steps: u64,
    /// Optimizer step, from 0, from which on they are taken in.
    pub update_starting_at_step: Option<u64>,
    /// Epoch, from 0, from which on they are taken in at each end of an epoch; never unless set.
    pub update_starting_at_epoch: Option<u64>,
    /// Average buffers, such as running means, too.
    #[default(true)]
    pub use_buffers: bool,
    /// Device that keeps the average; that of the weights unless set.
    #[schemars(with = "Option<String>")]
    pub device: Option<Device>,
}

/// Keeps an average of the weights: validation within fit, checkpoints and the module after fit have it; training goes
/// on with the weights themselves, which a checkpoint keeps beside it. Source: Lightning's `WeightAveraging` and
/// `EMAWeightAveraging`, PyTorch's `AveragedModel`.
///
/// The average takes as much memory as the weights.
pub struct WeightAveraging {
    when: WeightAveragingConfig,
    /// `None` for an equal average.
    decay: Option<f64>,
    /// Parameters and buffers by name, as in the module's state dict.
    average: Vec<(String, Tensor)>,
    num_averaged: u64,
    latest_update_step: u64,
    latest_update_epoch: Option<u64>,
    /// The average is in the module, as in validation and after training; the weights that are trained are in `average`.
    is_swapped: bool,
    /// Weights of a checkpoint, and what it has of the average in float32, until the module can take them.
    loaded: Option<[Vec<(String, Tensor)>; 2]>,
}

impl WeightAveraging {
    /// An equal average of the weights.
    pub fn new(config: WeightAveragingConfig) -> Self {
        Self {
            when: config,
            decay: None,
            average: Vec::new(),
            num_averaged: 0,
            latest_update_step: 0,
            latest_update_epoch: None,
            is_swapped: false,
            loaded: None,
        }
    }

    /// An exponential moving average.
    ///
    /// # Errors
    /// [`ConfigError`] if the decay is not between 0 and 1.
    pub fn ema(config: EmaWeightAveragingConfig) -> Result<Self, ConfigError> {
        let EmaWeightAveragingConfig {
            decay,
            update_every_n_steps,
            update_starting_at_step,
            update_starting_at_epoch,
            use_buffers,
            device,
        } = config;
        if !(0.0..=1.0).contains(&decay) {
            let what = format!("{decay} is not between 0 and 1");
            let problem = ConfigProblem::new("EMAWeightAveraging.decay", what, "use a number such as 0.999");
            return Err(ConfigError { problems: vec![problem] });
        }
        let when = WeightAveragingConfig {
            update_every_n_steps,
            update_starting_at_step,
            update_starting_at_epoch,
            use_buffers,
            device,
        };
        Ok(Self { decay: Some(decay), ..Self::new(when) })
    }

    fn is_step_due(&self, step: u64) -> bool {
        let every = self.when.update_every_n_steps;
        every > 0
            && step.is_multiple_of(every)
            && self.when.update_starting_at_step.is_none_or(|start| step >= start)
    }

    /// The module's tensors that are averaged; float32 where the optimizer has a copy of a 16-bit weight in float32.
    fn averaged(&self, ctx: &mut HookContext, module: &dyn Module) -> Result<Vec<(String, Tensor)>> {
        let is_parameter: std::collections::HashSet<String> =
            module.named_parameters().into_iter().map(|(fqn, _)| fqn).collect();
        let state = module.try_state_dict()?.into_iter();
        let state = state.filter(|(fqn, _)| self.when.use_buffers || is_parameter.contains(fqn));
        with_masters(ctx, state.collect())
    }

    /// Takes the module's weights in.
    fn update(&mut self, ctx: &mut HookContext, module: &dyn Module) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        for ((_, now), (_, average)) in self.averaged(ctx, module)?.into_iter().zip(&self.average) {
            let mut average = average.shallow_clone();
            let now = now.f_to_device(average.device())?;
            match self.decay {
                _ if self.num_averaged == 0 || !now.is_floating_point() => {
                    average.f_copy_(&now)?;
                }
                Some(decay) => drop(average.f_lerp_(&now, 1.0 - decay)?),
                None => drop(average.f_lerp_(&now, 1.0 / (self.num_averaged + 1) as f64)?),
            }
        }
        self.num_averaged += 1;
        Ok(())
    }

    /// Exchanges the module's weights, with their float32 copies in the optimizers, and the average. A second time gives back
    /// exactly what was there.
    fn swap(&mut self, ctx: &mut HookContext, module: &dyn Module) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let mut trained = Vec::new();
        for (_, now) in self.averaged(ctx, module)? {
            let mut copy = now.f_empty_like()?;
            copy.f_copy_(&now)?;
            trained.push(copy);
        }
        module.load_state_dict(&self.average, false)?;
        ctx.set_master_weights(&self.average)?;
        for ((_, average), trained) in self.average.iter().zip(&trained) {
            average.shallow_clone().f_copy_(trained)?;
        }
        self.is_swapped = !self.is_swapped;
        Ok(())
    }
}

const CURRENT: &str = "WeightAveraging.current.";
/// The average in float32 where the weights of the checkpoint have it in 16 bits.
const AVERAGE: &str = "WeightAveraging.average.";

impl Callback for WeightAveraging {
    fn state_dict(&self) -> Option<Value> {
        Some(json!({
            "latest_update_step": self.latest_update_step,
            "latest_update_epoch": self.latest_update_epoch,
            "num_averaged": self.num_averaged,
        }))
    }

    fn load_state_dict(&mut self, state: &Value) -> anyhow::Result<()> {
        self.latest_update_step = state["latest_update_step"].as_u64().unwrap_or(0);
        self.latest_update_epoch = state["latest_update_epoch"].as_u64();
        self.num_averaged = state["num_averaged"].as_u64().unwrap_or(0);
        Ok(())
    }

    fn on_save_checkpoint(
        &mut self,
        _ctx: &mut HookContext,
        checkpoint: &mut Checkpoint,
    ) -> anyhow::Result<()> {
        if self.average.is_empty() || self.num_averaged == 0 {
            return Ok(());
        }
        let (mut tensors, mut shards) = (Vec::new(), Vec::new());
        if self.is_swapped {
            // a resumed run trains from the weights that were trained
            let there = exchange_masters(checkpoint, &self.average)?;
            tensors
                .extend(there.whole.into_iter().map(|(fqn, average)| (format!("{AVERAGE}{fqn}"), average)));
            let named =
                |shard: Shard| Shard { name: callback_name(&format!("{AVERAGE}{}", shard.name)), ..shard };
            shards.extend(there.shards.into_iter().map(named));
        }
        for (name, average) in &self.average {
            if let Some(shard) = checkpoint.shards.iter_mut().find(|shard| shard.name == *name) {
                let own = shard.spec.of(average)?.f_to_device(shard.values.device())?;
                let rounded = own.f_to_kind(shard.values.kind())?;
                let trained = match self.is_swapped {
                    true => rounded,
                    false => std::mem::replace(&mut shard.values, rounded),
                };
                let mut add = |prefix: &str, values: Tensor| {
                    let name = callback_name(&format!("{prefix}{name}"));
                    shards.push(Shard { name, spec: shard.spec.clone(), values });
                };
                if !self.is_swapped && own.kind() != trained.kind() {
                    add(AVERAGE, own);
                }
                add(CURRENT, trained);
                continue;
            }
            let Some((_, weight)) = checkpoint.weights.iter_mut().find(|(fqn, _)| fqn == name) else {
                continue;
            };
            // the weights of the module are the average while the two are exchanged
            let rounded = average.f_to_kind(weight.kind())?;
            let trained = match self.is_swapped {
                true => rounded,
                false => std::mem::replace(weight, rounded),
            };
            if !self.is_swapped && average.kind() != trained.kind() {
                tensors.push((format!("{AVERAGE}{name}"), average.shallow_clone()));
            }
            tensors.push((format!("{CURRENT}{name}"), trained));
        }
        if let Some(training) = &mut checkpoint.training {
            training.callbacks.extend(tensors);
            checkpoint.shards.extend(shards);
        }
        Ok(())
    }

    fn on_load_checkpoint(&mut self, checkpoint: &Checkpoint) -> anyhow::Result<()> {
        let [current, average] = [CURRENT, AVERAGE].map(|prefix| checkpoint.callback_tensors(prefix));
        self.loaded = (!current.is_empty()).then_some([current, average]);
        Ok(())
    }

    fn setup(&mut self, _stage: Stage, _module: &mut dyn Module) -> anyhow::Result<()> {
        self.loaded = None; // of a checkpoint that no fit has gone on from
        Ok(())
    }

    fn on_fit_start(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        self.is_swapped = false;
        let copies = self.averaged(ctx, module)?.into_iter().map(|(fqn, now)| {
            let device = self.when.device.map_or_else(|| now.device(), Device::tch);
            Ok((fqn, now.f_detach()?.f_to_device(device)?.copy()))
        });
        self.average = copies.collect::<Result<_>>()?;
        match self.loaded.take() {
            // the module has got the average, under its own names
            Some([current, loaded]) => {
                let _no_grad = tch::no_grad_guard();
                for (name, average) in &self.average {
                    if let Some((_, precise)) = loaded.iter().find(|(saved, _)| saved == name) {
                        average.shallow_clone().f_copy_(precise)?;
                    }
                }
                module.load_state_dict(&current, false)?;
            }
            None => {
                self.num_averaged = 0;
                self.latest_update_step = 0;
                self.latest_update_epoch = None;
            }
        }
        Ok(())
    }

    fn on_train_batch_end(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        let steps = ctx.global_step();
        if steps > self.latest_update_step && self.is_step_due(steps - 1) {
            self.update(ctx, module)?;
            self.latest_update_step = steps;
        }
        Ok(())
    }

    fn on_train_epoch_end(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        let epoch = ctx.current_epoch();
        let is_due = self.when.update_starting_at_epoch.is_some_and(|start| epoch >= start)
            && self.latest_update_epoch.is_none_or(|latest| epoch > latest);
        if is_due {
            self.update(ctx, module)?;
            self.latest_update_epoch = Some(epoch);
        }
        Ok(())
    }

    fn on_validation_epoch_start(
        &mut self,
        ctx: &mut HookContext,
        module: &mut dyn Module,
    ) -> anyhow::Result<()> {
        if ctx.is_training() && self.num_averaged > 0 {
            self.swap(ctx, module)?;
        }
        Ok(())
    }

    fn on_validation_epoch_end(
        &mut self,
        ctx: &mut HookContext,
        module: &mut dyn Module,
    ) -> anyhow::Result<()> {
        if ctx.is_training() && self.is_swapped {
            self.swap(ctx, module)?;
        }
        Ok(())
    }

    fn on_train_end(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        if self.num_averaged > 0 {
            self.swap(ctx, module)?; // a checkpoint of now needs the weights that were trained, too
        }
        Ok(())
    }
}
