//! What devices, memory and kernels do while a profile is taken: what libtorch's profiler does not see.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use voltaic_sys as sys;

/// What the names of kernels begin with that stand in for libtorch's.
pub const KERNELS: &str = "voltaic::";

/// Bits of what is recorded; 0 while no profile is taken.
static RECORDED: AtomicI32 = AtomicI32::new(0);

/// What is recorded beside libtorch's own events.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Recorded {
    /// What emulated HPUs, graphs and collectives do.
    pub devices: bool,
    /// Memory that pools hand out and take back.
    pub memory: bool,
    /// Kernels that stand in for libtorch's.
    pub kernels: bool,
}

/// A row of a device in a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ActivityRow {
    /// Kernels of operators.
    Operators,
    /// Copies of memory.
    Copies,
    /// Captures and replays of graphs.
    Graphs,
    /// Operations of all ranks.
    Collectives,
    /// Kernels of the host that stand in for libtorch's, below the operator that they serve.
    Kernels,
}

/// Something that a device, or a kernel of the host, did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Activity {
    /// Such as `aten::addmm`, `Memcpy HtoD`, `all_reduce`.
    pub name: String,
    /// Members of a JSON object, such as `"bytes": 4`; may be empty.
    pub details: String,
    /// Nanoseconds since the epoch when the host began to ask for it; 0 if that took no time.
    pub launch_ns: i64,
    /// Nanoseconds since the epoch.
    pub start_ns: i64,
    /// Nanoseconds.
    pub duration_ns: i64,
    /// Where it is shown.
    pub row: ActivityRow,
    /// Number of the HPU; none for the host.
    pub device: Option<usize>,
    /// Thread that asked for it, as libtorch counts them.
    pub thread: u64,
    /// The same, as the system counts them.
    pub system_thread: i64,
}

/// Memory that a pool handed out or took back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryChange {
    /// Nanoseconds since the epoch.
    pub at_ns: i64,
    /// Number of the HPU; none for the host.
    pub device: Option<usize>,
    /// Given back if negative.
    pub bytes: i64,
    /// Where it is.
    pub address: u64,
    /// Bytes in use in the pool afterwards.
    pub allocated: u64,
    /// Bytes that the pool has of the system afterwards.
    pub reserved: u64,
    /// Thread on which it happened, as libtorch counts them.
    pub thread: u64,
    /// The same, as the system counts them.
    pub system_thread: i64,
}

impl Recorded {
    pub(in crate::ffi) fn bits(self) -> i32 {
        let bit = |is_on: bool, bit: i32| if is_on { bit } else { 0 };
        bit(self.devices, sys::VT_RECORD_DEVICES)
            | bit(self.memory, sys::VT_RECORD_MEMORY)
            | bit(self.kernels, sys::VT_RECORD_KERNELS)
    }
}

/// To be called when a profile begins, and with nothing when it ends.
pub(in crate::ffi) fn record(what: Recorded) {
    COLLECTIVES.lock().unwrap_or_else(PoisonError::into_inner).clear();
    RECORDED.store(what.bits(), Ordering::Relaxed);
}

fn records(what: i32) -> bool {
    RECORDED.load(Ordering::Relaxed) & what != 0
}

fn ticks() -> u64 {
    // SAFETY: reads a clock.
    unsafe { sys::vt_profile_ticks() }
}

fn add(name: &str, details: &str, began: u64, row: i32, device: Option<usize>) {
    let (name, details) = (CString::new(name).unwrap_or_default(), CString::new(details).unwrap_or_default());
    let activity = sys::vt_activity {
        name: name.as_ptr(),
        details: details.as_ptr(),
        launched: 0,
        began: began as i64,
        ended: ticks() as i64,
        row,
        device: device.map_or(-1, |device| device as i32),
        thread: 0,
        system_thread: 0,
    };
    // SAFETY: its texts live during the call.
    unsafe { sys::vt_profile_add_activity(&raw const activity) };
}

/// Runs a kernel that stands in for libtorch's, and notes it if it has computed: as `voltaic::<kernel><suffix>`.
pub(in crate::ffi) fn note_kernel<K>(
    kernel: &'static str,
    run: impl FnOnce() -> Option<K>,
    suffix: impl FnOnce(&K) -> String,
) -> Option<K> {
    if !records(sys::VT_RECORD_KERNELS) {
        return run();
    }
    let began = ticks();
    let done = run();
    if let Some(done) = &done {
        let name = format!("{KERNELS}{kernel}{}", suffix(done));
        add(&name, "", began, sys::VT_ROW_KERNELS, None);
    }
    done
}

/// Notes that a pool has handed out memory, or taken it back if `bytes` is negative. `stats` gives what is in use and what
/// the pool has of the system, and is asked only if memory is recorded.
pub(in crate::ffi) fn note_memory(
    pool: i32,
    bytes: i64,
    address: usize,
    stats: impl FnOnce() -> (usize, usize),
) {
    let (allocated, reserved) = stats();
    let change = sys::vt_memory_change {
        pool,
        bytes,
        address: address as u64,
        allocated: allocated as u64,
        reserved: reserved as u64,
        ..sys::vt_memory_change::default()
    };
    // SAFETY: plain numbers, which are copied.
    unsafe { sys::vt_profile_add_memory(&raw const change) };
}

/// Whether memory is recorded.
#[inline]
pub(in crate::ffi) fn records_memory() -> bool {
    records(sys::VT_RECORD_MEMORY)
}

/// A collective in progress.
struct Collective {
    op: &'static str,
    details: String,
    began: u64,
    device: Option<usize>,
}

/// Collectives in progress, by their number in the record of operations.
static COLLECTIVES: Mutex<BTreeMap<u64, Collective>> = Mutex::new(BTreeMap::new());
/// How many those are, so that nothing is locked without them.
static UNDER_WAY: AtomicU64 = AtomicU64::new(0);

/// Notes that a collective begins; [`collective_ends`] notes its end. `details` are members of a JSON object, made only if a
/// profile is taken.
pub fn collective_begins(
    number: u64,
    op: &'static str,
    device: Option<usize>,
    details: impl FnOnce() -> String,
) {
    if !records(sys::VT_RECORD_DEVICES) {
        return;
    }
    let collective = Collective { op, details: details(), began: ticks(), device };
    let mut under_way = COLLECTIVES.lock().unwrap_or_else(PoisonError::into_inner);
    under_way.insert(number, collective);
    UNDER_WAY.store(under_way.len() as u64, Ordering::Relaxed);
}

/// Notes that an operation has ended: that this rank has waited for it.
pub fn collective_ends(number: u64) {
    if UNDER_WAY.load(Ordering::Relaxed) == 0 {
        return;
    }
    let mut under_way = COLLECTIVES.lock().unwrap_or_else(PoisonError::into_inner);
    let ended = under_way.remove(&number);
    UNDER_WAY.store(under_way.len() as u64, Ordering::Relaxed);
    drop(under_way);
    if let Some(Collective { op, details, began, device }) = ended {
        add(op, &details, began, sys::VT_ROW_COLLECTIVES, device);
    }
}
