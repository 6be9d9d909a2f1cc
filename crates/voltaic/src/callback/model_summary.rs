//! Prints the module's children with their numbers of parameters before training.

use std::io::Write;

use super::Callback;
use crate::module::HookContext;
use crate::nn::{Member, Module, ModuleExt};

/// Prints a table of the module's direct children at the start of fit.
#[derive(Debug, Clone, Copy, Default)]
pub struct ModelSummary;

/// `61706` as `61.7 K`.
pub(crate) fn human_count(count: usize) -> String {
    match count {
        0..1_000 => count.to_string(),
        1_000..1_000_000 => format!("{:.1} K", count as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} M", count as f64 / 1e6),
        _ => format!("{:.1} B", count as f64 / 1e9),
    }
}

/// The table as text.
pub(crate) fn summary(module: &dyn Module) -> String {
    let mut rows: Vec<[String; 3]> = Vec::new();
    module.members(&mut |name, member| match member {
        Member::Module(child) => {
            rows.push([
                name.to_owned(),
                child.type_name().to_owned(),
                human_count(child.num_parameters(false)),
            ]);
        }
        Member::Parameter(parameter) => {
            rows.push([name.to_owned(), "Parameter".to_owned(), human_count(parameter.numel())]);
        }
        Member::Buffer(_) => {}
    });
    let header = ["Name", "Type", "Params"];
    let width = |column: usize| rows.iter().map(|row| row[column].len()).chain([header[column].len()]).max();
    let widths: Vec<usize> = (0..3).map(|column| width(column).unwrap_or(0)).collect();
    let line = |cells: [&str; 3]| {
        format!("{:<3$} | {:<4$} | {:>5$}\n", cells[0], cells[1], cells[2], widths[0], widths[1], widths[2])
    };
    let mut text = line(header);
    text.push_str(&"-".repeat(widths.iter().sum::<usize>() + 6));
    text.push('\n');
    for [name, kind, params] in &rows {
        text.push_str(&line([name, kind, params]));
    }
    let (all, trainable) = (module.num_parameters(false), module.num_parameters(true));
    let bytes: usize = module.parameters().iter().map(|p| p.numel() * p.kind().elt_size_in_bytes()).sum();
    text.push_str(&format!(
        "{} parameters, {} trainable, {:.2} MB\n",
        human_count(all),
        human_count(trainable),
        bytes as f64 / 1e6
    ));
    text
}

impl Callback for ModelSummary {
    fn on_fit_start(&mut self, _ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        // a closed terminal is no reason to stop training
        let _ = std::io::stderr().write_all(summary(module).as_bytes());
        Ok(())
    }
}
