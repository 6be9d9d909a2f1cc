//! Gives the loggers the learning rates.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::lightning::Callback;
use crate::module::{Hook, HookContext};
use crate::nn::Module;
use crate::optim::{Interval, Optimizer};

/// What [`LearningRateMonitor`] logs, and when.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LearningRateMonitorConfig {
    /// `step` or `epoch`; unless set, as often as each schedule is stepped.
    pub logging_interval: Option<Interval>,
    /// Log momentum too (for Adam the first beta).
    pub log_momentum: bool,
    /// Log weight decay too.
    pub log_weight_decay: bool,
}

/// Gives the loggers the learning rates as `lr-<optimizer>`, `lr-<optimizer>-1` for a second of the same class, or the
/// schedule's name, with `/` and the name of the group, or `/pg1`, `/pg2` for several groups without one. Monitors can use the names too. A step row is written when
/// `log_every_n_steps` says so. Source: Lightning's `LearningRateMonitor`.
#[derive(Debug, Default)]
pub struct LearningRateMonitor {
    config: LearningRateMonitorConfig,
    /// Name of each optimizer, and the interval of its schedule.
    optimizers: Vec<(String, Option<Interval>)>,
}

impl From<LearningRateMonitorConfig> for LearningRateMonitor {
    fn from(config: LearningRateMonitorConfig) -> Self {
        Self { config, optimizers: Vec::new() }
    }
}

/// Names for the optimizers: first of those with a schedule, then of the others.
fn names(
    classes: &[&str],
    schedules: &[(usize, Option<String>, Interval)],
) -> Vec<(String, Option<Interval>)> {
    let mut names = vec![(String::new(), None); classes.len()];
    let mut taken: Vec<String> = Vec::new();
    let mut free = |wanted: String| {
        let suffixed = (1..).map(|n| format!("{wanted}-{n}"));
        let name = std::iter::once(wanted.clone()).chain(suffixed).find(|name| !taken.contains(name));
        let name = name.unwrap_or(wanted);
        taken.push(name.clone());
        name
    };
    for (optimizer, name, interval) in schedules {
        let wanted = name.clone().unwrap_or_else(|| format!("lr-{}", classes[*optimizer]));
        names[*optimizer] = (free(wanted), Some(*interval));
    }
    for (index, class) in classes.iter().enumerate() {
        if names[index].1.is_none() {
            names[index].0 = free(format!("lr-{class}"));
        }
    }
    names
}

impl LearningRateMonitor {
    /// Values of the optimizers whose schedule has the interval; of all if none is given.
    fn values(&self, optimizers: &[Box<dyn Optimizer>], interval: Option<Interval>) -> Vec<(String, f64)> {
        let mut values = Vec::new();
        for (optimizer, (name, own)) in optimizers.iter().zip(&self.optimizers) {
            if interval.is_some() && own.is_some() && *own != interval {
                continue;
            }
            let groups = optimizer.param_groups();
            for (index, group) in groups.iter().enumerate() {
                let name = match group.name() {
                    Some(own) => format!("{name}/{own}"),
                    None if groups.len() > 1 => format!("{name}/pg{}", index + 1),
                    None => name.clone(),
                };
                values.push((name.clone(), group.lr));
                if self.config.log_momentum {
                    values.push((format!("{name}-momentum"), group.momentum()));
                }
                if self.config.log_weight_decay {
                    values.push((format!("{name}-weight_decay"), group.weight_decay));
                }
            }
        }
        values
    }

    fn begin(&mut self, ctx: &HookContext) {
        let classes: Vec<&str> = ctx.optimizers().iter().map(|optimizer| optimizer.name()).collect();
        let schedules = ctx.lr_schedulers().iter();
        let schedules = schedules
            .map(|active| (active.optimizer, active.configured.name.clone(), active.configured.interval));
        self.optimizers = names(&classes, &schedules.collect::<Vec<_>>());
    }

    fn log(&self, ctx: &mut HookContext, interval: Option<Interval>) {
        let values = self.values(ctx.optimizers(), interval);
        for (name, value) in &values {
            ctx.set_metric(name, *value);
        }
        let step = ctx.progress().batches_that_stepped;
        if !values.is_empty() {
            ctx.log_metrics(values, step);
        }
    }
}

impl Callback for LearningRateMonitor {
    fn needs_logger(&self) -> bool {
        true
    }

    fn on_hook(&mut self, hook: Hook, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        let own = self.config.logging_interval;
        let interval = match hook {
            Hook::OnTrainStart => {
                self.begin(ctx);
                return Ok(());
            }
            Hook::OnTrainEpochStart => Interval::Epoch,
            Hook::OnTrainBatchStart if ctx.log_step().is_some() => Interval::Step,
            _ => return Ok(()),
        };
        if own.is_none_or(|own| own == interval) {
            self.log(ctx, own.is_none().then_some(interval));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::Parameter;
    use crate::optim::{BuildOptimizer, ParamGroupSpec, Sgd};

    #[test]
    fn groups_have_their_names_or_their_numbers() {
        let spec = |name: &str| {
            let weight = Parameter::new(tch::Tensor::zeros([1], (tch::Kind::Float, tch::Device::Cpu)));
            ParamGroupSpec::new([(format!("weight of {name}"), weight)])
        };
        let named = |name: &str| spec(name).name(name);
        let values = |specs: Vec<ParamGroupSpec>| {
            let optimizer = Sgd::new(0.5).build(specs).expect("groups that fit");
            let optimizers = vec![("lr-SGD".to_owned(), None)];
            let monitor = LearningRateMonitor { optimizers, ..LearningRateMonitor::default() };
            let values = monitor.values(&[optimizer], None);
            values.into_iter().map(|(name, _)| name).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(values(vec![spec("a")]), "lr-SGD");
        assert_eq!(values(vec![named("a")]), "lr-SGD/a");
        assert_eq!(values(vec![named("a"), spec("b")]), "lr-SGD/a lr-SGD/pg2");
        let error = Sgd::new(0.5).build(vec![named("a"), named("a")]).err().expect("one name twice");
        assert!(error.to_string().contains("two groups are named a"), "{error}");
    }

    #[test]
    fn names_are_lightnings() {
        let named = |classes: &[&str], schedules: &[(usize, Option<&str>)]| -> Vec<String> {
            let schedules: Vec<_> = schedules
                .iter()
                .map(|(index, name)| (*index, name.map(str::to_owned), Interval::Epoch))
                .collect();
            names(classes, &schedules).into_iter().map(|(name, _)| name).collect()
        };
        assert_eq!(named(&["Adam"], &[(0, None)]), ["lr-Adam"]);
        assert_eq!(named(&["SGD", "SGD"], &[(0, None), (1, None)]), ["lr-SGD", "lr-SGD-1"]);
        assert_eq!(named(&["SGD", "SGD"], &[(1, None)]), ["lr-SGD-1", "lr-SGD"]);
        assert_eq!(named(&["Adam", "SGD"], &[(0, Some("warm"))]), ["warm", "lr-SGD"]);
    }
}
