//! The entry for steps of optimizers.

use std::ffi::c_void;

use voltaic_sys as sys;

use super::guard::guard_done;
use crate::kernels::{
    self, AdagradRule, AdamRule, LionRule, Numbers, NumbersMut, SgdRule, UpdateRule, slice_mut_of, slice_of,
};

pub(super) extern "C" fn update(
    rule: *const sys::vt_update_rule,
    updates: *const sys::vt_update,
    len: usize,
) -> i32 {
    guard_done("update", || {
        // SAFETY: the shim passes a rule and as many descriptions of tensors, all of which live during the call.
        let (rule, updates) = unsafe { (&*rule, slice_of(updates, len)) };
        // SAFETY: the shim has checked that what is written is used by nothing else, and that lengths are equal.
        let updates = updates.iter().map(|update| unsafe { update_of(rule, update) });
        kernels::update(updates.collect());
    })
}

/// # Safety
/// The tensors must be there for the lifetime, and what is written used by no other code.
unsafe fn update_of<'a>(rule: &sys::vt_update_rule, update: &sys::vt_update) -> kernels::Update<'a> {
    let len = update.len as usize;
    // SAFETY: as this function asks; an address is null where there is no tensor, or no element.
    unsafe {
        kernels::Update {
            rule: rule_of(rule, update.step),
            weights: floats_mut(&update.weights, len).unwrap_or_default(),
            grad: floats(&update.grad, len),
            states: update.states.map(|state| floats_mut(&state, len).unwrap_or_default()),
            rounded: floats_mut(&update.rounded, len),
        }
    }
}

fn rule_of(rule: &sys::vt_update_rule, step: f64) -> UpdateRule {
    let sys::vt_update_rule { lr, weight_decay, eps, momentum, dampening, lr_decay, .. } = *rule;
    let (betas, maximize) = ((rule.beta1, rule.beta2), rule.maximize != 0);
    match rule.kind {
        sys::VT_ADAM => {
            let (decoupled, amsgrad) = (rule.decoupled != 0, rule.amsgrad != 0);
            AdamRule { lr, betas, eps, weight_decay, decoupled, amsgrad, maximize, step }.into()
        }
        sys::VT_SGD => {
            let (nesterov, is_first_step) = (rule.nesterov != 0, rule.is_first_step != 0);
            SgdRule { lr, weight_decay, momentum, dampening, nesterov, maximize, is_first_step }.into()
        }
        sys::VT_ADAGRAD => AdagradRule { lr, lr_decay, eps, weight_decay, maximize, steps: step }.into(),
        _ => LionRule { lr, betas, weight_decay, maximize }.into(),
    }
}

/// # Safety
/// As for [`slice_of`].
unsafe fn floats<'a>(numbers: &sys::vt_numbers, len: usize) -> Numbers<'a> {
    let address: *const c_void = numbers.data;
    // SAFETY: as this function asks.
    unsafe {
        match numbers.dtype {
            sys::VT_FLOAT32 => Numbers::Float32(slice_of(address.cast(), len)),
            sys::VT_BFLOAT16 => Numbers::Bfloat16(slice_of(address.cast(), len)),
            _ => Numbers::Float16(slice_of(address.cast(), len)),
        }
    }
}

/// Numbers to write, if there are some.
///
/// # Safety
/// As for [`slice_mut_of`].
unsafe fn floats_mut<'a>(numbers: &sys::vt_numbers, len: usize) -> Option<NumbersMut<'a>> {
    if numbers.data.is_null() {
        return None;
    }
    // SAFETY: as this function asks.
    Some(unsafe {
        match numbers.dtype {
            sys::VT_FLOAT32 => NumbersMut::Float32(slice_mut_of(numbers.data.cast(), len)),
            sys::VT_BFLOAT16 => NumbersMut::Bfloat16(slice_mut_of(numbers.data.cast(), len)),
            _ => NumbersMut::Float16(slice_mut_of(numbers.data.cast(), len)),
        }
    })
}
