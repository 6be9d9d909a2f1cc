//! Ctrl-C and SIGTERM end a run after the batch in progress; a second Ctrl-C ends the process at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::{SigId, flag, low_level};

use crate::error::{Error, Result};

/// Watches for signals until it is dropped.
pub(crate) struct Signals {
    interrupt: Arc<AtomicBool>,
    terminate: Arc<AtomicBool>,
    registered: Vec<SigId>,
}

impl Signals {
    /// Starts to watch.
    pub(crate) fn watch() -> Result<Self> {
        let interrupt = Arc::new(AtomicBool::new(false));
        let terminate = Arc::new(AtomicBool::new(false));
        let register = || -> std::io::Result<Vec<SigId>> {
            Ok(vec![
                // order matters: the shutdown looks at the flag before the next line sets it
                flag::register_conditional_shutdown(SIGINT, 130, interrupt.clone())?,
                flag::register(SIGINT, interrupt.clone())?,
                flag::register_conditional_shutdown(SIGTERM, 143, terminate.clone())?,
                flag::register(SIGTERM, terminate.clone())?,
            ])
        };
        let registered = register().map_err(|error| Error::io("watch signals for", "this process", error))?;
        Ok(Self { interrupt, terminate, registered })
    }

    /// The signal that has arrived, if any.
    pub(crate) fn received(&self) -> Option<&'static str> {
        if self.interrupt.load(Ordering::Relaxed) {
            Some("SIGINT")
        } else if self.terminate.load(Ordering::Relaxed) {
            Some("SIGTERM")
        } else {
            None
        }
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for id in self.registered.drain(..) {
            low_level::unregister(id);
        }
    }
}
