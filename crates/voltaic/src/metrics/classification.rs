//! Metrics of classes: counts of right and wrong predictions for each class.

use tch::{Kind, Tensor};

use super::divide::safe_divide;
use crate::config::setters;
use crate::error::{ModuleError, Problem, Result};
use crate::nn::{Metric, MetricState, Module, Reduction, refuse_shape};

/// How the values of the classes become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Average {
    /// Counts of all classes together.
    Micro,
    /// Mean over the classes that occur as target or prediction; as target, if several of the largest logits count.
    Macro,
    /// Mean weighted by how often a class is the target.
    Weighted,
    /// One value per class, `[num_classes]`.
    None,
}

/// Refuses what would be counted wrongly: shapes that do not fit, and numbers where classes are needed.
fn check(metric: &'static str, preds: &Tensor, target: &Tensor, num_classes: i64) -> Result<()> {
    let (shape, mut wanted) = (preds.size(), target.size());
    let has_scores = shape.len() == wanted.len() + 1;
    if has_scores && !wanted.is_empty() {
        wanted.insert(1, num_classes);
    }
    if shape != wanted {
        let expected =
            format!("{wanted:?} is needed for {num_classes} classes and targets of {:?}", target.size());
        return Err(refuse_shape(metric, &shape, expected));
    }
    for (what, tensor) in [("targets", target), ("predicted classes", preds)] {
        let are_scores = has_scores && what != "targets";
        if !are_scores && (tensor.is_floating_point() || tensor.is_complex()) {
            let remedy = "give classes as integers, or scores of each class, [n, num_classes, ...]";
            return Err(refuse_values(
                metric,
                format!("{what} are {:?}, not integers", tensor.kind()),
                remedy,
            ));
        }
    }
    Ok(())
}

fn refuse_values(metric: &str, what: String, remedy: &'static str) -> crate::Error {
    ModuleError::Input { layer: metric.to_owned(), problem: Problem::new(what, remedy) }.into()
}

/// Predictions `[n]` and targets `[n]`, without those whose target is to be ignored. Logits or probabilities
/// `[n, num_classes, ...]` are made classes by their maximum.
fn classes(preds: &Tensor, target: &Tensor, ignore_index: Option<i64>) -> Result<(Tensor, Tensor)> {
    let preds =
        if preds.dim() == target.dim() + 1 { preds.f_argmax(1, false)? } else { preds.shallow_clone() };
    let (preds, target) = (preds.f_flatten(0, -1)?, target.f_flatten(0, -1)?.f_to_kind(Kind::Int64)?);
    let Some(ignored) = ignore_index else { return Ok((preds, target)) };
    let kept = target.f_ne(ignored)?;
    Ok((preds.f_masked_select(&kept)?, target.f_masked_select(&kept)?))
}

const COUNTS: &[(&str, Reduction)] =
    &[("tp", Reduction::Sum), ("fp", Reduction::Sum), ("fn", Reduction::Sum)];

/// Adds up weights by place. libtorch looks whether there is such a place; there is none for what is not one of the classes.
fn count(
    metric: &str,
    places: &Tensor,
    weight: &Tensor,
    (num_places, num_classes): (i64, i64),
) -> Result<Tensor> {
    let zeros = Tensor::f_zeros([num_places], (Kind::Int64, places.device()))?;
    zeros.f_scatter_add(0, places, weight).map_err(|error| {
        if !error.to_string().contains("out of bounds") {
            return error.into();
        }
        let what = format!("a target or a predicted class is not among 0 to {}", num_classes - 1);
        let remedy = "give as many classes as there are, and ignore_index for targets that do not count";
        refuse_values(metric, what, remedy)
    })
}

/// True positives, false positives and false negatives of each class, `[num_classes]` each.
fn counts(metric: &str, preds: &Tensor, target: &Tensor, num_classes: i64) -> Result<Vec<Tensor>> {
    let count = |of: &Tensor, weight: &Tensor| count(metric, of, weight, (num_classes, num_classes));
    let ones = target.f_ones_like()?;
    let right = preds.f_eq_tensor(target)?.f_to_kind(Kind::Int64)?;
    let tp = count(target, &right)?;
    let predicted = count(&preds.f_to_kind(Kind::Int64)?, &ones)?;
    let wanted = count(target, &ones)?;
    Ok(vec![tp.shallow_clone(), predicted.f_sub(&tp)?, wanted.f_sub(&tp)?])
}

/// Averages values of classes; `counts` are those of [`counts`]. With the first `top_k` of more than one, torchmetrics leaves out
/// classes that are only predicted.
fn averaged(average: Average, values: Tensor, counts: &[Tensor], top_k: i64) -> Result<Tensor> {
    let weights = match average {
        Average::None | Average::Micro => return Ok(values),
        Average::Weighted => counts[0].f_add(&counts[2])?.f_to_kind(Kind::Float)?,
        Average::Macro => {
            let wanted = counts[0].f_add(&counts[2])?;
            let occurs = if top_k > 1 { wanted } else { wanted.f_add(&counts[1])? };
            occurs.f_gt(0)?.f_to_kind(Kind::Float)?
        }
    };
    let total = weights.f_sum(Kind::Float)?;
    safe_divide(&values.f_mul(&weights)?.f_sum(Kind::Float)?, &total)
}

fn summed(average: Average, counts: &[Tensor]) -> Result<Vec<Tensor>> {
    let sum = |count: &Tensor| match average {
        Average::Micro => Ok(count.f_sum(Kind::Int64)?),
        _ => Ok(count.shallow_clone()),
    };
    counts.iter().map(sum).collect()
}

