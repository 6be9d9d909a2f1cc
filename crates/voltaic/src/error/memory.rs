//! Errors of host memory.

/// The host memory pool cannot be set up as asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The environment switch has a value it does not know.
    #[error(
        "VOLTAIC_HOST_POOL=`{value}` in the environment is neither 0 nor 1; unset it, or set it to 0 to keep libtorch's own allocator"
    )]
    HostPoolSwitch {
        /// What the environment says.
        value: String,
    },
}
