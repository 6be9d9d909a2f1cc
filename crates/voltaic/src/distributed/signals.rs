//! Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 end a run after the batch in progress, and the launcher passes them on to its ranks; a
//! second Ctrl-C or SIGTERM ends the process at once. Between runs these signals do again what they did before the first one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::{SigId, flag, low_level};

use super::slurm::notice;
use crate::error::{Error, Result};
use crate::ffi;

/// By rank; whether a second one ends the process at once. Schedulers and terminals may send the others twice.
const WATCHED: [(i32, &str, bool); 4] = [
    (SIGINT, "SIGINT", true),
    (SIGTERM, "SIGTERM", true),
    (SIGUSR1, "SIGUSR1", false),
    (SIGHUP, "SIGHUP", false),
];

/// Brings back the default action of signals while nothing watches for them. The library keeps its handler once one was
/// registered, and a handler without actions ignores the signal.
struct Defaults {
    /// How many watch now.
    watching: usize,
    /// Whether the default actions apply; set once the handlers are registered.
    in_force: Option<Arc<AtomicBool>>,
}

static DEFAULTS: Mutex<Defaults> = Mutex::new(Defaults { watching: 0, in_force: None });

impl Defaults {
    fn begin(&mut self) -> std::io::Result<()> {
        let in_force = match &self.in_force {
            Some(in_force) => in_force,
            None => {
                let in_force = Arc::new(AtomicBool::new(false));
                let signals = WATCHED.into_iter().map(|(signal, ..)| signal);
                for signal in signals.filter(|signal| !ffi::handles_or_ignores(*signal)) {
                    flag::register_conditional_default(signal, in_force.clone())?;
                }
                self.in_force.insert(in_force)
            }
        };
        in_force.store(false, Ordering::SeqCst);
        self.watching += 1;
        Ok(())
    }

    fn end(&mut self) {
        self.watching = self.watching.saturating_sub(1);
        if let Some(in_force) = self.in_force.as_ref().filter(|_| self.watching == 0) {
            in_force.store(true, Ordering::SeqCst);
        }
    }
}

fn defaults() -> MutexGuard<'static, Defaults> {
    DEFAULTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Watches for signals until it is dropped.
pub(crate) struct Signals {
    flags: [Arc<AtomicBool>; WATCHED.len()],
    registered: Vec<SigId>,
}

impl Signals {
    /// Starts to watch.
    pub(crate) fn watch() -> Result<Self> {
        let failed = |error| Error::io("watch signals for", "this process", error);
        defaults().begin().map_err(failed)?;
        let mut signals = Self { flags: Default::default(), registered: Vec::new() };
        signals.register().map_err(failed)?;
        Ok(signals)
    }

    fn register(&mut self) -> std::io::Result<()> {
        for ((signal, _, ends_at_second), received) in WATCHED.into_iter().zip(&self.flags) {
            if signal == SIGHUP && ffi::ignores(signal) {
                continue; // nohup
            }
            if ends_at_second {
                // order matters: the shutdown reads the flag before the next line sets it
                let shutdown = flag::register_conditional_shutdown(signal, 128 + signal, received.clone())?;
                self.registered.push(shutdown);
            }
            self.registered.push(flag::register(signal, received.clone())?);
        }
        Ok(())
    }

    /// The number and name of the signal that has arrived, if any: since this watches, or before if it is Slurm's notice.
    pub(crate) fn received(&self) -> Option<(i32, &'static str)> {
        let mut watched = WATCHED.iter().zip(&self.flags);
        let received = watched
            .find_map(|((signal, name, _), flag)| flag.load(Ordering::Relaxed).then_some((*signal, *name)));
        received.or_else(|| notice().map(|signal| (signal.number(), signal.name())))
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        defaults().end();
        for id in self.registered.drain(..) {
            low_level::unregister(id);
        }
    }
}
