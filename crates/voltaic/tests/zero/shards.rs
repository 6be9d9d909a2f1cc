//! Checkpoints of sharded state: a folder with a file of each rank, read by any number of ranks and any strategy.

use std::path::{Path, PathBuf};

use voltaic::callback::{
    Callback, EmaWeightAveragingConfig, ModelCheckpoint, ModelCheckpointConfig, SaveLast, WeightAveraging,
};
use voltaic::checkpoint::{
    AsyncCheckpointIo, Checkpoint, CheckpointIo, Chunk, FileCheckpointIo, Shard, ShardSpec, TrainingState,
};
use voltaic::data::{Loaders, Stage};
use voltaic::distributed::ProcessGroup;
use voltaic::logger::Logger;
use voltaic::models::{Gpt, GptConfig};
use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::optim::Optimizers;
use voltaic::trainer::{PluginConfig, TrainerBuilder};
use voltaic::{Module, Result, Tensor};

use crate::checkpoints::full_checkpoint;
use crate::ladder::gpt;
use crate::models::{Batch, Cnn, Kernels, Odd, Small, all_loaders, loaders, numbers, tokens};
use crate::ranks::{Body, STAGES, assert_same, assert_within, on_ranks_in_turn, silent, weights};
use crate::stage3::sharded;

/// A trainer whose stage 3 lets no parameter stay.
pub fn staged(ranks: usize, stage: &str, folder: &Path) -> TrainerBuilder {
    if stage == "zero3" { sharded(ranks, folder) } else { silent(ranks, stage, folder) }
}

/// Asks for a checkpoint after a batch, from 0, of the first epoch.
pub struct SaveAfter(pub usize, pub PathBuf);

impl Callback for SaveAfter {
    fn on_train_batch_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        if ctx.current_epoch() == 0 && ctx.batch_idx() == self.0 {
            ctx.request_checkpoint(full_checkpoint(self.1.clone()));
        }
        Ok(())
    }
}

/// Saves whole checkpoints only.
pub struct WholeIo;

impl CheckpointIo for WholeIo {
    fn save_checkpoint(
        &mut self,
        checkpoint: &Checkpoint,
        path: &Path,
        _storage_options: Option<&serde_json::Value>,
    ) -> Result<()> {
        checkpoint.save(path)
    }
}

pub fn sorted(mut tensors: Vec<(String, Tensor)>) -> Vec<(String, Tensor)> {
    tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
    tensors
}

/// Asserts that two checkpoints have the same weights and states of optimizers.
pub fn assert_alike(what: &str, own: &Checkpoint, expected: &Checkpoint) {
    let copies = |tensors: &[(String, Tensor)]| {
        sorted(tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect())
    };
    assert_same(&format!("{what}: weights"), &copies(&own.weights), &copies(&expected.weights));
    let (own, expected) = (own.training.as_ref().unwrap(), expected.training.as_ref().unwrap());
    assert_eq!(own.optimizers.len(), expected.optimizers.len(), "{what}");
    for (own, expected) in own.optimizers.iter().zip(&expected.optimizers) {
        let (own, expected) = (copies(own), copies(expected));
        // of a parameter without elements nobody keeps a state
        let expected: Vec<_> = expected.into_iter().filter(|(name, _)| !name.ends_with(".empty")).collect();
        assert_same(&format!("{what}: optimizer"), &own, &expected);
    }
}

/// Fits with a checkpoint after a batch, and reads it.
fn saved<M: LightningModule<Batch = Batch> + Module>(
    builder: TrainerBuilder,
    path: &Path,
    mut net: M,
    mut loaders: Loaders<Batch>,
) -> Option<Checkpoint> {
    let mut trainer = builder.max_epochs(1).callback(SaveAfter(3, path.to_path_buf())).build().unwrap();
    trainer.fit(&mut net, &mut loaders).unwrap();
    trainer.is_global_zero().then(|| Checkpoint::load(path).unwrap())
}

