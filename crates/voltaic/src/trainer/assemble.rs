//! Makes the parts of a trainer, from its configuration and from values that the builder was given.

use std::env;
use std::path::PathBuf;
use std::sync::Arc;

use crate::accelerator::rng::global_seed;
use crate::accelerator::{Accelerator, AcceleratorChoice};
use crate::callback::{Callback, ModelCheckpoint, ModelCheckpointConfig, ModelSummary, ProgressBar, Timer};
use crate::checkpoint::{AsyncCheckpointIo, CheckpointIo, FileCheckpointIo, HpuCheckpointIo};
use crate::device::Device;
use crate::distributed::{World, keep_notice};
use crate::error::{ConfigError, ConfigProblem, Result};
use crate::ffi::{self, DeterministicMode};
use crate::graph::dump_metrics_if_asked;
use crate::logger::{Logger, Loggers, RunFolders};
use crate::module::{Hardware, Logging, MetricStore, Position, Requests, RunFacts};
use crate::precision::{GradScaler, LossScale, Precision};
use crate::profiler::{Profiler, Profiling};
use crate::strategy::BuildStrategy;
use crate::trainer::config::TrainerConfig;
use crate::trainer::config::callbacks::{CallbackConfig, is_a};
use crate::trainer::config::graph::{GraphMode, GraphReport};
use crate::trainer::config::optimizers::OptimizerOverride;
use crate::trainer::config::searches::Searches;
use crate::trainer::config::values::{Limit, PluginConfig};
use crate::trainer::join::join;
use crate::trainer::plan::limits::minima_above_maxima;
use crate::trainer::plan::train_plan::TrainPlan;
use crate::trainer::plan::{self, contradictions};
use crate::trainer::session::agree::agreed;
use crate::trainer::session::engine::Engine;
use crate::trainer::session::session::Run;
use crate::trainer::state::find::run_folders;

/// Parts of a trainer that are code rather than data.
#[derive(Default)]
pub(crate) struct BuilderParts {
    /// In place of the one that the configuration names, whose name is this one's.
    pub accelerator: Option<Arc<dyn Accelerator>>,
    /// In place of the one that the configuration names.
    pub strategy: Option<Box<dyn BuildStrategy>>,
    pub callbacks: Vec<Box<dyn Callback>>,
    pub loggers: Vec<Box<dyn Logger>>,
    pub checkpoint_io: Option<Box<dyn CheckpointIo>>,
    pub optimizers: Option<OptimizerOverride>,
    /// An optimizer of the strategy's settings counts before the module's own.
    pub prefers_settings: bool,
    pub profiler: Option<Box<dyn Profiler>>,
    /// The loggers that the runs of this configuration have, if this trainer has none of them.
    pub loggers_of_runs: Option<Loggers>,
}

/// What can be known without the other ranks.
pub(crate) struct Resolved {
    pub plan: TrainPlan,
    pub accelerator: Arc<dyn Accelerator>,
    pub searches: Searches,
}

/// The plan, with callbacks and profiler made, or all problems of the configuration.
pub(crate) fn resolve(config: &mut TrainerConfig, parts: &mut BuilderParts) -> Result<Resolved, ConfigError> {
    let mut problems = Vec::new();
    let choice = match parts.accelerator.take() {
        Some(value) => AcceleratorChoice::Value(value),
        None => AcceleratorChoice::from(config.accelerator.as_str()),
    };
    let accelerator = choice.resolve();
    let (searches, of_callbacks) = build_callbacks(config, parts);
    let has_timer = parts.callbacks.iter().any(|callback| is_a::<Timer>(callback.as_ref()));
    let plan = plan::resolve(config, accelerator.as_deref(), has_timer);
    let plan = plan.map_err(|error| problems.extend(error.problems)).ok();
    problems.extend(of_callbacks);
    if let Some(plan) = &plan {
        if let Some(limit) = plan.max_time {
            parts.callbacks.insert(0, Box::new(Timer::new(limit)));
        }
        problems.extend(minima_above_maxima(config, plan));
    }
    if parts.strategy.is_some() && config.graph == GraphMode::Step {
        let what = "step, but the program gives a strategy of its own";
        problems.push(ConfigProblem::new("trainer.graph", what, "use graph=none, or leave the strategy out"));
    }
    if let (Some(_), Some(compile)) = (&parts.strategy, config.compile) {
        let what = format!("{}, but the program gives a strategy of its own", compile.backend);
        problems.push(ConfigProblem::new("trainer.compile", what, "leave one of the two out"));
    }
    if config.barebones && !parts.loggers.is_empty() {
        let what = "barebones=true switches logging off, but the builder was given a logger";
        problems.push(ConfigProblem::new("trainer.logger", what, "remove one of the two"));
    }
    if let Err(error) = build_profiler(config, parts) {
        problems.extend(error.below("trainer.profiler").problems);
    }
    if config.barebones {
        config.logger = Some(Loggers::Flag(false));
        config.enable_checkpointing = Some(false);
        config.enable_progress_bar = Some(false);
        config.enable_model_summary = Some(false);
    }
    problems.extend(contradictions::of_displays(config, &parts.callbacks));
    problems.extend(repeated_plugins(&config.plugins, parts.checkpoint_io.is_some()));
    problems.extend(add_model_checkpoint(config, parts).err().into_iter().flat_map(|error| error.problems));
    problems.extend(same_state_keys(&parts.callbacks));
    if parts.loggers.is_empty() && !config.loggers().is_enabled() {
        problems.extend(without_logger(&parts.callbacks));
    }
    problems.extend(parts.optimizers.iter().flat_map(OptimizerOverride::problems));
    match (plan, accelerator) {
        (Some(plan), Ok(accelerator)) if problems.is_empty() => Ok(Resolved { plan, accelerator, searches }),
        _ => Err(ConfigError { problems }),
    }
}

