//! Stochastic gradient descent.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Kind;

use super::engine::{Engine, Rule, Slot};
use super::optimizer::{BuildOptimizer, Optimizer};
use super::param_group::build_groups;
use super::param_group::{GroupOptions, Merged, Overrides, ParamGroup, ParamGroupSpec, SavedGroup};
use super::problems::Problems;
use super::replay::Rate;
use super::setters::setters;
use crate::device::Device;
use crate::error::Result;
use crate::ffi::{self, LearningRate, RecordingPause, SgdOptions, TensorList};

/// PyTorch's name.
const NAME: &str = "SGD";

/// Stochastic gradient descent, with momentum if wanted; as `torch.optim.SGD`.
///
/// With gradient `g`, weights `w` and buffer `b`: `g += weight_decay * w`; `b = momentum * b + (1 - dampening) * g`
/// (`b = g` at the first step); `w -= lr * b`, or with Nesterov momentum `w -= lr * (g + momentum * b)`.
/// Nesterov momentum follows Sutskever et al., "On the importance of initialization and momentum in deep learning"
/// (ICML 2013).
///
/// ```
/// use voltaic::optim::Sgd;
/// let sgd = Sgd::new(0.1).momentum(0.9).nesterov(true);
/// # assert_eq!(sgd.momentum, 0.9);
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Sgd {
    /// Learning rate, at least 0.
    pub lr: f64,
    /// Momentum factor, at least 0; 0 keeps no buffer.
    pub momentum: f64,
    /// Part of the gradient that is kept out of the momentum buffer.
    pub dampening: f64,
    /// L2 penalty: this times the weights is added to the gradient. At least 0.
    pub weight_decay: f64,
    /// Looks ahead along the momentum; needs momentum above 0 and no dampening.
    pub nesterov: bool,
    /// Ascends instead of descends.
    pub maximize: bool,
    /// Updates parameters in bfloat16 or float16 in float32 copies, which lose no small updates, and rounds these to
    /// the parameters after each step (arXiv:1710.03740, section 3.1).
    pub master_weights: bool,
}

impl Default for Sgd {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            momentum: 0.0,
            dampening: 0.0,
            weight_decay: 0.0,
            nesterov: false,
            maximize: false,
            master_weights: false,
        }
    }
}

impl Sgd {
    /// Plain SGD with a learning rate.
    pub fn new(lr: f64) -> Self {
        Self { lr, ..Self::default() }
    }

    setters! {
        /// Sets the learning rate.
        lr: f64,
        /// Sets the momentum factor.
        momentum: f64,
        /// Sets the dampening of the momentum.
        dampening: f64,
        /// Sets the L2 penalty.
        weight_decay: f64,
        /// Sets whether Nesterov momentum is used.
        nesterov: bool,
        /// Sets whether the objective is ascended.
        maximize: bool,
        /// Sets whether parameters of a lower dtype are updated in float32 copies.
        master_weights: bool,
    }

    /// These settings with those that a group has of its own.
    fn with(&self, own: &Overrides) -> Self {
        Self {
            lr: own.lr.unwrap_or(self.lr),
            momentum: own.momentum.unwrap_or(self.momentum),
            dampening: own.dampening.unwrap_or(self.dampening),
            weight_decay: own.weight_decay.unwrap_or(self.weight_decay),
            nesterov: own.nesterov.unwrap_or(self.nesterov),
            maximize: own.maximize.unwrap_or(self.maximize),
            master_weights: self.master_weights,
        }
    }

    fn check(&self, at: &str, problems: &mut Problems) {
        problems.require_not_negative(format!("{at}.lr"), self.lr);
        problems.require_not_negative(format!("{at}.momentum"), self.momentum);
        problems.require(
            self.dampening.is_finite(),
            format!("{at}.dampening"),
            self.dampening,
            "a finite number",
        );
        problems.require_not_negative(format!("{at}.weight_decay"), self.weight_decay);
        if self.nesterov && (self.momentum <= 0.0 || self.dampening != 0.0) {
            let what = format!("true with momentum {} and dampening {}", self.momentum, self.dampening);
            problems.add(
                format!("{at}.nesterov"),
                what,
                "set momentum above 0 and dampening 0, or nesterov=false",
            );
        }
    }
}

impl BuildOptimizer for Sgd {
    fn name(&self) -> &'static str {
        NAME
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn build(&self, groups: Vec<ParamGroupSpec>) -> Result<Box<dyn Optimizer>> {
        let groups = build_groups(
            groups,
            |problems| self.check("init_args", problems),
            |own, at, problems| {
                let merged = self.with(own);
                merged.check(at, problems);
                for (key, set) in [
                    ("betas", own.betas.is_some()),
                    ("eps", own.eps.is_some()),
                    ("amsgrad", own.amsgrad.is_some()),
                ] {
                    if set {
                        problems.add(format!("{at}.{key}"), "is not a setting of SGD", "remove it");
                    }
                }
                Merged {
                    lr: merged.lr,
                    weight_decay: merged.weight_decay,
                    maximize: merged.maximize,
                    options: GroupOptions::Sgd {
                        momentum: merged.momentum,
                        dampening: merged.dampening,
                        nesterov: merged.nesterov,
                    },
                }
            },
        )?;
        Ok(Box::new(Engine::new(SgdRule, groups, self.master_weights)?))
    }
}

struct SgdRule;

struct SgdLists {
    params: TensorList,
    buffers: Option<TensorList>,
    /// Entries whose buffer holds nothing yet, and the others.
    first: Vec<usize>,
    later: Vec<usize>,
    /// They have 16 bits, and are not on CUDA.
    is_narrow: bool,
}