/// What a folder holds is what a data-parallel run saves, and what is gathered.
fn nothing_is_empty(ranks: usize, folder: &Path) {
    for stage in STAGES {
        let run = |name: &str, run: &dyn Fn(TrainerBuilder, &Path) -> Option<Checkpoint>| {
            let what = format!("{stage}-{name}");
            let path = |kind: &str| folder.join(format!("{what}-{kind}.ckpt"));
            let own = run(staged(ranks, stage, folder), &path("own"));
            let whole = run(staged(ranks, stage, folder).checkpoint_io(WholeIo), &path("whole"));
            let ddp = run(silent(ranks, "ddp_find_unused_parameters_true", folder), &path("ddp"));
            let (Some(own), Some(whole), Some(ddp)) = (own, whole, ddp) else { return };
            let files = std::fs::read_dir(path("own")).unwrap().count();
            assert_eq!(files, ranks + 1, "{what}");
            assert!(path("whole").is_file() && path("ddp").is_file(), "{what}");
            assert_alike(&what, &own, &whole);
            assert_alike(&what, &own, &ddp);
        };
        run("mlp", &|builder, path| saved(builder, path, Small::new(), loaders(24)));
        run("odd", &|builder, path| saved(builder, path, Odd::new(), loaders(24)));
        run("cnn", &|builder, path| saved(builder, path, Cnn::new(), loaders(24)));
        run("kernels", &|builder, path| saved(builder, path, Kernels::new(), loaders(24)));
        run("gpt", &|builder, path| saved(builder, path, gpt(), tokens(24)));
        let ema =
            || WeightAveraging::ema(EmaWeightAveragingConfig { decay: 0.75, ..Default::default() }).unwrap();
        run("ema", &|builder, path| saved(builder.callback(ema()), path, Small::new(), loaders(24)));
    }
}

on_ranks_tests! {
    two_ranks_save_all: 2, nothing_is_empty;
    #[ignore = "a long form, which make stress runs"]
    three_ranks_save_all: 3, nothing_is_empty;
}

/// Leaves a checkpoint of each stage and precision, for other runs to go on from.
fn leave(ranks: usize, folder: &Path) {
    for stage in STAGES {
        for precision in ["32-true", "bf16-true"] {
            let path = folder.join(format!("{stage}-{precision}.ckpt"));
            let builder = staged(ranks, stage, folder).precision(precision).max_epochs(1);
            let config = ModelCheckpointConfig {
                dirpath: Some(folder.to_path_buf()),
                filename: Some(format!("{stage}-{precision}")),
                ..ModelCheckpointConfig::default()
            };
            let saver = ModelCheckpoint::new(config).unwrap();
            let mut trainer = builder.enable_checkpointing(true).callback(saver).build().unwrap();
            trainer.fit(&mut Small::new(), &mut all_loaders(24)).unwrap();
            if trainer.is_global_zero() {
                assert!(path.is_dir());
                Checkpoint::load(&path).unwrap().save(&path.with_extension("file.ckpt")).unwrap();
            }
        }
    }
}

/// Other ranks go on from them as from a file.
fn go_on(ranks: usize, folder: &Path) {
    for precision in ["32-true", "bf16-true"] {
        for saved in STAGES {
            let path = folder.join(format!("{saved}-{precision}.ckpt"));
            let run = |builder: TrainerBuilder, path: &Path| {
                let mut net = Small { has_masters: false, ..Small::new() };
                let mut trainer = builder.precision(precision).max_epochs(3).build().unwrap();
                trainer.ckpt_path(path);
                trainer.fit(&mut net, &mut all_loaders(24)).unwrap();
                (weights(&net), trainer.metric("train_loss_epoch"))
            };
            for stage in STAGES {
                let what = format!("{saved} {precision} to {stage} on {ranks} ranks");
                let (own, loss) = run(staged(ranks, stage, folder), &path);
                let (expected, expected_loss) =
                    run(staged(ranks, stage, folder), &path.with_extension("file.ckpt"));
                assert_same(&what, &own, &expected);
                assert_eq!(loss, expected_loss, "{what}");
                if precision == "32-true" {
                    let (ddp, _) = run(silent(ranks, "ddp", folder), &path);
                    assert_same(&what, &own, &ddp);
                }
            }
        }
    }
}

