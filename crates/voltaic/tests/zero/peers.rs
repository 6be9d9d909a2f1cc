//! A run with divided states is that of real DeepSpeed, and of PyTorch's `fully_shard`: see fixtures/deepspeed/make_losses.py.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;

use serde::Deserialize;
use serde_json::{Value, json};
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::functional::cross_entropy;
use voltaic::nn::{Callable, ModuleExt};
use voltaic::optim::{AdamW, Optimizers};
use voltaic::strategy::DeepSpeedStrategy;
use voltaic::trainer::TrainerBuilder;
use voltaic::{Kind, Module, Tensor};

use crate::ladder::gpt;
use crate::models::{Batch, Small, numbers};
use crate::ranks::{on_ranks, runs_all, silent};

/// What a peer did.
#[derive(Deserialize)]
struct Run {
    /// Of each rank and batch.
    losses: Vec<Vec<f64>>,
    /// By name, the norm of the final weights and their product with numbers.
    weights: BTreeMap<String, (f64, f64)>,
    /// The loss scale before each batch, in float16.
    #[serde(default)]
    scales: Vec<f64>,
}

/// A model with what it learns, and its losses so far.
trait Learner: LightningModule<Batch = Batch> + Module {
    fn told(&self) -> &Mutex<Vec<f64>>;
}

macro_rules! learner {
    ($name:ident, $net:ty, $loss:expr) => {
        #[derive(Module)]
        struct $name {
            net: $net,
            /// The strategy's settings name the optimizer.
            #[module(skip)]
            has_none: bool,
            #[module(skip)]
            told: Mutex<Vec<f64>>,
        }

        impl LightningModule for $name {
            type Batch = Batch;

            fn training_step(&self, (x, y): &Batch, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
                let loss: Tensor = $loss(&self.net, x, y)?;
                self.told.lock().unwrap().push(loss.double_value(&[]));
                Ok(loss)
            }

            fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
                if self.has_none { Optimizers::none().into() } else { AdamW::new(0.01).into() }
            }
        }

        impl Learner for $name {
            fn told(&self) -> &Mutex<Vec<f64>> {
                &self.told
            }
        }
    };
}

learner!(Mlp, Small, |net: &Small, x: &Tensor, y: &Tensor| net.loss(x, y));
learner!(Gpt, voltaic::models::Gpt, |net: &voltaic::models::Gpt, x: &Tensor, y: &Tensor| {
    let logits = net.call(x)?.flatten(0, 1).to_kind(Kind::Float);
    anyhow::Ok(cross_entropy(&logits, &y.flatten(0, 1))?)
});

fn in_order(x: Tensor, y: Tensor) -> Loaders<Batch> {
    let train = DataLoader::new(TensorDataset::new((x, y)).unwrap()).batch_size(2);
    Loaders::new().train(train.build().unwrap())
}

/// Trains as the peer did, and compares.
fn compare<M: Learner>(
    name: &str,
    peer: &Run,
    builder: TrainerBuilder,
    mut model: M,
    mut loaders: Loaders<Batch>,
    tolerance: f64,
) {
    let mut trainer = builder.max_epochs(2).build().unwrap();
    trainer.fit(&mut model, &mut loaders).unwrap();
    if !peer.scales.is_empty() {
        // what each batch began with; a window has one scale
        let scaler = trainer.loss_scaler().unwrap();
        let skipped = peer.scales.windows(2).filter(|pair| pair[1] < pair[0]).count() as u64;
        let last = [skipped, skipped + 1]; // the last step is not seen there
        assert!(last.contains(&scaler.skipped_steps()), "{name}: {scaler:?}, not {:?}", peer.scales);
    }
    let losses = model.told().lock().unwrap().clone();
    let expected = &peer.losses[trainer.world().rank];
    assert_eq!(losses.len(), expected.len(), "{name}");
    for (batch, (own, expected)) in losses.iter().zip(expected).enumerate() {
        let difference = (own - expected).abs();
        assert!(difference <= tolerance * expected, "{name}: batch {batch}: {losses:?}, not {expected:?}");
    }
    let own = model.named_parameters();
    assert_eq!(own.len(), peer.weights.len(), "{name}");
    for (fqn, parameter) in own {
        let whole = parameter.tensor().to_kind(Kind::Double);
        let norm = |of: &Tensor| of.norm().double_value(&[]);
        let factors = numbers(&whole.size(), 0.5);
        let product = (&whole * &factors).sum(Kind::Double).double_value(&[]);
        let (expected_norm, expected) = peer.weights[fqn.trim_start_matches("net.")];
        let limit = tolerance * expected_norm; // of the norm of the difference
        let found = format!("norm {}, not {expected_norm}; product {product}, not {expected}", norm(&whole));
        assert!((norm(&whole) - expected_norm).abs() <= limit, "{name}: {fqn}: {found}");
        assert!((product - expected).abs() <= limit * norm(&factors), "{name}: {fqn}: {found}");
    }
}

