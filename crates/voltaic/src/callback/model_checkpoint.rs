//! Saves checkpoints: the newest, the best by a metric, or every so often, with Lightning's names and rules.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use voltaic_macros::Defaults;

use super::claims::Claims;
use super::file_name::{FileName, Value, is_last_name};
use super::time_span::TimeSpan;
use crate::checkpoint::{CheckpointPaths, is_checkpoint_below, peek, remove_leftovers};
use crate::config::expand_home;
use crate::data::Stage;
use crate::error::{ConfigError, first_of};
use crate::lightning::Callback;
use crate::module::{CheckpointRequest, HookContext};
use crate::nn::Module;

/// Which direction of the monitored metric is better.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Smaller is better.
    #[default]
    Min,
    /// Larger is better.
    Max,
}

impl Mode {
    /// Whether `a` is better than `b`.
    pub(super) fn is_better(self, a: f64, b: f64) -> bool {
        match self {
            Self::Min => a < b,
            Self::Max => a > b,
        }
    }

    /// Worst possible value; stands for NaN.
    pub(super) fn worst(self) -> f64 {
        match self {
            Self::Min => f64::INFINITY,
            Self::Max => f64::NEG_INFINITY,
        }
    }
}

/// Whether and how `last.ckpt` is kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum SaveLast {
    /// No `last.ckpt`.
    #[default]
    No,
    /// `true`: a file of its own. `false`: none.
    Copy(bool),
    /// `link`: a symbolic link to the newest checkpoint.
    Link(LinkText),
}

/// The word `link`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LinkText {
    /// `link`
    Link,
}

/// What [`ModelCheckpoint`] saves, and when.
#[derive(Defaults, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ModelCheckpointConfig {
    /// Folder for the checkpoints; `checkpoints` below the run's folder unless set.
    pub dirpath: Option<PathBuf>,
    /// File name without `.ckpt`; `{epoch}`, `{step}` and metrics are filled in, as in `{epoch}-{val_loss:.2f}`.
    pub filename: Option<String>,
    /// Metric that decides which checkpoints are best; the newest is kept if none is given.
    pub monitor: Option<String>,
    /// Which direction of `monitor` is better: `min` or `max`.
    pub mode: Mode,
    /// How many of the best to keep: -1 all, 0 none.
    #[default(1)]
    pub save_top_k: i64,
    /// Also keep the newest as `last.ckpt`: `true`, `false` or `link`. A fit that ends before anything was saved then
    /// saves that at its end.
    pub save_last: SaveLast,
    /// Leave out optimizers and loop positions; training cannot be resumed from such a file.
    pub save_weights_only: bool,
    /// Put `name=` before each value in the file name.
    #[default(true)]
    pub auto_insert_metric_name: bool,
    /// Save every so many optimizer steps.
    pub every_n_train_steps: Option<u64>,
    /// Save every so many epochs; 1 unless `every_n_train_steps` or `train_time_interval` is set.
    pub every_n_epochs: Option<u64>,
    /// Save whenever so much time has passed since the last: `DD:HH:MM:SS` or `{minutes: 10}`.
    pub train_time_interval: Option<TimeSpan>,
    /// Save when the run fails or is interrupted.
    pub save_on_exception: bool,
    /// Log a line for each checkpoint saved.
    pub verbose: bool,
    /// Save at the end of the training epoch rather than after validation; decided by the run unless set.
    pub save_on_train_epoch_end: Option<bool>,
    /// Add `-v1`, `-v2` to a name that is taken, rather than overwrite the file.
    #[default(true)]
    pub enable_version_counter: bool,
}

/// A checkpoint kept for its score.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct BestModel {
    path: PathBuf,
    /// Value of the monitored metric; `None` without one.
    score: Option<f64>,
}

/// What is saved of the callback itself.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct State {
    dirpath: PathBuf,
    best_k_models: Vec<BestModel>,
    /// The best one in folders that the run had before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    earlier_best: Option<BestModel>,
    best_model_path: Option<PathBuf>,
    best_model_score: Option<f64>,
    last_model_path: Option<PathBuf>,
    last_step_saved: Option<u64>,
    /// The file of that step, if the model was among the best.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    newest: Option<PathBuf>,
    /// A save that waits for the validation that follows.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    deferred: bool,
}

