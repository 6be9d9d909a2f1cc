//! The values that steps and hooks log, until they are read.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::objects::{LoggedMetric, MetricObjects, check_scalar};
use super::scope::{Key, Level, LogOptions, LogScope, Phase};
use super::share::{RankValue, share, sync_step};
use super::value::{LogValue, Number, ReduceFx};
use crate::distributed::ProcessGroup;
use crate::error::{ConfigError, Error, Result};
use crate::nn::Metric;

/// Between the name of a value and the loader it is of; no name has it otherwise.
const LOADER: &str = "/dataloader_idx_";

#[derive(Debug)]
pub(super) struct Entry {
    /// Together with `hook` the key of the value: a later hook that logs the same name has an entry of its own.
    pub name: String,
    pub hook: String,
    pub options: LogOptions,
    /// Last value given; tensors are as they were given.
    pub last: LogValue,
    pub updated_this_batch: bool,
    pub reduced: Option<LogValue>,
    pub weight: f64,
    /// Fqn of the metric that is logged, if one is.
    pub metric: Option<String>,
    /// Of a checkpoint, until the value is logged again.
    pub is_restored: bool,
}

impl Entry {
    fn step_name(&self) -> String {
        self.forked("_step")
    }

    fn epoch_name(&self) -> String {
        self.forked("_epoch")
    }

    /// The name, with the suffix of a value of steps or epochs before that of the loader.
    fn forked(&self, suffix: &str) -> String {
        match self.name.split_once(LOADER) {
            _ if !self.options.is_forked() => self.name.clone(),
            Some((name, index)) => format!("{name}{suffix}{LOADER}{index}"),
            None => format!("{}{suffix}", self.name),
        }
    }

    fn key(&self) -> Key {
        (self.hook.clone(), self.name.clone())
    }

    /// What the values of the epoch have become so far. # Sync: reads it back.
    fn rank_value(&self) -> Option<RankValue> {
        Some(RankValue {
            key: self.key(),
            epoch_name: self.epoch_name(),
            sync_dist: self.options.sync_dist,
            reduce_fx: self.options.reduce_fx,
            reduced: Number(self.reduced.as_ref()?.read()),
            weight: self.weight,
        })
    }
}

/// One epoch's worth of logged values.
#[derive(Debug, Default)]
pub(super) struct Results {
    pub entries: Vec<Entry>,
    /// Places in `entries` by hook and name.
    index: HashMap<String, HashMap<String, usize>>,
}

impl Results {
    /// The metrics that are logged with `on_epoch`.
    fn metrics(&self) -> Vec<LoggedMetric> {
        let entries = self.entries.iter().filter(|entry| entry.options.on_epoch);
        let logged = entries.filter_map(|entry| {
            let (key, epoch_name, fqn) = (entry.key(), entry.epoch_name(), entry.metric.clone()?);
            Some(LoggedMetric { key, epoch_name, fqn, version: 0 })
        });
        logged.collect()
    }

    /// What was logged for the step by itself since the batch began. # Sync: reads it back.
    fn step_values(&self) -> Vec<(String, f64)> {
        let is_wanted = |e: &&Entry| e.options.on_step && e.options.logger && e.updated_this_batch;
        let mut values = Vec::new();
        self.entries.iter().filter(is_wanted).for_each(|e| set(&mut values, e.step_name(), e.last.read()));
        values
    }

    pub fn clear(&mut self) {
        self.truncate(0);
    }

    /// Drops all entries but the first `len`.
    pub fn truncate(&mut self, len: usize) {
        self.entries.truncate(len);
        self.index.values_mut().for_each(|names| names.retain(|_, index| *index < len));
    }

    fn find(&self, hook: &str, name: &str) -> Option<usize> {
        self.index.get(hook)?.get(name).copied()
    }

    /// Adds an entry whose hook and name are new.
    pub fn push(&mut self, entry: Entry) -> usize {
        let index = self.entries.len();
        self.index.entry(entry.hook.clone()).or_default().insert(entry.name.clone(), index);
        self.entries.push(entry);
        index
    }
}

