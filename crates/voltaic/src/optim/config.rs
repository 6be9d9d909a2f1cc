//! Optimizers and schedules by name, as a configuration file has them: `{class_path: AdamW, init_args: {lr: 0.001}}`.

use schemars::JsonSchema;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};
use tch::Tensor;

use super::adam::{Adam, AdamW};
use super::adaptive::{Adadelta, Adagrad, RmsProp};
use super::lion::{Lamb, Lion};
use super::lr_scheduler::basic::{ConstantLr, ExponentialLr, LinearLr, MultiStepLr, PolynomialLr, StepLr};
use super::lr_scheduler::cosine::{CosineAnnealingLr, CosineAnnealingWarmRestarts};
use super::lr_scheduler::one_cycle::OneCycleLr;
use super::lr_scheduler::plateau::ReduceLrOnPlateau;
use super::lr_scheduler::range_test::{LrRangeTest, OneCycle};
use super::lr_scheduler::scheduler::{BuildLrScheduler, KEY, LrScheduler};
use super::lr_scheduler::sequential::{LinearWarmupCosine, Sequence};
use super::lr_scheduler::stepper::BuildChained;
use super::lr_scheduler::swa::SwaLr;
use super::lr_scheduler::warmup::{WarmupCosineLr, WarmupDecayLr, WarmupLr};
use super::muon::Muon;
use super::muon_aux::MuonWithAuxAdam;
use super::optimizer::{BuildOptimizer, Optimizer};
use super::optimizers::into_optimizers;
use super::param_group::{ParamGroup, ParamGroupSpec};
use super::problems::Problems;
use super::sgd::Sgd;
use crate::config::nearest;
use crate::error::{ConfigProblem, Error, Result};
use crate::nn::Parameter;

/// What a configuration file says, before the class is known.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ClassPath {
    class_path: String,
    #[serde(default)]
    init_args: Map<String, Value>,
}

impl ClassPath {
    /// The class named, without the modules before it.
    fn class(&self) -> &str {
        self.class_path.rsplit('.').next().unwrap_or(&self.class_path)
    }

    fn args<T: DeserializeOwned>(self) -> Result<T, String> {
        serde_path_to_error::deserialize(Value::Object(self.init_args)).map_err(|error| {
            let path = error.path().to_string();
            let key = if path == "." { "init_args".to_owned() } else { format!("init_args.{path}") };
            format!("{key} of {}: {}", self.class_path, error.into_inner())
        })
    }

    fn unknown(&self, what: &str, known: &[&str]) -> String {
        let near = nearest(self.class(), known.iter().copied());
        let hint = near.map(|name| format!("did you mean {name}? ")).unwrap_or_default();
        format!("class_path: {} is not {what}; {hint}there are {}", self.class_path, known.join(", "))
    }
}

