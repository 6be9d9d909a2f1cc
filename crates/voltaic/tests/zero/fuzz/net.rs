//! The network of a plan.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::nn::{
    AttentionMask, BatchNorm2d, Callable, Conv2d, Dropout, Embedding, Forward, LayerNorm, Linear, ModuleExt,
    MultiheadAttention, Parameter,
};
use voltaic::optim::{
    Adagrad, AdamW, ExponentialLr, Interval, LrSchedulerSpec, Optimizers, ParamGroupSpec, RmsProp, Sgd,
};
use voltaic::{Kind, Module, Tensor};

use super::plan::{Plan, Rule, Shape, When};
use crate::models::{Batch, numbers};
use crate::random_runs::Manual;

const CPU: tch::Device = tch::Device::Cpu;
/// Features between modules.
const WIDTH: i64 = 8;

#[derive(Module)]
struct Block {
    linear: Option<Linear>,
    second: Option<Linear>,
    conv: Option<Conv2d>,
    batch_norm: Option<BatchNorm2d>,
    layer_norm: Option<LayerNorm>,
    embedding: Option<Embedding>,
    dropout: Option<Dropout>,
    attention: Option<MultiheadAttention>,
    bare: Vec<Parameter>,
    inner: Vec<Block>,
    /// Of a leaf module: a rank calls one of them, and nobody the last.
    experts: Vec<Linear>,
    #[module(skip)]
    chosen: AtomicUsize,
    #[module(skip)]
    shape: Shape,
}

fn parameter(size: &[i64], kind: Kind) -> Parameter {
    Parameter::new(Tensor::zeros(size, (kind, CPU)))
}

impl Block {
    fn new(shape: &Shape, tied: &Parameter) -> Self {
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
            inner: Vec::new(),
            experts: Vec::new(),
            chosen: AtomicUsize::default(),
            shape: shape.clone(),
        };
        match shape {
            Shape::Linear { bias } => {
                block.linear = Some(Linear::builder(WIDTH, WIDTH).bias(*bias).build().unwrap());
            }
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
                block.bare =
                    [&[WIDTH][..], &[], &[1], &[2], &[0, 3]].map(|size| parameter(size, Kind::Float)).into();
            }
            Shape::Double => block.bare = vec![parameter(&[WIDTH], Kind::Double)],
            Shape::Low => block.bare = vec![parameter(&[WIDTH], Kind::BFloat16)],
            Shape::Tied => block.bare = vec![tied.clone()],
            Shape::Nested(inner) => {
                block.bare = vec![parameter(&[WIDTH], Kind::Float)];
                block.inner = inner.iter().map(|shape| Self::new(shape, tied)).collect();
            }
        }
        block
    }
}

impl Forward for Block {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        let bare = |at: usize| self.bare[at].tensor();
        let out = match &self.shape {
            Shape::Linear { .. } => self.linear.as_ref().unwrap().call(x)?,
            Shape::Bottleneck(_) => {
                let hidden = self.linear.as_ref().unwrap().forward(x)?;
                self.second.as_ref().unwrap().call(&hidden.relu())?
            }
            Shape::Conv { .. } => {
                let out = self.conv.as_ref().unwrap().call(&x.view([-1, 2, 2, 2]))?;
                out.view([-1, WIDTH])
            }
            Shape::BatchNorm => {
                let out = self.batch_norm.as_ref().unwrap().call(&x.view([-1, WIDTH, 1, 1]))?;
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
                let x = x.view([-1, 1, WIDTH]);
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
        };
        match self.experts.get(self.chosen.load(Ordering::Relaxed)) {
            // gradients of what comes in would be summed in another order if it were used a second time
            Some(expert) => Ok(&out + expert.call(&out)? * 0.5),
            None => Ok(out),
        }
    }
}

/// The network, and what was seen of it.
#[derive(Module)]
pub struct Net {
    input: Linear,
    blocks: Vec<Block>,
    out: Linear,
    #[module(skip)]
    plan: Plan,
    /// The optimizer keeps float32 copies of weights of 16 bits itself.
    #[module(skip)]
    pub has_masters: bool,
    /// Bits of losses and of what was read.
    #[module(skip)]
    pub seen: Mutex<Vec<u64>>,
}

