//! Means: of squared errors, of negative log likelihoods, of anything.

use tch::{Kind, Tensor};

use crate::error::Result;
use crate::nn::{Metric, MetricState, Module, Reduction, refuse_shape};

const MEAN: &[(&str, Reduction)] = &[("sum", Reduction::Sum), ("total", Reduction::Sum)];

/// A sum by a number; not a number where nothing was counted.
fn mean(state: &[Tensor]) -> Result<Tensor> {
    Ok(state[0].f_div(&state[1].f_to_kind(Kind::Float)?)?)
}

fn total(n: usize, like: &Tensor) -> Result<Tensor> {
    Ok(Tensor::f_full([] as [i64; 0], n as i64, (Kind::Int64, like.device()))?)
}

/// Mean of squared differences, or its root; torchmetrics' `MeanSquaredError`.
#[derive(Debug, Clone, Module)]
#[module(metric)]
pub struct MeanSquaredError {
    squared: bool,
    state: MetricState,
}

impl MeanSquaredError {
    /// The mean of squares.
    pub fn new() -> Self {
        Self { squared: true, state: MetricState::new("MeanSquaredError", MEAN) }
    }

    /// With `false`: the root of the mean.
    #[must_use]
    pub fn squared(mut self, squared: bool) -> Self {
        self.squared = squared;
        self
    }

    /// Adds a batch of predictions and targets of one shape.
    ///
    /// # Errors
    /// If the shapes differ.
    pub fn update(&self, preds: &Tensor, target: &Tensor) -> Result<()> {
        if preds.size() != target.size() {
            let expected = format!("targets have shape {:?}", target.size());
            return Err(refuse_shape("MeanSquaredError", &preds.size(), expected));
        }
        let error = preds.f_detach()?.f_to_kind(Kind::Float)?.f_sub(&target.f_to_kind(Kind::Float)?)?;
        self.state.add(vec![error.f_square()?.f_sum(Kind::Float)?, total(preds.numel(), preds)?])
    }
}

impl Default for MeanSquaredError {
    fn default() -> Self {
        Self::new()
    }
}

impl Metric for MeanSquaredError {
    fn state(&self) -> &MetricState {
        &self.state
    }

    fn value(&self, state: &[Tensor]) -> Result<Tensor> {
        let mean = mean(state)?;
        if self.squared { Ok(mean) } else { Ok(mean.f_sqrt()?) }
    }
}

/// Exponential of the mean negative log likelihood of the tokens; torchmetrics' `Perplexity`.
#[derive(Debug, Clone, Module)]
#[module(metric)]
pub struct Perplexity {
    ignore_index: Option<i64>,
    state: MetricState,
}

impl Perplexity {
    /// Over all tokens.
    pub fn new() -> Self {
        Self { ignore_index: None, state: MetricState::new("Perplexity", MEAN) }
    }

    /// Leaves out tokens with this target.
    #[must_use]
    pub fn ignore_index(mut self, ignore_index: i64) -> Self {
        self.ignore_index = Some(ignore_index);
        self
    }

    /// Adds a batch: logits `[..., vocabulary]` and targets `[...]`, `i64`.
    ///
    /// # Errors
    /// If the shapes do not fit.
    pub fn update(&self, logits: &Tensor, target: &Tensor) -> Result<()> {
        let size = logits.size();
        if size.split_last().is_none_or(|(_, rest)| rest != target.size()) {
            return Err(refuse_shape("Perplexity", &size, format!("targets have shape {:?}", target.size())));
        }
        let log_probs = logits.f_detach()?.f_flatten(0, -2)?.f_log_softmax(-1, Kind::Float)?;
        let target = target.f_flatten(0, -1)?;
        let kept = match self.ignore_index {
            Some(ignored) => target.f_ne(ignored)?,
            None => target.f_ones_like()?.f_to_kind(Kind::Bool)?,
        };
        let index = target.f_masked_fill(&kept.f_logical_not()?, 0)?.f_unsqueeze(-1)?;
        let likelihood = log_probs.f_gather(-1, &index, false)?.f_squeeze_dim(-1)?;
        // not a product with 0, which is not a number where the likelihood is 0
        let kept_likelihood = likelihood.f_masked_fill(&kept.f_logical_not()?, 0.0)?;
        self.state.add(vec![kept_likelihood.f_sum(Kind::Float)?.f_neg()?, kept.f_sum(Kind::Int64)?])
    }
}

impl Default for Perplexity {
    fn default() -> Self {
        Self::new()
    }
}

impl Metric for Perplexity {
    fn state(&self) -> &MetricState {
        &self.state
    }

    fn value(&self, state: &[Tensor]) -> Result<Tensor> {
        Ok(mean(state)?.f_exp()?)
    }
}

/// Weighted mean of anything; torchmetrics' `MeanMetric`.
#[derive(Debug, Clone, Module)]
#[module(metric)]
pub struct MeanMetric {
    state: MetricState,
}

impl MeanMetric {
    /// Of no values yet.
    pub fn new() -> Self {
        Self { state: MetricState::new("MeanMetric", MEAN) }
    }

    /// Adds values of any shape, each with this weight.
    ///
    /// # Errors
    /// If libtorch refuses the values.
    pub fn update(&self, values: &Tensor, weight: f64) -> Result<()> {
        let values = values.f_detach()?.f_to_kind(Kind::Float)?;
        let count =
            Tensor::f_full([] as [i64; 0], weight * values.numel() as f64, (Kind::Float, values.device()))?;
        self.state.add(vec![values.f_sum(Kind::Float)?.f_mul_scalar(weight)?, count])
    }
}

impl Default for MeanMetric {
    fn default() -> Self {
        Self::new()
    }
}

impl Metric for MeanMetric {
    fn state(&self) -> &MetricState {
        &self.state
    }

    fn value(&self, state: &[Tensor]) -> Result<Tensor> {
        mean(state)
    }
}
