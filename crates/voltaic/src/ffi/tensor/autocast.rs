//! Autocast: whether operators cast their arguments, and which do.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char, c_void};
use std::panic::catch_unwind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};

use tch::Kind;
use voltaic_sys as sys;

use crate::device::Device;
use crate::dtype::DtypeNames;
use crate::error::TorchError;
use crate::ffi::check::check;

/// What autocast does with the arguments of an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AutocastPolicy {
    /// Casts them to the autocast dtype.
    Lower,
    /// Casts the first tensor to the autocast dtype.
    LowerFirst,
    /// Casts them to float32.
    Fp32,
    /// Casts them to float32 if one of them is, else to the autocast dtype.
    Promote,
}

impl AutocastPolicy {
    fn number(self) -> u8 {
        match self {
            Self::Lower => sys::VT_AUTOCAST_LOWER,
            Self::LowerFirst => sys::VT_AUTOCAST_LOWER_FIRST,
            Self::Fp32 => sys::VT_AUTOCAST_FP32,
            Self::Promote => sys::VT_AUTOCAST_PROMOTE,
        }
    }
}

/// Whether autocast is enabled for a kind of device on this thread, and c10's number of the dtype it casts to.
///
/// # Errors
/// libtorch's, if it has no autocast for this kind of device.
pub fn autocast_state(device: Device) -> Result<(bool, i32), TorchError> {
    let (mut enabled, mut dtype) = (0, 0);
    // SAFETY: both out-pointers are valid i32s on this stack.
    check("autocast", unsafe { sys::vt_autocast_get(device.numbers().0, &mut enabled, &mut dtype) })?;
    Ok((enabled != 0, dtype))
}

/// Enables or disables autocast for a kind of device on this thread; `dtype` is c10's number.
///
/// # Errors
/// libtorch's, if it has no autocast for this kind of device.
pub fn set_autocast_state(device: Device, enabled: bool, dtype: i32) -> Result<(), TorchError> {
    // SAFETY: plain numbers; the shim checks nothing that c10 does not.
    check("autocast", unsafe { sys::vt_autocast_set(device.numbers().0, i32::from(enabled), dtype) })
}

/// To be called at the beginning of a region with autocast, and [`leave_autocast`] at its end.
pub fn enter_autocast() {
    // SAFETY: counts up a number of this thread; it cannot fail.
    let _ = check("autocast", unsafe { sys::vt_autocast_enter() });
}

/// The end of a region; weights that were cast are dropped at the end of the outermost one.
pub fn leave_autocast() {
    // SAFETY: counts down a number of this thread and frees tensors; freeing does not fail.
    let _ = check("autocast", unsafe { sys::vt_autocast_leave() });
}

/// Drops weights that were cast in the region that is open; they are cast again when they are used.
///
/// # Errors
/// libtorch's.
pub fn clear_autocast_cache() -> Result<(), TorchError> {
    // SAFETY: frees tensors under libtorch's own lock; a tensor that is still in use has another owner.
    check("autocast", unsafe { sys::vt_autocast_clear_cache() })
}

/// How often lists were set in this process: results of earlier lists can be recognised by it.
static LISTS_VERSION: AtomicU64 = AtomicU64::new(0);

/// A number that is another one after each change of lists.
pub fn autocast_lists_version() -> u64 {
    LISTS_VERSION.load(Ordering::Relaxed)
}

/// Sets what autocast does by operator name, in place of what was set before; of two entries with the same name the
/// first holds. With `replaces_rest` all other operators are left as they are, even those of libtorch's own lists.
///
/// # Errors
/// libtorch's, if it has no autocast for this kind of device.
pub fn set_autocast_lists(
    device: Device,
    policies: &[(&str, AutocastPolicy)],
    replaces_rest: bool,
) -> Result<(), TorchError> {
    let named = |(name, policy): &(&str, AutocastPolicy)| Some((CString::new(*name).ok()?, policy.number()));
    let (names, numbers): (Vec<CString>, Vec<u8>) = policies.iter().filter_map(named).unzip();
    let pointers: Vec<*const c_char> = names.iter().map(|name| name.as_ptr()).collect();
    LISTS_VERSION.fetch_add(1, Ordering::Relaxed);
    // SAFETY: names and numbers have the same length and live for the call; the strings end with NUL.
    check("autocast lists", unsafe {
        sys::vt_autocast_set_lists(
            device.numbers().0,
            pointers.as_ptr(),
            numbers.as_ptr(),
            numbers.len(),
            i32::from(replaces_rest),
        )
    })
}

/// Back to libtorch's own lists.
///
/// # Errors
/// libtorch's, if it has no autocast for this kind of device.
pub fn reset_autocast_lists(device: Device) -> Result<(), TorchError> {
    LISTS_VERSION.fetch_add(1, Ordering::Relaxed);
    // SAFETY: a plain number.
    check("autocast lists", unsafe { sys::vt_autocast_reset_lists(device.numbers().0) })
}

/// What became of one argument of an operator.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Cast {
    /// ATen's name of the operator, without its overload.
    pub operator: String,
    /// Position of the argument.
    pub argument: usize,
    /// The dtype that was given.
    pub from: Kind,
    /// The dtype that the operator got.
    pub to: Kind,
}

static CAST_OBSERVER: RwLock<Option<fn(&Cast)>> = RwLock::new(None);

/// Sets the function that is called for each argument that an operator casts by lists that were set here, or none. libtorch's own
/// lists and replays of graphs do not call it. It runs on the thread of the operator, for all threads of the process.
pub fn observe_casts(observer: Option<fn(&Cast)>) {
    *CAST_OBSERVER.write().unwrap_or_else(PoisonError::into_inner) = observer;
    let report: Option<sys::vt_cast_report> = if observer.is_some() { Some(report_cast) } else { None };
    // SAFETY: a function that lives as long as the process and does not unwind, or none.
    unsafe { sys::vt_autocast_observe(report) }
}

extern "C" fn report_cast(op: *const c_char, argument: usize, from: i32, to: i32) {
    let Some(observer) = *CAST_OBSERVER.read().unwrap_or_else(PoisonError::into_inner) else { return };
    let kind = |number| DtypeNames::of_number(number).and_then(|dtype| dtype.kind).unwrap_or(Kind::Float);
    // SAFETY: the shim gives a NUL-terminated string that lives for the call.
    let operator = unsafe { CStr::from_ptr(op) }.to_string_lossy().into_owned();
    let cast = Cast { operator, argument, from: kind(from), to: kind(to) };
    let _ = catch_unwind(|| observer(&cast)); // a panic must not reach the shim; its hook has reported it
}

/// Names of libtorch's operators, without overloads.
///
/// # Errors
/// libtorch's.
pub fn operator_names() -> Result<BTreeSet<String>, TorchError> {
    let mut names = BTreeSet::new();
    // SAFETY: `note` gets the set back as `data`, during the call and on this thread only, and does not unwind.
    check("operators", unsafe { sys::vt_operator_names(note, (&raw mut names).cast()) })?;
    Ok(names)
}

extern "C" fn note(data: *mut c_void, name: *const c_char) {
    // SAFETY: data is the set of `operator_names`, to which there is no other reference while the shim runs; the shim gives a
    // NUL-terminated string that lives for the call.
    let (names, name) = unsafe { (&mut *data.cast::<BTreeSet<String>>(), CStr::from_ptr(name)) };
    let name = name.to_string_lossy();
    if !names.contains(name.as_ref()) {
        names.insert(name.into_owned());
    }
}