/// Ranks in float32 take the master weights of runs in bfloat16 as their weights, from a folder and from a file.
fn go_on_in_float32(ranks: usize, folder: &Path) {
    for saved in STAGES {
        let path = folder.join(format!("{saved}-bf16-true.ckpt"));
        let run = |builder: TrainerBuilder, path: &Path, max_epochs| {
            let mut net = Small::new();
            let mut trainer = builder.max_epochs(max_epochs).build().unwrap();
            trainer.ckpt_path(path);
            trainer.fit(&mut net, &mut all_loaders(24)).unwrap();
            weights(&net)
        };
        let masters = Checkpoint::load(&path).unwrap().training.unwrap().optimizers.remove(0);
        let masters = masters
            .into_iter()
            .filter_map(|(name, master)| Some((name.strip_prefix("master_param.")?.to_owned(), master)));
        let masters = sorted(masters.collect());
        let expected = run(silent(ranks, "ddp", folder), &path, 2);
        for stage in STAGES {
            for path in [&path, &path.with_extension("file.ckpt")] {
                let what = format!("{saved} to {stage} on {ranks} ranks, {}", path.display());
                assert_same(&what, &sorted(run(staged(ranks, stage, folder), path, 1)), &masters);
                assert_same(&what, &run(staged(ranks, stage, folder), path, 2), &expected);
            }
        }
        assert_same(saved, &sorted(run(silent(ranks, "ddp", folder), &path, 1)), &masters);
    }
}

/// One process in bfloat16 without master weights leaves them out.
fn go_on_without_masters(_ranks: usize, folder: &Path) {
    for saved in STAGES {
        let mut trainer = silent(1, "auto", folder).precision("bf16-true").max_epochs(2).build().unwrap();
        trainer.ckpt_path(folder.join(format!("{saved}-bf16-true.ckpt")));
        trainer.fit(&mut Small::new(), &mut all_loaders(24)).unwrap();
    }
}

#[test]
fn other_precisions_go_on_from_master_weights() {
    let name = "shards::other_precisions_go_on_from_master_weights";
    let one = |ranks: usize, folder: &Path| {
        go_on_in_float32(ranks, folder);
        go_on_without_masters(ranks, folder);
    };
    on_ranks_in_turn(name, &[(2, leave), (3, go_on_in_float32), (1, one)]);
}

/// One process reads folders, too, in evaluation and in fit.
fn alone(_ranks: usize, folder: &Path) {
    for saved in STAGES {
        let path = folder.join(format!("{saved}-32-true.ckpt"));
        let run = |path: &Path| {
            let mut net = Small::new();
            let mut trainer = silent(1, "auto", folder).max_epochs(2).build().unwrap();
            trainer.ckpt_path(path).fit(&mut net, &mut all_loaders(24)).unwrap();
            let train_loss = trainer.metric("train_loss_epoch").unwrap();
            trainer.ckpt_path(path).test(&mut net, &mut all_loaders(24)).unwrap();
            (train_loss, trainer.metric("test_loss").unwrap())
        };
        assert_eq!(run(&path), run(&path.with_extension("file.ckpt")), "{saved}");
    }
}

#[test]
fn any_number_of_ranks_goes_on() {
    on_ranks_in_turn("shards::any_number_of_ranks_goes_on", &[(2, leave), (3, go_on), (1, alone)]);
}

#[test]
#[ignore = "a long form, which make stress runs"]
fn twice_the_ranks_go_on() {
    on_ranks_in_turn("shards::twice_the_ranks_go_on", &[(2, leave), (4, go_on)]);
}

/// Kernels with the channels last, cut in another place by each number of ranks; also in a window that is open.
fn kernels(stage: &str, ranks: usize, folder: &Path) -> TrainerBuilder {
    staged(ranks, stage, folder).accumulate_grad_batches(2_u64)
}

