//! What each rank has to itself is in a checkpoint: random states, gradients and values of an open window and epoch.

use std::path::Path;

use tempfile::TempDir;
use voltaic::callback::{Callback, LambdaCallback, OnExceptionCheckpoint, OnExceptionCheckpointConfig};
use voltaic::checkpoint::Checkpoint;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::metrics::MeanSquaredError;
use voltaic::module::HookContext;
use voltaic::nn::{Forward, Linear, ModuleExt};
use voltaic::optim::AdamW;
use voltaic::trainer::Limit;
use voltaic::{Kind, Module, Tensor};

use crate::checkpoints::{full_checkpoint, resumed};
use crate::ddp::{
    Net, assert_same, builder, finish, folder_of_parent, loaders, numbered, run_ranks, weights,
};
use crate::probe::{plays, text_of};

/// Drops half of what a layer gives.
#[derive(Module)]
struct Dropped {
    first: Linear,
    second: Linear,
    error: MeanSquaredError,
}

lightning_module!(Dropped, (Tensor, Tensor), AdamW::new(0.01), |net, (x, y), ctx| {
    let hidden = net.first.forward(x)?.relu().f_dropout(0.5, true)?;
    let out = net.second.forward(&hidden)?;
    net.error.update(&out, y)?;
    let loss = (out - y).square().mean(Kind::Float);
    ctx.log("train_loss", &loss).on_epoch(true).sync_dist(true);
    ctx.log("train_error", &net.error).on_epoch(true);
    Ok(loss)
});

/// Gives each rank a random state of its own, and asks for a checkpoint in the middle of a window and of an epoch.
struct OwnMasks;

const SAVED: &str = "middle.ckpt";

impl Callback for OwnMasks {
    fn on_train_start(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        if ctx.global_step() == 0 {
            let rank = ctx.process_group().map_or(0, |group| group.rank());
            voltaic::ffi::manual_seed(7 + rank as u64)?;
        }
        Ok(())
    }

    fn on_train_batch_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        if (ctx.current_epoch(), ctx.batch_idx()) == (1, 2) {
            ctx.request_checkpoint(full_checkpoint(ctx.log_dir().join(SAVED)));
        }
        Ok(())
    }
}

fn train(ckpt_path: Option<&Path>, folder: &Path) {
    let (first, second) = (Linear::new(5, 16).unwrap(), Linear::new(16, 3).unwrap());
    let mut net = Dropped { first, second, error: MeanSquaredError::new() };
    numbered(&net);
    let builder = builder(folder).max_epochs(2).limit_val_batches(0).devices(2);
    let mut trainer = resumed(builder.accumulate_grad_batches(2_u64).callback(OwnMasks), ckpt_path);
    trainer.fit(&mut net, &mut loaders(None)).unwrap();
    let value = |name: &str| trainer.metric(name).unwrap();
    println!("\nvalues: {} {}", value("train_loss_epoch"), value("train_error_epoch"));
    if trainer.is_global_zero() {
        let checkpoint = Checkpoint { weights: net.state_dict(), ..Checkpoint::default() };
        checkpoint.save(&folder.join("end.ckpt")).unwrap();
    }
}

fn values_of(text: &str) -> &str {
    text.lines().find(|line| line.starts_with("values: ")).unwrap_or_else(|| panic!("{text}"))
}

#[test]
fn a_resumed_run_draws_what_each_rank_would_have_drawn() {
    const CHECKPOINT: &str = "VOLTAIC_TEST_CHECKPOINT";
    if plays("whole") {
        return train(None, &folder_of_parent());
    }
    if plays("resumed") {
        return train(Some(Path::new(&std::env::var_os(CHECKPOINT).unwrap())), &folder_of_parent());
    }
    let (whole, resumed) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let expected = run_ranks("whole", whole.path());
    let path = whole.path().join(SAVED);
    let training = Checkpoint::load(&path).unwrap().training.unwrap();
    let [other] = training.ranks.as_slice() else { panic!("{} ranks", training.ranks.len()) };
    assert_eq!((training.grads.len(), other.grads.len()), (4, 4), "a window is open");
    assert_eq!((training.metrics.len(), other.metrics.len()), (2, 2), "so is an epoch");
    assert!(training.rng[0].1 != other.rng[0].1, "masks of their own");
    let mut command = crate::probe::own_process("resumed");
    command.env(crate::ddp::FOLDER, resumed.path()).env(CHECKPOINT, &path);
    let text = text_of(&command.output().unwrap());
    assert_same(&weights(resumed.path()), &weights(whole.path()));
    assert_eq!(values_of(&text), values_of(&expected));
}

