//! The `voltaic` command.

use std::process::ExitCode;

use voltaic::cli::{self, Registry};

fn main() -> ExitCode {
    cli::run(Registry::builtin())
}
