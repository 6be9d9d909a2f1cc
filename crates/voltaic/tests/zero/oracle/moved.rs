//! Runs that others go on with, by another strategy and on another number of ranks. Parameters are frozen for a while, for ever, or never
//! used, and float32 copies of weights of 16 bits tell apart what those cannot hold.

use std::path::Path;

use anyhow::{Context, ensure};
use voltaic::checkpoint::Checkpoint;
use voltaic::trainer::Trainer;
use voltaic::{Kind, Tensor};

use super::expected::{Outcome, train};
use super::net::Net;
use super::plan::Plan;
use super::{add_checkpoint, builder, compare, loaders, own_loop};
use crate::fuzz::{End, SaveEnd};
use crate::random_runs::{cases, some};
use crate::ranks::{on_ranks_in_turn, weights};

/// The run of a plan in its folder, up to the checkpoint.
fn save(plan: &Plan, folder: &Path) -> anyhow::Result<()> {
    if plan.is_own_loop {
        return own_loop::run(plan, folder, None).map(drop);
    }
    let (builder, _) = add_checkpoint(plan, folder, builder(plan, folder));
    Ok(builder.build()?.fit(&mut Net::new(plan, false), &mut loaders(plan))?)
}

/// The second run, from a batch on, counted over all epochs.
fn go_on(plan: &Plan, folder: &Path, from: usize) -> anyhow::Result<Outcome> {
    let end = folder.join("end.ckpt");
    if plan.is_own_loop {
        let own = own_loop::run(plan, folder, Some(from))?;
        let names = weights(&Net::new(plan, false)).into_iter().map(|(name, _)| name);
        let weights: Vec<_> = names.zip(own.weights).collect();
        return Ok(Outcome { weights: exact(&weights, &end)?, ..own });
    }
    let mut trainer: Trainer = builder(plan, folder).callback(SaveEnd(End::Training, end.clone())).build()?;
    let mut net = Net::new(plan, false);
    trainer.ckpt_path(folder.join("saved.ckpt")).fit(&mut net, &mut loaders(plan))?;
    Ok(Outcome {
        weights: exact(&weights(&net), &end)?,
        val_losses: Vec::new(),
        steps: trainer.global_step(),
    })
}

/// Weights without rounding: where there are float32 copies, these. A weight is its copy, rounded.
fn exact(weights: &[(String, Tensor)], saved: &Path) -> anyhow::Result<Vec<Tensor>> {
    let saved = Checkpoint::load(saved)?.training.context("there are no states")?.optimizers;
    let of = |(name, weight): &(String, Tensor)| {
        let own = format!("master_param.{name}");
        let copy = saved.iter().flatten().find(|(name, _)| *name == own);
        let copy = copy.map_or_else(|| weight.shallow_clone(), |(_, copy)| copy.shallow_clone());
        ensure!(copy.to_kind(weight.kind()).equal(weight), "{name} is not its float32 copy, rounded");
        Ok(copy.to_kind(if weight.kind() == Kind::Double { Kind::Double } else { Kind::Float }))
    };
    weights.iter().map(of).collect()
}

/// The case of each seed that is one of so many ranks.
fn each(ranks: usize, folder: &Path, own: fn(&Plan, &Path, usize) -> Option<anyhow::Result<()>>) {
    cases(&format!(" on {ranks} ranks"), some(24, 500), |seed| {
        let plan = Plan::moved(seed);
        let done = own(&plan, &folder.join(format!("{seed}")), ranks).unwrap_or(Ok(()));
        done.map(|()| true).map_err(|error| format!("{error:#}\n  {plan:?}"))
    });
}

fn save_all(ranks: usize, folder: &Path) {
    each(ranks, folder, |plan, folder, ranks| {
        (plan.ranks == ranks).then(|| {
            std::fs::create_dir_all(folder)?;
            save(plan, folder)
        })
    });
}

fn go_on_all(ranks: usize, folder: &Path) {
    each(ranks, folder, |plan, folder, ranks| {
        let (second, left) = plan.parts().pop()?;
        (second.ranks == ranks).then(|| compare(&second, &go_on(&second, folder, left.start)?, &train(plan)))
    });
}

#[test]
fn other_strategies_and_ranks_go_on_as_a_loop_in_tch() {
    let test = "oracle::moved::other_strategies_and_ranks_go_on_as_a_loop_in_tch";
    on_ranks_in_turn(test, &[(1, save_all), (2, save_all), (1, go_on_all), (2, go_on_all), (3, go_on_all)]);
}
