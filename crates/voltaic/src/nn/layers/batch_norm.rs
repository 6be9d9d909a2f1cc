//! Normalisation over the batch.

use std::fmt;

use tch::{Kind, Tensor};

use crate::config::setters;
use crate::distributed::{ProcessGroup, collective_scope};
use crate::error::{ModuleError, Problem, Result};
use crate::nn::buffer::Buffer;
use crate::nn::calls::call::within_call;
use crate::nn::calls::recompute::is_recomputing;
use crate::nn::check::{at_least, empty, explain};
use crate::nn::layers::sync_batch_norm;
use crate::nn::misfit::note_misfit;
use crate::nn::module::{Forward, Module};
use crate::nn::parameter::Parameter;
use crate::nn::{init, running_statistics};

/// Batch normalisation of `[batch, num_features]` or `[batch, num_features, length]`, as `torch.nn.BatchNorm1d`.
pub type BatchNorm1d = BatchNorm<1>;

/// Batch normalisation of `[batch, num_features, height, width]`, as `torch.nn.BatchNorm2d`.
pub type BatchNorm2d = BatchNorm<2>;

/// Normalises each channel over the batch and the positions ([`BatchNorm1d`], [`BatchNorm2d`];
/// [Ioffe and Szegedy, 2015](https://arxiv.org/abs/1502.03167)).
///
/// In training mode it uses the batch's mean and variance and updates the running ones, which evaluation mode uses.
/// Output has the input's shape.
///
/// ```
/// use voltaic::nn::{BatchNorm2d, Forward, ModuleExt};
/// # use voltaic::{Kind, Tensor};
///
/// # fn main() -> anyhow::Result<()> {
/// let mut bn = BatchNorm2d::new(64)?;
/// # let features = Tensor::zeros([8, 64, 7, 7], (Kind::Float, tch::Device::Cpu));
/// let normalised = bn.forward(&features)?; // the batch's statistics
/// bn.eval();
/// let normalised = bn.forward(&features)?; // the running statistics
/// # Ok(())
/// # }
/// ```
#[derive(Module)]
#[module(type_name = Self::NAME)]
pub struct BatchNorm<const N: usize> {
    /// Scale of each channel, `[num_features]`, initially 1.
    pub weight: Option<Parameter>,
    /// Shift of each channel, `[num_features]`, initially 0.
    pub bias: Option<Parameter>,
    /// Mean of each channel over the batches seen, `[num_features]`.
    pub running_mean: Option<Buffer>,
    /// Unbiased variance of each channel over the batches seen, `[num_features]`.
    pub running_var: Option<Buffer>,
    /// Number of batches seen in training mode, `i64` of shape `[]`.
    pub num_batches_tracked: Option<Buffer>,
    num_features: i64,
    eps: f64,
    momentum: f64,
    #[module(training)]
    training: bool,
}

impl<const N: usize> BatchNorm<N> {
    const NAME: &'static str = if N == 1 { "BatchNorm1d" } else { "BatchNorm2d" };

    /// A layer with scale, shift and running statistics, `eps` 1e-5 and `momentum` 0.1.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if `num_features` is below 1.
    pub fn new(num_features: i64) -> Result<Self> {
        Self::builder(num_features).build()
    }

    /// A layer with options.
    pub fn builder(num_features: i64) -> BatchNormBuilder<N> {
        BatchNormBuilder { num_features, eps: 1e-5, momentum: 0.1, affine: true, track_running_stats: true }
    }

    fn normalise(&self, input: &Tensor) -> Result<Tensor, tch::TchError> {
        // a batch that is seen again counts once
        let own = |statistics: &Option<Buffer>| match statistics {
            Some(statistics) if self.training && is_recomputing() => statistics.f_detach_copy().map(Some),
            statistics => Ok(statistics.as_ref().map(|statistics| statistics.shallow_clone())),
        };
        let (running_mean, running_var) = (own(&self.running_mean)?, own(&self.running_var)?);
        input.f_batch_norm(
            self.weight.as_deref(),
            self.bias.as_deref(),
            running_mean.as_ref(),
            running_var.as_ref(),
            self.training || self.running_mean.is_none(),
            self.batch_weight()?,
            self.eps,
            true,
        )
    }

    /// Its name in the module, as far as its weight has one.
    fn fqn(&self) -> String {
        let fqn = self.weight.as_ref().and_then(Parameter::fqn);
        fqn.map_or(Self::NAME.to_owned(), |fqn| fqn.trim_end_matches(".weight").to_owned())
    }

    /// The same with the statistics of all ranks' batches.
    fn normalise_over(&self, input: &Tensor, group: &ProcessGroup) -> Result<Tensor> {
        let _named = collective_scope(self.fqn());
        let (mut output, mean, variance) = sync_batch_norm::normalise(input, self.eps, group)?;
        let shape: Vec<i64> = (0..input.dim()).map(|dim| if dim == 1 { -1 } else { 1 }).collect();
        if let Some(weight) = &self.weight {
            output = output.f_mul(&weight.f_view(&shape[..])?)?;
        }
        if let Some(bias) = &self.bias {
            output = output.f_add(&bias.f_view(&shape[..])?)?;
        }
        if is_recomputing() {
            return Ok(output);
        }
        let _no_grad = tch::no_grad_guard();
        for (running, now) in [(&self.running_mean, mean), (&self.running_var, variance)] {
            if let Some(running) = running {
                let now = now.f_to_kind(running.kind())?;
                let _ = running.shallow_clone().f_lerp_(&now, self.batch_weight()?)?;
            }
        }
        Ok(output)
    }

