//! The order of hooks, compared with what Lightning was recorded to do (tests/fixtures/hooks; docs/hooks.md argues the
//! differences).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tempfile::TempDir;
use voltaic::callback::{Callback, LambdaCallback, ModelCheckpoint, ModelCheckpointConfig};
use voltaic::checkpoint::Checkpoint;
use voltaic::data::{DataLoader, DataModule, Stage, TensorDataset};
use voltaic::module::{Hook, HookContext, LightningModule, ModuleTensors, StepContext, StepHook};
use voltaic::nn::Parameter;
use voltaic::optim::{GradientClip, LrScheduler, Optimizer, Optimizers, ParamGroup, Sgd, StepLr};
use voltaic::trainer::TrainerBuilder;
use voltaic::{Device, Error, Kind, Module, Tensor};

use crate::probe::silent;

#[derive(Clone, Default)]
struct Trace(Arc<Mutex<Vec<String>>>);

impl Trace {
    fn note(&self, word: impl Into<String>) {
        self.0.lock().unwrap().push(word.into());
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

#[derive(Clone, Copy, PartialEq, Default)]
enum Does {
    #[default]
    Trains,
    FailsAtOne,
    SkipsAtOne,
    NoLoss,
    Manual,
}

/// Notes each hook.
#[derive(Module)]
struct Net {
    layer: Parameter,
    other: Parameter,
    #[module(skip)]
    trace: Trace,
    #[module(skip)]
    does: Does,
}

impl Net {
    fn new(trace: &Trace, does: Does) -> Self {
        let weight = || Parameter::new(Tensor::ones([2], (Kind::Float, tch::Device::Cpu)));
        Self { layer: weight(), other: weight(), trace: trace.clone(), does }
    }
}

fn loss(weight: &Parameter, batch: &Tensor) -> anyhow::Result<Tensor> {
    Ok((batch * weight.tensor()).f_mean(Kind::Float)?)
}

macro_rules! module_hooks {
    ($($hook:ident),*; $($batch_hook:ident),*; $($shared:ident),*) => {
        $(fn $hook(&mut self, _ctx: &mut HookContext) -> anyhow::Result<()> {
            self.trace.note(concat!("M.", stringify!($hook)));
            Ok(())
        })*
        $(fn $batch_hook(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
            self.trace.note(format!(concat!("M.", stringify!($batch_hook), " {}"), ctx.batch_idx()));
            Ok(())
        })*
        $(fn $shared(&self, _ctx: &mut HookContext) -> anyhow::Result<()> {
            self.trace.note(concat!("M.", stringify!($shared)));
            Ok(())
        })*
    };
}

impl LightningModule for Net {
    type Batch = Tensor;

    fn training_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        self.trace.note(format!("M.training_step {}", ctx.batch_idx()));
        match self.does {
            Does::FailsAtOne => anyhow::ensure!(ctx.batch_idx() != 1, "no luck"),
            Does::NoLoss => return Ok(ctx.no_loss()),
            Does::Manual => {
                for (index, weight) in [&self.layer, &self.other].into_iter().enumerate() {
                    ctx.toggle_optimizer(index)?;
                    let loss = loss(weight, batch)?;
                    ctx.optimizer(index)?.zero_grad()?;
                    ctx.manual_backward(&loss)?;
                    ctx.optimizer(index)?.step()?;
                    ctx.untoggle_optimizer()?;
                }
                return Ok(ctx.no_loss());
            }
            _ => {}
        }
        loss(&self.layer, batch)
    }

    fn validation_step(&self, _batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<()> {
        self.trace.note(format!("M.validation_step {}", ctx.batch_idx()));
        Ok(())
    }

    fn test_step(&self, _batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<()> {
        self.trace.note(format!("M.test_step {}", ctx.batch_idx()));
        Ok(())
    }

    fn predict_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        self.trace.note(format!("M.predict_step {}", ctx.batch_idx()));
        Ok(batch.shallow_clone())
    }

    fn automatic_optimization(&self) -> bool {
        self.does != Does::Manual
    }

    fn configure_callbacks(&mut self) -> anyhow::Result<Vec<Box<dyn Callback>>> {
        self.trace.note("M.configure_callbacks");
        Ok(Vec::new())
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        self.trace.note("M.configure_optimizers");
        let one = || Optimizers::new(Sgd::new(0.1)).scheduler(StepLr::new(1, 0.5));
        Ok(if self.does == Does::Manual { one().and(one()) } else { one() })
    }

    fn prepare_data(&mut self) -> anyhow::Result<()> {
        self.trace.note("M.prepare_data");
        Ok(())
    }

    fn setup(&mut self, stage: Stage) -> anyhow::Result<()> {
        self.trace.note(format!("M.setup {stage}"));
        Ok(())
    }

    fn teardown(&mut self, stage: Stage) -> anyhow::Result<()> {
        self.trace.note(format!("M.teardown {stage}"));
        Ok(())
    }

    fn configure_model(&mut self) -> anyhow::Result<()> {
        self.trace.note("M.configure_model");
        Ok(())
    }

    fn on_before_batch_transfer(&mut self, batch: Tensor, _loader: usize) -> anyhow::Result<Tensor> {
        self.trace.note("M.on_before_batch_transfer");
        Ok(batch)
    }

    fn transfer_batch_to_device(
        &mut self,
        batch: Tensor,
        device: Device,
        _loader: usize,
    ) -> anyhow::Result<Tensor> {
        self.trace.note("M.transfer_batch_to_device");
        Ok(voltaic::data::Batch::move_to(batch, device)?)
    }

    fn on_after_batch_transfer(&mut self, batch: Tensor, _loader: usize) -> anyhow::Result<Tensor> {
        self.trace.note("M.on_after_batch_transfer");
        Ok(batch)
    }

    fn backward(&self, loss: &Tensor, _ctx: &mut HookContext) -> anyhow::Result<()> {
        self.trace.note("M.backward");
        Ok(loss.f_backward()?)
    }

    fn optimizer_zero_grad(
        &self,
        optimizer: &mut dyn Optimizer,
        _ctx: &mut HookContext,
    ) -> anyhow::Result<()> {
        self.trace.note("M.optimizer_zero_grad");
        Ok(optimizer.zero_grad()?)
    }

    fn configure_gradient_clipping(
        &self,
        optimizer: &mut dyn Optimizer,
        clip: Option<GradientClip>,
        _ctx: &mut HookContext,
    ) -> anyhow::Result<()> {
        self.trace.note("M.configure_gradient_clipping");
        Ok(clip.map_or(Ok(()), |clip| clip.apply(optimizer.param_groups()).map(drop))?)
    }

    fn optimizer_step(&self, optimizer: &mut dyn Optimizer, _ctx: &mut HookContext) -> anyhow::Result<()> {
        optimizer.step()?;
        self.trace.note("M.optimizer_step");
        Ok(())
    }

    fn lr_scheduler_step(
        &self,
        scheduler: &mut dyn LrScheduler,
        groups: &mut [ParamGroup],
        metric: Option<f64>,
    ) -> anyhow::Result<()> {
        self.trace.note("M.lr_scheduler_step");
        Ok(scheduler.step(groups, metric)?)
    }

    fn on_validation_model_zero_grad(&mut self) -> anyhow::Result<()> {
        self.trace.note("M.on_validation_model_zero_grad");
        Ok(())
    }

    fn on_validation_model_eval(&mut self) -> anyhow::Result<()> {
        self.trace.note("M.on_validation_model_eval");
        Ok(())
    }

    fn on_validation_model_train(&mut self) -> anyhow::Result<()> {
        self.trace.note("M.on_validation_model_train");
        Ok(())
    }

    fn on_test_model_eval(&mut self) -> anyhow::Result<()> {
        self.trace.note("M.on_test_model_eval");
        Ok(())
    }

    fn on_predict_model_eval(&mut self) -> anyhow::Result<()> {
        self.trace.note("M.on_predict_model_eval");
        Ok(())
    }

    fn on_save_checkpoint(&mut self, _tensors: &mut ModuleTensors) -> anyhow::Result<Value> {
        self.trace.note("M.on_save_checkpoint");
        Ok(json!(7))
    }

    fn on_load_checkpoint(&mut self, saved: &Value, _tensors: &ModuleTensors) -> anyhow::Result<()> {
        assert_eq!(*saved, json!(7));
        self.trace.note("M.on_load_checkpoint");
        Ok(())
    }

    fn on_train_batch_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        self.trace.note(format!("M.on_train_batch_start {}", ctx.batch_idx()));
        if self.does == Does::SkipsAtOne && ctx.batch_idx() == 1 {
            ctx.skip_epoch();
        }
        Ok(())
    }

    module_hooks! {
        on_fit_start, on_fit_end, on_train_start, on_train_end, on_train_epoch_start, on_train_epoch_end,
        on_validation_start, on_validation_end, on_validation_epoch_start, on_validation_epoch_end,
        on_test_start, on_test_end, on_test_epoch_start, on_test_epoch_end,
        on_predict_start, on_predict_end, on_predict_epoch_start, on_predict_epoch_end;
        on_train_batch_end, on_validation_batch_start, on_validation_batch_end,
        on_test_batch_start, on_test_batch_end, on_predict_batch_start, on_predict_batch_end;
        on_before_zero_grad, on_before_backward, on_after_backward, on_before_optimizer_step
    }
}

struct Note(Trace);

macro_rules! callback_hooks {
    ($($hook:ident),*; $($batch_hook:ident),*; $($shared:ident),*) => {
        $(fn $hook(&mut self, _ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
            self.0.note(concat!("C.", stringify!($hook)));
            Ok(())
        })*
        $(fn $batch_hook(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
            self.0.note(format!(concat!("C.", stringify!($batch_hook), " {}"), ctx.batch_idx()));
            Ok(())
        })*
        $(fn $shared(&mut self, _ctx: &mut HookContext, _module: &dyn Module) -> anyhow::Result<()> {
            self.0.note(concat!("C.", stringify!($shared)));
            Ok(())
        })*
    };
}

impl Callback for Note {
    fn state_dict(&self) -> Option<Value> {
        self.0.note("C.state_dict");
        Some(json!("callback"))
    }