/// Both ranks fail within a window; the checkpoint, which rank 0 writes alone, goes on with the window.
#[test]
fn a_run_that_failed_within_a_window_begins_the_window_again() {
    const FAILS: &str = "VOLTAIC_TEST_FAILS";
    let fit = |fails: Option<(u64, usize)>, ckpt: Option<&Path>| {
        let folder = folder_of_parent();
        let config = OnExceptionCheckpointConfig { dirpath: folder.clone(), ..Default::default() };
        let failing = LambdaCallback::new().on_after_backward(move |ctx, _| {
            anyhow::ensure!(fails != Some((ctx.current_epoch(), ctx.batch_idx())), "it fails here");
            Ok(())
        });
        let builder = builder(&folder).devices(2).strategy("ddp").accumulate_grad_batches(3_u64);
        let builder = builder.callback(failing).callback(OnExceptionCheckpoint::new(config).unwrap());
        let mut trainer = resumed(builder, ckpt);
        let mut net = Net::new();
        match trainer.fit(&mut net, &mut loaders(None)) {
            Ok(()) => finish(&trainer, &net, &folder),
            Err(error) => {
                println!("\nfailed: {error}");
                std::process::exit(0); // on all ranks
            }
        }
    };
    if plays("fails") {
        let numbers = std::env::var(FAILS).unwrap();
        let (epoch, batch) = numbers.split_once(' ').unwrap();
        return fit(Some((epoch.parse().unwrap(), batch.parse().unwrap())), None);
    }
    if plays("whole") {
        return fit(None, None);
    }
    if plays("resumed") {
        return fit(None, Some(&folder_of_parent().join("on_exception.ckpt")));
    }
    let whole = TempDir::new().unwrap();
    let expected = run_ranks("whole", whole.path());
    for fails in ["1 0", "1 2", "1 4"] {
        let folder = TempDir::new().unwrap();
        let mut command = crate::probe::own_process("fails");
        let output = command.env(FAILS, fails).env(crate::ddp::FOLDER, folder.path()).output().unwrap();
        assert!(folder.path().join("on_exception.ckpt").exists(), "{}", text_of(&output));
        let resumed = run_ranks("resumed", folder.path());
        assert_same(&weights(folder.path()), &weights(whole.path()));
        let value =
            |text: &str| text.lines().find(|line| line.starts_with("train_loss_epoch=")).unwrap().to_owned();
        assert_eq!(value(&resumed), value(&expected), "failed at {fails}");
    }
}

/// Notes the samples that it sees.
#[derive(Module)]
struct Seeing {
    layer: Linear,
    #[module(skip)]
    seen: std::sync::Mutex<Vec<i64>>,
}

lightning_module!(Seeing, (Tensor, Tensor), AdamW::new(0.01), |net, (x, _), _| {
    net.seen.lock().unwrap().extend(Vec::<i64>::try_from(x.reshape([-1]).to_kind(Kind::Int64))?);
    Ok(net.layer.forward(x)?.mean(Kind::Float))
});

const NUM_SAMPLES: usize = 48;

/// An epoch, or the rest of one; each rank leaves what it has seen in a file.
fn see(part: &str, how: (i64, usize), folder: &Path, ckpt_path: Option<&Path>) {
    see_limited(part, how, folder, ckpt_path, 1.0);
}

/// The same, of so many batches of the epoch.
fn see_limited(
    part: &str,
    (ranks, batch_size): (i64, usize),
    folder: &Path,
    ckpt_path: Option<&Path>,
    limit: impl Into<Limit>,
) {
    let x = Tensor::arange(NUM_SAMPLES as i64, (Kind::Float, tch::Device::Cpu)).reshape([-1, 1]);
    let train = DataLoader::new(TensorDataset::new((x.shallow_clone(), x)).unwrap());
    let train = train.batch_size(batch_size).shuffle(true).seed(3).build().unwrap();
    let save = LambdaCallback::new().on_train_batch_end(|ctx, _| {
        if ctx.batch_idx() == 2 {
            ctx.request_checkpoint(full_checkpoint(ctx.log_dir().join(SAVED)));
        }
        Ok(())
    });
    let failing = LambdaCallback::new().on_train_batch_start(|ctx, _| {
        anyhow::ensure!(ctx.batch_idx() != 3, "it fails here");
        Ok(())
    });
    let mut net = Seeing { layer: Linear::new(1, 1).unwrap(), seen: Default::default() };
    let mut builder = builder(folder).max_epochs(1).devices(ranks).limit_train_batches(limit);
    if ckpt_path.is_none() {
        builder = match part {
            "fails" => {
                let config = OnExceptionCheckpointConfig { dirpath: folder.into(), ..Default::default() };
                builder.callback(failing).callback(OnExceptionCheckpoint::new(config).unwrap())
            }
            _ => builder.callback(save),
        };
    }
    let mut trainer = resumed(builder, ckpt_path);
    let result = trainer.fit(&mut net, &mut Loaders::new().train(train));
    if part == "fails" {
        println!("\nfailed: {}", result.unwrap_err());
        std::process::exit(0); // on all ranks
    }
    result.unwrap();
    let seen = serde_json::to_string(&*net.seen.lock().unwrap()).unwrap();
    std::fs::write(folder.join(format!("{part}-{}", trainer.world().rank)), seen).unwrap();
}

