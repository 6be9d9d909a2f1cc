//! Runs that go on with batches of another size, from a file of any batch.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use tempfile::TempDir;
use voltaic::callback::{GradientAccumulationScheduler, LambdaCallback};
use voltaic::checkpoint::Checkpoint;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::{Forward, Linear, ModuleExt};
use voltaic::optim::{ExponentialLr, LrSchedulerSpec, Optimizers, Sgd};
use voltaic::trainer::TrainerBuilder;
use voltaic::{Kind, Module, Tensor};

use crate::checkpoints::{full_checkpoint, resumed};
use crate::compare::assert_same;
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

fn net() -> Net {
    Net { layer: Linear::new(5, 3).unwrap() }
}

type Build = dyn Fn(TrainerBuilder) -> TrainerBuilder;

fn builder(folder: &TempDir) -> TrainerBuilder {
    silent().accelerator("cpu").default_root_dir(folder.path())
}

/// A file of this batch of an epoch, of a run of so many epochs with batches of 3 samples; and the weights at its end.
fn saved<M: LightningModule<Batch = Batch>>(
    mut module: M,
    folder: &TempDir,
    (at, max_epochs): ((u64, usize), i64),
    build: &Build,
) -> (PathBuf, Vec<(String, Tensor)>) {
    let path = folder.path().join("batch.ckpt");
    let to = path.clone();
    let save = LambdaCallback::new().on_train_batch_end(move |ctx, _| {
        if (ctx.current_epoch(), ctx.batch_idx()) == at {
            ctx.request_checkpoint(full_checkpoint(to.clone()));
        }
        Ok(())
    });
    let builder = build(builder(folder)).callback(save).max_epochs(max_epochs);
    builder.build().unwrap().fit(&mut module, &mut loaders(3)).unwrap();
    (path, module.state_dict())
}

/// What a run does from a file on.
#[derive(Debug, Default)]
struct Seen {
    /// Batches of the first epoch.
    of_first: usize,
    batches: usize,
    global_step: u64,
    /// The batches, from 1, with a step.
    steps: Vec<usize>,
    /// The last learning rate.
    lr: f64,
}

/// Goes on to the end of the second epoch.
fn resume<M: LightningModule<Batch = Batch>>(
    mut module: M,
    path: &Path,
    batch_size: usize,
    builder: TrainerBuilder,
) -> Seen {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let [begin, own, end] = [(); 3].map(|()| seen.clone());
    let watch = LambdaCallback::new()
        .on_train_start(move |ctx, _| {
            begin.lock().unwrap().global_step = ctx.global_step();
            Ok(())
        })
        .on_train_batch_end(move |ctx, _| {
            let mut seen = own.lock().unwrap();
            seen.of_first += usize::from(ctx.current_epoch() == 0);
            seen.batches += 1;
            if ctx.global_step() > seen.global_step {
                let batch = seen.batches;
                seen.steps.push(batch);
            }
            seen.global_step = ctx.global_step();
            Ok(())
        })
        .on_train_end(move |ctx, _| {
            end.lock().unwrap().lr = ctx.optimizers()[0].param_groups()[0].lr;
            Ok(())
        });
    let mut trainer = resumed(builder.callback(watch).max_epochs(2), Some(path));
    trainer.fit(&mut module, &mut loaders(batch_size)).unwrap();
    std::mem::take(&mut *seen.lock().unwrap())
}

/// From a file of batch `at` of 4 of the first epoch.
fn go_on<M: LightningModule<Batch = Batch>>(
    make: fn() -> M,
    at: usize,
    batch_size: usize,
    (from, to): (&Build, &Build),
) -> Seen {
    let folder = TempDir::new().unwrap();
    let (path, _) = saved(make(), &folder, ((0, at), 1), from);
    resume(make(), &path, batch_size, to(builder(&folder)))
}

