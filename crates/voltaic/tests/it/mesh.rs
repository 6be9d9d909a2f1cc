//! Ranks as a mesh: data is split, and gradients and metrics are averaged, over the data-parallel ranks only.

use std::path::Path;

use tempfile::TempDir;
use voltaic::callback::Callback;
use voltaic::checkpoint::Checkpoint;
use voltaic::distributed::{DeviceMesh, ParallelDims, ReduceOp, World};
use voltaic::module::{HookContext, LightningModule, ReduceFx, StepContext};
use voltaic::nn::{Forward, Linear, ModuleExt, Parameter};
use voltaic::optim::{Optimizers, Sgd};
use voltaic::strategy::{Ddp, DdpConfig, Strategy};
use voltaic::trainer::TrainerBuilder;
use voltaic::{Kind, Module, Tensor};

use crate::ddp::{FOLDER, builder, folder_of_parent, loaders, numbered, numbers};
use crate::probe::{own_process, plays, text_of};

const DIMS: ParallelDims = ParallelDims { pp: 1, dp_replicate: 2, dp_shard: 1, tp: 2 };
const HIDDEN: i64 = 16;

/// Two layers; of the hidden features each rank along `tp` has a slice: columns of the first, rows of the second.
#[derive(Module)]
struct Sliced {
    first: Linear,
    second: Parameter,
}

impl Sliced {
    /// The slice at `place` of `of`.
    fn new(place: usize, of: usize) -> Self {
        let whole = Whole {
            first: Linear::new(5, HIDDEN).unwrap(),
            second: Parameter::new(numbers(&[3, HIDDEN], 0.0)),
        };
        numbered(&whole);
        let width = HIDDEN / of as i64;
        let slice = |tensor: &Tensor, dim| tensor.detach().narrow(dim, place as i64 * width, width).copy();
        let first = Linear::new(5, width).unwrap();
        let [weight, bias] = [0, 1].map(|index| whole.first.parameters()[index].clone());
        for (own, whole) in first.parameters().iter().zip([weight, bias]) {
            own.set_data(&slice(whole.leaf(), 0)).unwrap();
        }
        Self { first, second: Parameter::new(slice(whole.second.leaf(), 1)) }
    }
}

#[derive(Module)]
struct Whole {
    first: Linear,
    second: Parameter,
}

impl Sliced {
    /// The loss, and the factor for its backward pass: the sum's backward pass adds up the same gradient from each rank.
    fn loss(&self, x: &Tensor, y: &Tensor, mesh: &DeviceMesh) -> anyhow::Result<(Tensor, f64)> {
        let partial = self.first.forward(x)?.f_relu()?.f_matmul(&self.second.tensor().f_transpose(0, 1)?)?;
        let out = match mesh.tp.group() {
            Some(group) => group.differentiable_sum(&partial)?,
            None => partial,
        };
        Ok(((out - y).square().mean(Kind::Float), 1.0 / mesh.tp.size as f64))
    }
}

impl LightningModule for Sliced {
    type Batch = (Tensor, Tensor);

    fn training_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let (loss, factor) = self.loss(x, y, ctx.device_mesh())?;
        ctx.log("train_loss", &loss).on_epoch(true).sync_dist(true);
        Ok(loss * factor)
    }

    fn validation_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        let (loss, _) = self.loss(x, y, ctx.device_mesh())?;
        ctx.log("val_loss", &loss).sync_dist(true);
        ctx.log("val_samples", x.size()[0] as f64).reduce_fx(ReduceFx::Sum).sync_dist(true);
        Ok(())
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Sgd::new(0.25).into()
    }
}

/// Asks for a stop at the 4th batch, on one rank.
struct StopOn(usize);

impl Callback for StopOn {
    fn on_train_batch_end(
        &mut self,
        ctx: &mut HookContext,
        _module: &mut dyn voltaic::nn::Module,
    ) -> anyhow::Result<()> {
        let rank = ctx.process_group().map_or(0, |group| group.rank());
        if rank == self.0 && ctx.global_step() == 4 {
            ctx.request_stop("this is enough");
        }
        Ok(())
    }
}

fn meshed(world: World) -> voltaic::error::Result<Box<dyn Strategy>> {
    Ok(Box::new(Ddp::new("meshed", world.with_dims(DIMS)?, DdpConfig::default())))
}

fn save(net: &Sliced, folder: &Path, rank: usize) {
    let checkpoint = Checkpoint { weights: net.state_dict(), ..Checkpoint::default() };
    checkpoint.save(&folder.join(format!("{rank}.ckpt"))).unwrap();
}

fn saved(folder: &Path, rank: usize, name: &str) -> Tensor {
    let weights = Checkpoint::load(folder.join(format!("{rank}.ckpt"))).unwrap().weights;
    weights.into_iter().find(|(own, _)| own == name).unwrap().1
}

