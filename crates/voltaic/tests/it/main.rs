//! Integration tests, one file per theme.

mod nn;
mod rng;
