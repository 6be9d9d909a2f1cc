//! The module of a plan.

use std::sync::atomic::{AtomicUsize, Ordering};

use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::nn::{Callable, Linear, ModuleExt};
use voltaic::optim::{AdamW, ExponentialLr, LrSchedulerSpec, Optimizers, Sgd};
use voltaic::{Module, Tensor};

use super::expected::{GAMMA, initial};
use super::plan::{Hook, Plan, Restart};
use crate::models::Batch;

#[derive(Module)]
pub struct Net {
    first: Linear,
    second: Linear,
    last: Linear,
    #[module(skip)]
    plan: Plan,
    /// The hook of the plan fails.
    #[module(skip)]
    fails: bool,
    /// The batch, counted over all epochs.
    #[module(skip)]
    step: AtomicUsize,
}

impl Net {
    pub fn new(plan: &Plan, fails: bool) -> Self {
        let [first, second, last] = [(5, 8), (8, 8), (8, 3)].map(|(from, to)| Linear::new(from, to).unwrap());
        let net = Self { first, second, last, plan: plan.clone(), fails, step: AtomicUsize::default() };
        for (number, parameter) in net.parameters().into_iter().enumerate() {
            parameter.set_data(&initial(number)).unwrap();
        }
        net.freeze_second(0);
        if plan.is_frozen {
            let _ = net.last.bias.as_ref().unwrap().set_requires_grad(false);
        }
        net
    }

    /// As the plan says of a batch, counted over all epochs.
    pub fn freeze_second(&self, step: usize) {
        let is_trained = !self.plan.frozen.contains(&step);
        self.second.parameters().iter().for_each(|parameter| drop(parameter.set_requires_grad(is_trained)));
    }

    pub fn loss(&self, (x, y): &Batch, step: usize) -> anyhow::Result<Tensor> {
        let mut h = self.first.call(&x.to_kind(self.first.weight.kind()))?.tanh();
        if self.plan.uses_second(step) {
            h = self.second.call(&h)?.tanh();
        }
        let kind = self.plan.kind();
        Ok((self.last.call(&h)?.to_kind(kind) - y.to_kind(kind)).square().mean(kind))
    }

    /// Fails if the plan says so.
    fn at(&self, own: Hook) -> anyhow::Result<()> {
        let fails = match self.plan.restart {
            Restart::Failure(at, hook) => hook == own && self.step.load(Ordering::Relaxed) >= at,
            _ => false,
        };
        anyhow::ensure!(!(self.fails && fails), "fails on purpose");
        Ok(())
    }
}

impl LightningModule for Net {
    type Batch = Batch;

    fn automatic_optimization(&self) -> bool {
        !self.plan.is_manual
    }

    fn training_step(&self, batch: &Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let step = self.step.load(Ordering::Relaxed);
        if self.plan.no_loss == Some(step) {
            return Ok(ctx.no_loss());
        }
        let loss = self.loss(batch, step)?;
        self.at(Hook::TrainingStep)?;
        ctx.log("train_loss", &loss).on_epoch(true);
        if !self.plan.is_manual {
            return Ok(loss);
        }
        ctx.manual_backward(&(&loss / self.plan.window as f64))?;
        if self.plan.steps_after(step) {
            ctx.optimizer(0)?.step()?;
            ctx.optimizer(0)?.zero_grad()?;
        }
        Ok(loss.detach())
    }

    fn validation_step(&self, batch: &Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        let loss = self.loss(batch, 1)?;
        if ctx.batch_idx() == 1 {
            self.at(Hook::ValidationStep)?;
        }
        ctx.log("val_loss", &loss).sync_dist(true);
        Ok(())
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        // strategies that divide states keep master weights themselves
        let masters = self.plan.precision == "bf16-true" && !self.plan.is_divided();
        let plan = &self.plan;
        let made: Optimizers = match plan.is_adam {
            true => AdamW::new(plan.lr()).eps(plan.eps()).master_weights(masters).into(),
            false => Sgd::new(plan.lr()).momentum(plan.momentum).master_weights(masters).into(),
        };
        Ok(match plan.schedule {
            Some(interval) => {
                made.scheduler(LrSchedulerSpec::new(ExponentialLr::new(GAMMA)).interval(interval))
            }
            None => made,
        })
    }

    fn on_train_epoch_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        self.freeze_second(ctx.current_epoch() as usize * self.plan.batches);
        Ok(())
    }

    fn on_train_batch_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        let step = ctx.current_epoch() as usize * self.plan.batches + ctx.batch_idx();
        self.step.store(step, Ordering::Relaxed);
        self.freeze_second(step);
        self.at(Hook::BatchStart)
    }

    fn on_before_backward(&self, _ctx: &mut HookContext) -> anyhow::Result<()> {
        self.at(Hook::BeforeBackward)
    }

    fn on_after_backward(&self, _ctx: &mut HookContext) -> anyhow::Result<()> {
        self.at(Hook::AfterBackward)
    }

    fn on_before_optimizer_step(&self, _ctx: &mut HookContext) -> anyhow::Result<()> {
        self.at(Hook::BeforeStep)
    }

    fn on_train_batch_end(&mut self, _ctx: &mut HookContext) -> anyhow::Result<()> {
        self.at(Hook::BatchEnd)
    }

    fn on_validation_start(&mut self, _ctx: &mut HookContext) -> anyhow::Result<()> {
        self.at(Hook::ValidationStart)
    }

    fn on_validation_epoch_end(&mut self, _ctx: &mut HookContext) -> anyhow::Result<()> {
        self.at(Hook::ValidationEpochEnd)
    }

    fn on_validation_end(&mut self, _ctx: &mut HookContext) -> anyhow::Result<()> {
        self.at(Hook::ValidationEnd)
    }

    fn on_train_epoch_end(&mut self, _ctx: &mut HookContext) -> anyhow::Result<()> {
        self.at(Hook::EpochEnd)
    }

    fn on_train_end(&mut self, _ctx: &mut HookContext) -> anyhow::Result<()> {
        self.at(Hook::TrainEnd)
    }
}
