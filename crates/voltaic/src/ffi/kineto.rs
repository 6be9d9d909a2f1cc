//! libtorch's profiler (Kineto): operators, ranges and memory of a stretch of time, as events and as a Chrome trace.

use std::ffi::{CStr, CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use voltaic_sys as sys;

use crate::error::{TorchError, TorchErrorKind};
use crate::ffi::activities::{self, Activity, ActivityRow, MemoryChange, Recorded};
use crate::ffi::check::check;

/// What is recorded beside names and times.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KinetoOptions {
    /// Shapes of the inputs.
    pub record_shapes: bool,
    /// Floating point operations of products and convolutions.
    pub with_flops: bool,
    /// What CUDA devices do.
    pub with_cuda: bool,
    /// No operators, only ranges.
    pub without_operators: bool,
    /// What libtorch does not see.
    pub recorded: Recorded,
}

/// Where an event comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EventScope {
    /// An operator.
    Operator,
    /// A function of the backward pass.
    Backward,
    /// A range that a program named.
    Range,
    /// Memory, and other events of libtorch.
    Other,
}

/// An operator, a range, or a change of memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KinetoEvent {
    /// Such as `aten::linear`; `[memory]` for a change of memory.
    pub name: String,
    /// Shapes of the inputs, such as `[[2, 3], [], [3]]`; empty if they were not recorded.
    pub shapes: String,
    /// Nanoseconds since the epoch.
    pub start_ns: i64,
    /// Nanoseconds.
    pub duration_ns: i64,
    /// Thread on which it began, as libtorch counts them.
    pub thread: u64,
    /// Floating point operations; 0 if they are not known.
    pub flops: i64,
    /// Bytes that were allocated, or freed if negative.
    pub bytes: i64,
    /// Where it comes from.
    pub scope: EventScope,
    /// Number of libtorch's device type: 0 is the CPU.
    pub device_type: i32,
    /// Thread on which it began, as the trace names it.
    pub system_thread: i64,
    /// The trace's `External id`.
    pub id: u64,
    /// Whether libtorch's trace has it. It lacks ranges of threads other than the one that records.
    pub is_in_trace: bool,
}

/// What was recorded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Profile {
    /// Operators and ranges.
    pub events: Vec<KinetoEvent>,
    /// What devices, graphs, collectives and kernels did.
    pub activities: Vec<Activity>,
    /// What became of memory.
    pub memory: Vec<MemoryChange>,
    /// Activities and changes of memory that were too many to be kept.
    pub left_out: u64,
}

/// libtorch has one profiler per process.
static IS_RECORDING: AtomicBool = AtomicBool::new(false);

/// libtorch's profiler at work. It began on this thread and ends there. It sees the operators of this thread and of autograd's
/// backward passes, and ranges of all threads.
#[derive(Debug)]
pub struct Kineto {
    not_send: std::marker::PhantomData<*const ()>,
}

impl KinetoOptions {
    fn raw(self) -> sys::vt_profile_options {
        sys::vt_profile_options {
            record_shapes: self.record_shapes.into(),
            profile_memory: 0, // pools note it, for all threads
            with_flops: self.with_flops.into(),
            with_cuda: self.with_cuda.into(),
            operators: (!self.without_operators).into(),
            records: self.recorded.bits() | sys::VT_RECORD_RANGES,
        }
    }
}

impl Kineto {
    /// Starts to record.
    ///
    /// # Errors
    /// If it records already in this process; if libtorch refuses.
    pub fn start(options: KinetoOptions) -> Result<Self, TorchError> {
        if IS_RECORDING.swap(true, Ordering::AcqRel) {
            return Err(TorchError::new(
                "profiler",
                TorchErrorKind::Other,
                "libtorch's profiler records already in this process",
            ));
        }
        // SAFETY: takes plain integers; the profiler is not at work, since the flag was not set.
        let prepared = check("prepareProfiler", unsafe { sys::vt_profile_prepare(options.raw()) });
        // SAFETY: as above, and it was prepared.
        let begun =
            prepared.and_then(|()| check("enableProfiler", unsafe { sys::vt_profile_start(options.raw()) }));
        if let Err(error) = begun {
            IS_RECORDING.store(false, Ordering::Release);
            return Err(error);
        }
        activities::record(options.recorded);
        Ok(Self { not_send: std::marker::PhantomData })
    }

