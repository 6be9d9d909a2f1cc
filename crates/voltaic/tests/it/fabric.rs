//! A loop of one's own with `Fabric` trains what the trainer trains, bit for bit, and resumes where it was saved.

use std::path::Path;

use tempfile::TempDir;
use voltaic::checkpoint::Checkpoint;
use voltaic::data::{DataLoader, DataModule, EpochRange, TensorDataset};
use voltaic::logger::{CsvLogger, CsvLoggerConfig, Version};
use voltaic::nn::{Callable, CheckpointStats, Forward, Linear, ModuleExt};
use voltaic::optim::{AdamW, GradientClip, Sgd};
use voltaic::precision::autocast_enabled;
use voltaic::strategy::{DeepSpeedStrategy, StrategyConfig};
use voltaic::trainer::{ActivationCheckpointing, Fabric, FabricDataLoader, seed_everything};
use voltaic::{Device, Kind, Module, Tensor};

use crate::ddp::{FOLDER, Net, assert_same, builder, folder_of_parent, loaders, numbers, run_ranks, weights};
use crate::probe::plays;

const EPOCHS: u64 = 3;
const CLIP: f64 = 0.2;

struct Case {
    strategy: &'static str,
    devices: i64,
    precision: &'static str,
    accumulate: u64,
    /// Of the fabric alone: it changes no bit.
    activations: &'static str,
}

const CASES: [Case; 4] = [
    Case {
        strategy: "single_device",
        devices: 1,
        precision: "bf16-mixed",
        accumulate: 2,
        activations: r#"{"modules": ["Linear"], "save": ["matmul"]}"#,
    },
    Case {
        strategy: "ddp",
        devices: 2,
        precision: "32-true",
        accumulate: 2,
        activations: r#"{"modules": ["Linear"], "budget": 100}"#,
    },
    Case {
        strategy: "zero2",
        devices: 2,
        precision: "bf16-true",
        accumulate: 2,
        activations: r#"{"modules": ["second"], "mode": "offload"}"#,
    },
    Case {
        strategy: "zero3",
        devices: 2,
        precision: "bf16-mixed",
        accumulate: 1,
        activations: r#"["first"]"#,
    },
];

impl Case {
    fn name(&self, role: &str) -> String {
        format!("{role} {} {}", self.strategy, self.precision)
    }

    fn with_trainer(&self, folder: &Path) {
        let mut trainer = builder(folder)
            .devices(self.devices)
            .strategy(StrategyConfig::from(self.strategy))
            .precision(self.precision)
            .accumulate_grad_batches(self.accumulate)
            .gradient_clip_val(CLIP)
            .max_epochs(EPOCHS as i64)
            .limit_val_batches(0)
            .build()
            .unwrap();
        let mut net = Net::new();
        trainer.fit(&mut net, &mut loaders(None)).unwrap();
        end(&net, trainer.world().rank, folder);
    }

