//! Runs that go on with batches of another size, from a file of any batch.

use std::sync::{Arc, Mutex};

use tempfile::TempDir;
use voltaic::callback::{GradientAccumulationScheduler, LambdaCallback};
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::{Forward, Linear};
use voltaic::optim::{ExponentialLr, LrSchedulerSpec, Optimizers, Sgd};
use voltaic::trainer::TrainerBuilder;
use voltaic::{Kind, Module, Tensor};

use crate::checkpoints::{full_checkpoint, resumed};
use crate::probe::silent;
use crate::rng::seeded;

type Batch = (Tensor, Tensor);

#[derive(Module)]
struct Net {
    layer: Linear,
}

#[derive(Module)]
struct Manual {
    layer: Linear,
}

fn optimizers() -> Optimizers {
    Optimizers::new(Sgd::new(1e-3)).scheduler(LrSchedulerSpec::new(ExponentialLr::new(0.5)))
}

fn loss(layer: &Linear, (x, y): &Batch) -> anyhow::Result<Tensor> {
    Ok((layer.forward(x)? - y).square().mean(Kind::Float))
}

fn by_hand(layer: &Linear, batch: &Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
    let loss = loss(layer, batch)?;
    ctx.optimizer(0)?.zero_grad()?;
    ctx.manual_backward(&loss)?;
    ctx.optimizer(0)?.step()?;
    Ok(loss.detach())
}

lightning_module!(Net, Batch, |_net| optimizers(), |net, batch, _ctx| loss(&net.layer, batch));
lightning_module!(Manual, Batch, manual(Sgd::new(1e-3)), |net, batch, ctx| by_hand(&net.layer, batch, ctx));

/// 12 samples.
fn loaders(batch_size: usize) -> Loaders<Batch> {
    let [x, y] = [5, 3].map(|size| Tensor::ones([12, size], (Kind::Float, tch::Device::Cpu)));
    Loaders::new()
        .train(DataLoader::new(TensorDataset::new((x, y)).unwrap()).batch_size(batch_size).build().unwrap())
}

/// Batches of the first epoch that a run of two epochs trains, from a file of batch `at` of 4, and its last learning rate.
fn go_on<M: LightningModule<Batch = Batch>>(
    make: impl Fn() -> M,
    at: usize,
    batch_size: usize,
    build: fn(TrainerBuilder) -> TrainerBuilder,
) -> (usize, f64) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("batch.ckpt");
    let to = path.clone();
    let save = LambdaCallback::new().on_train_batch_end(move |ctx, _| {
        if ctx.batch_idx() == at {
            ctx.request_checkpoint(full_checkpoint(to.clone()));
        }
        Ok(())
    });
    let builder = || silent().default_root_dir(folder.path());
    builder().callback(save).max_epochs(1).build().unwrap().fit(&mut make(), &mut loaders(3)).unwrap();
    let seen = Arc::new(Mutex::new((0, 0.0)));
    let own = seen.clone();
    let watch = LambdaCallback::new().on_train_batch_end(move |ctx, _| {
        let mut seen = own.lock().unwrap();
        seen.0 += usize::from(ctx.current_epoch() == 0);
        Ok(())
    });
    let own = seen.clone();
    let watch = watch.on_train_end(move |ctx, _| {
        own.lock().unwrap().1 = ctx.optimizers()[0].param_groups()[0].lr;
        Ok(())
    });
    let mut trainer = resumed(build(builder().callback(watch).max_epochs(2)), Some(&path));
    trainer.fit(&mut make(), &mut loaders(batch_size)).unwrap();
    *seen.lock().unwrap()
}

/// Samples that were seen are not trained again, and an epoch steps its schedules once: a file of its last batch has that step.
#[test]
fn an_epoch_ends_once_whatever_its_batches() {
    let _rng = seeded(5);
    for at in 0..4 {
        for batch_size in [1, 2, 3, 4, 6] {
            let (batches, lr) = go_on(|| Net { layer: Linear::new(5, 3).unwrap() }, at, batch_size, |it| it);
            let left = 12 - (3 * (at + 1)).next_multiple_of(batch_size);
            let expected = if at == 3 { 0 } else { (left / batch_size).max(1) };
            assert_eq!(batches, expected, "after batch {at}, with batches of {batch_size}");
            assert!((lr - 0.25e-3).abs() < 1e-9, "after batch {at}, with batches of {batch_size}: {lr}");
        }
    }
}

/// The gradients that a module leaves after its own steps are no open window.
#[test]
fn manual_optimization_goes_on_with_other_batches() {
    let _rng = seeded(5);
    let (batches, _) = go_on(|| Manual { layer: Linear::new(5, 3).unwrap() }, 1, 2, |it| it);
    assert_eq!(batches, 3);
}

/// Gradients of an open window are continued or refused, never dropped.
#[test]
fn an_open_window_that_another_run_does_not_have_is_refused() {
    let _rng = seeded(5);
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("open.ckpt");
    let to = path.clone();
    let save = LambdaCallback::new().on_train_batch_end(move |ctx, _| {
        if ctx.batch_idx() == 1 {
            ctx.request_checkpoint(full_checkpoint(to.clone()));
        }
        Ok(())
    });
    let net = || Net { layer: Linear::new(5, 3).unwrap() };
    let builder =
        |window: u64| silent().default_root_dir(folder.path()).accumulate_grad_batches(window).max_epochs(1);
    builder(3).callback(save).build().unwrap().fit(&mut net(), &mut loaders(3)).unwrap();
    resumed(builder(3), Some(&path)).fit(&mut net(), &mut loaders(3)).unwrap();
    for window in [1, 2] {
        let error = resumed(builder(window), Some(&path)).fit(&mut net(), &mut loaders(3)).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("at its batch 2 no window of this run is open"), "{window}: {error}");
    }
}

/// A window that a callback sets counts for the position, too: with batches of 1 sample 6 have been seen, and a window has 4.
#[test]
fn a_scheduled_window_is_begun_with() {
    let _rng = seeded(5);
    let (batches, _) = go_on(
        || Net { layer: Linear::new(5, 3).unwrap() },
        1,
        1,
        |builder| builder.callback(GradientAccumulationScheduler::new([(0, 4)]).unwrap()),
    );
    assert_eq!(batches, 4, "from batch 8 of 12");
}