const WINDOWS: [&str; 2] = ["closed", "open"];

fn leave_kernels(ranks: usize, folder: &Path) {
    for stage in STAGES {
        let [closed, open] = WINDOWS.map(|window| folder.join(format!("{stage}-{window}.ckpt")));
        let builder = kernels(stage, ranks, folder).max_epochs(1);
        let builder = builder.callback(SaveAfter(1, closed.clone())).callback(SaveAfter(2, open.clone()));
        let mut trainer = builder.build().unwrap();
        trainer.fit(&mut Kernels::new(), &mut loaders(12 * ranks as i64)).unwrap();
        if trainer.is_global_zero() {
            for path in [closed, open] {
                Checkpoint::load(&path).unwrap().save(&path.with_extension("file.ckpt")).unwrap();
            }
        }
    }
}

fn go_on_with_kernels(ranks: usize, folder: &Path) {
    // in a file each rank has the window's mean, to which it adds its gradients before they are averaged: another order of sums
    from_kernels(ranks, folder, 1e-6);
}

fn from_kernels(ranks: usize, folder: &Path, limit_if_open: f64) {
    for (saved, window) in STAGES.iter().flat_map(|saved| WINDOWS.map(move |window| (saved, window))) {
        let path = folder.join(format!("{saved}-{window}.ckpt"));
        for stage in STAGES {
            let run = |path: &Path| {
                let mut net = Kernels::new();
                let mut trainer = kernels(stage, ranks, folder).max_epochs(2).build().unwrap();
                trainer.ckpt_path(path);
                trainer.fit(&mut net, &mut loaders(12 * ranks as i64)).unwrap(); // as many batches
                weights(&net)
            };
            let expected = run(&path.with_extension("file.ckpt"));
            let limit = if window == "open" { limit_if_open } else { 0.0 };
            assert_within(&format!("{saved} {window} to {stage} on {ranks}"), &run(&path), &expected, limit);
        }
    }
}

#[test]
#[ignore = "a long form, which make stress runs"]
fn any_number_of_ranks_goes_on_with_kernels() {
    let turns: [(usize, Body); 3] = [(2, leave_kernels), (2, go_on_with_kernels), (3, go_on_with_kernels)];
    on_ranks_in_turn("shards::any_number_of_ranks_goes_on_with_kernels", &turns);
}

/// Fewer ranks take the gradients of an open window of all ranks that there were.
#[test]
fn fewer_ranks_go_on_with_kernels() {
    let go_on: Body = |ranks, folder| from_kernels(ranks, folder, 1e-6);
    on_ranks_in_turn("shards::fewer_ranks_go_on_with_kernels", &[(4, leave_kernels), (2, go_on)]);
}

