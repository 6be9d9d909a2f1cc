//! What a module and its trainer save beside the weights: a full checkpoint after fit, open gradients of manual
//! optimization, tensors of the module's own; and modules that are made when a run begins.

use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;
use voltaic::callback::{EmaWeightAveragingConfig, LambdaCallback, WeightAveraging};
use voltaic::checkpoint::Checkpoint;
use voltaic::data::Stage;
use voltaic::metrics::MeanMetric;
use voltaic::module::{LightningModule, ModuleTensors, StepContext};
use voltaic::nn::{Dropout, Forward, Linear, ModuleExt};
use voltaic::optim::{AdamW, Optimizers, StepLr};
use voltaic::trainer::{BatchSizeFinderConfig, LearningRateFinderConfig, TrainerBuilder, seed_everything};
use voltaic::{Kind, Module, Tensor};

use crate::checkpoints::{full_checkpoint, resumed};
use crate::ddp::{assert_same, folder_of_parent, run_ranks};
use crate::probe::{Probe, loaders, own_process, plays, silent, text_of};
use crate::rng::seeded;

/// Its layer is made when a run begins.
#[derive(Module)]
struct Late {
    layer: Option<Linear>,
    dropout: Dropout,
    seen: MeanMetric,
    #[module(skip)]
    is_manual: bool,
    /// Tensors that are saved.
    #[module(skip)]
    own: Vec<(String, Tensor)>,
}

impl Late {
    fn new() -> Self {
        let dropout = Dropout::new(0.25).unwrap();
        Self { layer: None, dropout, seen: MeanMetric::new(), is_manual: false, own: Vec::new() }
    }

    fn weights(&self) -> Vec<(String, Tensor)> {
        self.state_dict().into_iter().map(|(name, t)| (name, t.to_device(tch::Device::Cpu).copy())).collect()
    }
}

impl LightningModule for Late {
    type Batch = Tensor;

    fn configure_model(&mut self) -> anyhow::Result<()> {
        if self.layer.is_none() {
            self.layer = Some(Linear::new(2, 3)?);
        }
        Ok(())
    }

    fn training_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let out = self.layer.as_ref().expect("made").forward(&self.dropout.forward(batch)?)?;
        let loss = out.f_square()?.f_mean(Kind::Float)?;
        if !self.own.is_empty() {
            self.seen.update(&loss, 1.0)?;
            ctx.log("seen", &self.seen).on_epoch(true);
        }
        if self.is_manual {
            ctx.manual_backward(&loss)?;
            // windows of four batches, which do not end with the epochs
            if (ctx.current_epoch() * 6 + ctx.batch_idx() as u64 + 1).is_multiple_of(4) {
                ctx.optimizer(0)?.step()?;
                ctx.optimizer(0)?.zero_grad()?;
            }
            return Ok(loss.f_detach()?);
        }
        Ok(loss)
    }

    fn validation_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<()> {
        ctx.log("val_loss", self.layer.as_ref().expect("made").forward(batch)?.f_mean(Kind::Float)?);
        Ok(())
    }

    fn automatic_optimization(&self) -> bool {
        !self.is_manual
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(Optimizers::new(AdamW::new(0.05)).scheduler(StepLr::new(1, 0.5)))
    }

    fn on_save_checkpoint(&mut self, tensors: &mut ModuleTensors) -> anyhow::Result<Value> {
        self.own.iter().try_for_each(|(name, tensor)| tensors.insert(name, tensor))?;
        Ok(json!({"num_tensors": self.own.len()}))
    }

    fn on_load_checkpoint(&mut self, saved: &Value, tensors: &ModuleTensors) -> anyhow::Result<()> {
        let names: Vec<&str> = tensors.names().collect();
        assert_eq!(saved["num_tensors"], names.len());
        let tensor = |name: &str| Ok((name.to_owned(), tensors.get(name)?.shallow_clone()));
        self.own = names.into_iter().map(tensor).collect::<anyhow::Result<_>>()?;
        Ok(())
    }
}

/// Asks for a checkpoint after so many batches.
fn save_after(batches: u64, path: &Path) -> LambdaCallback {
    let path = path.to_path_buf();
    LambdaCallback::new().on_train_batch_end(move |ctx, _| {
        if ctx.progress().total_batches == batches {
            let path = path.clone();
            ctx.request_checkpoint(full_checkpoint(path));
        }
        Ok(())
    })
}

