//! The module, the data and the callback of a drawn run: they do and note what those of `record.py` do and note.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use serde::Deserialize;
use serde_json::{Map, Value};
use voltaic::callback::Callback;
use voltaic::data::{DataLoader, DataModule, TensorDataset};
use voltaic::module::{
    Hook, HookContext, LightningModule, LogEntry, ModuleTensors, ReduceFx, StepContext, StepHook,
};
use voltaic::nn::Parameter;
use voltaic::optim::{
    GradientClip, LrScheduler, LrSchedulerSpec, Optimizer, OptimizerConfig, Optimizers, ParamGroup,
    ParamGroupSpec,
};
use voltaic::trainer::LrSchedulerSettings;
use voltaic::{Error, Kind, Module, Tensor};

/// What is drawn; see `draw.py`.
#[derive(Debug, Clone, Deserialize)]
pub struct Settings {
    pub seed: u64,
    pub data: DataSettings,
    pub trainer: Map<String, Value>,
    pub logs: Vec<Log>,
    pub manual: bool,
    pub optimizers: Vec<OptimizerSettings>,
    pub callbacks: Vec<Value>,
    pub events: Events,
    pub resume: Option<Resume>,
    pub then: Vec<String>,
}

#[derive(Debug, Clone, Deserialize)]
pub struct DataSettings {
    pub train: (i64, usize, bool),
    pub val: Vec<(i64, usize)>,
    pub test: Vec<(i64, usize)>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Log {
    at: String,
    name: String,
    value: String,
    on_step: Option<bool>,
    on_epoch: Option<bool>,
    reduce_fx: Option<ReduceFx>,
    prog_bar: Option<bool>,
    logger: Option<bool>,
    batch_size: Option<usize>,
    add_dataloader_idx: Option<bool>,
}

impl Log {
    /// Whether `name` is what a step of an evaluation logs by itself.
    pub fn is_of_steps(&self, name: &str) -> bool {
        let is_ours = name.split('/').next().is_some_and(|base| base.trim_end_matches("_step") == self.name);
        is_ours && self.on_step == Some(true) && !self.at.contains("train")
    }
}

#[derive(Debug, Clone, Deserialize)]
pub struct OptimizerSettings {
    optimizer: OptimizerConfig,
    scheduler: Option<LrSchedulerSettings>,
    every: Option<usize>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Events {
    stop: Option<(String, usize)>,
    fail: Option<(String, usize)>,
    none: Option<(usize, usize)>,
    skip_epoch: Option<(u64, usize)>,
    nan_epoch: Option<u64>,
}

#[derive(Debug, Clone, Deserialize)]
pub struct Resume {
    pub pick: i64,
    pub trainer: Map<String, Value>,
}

/// What one phase is seen to do.
#[derive(Debug, Default, Clone)]
pub struct Seen {
    pub hooks: Vec<String>,
    pub losses: Vec<f64>,
    pub rates: Vec<Vec<f64>>,
    pub saves: Vec<(u64, u64)>,
    /// How often something has been asked.
    counts: BTreeMap<&'static str, usize>,
}

#[derive(Debug, Default, Clone)]
pub struct Notes(Arc<Mutex<Seen>>);

impl Notes {
    pub fn with<T>(&self, f: impl FnOnce(&mut Seen) -> T) -> T {
        f(&mut self.0.lock().unwrap())
    }

    fn hook(&self, word: impl Into<String>) {
        self.with(|seen| seen.hooks.push(word.into()));
    }