    /// Stops, writes a Chrome trace of libtorch's own events to `path` if there is one, and returns what was recorded.
    ///
    /// # Errors
    /// If libtorch cannot end it.
    pub fn stop(self, path: Option<&Path>) -> Result<Profile, TorchError> {
        let path = path.map(|path| CString::new(path.as_os_str().as_bytes()).unwrap_or_default());
        let path = path.as_ref().map_or(ptr::null(), |path| path.as_ptr());
        let mut profile = Profile::default();
        let visitor = sys::vt_profile_visitor {
            data: ptr::from_mut(&mut profile).cast(),
            event: note_event,
            activity: note_activity,
            memory: note_memory,
        };
        let mut left_out = 0;
        activities::record(Recorded::default());
        // SAFETY: path is null or a text that lives until the end of this function; the visitor's functions get `profile`,
        // which outlives the call and is used by nothing else meanwhile. It was started on this thread, since Self does not
        // leave it.
        let stopped = check("disableProfiler", unsafe {
            sys::vt_profile_stop(path, &raw const visitor, &raw mut left_out)
        });
        std::mem::forget(self);
        IS_RECORDING.store(false, Ordering::Release);
        profile.left_out = left_out;
        stopped.map(|()| profile)
    }
}

impl Drop for Kineto {
    fn drop(&mut self) {
        activities::record(Recorded::default());
        let mut left_out = 0;
        // SAFETY: it was started on this thread, since Self does not leave it; nothing is written or reported.
        let _ = check("disableProfiler", unsafe {
            sys::vt_profile_stop(ptr::null(), ptr::null(), &raw mut left_out)
        });
        IS_RECORDING.store(false, Ordering::Release);
    }
}

extern "C" fn note_event(data: *mut c_void, event: *const sys::vt_profile_event) {
    // SAFETY: C++ passes on the profile that `stop` lends, and an event whose texts live during this call.
    let (profile, event) = unsafe { (&mut *data.cast::<Profile>(), &*event) };
    profile.events.push(KinetoEvent {
        name: unescaped_name(&text(event.name)),
        shapes: text(event.shapes),
        start_ns: event.start_ns,
        duration_ns: event.duration_ns,
        thread: event.thread,
        flops: event.flops,
        bytes: event.bytes,
        scope: match event.scope {
            0 => EventScope::Operator,
            1 => EventScope::Backward,
            7 => EventScope::Range,
            _ => EventScope::Other,
        },
        device_type: event.device_type,
        system_thread: event.system_thread,
        id: event.id,
        is_in_trace: true,
    });
}

extern "C" fn note_activity(data: *mut c_void, activity: *const sys::vt_activity) {
    // SAFETY: as above.
    let (profile, activity) = unsafe { (&mut *data.cast::<Profile>(), &*activity) };
    if activity.row == sys::VT_ROW_RANGES {
        profile.events.push(KinetoEvent {
            name: unescaped_name(&text(activity.name)),
            shapes: String::new(),
            start_ns: activity.began,
            duration_ns: (activity.ended - activity.began).max(0),
            thread: activity.thread,
            flops: 0,
            bytes: 0,
            scope: EventScope::Range,
            device_type: 0,
            system_thread: activity.system_thread,
            id: 0,
            is_in_trace: false,
        });
        return;
    }
    profile.activities.push(Activity {
        name: text(activity.name),
        details: text(activity.details),
        launch_ns: activity.launched,
        start_ns: activity.began,
        duration_ns: (activity.ended - activity.began).max(0),
        row: match activity.row {
            sys::VT_ROW_COPIES => ActivityRow::Copies,
            sys::VT_ROW_GRAPHS => ActivityRow::Graphs,
            sys::VT_ROW_COLLECTIVES => ActivityRow::Collectives,
            sys::VT_ROW_KERNELS => ActivityRow::Kernels,
            _ => ActivityRow::Operators,
        },
        device: usize::try_from(activity.device).ok(),
        thread: activity.thread,
        system_thread: activity.system_thread,
    });
}