fn ema() -> WeightAveraging {
    WeightAveraging::ema(EmaWeightAveragingConfig { decay: 0.5, ..Default::default() }).unwrap()
}

#[test]
fn a_checkpoint_after_fit_goes_on_as_one_within() {
    let _rng = seeded(1);
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("after.ckpt");
    let builds: [(&str, fn(TrainerBuilder) -> TrainerBuilder); 3] = [
        ("two epochs", |t| t.max_epochs(2)),
        ("a limit within an epoch", |t| t.max_steps(8)),
        ("a failure", |t| {
            t.callback(LambdaCallback::new().on_train_batch_start(|ctx, _| {
                anyhow::ensure!(ctx.global_step() != 9, "no luck");
                Ok(())
            }))
        }),
    ];
    for (name, build) in builds {
        // what a run that was cut short goes on from is kept if it may save
        let trainer = || silent().max_epochs(3).callback(ema()).save_on_signal(true);
        let own = || vec![("own".to_owned(), Tensor::from_slice(&[1_i64, 2]))];
        let (whole, seen) = {
            seed_everything(5).unwrap();
            let mut net = Late { own: own(), ..Late::new() };
            let mut trainer = trainer().build().unwrap();
            trainer.fit(&mut net, &mut loaders()).unwrap();
            (net.weights(), trainer.metric("seen_epoch").unwrap())
        };
        seed_everything(5).unwrap();
        let (mut net, mut first) = (Late::new(), build(trainer()).build().unwrap());
        net.own = own();
        assert_eq!(first.fit(&mut net, &mut loaders()).is_err(), name == "a failure");
        first.validate(&mut net, &mut loaders()).unwrap(); // which changes nothing
        first.save_checkpoint(&mut net, &mut loaders(), &path, None).unwrap();
        let twice = folder.path().join("twice.ckpt");
        first.save_checkpoint(&mut net, &mut loaders(), &twice, None).unwrap();
        let json = |path: &Path| Checkpoint::load(path).unwrap().training.unwrap().json;
        assert_eq!(json(&path), json(&twice), "{name}");
        seed_everything(99).unwrap();
        let (mut net, mut new) = (Late::new(), trainer().build().unwrap());
        new.ckpt_path(path.to_str().unwrap()).fit(&mut net, &mut loaders()).unwrap();
        assert_same(&net.weights(), &whole);
        assert_eq!((new.metric("seen_epoch").unwrap(), &net.own[0].1), (seen, &own()[0].1), "{name}");
    }
    let mut trainer = silent().build().unwrap();
    let error =
        trainer.save_checkpoint(&mut Late::new(), &mut loaders(), &path, None).unwrap_err().to_string();
    assert!(error.contains("this trainer has not trained; fit first, or save the weights alone"), "{error}");
    trainer.save_weights(&crate::probe::Probe::default(), &path, None).unwrap();
    assert!(Checkpoint::load(&path).unwrap().training.is_none());
}

#[test]
fn two_ranks_save_after_fit_and_when_cut_short() {
    let trainer = |folder: &Path| silent().default_root_dir(folder).max_epochs(4).callback(ema()).devices(2);
    let end = |net: &Late, folder: &Path| {
        let checkpoint = Checkpoint { weights: net.weights(), ..Checkpoint::default() };
        checkpoint.save(&folder.join("end.ckpt")).unwrap();
    };
    let part = std::env::var(crate::process::PART).unwrap_or_default();
    if !part.is_empty() {
        let folder = folder_of_parent();
        seed_everything(5).unwrap();
        let mut net = Late::new();
        let builder = trainer(&folder).save_on_signal(true);
        let stop = LambdaCallback::new().on_train_batch_end(|ctx, _| {
            if ctx.is_global_zero() && ctx.progress().total_batches == 4 {
                ctx.request_stop("the time is over, on this rank");
            }
            Ok(())
        });
        let mut trainer = match part.as_str() {
            "limited" => builder.max_steps(7).build().unwrap(),
            "stopped" => builder.callback(stop).build().unwrap(),
            _ => builder.build().unwrap(),
        };
        let saved = folder.join("saved.ckpt");
        if part == "resumed" {
            trainer.ckpt_path(saved.to_str().unwrap());
        }
        trainer.fit(&mut net, &mut loaders()).unwrap();
        if matches!(part.as_str(), "limited" | "stopped") {
            println!("\nsteps={}", trainer.global_step());
            return trainer.save_checkpoint(&mut net, &mut loaders(), &saved, None).unwrap();
        }
        if trainer.is_global_zero() {
            end(&net, &folder);
        }
        return;
    }
    let folder = TempDir::new().unwrap();
    let weights = || crate::ddp::weights(folder.path());
    run_ranks("whole", folder.path());
    let whole = weights();
    for (part, steps) in [("limited", 7), ("stopped", 5)] {
        assert_contains!(run_ranks(part, folder.path()), &format!("steps={steps}\n"));
        let saved = Checkpoint::load(folder.path().join("saved.ckpt")).unwrap();
        assert_eq!((saved.meta.global_step, saved.training.unwrap().ranks.len()), (steps, 1));
        run_ranks("resumed", folder.path());
        assert_same(&weights(), &whole);
    }
}