    fn load_state_dict(&mut self, state: &Value) -> anyhow::Result<()> {
        assert_eq!(*state, json!("callback"));
        self.0.note("C.load_state_dict");
        Ok(())
    }

    fn setup(&mut self, stage: Stage, _module: &mut dyn Module) -> anyhow::Result<()> {
        self.0.note(format!("C.setup {stage}"));
        Ok(())
    }

    fn teardown(&mut self, stage: Stage, _module: &mut dyn Module) -> anyhow::Result<()> {
        self.0.note(format!("C.teardown {stage}"));
        Ok(())
    }

    fn on_save_checkpoint(
        &mut self,
        _ctx: &mut HookContext,
        _checkpoint: &mut Checkpoint,
    ) -> anyhow::Result<()> {
        self.0.note("C.on_save_checkpoint");
        Ok(())
    }

    fn on_load_checkpoint(&mut self, _checkpoint: &Checkpoint) -> anyhow::Result<()> {
        self.0.note("C.on_load_checkpoint");
        Ok(())
    }

    fn on_exception(&mut self, _ctx: &mut HookContext, _error: &Error) {
        self.0.note("C.on_exception");
    }

    callback_hooks! {
        on_fit_start, on_fit_end, on_sanity_check_start, on_sanity_check_end,
        on_train_start, on_train_end, on_train_epoch_start, on_train_epoch_end,
        on_validation_start, on_validation_end, on_validation_epoch_start, on_validation_epoch_end,
        on_test_start, on_test_end, on_test_epoch_start, on_test_epoch_end,
        on_predict_start, on_predict_end, on_predict_epoch_start, on_predict_epoch_end;
        on_train_batch_start, on_train_batch_end, on_validation_batch_start, on_validation_batch_end,
        on_test_batch_start, on_test_batch_end, on_predict_batch_start, on_predict_batch_end;
        on_before_zero_grad, on_before_backward, on_after_backward, on_before_optimizer_step
    }
}

/// Asks to stop in the first batch.
struct Stop;

impl Callback for Stop {
    fn on_train_batch_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        ctx.request_stop("enough");
        Ok(())
    }
}

