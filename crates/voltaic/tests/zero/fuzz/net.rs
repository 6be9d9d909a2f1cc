//! The network of a plan.

use std::sync::Mutex;
use std::sync::atomic::Ordering;

use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::nn::{Callable, Linear, ModuleExt};
use voltaic::optim::{ExponentialLr, Interval, LrSchedulerSpec, Optimizers, ParamGroupSpec};
use voltaic::{Kind, Module, Tensor};

use super::plan::Plan;
use crate::models::Batch;
use crate::random_net::{Block, Uses, WIDTH, When, groups, init, penalized, step_by_hand};

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
        init(&net, [plan.frozen, plan.unfrozen]);
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
            let uses = Uses {
                twice: is(plan.twice, at),
                in_place: plan.in_place,
                detached: is(plan.detached, at),
                no_grad: is(plan.no_grad, at),
            };
            h = uses.of(h, |x| block.call(x))?;
        }
        if plan.transposed {
            h = &h + h.matmul(self.input.weight.tensor()).matmul(&self.input.weight.tr());
        }
        let loss = (self.out.call(&h)? - y).square().mean(self.loss_kind());
        penalized(self, loss, plan.penalty, plan.grad_penalty.then_some(&x))
    }

    fn rule(&self) -> Optimizers {
        self.plan.rule.optimizers(self.has_masters)
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
            return step_by_hand(manual, ctx, step, |_| {
                let loss = self.loss(&batch, step)?;
                self.note(&loss);
                Ok(loss)
            });
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
        if let Some(number) = self.plan.unfrozen.filter(|_| ctx.current_epoch() == 1) {
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
        if self.plan.has_groups {
            made = made.groups(groups(all));
        }
        if self.plan.has_schedule {
            made = made.scheduler(LrSchedulerSpec::new(ExponentialLr::new(0.9)).interval(Interval::Step));
        }
        Ok(made)
    }
}
