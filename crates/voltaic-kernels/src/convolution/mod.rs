//! Convolutions.

mod by_patches;
mod by_tiles;
pub(crate) mod convolve;
pub(crate) mod patches;
pub(crate) mod sizes;
mod tiling;
mod winograd;
