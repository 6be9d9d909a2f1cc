//! What is known of gradients between a backward pass and the step of an optimizer: the same for automatic and manual optimization, and
//! for a loop of the user's own.

use std::ops::Range;

use tch::Tensor;

use crate::checkpoint::SavedGradients;
use crate::error::{ConfigError, Result};
use crate::ffi;
use crate::optim::Optimizer;

/// The gradients of a call.
#[derive(Debug, Default)]
pub(crate) struct Gradients {
    /// The scale of the losses is in gradients: a loss was multiplied by it, or a checkpoint held such gradients.
    pub has_scaled: bool,
    /// The last backward pass has left its gradients to this rank, for others to be added.
    pub window_is_open: bool,
    of: Vec<OfOptimizer>,
}

/// Those of the parameters of one optimizer.
#[derive(Debug, Default)]
struct OfOptimizer {
    /// There has been a backward pass for it since its last step.
    is_open: bool,
    /// There once the scale of the loss is taken out.
    unscaled: Option<Unscaled>,
}

/// Gradients without the scale of the loss.
#[derive(Debug)]
struct Unscaled {
    all_finite: bool,
    /// Each leaf with its gradient, as identity and number of changes.
    grads: Vec<(Tensor, Option<(usize, i64)>)>,
}

impl Unscaled {
    fn of(optimizer: &dyn Optimizer, all_finite: bool) -> Result<Self> {
        let params = optimizer.param_groups().iter().flat_map(|group| group.params());
        let grads = params.map(|(_, parameter)| {
            let leaf = parameter.leaf().shallow_clone();
            let grad = mark(&leaf)?;
            Ok((leaf, grad))
        });
        Ok(Self { all_finite, grads: grads.collect::<Result<_>>()? })
    }

    /// Whether all gradients have been dropped.
    fn is_gone(&self) -> bool {
        !self.grads.iter().any(|(leaf, _)| leaf.grad().defined())
    }

