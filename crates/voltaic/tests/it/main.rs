//! Integration tests, one module per theme.

mod config;
mod data;
mod data_sets;
mod host_pool;
mod layers;
mod models;
mod nn;
mod optim;
mod parity;
mod rng;
mod trainer;
