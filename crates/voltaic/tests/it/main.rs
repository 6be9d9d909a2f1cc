//! Integration tests, one module per theme.

#![allow(clippy::unwrap_used, clippy::panic, missing_docs, reason = "a test that panics has failed")]

mod autograd;
mod cli;
mod config;
mod config_print;
mod config_problems;
mod data;
mod data_sets;
mod host_pool;
mod layers;
mod lr_scheduler;
mod models;
mod new_crate;
mod nn;
mod optim;
mod parity;
mod recipes;
mod rng;
mod trainer;
