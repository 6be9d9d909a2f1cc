//! The network of a plan.

use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::nn::{Linear, ModuleExt, set_training};
use voltaic::optim::{
    ExponentialLr, Interval, LrSchedulerSpec, OneCycleLr, Optimizer, Optimizers, ParamGroupSpec,
};
use voltaic::{Kind, Module, Tensor};

use super::plan::{Logs, Plan, Reads, Schedule};
use crate::random_net::{Block, Shape, Uses, WIDTH, groups, init, penalized, step_by_hand};

pub type Batch = (Tensor, Tensor);

/// Calls `f` with this block and those within.
fn each(block: &mut Block, f: &mut dyn FnMut(&mut Block)) {
    f(block);
    block.inner.iter_mut().for_each(|inner| each(inner, f));
}

/// What a block keeps for a hook to read.
pub fn stored(block: &Block, found: &mut Vec<Tensor>) {
    if block.shape == Shape::Stored {
        found.extend(block.kept.lock().unwrap().as_ref().map(Tensor::shallow_clone));
    }
    block.inner.iter().for_each(|inner| stored(inner, found));
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
        init(&net, [plan.frozen, plan.unfrozen]);
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
            let uses = Uses {
                twice: is(plan.twice),
                in_place: plan.in_place,
                detached: is(plan.detached),
                no_grad: is(plan.no_grad),
            };
            h = uses.of(h, |x| {
                let own = ctx.graphed(block, x)?;
                Ok(if plan.in_place { own.copy() } else { own })
            })?;
        }
        let loss = (ctx.graphed(&self.out, &h)? - y).square().mean(Kind::Float);
        let loss = penalized(self, loss, plan.penalty, plan.grad_penalty.then_some(&x))?;
        if plan.writes_batch {
            let _ = y.shallow_clone().f_mul_scalar_(0.5)?;
        }
        if plan.gives_output {
            ctx.output("hidden", &h);
        }
        Ok(loss)
    }

    fn rule(&self) -> Optimizers {
        self.plan.rule.optimizers(false)
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
            let batch_idx = ctx.batch_idx();
            return step_by_hand(manual, ctx, batch_idx, |ctx| self.loss(batch, ctx));
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
        if let Some(number) = self.plan.unfrozen.filter(|_| epoch == 1) {
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
            each(block, &mut |block| {
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
            each(block, &mut |block| {
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
            self.rule().groups(groups(all))
        } else {
            self.rule().groups([ParamGroupSpec::new(all)])
        };
        Ok(self.schedule(made))
    }
}
