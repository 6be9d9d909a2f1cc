//! A module whose steps are all about when they are called: one weight, no random numbers.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use voltaic::accelerator::{HpuEmulator, HpuSettings};
use voltaic::callback::Callback;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::module::{Hook, HookContext, LightningModule, StepContext};
use voltaic::nn::Parameter;
use voltaic::optim::{Optimizers, Sgd};
use voltaic::{Kind, Module, Tensor};

use crate::process::own_test;
pub use crate::process::{own_process, plays, text_of};
pub use crate::silent::silent;

pub type Step = dyn Fn(&Probe, Tensor, &mut StepContext) -> anyhow::Result<Tensor> + Send;

/// `loss = mean(x * weight)`: its gradient is the mean of the batch.
#[derive(Module)]
pub struct Probe {
    pub weight: Parameter,
    #[module(skip)]
    pub optimizers: Box<dyn Fn() -> Optimizers + Send>,
    /// Gets the loss in `training_step` and may log, change it, or fail.
    #[module(skip)]
    pub train: Box<Step>,
    /// The same in `validation_step`; without it there is no `validation_step`.
    #[module(skip)]
    pub validate: Option<Box<Step>>,
}

impl Default for Probe {
    fn default() -> Self {
        Self {
            weight: Parameter::new(Tensor::ones([2], (Kind::Float, tch::Device::Cpu))),
            optimizers: Box::new(|| Sgd::new(0.125).into()),
            train: Box::new(|_, loss, _| Ok(loss)),
            validate: Some(Box::new(|_, loss, _| Ok(loss))),
        }
    }
}

impl Probe {
    /// Logs as most modules do; `val_loss` has the given value in each epoch.
    pub fn logging(val_losses: &'static [f64]) -> Self {
        Self {
            train: Box::new(|_, loss, ctx| {
                ctx.log("train_loss", &loss).on_epoch(true).prog_bar(true);
                ctx.log("lr_x", 0.5);
                Ok(loss)
            }),
            validate: Some(Box::new(|_, loss, ctx| {
                ctx.log("val_loss", val_losses[ctx.current_epoch() as usize]);
                Ok(loss)
            })),
            ..Self::default()
        }
    }

    pub fn weights(&self) -> Vec<f32> {
        Vec::try_from(self.weight.tensor()).unwrap()
    }

    fn loss(&self, batch: &Tensor) -> anyhow::Result<Tensor> {
        Ok(batch.f_mul(&self.weight)?.f_sum_dim_intlist(1, false, Kind::Float)?.f_mean(Kind::Float)?)
    }
}

impl LightningModule for Probe {
    type Batch = Tensor;

    fn training_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        (self.train)(self, self.loss(batch)?, ctx)
    }

    fn validation_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<()> {
        match &self.validate {
            Some(step) => step(self, self.loss(batch)?, ctx).map(drop),
            None => Defaults.validation_step(batch, ctx),
        }
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok((self.optimizers)())
    }
}

/// Implements no step that has a default.
#[derive(Module)]
pub struct Defaults;

lightning_module!(Defaults, Tensor, Sgd::new(0.1), |_, _batch, _| anyhow::bail!("not called"));

/// Batches of two samples; sample `i` is `[i, -i / 2]`.
pub fn loader(samples: i64) -> DataLoader<Tensor> {
    let i = Tensor::arange(samples, (Kind::Float, tch::Device::Cpu)).unsqueeze(1);
    let x = Tensor::cat(&[&i, &(&i * -0.5)], 1);
    DataLoader::new(TensorDataset::new(x).unwrap()).batch_size(2).build().unwrap()
}

/// 6 training batches and 2 validation batches.
pub fn loaders() -> Loaders<Tensor> {
    Loaders::new().train(loader(12)).val(loader(4)).test(loader(4)).predict(loader(4))
}

/// Notes what happens as words: `t0` a training batch, `t0*` one that ends with an optimizer step, `V2` a validation
/// of two batches, `S2` a sanity check of two, `e` the end of an epoch, `x` a failure.
#[derive(Default, Clone)]
pub struct Events {
    words: Arc<Mutex<Vec<String>>>,
    global_step: u64,
    eval_batches: usize,
}

