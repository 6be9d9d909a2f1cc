//! Data-parallel training with processes: the same as one process on the same batches.

use std::path::{Path, PathBuf};

use tempfile::TempDir;
use voltaic::checkpoint::Checkpoint;
use voltaic::data::{DataLoader, Loaders, RandomSampler, Sampler, TensorDataset};
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::{Buffer, Forward, Linear, ModuleExt};
use voltaic::optim::{AdamW, Optimizers};
use voltaic::strategy::{DdpConfig, GradientCompression};
use voltaic::trainer::{Trainer, TrainerBuilder};
use voltaic::{Kind, Module, Tensor};

use crate::compare;
use crate::ddp_unused::assert_recorded;
use crate::probe::{by_libtorch, own_process, plays, silent, text_of};

const CPU: tch::Device = tch::Device::Cpu;
pub const FOLDER: &str = "VOLTAIC_TEST_FOLDER";
const BATCH: usize = 4;
const SAMPLES: i64 = 48;

/// Two layers, and a buffer that each rank changes in its own way.
#[derive(Module)]
pub struct Net {
    first: Linear,
    second: Linear,
    seen: Buffer,
}

/// Numbers without a pattern that a mistake could hide in, the same everywhere.
pub fn numbers(size: &[i64], phase: f64) -> Tensor {
    let count: i64 = size.iter().product();
    (Tensor::arange(count, (Kind::Double, CPU)) * 12.9898 + phase).sin().to_kind(Kind::Float).reshape(size)
}

impl Net {
    pub fn new() -> Self {
        let net = Self::without_values().unwrap();
        numbered(&net);
        net
    }

    pub fn without_values() -> voltaic::Result<Self> {
        let seen = Buffer::new(Tensor::zeros([1], (Kind::Float, CPU)));
        Ok(Self { first: Linear::new(5, 16)?, second: Linear::new(16, 3)?, seen })
    }
}

/// Gives parameters the same values everywhere.
pub fn numbered(net: &impl Module) {
    for (number, parameter) in net.parameters().into_iter().enumerate() {
        parameter.set_data(&(numbers(&parameter.size(), number as f64) * 0.3)).unwrap();
    }
}

impl LightningModule for Net {
    type Batch = (Tensor, Tensor);

    fn training_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let loss = self.train_loss(x, y)?;
        ctx.log("train_loss", &loss).on_epoch(true).sync_dist(true);
        Ok(loss)
    }

    fn validation_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        let loss = self.loss(x, y)?;
        ctx.log("val_loss", &loss).sync_dist(true);
        ctx.log("val_samples", x.size()[0] as f64).reduce_fx(voltaic::module::ReduceFx::Sum).sync_dist(true);
        Ok(())
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        AdamW::new(0.01).into()
    }
}

impl Net {
    /// The loss of a training batch, which also changes the buffer.
    pub fn train_loss(&self, x: &Tensor, y: &Tensor) -> anyhow::Result<Tensor> {
        let loss = self.loss(x, y)?;
        let mean = x.f_mean(Kind::Float)?;
        let _ = self.seen.tensor().shallow_clone().f_add_(&mean)?;
        Ok(loss)
    }

    fn loss(&self, x: &Tensor, y: &Tensor) -> anyhow::Result<Tensor> {
        let out = self.second.forward(&self.first.forward(x)?.relu())?;
        Ok((out - y).square().mean(Kind::Float))
    }
}

/// The order in which a process alone has to take batches to see what `ranks` see: those of all ranks, batch by batch.
#[derive(Debug)]
struct Interleaved {
    order: RandomSampler,
    ranks: usize,
}

impl Sampler for Interleaved {
    fn num_samples(&self) -> usize {
        self.order.num_samples()
    }

    fn indices(&self, seed: u64, epoch: u64) -> anyhow::Result<Vec<usize>> {
        let order = self.order.indices(seed, epoch)?;
        let global = BATCH * self.ranks;
        let place = |at: usize| {
            let (batch, within) = (at / global, at % global);
            let (rank, sample) = (within / BATCH, within % BATCH);
            batch * global + sample * self.ranks + rank
        };
        Ok((0..order.len()).map(|at| order[place(at)]).collect())
    }

    fn is_distributed(&self) -> bool {
        true
    }
}

fn dataset(samples: i64, phase: f64) -> TensorDataset<(Tensor, Tensor)> {
    TensorDataset::new((numbers(&[samples, 5], phase), numbers(&[samples, 3], phase + 1.0))).unwrap()
}

