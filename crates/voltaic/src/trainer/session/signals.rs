//! Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 end a run after the batch in progress; a second Ctrl-C or SIGTERM ends the process at
//! once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::{SigId, flag, low_level};

use crate::distributed::{RequeueSignal, notice};
use crate::error::{Error, Result};
use crate::ffi;

/// By rank; whether a second one ends the process at once. Schedulers and terminals may send the others twice.
const WATCHED: [(i32, &str, bool); 4] = [
    (SIGINT, "SIGINT", true),
    (SIGTERM, "SIGTERM", true),
    (SIGUSR1, "SIGUSR1", false),
    (SIGHUP, "SIGHUP", false),
];

/// Watches for signals until it is dropped.
pub(crate) struct Signals {
    flags: [Arc<AtomicBool>; WATCHED.len()],
    registered: Vec<SigId>,
}

impl Signals {
    /// Starts to watch.
    pub(crate) fn watch() -> Result<Self> {
        let mut signals = Self { flags: Default::default(), registered: Vec::new() };
        signals.register().map_err(|error| Error::io("watch signals for", "this process", error))?;
        Ok(signals)
    }

    fn register(&mut self) -> std::io::Result<()> {
        for ((signal, _, ends_at_second), received) in WATCHED.into_iter().zip(&self.flags) {
            if signal == SIGHUP && ffi::ignores(signal) {
                continue; // nohup
            }
            if ends_at_second {
                // order matters: the shutdown looks at the flag before the next line sets it
                let shutdown = flag::register_conditional_shutdown(signal, 128 + signal, received.clone())?;
                self.registered.push(shutdown);
            }
            self.registered.push(flag::register(signal, received.clone())?);
        }
        Ok(())
    }

    /// The signal that has arrived, if any: since this watches, or before if it is Slurm's notice.
    pub(crate) fn received(&self) -> Option<&'static str> {
        let mut watched = WATCHED.iter().zip(&self.flags);
        let received = watched.find_map(|((_, name, _), flag)| flag.load(Ordering::Relaxed).then_some(*name));
        received.or_else(|| notice().map(RequeueSignal::name))
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for id in self.registered.drain(..) {
            low_level::unregister(id);
        }
    }
}
