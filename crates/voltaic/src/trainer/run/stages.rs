//! One whole stage, fit or an evaluation, from set-up to tear-down.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use serde_json::Value;

use crate::accelerator::rng;
use crate::callback::Callback;
use crate::checkpoint::Progress;
use crate::config::expand_home;
use crate::data::{DataLoader, DataModule, Stage};
use crate::distributed::{World, collective_scope};
use crate::error::{ConfigError, Result, first_of};
use crate::ffi;
use crate::module::{BatchFacts, Hook, LightningModule, MetricStore, Requests, RunFacts};
use crate::nn::te::prepare_fp8;
use crate::nn::{
    CheckpointCalls, Module, ModuleExt, SyncBatchNorm, intercept_calls, name_parameters, quant, set_training,
};
use crate::optim::{GradientClip, OffloadState};
use crate::precision::fp8::QuantMode;
use crate::precision::{log_casts, set_run_lists};
use crate::profiler::ProfiledRun;
use crate::strategy::Votes;
use crate::trainer::config::values::{InitialWeights, Limit};
use crate::trainer::plan::contradictions;
use crate::trainer::plan::limits::limit_batches;
use crate::trainer::plan::train_plan::{ActivationPlan, TrainPlan};
use crate::trainer::run::eval::EvalLoaders;
use crate::trainer::run::loaders::{FitLoaders, LoaderSource, shard_eval};
use crate::trainer::run::optimizers::configure_optimizers;
use crate::trainer::session::agree::agreed;
use crate::trainer::session::engine::Checkpoints;
use crate::trainer::session::hooks::{guarded, hook_error, of_callback};
use crate::trainer::session::session::{CallOptions, Run, Session};
use crate::trainer::state::collect::check_mesh;
use crate::trainer::state::find::{find, tidy_up};
use crate::trainer::state::restore::{load, restore_module, restore_training, restore_weights};

impl Run {
    /// Trains, from set-up to tear-down. Knows no searches: they train with it, too.
    pub(crate) fn fit<M: LightningModule>(
        &mut self,
        plan: &TrainPlan,
        module: &mut M,
        data: &mut dyn DataModule<Batch = M::Batch>,
        options: &CallOptions,
    ) -> Result<()> {
        contradictions::refuse_steps(plan)?;
        let _engine = ffi::SingleThreadedEngine::enter()?;
        let _checkpoints = plan.checkpoints.enter();
        self.forget_last_fit(plan);
        let ranks = self.world().mesh().dp.group().cloned();
        let _sync = ranks.filter(|_| plan.ranks.sync_batchnorm).map(SyncBatchNorm::over);
        self.begin(Stage::Fit)?;
        let mut session = Session::new(plan, options, self, module, data);
        let result = match session.begin_fit() {
            Ok(mut loaders) => session.train(&mut loaders).and_then(|()| session.end_fit()),
            Err(error) => Err(error),
        };
        let result = result.and_then(|()| session.reload_states(&OffloadState::ALL));
        let result =
            result.and_then(|done| session.run.engine.strategy.finish(session.module).map(|()| done));
        let result = session.conclude(result);
        session.run.graphs = session.graphs.take_report(true);
        drop(session);
        self.engine.end_call();
        self.engine.strategy.teardown();
        result
    }

    /// Runs the loaders of another stage once; `body` does so.
    pub(crate) fn evaluate<M: LightningModule, T>(
        &mut self,
        plan: &TrainPlan,
        module: &mut M,
        data: &mut dyn DataModule<Batch = M::Batch>,
        (stage, options): (Stage, &CallOptions),
        body: impl FnOnce(&mut Session<M>, &EvalLoaders<M::Batch>) -> Result<T>,
    ) -> Result<T> {
        self.begin(stage)?;
        self.log.metrics.forget_values();
        let fitted = self.at.progress.clone();
        self.at.progress.enter_next_epoch();
        let mut session = Session::new(plan, options, self, module, data);
        let result = evaluate_session(&mut session, body);
        let result =
            result.and_then(|done| session.run.engine.strategy.finish(session.module).map(|()| done));
        let result = session.conclude(result);
        session.run.graphs = session.graphs.take_report(false);
        drop(session);
        self.at.progress = fitted;
        self.engine.end_call();
        self.engine.strategy.teardown();
        result
    }

