//! Integration tests, one file per theme.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test says what went wrong by failing")]

mod host_pool;
mod layers;
