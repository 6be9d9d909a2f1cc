//! The graphs of one fit: of steps, and of the updates that follow them.

use tch::Tensor;

use crate::error::{GraphError, Result};
use crate::ffi::TensorList;
use crate::graph::{
    CompileConfig, CompiledGraph, Conditions, FirstCapture, GraphUses, InputSignature, ModuleGraphs, Passes,
    RECOMPILE_LIMIT, fall_back,
};
use crate::module::{Logged, NamedTensors};
use crate::nn::{ModeNumbers, ModuleKind};
use crate::trainer::config::graph::{GraphMode, GraphReport};

/// What is there of the graph of an update. A number of each optimizer shows whether it would still do the same.
#[derive(Default)]
pub(crate) enum Update {
    #[default]
    Unknown,
    /// Captured once, to be compared.
    Seen(Vec<u64>, FirstCapture),
    Ready(Vec<u64>, CompiledGraph),
}

/// What makes a step another graph.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Signature {
    pub inputs: Vec<InputSignature>,
    pub opens_window: bool,
    pub window_size: u64,
    pub loss_scale: f64,
    /// What holds on the thread before the step.
    pub conditions: Conditions,
    /// Modes and plain values of the module and all modules below it.
    pub module: ModuleKind,
    /// Hash of which parameters are trained, and which have gradients that the step adds to.
    pub params: u64,
}

pub(crate) enum GraphState {
    /// Captured once, to be compared, with what it logged.
    Seen(FirstCapture, Vec<Logged>),
    Ready(Box<Ready>),
}

/// A step that can be replayed.
pub(crate) struct Ready {
    pub graph: CompiledGraph,
    /// Where the batch must be if a result is a view of it.
    pub places: Option<Vec<Tensor>>,
    pub loss: Tensor,
    pub logged: Vec<Logged>,
    /// What the step gives by name.
    pub outputs: NamedTensors,
    pub grads: TensorList,
    /// It adds to gradients that are there.
    pub adds: bool,
    /// What follows it.
    pub update: Update,
}

/// Kinds of batches that get a graph, unless they are compiled.
const MAX_GRAPHS: usize = 10;

/// The graphs of one fit.
pub(crate) struct StepGraphs {
    mode: GraphMode,
    compile: Option<CompileConfig>,
    /// Over the graphs that are captured.
    pub passes: Passes,
    /// Kinds of batches that get a graph; others run as usual.
    pub max: usize,
    pub params: Option<TensorList>,
    pub entries: Vec<(Signature, GraphState)>,
    pub modes: ModeNumbers,
    pub is_full: bool,
    /// It was looked at whether steps use them.
    pub is_use_checked: bool,
    /// The hooks before the backward pass of the step that runs were called before it.
    pub called_hooks: bool,
    /// Position of the graphs that have just been replayed.
    pub replayed: Option<usize>,
    /// Updates that were not what was captured before.
    pub changed_updates: u64,
    /// There with `modules`, and with compile for evaluation.
    pub modules: Option<ModuleGraphs>,
    pub report: GraphReport,
    /// What was captured by hand before the call.
    by_hand: GraphUses,
}

impl StepGraphs {
    pub(crate) fn new(mode: GraphMode, compile: Option<CompileConfig>) -> Self {
        Self {
            mode,
            compile,
            passes: Passes::of(compile),
            max: compile.map_or(MAX_GRAPHS, |config| config.recompile_limit.unwrap_or(RECOMPILE_LIMIT)),
            params: None,
            entries: Vec::new(),
            modes: ModeNumbers::default(),
            is_full: false,
            is_use_checked: false,
            called_hooks: false,
            replayed: None,
            changed_updates: 0,
            modules: match compile {
                Some(config) => Some(ModuleGraphs::compiled(config)),
                None => (mode == GraphMode::Modules).then(ModuleGraphs::default),
            },
            report: GraphReport::default(),
            by_hand: GraphUses::so_far(),
        }
    }