/// Top k, `last`, links and versions work with folders.
fn keeps_the_best(ranks: usize, folder: &Path) {
    let link: SaveLast = serde_json::from_value(serde_json::json!("link")).unwrap();
    let ways =
        [SaveLast::Copy(true), link].map(|save_last| [false, true].map(|is_async| (save_last, is_async)));
    for (save_last, is_async) in ways.into_iter().flatten() {
        let dirpath = folder.join(format!("{save_last:?} {is_async}"));
        let config = ModelCheckpointConfig {
            dirpath: Some(dirpath.clone()),
            filename: Some("{step}".to_owned()),
            save_last,
            ..ModelCheckpointConfig::default()
        };
        let saver = || ModelCheckpoint::new(config.clone()).unwrap();
        let builder = || {
            let builder = staged(ranks, "zero3", folder).enable_checkpointing(true).callback(saver());
            if is_async { builder.plugins(vec![PluginConfig::AsyncCheckpointIo]) } else { builder }
        };
        let mut trainer = builder().max_epochs(3).build().unwrap();
        let mut net = Small::new();
        trainer.fit(&mut net, &mut all_loaders(8 * ranks as i64)).unwrap();
        let expected = weights(&net);
        let names = || {
            let mut names: Vec<String> = std::fs::read_dir(&dirpath)
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names
        };
        if trainer.is_global_zero() {
            assert_eq!(names(), ["last.ckpt", "step=12.ckpt"]);
            let is_link = dirpath.join("last.ckpt").symlink_metadata().unwrap().is_symlink();
            assert_eq!(is_link, save_last != SaveLast::Copy(true));
        }
        trainer.world().barrier().unwrap();
        for ckpt_path in ["last", "best"] {
            let mut net = Small::new();
            let mut other = builder().build().unwrap();
            other.ckpt_path(ckpt_path).test(&mut net, &mut all_loaders(8)).unwrap();
            assert_same(ckpt_path, &weights(&net), &expected);
        }
        let mut trainer = builder().max_epochs(4).build().unwrap();
        trainer.ckpt_path("last").fit(&mut net, &mut all_loaders(8 * ranks as i64)).unwrap();
        if trainer.is_global_zero() {
            let kept: &[&str] = match save_last {
                SaveLast::Link(_) => &["last.ckpt", "step=12.ckpt", "step=16.ckpt"], // what a run goes on from stays
                _ => &["last.ckpt", "step=16.ckpt"],
            };
            assert_eq!(names(), kept);
        }
        trainer.world().barrier().unwrap();
    }
}

/// After a fit, a folder can be saved, also in place of a file and of a folder; files in place of folders.
fn save_after_fit(ranks: usize, folder: &Path) {
    let path = folder.join("after.ckpt");
    let mut trainer = staged(ranks, "zero3", folder).max_epochs(1).build().unwrap();
    let mut net = Small::new();
    trainer.fit(&mut net, &mut all_loaders(12)).unwrap();
    let expected = weights(&net);
    trainer.save_weights(&net, &path, None).unwrap();
    for _ in 0..2 {
        trainer.save_checkpoint(&mut net, &mut all_loaders(12), &path, None).unwrap();
        let loaded = Checkpoint::load(&path).unwrap();
        assert!(path.is_dir() && loaded.training.is_some());
        assert_same("saved after fit", &sorted(loaded.weights), &sorted(weights(&net)));
        trainer.world().barrier().unwrap();
    }
    let mut resumed = staged(ranks, "zero1", folder).max_epochs(2).build().unwrap();
    resumed.ckpt_path(&path).fit(&mut Small::new(), &mut all_loaders(12)).unwrap();
    trainer.save_weights(&net, &path, None).unwrap();
    assert!(path.is_file());
    assert_same("weights in a file", &sorted(Checkpoint::load(&path).unwrap().weights), &sorted(expected));
    let left = std::fs::read_dir(folder).unwrap().flatten();
    let left: Vec<_> = left.filter(|entry| entry.file_name().to_string_lossy().ends_with(".tmp")).collect();
    assert!(left.is_empty(), "{left:?}");
}

fn disk_is_full(path: &Path) -> Result<()> {
    Err(voltaic::Error::io("write", path, std::io::ErrorKind::StorageFull.into()))
}

/// A logger that has no room for its rows.
struct FullLogger {
    at_end: bool,
}

impl Logger for FullLogger {
    fn log_dir(&self) -> Option<&Path> {
        None
    }

    fn log_hyperparams(&mut self, _hyper_parameters: &serde_json::Value) -> Result<()> {
        Ok(())
    }

    fn log_metrics(&mut self, _metrics: &[(String, f64)], _step: u64) -> Result<()> {
        Ok(())
    }

    fn save(&mut self) -> Result<()> {
        if self.at_end { Ok(()) } else { disk_is_full(Path::new("metrics.csv")) }
    }

    fn finalize(&mut self, _success: bool) -> Result<()> {
        disk_is_full(Path::new("metrics.csv"))
    }
}

/// Fails on rank 0 alone: where a checkpoint is removed, or at the end of a fit.
#[derive(Clone, Copy, PartialEq)]
enum Fails {
    ToRemove,
    AtTheEnd,
}

