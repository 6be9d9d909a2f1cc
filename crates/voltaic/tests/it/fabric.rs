//! A loop of one's own with `Fabric` trains what the trainer trains, bit for bit, and resumes where it was saved.

use std::path::Path;

use tempfile::TempDir;
use voltaic::Tensor;
use voltaic::checkpoint::Checkpoint;
use voltaic::data::{DataModule, EpochRange};
use voltaic::nn::{CheckpointStats, ModuleExt};
use voltaic::optim::{AdamW, GradientClip};
use voltaic::strategy::StrategyConfig;
use voltaic::trainer::{ActivationCheckpointing, Fabric};

use crate::ddp::{FOLDER, Net, assert_same, builder, folder_of_parent, loaders, run_ranks, weights};
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
