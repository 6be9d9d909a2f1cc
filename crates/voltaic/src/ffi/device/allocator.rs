//! libtorch's memory comes from [`Pool`]s: one for the host, one for each emulated HPU.
//!
//! Freshly mapped pages cost a page fault each when they are first written; on conv nets that is 10 to 20 % of a
//! step. The pool hands the same pages out again. docs/memory.md says how much it keeps.

use std::ffi::{c_char, c_void};
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::{Mutex, PoisonError};

use voltaic_sys as sys;

use crate::config::read_switch;
use crate::error::Result;
use crate::ffi::activities::{note_memory, records_memory};
use crate::ffi::check::check;
use crate::ffi::device::host_memory;
use crate::ffi::device::pool::{Pool, PoolStats};
use crate::ffi::libtorch::check_libtorch;

/// Set to `0`, libtorch keeps its own allocator.
const SWITCH: &str = "VOLTAIC_HOST_POOL";

/// The host's pool, and behind it those of the HPUs, by number.
static POOLS: [Pool; 1 + sys::VT_HPU_MAX_DEVICES] = [
    Pool::new(sys::VT_HOST_POOL, None),
    device_pool(1),
    device_pool(2),
    device_pool(3),
    device_pool(4),
    device_pool(5),
    device_pool(6),
    device_pool(7),
    device_pool(8),
];

static TABLE: sys::vt_allocator = sys::vt_allocator { allocate, release, explain };

const fn device_pool(number: i32) -> Pool {
    Pool::new(number, None).with_drop_twin(|twin| {
        // SAFETY: the HPU back end stored the twin, and its block is being returned to the system.
        unsafe { sys::vt_hpu_drop_twin(twin) }
    })
}

/// Makes the host pool libtorch's allocator for the CPU device. Later calls change nothing.
///
/// Tensors made before keep their memory and free it the way they got it. To be called before threads that use
/// libtorch start: libtorch reads its current allocator without a lock.
///
/// Returns whether the pool is in use: it is not if the environment says `VOLTAIC_HOST_POOL=0`.
///
/// # Errors
/// [`SwitchError`](crate::error::SwitchError) if `VOLTAIC_HOST_POOL` is neither `0` nor `1`,
/// [`SettingError`](crate::error::SettingError) if `VOLTAIC_HOST_MEMORY` is not a size; as [`check_libtorch`].
pub fn install_host_pool() -> Result<bool> {
    if !is_wanted()? {
        return Ok(false);
    }
    install()?;
    Ok(true)
}

/// Makes the pools libtorch's allocator even if the host is not to have one: then the host's keeps nothing.
pub(in crate::ffi) fn install_device_pools() -> Result<()> {
    if !is_wanted()? {
        host_pool().set_caching(false);
    }
    install()
}

fn install() -> Result<()> {
    static INSTALLED: Mutex<bool> = Mutex::new(false);
    let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    if *installed {
        return Ok(());
    }
    check_libtorch()?;
    host_memory::configure(trim)?;
    // SAFETY: the table and the pools behind it are static, its functions may run on any thread and do not unwind.
    check("SetCPUAllocator", unsafe { sys::vt_set_cpu_allocator(&TABLE) })?;
    // SAFETY: the three functions live as long as the process, and are called by fork() in the order that
    // before_fork and after_fork ask for. Without memory for the registration (its only failure) a child of a
    // fork may wait for ever on a lock, which is what happens to most of libtorch after a fork anyway.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork)) };
    *installed = true;
    Ok(())
}

/// Gives back what all pools keep. Returns how many bytes it was.
fn trim() -> usize {
    POOLS.iter().map(Pool::trim).sum()
}

/// The pool that [`install_host_pool`] installs, for its statistics and [`Pool::trim`].
pub fn host_pool() -> &'static Pool {
    &POOLS[0]
}

/// The pool of an emulated HPU, by the device's index; none above the last one.
pub fn hpu_pool(index: usize) -> Option<&'static Pool> {
    POOLS.get(1 + index)
}

fn is_wanted() -> Result<bool> {
    Ok(read_switch(SWITCH, "allocator")?.unwrap_or(true))
}

extern "C" fn allocate(pool: i32, bytes: usize) -> *mut c_void {
    let Some(pool) = POOLS.get(pool as usize) else { return ptr::null_mut() };
    let block = pool.allocate(bytes).map_or(ptr::null_mut(), NonNull::as_ptr);
    if records_memory() && !block.is_null() {
        note(pool, bytes as i64, block);
    }
    block.cast()
}