/// Files of the step that a run resumes from which are not there: the process ended between two files of one moment.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Unwritten {
    newest: Option<BestModel>,
    is_last: bool,
}

/// Saves checkpoints during fit; see [`ModelCheckpointConfig`]. Source: Lightning's `ModelCheckpoint`.
#[derive(Debug)]
pub struct ModelCheckpoint {
    config: ModelCheckpointConfig,
    file_name: FileName,
    state: State,
    /// To be written when training starts.
    unwritten: Unwritten,
    /// Names that are taken, but have no file yet.
    claims: Claims,
    /// Something was saved in this fit.
    has_saved: bool,
    /// Validation has run in this fit, other than as a sanity check.
    has_validated: bool,
    interval: Option<Duration>,
    /// When the last checkpoint was saved, or the fit began.
    last_time: Instant,
}

impl ModelCheckpoint {
    /// A callback that saves as `config` says.
    ///
    /// # Errors
    /// [`ConfigError`] if the options contradict each other.
    pub fn new(mut config: ModelCheckpointConfig) -> Result<Self, ConfigError> {
        config.dirpath = config.dirpath.map(expand_home);
        let mut problems = Vec::new();
        let span = config.train_time_interval.as_ref();
        let interval = match span.map(|span| span.duration("ModelCheckpoint.train_time_interval")).transpose()
        {
            Ok(interval) => interval,
            Err(error) => {
                problems.extend(error.problems);
                None
            }
        };
        let mut refuse = |key: &str, what: String, remedy: &'static str| {
            problems.push(crate::error::ConfigProblem::new(format!("ModelCheckpoint.{key}"), what, remedy));
        };
        if config.save_top_k < -1 {
            refuse("save_top_k", format!("{} is below -1", config.save_top_k), "use -1 to keep all");
        }
        if config.monitor.is_none() && config.save_top_k > 1 {
            let what = format!("{} best checkpoints without a metric to compare", config.save_top_k);
            refuse("save_top_k", what, "set ModelCheckpoint.monitor, or use -1, 0 or 1");
        }
        let triggers = [
            ("every_n_train_steps", config.every_n_train_steps.is_some_and(|n| n > 0)),
            ("every_n_epochs", config.every_n_epochs.is_some_and(|n| n > 0)),
            ("train_time_interval", config.train_time_interval.is_some()),
        ];
        let set: Vec<&str> = triggers.iter().filter(|(_, is_set)| *is_set).map(|(key, _)| *key).collect();
        if let [first, others @ ..] = &set[..]
            && !others.is_empty()
        {
            let what = format!("set together with {}", others.join(" and "));
            refuse(first, what, "use one of them, or several ModelCheckpoint callbacks");
        }
        let template = config.filename.clone().unwrap_or_else(|| "{epoch}-{step}".to_owned());
        let file_name = FileName::parse(&template, config.auto_insert_metric_name);
        if let Err(what) = &file_name {
            refuse("filename", format!("`{template}`: {what}"), "write fields as {name} or {name:.2f}");
        }
        match file_name {
            Ok(file_name) if problems.is_empty() => {
                let state = State::default();
                Ok(Self {
                    config,
                    file_name,
                    state,
                    unwritten: Unwritten::default(),
                    claims: Claims::default(),
                    has_saved: false,
                    has_validated: false,
                    interval,
                    last_time: Instant::now(),
                })
            }
            _ => Err(ConfigError { problems }),
        }
    }

    fn every_n_train_steps(&self) -> u64 {
        self.config.every_n_train_steps.unwrap_or(0)
    }

    fn every_n_epochs(&self) -> u64 {
        let is_by_epoch = self.every_n_train_steps() == 0 && self.interval.is_none();
        self.config.every_n_epochs.unwrap_or(u64::from(is_by_epoch))
    }

    /// Whether epoch checkpoints are saved at the end of the training epoch rather than after validation.
    fn saves_on_train_epoch_end(&self, ctx: &HookContext) -> bool {
        let facts = ctx.facts();
        self.config.save_on_train_epoch_end.unwrap_or_else(|| {
            facts.check_val_every_n_epoch == Some(1)
                && (facts.num_eval_batches == 0 || facts.validates_once_per_epoch)
        })
    }

    fn is_epoch_due(&self, ctx: &HookContext) -> bool {
        let every = self.every_n_epochs();
        every > 0 && (ctx.current_epoch() + 1).is_multiple_of(every)
    }

    fn skips(&self, ctx: &HookContext) -> bool {
        ctx.facts().fast_dev_run
            || ctx.is_sanity_check()
            || self.state.last_step_saved.unwrap_or(0) == ctx.global_step() // before the first step there is nothing to save
    }

    /// Score of the model now; `Err` if the monitored metric has no value yet.
    fn score(&self, ctx: &HookContext) -> Result<Option<f64>, String> {
        let Some(monitor) = &self.config.monitor else { return Ok(None) };
        match ctx.metric(monitor) {
            Some(score) if score.is_nan() => Ok(Some(self.config.mode.worst())),
            Some(score) => Ok(Some(score)),
            None => Err(format!(
                "ModelCheckpoint.monitor: no metric `{monitor}` has been logged; log it, or choose one of: {}",
                ctx.metric_names().join(", ")
            )),
        }
    }

    /// Rank 0's score on all ranks, so that all save at once; without `sync_dist` each has metrics of its own.
    ///
    /// # Collective
    /// All ranks must call it.
    fn agreed_score(&self, ctx: &HookContext) -> anyhow::Result<Result<Option<f64>, String>> {
        let bits = self.score(ctx).map(|score| score.map(f64::to_bits)); // JSON has no infinity
        Ok(of_rank_zero(ctx, bits)?.map(|score| score.map(f64::from_bits)))
    }

    /// Saves if the model is among the best, and updates `last.ckpt`.
    fn save(&mut self, ctx: &mut HookContext, score: Option<f64>) {
        let top_k = self.config.save_top_k;
        let kept = &self.state.best_k_models;
        let worst = worst_of(kept, self.config.mode);
        let is_full = top_k >= 0 && kept.len() as i64 >= top_k;
        let is_good = match (score, is_full, worst) {
            _ if top_k == 0 => false,
            (_, false, _) | (None, ..) => true,
            (Some(score), true, Some(worst)) => {
                self.config.mode.is_better(score, kept[worst].score.unwrap_or(self.config.mode.worst()))
            }
            (Some(_), true, None) => true,
        };
        let (mut newest, mut then_remove) = (None, None);
        if is_good {
            let replaced = (is_full && top_k > 0).then_some(worst).flatten();
            let replaced = replaced.map(|index| self.state.best_k_models.remove(index).path);
            let path = self.free_path(ctx, replaced.as_deref());
            self.state.best_k_models.push(BestModel { path: path.clone(), score });
            self.update_best();
            newest = Some(path.clone());
            let is_own = |old: &PathBuf| is_checkpoint_below(&self.state.dirpath, old);
            then_remove = replaced.filter(|old| *old != path && is_own(old));
            // `last.ckpt` may still lead to what is replaced: that goes once the link leads to the new one
            let goes_with_link = matches!(self.config.save_last, SaveLast::Link(_));
            let with_file = if goes_with_link { None } else { then_remove.take() };
            self.request(ctx, path, None, with_file);
        }
        self.state.last_step_saved = Some(ctx.global_step());
        self.state.newest.clone_from(&newest);
        self.has_saved = true;
        self.last_time = Instant::now();
        if self.config.verbose {
            let (epoch, step) = (ctx.current_epoch(), ctx.global_step());
            match &newest {
                Some(path) => tracing::info!("epoch {epoch}, step {step}: saving {}", path.display()),
                None => tracing::info!("epoch {epoch}, step {step}: not among the best {top_k}"),
            }
        }
        self.update_last(ctx, newest, then_remove);
    }

    /// Makes `newest`, if something was saved, the last checkpoint, as `save_last` has it; then removes one.
    fn update_last(&mut self, ctx: &mut HookContext, newest: Option<PathBuf>, then_remove: Option<PathBuf>) {
        match (self.config.save_last, newest) {
            (SaveLast::No | SaveLast::Copy(false), newest) => {
                if newest.is_some() {
                    self.state.last_model_path = newest;
                }
            }
            (SaveLast::Link(_), newest @ Some(_)) => self.save_last(ctx, newest, then_remove),
            (SaveLast::Copy(true) | SaveLast::Link(_), _) => self.save_last(ctx, None, None),
        }
    }

    /// Writes `last.ckpt`, or links it to a checkpoint; then removes one.
    fn save_last(&mut self, ctx: &mut HookContext, link_to: Option<PathBuf>, then_remove: Option<PathBuf>) {
        let last = self.last_path(ctx);
        self.state.last_model_path = Some(last.clone());
        self.request(ctx, last, link_to, then_remove);
    }

    /// `last.ckpt`, or `last-v1.ckpt` and so on beside those of other runs.
    fn last_path(&mut self, ctx: &HookContext) -> PathBuf {
        if let Some(own) = &self.state.last_model_path
            && is_last_name(own)
            && own.parent() == Some(&self.state.dirpath)
        {
            return own.clone();
        }
        let first = self.state.dirpath.join("last.ckpt");
        if !self.config.enable_version_counter {
            return first;
        }
        let folder = self.state.dirpath.clone();
        let versions = (1_u64..).map(|version| folder.join(format!("last-v{version}.ckpt")));
        let paths = std::iter::once(first.clone()).chain(versions);
        self.claims.take_free(ctx.is_global_zero(), paths, None).unwrap_or(first)
    }

    fn request(
        &self,
        ctx: &mut HookContext,
        path: PathBuf,
        link_to: Option<PathBuf>,
        then_remove: Option<PathBuf>,
    ) {
        let weights_only = self.config.save_weights_only;
        let then_remove = then_remove.into_iter().collect();
        ctx.request_checkpoint(CheckpointRequest { path, weights_only, link_to, then_remove });
    }

    fn keeps_last(&self) -> bool {
        !matches!(self.config.save_last, SaveLast::No | SaveLast::Copy(false))
    }

    fn update_best(&mut self) {
        let kept = self.state.earlier_best.iter().chain(&self.state.best_k_models);
        let best = kept.reduce(|best, next| match (best.score, next.score) {
            (Some(a), Some(b)) if !self.config.mode.is_better(b, a) => best,
            (Some(_), None) => best,
            _ => next, // without scores the newest is best
        });
        self.state.best_model_path = best.map(|best| best.path.clone());
        self.state.best_model_score = best.and_then(|best| best.score);
    }

    /// Drops checkpoints that the state names and that are not there. Those of the step that the run resumes from are left to
    /// [`Self::write_unwritten`].
    ///
    /// # Collective
    /// If the state names a checkpoint. Rank 0 looks, since others may not see the folder.
    fn forget_missing_files(&mut self, ctx: &HookContext) -> crate::Result<()> {
        let State { best_k_models, earlier_best, last_model_path, .. } = &self.state;
        if best_k_models.is_empty() && earlier_best.is_none() && last_model_path.is_none() {
            return Ok(());
        }
        let saved_now = self.state.last_step_saved.filter(|step| *step == ctx.global_step());
        let own = self.state.newest.iter().filter(|newest| saved_now.is_some() && is_missing(newest));
        let mut own = own.filter(|newest| is_checkpoint_below(&self.state.dirpath, newest));
        let is_stale = |last: &PathBuf, step| {
            is_missing(last) || peek(last).is_ok_and(|beginning| beginning.global_step < step)
        };
        let last = last_model_path.as_ref().filter(|_| self.keeps_last()).zip(saved_now);
        let is_last = last.is_some_and(|(last, step)| is_stale(last, step));
        let named = best_k_models.iter().chain(earlier_best).map(|kept| &kept.path);
        let missing: Vec<&PathBuf> = named.filter(|path| is_missing(path)).collect();
        let found = (missing.into_iter().cloned().collect::<Vec<_>>(), own.next().cloned(), is_last);
        let (missing, own, is_last) = of_rank_zero(ctx, found)?;
        let newest = best_k_models.iter().find(|kept| Some(&kept.path) == own.as_ref()).cloned();
        let is_gone = |kept: &BestModel| missing.contains(&kept.path);
        let gone = missing.iter().filter(|path| newest.as_ref().is_none_or(|newest| newest.path != **path));
        let gone: Vec<String> = gone.map(|path| path.display().to_string()).collect();
        if !gone.is_empty() && ctx.is_global_zero() {
            let all = first_of(&gone, 5);
            tracing::warn!(
                "the checkpoint names {all} among the best, which is not there: its score no longer counts"
            );
        }
        if missing.is_empty() && !is_last {
            return Ok(());
        }
        self.state.best_k_models.retain(|kept| !is_gone(kept));
        self.state.earlier_best.take_if(|kept| is_gone(kept));
        self.unwritten = Unwritten { newest, is_last };
        self.update_best();
        Ok(())
    }

    /// Writes what the process that the run resumes ended before.
    fn write_unwritten(&mut self, ctx: &mut HookContext) {
        let Unwritten { newest, is_last } = std::mem::take(&mut self.unwritten);
        let newest = newest.map(|kept| {
            self.state.best_k_models.push(kept.clone());
            self.update_best();
            self.request(ctx, kept.path.clone(), None, None);
            kept.path
        });
        if newest.is_none() && !is_last {
            return;
        }
        if ctx.is_global_zero() {
            tracing::info!(
                "writing the files of global_step {} that the resumed run had not written",
                ctx.global_step()
            );
        }
        self.update_last(ctx, newest.or_else(|| self.state.newest.clone()), None);
    }

    /// Drops checkpoints that the state names outside the folder: the state may have been read from a file, and what it
    /// names is removed once it is replaced.
    ///
    /// # Collective
    /// If there are such checkpoints. Rank 0 looks, since others may not see the folder.
    fn forget_foreign_files(&mut self, ctx: &HookContext) -> crate::Result<()> {
        let State { dirpath, best_k_models, .. } = &mut self.state;
        if best_k_models.is_empty() {
            return Ok(());
        }
        let is_own = |kept: &BestModel| is_checkpoint_below(dirpath, &kept.path);
        let mut are_own =
            of_rank_zero(ctx, best_k_models.iter().map(is_own).collect::<Vec<_>>())?.into_iter();
        best_k_models.retain(|kept| {
            let is_own = are_own.next().unwrap_or(false);
            if !is_own && ctx.is_global_zero() {
                tracing::warn!(
                    "the checkpoint names {} as one to keep, which is not a checkpoint below {}; it is left alone",
                    kept.path.display(),
                    dirpath.display()
                );
            }
            is_own
        });
        Ok(())
    }

    /// The name from the template, with `-v1`, `-v2` if it is taken by another file than `replaced`.
    fn free_path(&mut self, ctx: &HookContext, replaced: Option<&Path>) -> PathBuf {
        let name = self.file_name.fill(|field| match field {
            "epoch" => Value::Count(ctx.current_epoch()),
            "step" => Value::Count(ctx.global_step()),
            metric => ctx.metric(metric).map_or(Value::Count(0), Value::Metric),
        });
        let folder = self.state.dirpath.clone();
        let path = |suffix: String| folder.join(format!("{name}{suffix}.ckpt"));
        let first = path(String::new());
        if !self.config.enable_version_counter {
            return first;
        }
        let versions = (1_u64..).map(|version| path(format!("-v{version}")));
        let paths = std::iter::once(first.clone()).chain(versions);
        self.claims.take_free(ctx.is_global_zero(), paths, replaced).unwrap_or(first)
    }
}

