//! States in memory of the host between phases: the device has the room, who reads them reads them there, and training does not change
//! by a bit.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use voltaic::accelerator::memory_allocated;
use voltaic::callback::{Callback, LambdaCallback};
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::module::HookContext;
use voltaic::nn::{ModuleExt, Parameter};
use voltaic::optim::{OffloadState, OffloadStates};
use voltaic::trainer::TrainerBuilder;
use voltaic::{Device, Module, Tensor};

use crate::checkpoints::full_checkpoint;
use crate::memory::{Deep, WIDTH};
use crate::models::{Odd, Small, all_loaders, loaders, numbers};
use crate::ranks::{assert_same, silent, weights};
use crate::shards::staged;
use crate::values::host;

use OffloadState::{HpParams, LpGrads, LpParams, OptimStates};

/// Moves states away after some batches and epochs, and some of the times back, with a checkpoint while they are away.
struct Away {
    states: OffloadStates,
    folder: PathBuf,
}

/// All values of all trained parameters.
fn values(ctx: &HookContext, module: &dyn Module) -> anyhow::Result<Vec<(String, Tensor)>> {
    let mut values = Vec::new();
    let trained = module.named_parameters().into_iter().filter(|(_, parameter)| parameter.requires_grad());
    for (fqn, parameter) in trained.filter(|(_, parameter)| parameter.numel() > 0) {
        assert_eq!(ctx.full_fp32_param(&fqn)?.size(), parameter.size());
        values.push((format!("weight of {fqn}"), host(&ctx.full_fp32_param(&fqn)?).copy()));
        if let Some(grad) = ctx.full_grad(&fqn)? {
            values.push((format!("gradient of {fqn}"), host(&grad).copy()));
        }
        for state in ["exp_avg", "step"] {
            let Ok(value) = ctx.full_optimizer_state(&fqn, state) else { continue };
            values.push((format!("{state} of {fqn}"), host(&value).copy()));
        }
    }
    Ok(values)
}

impl Away {
    fn go(&self, ctx: &mut HookContext, module: &dyn Module, comes_back: bool) -> anyhow::Result<()> {
        let before = values(ctx, module)?;
        ctx.offload_states(self.states.clone())?;
        assert_same("values that are away", &values(ctx, module)?, &before);
        ctx.offload_states(self.states.clone())?;
        if self.states.include.contains(&OptimStates) {
            let states = ctx.optimizers()[0].state_dict().tensors;
            let mut moments = states.iter().filter(|(name, _)| name.starts_with("exp_avg"));
            assert!(moments.all(|(_, state)| state.device() == tch::Device::Cpu));
        }
        if comes_back {
            ctx.reload_states()?;
            assert_same("values that are back", &values(ctx, module)?, &before);
        }
        Ok(())
    }
}

impl Callback for Away {
    fn on_train_batch_end(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        if self.states.include.is_empty() {
            return Ok(());
        }
        if ctx.current_epoch() == 1 {
            let path = self.folder.join(format!("{}.ckpt", ctx.batch_idx()));
            ctx.request_checkpoint(full_checkpoint(path));
        }
        // after 0, 2 and 4 a window is open
        if ctx.batch_idx() == 3 { Ok(()) } else { self.go(ctx, module, ctx.batch_idx() == 1) }
    }

    fn on_train_epoch_end(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        match self.states.include.is_empty() {
            true => Ok(()),
            false => self.go(ctx, module, ctx.current_epoch() == 0),
        }
    }
}

fn strategies(ranks: usize) -> [&'static str; 4] {
    [if ranks == 1 { "auto" } else { "ddp_find_unused_parameters_true" }, "zero1", "zero2", "zero3"]
}

/// A run of a strategy with small units.
fn builder(ranks: usize, strategy: &'static str, folder: &Path) -> TrainerBuilder {
    match strategy {
        "zero1" | "zero2" | "zero3" => staged(ranks, strategy, folder),
        _ => silent(ranks, strategy, folder),
    }
}

fn same(ranks: usize, folder: &Path, accelerator: &str) {
    let sets: [OffloadStates; 4] =
        [OffloadState::ALL.into(), [OptimStates, LpGrads].into(), [HpParams].into(), [LpParams].into()];
    let num_sets = if accelerator == "cpu" { 1 } else { sets.len() };
    let none = OffloadStates { include: Vec::new(), pin_memory: false };
    for (strategy, precision) in
        strategies(ranks).into_iter().flat_map(|strategy| [(strategy, "32-true"), (strategy, "bf16-true")])
    {
        let run = |states: &OffloadStates, from: Option<u64>, folder: &Path| {
            let away = Away { states: states.clone(), folder: folder.to_path_buf() };
            let builder = builder(ranks, strategy, folder).accelerator(accelerator).precision(precision);
            let builder = builder.max_epochs(3).accumulate_grad_batches(2_u64).gradient_clip_val(0.1);
            let mut trainer = builder.callback(away).build().unwrap();
            if let Some(batch) = from {
                trainer.ckpt_path(folder.join(format!("{batch}.ckpt")));
            }
            let mut net = Small { has_masters: precision == "bf16-true", ..Small::new() };
            trainer.fit(&mut net, &mut all_loaders(5 * 2 * ranks as i64)).unwrap();
            let is_on_host = |parameter: &Parameter| Device::of(parameter.leaf()).unwrap() == Device::Cpu;
            assert!(net.parameters().iter().all(|parameter| is_on_host(parameter) == (accelerator == "cpu")));
            weights(&net)
        };
        let expected = run(&none, None, folder);
        for states in &sets[..num_sets] {
            let saved = folder.join(format!("{strategy}-{precision}-{:?}", states.include));
            let what = format!("{strategy}, {precision}, {:?}", states.include);
            assert_same(&what, &run(states, None, &saved), &expected);
            if states.include.len() > 1 {
                assert_same(&format!("{what}: resumed"), &run(states, Some(2), &saved), &expected);
            }
        }
    }
    let odd = |states: OffloadStates| {
        let away = Away { states, folder: folder.join("odd") };
        let builder = builder(ranks, "zero3", folder).accelerator(accelerator);
        let mut net = Odd::new();
        builder.max_epochs(2).callback(away).build().unwrap().fit(&mut net, &mut loaders(24)).unwrap();
        weights(&net)
    };
    assert_same("odd", &odd(OffloadStates::default()), &odd(none));
}

