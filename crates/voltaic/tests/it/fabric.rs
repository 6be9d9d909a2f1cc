//! A loop of one's own with `Fabric` trains what the trainer trains, bit for bit, and resumes where it was saved.

use std::collections::HashMap;
use std::path::Path;

use tempfile::TempDir;
use voltaic::callback::{ModelCheckpoint, ModelCheckpointConfig};
use voltaic::checkpoint::Checkpoint;
use voltaic::data::{DataLoader, DataModule, EpochRange, TensorDataset};
use voltaic::distributed::ReduceOp;
use voltaic::logger::{CsvLogger, CsvLoggerConfig, Version};
use voltaic::nn::{Callable, CheckpointStats, Forward, Linear, ModuleExt};
use voltaic::optim::{AdamW, GradientClip, Sgd};
use voltaic::precision::autocast_enabled;
use voltaic::strategy::{DeepSpeedStrategy, StrategyConfig};
use voltaic::trainer::{ActivationCheckpointing, Fabric, FabricDataLoader, seed_everything};
use voltaic::{Device, Kind, Module, Tensor};

use crate::checkpoints::resumed;
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
            for batch in loader.iter(fabric.position()).unwrap() {
                let (x, y) = batch.unwrap();
                done += 1;
                let steps =
                    (done % num_batches).is_multiple_of(self.accumulate) || done.is_multiple_of(num_batches);
                let loss = fabric.forward(&net, |net| net.train_loss(&x, &y)).unwrap();
                let loss = loss / self.accumulate as f64;
                fabric.no_backward_sync(!steps, |fabric| fabric.backward(&net, &loss)).unwrap();
                if steps {
                    let norm =
                        fabric.clip_gradients(&mut optimizer, GradientClip::Norm(CLIP)).unwrap().unwrap();
                    let norms = fabric.all_gather(norm).unwrap();
                    assert!(norms.min().double_value(&[]) > 0.0 && norms.min() == norms.max(), "{norms}");
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
    let mut all = Checkpoint::load(folder.join("rank_1.ckpt")).unwrap().weights;
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

/// Each resumes from the file of the other at the right batch, also at the end of an epoch.
#[test]
fn the_trainer_and_a_loop_go_on_from_each_others_files() {
    let _rng = crate::rng::seeded(0);
    let folder = TempDir::new().unwrap();
    let with_trainer = |saves_at: u64, from: Option<&Path>| {
        let config = ModelCheckpointConfig {
            dirpath: Some(folder.path().to_path_buf()),
            filename: Some("trainer".to_owned()),
            every_n_train_steps: Some(saves_at),
            save_top_k: -1,
            ..ModelCheckpointConfig::default()
        };
        let saver = ModelCheckpoint::new(config).unwrap();
        let builder = builder(folder.path()).enable_checkpointing(true).callback(saver).limit_val_batches(0);
        let mut net = Net::new();
        resumed(builder.max_epochs(2), from).fit(&mut net, &mut loaders(None)).unwrap();
        net.state_dict()
    };
    // gradients stay until the next backward pass
    let with_fabric = |saves_at: u64, from: Option<&Path>| {
        let mut fabric = Fabric::builder().devices(1).launch().unwrap();
        let (mut net, mut optimizer) = fabric.setup(Net::new(), AdamW::new(0.01)).unwrap();
        let loader = fabric.setup_dataloaders(loaders(None).train_dataloader().unwrap().unwrap()).unwrap();
        if let Some(from) = from {
            let state: Option<u64> = fabric.load(from, (&mut net, &mut optimizer)).unwrap();
            assert_eq!((state, fabric.global_step()), (None, saves_at));
            let (epoch, batch) = (saves_at / 12, saves_at % 12);
            assert_eq!(fabric.position(), EpochRange::epoch(epoch).from_batch(batch as usize));
        }
        while fabric.global_step() < 24 {
            for batch in loader.iter(fabric.position()).unwrap() {
                let (x, y) = batch.unwrap();
                let loss = fabric.forward(&net, |net| net.train_loss(&x, &y)).unwrap();
                optimizer.zero_grad().unwrap();
                fabric.backward(&net, &loss).unwrap();
                fabric.step(&mut optimizer).unwrap();
                if from.is_none() && fabric.global_step() == saves_at {
                    fabric.save(folder.path().join("fabric.ckpt"), (&mut net, &mut optimizer), &1).unwrap();
                }
            }
        }
        fabric.finish(net).unwrap().state_dict()
    };
    for saves_at in [17, 12] {
        let expected = with_trainer(saves_at, None);
        assert_same(&with_fabric(saves_at, Some(&folder.path().join("trainer.ckpt"))), &expected);
        assert_same(&with_fabric(saves_at, None), &expected);
        assert_same(&with_trainer(saves_at, Some(&folder.path().join("fabric.ckpt"))), &expected);
        std::fs::remove_file(folder.path().join("trainer.ckpt")).unwrap();
    }
}

#[test]
fn clipping_gives_the_norm_and_a_graph_can_be_retained() {
    let mut fabric = Fabric::builder().devices(1).launch().unwrap();
    let (net, mut optimizer) = fabric.setup(Net::new(), AdamW::new(0.01)).unwrap();
    let (x, y) = (numbers(&[4, 5], 0.5), numbers(&[4, 3], 0.1));
    let loss = fabric.forward(&net, |net| net.train_loss(&x, &y)).unwrap();
    let norm = || -> f64 {
        let squares = net.parameters().into_iter().map(|parameter| {
            parameter.grad().to_kind(Kind::Double).square().sum(Kind::Double).double_value(&[])
        });
        squares.sum::<f64>().sqrt()
    };
    fabric.backward_retaining_graph(&net, &loss).unwrap();
    let once = norm();
    fabric.backward(&net, &loss).unwrap();
    assert!((norm() - 2.0 * once).abs() < 1e-5 * once, "{} {once}", norm());
    assert!(fabric.backward(&net, &loss).unwrap_err().to_string().contains("freed"));
    assert!(fabric.clip_gradients(&mut optimizer, GradientClip::Value(1e3)).unwrap().is_none());
    let given = fabric.clip_gradients(&mut optimizer, GradientClip::Norm(0.1)).unwrap().unwrap();
    assert!((given.double_value(&[]) - 2.0 * once).abs() < 1e-5 * once, "{given} {once}");
    assert!((norm() - 0.1).abs() < 1e-5, "{}", norm());
}

/// What each rank does beside the loop.
#[test]
fn ranks_exchange_collections_and_share_files_of_weights() {
    if plays("ranks") {
        let folder = folder_of_parent();
        let builder = Fabric::builder().devices(2_i64).strategy("zero2").default_root_dir(&folder);
        let mut fabric = builder.launch().unwrap();
        let (mut net, _) = fabric.setup(Net::new(), AdamW::new(0.01)).unwrap();
        let rank = fabric.global_rank();
        assert_eq!((fabric.strategy(), fabric.loggers().len(), rank), ("zero2", 0, fabric.world().rank));
        let own = Tensor::from(rank as f32 + 1.0);
        let values = (own.shallow_clone(), vec![own.shallow_clone(), &own * 10.0]);
        let values = fabric.to_device(values).unwrap();
        let (sum, list) = fabric.all_reduce(values, ReduceOp::Sum).unwrap();
        assert_eq!([&sum, &list[0], &list[1]].map(|sum| sum.double_value(&[])), [3.0, 3.0, 30.0]);
        let named = HashMap::from([("b".to_owned(), &own * 2.0), ("a".to_owned(), own)]);
        let named = fabric.all_gather(named).unwrap();
        assert_eq!([&named["a"], &named["b"]].map(f64s), [[1.0, 2.0], [2.0, 4.0]]);
        let file = folder.join("first.txt");
        let is_there = fabric.rank_zero_first(false, || {
            let is_there = file.exists();
            if !is_there {
                std::thread::sleep(std::time::Duration::from_millis(300));
                std::fs::write(&file, "here")?;
            }
            Ok(is_there)
        });
        assert_eq!(is_there.unwrap(), rank == 1);
        let failed = fabric.rank_zero_first(true, || match rank {
            0 => anyhow::bail!("no such corpus"),
            _ => Ok(()),
        });
        assert!(failed.unwrap_err().to_string().contains("no such corpus"));
        let path = folder.join("first.ckpt");
        fabric.save_weights_if(&net, &path, &|fqn| fqn.starts_with("first")).unwrap();
        let copies = |net: &Net| -> Vec<_> {
            net.state_dict().into_iter().map(|(name, tensor)| (name, tensor.copy())).collect()
        };
        let before = copies(&net);
        for parameter in net.parameters() {
            parameter.set_data(&parameter.tensor().zeros_like()).unwrap();
        }
        assert_error!(fabric.load_weights(&path, &mut net, true), "missing second.weight");
        let keys = fabric.load_weights(&path, &mut net, false).unwrap();
        assert_eq!(keys.missing_keys, ["seen", "second.weight", "second.bias"]);
        for ((name, own), (_, before)) in copies(&net).iter().zip(&before) {
            assert_eq!(own.equal(before), name.starts_with("first") || name == "seen", "{name}");
        }
        return;
    }
    let folder = TempDir::new().unwrap();
    run_ranks("ranks", folder.path());
}

fn f64s(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(&tensor.to_kind(Kind::Double)).unwrap()
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut fabric = Fabric::builder().devices(1).launch().unwrap();
    let (mut net, mut optimizer) = fabric.setup(Net::new(), AdamW::new(0.01)).unwrap();
    assert_error!(fabric.setup(Net::new(), AdamW::new(0.01)), "a second module");
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("a.ckpt");
    fabric.save(&path, (&mut net, &mut optimizer), &"seven").unwrap();
    assert_error!(fabric.load::<_, u64>(&path, (&mut net, &mut optimizer)), "a.ckpt", "expected u64");
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
        fabric.log_dict([("loss", step as f64)], step).unwrap();
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

/// Weights that stay sharded after a fit of the trainer.
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
