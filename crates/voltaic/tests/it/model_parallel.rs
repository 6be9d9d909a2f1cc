//! Training with layers divided among ranks, beside replicas and ZeRO: the same as one process, and checkpoints that any mesh reads.

use std::path::{Path, PathBuf};

use serde_json::json;
use tempfile::TempDir;
use voltaic::checkpoint::Checkpoint;
use voltaic::data::DataModule;
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::parallel::{ColwiseParallel, ParallelPlan, RowwiseParallel};
use voltaic::nn::{Dropout, Embedding, Forward, LayerNorm, Linear, ModuleExt};
use voltaic::optim::{GradientClip, Optimizers, Sgd};
use voltaic::strategy::{DeepSpeedStrategy, ModelParallelStrategy};
use voltaic::trainer::{Fabric, TrainerBuilder};
use voltaic::{Kind, Module, Tensor};

use crate::checkpoints::resumed;
use crate::ddp::{FOLDER, builder, folder_of_parent, loaders, numbered};
use crate::probe::{own_process, plays, text_of};

/// A packed layer, a row-wise one, a norm that all have, and a table of a vocabulary.
#[derive(Module)]
#[module(parallel_plan = Self::plan)]
struct Net {
    packed: Linear,
    narrow: Linear,
    norm: LayerNorm,
    table: Embedding,
    head: Linear,
    dropout: Dropout,
}

impl Net {
    fn new(dropout: f64) -> Self {
        let net = Self {
            packed: Linear::new(5, 3 * 8).unwrap(),
            narrow: Linear::new(8, 6).unwrap(),
            norm: LayerNorm::new(6).unwrap(),
            table: Embedding::new(4, 6).unwrap(),
            head: Linear::new(6, 3).unwrap(),
            dropout: Dropout::new(dropout).unwrap(),
        };
        numbered(&net);
        net
    }

    fn plan(&self) -> ParallelPlan {
        ParallelPlan::new()
            .layer("packed", ColwiseParallel::default().parts(3).unit(4))
            .layer("narrow", RowwiseParallel::default().unit(4))
            .layer("table", RowwiseParallel::default())
    }

    fn loss(&self, x: &Tensor, y: &Tensor) -> anyhow::Result<Tensor> {
        let parts = self.packed.forward(x)?.chunk(3, -1);
        let hidden = self.narrow.forward(&(&parts[0] * parts[1].sigmoid() + &parts[2]))?;
        let index = x.select(1, 0).gt(0.0).to_kind(Kind::Int64) * 3;
        let hidden = self.dropout.forward(&(self.norm.forward(&hidden)? + self.table.forward(&index)?))?;
        Ok((self.head.forward(&hidden)? - y).square().mean(Kind::Float))
    }
}

impl LightningModule for Net {
    type Batch = (Tensor, Tensor);

    fn training_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let loss = self.loss(x, y)?;
        ctx.log("train_loss", &loss).on_epoch(true).sync_dist(true);
        Ok(loss)
    }

    /// Replicas have different numbers of batches.
    fn validation_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        ctx.log("val_loss", self.loss(x, y)?).sync_dist(true);
        Ok(())
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Sgd::new(0.05).momentum(0.9).into()
    }
}

/// `stage` of ZeRO beside two slices, or replicas of two slices.
fn meshed(folder: &Path, ranks: i64, stage: Option<u64>) -> TrainerBuilder {
    let builder = builder(folder).devices(ranks).gradient_clip_val(0.5);
    match stage {
        None => builder.strategy(ModelParallelStrategy::tensor_parallel_size(2)),
        Some(stage) => builder.strategy(DeepSpeedStrategy::settings(json!({
            "zero_optimization": {"stage": stage},
            "tensor_parallel": {"autotp_size": 2},
            "zero_allow_untested_optimizer": true,
        }))),
    }
}

/// The parts that processes play: ranks, and the stage of ZeRO.
const PARTS: [(&str, i64, Option<u64>); 5] = [
    ("replicas", 4, None),
    ("slices alone", 2, None),
    ("stage 1", 4, Some(1)),
    ("stage 2", 4, Some(2)),
    ("stage 3", 4, Some(3)),
];

fn saved(folder: &Path, part: &str, what: &str) -> PathBuf {
    folder.join(format!("{part} {what}.ckpt").replace(' ', "_"))
}

