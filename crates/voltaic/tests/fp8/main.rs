//! float8: casts, scales, layers, and runs with them; inference.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::type_complexity,
    missing_docs,
    reason = "a test that panics has failed"
)]

#[macro_use]
#[path = "../support/assert_error.rs"]
mod assert_error;

#[path = "../support/compare.rs"]
mod compare;
#[allow(unused, reason = "what other programs need of it")]
#[path = "../support/random_runs.rs"]
mod random_runs;
#[allow(unused, reason = "what other programs need of it")]
#[path = "../zero/ranks.rs"]
mod ranks;
#[path = "../support/silent.rs"]
mod silent;

mod extra_state;
mod fuzz;
mod graphs;
mod inference;
mod kv_cache;
mod layers;
mod operators;
mod runs;
mod scales;
mod several_ranks;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Tests run one after another while they hold this: random numbers, which round gradients, are the process's.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}
