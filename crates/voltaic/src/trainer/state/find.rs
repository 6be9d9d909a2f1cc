//! Finds the file that `best`, `last`, `hpc` or a path means: among what this trainer has saved, else where runs of this
//! configuration leave their checkpoints.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::callback::{Callback, OnExceptionCheckpoint, SWA_FILE};
use crate::checkpoint::{Beginning, CheckpointPaths, peek, peek_whole, remove_leftovers};
use crate::config::expand_home;
use crate::data::Stage;
use crate::distributed::{World, collective_scope};
use crate::error::{ConfigError, Error, Problem, Result};
use crate::logger::Logger;
use crate::trainer::config::callbacks::is_a;
use crate::trainer::config::values::CkptPath;
use crate::trainer::session::agree::agreed;
use crate::trainer::session::session::Run;
use crate::trainer::state::restart::newest_of_slurm;

/// Folder of checkpoints below that of a run.
const CHECKPOINTS: &str = "checkpoints";

/// Where a fit starts: `ckpt_path` if it is set, else from what [`OnExceptionCheckpoint`] has saved of a run that failed. A
/// fast_dev_run leaves that to a real run.
///
/// # Collective
/// Rank 0 looks.
pub(crate) fn or_of_failed_run(run: &Run, ckpt_path: Option<CkptPath>) -> Result<Option<CkptPath>> {
    let mut savers =
        run.callbacks.iter().filter(|saver| is_a::<OnExceptionCheckpoint>(saver.as_ref())).peekable();
    if ckpt_path.is_some() || savers.peek().is_none() || run.facts.fast_dev_run {
        return Ok(ckpt_path);
    }
    let found = newest_first(savers.filter_map(|saver| saver.checkpoint_paths()?.last)).into_iter().next();
    let found = run.world().of_rank_zero(found)?;
    if let Some(path) = &found {
        tracing::info!(
            "no ckpt_path is given: resuming {}, which a run that failed has left",
            path.display()
        );
    }
    Ok(found.map(CkptPath::At))
}

/// The file that `best`, `last`, `hpc` or a path means. `None` if a fit is to resume `last` and there is none: it starts from
/// the beginning, as in Lightning.
///
/// # Errors
/// If there is no such checkpoint, with the folders that were looked at.
///
/// # Collective
/// Rank 0 looks.
pub(crate) fn find(run: &Run, ckpt_path: &CkptPath, stage: Stage) -> Result<Option<PathBuf>> {
    let _named = collective_scope("the checkpoint to start from");
    let found = match ckpt_path {
        CkptPath::At(path) => return Ok(Some(expand_home(path))),
        _ if !run.world().is_global_zero() => {
            look_for_rank_zero(run.world())?;
            Ok(None)
        }
        CkptPath::Best => best(run).map(Some),
        CkptPath::Last => last(run, stage),
        CkptPath::Hpc => of_slurm(run).map(Some),
    };
    if let Some(group) = run.world().peers().filter(|group| group.rank() == 0) {
        group.broadcast_object(&None::<PathBuf>, 0)?;
    }
    let found: Result<Option<PathBuf>, Problem> = run.world().of_rank_zero(found)?;
    found.map_err(|problem| ConfigError::at("ckpt_path", problem).into())
}

/// The beginning of a checkpoint that is whole. Of a folder each rank looks at its share of the files.
fn whole(world: &World, path: &Path) -> Result<Beginning> {
    let Some(group) = world.peers().filter(|_| path.is_dir()) else { return peek_whole(path, (0, 1)) };
    group.broadcast_object(&Some(path.to_path_buf()), 0)?;
    agreed(world, "read", path, peek_whole(path, (0, world.world_size)))
}

/// On other ranks than 0: looks at the shares of folders that rank 0 names, until it names none.
fn look_for_rank_zero(world: &World) -> Result<()> {
    let Some(group) = world.peers() else { return Ok(()) };
    while let Some(path) = group.broadcast_object(&None::<PathBuf>, 0)? {
        let looked = peek_whole(&path, (world.rank, world.world_size));
        if let Err(error @ Error::Distributed(_)) = agreed(world, "read", &path, looked) {
            return Err(error);
        }
    }
    Ok(())
}

fn last(run: &Run, stage: Stage) -> Result<Option<PathBuf>, Problem> {
    let places = Places::of(run);
    match places.newest(run, stage) {
        Some(found) => Ok(Some(found)),
        None if stage == Stage::Fit => {
            tracing::warn!(
                "ckpt_path=last, but there is no checkpoint in {}; starting from the beginning",
                places.text()
            );
            Ok(None)
        }
        None => {
            let what = format!("`last`, but there is no checkpoint in {}", places.text());
            Err(Problem::new(what, "fit first, or give the path of a checkpoint"))
        }
    }
}

