//! The trainer with `accelerator("cuda")` beside the CPU.

use std::path::Path;

use tch::{Kind, Tensor};
use tempfile::TempDir;
use voltaic::Device;
use voltaic::accelerator::memory_stats;
use voltaic::callback::{ModelCheckpoint, ModelCheckpointConfig};
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::graph::{HpuGraph, StaticTensor};
use voltaic::models::{Classifier, LeNet, LeNetConfig};
use voltaic::nn::functional::cross_entropy;
use voltaic::nn::{Forward, ModuleExt};
use voltaic::optim::{AdamW, Optimizers};
use voltaic::trainer::{Trainer, TrainerBuilder, seed_everything};

use crate::losses::Losses;
use crate::{ACCELERATOR, GPU, cuda};

type Data = Loaders<(Tensor, Tensor)>;

/// Six batches of pictures, in each of which bright rows show its label.
fn data() -> Data {
    let options = (Kind::Float, tch::Device::Cpu);
    let labels = Tensor::arange(48, (Kind::Int64, tch::Device::Cpu)).fmod(10);
    let rows = labels.onehot(10).repeat_interleave_self_int(2, 1, 20).constant_pad_nd([0, 8]);
    let noise = Tensor::arange(48 * 784, options).sin().reshape([48, 1, 28, 28]) * 0.1;
    let images = rows.reshape([48, 1, 28, 1]) + noise;
    let pictures = TensorDataset::new((images, labels)).unwrap();
    Loaders::new().train(DataLoader::new(pictures).batch_size(8).shuffle(true).build().unwrap())
}

fn trainer(root: &Path, accelerator: &str) -> TrainerBuilder {
    Trainer::builder()
        .accelerator(accelerator)
        .devices(1)
        .max_epochs(8)
        .gradient_clip_val(0.5)
        .accumulate_grad_batches(2_u64)
        .logger(false)
        .enable_checkpointing(false)
        .enable_progress_bar(false)
        .enable_model_summary(false)
        .default_root_dir(root)
}

/// What a run has come to: losses, and weights on the CPU.
struct Outcome {
    losses: Vec<f64>,
    weights: Vec<(String, Tensor)>,
}

fn fit(accelerator: &str, configure: impl Fn(TrainerBuilder) -> TrainerBuilder) -> Outcome {
    fit_from(accelerator, configure, None)
}

fn fit_from(
    accelerator: &str,
    configure: impl Fn(TrainerBuilder) -> TrainerBuilder,
    checkpoint: Option<&Path>,
) -> Outcome {
    let (root, losses) = (TempDir::new().unwrap(), Losses::default());
    seed_everything(3).unwrap();
    let mut net = Classifier::new(LeNet::new(LeNetConfig::default()).unwrap());
    let mut trainer = configure(trainer(root.path(), accelerator).callback(losses.clone())).build().unwrap();
    if let Some(path) = checkpoint {
        trainer.ckpt_path(path);
    }
    seed_everything(5).unwrap();
    trainer.fit(&mut net, &mut data()).unwrap();
    let on_cpu = |tensor: Tensor| tensor.to_device(tch::Device::Cpu).copy();
    let weights = net.state_dict().into_iter().map(|(name, tensor)| (name, on_cpu(tensor))).collect();
    Outcome { losses: losses.0.lock().unwrap().clone(), weights }
}

fn assert_near(what: &str, own: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(own.len(), expected.len(), "{what}");
    for (step, (own, expected)) in own.iter().zip(expected).enumerate() {
        assert!(
            (own - expected).abs() <= tolerance * expected.abs(),
            "{what}, step {step}: {own}, {expected}"
        );
    }
}

fn assert_falls(what: &str, losses: &[f64]) {
    let epoch = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    let (first, last) = (epoch(&losses[..6]), epoch(&losses[42..]));
    assert!(last < 0.95 * first, "{what}: {losses:?}");
}

#[test]
fn a_fit_has_the_losses_of_the_cpu() {
    let Some(_guard) = cuda("a fit") else { return };
    let (cpu, gpu) = (fit("cpu", |trainer| trainer), fit(ACCELERATOR, |trainer| trainer));
    assert_eq!(gpu.losses.len(), 48);
    assert_falls("cuda", &gpu.losses);
    assert_near("cuda", &gpu.losses, &cpu.losses, 5e-3);
    assert!(memory_stats(GPU).unwrap().max_in_use > 1 << 20, "weights were there");
}

#[test]
fn each_precision_trains() {
    let Some(_guard) = cuda("precisions") else { return };
    let full = fit(ACCELERATOR, |trainer| trainer);
    for precision in ["64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"] {
        let own = fit(ACCELERATOR, |trainer| trainer.precision(precision));
        assert_ne!(own.losses, full.losses, "{precision} does something");
        assert_near(precision, &own.losses[..4], &full.losses[..4], 0.05);
        if precision != "16-true" {
            assert_falls(precision, &own.losses); // Adam's epsilon of 1e-8 is nothing in float16
        }
    }
}