/// The value of rank 0. # Collective
fn of_rank_zero<T: Serialize + serde::de::DeserializeOwned>(ctx: &HookContext, value: T) -> crate::Result<T> {
    match ctx.process_group() {
        Some(group) => group.broadcast_object(&value, 0),
        None => Ok(value),
    }
}

/// Whether a folder is there, and has no such file. One that was moved or is not mounted may have it.
fn is_missing(path: &Path) -> bool {
    !path.exists() && path.parent().is_some_and(Path::exists)
}

/// Index of the checkpoint that goes first when there is no room.
fn worst_of(kept: &[BestModel], mode: Mode) -> Option<usize> {
    (0..kept.len()).reduce(|worst, next| match (kept[worst].score, kept[next].score) {
        (Some(a), Some(b)) if mode.is_better(a, b) => next,
        (Some(_), None) => next,
        _ => worst, // without scores the oldest goes first
    })
}

impl Callback for ModelCheckpoint {
    fn state_key(&self) -> String {
        let Self { config: c, .. } = self;
        let monitor = c.monitor.as_deref().unwrap_or("none");
        let interval =
            self.interval.map(|time| format!(", train_time_interval={time:?}")).unwrap_or_default();
        format!(
            "ModelCheckpoint{{monitor={monitor}, mode={:?}, every_n_train_steps={}, every_n_epochs={}{interval}}}",
            c.mode,
            self.every_n_train_steps(),
            self.every_n_epochs()
        )
    }

