//! What `configure_optimizers` returns: optimizers with their groups and schedules, not built yet.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::lr_scheduler::scheduler::{BuildLrScheduler, LrScheduler};
use super::optimizer::{BuildOptimizer, Optimizer};
use super::param_group::ParamGroupSpec;
use super::problems::Problems;
use super::unsharded_params::UnshardedParameters;
use crate::config::setters;
use crate::error::Result;
use crate::nn::{Module, ModuleExt, Parameter};

/// The optimizers of a module; usually one.
///
/// ```
/// use voltaic::optim::{AdamW, CosineAnnealingLr, Interval, LrSchedulerSpec, Optimizers};
/// let plain: Optimizers = AdamW::new(1e-3).into();
/// let with_schedule = Optimizers::new(AdamW::new(1e-3))
///     .scheduler(LrSchedulerSpec::new(CosineAnnealingLr::new(1000)).interval(Interval::Step));
/// # assert_eq!((plain.len(), with_schedule.len()), (1, 1));
/// ```
#[derive(Default)]
pub struct Optimizers {
    specs: Vec<OptimizerSpec>,
    lr: Option<f64>,
    float32_states: bool,
}

struct OptimizerSpec {
    optimizer: Box<dyn BuildOptimizer>,
    groups: Option<Vec<ParamGroupSpec>>,
    scheduler: Option<LrSchedulerSpec>,
}

/// An optimizer that is ready, with its schedule.
pub struct ConfiguredOptimizer {
    /// The optimizer.
    pub optimizer: Box<dyn Optimizer>,
    /// Its schedule, if it has one.
    pub scheduler: Option<ConfiguredLrScheduler>,
}

/// A schedule that is ready, and when to step it.
pub struct ConfiguredLrScheduler {
    /// The schedule.
    pub scheduler: Box<dyn LrScheduler>,
    /// What is counted.
    pub interval: Interval,
    /// It is stepped at every so many batches of an epoch, or epochs.
    pub frequency: u64,
    /// Name of the metric that the schedule follows.
    pub monitor: Option<String>,
    /// A missing metric is an error; otherwise the schedule waits for it.
    pub strict: bool,
    /// Name under which the learning rate is logged.
    pub name: Option<String>,
}

/// A schedule at work on one of the optimizers of a run.
pub struct ActiveLrScheduler {
    /// Index of the optimizer.
    pub optimizer: usize,
    /// The schedule.
    pub configured: ConfiguredLrScheduler,
}

/// After what a schedule is stepped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Interval {
    /// After each optimizer step.
    Step,
    /// After each epoch.
    #[default]
    Epoch,
}

/// A schedule, and when to step it: Lightning's `lr_scheduler` dictionary.
pub struct LrSchedulerSpec {
    scheduler: Box<dyn BuildLrScheduler>,
    interval: Interval,
    frequency: u64,
    monitor: Option<String>,
    strict: bool,
    name: Option<String>,
}

impl LrSchedulerSpec {
    /// Steps the schedule once after each epoch.
    pub fn new(scheduler: impl BuildLrScheduler + 'static) -> Self {
        Self {
            scheduler: Box::new(scheduler),
            interval: Interval::default(),
            frequency: 1,
            monitor: None,
            strict: true,
            name: None,
        }
    }

    setters! {
        /// Sets after what the schedule is stepped.
        #[must_use]
        interval: Interval;
        /// Sets at every how many batches of an epoch, or epochs, the schedule is stepped; batches without an optimizer step
        /// step it never.
        #[must_use]
        frequency: u64;
        /// Sets the metric that the schedule follows, by the name it is logged under.
        #[must_use]
        monitor: impl Into<String> = Some(monitor.into());
        /// Sets whether a missing metric is an error, which it is unless set; otherwise the schedule waits for it.
        #[must_use]
        strict: bool;
        /// Sets the name under which the learning rate is logged.
        #[must_use]
        name: impl Into<String> = Some(name.into());
    }

