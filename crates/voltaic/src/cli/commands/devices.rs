//! `devices`: what this machine has to train on.

use serde::Serialize;

use crate::accelerator::{FlagReport, Inventory, RuntimeFlags};
use crate::cli::args::DevicesArgs;
use crate::cli::outcome::Failure;

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    inventory: Inventory,
    #[serde(skip_serializing_if = "Option::is_none")]
    env: Option<Vec<FlagReport>>,
}

/// The accelerators with their devices, and with `--env` the variables that describe HPUs.
pub(in crate::cli) fn devices(arguments: &DevicesArgs) -> Result<String, Failure> {
    let failure = |error| Failure::usage(format!("{error}"));
    let flags = RuntimeFlags::from_env().map_err(failure)?;
    let inventory = Inventory::of_machine().map_err(failure)?;
    let env = arguments.env.then(|| flags.report());
    if arguments.json {
        let text = serde_json::to_string_pretty(&Report { inventory, env })
            .map_err(|error| Failure::run(anyhow::Error::new(error)))?;
        return Ok(format!("{text}\n"));
    }
    let mut text = inventory.to_string();
    for flag in env.iter().flatten() {
        text.push_str(&describe(flag));
    }
    Ok(text)
}

fn describe(flag: &FlagReport) -> String {
    let FlagReport { name, value, default, accepted, effect } = flag;
    let value = match value {
        Some(value) => format!("={value}"),
        None => format!(" (not set: {default})"),
    };
    format!("\n{name}{value}\n    accepts {accepted}\n    {effect}\n")
}