/// Loaders for ranks, whose part the trainer takes; or for a process that does the work of `ranks`.
pub fn loaders(ranks: Option<usize>) -> Loaders<(Tensor, Tensor)> {
    let train = DataLoader::new(dataset(SAMPLES, 3.0)).batch_size(BATCH).seed(0);
    let train = match ranks {
        None => train.shuffle(true),
        Some(ranks) => train.sampler(Interleaved { order: RandomSampler::new(SAMPLES as usize), ranks }),
    };
    // one sample more than can be divided
    let val = DataLoader::new(dataset(17, 5.0)).batch_size(BATCH).build().unwrap();
    Loaders::new().train(train.build().unwrap()).val(val)
}

pub fn builder(folder: &Path) -> TrainerBuilder {
    silent().max_epochs(3).default_root_dir(folder)
}

/// Weights after training, and metrics, as rank 0 or a process alone leaves them.
pub fn finish(trainer: &Trainer, net: &Net, folder: &Path) {
    if trainer.is_global_zero() {
        Checkpoint { weights: net.state_dict(), ..Checkpoint::default() }
            .save(&folder.join("end.ckpt"))
            .unwrap();
    }
    for name in ["train_loss_epoch", "val_loss", "val_samples"] {
        println!("\n{name}={}", trainer.metric(name).unwrap());
    }
}

/// The weights that a folder holds, without the buffer, which counts what one rank saw.
pub fn weights(folder: &Path) -> Vec<(String, Tensor)> {
    let all = Checkpoint::load(folder.join("end.ckpt")).unwrap().weights;
    let mut weights: Vec<_> = all.into_iter().filter(|(name, _)| name != "seen").collect();
    weights.sort_by(|a, b| a.0.cmp(&b.0));
    weights
}

fn values(text: &str, name: &str) -> f64 {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(&format!("{name}=")))
        .unwrap_or_else(|| panic!("{text}"));
    line.parse().unwrap()
}

/// One process that accumulates the gradients of the batches of `ranks`.
pub fn alone(ranks: usize, windows: u64) -> (TempDir, Vec<(String, Tensor)>, f64, f64) {
    let folder = TempDir::new().unwrap();
    let mut trainer = builder(folder.path()).accumulate_grad_batches(ranks as u64 * windows).build().unwrap();
    let mut net = Net::new();
    trainer.fit(&mut net, &mut loaders(Some(ranks))).unwrap();
    finish(&trainer, &net, folder.path());
    let metrics = (trainer.metric("train_loss_epoch").unwrap(), trainer.metric("val_loss").unwrap());
    let weights = weights(folder.path());
    (folder, weights, metrics.0, metrics.1)
}

pub fn folder_of_parent() -> PathBuf {
    PathBuf::from(std::env::var_os(FOLDER).unwrap())
}

/// Runs a test again as `part` in a process that starts the ranks; returns what rank 0 printed.
pub fn run_ranks(part: &str, folder: &Path) -> String {
    text_of(&own_process(part).env(FOLDER, folder).output().unwrap())
}

/// The same with libtorch's kernels, whose bits PyTorch's weights have.
pub fn run_ranks_by_libtorch(part: &str, folder: &Path) -> String {
    text_of(&by_libtorch(part).env(FOLDER, folder).output().unwrap())
}

pub fn assert_same(own: &[(String, Tensor)], expected: &[(String, Tensor)]) {
    compare::assert_same("weights", own, expected);
}

#[test]
fn two_ranks_equal_one_process_bit_for_bit() {
    if plays("ddp") {
        let folder = folder_of_parent();
        let mut trainer = builder(&folder).devices(2).strategy("ddp").build().unwrap();
        assert_eq!((trainer.strategy(), trainer.world().world_size), ("ddp", 2));
        let mut net = Net::new();
        trainer.fit(&mut net, &mut loaders(None)).unwrap();
        return finish(&trainer, &net, &folder);
    }
    let (_kept, expected, train_loss, val_loss) = alone(2, 1);
    let folder = TempDir::new().unwrap();
    let text = run_ranks("ddp", folder.path());
    assert_same(&weights(folder.path()), &expected);
    let recorded = TempDir::new().unwrap();
    run_ranks_by_libtorch("ddp", recorded.path());
    assert_recorded(&weights(recorded.path()), "two_ranks");
    assert_eq!(values(&text, "val_samples"), 17.0, "each sample counts once");
    // the same float32 sums in another order
    for (name, expected) in [("train_loss_epoch", train_loss), ("val_loss", val_loss)] {
        assert!((values(&text, name) - expected).abs() < 1e-6 * expected.abs(), "{name}: {text} {expected}");
    }
    let log = std::fs::read_to_string(folder.path().join("rank_logs/rank_1.log")).unwrap();
    assert!(log.contains("val_loss="), "rank 1 writes to its file: {log}");
    assert!(text.matches("val_loss=").count() == 1, "rank 0 alone prints: {text}");
}

