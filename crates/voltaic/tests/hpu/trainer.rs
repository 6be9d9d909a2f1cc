//! The trainer with `accelerator("hpu")`.

use std::path::Path;
use std::sync::{Arc, Mutex};

use tch::{Kind, Tensor};
use tempfile::TempDir;
use voltaic::accelerator::{MemoryStats, memory_stats};
use voltaic::callback::Callback;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::models::{Classifier, LeNet, LeNetConfig};
use voltaic::module::HookContext;
use voltaic::nn::ModuleExt;
use voltaic::trainer::{Trainer, TrainerBuilder, seed_everything};
use voltaic::{Device, Module, ffi};

use crate::support::{CPU, bits, start};

pub fn loader() -> DataLoader<(Tensor, Tensor)> {
    let options = (Kind::Float, CPU);
    let images = Tensor::arange(24 * 784, options).sin().reshape([24, 1, 28, 28]);
    let labels = Tensor::arange(24, (Kind::Int64, CPU)).fmod(10);
    DataLoader::new(TensorDataset::new((images, labels)).unwrap())
        .batch_size(8)
        .shuffle(true)
        .build()
        .unwrap()
}

/// The bytes of a loss, and where it was.
type Seen = (Vec<u8>, Device);

/// Remembers the loss of each batch.
#[derive(Default, Clone)]
struct Losses(Arc<Mutex<Vec<Seen>>>);

impl Callback for Losses {
    fn on_train_batch_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        let loss = ctx.loss().unwrap();
        self.0.lock().unwrap().push((bits(loss), Device::of(loss)?));
        Ok(())
    }
}

pub fn trainer(root: &Path, accelerator: &str) -> TrainerBuilder {
    Trainer::builder()
        .accelerator(accelerator)
        .devices(1)
        .precision("32-true")
        .max_epochs(2)
        .gradient_clip_val(0.5)
        .default_root_dir(root)
        .enable_progress_bar(false)
        .enable_model_summary(false)
}

struct Outcome {
    losses: Vec<Vec<u8>>,
    devices: Vec<Device>,
    weights: Vec<Vec<u8>>,
    checkpoint: std::path::PathBuf,
}

fn fit(root: &Path, accelerator: &str, ckpt: Option<&Path>) -> Outcome {
    seed_everything(4).unwrap();
    let net = LeNet::new(LeNetConfig::default()).unwrap();
    let mut net = Classifier::new(net);
    let losses = Losses::default();
    let mut trainer = trainer(root, accelerator).callback(losses.clone()).build().unwrap();
    if let Some(path) = ckpt {
        trainer.ckpt_path(path.to_str().unwrap());
    }
    seed_everything(5).unwrap();
    trainer.fit(&mut net, &mut Loaders::new().train(loader()).val(loader())).unwrap();
    let (losses, devices) = losses.0.lock().unwrap().drain(..).unzip();
    let weights = net.state_dict().iter().map(|(_, tensor)| bits(tensor)).collect();
    Outcome { losses, devices, weights, checkpoint: trainer.best_model_path().unwrap() }
}

#[test]
fn fit_on_hpu_equals_fit_on_cpu_bit_for_bit() {
    let _rng = start();
    let root = TempDir::new().unwrap();
    let cpu = fit(root.path(), "cpu", None);
    let copied = ffi::hpu_copied_outputs();
    let hpu = fit(root.path(), "hpu", None);
    assert_eq!(cpu.losses.len(), 6);
    assert!(cpu.losses == hpu.losses && cpu.weights == hpu.weights);
    assert!(cpu.devices.iter().all(|&device| device == Device::Cpu));
    assert!(hpu.devices.iter().all(|&device| device == Device::Hpu(0)));
    assert_eq!(ffi::hpu_copied_outputs(), copied);
    assert!(hpu.checkpoint.exists());
}