/// Joins the other ranks if there are any, and makes the run. The plan has the device of this rank then.
pub(crate) fn assemble(
    config: &TrainerConfig,
    mut parts: BuilderParts,
    plan: TrainPlan,
    accelerator: Arc<dyn Accelerator>,
) -> Result<(TrainPlan, Run)> {
    plan.requeue_signal.map(keep_notice).transpose()?; // ranks may wait long for each other
    let facts = plan::facts::facts(config, &plan, &parts.callbacks);
    let (strategy, device) = join(config, &plan, accelerator.as_ref(), parts.strategy.take(), facts)?;
    let plan = TrainPlan { device, ..plan };
    let world = strategy.world().clone();
    add_displays(config, &mut parts, world.is_global_zero());
    accelerator.setup()?;
    ffi::install_host_pool()?;
    ffi::install_kernels()?;
    dump_metrics_if_asked((world.world_size > 1).then_some(world.rank));
    set_up_libtorch(&plan)?;
    let run_folders = folders_of_runs(config, &parts, &plan);
    let facts = build_loggers(config, &mut parts, &plan, &world)?;
    let profiling = parts.profiler.take().map(Profiling::with).unwrap_or_default();
    profiling.watch(&facts.module_hooks);
    let metrics = MetricStore::of_ranks(world.mesh().dp.group().cloned()).off_if(plan.barebones);
    let loss_scale = match strategy.loss_scaler(plan.precision) {
        Some(scaler) => Some(LossScale::Strategy { scaler, all_finite: None }),
        None if plan.precision == Precision::Fp16Mixed => Some(LossScale::Grad(GradScaler::default())),
        None => None,
    };
    let run = Run {
        checkpoint_io: checkpoint_io(parts.checkpoint_io, &config.plugins, accelerator.name()),
        at: Position::default(),
        facts: RunFacts { profiling, world, hardware: Hardware { accelerator, device }, ..facts },
        log: Logging { metrics, rows: Vec::new() },
        requests: Requests::default(),
        engine: Engine::new(strategy, loss_scale),
        callbacks: parts.callbacks,
        loggers: parts.loggers,
        rows: Vec::new(),
        replaced: Vec::new(),
        run_folders,
        resumed_from: None,
        weights: None,
        seed: global_seed(),
        fits: 0,
        snapshot: None,
        graphs: GraphReport::default(),
    };
    Ok((plan, run))
}

/// Builds the callbacks of the configuration.
fn build_callbacks(config: &TrainerConfig, parts: &mut BuilderParts) -> (Searches, Vec<ConfigProblem>) {
    let (mut searches, mut problems) = (Searches::default(), Vec::new());
    for (index, callback) in config.callbacks.iter().cloned().enumerate() {
        searches.counts_flops |= matches!(&callback, CallbackConfig::ModelSummary(config) if config.flops);
        let problem = match callback {
            CallbackConfig::LearningRateFinder(config) => {
                let checked = config.check();
                searches.lr = Some(config);
                checked
            }
            CallbackConfig::BatchSizeFinder(config) => {
                let checked = config.check();
                searches.batch_size = Some(config);
                checked
            }
            callback => callback.build().map(|callback| parts.callbacks.push(callback)),
        };
        if let Err(error) = problem {
            problems.extend(error.below(&format!("trainer.callbacks.{index}")).problems);
        }
    }
    (searches, problems)
}

