//! Modules one after the other.

use std::fmt;

use tch::Tensor;

use crate::nn::callable::Callable;
use crate::nn::calls::active::at_place;
use crate::nn::calls::call::within_call;
use crate::nn::field::with_index;
use crate::nn::misfit::in_sequence;
use crate::nn::module::{Forward, Member, Module};

/// Applies its layers in order, as `torch.nn.Sequential`; they are named `0`, `1`, ...
///
/// ```
/// use voltaic::nn::{Linear, ModuleExt, Relu, Sequential};
///
/// # fn main() -> voltaic::Result<()> {
/// let mlp = Sequential::new().add(Linear::new(784, 256)?).add(Relu).add(Linear::new(256, 10)?);
/// let names: Vec<String> = mlp.named_parameters().into_iter().map(|(fqn, _)| fqn).collect();
/// assert_eq!(names, ["0.weight", "0.bias", "2.weight", "2.bias"]);
/// # Ok(())
/// # }
/// ```
#[derive(Default)]
pub struct Sequential {
    layers: Vec<Box<dyn Forward>>,
}

impl Sequential {
    /// No layers yet: the output is the input.
    pub fn new() -> Self {
        Self::default()
    }

    /// With `layer` after the others.
    #[must_use = "add() returns the longer sequence; use push() to change one in place"]
    #[expect(clippy::should_implement_trait, reason = "no sum of sequences is meant")]
    pub fn add(mut self, layer: impl Forward) -> Self {
        self.push(layer);
        self
    }

    /// Puts `layer` after the others.
    pub fn push(&mut self, layer: impl Forward) {
        self.layers.push(Box::new(layer));
    }

    /// Number of layers.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Whether there are no layers.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }
}

impl Module for Sequential {
    fn members<'a>(&'a self, visit: &mut dyn FnMut(&str, Member<'a>)) {
        for (index, layer) in self.layers.iter().enumerate() {
            with_index("", index, |name| visit(name, Member::Module(layer.as_ref())));
        }
    }

    fn children_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&str, &'a mut dyn Module)) {
        for (index, layer) in self.layers.iter_mut().enumerate() {
            with_index("", index, |name| visit(name, layer.as_mut()));
        }
    }
}

impl Forward for Sequential {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, input, |input| {
            let mut output = input.shallow_clone();
            for (place, layer) in self.layers.iter().enumerate() {
                output =
                    at_place(place, || layer.call(&output)).map_err(|error| in_sequence(place, error))?;
            }
            Ok(output)
        })
    }
}

impl fmt::Debug for Sequential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.layers.iter().map(|layer| layer.type_name()).collect();
        write!(f, "Sequential({})", names.join(", "))
    }
}
