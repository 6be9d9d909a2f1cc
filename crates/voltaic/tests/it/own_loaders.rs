//! A module with loaders of its own: it needs no data beside it, from code and from the command line.

use std::ffi::OsString;
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};
use voltaic::Module;
use voltaic::cli::{Console, FromConfig, Registry, run_with};
use voltaic::data::{DataLoader, DataModule, Dataset, Loaders, StdRng, TensorDataset};
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::{Forward, Linear};
use voltaic::optim::{Optimizers, Sgd};
use voltaic::trainer::{Trainer, TrainerBuilder, seed_everything};

const SAMPLES: i64 = 64;

fn loader(seed: f64) -> DataLoader<Tensor> {
    let x = Tensor::arange(SAMPLES * 32, (Kind::Float, tch::Device::Cpu)).view([SAMPLES, 32]);
    let x = (x * 0.37 + seed).sin();
    DataLoader::new(TensorDataset::new(x).unwrap()).batch_size(4).shuffle(seed == 0.0).build().unwrap()
}

/// Lightning's `BoringModel`, whose loaders are its own.
#[derive(Module)]
struct BoringModel {
    layer: Linear,
    /// Without loaders there is nothing to run on.
    has_loaders: bool,
}

#[derive(Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct BoringConfig {
    /// Whether it has any.
    has_no_loaders: bool,
}

impl FromConfig for BoringModel {
    type Config = BoringConfig;

    fn from_config(config: BoringConfig) -> anyhow::Result<Self> {
        Ok(Self { layer: Linear::new(32, 2)?, has_loaders: !config.has_no_loaders })
    }
}

impl BoringModel {
    fn new() -> Self {
        seed_everything(1).unwrap();
        Self { layer: Linear::new(32, 2).unwrap(), has_loaders: true }
    }

    fn loss(&self, batch: &Tensor) -> anyhow::Result<Tensor> {
        Ok(self.layer.forward(batch)?.f_pow_tensor_scalar(2)?.f_mean(Kind::Float)?)
    }

    fn own(&self, seed: f64) -> Vec<DataLoader<Tensor>> {
        if self.has_loaders { vec![loader(seed)] } else { Vec::new() }
    }
}

/// Data whose samples are missing.
struct Missing;

impl Dataset for Missing {
    type Batch = Tensor;

    fn len(&self) -> usize {
        8
    }

    fn batch(&self, _: &[usize], _: &mut StdRng) -> anyhow::Result<Tensor> {
        anyhow::bail!("no such file")
    }
}

#[test]
fn the_error_of_a_sample_names_its_loader() {
    let missing = || DataLoader::new(Missing).batch_size(4).build().unwrap();
    let run = |data: &mut Loaders<Tensor>, tests: bool| {
        let mut trainer = crate::probe::silent().max_epochs(1).num_sanity_val_steps(0).build().unwrap();
        let mut net = BoringModel { has_loaders: false, ..BoringModel::new() };
        match tests {
            true => trainer.test(&mut net, data).unwrap_err().to_string(),
            false => trainer.fit(&mut net, data).unwrap_err().to_string(),
        }
    };
    for (mut data, tests, expected) in [
        (
            Loaders::new().train(missing()),
            false,
            "batch 0 of epoch 0 of train_dataloader (samples [0, 1, 2, 3])",
        ),
        (Loaders::new().train(loader(0.0)).val(missing()), false, "of val_dataloader (samples"),
        (
            Loaders::new().train(loader(0.0)).val(loader(1.0)).val(missing()),
            false,
            "of val_dataloader 1 (samples",
        ),
        (Loaders::new().test(missing()), true, "of test_dataloader (samples"),
    ] {
        let error = run(&mut data, tests);
        assert!(error.contains(expected), "{expected}: {error}");
    }
}

impl LightningModule for BoringModel {
    type Batch = Tensor;

