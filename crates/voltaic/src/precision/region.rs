//! A region in which a run's precision holds.

use std::sync::Arc;

use super::autocast::{AutocastGuard, autocast};
use super::fp8::autocast::{Fp8Autocast, fp8_autocast_of};
use super::fp8::recipe::Recipe;
use super::precision::Precision;
use crate::device::Device;
use crate::error::Result;

/// Operators cast, and layers compute in float8, as a run's precision says, until this is dropped.
#[must_use = "the region ends when this is dropped"]
pub(crate) struct PrecisionRegion {
    _casts: Option<AutocastGuard>,
    _fp8: Option<Fp8Autocast>,
}

impl PrecisionRegion {
    pub(crate) fn enter(device: Device, precision: Precision, recipe: Option<&Arc<Recipe>>) -> Result<Self> {
        Ok(Self {
            _casts: precision.autocast_dtype().map(|dtype| autocast(device, dtype)).transpose()?,
            _fp8: recipe.map(|recipe| fp8_autocast_of(true, recipe.clone())).transpose()?,
        })
    }
}