impl CheckpointIo for Fails {
    fn save_checkpoint(
        &mut self,
        checkpoint: &Checkpoint,
        path: &Path,
        options: Option<&serde_json::Value>,
    ) -> Result<()> {
        FileCheckpointIo.save_checkpoint(checkpoint, path, options)
    }

    fn reads_shards(&self) -> bool {
        true
    }

    fn save_shards(
        &mut self,
        checkpoint: &Checkpoint,
        ranks: &ProcessGroup,
        path: &Path,
        options: Option<&serde_json::Value>,
    ) -> Result<()> {
        FileCheckpointIo.save_shards(checkpoint, ranks, path, options)
    }

    fn remove_checkpoint(&mut self, path: &Path) -> Result<()> {
        if *self == Self::ToRemove { disk_is_full(path) } else { FileCheckpointIo.remove_checkpoint(path) }
    }

    fn teardown(&mut self) -> Result<()> {
        let is_first = voltaic::distributed::is_global_zero();
        if *self == Self::AtTheEnd && is_first { disk_is_full(Path::new("last")) } else { Ok(()) }
    }
}

/// Cannot fetch its data, which rank 0 does.
#[derive(Module)]
struct Unprepared {
    net: Small,
}

impl LightningModule for Unprepared {
    type Batch = Batch;

    fn prepare_data(&mut self) -> anyhow::Result<()> {
        anyhow::bail!("no network")
    }

    fn training_step(&self, (x, y): &Batch, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        self.net.loss(x, y)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        self.net.configure_optimizers()
    }
}

/// What fails on rank 0 alone beside a checkpoint is the error of all ranks, at once.
fn fails_together(ranks: usize, folder: &Path) {
    let mut trainer = staged(ranks, "ddp", folder).build().unwrap();
    let error = trainer.fit(&mut Unprepared { net: Small::new() }, &mut loaders(24)).unwrap_err().to_string();
    let is_told = error.contains("prepare_data") && error.contains("no network");
    let of_other = error.contains("rank 0 has failed");
    assert!(is_told && of_other != voltaic::distributed::is_global_zero(), "{error}");
    for stage in ["ddp", "zero1", "zero3"] {
        let check = |name: &str, more: &dyn Fn(TrainerBuilder) -> TrainerBuilder| {
            let config = ModelCheckpointConfig {
                dirpath: Some(folder.join(format!("{stage}-{name}"))),
                ..ModelCheckpointConfig::default()
            };
            let saver = ModelCheckpoint::new(config).unwrap();
            let builder = staged(ranks, stage, folder).enable_checkpointing(true).callback(saver);
            let mut trainer = more(builder).max_epochs(2).build().unwrap();
            let group = trainer.world().group().unwrap().clone();
            let begun = std::time::Instant::now();
            let error = trainer.fit(&mut Small::new(), &mut loaders(24)).unwrap_err().to_string();
            assert!(error.contains("rank 0: cannot write"), "{stage} {name}: {error}");
            assert!(error.contains("free some disk space"), "{stage} {name}: {error}");
            for other in group.all_gather_object(&error).unwrap() {
                assert_eq!(other, error, "{stage} {name}");
            }
            assert!(begun.elapsed().as_secs() < 20, "{stage} {name}");
        };
        check("logger", &|builder| builder.with_logger(FullLogger { at_end: false })); // which rank 0 has
        check("end of a logger", &|builder| builder.with_logger(FullLogger { at_end: true }));
        check("remove", &|builder| builder.checkpoint_io(Fails::ToRemove));
        check("remove beside training", &|builder| {
            builder.checkpoint_io(AsyncCheckpointIo::around(Fails::ToRemove))
        });
        check("end", &|builder| builder.checkpoint_io(Fails::AtTheEnd));
    }
}

/// Where a folder of each version of the format is kept, with what one file has of it.
fn kept_folder(version: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/shards").join(version)
}