extern "C" fn note_memory(data: *mut c_void, change: *const sys::vt_memory_change) {
    // SAFETY: as above.
    let (profile, change) = unsafe { (&mut *data.cast::<Profile>(), &*change) };
    profile.memory.push(MemoryChange {
        at_ns: change.at,
        device: usize::try_from(change.pool - 1).ok(), // the host's pool is the first
        bytes: change.bytes,
        address: change.address,
        allocated: change.allocated,
        reserved: change.reserved,
        thread: change.thread,
        system_thread: change.system_thread,
    });
}

fn text(pointer: *const c_char) -> String {
    // SAFETY: the shim's texts end with 0 and live during the call.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

/// A range of this thread, in what libtorch's profiler records; it ends when dropped. Ranges are nested.
#[derive(Debug)]
#[must_use = "the range ends when this is dropped"]
pub struct ProfileRange {
    range: *mut c_void,
}

impl ProfileRange {
    /// Begins one; without effect if nothing records.
    ///
    /// # Errors
    /// If libtorch refuses.
    pub fn begin(name: &str) -> Result<Self, TorchError> {
        let name = CString::new(escaped(name)).unwrap_or_default();
        let mut range = ptr::null_mut();
        // SAFETY: name is a text that lives during the call; the out-pointer is on this stack.
        check("record_function", unsafe { sys::vt_profile_range_begin(name.as_ptr(), &mut range) })?;
        Ok(Self { range })
    }
}

/// Begins a name that is [`escaped`].
const ESCAPED: &str = "%%";

/// Kineto writes quotes as they are, so that its trace is no JSON, slashes for backslashes, and `unknown` for other
/// characters than those of ASCII: a name that has any goes through it as `%%`, with bytes such as `%22`.
fn escaped(name: &str) -> String {
    let is_plain = |byte: u8| (byte == b' ' || byte.is_ascii_graphic()) && byte != b'"' && byte != b'\\';
    if name.bytes().all(is_plain) && !name.starts_with(ESCAPED) {
        return name.to_owned();
    }
    let mut escaped = ESCAPED.to_owned();
    for byte in name.bytes() {
        match byte {
            b'%' => escaped += "%25",
            byte if is_plain(byte) => escaped.push(char::from(byte)),
            byte => escaped += &format!("%{byte:02x}"),
        }
    }
    escaped
}

/// The name of a range, as the program gave it, from what libtorch's trace has.
pub fn unescaped_name(name: &str) -> String {
    let Some(escaped) = name.strip_prefix(ESCAPED) else { return name.to_owned() };
    let mut bytes = Vec::with_capacity(escaped.len());
    let mut rest = escaped.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let code = (byte == b'%').then(|| after.get(..2)).flatten();
        let code = code.and_then(|code| u8::from_str_radix(std::str::from_utf8(code).ok()?, 16).ok());
        bytes.push(code.unwrap_or(byte));
        rest = if code.is_some() { &after[2..] } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Drop for ProfileRange {
    fn drop(&mut self) {
        // SAFETY: it came from begin, on this thread (the pointer makes Self !Send), and is freed once.
        unsafe { sys::vt_profile_range_end(self.range) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_kineto() {
        for name in ["plain 50%", "a \"b\"\n\\ c\0", "ä中🦀 100%", "%%", "</script>", ""] {
            let escaped = escaped(name);
            let is_harmless = |byte: u8| byte == b' ' || byte.is_ascii_graphic();
            assert!(escaped.bytes().all(is_harmless) && !escaped.contains(['"', '\\']), "{escaped}");
            assert_eq!(unescaped_name(&escaped), name);
        }
        assert_eq!(unescaped_name("%%a%"), "a%");
    }
}