    /// How often this has been asked before.
    fn count(&self, what: &'static str) -> usize {
        self.with(|seen| {
            let count = seen.counts.entry(what).or_default();
            *count += 1;
            *count - 1
        })
    }
}

/// The letters of `record.py`.
fn code(hook: &str) -> &'static str {
    match hook {
        "on_fit_start" => "f",
        "on_fit_end" => "F",
        "on_train_start" => "t",
        "on_train_end" => "T",
        "on_train_epoch_start" => "e",
        "on_train_epoch_end" => "E",
        "on_train_batch_start" => "b",
        "on_train_batch_end" => "B",
        "on_before_zero_grad" => "z",
        "on_before_backward" => "d",
        "on_after_backward" => "D",
        "on_before_optimizer_step" => "o",
        "on_validation_start" => "v",
        "on_validation_end" => "V",
        "on_validation_epoch_start" => "w",
        "on_validation_epoch_end" => "W",
        "on_validation_batch_start" => "x",
        "on_validation_batch_end" => "X",
        "on_test_start" => "u",
        "on_test_end" => "U",
        "on_test_epoch_start" => "y",
        "on_test_epoch_end" => "Y",
        "on_test_batch_start" => "q",
        "on_test_batch_end" => "Q",
        "on_sanity_check_start" => "n",
        "on_sanity_check_end" => "N",
        other => panic!("{other} has no letter"),
    }
}

/// The word for a hook with what it tells.
fn word(who: char, hook: &str, ctx: &HookContext) -> String {
    let code = code(hook);
    let index = if hook.contains("_batch_") { ctx.batch_idx().to_string() } else { String::new() };
    let more = match hook {
        "on_train_epoch_start" => ctx.current_epoch().to_string(),
        "on_train_batch_end" | "on_validation_start" => format!(":{}", ctx.global_step()),
        _ => String::new(),
    };
    format!("{who}{code}{index}{more}")
}

#[derive(Module)]
pub struct Net {
    pub w: Parameter,
    pub v: Parameter,
    #[module(skip)]
    settings: Settings,
    #[module(skip)]
    pub notes: Notes,
}

impl Net {
    pub fn new(settings: &Settings, notes: &Notes) -> Self {
        let weight = |values: [f32; 2]| Parameter::new(Tensor::from_slice(&values));
        Self {
            w: weight([0.5, -0.25]),
            v: weight([-0.5, 0.75]),
            settings: settings.clone(),
            notes: notes.clone(),
        }
    }

    fn loss(&self, batch: &Tensor, weight: &Parameter) -> anyhow::Result<Tensor> {
        let off = batch.f_narrow(1, 0, 2)?.f_matmul(weight)? - batch.f_select(1, 2)?;
        Ok(off.f_square()?.f_mean(Kind::Float)?)
    }

    /// Which values are logged at this place.
    fn logs(
        &self,
        at: &str,
        epoch: u64,
        (step, index): (u64, usize),
        loss: Option<&Tensor>,
    ) -> Vec<(Log, Tensor)> {
        let number = |value: f64| Tensor::from(value as f32);
        let zig = || match self.settings.events.nan_epoch == Some(epoch) {
            true => f64::NAN,
            false => ((7 * epoch + 3) % 5) as f64 / 8.0,
        };
        let logs = self.settings.logs.iter().filter(|log| log.at == at);
        let with_value = logs.map(|log| {
            let value = match log.value.as_str() {
                "loss" => loss.unwrap().detach(),
                "index" => number(index as f64),
                "epoch" => number(epoch as f64),
                "step" => number(step as f64),
                "tensor" => number(0.25 + epoch as f64),
                "zig" => number(zig()),
                other => panic!("no value {other}"),
            };
            (log.clone(), value)
        });
        with_value.collect()
    }

    fn fails(&self, at: &'static str) -> anyhow::Result<()> {
        if let Some((place, count)) = &self.settings.events.fail
            && place == at
            && self.notes.count("fail") == *count
        {
            anyhow::bail!("the settings ask for it");
        }
        Ok(())
    }

    fn log_in_step(&self, at: &str, loss: &Tensor, ctx: &mut StepContext) {
        for (log, value) in
            self.logs(at, ctx.current_epoch(), (ctx.global_step(), ctx.batch_idx()), Some(loss))
        {
            entry(&log, ctx.log(&log.name, &value));
        }
    }

    fn own_hook(&mut self, hook: &str, ctx: &mut HookContext) -> anyhow::Result<()> {
        self.notes.hook(word('M', hook, ctx));
        if hook == "on_train_epoch_end" {
            self.fails("on_train_epoch_end")?;
        }
        for (log, value) in self.logs(hook, ctx.current_epoch(), (ctx.global_step(), ctx.batch_idx()), None) {
            entry(&log, ctx.log(&log.name, &value));
        }
        if hook == "on_train_batch_start"
            && self.settings.events.skip_epoch == Some((ctx.current_epoch(), ctx.batch_idx()))
        {
            ctx.skip_epoch();
        }
        if hook == "on_train_epoch_end" && self.settings.manual {
            let schedulers = self.settings.optimizers.iter().filter_map(|spec| spec.scheduler.as_ref());
            for (index, spec) in schedulers.enumerate() {
                let follows = serde_json::to_value(&spec.scheduler)?["class_path"] == "ReduceLROnPlateau";
                let metric = follows.then(|| ctx.current_epoch() as f64);
                ctx.lr_scheduler_step(index, metric)?;
            }
        }
        Ok(())
    }
}

fn entry(log: &Log, mut entry: LogEntry) {
    macro_rules! set {
        ($($option:ident),*) => {$(
            if let Some(value) = log.$option {
                entry = entry.$option(value);
            }
        )*};
    }
    set!(on_step, on_epoch, reduce_fx, prog_bar, logger, batch_size, add_dataloader_idx);
    drop(entry);
}

macro_rules! hooks {
    ($($hook:ident),*; $($shared:ident),*) => {
        $(fn $hook(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
            self.own_hook(stringify!($hook), ctx)
        })*
        $(fn $shared(&self, ctx: &mut HookContext) -> anyhow::Result<()> {
            self.notes.hook(word('M', stringify!($shared), ctx));
            Ok(())
        })*
    };
}

impl LightningModule for Net {
    type Batch = Tensor;

