//! States divided among ranks (ZeRO): the same as data-parallel training.

#![allow(clippy::unwrap_used, clippy::panic, missing_docs, reason = "a test that panics has failed")]

mod averages;
mod beyond;
mod changes;
#[path = "../support/checkpoint.rs"]
mod checkpoint;
mod command;
mod corners;
mod deepspeed;
mod deferred;
mod evaluation;
mod faults;
mod fuzz;
mod half;
mod ladder;
mod large;
mod leaf;
mod memory;
mod models;
mod muon;
mod one_file;
mod optimizers;
mod oracle;
mod partitioning;
mod peers;
mod prefetch;
#[path = "../support/random_runs.rs"]
mod random_runs;
mod ranks;
mod recompute;
mod reduction;
mod rest;
mod restart;
mod resume;
mod shards;
#[path = "../support/signal.rs"]
mod signal;
mod stage3;
mod storage;
mod touch;
mod units;
mod values;