    /// Nothing of an earlier fit may show in the next.
    fn forget_last_fit(&mut self, plan: &TrainPlan) {
        self.requests = Requests::default();
        self.log.metrics =
            MetricStore::of_ranks(self.world().mesh().dp.group().cloned()).off_if(plan.barebones);
        self.engine.agreed = Votes::default();
        self.at.progress = Progress::default();
        self.snapshot = None;
    }

    /// Sets the profiler up, and takes the present seed.
    fn begin(&mut self, stage: Stage) -> Result<()> {
        self.seed = rng::global_seed();
        let world = self.engine.strategy.world();
        let is_set_up = self.facts.profiling.setup(|| ProfiledRun {
            stage,
            rank: world.rank,
            world_size: world.world_size,
            log_dir: self.facts.log_dir.clone(),
            device: self.facts.hardware.device,
        });
        agreed(world, "write", &self.facts.log_dir, is_set_up)?;
        self.begin_call(stage)
    }
}

/// The whole of validate, test and predict.
fn evaluate_session<M: LightningModule, T>(
    session: &mut Session<M>,
    body: impl FnOnce(&mut Session<M>, &EvalLoaders<M::Batch>) -> Result<T>,
) -> Result<T> {
    let (stage, source) = (session.run.at.stage, LoaderSource::of(session.run.at.stage));
    session.setup()?;
    if let Some(path) = session.start()? {
        let mut loaded = load(session, &path, false)?;
        restore_module(session, &mut loaded, &path)?;
        if session.run.world().is_global_zero() {
            tracing::info!("{stage} with the weights of {}", path.display());
        }
        session.say_weights_are_idle(&path);
    } else {
        session.take_initial_weights()?;
    }
    session.convert_for_inference()?;
    let is_left_out = (source.limit)(session.plan).is_none(); // then no loader is requested, as in Lightning
    let mut loaders = if is_left_out { Vec::new() } else { session.ask_for(&source)? };
    if loaders.is_empty() && !is_left_out {
        let what = format!("there is no loader to {stage}");
        let remedy = format!("implement {} of the data module or of the module", source.method);
        return Err(ConfigError::new("data", what, remedy).into());
    }
    session.warn_of_shuffled(&loaders);
    loaders.iter_mut().for_each(|loader| loader.set_seed(rng::global_seed()));
    session.set_batch_size(&mut loaders)?;
    session.check_loaders_alike(&stage.to_string(), &loaders)?;
    shard_eval(&mut loaders, session.plan, &session.run.world().mesh().dp)?;
    let available: Vec<usize> = loaders.iter().map(DataLoader::num_batches).collect();
    let num_batches = limit_batches(source.limit_key, (source.limit)(session.plan), &available)?;
    session.run.facts.num_eval_batches = num_batches.iter().sum();
    let output = body(session, &EvalLoaders { loaders: &loaders, num_batches: &num_batches })?;
    quant::finish_in_run(session.module.as_dyn(), session.run.world(), &session.run.facts.log_dir)?;
    session.write_checkpoints()?;
    session.teardown()?;
    Ok(output)
}

