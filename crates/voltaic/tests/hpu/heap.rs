//! Counts what Rust code takes from the heap.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local!(static ALLOCS: Cell<u64> = const { Cell::new(0) });

// SAFETY: every call goes to the system's allocator as it came; the counter is a plain thread-local integer, whose
// access allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // a thread that ends has no counter left, and its last allocations do not matter
        let _ = ALLOCS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promises are those that the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: `block` came from the system's allocator with this layout, through `alloc` above.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static HEAP: Counting = Counting;

/// How often this thread took a block so far.
pub fn allocs() -> u64 {
    ALLOCS.get()
}
