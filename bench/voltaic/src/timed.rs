//! A network with the steps of a trained module, and a clock in them.

use std::cell::RefCell;

use measure::{Job, StepClock};
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
    clock: RefCell<StepClock>,
    #[module(skip)]
    losses: RefCell<Vec<Tensor>>,
}

impl<N: Forward> Timed<N> {
    pub fn new(net: N, optimizers: fn(&N) -> anyhow::Result<Optimizers>, logs: bool) -> Self {
        Self { net, optimizers, logs, clock: RefCell::default(), losses: RefCell::default() }
    }

    pub fn print_report(&self, job: &Job) -> anyhow::Result<()> {
        let losses = self.losses.borrow().iter().map(f64::try_from).collect::<Result<_, _>>()?;
        self.clock.borrow().print_report(job, losses, tch::get_num_threads().try_into()?)
    }
}

impl<N: Forward> LightningModule for Timed<N> {
    type Batch = (Tensor, Tensor);

    fn training_step(
        &self,
        (inputs, targets): &Self::Batch,
        ctx: &mut StepContext,
    ) -> anyhow::Result<Tensor> {
        let mut clock = self.clock.borrow_mut();
        if clock.num_steps() == 0 {
            seed_everything(3)?; // the masks of dropout are the same everywhere
        }
        clock.tick();
        let logits = self.net.forward(inputs)?;
        let loss = cross_entropy(&logits.f_flatten(0, -2)?, &targets.f_flatten(0, -1)?)?;
        if self.logs {
            ctx.log("train_loss", &loss).prog_bar(true);
        }
        self.losses.borrow_mut().push(loss.f_detach()?);
        Ok(loss)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        (self.optimizers)(&self.net)
    }
}
