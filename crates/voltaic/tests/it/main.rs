//! Integration tests, one module per theme.

mod data;
mod data_sets;
