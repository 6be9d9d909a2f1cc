//! What tests of random runs share: their seeds, data, averages of weights and checkpoints.

use std::ops::Range;
use std::path::PathBuf;

use rand::RngExt;
use rand::rngs::StdRng;
use tch::{Kind, Tensor};
use voltaic::Module;
use voltaic::callback::{Callback, EmaWeightAveragingConfig, StochasticWeightAveraging, WeightAveraging};
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::module::{CheckpointRequest, HookContext};
use voltaic::trainer::{ActivationCheckpointingConfig, ActivationMode, TrainerBuilder};

/// The seeds that `VOLTAIC_FUZZ` names, one or a range.
pub fn seeds(default: Range<u64>) -> Range<u64> {
    let Ok(text) = std::env::var("VOLTAIC_FUZZ") else { return default };
    match text.split_once("..") {
        Some((first, end)) => first.parse().unwrap()..end.parse().unwrap(),
        None => text.parse().unwrap()..text.parse::<u64>().unwrap() + 1,
    }
}

/// So many seeds, or more with `VOLTAIC_TEST_ALL`.
pub fn some(default: u64, all: u64) -> Range<u64> {
    0..if std::env::var_os("VOLTAIC_TEST_ALL").is_some() { all } else { default }
}

/// Runs the case of each seed: an error if something differs, false if it does not run at all. Those after the first that fails only with
/// `VOLTAIC_FUZZ_ON`.
pub fn cases(of: &str, default: Range<u64>, mut case: impl FnMut(u64) -> Result<bool, String>) {
    let goes_on = std::env::var_os("VOLTAIC_FUZZ_ON").is_some();
    let (mut failed, mut left_out, seeds) = (Vec::new(), 0, seeds(default));
    for seed in seeds.clone() {
        match case(seed) {
            Ok(runs) => left_out += u64::from(!runs),
            Err(what) => {
                assert!(goes_on, "seed {seed}{of}: {what}");
                println!("\nseed {seed}{of}: {what}");
                failed.push(seed);
            }
        }
    }
    let count = seeds.end - seeds.start;
    assert!(3 * left_out <= count.max(3), "{left_out} of {count} cases{of} do not run");
    assert!(failed.is_empty(), "seeds {failed:?}{of}");
}

/// A number that stands for a module or a parameter, in one of so many cases.
pub fn maybe(rng: &mut StdRng, chance: u32) -> Option<usize> {
    let (number, is_there) = (rng.random_range(0..64), rng.random_range(0..chance) == 0);
    is_there.then_some(number)
}

/// One of several.
pub fn one<T: Clone, const N: usize>(rng: &mut StdRng, of: [T; N]) -> T {
    of[rng.random_range(0..N)].clone()
}

/// Numbers without a pattern that a mistake could hide in, the same everywhere.
pub fn numbers(size: &[i64], phase: f64) -> Tensor {
    let count: i64 = size.iter().product();
    let all = Tensor::arange(count, (Kind::Double, tch::Device::Cpu)) * 12.9898 + phase;
    all.sin().to_kind(Kind::Float).reshape(size)
}

/// Batches of inputs `[n, 5]` and targets `[n, 3]`: so many samples in batches of that size, shuffled for training.
pub fn loaders((samples, batch_size): (i64, usize), val: Option<(i64, usize)>) -> Loaders<(Tensor, Tensor)> {
    let of = |samples: i64, batch_size: usize, phase: f64| {
        let data = (numbers(&[samples, 5], phase), numbers(&[samples, 3], phase + 1.0));
        DataLoader::new(TensorDataset::new(data).unwrap()).batch_size(batch_size)
    };
    let loaders = Loaders::new().train(of(samples, batch_size, 3.0).shuffle(true).seed(0).build().unwrap());
    match val {
        Some((samples, batch_size)) => loaders.val(of(samples, batch_size, 5.0).build().unwrap()),
        None => loaders,
    }
}

/// What becomes of what checkpointed modules save.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activations {
    Recompute,
    /// But for results of some operators.
    Save,
    Offload,
}

impl Activations {
    pub fn random(rng: &mut StdRng) -> Self {
        one(rng, [Self::Recompute, Self::Save, Self::Save, Self::Offload])
    }

    /// Of the modules with a name.
    pub fn of(self, modules: &str) -> ActivationCheckpointingConfig {
        let save = if self == Self::Save { &["matmul", "attention", "tanh"][..] } else { &[] };
        ActivationCheckpointingConfig {
            modules: vec![modules.to_owned()],
            mode: if self == Self::Offload { ActivationMode::Offload } else { ActivationMode::Recompute },
            save: save.iter().map(|name| (*name).to_owned()).collect(),
            budget: None,
        }
    }
}

/// Steps by hand, with two optimizers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Manual {
    /// Gradients flow to the parameters of one optimizer at a time.
    pub toggles: bool,
    /// Gradients are dropped at each so many batches.
    pub drops_every: usize,
    /// A second backward pass before each step.
    pub again: bool,
}

impl Manual {
    pub fn random(rng: &mut StdRng) -> Self {
        Self { toggles: rng.random(), drops_every: one(rng, [1, 1, 2]), again: rng.random() }
    }
}

/// An average of the weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Average {
    None,
    Ema,
    Swa,
}

impl Average {
    pub fn random(rng: &mut StdRng) -> Self {
        one(rng, [Self::None, Self::None, Self::None, Self::Ema, Self::Swa])
    }

    pub fn add_to(self, builder: TrainerBuilder) -> TrainerBuilder {
        match self {
            Self::None => builder,
            Self::Ema => {
                let config = EmaWeightAveragingConfig { decay: 0.75, ..Default::default() };
                builder.callback(WeightAveraging::ema(config).unwrap())
            }
            Self::Swa => builder.callback(StochasticWeightAveraging::new(0.02).unwrap()),
        }
    }
}

/// Asks for a checkpoint after a batch, counted over all epochs.
pub struct SaveAt {
    pub step: usize,
    /// Of an epoch.
    pub batches: usize,
    pub path: PathBuf,
    /// There may be several.
    pub name: &'static str,
}

impl Callback for SaveAt {
    fn state_key(&self) -> String {
        self.name.to_owned()
    }

    fn on_train_batch_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        if ctx.current_epoch() as usize * self.batches + ctx.batch_idx() == self.step {
            ctx.request_checkpoint(CheckpointRequest {
                path: self.path.clone(),
                weights_only: false,
                link_to: None,
                then_remove: Vec::new(),
            });
        }
        Ok(())
    }
}