/// For a profile.
#[cold]
fn note(pool: &Pool, bytes: i64, block: *mut u8) {
    note_memory(pool.id(), bytes, block.addr(), || {
        let stats = pool.stats();
        (stats.in_use, stats.reserved)
    });
}

extern "C" fn release(block: *mut c_void) {
    if let Some(block) = NonNull::new(block) {
        if records_memory() {
            // SAFETY: as below.
            let (pool, bytes) = unsafe { (Pool::of(block.cast()), Pool::requested_bytes(block.cast())) };
            // SAFETY: as below.
            unsafe { Pool::release(block.cast()) };
            note(pool, -(bytes as i64), block.as_ptr().cast());
            return;
        }
        // SAFETY: libtorch releases what `allocate` gave out, once, when the storage that owned it is gone.
        unsafe { Pool::release(block.cast()) };
    }
}

/// Why an emulated HPU has no memory. `shortage` is what the machine lacks, if anything.
fn of_hpu(device: i32, bytes: usize, stats: &PoolStats, shortage: Option<String>) -> String {
    let block = Pool::block_bytes(bytes).unwrap_or(usize::MAX);
    let limit_allows = stats.limit.is_none_or(|limit| block.saturating_add(stats.in_use) <= limit);
    let remedy = match shortage {
        Some(shortage) if limit_allows => {
            format!("the limit allows it, but there is no more memory: {shortage}; or use a smaller batch or model")
        }
        None if limit_allows && stats.cached() == 0 => {
            "the limit allows it, but this machine has no more memory: free some, or use a smaller batch or model".to_owned()
        }
        _ => "use a smaller batch or model, or raise the limit of the emulated device with VOLTAIC_HPU_MEMORY".to_owned(),
    };
    let rounded = if block == bytes { String::new() } else { format!(" in a block of {block}") };
    format!("hpu:{device} out of memory: tried to allocate {bytes} bytes{rounded}; {stats}; {remedy}")
}

/// Writes why there is no memory to `text`: at most `capacity` bytes, the last of them 0.
extern "C" fn explain(pool: i32, bytes: usize, text: *mut c_char, capacity: usize) {
    let Some(stats) = POOLS.get(pool as usize).map(Pool::stats) else { return };
    let message = if pool == sys::VT_HOST_POOL {
        let remedy = host_memory::shortage().unwrap_or_else(|| "free memory on this machine".to_owned());
        format!(
            "host out of memory: tried to allocate {bytes} bytes; {stats}; use a smaller batch, or: {remedy}"
        )
    } else {
        of_hpu(pool - 1, bytes, &stats, host_memory::shortage())
    };
    write_text(&message, text, capacity);
}

/// Copies a message to a buffer of the shim: at most `capacity` bytes, the last of them 0.
pub(in crate::ffi) fn write_text(message: &str, text: *mut c_char, capacity: usize) {
    if capacity == 0 {
        return;
    }
    let len = message.len().min(capacity - 1);
    // SAFETY: the shim gives `capacity` writable bytes.
    let text = unsafe { slice::from_raw_parts_mut(text.cast::<u8>(), capacity) };
    text[..len].copy_from_slice(&message.as_bytes()[..len]);
    text[len] = 0;
}

extern "C" fn before_fork() {
    POOLS.iter().for_each(Pool::before_fork);
}

extern "C" fn after_fork() {
    for pool in &POOLS {
        // SAFETY: fork() called before_fork in the same thread, and calls this once in each process.
        unsafe { pool.after_fork() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_are_numbered_by_their_place() {
        for (number, pool) in POOLS.iter().enumerate() {
            assert_eq!(pool.id(), number as i32);
        }
        assert!(hpu_pool(sys::VT_HPU_MAX_DEVICES).is_none());
    }

    #[test]
    fn the_limit_is_for_whole_blocks() {
        let stats = PoolStats { limit: Some(5_000_000), ..PoolStats::default() };
        let explained = |bytes: usize| of_hpu(3, bytes, &stats, None);
        let refused = explained(4_990_000); // a block has 5 MiB
        for part in ["tried to allocate 4990000 bytes in a block of 5242880;", "with VOLTAIC_HPU_MEMORY"] {
            assert!(refused.contains(part), "{refused}");
        }
        assert!(explained(4_900_000).contains("the limit allows it"));
    }

    #[test]
    fn the_explanation_fits_its_buffer() {
        let mut text = [1 as c_char; 32];
        explain(0, 4096, text.as_mut_ptr(), text.len());
        assert_eq!(text[31], 0);
        assert!(text[..31].iter().all(|&byte| byte > 1));
        explain(0, 4096, ptr::null_mut(), 0);
    }
}
