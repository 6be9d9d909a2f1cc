//! What `verbose` of the plugin shows: casts in the log.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use tch::Kind;

use crate::ffi::{Cast, observe_casts};

/// The sorts of casts that were logged; none while nothing is to be logged.
static LOGGED: Mutex<Option<HashSet<(String, Kind, Kind)>>> = Mutex::new(None);

/// Logs each kind of cast when it is first done, or logs none any more.
pub(crate) fn log_casts(is_on: bool) {
    let mut logged = LOGGED.lock().unwrap_or_else(PoisonError::into_inner);
    if is_on == logged.is_some() {
        return; // the observer was not set here
    }
    *logged = is_on.then(HashSet::new);
    observe_casts(if is_on { Some(log) } else { None });
}

fn log(cast: &Cast) {
    let mut logged = LOGGED.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(logged) = &mut *logged else { return };
    if logged.insert((cast.operator.clone(), cast.from, cast.to)) {
        tracing::info!("{} casts {:?} to {:?}", cast.operator, cast.from, cast.to);
    }
}