/// All values logged in a run, until they are read.
#[derive(Debug, Default)]
pub struct MetricStore {
    scope: LogScope,
    pub(super) train: Results,
    eval: Results,
    /// Latest complete values by name: what `callback_metrics` is in Lightning.
    pub(super) finished: HashMap<String, f64>,
    /// Names that an evaluation, or [`MetricStore::set_callback_metric`], has published since training steps logged them:
    /// hooks see what was published last.
    pub(super) overridden: HashSet<String>,
    /// Names and latest complete values of the progress bar, in order of appearance.
    bar: Vec<(String, f64)>,
    problem: Option<Error>,
    /// The metrics of the module.
    pub(super) objects: MetricObjects,
    /// The ranks with other batches, if there are some.
    group: Option<Arc<ProcessGroup>>,
    /// Other ranks have no such batch: values of the step are this rank's.
    is_alone: bool,
    /// The training epoch has had its batches: what hooks see are its values, no longer those of its last batch.
    train_epoch_is_over: bool,
    /// What the step that is being captured logs.
    captured: Option<Vec<Logged>>,
    /// Nothing is recorded, as in a barebones run.
    is_off: bool,
}

/// Values that hooks and the progress bar can read, by name.
pub(crate) type Known = (HashMap<String, f64>, HashSet<String>, Vec<(String, f64)>);

/// A value as a step logged it, so that it can be logged again when the step is replayed.
#[derive(Debug)]
pub(crate) struct Logged {
    name: String,
    value: LogValue,
    options: LogOptions,
}

impl Logged {
    /// The value, if it is on a device.
    pub(crate) fn tensor(&self) -> Option<&tch::Tensor> {
        self.value.tensor()
    }

    /// The name of the first value that another run of the same code has logged otherwise: numbers by their values, tensors as such.
    pub(crate) fn first_difference(before: &[Self], now: &[Self]) -> Option<String> {
        let is_same = |a: &Self, b: &Self| {
            let is_same_value = match (&a.value, &b.value) {
                (LogValue::Host(a), LogValue::Host(b)) => a.to_bits() == b.to_bits(),
                (LogValue::Tensor(_), LogValue::Tensor(_)) => true,
                _ => false,
            };
            a.name == b.name && is_same_value
        };
        let differs = before.iter().zip(now).find(|(a, b)| !is_same(a, b)).map(|(_, now)| now);
        let added = before.iter().chain(now).nth(before.len().min(now.len()) * 2);
        differs.or(added.filter(|_| before.len() != now.len())).map(|logged| logged.name.clone())
    }
}

impl MetricStore {
    /// Reduces over the ranks with other batches, if there are some.
    pub(crate) fn of_ranks(group: Option<Arc<ProcessGroup>>) -> Self {
        Self { group, ..Self::default() }
    }

    /// The same, recording nothing if the run is to be without.
    pub(crate) fn off_if(self, is_off: bool) -> Self {
        Self { is_off, ..self }
    }

    /// Makes the module's metrics known, by fqn.
    pub(crate) fn set_metrics(&mut self, metrics: Vec<(String, Arc<dyn Metric>)>) {
        self.objects = MetricObjects::new(metrics);
    }

    /// Enters a hook; values logged from now on belong to it. Returns the scope before.
    pub(crate) fn enter(&mut self, scope: LogScope) -> LogScope {
        std::mem::replace(&mut self.scope, scope)
    }

