//! Integration tests, one module per theme.

mod config;
mod data;
mod data_sets;
mod frames;
mod host_pool;
mod kill;
mod layers;
mod memory;
mod models;
mod nn;
mod optim;
mod parity;
mod probe;
mod resume;
mod rng;
mod trainer;
mod trainer_errors;
mod trainer_files;
mod trainer_rules;
