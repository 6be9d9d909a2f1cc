//! Training with the kernels: what a graph replays and an emulated HPU computes is the same to the bit, and close to
//! float64, which the kernels leave alone.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tch::{Device, Kind, Tensor};
use tempfile::TempDir;
use voltaic::data::{DataLoader, Dataset, Loaders, StdRng};
use voltaic::ffi;
use voltaic::models::{Classifier, ConvNet, ConvNetConfig, Gpt, GptConfig};
use voltaic::module::LightningModule;
use voltaic::nn::ModuleExt;
use voltaic::trainer::{GraphMode, seed_everything};

use crate::compare::assert_same;
use crate::silent::silent;
use crate::{assert_close, install};

const STEPS: u64 = 4;

/// Weights are drawn from the generator of the process.
static GENERATOR: Mutex<()> = Mutex::new(());

fn drawing_alone() -> MutexGuard<'static, ()> {
    GENERATOR.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Batches that follow from their number.
struct Made(fn(f64) -> (Tensor, Tensor));

impl Dataset for Made {
    type Batch = (Tensor, Tensor);

    fn len(&self) -> usize {
        STEPS as usize
    }

    fn batch(&self, indices: &[usize], _rng: &mut StdRng) -> anyhow::Result<Self::Batch> {
        Ok((self.0)(indices[0] as f64))
    }
}

fn numbers(sizes: &[i64], index: f64) -> Tensor {
    let all = sizes.iter().product::<i64>();
    ((Tensor::arange(all, (Kind::Double, Device::Cpu)) * 12.9 + index).sin() * 43758.5)
        .frac()
        .abs()
        .view(sizes)
}

fn text(index: f64) -> (Tensor, Tensor) {
    let text = (numbers(&[3, 33], index) * 64.0).to_kind(Kind::Int64);
    (text.narrow(1, 0, 32).contiguous(), text.narrow(1, 1, 32).contiguous())
}

fn pictures(index: f64) -> (Tensor, Tensor) {
    let labels = (numbers(&[4], index) * 10.0).to_kind(Kind::Int64);
    (numbers(&[4, 1, 28, 28], index).to_kind(Kind::Float), labels)
}

fn small_gpt() -> Gpt {
    seed_everything(11).unwrap();
    Gpt::new(GptConfig {
        vocab_size: 64,
        block_size: 32,
        n_layer: 2,
        n_head: 2,
        n_embd: 32,
        ..GptConfig::tiny()
    })
    .unwrap()
}

/// The parameters after training, on the CPU.
fn train<M>(
    mut module: M,
    batches: fn(f64) -> (Tensor, Tensor),
    switches: [&str; 2],
    graph: GraphMode,
) -> Vec<(String, Tensor)>
where
    M: LightningModule<Batch = (Tensor, Tensor)>,
{
    install();
    let root = TempDir::new().unwrap();
    let [accelerator, precision] = switches;
    let mut trainer = silent()
        .accelerator(accelerator)
        .devices(1)
        .precision(precision)
        .graph(graph)
        .max_epochs(2)
        .default_root_dir(root.path())
        .build()
        .unwrap();
    seed_everything(5).unwrap();
    let loader = DataLoader::new(Made(batches)).unbatched().build().unwrap();
    trainer.fit(&mut module, &mut Loaders::new().train(loader)).unwrap();
    let parameters = module.named_parameters();
    parameters.into_iter().map(|(name, tensor)| (name, tensor.detach().to_device(Device::Cpu))).collect()
}

#[test]
fn devices_and_graphs_agree_to_the_bit() {
    let _generator = drawing_alone();
    let convolutional = || {
        seed_everything(12).unwrap();
        Classifier::new(ConvNet::new(ConvNetConfig::default()).unwrap())
    };
    for precision in ["32-true", "bf16-mixed"] {
        let eager = train(small_gpt(), text, ["cpu", precision], GraphMode::Off);
        assert_same("weights", &train(small_gpt(), text, ["cpu", precision], GraphMode::Step), &eager);
        // what an HPU casts by default is another list
        if precision == "32-true" {
            assert_same("weights", &train(small_gpt(), text, ["hpu", precision], GraphMode::Off), &eager);
        }
        let eager = train(convolutional(), pictures, ["cpu", precision], GraphMode::Off);
        assert_same(
            "weights",
            &train(convolutional(), pictures, ["cpu", precision], GraphMode::Step),
            &eager,
        );
    }
}

#[test]
fn a_trained_network_is_close_to_float64() {
    let _generator = drawing_alone();
    ffi::manual_seed(0).unwrap();
    let exact = train(small_gpt(), text, ["cpu", "64-true"], GraphMode::Off);
    let trained = train(small_gpt(), text, ["cpu", "32-true"], GraphMode::Off);
    for ((name, a), (_, b)) in trained.iter().zip(&exact) {
        assert_close(name, a, b, 2e-4);
    }
}
