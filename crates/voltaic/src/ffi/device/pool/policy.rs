//! What a memory pool decides: what may be kept, what goes back to the system.
//!
//! Plain arithmetic on counts, without pointers or threads; `super` owns the memory and does what is decided
//! here. Four rules bound what a pool costs beyond what is in use:
//!
//! - A block is at most 25 % larger than asked for below 1 MiB (4 sizes per power of two) and at most 12.5 %
//!   from there on (16 sizes per power of two, and the next size is taken too when the exact one is not cached).
//! - A pool takes no more from the system than the highest use of late and an eighth, or [`CACHE_FLOOR`] if that is more.
//!   When it would, cached blocks of other sizes, those that were needed longest ago first, become free pages, from which
//!   the block is cut; what still does not fit goes back to the system before more is taken.
//! - Blocks and pages that were not used for a whole [`IDLE_SECS`] window go back at its end, as long as more than
//!   [`CACHE_FLOOR`] is cached. So the memory of a phase with other shapes is not kept for ever.
//! - When memory runs short (see `host_memory`), windows are [`TIGHT_SECS`] long and nothing that is idle is kept.

#![forbid(unsafe_code)]

use std::fmt;

use super::size_class::{NUM_CLASSES, SizeClass};

/// So many cached bytes are kept without looking closer.
pub(super) const CACHE_FLOOR: usize = 64 << 20;
/// Of the highest use, what a pool may have beside it: one part in so many.
const SLACK: usize = 8;
/// Length of the window after which unneeded blocks go back, in seconds.
pub(super) const IDLE_SECS: u64 = 30;
/// The same when memory runs short.
pub(super) const TIGHT_SECS: u64 = 1;
/// The clock is read once in so many frees.
const FREES_PER_CLOCK_READ: u64 = 256;

/// What a pool has done and holds. Sizes are those of the blocks, which are a little larger than what was asked
/// for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolStats {
    /// Most bytes the pool may take from the system; none if it has no limit.
    pub limit: Option<usize>,
    /// Bytes in blocks that are handed out.
    pub in_use: usize,
    /// Highest value of `in_use` so far, or since [`Pool::reset_peaks`](super::Pool::reset_peaks).
    pub max_in_use: usize,
    /// Bytes taken from the system: in use or cached.
    pub reserved: usize,
    /// Blocks handed out so far.
    pub num_allocs: u64,
    /// Blocks that came back so far.
    pub num_frees: u64,
    /// Bytes of the largest block handed out so far, or since [`PeakReset::Current`].
    pub max_alloc_size: usize,
    /// How often memory was taken from the system.
    pub total_system_allocs: u64,
    /// How often memory was given back to the system: a block, or pages of several.
    pub total_system_frees: u64,
}

impl PoolStats {
    /// Blocks that are handed out now.
    pub fn active_allocs(&self) -> u64 {
        self.num_allocs - self.num_frees
    }

    /// Bytes kept for reuse.
    pub fn cached(&self) -> usize {
        self.reserved - self.in_use
    }
}

impl fmt::Display for PoolStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "in use {}, reserved {}, limit ", self.in_use, self.reserved)?;
        match self.limit {
            Some(limit) => write!(f, "{limit}"),
            None => f.write_str("none"),
        }
    }
}

/// What [`Pool::reset_peaks`](super::Pool::reset_peaks) starts again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeakReset {
    /// `max_in_use` becomes 0 until the next allocation.
    Zero,
    /// `max_in_use` becomes `in_use`, and `max_alloc_size` 0.
    Current,
}

/// Counts of the free blocks of one class.
#[derive(Clone, Copy)]
struct FreeList {
    cached: u32,
    /// Fewest that were cached at any moment of the window: so many were not needed.
    idle: u32,
    /// How many allocations the pool had had when one was needed last.
    needed: u64,
}

/// The accounting of one pool: what is handed out, what is cached, and what may stay cached.
pub(super) struct Ledger {
    stats: PoolStats,
    /// Highest use in this window and in the one before, which decides what may stay cached.
    highest_use: [usize; 2],
    free_lists: [FreeList; NUM_CLASSES],
    /// Bytes of free pages, and the fewest of the window.
    free_pages: usize,
    idle_pages: usize,
    window_start_secs: u64,
    caching: bool,
}

