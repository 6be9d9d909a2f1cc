//! Ranks: stores and process groups, libraries for collectives, sums through shared memory, child processes.

pub(super) mod c10d;
pub(super) mod flight_memory;
pub(super) mod libraries;
pub(super) mod listeners;
pub(super) mod process;
pub(super) mod seal;
pub(super) mod shared_memory;
pub(super) mod shared_sum;
