//! Integration tests, one file per theme.

mod config;
