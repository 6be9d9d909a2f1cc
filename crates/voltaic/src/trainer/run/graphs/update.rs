//! With `trainer.graph=step`: clipping and the optimizer step after a replayed step, as a graph of their own.
//!
//! As forward and backward, they are captured twice; if both captures are the same graph, it takes the place of the code.
//! Learning rates are read again in each replay.

use crate::error::{Error, Result};
use crate::graph::{self, FirstCapture};
use crate::module::{BatchFacts, LightningModule};
use crate::trainer::session::graphs::Update;
use crate::trainer::session::hooks::scope;
use crate::trainer::session::session::Session;
use crate::trainer::session::step::{OPTIMIZER_STEP, Step};

/// How often an update may turn out to be another one before that is taken to be the rule.
const MAX_CHANGES: u64 = 10;

impl<M: LightningModule> Session<'_, M> {
    /// Clips and steps the optimizers by a graph, or by `update` while that is captured; `false` if this is left to be done
    /// as usual, since the gradients are not those of a replayed step, or there can be no graph.
    pub(crate) fn graphed_update(
        &mut self,
        facts: BatchFacts,
        update: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<bool> {
        if self.graphs.replayed.is_none() || self.graphs.report.update_refusal.is_some() {
            return Ok(false);
        }
        let prepared = self.training.optimizers.iter_mut().map(|optimizer| optimizer.prepare_replay());
        let Some(prepared) = prepared.collect::<Result<Option<Vec<u64>>>>()? else {
            self.refuse_update("an optimizer does not implement prepare_replay");
            return Ok(false);
        };
        let _action = self.profile_strategy("update")?;
        let Some((ready, params)) = self.graphs.replayed_step() else { return Ok(false) };
        if !ready.grads.are_grads_of(params)? {
            return Ok(false); // a hook has put others in their place
        }
        let before = match std::mem::take(&mut ready.update) {
            Update::Ready(captured, mut graph) if captured == prepared => {
                graph.replay(None)?;
                ready.update = Update::Ready(captured, graph);
                self.graphs.report.replayed_updates += 1;
                return Ok(true);
            }
            Update::Seen(captured, before) if captured == prepared => Some(before),
            Update::Unknown => None,
            Update::Ready(..) | Update::Seen(..) => {
                self.graphs.changed_updates += 1;
                None
            }
        };
        if self.graphs.changed_updates > MAX_CHANGES {
            self.refuse_update(
                "other numbers than learning rates, or what has gradients, change from step to step",
            );
            return Ok(false);
        }
        self.capture_update(before, prepared, facts, update)?;
        Ok(true)
    }

    fn capture_update(
        &mut self,
        before: Option<FirstCapture>,
        prepared: Vec<u64>,
        facts: BatchFacts,
        update: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        let names = self.tensor_names(&[]);
        let capture = graph::Capture::begin()?;
        self.run.log.metrics.begin_capture();
        let updated = update(self);
        let logged = self.run.log.metrics.end_capture();
        if !logged.is_empty() {
            graph::refuse_capture("values are logged there");
        }
        let captured = capture.end();
        updated?; // an error of the update is more to the point than one of the capture
        self.run.log.metrics.enter(scope(OPTIMIZER_STEP, &facts));
        self.run.log.metrics.record_again(&logged)?;
        self.run.log.metrics.enter(scope(Step::Training.facts(), &facts));
        self.graphs.report.captured_updates += 1;
        let update = captured.and_then(|captured| {
            let graphs = captured.read(&names)?;
            let Some(before) = before else { return Ok(Update::Seen(prepared, captured.into_seen(graphs))) };
            before.check_same(&graphs)?;
            let graph = captured.compile(graphs, &[])?;
            for stats in graph.plan_stats() {
                let (all, replayed) = (stats.num_nodes, stats.num_calls);
                tracing::info!(
                    "captured clipping and the optimizer step: {all} operators, {replayed} replayed"
                );
            }
            Ok(Update::Ready(prepared, graph))
        });
        match (update, self.graphs.replayed_step()) {
            (Ok(update), Some((ready, _))) => ready.update = update,
            (Ok(_), None) => {}
            (Err(Error::Graph(error)), _) => {
                graph::count_fallback(&error);
                self.refuse_update(&error.to_string());
            }
            (Err(error), _) => return Err(error),
        }
        Ok(())
    }

    fn refuse_update(&mut self, why: &str) {
        tracing::warn!("trainer.graph=step: clipping and the optimizer step run as usual: {why}");
        self.graphs.report.update_refusal = Some(why.to_owned());
    }
}