impl SgdRule {
    fn options<'a>(group: &ParamGroup, lr: LearningRate<'a>) -> SgdOptions<'a> {
        let (momentum, dampening, nesterov) = match group.options {
            GroupOptions::Sgd { momentum, dampening, nesterov } => (momentum, dampening, nesterov),
            _ => (0.0, 0.0, false),
        };
        SgdOptions {
            lr,
            weight_decay: group.weight_decay,
            momentum,
            dampening,
            nesterov,
            maximize: group.maximize,
        }
    }

    fn update_now(options: &SgdOptions<'_>, lists: &mut SgdLists, grads: &mut TensorList) -> Result<()> {
        match &lists.buffers {
            Some(buffers) if !lists.first.is_empty() && !lists.later.is_empty() => {
                for (entries, is_first_step) in [(&lists.first, true), (&lists.later, false)] {
                    let (params, buffers) = (lists.params.select(entries)?, buffers.select(entries)?);
                    let grads = &mut grads.select(entries)?;
                    Self::step(options, &params, grads, Some(&buffers), is_first_step, lists.is_narrow)?;
                }
                grads.clear();
            }
            buffers => {
                let is_first_step = !lists.first.is_empty();
                let buffers = buffers.as_ref();
                Self::step(options, &lists.params, grads, buffers, is_first_step, lists.is_narrow)?;
            }
        }
        // from now on every buffer holds something
        lists.first.clear();
        Ok(())
    }

    /// One step of the kernel. That for the CPU reads momentum of 16 bits as if it had 32, past its end: it is given float32.
    fn step(
        options: &SgdOptions<'_>,
        params: &TensorList,
        grads: &mut TensorList,
        buffers: Option<&TensorList>,
        is_first_step: bool,
        is_narrow: bool,
    ) -> Result<()> {
        let Some(buffers) = buffers.filter(|_| is_narrow) else {
            return Ok(options.step(params, grads, buffers, is_first_step)?);
        };
        let wide = |list: &TensorList| -> Result<TensorList> {
            let mut copies = list.copies()?;
            copies.to_float()?;
            Ok(copies)
        };
        let (wide_params, mut wide_grads, wide_buffers) = (wide(params)?, wide(grads)?, wide(buffers)?);
        grads.clear();
        options.step(&wide_params, &mut wide_grads, Some(&wide_buffers), is_first_step)?;
        params.copy_from(&wide_params)?;
        Ok(buffers.copy_from(&wide_buffers)?)
    }

    /// A first step, which fills buffers, while it is captured: replays are later steps, which read them. So a later
    /// step is recorded, and its results are replaced by those of the first one, which runs unrecorded.
    fn record_first(options: &SgdOptions<'_>, lists: &mut SgdLists, grads: &mut TensorList) -> Result<()> {
        let unrecorded = RecordingPause::begin();
        Self::update_now(options, lists, &mut grads.copies()?)?;
        let Some(buffers) = &lists.buffers else { return Ok(()) };
        let (params, momenta) = (lists.params.copies()?, buffers.copies()?);
        drop(unrecorded);
        Self::step(options, &lists.params, grads, Some(buffers), false, lists.is_narrow)?;
        let _unrecorded = RecordingPause::begin();
        lists.params.copy_from(&params)?;
        Ok(buffers.copy_from(&momenta)?)
    }
}

impl Rule for SgdRule {
    const STATE: &'static [&'static str] = &["momentum_buffer"];
    type Lists = SgdLists;

    fn name(&self) -> &'static str {
        NAME
    }

    fn lists(&self, group: &ParamGroup, members: &mut [Slot], active: &[usize]) -> Result<SgdLists> {
        let params = TensorList::new(active.iter().map(|index| members[*index].weights()))?;
        if group.momentum() == 0.0 {
            let (first, later) = (Vec::new(), Vec::new());
            return Ok(SgdLists { params, buffers: None, first, later, is_narrow: false });
        }
        let (mut first, mut later, mut buffers) = (Vec::new(), Vec::new(), Vec::new());
        for (entry, index) in active.iter().enumerate() {
            let slot = &mut members[*index];
            let buffer = match &slot.state[0] {
                Some(buffer) => {
                    later.push(entry);
                    buffer.shallow_clone()
                }
                None => {
                    first.push(entry);
                    slot.weights().detach().f_zeros_like()?
                }
            };
            slot.state[0] = Some(buffer.shallow_clone());
            buffers.push(buffer);
        }
        let is_narrow = buffers.first().is_some_and(|buffer| {
            matches!(buffer.kind(), Kind::BFloat16 | Kind::Half)
                && !matches!(Device::of(buffer), Ok(Device::Cuda(_)))
        });
        Ok(SgdLists { params, buffers: Some(TensorList::new(&buffers)?), first, later, is_narrow })
    }

    fn fits(&self, group: &ParamGroup, lists: &SgdLists) -> bool {
        lists.buffers.is_some() == (group.momentum() != 0.0)
    }

    fn update(
        &self,
        group: &ParamGroup,
        rate: Rate<'_>,
        lists: &mut SgdLists,
        grads: &mut TensorList,
    ) -> Result<()> {
        let options = Self::options(group, rate.lr);
        if !lists.first.is_empty() && ffi::is_recording() {
            return Self::record_first(&options, lists, grads);
        }
        Self::update_now(&options, lists, grads)
    }

    fn required(_: &SavedGroup) -> Vec<usize> {
        Vec::new()
    }

    fn is_count(_: usize) -> bool {
        false
    }
}