/// Two epochs and a checkpoint, then a third epoch; or the third one from the checkpoint of another part.
fn train(part: &str, ranks: i64, stage: Option<u64>, from: Option<&str>) {
    let folder = folder_of_parent();
    let of_checkpoint = from.map(|from| saved(&folder, from, "middle"));
    let builder =
        || meshed(&folder, ranks, stage).accumulate_grad_batches(if ranks == 2 { 2_u64 } else { 1 });
    let mut data = loaders(if ranks == 2 { Some(2) } else { None });
    let mut net = Net::new(0.0);
    let mut trainer = match &of_checkpoint {
        Some(path) => resumed(builder().max_epochs(3), Some(path)),
        None => builder().max_epochs(2).build().unwrap(),
    };
    assert_eq!((trainer.world().mesh().tp.size, trainer.world().mesh().dp.size), (2, ranks as usize / 2));
    trainer.fit(&mut net, &mut data).unwrap();
    assert_eq!(net.packed.weight.size(), [12, 5]);
    if from.is_none() {
        let path = saved(&folder, part, "middle");
        trainer.save_checkpoint(&mut net, &mut data, &path, None).unwrap();
        trainer = resumed(builder().max_epochs(3), Some(&path));
        trainer.fit(&mut net, &mut data).unwrap();
    }
    let name = from.map_or_else(|| part.to_owned(), |from| format!("{part} from {from}"));
    trainer.save_weights(&net, saved(&folder, &name, "end"), None).unwrap();
    let loss = trainer.metric("val_loss").unwrap();
    trainer.gather_weights(&net).unwrap();
    assert_eq!((net.packed.weight.size(), net.table.weight.size()), (vec![24, 5], vec![4, 6]));
    let whole = net.loss(&crate::ddp::numbers(&[2, 5], 0.0), &crate::ddp::numbers(&[2, 3], 1.0)).unwrap();
    println!("\nval_loss={loss} whole={}", whole.double_value(&[]));
}

fn assert_close(what: &str, path: &Path, expected: &[(String, Tensor)]) {
    let own = Checkpoint::load(path).unwrap().weights;
    assert_eq!(own.len(), expected.len(), "{what}");
    for (name, expected) in expected {
        let own = &own.iter().find(|(own, _)| own == name).unwrap_or_else(|| panic!("{what}: no {name}")).1;
        let difference = (own - expected).abs().max().double_value(&[]);
        assert!(difference < 1e-5, "{what}: {name} differs by {difference}");
    }
}

/// Trains by these parts, goes on from their checkpoints in one process and by other parts, and compares all with one process.
fn compare_with_one_process(parts: &[&str], others: &[(&str, &str)]) {
    for (part, ranks, stage) in PARTS {
        if plays(part) {
            return train(part, ranks, stage, None);
        }
        for (from, ..) in PARTS {
            if plays(&format!("{part} from {from}")) {
                return train(part, ranks, stage, Some(from));
            }
        }
    }
    let folder = TempDir::new().unwrap();
    let alone = |from: Option<&Path>| {
        let _rng = crate::rng::seeded(1);
        let builder = builder(folder.path()).gradient_clip_val(0.5);
        let mut trainer = resumed(builder.max_epochs(3).accumulate_grad_batches(2_u64), from);
        let mut net = Net::new(0.0);
        trainer.fit(&mut net, &mut loaders(Some(2))).unwrap();
        (net.state_dict(), trainer.metric("val_loss").unwrap())
    };
    let (expected, val_loss) = alone(None);
    let run = |part: &str| text_of(&own_process(part).env(FOLDER, folder.path()).output().unwrap());
    for part in parts {
        let text = run(part);
        let own =
            text.lines().find_map(|line| line.strip_prefix("val_loss=")?.split(' ').next()?.parse().ok());
        let own: f64 = own.unwrap_or_else(|| panic!("{text}"));
        assert!((own - val_loss).abs() < 1e-5, "{part}: {own} {val_loss}");
        assert_close(part, &saved(folder.path(), part, "end"), &expected);
        let one_process = alone(Some(&saved(folder.path(), part, "middle")));
        for ((name, own), (_, expected)) in one_process.0.iter().zip(&expected) {
            let difference = (own - expected).abs().max().double_value(&[]);
            assert!(difference < 1e-5, "one process from {part}: {name} differs by {difference}");
        }
    }
    for (part, from) in others {
        let name = format!("{part} from {from}");
        run(&name);
        assert_close(&name, &saved(folder.path(), &name, "end"), &expected);
    }
}

#[test]
fn meshes_of_slices_train_as_one_process_and_read_each_others_checkpoints() {
    compare_with_one_process(&["replicas", "stage 3"], &[("slices alone", "stage 3")]);
}

#[test]
#[ignore = "repeats meshes_of_slices_train_as_one_process_and_read_each_others_checkpoints with other stages"]
fn all_stages_beside_slices_train_as_one_process() {
    let others = [("stage 3", "replicas"), ("slices alone", "stage 2"), ("replicas", "stage 1")];
    compare_with_one_process(&PARTS.map(|(part, ..)| part), &others);
}

/// Precisions of 16 bits, on the CPU and on emulated cards.
const NARROW: [(&str, &str, &str, Option<u64>); 3] = [
    ("autocast", "cpu", "bf16-mixed", None),
    ("bfloat16", "cpu", "bf16-true", Some(2)),
    ("float16 on cards", "hpu", "16-true", Some(3)),
];