    fn saves_on_exception(&self) -> bool {
        self.config.save_on_exception
    }

    fn saves_checkpoints(&self) -> bool {
        true
    }

    fn checkpoint_paths(&self) -> Option<CheckpointPaths> {
        let State { best_model_path, last_model_path, .. } = self.state.clone();
        let folder = self.config.dirpath.clone();
        Some(CheckpointPaths { best: best_model_path, last: last_model_path, folder })
    }

    fn state_dict(&self) -> Option<serde_json::Value> {
        serde_json::to_value(&self.state).ok()
    }

    fn load_state_dict(&mut self, state: &serde_json::Value) -> anyhow::Result<()> {
        self.state = serde_json::from_value(state.clone())?;
        Ok(())
    }

    fn on_checkpoints_written(&mut self) {
        self.claims.release_written();
    }

    fn teardown(&mut self, _stage: Stage, _module: &mut dyn Module) -> anyhow::Result<()> {
        self.claims.release_all();
        Ok(())
    }

    fn on_fit_start(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        let dirpath = self.config.dirpath.clone().unwrap_or_else(|| ctx.log_dir().join("checkpoints"));
        self.unwritten = Unwritten::default();
        self.state.last_step_saved.take_if(|step| *step > ctx.global_step()); // that was another fit
        self.forget_missing_files(ctx)?;
        if !self.state.dirpath.as_os_str().is_empty() && self.state.dirpath != dirpath {
            tracing::info!(
                "checkpoints of the resumed run are in {}; this run saves to {} and keeps those",
                self.state.dirpath.display(),
                dirpath.display()
            );
            if let Some(kept) = &mut self.unwritten.newest
                && let Ok(name) = kept.path.strip_prefix(&self.state.dirpath)
            {
                kept.path = dirpath.join(name);
            }
            self.state.best_k_models.clear();
            let score = self.state.best_model_score;
            self.state.earlier_best =
                self.state.best_model_path.clone().map(|path| BestModel { path, score });
        }
        self.state.dirpath = dirpath;
        self.forget_foreign_files(ctx)?;
        self.state.deferred &= ctx.progress().validation_is_open; // else that was another fit
        self.has_saved = false;
        self.has_validated = false;
        self.last_time = Instant::now();
        if !ctx.facts().fast_dev_run {
            remove_leftovers(&self.state.dirpath);
        }
        Ok(())
    }

