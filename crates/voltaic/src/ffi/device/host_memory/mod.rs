//! How much memory there is for this process, and what happens when it runs short.
//!
//! Pools call [`admits`] before they take memory from the system, so that too large a tensor is an error and the kernel does not
//! kill the process. The limits of the machine and of the process's cgroups are read again when the granted bytes are used up, and at
//! most once a second for [`is_tight`].

mod limits;

use std::env;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

use limits::{Level, Limits};

use crate::config::parse_size;
use crate::error::SettingError;
use crate::kernels;

/// The most memory that pools may take, in place of what the machine and the cgroups say.
const SETTING: &str = "VOLTAIC_HOST_MEMORY";
/// The folder of the cgroup that counts, in place of this process's own.
const CGROUP: &str = "VOLTAIC_CGROUP";
/// The most that is granted before the limits are read again.
const MAX_GRANT: usize = 1 << 30;
/// Memory is tight when less than this is left, or less than one part in [`TIGHT_PART`] of a limit.
const TIGHT: usize = 1 << 30;
const TIGHT_PART: usize = 16;

/// Bytes that all pools have from the system; the kernels' buffers come on top.
static TAKEN: AtomicUsize = AtomicUsize::new(0);
/// Bytes that may be taken before the limits are read again.
static GRANT: AtomicUsize = AtomicUsize::new(0);
/// When the limits were read last, in seconds, and whether memory was tight then.
static LOOKED_AT: AtomicU64 = AtomicU64::new(0);
static WAS_TIGHT: AtomicBool = AtomicBool::new(false);
/// Gives back what pools keep.
static RELIEF: OnceLock<fn() -> usize> = OnceLock::new();
/// Why memory was refused last.
static SHORTAGE: Mutex<Option<Shortage>> = Mutex::new(None);

/// What the environment says of memory.
enum Setting {
    /// Nothing: the machine's and the cgroups' limits count.
    Found(Limits),
    /// Pools may take so many bytes.
    Bytes(usize),
    /// Nothing is limited.
    Nothing,
}

impl Setting {
    fn read() -> Result<Self, SettingError> {
        let Some(value) = env::var_os(SETTING) else {
            let folder = env::var_os(CGROUP).map(PathBuf::from);
            return Ok(Self::Found(Limits::of_process(folder)));
        };
        let value = value.to_string_lossy().into_owned();
        match value.as_str() {
            "none" => Ok(Self::Nothing),
            text => parse_size(text).map(Self::Bytes).ok_or(SettingError {
                name: SETTING,
                value,
                accepted: "a size such as 24GiB, or `none` for no limit; unset, the machine and the cgroup limit it",
            }),
        }
    }

    fn levels(&self) -> Vec<Level> {
        let taken = TAKEN.load(Ordering::Relaxed) + kernels::scratch_bytes();
        match self {
            Self::Found(limits) => limits.levels(taken),
            Self::Bytes(limit) => vec![Level::hard(SETTING.to_owned(), *limit, taken)],
            Self::Nothing => Vec::new(),
        }
    }
}

fn setting() -> &'static Setting {
    static SETTING: OnceLock<Setting> = OnceLock::new();
    // one that cannot be read was reported by `configure`
    SETTING.get_or_init(|| Setting::read().unwrap_or(Setting::Nothing))
}

/// Reads the setting now, before a fork: a child would wait for ever on a thread that was reading it.
pub(super) fn read_setting() {
    setting();
}

/// Reads the environment, and names what gives memory back when it runs short.
///
/// # Errors
/// [`SettingError`] if `VOLTAIC_HOST_MEMORY` is not a size.
pub(super) fn configure(relief: fn() -> usize) -> Result<(), SettingError> {
    Setting::read()?;
    RELIEF.get_or_init(|| relief);
    Ok(())
}

/// What limits the memory of this process: by what, the limit in bytes, and how many of them are used.
pub fn memory_limits() -> Vec<(String, usize, usize)> {
    setting().levels().into_iter().map(|level| (level.what, level.limit, level.used)).collect()
}

