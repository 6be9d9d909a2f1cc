//! `run`: torchrun's flags for the launcher of this program.

use std::convert::Infallible;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::cli::args::LaunchArgs;
use crate::cli::outcome::Failure;
use crate::cli::request::Verb;
use crate::error::ConfigError;

/// Becomes the same program with the keys and variables that the flags stand for. Returns only if that fails.
pub(in crate::cli) fn launch(arguments: &LaunchArgs) -> Result<Infallible, Failure> {
    let verb = arguments.command[0].as_str();
    if Verb::parse(verb).is_none() {
        let verbs = Verb::ALL.map(Verb::as_str).join(", ");
        let what = format!("`{verb}` has no ranks");
        return Err(ConfigError::new("run", what, format!("give one of {verbs}, with its options")).into());
    }
    let failed = |error| Failure::run(anyhow::Error::new(error).context("cannot start the program again"));
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    command.args(&arguments.command).args(keys(arguments)).envs(variables(arguments));
    Err(failed(command.exec()))
}

/// The options that the flags stand for.
fn keys(arguments: &LaunchArgs) -> Vec<String> {
    let devices = arguments.nproc_per_node.as_ref().map(|count| format!("--trainer.devices={count}"));
    let nodes = arguments.nnodes.map(|count| format!("--trainer.num_nodes={count}"));
    let restarts = arguments.max_restarts.map(|count| format!("--trainer.max_restarts={count}"));
    devices.into_iter().chain(nodes).chain(restarts).collect()
}

/// The variables that the launcher reads.
fn variables(arguments: &LaunchArgs) -> Vec<(&'static str, OsString)> {
    let rank = arguments.node_rank.map(|rank| ("NODE_RANK", rank.to_string().into()));
    let address = arguments.master_addr.as_ref().map(|address| ("MASTER_ADDR", address.into()));
    let port = arguments.master_port.map(|port| ("MASTER_PORT", port.to_string().into()));
    rank.into_iter().chain(address).chain(port).collect()
}