    /// Name of the hook or step that runs.
    pub(crate) fn hook(&self) -> &'static str {
        self.scope.hook
    }

    /// Options a value has in the current hook unless it says otherwise.
    pub(crate) fn default_options(&self) -> LogOptions {
        let on_step = self.scope.level == Level::Step;
        LogOptions {
            prog_bar: false,
            logger: true,
            on_step,
            on_epoch: !on_step,
            reduce_fx: ReduceFx::Mean,
            sync_dist: false,
            add_dataloader_idx: true,
            batch_size: self.scope.batch_size,
        }
    }

    /// Records a value; a mistake is kept for [`MetricStore::take_problem`].
    pub(crate) fn record(&mut self, name: &str, value: LogValue, options: LogOptions) {
        if self.is_off {
            return;
        }
        if let Some(captured) = &mut self.captured {
            captured.push(Logged { name: name.to_owned(), value, options });
            return;
        }
        if let Err(problem) = self.try_record(name, value, options) {
            self.problem.get_or_insert(problem);
        }
    }

    /// Keeps what is logged from now on as it is: nothing is computed with it while a graph is captured.
    pub(crate) fn begin_capture(&mut self) {
        self.captured = Some(Vec::new());
    }

    /// What was logged since [`MetricStore::begin_capture`].
    pub(crate) fn end_capture(&mut self) -> Vec<Logged> {
        self.captured.take().unwrap_or_default()
    }

    /// Records what a captured step logged, with the values that its tensors have now.
    pub(crate) fn record_again(&mut self, logged: &[Logged]) -> Result<(), tch::TchError> {
        for Logged { name, value, options } in logged {
            self.record(name, value.snapshot()?, *options);
        }
        Ok(())
    }

    /// The first mistake made in logging since the last call.
    pub(crate) fn take_problem(&mut self) -> Option<Error> {
        self.problem.take()
    }

    fn try_record(&mut self, name: &str, value: LogValue, options: LogOptions) -> Result<()> {
        self.validate(name, &value, options)?;
        let metric = match &value {
            LogValue::Metric(metric) => Some(self.objects.fqn_of(name, metric.as_ref())?.to_owned()),
            _ => None,
        };
        let last = match &self.group {
            Some(group) if options.sync_dist && options.on_step && !self.is_alone => {
                Some(sync_step(group, &value, options.reduce_fx)?)
            }
            _ => None,
        };
        let LogScope { hook, phase, dataloader_idx, .. } = self.scope;
        let dataloader_idx = dataloader_idx.filter(|_| options.add_dataloader_idx);
        let results = match phase {
            Phase::Train => &mut self.train,
            Phase::Eval => &mut self.eval,
        };
        let of_loader = dataloader_idx.map(|index| format!("{name}{LOADER}{index}"));
        let full_name = of_loader.as_deref().unwrap_or(name);
        let kept = LogOptions { batch_size: None, ..options };
        let index = results.find(hook, full_name).unwrap_or_else(|| {
            results.push(Entry {
                name: full_name.to_owned(),
                hook: hook.to_owned(),
                options: kept,
                last: LogValue::Host(f64::NAN),
                updated_this_batch: false,
                reduced: None,
                weight: 0.0,
                metric: None,
                is_restored: false,
            })
        });
        let entry = &mut results.entries[index];
        if let (None, LogValue::Metric(metric)) = (&entry.metric, &value) {
            check_scalar(name, &metric.compute()?)?; // once an epoch
        }
        if std::mem::take(&mut entry.is_restored) {
            entry.options = kept; // the program may have changed them since the checkpoint
        }
        if entry.options != kept {
            return Err(ConfigError::new(
                format!("log({name})"),
                format!("{hook} logs `{name}` twice with different options"),
                "use one set of options, or two names",
            )
            .into());
        }
        let failed = |error: tch::TchError| {
            ConfigError::new(
                format!("log({name})"),
                format!("the value cannot be reduced: {error}"),
                "log a float",
            )
        };
        if options.on_epoch && metric.is_none() {
            let weight = options.batch_size.unwrap_or(1) as f64;
            let next = value.to_f32().map_err(failed)?;
            let start = LogValue::Host(0.0);
            let reduced = match (&entry.reduced, options.reduce_fx) {
                (None, ReduceFx::Sum | ReduceFx::Min | ReduceFx::Max) => next,
                (old, fx) => old.as_ref().unwrap_or(&start).reduce(&next, fx, weight).map_err(failed)?,
            };
            entry.reduced = Some(reduced);
            entry.weight += weight;
        }
        entry.metric = metric;
        entry.last = last.unwrap_or(value);
        entry.updated_this_batch = true;
        if phase == Phase::Train && !self.overridden.is_empty() {
            self.overridden.remove(&entry.name);
            self.overridden.remove(&entry.step_name());
        }
        Ok(())
    }

    fn validate(&self, name: &str, value: &LogValue, options: LogOptions) -> Result<(), ConfigError> {
        let LogScope { hook, level, .. } = self.scope;
        let refuse =
            |what: String, remedy: &'static str| Err(ConfigError::new(format!("log({name})"), what, remedy));
        if level == Level::Denied {
            return refuse(format!("{hook} cannot log"), "log in a step, a batch hook or an epoch hook");
        }
        if options.on_step && level == Level::EpochOnly {
            return refuse(format!("on_step=true in {hook}, which has no steps"), "use on_epoch(true)");
        }
        if !options.on_step && !options.on_epoch {
            return refuse("on_step=false and on_epoch=false log nothing".to_owned(), "set one of them");
        }
        if name.contains(LOADER) {
            return refuse(
                "the suffix /dataloader_idx_<i> is added by the trainer".to_owned(),
                "choose another name",
            );
        }
        if let LogValue::Tensor(tensor) = value
            && tensor.numel() != 1
        {
            return refuse(
                format!("a tensor of shape {:?} is not a scalar", tensor.size()),
                "reduce it first, for example with mean()",
            );
        }
        if options.on_epoch
            && options.reduce_fx == ReduceFx::Mean
            && options.batch_size.is_none()
            && !matches!(value, LogValue::Metric(_))
            && matches!(level, Level::Step | Level::Epoch)
        {
            return refuse(
                "the batch holds no tensor, so the weight of the epoch's mean is unknown".to_owned(),
                "add .batch_size(n)",
            );
        }
        Ok(())
    }

    /// Starts a training batch: values of the last one are no longer new.
    pub(crate) fn begin_train_batch(&mut self) {
        for entry in &mut self.train.entries {
            entry.updated_this_batch = false;
        }
    }

    /// Starts an evaluation.
    ///
    /// # Errors
    /// If the state of a metric cannot be kept.
    pub(crate) fn begin_eval(&mut self) -> Result<()> {
        self.eval.clear();
        self.objects.begin_eval()
    }

    /// Whether values of steps are this rank's alone, though they are logged with `sync_dist`.
    pub(crate) fn set_alone(&mut self, is_alone: bool) {
        self.is_alone = is_alone;
    }

    /// Values of this training batch for the loggers. # Sync: reads them back.
    pub(crate) fn step_values(&self) -> Vec<(String, f64)> {
        self.train.step_values()
    }

    /// Values of this batch of an evaluation for the loggers. # Sync: reads them back.
    pub(crate) fn eval_step_values(&mut self) -> Vec<(String, f64)> {
        let values = self.eval.step_values();
        self.eval.entries.iter_mut().for_each(|entry| entry.updated_this_batch = false);
        values
    }

    /// Ends the training epoch: values for the loggers. # Sync: reads them back.
    pub(crate) fn finish_train_epoch(&mut self) -> Result<Vec<(String, f64)>> {
        let mut results = std::mem::take(&mut self.train);
        let logged = self.finish(&results, Phase::Train)?.logged;
        self.reset_metrics(&results);
        results.clear();
        self.train = results;
        self.train_epoch_is_over = false;
        Ok(logged)
    }

    /// Publishes the epoch values so far to callbacks without ending the epoch. # Sync: reads them back.
    pub(crate) fn publish_train_epoch(&mut self) -> Result<()> {
        let results = std::mem::take(&mut self.train);
        let finished = self.finish(&results, Phase::Train);
        self.train = results;
        self.train_epoch_is_over = true;
        finished.map(drop)
    }

    /// Publishes the values of an evaluation to hooks after its last batch. # Sync: reads them back.
    ///
    /// # Collective
    /// All ranks must call it.
    pub(crate) fn publish_eval(&mut self) -> Result<()> {
        let results = std::mem::take(&mut self.eval);
        let finished = self.finish(&results, Phase::Eval);
        self.eval = results;
        finished.map(drop)
    }

    /// The values that hooks can read, to be restored after the sanity check.
    pub(crate) fn known(&self) -> Known {
        (self.finished.clone(), self.overridden.clone(), self.bar.clone())
    }

    /// Clears the values that hooks can read, since an evaluation has its own.
    pub(crate) fn forget_values(&mut self) {
        self.finished.clear();
        self.overridden.clear();
        self.bar.clear();
    }

    /// Goes back to what hooks knew.
    pub(crate) fn forget_since(&mut self, known: Known) {
        (self.finished, self.overridden, self.bar) = known;
    }

    /// Ends an evaluation: all its values by name, and those for the loggers. # Sync: reads them back.
    pub(crate) fn finish_eval(&mut self) -> Result<EvalValues> {
        let results = std::mem::take(&mut self.eval);
        let finished = self.finish(&results, Phase::Eval)?;
        self.reset_metrics(&results);
        self.objects.end_eval();
        Ok(finished)
    }

    /// Forgets what the metrics of an epoch that is over have accumulated.
    fn reset_metrics(&self, results: &Results) {
        let logged = results.entries.iter().filter_map(|entry| entry.metric.as_deref());
        logged.for_each(|fqn| self.objects.reset(fqn));
    }

    /// Leaves a run that has failed: metrics are as if its open epoch and evaluation had not begun.
    pub(crate) fn abandon(&mut self) {
        self.discard_eval();
        self.reset_metrics(&self.train);
    }

    /// Forgets an evaluation, as after the sanity check.
    pub(crate) fn discard_eval(&mut self) {
        self.eval.clear();
        self.objects.abandon_eval();
    }

    /// Makes a value the latest of a name. Steps of training have none where it is overridden.
    fn publish(&mut self, name: String, value: f64, phase: Phase) {
        if phase == Phase::Eval {
            self.overridden.insert(name.clone());
        }
        self.finished.insert(name, value);
    }

    fn finish(&mut self, results: &Results, phase: Phase) -> Result<EvalValues> {
        let own = results.entries.iter().filter_map(Entry::rank_value).collect();
        let mut shared = share(self.group.as_deref(), own)?;
        shared.extend(self.objects.values(self.group.as_deref(), results.metrics())?);
        let (mut logged, mut all) = (Vec::new(), Vec::new());
        // Values of a rank without a batch come from other ranks. They are those of steps, and hooks of the epoch override them.
        let is_own = |key: &Key| results.find(&key.0, &key.1).is_some();
        for ((_, name), (epoch_name, value)) in shared.iter().filter(|(key, _)| !is_own(key)) {
            self.publish(epoch_name.clone(), *value, phase);
            self.publish(name.clone(), *value, phase);
            set(&mut all, epoch_name.clone(), *value);
        }
        for entry in &results.entries {
            if entry.options.on_step {
                let value = entry.last.read();
                let is_older = |name: &String| phase == Phase::Train && self.overridden.contains(name);
                let is_shown = entry.options.prog_bar && !is_older(&entry.step_name());
                let names = [entry.step_name(), entry.name.clone()];
                for name in names.into_iter().filter(|name| !is_older(name)).collect::<Vec<_>>() {
                    self.publish(name, value, phase);
                }
                if is_shown {
                    set(&mut self.bar, entry.step_name(), value);
                }
            }
            if let Some((epoch_name, value)) = shared.remove(&entry.key()) {
                set(&mut all, epoch_name, value);
                self.publish(entry.epoch_name(), value, phase);
                self.publish(entry.name.clone(), value, phase);
                if entry.options.prog_bar {
                    set(&mut self.bar, entry.epoch_name(), value);
                }
                if entry.options.logger {
                    set(&mut logged, entry.epoch_name(), value);
                }
            }
        }
        Ok(EvalValues { all, logged })
    }

    /// The last entry whose step value is called `name`, if this epoch has logged it.
    fn live(&self, name: &str) -> Option<&Entry> {
        if self.train_epoch_is_over || self.overridden.contains(name) {
            return None;
        }
        let base = name.strip_suffix("_step").unwrap_or(name);
        let is_called = |e: &&Entry| e.name == name || (e.name == base && e.options.is_forked());
        self.train.entries.iter().rev().find(|e| e.options.on_step && is_called(e))
    }

    /// The latest value called `name`. # Sync: reads a value of the running epoch back.
    pub(crate) fn callback_metric(&self, name: &str) -> Option<f64> {
        self.live(name).map(|entry| entry.last.read()).or_else(|| self.finished.get(name).copied())
    }

    /// Sets a value that no hook has logged.
    pub(crate) fn set_callback_metric(&mut self, name: String, value: f64) {
        self.publish(name, value, Phase::Eval);
    }

    /// All names that have a value, sorted.
    pub(crate) fn callback_metric_names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.finished.keys().cloned().collect();
        for entry in self.train.entries.iter().filter(|e| e.options.on_step) {
            names.push(entry.name.clone());
            names.push(entry.step_name());
        }
        names.sort();
        names.dedup();
        names
    }

    /// Names and values of the progress bar. # Sync: reads values of the running epoch back.
    pub(crate) fn progress_bar_metrics(&self) -> Vec<(String, f64)> {
        let mut shown = self.bar.clone();
        let is_shown =
            |e: &&Entry| e.options.prog_bar && e.options.on_step && !self.overridden.contains(&e.step_name());
        for entry in self.train.entries.iter().filter(is_shown) {
            set(&mut shown, entry.step_name(), entry.last.read());
        }
        shown
    }
}