#[test]
fn gradients_that_a_manual_step_has_left_open_are_saved() {
    let _rng = seeded(1);
    let folder = TempDir::new().unwrap();
    let fit = |build: &dyn Fn(TrainerBuilder) -> TrainerBuilder, ckpt: Option<&Path>| {
        seed_everything(if ckpt.is_some() { 99 } else { 5 }).unwrap();
        let mut net = Late { is_manual: true, ..Late::new() };
        let mut trainer = resumed(build(silent().max_epochs(3)), ckpt);
        trainer.fit(&mut net, &mut loaders()).unwrap();
        net.weights()
    };
    let whole = fit(&|t| t, None);
    for batches in [1, 3, 4, 6, 9] {
        let path = folder.path().join(format!("{batches}.ckpt"));
        fit(&|t| t.max_epochs(2).callback(save_after(batches, &path)), None);
        let resumed = fit(&|t| t, Some(&path));
        assert_same(&resumed, &whole);
    }
}

#[test]
fn a_search_leaves_a_module_that_it_has_completed_as_it_was() {
    let _rng = seeded(1);
    let whole = {
        seed_everything(5).unwrap();
        let mut net = Late::new();
        net.configure_model().unwrap();
        net.weights()
    };
    let trainer = silent().max_epochs(1).build().unwrap();
    let config = LearningRateFinderConfig { num_training_steps: 20, ..Default::default() };
    seed_everything(5).unwrap();
    let mut net = Late::new();
    trainer.lr_find(&mut net, &mut loaders(), &config).unwrap();
    assert_same(&net.weights(), &whole);
    trainer.lr_find(&mut net, &mut loaders(), &config).unwrap();
    assert_same(&net.weights(), &whole);
    let config = BatchSizeFinderConfig { max_val: 8, ..Default::default() };
    for stage in [Stage::Fit, Stage::Validate] {
        seed_everything(5).unwrap();
        let mut net = Late::new();
        assert_eq!(
            trainer.scale_batch_size(&mut net, &mut loaders(), stage, &config).unwrap(),
            if stage == Stage::Fit { 8 } else { 4 }
        );
        assert_same(&net.weights(), &whole);
    }
    seed_everything(5).unwrap();
    let mut net = Late::new();
    trainer.measure_flops(&mut net, &mut loaders()).unwrap();
    assert_same(&net.weights(), &whole);
}

/// Tensors of every kind, some with strides of their own.
fn tensors() -> Vec<(String, Tensor)> {
    let numbers = Tensor::arange(12, (Kind::Float, tch::Device::Cpu)).reshape([3, 4]);
    vec![
        ("queue".to_owned(), numbers.to_kind(Kind::BFloat16)),
        ("transposed".to_owned(), numbers.tr()),
        ("part".to_owned(), numbers.select(1, 2)),
        ("counts".to_owned(), numbers.to_kind(Kind::Int64)),
        ("mask".to_owned(), numbers.gt(3.0)),
        ("double".to_owned(), numbers.sum(Kind::Double)),
        ("empty".to_owned(), numbers.slice(0, 0, 0, 1)),
        ("layer.weight".to_owned(), numbers.to_kind(Kind::Half)),
    ]
}