/// Builds the profiler of the configuration.
fn build_profiler(config: &TrainerConfig, parts: &mut BuilderParts) -> Result<(), ConfigError> {
    if config.barebones && parts.profiler.is_some() {
        let what = "is set beside barebones=true, which switches it off";
        return Err(ConfigError::new("trainer.profiler", what, "remove one of the two"));
    }
    let Some(config) = &config.profiler else { return Ok(()) };
    if parts.profiler.is_some() {
        let what = "is set, but the builder was given a profiler too";
        return Err(ConfigError::new("trainer.profiler", what, "give one of the two"));
    }
    parts.profiler = Some(config.build()?);
    Ok(())
}

/// Where the runs of this configuration are, those of a fast_dev_run too, which has no loggers.
fn folders_of_runs(config: &TrainerConfig, parts: &BuilderParts, plan: &TrainPlan) -> Vec<PathBuf> {
    if !parts.loggers.is_empty() {
        return run_folders(&parts.loggers);
    }
    let loggers = parts.loggers_of_runs.clone().unwrap_or_else(|| config.loggers());
    let built = loggers.list().into_iter();
    let built: Vec<_> = built.map(|logger| logger.build(&plan.default_root_dir)).collect();
    run_folders(&built)
}

/// Builds the loggers, on rank 0 only, and puts together what callbacks may know.
///
/// # Collective
/// All ranks learn where rank 0 logs.
fn build_loggers(
    config: &TrainerConfig,
    parts: &mut BuilderParts,
    plan: &TrainPlan,
    world: &World,
) -> Result<RunFacts> {
    if plan.fast_dev_run || !world.is_global_zero() {
        parts.loggers.clear();
    }
    if world.is_global_zero() && parts.loggers.is_empty() && !plan.fast_dev_run {
        let loggers = config.loggers().list().into_iter();
        parts.loggers.extend(loggers.map(|logger| logger.build(&plan.default_root_dir)));
    }
    let mut folders = RunFolders::default();
    let begun = parts.loggers.iter_mut().try_for_each(|logger| logger.begin(&mut folders));
    agreed(world, "write", &plan.default_root_dir, begun)?;
    let first = parts.loggers.first();
    let log_dir = first.and_then(|logger| logger.log_dir()).unwrap_or(&plan.default_root_dir).to_path_buf();
    let version = first.and_then(|logger| logger.version());
    let (log_dir, version, has_logger) = world.of_rank_zero((log_dir, version, first.is_some()))?;
    Ok(RunFacts {
        max_epochs: plan.max_epochs,
        check_val_every_n_epoch: plan.check_val_every_n_epoch,
        fast_dev_run: plan.fast_dev_run,
        log_dir,
        default_root_dir: plan.default_root_dir.clone(),
        validates_once_per_epoch: plan.val_check_time.is_none()
            && matches!(plan.val_check_interval, Limit::Fraction(1.0) | Limit::Batches(1)), // Python: 1 == 1.0
        has_logger,
        accumulate_grad_batches: plan.accumulate_grad_batches,
        automatic_optimization: true,
        min_epochs: plan.min_epochs,
        min_steps: plan.min_steps,
        log_every_n_steps: plan.log_every_n_steps,
        graph: match plan.compile {
            Some(compile) => Some(format!("trainer.compile={}", compile.backend)),
            None => (plan.graph != GraphMode::Off).then(|| format!("trainer.graph={}", plan.graph)),
        },
        version,
        ..RunFacts::default()
    })
}

/// Checkpoints are saved unless that is switched off.
fn add_model_checkpoint(config: &TrainerConfig, parts: &mut BuilderParts) -> Result<(), ConfigError> {
    let saves = parts.callbacks.iter().any(|callback| callback.saves_checkpoints());
    let is_enabled = config.enable_checkpointing.unwrap_or(true);
    if saves && !is_enabled {
        let what = "false, but a callback saves checkpoints";
        return Err(ConfigError::new("trainer.enable_checkpointing", what, "remove one of the two"));
    }
    if !saves && is_enabled {
        parts.callbacks.push(Box::new(ModelCheckpoint::new(ModelCheckpointConfig::default())?));
    }
    Ok(())
}

/// What one process shows for all.
fn add_displays(config: &TrainerConfig, parts: &mut BuilderParts, is_global_zero: bool) {
    let has_bar = parts.callbacks.iter().any(|callback| is_a::<ProgressBar>(callback.as_ref()));
    if is_global_zero && config.enable_progress_bar.unwrap_or(true) && !has_bar {
        parts.callbacks.push(Box::new(ProgressBar::default()));
    }
    let has_summary = parts.callbacks.iter().any(|callback| is_a::<ModelSummary>(callback.as_ref()));
    if is_global_zero && config.enable_model_summary.unwrap_or(true) && !has_summary {
        parts.callbacks.push(Box::new(ModelSummary::default()));
    }
}

