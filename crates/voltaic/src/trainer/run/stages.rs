//! One whole stage, fit or an evaluation, from set-up to tear-down.

use serde_json::Value;

use crate::accelerator::rng;
use crate::accelerator::rng::global_seed;
use crate::data::{DataLoader, Stage};
use crate::error::{ConfigError, Result};
use crate::ffi;
use crate::module::LightningModule;
use crate::nn::set_training;
use crate::trainer::config::optimizers::OptimizerOverride;
use crate::trainer::join as ranks;
use crate::trainer::plan::limits::limit_batches;
use crate::trainer::plan::train_plan::TrainPlan;
use crate::trainer::run::eval::EvalLoaders;
use crate::trainer::run::loaders::LoaderSource;
use crate::trainer::run::optimizers::configure_optimizers;
use crate::trainer::session::hooks::call_hook;
use crate::trainer::session::session::Session;
use crate::trainer::state::collect as checkpointing;
use crate::trainer::state::find::find;

/// The whole of validate, test and predict.
pub(crate) fn evaluate_session<M: LightningModule, T>(
    session: &mut Session<M>,
    source: &LoaderSource<M>,
    ckpt_path: Option<&str>,
    body: impl FnOnce(&mut Session<M>, &EvalLoaders<M::Batch>) -> Result<T>,
) -> Result<T> {
    let stage = session.stage;
    session.setup()?;
    if let Some(path) = ckpt_path.map(|path| find(session.run, path, stage)).transpose()?.flatten() {
        let checkpoint = session.run.checkpoint_io.load_checkpoint(&path)?;
        checkpointing::restore_module(session, &checkpoint, &path)?;
    }
    let mut loaders = session.ask_for(source)?;
    if loaders.is_empty() {
        let what = format!("there is no loader to {stage}");
        let remedy = format!("implement {} of the data module or of the module", source.method);
        return Err(ConfigError::new("data", what, remedy).into());
    }
    session.warn_of_shuffled(&loaders);
    loaders.iter_mut().for_each(|loader| loader.set_seed(global_seed()));
    session.set_batch_size(&mut loaders)?;
    ranks::shard_eval(&mut loaders, session.plan, session.run.world())?;
    let available: Vec<usize> = loaders.iter().map(DataLoader::num_batches).collect();
    let num_batches = limit_batches(source.limit_key, (source.limit)(session.plan), &available)?;
    session.run.facts.num_eval_batches = num_batches.iter().sum();
    let output = body(session, &EvalLoaders { loaders: &loaders, num_batches: &num_batches })?;
    session.write_checkpoints()?;
    session.teardown()?;
    Ok(output)
}

/// The whole of fit.
pub(crate) fn fit_session<M: LightningModule>(
    session: &mut Session<M>,
    optimizers: Option<OptimizerOverride>,
    ckpt_path: Option<&str>,
) -> Result<()> {
    session.setup()?;
    set_training(session.module, true);
    let mut checkpoint = None;
    session.run.resumed_from = None;
    if let Some(path) = ckpt_path.map(|path| find(session.run, path, Stage::Fit)).transpose()?.flatten() {
        let loaded = session.run.checkpoint_io.load_checkpoint(&path)?;
        checkpointing::restore_module(session, &loaded, &path)?;
        session.run.resumed_from = Some(path.clone());
        checkpoint = Some((loaded, path));
    }
    configure_optimizers(session, optimizers)?;
    session.run.facts.automatic_optimization = session.module.automatic_optimization();
    session.anomaly = session.plan.detect_anomaly.then(ffi::AnomalyWatch::begin).transpose()?;
    call_hook!(session, on_fit_start, Train, Denied)?;
    let hyper_parameters =
        merged(session.module.hyper_parameters(), session.data.hyper_parameters(), session.plan)?;
    if !hyper_parameters.is_null() {
        session.run.loggers.iter_mut().try_for_each(|logger| logger.log_hyperparams(&hyper_parameters))?;
    }
    let resumed = checkpoint
        .map(|(loaded, path)| checkpointing::restore_training(session, loaded, path))
        .transpose()?;
    let val = session.sanity_check()?;
    let mut loaders = session.fit_loaders(val)?;
    if let Some(resumed) = resumed {
        resumed.check_position(session.run)?;
        rng::set_states(&resumed.rng)?;
        tracing::info!(
            "resumed {} at global_step {}",
            resumed.path.display(),
            session.run.progress.global_step
        );
    }
    session.train(&mut loaders)?;
    call_hook!(session, on_fit_end, Train, Denied)?;
    session.write_checkpoints()?;
    session.run.checkpoint_io.teardown()?;
    session.teardown()
}

/// Hyper-parameters of module and data for the loggers; null if they are to get none.
fn merged(module: Value, data: Value, plan: &TrainPlan) -> Result<Value> {
    if !plan.enable_autolog_hparams {
        return Ok(Value::Null);
    }
    let (mut all, data) = match (module, data) {
        (Value::Object(module), Value::Object(data)) => (module, data),
        (Value::Null, data) => return Ok(data),
        (module, _) => return Ok(module),
    };
    for (name, value) in data {
        if let Some(own) = all.get(&name).filter(|own| **own != value) {
            let what = format!("`{name}` is {own} in the module and {value} in the data module");
            let remedy = "use the same value or another name, or set trainer.enable_autolog_hparams=false";
            return Err(ConfigError::new("hyper_parameters", what, remedy).into());
        }
        all.insert(name, value);
    }
    Ok(Value::Object(all))
}
