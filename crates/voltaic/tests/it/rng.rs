//! The default random generator belongs to the whole process, and tests run as threads of one.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::{Mutex, MutexGuard, PoisonError};

static GENERATOR: Mutex<()> = Mutex::new(());

/// Seeds the default generators and keeps other tests from drawing until the guard is dropped. Every test that draws
/// (makes a layer, drops, shuffles by the default generator) holds this.
///
/// Operators called from this thread use one thread from then on: tests run side by side, and sums are then the same
/// to the last bit on every machine.
pub fn seeded(seed: u64) -> MutexGuard<'static, ()> {
    let guard = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    voltaic::ffi::manual_seed(seed).unwrap();
    voltaic::ffi::set_thread_num_threads(1);
    guard
}
