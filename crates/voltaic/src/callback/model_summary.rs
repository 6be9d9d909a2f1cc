//! Prints the module's layers with their numbers of parameters, and of operations, before training.

use std::sync::{Arc, Mutex};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;
use voltaic_macros::Defaults;

use crate::error::{ConfigError, write_stderr};
use crate::graph::Flops;
use crate::lightning::Callback;
use crate::module::{CallSizes, HookContext};
use crate::nn::{
    CallWatcher, Member, Module, ModuleCall, ModuleExt, ModuleHooks, RemovableHandle, Which, join_fqn,
};

/// What [`ModelSummary`] prints.
#[derive(Defaults, Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ModelSummaryConfig {
    /// Levels of the module's tree: 1 for its direct children, -1 for all, 0 for the sums alone.
    #[default(1)]
    pub max_depth: i64,
    /// Also count floating-point operations of a training batch, by running one before the fit. On cpu and emulated HPUs.
    pub flops: bool,
    /// Also show the sizes of each module's inputs and outputs. They are those of its first call, so that the table is printed
    /// after the first training batch. A module with an `example_input_array` shows them in any case, before the first batch.
    pub sizes: bool,
}

/// Prints a table of the module's layers at the start of fit: type, parameters, and with `flops` the operations of the
/// forward pass. If the module has an `example_input_array`, it is run on that first, and the table also has the sizes of inputs
/// and outputs, as Lightning's; with `sizes` and without an example they are those of the first batch. A module that is not called by [`call`](crate::nn::Callable::call) has `?`.
/// Source: Lightning's `ModelSummary`.
#[derive(Debug, Clone, Default)]
pub struct ModelSummary {
    config: ModelSummaryConfig,
    sizes: Arc<Mutex<CallSizes>>,
    /// There until the sizes are known.
    watch: Option<RemovableHandle>,
}

/// Notes the sizes of the first call of each module.
struct SizesOfCalls {
    sizes: Arc<Mutex<CallSizes>>,
    /// Inputs of the calls in progress.
    inputs: Vec<String>,
}

impl CallWatcher for SizesOfCalls {
    fn before_forward(&mut self, _: &ModuleCall<'_>, inputs: &[Tensor]) -> anyhow::Result<()> {
        self.inputs.push(sizes_of(inputs));
        Ok(())
    }

    fn after_forward(&mut self, call: &ModuleCall<'_>, outputs: &[Tensor]) -> anyhow::Result<()> {
        if let (Some(inputs), Ok(mut sizes)) = (self.inputs.last(), self.sizes.lock()) {
            sizes.entry(call.fqn().to_owned()).or_insert_with(|| [inputs.clone(), sizes_of(outputs)]);
        }
        Ok(())
    }

    fn end(&mut self) {
        self.inputs.pop();
    }
}

/// Notes the sizes of calls in `sizes`, until the hook is removed.
pub(crate) fn watch_sizes(calls: &ModuleHooks, sizes: &Arc<Mutex<CallSizes>>) -> RemovableHandle {
    calls.watch(Which::All, SizesOfCalls { sizes: sizes.clone(), inputs: Vec::new() })
}

/// As Lightning shows them: a list, or a list of lists.
fn sizes_of(tensors: &[Tensor]) -> String {
    match tensors {
        [tensor] => format!("{:?}", tensor.size()),
        tensors => format!("{:?}", tensors.iter().map(Tensor::size).collect::<Vec<_>>()),
    }
}

impl ModelSummary {
    /// Prints as `config` says.
    ///
    /// # Errors
    /// [`ConfigError`] if the depth is below -1.
    pub fn new(config: ModelSummaryConfig) -> Result<Self, ConfigError> {
        if config.max_depth < -1 {
            let what = format!("{} levels", config.max_depth);
            return Err(ConfigError::new(
                "ModelSummary.max_depth",
                what,
                "use -1 for all, or a number from 0",
            ));
        }
        Ok(Self { config, ..Self::default() })
    }
}

/// `61706` as `61.7 K`.
pub(crate) fn human_count(count: u64) -> String {
    match count {
        0..1_000 => count.to_string(),
        1_000..1_000_000 => format!("{:.1} K", count as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} M", count as f64 / 1e6),
        1_000_000_000..1_000_000_000_000 => format!("{:.1} B", count as f64 / 1e9),
        _ => format!("{:.1} T", count as f64 / 1e12),
    }
}

/// One module, by column.
type Row = Vec<String>;

/// What is shown beside names, types and parameters.
#[derive(Clone, Copy, Default)]
pub(crate) struct Columns<'a> {
    pub(crate) flops: Option<&'a Flops>,
    pub(crate) sizes: Option<&'a CallSizes>,
}

