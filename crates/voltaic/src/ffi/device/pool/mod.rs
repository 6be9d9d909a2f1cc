//! A caching memory pool: blocks that come back are kept and handed out again.
//!
//! Owns the memory between the system and libtorch. `policy` decides what is kept, and for how long; `pages` has the free pages;
//! `host_memory` says how much memory there is. This file follows pointers. Each block lies behind a [`Header`] that names its pool, so
//! that any thread can release any block. A pool is never dropped: tensors in static variables may be freed after `main`.
//!
//! The lock is held for a few instructions only: system calls are made outside it.

mod lock;
mod pages;
mod policy;
mod size_class;
mod system;

use std::ffi::c_void;
use std::mem;
use std::ops::Range;
use std::ptr::{self, NonNull};

use lock::{SpinGuard, SpinLock};
use pages::{Pages, whole_pages};
use policy::Ledger;
pub use policy::{PeakReset, PoolStats};
use size_class::{NUM_CLASSES, SizeClass};
use system::Origin;

use crate::ffi::device::host_memory;
use voltaic_sys::{VT_BLOCK_HEADER_BYTES, VT_BLOCK_MAGIC, vt_block_header};

/// Lies right before each block.
#[repr(C, align(64))]
struct Header {
    /// What the shim reads and writes: the pool's number, and whatever a device keeps with the block for as long as
    /// it is not given back to the system.
    shared: vt_block_header,
    pool: &'static Pool,
    next_free: *mut Header,
    requested: usize,
    class: SizeClass,
    origin: Origin,
}

const _: () = assert!(size_of::<Header>() == HEADER_BYTES);
const HEADER_BYTES: usize = VT_BLOCK_HEADER_BYTES;

impl Header {
    fn of(block: NonNull<u8>) -> *mut Self {
        block.as_ptr().wrapping_sub(HEADER_BYTES).cast()
    }

    fn block(header: NonNull<Self>) -> NonNull<u8> {
        // SAFETY: every header was placed at the start of a piece of memory of HEADER_BYTES + a block's size.
        unsafe { header.cast::<u8>().add(HEADER_BYTES) }
    }
}

/// Bytes of the pages that a block of mapped pages takes, its header included.
fn pages_of(class: SizeClass) -> usize {
    whole_pages(HEADER_BYTES + class.size())
}

/// The data that the lock protects.
struct PoolState {
    ledger: Ledger,
    /// First free block of each class; the others follow through `next_free`.
    free: [*mut Header; NUM_CLASSES],
    /// Mapped pages that are in no block.
    pages: Pages,
}

// SAFETY: the pointers lead to headers of free blocks, which only the pool refers to; moving them to another
// thread moves the right to use them.
unsafe impl Send for PoolState {}

impl PoolState {
    /// Takes a free block off its list. The ledger has already counted it as gone from there.
    ///
    /// # Safety
    /// The ledger counted at least one free block of `class`.
    unsafe fn pop(&mut self, class: SizeClass) -> NonNull<Header> {
        let first = &mut self.free[class.index()];
        // SAFETY: ledger and lists change together under one lock, so the list is not empty; its headers are
        // alive, since blocks leave it before they are given back.
        unsafe {
            let header = NonNull::new_unchecked(*first);
            *first = header.as_ref().next_free;
            header
        }
    }

    /// # Safety
    /// `header` is alive, belongs to this pool, and its block is free.
    unsafe fn push(&mut self, header: NonNull<Header>, class: SizeClass) {
        let first = &mut self.free[class.index()];
        // SAFETY: the caller vouches for the header; a free block has no other reference.
        unsafe { (*header.as_ptr()).next_free = *first };
        *first = header.as_ptr();
    }

    /// Moves a free block of `class` to `discarded`. False if there is none.
    fn discard(&mut self, class: SizeClass, discarded: &mut Discarded) -> bool {
        if !self.ledger.discard(class) {
            return false;
        }
        // SAFETY: the ledger had counted a free block of this class.
        let header = unsafe { self.pop(class) };
        discarded.add(header);
        true
    }