    /// Whether steps may be captured or replayed.
    pub(crate) fn are_on(&self) -> bool {
        (self.mode == GraphMode::Step || self.compile.is_some()) && self.report.refusal.is_none()
    }

    /// The modules that a step calls by `ctx.graphed`, if they have graphs of their own: not in a training step that is compiled as a
    /// whole.
    pub(crate) fn take_modules(&mut self, is_training: bool) -> Option<ModuleGraphs> {
        if is_training && self.compile.is_some() { None } else { self.modules.take() }
    }

    /// The key of the configuration that asks for graphs, for messages.
    pub(crate) fn key(&self) -> String {
        match self.compile {
            Some(config) => format!("trainer.compile={}", config.backend),
            None => format!("trainer.graph={}", self.mode),
        }
    }

    /// What was done in the call.
    pub(crate) fn take_report(&mut self, is_fit: bool) -> GraphReport {
        let modules = self.modules.as_ref().map_or_else(Vec::new, ModuleGraphs::stats);
        let (now, before) = (GraphUses::so_far(), self.by_hand);
        let report = std::mem::take(&mut self.report);
        let refusal = report.refusal.clone().or_else(|| self.unused(is_fit).map(str::to_owned));
        GraphReport {
            modules,
            refusal,
            captured_by_hand: now.captured - before.captured,
            replayed_by_hand: now.replayed - before.replayed,
            ..report
        }
    }

    /// Why a call that asks for graphs has tried none.
    fn unused(&self, is_fit: bool) -> Option<&'static str> {
        let is_step = self.mode == GraphMode::Step && self.compile.is_none();
        match &self.modules {
            None if is_step && !is_fit => Some(
                "trainer.graph=step captures training steps; set trainer.graph=modules for modules that steps call by ctx.graphed",
            ),
            Some(modules) if modules.is_empty() && !(is_fit && self.compile.is_some()) => {
                Some("no step called a module by ctx.graphed(&module, &input)")
            }
            _ => None,
        }
    }

    /// After an epoch, or the part of one: says once if no step has called what it could capture.
    pub(crate) fn warn_if_unused(&mut self) {
        if !std::mem::replace(&mut self.is_use_checked, true)
            && self.compile.is_none()
            && self.modules.as_ref().is_some_and(ModuleGraphs::is_empty)
        {
            tracing::warn!(
                "trainer.graph=modules: no step called a module by ctx.graphed(&module, &input), so that nothing is captured; call one so, or set trainer.graph=step"
            );
        }
    }

    /// Whether the hooks before the backward pass of the step that runs were called before it.
    pub(crate) fn called_hooks(&self) -> bool {
        self.called_hooks
    }

    /// The step that has just been replayed, and the parameters.
    pub(crate) fn replayed_step(&mut self) -> Option<(&mut Ready, &TensorList)> {
        match (self.entries.get_mut(self.replayed?), &self.params) {
            (Some((_, GraphState::Ready(ready))), Some(params)) => Some((ready, params)),
            _ => None,
        }
    }

    /// The same for what cannot be captured or replayed; an error if compile may not do without.
    pub(crate) fn fall_back(&mut self, error: &GraphError) -> Result<()> {
        fall_back(self.compile, error)?;
        self.refuse(&error.to_string());
        Ok(())
    }

    /// Counts an update that runs as usual; an error if compile may not do so.
    pub(crate) fn fall_back_in_update(&self, error: &GraphError) -> Result<()> {
        fall_back(self.compile, error)
    }

    /// Ends the use of graphs in this fit.
    pub(crate) fn refuse(&mut self, why: &str) {
        tracing::warn!("{}: {why}; the run continues without graphs", self.key());
        self.report.refusal = Some(why.to_owned());
        self.entries.clear();
    }

    /// Position of the graphs for a signature; none if there is no room for another one.
    pub(crate) fn find(&self, signature: &Signature) -> Option<usize> {
        self.entries.iter().position(|(known, _)| known == signature)
    }
}
