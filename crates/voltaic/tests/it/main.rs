//! Integration tests, one module per theme.

mod data;
mod models;
mod nn;
mod rng;
mod trainer;