#[test]
fn a_checkpoint_goes_from_one_device_to_the_other() {
    let _rng = start();
    let root = TempDir::new().unwrap();
    let half = |accelerator: &str| {
        seed_everything(4).unwrap();
        let net = LeNet::new(LeNetConfig::default()).unwrap();
        let mut net = Classifier::new(net);
        let mut trainer = trainer(root.path(), accelerator).max_epochs(1).build().unwrap();
        seed_everything(5).unwrap();
        trainer.fit(&mut net, &mut Loaders::new().train(loader())).unwrap();
        trainer.best_model_path().unwrap()
    };
    let whole = fit(root.path(), "cpu", None);
    for (first, second) in [("hpu", "cpu"), ("cpu", "hpu"), ("hpu", "hpu")] {
        let rest = fit(root.path(), second, Some(&half(first)));
        assert_eq!(rest.losses, whole.losses[3..], "{first} then {second}");
        assert!(rest.weights == whole.weights, "{first} then {second}");
    }
}

#[test]
fn evaluation_on_hpu_has_no_grad_but_is_no_inference_mode() {
    let _rng = start();
    let root = TempDir::new().unwrap();
    let mut net = Classifier::new(LeNet::new(LeNetConfig::default()).unwrap());
    let mut trainer = trainer(root.path(), "hpu").logger(false).build().unwrap();
    let mut data = Loaders::new().predict(loader());
    let outputs = trainer.predict(&mut net, &mut data).unwrap().remove(0);
    assert_eq!(outputs.len(), 3);
    for output in outputs {
        // a tensor of inference mode cannot be used where autograd records
        assert!(!output.is_inference() && !output.requires_grad());
        assert_eq!(Device::of(&output).unwrap(), Device::Hpu(0));
    }
}

#[test]
fn memory_statistics_tell_of_the_run() {
    let _rng = start();
    let root = TempDir::new().unwrap();
    let before = memory_stats(Device::Hpu(0)).unwrap();
    fit(root.path(), "hpu", None);
    let MemoryStats { max_in_use, total_system_allocs, .. } = memory_stats(Device::Hpu(0)).unwrap();
    assert!(max_in_use > 1 << 20 && total_system_allocs > before.total_system_allocs + 100);
}

#[test]
fn devices_that_one_process_cannot_drive_are_refused() {
    let _rng = start();
    let root = TempDir::new().unwrap();
    for (devices, expected) in [
        (voltaic::trainer::Devices::from(9), "there are 8 hpu devices"),
        (voltaic::trainer::Devices::from(vec![1]), "not chosen one by one"),
        (voltaic::trainer::Devices::from("x"), "`x` is not a choice of devices"),
    ] {
        assert_error!(trainer(root.path(), "hpu").devices(devices).build(), "trainer.devices", expected);
    }
    assert_error!(trainer(root.path(), "tpu").build(), "trainer.accelerator", "use auto, cpu, cuda, hpu");
}

/// Training losses of a few epochs.
fn losses_with(accelerator: &str, precision: &str) -> Vec<f64> {
    let root = TempDir::new().unwrap();
    seed_everything(3).unwrap();
    let mut module = Classifier::new(LeNet::new(LeNetConfig::default()).unwrap());
    let losses = Losses::default();
    let mut trainer = trainer(root.path(), accelerator)
        .precision(precision)
        .max_epochs(12)
        .enable_checkpointing(false)
        .logger(false)
        .callback(losses.clone())
        .build()
        .unwrap();
    trainer.fit(&mut module, &mut Loaders::new().train(loader())).unwrap();
    let losses = losses.0.lock().unwrap();
    losses.iter().map(|(bytes, _)| f64::from(f32::from_le_bytes(bytes[..4].try_into().unwrap()))).collect()
}

#[test]
fn mixed_precision_reaches_the_loss_of_float32() {
    let _rng = start();
    let last = |losses: &[f64]| losses[losses.len() - 3..].iter().sum::<f64>() / 3.0;
    let full = losses_with("cpu", "32-true");
    assert!(last(&full) < full[0], "it trains");
    for accelerator in ["cpu", "hpu"] {
        for precision in ["bf16-mixed", "16-mixed"] {
            let mixed = losses_with(accelerator, precision);
            assert_ne!(mixed, full, "{precision} on {accelerator} does something");
            let error = (last(&mixed) / last(&full) - 1.0).abs();
            assert!(error < 0.02, "{precision} on {accelerator}: {} for {}", last(&mixed), last(&full));
        }
    }
}
