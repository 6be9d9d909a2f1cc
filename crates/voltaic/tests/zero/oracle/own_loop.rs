//! A loop of `Fabric`'s calls in place of the trainer.

use std::path::Path;

use anyhow::ensure;
use voltaic::data::{DataLoader, EpochRange, TensorDataset};
use voltaic::module::LightningModule;
use voltaic::optim::{GradientClip, Interval};
use voltaic::strategy::StrategyConfig;
use voltaic::trainer::Fabric;

use super::expected::{Outcome, data, train};
use super::net::Net;
use super::plan::{Plan, Restart};
use super::{compare, deepspeed};
use crate::fuzz::cases;
use crate::ranks::weights;

fn launch(plan: &Plan, folder: &Path) -> voltaic::Result<Fabric> {
    let mut builder = Fabric::builder().accelerator(plan.accelerator).devices(plan.ranks as i64);
    builder = builder.default_root_dir(folder).precision(plan.precision);
    builder = match deepspeed(plan, folder) {
        Some(strategy) => builder.strategy(strategy),
        None => builder.strategy(StrategyConfig::from(plan.strategy)),
    };
    if let Some(modules) = plan.checkpointed {
        builder = builder.activation_checkpointing([modules]);
    }
    builder.launch()
}

/// Trains as the plan says, from a batch on, of all epochs, with the checkpoint `saved.ckpt`, or to it; saves `end.ckpt` at the
/// end.
pub fn run(plan: &Plan, folder: &Path, second: Option<usize>) -> anyhow::Result<Outcome> {
    let mut fabric = launch(plan, folder)?;
    let net = Net::new(plan, false);
    let made = net.configure_optimizers()?;
    let (mut net, mut optimizers) = fabric.setup(net, made)?;
    let [data, _] = data(plan);
    let loader = DataLoader::new(TensorDataset::new(data)?).batch_size(plan.batch_size).build()?;
    let loader = fabric.setup_dataloaders(loader)?;
    let saved = folder.join("saved.ckpt");
    if second.is_some() {
        let at: usize = fabric.load(&saved, (&mut net, &mut optimizers))?;
        ensure!(Restart::Batch(at) == plan.restart, "the state that was saved is {at}");
    }
    let begin = second.unwrap_or(0);
    for epoch in begin / plan.batches..plan.epochs {
        let first = begin.saturating_sub(epoch * plan.batches);
        for (at, batch) in (first..).zip(loader.iter(EpochRange::epoch(epoch as u64).from_batch(first))?) {
            let (step, batch) = (epoch * plan.batches + at, batch?);
            net.freeze_second(step);
            if plan.no_loss != Some(step) {
                fabric.no_backward_sync(!plan.steps_after(step), |fabric| {
                    let loss = fabric.forward(&net, |net| net.loss(&batch, step))?;
                    fabric.backward(&net, &(loss / plan.window as f64))
                })?;
            }
            if plan.steps_after(step) {
                let clip = plan.clip.map(GradientClip::Norm);
                clip.map(|clip| fabric.clip_gradients(&mut optimizers, clip)).transpose()?;
                fabric.step(&mut optimizers)?;
                optimizers.zero_grad()?;
            }
            let schedules = match plan.schedule {
                None => false,
                Some(Interval::Step) => plan.steps_after(step),
                Some(Interval::Epoch) => at + 1 == plan.batches,
            };
            if schedules {
                optimizers.step_lr_schedulers(None)?;
            }
            if second.is_none() && plan.restart == Restart::Batch(step) {
                fabric.save(&saved, (&mut net, &mut optimizers), &step)?;
            }
        }
    }
    fabric.save(folder.join("end.ckpt"), (&mut net, &mut optimizers), &0)?;
    let steps = fabric.global_step();
    let weights = weights(&fabric.finish(net)?).into_iter().map(|(_, weight)| weight).collect();
    Ok(Outcome { weights, val_losses: Vec::new(), steps })
}

fn compare_runs(accelerator: &'static str, ranks: usize, folder: &Path) {
    cases(ranks, folder, 16, |seed, folder| {
        let schedules = [None, Some(Interval::Step), Some(Interval::Epoch)];
        let plan = Plan::of(seed, ranks, accelerator).of_own_loop(schedules[seed as usize % 3]);
        let done = || {
            let own = run(&plan, folder, None)?; // first, which sets an HPU up
            let expected = train(&plan);
            compare(&plan, &own, &expected)?;
            let Restart::Batch(at) = plan.restart else { return Ok(true) };
            compare(&plan, &run(&plan, folder, Some(at + 1))?, &expected).map(|()| true)
        };
        done().map_err(|error: anyhow::Error| format!("{error:#}\n  {plan:?}"))
    });
}

on_ranks_tests! {
    one_rank_of_fabric_is_a_loop_in_tch: 1, |ranks, folder| compare_runs("cpu", ranks, folder);
    two_ranks_of_fabric_are_a_loop_in_tch: 2, |ranks, folder| compare_runs("cpu", ranks, folder);
    an_emulated_hpu_of_fabric_is_a_loop_in_tch: 1, |ranks, folder| compare_runs("hpu", ranks, folder);
}