impl Ledger {
    pub(super) const fn new(limit: Option<usize>) -> Self {
        let stats = PoolStats {
            limit,
            in_use: 0,
            max_in_use: 0,
            reserved: 0,
            num_allocs: 0,
            num_frees: 0,
            max_alloc_size: 0,
            total_system_allocs: 0,
            total_system_frees: 0,
        };
        Self {
            stats,
            highest_use: [0; 2],
            free_lists: [FreeList { cached: 0, idle: 0, needed: 0 }; NUM_CLASSES],
            free_pages: 0,
            idle_pages: 0,
            window_start_secs: 0,
            caching: true,
        }
    }

    pub(super) fn stats(&self) -> PoolStats {
        self.stats
    }

    pub(super) fn reset_peaks(&mut self, reset: PeakReset) {
        match reset {
            PeakReset::Zero => self.stats.max_in_use = 0,
            PeakReset::Current => {
                self.stats.max_in_use = self.stats.in_use;
                self.stats.max_alloc_size = 0;
            }
        }
    }

    pub(super) fn set_limit(&mut self, limit: Option<usize>) {
        self.stats.limit = limit;
    }

    pub(super) fn is_caching(&self) -> bool {
        self.caching
    }

    pub(super) fn set_caching(&mut self, caching: bool) {
        self.caching = caching;
    }

    /// The class of a cached block that will do for one of `class`; it is counted as in use.
    #[inline]
    pub(super) fn take(&mut self, class: SizeClass) -> Option<SizeClass> {
        let cached = |class: &SizeClass| self.free_lists[class.index()].cached > 0;
        let larger = || class.next_larger().filter(|_| class.is_big());
        let found = Some(class).filter(cached).or_else(|| larger().filter(cached))?;
        let list = &mut self.free_lists[found.index()];
        list.cached -= 1;
        list.idle = list.idle.min(list.cached);
        list.needed = self.stats.num_allocs;
        self.count_allocation(found);
        Some(found)
    }

    /// How many bytes must go back before a new block of `class` is taken from the system.
    pub(super) fn excess(&self, class: SizeClass) -> usize {
        let (in_use, reserved) = (self.stats.in_use + class.size(), self.stats.reserved + class.size());
        let allowed = self.allowed(in_use);
        reserved.saturating_sub(self.stats.limit.map_or(allowed, |limit| limit.min(allowed)))
    }

    /// What the pool may have from the system while so much is in use.
    fn allowed(&self, in_use: usize) -> usize {
        let [now, before] = self.highest_use;
        let highest = now.max(before).max(in_use);
        highest.saturating_add((highest / SLACK).max(CACHE_FLOOR))
    }

    /// A block of `class` will come from the system; [`Ledger::commit`] or [`Ledger::cancel`] must follow.
    pub(super) fn reserve(&mut self, class: SizeClass) {
        self.stats.reserved += class.size();
    }

    /// The system gave the block that [`Ledger::reserve`] announced.
    pub(super) fn commit(&mut self, class: SizeClass) {
        self.stats.total_system_allocs += 1;
        self.free_lists[class.index()].needed = self.stats.num_allocs;
        self.count_allocation(class);
    }

    /// The system had no memory for the block that [`Ledger::reserve`] announced: no counter has changed.
    pub(super) fn cancel(&mut self, class: SizeClass) {
        self.stats.reserved -= class.size();
    }

    /// A block of `class` was cut from `bytes` of the free pages.
    pub(super) fn cut(&mut self, class: SizeClass, bytes: usize) {
        self.free_pages -= bytes;
        self.idle_pages = self.idle_pages.min(self.free_pages);
        self.stats.reserved = self.stats.reserved + class.size() - bytes;
        self.free_lists[class.index()].needed = self.stats.num_allocs;
        self.count_allocation(class);
    }