    /// Trains from a checkpoint if there is one, up to a batch, after which it saves one.
    fn with_fabric(&self, folder: &Path, ends_after: Option<u64>) {
        let activations: ActivationCheckpointing = serde_json::from_str(self.activations).unwrap();
        let before = CheckpointStats::of_thread();
        let mut fabric = Fabric::builder()
            .devices(self.devices)
            .strategy(StrategyConfig::from(self.strategy))
            .precision(self.precision)
            .activation_checkpointing(activations.clone())
            .default_root_dir(folder)
            .launch()
            .unwrap();
        let (mut net, mut optimizer) = fabric.setup(Net::new(), AdamW::new(0.01)).unwrap();
        let loader = fabric.setup_dataloaders(loaders(None).train_dataloader().unwrap().unwrap()).unwrap();
        let num_batches = loader.num_batches() as u64;
        let ckpt = folder.join("fabric.ckpt");
        let mut done = 0_u64;
        if ckpt.exists() {
            // what was done before is gone after it
            let (x, y) = loader.epoch(0).unwrap().next().unwrap().unwrap();
            let loss = fabric.forward(&net, |net| net.train_loss(&x, &y)).unwrap();
            fabric.no_backward_sync(true, |fabric| fabric.backward(&net, &loss)).unwrap();
            done = fabric.load(&ckpt, (&mut net, &mut optimizer)).unwrap();
        }
        while done < EPOCHS * num_batches {
            let (epoch, first) = (done / num_batches, done % num_batches);
            for batch in loader.iter(EpochRange::epoch(epoch).from_batch(first as usize)).unwrap() {
                let (x, y) = batch.unwrap();
                done += 1;
                let steps =
                    (done % num_batches).is_multiple_of(self.accumulate) || done.is_multiple_of(num_batches);
                let loss = fabric.forward(&net, |net| net.train_loss(&x, &y)).unwrap();
                let loss = loss / self.accumulate as f64;
                fabric.no_backward_sync(!steps, |fabric| fabric.backward(&net, &loss)).unwrap();
                if steps {
                    fabric.clip_gradients(&mut optimizer, GradientClip::Norm(CLIP)).unwrap();
                    assert!(fabric.step(&mut optimizer).unwrap());
                    optimizer.zero_grad().unwrap();
                }
                if ends_after == Some(done) {
                    return fabric.save(&ckpt, (&mut net, &mut optimizer), &done).unwrap();
                }
            }
        }
        let recomputed = CheckpointStats::of_thread().recomputed - before.recomputed;
        assert_eq!(recomputed == 0, self.activations.contains("offload"), "{recomputed} are recomputed");
        assert_eq!(fabric.global_step(), EPOCHS * num_batches.div_ceil(self.accumulate));
        let rank = fabric.world().rank;
        end(&fabric.finish(net).unwrap(), rank, folder);
    }
}

fn end(net: &Net, rank: usize, folder: &Path) {
    let name = if rank == 0 { "end.ckpt".to_owned() } else { format!("rank_{rank}.ckpt") };
    let checkpoint = Checkpoint { weights: net.state_dict(), ..Checkpoint::default() };
    checkpoint.save(&folder.join(name)).unwrap();
}