    fn training_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        self.notes.hook(format!("Ms{}", ctx.batch_idx()));
        self.fails("training_step")?;
        let loss = self.loss(batch, &self.w)?;
        self.notes.with(|seen| seen.losses.push(loss.double_value(&[])));
        self.log_in_step("training_step", &loss, ctx);
        if !self.settings.manual {
            let none = self.settings.events.none.is_some_and(|(of, at)| ctx.batch_idx() % of == at);
            return Ok(if none { ctx.no_loss() } else { loss });
        }
        let weights = [&self.w, &self.v];
        for (index, (spec, weight)) in self.settings.optimizers.iter().zip(weights).enumerate() {
            if (ctx.batch_idx() + 1).is_multiple_of(spec.every.unwrap_or(1)) {
                ctx.toggle_optimizer(index)?;
                ctx.optimizer(index)?.zero_grad()?;
                ctx.manual_backward(&self.loss(batch, weight)?)?;
                ctx.optimizer(index)?.step()?;
                ctx.untoggle_optimizer()?;
            }
        }
        Ok(ctx.no_loss())
    }

    fn validation_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<()> {
        self.notes.hook(format!("Mp{}", ctx.batch_idx()));
        if !self.notes.with(|seen| in_sanity_check(&seen.hooks)) {
            self.fails("validation_step")?;
        }
        self.log_in_step("validation_step", &self.loss(batch, &self.w)?, ctx);
        Ok(())
    }

    fn test_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<()> {
        self.notes.hook(format!("Mi{}", ctx.batch_idx()));
        self.log_in_step("test_step", &self.loss(batch, &self.w)?, ctx);
        Ok(())
    }

    fn automatic_optimization(&self) -> bool {
        !self.settings.manual
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        let mut all = Optimizers::none();
        for (spec, weight) in self.settings.optimizers.iter().zip([("w", &self.w), ("v", &self.v)]) {
            let group = ParamGroupSpec::new([(weight.0.to_owned(), weight.1.clone())]);
            let mut one = Optimizers::new(spec.optimizer.clone()).groups([group]);
            if let Some(settings) = spec.scheduler.clone() {
                let LrSchedulerSettings { scheduler, interval, frequency, monitor, strict, name } = settings;
                let mut spec =
                    LrSchedulerSpec::new(scheduler).interval(interval).frequency(frequency).strict(strict);
                if let Some(monitor) = monitor {
                    spec = spec.monitor(monitor);
                }
                if let Some(name) = name {
                    spec = spec.name(name);
                }
                one = one.scheduler(spec);
            }
            all = all.and(one);
        }
        Ok(all)
    }

    fn optimizer_zero_grad(
        &self,
        optimizer: &mut dyn Optimizer,
        _ctx: &mut HookContext,
    ) -> anyhow::Result<()> {
        self.notes.hook("MZ");
        Ok(optimizer.zero_grad()?)
    }

    fn configure_gradient_clipping(
        &self,
        optimizer: &mut dyn Optimizer,
        clip: Option<GradientClip>,
        _ctx: &mut HookContext,
    ) -> anyhow::Result<()> {
        self.notes.hook("Mc");
        Ok(clip.map_or(Ok(()), |clip| optimizer.clip(clip).map(drop))?)
    }

    fn lr_scheduler_step(
        &self,
        scheduler: &mut dyn LrScheduler,
        groups: &mut [ParamGroup],
        metric: Option<f64>,
    ) -> anyhow::Result<()> {
        self.notes.hook("Ml");
        Ok(scheduler.step(groups, metric)?)
    }