    #[inline]
    fn count_allocation(&mut self, class: SizeClass) {
        let size = class.size();
        self.stats.num_allocs += 1;
        self.stats.in_use += size;
        self.stats.max_in_use = self.stats.max_in_use.max(self.stats.in_use);
        self.highest_use[0] = self.highest_use[0].max(self.stats.in_use);
        self.stats.max_alloc_size = self.stats.max_alloc_size.max(size);
    }

    /// A block came back and is cached now.
    #[inline]
    pub(super) fn put(&mut self, class: SizeClass) {
        self.stats.num_frees += 1;
        self.stats.in_use -= class.size();
        self.free_lists[class.index()].cached += 1;
    }

    /// Takes a cached block off its list; [`Ledger::gave_back`] or [`Ledger::dissolved`] must follow. False if there is
    /// none of this class.
    pub(super) fn discard(&mut self, class: SizeClass) -> bool {
        let list = &mut self.free_lists[class.index()];
        if list.cached == 0 {
            return false;
        }
        list.cached -= 1;
        list.idle = list.idle.saturating_sub(1);
        true
    }

    /// A block of `class` that was discarded is the system's.
    pub(super) fn gave_back(&mut self, class: SizeClass) {
        self.stats.reserved -= class.size();
        self.stats.total_system_frees += 1;
    }

    /// A block of `class` that was discarded is `bytes` of free pages now.
    pub(super) fn dissolved(&mut self, class: SizeClass, bytes: usize) {
        self.free_pages += bytes;
        self.stats.reserved = self.stats.reserved + bytes - class.size();
    }

    /// So many bytes of the free pages are the system's.
    pub(super) fn gave_pages_back(&mut self, bytes: usize) {
        self.free_pages -= bytes;
        self.idle_pages = self.idle_pages.min(self.free_pages);
        self.stats.reserved -= bytes;
        self.stats.total_system_frees += 1;
    }

    /// The class that was needed longest ago, of those that have cached blocks; of mapped pages only if `are_big`.
    pub(super) fn oldest(&self, are_big: bool) -> Option<SizeClass> {
        SizeClass::all()
            .filter(|class| self.free_lists[class.index()].cached > 0 && class.is_big() >= are_big)
            .min_by_key(|class| self.free_lists[class.index()].needed)
    }

    /// Whether the clock should be read to see if a window has ended.
    #[inline]
    pub(super) fn wants_clock(&self) -> bool {
        self.stats.num_frees.is_multiple_of(FREES_PER_CLOCK_READ)
    }

    /// Whether the window has ended at `now_secs` (of any clock that does not go back).
    pub(super) fn window_ends(&self, now_secs: u64, is_tight: bool) -> bool {
        let length = if is_tight { TIGHT_SECS } else { IDLE_SECS };
        now_secs.saturating_sub(self.window_start_secs) >= length
    }

    /// How many blocks of `class` stayed unused in the window; 0 if little is cached.
    pub(super) fn idle(&self, class: SizeClass, is_tight: bool) -> u32 {
        if self.has_surplus(is_tight) { self.free_lists[class.index()].idle } else { 0 }
    }

    /// Bytes of free pages that stayed unused in the window; 0 if little is cached.
    pub(super) fn idle_pages(&self, is_tight: bool) -> usize {
        if self.has_surplus(is_tight) { self.idle_pages } else { 0 }
    }

    fn has_surplus(&self, is_tight: bool) -> bool {
        is_tight || self.stats.cached() > CACHE_FLOOR
    }

