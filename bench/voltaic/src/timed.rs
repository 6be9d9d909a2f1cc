//! A network with the steps of a trained module, and a clock in them.

use measure::{Job, StepClock};
use voltaic::module::HookContext;
use voltaic::nn::functional::cross_entropy;
use voltaic::nn::{Forward, Module};
use voltaic::optim::Optimizers;
use voltaic::prelude::*;

/// Trains `net` by cross-entropy and takes the time and the loss of each step.
#[derive(Module)]
pub struct Timed<N: Forward> {
    net: N,
    #[module(skip)]
    optimizers: fn(&N) -> anyhow::Result<Optimizers>,
    #[module(skip)]
    logs: bool,
    #[module(skip)]
    clock: StepClock,
    #[module(skip)]
    losses: Vec<Tensor>,
}

impl<N: Forward> Timed<N> {
    pub fn new(net: N, optimizers: fn(&N) -> anyhow::Result<Optimizers>, logs: bool) -> Self {
        Self { net, optimizers, logs, clock: StepClock::default(), losses: Vec::new() }
    }

    pub fn print_report(&self, job: &Job) -> anyhow::Result<()> {
        let losses = self.losses.iter().map(f64::try_from).collect::<Result<_, _>>()?;
        self.clock.print_report(job, losses, tch::get_num_threads().try_into()?)
    }
}

impl<N: Forward> LightningModule for Timed<N> {
    type Batch = (Tensor, Tensor);

    fn training_step(
        &self,
        (inputs, targets): &Self::Batch,
        ctx: &mut StepContext,
    ) -> anyhow::Result<Tensor> {
        let logits = self.net.forward(inputs)?;
        let loss = cross_entropy(&logits.f_flatten(0, -2)?, &targets.f_flatten(0, -1)?)?;
        if self.logs {
            ctx.log("train_loss", &loss).prog_bar(true);
        }
        Ok(loss)
    }

    // the clock is in hooks, which are called for a step that a graph replays, too
    fn on_train_batch_start(&mut self, _ctx: &mut HookContext) -> anyhow::Result<()> {
        if self.clock.num_steps() == 0 {
            seed_everything(3)?; // the masks of dropout are the same everywhere
        }
        self.clock.tick();
        Ok(())
    }

    fn on_train_batch_end(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        self.losses.extend(ctx.loss().map(Tensor::shallow_clone));
        Ok(())
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        (self.optimizers)(&self.net)
    }
}
