//! Devices: back ends, emulated and real HPUs, and the memory that tensors lie in.

pub(super) mod allocator;
pub(super) mod backend;
pub(super) mod hlml;
pub(super) mod host_memory;
pub(super) mod hpu;
pub(super) mod pool;