impl<M: LightningModule> Session<'_, M> {
    /// Lets layers measure or compute in float8, if the plugin says so, with the weights that the call has.
    fn convert_for_inference(&mut self) -> Result<()> {
        let module = self.module.as_dyn();
        if let Some(inference) = self.plan.fp8.as_ref().and_then(|fp8| fp8.inference.as_ref()) {
            let quantizes =
                inference.config.mode == QuantMode::Quantize && !quant::has_inference_layers(module);
            if quantizes && self.run.engine.strategy.keeps(module) {
                let what = format!(
                    "{} shards the weights among ranks, and the precision plugin quantizes them",
                    self.run.engine.strategy.name()
                );
                let remedy = "call convert_modules before predict, or use ddp";
                return Err(ConfigError::new("trainer.strategy", what, remedy).into());
            }
            quant::convert_in_run(module, inference, &self.run.facts.log_dir)?;
        }
        if self.run.at.stage == Stage::Predict && self.run.world().is_global_zero() {
            let [test, predict] = [self.plan.limit_test, self.plan.limit_predict];
            let limits = |limit: Limit| limit != Limit::Fraction(1.0);
            quant::warn_of_limits(module, limits(test), limits(predict));
        }
        Ok(())
    }

    /// Refuses what would be of one rank's slices, where the strategy does not know how the mesh slices the weights.
    fn refuse_unknown_mesh(&self) -> Result<()> {
        let norm = matches!(self.plan.clip, Some(GradientClip::Norm(_)));
        let saves = self.run.callbacks.iter().any(|c| c.saves_checkpoints() || c.saves_on_exception());
        let asked = [
            ("trainer.gradient_clip_val", norm, "clips by the norm of all gradients"),
            ("trainer.precision", self.run.engine.loss_scale.is_some(), "scales the loss"),
            ("trainer.enable_checkpointing", saves && !self.plan.fast_dev_run, "saves checkpoints"),
        ];
        let refused = asked.into_iter().find(|(_, is_asked, _)| *is_asked);
        refused.map_or(Ok(()), |(key, _, what)| check_mesh(self.run, key, what))
    }

    /// Refuses to train a module that is converted for fp8 inference, or a plugin that says so.
    fn refuse_quantized(&self) -> Result<()> {
        let by_plugin = self.plan.fp8.as_ref().is_some_and(|fp8| fp8.inference.is_some());
        if !by_plugin && !quant::has_inference_layers(self.module.as_dyn()) {
            return Ok(());
        }
        let (key, what) = match by_plugin {
            true => ("trainer.plugins", "the precision plugin has inference: true, which fit cannot do"),
            false => ("module", "it is measured or quantized for fp8 inference, which cannot be trained"),
        };
        let remedy = "fit with another plugin or module, then validate, test or predict with this one";
        Err(ConfigError::new(key, what, remedy).into())
    }

    /// All that comes before the first epoch: set-up, a checkpoint's state, optimizers, sanity check, loaders.
    fn begin_fit(&mut self) -> Result<FitLoaders<M::Batch>> {
        self.refuse_quantized()?;
        self.refuse_unknown_mesh()?;
        self.setup()?;
        set_training(self.module, true);
        if self.run.world().is_global_zero() && !self.plan.fast_dev_run {
            tidy_up(self.run);
        }
        let mut checkpoint = None;
        self.run.resumed_from = None;
        if let Some(path) = self.start()? {
            let mut loaded = load(self, &path, true)?;
            restore_module(self, &mut loaded, &path)?;
            self.say_weights_are_idle(&path);
            self.run.resumed_from = Some(path.clone());
            checkpoint = Some((loaded, path));
        } else {
            self.take_initial_weights()?;
        }
        configure_optimizers(self)?;
        self.check_optimizers_alike()?;
        self.run.facts.automatic_optimization = self.module.automatic_optimization();
        self.run.engine.of_call.anomaly =
            self.plan.detect_anomaly.then(ffi::AnomalyWatch::begin).transpose()?;
        if !self.options.is_trial {
            self.run_example()?;
        }
        self.call(Hook::OnFitStart, BatchFacts::default())?;
        self.run.engine.of_call.checkpoints = checkpoint_calls(self.module.as_dyn(), &self.plan.activations)?;
        let hyper_parameters =
            merged(self.module.hyper_parameters(), self.data.hyper_parameters(), self.plan)?;
        let resumed = checkpoint.map(|(loaded, path)| restore_training(self, loaded, path)).transpose()?;
        let logged = if resumed.is_some() { self.run.resume_loggers() } else { Ok(()) };
        let mut loggers = self.run.loggers.iter_mut().filter(|_| !hyper_parameters.is_null());
        let logged =
            logged.and_then(|()| loggers.try_for_each(|logger| logger.log_hyperparams(&hyper_parameters)));
        self.run.mark_rows();
        self.compare_failures(logged)?;
        let val = self.sanity_check()?;
        let loaders = self.fit_loaders(val)?;
        if let Some(resumed) = resumed {
            let window = self.windows_of_epoch();
            resumed.find_position(self.run, self.plan, window)?;
            resumed.set_rng()?;
            tracing::info!(
                "resumed {} at global_step {}",
                resumed.path.display(),
                self.run.at.progress.global_step
            );
        }
        Ok(loaders)
    }

    /// Loads the weights that the call begins with, if they are a file's.
    fn take_initial_weights(&mut self) -> Result<()> {
        let Some(InitialWeights { path, strict, rename }) = self.run.weights.clone() else { return Ok(()) };
        let path = expand_home(path);
        let mut loaded = load(self, &path, false)?;
        loaded.rename(&rename)?;
        let keys = restore_weights(self, &mut loaded, ("weights", &path), strict)?;
        if self.options.is_trial || !self.run.world().is_global_zero() {
            return Ok(());
        }
        tracing::info!("{} begins with the weights of {}", self.run.at.stage, path.display());
        for (what, names) in [("it has no", keys.missing_keys), ("the module has no", keys.unexpected_keys)] {
            if !names.is_empty() {
                tracing::warn!("{}: {what} {}", path.display(), first_of(&names, 20));
            }
        }
        Ok(())
    }

    /// Says on rank 0 that the call has the weights of its checkpoint in place of those of a file.
    fn say_weights_are_idle(&self, checkpoint: &Path) {
        let Some(InitialWeights { path, .. }) = &self.run.weights else { return };
        if self.run.world().is_global_zero() && !self.options.is_trial {
            tracing::info!(
                "weights={} has no effect: {} begins with ckpt_path={}",
                path.display(),
                self.run.at.stage,
                checkpoint.display()
            );
        }
    }

    /// All that comes after the last epoch.
    fn end_fit(&mut self) -> Result<()> {
        self.call(Hook::OnFitEnd, BatchFacts::default())?;
        self.write_checkpoints()?;
        let done = self.run.checkpoint_io.teardown();
        let named = collective_scope("checkpoint");
        agreed(self.run.world(), "save", &self.run.facts.log_dir.join("checkpoints"), done)?;
        drop(named);
        self.teardown()
    }

    /// The checkpoint that the call starts from, if any.
    fn start(&self) -> Result<Option<PathBuf>> {
        let of_strategy = self.plan.ranks.strategy.inference();
        match &self.options.ckpt_path {
            Some(path) => find(self.run, path, self.run.at.stage),
            None => Ok(of_strategy.and_then(|inference| inference.settings.config.checkpoint_path())),
        }
    }

    /// The hooks from `configure_callbacks` to `configure_model`; then the module goes to its device.
    pub(crate) fn setup(&mut self) -> Result<()> {
        let stage = self.run.at.stage;
        set_run_lists(self.plan.device, self.plan.op_lists.as_ref(), self.plan.lists_are_default)?;
        log_casts(self.plan.logs_casts);
        let callbacks = self.module_method("configure_callbacks", |module| module.configure_callbacks())?;
        self.add_callbacks(callbacks);
        let fail = |hook| move |source| hook_error(hook, &Progress::default(), source);
        let prepared = if self.run.world().local_rank == 0 { self.prepare_data() } else { Ok(()) };
        all_have_prepared(self.run.world(), prepared)?;
        let action = self.profile_data("setup")?;
        guarded(|| self.data.setup(stage)).map_err(fail("setup of the data module"))?;
        drop(action);
        let Run { callbacks, facts: RunFacts { profiling, .. }, .. } = &mut *self.run;
        for callback in callbacks {
            of_callback(profiling, callback.as_mut(), "setup", |callback| callback.setup(stage, self.module))
                .map_err(fail("setup"))?;
        }
        self.module_method("setup", |module| module.setup(stage))?;
        self.module_method("configure_model", |module| module.configure_model())?;
        let of_training = self.plan.fp8.as_ref().filter(|fp8| fp8.inference.is_none());
        if let Some(fp8) = of_training {
            prepare_fp8(self.module.as_dyn(), fp8)?;
        }
        self.run.log.metrics.set_metrics(self.module.named_metrics());
        let dtype = self.plan.precision.true_dtype();
        self.run.engine.strategy.place(self.module.as_dyn(), self.plan.device, dtype)?;
        name_parameters(self.module);
        let _named = collective_scope("prepare");
        self.check_module_alike()?;
        let Run { engine, facts, .. } = &mut *self.run;
        engine.strategy.prepare(self.module, &facts.module_hooks)
    }

    /// The `teardown` hooks, and the end of the loggers.
    fn teardown(&mut self) -> Result<()> {
        let stage = self.run.at.stage;
        let fail = |hook| move |source| hook_error(hook, &Progress::default(), source);
        let action = self.profile_data("teardown")?;
        guarded(|| self.data.teardown(stage)).map_err(fail("teardown of the data module"))?;
        drop(action);
        let Run { callbacks, facts: RunFacts { profiling, .. }, .. } = &mut *self.run;
        for callback in callbacks {
            let hook = |callback: &mut dyn Callback| callback.teardown(stage, self.module);
            of_callback(profiling, callback.as_mut(), "teardown", hook).map_err(fail("teardown"))?;
        }
        self.module_method("teardown", |module| module.teardown(stage))?;
        let finalized = self.run.loggers.iter_mut().try_for_each(|logger| logger.finalize(true));
        let _named = collective_scope("teardown");
        self.compare_failures(finalized) // and what rank 0 has written is there
    }

    fn prepare_data(&mut self) -> Result<()> {
        let fail = |hook| move |source| hook_error(hook, &Progress::default(), source);
        let action = self.profile_data("prepare_data")?;
        guarded(|| self.data.prepare_data()).map_err(fail("prepare_data of the data module"))?;
        drop(action);
        self.module_method("prepare_data", |module| module.prepare_data())
    }

    /// Adds the module's callbacks in place of those of the same type, and puts all into the order in which they run.
    fn add_callbacks(&mut self, callbacks: Vec<Box<dyn Callback>>) {
        let Run { callbacks: own, replaced, .. } = &mut *self.run;
        let is_replaced = |old: &dyn Callback| callbacks.iter().any(|new| new.type_name() == old.type_name());
        let gone = own.iter().filter(|old| is_replaced(old.as_ref()));
        let saved = gone.filter_map(|old| old.checkpoint_paths());
        let saved: Vec<_> = saved.filter(|paths| paths.best.is_some() || paths.last.is_some()).collect();
        if !saved.is_empty() {
            *replaced = saved;
        }
        own.retain(|old| !is_replaced(old.as_ref()));
        own.extend(callbacks);
        own.sort_by_key(|callback| (callback.runs_after_module(), callback.saves_checkpoints()));
    }
}

