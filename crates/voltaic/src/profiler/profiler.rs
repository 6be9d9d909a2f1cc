//! `Profiler`: measures actions of a run; and the guard around one action.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use tch::Tensor;

use super::actions;
use crate::data::Stage;
use crate::device::Device;
use crate::error::Result;
use crate::nn::{CallWatcher, Module, ModuleCall, ModuleHooks, Which};

/// The run that a profiler measures.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProfiledRun {
    /// What is being done: `fit`, `validate`, `test` or `predict`.
    pub stage: Stage,
    /// Rank of this process among all.
    pub rank: usize,
    /// Number of ranks; each has a profiler of its own.
    pub world_size: usize,
    /// Folder of the run.
    pub log_dir: PathBuf,
    /// The device of this process.
    pub device: Device,
}

/// Measures the actions of a run: hooks, steps, batches fetched, checkpoints saved (`docs/profilers.md` has their names).
///
/// The trainer calls [`setup`](Profiler::setup) at the start of each of fit, validate, test and predict, then `start` and
/// `stop` around each action on the thread that trains, and [`describe`](Profiler::describe) at the end, also of a run that
/// failed. Actions are nested: the one that began last ends first. An action whose name ends with `training_step`,
/// `validation_step`, `test_step` or `predict_step` is one step of its loop.
pub trait Profiler: Send {
    /// Called before the first action of a run.
    ///
    /// # Errors
    /// If the profiler cannot be set up; it ends the run.
    fn setup(&mut self, run: &ProfiledRun) -> Result<()> {
        let _ = run;
        Ok(())
    }

    /// Whether calls of modules are actions, too: `[module]Linear: fc1`.
    fn records_modules(&self) -> bool {
        false
    }

    /// An action begins.
    ///
    /// # Errors
    /// [`ProfilerError`](crate::error::ProfilerError) if an action of this name has begun and not ended.
    fn start(&mut self, action: &str) -> Result<()>;

    /// An action ends.
    ///
    /// # Errors
    /// [`ProfilerError`](crate::error::ProfilerError) if no action of this name has begun.
    fn stop(&mut self, action: &str) -> Result<()>;

    /// What was measured, as text.
    fn summary(&self) -> String {
        String::new()
    }

    /// Called after the last action of a run: writes what was measured.
    ///
    /// # Errors
    /// If it cannot be written.
    fn describe(&mut self) -> Result<()>;
}

type Shared = Arc<Mutex<Box<dyn Profiler>>>;

/// The profiler of a run, or none: then nothing is measured, and a name is not even made.
#[derive(Clone, Default)]
pub(crate) struct Profiling(Option<Shared>);

/// An action that is being measured; it ends when this goes out of scope.
#[must_use = "the action ends when its guard goes out of scope"]
pub struct Action(Option<(Shared, String)>);

impl Profiling {
    pub(crate) fn with(profiler: Box<dyn Profiler>) -> Self {
        Self(Some(Arc::new(Mutex::new(profiler))))
    }

    /// Begins an action.
    pub(crate) fn start(&self, name: impl FnOnce() -> String) -> Result<Action> {
        let Some(profiler) = &self.0 else { return Ok(Action(None)) };
        let name = name();
        locked(profiler, |profiler| profiler.start(&name))?;
        Ok(Action(Some((Arc::clone(profiler), name))))
    }

    /// Begins a hook of a module.
    pub(crate) fn of_module(&self, module: &impl Module, hook: &str) -> Result<Action> {
        self.start(|| actions::of_module(module.type_name(), hook))
    }

    /// The same of a data module whose type has this name.
    pub(crate) fn of_data(&self, type_name: &str, hook: &str) -> Result<Action> {
        self.start(|| actions::of_data(short(type_name), hook))
    }

    /// Measures calls of modules, if the profiler records them.
    pub(crate) fn watch(&self, hooks: &ModuleHooks) {
        if self.0.as_ref().is_some_and(|profiler| locked(profiler, |profiler| profiler.records_modules())) {
            let _ = hooks.watch(Which::All, Calls { profiling: self.clone(), running: Vec::new() });
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Begins what a strategy does.
    pub(crate) fn of_strategy(&self, name: &str, method: &str) -> Result<Action> {
        self.start(|| actions::of_strategy(name, method))
    }

    pub(crate) fn setup(&self, run: impl FnOnce() -> ProfiledRun) -> Result<()> {
        self.0.as_ref().map_or(Ok(()), |profiler| locked(profiler, |profiler| profiler.setup(&run())))
    }

    pub(crate) fn describe(&self) -> Result<()> {
        self.0.as_ref().map_or(Ok(()), |profiler| locked(profiler, Profiler::describe))
    }

    pub(crate) fn summary(&self) -> Option<String> {
        self.0.as_ref().map(|profiler| locked(profiler, |profiler| profiler.summary()))
    }
}

/// Calls of modules as actions.
struct Calls {
    profiling: Profiling,
    /// None for a call of a module within its own: an action does not begin twice.
    running: Vec<Option<Action>>,
}

impl CallWatcher for Calls {
    fn before_forward(&mut self, call: &ModuleCall<'_>, _: &[Tensor]) -> anyhow::Result<()> {
        let name = || format!("[module]{}: {}", call.type_name(), call.fqn());
        self.running.push(self.profiling.start(name).ok());
        Ok(())
    }

    fn end(&mut self) {
        self.running.pop();
    }
}

fn locked<T>(profiler: &Shared, call: impl FnOnce(&mut (dyn Profiler + 'static)) -> T) -> T {
    let mut profiler = profiler.lock().unwrap_or_else(PoisonError::into_inner);
    call(profiler.as_mut())
}

/// A type's name without paths and without what it is generic over.
fn short(type_name: &str) -> &str {
    let name = type_name.split('<').next().unwrap_or(type_name);
    name.rsplit("::").next().unwrap_or(name)
}

impl Action {
    /// Runs `body` as this action.
    pub(crate) fn around<T>(self, body: impl FnOnce() -> T) -> T {
        body()
    }
}

impl Drop for Action {
    fn drop(&mut self) {
        let Some((profiler, name)) = self.0.take() else { return };
        if let Err(error) = locked(&profiler, |profiler| profiler.stop(&name)) {
            tracing::warn!("the profiler could not end {name}: {error}");
        }
    }
}

impl fmt::Debug for Profiling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Profiling(on)" } else { "Profiling(off)" })
    }
}

impl fmt::Debug for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Action").field(&self.0.as_ref().map(|(_, name)| name)).finish()
    }
}
