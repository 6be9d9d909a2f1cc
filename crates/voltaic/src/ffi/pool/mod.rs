//! A caching memory pool: blocks that come back are kept and handed out again.
//!
//! Owns the memory between the system and libtorch. What is kept, and for how long, is decided in `policy`;
//! this file follows pointers. Each block lies behind a [`Header`] that names its pool, so that any thread can
//! release a block without knowing where it came from. A pool is never dropped: tensors in static variables may
//! be freed after `main`.
//!
//! The lock is held for a few instructions only: system calls are made outside it.

mod lock;
mod policy;
mod system;

use std::ffi::c_void;
use std::mem;
use std::ptr::{self, NonNull};

use lock::{SpinGuard, SpinLock};
use policy::{Ledger, NUM_CLASSES, SizeClass, Source};
pub use policy::{PeakReset, PoolStats};
use system::Origin;
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

/// What the lock protects.
struct Books {
    ledger: Ledger,
    /// First free block of each class; the others follow through `next_free`.
    free: [*mut Header; NUM_CLASSES],
}

// SAFETY: the pointers lead to headers of free blocks, which only the pool refers to; moving them to another
// thread moves the right to use them.
unsafe impl Send for Books {}

impl Books {
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
        // SAFETY: the caller vouches for the header; nobody else refers to a free block.
        unsafe { (*header.as_ptr()).next_free = *first };
        *first = header.as_ptr();
    }

    /// Moves a free block of `class` to `discarded`. False if there is none.
    fn discard(&mut self, class: SizeClass, discarded: &mut Discarded) -> bool {
        if !self.ledger.give_back(class) {
            return false;
        }
        // SAFETY: the ledger had counted a free block of this class.
        let header = unsafe { self.pop(class) };
        discarded.add(header);
        true
    }

    /// Takes what must not stay cached off the lists, after a block of class `last` came back.
    #[inline]
    fn discard_surplus(&mut self, last: SizeClass) -> Discarded {
        let mut discarded = Discarded::default();
        if !self.ledger.is_caching() {
            self.discard(last, &mut discarded);
        }
        while let Some(class) = self.ledger.over_cap() {
            self.discard(class, &mut discarded);
        }
        if self.ledger.wants_clock() {
            self.end_window(system::monotonic_secs(), &mut discarded);
        }
        discarded
    }

    fn end_window(&mut self, now_secs: u64, discarded: &mut Discarded) {
        if !self.ledger.window_ends(now_secs) {
            return;
        }
        for class in SizeClass::all().rev() {
            while self.ledger.idle(class) > 0 && self.discard(class, discarded) {}
        }
        self.ledger.start_window(now_secs);
    }
}

/// Blocks on their way back to the system, so that the lock need not be held while the system works.
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

    /// Gives the blocks to the system; how many bytes they were.
    #[inline]
    fn release(self, pool: &Pool) -> usize {
        let mut next = self.first;
        while let Some(header) = NonNull::new(next) {
            // SAFETY: `add` got headers that nobody else refers to; each is read before its memory goes.
            unsafe {
                let Header { shared: vt_block_header { twin, .. }, next_free, class, origin, .. } =
                    header.read();
                if let (Some(drop_twin), false) = (pool.drop_twin, twin.is_null()) {
                    drop_twin(twin);
                }
                origin.release(header.cast(), HEADER_BYTES + class.size());
                next = next_free;
            }
        }
        self.bytes
    }
}

/// A caching memory pool, for one device or for the host.
///
/// It hands out blocks aligned to 64 bytes. All methods may be called from any thread.
pub struct Pool {
    id: i32,
    drop_twin: Option<fn(*mut c_void)>,
    books: SpinLock<Books>,
}