/// An enum of classes. The first name of each is PyTorch's, which is written; the second one is read as well.
macro_rules! classes {
    (
        $(#[$doc:meta])* $enum:ident: $build:ident, $what:literal,
        $($(#[$variant_doc:meta])* $variant:ident($type:ty) = $name:literal | $alias:literal,)*
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
        #[serde(tag = "class_path", content = "init_args")]
        #[non_exhaustive]
        pub enum $enum {
            $($(#[$variant_doc])* #[serde(rename = $name)] $variant($type),)*
        }

        impl $enum {
            /// The names that `class_path` may have.
            pub const CLASSES: &'static [&'static str] = &[$($name),*];

            fn inner(&self) -> &dyn $build {
                match self {
                    $(Self::$variant(config) => config,)*
                }
            }
        }

        impl<'de> Deserialize<'de> for $enum {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let class = ClassPath::deserialize(deserializer)?;
                match class.class() {
                    $($name | $alias => class.args().map(Self::$variant),)*
                    _ => Err(class.unknown($what, Self::CLASSES)),
                }
                .map_err(D::Error::custom)
            }
        }

        $(impl From<$type> for $enum {
            fn from(config: $type) -> Self {
                Self::$variant(config)
            }
        })*
    };
}

classes! {
    /// An optimizer by name.
    ///
    /// `class_path` may be written with PyTorch's module path (`torch.optim.AdamW`).
    OptimizerConfig: BuildOptimizer, "an optimizer",
    /// Stochastic gradient descent.
    Sgd(Sgd) = "SGD" | "Sgd",
    /// Adam with L2 penalty.
    Adam(Adam) = "Adam" | "adam",
    /// Adam with decoupled weight decay.
    AdamW(AdamW) = "AdamW" | "adamw",
    /// Adagrad.
    Adagrad(Adagrad) = "Adagrad" | "adagrad",
    /// RMSprop.
    RmsProp(RmsProp) = "RMSprop" | "RmsProp",
    /// Adadelta.
    Adadelta(Adadelta) = "Adadelta" | "adadelta",
    /// Lion, as DeepSpeed's.
    Lion(Lion) = "Lion" | "lion",
    /// LAMB, as DeepSpeed's.
    Lamb(Lamb) = "Lamb" | "lamb",
    /// Muon, for matrices.
    Muon(Muon) = "Muon" | "muon",
    /// Muon for matrices and AdamW for other parameters, as DeepSpeed's.
    MuonWithAuxAdam(MuonWithAuxAdam) = "MuonWithAuxAdam" | "muon_with_aux_adam",
}

into_optimizers!(OptimizerConfig);

impl OptimizerConfig {
    /// What is wrong with the settings, found by building the optimizer for a matrix that is not trained.
    pub(crate) fn problems(&self) -> Vec<ConfigProblem> {
        let weight = Parameter::new(Tensor::from(0.0_f32).reshape([1_i64, 1]));
        match self.build(vec![ParamGroupSpec::new([("weight".to_owned(), weight)])]) {
            Err(Error::Config(error)) => error.problems,
            _ => Vec::new(), // what else there is shows in the fit
        }
    }
}

impl BuildOptimizer for OptimizerConfig {
    fn name(&self) -> &'static str {
        self.inner().name()
    }

    fn is_elementwise(&self) -> bool {
        self.inner().is_elementwise()
    }

    fn needs_unsharded_parameters(&self) -> bool {
        self.inner().needs_unsharded_parameters()
    }

    fn unshards_parameters(&self) -> bool {
        self.inner().unshards_parameters()
    }

    fn build(&self, groups: Vec<ParamGroupSpec>) -> Result<Box<dyn Optimizer>> {
        self.inner().build(groups)
    }
}

classes! {
    /// A learning rate schedule by name.
    ///
    /// `class_path` may be written with PyTorch's module path (`torch.optim.lr_scheduler.StepLR`).
    LrSchedulerConfig: BuildLrScheduler, "a learning rate schedule",
    /// A factor every so many steps.
    StepLr(StepLr) = "StepLR" | "StepLr",
    /// A factor at given steps.
    MultiStepLr(MultiStepLr) = "MultiStepLR" | "MultiStepLr",
    /// A smaller rate at first.
    ConstantLr(ConstantLr) = "ConstantLR" | "ConstantLr",
    /// A line, such as linear warm-up.
    LinearLr(LinearLr) = "LinearLR" | "LinearLr",
    /// A factor at every step.
    ExponentialLr(ExponentialLr) = "ExponentialLR" | "ExponentialLr",
    /// A power that falls to zero.
    PolynomialLr(PolynomialLr) = "PolynomialLR" | "PolynomialLr",
    /// Half a cosine.
    CosineAnnealingLr(CosineAnnealingLr) = "CosineAnnealingLR" | "CosineAnnealingLr",
    /// Half a cosine, over and over.
    CosineAnnealingWarmRestarts(CosineAnnealingWarmRestarts) =
        "CosineAnnealingWarmRestarts" | "CosineAnnealingWarmRestartsLR",
    /// The one-cycle policy.
    OneCycleLr(OneCycleLr) = "OneCycleLR" | "OneCycleLr",
    /// Schedules one after the other.
    SequentialLr(SequentialLr) = "SequentialLR" | "SequentialLr",
    /// Linear warm-up, then half a cosine.
    LinearWarmupCosine(LinearWarmupCosine) = "LinearWarmupCosine" | "LinearWarmupCosineLR",
    /// To a rate that then stays, for averages of the weights.
    SwaLr(SwaLr) = "SWALR" | "SwaLr",
    /// Lower when a metric has stopped improving.
    ReduceLrOnPlateau(ReduceLrOnPlateau) = "ReduceLROnPlateau" | "ReduceLrOnPlateau",
    /// DeepSpeed's rise to a rate that then stays.
    WarmupLr(WarmupLr) = "WarmupLR" | "WarmupLr",
    /// DeepSpeed's rise, and then a line down.
    WarmupDecayLr(WarmupDecayLr) = "WarmupDecayLR" | "WarmupDecayLr",
    /// DeepSpeed's rise, and then half a cosine down.
    WarmupCosineLr(WarmupCosineLr) = "WarmupCosineLR" | "WarmupCosineLr",
    /// DeepSpeed's one-cycle policy.
    OneCycle(OneCycle) = "OneCycle" | "onecycle",
    /// DeepSpeed's rise without end, to find the highest rate.
    LrRangeTest(LrRangeTest) = "LRRangeTest" | "LrRangeTest",
}

impl LrSchedulerConfig {
    /// The schedule, if it can be part of a sequence.
    fn chainable(&self) -> Option<&dyn BuildChained> {
        Some(match self {
            Self::StepLr(config) => config,
            Self::MultiStepLr(config) => config,
            Self::ConstantLr(config) => config,
            Self::LinearLr(config) => config,
            Self::ExponentialLr(config) => config,
            Self::PolynomialLr(config) => config,
            Self::CosineAnnealingLr(config) => config,
            Self::CosineAnnealingWarmRestarts(config) => config,
            _ => return None,
        })
    }
}

impl BuildLrScheduler for LrSchedulerConfig {
    fn name(&self) -> &'static str {
        self.inner().name()
    }

    fn needs_metric(&self) -> bool {
        self.inner().needs_metric()
    }

    fn build(&self, groups: &mut [ParamGroup]) -> Result<Box<dyn LrScheduler>> {
        self.inner().build(groups)
    }
}

/// Several schedules, each from a milestone to the next; as `torch.optim.lr_scheduler.SequentialLR`.
///
/// Each starts from the learning rate that the optimizer was given, not from where the one before it ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SequentialLr {
    /// The schedules in order. OneCycleLR, ReduceLROnPlateau, DeepSpeed's and other sequences cannot be among
    /// them.
    pub schedulers: Vec<LrSchedulerConfig>,
    /// Step at which each schedule but the first begins: increasing, one fewer than the schedules.
    pub milestones: Vec<u64>,
}