/// Values of one evaluation.
pub(crate) struct EvalValues {
    pub all: Vec<(String, f64)>,
    pub logged: Vec<(String, f64)>,
}

fn set(values: &mut Vec<(String, f64)>, name: String, value: f64) {
    match values.iter_mut().find(|(known, _)| *known == name) {
        Some(slot) => slot.1 = value,
        None => values.push((name, value)),
    }
}

#[cfg(test)]
mod tests {
    use tch::Tensor;

    use super::super::state::MetricsState;
    use super::*;

    fn store(level: Level) -> MetricStore {
        let mut store = MetricStore::default();
        store.enter(LogScope { hook: "training_step", level, batch_size: Some(4), ..LogScope::default() });
        store
    }

    /// A value as it comes from the host, and as it comes from a device.
    fn both(value: f64) -> [LogValue; 2] {
        [LogValue::from(value), LogValue::Tensor(Tensor::from(value))]
    }

    #[test]
    fn epoch_mean_is_weighted_by_batch_size() {
        for source in 0..2 {
            let mut store = store(Level::Step);
            for (value, size) in [(1.0, 4), (3.0, 2)] {
                let options =
                    LogOptions { on_epoch: true, batch_size: Some(size), ..store.default_options() };
                let [host, device] = both(value);
                store.record("loss", if source == 0 { host } else { device }, options);
            }
            assert_eq!(store.callback_metric("loss_step"), Some(3.0));
            let logged = store.finish_train_epoch().unwrap();
            assert_eq!(logged, vec![("loss_epoch".to_owned(), f64::from(10.0_f32 / 6.0))]);
            assert_eq!(store.callback_metric("loss"), store.callback_metric("loss_epoch"));
            assert!(store.take_problem().is_none());
        }
    }

