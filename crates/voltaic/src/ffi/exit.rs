//! Code that runs when the process ends.

use std::panic::catch_unwind;
use std::sync::Mutex;

static AT_EXIT: Mutex<Vec<fn()>> = Mutex::new(Vec::new());

extern "C" fn run_all() {
    let all = AT_EXIT.lock().map(|mut all| std::mem::take(&mut *all)).unwrap_or_default();
    for body in all {
        // a panic must not go on into C, and the process has no way left to report it
        drop(catch_unwind(body));
    }
}

/// Runs `body` when the process returns from `main` or calls `exit`; not when a signal ends it.
pub fn at_exit(body: fn()) {
    let Ok(mut all) = AT_EXIT.lock() else { return };
    all.push(body);
    if all.len() == 1 {
        // SAFETY: atexit takes a function of C that takes and returns nothing, which a static function of this program is for as long as
        // the process lives.
        unsafe { libc::atexit(run_all) };
    }
}
