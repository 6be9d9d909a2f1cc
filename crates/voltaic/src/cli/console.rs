//! Where the command line writes.

use std::io::{ErrorKind, IsTerminal, Write};

use super::outcome::Failure;
use crate::error::printable;

const RED: u8 = 31;

/// Standard output and standard error, or what stands for them in a test.
pub struct Console<'w> {
    out: Box<dyn Write + 'w>,
    err: Box<dyn Write + 'w>,
    has_colour: bool,
}

impl Console<'static> {
    /// The console of this process; colours only on a terminal, and not if `NO_COLOR` is set.
    pub fn of_process() -> Self {
        let has_colour = std::io::stderr().is_terminal()
            && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Self { out: Box::new(std::io::stdout()), err: Box::new(std::io::stderr()), has_colour }
    }
}

impl<'w> Console<'w> {
    /// A console without colours that writes to `out` and `err`.
    pub fn new(out: impl Write + 'w, err: impl Write + 'w) -> Self {
        Self { out: Box::new(out), err: Box::new(err), has_colour: false }
    }

    pub(super) fn has_colour(&self) -> bool {
        self.has_colour
    }

    /// Writes to standard output, with escapes in place of control characters. A reader that has gone away (`| head`) has read
    /// enough: that is not a failure.
    pub(super) fn print(&mut self, text: &str) -> Result<(), Failure> {
        match self.out.write_all(printable(text).as_bytes()).and_then(|()| self.out.flush()) {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                Err(Failure::run(anyhow::Error::new(error).context("cannot write to standard output")))
            }
            _ => Ok(()),
        }
    }

    /// Writes the `error:` lines of a failure; returns its exit code.
    pub(super) fn report(&mut self, failure: Failure) -> u8 {
        for line in &failure.lines {
            self.complain("error", RED, line);
        }
        failure.code
    }

    /// Writes one line to standard error behind a coloured `label`, with control characters escaped. A failure to write is ignored,
    /// since it could not be reported either.
    pub(super) fn complain(&mut self, label: &str, colour: u8, text: &str) {
        let label =
            if self.has_colour { format!("\x1b[1;{colour}m{label}\x1b[0m") } else { label.to_owned() };
        let text = printable(text);
        let _ = writeln!(self.err, "{label}: {text}").and_then(|()| self.err.flush());
    }
}

/// Writes to standard output, with escapes in place of control characters. A reader that has gone away (`| head`) has read enough:
/// that is not a failure.
pub(super) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(printable(text).as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(anyhow::Error::new(error).context("cannot write to standard output"))
        }
        _ => Ok(()),
    }
}

/// A table of metrics.
pub(super) fn print_metrics(what: &str, metrics: &[(String, f64)]) -> anyhow::Result<()> {
    let width = metrics.iter().map(|(name, _)| name.len()).max().unwrap_or(0).max(24);
    let mut text = format!("{:<width$}  value\n{}\n", format!("{what} metric"), "-".repeat(width + 22));
    for (name, value) in metrics {
        text.push_str(&format!("{name:<width$}  {value}\n"));
    }
    print(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_is_written_controls_the_terminal() {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let mut console = Console::new(&mut out, &mut err);
        console.print("a\x1b[2Jb\n").unwrap();
        console.report(Failure::usage("c\x1b]0;d\x07"));
        drop(console);
        assert_eq!(String::from_utf8(out).unwrap(), "a\\u{1b}[2Jb\n");
        assert_eq!(String::from_utf8(err).unwrap(), "error: c\\u{1b}]0;d\\u{7}\n");
    }
}
