//! Raw memory from the system: mapped pages for big blocks, the system allocator for the rest.

use std::alloc::Layout;
use std::ptr::{self, NonNull};

use super::size_class::{BIG_BLOCK, MIN_BLOCK};

/// Size of the pages that the kernel prefers for large maps on x86-64.
const HUGE_PAGE: usize = 2 << 20;

/// Which system call gave a piece of memory, and so which one takes it back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Origin {
    /// The system allocator.
    Heap,
    /// Pages mapped for this piece alone.
    Map,
}

impl Origin {
    /// Where a pool that caches takes `bytes` from.
    pub(super) fn of(bytes: usize) -> Self {
        if bytes >= BIG_BLOCK { Self::Map } else { Self::Heap }
    }

    /// Memory of `bytes`, aligned to [`MIN_BLOCK`], with any content. None if the system has no more.
    pub(super) fn allocate(self, bytes: usize) -> Option<NonNull<u8>> {
        match self {
            Self::Heap => {
                let layout = Layout::from_size_align(bytes, MIN_BLOCK).ok()?;
                // SAFETY: the layout's size is not zero, since every block has a header.
                NonNull::new(unsafe { std::alloc::alloc(layout) })
            }
            Self::Map => map(bytes),
        }
    }

    /// Gives memory back to the system.
    ///
    /// # Safety
    /// `memory` came from `allocate(bytes)` of the same origin, and nothing refers to it any more.
    pub(super) unsafe fn release(self, memory: NonNull<u8>, bytes: usize) {
        match self {
            // SAFETY: `allocate` used the same size and alignment and found them valid; the caller vouches for
            // the rest.
            Self::Heap => unsafe {
                std::alloc::dealloc(memory.as_ptr(), Layout::from_size_align_unchecked(bytes, MIN_BLOCK));
            },
            // SAFETY: the whole map is unmapped, and the caller vouches that nothing refers to it.
            Self::Map => unsafe {
                libc::munmap(memory.as_ptr().cast(), bytes);
            },
        }
    }
}

fn map(bytes: usize) -> Option<NonNull<u8>> {
    // SAFETY: an anonymous map at an address of the kernel's choice touches no existing memory.
    let memory = unsafe {
        libc::mmap(
            ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if memory == libc::MAP_FAILED {
        return None;
    }
    if bytes >= HUGE_PAGE {
        // SAFETY: the range is the map just made. A kernel without huge pages refuses, which changes nothing.
        unsafe { libc::madvise(memory, bytes, libc::MADV_HUGEPAGE) };
    }
    NonNull::new(memory.cast())
}

/// Seconds of a clock that never goes back, to within a few milliseconds.
pub(super) fn monotonic_secs() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the out-pointer is a valid timespec; a clock that is missing leaves it at zero.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &mut now) };
    now.tv_sec as u64
}