impl Events {
    fn note(&self, word: String) {
        self.words.lock().unwrap().push(word);
    }

    pub fn text(&self) -> String {
        self.words.lock().unwrap().join(" ")
    }
}

impl Callback for Events {
    fn on_hook(&mut self, hook: Hook, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        match hook {
            Hook::OnTrainStart => self.global_step = ctx.global_step(),
            Hook::OnTrainBatchEnd => {
                let star = if ctx.global_step() > self.global_step { "*" } else { "" };
                self.global_step = ctx.global_step();
                self.note(format!("t{}{star}", ctx.batch_idx()));
            }
            Hook::OnTrainEpochEnd => self.note("e".to_owned()),
            Hook::OnValidationStart => self.eval_batches = 0,
            Hook::OnValidationBatchEnd => self.eval_batches += 1,
            Hook::OnValidationEnd => {
                self.note(format!("{}{}", if ctx.is_sanity_check() { "S" } else { "V" }, self.eval_batches));
            }
            _ => {}
        }
        Ok(())
    }

    fn on_exception(&mut self, _ctx: &mut HookContext, _error: &voltaic::Error) {
        self.note("x".to_owned());
    }
}

/// Learning rate at the start of each batch.
#[derive(Default, Clone)]
pub struct LearningRates(pub Arc<Mutex<Vec<f64>>>);

impl Callback for LearningRates {
    fn on_train_batch_start(
        &mut self,
        ctx: &mut HookContext,
        _module: &mut dyn Module,
    ) -> anyhow::Result<()> {
        self.0.lock().unwrap().push(ctx.optimizers()[0].param_groups()[0].lr);
        Ok(())
    }
}

/// A thread for a part of the present test, which may call [`own_process`], too.
pub fn own_thread() -> std::thread::Builder {
    std::thread::Builder::new().name(own_test())
}

/// [`own_process`] with libtorch's kernels, for what was recorded to the last bit.
pub fn by_libtorch(part: &str) -> Command {
    let mut command = own_process(part);
    command.env("VOLTAIC_CPU_KERNELS", "0");
    command
}

/// Runs a test again in a process of its own, in which the emulated HPU is set up before libtorch trains. True in that
/// process; elsewhere the test is over, and went well there.
pub fn has_hpu() -> bool {
    if !plays("hpu") {
        text_of(&own_process("hpu").output().unwrap());
        return false;
    }
    HpuEmulator::init(HpuSettings::default()).unwrap();
    true
}

/// Exit code and standard error of the real `voltaic` in a folder of its own.
pub fn voltaic(arguments: &[&str], variables: &[(&str, &str)]) -> (Option<i32>, String) {
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_voltaic"))
        .args(arguments)
        .envs(variables.iter().copied())
        .current_dir(folder.path())
        .output()
        .unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// A fit of a small network for one batch by the real `voltaic`.
pub fn short_fit(arguments: &[&str], variables: &[(&str, &str)]) -> (Option<i32>, String) {
    let short =
        ["fit", "--model=Mlp", "--data=MnistData", "--data.batch_size=2", "--trainer.accelerator=cpu"];
    let short = short.into_iter().chain(["--trainer.limit_train_batches=1", "--trainer.max_epochs=1"]);
    let quiet =
        ["--trainer.limit_val_batches=1", "--trainer.logger=false", "--trainer.enable_checkpointing=false"];
    let arguments: Vec<&str> = short.chain(quiet).chain(arguments.iter().copied()).collect();
    voltaic(&arguments, variables)
}

/// Names of the files in a folder, sorted; a link has an `@` behind it. None if there is no folder.
pub fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .map(|entry| {
            let entry = entry.unwrap();
            let link = if entry.file_type().unwrap().is_symlink() { "@" } else { "" };
            format!("{}{link}", entry.file_name().to_str().unwrap())
        })
        .collect();
    names.sort();
    names
}

pub fn files(folder: &Path) -> Vec<PathBuf> {
    names(folder).iter().map(|name| folder.join(name.trim_end_matches('@'))).collect()
}
