//! Integration tests, one module per theme.

mod data;
mod trainer;