impl Pool {
    /// An empty pool that takes at most `limit` bytes from the system. `id` is what the shim knows it by.
    pub const fn new(id: i32, limit: Option<usize>) -> Self {
        let books = Books { ledger: Ledger::new(limit), free: [ptr::null_mut(); NUM_CLASSES] };
        Self { id, drop_twin: None, books: SpinLock::new(books) }
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
        let mut books = self.books.lock();
        match books.ledger.take(class) {
            // SAFETY: the ledger has just counted a free block of this class as taken.
            Source::Cached(found) => Some(unsafe { books.pop(found) }),
            Source::System => self.take_from_system(class, books),
            Source::Refused => None,
        }
    }

    #[cold]
    fn take_after_trim(&'static self, class: SizeClass) -> Option<NonNull<Header>> {
        if self.trim() == 0 {
            return None;
        }
        self.take(class)
    }

    #[cold]
    fn take_from_system(
        &'static self,
        class: SizeClass,
        books: SpinGuard<'_, Books>,
    ) -> Option<NonNull<Header>> {
        // without caching, libtorch's own way of getting memory: the heap, whatever the size
        let origin = if books.ledger.is_caching() { Origin::of(class.size()) } else { Origin::Heap };
        drop(books);
        let memory = origin.allocate(HEADER_BYTES + class.size());
        let mut books = self.books.lock();
        let Some(memory) = memory else {
            books.ledger.cancel(class);
            return None;
        };
        books.ledger.commit(class);
        let header = memory.cast::<Header>();
        let blank = Header {
            shared: vt_block_header { twin: ptr::null_mut(), pool: self.id, magic: VT_BLOCK_MAGIC },
            pool: self,
            next_free: ptr::null_mut(),
            requested: 0,
            class,
            origin,
        };
        // SAFETY: the memory is fresh, large enough, and aligned to 64 bytes as Header is.
        unsafe { header.write(blank) };
        Some(header)
    }

    /// Gives a block back to the pool it came from.
    ///
    /// # Safety
    /// `block` came from [`Pool::allocate`] of any pool, was not released since, and nothing refers to it.
    #[inline]
    pub unsafe fn release(block: NonNull<u8>) {
        // SAFETY: the caller vouches that a live header lies before the block.
        let header = unsafe { NonNull::new_unchecked(Header::of(block)) };
        // SAFETY: as above; the block is still handed out, so nobody writes to its header meanwhile.
        let (pool, class) = unsafe { (header.as_ref().pool, header.as_ref().class) };
        let mut books = pool.books.lock();
        books.ledger.put(class);
        // SAFETY: the header is alive, it names this pool, and the caller gives the block up.
        unsafe { books.push(header, class) };
        let surplus = books.discard_surplus(class);
        drop(books);
        surplus.release(pool);
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
        self.books.lock().ledger.stats()
    }

    /// Gives all cached blocks back to the system. Returns how many bytes they were.
    pub fn trim(&self) -> usize {
        let mut discarded = Discarded::default();
        let mut books = self.books.lock();
        for class in SizeClass::all() {
            while books.discard(class, &mut discarded) {}
        }
        drop(books);
        discarded.release(self)
    }

    /// Starts the statistics of the highest use again. What stays cached does not depend on them.
    pub fn reset_peaks(&self, reset: PeakReset) {
        self.books.lock().ledger.reset_peaks(reset);
    }

    /// Changes the limit. Blocks that are in use stay, even above it.
    pub fn set_limit(&self, limit: Option<usize>) {
        self.books.lock().ledger.set_limit(limit);
    }

    /// Whether blocks are kept when they come back. Off, each allocation asks the system, as libtorch's own
    /// allocator does; this is for measuring what the pool gains.
    pub fn set_caching(&self, caching: bool) {
        self.books.lock().ledger.set_caching(caching);
        if !caching {
            self.trim();
        }
    }

    /// Holds the pool still while the process forks.
    pub(super) fn before_fork(&self) {
        mem::forget(self.books.lock());
    }

    /// Lets the pool go on, in the parent and in the child.
    ///
    /// # Safety
    /// [`Pool::before_fork`] ran before, once for each process that calls this.
    pub(super) unsafe fn after_fork(&self) {
        // SAFETY: before_fork has forgotten the guard, in the thread that forked; the child is a copy of it.
        unsafe { self.books.unlock() };
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
