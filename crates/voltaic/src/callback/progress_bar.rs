//! Shows where a run stands: bars on a terminal, plain lines elsewhere. Written to standard error.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressDrawTarget, ProgressStyle};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::write_stderr;
use crate::lightning::Callback;
use crate::module::{Hook, HookContext};
use crate::nn::Module;

/// [`ProgressBar`] by name. It has no settings: those of Lightning's bars are about how often and in which colours they are drawn.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(extend("x-no-effect" = drawing()))]
pub struct ProgressBarConfig {}

fn drawing() -> serde_json::Value {
    let keys = ["refresh_rate", "process_position", "leave", "theme", "console_kwargs"];
    let why = serde_json::Value::from("how bars are drawn is fixed");
    serde_json::Value::Object(keys.into_iter().map(|key| (key.to_owned(), why.clone())).collect())
}

/// How often the terminal is redrawn; metrics are read back from the device no more often than that.
const REDRAW: Duration = Duration::from_millis(100);
/// How often a line is written when standard error is not a terminal.
const LINE: Duration = Duration::from_secs(10);
const TEMPLATE: &str = "{prefix}: {percent:>3}%|{bar:24}| {pos}/{len} [{elapsed}<{eta}, {msg}]";

/// Progress through the batches of one loop.
#[derive(Debug)]
struct Bar {
    title: String,
    total: usize,
    done: usize,
    done_before: usize,
    started: Instant,
    shown: Instant,
    /// Set on a terminal.
    drawn: Option<indicatif::ProgressBar>,
}

impl Bar {
    fn new(title: String, done: usize, total: usize, terminal: Option<&MultiProgress>) -> Self {
        let drawn = terminal.map(|terminal| {
            let bar = terminal.add(indicatif::ProgressBar::new(total as u64));
            let style =
                ProgressStyle::with_template(TEMPLATE).unwrap_or_else(|_| ProgressStyle::default_bar());
            bar.set_style(style.progress_chars("█▉▊▋▌▍▎▏ "));
            bar.set_prefix(title.clone());
            bar
        });
        let now = Instant::now();
        Self { title, total, done, done_before: done, started: now, shown: now, drawn }
    }

    /// Counts a batch; shows it if it is time to.
    fn advance(&mut self, ctx: &HookContext) {
        self.done += 1;
        let now = Instant::now();
        if now - self.shown >= if self.drawn.is_some() { REDRAW } else { LINE } {
            self.shown = now;
            self.show(ctx);
        }
    }

    fn show(&self, ctx: &HookContext) {
        let seconds = self.started.elapsed().as_secs_f64().max(1e-9);
        let rate = (self.done - self.done_before) as f64 / seconds;
        let version = ctx.facts().version.as_ref().map(|version| format!("v_num={version}"));
        let metrics =
            ctx.progress_bar_metrics().into_iter().map(|(name, value)| format!("{name}={}", short(value)));
        let fields: Vec<String> =
            [format!("{rate:.1} it/s")].into_iter().chain(version).chain(metrics).collect();
        let text = fields.join(", ");
        match &self.drawn {
            Some(drawn) => {
                drawn.set_message(text);
                drawn.set_position(self.done as u64);
            }
            None => write_stderr(&format!("{}: {}/{} [{text}]\n", self.title, self.done, self.total)),
        }
    }
}

/// Shows epoch, batches, iterations per second and the metrics logged with `prog_bar(true)`.
#[derive(Debug)]
pub struct ProgressBar {
    terminal: Option<MultiProgress>,
    train: Option<Bar>,
    eval: Option<Bar>,
}

impl Default for ProgressBar {
    /// Bars if standard error is a terminal, else lines.
    fn default() -> Self {
        let terminal = std::io::stderr()
            .is_terminal()
            .then(|| MultiProgress::with_draw_target(ProgressDrawTarget::stderr_with_hz(10)));
        Self { terminal, train: None, eval: None }
    }
}

impl ProgressBar {
    fn begin_train(&mut self, ctx: &HookContext) {
        let title = match ctx.facts().max_epochs {
            Some(max) => format!("Epoch {}/{}", ctx.current_epoch(), max.saturating_sub(1)),
            None => format!("Epoch {}", ctx.current_epoch()),
        };
        let done = ctx.progress().batch_idx as usize;
        self.train = Some(Bar::new(title, done, ctx.facts().num_training_batches, self.terminal.as_ref()));
    }

    fn begin_eval(&mut self, title: &str, ctx: &HookContext) {
        let title = if ctx.is_sanity_check() { "Sanity checking" } else { title };
        self.eval = Some(Bar::new(title.to_owned(), 0, ctx.facts().num_eval_batches, self.terminal.as_ref()));
    }

    /// Validation inside fit leaves no trace; a run of its own shows its last state.
    fn end_eval(&mut self, ctx: &HookContext) {
        let Some(bar) = self.eval.take() else { return };
        if !ctx.is_training() {
            bar.show(ctx);
        }
        match (&bar.drawn, ctx.is_training()) {
            (Some(drawn), true) => drawn.finish_and_clear(),
            (Some(drawn), false) => drawn.abandon(),
            (None, _) => {}
        }
    }
}

/// A number with three significant digits.
fn short(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return value.to_string();
    }
    let exponent = value.abs().log10().floor() as i32;
    if (-4..6).contains(&exponent) {
        format!("{value:.*}", (2 - exponent).max(0) as usize)
    } else {
        format!("{value:.2e}")
    }
}

impl Callback for ProgressBar {
    fn on_hook(&mut self, hook: Hook, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        match hook {
            Hook::OnTrainEpochStart => self.begin_train(ctx),
            Hook::OnTrainBatchEnd => self.train.iter_mut().for_each(|bar| bar.advance(ctx)),
            Hook::OnTrainEpochEnd => {
                if let Some(bar) = self.train.take() {
                    bar.show(ctx);
                    bar.drawn.iter().for_each(indicatif::ProgressBar::abandon);
                }
            }
            Hook::OnValidationStart => self.begin_eval("Validation", ctx),
            Hook::OnTestStart => self.begin_eval("Testing", ctx),
            Hook::OnPredictStart => self.begin_eval("Predicting", ctx),
            Hook::OnValidationBatchEnd | Hook::OnTestBatchEnd | Hook::OnPredictBatchEnd => {
                self.eval.iter_mut().for_each(|bar| bar.advance(ctx));
            }
            Hook::OnValidationEnd | Hook::OnTestEnd | Hook::OnPredictEnd => self.end_eval(ctx),
            _ => {}
        }
        Ok(())
    }

    fn on_exception(&mut self, _ctx: &mut HookContext, _error: &crate::Error) {
        for bar in [self.eval.take(), self.train.take()].into_iter().flatten() {
            bar.drawn.iter().for_each(indicatif::ProgressBar::abandon);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::short;

    #[test]
    fn numbers_have_three_digits() {
        for (value, text) in [
            (0.060_705, "0.0607"),
            (0.976_2, "0.976"),
            (2.3, "2.30"),
            (123.4, "123"),
            (1234.0, "1234"),
            (1e-7, "1.00e-7"),
            (0.0, "0"),
            (f64::NAN, "NaN"),
        ] {
            assert_eq!(short(value), text);
        }
    }
}