struct Data(Trace);

fn loader(batches: i64) -> DataLoader<Tensor> {
    let x = Tensor::ones([batches, 2], (Kind::Float, tch::Device::Cpu));
    DataLoader::new(TensorDataset::new(x).unwrap()).build().unwrap()
}

macro_rules! loaders {
    ($($hook:ident),*) => {$(
        fn $hook(&mut self) -> anyhow::Result<Vec<DataLoader<Tensor>>> {
            self.0.note(concat!("D.", stringify!($hook)));
            Ok(vec![loader(1)])
        }
    )*};
}

impl DataModule for Data {
    type Batch = Tensor;

    fn prepare_data(&mut self) -> anyhow::Result<()> {
        self.0.note("D.prepare_data");
        Ok(())
    }

    fn setup(&mut self, stage: Stage) -> anyhow::Result<()> {
        self.0.note(format!("D.setup {stage}"));
        Ok(())
    }

    fn teardown(&mut self, stage: Stage) -> anyhow::Result<()> {
        self.0.note(format!("D.teardown {stage}"));
        Ok(())
    }

    fn train_dataloader(&mut self) -> anyhow::Result<Option<DataLoader<Tensor>>> {
        self.0.note("D.train_dataloader");
        Ok(Some(loader(2)))
    }

    loaders! {
        val_dataloader, test_dataloader, predict_dataloader
    }

