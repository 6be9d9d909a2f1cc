//! Validation, testing and prediction: batches without grad, in evaluation mode.

use std::time::Instant;

use crate::accelerator::rng;
use crate::data::{Batch, DataLoader, EpochRange, Stage};
use crate::distributed::{AbsentRanks, World, collective_scope};
use crate::error::{Error, Result};
use crate::ffi::{InferenceMode, note_writes};
use crate::module::{BatchFacts, Hook, LightningModule, NotImplemented, StepOutput};
use crate::nn::{set_training, set_training_modes, training_modes};
use crate::profiler::actions;
use crate::trainer::run::loaders::FitLoaders;
use crate::trainer::session::session::Session;
use crate::trainer::session::step::Step;

/// Metrics of an evaluation, by name, in the order they were first logged.
pub type EvalMetrics = Vec<(String, f64)>;

/// Loaders with the number of batches to take from each.
pub(crate) struct EvalLoaders<'a, B: Batch> {
    pub loaders: &'a [DataLoader<B>],
    pub num_batches: &'a [usize],
}

/// What each rank has: the number of batches of each loader, and how many of them are predicted already.
fn batches_of_ranks(world: &World, own: (Vec<usize>, Vec<usize>)) -> Result<Vec<(Vec<usize>, Vec<usize>)>> {
    let Some(group) = world.peers() else { return Ok(vec![own]) };
    let _named = collective_scope("numbers of batches");
    group.all_gather_object(&own)
}

