//! `Callback`: code that runs at points of a run without being part of the model.

use std::path::PathBuf;

use super::hook_context::HookContext;
use super::hooks::{Hook, StepHook, call_method, each_hook, each_step_hook, hook_methods};
use crate::checkpoint::{Checkpoint, CheckpointPaths};
use crate::data::Stage;
use crate::nn::Module;

/// Code that runs at points of a run. All hooks do nothing unless they are implemented.
///
/// Callbacks run in the order they were given, before the module's hook of the same name; those that look at what
/// hooks log ([`Callback::runs_after_module`]) run after it, and of them those that save checkpoints last.
///
/// Hooks around backward and the optimizer see the module only to read, since with manual optimization they run within
/// its `training_step`.
#[allow(unused_variables)]
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a callback",
    note = "settings become one by `new`: `ModelCheckpoint::new(config)?`, `EarlyStopping::new(config)?`",
    note = "for one of your own implement `Callback`: each hook that it leaves out does nothing"
)]
pub trait Callback: Send {
    /// Name under which the callback's state is saved; two callbacks with state need different ones.
    fn state_key(&self) -> String {
        let name = std::any::type_name::<Self>();
        name.rsplit("::").next().unwrap_or(name).to_owned()
    }

    /// The callback's type: one that a module configures takes the place of the trainer's of the same type.
    fn type_name(&self) -> &'static str {
        std::any::type_name::<Self>()
    }

    /// What has to be saved in checkpoints; `None` if nothing.
    fn state_dict(&self) -> Option<serde_json::Value> {
        None
    }

    /// Takes back what [`Callback::state_dict`] gave.
    ///
    /// # Errors
    /// If the state is not this callback's.
    fn load_state_dict(&mut self, state: &serde_json::Value) -> anyhow::Result<()> {
        Ok(())
    }

    /// Whether this callback saves checkpoints, and so runs after the others. For one that does, the run is kept as it
    /// was when training was cut short within an epoch.
    fn saves_checkpoints(&self) -> bool {
        false
    }

    /// Why a run that is resumed with the state this callback has loaded is over before it begins, if it is.
    fn has_ended_run(&self) -> Option<String> {
        None
    }

    /// Whether this callback requests a checkpoint when a run fails. What a batch changes is then kept until the batch is done,
    /// so that a run that failed within the batch resumes at its beginning.
    fn saves_on_exception(&self) -> bool {
        false
    }

    /// Whether this callback looks at what the module's hooks log, and so runs after them.
    fn runs_after_module(&self) -> bool {
        self.saves_checkpoints()
    }

    /// Whether this callback is of no use without a logger, so that a trainer without one refuses it.
    fn needs_logger(&self) -> bool {
        false
    }

    /// The best and the last checkpoint this callback has saved, if it saves any.
    fn checkpoint_paths(&self) -> Option<CheckpointPaths> {
        None
    }

    /// How many batches of a loader, from its beginning, `predict` is not to run again, since what it predicted for them is written.
    /// Called after `on_predict_epoch_start`; all ranks begin after the fewest that one of them has.
    fn predicted_batches(&self, dataloader_idx: usize) -> usize {
        let _ = dataloader_idx;
        0
    }

    /// Files and folders it has written for the user; the command line prints their paths.
    fn files(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Called at each [`Hook`]; calls the method of that name. For a callback that does the same at many hooks: with this
    /// implemented, its own methods of those names are not called.
    fn on_hook(&mut self, hook: Hook, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        each_hook!(call_method(hook, Hook, self, (ctx, module)))
    }

    /// The same of the hooks around backward and the optimizer.
    fn on_step_hook(
        &mut self,
        hook: StepHook,
        ctx: &mut HookContext,
        module: &dyn Module,
    ) -> anyhow::Result<()> {
        each_step_hook!(call_method(hook, StepHook, self, (ctx, module)))
    }

    /// Called first in each of fit, validate, test and predict.
    fn setup(&mut self, stage: Stage, module: &mut dyn Module) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called last in each of fit, validate, test and predict, not after a failure.
    fn teardown(&mut self, stage: Stage, module: &mut dyn Module) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called when the requested checkpoints were handed to the checkpoint IO, which may still be writing them.
    fn on_checkpoints_written(&mut self) {}

    /// Called when the run fails or is interrupted, before the error is returned.
    fn on_exception(&mut self, ctx: &mut HookContext, error: &crate::Error) {}

    /// Called with each checkpoint before it is written; may change it. What a strategy has sharded among ranks is in
    /// [`shards`](Checkpoint::shards), on each rank its own, and not in the other lists.
    fn on_save_checkpoint(
        &mut self,
        ctx: &mut HookContext,
        checkpoint: &mut Checkpoint,
    ) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called with the checkpoint that a run starts from, when the module has its weights. Where each rank reads its shards of a
    /// checkpoint that is sharded among ranks, weights and states of optimizers are not in it. Where the call does not train, states of
    /// optimizers may be missing, too.
    fn on_load_checkpoint(&mut self, checkpoint: &Checkpoint) -> anyhow::Result<()> {
        Ok(())
    }

    // a method for each hook, with its doc: hooks.rs has the tables
    each_hook!(hook_methods (&mut self, ctx: &mut HookContext, module: &mut dyn Module));
    each_step_hook!(hook_methods (&mut self, ctx: &mut HookContext, module: &dyn Module));
}