    /// Whether no gradient has been added to.
    fn holds(&self) -> Result<bool> {
        for (leaf, grad) in &self.grads {
            let now = mark(leaf)?;
            if now.is_some() && now != *grad {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// What the optimizer itself has changed, such as by clipping, is no addition.
    fn follow(&mut self) -> Result<()> {
        for (leaf, grad) in &mut self.grads {
            *grad = mark(leaf)?;
        }
        Ok(())
    }
}

/// The identity of the gradient of a leaf, and how often it was changed.
fn mark(leaf: &Tensor) -> Result<Option<(usize, i64)>> {
    let grad = leaf.grad();
    if !grad.defined() {
        return Ok(None);
    }
    Ok(Some((ffi::tensor_id(&grad)?, grad.f_internal_version()?)))
}

impl Gradients {
    /// Nothing is known of the gradients of this number of optimizers.
    pub fn of(num_optimizers: usize) -> Self {
        Self { of: (0..num_optimizers).map(|_| OfOptimizer::default()).collect(), ..Self::default() }
    }

    /// A backward pass begins, from a loss times `scale`. If an optimizer is `toggled`, its parameters alone get gradients.
    pub fn begin_backward(&mut self, syncs: bool, scale: Option<f64>, toggled: Option<usize>) {
        self.window_is_open = !syncs;
        self.has_scaled |= scale.is_some();
        let all = self.of.iter_mut().enumerate();
        for (_, of) in all.filter(|(index, _)| toggled.is_none_or(|toggled| toggled == *index)) {
            of.is_open = true;
            // nothing is left of them, or what is added has no scale either
            if of.unscaled.as_ref().is_some_and(|unscaled| scale == Some(1.0) || unscaled.is_gone()) {
                of.unscaled = None;
            }
        }
    }

    /// All gradients have been dropped, or a loop of the trainer does so.
    pub fn begin_window(&mut self) {
        self.of.iter_mut().for_each(|of| of.unscaled = None);
    }

    /// Whether there are gradients that no step has used.
    pub fn are_open(&self) -> bool {
        self.of.iter().any(|of| of.is_open)
    }

    /// An error if the gradients are those of an accumulation window that is open.
    pub fn check_closed(&self) -> Result<()> {
        if !self.window_is_open {
            return Ok(());
        }
        let what =
            "an accumulation window is open: the last backward pass has left its gradients to this rank";
        let remedy = "call the last fabric.backward of a window, a shorter one at the end of an epoch too, outside of no_backward_sync";
        Err(ConfigError::new("optimizer.step", what, remedy).into())
    }

    /// An error if a loss scale is to be taken out of gradients that have none.
    pub fn check_scaled(&self, scale: f64) -> Result<()> {
        if self.has_scaled {
            return Ok(());
        }
        let what = format!("gradients are to be divided by {scale}, but no loss was multiplied by it");
        let remedy = "call ctx.manual_backward(&loss), or backward of Fabric, not loss.backward()";
        Err(ConfigError::new("optimizer.step", what, remedy).into())
    }

    /// What was found when the scale was taken out of the gradients of an optimizer, if that was done.
    ///
    /// # Errors
    /// If scaled gradients were added to them since.
    pub fn found(&self, index: usize, name: &str) -> Result<Option<bool>> {
        let Some(unscaled) = self.of.get(index).and_then(|of| of.unscaled.as_ref()) else { return Ok(None) };
        if unscaled.holds()? {
            return Ok(Some(unscaled.all_finite));
        }
        let what = format!(
            "gradients of optimizer {index} ({name}) from which the scale of the loss was taken, by clipping or a step, were added to by \
             another backward pass, whose gradients have it"
        );
        let remedy = "call zero_grad between a step and the next backward pass, and clip after the last backward pass before a step";
        Err(ConfigError::new("optimizer.step", what, remedy).into())
    }

    /// The scale was taken out of the gradients of an optimizer.
    pub fn note_unscaled(&mut self, index: usize, optimizer: &dyn Optimizer, finite: bool) -> Result<()> {
        if let Some(of) = self.of.get_mut(index) {
            of.unscaled = Some(Unscaled::of(optimizer, finite)?);
        }
        Ok(())
    }

    /// These optimizers have clipped their gradients.
    pub fn note_changed(&mut self, which: Range<usize>) -> Result<()> {
        let some = self.of.iter_mut().skip(which.start).take(which.len());
        some.filter_map(|of| of.unscaled.as_mut()).try_for_each(Unscaled::follow)
    }

    /// These optimizers have used their gradients, or have left a step out. The gradients stay until they are dropped.
    pub fn note_step(&mut self, which: Range<usize>) -> Result<()> {
        self.of.iter_mut().skip(which.start).take(which.len()).for_each(|of| of.is_open = false);
        self.note_changed(which)
    }

    /// Whether an optimizer has gradients that wait for a step with the scale in them.
    pub fn wait_scaled(&self, index: usize) -> bool {
        self.of.get(index).is_some_and(|of| of.is_open && of.unscaled.is_none())
    }

    /// For a checkpoint that holds the gradients.
    pub fn saved(&self) -> SavedGradients {
        let found = |of: &OfOptimizer| of.unscaled.as_ref().map(|unscaled| unscaled.all_finite);
        SavedGradients { window_is_open: self.window_is_open, unscaled: self.of.iter().map(found).collect() }
    }

    /// The gradients are now those that a checkpoint held.
    pub fn restore(
        &mut self,
        saved: Option<SavedGradients>,
        optimizers: &[Box<dyn Optimizer>],
    ) -> Result<()> {
        let SavedGradients { window_is_open, unscaled } = saved.unwrap_or_default();
        *self = Self { has_scaled: self.has_scaled, window_is_open, ..Self::of(optimizers.len()) };
        for (index, found) in unscaled.into_iter().enumerate() {
            if let (Some(finite), Some(optimizer)) = (found, optimizers.get(index)) {
                self.note_unscaled(index, optimizer.as_ref(), finite)?;
            }
        }
        Ok(())
    }
}
