//! Devices: back ends, emulated and real HPUs, and the memory that tensors lie in.
//!
//! `allocator` gives libtorch a caching memory pool (`pool`) for the host and for each emulated device; `host_memory` has the limits of
//! the machine and its cgroups. `backend` reaches any device, `hpu` registers the emulator, and `hlml` reads Gaudi cards.

pub(super) mod allocator;
pub(super) mod backend;
pub(super) mod hlml;
pub(super) mod host_memory;
pub(super) mod hpu;
pub(super) mod pool;