/// What rank 1 has, with the buffer that becomes rank 0's when an accumulation window begins.
fn of_rank_1(folder: &Path) -> Vec<(String, Tensor)> {
    let mut all = Checkpoint::load(&folder.join("rank_1.ckpt")).unwrap().weights;
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

#[test]
fn a_loop_of_ones_own_trains_what_the_trainer_trains() {
    for case in &CASES {
        if plays(&case.name("trainer")) {
            return case.with_trainer(&folder_of_parent());
        }
        if plays(&case.name("fabric")) {
            return case.with_fabric(&folder_of_parent(), None);
        }
        if plays(&case.name("first")) {
            return case.with_fabric(&folder_of_parent(), Some(9)); // within an accumulation window
        }
    }
    if std::env::var_os(FOLDER).is_some() {
        return;
    }
    for case in &CASES {
        let run = |role: &str, folder: &TempDir| {
            run_ranks(&case.name(role), folder.path());
        };
        let (of_trainer, of_fabric, resumed) =
            (TempDir::new().unwrap(), TempDir::new().unwrap(), TempDir::new().unwrap());
        run("trainer", &of_trainer);
        run("fabric", &of_fabric);
        assert_same(&weights(of_fabric.path()), &weights(of_trainer.path()));
        run("first", &resumed);
        assert!(!resumed.path().join("end.ckpt").exists());
        run("fabric", &resumed);
        assert_same(&weights(resumed.path()), &weights(of_trainer.path()));
        if case.devices > 1 {
            assert_same(&of_rank_1(of_fabric.path()), &of_rank_1(of_trainer.path()));
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut fabric = Fabric::builder().devices(1).launch().unwrap();
    let (mut net, mut optimizer) = fabric.setup(Net::new(), AdamW::new(0.01)).unwrap();
    let error = fabric.setup(Net::new(), AdamW::new(0.01)).err().unwrap().to_string();
    assert!(error.contains("a second module"), "{error}");
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("a.ckpt");
    fabric.save(&path, (&mut net, &mut optimizer), &"seven").unwrap();
    let error = fabric.load::<_, u64>(&path, (&mut net, &mut optimizer)).unwrap_err().to_string();
    assert!(error.contains("a.ckpt") && error.contains("expected u64"), "{error}");
    assert_eq!(fabric.load::<_, String>(&path, (&mut net, &mut optimizer)).unwrap(), "seven");
    let error = fabric.forward(&net, |_| -> anyhow::Result<()> { panic!("no such layer") }).unwrap_err();
    assert!(
        error.to_string().contains("forward") && format!("{error:?}").contains("no such layer"),
        "{error:?}"
    );
}

#[test]
fn a_name_of_no_module_is_refused_by_fabric() {
    let mut fabric = Fabric::builder().activation_checkpointing(["Liner"]).launch().unwrap();
    let error = fabric.setup(Net::new(), AdamW::new(0.01)).err().unwrap().to_string();
    assert!(error.contains("`Liner` is neither the type nor the fqn of a module"), "{error}");
}

fn lines_of(folder: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(folder.join("lightning_logs/mine/metrics.csv")).unwrap();
    text.lines().map(ToOwned::to_owned).collect()
}

/// One process saves and fails; another resumes.
#[test]
fn a_loaded_loop_has_the_rows_and_the_order_of_the_one_before() {
    let folder = TempDir::new().unwrap();
    let ckpt = folder.path().join("loop.ckpt");
    let start = |seed: u64| {
        let version = Some(Version::Name("mine".into()));
        let config = CsvLoggerConfig { version, plots: false, ..Default::default() };
        let logger = CsvLogger::from_config(config, folder.path());
        let mut fabric = Fabric::builder().devices(1).with_logger(logger).launch().unwrap();
        seed_everything(seed).unwrap();
        let net = fabric.setup(Net::new(), AdamW::new(0.01)).unwrap();
        let dataset = TensorDataset::new(Tensor::arange(50, (Kind::Float, tch::Device::Cpu))).unwrap();
        let loader = DataLoader::new(dataset).batch_size(50).shuffle(true).build().unwrap();
        (fabric.setup_dataloaders(loader).unwrap(), fabric, net)
    };
    let order = |loader: &FabricDataLoader<Tensor>| {
        Vec::<f32>::try_from(loader.epoch(3).unwrap().next().unwrap().unwrap()).unwrap()
    };
    let (loader, mut fabric, (mut net, mut optimizer)) = start(1);
    let expected = order(&loader);
    for step in 0..4 {
        fabric.log("loss", step as f64, step).unwrap();
        if step == 2 {
            fabric.save(&ckpt, (&mut net, &mut optimizer), &step).unwrap();
        }
    }
    drop(fabric); // as an error does that leaves main
    assert_eq!(lines_of(folder.path()), ["loss,step", "0,0", "1,1", "2,2", "3,3"]);
    let (loader, mut fabric, (mut net, mut optimizer)) = start(2);
    assert_ne!(order(&loader), expected);
    assert_eq!(fabric.load::<_, u64>(&ckpt, (&mut net, &mut optimizer)).unwrap(), 2);
    assert_eq!(order(&loader), expected);
    fabric.log("loss", 30.0, 3).unwrap();
    fabric.finish(net).unwrap();
    assert_eq!(lines_of(folder.path()), ["loss,step", "0,0", "1,1", "2,2", "30,3"]);
}

/// DeepSpeed's engine clips and steps its schedule within its step.
#[test]
fn settings_of_deepspeed_count_in_a_step() {
    let settings = serde_json::json!({
        "gradient_clipping": 0.01,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1.0, "warmup_type": "linear"}},
        "zero_optimization": {"stage": 1},
    });
    let strategy = DeepSpeedStrategy::settings(settings);
    let mut fabric = Fabric::builder().devices(1).strategy(strategy).launch().unwrap();
    let (net, mut optimizer) = fabric.setup(Net::new(), Sgd::new(1.0)).unwrap();
    let x = numbers(&[4, 5], 0.5);
    let mut rates = Vec::new();
    for step in 0..5 {
        let before: Vec<Tensor> = net.parameters().iter().map(|p| p.tensor().detach().copy()).collect();
        let loss = fabric.forward(&net, |net| net.train_loss(&x, &numbers(&[4, 3], 0.1))).unwrap();
        fabric.backward(&net, &loss).unwrap();
        let lr = optimizer[0].param_groups()[0].lr;
        assert!(fabric.step(&mut optimizer).unwrap());
        optimizer.zero_grad().unwrap();
        let squares = net
            .parameters()
            .iter()
            .zip(&before)
            .map(|(p, before)| {
                f64::try_from((p.tensor().detach() - before).square().sum(None::<Kind>)).unwrap()
            })
            .sum::<f64>();
        assert!((squares.sqrt() - 0.01 * lr).abs() <= 1e-3 * 0.01, "step {step}: {} of {lr}", squares.sqrt());
        rates.push(lr);
    }
    assert!(rates[1..].is_sorted_by(|a, b| a < b), "{rates:?}"); // the first two are 0, as DeepSpeed's
    fabric.finish(net).unwrap();
}

/// Weights that stay divided after a fit of the trainer.
#[test]
fn a_finished_module_is_whole() {
    if plays("deferred") {
        let folder = folder_of_parent();
        let builder = Fabric::builder().devices(2_i64).strategy("zero3").default_root_dir(&folder);
        let mut fabric = builder.launch().unwrap();
        let net = voltaic::nn::init::deferred(Net::without_values).unwrap();
        let (net, _) = fabric.setup(net, AdamW::new(0.01)).unwrap();
        fabric.save_weights(&net, folder.join("weights.ckpt")).unwrap();
        let rank = fabric.world().rank;
        return end(&fabric.finish(net).unwrap(), rank, &folder);
    }
    let folder = TempDir::new().unwrap();
    run_ranks("deferred", folder.path());
    let expected = weights(folder.path());
    assert!(expected.iter().any(|(_, tensor)| tensor.numel() == 80), "{expected:?}");
    let mut of_rank_1 = of_rank_1(folder.path());
    of_rank_1.retain(|(name, _)| name != "seen");
    assert_same(&of_rank_1, &expected);
    assert!(folder.path().join("weights.ckpt").exists());
}

#[derive(Module)]
struct Pair {
    first: Linear,
    second: Linear,
}

impl Pair {
    fn new() -> Self {
        let net = Self { first: Linear::new(5, 16).unwrap(), second: Linear::new(16, 3).unwrap() };
        crate::ddp::numbered(&net);
        net
    }
}

impl Forward for Pair {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        self.second.call(&self.first.call(x)?.f_relu()?)
    }
}

