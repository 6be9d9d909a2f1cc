//! The product of a layer in float8, with its gradients.

use std::sync::Arc;

use tch::{Kind, Tensor};

use crate::device::Device;
use crate::error::{ModuleError, Problem, Result};
use crate::ffi::{Fp8Cast, Fp8Tensor, autograd_function_saving, fp8_mm, grad_is_enabled};
use crate::nn::calls::stash::stashed;
use crate::nn::parameter::Parameter;
use crate::precision::fp8::{
    Forward, Fp8Format, Fp8Meta, Recipe, begin_forward, check_device, rounds_stochastically,
};
use crate::precision::{autocast_dtype, disable_casts, is_autocast_enabled};

/// Numbers of the tensors in the scales of a layer.
const INPUT: usize = 0;
const WEIGHT: usize = 1;

/// What a layer needs for float8.
#[derive(Debug, Clone)]
pub(crate) struct Fp8Linear {
    pub(crate) meta: Arc<Fp8Meta>,
    /// Casts the weight again in backward in place of keeping it.
    pub(crate) minimize_memory: bool,
}

/// Where the scales of one call come from.
pub(super) enum Scaling {
    Delayed(Forward),
    /// From the tensors, or from their rows.
    Current {
        margin: i64,
        format: Fp8Format,
        by_row: bool,
    },
}

/// A tensor in float8 for the forward pass and for the backward pass.
pub(super) type Both = (Fp8Tensor, Fp8Tensor);

impl Scaling {
    pub(super) fn of(recipe: &Recipe, meta: &Arc<Fp8Meta>, device: Device, with_grad: bool) -> Result<Self> {
        match recipe {
            Recipe::DelayedScaling(recipe) => {
                let make = || begin_forward(meta, recipe, device, with_grad);
                Ok(Self::Delayed(stashed(make, Forward::stashed, Forward::shallow_clone)?))
            }
            Recipe::Float8CurrentScaling(recipe) => {
                check_device(device)?;
                Ok(Self::Current { margin: recipe.margin, format: recipe.fp8_format, by_row: false })
            }
            Recipe::RowwiseScaling(recipe) => {
                check_device(device)?;
                Ok(Self::Current { margin: recipe.margin, format: recipe.fp8_format, by_row: true })
            }
        }
    }

    fn is_by_row(&self) -> bool {
        matches!(self, Self::Current { by_row: true, .. })
    }

    /// Of a matrix whose rows are summed along in the forward pass. By row the backward pass sums along others, so that it casts anew.
    pub(super) fn cast(&self, input: &Tensor, slot: usize) -> Result<Both> {
        match self {
            Self::Delayed(forward) => forward.cast(input, slot),
            Self::Current { margin, format, by_row } => {
                let (forward_dtype, dtype) = (format.forward_dtype(), format.backward_dtype());
                let forward = nearest(forward_dtype).with_current_scale(input, *by_row, *margin)?;
                let backward = match forward_dtype == dtype || *by_row {
                    true => forward.shallow_clone(),
                    false => nearest(dtype).with_current_scale(input, false, *margin)?,
                };
                Ok((forward, backward))
            }
        }
    }

    /// For the backward pass, in it.
    fn cast_again(&self, input: &Tensor, slot: usize) -> Result<Fp8Tensor> {
        match self {
            Self::Delayed(forward) => forward.cast_again(input, slot),
            Self::Current { margin, format, by_row } => {
                Ok(nearest(format.backward_dtype()).with_current_scale(input, *by_row, *margin)?)
            }
        }
    }

    fn cast_grad(&self, grad: &Tensor) -> Result<Fp8Tensor> {
        self.cast_grad_of(grad, 0)
    }

    /// Gradient number `slot`; number 0 comes first.
    pub(super) fn cast_grad_of(&self, grad: &Tensor, slot: usize) -> Result<Fp8Tensor> {
        match self {
            Self::Delayed(forward) => forward.cast_grad(grad, slot),
            Self::Current { margin, format, by_row } => {
                let is_stochastic = rounds_stochastically(*format);
                let cast = Fp8Cast { dtype: format.backward_dtype(), is_stochastic };
                Ok(cast.with_current_scale(grad, *by_row, *margin)?)
            }
        }
    }
}

fn nearest(dtype: Kind) -> Fp8Cast {
    Fp8Cast { dtype, is_stochastic: false }
}

/// The matrix, or each of a batch, transposed.
pub(super) fn turned(tensor: &Fp8Tensor) -> Result<Fp8Tensor> {
    Ok(Fp8Tensor { codes: tensor.codes.f_transpose(-2, -1)?, scale_inv: tensor.scale_inv.shallow_clone() })
}