/// Checkpoints the calls of the modules with these names.
pub(crate) fn checkpoint_calls(root: &dyn Module, plan: &ActivationPlan) -> Result<Option<Checkpoints>> {
    if plan.modules.is_empty() {
        return Ok(None);
    }
    let calls = CheckpointCalls::of(root, &plan.modules, plan.treatment.clone());
    let calls = Rc::new(calls.map_err(|name| no_module(root, &name))?);
    Ok(Some(Checkpoints { _handle: intercept_calls(calls.clone()), calls, budget: plan.budget }))
}

/// A name of `activation_checkpointing` that is that of no module.
pub(crate) fn no_module(root: &dyn Module, name: &str) -> ConfigError {
    let what = format!("`{name}` is neither the type nor the fqn of a module");
    let mut known: Vec<&str> = root.named_modules().iter().map(|(_, module)| module.type_name()).collect();
    known.sort_unstable();
    known.dedup();
    let remedy = format!("use one of the types {}, or an fqn of module.named_modules()", known.join(", "));
    ConfigError::new("trainer.activation_checkpointing", what, remedy)
}

/// Waits for what others fetch. All ranks end if one of them could not.
fn all_have_prepared(world: &World, own: Result<()>) -> Result<()> {
    let Some(group) = world.peers() else { return own };
    let _named = collective_scope("prepare_data");
    let failure = own.as_ref().err().map(ToString::to_string);
    let all = group.all_gather_object(&failure);
    own?;
    match all?.into_iter().enumerate().find_map(|(rank, failure)| Some((rank, failure?))) {
        None => Ok(()),
        Some((rank, text)) => {
            let source = anyhow::anyhow!("rank {rank} has failed: {text}");
            Err(hook_error("prepare_data", &Progress::default(), source))
        }
    }
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
