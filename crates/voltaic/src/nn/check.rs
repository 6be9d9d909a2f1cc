//! What the layers share: sizes along dimensions, refusing nonsense, and explaining what libtorch refused.

use tch::{Kind, TchError, Tensor};

use crate::error::{ModuleError, Problem, Result};
use crate::nn::misfit::note_misfit;
use crate::nn::module::Module;

/// Sizes along `N` dimensions, as one number for all or one for each: `3`, `[3, 5]` or `(3, 5)`.
pub trait Sizes<const N: usize> {
    /// The size along each dimension.
    fn sizes(self) -> [i64; N];
}

impl<const N: usize> Sizes<N> for i64 {
    fn sizes(self) -> [i64; N] {
        [self; N]
    }
}

impl<const N: usize> Sizes<N> for [i64; N] {
    fn sizes(self) -> [i64; N] {
        self
    }
}

impl Sizes<2> for (i64, i64) {
    fn sizes(self) -> [i64; 2] {
        self.into()
    }
}

/// Refuses sizes below `least`. `sizes` are names and values.
pub(super) fn at_least<'a>(
    layer: &'static str,
    least: i64,
    sizes: impl IntoIterator<Item = (&'a str, &'a [i64])>,
) -> Result<()> {
    for (name, values) in sizes {
        if let Some(value) = values.iter().find(|value| **value < least) {
            return refuse(layer, format!("{name} is {value}"), format!("give at least {least}"));
        }
    }
    Ok(())
}

/// Refuses a number of channels that `groups` does not divide.
pub(super) fn divides(layer: &'static str, groups: (&str, i64), channels: (&str, i64)) -> Result<()> {
    if channels.1 % groups.1 != 0 {
        let what = format!("{} = {} does not divide {} = {}", groups.0, groups.1, channels.0, channels.1);
        return refuse(layer, what, format!("choose {} among the divisors of {}", groups.0, channels.1));
    }
    Ok(())
}

/// Refuses a probability outside `0..=1`.
pub(super) fn probability(layer: &'static str, p: f64) -> Result<()> {
    if !(0.0..=1.0).contains(&p) {
        return refuse(layer, format!("p is {p}"), "give a probability between 0 and 1".to_owned());
    }
    Ok(())
}

/// The error for invalid sizes.
pub(super) fn refuse<T>(layer: &'static str, what: String, remedy: String) -> Result<T> {
    Err(ModuleError::Sizes { layer, problem: Problem::new(what, remedy) }.into())
}

/// Memory for a parameter, not yet initialised: `f32` on the CPU, where PyTorch draws its initial values too.
pub(super) fn empty(shape: &[i64]) -> Result<Tensor> {
    Ok(Tensor::f_empty(shape, (Kind::Float, tch::Device::Cpu))?)
}

/// Puts what libtorch refused into the layer's own words, if the shape of `input` is the reason.
///
/// `misfit` is called only then, with that shape; it returns the layer's name with its sizes, and what it needs.
pub(super) fn explain(
    module: &dyn Module,
    output: Result<Tensor, TchError>,
    input: &Tensor,
    misfit: impl FnOnce(&[i64]) -> Option<(String, String)>,
) -> Result<Tensor> {
    output.map_err(|error| {
        let shape = input.size();
        match misfit(&shape) {
            Some((layer, expected)) => {
                note_misfit(module);
                ModuleError::Shape { layer, shape, expected }.into()
            }
            None => error.into(),
        }
    })
}