/// Writes a folder of the version that is in force, of three ranks in an open window, to keep: `cargo test --test zero
/// shards::keeps_a_folder -- --ignored`. `v1` was written before the index had chunks.
fn keep_folder(ranks: usize, folder: &Path) {
    let path = folder.join("folder.ckpt");
    let builder = kernels("zero3", ranks, folder).max_epochs(1).callback(SaveAfter(2, path.clone()));
    let mut trainer = builder.build().unwrap();
    trainer.fit(&mut Kernels::new(), &mut loaders(12 * ranks as i64)).unwrap();
    if trainer.is_global_zero() {
        let kept = kept_folder("new");
        std::fs::create_dir_all(&kept).unwrap();
        Checkpoint::load(&path).unwrap().save(&kept.join("file.ckpt")).unwrap();
        std::fs::rename(&path, kept.join("folder.ckpt")).unwrap();
    }
}

/// Folders of earlier versions are what they were, and ranks go on from them.
fn read_kept(ranks: usize, folder: &Path) {
    for version in ["v1"] {
        let [kept, file] = ["folder.ckpt", "file.ckpt"].map(|name| kept_folder(version).join(name));
        let (own, expected) = (Checkpoint::load(&kept).unwrap(), Checkpoint::load(&file).unwrap());
        assert_alike(version, &own, &expected);
        let ranks_of = |checkpoint: Checkpoint| checkpoint.training.unwrap().ranks;
        for (own, expected) in ranks_of(own).into_iter().zip(ranks_of(expected)) {
            assert_same(version, &sorted(own.grads), &sorted(expected.grads));
            assert_same(version, &own.rng, &expected.rng);
        }
        for stage in STAGES {
            let run = |path: &Path| {
                let mut net = Kernels::new();
                let mut trainer = kernels(stage, ranks, folder).max_epochs(2).build().unwrap();
                trainer.ckpt_path(path).fit(&mut net, &mut loaders(12 * ranks as i64)).unwrap();
                weights(&net)
            };
            assert_within(&format!("{version} to {stage}"), &run(&kept), &run(&file), 1e-6);
        }
    }
}