    pub(crate) fn build(self, optimizer: &mut dyn Optimizer) -> Result<ConfiguredLrScheduler> {
        let Self { scheduler, interval, frequency, monitor, strict, name } = self;
        let mut problems = Problems::new("lr_scheduler");
        problems.require(frequency > 0, "frequency", frequency, "at least 1");
        match (scheduler.needs_metric(), &monitor) {
            (true, None) => {
                let what = format!("is not set, but {} follows a metric", scheduler.name());
                problems.add("monitor", what, "name a metric that is logged, such as val_loss");
            }
            (false, Some(metric)) => {
                let what = format!("{metric} is set, but {} follows no metric", scheduler.name());
                problems.add("monitor", what, "remove it, or use ReduceLROnPlateau");
            }
            _ => {}
        }
        problems.finish()?;
        if PER_STEP.contains(&scheduler.name()) && interval == Interval::Epoch {
            tracing::warn!(
                "{} is made to be stepped after each optimizer step; set interval=step",
                scheduler.name()
            );
        }
        let scheduler = scheduler.build(optimizer.param_groups_mut())?;
        Ok(ConfiguredLrScheduler { scheduler, interval, frequency, monitor, strict, name })
    }
}

impl<S: BuildLrScheduler + 'static> From<S> for LrSchedulerSpec {
    fn from(scheduler: S) -> Self {
        Self::new(scheduler)
    }
}

impl Optimizers {
    /// One optimizer over all parameters of the module that require grad.
    pub fn new(optimizer: impl BuildOptimizer + 'static) -> Self {
        let spec = OptimizerSpec { optimizer: Box::new(optimizer), groups: None, scheduler: None };
        Self { specs: vec![spec], lr: None, float32_states: false }
    }

    /// No optimizer: nothing is trained.
    pub fn none() -> Self {
        Self::default()
    }

    /// Gives the optimizer added last these groups of parameters instead of all parameters.
    #[must_use]
    pub fn groups(mut self, groups: impl IntoIterator<Item = ParamGroupSpec>) -> Self {
        if let Some(spec) = self.specs.last_mut() {
            spec.groups = Some(groups.into_iter().collect());
        }
        self
    }

    /// Gives the optimizer added last a schedule.
    #[must_use]
    pub fn scheduler(mut self, scheduler: impl Into<LrSchedulerSpec>) -> Self {
        if let Some(spec) = self.specs.last_mut() {
            spec.scheduler = Some(scheduler.into());
        }
        self
    }

    /// Adds further optimizers, for modules that step them by hand.
    #[must_use]
    pub fn and(mut self, others: impl Into<Self>) -> Self {
        self.specs.extend(others.into().specs);
        self
    }

    /// Gives all groups this learning rate, which their schedules then start from.
    #[must_use]
    pub fn with_lr(mut self, lr: f64) -> Self {
        self.lr = Some(lr);
        self
    }

    /// [`ParamGroupSpec::float32_states`] for all groups.
    #[must_use]
    pub fn with_float32_states(mut self) -> Self {
        self.float32_states = true;
        self
    }

    /// Number of optimizers.
    pub fn len(&self) -> usize {
        self.specs.len()
    }

    /// Whether an optimizer has a schedule.
    pub fn has_scheduler(&self) -> bool {
        self.specs.iter().any(|spec| spec.scheduler.is_some())
    }

    /// Whether there is no optimizer.
    pub fn is_empty(&self) -> bool {
        self.specs.is_empty()
    }

    /// Builds optimizers and schedules for the parameters of `module`.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) if a setting is out of range, a schedule that follows a metric has no
    /// `monitor`, or there are no parameters.
    pub fn build(self, module: &dyn Module) -> Result<Vec<ConfiguredOptimizer>> {
        self.build_over(module, &|parameter| parameter.clone())
    }

