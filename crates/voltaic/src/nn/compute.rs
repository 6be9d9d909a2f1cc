//! In which numbers a layer computes its products.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use crate::nn::field::Field;
use crate::nn::fp8_linear::Fp8Linear;
use crate::nn::module::{Member, Module};
use crate::nn::quant::observer::LayerObserver;
use crate::nn::quant::quantized::{Quantized, Unmeasured};
use crate::precision::fp8::{Recipe, fp8_recipe};

/// How a layer computes its product, independent of how its weights are sharded.
#[derive(Clone, Default)]
pub(crate) enum Compute {
    /// By libtorch's operators.
    #[default]
    Plain,
    /// In float8 within a region of [`fp8_autocast`](crate::precision::fp8::fp8_autocast), else by libtorch's operators.
    Fp8(Fp8Linear),
    /// By libtorch's operators; what it computes with is measured.
    Measured(Arc<LayerObserver>),
    /// In float8 with scales that stay.
    Quantized(Arc<Quantized>),
    /// Not at all: there is no scale for it.
    Unmeasured(Unmeasured),
}

/// The compute mode of a layer, which conversions change.
#[derive(Default)]
pub(crate) struct ComputeMode(RefCell<Compute>);

impl ComputeMode {
    pub(crate) fn set(&self, compute: Compute) {
        *self.0.borrow_mut() = compute;
    }

    pub(crate) fn get(&self) -> Compute {
        self.0.borrow().clone()
    }

    /// What it needs for float8 in training, if it has been converted.
    pub(crate) fn fp8(&self) -> Option<Fp8Linear> {
        match &*self.0.borrow() {
            Compute::Fp8(fp8) => Some(fp8.clone()),
            _ => None,
        }
    }

    /// The same with the recipe, within a region.
    pub(crate) fn active_fp8(&self) -> Option<(Fp8Linear, Arc<Recipe>)> {
        self.fp8().zip(fp8_recipe())
    }

    /// Whether inference has converted it.
    pub(crate) fn is_of_inference(&self) -> bool {
        !matches!(&*self.0.borrow(), Compute::Plain | Compute::Fp8(_))
    }

    fn name(&self) -> &'static str {
        match &*self.0.borrow() {
            Compute::Plain => "plain",
            Compute::Fp8(_) => "fp8",
            Compute::Measured(_) => "measured",
            Compute::Quantized(_) => "quantized",
            Compute::Unmeasured(_) => "unmeasured",
        }
    }
}

impl fmt::Debug for ComputeMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A graph of a layer stands for no other mode of it, and no other scales.
impl Field for ComputeMode {
    fn members<'a>(&'a self, _: &str, _: &mut dyn FnMut(&str, Member<'a>)) {}

    fn children_mut<'a>(&'a mut self, _: &str, _: &mut dyn FnMut(&str, &'a mut dyn Module)) {}

    fn settings(&self, visit: &mut dyn FnMut(u64)) {
        match &*self.0.borrow() {
            Compute::Plain | Compute::Fp8(_) => {}
            Compute::Measured(_) => visit(1),
            Compute::Quantized(layer) => visit(layer.number()),
            Compute::Unmeasured(_) => visit(2),
        }
    }
}
