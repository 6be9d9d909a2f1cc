//! How a command line ends: its error lines and its exit code.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{self, AssertUnwindSafe};

use crate::error::{ConfigError, Error, printable, write_stderr};

/// Why a command did not succeed.
#[derive(Debug)]
pub(super) struct Failure {
    /// The message for the user.
    pub lines: Vec<String>,
    /// The exit code.
    pub code: u8,
}

impl Failure {
    /// The command line is wrong.
    pub fn usage(line: impl Into<String>) -> Self {
        Self { lines: vec![line.into()], code: 2 }
    }

    /// A run failed; the code depends on what ended it.
    pub fn run(error: anyhow::Error) -> Self {
        if let Some(config) = config_error(&error) {
            return config.clone().into();
        }
        let own = error.chain().find_map(|cause| cause.downcast_ref::<Error>());
        let code = match own {
            Some(Error::Interrupted { signal: "SIGINT", .. }) => 130,
            Some(Error::Interrupted { signal: "SIGTERM", .. }) => 143,
            Some(Error::Interrupted { signal: "SIGHUP", .. }) => 129,
            Some(Error::Interrupted { signal: "SIGUSR1", .. }) => 138,
            Some(Error::Interrupted { signal: "SIGUSR2", .. }) => 140,
            _ => 1,
        };
        // `{:#}` joins the chain of causes with colons; a cause that its parent already quotes is not said twice.
        let mut line = String::new();
        for cause in error.chain().map(ToString::to_string) {
            if line.is_empty() {
                line = cause;
            } else if !line.contains(&cause) {
                line = format!("{line}: {cause}");
            }
        }
        Self { lines: vec![line], code }
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        Self { lines: error.problems.iter().map(ToString::to_string).collect(), code: 2 }
    }
}

/// The configuration error that `error` is, or that caused it.
pub(super) fn config_error(error: &anyhow::Error) -> Option<&ConfigError> {
    error.chain().find_map(|cause| match cause.downcast_ref::<Error>() {
        Some(Error::Config(config)) => Some(config),
        Some(Error::Hook { source, .. }) => config_error(source),
        _ => cause.downcast_ref::<ConfigError>(),
    })
}

thread_local! {
    /// Where this thread panicked last.
    static PLACE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Makes panics of this process silent where [`without_panics`] will report them, and one line elsewhere.
///
/// With `RUST_BACKTRACE` set, the usual report is printed as well.
pub(super) fn quiet_panics() {
    let usual = panic::take_hook();
    let wants_backtrace = std::env::var_os("RUST_BACKTRACE").is_some_and(|value| value != "0");
    let main = std::thread::current().id();
    panic::set_hook(Box::new(move |info| {
        let place = info.location().map(|location| format!("{}:{}", location.file(), location.line()));
        if wants_backtrace {
            usual(info);
        } else if std::thread::current().id() != main {
            let thread = std::thread::current();
            let text = describe(thread.name().unwrap_or("thread"), place.as_deref(), info.payload());
            write_stderr(&format!("error: {}\n", printable(&text)));
        }
        PLACE.with(|slot| slot.replace(place));
    }));
}

/// Runs `body`, turning a panic into a failure with its message and place in one line.
pub(super) fn without_panics(body: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
    panic::catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| {
        let place = PLACE.with(RefCell::take);
        let line = describe("voltaic", place.as_deref(), payload.as_ref());
        Err(Failure { lines: vec![format!("{line}; set RUST_BACKTRACE=1 to see where from")], code: 1 })
    })
}

fn describe(who: &str, place: Option<&str>, payload: &dyn Any) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    let message = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no message");
    match place {
        Some(place) => format!("{who} panicked at {place}: {message}"),
        None => format!("{who} panicked: {message}"),
    }
}