    /// A name of training steps, of an evaluation, or of both: hooks see what was published last.
    #[test]
    fn what_was_published_last_is_what_hooks_see() {
        for (on_epoch, prog_bar) in [(false, false), (true, false), (false, true), (true, true)] {
            let mut store = store(Level::Step);
            let train = |store: &mut MetricStore, value: f64| {
                store.enter(LogScope {
                    hook: "training_step",
                    level: Level::Step,
                    batch_size: Some(4),
                    ..LogScope::default()
                });
                let options = LogOptions { on_epoch, prog_bar, ..store.default_options() };
                store.record("loss", value.into(), options);
            };
            let evaluate = |store: &mut MetricStore, value: f64| {
                store.begin_eval().unwrap();
                let scope = LogScope {
                    hook: "validation_step",
                    level: Level::Step,
                    phase: Phase::Eval,
                    ..LogScope::default()
                };
                store.enter(LogScope { batch_size: Some(4), ..scope });
                let options =
                    LogOptions { on_step: false, on_epoch: true, prog_bar, ..store.default_options() };
                store.record("loss", value.into(), options);
                store.publish_eval().unwrap();
                store.finish_eval().unwrap();
            };
            train(&mut store, 103.0);
            evaluate(&mut store, 3.0);
            assert_eq!(store.callback_metric("loss"), Some(3.0));
            let again = serde_json::to_string(&store.state()).unwrap();
            let mut resumed = MetricStore::default();
            resumed.restore(serde_json::from_str(&again).unwrap());
            assert_eq!(resumed.callback_metric("loss"), Some(3.0), "after a resume");
            train(&mut store, 104.0);
            assert_eq!(store.callback_metric("loss"), Some(104.0), "the step is later");
            evaluate(&mut store, 4.0);
            store.publish_train_epoch().unwrap();
            let of_epoch = if on_epoch { 103.5 } else { 4.0 }; // an epoch's mean is published after the validation
            assert_eq!(store.callback_metric("loss"), Some(of_epoch));
            store.finish_train_epoch().unwrap();
            assert_eq!(store.callback_metric("loss"), Some(of_epoch));
            let step = store.callback_metric("loss_step");
            assert_eq!(step, on_epoch.then_some(104.0), "a name of its own");
            let shown = store.progress_bar_metrics().into_iter().find(|(name, _)| name == "loss");
            assert_eq!(shown.map(|(_, value)| value), prog_bar.then_some(4.0));
        }
    }