/// What the process has read of files, as the system counts.
fn bytes_read() -> u64 {
    let counts = std::fs::read_to_string("/proc/self/io").unwrap();
    counts.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

/// Counts what is read of a checkpoint before the first step.
struct Reads(u64, PathBuf);

impl Callback for Reads {
    fn setup(&mut self, _stage: Stage, _module: &mut dyn Module) -> anyhow::Result<()> {
        self.0 = bytes_read();
        Ok(())
    }

    fn on_train_start(&mut self, _ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        let read = bytes_read() - self.0;
        let files = std::fs::read_dir(&self.1).unwrap().map(|file| file.unwrap().metadata().unwrap().len());
        let size = files.sum::<u64>();
        println!("\na rank of four has read {read} bytes of a folder of {size}");
        // a quarter, and the rest of blocks at the ends of its ranges, which are as small as a block: of tensors in two files twice as many
        let eighths = if self.1.ends_with("4.ckpt") { 3 } else { 5 };
        anyhow::ensure!(read < size / 8 * eighths, "{read} of {size}");
        Ok(())
    }
}

fn middle() -> Gpt {
    let config =
        GptConfig { vocab_size: 61, block_size: 16, n_layer: 4, n_head: 2, n_embd: 256, ..GptConfig::tiny() };
    Gpt::new(config).unwrap()
}

fn leave_middle(ranks: usize, folder: &Path) {
    let path = folder.join(format!("{ranks}.ckpt"));
    let mut trainer =
        staged(ranks, "zero3", folder).max_steps(1).callback(SaveAfter(0, path)).build().unwrap();
    trainer.fit(&mut middle(), &mut tokens(16)).unwrap();
}

/// A rank reads its shards, whichever ranks have written them.
fn read_middle(ranks: usize, folder: &Path) {
    for saved_by in [4, 3] {
        let path = folder.join(format!("{saved_by}.ckpt"));
        let mut trainer =
            staged(ranks, "zero3", folder).max_steps(2).callback(Reads(0, path.clone())).build().unwrap();
        trainer.ckpt_path(path).fit(&mut middle(), &mut tokens(16)).unwrap();
    }
}

#[test]
fn ranks_read_their_shards() {
    let turns: [(usize, Body); 3] = [(4, leave_middle), (3, leave_middle), (4, read_middle)];
    on_ranks_in_turn("shards::ranks_read_their_shards", &turns);
}

/// A layer whose columns two ranks have for tensor parallelism, each in two shards of ZeRO, written without a strategy.
fn save_columns(ranks: usize, folder: &Path) {
    let trainer = silent(ranks, "ddp", folder).build().unwrap();
    let group = trainer.world().group().unwrap().clone();
    let whole = |phase: f64| numbers(&[6, 10], phase);
    let columns = Chunk { offsets: vec![0, 5 * (group.rank() / 2)], sizes: vec![6, 5] };
    let mut spec = ShardSpec::of_chunk(&[6, 10], columns);
    spec.range = if group.rank().is_multiple_of(2) { 0..13 } else { 13..30 }; // within a row
    let shard = |name: &str, phase: f64| {
        let values = spec.of(&whole(phase)).unwrap();
        Shard { name: name.to_owned(), spec: spec.clone(), values }
    };
    let state = "voltaic:optimizer.0.exp_avg.fc.weight";
    let (optimizers, json) = (vec![Vec::new()], serde_json::json!({}));
    let training = TrainingState { optimizers, json, ..TrainingState::default() };
    let tied = vec![("head.weight".to_owned(), "fc.weight".to_owned())];
    let weights_only =
        || Checkpoint { shards: vec![shard("fc.weight", 1.0)], tied: tied.clone(), ..Checkpoint::default() };
    let mut full = Checkpoint { training: Some(training), ..weights_only() };
    full.shards.push(shard(state, 2.0));
    let save = |io: &mut dyn CheckpointIo, checkpoint: &Checkpoint, name: &str, is_folder: bool| {
        let path = folder.join(name);
        io.save_shards(checkpoint, &group, &path, None).unwrap();
        let loaded = Checkpoint::load(&path).unwrap();
        assert_eq!(path.is_dir(), is_folder, "{name}");
        assert!(
            loaded.weights.len() == 2 && loaded.weights.iter().all(|(_, it)| it.equal(&whole(1.0))),
            "{name}"
        );
        if let Some(training) = loaded.training {
            assert!(training.optimizers[0].iter().all(|(_, it)| it.equal(&whole(2.0))), "{name}");
            assert_eq!((training.optimizers[0].len(), training.ranks.len()), (1, ranks - 1), "{name}");
        }
    };
    save(&mut FileCheckpointIo, &full, "folder.ckpt", true);
    save(&mut WholeIo, &full, "whole.ckpt", false);
    save(&mut FileCheckpointIo, &weights_only(), "weights.ckpt", false);
    save(&mut WholeIo, &weights_only(), "whole-weights.ckpt", false);
    // all ranks know what does not fit together
    if group.rank() == 2 {
        full.shards.pop();
    }
    for io in [&mut FileCheckpointIo as &mut dyn CheckpointIo, &mut WholeIo] {
        let error = io.save_shards(&full, &group, &folder.join("bad.ckpt"), None).unwrap_err().to_string();
        assert!(error.contains(&format!("{state} has element [0, 5] in no chunk")), "{error}");
    }
    assert!(!folder.join("bad.ckpt").exists());
}

on_ranks_tests! {
    columns_of_four_ranks_are_saved: 4, save_columns;
    #[ignore = "writes files of the tests"]
    keeps_a_folder: 3, keep_folder;
    two_ranks_keep_the_best: 2, keeps_the_best;
    two_ranks_save_after_fit: 2, save_after_fit;
    what_fails_on_one_rank_beside_a_checkpoint_ends_all: 2, fails_together;
    two_ranks_go_on_from_folders_of_earlier_versions: 2, read_kept;
}
