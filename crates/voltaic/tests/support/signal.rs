//! Ranks that send themselves a signal.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use voltaic::Module;
use voltaic::callback::Callback;
use voltaic::module::HookContext;

/// Sends this process a signal by name, such as `-KILL`.
pub fn signal_self(signal: &str) -> std::io::Result<()> {
    Command::new("kill").args([signal, &std::process::id().to_string()]).status().map(drop)
}

/// Says where training begins; sends the last rank a signal before a batch of the second epoch, when that is come to for the
/// first time.
pub struct SignalOnce {
    /// `None` for none.
    pub signal: Option<&'static str>,
    pub batch: usize,
    /// A file that is there from then on.
    pub mark: PathBuf,
}

impl Callback for SignalOnce {
    fn on_train_start(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        println!("\nbegins at step {}", ctx.global_step());
        Ok(())
    }

    fn on_train_batch_start(
        &mut self,
        ctx: &mut HookContext,
        _module: &mut dyn Module,
    ) -> anyhow::Result<()> {
        let is_last = ctx.process_group().is_none_or(|group| group.rank() + 1 == group.world_size());
        let is_there = is_last && (ctx.current_epoch(), ctx.batch_idx()) == (1, self.batch);
        let Some(signal) = self.signal.filter(|_| is_there && !self.mark.exists()) else { return Ok(()) };
        std::fs::write(&self.mark, "")?;
        signal_self(signal)?;
        if signal == "-KILL" {
            std::thread::sleep(Duration::from_secs(60));
        }
        Ok(())
    }
}