    fn on_train_start(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        self.write_unwritten(ctx);
        Ok(())
    }

    fn on_train_batch_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        let every = self.every_n_train_steps();
        let is_step = every > 0 && ctx.global_step() > 0 && ctx.global_step().is_multiple_of(every);
        let is_time = match self.interval {
            Some(interval) => of_rank_zero(ctx, self.last_time.elapsed() >= interval)?, // clocks differ
            None => false,
        };
        if !(is_step || is_time) || self.skips(ctx) {
            return Ok(());
        }
        if ctx.will_validate() {
            self.state.deferred = true; // the metrics of this step come with the validation that follows
            return Ok(());
        }
        match self.agreed_score(ctx)? {
            Ok(score) => self.save(ctx, score),
            Err(reason) => tracing::warn!("no checkpoint at step {}: {reason}", ctx.global_step()),
        }
        Ok(())
    }

    fn on_validation_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        let is_due = self.state.deferred || (self.is_epoch_due(ctx) && !self.saves_on_train_epoch_end(ctx));
        if !ctx.is_training() || !is_due || self.skips(ctx) {
            return Ok(());
        }
        self.state.deferred = false;
        match self.agreed_score(ctx)? {
            Ok(score) => self.save(ctx, score),
            // the module has no validation_step
            Err(reason) if !self.has_validated => {
                if ctx.is_global_zero() {
                    tracing::warn!("no checkpoint at step {}: {reason}", ctx.global_step());
                }
            }
            Err(reason) => anyhow::bail!(reason),
        }
        Ok(())
    }

    fn on_validation_batch_end(
        &mut self,
        ctx: &mut HookContext,
        _module: &mut dyn Module,
    ) -> anyhow::Result<()> {
        self.has_validated |= !ctx.is_sanity_check();
        Ok(())
    }

    fn on_train_epoch_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        if self.is_epoch_due(ctx) && self.saves_on_train_epoch_end(ctx) && !self.skips(ctx) {
            let score = match self.agreed_score(ctx)? {
                Ok(score) => score,
                Err(reason) if ctx.is_cut_short() => {
                    if ctx.is_global_zero() {
                        tracing::warn!(
                            "training ended within its epoch, so the checkpoint has no score: {reason}"
                        );
                    }
                    None
                }
                Err(reason) if !self.has_validated => {
                    if ctx.is_global_zero() {
                        tracing::warn!("no checkpoint of epoch {}: {reason}", ctx.current_epoch());
                    }
                    return Ok(()); // a validation to come may log it
                }
                Err(reason) => return Err(anyhow::Error::msg(reason)),
            };
            self.save(ctx, score);
        }
        Ok(())
    }

    fn on_train_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        if self.keeps_last() && !self.has_saved && !self.skips(ctx) {
            self.state.last_step_saved = Some(ctx.global_step());
            self.state.newest = None;
            self.save_last(ctx, None, None);
        }
        Ok(())
    }

    fn on_exception(&mut self, ctx: &mut HookContext, _error: &crate::Error) {
        self.claims.release_all(); // earlier requests are not written
        if self.config.save_on_exception && ctx.has_begun() && !self.skips(ctx) {
            // beside the best, since a failure says nothing about the metric: no score keeps it away, and it evicts no file.
            // `last_step_saved` stays: a resumed run has yet to save this step after its validation.
            let path = self.free_path(ctx, None);
            tracing::info!("saving {} of the run that fails", path.display());
            self.request(ctx, path.clone(), None, None);
            self.has_saved = true;
            self.update_last(ctx, Some(path), None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contradictions_are_refused_together() {
        let config = ModelCheckpointConfig {
            save_top_k: 3,
            every_n_train_steps: Some(5),
            every_n_epochs: Some(1),
            filename: Some("{epoch".to_owned()),
            ..ModelCheckpointConfig::default()
        };
        let problems = ModelCheckpoint::new(config).expect_err("three mistakes").problems;
        let keys: Vec<&str> = problems.iter().map(|p| p.key.as_str()).collect();
        assert_eq!(
            keys,
            ["ModelCheckpoint.save_top_k", "ModelCheckpoint.every_n_train_steps", "ModelCheckpoint.filename"]
        );
    }

    #[test]
    fn worst_and_best_follow_the_mode() {
        let kept = |scores: &[f64]| -> Vec<BestModel> {
            scores.iter().map(|&s| BestModel { path: format!("{s}").into(), score: Some(s) }).collect()
        };
        assert_eq!(worst_of(&kept(&[0.2, 0.9, 0.5]), Mode::Min), Some(1));
        assert_eq!(worst_of(&kept(&[0.2, 0.9, 0.5]), Mode::Max), Some(0));
        assert_eq!(worst_of(&[], Mode::Max), None);
        let without_score = BestModel { path: "cut short".into(), score: None };
        let mut mixed = kept(&[0.2, 0.9]);
        mixed.push(without_score);
        assert_eq!(worst_of(&mixed, Mode::Max), Some(2));
        let mut callback = ModelCheckpoint::new(ModelCheckpointConfig::default()).expect("valid");
        callback.state.best_k_models = kept(&[0.2, 0.9, 0.5]);
        callback.update_best();
        assert_eq!(callback.state.best_model_score, Some(0.2));
        callback.state.best_k_models = mixed;
        callback.update_best();
        assert_eq!(callback.state.best_model_score, Some(0.2));
    }
}
