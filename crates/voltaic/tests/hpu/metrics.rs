//! Metrics that are logged as objects, and counted operations, on an emulated HPU: those of the CPU.

use std::path::Path;

use tch::{Kind, Tensor};
use tempfile::TempDir;
use voltaic::Module;
use voltaic::callback::{ModelCheckpoint, ModelCheckpointConfig};
use voltaic::data::Loaders;
use voltaic::metrics::{Accuracy, Auroc, Average, F1Score, MeanSquaredError};
use voltaic::nn::functional::cross_entropy;
use voltaic::nn::{Forward, Linear};
use voltaic::optim::AdamW;
use voltaic::trainer::seed_everything;

use crate::support::start;
use crate::trainer::{loader, trainer};

#[derive(Module)]
struct Scored {
    fc: Linear,
    accuracy: Accuracy,
    f1: F1Score,
    auroc: Auroc,
    mse: MeanSquaredError,
}

impl Scored {
    fn new() -> Self {
        Self {
            fc: Linear::new(784, 10).unwrap(),
            accuracy: Accuracy::new(10, Average::Micro).top_k(3),
            f1: F1Score::new(10, Average::Macro),
            auroc: Auroc::multiclass(10),
            mse: MeanSquaredError::new(),
        }
    }
}

lightning_module!(Scored, (Tensor, Tensor), AdamW::new(1e-2), |net, (x, y), ctx| {
    let logits = net.fc.forward(&x.f_flatten(1, -1)?)?;
    net.accuracy.update(&logits, y)?;
    net.f1.update(&logits, y)?;
    net.auroc.update(&logits.f_softmax(1, Kind::Float)?, y)?;
    net.mse.update(&logits.f_mean_dim(1, false, Kind::Float)?, &y.f_to_kind(Kind::Float)?)?;
    ctx.log("accuracy", &net.accuracy).on_epoch(true);
    ctx.log("f1", &net.f1).on_step(false).on_epoch(true);
    ctx.log("auroc", &net.auroc).on_step(false).on_epoch(true);
    ctx.log("mse", &net.mse).on_step(false).on_epoch(true);
    Ok(cross_entropy(&logits, y)?)
});

fn values(root: &Path, accelerator: &str, ckpt: Option<&Path>) -> Vec<u64> {
    seed_everything(4).unwrap();
    let saver = ModelCheckpoint::new(ModelCheckpointConfig {
        dirpath: Some(root.join("saved")),
        save_top_k: -1,
        every_n_train_steps: Some(1),
        enable_version_counter: false,
        ..ModelCheckpointConfig::default()
    });
    let mut trainer = trainer(root, accelerator).callback(saver.unwrap()).build().unwrap();
    if let Some(ckpt) = ckpt {
        trainer.ckpt_path(ckpt.to_str().unwrap());
    }
    let mut net = Scored::new();
    seed_everything(5).unwrap();
    trainer.fit(&mut net, &mut Loaders::new().train(loader())).unwrap();
    ["accuracy_epoch", "accuracy_step", "f1", "auroc", "mse"]
        .map(|name| trainer.metric(name).unwrap().to_bits())
        .to_vec()
}

#[test]
fn values_are_those_of_the_cpu_also_when_a_run_changes_devices_within_an_epoch() {
    let _rng = start();
    let root = TempDir::new().unwrap();
    let cpu = values(root.path(), "cpu", None);
    assert_eq!(values(root.path(), "hpu", None), cpu);
    let middle = root.path().join("saved/epoch=1-step=5.ckpt");
    for accelerator in ["hpu", "cpu"] {
        assert_eq!(values(root.path(), accelerator, Some(&middle)), cpu, "resumed on {accelerator}");
    }
}

#[test]
fn operations_are_counted_as_on_the_cpu() {
    let _rng = start();
    let root = TempDir::new().unwrap();
    let count = |accelerator| {
        let trainer = trainer(root.path(), accelerator).build().unwrap();
        trainer.measure_flops(&mut Scored::new(), &mut Loaders::new().train(loader())).unwrap()
    };
    let (cpu, hpu) = (count("cpu"), count("hpu"));
    assert_eq!(cpu, hpu);
    assert_eq!(hpu.of_layer("fc"), 2 * 8 * 784 * 10);
}
