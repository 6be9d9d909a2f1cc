//! Area under the receiver operating characteristic.

use tch::{Kind, Tensor};

use super::divide::safe_divide;
use crate::device::Device;
use crate::error::{ModuleError, Problem, Result};
use crate::nn::{Metric, MetricState, Module, Reduction, refuse_shape};

/// Area under the receiver operating characteristic, exact: all scores are kept until the reset. torchmetrics'
/// `BinaryAUROC`, and `MulticlassAUROC` with `average="macro"`: each class against the others.
///
/// It is the probability that a positive sample has a higher score than a negative one, ties counting half
/// ([Mann and Whitney, 1947](https://doi.org/10.1214/aoms/1177730491)). On an HPU, which has no float64, the value is computed on
/// the host.
#[derive(Debug, Clone, Module)]
#[module(metric)]
pub struct Auroc {
    /// 1 for binary classification with one score.
    num_classes: i64,
    state: MetricState,
}

const SCORES: &[(&str, Reduction)] = &[("preds", Reduction::Cat), ("target", Reduction::Cat)];

impl Auroc {
    /// Of scores `[n]` and targets 0 or 1.
    pub fn binary() -> Self {
        Self { num_classes: 1, state: MetricState::new("Auroc", SCORES) }
    }

    /// Mean over classes of scores `[n, num_classes]`: probabilities, or logits if one of a batch is not from 0 to 1.
    pub fn multiclass(num_classes: i64) -> Self {
        Self { num_classes, state: MetricState::new("Auroc", SCORES) }
    }

    /// Adds a batch: scores `[n]` or `[n, num_classes]`, and targets `[n]`, `i64`.
    ///
    /// # Errors
    /// If the shapes do not fit.
    pub fn update(&self, preds: &Tensor, target: &Tensor) -> Result<()> {
        let n = target.numel() as i64;
        let expected = if self.num_classes == 1 { vec![n] } else { vec![n, self.num_classes] };
        if preds.size() != expected || target.dim() != 1 {
            let what = format!(
                "scores of shape {expected:?} are needed, and targets [{n}], not {:?}",
                target.size()
            );
            return Err(refuse_shape("Auroc", &preds.size(), what));
        }
        let scores =
            if self.num_classes == 1 { preds.f_detach()? } else { probabilities(&preds.f_detach()?)? };
        self.state.add(vec![scores, target.f_to_kind(Kind::Int64)?])
    }
}

/// The softmax of logits `[n, num_classes]`, by which samples are compared. Numbers from 0 to 1 are taken for probabilities.
fn probabilities(scores: &Tensor) -> Result<Tensor> {
    let are_logits = scores.f_lt(0.0)?.f_logical_or(&scores.f_gt(1.0)?)?.f_any()?;
    Ok(scores.f_softmax(1, scores.kind())?.f_where_self(&are_logits, scores)?)
}

/// Refuses targets that are no classes: they would be counted as positive several times, or as negative everywhere.
fn check_targets(target: &Tensor, num_classes: i64) -> Result<()> {
    let last = if num_classes == 1 { 1 } else { num_classes - 1 };
    let is_class = target.f_ge(0)?.f_logical_and(&target.f_le(last)?)?;
    if target.numel() == 0 || bool::try_from(is_class.f_all()?)? {
        return Ok(()); // sync point
    }
    let what = format!("a target is not among 0 to {last}");
    let problem = Problem::new(what, "give the classes of the samples, and as many classes as there are");
    Err(ModuleError::Input { layer: "Auroc".to_owned(), problem }.into())
}

/// Area of one class against the others.
fn area(scores: &Tensor, is_positive: &Tensor) -> Result<Tensor> {
    let (sorted, _) = scores.f_sort(0, false)?;
    // mean of the first and the last rank of equal scores, from 1
    let first = scores.f_searchsorted(&sorted, false, false, "left", None::<Tensor>)?;
    let last = scores.f_searchsorted(&sorted, false, true, "right", None::<Tensor>)?;
    let rank = first.f_add(&last)?.f_add_scalar(1)?.f_to_kind(Kind::Double)?.f_mul_scalar(0.5)?;
    let is_positive = is_positive.f_to_kind(Kind::Double)?;
    let positives = is_positive.f_sum(Kind::Double)?;
    let negatives = positives.f_neg()?.f_add_scalar(scores.numel() as f64)?;
    let least = positives.f_mul(&positives.f_add_scalar(1.0)?)?.f_mul_scalar(0.5)?;
    let wins = rank.f_mul(&is_positive)?.f_sum(Kind::Double)?.f_sub(&least)?;
    safe_divide(&wins, &positives.f_mul(&negatives)?)
}

impl Metric for Auroc {
    fn state(&self) -> &MetricState {
        &self.state
    }

    fn value(&self, state: &[Tensor]) -> Result<Tensor> {
        // ranks of many samples take float64, which an HPU has not
        let is_on_hpu = matches!(Device::of(&state[0])?, Device::Hpu(_));
        let placed = |tensor: &Tensor| {
            if is_on_hpu { tensor.f_to_device(tch::Device::Cpu) } else { Ok(tensor.shallow_clone()) }
        };
        let (preds, target) = (&placed(&state[0])?, &placed(&state[1])?);
        check_targets(target, self.num_classes)?;
        if self.num_classes == 1 {
            return area(&preds.f_contiguous()?, target);
        }
        let areas = (0..self.num_classes)
            .map(|class| area(&preds.f_select(1, class)?.f_contiguous()?, &target.f_eq(class)?));
        let areas = areas.collect::<Result<Vec<_>>>()?;
        Ok(Tensor::f_stack(&areas, 0)?.f_mean(Kind::Float)?)
    }
}