    #[test]
    fn a_tensor_of_the_host_is_read_at_once() {
        let loss = Tensor::from(0.1_f32).set_requires_grad(true);
        assert!(matches!(LogValue::from(&loss * 2.0), LogValue::Host(value) if value == f64::from(0.2_f32)));
        assert!(matches!(LogValue::from(Tensor::from_slice(&[1.0, 2.0])), LogValue::Tensor(_)));
    }

    #[test]
    fn sum_min_max_ignore_batch_size() {
        for (fx, expected) in [(ReduceFx::Sum, 6.0), (ReduceFx::Min, 1.0), (ReduceFx::Max, 3.0)] {
            let mut store = store(Level::Epoch);
            for (source, value) in [2.0, 1.0, 3.0].into_iter().enumerate() {
                let options = LogOptions { reduce_fx: fx, ..store.default_options() };
                let [host, device] = both(value);
                store.record("x", if source == 1 { device } else { host }, options);
            }
            assert_eq!(store.finish_train_epoch().unwrap(), vec![("x".to_owned(), expected)], "{fx:?}");
        }
    }

    #[test]
    fn mistakes_are_named() {
        type Change = fn(&mut LogOptions);
        let cases: [(Level, &str, LogValue, Change, &str); 6] = [
            (Level::Denied, "x", 1.0.into(), |_| {}, "cannot log"),
            (Level::EpochOnly, "x", 1.0.into(), |o| o.on_step = true, "no steps"),
            (Level::Step, "x", 1.0.into(), |o| o.on_step = false, "log nothing"),
            (Level::Step, "x/dataloader_idx_0", 1.0.into(), |_| {}, "suffix"),
            (Level::Step, "x", Tensor::from_slice(&[1.0, 2.0]).into(), |_| {}, "not a scalar"),
            (Level::Epoch, "x", 1.0.into(), |o| o.batch_size = None, "weight"),
        ];
        for (level, name, value, change, text) in cases {
            let mut store = store(level);
            let mut options = store.default_options();
            change(&mut options);
            store.record(name, value, options);
            let problem = store.take_problem().expect("refused").to_string();
            assert!(problem.contains(text) && problem.contains("; "), "{problem}");
        }
    }

    #[test]
    fn state_survives_json_also_when_not_finite() {
        let mut store = store(Level::Step);
        for value in [0.1, f64::NAN, f64::INFINITY] {
            let options = LogOptions { on_epoch: true, ..store.default_options() };
            store.record("loss", value.into(), options);
        }
        let text = serde_json::to_string(&store.state()).expect("serializes");
        let state: MetricsState = serde_json::from_str(&text).expect("parses");
        assert_eq!(state, store.state());
        let mut other = MetricStore::default();
        other.restore(state.clone());
        assert_eq!(other.state(), state);
    }
}