/// What the builder or the plugins ask for, around what the accelerator needs.
fn checkpoint_io(
    given: Option<Box<dyn CheckpointIo>>,
    plugins: &[PluginConfig],
    accelerator: &str,
) -> Box<dyn CheckpointIo> {
    let needs_host = accelerator == "hpu" || plugins.contains(&PluginConfig::HpuCheckpointIo);
    let own: Box<dyn CheckpointIo> =
        if needs_host { Box::new(HpuCheckpointIo) } else { Box::new(FileCheckpointIo) };
    let is_async = plugins.contains(&PluginConfig::AsyncCheckpointIo);
    let outer =
        given.or_else(|| is_async.then(|| Box::new(AsyncCheckpointIo::new()) as Box<dyn CheckpointIo>));
    match outer {
        Some(mut outer) => {
            outer.set_inner(own);
            outer
        }
        None => own,
    }
}

/// Plugins that would do the same thing twice.
fn repeated_plugins(plugins: &[PluginConfig], has_checkpoint_io: bool) -> Vec<ConfigProblem> {
    let kinds = [PluginConfig::AsyncCheckpointIo, PluginConfig::HpuCheckpointIo];
    let counts = kinds.map(|kind| plugins.iter().filter(|plugin| **plugin == kind).count());
    let is_slurm = |plugin: &&PluginConfig| matches!(plugin, PluginConfig::SlurmEnvironment(_));
    let mut problems = Vec::new();
    if counts.iter().any(|&count| count > 1) || plugins.iter().filter(is_slurm).count() > 1 {
        problems.push(ConfigProblem::new("trainer.plugins", "a class is given twice", "give it once"));
    }
    if has_checkpoint_io && counts.iter().any(|&count| count > 0) {
        let what = "names a CheckpointIo, but the builder was given one too";
        problems.push(ConfigProblem::new("trainer.plugins", what, "give one of the two"));
    }
    problems
}

/// Callbacks that have nothing to do in a run without logger.
fn without_logger(callbacks: &[Box<dyn Callback>]) -> impl Iterator<Item = ConfigProblem> {
    callbacks.iter().filter(|callback| callback.needs_logger()).map(|callback| {
        let what = format!("false, but {} has to have a logger", callback.state_key());
        ConfigProblem::new("trainer.logger", what, "set trainer.logger=true, or remove the callback")
    })
}

/// Callbacks whose states would overwrite each other in a checkpoint.
fn same_state_keys(callbacks: &[Box<dyn Callback>]) -> Vec<ConfigProblem> {
    let keys: Vec<String> = callbacks
        .iter()
        .filter(|callback| callback.state_dict().is_some())
        .map(|callback| callback.state_key())
        .collect();
    let repeated = keys.iter().enumerate().filter(|(i, key)| keys[..*i].contains(key));
    repeated
        .map(|(_, key)| {
            let what = format!("two callbacks keep their state in checkpoints as {key}");
            let remedy = "remove one, or change one of the settings that this name tells; a callback of your own \
                          may tell more in Callback::state_key";
            ConfigProblem::new("trainer.callbacks", what, remedy)
        })
        .collect()
}

/// How much memory cuBLAS may use for a product. Without a fixed size its products differ from run to run, and libtorch refuses
/// them where only deterministic operators may run.
/// Source: <https://docs.nvidia.com/cuda/cublas/#results-reproducibility>
const CUBLAS_WORKSPACE: &str = "CUBLAS_WORKSPACE_CONFIG";

fn needs_cublas_workspace(device: Device, mode: DeterministicMode) -> bool {
    matches!(device, Device::Cuda(_)) && mode != DeterministicMode::Off
}

/// Sets what holds for the process.
fn set_up_libtorch(plan: &TrainPlan) -> Result<()> {
    if let Some(mode) = plan.deterministic {
        ffi::set_deterministic(mode)?;
        if needs_cublas_workspace(plan.device, mode) && env::var_os(CUBLAS_WORKSPACE).is_none() {
            ffi::set_environment(CUBLAS_WORKSPACE, ":4096:8");
        }
    }
    if let Some(benchmark) = plan.benchmark {
        ffi::set_cudnn_benchmark(benchmark)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cublas_has_a_fixed_workspace_where_runs_must_repeat() {
        assert!(needs_cublas_workspace(Device::Cuda(1), DeterministicMode::Error));
        assert!(needs_cublas_workspace(Device::Cuda(0), DeterministicMode::Warn));
        assert!(!needs_cublas_workspace(Device::Cuda(0), DeterministicMode::Off));
        assert!(!needs_cublas_workspace(Device::Cpu, DeterministicMode::Error));
    }
}
