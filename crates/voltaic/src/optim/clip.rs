//! Gradient clipping.

use tch::Tensor;

use super::param_group::ParamGroup;
use crate::error::{ConfigError, Result};
use crate::ffi::{self, TensorList};
use crate::nn::{GradShare, Parameter};

/// The leaves of these parameters. An error if some have less of their gradients than `is_enough` says.
fn leaves_of<'a>(
    function: &'static str,
    params: impl IntoIterator<Item = &'a Parameter>,
    is_enough: impl Fn(GradShare) -> bool,
) -> Result<Vec<&'a Tensor>> {
    let leaf = |parameter: &'a Parameter| match is_enough(parameter.grad_share()) {
        true => Ok(parameter.leaf()),
        false => {
            let what = "the gradients are sharded over the ranks, and are not in these parameters";
            let remedy = "call grad_norm or clip of the optimizer, or set trainer.gradient_clip_val";
            Err(ConfigError::new(function, what, remedy).into())
        }
    };
    params.into_iter().map(leaf).collect()
}

/// A limit for gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum GradientClip {
    /// Of the L2 norm of all gradients together.
    Norm(f64),
    /// Of the absolute value of each element.
    Value(f64),
}

impl GradientClip {
    /// Limits the gradients of all parameters in `groups`, in place; see [`clip_grad_norm`], whose norm is returned, and
    /// [`clip_grad_value`].
    ///
    /// # Errors
    /// [`ConfigError`] if the limit is negative or NaN.
    pub fn apply(self, groups: &[ParamGroup]) -> Result<Option<Tensor>> {
        let params = groups.iter().flat_map(|group| group.params()).map(|(_, parameter)| parameter);
        match self {
            Self::Norm(max_norm) => clip_grad_norm(params, max_norm).map(Some),
            Self::Value(value) => clip_grad_value(params, value).map(|()| None),
        }
    }
}

/// Scales gradients in place so that their norm, taken over all of them as one vector, is at most `max_norm`.
///
/// Returns the norm *before* clipping: shape `[]`, the gradients' dtype and device (`float32` zero on the CPU if no
/// parameter has a gradient). Nothing is read back to the host: the factor `max_norm / (norm + 1e-6)`, at most 1, is
/// always multiplied. A norm that is not finite is returned as it is, and then the gradients are not finite either.
///
/// Same result as `torch.nn.utils.clip_grad_norm_` with `norm_type=2`; see [`clip_grad_norm_of_type`] for others.
///
/// # Errors
/// [`ConfigError`] if `max_norm` is negative or NaN; if the gradients are sharded over ranks (ZeRO):
/// [`Optimizer::clip`](super::Optimizer::clip) takes the norm of all.
pub fn clip_grad_norm<'a>(params: impl IntoIterator<Item = &'a Parameter>, max_norm: f64) -> Result<Tensor> {
    clip_grad_norm_of_type(params, max_norm, 2.0)
}

/// As [`clip_grad_norm`] with the `norm_type`-norm; `f64::INFINITY` for the largest absolute value.
///
/// # Errors
/// [`ConfigError`] if `max_norm` is negative or NaN, or `norm_type` is NaN.
pub fn clip_grad_norm_of_type<'a>(
    params: impl IntoIterator<Item = &'a Parameter>,
    max_norm: f64,
    norm_type: f64,
) -> Result<Tensor> {
    check_bound(max_norm)?;
    let grads = grads_of(leaves_of("clip_grad_norm", params, |share| share == GradShare::All)?)?;
    let norm = norm_of(&grads, norm_type)?;
    scale_to_norm(&grads, &norm, max_norm)?;
    Ok(norm)
}

/// Scales gradients in place as [`clip_grad_norm`] does if `norm` is that of all gradients, of which these are a part.
///
/// # Errors
/// [`ConfigError`] if `max_norm` is negative or NaN.
pub fn clip_to_norm<'a>(
    params: impl IntoIterator<Item = &'a Tensor>,
    norm: &Tensor,
    max_norm: f64,
) -> Result<()> {
    check_bound(max_norm)?;
    scale_to_norm(&grads_of(params)?, norm, max_norm)
}

fn scale_to_norm(grads: &[Grads], norm: &Tensor, max_norm: f64) -> Result<()> {
    if grads.is_empty() {
        return Ok(());
    }
    let _no_grad = tch::no_grad_guard();
    // the reciprocal, because PyTorch divides a number by a tensor this way and rounds twice
    let factor = norm.f_add_scalar(1e-6)?.f_reciprocal()?.f_mul_scalar(max_norm)?.f_clamp_max(1.0)?;
    grads.iter().try_for_each(|Grads { list, device, .. }| {
        Ok(ffi::foreach_mul_tensor(list, &factor.f_to_device(*device)?)?)
    })
}

