//! libtorch's host memory comes from a [`Pool`].
//!
//! Freshly mapped pages cost a page fault each when they are first written; on conv nets that is 10 to 20 % of a
//! step. The pool hands the same pages out again.

use std::ffi::{c_char, c_void};
use std::ptr::{self, NonNull};
use std::sync::{Mutex, PoisonError};
use std::{env, slice};

use voltaic_sys as sys;

use super::check;
use super::pool::Pool;
use crate::error::{MemoryError, Result};

/// Set to `0`, libtorch keeps its own allocator.
const SWITCH: &str = "VOLTAIC_HOST_POOL";

static HOST_POOL: Pool = Pool::new(0, None);

static TABLE: sys::vt_allocator = sys::vt_allocator { allocate, release, explain };

/// Makes the host pool libtorch's allocator for the CPU device. Later calls change nothing.
///
/// Tensors made before keep their memory and free it the way they got it. To be called before threads that use
/// libtorch start: libtorch reads its current allocator without a lock.
///
/// Returns whether the pool is in use: it is not if the environment says `VOLTAIC_HOST_POOL=0`.
///
/// # Errors
/// [`MemoryError::HostPoolSwitch`] if `VOLTAIC_HOST_POOL` is neither `0` nor `1`.
pub fn install_host_pool() -> Result<bool> {
    static INSTALLED: Mutex<bool> = Mutex::new(false);
    let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    if *installed {
        return Ok(true);
    }
    if !is_wanted(env::var_os(SWITCH).map(|value| value.to_string_lossy().into_owned()))? {
        return Ok(false);
    }
    // SAFETY: the table and the pool behind it are static, its functions may run on any thread and do not unwind.
    check("SetCPUAllocator", unsafe { sys::vt_set_cpu_allocator(&TABLE) })?;
    // SAFETY: the three functions live as long as the process, and are called by fork() in the order that
    // before_fork and after_fork ask for. Without memory for the registration (its only failure) a child of a
    // fork may wait for ever on a lock, which is what happens to most of libtorch after a fork anyway.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork)) };
    *installed = true;
    Ok(true)
}

/// The pool that [`install_host_pool`] installs, for its statistics and [`Pool::trim`].
pub fn host_pool() -> &'static Pool {
    &HOST_POOL
}

fn is_wanted(switch: Option<String>) -> Result<bool> {
    match switch.as_deref() {
        None | Some("1") => Ok(true),
        Some("0") => Ok(false),
        Some(_) => Err(MemoryError::HostPoolSwitch { value: switch.unwrap_or_default() }.into()),
    }
}

extern "C" fn allocate(bytes: usize) -> *mut c_void {
    HOST_POOL.allocate(bytes).map_or(ptr::null_mut(), |block| block.as_ptr().cast())
}

extern "C" fn release(block: *mut c_void) {
    if let Some(block) = NonNull::new(block) {
        // SAFETY: libtorch releases what `allocate` gave out, once, when the storage that owned it is gone.
        unsafe { Pool::release(block.cast()) };
    }
}

/// Writes why there is no memory to `text`: at most `capacity` bytes, the last of them 0.
extern "C" fn explain(bytes: usize, text: *mut c_char, capacity: usize) {
    let stats = HOST_POOL.stats();
    let message = format!(
        "host out of memory: tried to allocate {bytes} bytes; {stats}; use a smaller batch, or free memory on this machine"
    );
    let len = message.len().min(capacity.saturating_sub(1));
    if capacity > 0 {
        // SAFETY: the caller gives `capacity` writable bytes.
        let text = unsafe { slice::from_raw_parts_mut(text.cast::<u8>(), capacity) };
        text[..len].copy_from_slice(&message.as_bytes()[..len]);
        text[len] = 0;
    }
}

extern "C" fn before_fork() {
    HOST_POOL.before_fork();
}

extern "C" fn after_fork() {
    // SAFETY: fork() called before_fork in the same thread, and calls this once in each process.
    unsafe { HOST_POOL.after_fork() };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_switch_is_0_or_1() {
        assert!(is_wanted(None).unwrap());
        assert!(is_wanted(Some("1".to_owned())).unwrap());
        assert!(!is_wanted(Some("0".to_owned())).unwrap());
        for nonsense in ["", "yes", "01", "false"] {
            let message = is_wanted(Some(nonsense.to_owned())).unwrap_err().to_string();
            assert!(message.contains(&format!("VOLTAIC_HOST_POOL=`{nonsense}`")), "{message}");
            assert!(message.contains("; unset it"), "{message}");
        }
    }

    #[test]
    fn the_explanation_fits_its_buffer() {
        let mut text = [1 as c_char; 32];
        explain(4096, text.as_mut_ptr(), text.len());
        assert_eq!(text[31], 0);
        assert!(text[..31].iter().all(|&byte| byte > 1));
        explain(4096, ptr::null_mut(), 0);
    }
}