/// Part of the samples whose class is right, or among the `top_k` most likely; torchmetrics' `MulticlassAccuracy`.
#[derive(Debug, Clone, Module)]
#[module(metric)]
pub struct Accuracy {
    num_classes: i64,
    #[module(skip)]
    average: Average,
    top_k: i64,
    ignore_index: Option<i64>,
    state: MetricState,
}

impl Accuracy {
    /// Over `num_classes` classes.
    pub fn new(num_classes: i64, average: Average) -> Self {
        Self {
            num_classes,
            average,
            top_k: 1,
            ignore_index: None,
            state: MetricState::new("Accuracy", COUNTS),
        }
    }

    setters! {
        /// Counts a sample as right if its class is among so many of the largest logits.
        #[must_use]
        top_k: i64;
        /// Leaves out samples with this target.
        #[must_use]
        ignore_index: i64 = Some(ignore_index);
    }

    /// Adds a batch: logits or probabilities `[n, num_classes, ...]`, or classes `[n, ...]`, and targets `[n, ...]`, `i64`.
    ///
    /// # Errors
    /// If the shapes do not fit.
    pub fn update(&self, preds: &Tensor, target: &Tensor) -> Result<()> {
        check("Accuracy", preds, target, self.num_classes)?;
        let preds = if self.top_k > 1 { self.best_of_top(preds, target)? } else { preds.shallow_clone() };
        let (preds, target) = classes(&preds, target, self.ignore_index)?;
        self.state.add(counts("Accuracy", &preds, &target, self.num_classes)?)
    }

    /// The target where it is among the first `top_k`, else the most likely class.
    fn best_of_top(&self, preds: &Tensor, target: &Tensor) -> Result<Tensor> {
        if preds.dim() != target.dim() + 1 || preds.size()[1] < self.top_k {
            let expected = format!("[n, num_classes, ...] is needed for the top {}", self.top_k);
            return Err(refuse_shape("Accuracy", &preds.size(), expected));
        }
        let (_, top) = preds.f_topk(self.top_k, 1, true, true)?;
        let hit = top.f_eq_tensor(&target.f_unsqueeze(1)?)?.f_any_dim(1, false)?;
        Ok(target.f_where_self(&hit, &top.f_select(1, 0)?)?)
    }
}

impl Metric for Accuracy {
    fn state(&self) -> &MetricState {
        &self.state
    }

    fn value(&self, state: &[Tensor]) -> Result<Tensor> {
        let counts = summed(self.average, state)?;
        let values = safe_divide(&counts[0], &counts[0].f_add(&counts[2])?)?;
        averaged(self.average, values, &counts, self.top_k)
    }
}

/// Harmonic mean of precision and recall; torchmetrics' `MulticlassF1Score`.
#[derive(Debug, Clone, Module)]
#[module(metric)]
pub struct F1Score {
    num_classes: i64,
    #[module(skip)]
    average: Average,
    state: MetricState,
}

impl F1Score {
    /// Over `num_classes` classes.
    pub fn new(num_classes: i64, average: Average) -> Self {
        Self { num_classes, average, state: MetricState::new("F1Score", COUNTS) }
    }

    /// Adds a batch; as [`Accuracy::update`].
    ///
    /// # Errors
    /// If the shapes do not fit, or a class is none.
    pub fn update(&self, preds: &Tensor, target: &Tensor) -> Result<()> {
        check("F1Score", preds, target, self.num_classes)?;
        let (preds, target) = classes(preds, target, None)?;
        self.state.add(counts("F1Score", &preds, &target, self.num_classes)?)
    }
}

impl Metric for F1Score {
    fn state(&self) -> &MetricState {
        &self.state
    }

    fn value(&self, state: &[Tensor]) -> Result<Tensor> {
        let counts = summed(self.average, state)?;
        let double = counts[0].f_mul_scalar(2)?;
        let values = safe_divide(&double, &double.f_add(&counts[1])?.f_add(&counts[2])?)?;
        averaged(self.average, values, &counts, 1)
    }
}

/// How often each class was predicted for each target: `[num_classes, num_classes]`, `i64`, targets in rows;
/// torchmetrics' `MulticlassConfusionMatrix`.
#[derive(Debug, Clone, Module)]
#[module(metric)]
pub struct ConfusionMatrix {
    num_classes: i64,
    state: MetricState,
}

impl ConfusionMatrix {
    /// Over `num_classes` classes.
    pub fn new(num_classes: i64) -> Self {
        Self { num_classes, state: MetricState::new("ConfusionMatrix", &[("confmat", Reduction::Sum)]) }
    }

    /// Adds a batch; as [`Accuracy::update`].
    ///
    /// # Errors
    /// If the shapes do not fit.
    pub fn update(&self, preds: &Tensor, target: &Tensor) -> Result<()> {
        let size = self.num_classes;
        check("ConfusionMatrix", preds, target, size)?;
        let (preds, target) = classes(preds, target, None)?;
        let preds = preds.f_to_kind(Kind::Int64)?;
        // a prediction that is no class would be counted in another row
        let is_class = preds.f_ge(0)?.f_logical_and(&preds.f_lt(size)?)?;
        let cells =
            target.f_mul_scalar(size)?.f_add(&preds)?.f_masked_fill(&is_class.f_logical_not()?, -1)?;
        let counts = count("ConfusionMatrix", &cells, &cells.f_ones_like()?, (size * size, size))?;
        self.state.add(vec![counts.f_reshape([size, size])?])
    }
}

impl Metric for ConfusionMatrix {
    fn state(&self) -> &MetricState {
        &self.state
    }

    fn value(&self, state: &[Tensor]) -> Result<Tensor> {
        Ok(state[0].shallow_clone())
    }
}
