//! Largest magnitudes are those of all ranks: DDP, ZeRO and slices of layers have the scales of one process.

use std::path::{Path, PathBuf};

use tch::Tensor;
use voltaic::Module;
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::functional::mse_loss;
use voltaic::nn::parallel::{ColwiseParallel, ParallelPlan, RowwiseParallel};
use voltaic::nn::{Callable, Linear, ModuleExt};
use voltaic::optim::{Optimizers, Sgd};
use voltaic::precision::fp8::DelayedScaling;
use voltaic::strategy::ModelParallelStrategy;
use voltaic::trainer::{GraphMode, TrainerBuilder};

use crate::compare::assert_within;
use crate::operators::start_hpu;
use crate::ranks::{assert_same, folder_of_rank, output, silent, sorted_file};
use crate::runs::{Batch, Net, left_by, loaders, no_counts, plugin, waves};

/// What a run leaves; what rank 0 has goes to `to`, too.
fn trained(
    builder: TrainerBuilder,
    batch: usize,
    recipe: DelayedScaling,
    to: Option<PathBuf>,
) -> Vec<(String, Tensor)> {
    let mut net = Net::new(false);
    let builder = builder.accelerator("hpu").plugins([plugin(recipe, false)]);
    let mut trainer = builder.build().unwrap();
    trainer.fit(&mut net, &mut loaders(24, batch)).unwrap();
    let left = left_by(&net);
    if let Some(to) = to.filter(|_| trainer.is_global_zero()) {
        Tensor::write_safetensors(&left, to).unwrap();
    }
    left
}

fn of(all: &[(String, Tensor)], is_scale: bool) -> Vec<(String, Tensor)> {
    let own = all
        .iter()
        .filter(|(name, _)| name.contains("/scale") == is_scale && (is_scale || !name.contains('/')));
    own.map(|(name, tensor)| (name.clone(), tensor.copy())).collect()
}

fn recipe(reduce_amax: bool) -> DelayedScaling {
    DelayedScaling { amax_history_len: 2, reduce_amax, ..DelayedScaling::default() }
}

/// On each rank.
fn check(ranks: usize, folder: &Path) {
    start_hpu();
    let on_ranks = |strategy: &str, reduces: bool, name: &str| {
        let to = folder.join(format!("{name}.safetensors"));
        trained(silent(ranks, strategy, folder).max_steps(3), 4, recipe(reduces), Some(to))
    };
    let ddp = on_ranks("ddp", true, "ddp");
    for stage in ["zero1", "zero2", "zero3"] {
        assert_same(stage, &on_ranks(stage, true, stage), &ddp);
    }
    on_ranks("ddp", false, "local");
    // of eight steps four are replayed
    let long = |graph| {
        trained(silent(ranks, "ddp", folder).max_epochs(3).max_steps(8).graph(graph), 4, recipe(true), None)
    };
    assert_same("graphs", &no_counts(long(GraphMode::Modules)), &no_counts(long(GraphMode::Off)));
}

#[test]
fn ranks_have_the_scales_of_one_process() {
    const RANKS: usize = 2;
    if let Some(folder) = folder_of_rank() {
        return check(RANKS, &folder);
    }
    let _alone = crate::alone();
    start_hpu();
    let (test, folder) = (std::thread::current().name().unwrap().to_owned(), tempfile::tempdir().unwrap());
    let output = output(&test, RANKS, folder.path(), &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let [ddp, local] =
        ["ddp", "local"].map(|name| sorted_file(&folder.path().join(format!("{name}.safetensors"))));
    let mut alone = trained(crate::silent::silent().devices(1).max_steps(3), 4 * RANKS, recipe(true), None);
    alone.sort_by(|(a, _), (b, _)| a.cmp(b));
    // the mean over a part of the batch has gradients that are larger by the number of ranks
    let expected = of(&alone, true).into_iter().map(|(name, scale)| {
        let factor = match (name.contains("_bwd"), name.contains("_inv")) {
            (true, true) => RANKS as f64,
            (true, false) => 1.0 / RANKS as f64,
            (false, _) => 1.0,
        };
        (name, scale * factor)
    });
    assert_same("scales", &of(&ddp, true), &expected.collect::<Vec<_>>());
    assert_within("weights", &of(&ddp, false), &of(&alone, false), 1e-3);
    let scale = |all: &[(String, Tensor)]| {
        all.iter().find(|(name, _)| name == "first/scale_fwd").unwrap().1.double_value(&[0])
    };
    // rank 0 has the small samples alone
    assert!(scale(&local) >= 4.0 * scale(&ddp), "{} and {}", scale(&local), scale(&ddp));
}

/// A column-wise layer, a row-wise one, and one that each rank has.
#[derive(Module)]
#[module(parallel_plan = Self::plan)]
struct Sliced {
    up: Linear,
    down: Linear,
    head: Linear,
}

impl Sliced {
    fn new() -> Self {
        let [up, down, head] = [(5, 14), (14, 6), (6, 3)].map(|(from, to)| Linear::new(from, to).unwrap());
        let net = Self { up, down, head };
        for (number, parameter) in net.parameters().into_iter().enumerate() {
            parameter.set_data(&(waves(&parameter.size(), number as f64) * 0.3)).unwrap();
        }
        net
    }

    fn plan(&self) -> ParallelPlan {
        ParallelPlan::new().layer("up", ColwiseParallel::default()).layer("down", RowwiseParallel::default())
    }
}

impl LightningModule for Sliced {
    type Batch = Batch;

    fn training_step(&self, (x, y): &Batch, _: &mut StepContext) -> anyhow::Result<Tensor> {
        let hidden = self.down.call(&self.up.call(x)?.f_tanh()?)?;
        Ok(mse_loss(&self.head.call(&hidden.f_tanh()?)?, y)?)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Sgd::new(0.05).momentum(0.9).into()
    }
}

/// Twelve steps; rank `r` writes what it has to `r.safetensors`, with its whole weights.
fn of_slices(builder: TrainerBuilder, recipe: DelayedScaling, folder: &Path) {
    let mut net = Sliced::new();
    let builder = builder.accelerator("hpu").max_steps(12).plugins([plugin(recipe, true)]);
    let mut trainer = builder.build().unwrap();
    trainer.fit(&mut net, &mut loaders(48, 4)).unwrap();
    let rank = trainer.world().rank;
    Tensor::write_safetensors(&left_by(&net), folder.join(format!("{rank}.safetensors"))).unwrap();
}

fn slices(folder: &Path) {
    start_hpu();
    let builder = silent(2, "auto", folder).strategy(ModelParallelStrategy::tensor_parallel_size(2));
    of_slices(builder, recipe(true), folder);
}

#[test]
fn slices_of_tensor_parallelism_train_as_whole_layers() {
    if let Some(folder) = folder_of_rank() {
        return slices(&folder);
    }
    let _alone = crate::alone();
    start_hpu();
    let (test, folder) = (std::thread::current().name().unwrap().to_owned(), tempfile::tempdir().unwrap());
    let whole = tempfile::tempdir().unwrap();
    let output = output(&test, 2, folder.path(), &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    of_slices(crate::silent::silent().devices(1), recipe(true), whole.path());
    let read = |folder: &Path, rank: usize| sorted_file(&folder.join(format!("{rank}.safetensors")));
    let expected = read(whole.path(), 0);
    for rank in 0..2 {
        let found = read(folder.path(), rank);
        assert_same("scales", &of(&found, true), &of(&expected, true));
        assert_within("weights", &of(&found, false), &of(&expected, false), 1e-5);
    }
}