/// Ranks that have slices of the same layers keep what they all have the same, to the last bit.
#[test]
fn sixteen_bits_train_beside_slices() {
    for (part, accelerator, precision, stage) in NARROW {
        if plays(part) {
            let builder = meshed(&folder_of_parent(), 4, stage).accelerator(accelerator).precision(precision);
            let mut trainer = builder.max_epochs(2).build().unwrap();
            let mut net = Net::new(0.0);
            trainer.fit(&mut net, &mut loaders(None)).unwrap();
            let own = net.norm.weight.as_ref().unwrap().detach().to_device(tch::Device::Cpu);
            let all = trainer.world().group().unwrap().all_gather(&own).unwrap();
            assert!((1..4).all(|rank| all.get(rank).equal(&all.get(0))), "{part}");
            return println!("\nval_loss={}", trainer.metric("val_loss").unwrap());
        }
    }
    let folder = TempDir::new().unwrap();
    let expected = {
        let _rng = crate::rng::seeded(1);
        let builder = builder(folder.path()).max_epochs(2).gradient_clip_val(0.5);
        let mut trainer = builder.accumulate_grad_batches(2_u64).build().unwrap();
        trainer.fit(&mut Net::new(0.0), &mut loaders(Some(2))).unwrap();
        trainer.metric("val_loss").unwrap()
    };
    for (part, ..) in NARROW {
        let mut process = own_process(part);
        process.env(FOLDER, folder.path()).env("VOLTAIC_HPU", "emulator").env("VOLTAIC_HPU_DEVICES", "4");
        let text = text_of(&process.output().unwrap());
        let own = text.lines().find_map(|line| line.strip_prefix("val_loss=")?.parse().ok());
        let own: f64 = own.unwrap_or_else(|| panic!("{text}"));
        assert!((own - expected).abs() < 0.03 * expected, "{part}: {own} {expected}");
    }
}

/// A loop of one's own, with a checkpoint that it reads back, is the trainer's.
#[test]
fn a_loop_of_ones_own_trains_beside_slices() {
    if !plays("fabric") {
        let folder = TempDir::new().unwrap();
        let text = text_of(&own_process("fabric").env(FOLDER, folder.path()).output().unwrap());
        return assert!(text.contains("rank 0 is done"), "{text}");
    }
    let folder = folder_of_parent();
    let mut trainer = meshed(&folder, 2, None).limit_val_batches(0).max_epochs(2).build().unwrap();
    let mut expected = Net::new(0.0);
    trainer.fit(&mut expected, &mut loaders(None)).unwrap();
    let strategy = ModelParallelStrategy::tensor_parallel_size(2);
    let builder = Fabric::builder().devices(2_i64).strategy(strategy).default_root_dir(&folder);
    let mut fabric = builder.launch().unwrap();
    let sgd = Sgd::new(0.05).momentum(0.9);
    let (mut net, mut optimizer) = fabric.setup(Net::new(0.0), sgd).unwrap();
    let loader = fabric.setup_dataloaders(loaders(None).train_dataloader().unwrap().unwrap()).unwrap();
    for epoch in 0..2 {
        for batch in loader.epoch(epoch).unwrap() {
            let (x, y) = batch.unwrap();
            let loss = fabric.forward(&net, |net| net.loss(&x, &y)).unwrap();
            fabric.backward(&net, &loss).unwrap();
            fabric.clip_gradients(&mut optimizer, GradientClip::Norm(0.5)).unwrap();
            assert!(fabric.step(&mut optimizer).unwrap());
            optimizer.zero_grad().unwrap();
        }
        if epoch == 0 {
            let path = folder.join("fabric.ckpt");
            fabric.save(&path, (&mut net, &mut optimizer), &7_u64).unwrap();
            assert_eq!(fabric.load::<_, u64>(&path, (&mut net, &mut optimizer)).unwrap(), 7);
        }
    }
    let rank = fabric.world().rank;
    let net = fabric.finish(net).unwrap();
    for ((name, own), (_, expected)) in net.state_dict().iter().zip(&expected.state_dict()) {
        assert!(own.equal(expected), "{name} differs by {}", (own - expected).abs().max());
    }
    println!("\nrank {rank} is done");
}

/// What layers drop at random is the same on the ranks that have slices of the same layers, also if these were seeded apart.
#[test]
fn ranks_with_slices_drop_the_same() {
    if plays("drops") {
        let folder = folder_of_parent();
        let mut trainer = meshed(&folder, 2, None).max_epochs(1).build().unwrap();
        voltaic::ffi::manual_seed(trainer.world().rank as u64).unwrap();
        let mut net = Net::new(0.5);
        trainer.fit(&mut net, &mut loaders(Some(2))).unwrap();
        let own = net.norm.weight.as_ref().unwrap().detach();
        let group = trainer.world().group().unwrap().clone();
        let all = group.all_gather(&own).unwrap();
        assert!(all.get(0).equal(&all.get(1)), "{}", (all.get(0) - all.get(1)).abs().max());
        println!("\ndone");
        return;
    }
    let folder = TempDir::new().unwrap();
    assert_contains!(text_of(&own_process("drops").env(FOLDER, folder.path()).output().unwrap()), "done");
}
