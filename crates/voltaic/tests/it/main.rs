//! Integration tests, one module per theme.

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
mod rng;
mod trainer;
