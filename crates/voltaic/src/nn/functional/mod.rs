//! Losses, metrics and attention as functions, as in `torch.nn.functional`: those that have too many arguments in
//! `tch`, or none of the right name. Everything else is a method of the tensor.

mod attention;

use tch::{Kind, Tensor};

pub use tch::Reduction;

pub use attention::scaled_dot_product_attention;

use crate::error::{ModuleError, Result};

/// Mean over the batch of the negative log-likelihood of the right class, as `torch.nn.functional.cross_entropy`.
///
/// `logits` `[batch, classes]` (or `[batch, classes, *]`), any floating dtype; `targets` `[batch]` (or `[batch, *]`),
/// class indices as `i64`, or `[batch, classes]`, probabilities. Returns shape `[]`.
///
/// # Errors
/// If the shapes do not fit together.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    cross_entropy_with(logits, targets, &CrossEntropyOptions::default())
}

/// [`cross_entropy`] with options.
///
/// ```
/// use voltaic::nn::functional::{CrossEntropyOptions, cross_entropy_with};
/// # use voltaic::{Kind, Tensor};
///
/// # fn main() -> voltaic::Result<()> {
/// # let logits = Tensor::zeros([8, 10], (Kind::Float, tch::Device::Cpu));
/// # let targets = Tensor::zeros([8], (Kind::Int64, tch::Device::Cpu));
/// let options = CrossEntropyOptions { label_smoothing: 0.1, ..Default::default() };
/// let loss = cross_entropy_with(&logits, &targets, &options)?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// If the shapes do not fit together.
pub fn cross_entropy_with(
    logits: &Tensor,
    targets: &Tensor,
    options: &CrossEntropyOptions<'_>,
) -> Result<Tensor> {
    let CrossEntropyOptions { weight, reduction, ignore_index, label_smoothing } = *options;
    Ok(logits.f_cross_entropy_loss(targets, weight, reduction, ignore_index, label_smoothing)?)
}

/// Options of [`cross_entropy_with`].
#[derive(Debug, Clone, Copy)]
pub struct CrossEntropyOptions<'a> {
    /// Weight of each class, `[classes]` (default: 1 each).
    pub weight: Option<&'a Tensor>,
    /// What becomes of the batch's losses (default: their mean).
    pub reduction: Reduction,
    /// Targets of this value do not count (default -100).
    pub ignore_index: i64,
    /// Share of the target that is spread over all classes, between 0 and 1 (default 0;
    /// [Szegedy et al., 2015](https://arxiv.org/abs/1512.00567)).
    pub label_smoothing: f64,
}

impl Default for CrossEntropyOptions<'_> {
    fn default() -> Self {
        Self { weight: None, reduction: Reduction::Mean, ignore_index: -100, label_smoothing: 0.0 }
    }
}

/// Mean of the squared differences, as `torch.nn.functional.mse_loss`. Both of one shape; returns shape `[]`.
///
/// # Errors
/// [`ModuleError::Shape`] if the shapes differ. libtorch would compare each row of `[n]` with each of `[n, 1]`.
pub fn mse_loss(input: &Tensor, target: &Tensor) -> Result<Tensor> {
    same_shape("mse_loss", input, target)?;
    Ok(input.f_mse_loss(target, Reduction::Mean)?)
}

/// Mean of the absolute differences, as `torch.nn.functional.l1_loss`. Both of one shape; returns shape `[]`.
///
/// # Errors
/// [`ModuleError::Shape`] if the shapes differ.
pub fn l1_loss(input: &Tensor, target: &Tensor) -> Result<Tensor> {
    same_shape("l1_loss", input, target)?;
    Ok(input.f_l1_loss(target, Reduction::Mean)?)
}

/// Mean of the squared differences below `beta` and of the absolute ones above, as `torch.nn.functional.smooth_l1_loss`
/// (its `beta` is 1 by default). Both of one shape; returns shape `[]`.
///
/// # Errors
/// [`ModuleError::Shape`] if the shapes differ; libtorch's if `beta` is negative.
pub fn smooth_l1_loss(input: &Tensor, target: &Tensor, beta: f64) -> Result<Tensor> {
    same_shape("smooth_l1_loss", input, target)?;
    Ok(input.f_smooth_l1_loss(target, Reduction::Mean, beta)?)
}

