//! States sharded over ranks (ZeRO): the same as data-parallel training.

#![allow(clippy::unwrap_used, clippy::panic, missing_docs, reason = "a test that panics has failed")]

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
#[macro_use]
mod ranks;

mod averages;
mod background;
mod beyond;
mod changes;
#[path = "../support/checkpoint.rs"]
mod checkpoint;
#[path = "../support/checkpoints.rs"]
mod checkpoints;
mod command;
#[path = "../support/compare.rs"]
mod compare;
mod corners;
mod deepspeed;
mod deferred;
mod evaluation;
mod experts;
mod faults;
mod folders;
mod freezing;
mod frozen;
mod fuzz;
mod gaudi;
mod generation;
mod half;
#[path = "../support/heavy.rs"]
mod heavy;
mod ladder;
mod large;
mod leaf;
mod memory;
mod models;
mod muon;
mod nvme;
mod offload;
mod offload_states;
mod one_file;
mod optimizers;
mod oracle;
mod partitioning;
mod peers;
mod prefetch;
#[path = "../support/random_runs.rs"]
mod random_runs;
mod recompute;
mod reduction;
mod rest;
mod restart;
mod resume;
mod shards;
#[path = "../support/signal.rs"]
mod signal;
#[path = "../support/silent.rs"]
mod silent;
mod stage3;
mod touch;
mod units;
mod values;