/// What the ranks of a part have seen, in the order of the epoch.
fn seen(part: &str, (ranks, _): (i64, usize), folder: &Path) -> Vec<i64> {
    let of_rank = |rank| {
        let text = std::fs::read_to_string(folder.join(format!("{part}-{rank}"))).unwrap();
        serde_json::from_str::<Vec<i64>>(&text).unwrap()
    };
    let all: Vec<Vec<i64>> = (0..ranks).map(of_rank).collect();
    (0..all[0].len()).flat_map(|at| all.iter().map(move |of_rank| of_rank[at])).collect()
}

#[test]
fn other_numbers_of_ranks_go_on_within_an_epoch() {
    // ranks, batch size, and the samples before the first batch
    let others = [
        ("one", (1, 2), 12),
        ("one with the batch of all", (1, 4), 12),
        ("three", (3, 2), 12),
        ("three with another batch", (3, 4), 12),
        ("two with another batch", (2, 4), 16),
    ];
    const WHOLE: (i64, usize) = (2, 2);
    if plays("whole") {
        return see("whole", WHOLE, &folder_of_parent(), None);
    }
    for (part, how, _) in others {
        if plays(part) {
            let folder = folder_of_parent();
            return see(part, how, &folder, Some(&folder.join(SAVED)));
        }
    }
    let folder = TempDir::new().unwrap();
    run_ranks("whole", folder.path());
    let order = seen("whole", WHOLE, folder.path());
    assert_eq!(order.len(), NUM_SAMPLES);
    for (part, how, skipped) in others {
        run_ranks(part, folder.path());
        assert_eq!(seen(part, how, folder.path()), order[skipped..], "{part}");
    }
}

#[test]
fn a_limit_of_batches_goes_on_after_the_samples_that_were_seen() {
    // ranks, batch size, and the samples of the epoch that are left
    let others = [
        ("one", (1, 2), 12..16),
        ("three", (3, 2), 12..48),
        ("two with another batch", (2, 4), 16..48),
        ("two", (2, 2), 12..32),
    ];
    const HOW: (i64, usize) = (2, 2);
    const LIMIT: u64 = 8;
    if plays("whole") {
        return see("whole", HOW, &folder_of_parent(), None);
    }
    if plays("limited") {
        return see_limited("limited", HOW, &folder_of_parent(), None, LIMIT);
    }
    for (part, how, _) in &others {
        if plays(part) {
            let folder = folder_of_parent();
            return see_limited(part, *how, &folder, Some(&folder.join(SAVED)), LIMIT);
        }
    }
    let folder = TempDir::new().unwrap();
    run_ranks("whole", folder.path());
    let order = seen("whole", HOW, folder.path());
    run_ranks("limited", folder.path());
    assert_eq!(seen("limited", HOW, folder.path()), order[..32]);
    for (part, how, left) in others {
        run_ranks(part, folder.path());
        assert_eq!(seen(part, how, folder.path()), order[left], "{part}");
    }
}

/// Rank 0 saves alone what `OnExceptionCheckpoint` asks for.
#[test]
fn other_ranks_go_on_from_a_failure_within_an_epoch() {
    const HOW: (i64, usize) = (2, 2);
    const ONE: (i64, usize) = (1, 2);
    if plays("whole") || plays("fails") {
        let part = if plays("whole") { "whole" } else { "fails" };
        return see(part, HOW, &folder_of_parent(), None);
    }
    if plays("one") {
        let folder = folder_of_parent();
        return see("one", ONE, &folder, Some(&folder.join("on_exception.ckpt")));
    }
    let folder = TempDir::new().unwrap();
    run_ranks("whole", folder.path());
    let order = seen("whole", HOW, folder.path());
    let mut command = crate::probe::own_process("fails");
    let output = command.env(crate::ddp::FOLDER, folder.path()).output().unwrap();
    assert!(folder.path().join("on_exception.ckpt").exists(), "{}", text_of(&output));
    run_ranks("one", folder.path());
    assert_eq!(seen("one", ONE, folder.path()), order[12..]);
}