    fn training_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let loss = self.loss(batch)?;
        ctx.log("train_loss", &loss);
        Ok(loss)
    }

    fn validation_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<()> {
        ctx.log("val_loss", self.loss(batch)?).sync_dist(true);
        Ok(())
    }

    fn test_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<()> {
        ctx.log("test_loss", self.loss(batch)?).sync_dist(true);
        Ok(())
    }

    fn predict_step(&self, batch: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        self.layer.forward(batch)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(Sgd::new(0.1).into())
    }

    fn train_dataloader(&mut self) -> anyhow::Result<Option<DataLoader<Tensor>>> {
        Ok(self.own(0.0).pop())
    }

    fn val_dataloader(&mut self) -> anyhow::Result<Vec<DataLoader<Tensor>>> {
        Ok(self.own(1.0))
    }

    fn test_dataloader(&mut self) -> anyhow::Result<Vec<DataLoader<Tensor>>> {
        Ok(self.own(2.0))
    }

    fn predict_dataloader(&mut self) -> anyhow::Result<Vec<DataLoader<Tensor>>> {
        Ok(self.own(3.0))
    }
}

fn trainer(root: &Path) -> TrainerBuilder {
    Trainer::builder()
        .accelerator("cpu")
        .default_root_dir(root)
        .max_epochs(2)
        .enable_progress_bar(false)
        .enable_model_summary(false)
}

fn weight(net: &BoringModel) -> Vec<f32> {
    Vec::try_from(net.layer.weight.tensor().detach().flatten(0, -1)).unwrap()
}

#[test]
fn a_module_with_loaders_is_enough() {
    let root = tempfile::tempdir().unwrap();
    let (mut own, mut given) = (BoringModel::new(), BoringModel::new());
    let mut first = trainer(root.path()).build().unwrap();
    first.fit_module(&mut own).unwrap();
    given.has_loaders = false;
    let mut second = trainer(root.path()).build().unwrap();
    second.fit(&mut given, &mut Loaders::new().train(loader(0.0)).val(loader(1.0))).unwrap();
    assert_eq!(weight(&own), weight(&given));
    assert_eq!(first.metric("val_loss"), second.metric("val_loss"));
    assert_eq!(first.global_step(), 32);

    assert_eq!(
        first.validate_module(&mut own).unwrap(),
        [("val_loss".to_owned(), first.metric("val_loss").unwrap())]
    );
    let mut tests = Loaders::new().test(loader(2.0));
    assert_eq!(first.test_module(&mut own).unwrap(), second.test(&mut given, &mut tests).unwrap());
    let predictions = first.predict_module(&mut own).unwrap();
    assert_eq!((predictions.len(), predictions[0].len(), predictions[0][0].size()), (1, 16, vec![4, 2]));
}

#[test]
fn data_that_is_given_comes_first() {
    let root = tempfile::tempdir().unwrap();
    let mut net = BoringModel::new();
    let mut trainer = trainer(root.path()).max_epochs(1).build().unwrap();
    // eight batches in place of sixteen; the validation loader is the module's
    let half = Tensor::ones([32, 32], (Kind::Float, tch::Device::Cpu));
    let half = DataLoader::new(TensorDataset::new(half).unwrap()).batch_size(4).build().unwrap();
    trainer.fit(&mut net, &mut Loaders::new().train(half)).unwrap();
    assert_eq!(trainer.global_step(), 8);
    let after = trainer.validate_module(&mut net).unwrap();
    assert_eq!(trainer.metric("val_loss"), Some(after[0].1));
}

#[test]
fn it_goes_on_from_a_checkpoint_within_an_epoch() {
    let root = tempfile::tempdir().unwrap();
    let mut whole = BoringModel::new();
    trainer(root.path()).build().unwrap().fit_module(&mut whole).unwrap();
    let mut parts = BoringModel::new();
    let mut first = trainer(root.path()).max_steps(21).build().unwrap();
    first.fit_module(&mut parts).unwrap();
    let path = root.path().join("part.ckpt");
    first.save_checkpoint(&mut parts, &mut Loaders::new(), &path, None).unwrap();
    let mut parts = BoringModel::new();
    let mut second = trainer(root.path()).build().unwrap();
    second.ckpt_path(path.to_str().unwrap()).fit_module(&mut parts).unwrap();
    assert_eq!(weight(&whole), weight(&parts));
}

#[test]
fn what_is_missing_is_named() {
    let root = tempfile::tempdir().unwrap();
    let mut net = BoringModel { has_loaders: false, ..BoringModel::new() };
    let mut trainer = trainer(root.path()).build().unwrap();
    assert_error!(
        trainer.fit_module(&mut net),
        "there is no training loader; implement train_dataloader of the data module or of the module"
    );
    assert_error!(trainer.test_module(&mut net), "no loader to test; implement test_dataloader");
}

