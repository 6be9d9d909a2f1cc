//! The network of a plan.

use std::sync::Mutex;

use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::nn::{
    AttentionMask, BatchNorm2d, Buffer, Callable, Conv2d, Dropout, Embedding, Forward, LayerNorm, Linear,
    ModuleExt, MultiheadAttention, Parameter, set_training,
};
use voltaic::optim::{
    Adadelta, Adagrad, Adam, AdamW, ExponentialLr, Interval, Lamb, Lion, LrSchedulerSpec, OneCycleLr,
    Optimizer, Optimizers, ParamGroupSpec, RmsProp, Sgd,
};
use voltaic::{Kind, Module, Tensor};

use super::plan::{Logs, Plan, Reads, Rule, Schedule, Shape};
use crate::random_runs::{Manual, numbers};
use crate::support::CPU;

pub type Batch = (Tensor, Tensor);

/// Features between modules.
const WIDTH: i64 = 8;

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
    inner: Vec<Block>,
    #[module(skip)]
    shape: Shape,
    /// What hooks set.
    factor: f64,
    flag: bool,
    #[module(skip)]
    kept: Mutex<Option<Tensor>>,
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
            buffer: None,
            inner: Vec::new(),
            shape: shape.clone(),
            factor: 1.0,
            flag: false,
            kept: Mutex::default(),
        };
        let parameter = |size: &[i64]| Parameter::new(Tensor::zeros(size, (Kind::Float, CPU)));
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
            Shape::Bare => block.bare = [&[WIDTH][..], &[], &[1], &[0, 3], &[2]].map(parameter).into(),
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

    /// Calls `f` with this one and those within.
    fn each(&mut self, f: &mut dyn FnMut(&mut Self)) {
        f(self);
        self.inner.iter_mut().for_each(|inner| inner.each(f));
    }

    /// What it keeps for a hook to read.
    pub fn stored(&self, found: &mut Vec<Tensor>) {
        if self.shape == Shape::Stored {
            found.extend(self.kept.lock().unwrap().as_ref().map(Tensor::shallow_clone));
        }
        self.inner.iter().for_each(|inner| inner.stored(found));
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
            Shape::Linear { .. } => self.linear.as_ref().unwrap().call(x)?,
            Shape::EvenOnly if x.size()[0] % 2 == 0 => self.linear.as_ref().unwrap().call(x)?,
            Shape::EvenOnly => x.shallow_clone(),
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
            Shape::Bare => x * bare(0) * (bare(1) + 1.0) + bare(2) + bare(3).sum(None),
            Shape::Tied => x.matmul(bare(0)).matmul(&bare(0).tr()),
            Shape::Nested(_) => {
                let x = x * bare(0);
                let x = self.inner.iter().try_fold(x, |x, inner| inner.call(&x))?;
                x * bare(0)
            }
            Shape::Running | Shape::Replaced | Shape::Kept | Shape::Stored => self.keeping(x),
            _ => self.flowing(x),
        };
        Ok(out)
    }
}

/// The network of a plan.
#[derive(Module)]
pub struct Net {
    input: Linear,
    pub blocks: Vec<Block>,
    out: Linear,
    #[module(skip)]
    plan: Plan,
    /// What a step logs.
    number: f64,
}