#[test]
fn gradients_that_travel_in_bfloat16_are_pytorchs() {
    if plays("compressed") {
        let folder = folder_of_parent();
        let config = DdpConfig { gradient_compression: GradientCompression::Bf16, ..DdpConfig::default() };
        let mut trainer = builder(&folder).devices(2).strategy(config).build().unwrap();
        let mut net = Net::new();
        trainer.fit(&mut net, &mut loaders(None)).unwrap();
        return finish(&trainer, &net, &folder);
    }
    let folder = TempDir::new().unwrap();
    run_ranks_by_libtorch("compressed", folder.path());
    assert_recorded(&weights(folder.path()), "bf16");
}

#[test]
fn accumulation_and_compression_and_find_unused_work_together_with_ranks() {
    for (part, config) in [
        ("accumulate", DdpConfig { static_graph: true, ..DdpConfig::default() }),
        ("unused", DdpConfig { find_unused_parameters: true, ..DdpConfig::default() }),
        ("bf16", DdpConfig { gradient_compression: GradientCompression::Bf16, ..DdpConfig::default() }),
    ] {
        if plays(part) {
            let folder = folder_of_parent();
            let mut trainer =
                builder(&folder).devices(2).strategy(config).accumulate_grad_batches(2_u64).build().unwrap();
            let mut net = Net::new();
            trainer.fit(&mut net, &mut loaders(None)).unwrap();
            return finish(&trainer, &net, &folder);
        }
    }
    let (_kept, expected, ..) = alone(2, 2);
    let run = |part: &str| {
        let folder = TempDir::new().unwrap();
        run_ranks(part, folder.path());
        weights(folder.path())
    };
    // each rank adds its own batches first, so sums of four have another order
    for part in ["accumulate", "unused"] {
        for ((name, own), (_, expected)) in run(part).iter().zip(&expected) {
            assert!(own.allclose(expected, 1e-5, 1e-6, false), "{part}: {name}");
        }
    }
    for ((name, own), (_, expected)) in run("bf16").iter().zip(&expected) {
        // AdamW turns an error of a gradient's sign into a step of the learning rate; there are 9 steps of 0.01
        let difference = (own - expected).abs().max().double_value(&[]);
        assert!(difference > 0.0 && difference < 0.09, "{name} {difference}");
    }
}

/// Runs backward itself, which ranks see only through `ctx.manual_backward`.
#[derive(Module)]
struct OwnBackward {
    net: Net,
    asks_trainer: bool,
}

lightning_module!(OwnBackward, (Tensor, Tensor), manual(AdamW::new(0.01)), |net, (x, y), ctx| {
    ctx.optimizer(0)?.zero_grad()?;
    let loss = net.net.loss(x, y)?;
    loss.f_backward()?;
    if net.asks_trainer {
        ctx.manual_backward(&net.net.loss(x, y)?)?; // averages what is there, too
    }
    ctx.optimizer(0)?.step()?;
    Ok(ctx.no_loss())
});

#[test]
fn gradients_of_one_rank_alone_are_no_step() {
    if plays("own_backward") {
        let folder = folder_of_parent();
        for asks_trainer in [true, false] {
            let mut trainer =
                builder(&folder).devices(2).strategy("ddp").limit_val_batches(0).build().unwrap();
            let mut module = OwnBackward { net: Net::new(), asks_trainer };
            let result = trainer.fit(&mut module, &mut loaders(None));
            println!("{asks_trainer}: {result:?}");
        }
        return;
    }
    let folder = TempDir::new().unwrap();
    let text = run_ranks("own_backward", folder.path());
    assert!(text.contains("true: Ok("), "{text}");
    let refused = text.split_once("false: Err(").unwrap_or_else(|| panic!("{text}")).1;
    for words in ["the gradient of `net.second", "ctx.manual_backward(&loss)"] {
        assert!(refused.contains(words), "{refused}");
    }
}