impl<M: LightningModule> Session<'_, M> {
    /// Validates within fit and gives the metrics to the loggers.
    pub(crate) fn validate_in_fit(&mut self, loaders: &mut FitLoaders<M::Batch>) -> Result<()> {
        let is_open = self.open_window().is_some() || self.run.engine.of_call.gradients.are_open();
        if !is_open {
            self.module_method("on_validation_model_zero_grad", |module| {
                module.on_validation_model_zero_grad()
            })?;
        }
        self.reload_val_dataloader(loaders)?;
        let (val, num_batches) = (&loaders.val, &loaders.plan.num_val_batches);
        self.run.at.progress.validation_is_open = true;
        self.validate(&EvalLoaders { loaders: val, num_batches })?;
        self.run.at.progress.validation_is_open = false;
        if self.has_no_validation_step {
            self.drop_val_loaders(loaders)?;
        }
        let num_batches = &loaders.plan.num_val_batches;
        let seen = &mut self.run.at.progress.validation_batches;
        seen.resize(num_batches.len(), 0);
        seen.iter_mut().zip(num_batches).for_each(|(seen, &batches)| *seen += batches as u64);
        self.last_validation = Instant::now();
        self.agree()?;
        self.check_failures()
    }

    /// Runs a few validation batches before training, and returns the loaders. Leaves no metrics and no change of random
    /// state behind. A run that is resumed within an epoch has done it before.
    pub(crate) fn sanity_check(&mut self) -> Result<Option<Vec<DataLoader<M::Batch>>>> {
        let limit = self.plan.num_sanity_val_steps.unwrap_or(usize::MAX);
        let is_mid_epoch = self.run.at.progress.batch_idx > 0 && !self.run.at.progress.epoch_ended;
        if limit == 0 || self.plan.limit_val.is_none() || is_mid_epoch {
            return Ok(None);
        }
        // requested before the hook, since a run without data to validate on has no such check
        let val = self.val_dataloader()?;
        let num_batches = self.num_val_batches(&val)?;
        let num_batches: Vec<usize> = num_batches.iter().map(|&batches| batches.min(limit)).collect();
        if !self.run.world().of_rank_zero(num_batches.iter().any(|&batches| batches > 0))? {
            return Ok(Some(val));
        }
        let rng = rng::states(self.plan.device)?;
        self.run.facts.num_eval_batches = num_batches.iter().sum();
        self.run.at.is_sanity_check = true;
        let known = self.run.log.metrics.known();
        self.call(Hook::OnSanityCheckStart, BatchFacts::default())?;
        self.validate(&EvalLoaders { loaders: &val, num_batches: &num_batches })?;
        self.call(Hook::OnSanityCheckEnd, BatchFacts::default())?;
        self.run.at.is_sanity_check = false;
        self.run.log.metrics.forget_since(known);
        rng::set_states(&rng)?;
        Ok(Some(if self.has_no_validation_step { Vec::new() } else { val }))
    }

    /// Validates; returns the metrics.
    pub(crate) fn validate(&mut self, data: &EvalLoaders<M::Batch>) -> Result<EvalMetrics> {
        if !self.has_batches(data)? {
            return Ok(EvalMetrics::new());
        }
        self.evaluate(|session| {
            let modes = training_modes(session.module);
            session.module_method("on_validation_model_eval", |module| module.on_validation_model_eval())?;
            session.call(Hook::OnValidationStart, BatchFacts::default())?;
            session.call(Hook::OnValidationEpochStart, BatchFacts::default())?;
            session.for_each_batch(data, |session, batch, mut facts| {
                session.call_on_start(Hook::OnValidationBatchStart, &mut facts, batch)?;
                session.step(Step::Validation, batch, facts, M::validation_step)?;
                let outputs = std::mem::take(&mut session.outputs);
                session.call_on_end(Hook::OnValidationBatchEnd, facts, batch, &outputs)
            })?;
            session.run.log.metrics.publish_eval()?; // sync point
            session.call(Hook::OnValidationEpochEnd, BatchFacts::default())?;
            let metrics = session.finish_eval()?;
            session.call(Hook::OnValidationEnd, BatchFacts::default())?;
            if session.run.at.stage == Stage::Fit {
                set_training(session.module, true); // of modules that do not tell their mode
                set_training_modes(session.module, &mut modes.into_iter());
                session.module_method("on_validation_model_train", |module| {
                    module.on_validation_model_train()
                })?;
            }
            Ok(metrics)
        })
    }

    /// Tests; returns the metrics.
    pub(crate) fn test(&mut self, data: &EvalLoaders<M::Batch>) -> Result<EvalMetrics> {
        if !self.has_batches(data)? {
            return Ok(EvalMetrics::new());
        }
        self.evaluate(|session| {
            session.module_method("on_test_model_eval", |module| module.on_test_model_eval())?;
            session.call(Hook::OnTestStart, BatchFacts::default())?;
            session.call(Hook::OnTestEpochStart, BatchFacts::default())?;
            session.for_each_batch(data, |session, batch, mut facts| {
                session.call_on_start(Hook::OnTestBatchStart, &mut facts, batch)?;
                session.step(Step::Test, batch, facts, M::test_step)?;
                let outputs = std::mem::take(&mut session.outputs);
                session.call_on_end(Hook::OnTestBatchEnd, facts, batch, &outputs)
            })?;
            session.run.log.metrics.publish_eval()?; // sync point
            session.call(Hook::OnTestEpochEnd, BatchFacts::default())?;
            let metrics = session.finish_eval()?;
            session.call(Hook::OnTestEnd, BatchFacts::default())?;
            Ok(metrics)
        })
    }

    /// Predicts; returns what was given for each batch of each loader, on the device; nothing unless `returns`.
    pub(crate) fn predict(
        &mut self,
        data: &EvalLoaders<M::Batch>,
        returns: bool,
    ) -> Result<Vec<Vec<StepOutput>>> {
        let mut predictions: Vec<Vec<StepOutput>> = data.loaders.iter().map(|_| Vec::new()).collect();
        if !self.has_batches(data)? {
            return Ok(predictions);
        }
        self.evaluate(|session| {
            session.module_method("on_predict_model_eval", |module| module.on_predict_model_eval())?;
            session.call(Hook::OnPredictStart, BatchFacts::default())?;
            session.call(Hook::OnPredictEpochStart, BatchFacts::default())?;
            session.for_each_batch(data, |session, batch, mut facts| {
                session.call_on_start(Hook::OnPredictBatchStart, &mut facts, batch)?;
                let given = session.step(Step::Predict, batch, facts, M::predict_step)?;
                let prediction = given.defined().then_some(given);
                let outputs = StepOutput { prediction, ..std::mem::take(&mut session.outputs) };
                session.call_on_end(Hook::OnPredictBatchEnd, facts, batch, &outputs)?;
                if returns {
                    predictions[facts.dataloader_idx].push(outputs);
                }
                Ok(())
            })?;
            session.call(Hook::OnPredictEpochEnd, BatchFacts::default())?;
            session.call(Hook::OnPredictEnd, BatchFacts::default())
        })?;
        Ok(predictions)
    }

    /// Whether there is something to evaluate; without, no hook is called. # Collective
    fn has_batches(&self, data: &EvalLoaders<M::Batch>) -> Result<bool> {
        self.run.world().of_rank_zero(data.num_batches.iter().any(|&batches| batches > 0))
    }

    /// Runs `body` without grad, and in inference mode outside fit.
    fn evaluate<T>(&mut self, body: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let _no_grad = tch::no_grad_guard();
        let infers = self.plan.inference_mode && self.run.at.stage != Stage::Fit;
        let _inference = infers.then(InferenceMode::enter).transpose()?;
        self.run.engine.strategy.begin_forward(self.module, true)?;
        self.run.log.metrics.begin_eval()?;
        note_writes(); // strategies may have given weights other values without a new version
        body(self)
    }

    fn for_each_batch(
        &mut self,
        data: &EvalLoaders<M::Batch>,
        mut body: impl FnMut(&mut Self, &mut M::Batch, BatchFacts) -> Result<()>,
    ) -> Result<()> {
        let done =
            |loader| self.run.callbacks.iter().map(|callback| callback.predicted_batches(loader)).max();
        let done: Vec<usize> = match self.run.at.stage {
            Stage::Predict => (0..data.loaders.len()).map(|loader| done(loader).unwrap_or(0)).collect(),
            _ => vec![0; data.loaders.len()],
        };
        let of_ranks = batches_of_ranks(self.run.world(), (data.num_batches.to_vec(), done))?;
        let first_batch = |loader: usize| of_ranks.iter().map(|(_, done)| done[loader]).min().unwrap_or(0);
        let first_batches: Vec<usize> = (0..data.loaders.len()).map(first_batch).collect();
        let num_batches_of_ranks: Vec<Vec<usize>> =
            of_ranks.into_iter().map(|(batches, _)| batches).collect();
        self.run.engine.strategy.begin_evaluation(self.module, &num_batches_of_ranks)?;
        let has_several = data.loaders.len() > 1;
        let mut remaining: usize = data.num_batches.iter().sum();
        'loaders: for (dataloader_idx, (loader, &num_batches)) in
            data.loaders.iter().zip(data.num_batches).enumerate()
        {
            let epoch = self.run.at.progress.current_epoch;
            let first_batch = first_batches[dataloader_idx].min(num_batches);
            let range = EpochRange { epoch, first_batch, num_batches: Some(num_batches - first_batch) };
            let mut batches = loader.iter(range)?;
            let action = actions::next_eval_batch(self.run.at.stage);
            while let Some(batch) = self.next_batch(&mut batches, action)? {
                let batch_idx = batches.next_batch_idx() - 1;
                let mut batch = self.take(batch, dataloader_idx)?;
                remaining = remaining.saturating_sub(1);
                let facts = BatchFacts {
                    batch_idx,
                    dataloader_idx,
                    batch_size: batch.batch_size(),
                    batch_indices: batches.batch_indices(batch_idx),
                    metric_suffix: has_several.then_some(dataloader_idx),
                    log_step: self
                        .eval_log_step()
                        .filter(|_| remaining == 0 && self.plan.log_every_n_steps > 0),
                    ..BatchFacts::default()
                };
                self.leave_ranks_without_batch(&num_batches_of_ranks, dataloader_idx, batch_idx);
                let done = body(self, &mut batch, facts)
                    .and_then(|()| self.log_eval_step_values(dataloader_idx, batch_idx));
                self.run.log.metrics.set_alone(false);
                self.run.world().group().inspect(|group| group.set_absent(None));
                match done {
                    Err(error) if self.may_do_without(&error) => break 'loaders,
                    done => done?,
                }
                self.check_signals()?;
            }
        }
        if num_batches_of_ranks.iter().any(|batches| batches.iter().all(|&batches| batches == 0)) {
            // a rank without a batch has not called the step
            self.has_no_validation_step = self.run.world().of_rank_zero(self.has_no_validation_step)?;
        }
        Ok(())
    }

    /// Whether a batch has failed because a fit has no `validation_step`. The rest of the validation is left out then, and
    /// all others; rank 0 says so.
    fn may_do_without(&mut self, error: &Error) -> bool {
        let Error::Hook { source, .. } = error else { return false };
        let is_missing = self.run.at.stage == Stage::Fit && source.is::<NotImplemented>();
        if is_missing && self.run.world().is_global_zero() {
            tracing::warn!("{source}: this fit does not validate");
        }
        self.has_no_validation_step |= is_missing;
        is_missing
    }

    /// In a batch that some ranks do not have, values are this rank's alone, and collectives with those ranks are refused: they are
    /// at the end of the evaluation. `of_ranks` are the numbers of batches by rank and loader.
    fn leave_ranks_without_batch(
        &mut self,
        of_ranks: &[Vec<usize>],
        dataloader_idx: usize,
        batch_idx: usize,
    ) {
        let num_batches = |rank: usize| of_ranks[rank].get(dataloader_idx).copied().unwrap_or(0);
        let ranks: Vec<usize> = (0..of_ranks.len()).filter(|rank| num_batches(*rank) <= batch_idx).collect();
        let Some(&rank) = ranks.first() else { return };
        self.run.log.metrics.set_alone(true);
        let (stage, batches) = (self.run.at.stage, num_batches(rank));
        let why = format!(
            "batch {batch_idx} of loader {dataloader_idx} ({stage}): rank {rank} has {batches} batches and does not take part"
        );
        self.run.world().group().inspect(|group| group.set_absent(Some(AbsentRanks { ranks, why })));
    }

    /// Gives what a batch has logged for the step by itself to the loggers. The step is the number of the batch among all
    /// that this loader has given in the run.
    fn log_eval_step_values(&mut self, dataloader_idx: usize, batch_idx: usize) -> Result<()> {
        if self.eval_log_step().is_none() {
            return Ok(());
        }
        let values = self.run.log.metrics.eval_step_values(); // sync point
        if values.is_empty() {
            return Ok(());
        }
        let before = match self.run.at.stage {
            Stage::Fit => self.run.at.progress.validation_batches.get(dataloader_idx).copied().unwrap_or(0),
            _ => 0,
        };
        let step = before + batch_idx as u64;
        self.give_to_loggers(&values, step)
    }

    /// Reads the metrics back and gives them to the loggers.
    fn finish_eval(&mut self) -> Result<EvalMetrics> {
        if self.run.at.is_sanity_check {
            self.run.log.metrics.discard_eval();
            return Ok(Vec::new());
        }
        let values = self.run.log.metrics.finish_eval()?; // sync point
        self.log(values.logged, self.eval_step())?;
        Ok(values.all)
    }

    /// The step that the metrics of an evaluation belong to: within fit the one just done, or, within an accumulation
    /// window, the one to come.
    fn eval_step(&self) -> u64 {
        let steps = self.run.at.progress.batches_that_stepped;
        let follows_step = self.run.at.stage == Stage::Fit && self.open_window().is_none();
        if follows_step { steps.saturating_sub(1) } else { steps }
    }

    /// The step under which loggers take rows of a batch of this evaluation, if they do.
    fn eval_log_step(&self) -> Option<u64> {
        let takes_rows = !self.run.loggers.is_empty()
            && !self.run.at.is_sanity_check
            && self.run.at.stage != Stage::Predict;
        takes_rows.then(|| self.eval_step())
    }
}