impl Net {
    pub fn new(plan: &Plan) -> Self {
        let input = Linear::new(5, WIDTH).unwrap();
        let blocks = plan.blocks.iter().map(|shape| Block::new(shape, &input.weight)).collect();
        let out = Linear::new(WIDTH, 3).unwrap();
        let net = Self { input, blocks, out, plan: plan.clone(), number: 0.0 };
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

    fn block(&self, number: Option<usize>) -> Option<usize> {
        Some(number? % self.blocks.len().max(1))
    }

    fn loss(&self, (x, y): &Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let plan = &self.plan;
        let x = if plan.grad_penalty { x.copy().set_requires_grad(true) } else { x.shallow_clone() };
        let mut h = ctx.graphed(&self.input, &x)?.tanh();
        for (at, block) in self.blocks.iter().enumerate() {
            let is = |number: Option<usize>| self.block(number) == Some(at);
            if is(plan.unused) {
                continue;
            }
            for _ in 0..if is(plan.twice) { 2 } else { 1 } {
                let mut own = ctx.graphed(block, &h)?;
                if plan.in_place {
                    own = own.copy();
                    own += 0.125;
                    own = own.leaky_relu_();
                }
                h = (&h * 0.5 + own).tanh();
            }
            if is(plan.detached) {
                h = h.shallow_clone() + ctx.graphed(block, &h.detach())? * 0.25;
            }
            if is(plan.no_grad) {
                let aside = tch::no_grad(|| ctx.graphed(block, &h))?;
                h = &h + aside * 0.25;
            }
        }
        let mut loss = (ctx.graphed(&self.out, &h)? - y).square().mean(Kind::Float);
        if let Some(number) = plan.penalty {
            let parameters = self.parameters();
            let of = &parameters[number % parameters.len()];
            loss += of.square().sum(Kind::Float) * 0.01;
        }
        if plan.grad_penalty {
            let grads = Tensor::f_run_backward(&[&loss], &[&x], true, true)?;
            loss += grads[0].square().mean(Kind::Float);
        }
        if plan.writes_batch {
            let _ = y.shallow_clone().f_mul_scalar_(0.5)?;
        }
        if plan.gives_output {
            ctx.output("hidden", &h);
        }
        Ok(loss)
    }

    fn manual(&self, batch: &Batch, ctx: &mut StepContext, manual: Manual) -> anyhow::Result<Tensor> {
        let Manual { toggles, drops_every, again } = manual;
        let mut last = None;
        for index in 0..2 {
            if toggles {
                ctx.toggle_optimizer(index)?;
            }
            if ctx.batch_idx().is_multiple_of(drops_every) {
                ctx.optimizer(index)?.zero_grad()?;
            }
            for _ in 0..if again { 2 } else { 1 } {
                let loss = self.loss(batch, ctx)?;
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
        match self.plan.rule {
            Rule::AdamW => AdamW::new(0.01).into(),
            Rule::Adam => Adam::new(0.01).weight_decay(0.01).into(),
            Rule::Sgd => Sgd::new(0.05).momentum(0.9).into(),
            Rule::Adagrad => Adagrad::new(0.02).into(),
            Rule::RmsProp => RmsProp::new(0.01).into(),
            Rule::Adadelta => Adadelta::new(0.5).into(),
            Rule::Lion => Lion::new(0.005).into(),
            Rule::Lamb => Lamb::new(0.01).into(),
        }
    }

    fn schedule(&self, made: Optimizers) -> Optimizers {
        let exponential = |interval| LrSchedulerSpec::new(ExponentialLr::new(0.9)).interval(interval);
        match self.plan.schedule {
            Schedule::None => made,
            Schedule::Step => made.scheduler(exponential(Interval::Step)),
            Schedule::Epoch => made.scheduler(exponential(Interval::Epoch)),
            Schedule::OneCycle => {
                made.scheduler(LrSchedulerSpec::new(OneCycleLr::new(0.05, 200)).interval(Interval::Step))
            }
        }
    }
}

impl LightningModule for Net {
    type Batch = Batch;

    fn training_step(&self, batch: &Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        if let Some(manual) = self.plan.manual {
            return self.manual(batch, ctx, manual);
        }
        let mut loss = self.loss(batch, ctx)?;
        let number = match self.plan.reads {
            Reads::Nothing => None,
            Reads::Epoch => Some(ctx.current_epoch()),
            Reads::BatchIdx => Some(ctx.batch_idx() as u64),
            Reads::GlobalStep => Some(ctx.global_step()),
        };
        if let Some(number) = number {
            loss /= 1.0 + number as f64;
        }
        match self.plan.logs {
            Logs::Nothing => {}
            Logs::Tensor => drop(ctx.log("train_loss", &loss).on_epoch(true).on_step(true)),
            Logs::Number => drop(ctx.log("number", 3.5).on_epoch(true)),
            Logs::BatchNumber | Logs::EpochNumber => {
                drop(ctx.log("number", self.number).on_epoch(true).on_step(true));
            }
        }
        Ok(loss)
    }

    fn validation_step(&self, (x, y): &Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        let mut h = ctx.graphed(&self.input, x)?;
        for block in &self.blocks {
            h = ctx.graphed(block, &h)?;
        }
        let loss = (ctx.graphed(&self.out, &h)? - y).square().mean(Kind::Float);
        ctx.log("val_loss", &loss);
        Ok(())
    }

    fn automatic_optimization(&self) -> bool {
        self.plan.manual.is_none()
    }

    fn on_train_epoch_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        let epoch = ctx.current_epoch();
        if let Some(number) = self.plan.thawed.filter(|_| epoch == 1) {
            let parameters = self.parameters();
            let _ = parameters[number % parameters.len()].set_requires_grad(true);
        }
        if self.plan.logs == Logs::EpochNumber {
            self.number = epoch as f64;
        }
        let switched = self.block(self.plan.modes);
        for (at, block) in self.blocks.iter_mut().enumerate() {
            if switched == Some(at) {
                set_training(block, epoch % 2 == 1);
            }
            block.each(&mut |block| {
                if matches!(block.shape, Shape::EpochFactor | Shape::EpochBranch) {
                    (block.factor, block.flag) = (1.0 / (1.0 + epoch as f64), epoch % 2 == 1);
                }
            });
        }
        Ok(())
    }

    fn on_train_batch_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        let step = 100 * ctx.current_epoch() + ctx.batch_idx() as u64;
        if self.plan.logs == Logs::BatchNumber {
            self.number = step as f64;
        }
        for block in &mut self.blocks {
            block.each(&mut |block| {
                if block.shape == Shape::BatchFactor {
                    block.factor = 1.0 / (1.0 + step as f64);
                }
            });
        }
        Ok(())
    }

    fn optimizer_zero_grad(
        &self,
        optimizer: &mut dyn Optimizer,
        ctx: &mut HookContext,
    ) -> anyhow::Result<()> {
        let every = self.plan.zeroes_every;
        if every == 1 || (ctx.batch_idx() / self.plan.window as usize).is_multiple_of(every) {
            optimizer.zero_grad()?;
        }
        Ok(())
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        let all = self.named_parameters();
        if self.plan.manual.is_some() {
            let (first, second): (Vec<_>, Vec<_>) =
                all.into_iter().partition(|(fqn, _)| fqn.starts_with("input"));
            let made = self.rule().groups([ParamGroupSpec::new(second)]);
            return Ok(made.and(self.rule().groups([ParamGroupSpec::new(first).lr(0.02)])));
        }
        let made = if self.plan.has_groups {
            let (matrices, others): (Vec<_>, Vec<_>) =
                all.into_iter().partition(|(_, parameter)| parameter.dim() >= 2);
            let groups =
                [ParamGroupSpec::new(others).weight_decay(0.0), ParamGroupSpec::new(matrices).lr(0.02)];
            self.rule().groups(groups)
        } else {
            self.rule().groups([ParamGroupSpec::new(all)])
        };
        Ok(self.schedule(made))
    }
}