    fn state_dict(&self) -> Option<Value> {
        self.0.note("D.state_dict");
        Some(json!("data"))
    }

    fn load_state_dict(&mut self, state: &Value) -> anyhow::Result<()> {
        assert_eq!(*state, json!("data"));
        self.0.note("D.load_state_dict");
        Ok(())
    }

    fn on_exception(&mut self, _error: &Error) {
        self.0.note("D.on_exception");
    }
}

/// What Lightning was recorded to do, with the differences of docs/hooks.md applied.
fn recorded(case: &str) -> Vec<String> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/hooks/hooks.json");
    let all: BTreeMap<String, Vec<String>> =
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut trace = all[case].clone();
    let is_evaluation = !trace.iter().any(|word| word == "C.setup fit");
    // the module stays in evaluation mode after an evaluation of its own
    trace.retain(|word| !(is_evaluation && word.ends_with("_model_train")));
    for word in &mut trace {
        if let Some((hook, _)) = word.split_once("on_exception ") {
            *word = format!("{hook}on_exception"); // Python's class of the error
        }
    }
    // whether there is something to check is known once the loaders are there
    if let Some(at) = trace.iter().position(|word| word == "C.on_sanity_check_start") {
        trace.swap(at, at + 1);
    }
    trace
}

fn check(case: &str, trace: &Trace) {
    let (expected, found) = (recorded(case), trace.take());
    if let Some(at) = (0..expected.len().max(found.len())).find(|&i| expected.get(i) != found.get(i)) {
        let from = at.saturating_sub(3);
        panic!(
            "{case}, entry {at}: Lightning does {:?}, voltaic {:?}",
            &expected[from.min(expected.len())..(at + 5).min(expected.len())],
            &found[from.min(found.len())..(at + 5).min(found.len())]
        );
    }
}

fn trainer(trace: &Trace) -> TrainerBuilder {
    silent().max_epochs(1).num_sanity_val_steps(0).callback(Note(trace.clone()))
}

fn fit(case: &str, does: Does, build: impl FnOnce(TrainerBuilder) -> TrainerBuilder) {
    let trace = Trace::default();
    let mut trainer = build(trainer(&trace)).build().unwrap();
    trace.take(); // the builder asks for states, too
    let result = trainer.fit(&mut Net::new(&trace, does), &mut Data(trace.clone()));
    assert_eq!(result.is_err(), does == Does::FailsAtOne, "{case}: {result:?}");
    check(case, &trace);
}

#[test]
fn fit_calls_hooks_as_lightning_does() {
    fit("fit_without_validation", Does::Trains, |t| t.limit_val_batches(0).gradient_clip_val(1.0));
    fit("validation_within_epoch", Does::Trains, |t| t.val_check_interval(1));
    fit("early_stop", Does::Trains, |t| t.max_epochs(3).limit_val_batches(0).callback(Stop));
    fit("early_stop_validates", Does::Trains, |t| t.max_epochs(3).callback(Stop));
    fit("early_stop_after_min_epochs", Does::Trains, |t| {
        t.max_epochs(3).min_epochs(2_u64).limit_val_batches(0).callback(Stop)
    });
    fit("max_steps", Does::Trains, |t| t.max_epochs(3).max_steps(3));
    fit("failure", Does::FailsAtOne, |t| t);
    fit("skipped_epoch", Does::SkipsAtOne, |t| t.limit_val_batches(0));
    fit("no_loss", Does::NoLoss, |t| t.limit_val_batches(0).limit_train_batches(1));
    fit("manual", Does::Manual, |t| t.limit_train_batches(1));
    fit("reload", Does::Trains, |t| {
        t.max_epochs(2).limit_train_batches(1).reload_dataloaders_every_n_epochs(1_u64)
    });
}