/// A pool has so many bytes more from the system.
pub(super) fn took(bytes: usize) {
    TAKEN.fetch_add(bytes, Ordering::Relaxed);
}

/// A pool has so many bytes less.
pub(super) fn gave(bytes: usize) {
    TAKEN.fetch_sub(bytes, Ordering::Relaxed);
    // what just went back can be taken again
    let grant = GRANT.load(Ordering::Relaxed);
    GRANT.store(grant.saturating_add(bytes).min(MAX_GRANT), Ordering::Relaxed);
}

/// Whether the limits allow so many bytes more.
pub(super) fn admits(bytes: usize) -> bool {
    let granted =
        GRANT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |grant| grant.checked_sub(bytes)).is_ok();
    granted || look(bytes)
}

/// Whether pools should keep nothing that they do not need. Reads the limits once in a second at most.
pub(super) fn is_tight(now_secs: u64) -> bool {
    if LOOKED_AT.swap(now_secs, Ordering::Relaxed) != now_secs {
        look(0);
        kernels::end_window(now_secs);
    }
    WAS_TIGHT.load(Ordering::Relaxed)
}

/// Gives back what all pools and the kernels keep. Returns how many bytes it was.
pub(super) fn relieve() -> usize {
    let bytes = RELIEF.get().map_or(0, |relief| relief()) + kernels::release_idle();
    if bytes > 0 {
        // SAFETY: only asks the heap to give free pages at its end back.
        unsafe { libc::malloc_trim(0) };
    }
    bytes
}

/// Reads the limits, and returns whether they allow so many bytes; if not, the reason is kept for [`shortage`].
fn look(bytes: usize) -> bool {
    let levels = setting().levels();
    WAS_TIGHT.store(levels.iter().any(is_nearly_used_up), Ordering::Relaxed);
    let Some(least) = levels.into_iter().filter(|level| level.is_hard).min_by_key(Level::left) else {
        GRANT.store(MAX_GRANT, Ordering::Relaxed);
        return true;
    };
    let left = least.left();
    let is_enough = bytes <= left;
    // the closer to the limit, the sooner it is looked at again
    GRANT.store((left.saturating_sub(bytes) / 4).min(MAX_GRANT), Ordering::Relaxed);
    // not waited for: a child of a fork would wait for ever on a thread that it does not have
    if let Ok(mut shortage) = SHORTAGE.try_lock() {
        *shortage = (!is_enough).then_some(Shortage { level: least });
    }
    is_enough
}

fn is_nearly_used_up(level: &Level) -> bool {
    level.left() < TIGHT.min(level.limit / TIGHT_PART)
}

/// Why memory was refused when the limits were read last; none if it was not.
pub(super) fn shortage() -> Option<String> {
    SHORTAGE.try_lock().ok()?.as_ref().map(Shortage::to_string)
}

/// A limit that did not allow what was asked for.
struct Shortage {
    level: Level,
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Level { what, limit, used, .. } = &self.level;
        write!(f, "{what} is {limit} bytes, of which {used} are used; raise it, or set {SETTING}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_tight_near_a_limit_of_any_kind() {
        let level = |limit, used| Level::hard("limit".to_owned(), limit, used);
        assert!(!is_nearly_used_up(&level(16 << 20, 15 << 20)));
        assert!(is_nearly_used_up(&level(16 << 20, (15 << 20) + 1)));
        assert!(!is_nearly_used_up(&level(1 << 40, (1 << 40) - (1 << 30))), "a gibibyte is enough");
        assert!(is_nearly_used_up(&Level { is_hard: false, ..level(1 << 20, 2 << 20) }), "above memory.high");
    }

    #[test]
    fn a_shortage_names_the_limit_and_what_is_used() {
        let shortage = Shortage { level: Level::hard("/sys/fs/cgroup/a/memory.max".to_owned(), 1000, 900) };
        assert_eq!(
            shortage.to_string(),
            "/sys/fs/cgroup/a/memory.max is 1000 bytes, of which 900 are used; raise it, or set VOLTAIC_HOST_MEMORY"
        );
    }
}
