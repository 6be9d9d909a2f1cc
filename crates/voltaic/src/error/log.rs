//! Log lines on standard error: what a run chose, and what it warns of.

use std::io::{self, IsTerminal, Write};

use tracing_subscriber::EnvFilter;

use super::stderr::write_stderr;

/// Prints log lines from now on, unless the program has arranged for that itself: those that pass the variable `RUST_LOG`, or without it
/// the filter `default`.
pub(crate) fn print_log(default: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    let has_colour =
        io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let printer =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(Lines::default).with_ansi(has_colour);
    // fails if there is a subscriber already, whose business the lines then are; records of the crate log are the program's
    let _ = tracing::subscriber::set_global_default(printer.without_time().with_target(false).finish());
}

/// Standard error, on which a progress bar may stand: a line begins by wiping what is there.
///
/// Never fails: of a failure `tracing_subscriber` would write a line to standard error, and panic if that fails as well.
struct Lines {
    is_terminal: bool,
}

impl Default for Lines {
    fn default() -> Self {
        Self { is_terminal: io::stderr().is_terminal() }
    }
}

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        match self.is_terminal {
            true => write_stderr(&format!("\r\x1b[2K{text}")),
            false => write_stderr(&text),
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