/// Other data, which is not chosen unasked where a model has its own.
#[derive(Default)]
struct Few;

#[derive(Default, Serialize, Deserialize, JsonSchema)]
struct FewConfig {}

impl FromConfig for Few {
    type Config = FewConfig;

    fn from_config(_: FewConfig) -> anyhow::Result<Self> {
        Ok(Self)
    }
}

impl DataModule for Few {
    type Batch = Tensor;

    fn train_dataloader(&mut self) -> anyhow::Result<Option<DataLoader<Tensor>>> {
        let x = Tensor::ones([8, 32], (Kind::Float, tch::Device::Cpu));
        Ok(Some(DataLoader::new(TensorDataset::new(x)?).batch_size(4).build()?))
    }
}

fn run(root: &Path, arguments: &[&str]) -> (u8, String, String) {
    let registry = Registry::new().model_with_loaders::<BoringModel>("BoringModel").data::<Few>("Few");
    let root = format!("--trainer.default_root_dir={}", root.display());
    let mut all: Vec<OsString> = arguments.iter().map(OsString::from).collect();
    if arguments[0] != "models" {
        all.extend([
            root.into(),
            "--trainer.accelerator=cpu".into(),
            "--trainer.enable_progress_bar=false".into(),
        ]);
    }
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let mut console = Console::new(&mut out, &mut err);
    let code = run_with(&registry, &OsString::from("/bin/mine"), all, std::iter::empty(), &mut console);
    drop(console);
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (code, text(out), text(err))
}

#[test]
fn the_command_line_needs_no_data_either() {
    let root = tempfile::tempdir().unwrap();
    let csv = |version: u32| {
        let path = root.path().join(format!("lightning_logs/version_{version}/metrics.csv"));
        std::fs::read_to_string(path).unwrap().lines().count()
    };
    let fit = ["fit", "--trainer.max_epochs=1", "--trainer.log_every_n_steps=1"];
    let (code, _, err) = run(root.path(), &fit);
    assert_eq!((code, csv(0)), (0, 1 + 16 + 1), "{err}");
    let (code, _, err) = run(root.path(), &["test", "--ckpt_path=last"]);
    assert_eq!(code, 0, "{err}");
    let chosen = [&fit[..], &["--data=Few"]].concat();
    let (code, _, err) = run(root.path(), &chosen);
    assert_eq!((code, csv(1)), (0, 1 + 2 + 1), "{err}");
    let config = root.path().join("lightning_logs/version_0/config.yaml");
    let again = ["fit", "--config", config.to_str().unwrap()];
    let (code, _, err) = run(root.path(), &again);
    assert_eq!((code, csv(2)), (0, 1 + 16 + 1), "{err}");
    let (code, _, err) = run(root.path(), &["fit", "--model.has_no_loaders=true"]);
    assert!(code == 2 && err.contains("there is no training loader"), "{code} {err}");
    let (_, out, _) = run(root.path(), &["models"]);
    assert!(out.contains("data: its own, Few"), "{out}");
}

/// Data that is only borrowed, with a note of what was asked of it.
struct Borrowed<'a> {
    x: &'a Tensor,
    calls: &'a mut Vec<&'static str>,
}

impl DataModule for Borrowed<'_> {
    type Batch = Tensor;

    fn train_dataloader(&mut self) -> anyhow::Result<Option<DataLoader<Tensor>>> {
        self.calls.push("train_dataloader");
        Ok(Some(DataLoader::new(TensorDataset::new(self.x.shallow_clone())?).batch_size(4).build()?))
    }
}

#[test]
fn a_data_module_may_borrow() {
    let x = Tensor::ones([8, 32], (Kind::Float, tch::Device::Cpu));
    let mut calls = Vec::new();
    let mut model = BoringModel { has_loaders: false, ..BoringModel::new() };
    let mut trainer = crate::probe::silent().max_epochs(1).build().unwrap();
    trainer.fit(&mut model, &mut Borrowed { x: &x, calls: &mut calls }).unwrap();
    assert_eq!(trainer.global_step(), 2);
    assert_eq!(calls, ["train_dataloader"]);
}
