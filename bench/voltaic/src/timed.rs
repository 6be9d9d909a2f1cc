//! A network with the steps of a trained module, and a clock in them.

use measure::{Job, StepClock};
use voltaic::accelerator::{Accelerator, accelerator, memory_stats};
use voltaic::module::HookContext;
use voltaic::nn::functional::cross_entropy;
use voltaic::nn::{Forward, Module, te};
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
    /// The steps run in a region of float8.
    #[module(skip)]
    in_fp8: bool,
    #[module(skip)]
    job: Job,
    /// What is waited for after each block of steps.
    #[module(skip)]
    accelerator: Box<dyn Accelerator>,
    #[module(skip)]
    clock: StepClock,
    #[module(skip)]
    losses: Vec<Tensor>,
}

impl<N: Forward> Timed<N> {
    pub fn new(
        net: N,
        optimizers: fn(&N) -> anyhow::Result<Optimizers>,
        [logs, in_fp8]: [bool; 2],
        job: &Job,
    ) -> anyhow::Result<Self> {
        let accelerator = accelerator(&job.accelerator)?;
        let (job, clock, losses) = (job.clone(), StepClock::default(), Vec::new());
        Ok(Self { net, optimizers, logs, in_fp8, job, accelerator, clock, losses })
    }

    pub fn print_report(&self) -> anyhow::Result<()> {
        let losses = self.losses.iter().map(f64::try_from).collect::<Result<_, _>>()?;
        let is_on_host = self.accelerator.name() == "cpu";
        let memory =
            if is_on_host { None } else { Some(memory_stats(self.accelerator.device(0))?.max_in_use) };
        self.clock.print_report(&self.job, losses, tch::get_num_threads().try_into()?, memory)
    }
}

impl<N: Forward> LightningModule for Timed<N> {
    type Batch = (Tensor, Tensor);

    fn training_step(
        &self,
        (inputs, targets): &Self::Batch,
        ctx: &mut StepContext,
    ) -> anyhow::Result<Tensor> {
        let _region = self.in_fp8.then(|| te::fp8_autocast(true, None)).transpose()?;
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
        if self.job.waits_after(self.clock.num_steps()) {
            self.accelerator.synchronize(self.accelerator.device(0))?;
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
