//! Steps of optimizers by voltaic's kernel.

use std::ptr;

use voltaic_sys as sys;

use crate::error::TorchError;
use crate::ffi::check::check;
use crate::ffi::tensor::lists::{TensorList, list_or_null};

/// An optimizer with a kernel, and the states that it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepKind {
    /// `exp_avg`, `exp_avg_sq` and, with amsgrad, `max_exp_avg_sq`.
    Adam,
    /// `momentum_buffer` if the momentum is not 0.
    Sgd,
    /// `sum`.
    Adagrad,
    /// `exp_avg`.
    Lion,
}

/// The hyper-parameters of one step; those that its kind does not have mean nothing.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)] // the settings of optimizers say what they are
pub struct StepRule {
    pub kind: StepKind,
    pub lr: f64,
    pub weight_decay: f64,
    pub betas: (f64, f64),
    pub eps: f64,
    pub momentum: f64,
    pub dampening: f64,
    pub lr_decay: f64,
    pub decoupled: bool,
    pub amsgrad: bool,
    pub nesterov: bool,
    pub maximize: bool,
    pub is_first_step: bool,
}

impl StepRule {
    /// With these, and all others 0 or false.
    pub fn new(kind: StepKind, lr: f64, weight_decay: f64, maximize: bool) -> Self {
        let (betas, eps, momentum, dampening, lr_decay) = ((0.0, 0.0), 0.0, 0.0, 0.0, 0.0);
        let (decoupled, amsgrad, nesterov, is_first_step) = (false, false, false, false);
        Self {
            kind,
            lr,
            weight_decay,
            betas,
            eps,
            momentum,
            dampening,
            lr_decay,
            decoupled,
            amsgrad,
            nesterov,
            maximize,
            is_first_step,
        }
    }

    fn raw(&self) -> sys::vt_update_rule {
        sys::vt_update_rule {
            kind: match self.kind {
                StepKind::Adam => sys::VT_ADAM,
                StepKind::Sgd => sys::VT_SGD,
                StepKind::Adagrad => sys::VT_ADAGRAD,
                StepKind::Lion => sys::VT_LION,
            },
            lr: self.lr,
            weight_decay: self.weight_decay,
            beta1: self.betas.0,
            beta2: self.betas.1,
            eps: self.eps,
            momentum: self.momentum,
            dampening: self.dampening,
            lr_decay: self.lr_decay,
            decoupled: self.decoupled.into(),
            amsgrad: self.amsgrad.into(),
            nesterov: self.nesterov.into(),
            maximize: self.maximize.into(),
            is_first_step: self.is_first_step.into(),
        }
    }
}

/// Weights of `float32` and what belongs to them; each list has an entry for each weight.
#[derive(Debug, Clone, Copy)]
pub struct StepLists<'a> {
    /// The weights.
    pub params: &'a TensorList,
    /// A list for each state of the rule, in `float32`, `bfloat16` or `float16`.
    pub states: &'a [&'a TensorList],
    /// What the new weights are written to, rounded: tensors of 16 bits, undefined for weights without.
    pub rounded: Option<&'a TensorList>,
}

impl StepLists<'_> {
    /// Does a step in one pass over memory, with gradients of `float32`, `bfloat16` or `float16`, which it empties.
    ///
    /// `counts` are for kinds that count: of Adam the number of each weight's step, from 1 on, or infinity for moments that are not
    /// corrected for their start at 0; of Adagrad the number of its steps before.
    ///
    /// Gives false, with nothing done, if voltaic's kernel is not in use ([`install_kernels`](crate::ffi::install_kernels)), or if a
    /// tensor is not dense memory of the CPU, laid out as its weight and apart from the others.
    ///
    /// # Errors
    /// If lists or counts are too few.
    pub fn step(
        &self,
        grads: &mut TensorList,
        rule: &StepRule,
        counts: Option<&[f64]>,
    ) -> Result<bool, TorchError> {
        if counts.is_some_and(|counts| counts.len() != self.params.len()) {
            let what = "the weights and the counts of their steps differ in number";
            return Err(TorchError::new("update", crate::error::TorchErrorKind::Other, what));
        }
        let states: Vec<*const sys::vt_list> =
            self.states.iter().map(|list| list_or_null(Some(*list))).collect();
        let mut is_done = 0;
        // SAFETY: all lists are alive for the call, and the shim checks tensors and numbers of entries; there is a count for
        // each weight; the rule and the out-pointer lie on this stack.
        let error = unsafe {
            sys::vt_update_lists(
                list_or_null(Some(self.params)),
                grads.as_mut_ptr(),
                states.as_ptr(),
                states.len(),
                list_or_null(self.rounded),
                counts.map_or(ptr::null(), <[f64]>::as_ptr),
                &rule.raw(),
                &mut is_done,
            )
        };
        check("update", error)?;
        Ok(is_done != 0)
    }
}