/// A call of the module, or of a layer, outside of `forward` has the fabric's precision; other modules have their own.
#[test]
fn calls_outside_of_forward_are_in_the_precision() {
    let _rng = crate::rng::seeded(0);
    for activations in ["[]", r#"["first"]"#] {
        let fabric = Fabric::builder().accelerator("cpu").precision("bf16-mixed");
        let checkpoints: ActivationCheckpointing = serde_json::from_str(activations).unwrap();
        let mut fabric = fabric.activation_checkpointing(checkpoints).launch().unwrap();
        let (net, mut optimizers) = fabric.setup(Pair::new(), Sgd::new(0.1)).unwrap();
        let other = Pair::new();
        let x = numbers(&[4, 5], 0.0);
        let within = fabric.forward(&net, |net| net.call(&x)).unwrap();
        let mut grads = |fabric: &mut Fabric, out: &Tensor| {
            optimizers.zero_grad().unwrap();
            fabric.backward(&net, &out.square().mean(Kind::Float)).unwrap();
            net.parameters().iter().map(|parameter| parameter.grad().copy()).collect::<Vec<_>>()
        };
        let expected = grads(&mut fabric, &within);
        let outside = net.call(&x).unwrap();
        assert_eq!((within.kind(), outside.kind()), (Kind::BFloat16, Kind::BFloat16));
        assert!(outside.equal(&within) && grads(&mut fabric, &outside) == expected, "{activations}");
        assert_eq!(net.first.call(&x).unwrap().kind(), Kind::BFloat16);
        assert_eq!(other.call(&x).unwrap().kind(), Kind::Float);
        let plain = fabric.forward(&net, |net| {
            let _off = autocast_enabled(Device::Cpu, Kind::BFloat16, false)?;
            net.call(&x)
        });
        assert_eq!(plain.unwrap().kind(), Kind::Float, "forward's body decides for itself");
        drop(fabric);
        assert_eq!(net.call(&x).unwrap().kind(), Kind::Float);
    }
}