    /// Discards blocks that were needed longest ago, of `bytes` or a little more; of mapped pages only if `are_big`.
    /// None if there are no such blocks.
    fn discard_oldest(&mut self, bytes: usize, are_big: bool) -> Option<Discarded> {
        let mut discarded = Discarded::default();
        while discarded.bytes < bytes
            && let Some(class) = self.ledger.oldest(are_big)
        {
            while discarded.bytes < bytes && self.discard(class, &mut discarded) {}
        }
        (discarded.bytes > 0).then_some(discarded)
    }

    /// A block cut from the free pages, counted as in use, with a header that is yet to be written.
    fn cut(&mut self, class: SizeClass) -> Option<NonNull<Header>> {
        let address = self.pages.cut(pages_of(class))?;
        self.ledger.cut(class, pages_of(class));
        NonNull::new(ptr::with_exposed_provenance_mut(address))
    }

    /// Free pages to be returned to the system, of `bytes` or a little more if there are as many next to each other.
    fn discard_pages(&mut self, bytes: usize) -> Option<Range<usize>> {
        let range = self.pages.give_back(bytes)?;
        self.ledger.gave_pages_back(range.len());
        Some(range)
    }

    /// Blocks and pages that stayed unused in the window that ends, if one does.
    fn end_window(&mut self, now_secs: u64, is_tight: bool) -> (Discarded, Vec<Range<usize>>) {
        let (mut discarded, mut ranges) = (Discarded::default(), Vec::new());
        if !self.ledger.window_ends(now_secs, is_tight) {
            return (discarded, ranges);
        }
        let mut idle = self.ledger.idle_pages(is_tight);
        while idle > 0
            && let Some(range) = self.discard_pages(idle)
        {
            idle = idle.saturating_sub(range.len());
            ranges.push(range);
        }
        for class in SizeClass::all().rev() {
            while self.ledger.idle(class, is_tight) > 0 && self.discard(class, &mut discarded) {
                self.ledger.gave_back(class);
            }
        }
        self.ledger.start_window(now_secs);
        (discarded, ranges)
    }
}

/// Gives free pages to the system.
fn release_pages(range: Range<usize>) {
    if let Some(start) = NonNull::new(ptr::with_exposed_provenance_mut(range.start)) {
        // SAFETY: free pages come from blocks that were mapped and have no references; those that left the lists
        // are this call's alone.
        unsafe { Origin::Map.release(start, range.len()) };
        host_memory::gave(range.len());
    }
}

/// Blocks that leave a pool: collected under the lock, and freed without it.
#[must_use]
struct Discarded {
    first: *mut Header,
    bytes: usize,
}

impl Default for Discarded {
    fn default() -> Self {
        Self { first: ptr::null_mut(), bytes: 0 }
    }
}

impl Discarded {
    fn add(&mut self, header: NonNull<Header>) {
        // SAFETY: callers pass a header that they have just taken off a free list: alive, and theirs alone.
        unsafe {
            (*header.as_ptr()).next_free = self.first;
            self.bytes += header.as_ref().class.size();
        }
        self.first = header.as_ptr();
    }

    /// Calls `take` with each block's memory, where it came from, and its class, after its twin was dropped.
    fn for_each(self, pool: &Pool, mut take: impl FnMut(NonNull<u8>, Origin, SizeClass)) {
        let mut next = self.first;
        while let Some(header) = NonNull::new(next) {
            // SAFETY: `add` got headers without other references; each is read before its memory is freed.
            let Header { shared: vt_block_header { twin, .. }, next_free, class, origin, .. } =
                unsafe { header.read() };
            if let (Some(drop_twin), false) = (pool.drop_twin, twin.is_null()) {
                drop_twin(twin);
            }
            take(header.cast(), origin, class);
            next = next_free;
        }
    }

