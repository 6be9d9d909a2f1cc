//! The emulated HPU. A binary of its own: the back end and its memory pools are there for a whole process.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[macro_use]
#[path = "../support/wrapped_optimizer.rs"]
mod wrapped_optimizer;
#[macro_use]
#[path = "../support/assert_error.rs"]
mod assert_error;
#[macro_use]
#[path = "../support/lightning_module.rs"]
mod lightning_module;
#[macro_use]
#[path = "../support/random_net.rs"]
mod random_net;

mod activations;
mod compile;
mod compile_freezing;
mod compile_random;
mod compile_recomputation;
mod device;
mod device_stats;
mod fuzz;
mod graph;
mod graph_dynamic;
mod graph_modes;
mod graph_modules;
mod graph_optimizers;
mod graph_pitfalls;
mod graph_silent;
mod graph_updates;
mod heap;
mod hook_outputs;
#[path = "../support/losses.rs"]
mod losses;
mod metrics;
mod operators;
mod ops;
mod precision;
#[path = "../support/process.rs"]
mod process;
mod processes;
#[path = "../support/random_runs.rs"]
mod random_runs;
#[path = "../support/silent.rs"]
mod silent;
#[path = "../support/stages.rs"]
mod stages;
mod support;
mod trainer;
mod training;