fn train(builder: TrainerBuilder, folder: &Path) {
    let mut trainer = builder.devices(4).strategy(meshed).build().unwrap();
    let mesh = trainer.world().mesh().clone();
    let rank = trainer.world().rank;
    assert_eq!((mesh.dp.rank, mesh.tp.rank, mesh.dp.size, mesh.tp.size), (rank / 2, rank % 2, 2, 2));
    assert_eq!((mesh.dp_shard.size, mesh.pp.size), (1, 1));
    assert!(mesh.dp_shard.group().is_none() && mesh.pp.group().is_none());
    let ones = Tensor::from_slice(&[1 << rank]);
    mesh.dp.group().unwrap().all_reduce(&ones, ReduceOp::Sum).unwrap();
    assert_eq!(ones.int64_value(&[0]), [0b0101, 0b1010][rank % 2], "ranks 0 and 2, 1 and 3");
    let mut net = Sliced::new(mesh.tp.rank, mesh.tp.size);
    trainer.fit(&mut net, &mut loaders(None)).unwrap();
    save(&net, folder, rank);
    println!("\nsteps={}", trainer.global_step());
    for name in ["train_loss_epoch", "val_loss", "val_samples"] {
        println!("{name}={}", trainer.metric(name).unwrap_or(f64::NAN));
    }
}

#[test]
fn two_by_two_ranks_equal_one_process() {
    let folder = folder_of_parent_or_new();
    for part in ["whole epochs", "stops"] {
        let stop = |builder: TrainerBuilder| match part {
            "stops" => builder.callback(StopOn(3)),
            _ => builder,
        };
        if plays(part) {
            return train(stop(builder(&folder)), &folder);
        }
    }
    let kept = TempDir::new().unwrap();
    let mut trainer = builder(kept.path()).accumulate_grad_batches(2_u64).build().unwrap();
    let mut whole = Sliced::new(0, 1);
    trainer.fit(&mut whole, &mut loaders(Some(2))).unwrap();
    save(&whole, kept.path(), 0);

    let folder = TempDir::new().unwrap();
    let text = text_of(&own_process("whole epochs").env(FOLDER, folder.path()).output().unwrap());
    for (name, dim) in [("first.weight", 0), ("first.bias", 0), ("second", 1)] {
        let parts = [0, 1, 2, 3].map(|rank| saved(folder.path(), rank, name));
        assert!(parts[0].equal(&parts[2]) && parts[1].equal(&parts[3]), "{name}: copies are equal");
        assert!(!parts[0].equal(&parts[1]), "{name}: slices are not");
        let own = Tensor::cat(&parts[..2], dim);
        let difference = (own - saved(kept.path(), 0, name)).abs().max().double_value(&[]);
        assert!(difference < 1e-6, "{name} differs by {difference}");
    }
    let number = |name: &str| -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name}=")));
        line.unwrap_or_else(|| panic!("{text}")).parse().unwrap()
    };
    assert_eq!((number("val_samples"), number("steps")), (17.0, 18.0), "each sample counts once");
    for name in ["train_loss_epoch", "val_loss"] {
        let expected = trainer.metric(name).unwrap();
        assert!((number(name) - expected).abs() < 1e-6 * expected.abs(), "{name}: {text} {expected}");
    }

    let folder = TempDir::new().unwrap();
    let text = text_of(&own_process("stops").env(FOLDER, folder.path()).output().unwrap());
    assert!(text.contains("\nsteps=4\n") || text.contains("\nsteps=5\n"), "{text}");
    assert!((0..4).all(|rank| folder.path().join(format!("{rank}.ckpt")).exists()), "all ranks end");
}

/// What would be of one rank's slices is refused by name, on a mesh whose slices the strategy does not know.
#[test]
fn a_mesh_that_the_strategy_does_not_know_is_refused_where_it_matters() {
    type Change = fn(TrainerBuilder) -> TrainerBuilder;
    let cases: [(&str, Change); 2] = [
        ("trainer.gradient_clip_val", |t| t.gradient_clip_val(1.0)),
        ("trainer.enable_checkpointing", |t| t.enable_checkpointing(true)),
    ];
    for (key, change) in cases {
        if plays(key) {
            let builder = change(builder(&folder_of_parent()).devices(4)).strategy(meshed);
            let mut trainer = builder.build().unwrap();
            let mut net = Sliced::new(trainer.world().mesh().tp.rank, 2);
            println!("\nrefused: {}", trainer.fit(&mut net, &mut loaders(None)).unwrap_err());
            return;
        }
        let folder = TempDir::new().unwrap();
        let text = text_of(&own_process(key).env(FOLDER, folder.path()).output().unwrap());
        assert!(text.contains(&format!("refused: {key}: it ")) && text.contains("tp=2"), "{text}");
    }
}

fn folder_of_parent_or_new() -> std::path::PathBuf {
    std::env::var_os(FOLDER).map_or_else(std::env::temp_dir, |_| folder_of_parent())
}

#[test]
fn a_mesh_of_another_number_of_ranks_is_refused() {
    let error = World::default().with_dims(DIMS).unwrap_err().to_string();
    assert!(error.contains("dp_replicate=2 x dp_shard=1 x tp=2 is 4, but there are 1 rank(s)"), "{error}");
}