    /// Gives the blocks to the system. The ledger has counted them already.
    #[inline]
    fn release(self, pool: &Pool) {
        // SAFETY: there are no references to blocks that were discarded, and each is of its class.
        self.for_each(pool, |memory, origin, class| unsafe { release_block(memory, origin, class) });
    }

    /// Makes free pages of the blocks; those from the heap go back there.
    fn dissolve(self, pool: &Pool) {
        self.for_each(pool, |memory, origin, class| match origin {
            Origin::Map => {
                let start = memory.as_ptr().expose_provenance();
                let mut state = pool.state.lock();
                state.pages.insert(start..start + pages_of(class));
                state.ledger.dissolved(class, pages_of(class));
            }
            Origin::Heap => {
                pool.state.lock().ledger.gave_back(class);
                // SAFETY: as in `release`.
                unsafe { release_block(memory, origin, class) };
            }
        });
    }
}

/// # Safety
/// `memory` is a block of `class` with its header, from `origin`, without references.
unsafe fn release_block(memory: NonNull<u8>, origin: Origin, class: SizeClass) {
    let bytes = bytes_from(origin, class);
    // SAFETY: `take_from_system` and `cut` ask for as much.
    unsafe { origin.release(memory, bytes) };
    host_memory::gave(bytes);
}

/// What a block of `class` takes, its header included.
fn bytes_from(origin: Origin, class: SizeClass) -> usize {
    match origin {
        Origin::Heap => HEADER_BYTES + class.size(),
        Origin::Map => pages_of(class),
    }
}

/// A caching memory pool, for one device or for the host.
///
/// It hands out blocks aligned to 64 bytes. All methods may be called from any thread.
pub struct Pool {
    id: i32,
    drop_twin: Option<fn(*mut c_void)>,
    state: SpinLock<PoolState>,
}

impl Pool {
    /// An empty pool that takes at most `limit` bytes from the system. `id` is its number in the shim.
    pub const fn new(id: i32, limit: Option<usize>) -> Self {
        let (ledger, free) = (Ledger::new(limit), [ptr::null_mut(); NUM_CLASSES]);
        let state = PoolState { ledger, free, pages: Pages::new() };
        Self { id, drop_twin: None, state: SpinLock::new(state) }
    }

    /// The same pool, calling `drop_twin` with a block's twin (see [`Pool::twin_of`]) when the block goes back to
    /// the system.
    pub const fn with_drop_twin(mut self, drop_twin: fn(*mut c_void)) -> Self {
        self.drop_twin = Some(drop_twin);
        self
    }

    /// The number given to [`Pool::new`].
    pub fn id(&self) -> i32 {
        self.id
    }

    /// Bytes of the block that serves a request; none above 64 TiB.
    pub(crate) fn block_bytes(bytes: usize) -> Option<usize> {
        SizeClass::of(bytes).map(SizeClass::size)
    }

    /// A block of at least `bytes`, with any content. None if the limit or the system does not allow it, even
    /// after the cached blocks were given back; the counters are then as before.
    #[inline]
    pub fn allocate(&'static self, bytes: usize) -> Option<NonNull<u8>> {
        let class = SizeClass::of(bytes)?;
        let header = self.take(class).or_else(|| self.take_after_trim(class))?;
        // SAFETY: a header that was just taken is this call's alone until it returns the block.
        unsafe {
            (*header.as_ptr()).requested = bytes;
            // a graph that kept the block has left another number there
            (*header.as_ptr()).shared.magic = VT_BLOCK_MAGIC;
        }
        Some(Header::block(header))
    }

    /// A block that goes back when it is dropped. None as for [`Pool::allocate`].
    pub fn block(&'static self, bytes: usize) -> Option<PoolBlock> {
        self.allocate(bytes).map(|block| PoolBlock { block })
    }

    #[inline]
    fn take(&'static self, class: SizeClass) -> Option<NonNull<Header>> {
        let mut state = self.state.lock();
        match state.ledger.take(class) {
            // SAFETY: the ledger has just counted a free block of this class as taken.
            Some(found) => Some(unsafe { state.pop(found) }),
            None => self.make(class, state),
        }
    }

