//! What kernels need from the program that has them.

use std::any::Any;
use std::ffi::{CStr, c_void};
use std::fmt;
use std::sync::OnceLock;

/// Functions of the program that kernels call.
#[derive(Debug, Clone, Copy)]
pub struct Host {
    /// How many threads an operator may use that is called from this thread.
    pub num_threads: fn() -> usize,
    /// Memory for so many numbers; none if there is none left.
    pub memory: fn(usize) -> Option<Memory>,
}

static HOST: OnceLock<Host> = OnceLock::new();

/// One thread, and memory of the heap.
static ALONE: Host = Host { num_threads: || 1, memory: Memory::of_heap };

impl Default for Host {
    /// One thread, and memory of the heap.
    fn default() -> Self {
        ALONE
    }
}

/// Names the program that has the kernels, for the rest of the process; the first one stays. Without one, kernels use one
/// thread, and memory of the heap.
pub fn set_host(host: Host) {
    HOST.get_or_init(|| host);
}

pub(crate) fn host() -> &'static Host {
    HOST.get().unwrap_or(&ALONE)
}

/// Memory for so many numbers; none if there is none left.
pub(crate) fn memory(len: usize) -> Option<Memory> {
    (host().memory)(len)
}

/// Numbers that a kernel works in, whatever they are. They go back when this is dropped.
pub struct Memory {
    start: *mut f32,
    owner: Box<dyn Any>,
}

impl Memory {
    /// Numbers from `start` on, which are there until `owner` is dropped.
    pub fn new(start: *mut f32, owner: Box<dyn Any>) -> Self {
        Self { start, owner }
    }

    /// Memory of the heap.
    pub fn of_heap(len: usize) -> Option<Self> {
        let mut numbers = Vec::<f32>::new();
        numbers.try_reserve_exact(len).ok()?;
        Some(Self::new(numbers.as_mut_ptr(), Box::new(numbers)))
    }

    /// The address of the first one.
    pub(crate) fn start(&self) -> *mut f32 {
        self.start
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("start", &self.start).field("owner", &self.owner).finish()
    }
}

/// A function of the libraries that are loaded, if one of them has it.
pub fn loaded_symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: dlsym only looks the symbol up.
    let symbol = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!symbol.is_null()).then_some(symbol)
}
