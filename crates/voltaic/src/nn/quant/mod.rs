//! fp8 inference: layers measure the ranges of what they compute with, and compute in float8 with scales made of them.
//!
//! See `docs/fp8.md`.

pub(in crate::nn) mod convert;
mod layers;
mod measures;
pub(in crate::nn) mod observer;
mod pickled;
pub(in crate::nn) mod quantized;
mod report;
mod saved;

pub use convert::{Converted, convert, finish_measurements};
pub(crate) use convert::{convert_in_run, finish_in_run, has_inference_layers, warn_of_limits};
pub use measures::{LayerMeasures, Measures};
pub use report::{LayerReport, count_casts, report};
pub(crate) use saved::{has_scales, restore, scales};
pub use saved::{is_quantized, load, save, state_dict};