impl Columns<'_> {
    fn row(&self, fqn: &str, kind: &str, params: usize, is_module: bool) -> Row {
        let mut row = vec![fqn.to_owned(), kind.to_owned(), human_count(params as u64)];
        let of_module = |text: String| if is_module { text } else { String::new() };
        row.extend(self.flops.map(|flops| of_module(human_count(flops.of_layer(fqn)))));
        if let Some(sizes) = self.sizes {
            let unknown = || ["?".to_owned(), "?".to_owned()];
            row.extend(sizes.get(fqn).cloned().unwrap_or_else(unknown).map(of_module));
        }
        row
    }
}

/// Rows of the members below `module`, whose fqn is `prefix`.
fn add_rows(module: &dyn Module, prefix: &str, depth: i64, columns: Columns, rows: &mut Vec<Row>) {
    if depth == 0 {
        return;
    }
    module.members(&mut |name, member| {
        let fqn = join_fqn(prefix, name);
        match member {
            Member::Module(child) => {
                rows.push(columns.row(&fqn, child.type_name(), child.num_parameters(false), true));
                add_rows(child, &fqn, depth - 1, columns, rows);
            }
            Member::Parameter(parameter) if prefix.is_empty() => {
                rows.push(columns.row(&fqn, "Parameter", parameter.numel(), false));
            }
            Member::Parameter(_) | Member::Buffer(_) => {}
        }
    });
}

/// The table as text.
pub(crate) fn summary(module: &dyn Module, max_depth: i64, columns: Columns) -> String {
    let flops = columns.flops;
    let mut rows: Vec<Row> = Vec::new();
    add_rows(module, "", max_depth, columns, &mut rows);
    let mut text = String::new();
    if max_depth != 0 {
        let mut header = vec!["Name", "Type", "Params"];
        header.extend(flops.map(|_| "FLOPs"));
        header.extend(columns.sizes.iter().flat_map(|_| ["In sizes", "Out sizes"]));
        let header: Row = header.into_iter().map(str::to_owned).collect();
        let width =
            |column: usize| rows.iter().chain([&header]).map(|row| row[column].len()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..header.len()).map(width).collect();
        let line = |row: &Row| {
            let cells = row.iter().zip(&widths).enumerate();
            let cells =
                cells.map(
                    |(column, (cell, width))| {
                        if column < 2 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
                    },
                );
            cells.collect::<Vec<_>>().join(" | ") + "\n"
        };
        text.push_str(&line(&header));
        text.push_str(&"-".repeat(widths.iter().sum::<usize>() + 3 * (widths.len() - 1)));
        text.push('\n');
        rows.iter().for_each(|row| text.push_str(&line(row)));
    }
    let (all, trainable) = (module.num_parameters(false), module.num_parameters(true));
    let bytes: usize = module.parameters().iter().map(|p| p.numel() * p.kind().elt_size_in_bytes()).sum();
    text.push_str(&format!(
        "{} parameters, {} trainable, {:.2} MB\n",
        human_count(all as u64),
        human_count(trainable as u64),
        bytes as f64 / 1e6
    ));
    if let Some(flops) = flops {
        text.push_str(&format!(
            "{} floating-point operations of a training batch, {} of them forward\n",
            human_count(flops.total),
            human_count(flops.forward)
        ));
    }
    text
}

impl ModelSummary {
    fn print(&self, ctx: &HookContext, module: &dyn Module) {
        let sizes = self.sizes.lock().map(|sizes| sizes.clone()).unwrap_or_default();
        let of_calls = self.config.sizes.then_some(&sizes);
        let columns = Columns {
            flops: ctx.facts().flops.as_deref().filter(|_| self.config.flops),
            sizes: ctx.facts().example_sizes.as_deref().or(of_calls),
        };
        let text = summary(module, self.config.max_depth, columns);
        write_stderr(&text);
    }
}

impl Callback for ModelSummary {
    fn on_fit_start(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        if !ctx.is_global_zero() {
            return Ok(());
        }
        if !self.config.sizes || ctx.facts().example_sizes.is_some() {
            self.print(ctx, module);
            return Ok(());
        }
        self.watch.iter().for_each(RemovableHandle::remove);
        self.watch = Some(watch_sizes(ctx.module_hooks(), &self.sizes));
        Ok(())
    }

    fn on_train_batch_end(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        if let Some(watch) = self.watch.take() {
            watch.remove();
            self.print(ctx, module);
        }
        Ok(())
    }

    fn on_fit_end(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        self.on_train_batch_end(ctx, module) // without a batch the sizes stay unknown
    }
}