/// The `norm_type`-norm of the gradients, taken over all of them as one vector: shape `[]`, as [`clip_grad_norm_of_type`]
/// returns it, and nothing is changed.
///
/// Same result as `torch.nn.utils.get_total_norm` of the gradients.
///
/// # Errors
/// [`ConfigError`] if `norm_type` is NaN; if the gradients are sharded over ranks (ZeRO):
/// [`Optimizer::grad_norm`](super::Optimizer::grad_norm) takes the norm of all.
pub fn grad_norm<'a>(params: impl IntoIterator<Item = &'a Parameter>, norm_type: f64) -> Result<Tensor> {
    local_norm(leaves_of("grad_norm", params, |share| share == GradShare::All)?, norm_type)
}

/// The same of what this rank has of the gradients of these leaves.
pub(crate) fn local_norm<'a>(params: impl IntoIterator<Item = &'a Tensor>, norm_type: f64) -> Result<Tensor> {
    norm_of(&grads_of(params)?, norm_type)
}

fn norm_of(grads: &[Grads], norm_type: f64) -> Result<Tensor> {
    if norm_type.is_nan() {
        let remedy = "use 2, another number, or infinity for the largest absolute value";
        return Err(ConfigError::new("norm_type", "NaN is not a norm", remedy).into());
    }
    let _no_grad = tch::no_grad_guard();
    let norms = match grads {
        [] => return Ok(Tensor::from(0.0_f32)),
        [Grads { list, .. }] => ffi::foreach_norm(list, norm_type)?,
        [Grads { device, .. }, ..] => {
            let norms = grads
                .iter()
                .map(|Grads { list, .. }| Ok(ffi::foreach_norm(list, norm_type)?.f_to_device(*device)?));
            let norms = Tensor::f_cat(&norms.collect::<Result<Vec<_>>>()?, 0)?;
            // in the order of the parameters: the sum is that of gradients on one device
            let places: Vec<i64> = grads.iter().flat_map(|grads| grads.places.iter().copied()).collect();
            let order = Tensor::f_from_slice(&places)?.f_argsort(0, false)?;
            norms.f_index_select(0, &order.f_to_device(*device)?)?
        }
    };
    let dim: Option<&[i64]> = None;
    Ok(norms.f_linalg_norm(norm_type, dim, false, None)?)
}

/// Limits each element of the gradients to `[-clip_value, clip_value]`, in place.
///
/// Same result as `torch.nn.utils.clip_grad_value_`.
///
/// # Errors
/// [`ConfigError`] if `clip_value` is negative or NaN.
pub fn clip_grad_value<'a>(params: impl IntoIterator<Item = &'a Parameter>, clip_value: f64) -> Result<()> {
    check_bound(clip_value)?;
    grads_of(leaves_of("clip_grad_value", params, |share| share != GradShare::Nothing)?)?
        .iter()
        .try_for_each(|Grads { list, .. }| Ok(ffi::foreach_clamp(list, -clip_value, clip_value)?))
}

/// Gradients on one device, at least one.
struct Grads {
    list: TensorList,
    device: tch::Device,
    /// The places of their parameters among all.
    places: Vec<i64>,
}

/// The gradients of parameters by device: some may be offloaded. Those of 16 bits of parameters in float32 become float32.
fn grads_of<'a>(params: impl IntoIterator<Item = &'a Tensor>) -> Result<Vec<Grads>> {
    // the largest element of none is an error of libtorch's
    let leaves: Vec<&Tensor> = params.into_iter().filter(|leaf| leaf.numel() > 0).collect();
    let mut by_device: Vec<(tch::Device, Vec<(i64, &Tensor)>)> = Vec::new();
    for (place, leaf) in (0..).zip(leaves) {
        let device = leaf.device();
        match by_device.iter_mut().find(|(known, _)| *known == device) {
            Some((_, leaves)) => leaves.push((place, leaf)),
            None => by_device.push((device, vec![(place, leaf)])),
        }
    }
    if by_device.len() > 1 {
        by_device.iter_mut().for_each(|(_, leaves)| leaves.retain(|(_, leaf)| leaf.grad().defined()));
    }
    let mut all = Vec::new();
    for (device, leaves) in by_device {
        let mut list = TensorList::new([])?;
        let params = TensorList::new(leaves.iter().map(|(_, leaf)| *leaf))?;
        params.widen_grads()?;
        list.fill_with_grads(&params)?;
        if !list.is_empty() {
            all.push(Grads { list, device, places: leaves.into_iter().map(|(place, _)| place).collect() });
        }
    }
    Ok(all)
}

fn check_bound(bound: f64) -> Result<()> {
    if bound >= 0.0 {
        return Ok(());
    }
    let what = format!("{bound} is not a number >= 0");
    Err(ConfigError::new("trainer.gradient_clip_val", what, "set a number above 0, or null for no clipping")
        .into())
}
