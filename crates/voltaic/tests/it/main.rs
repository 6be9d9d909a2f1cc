//! Integration tests, one module per theme.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test says what went wrong by failing")]

mod cli;
mod config;
mod data;
mod data_sets;
mod host_pool;
mod layers;
mod models;
mod new_crate;
mod nn;
mod rng;
mod trainer;