/// Samples that were seen are not trained again, and an epoch steps its schedules once: a file of its last batch has that step.
#[test]
fn an_epoch_ends_once_whatever_its_batches() {
    let _rng = seeded(5);
    for at in 0..4 {
        for batch_size in [1, 2, 3, 4, 6] {
            let Seen { of_first: batches, lr, .. } = go_on(net, at, batch_size, (&|it| it, &|it| it));
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
    let manual = || Manual { layer: Linear::new(5, 3).unwrap() };
    assert_eq!(go_on(manual, 1, 2, (&|it| it, &|it| it)).of_first, 3);
}

/// Windows of so many batches, by the trainer's key and by a callback.
fn windows(size: u64) -> [Box<Build>; 2] {
    let scheduler = move || GradientAccumulationScheduler::new([(0, size)]).unwrap();
    [
        Box::new(move |builder| builder.accumulate_grad_batches(size)),
        Box::new(move |builder| builder.callback(scheduler())),
    ]
}

/// Gradients of an open window were divided by its size: those of a window of another size cannot be added to them. Two batches are done.
#[test]
fn an_open_window_of_another_size_is_refused() {
    let _rng = seeded(5);
    for (size, own) in [(3, 1), (3, 2), (3, 4), (4, 3)] {
        for from in windows(size) {
            let folder = TempDir::new().unwrap();
            let (path, _) = saved(net(), &folder, ((0, 1), 1), &from);
            let fit = |build: &Build, path: &Path| {
                resumed(build(builder(&folder)).max_epochs(1), Some(path)).fit(&mut net(), &mut loaders(3))
            };
            for build in windows(own) {
                let error = fit(&build, &path).unwrap_err().to_string();
                let words = format!("an open accumulation window of {size} batches");
                let key = format!("trainer.accumulate_grad_batches: {own}, but ");
                assert!(error.contains(&key) && error.contains(&words), "{size} {own}: {error}");
            }
            windows(size).iter().for_each(|build| fit(build, &path).unwrap());
            // files of earlier versions do not tell
            let mut file = Checkpoint::load(&path).unwrap();
            let state = file.training.as_mut().unwrap().json.as_object_mut().unwrap();
            assert_eq!(state.remove("window").unwrap(), serde_json::json!({"size": size, "done": 2}));
            file.save(&path).unwrap();
            windows(size).iter().for_each(|build| fit(build, &path).unwrap());
        }
    }
}

fn window_of_three(strategy: &'static str) -> impl Fn(TrainerBuilder) -> TrainerBuilder {
    move |builder| builder.strategy(strategy).accumulate_grad_batches(3_u64)
}

/// Windows of DeepSpeed go on over epochs, here of 4 batches in windows of 3: at the same batch another part of a window is done.
#[test]
fn windows_over_epochs_are_no_windows_of_an_epoch() {
    let _rng = seeded(5);
    let (deepspeed, own) = ("deepspeed_stage_1", "auto");
    for (from, to, at, refused) in [
        (deepspeed, own, (1, 0), "(2 of 3 batches), and at its batch 1 the window of this run has 1 "),
        (own, deepspeed, (1, 0), "(1 of 3 batches), and at its batch 1 the window of this run has 2 "),
        (deepspeed, own, (0, 3), "(1 of 3 batches), and at its batch 4 no window of this run is open"),
        (deepspeed, deepspeed, (0, 3), ""),
        (deepspeed, deepspeed, (1, 0), ""),
        (own, own, (1, 0), ""),
    ] {
        let folder = TempDir::new().unwrap();
        let (path, whole) = saved(net(), &folder, (at, 3), &window_of_three(from));
        let mut net = net();
        let mut trainer = resumed(window_of_three(to)(builder(&folder)).max_epochs(3), Some(&path));
        let done = trainer.fit(&mut net, &mut loaders(3));
        match refused {
            "" => {
                done.unwrap();
                assert_same(to, &net.state_dict(), &whole);
            }
            _ => {
                let error = done.unwrap_err().to_string();
                assert!(error.contains(refused), "{from} to {to}: {error}");
            }
        }
    }
}

/// A window that a callback sets counts for the position, too: with batches of 1 sample 6 have been seen, and a window has 4.
#[test]
fn a_scheduled_window_is_begun_with() {
    let _rng = seeded(5);
    let [_, scheduled] = windows(4);
    assert_eq!(go_on(net, 1, 1, (&|it| it, &scheduled)).of_first, 4, "from batch 8 of 12");
}

/// DeepSpeed counts batches over epochs: the first batch of another size begins a window, wherever it is in its epoch.
#[test]
fn a_window_over_epochs_begins_among_other_batches() {
    let _rng = seeded(5);
    let deepspeed = |window: u64| {
        move |builder: TrainerBuilder| builder.strategy("deepspeed_stage_1").accumulate_grad_batches(window)
    };
    // the batch of 4 of 3 samples, windows before and after; batches of 2 that are left of the first epoch, and those with a step
    for (at, from, to, left, steps) in [
        (2, 3, 3, 1, vec![3, 6]),
        (2, 3, 2, 1, vec![2, 4, 6]),
        (1, 2, 4, 3, vec![4, 8]),
        (3, 4, 3, 0, vec![3, 6]),
    ] {
        let seen = go_on(net, at, 2, (&deepspeed(from), &deepspeed(to)));
        assert_eq!(
            (seen.of_first, seen.steps),
            (left, steps),
            "after batch {at}, windows of {from} and {to}"
        );
    }
}

/// Also at the end of an epoch gradients of an open window are those of the same batches only.
#[test]
fn a_window_over_epochs_is_one_of_the_same_batches() {
    let _rng = seeded(5);
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("end.ckpt");
    let to = path.clone();
    let save = LambdaCallback::new().on_train_epoch_end(move |ctx, _| {
        ctx.request_checkpoint(full_checkpoint(to.clone()));
        Ok(())
    });
    let builder = || window_of_three("deepspeed_stage_1")(builder(&folder));
    builder().callback(save).max_epochs(1).build().unwrap().fit(&mut net(), &mut loaders(3)).unwrap();
    let fit = |size| resumed(builder().max_epochs(2), Some(&path)).fit(&mut net(), &mut loaders(size));
    fit(3).unwrap();
    assert_error!(fit(2), "the checkpoint has gradients of an open accumulation window");
}