    /// Whether the number of dimensions is right. libtorch normalises any, which would hide a missing flatten.
    fn fits(dims: usize) -> bool {
        dims == N + 2 || (N == 1 && dims == 2)
    }

    /// Refuses a batch with one value in each channel: it has no unbiased variance, and the running one would be lost.
    fn refuse_one_value(&self, input: &Tensor) -> Result<()> {
        let needs_variance = self.training || self.running_mean.is_none();
        let shape = input.size();
        let values = shape.iter().enumerate().filter(|(dim, _)| *dim != 1).map(|(_, size)| size);
        if !needs_variance || values.product::<i64>() != 1 {
            return Ok(());
        }
        let what = format!("input of shape {shape:?} has one value in each channel, which has no variance");
        let remedy =
            "give more samples, leave out a last batch of one (drop_last), or use the evaluation mode";
        note_misfit(self);
        Err(ModuleError::Input { layer: format!("{self:?}"), problem: Problem::new(what, remedy) }.into())
    }

    /// Weight of this batch in the running statistics.
    fn batch_weight(&self) -> Result<f64, tch::TchError> {
        match &self.num_batches_tracked {
            Some(count) if running_statistics::are_equal() => {
                Ok(1.0 / (count.f_int64_value(&[])? + 1) as f64)
            }
            _ => Ok(self.momentum),
        }
    }

    fn count(&self) -> Result<(), tch::TchError> {
        if let Some(count) = self.num_batches_tracked.as_ref().filter(|_| !is_recomputing()) {
            let _ = count.shallow_clone().f_add_scalar_(1)?;
        }
        Ok(())
    }

    fn misfit(&self, shape: &[i64]) -> Option<(String, String)> {
        let expected = if !Self::fits(shape.len()) {
            match N {
                1 => "2 or 3 dimensions, [batch, channels, length], are needed".to_owned(),
                _ => "4 dimensions, [batch, channels, height, width], are needed".to_owned(),
            }
        } else if shape[1] != self.num_features {
            format!("dimension 1 holds the channels and must be {}", self.num_features)
        } else {
            return None;
        };
        Some((format!("{self:?}"), expected))
    }
}

impl<const N: usize> Forward for BatchNorm<N> {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, input, |input| {
            Parameter::unshard_all([self.weight.as_ref(), self.bias.as_ref()])?;
            let fits = self.misfit(&input.size()).is_none();
            if let Some(group) = sync_batch_norm::ranks().filter(|_| self.training && fits) {
                let output = self.normalise_over(input, &group)?;
                self.count()?;
                return Ok(output);
            }
            self.refuse_one_value(input)?;
            let output = if Self::fits(input.dim()) {
                self.normalise(input)
            } else {
                Err(tch::TchError::Shape("number of dimensions".to_owned()))
            };
            let output = explain(self, output, input, |shape| self.misfit(shape))?;
            if self.training {
                self.count()?;
            }
            Ok(output)
        })
    }
}

impl<const N: usize> fmt::Debug for BatchNorm<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({})", Self::NAME, self.num_features)
    }
}

/// Options of a [`BatchNorm1d`] or [`BatchNorm2d`].
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until build()"]
pub struct BatchNormBuilder<const N: usize> {
    num_features: i64,
    eps: f64,
    momentum: f64,
    affine: bool,
    track_running_stats: bool,
}

impl<const N: usize> BatchNormBuilder<N> {
    setters! {
        /// Added to the variance before its root is taken (default 1e-5).
        eps: f64;
        /// Weight of the new batch in the running statistics (default 0.1).
        momentum: f64;
        /// Whether each channel has a trained scale and shift (default `true`).
        affine: bool;
        /// Whether running statistics are kept (default `true`); without them evaluation mode uses the batch's own.
        track_running_stats: bool;
    }

    /// Makes the layer.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if `num_features` is below 1.
    pub fn build(self) -> Result<BatchNorm<N>> {
        let Self { num_features, eps, momentum, affine, track_running_stats } = self;
        at_least(BatchNorm::<N>::NAME, 1, [("num_features", &[num_features][..])])?;
        let filled = |value| -> Result<Tensor> {
            let tensor = empty(&[num_features])?;
            init::constant_(&tensor, value)?;
            Ok(tensor)
        };
        let mut layer = BatchNorm {
            weight: None,
            bias: None,
            running_mean: None,
            running_var: None,
            num_batches_tracked: None,
            num_features,
            eps,
            momentum,
            training: true,
        };
        if affine {
            layer.weight = Some(Parameter::new(filled(1.0)?));
            layer.bias = Some(Parameter::new(filled(0.0)?));
        }
        if track_running_stats {
            let count = Tensor::f_zeros([0_i64; 0], (Kind::Int64, tch::Device::Cpu))?;
            layer.running_mean = Some(Buffer::new(filled(0.0)?));
            layer.running_var = Some(Buffer::new(filled(1.0)?));
            layer.num_batches_tracked = Some(Buffer::new(count));
        }
        Ok(layer)
    }
}