impl SequentialLr {
    /// `schedulers` one after the other, changing at `milestones`.
    pub fn new(schedulers: impl Into<Vec<LrSchedulerConfig>>, milestones: impl Into<Vec<u64>>) -> Self {
        Self { schedulers: schedulers.into(), milestones: milestones.into() }
    }

    fn check(&self) -> Result<()> {
        let mut problems = Problems::new(KEY);
        let (schedulers, milestones) = (self.schedulers.len(), self.milestones.len());
        if schedulers == 0 {
            problems.add("schedulers", "is empty", "name at least one schedule");
        } else if milestones + 1 != schedulers {
            let what = format!("has {milestones} values for {schedulers} schedulers");
            problems.add("milestones", what, format!("give {}", schedulers - 1));
        }
        if self.milestones.first() == Some(&0) || self.milestones.windows(2).any(|pair| pair[0] >= pair[1]) {
            let what = format!("{:?} does not increase from 1 on", self.milestones);
            problems.add("milestones", what, "put the steps in order, each once");
        }
        for (index, scheduler) in self.schedulers.iter().enumerate() {
            if scheduler.chainable().is_none() {
                let what = format!("{} cannot be part of a sequence", scheduler.name());
                problems.add(
                    format!("schedulers[{index}]"),
                    what,
                    "use it alone, or choose another schedule",
                );
            }
        }
        problems.finish()
    }
}

impl BuildLrScheduler for SequentialLr {
    fn name(&self) -> &'static str {
        "SequentialLR"
    }

    fn build(&self, groups: &mut [ParamGroup]) -> Result<Box<dyn LrScheduler>> {
        self.check()?;
        let chainable = self.schedulers.iter().filter_map(LrSchedulerConfig::chainable);
        let parts = chainable.map(|scheduler| scheduler.chained(groups)).collect::<Result<_>>()?;
        Ok(Box::new(Sequence::build(self.name(), parts, self.milestones.clone(), groups)?))
    }
}