    fn on_load_checkpoint(&mut self, _saved: &Value, _tensors: &ModuleTensors) -> anyhow::Result<()> {
        self.notes.hook("Mm");
        Ok(())
    }

    hooks! {
        on_fit_start, on_fit_end, on_train_start, on_train_end, on_train_epoch_start, on_train_epoch_end,
        on_train_batch_start, on_train_batch_end, on_validation_start, on_validation_end,
        on_validation_epoch_start, on_validation_epoch_end, on_validation_batch_start, on_validation_batch_end,
        on_test_start, on_test_end, on_test_epoch_start, on_test_epoch_end, on_test_batch_start,
        on_test_batch_end;
        on_before_zero_grad, on_before_backward, on_after_backward, on_before_optimizer_step
    }
}

/// Whether the last sanity check that has begun is still on.
fn in_sanity_check(hooks: &[String]) -> bool {
    hooks.iter().rev().find(|word| *word == "Cn" || *word == "CN").is_some_and(|word| word == "Cn")
}

/// Notes hooks and learning rates, and stops where the settings ask for it.
pub struct Watch {
    pub notes: Notes,
    pub events: Events,
}

impl Callback for Watch {
    fn on_hook(&mut self, hook: Hook, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        let name = hook.name();
        self.notes.hook(word('C', name, ctx));
        if ["on_train_batch_end", "on_train_epoch_start", "on_train_end"].contains(&name) {
            let rates = ctx.optimizers().iter().map(|optimizer| optimizer.param_groups()[0].lr).collect();
            self.notes.with(|seen| seen.rates.push(rates));
        }
        let is_here = self.events.stop.as_ref().is_some_and(|(at, _)| at == name);
        if is_here && !ctx.is_sanity_check() && ctx.is_training() {
            let count = self.notes.count("stop");
            if self.events.stop.as_ref().is_some_and(|(_, at)| *at == count) {
                ctx.request_stop("the settings ask for it");
            }
        }
        Ok(())
    }

    fn on_step_hook(
        &mut self,
        hook: StepHook,
        ctx: &mut HookContext,
        _module: &dyn Module,
    ) -> anyhow::Result<()> {
        self.notes.hook(word('C', hook.name(), ctx));
        Ok(())
    }

    fn on_exception(&mut self, _ctx: &mut HookContext, _error: &Error) {
        self.notes.hook("Cr");
    }

    fn on_save_checkpoint(
        &mut self,
        _ctx: &mut HookContext,
        checkpoint: &mut voltaic::checkpoint::Checkpoint,
    ) -> anyhow::Result<()> {
        let meta = &checkpoint.meta;
        self.notes.with(|seen| seen.saves.push((meta.epoch, meta.global_step)));
        Ok(())
    }
}

pub struct Data {
    pub settings: DataSettings,
    pub notes: Notes,
}

fn loader(
    first: i64,
    samples: i64,
    batch_size: usize,
    drop_last: bool,
) -> anyhow::Result<DataLoader<Tensor>> {
    let sample = |i: i64| {
        [((7 * i) % 11 - 5) as f32 / 4.0, ((5 * i) % 13 - 6) as f32 / 4.0, ((3 * i) % 7 - 3) as f32 / 2.0]
    };
    let rows: Vec<f32> = (first..first + samples).flat_map(sample).collect();
    let rows = Tensor::from_slice(&rows).f_reshape([samples, 3])?;
    Ok(DataLoader::new(TensorDataset::new(rows)?).batch_size(batch_size).drop_last(drop_last).build()?)
}

impl DataModule for Data {
    type Batch = Tensor;

    fn train_dataloader(&mut self) -> anyhow::Result<Option<DataLoader<Tensor>>> {
        self.notes.hook("j");
        let (samples, batch_size, drop_last) = self.settings.train;
        loader(0, samples, batch_size, drop_last).map(Some)
    }

    fn val_dataloader(&mut self) -> anyhow::Result<Vec<DataLoader<Tensor>>> {
        self.notes.hook("k");
        let of = self.settings.val.iter().zip((100..).step_by(50));
        of.map(|(&(samples, batch_size), first)| loader(first, samples, batch_size, false)).collect()
    }

    fn test_dataloader(&mut self) -> anyhow::Result<Vec<DataLoader<Tensor>>> {
        self.notes.hook("K");
        let of = self.settings.test.iter().zip((300..).step_by(50));
        of.map(|(&(samples, batch_size), first)| loader(first, samples, batch_size, false)).collect()
    }
}