    /// Names of the optimizers that do not work on each element by itself, nor on parameters that they unshard; see
    /// [`BuildOptimizer::is_elementwise`] and [`BuildOptimizer::unshards_parameters`].
    pub fn not_elementwise(&self) -> impl Iterator<Item = &'static str> {
        let specs = self.specs.iter().map(|spec| &spec.optimizer);
        let others =
            specs.filter(|optimizer| !optimizer.is_elementwise() && !optimizer.unshards_parameters());
        others.map(|optimizer| optimizer.name())
    }

    /// Names of the optimizers that cannot update shards of parameters; see [`BuildOptimizer::needs_unsharded_parameters`].
    pub fn not_divisible(&self) -> impl Iterator<Item = &'static str> {
        let specs = self.specs.iter().map(|spec| &spec.optimizer);
        specs.filter(|optimizer| optimizer.needs_unsharded_parameters()).map(|optimizer| optimizer.name())
    }

    /// Names of optimizers that update an element by others of its parameter, too.
    pub(crate) fn looks_at_whole_parameters(&self) -> impl Iterator<Item = &'static str> {
        let specs = self.specs.iter().map(|spec| &spec.optimizer);
        specs.filter(|optimizer| !optimizer.is_elementwise()).map(|optimizer| optimizer.name())
    }

    /// The parameters that each optimizer changes, with their fqn.
    pub fn parameters(&self, module: &dyn Module) -> Vec<Vec<(String, Parameter)>> {
        let of = |spec: &OptimizerSpec| match &spec.groups {
            Some(groups) => groups.iter().flat_map(|group| group.params.iter().cloned()).collect(),
            None => all_parameters(module).params,
        };
        self.specs.iter().map(of).collect()
    }

    /// [`Optimizers::build`] over what stands in the place of each parameter, such as a shard of it.
    ///
    /// # Errors
    /// As [`Optimizers::build`].
    pub fn build_over(
        self,
        module: &dyn Module,
        in_place_of: &dyn Fn(&Parameter) -> Parameter,
    ) -> Result<Vec<ConfiguredOptimizer>> {
        self.build_over_shards(module, in_place_of, None)
    }

    /// [`Optimizers::build_over`] over shards of parameters, which `unsharded` unshards.
    ///
    /// # Errors
    /// As [`Optimizers::build`].
    pub fn build_over_shards(
        self,
        module: &dyn Module,
        in_place_of: &dyn Fn(&Parameter) -> Parameter,
        unsharded: Option<Arc<dyn UnshardedParameters>>,
    ) -> Result<Vec<ConfiguredOptimizer>> {
        let mut built = Vec::with_capacity(self.specs.len());
        for OptimizerSpec { optimizer, groups, scheduler } in self.specs {
            let mut groups = groups.unwrap_or_else(|| vec![all_parameters(module)]);
            for (_, parameter) in groups.iter_mut().flat_map(|group| &mut group.params) {
                *parameter = in_place_of(parameter);
            }
            for group in &mut groups {
                group.unsharded.clone_from(&unsharded);
                group.float32_states |= self.float32_states;
            }
            let mut optimizer = optimizer.build(groups)?;
            if let Some(lr) = self.lr {
                optimizer.param_groups_mut().iter_mut().for_each(|group| group.lr = lr);
            }
            let scheduler = scheduler.map(|spec| spec.build(optimizer.as_mut())).transpose()?;
            built.push(ConfiguredOptimizer { optimizer, scheduler });
        }
        Ok(built)
    }
}

/// Schedules that count optimizer steps.
const PER_STEP: [&str; 6] =
    ["OneCycleLR", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"];

/// All parameters, as `AdamW(self.parameters())` takes them in PyTorch: one that is frozen has no gradient, so that it is left
/// alone and has no state until it is unfrozen.
fn all_parameters(module: &dyn Module) -> ParamGroupSpec {
    ParamGroupSpec::new(module.named_parameters())
}

impl<O: BuildOptimizer + 'static> From<O> for Optimizers {
    fn from(optimizer: O) -> Self {
        Self::new(optimizer)
    }
}

/// Lets a hook that returns `anyhow::Result<Optimizers>` end with `AdamW::new(1e-3).into()`.
macro_rules! into_optimizers {
    ($config:ty) => {
        impl From<$config> for anyhow::Result<$crate::optim::optimizers::Optimizers> {
            fn from(config: $config) -> Self {
                Ok(config.into())
            }
        }
    };
}
pub(super) use into_optimizers;

impl From<Optimizers> for anyhow::Result<Optimizers> {
    fn from(optimizers: Optimizers) -> Self {
        Ok(optimizers)
    }
}
