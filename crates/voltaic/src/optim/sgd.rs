//! Stochastic gradient descent.

use tch::Kind;
use voltaic_macros::settings;

use super::checks::{finite, not_negative};
use super::engine::{Engine, Rule, Slot};
use super::optimizer::{BuildOptimizer, Optimizer};
use super::param_group::{GroupOptions, ParamGroup, ParamGroupSpec, SavedGroup};
use super::problems::Problems;
use super::replay::Rate;
use super::settings::{Settings, optimizer};
use crate::device::Device;
use crate::error::Result;
use crate::ffi::{self, LearningRate, RecordingPause, SgdOptions, StepKind, StepLists, StepRule, TensorList};

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
#[settings(lr = 1e-3)]
pub struct Sgd {
    /// Momentum factor, at least 0; 0 keeps no buffer.
    #[setting(default = 0.0, check = not_negative, per_group)]
    pub momentum: f64,
    /// Part of the gradient that is kept out of the momentum buffer.
    #[setting(default = 0.0, check = finite, per_group)]
    pub dampening: f64,
    /// L2 penalty: this times the weights is added to the gradient. At least 0.
    #[setting(default = 0.0, check = not_negative, per_group)]
    pub weight_decay: f64,
    /// Looks ahead along the momentum; needs momentum above 0 and no dampening.
    #[setting(default = false, per_group)]
    pub nesterov: bool,
}

optimizer!(Sgd = "SGD", |sgd| GroupOptions::Sgd {
    momentum: sgd.momentum,
    dampening: sgd.dampening,
    nesterov: sgd.nesterov,
}, also check_nesterov);

impl Sgd {
    fn check_nesterov(&self, problems: &mut Problems) {
        if self.nesterov && (self.momentum <= 0.0 || self.dampening != 0.0) {
            let what = format!("true with momentum {} and dampening {}", self.momentum, self.dampening);
            problems.add("nesterov", what, "set momentum above 0 and dampening 0, or nesterov=false");
        }
    }
}

impl BuildOptimizer for Sgd {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn build(&self, groups: Vec<ParamGroupSpec>) -> Result<Box<dyn Optimizer>> {
        Ok(Box::new(Engine::new(SgdRule, self.groups(groups)?, self.master_weights)?))
    }
}

struct SgdRule;

struct SgdLists {
    params: TensorList,
    buffers: Option<TensorList>,
    /// Entries whose buffer holds nothing yet, and the others.
    first: Vec<usize>,
    later: Vec<usize>,
    /// The parameters have 16 bits, and are not on CUDA.
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

    /// One step of the kernel. That of libtorch for the CPU is given float32: it reads momentum of 16 bits as if it had 32, past its end,
    /// and subtracts something else than the gradient where there is no momentum.
    fn step(
        options: &SgdOptions<'_>,
        params: &TensorList,
        grads: &mut TensorList,
        buffers: Option<&TensorList>,
        is_first_step: bool,
        is_narrow: bool,
    ) -> Result<()> {
        if !is_narrow {
            return Ok(options.step(params, grads, buffers, is_first_step)?);
        }
        let wide = |list: &TensorList| -> Result<TensorList> {
            let mut copies = list.copies()?;
            copies.to_float()?;
            Ok(copies)
        };
        let (wide_params, mut wide_grads) = (wide(params)?, wide(grads)?);
        let wide_buffers = buffers.map(wide).transpose()?;
        grads.clear();
        options.step(&wide_params, &mut wide_grads, wide_buffers.as_ref(), is_first_step)?;
        params.copy_from(&wide_params)?;
        match buffers.zip(wide_buffers.as_ref()) {
            Some((buffers, wide)) => Ok(buffers.copy_from(wide)?),
            None => Ok(()),
        }
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
    const HAS_OPERATOR: bool = true;

    fn name(&self) -> &'static str {
        Sgd::NAME
    }

    fn lists(&self, group: &ParamGroup, members: &mut [Slot], active: &[usize]) -> Result<SgdLists> {
        let params = TensorList::new(active.iter().map(|index| members[*index].weights()))?;
        let is_narrow = active.first().is_some_and(|index| {
            let weights = members[*index].weights();
            matches!(weights.kind(), Kind::BFloat16 | Kind::Half)
                && !matches!(Device::of(weights), Ok(Device::Cuda(_)))
        });
        if group.momentum() == 0.0 {
            let (first, later) = (Vec::new(), Vec::new());
            return Ok(SgdLists { params, buffers: None, first, later, is_narrow });
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
                    slot.new_state(0.0)?
                }
            };
            slot.state[0] = Some(buffer.shallow_clone());
            buffers.push(buffer);
        }
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

    fn update_in_one_pass(
        &self,
        group: &ParamGroup,
        lists: &mut SgdLists,
        grads: &mut TensorList,
        rounded: Option<&TensorList>,
    ) -> Result<bool> {
        if !lists.first.is_empty() && !lists.later.is_empty() {
            return Ok(false); // two kinds of step
        }
        let options = Self::options(group, LearningRate::Number(group.lr));
        let rule = StepRule {
            momentum: options.momentum,
            dampening: options.dampening,
            nesterov: options.nesterov,
            is_first_step: !lists.first.is_empty(),
            ..StepRule::new(StepKind::Sgd, group.lr, group.weight_decay, group.maximize)
        };
        let states: Vec<&TensorList> = lists.buffers.iter().collect();
        let step = StepLists { params: &lists.params, states: &states, rounded };
        let is_done = step.step(grads, &rule, None)?;
        if is_done {
            lists.first.clear();
        }
        Ok(is_done)
    }

    fn required(_: &SavedGroup) -> Vec<usize> {
        Vec::new()
    }

    fn is_count(_: usize) -> bool {
        false
    }
}