/// A float32 bias rounded to bfloat16, as cards have it with float32 activations. Its gradient is not rounded.
pub(super) fn rounded_bias(bias: &Tensor) -> Result<Tensor> {
    let own = bias.f_detach()?;
    let change = own.f_to_kind(Kind::BFloat16)?.f_to_kind(Kind::Float)?.f_sub(&own)?;
    Ok(bias.f_add(&change)?)
}

/// The dtype of the output: what autocast casts to, else the input's, which parameters have then, too.
fn activation_dtype(device: Device, input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Kind> {
    if is_autocast_enabled(device)? {
        return autocast_dtype(device);
    }
    let kind = input.kind();
    for (name, parameter) in [("weight", Some(weight)), ("bias", bias)] {
        let Some(parameter) = parameter.filter(|parameter| parameter.kind() != kind) else { continue };
        let what = format!(
            "Data types for parameters must match when outside of autocasted region. Found input dtype: {kind:?} and {name} dtype: \
             {:?}",
            parameter.kind()
        );
        let remedy = "convert the input or the module, or call the layer within autocast";
        let problem = Problem::new(what, remedy);
        return Err(ModuleError::Input { layer: "te::Linear".to_owned(), problem }.into());
    }
    Ok(kind)
}

impl Fp8Linear {
    /// A layer with one product.
    pub(crate) fn new(minimize_memory: bool) -> Self {
        Self { meta: Fp8Meta::new(2, 1), minimize_memory }
    }

    /// `input weightᵀ + bias` for `input` `[*, in_features]`: products of float8 numbers, summed in float32, in the dtype of activations.
    /// With `is_first_microbatch` the weight in float8 is kept (`true`), or the kept one used (`false`).
    ///
    /// Source: `transformer_engine.Linear`.
    pub(crate) fn product(
        &self,
        recipe: &Recipe,
        input: &Tensor,
        (weight, bias): (&Parameter, Option<&Parameter>),
        is_first_microbatch: Option<bool>,
    ) -> Result<Tensor> {
        let device = Device::of(input)?;
        let weight_tensor = weight.try_tensor()?;
        let bias_tensor = bias.map(Parameter::try_tensor).transpose()?;
        let dtype = activation_dtype(device, input, weight_tensor, bias_tensor)?;
        let needs = |tensor: &Tensor| grad_is_enabled() && tensor.requires_grad();
        let needed = Needed {
            input: needs(input),
            weight: needs(weight_tensor),
            bias: bias_tensor.is_some_and(needs),
        };
        let with_grad = grad_is_enabled();
        let _no_casts = disable_casts(device)?;
        let scaling = Scaling::of(recipe, &self.meta, device, with_grad)?;
        let (output, saved) = {
            let _no_grad = tch::no_grad_guard();
            let matrix = input.f_detach()?.f_reshape([-1, weight.size()[1]])?;
            let (own, for_backward) = scaling.cast(&matrix, INPUT)?;
            let (own_weight, weight_for_backward) =
                self.weight(&scaling, weight_tensor, is_first_microbatch)?;
            let bias = match (bias_tensor, dtype) {
                (Some(bias), Kind::Float) => Some(bias.f_to_kind(Kind::BFloat16)?), // as the cards do
                (bias, _) => bias.map(Tensor::f_detach).transpose()?,
            };
            let product = fp8_mm(&own, &turned(&own_weight)?, bias.as_ref(), dtype)?;
            let mut shape = input.size();
            if let Some(last) = shape.last_mut() {
                *last = weight.size()[0];
            }
            let saved = match scaling.is_by_row() {
                true => vec![matrix],
                false => {
                    let mut saved = vec![for_backward.codes, for_backward.scale_inv];
                    if !self.minimize_memory {
                        saved.extend([weight_for_backward.codes, weight_for_backward.scale_inv]);
                    }
                    saved
                }
            };
            (product.f_internal_unsafe_view(&shape)?, saved) // no view, so that it may be changed in place
        };
        if !(needed.input || needed.weight || needed.bias) {
            return Ok(output);
        }
        let again = match &scaling {
            Scaling::Delayed(forward) if self.minimize_memory => Some(Scaling::Delayed(forward.stashed()?)),
            _ => None,
        };
        let shape = input.size();
        let kinds = (input.kind(), weight_tensor.kind(), bias_tensor.map(Tensor::kind));
        let backward =
            Backward { scaling, again, weight: weight.clone(), dtype, device, shape, kinds, needed };
        let inputs = [Some(input), Some(weight_tensor), bias_tensor].into_iter().flatten();
        autograd_function_saving(inputs, std::slice::from_ref(&output), &saved, move |given| {
            backward.run(given)
        })?;
        Ok(output)
    }

    /// The weight in float8, from the first micro-batch if that has been.
    fn weight(&self, scaling: &Scaling, weight: &Tensor, is_first_microbatch: Option<bool>) -> Result<Both> {
        if is_first_microbatch == Some(false)
            && let Some(kept) = self.meta.cached_weight()
        {
            return Ok(kept);
        }
        let both = scaling.cast(&weight.f_detach()?, WEIGHT)?;
        if is_first_microbatch == Some(true) {
            self.meta.cache_weight(&both.0, &both.1);
        }
        Ok(both)
    }
}

/// What requires grad.
struct Needed {
    input: bool,
    weight: bool,
    bias: bool,
}

/// The backward pass of one call.
struct Backward {
    scaling: Scaling,
    /// The scales of the weight's cast, if that is repeated.
    again: Option<Scaling>,
    weight: Parameter,
    dtype: Kind,
    device: Device,
    shape: Vec<i64>,
    /// Of input, weight and bias.
    kinds: (Kind, Kind, Option<Kind>),
    needed: Needed,
}

impl Backward {
    /// Gradients of input, weight and bias, of that of the output and of what was saved.
    fn run(&self, given: &[Tensor]) -> anyhow::Result<Vec<Option<Tensor>>> {
        let [grad, saved @ ..] = given else { anyhow::bail!("no gradient of the output") };
        let mut grads = vec![None, None];
        grads.extend(self.kinds.2.map(|_| None));
        if !grad.defined() {
            return Ok(grads);
        }
        let _no_casts = disable_casts(self.device)?;
        let grad = grad.f_reshape([-1, self.weight.size()[0]])?;
        if let (Some(kind), true) = (self.kinds.2, self.needed.bias) {
            grads[2] = Some(grad.f_sum_dim_intlist([0_i64].as_slice(), false, None)?.f_to_kind(kind)?);
        }
        let (input, weight) = match self.scaling.is_by_row() {
            true => self.by_row(&grad, saved)?,
            false => self.by_tensor(&grad, saved)?,
        };
        if let Some(input) = input {
            grads[0] = Some(input.f_reshape(&self.shape)?.f_to_kind(self.kinds.0)?);
        }
        grads[1] = weight.map(|weight| weight.f_to_kind(self.kinds.1)).transpose()?;
        Ok(grads)
    }

    fn by_tensor(&self, grad: &Tensor, saved: &[Tensor]) -> anyhow::Result<(Option<Tensor>, Option<Tensor>)> {
        let grad = self.scaling.cast_grad(grad)?;
        let of = |codes: &Tensor, scale_inv: &Tensor| Fp8Tensor {
            codes: codes.shallow_clone(),
            scale_inv: scale_inv.shallow_clone(),
        };
        let [codes, scale_inv, of_weight @ ..] = saved else { anyhow::bail!("nothing was saved") };
        let input = of(codes, scale_inv);
        let input_grad = match (self.needed.input, of_weight) {
            (false, _) => None,
            (true, [codes, scale_inv]) => Some(fp8_mm(&grad, &of(codes, scale_inv), None, self.dtype)?),
            (true, _) => {
                let scaling = self.again.as_ref().unwrap_or(&self.scaling);
                let weight = scaling.cast_again(&self.weight.try_tensor()?.f_detach()?, WEIGHT)?;
                Some(fp8_mm(&grad, &weight, None, self.dtype)?)
            }
        };
        let weight_grad = match self.needed.weight {
            true => Some(fp8_mm(&turned(&grad)?, &input, None, self.dtype)?),
            false => None,
        };
        Ok((input_grad, weight_grad))
    }

    /// Each factor with a scale for each of the rows that the product sums along.
    fn by_row(&self, grad: &Tensor, saved: &[Tensor]) -> anyhow::Result<(Option<Tensor>, Option<Tensor>)> {
        let [input] = saved else { anyhow::bail!("the input was not saved") };
        let columns = |matrix: &Tensor| -> Result<Fp8Tensor> {
            self.scaling.cast_again(&matrix.f_transpose(0, 1)?.f_contiguous()?, INPUT)
        };
        let input_grad = match self.needed.input {
            true => {
                let weight = columns(&self.weight.try_tensor()?.f_detach()?)?;
                Some(fp8_mm(&self.scaling.cast_grad(grad)?, &turned(&weight)?, None, self.dtype)?)
            }
            false => None,
        };
        let weight_grad = match self.needed.weight {
            true => {
                let grad = self.scaling.cast_grad(&grad.f_transpose(0, 1)?.f_contiguous()?)?;
                Some(fp8_mm(&grad, &turned(&columns(input)?)?, None, self.dtype)?)
            }
            false => None,
        };
        Ok((input_grad, weight_grad))
    }
}