/// Mean of the binary cross-entropy of probabilities, as `torch.nn.functional.binary_cross_entropy`. `input` and `target` between 0 and
/// 1, of one shape and floating dtype; returns shape `[]`. Of logits, [`binary_cross_entropy_with_logits`] is more exact.
///
/// # Errors
/// [`ModuleError::Shape`] if the shapes differ; libtorch's if a number is outside of 0 to 1.
pub fn binary_cross_entropy(input: &Tensor, target: &Tensor) -> Result<Tensor> {
    same_shape("binary_cross_entropy", input, target)?;
    Ok(input.f_binary_cross_entropy(target, None::<Tensor>, Reduction::Mean)?)
}

/// Mean of the binary cross-entropy of logits, as `torch.nn.functional.binary_cross_entropy_with_logits`. `logits` any numbers, `target`
/// between 0 and 1, of one shape and floating dtype; returns shape `[]`.
///
/// # Errors
/// [`ModuleError::Shape`] if the shapes differ.
pub fn binary_cross_entropy_with_logits(logits: &Tensor, target: &Tensor) -> Result<Tensor> {
    same_shape("binary_cross_entropy_with_logits", logits, target)?;
    let none = None::<Tensor>;
    Ok(logits.f_binary_cross_entropy_with_logits(target, none.as_ref(), none.as_ref(), Reduction::Mean)?)
}

/// Mean of the negative log-likelihoods of the right classes, as `torch.nn.functional.nll_loss`: what [`cross_entropy`] computes of
/// `log_softmax`. `log_probs` `[batch, classes]`, `targets` `[batch]` of `i64`; returns shape `[]`.
///
/// # Errors
/// If the shapes do not fit together.
pub fn nll_loss(log_probs: &Tensor, targets: &Tensor) -> Result<Tensor> {
    Ok(log_probs.f_nll_loss(targets, None::<Tensor>, Reduction::Mean, -100)?)
}

/// Kullback-Leibler divergence as `torch.nn.functional.kl_div` with `reduction="batchmean"`: the sum over all elements of
/// `target * (log(target) - input)`, by the batch. `input` log-probabilities, `target` probabilities, of one shape `[batch, *]`; returns
/// shape `[]`.
///
/// # Errors
/// [`ModuleError::Shape`] if the shapes differ or have no dimension.
pub fn kl_div(input: &Tensor, target: &Tensor) -> Result<Tensor> {
    same_shape("kl_div", input, target)?;
    let Some(batch) = input.size().first().copied() else {
        let (shape, expected) = (Vec::new(), "a dimension of the batch is needed".to_owned());
        return Err(ModuleError::Shape { layer: "kl_div".to_owned(), shape, expected }.into());
    };
    Ok(input.f_kl_div(target, Reduction::Sum, false)?.f_div_scalar(batch)?)
}

/// GELU in its exact form, as `torch.nn.functional.gelu`; see [`Gelu`](crate::nn::Gelu).
///
/// # Errors
/// If the dtype is not a floating one.
pub fn gelu(input: &Tensor) -> Result<Tensor> {
    Ok(input.f_gelu("none")?)
}

/// The largest value of each window of `size` x `size`, side by side; see [`MaxPool2d`](crate::nn::MaxPool2d).
///
/// # Errors
/// If the input is smaller than the window, or has other than 3 or 4 dimensions.
pub fn max_pool2d(input: &Tensor, size: i64) -> Result<Tensor> {
    Ok(input.f_max_pool2d([size, size], [size, size], [0, 0], [1, 1], false)?)
}

/// Share of samples whose largest logit is the target's: `f32` of shape `[]`, on the device of `logits`.
///
/// `logits` `[*, classes]`, `targets` `[*]`. No gradient flows through it, and nothing is read back to the host.
///
/// # Errors
/// [`ModuleError::Shape`] if the shapes do not fit together.
pub fn accuracy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let found = logits.f_argmax(-1, false)?;
    same_shape("accuracy", &found, targets)?;
    Ok(found.f_eq_tensor(targets)?.f_mean(Kind::Float)?)
}

fn same_shape(function: &str, input: &Tensor, target: &Tensor) -> Result<()> {
    let shape = input.size();
    if shape == target.size() {
        return Ok(());
    }
    let expected = format!("targets have shape {:?}; reshape one of them", target.size());
    Err(ModuleError::Shape { layer: function.to_owned(), shape, expected }.into())
}
