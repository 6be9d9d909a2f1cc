//! Integration tests, one file per theme.

mod models;
mod nn;
mod rng;