    /// Starts the next window.
    pub(super) fn start_window(&mut self, now_secs: u64) {
        self.window_start_secs = now_secs;
        self.highest_use = [self.stats.in_use, self.highest_use[0]];
        self.idle_pages = self.free_pages;
        for list in &mut self.free_lists {
            list.idle = list.cached;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn class(bytes: usize) -> SizeClass {
        SizeClass::of(bytes).expect("a size that blocks have")
    }

    /// Takes a block as the pool does when the system has memory.
    fn take(ledger: &mut Ledger, bytes: usize) -> SizeClass {
        ledger.take(class(bytes)).unwrap_or_else(|| {
            ledger.reserve(class(bytes));
            ledger.commit(class(bytes));
            class(bytes)
        })
    }

    #[test]
    fn a_freed_block_is_used_again_and_every_counter_is_exact() {
        let mut ledger = Ledger::new(None);
        let block = take(&mut ledger, 1000);
        ledger.put(block);
        assert_eq!(ledger.take(class(900)), Some(class(1024)), "896 < 900 <= 1024");
        let expected = PoolStats {
            limit: None,
            in_use: 1024,
            max_in_use: 1024,
            reserved: 1024,
            num_allocs: 2,
            num_frees: 1,
            max_alloc_size: 1024,
            total_system_allocs: 1,
            total_system_frees: 0,
        };
        assert_eq!(ledger.stats(), expected);
        assert_eq!((expected.active_allocs(), expected.cached()), (1, 0));
    }

    #[test]
    fn a_big_request_takes_the_next_size_but_no_larger_one() {
        let mut ledger = Ledger::new(None);
        let big = take(&mut ledger, 8 * MIB);
        ledger.put(big);
        assert_eq!(ledger.take(class(7 * MIB)), None, "8 MiB is more than 12.5 % above 7 MiB");
        assert_eq!(ledger.take(class(7 * MIB + 3 * MIB / 4)), Some(big), "7.75 MiB, else the next: 8");
        let small = take(&mut ledger, 512);
        ledger.put(small);
        assert_eq!(ledger.take(class(448)), None, "small blocks are used for their own class only");
    }

    #[test]
    fn peaks_start_again_without_changing_what_is_kept() {
        let mut ledger = Ledger::new(None);
        let kept = take(&mut ledger, 1024);
        let large = take(&mut ledger, 320 * MIB);
        ledger.put(large);
        ledger.reset_peaks(PeakReset::Zero);
        assert_eq!((ledger.stats().max_in_use, ledger.stats().max_alloc_size), (0, 320 * MIB));
        assert_eq!(ledger.excess(class(MIB)), 0, "320 MiB were needed once and may stay");
        ledger.reset_peaks(PeakReset::Current);
        assert_eq!((ledger.stats().max_in_use, ledger.stats().max_alloc_size), (1024, 0));
        ledger.put(kept);
        take(&mut ledger, 64);
        assert_eq!((ledger.stats().max_in_use, ledger.stats().max_alloc_size), (1024, 64));
    }

    #[test]
    fn the_limit_counts_cached_blocks() {
        let mut ledger = Ledger::new(Some(64 * MIB));
        let blocks: Vec<SizeClass> = (0..16).map(|_| take(&mut ledger, 4 * MIB)).collect();
        assert_eq!(ledger.excess(class(1)), 64);
        ledger.put(blocks[0]);
        assert_eq!(ledger.excess(class(2 * MIB)), 2 * MIB, "the freed block is cached, not gone");
        assert!(ledger.discard(blocks[0]));
        ledger.gave_back(blocks[0]);
        assert_eq!(ledger.excess(class(2 * MIB)), 0);
        ledger.reserve(class(2 * MIB));
        assert_eq!(ledger.stats().to_string(), "in use 62914560, reserved 65011712, limit 67108864");
    }

    #[test]
    fn an_allocation_that_the_system_refused_leaves_no_trace() {
        let mut ledger = Ledger::new(None);
        ledger.reserve(class(MIB));
        ledger.cancel(class(MIB));
        assert_eq!(ledger.stats(), PoolStats::default());
    }

    #[test]
    fn a_step_that_repeats_takes_nothing_from_the_system() {
        let mut ledger = Ledger::new(None);
        let sizes: Vec<usize> = (1..200).map(|i| i * i * 997 % (9 * MIB) + 1).collect();
        for step in 0..50 {
            let before = ledger.stats().total_system_allocs;
            let blocks: Vec<SizeClass> = sizes.iter().map(|&bytes| take(&mut ledger, bytes)).collect();
            for block in blocks {
                ledger.put(block);
            }
            assert_eq!(ledger.stats().total_system_allocs > before, step == 0, "step {step}");
        }
    }

    #[test]
    fn what_is_cached_is_bounded_by_the_highest_use_of_late() {
        let mut ledger = Ledger::new(None);
        let large = take(&mut ledger, 800 * MIB);
        ledger.put(large);
        assert_eq!(ledger.excess(class(100 * MIB)), 0, "800 MiB and an eighth");
        let more = take(&mut ledger, 100 * MIB);
        ledger.put(more);
        assert_eq!(ledger.excess(class(64 * MIB)), 64 * MIB, "900 MiB are reserved");
        ledger.start_window(0);
        assert_eq!(ledger.excess(class(64 * MIB)), 64 * MIB, "the window before had 800 MiB in use");
        ledger.start_window(IDLE_SECS);
        assert_eq!(ledger.excess(class(64 * MIB)), (900 + 64 - 64 - 64) * MIB, "nothing was in use of late");
        assert!(ledger.discard(large));
        ledger.gave_back(large);
        assert_eq!(ledger.excess(class(MIB)), (100 + 1 - 1 - 64) * MIB);
        take(&mut ledger, 128 * MIB);
        assert_eq!(
            ledger.excess(class(MIB)),
            (100 + 128 + 1 - 129 - 64) * MIB,
            "what is in use always counts"
        );
    }

    #[test]
    fn the_class_that_was_needed_longest_ago_goes_first() {
        let mut ledger = Ledger::new(None);
        for bytes in [2 * MIB, 4 * MIB, 1000, 2 * MIB] {
            let block = take(&mut ledger, bytes);
            ledger.put(block);
        }
        assert_eq!(ledger.oldest(true), Some(class(4 * MIB)));
        assert!(ledger.discard(class(4 * MIB)));
        assert_eq!(ledger.oldest(true), Some(class(2 * MIB)));
        assert_eq!(ledger.oldest(false), Some(class(1000)), "small ones as well");
        assert!(!ledger.discard(class(4 * MIB)), "there is no second one");
    }

    #[test]
    fn pages_of_a_block_become_another_block() {
        let mut ledger = Ledger::new(None);
        let block = take(&mut ledger, 4 * MIB);
        ledger.put(block);
        assert!(ledger.discard(block));
        ledger.dissolved(block, 4 * MIB + 4096);
        assert_eq!((ledger.stats().reserved, ledger.stats().cached()), (4 * MIB + 4096, 4 * MIB + 4096));
        ledger.cut(class(3 * MIB), 3 * MIB + 4096);
        let stats = ledger.stats();
        assert_eq!((stats.in_use, stats.reserved, stats.num_allocs), (3 * MIB, 4 * MIB, 2));
        assert_eq!((stats.total_system_allocs, stats.total_system_frees), (1, 0));
        ledger.gave_pages_back(MIB);
        assert_eq!((ledger.stats().cached(), ledger.stats().total_system_frees), (0, 1));
    }

    #[test]
    fn blocks_that_a_window_did_not_need_are_idle() {
        let mut ledger = Ledger::new(None);
        let blocks: Vec<SizeClass> = (0..4).map(|_| take(&mut ledger, 100 * MIB)).collect();
        blocks.iter().for_each(|&block| ledger.put(block));
        assert_eq!(ledger.idle(blocks[0], false), 0, "the first window saw them all in use");
        assert!(!ledger.window_ends(IDLE_SECS - 1, false));
        assert!(ledger.window_ends(IDLE_SECS, false) && ledger.window_ends(TIGHT_SECS, true));
        ledger.start_window(IDLE_SECS);
        let block = take(&mut ledger, 100 * MIB);
        ledger.put(block);
        assert_eq!(ledger.idle(block, false), 3, "one of four was needed");
        for _ in 0..3 {
            assert!(ledger.discard(block));
            ledger.gave_back(block);
        }
        let small = take(&mut ledger, 10 * MIB);
        ledger.put(small);
        assert!(ledger.discard(block));
        ledger.gave_back(block);
        ledger.start_window(2 * IDLE_SECS);
        assert_eq!(ledger.idle(small, false), 0, "10 MiB may stay cached for ever");
        assert_eq!(ledger.idle(small, true), 1, "unless memory is tight");
    }
}
