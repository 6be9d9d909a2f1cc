//! The command line of `voltaic`, and of any binary that registers its own models and data.
//!
//! A binary is a [`Registry`] and one call:
//!
//! ```no_run
//! use std::process::ExitCode;
//! use voltaic::cli::{self, Registry};
//!
//! fn main() -> ExitCode {
//!     cli::run(Registry::empty())
//! }
//! ```
//!
//! Verbs and fixed options are parsed by clap; every other option is a dotted key of the configuration, laid over
//! defaults, `PL_FIT__...` variables, `--config` files and `VOLTAIC_...` variables by [`crate::config`]. Help texts come from the same schemas.
//!
//! Exit codes: 0 done, 1 the run failed, 2 the command or the configuration is wrong, and of a run that a signal
//! ended 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP, 138 for SIGUSR1, 140 for SIGUSR2.

mod args;
mod commands;
mod console;
mod generate;
mod help;
mod outcome;
mod quantize;
mod registry;
mod request;
mod show;
mod training;

use std::ffi::OsString;
use std::process::ExitCode;

pub use console::Console;
pub use registry::{FromConfig, Registry};
pub use request::{RunRequest, Verb};

use crate::distributed::{RequeueSignal, Variables, keep_notice};
use crate::error::{Error, print_log, report_lost_lines};
use args::Command;
use outcome::Failure;

/// Runs the command line of this process and returns its exit code.
pub fn run(registry: Registry) -> ExitCode {
    outcome::quiet_panics();
    // what voltaic has to say, which the first rank says for all, and warnings of everything else
    print_log(if Variables::of_process().is_one_more_rank() { "warn" } else { "warn,voltaic=info" });
    let kept = keep_notice(RequeueSignal::SigUsr1); // models and data may take long to load
    let mut arguments = std::env::args_os();
    let program = arguments.next().unwrap_or_default();
    let mut console = Console::of_process();
    if let Err(error) = kept {
        console.report(Failure::run(error.into()));
    }
    let code = run_with(&registry, &program, arguments.collect(), std::env::vars_os(), &mut console);
    report_lost_lines();
    ExitCode::from(code)
}

/// Runs a command line that is given as values, for tests and for programs around it; returns the exit code.
///
/// `variables` is the environment, of which only `VOLTAIC_...` and Lightning's `PL_FIT__...` count. Errors are written to the console.
pub fn run_with(
    registry: &Registry,
    program: &OsString,
    arguments: Vec<OsString>,
    variables: impl IntoIterator<Item = (OsString, OsString)>,
    console: &mut Console<'_>,
) -> u8 {
    let program = std::path::Path::new(program)
        .file_stem()
        .map_or_else(|| "voltaic".to_owned(), |name| name.to_string_lossy().into_owned());
    let variables = variables
        .into_iter()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect();
    let result = outcome::without_panics(|| {
        let command = args::parse(&program, arguments, console.has_colour())?;
        if !matches!(command, Command::Env(_)) {
            crate::ffi::check_libtorch().map_err(|error| Failure::run(Error::from(error).into()))?;
        }
        dispatch(registry, &program, command, variables, console)
    });
    match result {
        Ok(()) => 0,
        Err(failure) => console.report(failure),
    }
}

fn dispatch(
    registry: &Registry,
    program: &str,
    command: Command,
    variables: Vec<(String, String)>,
    console: &mut Console<'_>,
) -> Result<(), Failure> {
    match command {
        Command::Text(text) => console.print(&text),
        Command::Version => console.print(&commands::version(program)),
        Command::Models => console.print(&commands::models(registry)),
        Command::Schema => console.print(&commands::schema(registry)?),
        Command::Completion(shell) => {
            console.print(&commands::completion(registry, program, args::command(), shell))
        }
        Command::Devices(arguments) => console.print(&commands::devices(&arguments)?),
        Command::Env(arguments) => {
            console.print(&commands::env(registry, program, arguments.json, variables)?)
        }
        Command::Convert(arguments) => console.print(&commands::convert(&arguments)?),
        Command::Plot(arguments) => console.print(&commands::plot(&arguments)?),
        Command::Bundle(arguments) => console.print(&commands::bundle(&arguments)?),
        Command::Launch(arguments) => match commands::launch(&arguments)? {},
        Command::New(path) => console.print(&commands::new(&path)?),
        Command::Run(arguments) => commands::run(registry, program, &arguments, variables, console),
    }
}