fn of_slurm(run: &Run) -> Result<PathBuf, Problem> {
    let root = &run.facts.default_root_dir;
    newest_of_slurm(root, None).ok_or_else(|| {
        let what = format!("`hpc`, but there is no hpc_ckpt_<n>.ckpt in {}", root.display());
        Problem::new(what, "give the path of a checkpoint, or set trainer.default_root_dir to its folder")
    })
}

fn best(run: &Run) -> Result<PathBuf, Problem> {
    let remedy = "give the path of a checkpoint";
    let refuse = |what: String| Err(Problem::new(what, remedy));
    let known = saved(run);
    if known.is_empty() {
        let what = "`best` without a callback that saves checkpoints".to_owned();
        return Err(Problem::new(what, format!("enable checkpointing, or {remedy}")));
    }
    if let Some(best) = known.iter().find_map(|paths| paths.best.clone()) {
        return Ok(best);
    }
    // what a run knew of its checkpoints is in the newest of them
    let places = Places::of(run);
    let Some(newest) = places.newest(run, Stage::Fit) else {
        let what = format!("`best`, but there is no checkpoint in {}", places.text());
        return Err(Problem::new(what, format!("fit first, or {remedy}")));
    };
    let beginning = peek(&newest);
    let step = beginning.as_ref().map_or(0, |beginning| beginning.global_step);
    let best = match beginning.map(|beginning| beginning.training) {
        Ok(Some(training)) => best_of(&training, step, run),
        Ok(None) => {
            return refuse(format!(
                "`best`, but {}, the newest checkpoint, holds weights only and does not tell which is best",
                newest.display()
            ));
        }
        Err(error) => return refuse(format!("`best`, but the newest checkpoint does not tell: {error}")),
    };
    let Some((best, is_of_newest)) = best else {
        return refuse(format!(
            "`best`, but {}, the newest checkpoint, has no state of a ModelCheckpoint that names one",
            newest.display()
        ));
    };
    // the folder may have been moved, or that of the runs of which this is the newest: version_0/checkpoints/best.ckpt
    let parts: Vec<_> = best.components().collect();
    let ends =
        (1..=3).filter_map(|count| Some(parts.get(parts.len().checked_sub(count)?..)?.iter().collect()));
    let moved = newest.ancestors().skip(1).zip(ends).map(|(folder, end): (_, PathBuf)| folder.join(end));
    match std::iter::once(best.clone()).chain(moved).find(|path| path.exists()) {
        Some(found) => Ok(found),
        None if is_of_newest => {
            let [best, newest_file] = [&best, &newest].map(|path| path.display());
            tracing::info!(
                "the run ended before it wrote {best}, the best; {newest_file} has the same weights"
            );
            Ok(newest)
        }
        None => refuse(format!(
            "`best` is {} according to {}, but that file is neither there nor beside it",
            best.display(),
            newest.display()
        )),
    }
}

/// What the state of a ModelCheckpoint in a checkpoint of `step` names as best, and whether that is of this step; of one that this run has,
/// if there are several.
fn best_of(training: &Value, step: u64, run: &Run) -> Option<(PathBuf, bool)> {
    let states = training["callbacks"].as_array()?.iter();
    let named = states.filter_map(|saved| {
        let (key, state) = (saved[0].as_str().filter(|key| key.starts_with("ModelCheckpoint"))?, &saved[1]);
        let best = state["best_model_path"].as_str()?;
        Some((key, best, state["newest"] == best && state["last_step_saved"] == step))
    });
    let named: Vec<(&str, &str, bool)> = named.collect();
    let own =
        |(key, ..): &&(&str, &str, bool)| run.callbacks.iter().any(|callback| callback.state_key() == *key);
    named.iter().find(own).or(named.first()).map(|(_, path, is_of_step)| (PathBuf::from(path), *is_of_step))
}

/// What the callbacks of this trainer have saved, also those that a module has replaced by others.
pub(crate) fn saved(run: &Run) -> Vec<CheckpointPaths> {
    let own = run.callbacks.iter().filter_map(|callback| callback.checkpoint_paths());
    own.chain(run.replaced.iter().cloned()).collect()
}

/// Folders of checkpoints: those of this configuration, and where they are by default.
struct Places {
    own: Vec<PathBuf>,
    default: PathBuf,
}

impl Places {
    fn of(run: &Run) -> Self {
        let root = &run.facts.default_root_dir;
        let mut own: Vec<PathBuf> = saved(run).into_iter().filter_map(|paths| paths.folder).collect();
        own.extend(run.run_folders.iter().map(|folder| folder.join(CHECKPOINTS)));
        own.push(root.join(CHECKPOINTS));
        Self { own, default: root.join("lightning_logs/*").join(CHECKPOINTS) }
    }

