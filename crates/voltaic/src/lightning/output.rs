//! What hooks see of a batch: the batch itself, and what the step gave.

use std::any::{Any, type_name};
use std::borrow::Cow;
use std::fmt;

use tch::Tensor;

use crate::data::Batch;

/// A batch whose type is not known.
pub(crate) trait AnyBatch {
    fn as_any(&self) -> &dyn Any;
    fn as_any_mut(&mut self) -> &mut dyn Any;
    fn type_name(&self) -> &'static str;
}

impl<B: Batch> AnyBatch for B {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    fn type_name(&self) -> &'static str {
        type_name::<B>()
    }
}

/// What a step gave under a name.
pub enum OutputValue {
    /// Given to [`StepContext::output`](super::StepContext::output): detached, on the device.
    Tensor(Tensor),
    /// Given to [`StepContext::output_value`](super::StepContext::output_value): anything else.
    Value {
        /// The value.
        value: Box<dyn Any + Send>,
        /// Its type, for messages.
        type_name: &'static str,
    },
}

impl OutputValue {
    /// The value's type.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::Tensor(_) => type_name::<Tensor>(),
            Self::Value { type_name, .. } => type_name,
        }
    }
}

/// Tensors that a step gave by name.
pub(crate) type NamedTensors = Vec<(Cow<'static, str>, Tensor)>;

/// What a step gave: what it returned, and what it handed to `ctx.output`. Lightning's `outputs`.
#[derive(Default)]
pub struct StepOutput {
    pub(crate) loss: Option<Tensor>,
    pub(crate) prediction: Option<Tensor>,
    pub(crate) named: Vec<(Cow<'static, str>, OutputValue)>,
}

impl StepOutput {
    /// That of no step.
    pub(crate) const NONE: &'static Self = &Self { loss: None, prediction: None, named: Vec::new() };

    /// Of a `training_step`: the loss, divided by `accumulate_grad_batches` with automatic optimization; scalar, detached,
    /// on the device. `None` if the step gave none.
    pub fn loss(&self) -> Option<&Tensor> {
        self.loss.as_ref()
    }

    /// Of a `predict_step`: what it returned, on the device. `None` if that was `ctx.no_prediction()`.
    pub fn prediction(&self) -> Option<&Tensor> {
        self.prediction.as_ref()
    }

    /// The tensor that the step gave under this name, detached, on the device.
    ///
    /// # Errors
    /// If there is none.
    pub fn tensor(&self, name: &str) -> anyhow::Result<&Tensor> {
        match self.find(name)? {
            OutputValue::Tensor(tensor) => Ok(tensor),
            OutputValue::Value { type_name, .. } => {
                anyhow::bail!(
                    "output `{name}` is a {type_name}, not a tensor; read it with value::<T>({name:?})"
                )
            }
        }
    }

    /// The value that the step gave under this name.
    ///
    /// # Errors
    /// If there is none, or it has another type.
    pub fn value<T: 'static>(&self, name: &str) -> anyhow::Result<&T> {
        let found = self.find(name)?;
        let value = match found {
            OutputValue::Tensor(tensor) => (tensor as &dyn Any).downcast_ref(),
            OutputValue::Value { value, .. } => value.downcast_ref(),
        };
        value.ok_or_else(|| {
            let (is, asked) = (found.type_name(), type_name::<T>());
            anyhow::anyhow!("output `{name}` is a {is}, not a {asked}; ask for the type that the step gave")
        })
    }

    /// All that was given by name, in the order of the step.
    pub fn named(&self) -> impl ExactSizeIterator<Item = (&str, &OutputValue)> {
        self.named.iter().map(|(name, value)| (name.as_ref(), value))
    }

    fn find(&self, name: &str) -> anyhow::Result<&OutputValue> {
        let found = self.named.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value).ok_or_else(|| {
            let known: Vec<&str> = self.named.iter().map(|(known, _)| known.as_ref()).collect();
            let (has, remedy) = match known.as_slice() {
                [] => ("nothing".to_owned(), format!("call ctx.output({name:?}, &tensor) in the step")),
                known => (known.join(", "), "use one of these names".to_owned()),
            };
            anyhow::anyhow!("there is no output `{name}`: the step gave {has}; {remedy}")
        })
    }

    /// Notes a value; a later one takes the place of an earlier one of that name.
    pub(crate) fn put(&mut self, name: Cow<'static, str>, value: OutputValue) {
        match self.named.iter_mut().find(|(known, _)| *known == name) {
            Some((_, old)) => *old = value,
            None => self.named.push((name, value)),
        }
    }

    /// Puts copies in the place of the tensors given by name, and returns the tensors.
    pub(crate) fn take_tensors(
        &mut self,
        copy: impl Fn(&Tensor) -> crate::Result<Tensor>,
    ) -> crate::Result<NamedTensors> {
        let mut tensors = NamedTensors::new();
        for (name, value) in &mut self.named {
            if let OutputValue::Tensor(tensor) = value {
                let copy = copy(tensor)?;
                tensors.push((name.clone(), std::mem::replace(tensor, copy)));
            }
        }
        Ok(tensors)
    }

    /// Ends the tensors' part in autograd.
    pub(crate) fn detach(&mut self) -> crate::Result<()> {
        for (_, value) in &mut self.named {
            if let OutputValue::Tensor(tensor) = value {
                *tensor = tensor.f_detach()?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for OutputValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tensor(tensor) => tensor.fmt(f),
            Self::Value { type_name, .. } => f.write_str(type_name),
        }
    }
}

impl fmt::Debug for StepOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { loss, prediction, named } = self;
        f.debug_struct("StepOutput")
            .field("loss", loss)
            .field("prediction", prediction)
            .field("named", named)
            .finish()
    }
}