    /// A block that was not cached: cut from free pages, or from the system once what is too much went back.
    #[cold]
    fn make<'a>(
        &'static self,
        class: SizeClass,
        mut state: SpinGuard<'a, PoolState>,
    ) -> Option<NonNull<Header>> {
        loop {
            let is_big = class.is_big() && state.ledger.is_caching();
            if is_big && let Some(header) = state.cut(class) {
                drop(state);
                self.write_header(header, class, Origin::Map);
                return Some(header);
            }
            let excess = state.ledger.excess(class);
            if excess == 0 {
                return self.take_from_system(class, state);
            }
            // a big block may fit into what others leave; a small one is nowhere but on the heap
            if is_big && let Some(discarded) = state.discard_oldest(class.size(), true) {
                drop(state);
                discarded.dissolve(self);
            } else if let Some(range) = state.discard_pages(excess) {
                drop(state);
                release_pages(range);
            } else if let Some(discarded) = state.discard_oldest(excess, false) {
                drop(state);
                discarded.dissolve(self);
            } else {
                return None; // the limit
            }
            state = self.state.lock();
        }
    }

    #[cold]
    fn take_after_trim(&'static self, class: SizeClass) -> Option<NonNull<Header>> {
        if self.trim() + host_memory::relieve() == 0 {
            return None;
        }
        self.take(class)
    }

    #[cold]
    fn take_from_system(
        &'static self,
        class: SizeClass,
        mut state: SpinGuard<'_, PoolState>,
    ) -> Option<NonNull<Header>> {
        state.ledger.reserve(class);
        // without caching, libtorch's own way of getting memory: the heap, whatever the size
        let origin = if state.ledger.is_caching() { Origin::of(class.size()) } else { Origin::Heap };
        drop(state);
        let bytes = bytes_from(origin, class);
        let memory = if host_memory::admits(bytes) { origin.allocate(bytes) } else { None };
        let mut state = self.state.lock();
        let Some(memory) = memory else {
            state.ledger.cancel(class);
            return None;
        };
        state.ledger.commit(class);
        drop(state);
        host_memory::took(bytes);
        let header = memory.cast::<Header>();
        self.write_header(header, class, origin);
        Some(header)
    }

    /// Writes the header of a block that was just made.
    fn write_header(&'static self, header: NonNull<Header>, class: SizeClass, origin: Origin) {
        let blank = Header {
            shared: vt_block_header { twin: ptr::null_mut(), pool: self.id, magic: VT_BLOCK_MAGIC },
            pool: self,
            next_free: ptr::null_mut(),
            requested: 0,
            class,
            origin,
        };
        // SAFETY: callers have just got the memory, large enough for a block with its header, and aligned to 64 bytes as
        // Header is.
        unsafe { header.write(blank) };
    }

    /// Gives a block back to the pool it came from.
    ///
    /// # Safety
    /// `block` came from [`Pool::allocate`] of any pool, was not released since, and nothing refers to it.
    #[inline]
    pub unsafe fn release(block: NonNull<u8>) {
        // SAFETY: the caller vouches that a live header lies before the block.
        let header = unsafe { NonNull::new_unchecked(Header::of(block)) };
        // SAFETY: as above; the block is still handed out, so its header is not written to meanwhile.
        let (pool, class) = unsafe { (header.as_ref().pool, header.as_ref().class) };
        let mut state = pool.state.lock();
        state.ledger.put(class);
        // SAFETY: the header is alive, it names this pool, and the caller gives the block up.
        unsafe { state.push(header, class) };
        let (is_caching, wants_clock) = (state.ledger.is_caching(), state.ledger.wants_clock());
        if !is_caching {
            let mut discarded = Discarded::default();
            if state.discard(class, &mut discarded) {
                state.ledger.gave_back(class);
            }
            drop(state);
            discarded.release(pool);
        } else if wants_clock {
            drop(state);
            pool.end_window(system::monotonic_secs());
        }
    }

    /// Gives back memory that stayed unused in the window, if it ends.
    #[cold]
    fn end_window(&self, now_secs: u64) {
        let is_tight = host_memory::is_tight(now_secs);
        let (discarded, ranges) = self.state.lock().end_window(now_secs, is_tight);
        discarded.release(self);
        ranges.into_iter().for_each(release_pages);
    }

    /// The pool that `block` came from.
    ///
    /// # Safety
    /// `block` came from [`Pool::allocate`] of any pool and was not released since.
    pub unsafe fn of(block: NonNull<u8>) -> &'static Self {
        // SAFETY: the caller vouches that a live header lies before the block.
        unsafe { (*Header::of(block)).pool }
    }

    /// How many bytes were asked for when `block` was allocated.
    ///
    /// # Safety
    /// `block` came from [`Pool::allocate`] of any pool and was not released since.
    pub unsafe fn requested_bytes(block: NonNull<u8>) -> usize {
        // SAFETY: the caller vouches that a live header lies before the block.
        unsafe { (*Header::of(block)).requested }
    }

    /// The place for a pointer that stays with the block through releases and allocations, null at first.
    ///
    /// # Safety
    /// `block` came from [`Pool::allocate`] of any pool and was not released since; the place may be used until
    /// it is.
    pub unsafe fn twin_of(block: NonNull<u8>) -> NonNull<*mut c_void> {
        // SAFETY: the caller vouches that a live header lies before the block.
        unsafe { NonNull::from(&mut (*Header::of(block)).shared.twin) }
    }

    /// What the pool has done and holds.
    pub fn stats(&self) -> PoolStats {
        self.state.lock().ledger.stats()
    }

    /// Gives all cached memory back to the system. Returns how many bytes it was.
    pub fn trim(&self) -> usize {
        let before = self.stats().reserved;
        let mut state = self.state.lock();
        while let Some(discarded) = state.discard_oldest(usize::MAX, false) {
            drop(state);
            discarded.dissolve(self);
            state = self.state.lock();
        }
        loop {
            let bytes = state.pages.bytes();
            let Some(range) = state.discard_pages(bytes) else { break };
            drop(state);
            release_pages(range);
            state = self.state.lock();
        }
        before.saturating_sub(state.ledger.stats().reserved)
    }

    /// Starts the statistics of the highest use again. What stays cached does not depend on them.
    pub fn reset_peaks(&self, reset: PeakReset) {
        self.state.lock().ledger.reset_peaks(reset);
    }

    /// Changes the limit. Blocks that are in use stay, even above it.
    pub fn set_limit(&self, limit: Option<usize>) {
        self.state.lock().ledger.set_limit(limit);
    }

    /// Whether blocks are kept when they come back. Off, each allocation asks the system, as libtorch's own
    /// allocator does; this is for measuring what the pool gains.
    pub fn set_caching(&self, caching: bool) {
        self.state.lock().ledger.set_caching(caching);
        if !caching {
            self.trim();
        }
    }

    /// Holds the pool still while the process forks.
    pub(super) fn before_fork(&self) {
        host_memory::read_setting();
        mem::forget(self.state.lock());
    }

    /// Unlocks the pool after a fork, in the parent and in the child.
    ///
    /// # Safety
    /// [`Pool::before_fork`] ran before, once for each process that calls this.
    pub(super) unsafe fn after_fork(&self) {
        // SAFETY: before_fork has forgotten the guard, in the thread that forked; the child is a copy of it.
        unsafe { self.state.unlock() };
    }
}

/// A block of a [`Pool`], with any content.
#[derive(Debug)]
pub struct PoolBlock {
    block: NonNull<u8>,
}

impl Drop for PoolBlock {
    fn drop(&mut self) {
        // SAFETY: the block came from a pool, and this is its only owner.
        unsafe { Pool::release(self.block) }
    }
}

#[cfg(test)]
mod tests;