#[test]
fn evaluations_call_hooks_as_lightning_does() {
    let trace = Trace::default();
    let (mut net, mut data) = (Net::new(&trace, Does::Trains), Data(trace.clone()));
    let mut trainer = trainer(&trace).build().unwrap();
    trace.take();
    trainer.validate(&mut net, &mut data).unwrap();
    check("validate", &trace);
    trainer.test(&mut net, &mut data).unwrap();
    check("test", &trace);
    trainer.predict(&mut net, &mut data).unwrap();
    check("predict", &trace);
}

#[test]
fn saving_and_resuming_call_hooks_as_lightning_does() {
    let folder = TempDir::new().unwrap();
    let trace = Trace::default();
    let saving = |builder: TrainerBuilder| {
        let config = ModelCheckpointConfig {
            dirpath: Some(folder.path().into()),
            save_top_k: -1,
            enable_version_counter: false,
            ..Default::default()
        };
        let builder = builder.enable_checkpointing(true).callback(ModelCheckpoint::new(config).unwrap());
        let built = builder.build().unwrap();
        trace.take();
        built
    };
    let (mut net, mut data) = (Net::new(&trace, Does::Trains), Data(trace.clone()));
    let mut first =
        saving(trainer(&trace).max_epochs(2).accumulate_grad_batches(2_u64).num_sanity_val_steps(1));
    first.fit(&mut net, &mut data).unwrap();
    check("fit", &trace);
    let path = folder.path().join("epoch=0-step=1.ckpt");
    let mut second = saving(trainer(&trace).max_epochs(2).num_sanity_val_steps(1));
    second.ckpt_path(path.to_str().unwrap()).fit(&mut net, &mut data).unwrap();
    check("resume", &trace);
    let mut third = saving(trainer(&trace));
    third.ckpt_path(path.to_str().unwrap()).test(&mut net, &mut data).unwrap();
    check("test_from_checkpoint", &trace);
}

/// Notes each hook by the one function for all.
struct NoteAll(Trace);

impl Callback for NoteAll {
    fn on_hook(
        &mut self,
        hook: Hook,
        _ctx: &mut HookContext,
        _module: &mut dyn Module,
    ) -> anyhow::Result<()> {
        self.0.note(hook.name());
        Ok(())
    }

    fn on_step_hook(
        &mut self,
        hook: StepHook,
        _ctx: &mut HookContext,
        _module: &dyn Module,
    ) -> anyhow::Result<()> {
        self.0.note(hook.name());
        Ok(())
    }
}

#[test]
fn one_function_and_closures_see_the_hooks_that_methods_see() {
    let (methods, function, closures) = (Trace::default(), Trace::default(), Trace::default());
    let mut lambda = LambdaCallback::new();
    for hook in Hook::ALL {
        let trace = closures.clone();
        lambda = lambda.on(hook, move |_, _| {
            trace.note(hook.name());
            Ok(())
        });
    }
    for hook in StepHook::ALL {
        let trace = closures.clone();
        lambda = lambda.on_step(hook, move |_, _| {
            trace.note(hook.name());
            Ok(())
        });
    }
    let mut trainer = silent()
        .max_epochs(1)
        .num_sanity_val_steps(1)
        .callback(Note(methods.clone()))
        .callback(NoteAll(function.clone()))
        .callback(lambda)
        .build()
        .unwrap();
    let other = Trace::default();
    trainer.fit(&mut Net::new(&other, Does::Trains), &mut Data(other.clone())).unwrap();
    let methods: Vec<String> = methods
        .take()
        .iter()
        .filter_map(|word| word.strip_prefix("C.")?.split(' ').next().map(str::to_owned))
        .filter(|word| word.starts_with("on_"))
        .collect();
    assert!(methods.len() > 20);
    assert_eq!(function.take(), methods);
    assert_eq!(closures.take(), methods);
}