impl Net {
    pub fn new(plan: &Plan) -> Self {
        let input = Linear::new(5, WIDTH).unwrap();
        let mut blocks: Vec<_> = plan.blocks.iter().map(|shape| Block::new(shape, &input.weight)).collect();
        if let (Some(leaf), count @ 1..) = (plan.leaf, blocks.len()) {
            blocks[leaf % count].experts = (0..4).map(|_| Linear::new(WIDTH, WIDTH).unwrap()).collect();
        }
        let out = Linear::new(WIDTH, 3).unwrap();
        let net = Self { input, blocks, out, plan: plan.clone(), has_masters: false, seen: Mutex::default() };
        let parameters = net.parameters();
        for (number, parameter) in parameters.iter().enumerate() {
            let values = numbers(&parameter.size(), number as f64) * 0.6;
            tch::no_grad(|| parameter.tensor().shallow_clone().copy_(&values));
        }
        for number in [plan.frozen, plan.thawed].into_iter().flatten() {
            let _ = parameters[number % parameters.len()].set_requires_grad(false);
        }
        net
    }

    pub fn note(&self, value: &Tensor) {
        self.seen.lock().unwrap().push(value.detach().double_value(&[]).to_bits());
    }

    /// Which expert this rank calls from now on.
    fn choose(&self, ctx: &StepContext, step: usize) {
        let rank = ctx.process_group().map_or(0, |group| group.rank());
        self.blocks.iter().for_each(|block| block.chosen.store((2 * rank + step) % 3, Ordering::Relaxed));
    }

    fn loss_kind(&self) -> Kind {
        if self.plan.is_wide() { Kind::Double } else { Kind::Float }
    }

    /// Inputs and targets in the dtype of the weights.
    fn cast(&self, (x, y): &Batch) -> Batch {
        let kind = if self.plan.half { Kind::BFloat16 } else { self.loss_kind() };
        (x.to_kind(kind), y.to_kind(kind))
    }

    fn loss(&self, batch: &Batch, step: usize) -> anyhow::Result<Tensor> {
        let plan = &self.plan;
        let (x, y) = self.cast(batch);
        let x = x.copy().set_requires_grad(plan.grad_penalty);
        let mut h = self.input.call(&x)?.tanh();
        let count = self.blocks.len();
        let is = |number: Option<usize>, at: usize| number.is_some_and(|number| number % count == at);
        for place in 0..count {
            let at = if plan.rotates { (place + step) % count } else { place };
            if is(plan.unused, at) || (is(plan.skipped, at) && step % 3 == 1) {
                continue;
            }
            let block = &self.blocks[at];
            let times = if is(plan.twice, at) { 2 } else { 1 };
            for _ in 0..times {
                let mut own = block.call(&h)?;
                if plan.in_place {
                    own += 0.125;
                    own = own.leaky_relu_();
                }
                h = (&h * 0.5 + own).tanh();
            }
            if is(plan.detached, at) {
                h = h.shallow_clone() + block.call(&h.detach())? * 0.25;
            }
            if is(plan.no_grad, at) {
                let aside = tch::no_grad(|| block.call(&h))?;
                h = &h + aside * 0.25;
            }
        }
        if plan.transposed {
            h = &h + h.matmul(self.input.weight.tensor()).matmul(&self.input.weight.tr());
        }
        let mut loss = (self.out.call(&h)? - y).square().mean(self.loss_kind());
        if let Some(number) = plan.penalty {
            let parameters = self.parameters();
            let of = &parameters[number % parameters.len()];
            loss += of.square().sum(self.loss_kind()) * 0.01;
        }
        if plan.grad_penalty {
            let grads = Tensor::f_run_backward(&[&loss], &[&x], true, true)?;
            loss += grads[0].square().mean(self.loss_kind());
        }
        Ok(loss)
    }

