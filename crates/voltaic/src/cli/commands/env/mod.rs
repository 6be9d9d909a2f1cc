//! `env`: the build, the machine and the environment, as text to be pasted into a bug report.

mod build;
mod machine;
mod variables;

use serde::Serialize;

use crate::accelerator::Inventory;
use crate::cli::outcome::Failure;
use crate::cli::registry::Registry;
use crate::config::{Layers, wrap};
use crate::distributed::collective_libraries;
use build::{Build, Kernels};
use machine::Machine;
use variables::Variable;

/// Column where lines are broken, but for values of variables.
const WIDTH: usize = 78;
/// Column where values begin.
const INDENT: usize = 16;

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    build: Build,
    machine: Machine,
    kernels: Kernels,
    #[serde(skip_serializing_if = "Option::is_none")]
    accelerators: Option<Inventory>,
    /// Why there is no list of accelerators.
    #[serde(skip_serializing_if = "Option::is_none")]
    accelerators_error: Option<String>,
    collectives: Vec<Collectives>,
    variables: Vec<Variable>,
}

/// A library that ranks exchange tensors by.
#[derive(Serialize)]
struct Collectives {
    name: &'static str,
    available: bool,
    description: String,
}

/// The report. What is missing or invalid is said in it, and is not a failure.
pub(in crate::cli) fn env(
    registry: &Registry,
    program: &str,
    json: bool,
    variables: Vec<(String, String)>,
) -> Result<String, Failure> {
    let (accelerators, accelerators_error) = match Inventory::of_machine() {
        Ok(inventory) => (Some(inventory), None),
        Err(error) => (None, Some(error.to_string())),
    };
    let collectives = collective_libraries().into_iter().map(|(name, found)| Collectives {
        name,
        available: found.is_ok(),
        description: found.unwrap_or_else(|error| error),
    });
    let keys = crate::config::keys(Layers::new(registry.schema()).schema());
    let report = Report {
        build: Build::of_process(program),
        machine: Machine::here(),
        kernels: Kernels::of_process(),
        accelerators,
        accelerators_error,
        collectives: collectives.collect(),
        variables: variables::in_force(variables, &keys),
    };
    if json {
        let text =
            serde_json::to_string_pretty(&report).map_err(|error| Failure::run(anyhow::Error::new(error)))?;
        return Ok(format!("{text}\n"));
    }
    Ok(report.text())
}

impl Report {
    fn text(&self) -> String {
        let mut text = String::new();
        section(&mut text, "build", &self.build.lines());
        section(&mut text, "machine", &self.machine.lines());
        section(&mut text, "kernels", &self.kernels.lines());
        let mut accelerators = Vec::new();
        for one in self.accelerators.iter().flat_map(|inventory| &inventory.accelerators) {
            let state = match (one.available, one.emulated) {
                (false, _) => "not available: ".to_owned(),
                (true, true) => String::new(),
                (true, false) if one.name == "cpu" => String::new(),
                (true, false) => format!("{} devices, ", one.cards.len()),
            };
            accelerators.push((one.name.to_owned(), format!("{state}{}", one.description)));
            let own = one.cards.iter().filter(|_| one.available && !one.emulated && one.name != "cpu");
            accelerators.extend(own.map(|card| (String::new(), card.to_string())));
        }
        accelerators.extend(self.accelerators_error.iter().map(|error| ("error".to_owned(), error.clone())));
        let auto = self.accelerators.as_ref().map(|inventory| inventory.auto.to_owned());
        accelerators.extend(auto.map(|auto| ("auto".to_owned(), auto)));
        section(&mut text, "accelerators", &accelerators);
        let collectives = self.collectives.iter().map(|library| {
            let state = if library.available { "" } else { "not available: " };
            (library.name.to_owned(), format!("{state}{}", library.description))
        });
        section(&mut text, "collectives", &collectives.collect::<Vec<_>>());
        text.push_str("variables\n");
        for variable in &self.variables {
            text.push_str(&format!("  {variable}\n"));
        }
        if self.variables.is_empty() {
            text.push_str("  none that matter\n");
        }
        text
    }
}

/// A heading with a line for each label and value, broken at [`WIDTH`].
fn section(text: &mut String, heading: &str, lines: &[(String, String)]) {
    text.push_str(heading);
    text.push('\n');
    for (label, value) in lines {
        for (index, line) in wrap(value, WIDTH - INDENT).iter().enumerate() {
            let label = if index == 0 { label } else { "" };
            text.push_str(&format!("  {label:<width$}{line}\n", width = INDENT - 2));
        }
    }
    text.push('\n');
}