/// Makes each run of the fixture whose name contains `of`, with strategies made of the name.
fn make_runs(
    of: &str,
    folder: &Path,
    tolerance: f64,
    strategies: impl Fn(&str, f64) -> Vec<(DeepSpeedStrategy, &'static str)>,
) {
    let text = include_str!("../fixtures/deepspeed/losses.json");
    make_runs_of(text, false, of, folder, tolerance, strategies);
}

/// The same for the runs of this fixture; modules may leave the optimizer to the settings.
fn make_runs_of(
    text: &str,
    has_none: bool,
    of: &str,
    folder: &Path,
    tolerance: f64,
    strategies: impl Fn(&str, f64) -> Vec<(DeepSpeedStrategy, &'static str)>,
) {
    let peers: BTreeMap<String, Run> = serde_json::from_str(text).unwrap();
    let peers: Vec<_> = peers.into_iter().filter(|(name, _)| name.contains(of)).collect();
    assert!(!peers.is_empty(), "{of}");
    for (name, peer) in peers {
        let (window, clip) = if name.contains("window 2") { (2_u64, 0.3) } else { (1, 0.0) };
        for (strategy, precision) in strategies(&name, clip) {
            let builder = silent(2, "auto", folder).strategy(strategy).precision(precision);
            let builder = builder.accumulate_grad_batches(window);
            let (own, told) = (name.clone(), Mutex::default());
            if name.contains("mlp") {
                let loaders = in_order(numbers(&[24, 5], 3.0), numbers(&[24, 3], 4.0));
                compare(&own, &peer, builder, Mlp { net: Small::new(), has_none, told }, loaders, tolerance);
            } else {
                let all = (numbers(&[24, 17], 7.0) * 1000.0).to_kind(Kind::Int64).remainder(61);
                let (x, y) = (all.narrow(1, 0, 16).contiguous(), all.narrow(1, 1, 16).contiguous());
                compare(&own, &peer, builder, Gpt { net: gpt(), has_none, told }, in_order(x, y), tolerance);
            }
        }
    }
}

fn stage_of(name: &str) -> u64 {
    name.strip_prefix("stage ").and_then(|rest| rest[..1].parse().ok()).unwrap()
}

/// DeepSpeed's settings for a run of this name.
fn settings(name: &str, clip: f64, more: Value) -> DeepSpeedStrategy {
    let mut all = json!({
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": clip,
        "zero_allow_untested_optimizer": true,
        "zero_optimization": {"stage": stage_of(name), "stage3_param_persistence_threshold": 0},
    });
    all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    DeepSpeedStrategy::settings(all)
}

#[test]
fn bfloat16_is_deepspeeds() {
    on_ranks("peers::bfloat16_is_deepspeeds", 2, |_, folder| {
        make_runs(" bf16 ", folder, IN_HALF, |name, clip| {
            let mut more = json!({"bf16": {"enabled": true}});
            if name.contains("fp32_sums") {
                more["data_types"] = json!({"grad_accum_dtype": "fp32"});
            }
            match name.starts_with("stage") {
                true => vec![(settings(name, clip, more), "bf16-true")],
                false => vec![],
            }
        });
    });
}

/// The loss scale of the script.
fn fp16() -> Value {
    json!({"enabled": true, "initial_scale_power": 18, "loss_scale_window": 100, "hysteresis": 1})
}

#[test]
fn float16_is_deepspeeds() {
    on_ranks("peers::float16_is_deepspeeds", 2, |_, folder| {
        make_runs(" fp16 ", folder, IN_HALF, |name, clip| {
            vec![(settings(name, clip, json!({"fp16": fp16()})), "16-true")]
        });
    });
}

#[test]
fn weights_divided_by_module_are_fully_shards() {
    on_ranks("peers::weights_divided_by_module_are_fully_shards", 2, |_, folder| {
        for (of, tolerance, precision, bf16) in [
            ("fully_shard fp32", IN_FULL, "32-true", false),
            ("fully_shard bf16", IN_HALF, "bf16-true", true),
        ] {
            make_runs(of, folder, tolerance, |_, clip| {
                vec![(settings("stage 3", clip, json!({"bf16": {"enabled": bf16}})), precision)]
            });
        }
    });
}

/// DeepSpeed's Muon; see `muon_runs` of the script.
#[test]
fn muon_is_deepspeeds() {
    on_ranks("peers::muon_is_deepspeeds", 2, |_, folder| {
        let text = include_str!("../fixtures/deepspeed/muon_losses.json");
        for (of, precision, tolerance) in [
            (" fp32 gram ", "32-true", IN_FULL),
            (" fp32 standard ", "32-true", IN_HALF), // updates are in bfloat16
            (" bf16 gram ", "bf16-true", IN_HALF),
            (" bf16 standard ", "bf16-true", 1.5 * IN_HALF),
            (" fp16 ", "16-true", IN_HALF),
        ] {
            make_runs_of(text, true, of, folder, tolerance, |name, clip| {
                if name.starts_with("stage 2") && !runs_all() {
                    return vec![];
                }
                let method = if name.contains("gram") { "gram" } else { "standard" };
                let params = json!({"muon_lr": 0.02, "adam_lr": 0.01, "weight_decay": 0.1, "torch_adam": true, "ns_method": method});
                let mut more = json!({"optimizer": {"type": "Muon", "params": params}});
                match precision {
                    "bf16-true" => more["bf16"] = json!({"enabled": true}),
                    "16-true" => more["fp16"] = fp16(),
                    _ => {}
                }
                vec![(settings(name, clip, more), precision)]
            });
        }
    });
}

const IN_FULL: f64 = 5e-5;
const IN_HALF: f64 = 1.6e-2;

#[test]
fn float32_is_deepspeeds() {
    on_ranks("peers::float32_is_deepspeeds", 2, |_, folder| {
        make_runs("fp32 ", folder, IN_FULL, |name, clip| match name.starts_with("stage") {
            true => vec![(settings(name, clip, json!({})), "32-true")],
            false => vec![],
        });
    });
}
