//! Prints the module's layers with their numbers of parameters, and of operations, before training.

use std::io::Write;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::ConfigError;
use crate::graph::Flops;
use crate::lightning::Callback;
use crate::module::HookContext;
use crate::nn::{Member, Module, ModuleExt};

/// What [`ModelSummary`] prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ModelSummaryConfig {
    /// Levels of the module's tree: 1 for its direct children, -1 for all, 0 for the sums alone.
    pub max_depth: i64,
    /// Also count floating-point operations of a training batch, by running one before the fit. On cpu and emulated HPUs.
    pub flops: bool,
}

impl Default for ModelSummaryConfig {
    fn default() -> Self {
        Self { max_depth: 1, flops: false }
    }
}

/// Prints a table of the module's layers at the start of fit: type, parameters, and with `flops` the operations of the
/// forward pass. Source: Lightning's `ModelSummary`.
#[derive(Debug, Clone, Copy, Default)]
pub struct ModelSummary {
    config: ModelSummaryConfig,
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
        Ok(Self { config })
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

/// Name, type, parameters, and operations if they are counted.
type Row = [String; 4];

/// Rows of the members below `module`, whose fqn is `prefix`.
fn add_rows(module: &dyn Module, prefix: &str, depth: i64, flops: Option<&Flops>, rows: &mut Vec<Row>) {
    if depth == 0 {
        return;
    }
    module.members(&mut |name, member| {
        let fqn = if prefix.is_empty() { name.to_owned() } else { format!("{prefix}.{name}") };
        match member {
            Member::Module(child) => {
                let params = human_count(child.num_parameters(false) as u64);
                let count = flops.map(|flops| human_count(flops.of_layer(&fqn))).unwrap_or_default();
                rows.push([fqn.clone(), child.type_name().to_owned(), params, count]);
                add_rows(child, &fqn, depth - 1, flops, rows);
            }
            Member::Parameter(parameter) if prefix.is_empty() => {
                let params = human_count(parameter.numel() as u64);
                rows.push([fqn, "Parameter".to_owned(), params, String::new()]);
            }
            Member::Parameter(_) | Member::Buffer(_) => {}
        }
    });
}

/// The table as text.
pub(crate) fn summary(module: &dyn Module, max_depth: i64, flops: Option<&Flops>) -> String {
    let mut rows: Vec<Row> = Vec::new();
    add_rows(module, "", max_depth, flops, &mut rows);
    let mut text = String::new();
    if max_depth != 0 {
        let columns = if flops.is_some() { 4 } else { 3 };
        let header = ["Name", "Type", "Params", "FLOPs"];
        let widths: Vec<usize> = (0..columns)
            .map(|column| {
                rows.iter().map(|row| row[column].len()).max().unwrap_or(0).max(header[column].len())
            })
            .collect();
        let line = |cells: [&str; 4]| {
            let mut line = format!("{:<2$} | {:<3$}", cells[0], cells[1], widths[0], widths[1]);
            for (cell, width) in cells.iter().zip(&widths).skip(2) {
                line.push_str(&format!(" | {cell:>width$}"));
            }
            line + "\n"
        };
        text.push_str(&line(header));
        text.push_str(&"-".repeat(widths.iter().sum::<usize>() + 3 * (columns - 1)));
        text.push('\n');
        for [name, kind, params, count] in &rows {
            text.push_str(&line([name, kind, params, count]));
        }
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

impl Callback for ModelSummary {
    fn on_fit_start(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        if ctx.is_global_zero() {
            let flops = ctx.facts().flops.as_deref().filter(|_| self.config.flops);
            let text = summary(module, self.config.max_depth, flops);
            // a closed terminal is not a reason to stop training
            let _ = std::io::stderr().write_all(text.as_bytes());
        }
        Ok(())
    }
}