    /// The newest checkpoint that serves `stage`: of those that this trainer has saved, else in the folders of this
    /// configuration, else in the default ones. A damaged one is passed over, with a warning; if there is no other, reading
    /// it says what is wrong. A fit takes one of weights alone only to say that it cannot resume it.
    fn newest(&self, run: &Run, stage: Stage) -> Option<PathBuf> {
        let mut damaged = Vec::new();
        let mut serves = |path: &&PathBuf| match whole(run.world(), path) {
            Ok(beginning) if stage == Stage::Fit => beginning.training.is_some(),
            Ok(_) => path.file_name().is_none_or(|name| name != SWA_FILE),
            Err(error) => {
                damaged.push(error);
                false
            }
        };
        let last = |callback: &dyn Callback| callback.checkpoint_paths().and_then(|paths| paths.last);
        let (savers, others): (Vec<_>, Vec<_>) =
            run.callbacks.iter().map(AsRef::as_ref).partition(|callback| callback.saves_checkpoints());
        let savers = savers.into_iter().filter_map(last);
        let mut known =
            newest_first(savers.chain(run.replaced.iter().filter_map(|paths| paths.last.clone())));
        let mut own = files_in(&self.own);
        // a file that a failure leaves may be of an earlier process
        let left = if known.is_empty() { &mut own } else { &mut known };
        left.extend(others.into_iter().filter_map(last));
        let default = std::slice::from_ref(&self.default);
        let places = [newest_first(known.into_iter()), newest_first(own.into_iter()), files_in(default)];
        let serving = places.iter().flatten().find(&mut serves);
        if let Some(serving) = serving {
            for error in damaged {
                tracing::warn!("{error}; taking {}, the newest before it", serving.display());
            }
        }
        serving.or_else(|| places.iter().flatten().next()).cloned()
    }

    fn text(&self) -> String {
        let all = self.own.iter().chain([&self.default]);
        let mut texts: Vec<String> = all.map(|folder| folder.display().to_string()).collect();
        let mut seen = std::collections::HashSet::new();
        texts.retain(|text| seen.insert(text.clone()));
        texts.join(", ")
    }
}

/// Folders of the runs of this configuration, one of which may be `*` for all that lie beside it. `loggers` are those that
/// the trainer has, or would have if it were not a fast_dev_run.
pub(crate) fn run_folders(loggers: &[Box<dyn Logger>]) -> Vec<PathBuf> {
    let folders = loggers.iter().filter_map(|logger| {
        let folder = logger.log_dir()?;
        Some(match (logger.version(), folder.parent()) {
            (Some(_), Some(runs)) => runs.join("*"),
            _ => folder.to_path_buf(),
        })
    });
    folders.collect()
}

/// The checkpoints in these folders, the one written last first. A folder may have `*` for any name of one of its parts.
fn files_in(folders: &[PathBuf]) -> Vec<PathBuf> {
    newest_first(folders.iter().flat_map(|folder| expand(folder)).flat_map(|folder| entries(&folder)))
}

fn expand(folder: &Path) -> Vec<PathBuf> {
    let mut found = vec![PathBuf::new()];
    for part in folder.components() {
        found = match part.as_os_str() == "*" {
            true => found.iter().flat_map(|folder| entries(folder)).collect(),
            false => found.iter().map(|folder| folder.join(part)).collect(),
        };
    }
    found
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
}

/// By when they were written as they say themselves: copies and `touch` change the times of files. Those that do not say go by
/// these times. Links that lead nowhere and files of other kinds do not count.
fn newest_first(paths: impl Iterator<Item = PathBuf>) -> Vec<PathBuf> {
    let mut found: Vec<_> = paths
        .filter(|path| path.extension().is_some_and(|extension| extension == "ckpt"))
        .filter_map(|path| {
            let modified = path.metadata().ok()?.modified().ok()?;
            let (saved_at, global_step) = match peek(&path) {
                Ok(beginning) => (beginning.saved_at, beginning.global_step),
                Err(_) => (None, 0),
            };
            let since_1970 = || modified.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
            let saved_at = saved_at.map_or_else(|| since_1970().as_micros(), u128::from);
            Some((saved_at, global_step, modified, path))
        })
        .collect();
    found.sort();
    found.into_iter().rev().map(|(.., path)| path).collect()
}

/// Removes what writers that were killed have left in the folders of earlier runs of this configuration.
pub(crate) fn tidy_up(run: &Run) {
    let folders = Places::of(run).own.into_iter().chain(run.run_folders.iter().cloned());
    folders.flat_map(|folder| expand(&folder)).for_each(|folder| remove_leftovers(&folder));
}
