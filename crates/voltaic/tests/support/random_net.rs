//! Modules of random networks, and what their steps share.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use rand::RngExt;
use rand::rngs::StdRng;
use voltaic::module::{StepContext, StepHook};
use voltaic::nn::{
    AttentionMask, BatchNorm2d, Buffer, Callable, Conv2d, Dropout, Embedding, Forward, LayerNorm, Linear,
    ModuleExt, MultiheadAttention, Parameter,
};
use voltaic::optim::{Adadelta, Adagrad, Adam, AdamW, Lamb, Lion, Optimizers, ParamGroupSpec, RmsProp, Sgd};
use voltaic::{Kind, Module, Tensor};

use crate::random_runs::{Manual, numbers, one};

/// Declares a plan, of which a failure may not need all: `= value` is what a field is if it is left out.
macro_rules! plan {
    ($(#[$plan:meta])* pub struct $name:ident { $($(#[$doc:meta])* pub $field:ident: $type:ty $(= $off:expr)?,)* }) => {
        $(#[$plan])*
        pub struct $name { $($(#[$doc])* pub $field: $type,)* }

        impl $name {
            /// The run of a seed without the fields, and the blocks by number, in `VOLTAIC_FUZZ_WITHOUT`, to find out which of them a
            /// failure needs.
            pub fn reduced(seed: u64) -> Self {
                let mut plan = Self::of(seed);
                let parts = std::env::var("VOLTAIC_FUZZ_WITHOUT").unwrap_or_default();
                for part in parts.split(',').filter(|part| !part.is_empty()) {
                    $($(if part == stringify!($field) {
                        plan.$field = $off;
                        continue;
                    })?)*
                    plan.blocks.remove(part.parse().expect("a field that can be left out, or the number of a block"));
                }
                plan.reconcile();
                plan
            }
        }
    };
}

const CPU: tch::Device = tch::Device::Cpu;
/// Features between modules.
pub const WIDTH: i64 = 8;

/// A module from 8 features to 8.
#[derive(Debug, Clone, PartialEq)]
pub enum Shape {
    Linear {
        bias: bool,
    },
    /// Two layers with so many features between them.
    Bottleneck(i64),
    /// With the channels last in memory, perhaps.
    Conv {
        last: bool,
    },
    BatchNorm,
    LayerNorm,
    Embedding,
    Dropout,
    Attention,
    /// Parameters of its own: one for each feature, scalar, of one element, of two, empty, and one that is never used.
    Bare,
    /// A parameter in float64.
    Double,
    /// A parameter in bfloat16.
    Low,
    /// The weight of the layer that comes into the network, from another module.
    Tied,
    /// Views, slices, and operators in place on them.
    Views,
    /// A buffer that the forward pass updates and uses.
    Running,
    /// A buffer whose memory the forward pass replaces.
    Replaced,
    /// A tensor of the step before, which the module keeps and uses.
    Kept,
    /// A tensor of the step, which the module keeps and a hook reads.
    Stored,
    /// Times a number that a hook sets in each epoch.
    EpochFactor,
    /// Times a number that a hook sets in each batch.
    BatchFactor,
    /// Goes one of two ways by a flag that a hook sets in each epoch.
    EpochBranch,
    /// Goes one of two ways by what the data hold.
    DataBranch,
    /// As many rows as there are positive ones.
    Masked,
    /// Random numbers that it draws itself.
    Noise,
    /// Only used if the batch has an even number of samples.
    EvenOnly,
    /// Modules within one that has a parameter, which it uses before and after them.
    Nested(Vec<Shape>),
}

impl Shape {
    /// One of those that all ranks can compute alike, or of those that graphs are to be tried with.
    pub fn random(rng: &mut StdRng, depth: usize, is_for_graphs: bool) -> Self {
        let kinds = if is_for_graphs { 25 } else { 12 };
        let first = usize::from(is_for_graphs); // one more way to a linear layer
        let most = first + if depth > 1 { kinds } else { kinds + 2 };
        match rng.random_range(0..most).saturating_sub(first) {
            0 | 1 => Self::Linear { bias: rng.random() },
            2 => Self::Bottleneck([1, 3, 7, 33][rng.random_range(0..4)]),
            3 => Self::Conv { last: rng.random() },
            4 => Self::BatchNorm,
            5 => Self::LayerNorm,
            6 => Self::Embedding,
            7 => Self::Dropout,
            8 => Self::Attention,
            9 => Self::Bare,
            10 if is_for_graphs => Self::Bare,
            10 => one(rng, [Self::Double, Self::Low]),
            11 => Self::Tied,
            number if number >= kinds => {
                let count = rng.random_range(1..3);
                Self::Nested((0..count).map(|_| Self::random(rng, depth + 1, is_for_graphs)).collect())
            }
            12 | 13 => Self::Views,
            14 => Self::Running,
            15 => Self::Noise,
            16 | 17 => Self::EvenOnly,
            18 => one(rng, [Self::Kept, Self::BatchFactor, Self::DataBranch, Self::Masked]),
            19 => Self::Replaced,
            20 => Self::Stored,
            21 => one(rng, [Self::EpochFactor, Self::EpochBranch]),
            22 => Self::BatchNorm,
            _ => Self::Linear { bias: true },
        }
    }

    /// Whether it is among these, or within them.
    pub fn is_among(&self, shapes: &[Self]) -> bool {
        shapes.iter().any(|own| match own {
            Self::Nested(inner) => self.is_among(inner),
            own => own == self,
        })
    }
}

#[derive(Module)]
pub struct Block {
    linear: Option<Linear>,
    second: Option<Linear>,
    conv: Option<Conv2d>,
    batch_norm: Option<BatchNorm2d>,
    layer_norm: Option<LayerNorm>,
    embedding: Option<Embedding>,
    dropout: Option<Dropout>,
    attention: Option<MultiheadAttention>,
    bare: Vec<Parameter>,
    buffer: Option<Buffer>,
    pub inner: Vec<Block>,
    /// One of them may be used.
    pub experts: Vec<Linear>,
    #[module(skip)]
    pub chosen: AtomicUsize,
    #[module(skip)]
    pub shape: Shape,
    /// What hooks set.
    pub factor: f64,
    pub flag: bool,
    #[module(skip)]
    pub kept: Mutex<Option<Tensor>>,
}

impl Block {
    pub fn new(shape: &Shape, tied: &Parameter) -> Self {
        let mut block = Self {
            linear: None,
            second: None,
            conv: None,
            batch_norm: None,
            layer_norm: None,
            embedding: None,
            dropout: None,
            attention: None,
            bare: Vec::new(),
            buffer: None,
            inner: Vec::new(),
            experts: Vec::new(),
            chosen: AtomicUsize::default(),
            shape: shape.clone(),
            factor: 1.0,
            flag: false,
            kept: Mutex::default(),
        };
        let of_kind = |size: &[i64], kind| Parameter::new(Tensor::zeros(size, (kind, CPU)));
        let parameter = |size: &[i64]| of_kind(size, Kind::Float);
        match shape {
            Shape::Linear { bias } => {
                block.linear = Some(Linear::builder(WIDTH, WIDTH).bias(*bias).build().unwrap());
            }
            Shape::EvenOnly => block.linear = Some(Linear::new(WIDTH, WIDTH).unwrap()),
            Shape::Bottleneck(inner) => {
                block.linear = Some(Linear::new(WIDTH, *inner).unwrap());
                block.second = Some(Linear::new(*inner, WIDTH).unwrap());
            }
            Shape::Conv { last } => {
                let conv = Conv2d::new(2, WIDTH, [2, 2]).unwrap();
                if *last {
                    conv.to_channels_last().unwrap();
                }
                block.conv = Some(conv);
            }
            Shape::BatchNorm => block.batch_norm = Some(BatchNorm2d::new(WIDTH).unwrap()),
            Shape::LayerNorm => block.layer_norm = Some(LayerNorm::new(WIDTH).unwrap()),
            Shape::Embedding => block.embedding = Some(Embedding::new(6, WIDTH).unwrap()),
            Shape::Dropout => block.dropout = Some(Dropout::new(0.25).unwrap()),
            Shape::Attention => block.attention = Some(MultiheadAttention::new(WIDTH, 2).unwrap()),
            Shape::Bare => {
                block.bare = [&[WIDTH][..], &[], &[1], &[2], &[0, 3], &[4]].map(parameter).into();
            }
            Shape::Double => block.bare = vec![of_kind(&[WIDTH], Kind::Double)],
            Shape::Low => block.bare = vec![of_kind(&[WIDTH], Kind::BFloat16)],
            Shape::Tied => block.bare = vec![tied.clone()],
            Shape::Running | Shape::Replaced => block.buffer = Some(Buffer::new(numbers(&[WIDTH], 0.5))),
            Shape::Nested(inner) => {
                block.bare = vec![parameter(&[WIDTH])];
                block.inner = inner.iter().map(|shape| Self::new(shape, tied)).collect();
            }
            _ => {}
        }
        block
    }

    fn keeping(&self, x: &Tensor) -> Tensor {
        let mean = || x.detach().mean_dim([0_i64].as_slice(), false, None);
        let buffer = self.buffer.as_ref();
        match &self.shape {
            Shape::Running => {
                let buffer = buffer.unwrap().tensor();
                let mut own = buffer.shallow_clone();
                tch::no_grad(|| {
                    let _ = own.multiply_scalar_(0.75);
                    own += (mean() * 0.25).to_kind(buffer.kind());
                });
                x - buffer.copy()
            }
            Shape::Replaced => {
                let next = tch::no_grad(|| buffer.unwrap().tensor() * 0.75 + mean() * 0.25);
                buffer.unwrap().set_data(&next.to_kind(buffer.unwrap().tensor().kind())).unwrap();
                x * 0.5
            }
            Shape::Kept => match self.kept.lock().unwrap().replace(mean()) {
                Some(last) => x + last,
                None => x.shallow_clone(),
            },
            _ => {
                *self.kept.lock().unwrap() = Some(mean());
                x.tanh()
            }
        }
    }

    fn flowing(&self, x: &Tensor) -> Tensor {
        match &self.shape {
            Shape::EpochFactor | Shape::BatchFactor => x * self.factor,
            Shape::EpochBranch if self.flag => x.sin(),
            Shape::EpochBranch => x.cos(),
            Shape::DataBranch if x.detach().sum(Kind::Float).double_value(&[]) > 0.0 => x.sin(),
            Shape::DataBranch => x.cos(),
            Shape::Masked => {
                let is_positive = x.detach().sum_dim_intlist([1_i64].as_slice(), false, None).gt(0.0);
                x + x.index(&[Some(is_positive)]).sum_dim_intlist([0_i64].as_slice(), true, None)
            }
            Shape::Noise => x + x.detach().randn_like() * 0.125,
            _ => {
                let out = x * 1.5;
                let _ = out.narrow(1, 0, 3).relu_();
                let mut some = out.slice(1, 1, 8, 3);
                some += 0.5;
                out.select(1, 7).copy_(&x.select(1, 0));
                let turned = out.tr().contiguous().view([2, 4, -1]).transpose(0, 1).reshape([8, -1]).tr();
                turned.roll([1], [1]) + out.flip([1])
            }
        }
    }
}

impl Forward for Block {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        let bare = |at: usize| self.bare[at].tensor();
        let out = match &self.shape {
            Shape::EvenOnly if x.size()[0] % 2 == 1 => x.shallow_clone(),
            Shape::Linear { .. } | Shape::EvenOnly => self.linear.as_ref().unwrap().call(x)?,
            Shape::Bottleneck(_) => {
                let hidden = self.linear.as_ref().unwrap().forward(x)?;
                self.second.as_ref().unwrap().call(&hidden.relu())?
            }
            Shape::Conv { .. } => {
                let out = self.conv.as_ref().unwrap().call(&x.reshape([-1, 2, 2, 2]))?;
                out.view([-1, WIDTH])
            }
            Shape::BatchNorm => {
                let out = self.batch_norm.as_ref().unwrap().call(&x.reshape([-1, WIDTH, 1, 1]))?;
                out.view([-1, WIDTH])
            }
            Shape::LayerNorm => self.layer_norm.as_ref().unwrap().call(x)?,
            Shape::Embedding => {
                let sums = x.detach().abs().sum_dim_intlist([1_i64].as_slice(), false, Kind::Float);
                let index = (sums.nan_to_num(0.0, 0.0, 0.0) * 7.0).to_kind(Kind::Int64).remainder(6);
                x + self.embedding.as_ref().unwrap().call(&index)?
            }
            Shape::Dropout => self.dropout.as_ref().unwrap().call(x)?,
            Shape::Attention => {
                let x = x.reshape([-1, 1, WIDTH]);
                let out = self.attention.as_ref().unwrap().attend(&x, &x, &x, &AttentionMask::default())?;
                out.view([-1, WIDTH])
            }
            Shape::Bare => {
                let sum = |at: usize| bare(at).sum(x.kind());
                x * bare(0) * (bare(1) + 1.0) + bare(2) + sum(3) + sum(4)
            }
            Shape::Double => (x.to_kind(Kind::Double) * bare(0)).to_kind(x.kind()),
            Shape::Low => (x.to_kind(bare(0).kind()) * bare(0)).to_kind(x.kind()),
            Shape::Tied => x.matmul(bare(0)).matmul(&bare(0).tr()),
            Shape::Nested(_) => {
                let x = x * bare(0);
                let x = self.inner.iter().try_fold(x, |x, inner| inner.call(&x))?;
                x * bare(0)
            }
            Shape::Running | Shape::Replaced | Shape::Kept | Shape::Stored => self.keeping(x),
            _ => self.flowing(x),
        };
        match self.experts.get(self.chosen.load(Ordering::Relaxed)) {
            // gradients of what comes in would be summed in another order if it were used a second time
            Some(expert) => Ok(&out + expert.call(&out)? * 0.5),
            None => Ok(out),
        }
    }
}

/// Gives all parameters their initial values, and freezes those of these numbers.
pub fn init(net: &impl Module, frozen: [Option<usize>; 2]) {
    let parameters = net.parameters();
    for (number, parameter) in parameters.iter().enumerate() {
        let values = numbers(&parameter.size(), number as f64) * 0.6;
        tch::no_grad(|| parameter.tensor().shallow_clone().copy_(&values));
    }
    for number in frozen.into_iter().flatten() {
        let _ = parameters[number % parameters.len()].set_requires_grad(false);
    }
}

/// What a step does with a block besides a call.
#[derive(Debug, Clone, Copy)]
pub struct Uses {
    pub twice: bool,
    /// What it gives is written to.
    pub in_place: bool,
    /// It is called with what is detached, too.
    pub detached: bool,
    /// It is called without grad, too.
    pub no_grad: bool,
}

impl Uses {
    pub fn of(
        self,
        mut h: Tensor,
        mut call: impl FnMut(&Tensor) -> anyhow::Result<Tensor>,
    ) -> anyhow::Result<Tensor> {
        for _ in 0..if self.twice { 2 } else { 1 } {
            let mut own = call(&h)?;
            if self.in_place {
                own += 0.125;
                own = own.leaky_relu_();
            }
            h = (&h * 0.5 + own).tanh();
        }
        if self.detached {
            h = h.shallow_clone() + call(&h.detach())? * 0.25;
        }
        if self.no_grad {
            let aside = tch::no_grad(|| call(&h))?;
            h = &h + aside * 0.25;
        }
        Ok(h)
    }
}

/// A loss, and the squares of a parameter and of the gradient of what comes in.
pub fn penalized(
    net: &impl Module,
    mut loss: Tensor,
    penalty: Option<usize>,
    of_gradient: Option<&Tensor>,
) -> anyhow::Result<Tensor> {
    let kind = loss.kind();
    if let Some(number) = penalty {
        let parameters = net.parameters();
        let of = &parameters[number % parameters.len()];
        loss += of.square().sum(kind) * 0.01;
    }
    if let Some(x) = of_gradient {
        let grads = Tensor::f_run_backward(&[&loss], &[x], true, true)?;
        loss += grads[0].square().mean(kind);
    }
    Ok(loss)
}

/// An optimizer.
#[allow(dead_code, reason = "each program draws some of them")]
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    AdamW,
    Adam,
    Sgd,
    Adagrad,
    RmsProp,
    Adadelta,
    Lion,
    Lamb,
}

impl Rule {
    pub fn optimizers(self, masters: bool) -> Optimizers {
        match self {
            Self::AdamW => AdamW::new(0.01).master_weights(masters).into(),
            Self::Adam => Adam::new(0.01).weight_decay(0.01).master_weights(masters).into(),
            Self::Sgd => Sgd::new(0.05).momentum(0.9).master_weights(masters).into(),
            Self::Adagrad => Adagrad::new(0.02).master_weights(masters).into(),
            Self::RmsProp => RmsProp::new(0.01).master_weights(masters).into(),
            Self::Adadelta => Adadelta::new(0.5).master_weights(masters).into(),
            Self::Lion => Lion::new(0.005).master_weights(masters).into(),
            Self::Lamb => Lamb::new(0.01).master_weights(masters).into(),
        }
    }
}

/// When something is done by hand.
#[allow(dead_code, reason = "each program draws some of them")]
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum When {
    EpochStart,
    BatchStart,
    Forward,
    BeforeZeroGrad,
    BeforeBackward,
    AfterBackward,
    BeforeStep,
    BatchEnd,
    EpochEnd,
}

impl When {
    pub fn of(hook: StepHook) -> Self {
        match hook {
            StepHook::OnBeforeZeroGrad => Self::BeforeZeroGrad,
            StepHook::OnBeforeBackward => Self::BeforeBackward,
            StepHook::OnAfterBackward => Self::AfterBackward,
            StepHook::OnBeforeOptimizerStep => Self::BeforeStep,
        }
    }
}

/// Matrices, and other parameters, in groups with settings of their own.
pub fn groups(all: Vec<(String, Parameter)>) -> [ParamGroupSpec; 2] {
    let (matrices, others): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|(_, parameter)| parameter.dim() >= 2);
    [ParamGroupSpec::new(others).weight_decay(0.0), ParamGroupSpec::new(matrices).lr(0.02)]
}

/// Steps of two optimizers by hand, in the batch of this number. Returns the last loss.
pub fn step_by_hand(
    Manual { toggles, drops_every, again }: Manual,
    ctx: &mut StepContext,
    batch: usize,
    mut loss: impl FnMut(&mut StepContext) -> anyhow::Result<Tensor>,
) -> anyhow::Result<Tensor> {
    let mut last = None;
    for index in 0..2 {
        if toggles {
            ctx.toggle_optimizer(index)?;
        }
        if batch.is_multiple_of(drops_every) {
            ctx.optimizer(index)?.zero_grad()?;
        }
        for _ in 0..if again { 2 } else { 1 } {
            let loss = loss(ctx)?;
            ctx.manual_backward(&loss)?;
            last = Some(loss.detach());
        }
        ctx.optimizer(index)?.step()?;
        if toggles {
            ctx.untoggle_optimizer()?;
        }
    }
    Ok(last.unwrap())
}