fn same_on_cpu(ranks: usize, folder: &Path) {
    same(ranks, folder, "cpu");
}

fn same_on_hpu(ranks: usize, folder: &Path) {
    same(ranks, folder, "hpu");
}

/// Notes how many bytes of the device each state gives back at the end of an epoch, and how many more there are when all are back.
struct Meter(Arc<Mutex<Vec<i64>>>);

impl Callback for Meter {
    fn on_train_epoch_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        let device = ctx.device();
        let held = || memory_allocated(device).map(|bytes| bytes as i64);
        let first = held()?;
        for state in OffloadState::ALL {
            let before = held()?;
            ctx.offload_states([state])?;
            self.0.lock().unwrap().push(before - held()?);
        }
        ctx.reload_states()?;
        self.0.lock().unwrap().push(held()? - first);
        Ok(())
    }
}

/// What is left of the gradients of a step, with the buckets of DDP, which stay.
fn memory(ranks: usize, folder: &Path) {
    for strategy in strategies(ranks) {
        let freed = Arc::new(Mutex::new(Vec::new()));
        let builder = silent(ranks, strategy, folder).accelerator("hpu").precision("bf16-true");
        let mut trainer = builder.max_epochs(1).callback(Meter(freed.clone())).build().unwrap();
        let data = numbers(&[4 * ranks as i64, WIDTH], 1.0);
        let data = TensorDataset::new((data.copy(), data)).unwrap();
        let train = DataLoader::new(data).batch_size(1).build().unwrap();
        let mut net = Deep::new(true, false);
        trainer.fit(&mut net, &mut Loaders::new().train(train)).unwrap();
        let numel: i64 = net.parameters().iter().map(|parameter| parameter.numel() as i64).sum();
        let (psi, n) = (numel as f64, if strategy.starts_with("zero") { ranks as f64 } else { 1.0 });
        let weights = if strategy == "zero3" { 0.0 } else { 2.0 * psi }; // with master weights there are no shards of others
        let grads = if strategy.starts_with("ddp") { 0.0 } else { 2.0 * psi / n };
        let expected = [8.0 * psi / n, 4.0 * psi / n, weights, grads, 0.0];
        let freed: Vec<f64> = freed.lock().unwrap().iter().map(|bytes| *bytes as f64).collect();
        let are_alike =
            freed.iter().zip(expected).all(|(freed, expected)| (freed - expected).abs() < 0.25 * psi);
        assert!(are_alike && freed.len() == 5, "{strategy}: {freed:?} bytes, not {expected:?}");
    }
}

on_ranks_tests! {
    one_rank_trains_as_if_nothing_was_away: 1, same_on_hpu;
    two_ranks_train_as_if_nothing_was_away: 2, same_on_hpu;
    one_rank_of_the_host_moves_nothing: 1, same_on_cpu;
    two_ranks_of_the_host_move_nothing: 2, same_on_cpu;
    one_rank_gives_the_memory_back: 1, memory;
    two_ranks_give_the_memory_back: 2, memory;
}

/// Asks where states are needed.
struct TooEarly;

impl Callback for TooEarly {
    fn on_after_backward(&mut self, ctx: &mut HookContext, _module: &dyn Module) -> anyhow::Result<()> {
        Ok(ctx.offload_states(OffloadStates::default())?)
    }
}

#[test]
fn states_stay_where_they_are_needed() {
    let folder = tempfile::tempdir().unwrap();
    let builder = || silent(1, "auto", folder.path()).max_epochs(1);
    let fit = |builder: TrainerBuilder| {
        builder.build().unwrap().fit(&mut Small::new(), &mut loaders(8)).unwrap_err().to_string()
    };
    assert_contains!(fit(builder().callback(TooEarly)), "on_after_backward is a part of a step", "between");
    let error = fit(builder()
        .callback(LambdaCallback::new().on_train_epoch_end(|ctx, _| Ok(ctx.offload_states([LpParams])?)))
        .graph(voltaic::trainer::GraphMode::Step));
    assert!(error.contains("trainer.graph=step") && error.contains("graph=off"), "{error}");
    let mut trainer = builder()
        .callback(LambdaCallback::new().on_test_end(|ctx, _| Ok(ctx.offload_states([LpParams])?)))
        .build()
        .unwrap();
    assert_error!(trainer.test(&mut Small::new(), &mut all_loaders(8)), "there are no optimizers");
}
