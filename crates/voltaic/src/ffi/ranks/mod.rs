//! Ranks: stores and process groups of c10d (`c10d`), libraries for collectives (`libraries`), sums through memory that ranks of one host
//! share (`shared_sum` on `shared_memory`), the memory of the flight recorder, sealed values of a store, child processes.

pub(super) mod c10d;
pub(super) mod flight_memory;
pub(super) mod libraries;
pub(super) mod listeners;
pub(super) mod process;
pub(super) mod seal;
pub(super) mod shared_memory;
pub(super) mod shared_sum;