#[test]
fn a_resumed_run_has_the_bits_of_one_that_was_not_stopped() {
    let Some(_guard) = cuda("resuming") else { return };
    let folder = TempDir::new().unwrap();
    let config = ModelCheckpointConfig {
        dirpath: Some(folder.path().to_owned()),
        filename: Some("{step}".to_owned()),
        every_n_train_steps: Some(4), // within the second epoch
        save_top_k: -1,
        ..Default::default()
    };
    let deterministic = |trainer: TrainerBuilder| trainer.deterministic(true);
    let whole = fit(ACCELERATOR, |trainer| {
        let saver = ModelCheckpoint::new(config.clone()).unwrap();
        deterministic(trainer).enable_checkpointing(true).callback(saver)
    });
    let rest = fit_from(ACCELERATOR, deterministic, Some(&folder.path().join("step=4.ckpt")));
    assert_eq!(rest.losses, whole.losses[8..]);
    for ((name, own), (_, expected)) in rest.weights.iter().zip(&whole.weights) {
        assert!(own.equal(expected), "{name}");
    }
}

#[test]
fn one_gpu_is_enough_for_each_strategy() {
    let Some(_guard) = cuda("strategies") else { return };
    let plain = fit(ACCELERATOR, |trainer| trainer);
    for strategy in ["ddp", "zero1", "zero2", "zero3"] {
        let own = fit(ACCELERATOR, |trainer| trainer.strategy(strategy));
        assert_near(strategy, &own.losses, &plain.losses, 1e-3);
    }
}

#[test]
fn a_captured_step_trains_as_an_eager_one() {
    let Some(_guard) = cuda("a captured step") else { return };
    let train = |is_captured: bool| -> Vec<f64> {
        voltaic::ffi::manual_seed(1).unwrap();
        let net = LeNet::new(LeNetConfig::default()).unwrap();
        net.to_device(GPU).unwrap();
        let on_gpu = |tensor: Tensor| StaticTensor::new(tensor.to_device(GPU.into()));
        let images = on_gpu(Tensor::zeros([8, 1, 28, 28], (Kind::Float, tch::Device::Cpu)));
        let labels = on_gpu(Tensor::zeros([8], (Kind::Int64, tch::Device::Cpu)));
        let mut optimizer =
            Optimizers::from(AdamW::new(1e-3)).build(net.as_dyn()).unwrap().remove(0).optimizer;
        let mut step = || -> anyhow::Result<Tensor> {
            let loss = cross_entropy(&net.forward(&images.get())?, &labels.get())?;
            optimizer.zero_grad()?;
            loss.f_backward()?;
            optimizer.step()?;
            Ok(loss)
        };
        let graph = HpuGraph::on(GPU);
        let mut captured: Option<Tensor> = None;
        let mut losses = Vec::new();
        for number in 0..8 {
            let phase = f64::from(number);
            let batch = (Tensor::arange(8 * 784, (Kind::Float, tch::Device::Cpu)) + phase).sin();
            images.copy_(&batch.reshape([8, 1, 28, 28])).unwrap();
            labels.copy_(&Tensor::arange(8, (Kind::Int64, tch::Device::Cpu))).unwrap();
            let loss = match &captured {
                Some(loss) => {
                    graph.replay().unwrap();
                    loss.shallow_clone()
                }
                None if is_captured && number == 3 => {
                    // a capture does not compute, the replay after it does
                    let loss = graph.capture(&mut step).unwrap();
                    graph.replay().unwrap();
                    captured.insert(loss).shallow_clone()
                }
                None => step().unwrap(),
            };
            losses.push(loss.double_value(&[]));
        }
        losses
    };
    assert_near("captured", &train(true), &train(false), 1e-3);
}

#[test]
fn a_profile_has_the_kernels_of_the_gpu() {
    let Some(_guard) = cuda("a profile") else { return };
    let folder = TempDir::new().unwrap();
    let config = voltaic::profiler::PyTorchProfilerConfig {
        dirpath: Some(folder.path().to_owned()),
        filename: Some("gpu".to_owned()),
        ..Default::default()
    };
    fit(ACCELERATOR, |trainer| trainer.profiler(config.clone()));
    let traces = std::fs::read_dir(folder.path()).unwrap().flatten().map(|entry| entry.path());
    let traces: Vec<_> = traces.filter(|path| path.extension().is_some_and(|is| is == "json")).collect();
    assert!(!traces.is_empty());
    let texts = traces.iter().map(|path| std::fs::read_to_string(path).unwrap());
    assert!(texts.into_iter().any(|text| text.contains("\"kernel\"")), "{traces:?}");
}

#[test]
fn a_tensor_tells_where_it_is() {
    let Some(_guard) = cuda("devices of tensors") else { return };
    let there = Tensor::zeros([2], (Kind::Float, GPU.into()));
    assert_eq!(Device::of(&there).unwrap(), GPU);
}