    fn manual(
        &self,
        batch: &Batch,
        ctx: &mut StepContext,
        step: usize,
        manual: Manual,
    ) -> anyhow::Result<Tensor> {
        let Manual { toggles, drops_every, again } = manual;
        let mut last = None;
        for index in 0..2 {
            if toggles {
                ctx.toggle_optimizer(index)?;
            }
            if step.is_multiple_of(drops_every) {
                ctx.optimizer(index)?.zero_grad()?;
            }
            for _ in 0..if again { 2 } else { 1 } {
                let loss = self.loss(batch, step)?;
                self.note(&loss);
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

    fn rule(&self) -> Optimizers {
        let masters = self.has_masters;
        match self.plan.rule {
            Rule::AdamW => AdamW::new(0.01).master_weights(masters).into(),
            Rule::Sgd => Sgd::new(0.05).momentum(0.9).master_weights(masters).into(),
            Rule::Adagrad => Adagrad::new(0.02).master_weights(masters).into(),
            Rule::RmsProp => RmsProp::new(0.01).master_weights(masters).into(),
        }
    }
}

impl LightningModule for Net {
    type Batch = Batch;

    fn training_step(&self, batch: &Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let step = ctx.current_epoch() as usize * self.plan.batches + ctx.batch_idx();
        let rank = ctx.process_group().map_or(0, |group| group.rank());
        if let Some((When::Forward, number)) = self.plan.by_hand {
            super::write(self, step, number);
        }
        let batch = match self.plan.nan {
            Some(at) if at % self.plan.batches == step && rank == 0 => {
                (batch.0.shallow_clone() * f64::NAN, batch.1.shallow_clone())
            }
            _ => (batch.0.shallow_clone(), batch.1.shallow_clone()),
        };
        self.choose(ctx, step);
        if self.plan.has_no_loss(step) {
            return Ok(ctx.no_loss());
        }
        if let Some(manual) = self.plan.manual {
            return self.manual(&batch, ctx, step, manual);
        }
        let loss = self.loss(&batch, step)?;
        self.note(&loss);
        ctx.log("train_loss", &loss);
        Ok(loss)
    }

    fn validation_step(&self, batch: &Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        self.choose(ctx, ctx.batch_idx());
        let (x, y) = self.cast(batch);
        let h = self.blocks.iter().try_fold(self.input.call(&x)?, |h, block| block.call(&h))?;
        let loss = (self.out.call(&h)? - y).square().mean(self.loss_kind());
        self.note(&loss);
        match self.plan.logs_steps {
            true => ctx.log("val_loss", &loss).on_step(true).on_epoch(true).sync_dist(true),
            false => ctx.log("val_loss", &loss).sync_dist(true),
        };
        Ok(())
    }

    fn automatic_optimization(&self) -> bool {
        self.plan.manual.is_none()
    }

    fn on_train_epoch_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        if let Some(number) = self.plan.thawed.filter(|_| ctx.current_epoch() == 1) {
            let parameters = self.parameters();
            let _ = parameters[number % parameters.len()].set_requires_grad(true);
        }
        Ok(())
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        let all = self.named_parameters();
        if self.plan.manual.is_some() {
            let (first, second): (Vec<_>, Vec<_>) =
                all.into_iter().partition(|(fqn, _)| fqn.starts_with("blocks"));
            let mut made = self.rule().groups([ParamGroupSpec::new(second)]);
            if !first.is_empty() {
                made = made.and(self.rule().groups([ParamGroupSpec::new(first).lr(0.02)]));
            }
            return Ok(made);
        }
        let mut made = self.rule();
        made = if self.plan.has_groups {
            let (matrices, others): (Vec<_>, Vec<_>) =
                all.into_iter().partition(|(_, parameter)| parameter.dim() >= 2);
            let groups =
                [ParamGroupSpec::new(others).weight_decay(0.0), ParamGroupSpec::new(matrices).lr(0.02)];
            made.groups(groups)
        } else {
            made
        };
        if self.plan.has_schedule {
            made = made.scheduler(LrSchedulerSpec::new(ExponentialLr::new(0.9)).interval(Interval::Step));
        }
        Ok(made)
    }
}