fn check_tensors(builder: fn() -> TrainerBuilder) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("own.ckpt");
    let mut trainer = builder().callback(save_after(2, &path)).build().unwrap();
    let mut net = Late { own: tensors(), ..Late::new() };
    trainer.fit(&mut net, &mut loaders()).unwrap();
    let device = net.layer.as_ref().unwrap().weight.device();
    net.own.push(("on the device".to_owned(), Tensor::ones([2], (Kind::Float, device))));
    trainer.save_checkpoint(&mut net, &mut loaders(), &path, None).unwrap();
    let mut other = Late::new();
    let mut trainer = builder().max_epochs(2).build().unwrap();
    trainer.ckpt_path(path.to_str().unwrap()).fit(&mut other, &mut loaders()).unwrap();
    assert_eq!(other.own.len(), net.own.len());
    for (name, expected) in &net.own {
        let found = &other.own.iter().find(|(own, _)| own == name).unwrap().1;
        assert_eq!(
            (found.kind(), found.device(), found.size()),
            (expected.kind(), expected.device(), expected.size()),
            "{name}"
        );
        assert!(found.equal(expected), "{name}");
    }
    let mut tested = Late::new();
    trainer.ckpt_path(path.to_str().unwrap()).validate(&mut tested, &mut loaders()).unwrap();
    assert_eq!(tested.own.len(), net.own.len(), "an evaluation has them, too");
}

#[test]
fn a_module_s_own_tensors_come_back() {
    let _rng = seeded(1);
    check_tensors(|| silent().max_epochs(1));
    let fit = |own: Vec<(String, Tensor)>| {
        let folder = TempDir::new().unwrap();
        let saver = save_after(1, &folder.path().join("a.ckpt"));
        let mut trainer = silent().max_epochs(1).callback(saver).build().unwrap();
        trainer.fit(&mut Late { own, ..Late::new() }, &mut loaders()).unwrap_err().to_string()
    };
    let one = |name: &str| (name.to_owned(), Tensor::ones([1], (Kind::Float, tch::Device::Cpu)));
    let error = fit(vec![one("queue"), one("queue")]);
    assert!(
        error.starts_with("on_save_checkpoint failed")
            && error.contains("there is a tensor `queue` already; give each"),
        "{error}"
    );
    assert!(fit(vec![one("")]).contains("a tensor has an empty name"));
    let complex = Tensor::ones([1], (Kind::ComplexFloat, tch::Device::Cpu));
    assert_contains!(fit(vec![("phase".to_owned(), complex)]), "phase", "ComplexFloat");
    assert_error!(ModuleTensors::default().get("queue"), "no tensor `queue`");
}

#[test]
fn a_module_s_own_tensors_come_back_to_an_hpu() {
    if plays("hpu") {
        return check_tensors(|| silent().accelerator("hpu").devices(1).max_epochs(1));
    }
    text_of(&own_process("hpu").output().unwrap());
}

/// They are as large as the weights and more.
#[test]
fn only_calls_that_train_read_states_of_optimizers() {
    let root = TempDir::new().unwrap();
    let path = root.path().join("run.ckpt");
    let net = || Probe { optimizers: Box::new(|| AdamW::new(0.1).into()), ..Probe::default() };
    let mut trained = net();
    let mut trainer = silent().max_epochs(1).build().unwrap();
    trainer.fit(&mut trained, &mut loaders()).unwrap();
    trainer.save_checkpoint(&mut trained, &mut loaders(), &path, None).unwrap();
    for trains in [true, false] {
        let states = std::sync::Arc::new(std::sync::Mutex::new(None));
        let note = states.clone();
        let noting = LambdaCallback::new().on_load_checkpoint(move |checkpoint| {
            let training = checkpoint.training.as_ref().unwrap();
            assert_eq!((training.rng.len(), checkpoint.weights.len()), (1, 1));
            *note.lock().unwrap() = Some(training.optimizers.iter().map(Vec::len).sum::<usize>());
            Ok(())
        });
        let mut other = net();
        let mut trainer = resumed(silent().max_epochs(2).callback(noting), Some(&path));
        match trains {
            true => trainer.fit(&mut other, &mut loaders()).unwrap(),
            false => {
                trainer.validate(&mut other, &mut loaders()).unwrap();
                assert_eq!(other.weights(), trained.weights());
            }
        }
        let states = states.lock().unwrap().unwrap();
        assert_eq!(states > 0, trains, "{states}");
    }
}
