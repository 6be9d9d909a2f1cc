//! What a memory pool decides: block sizes, what may be kept, what goes back to the system.
//!
//! Plain arithmetic on counts, without pointers or threads; `super` owns the memory and does what is decided
//! here. Three rules bound what a pool costs beyond what is in use:
//!
//! - A block is at most 25 % larger than asked for below 1 MiB (4 sizes per power of two) and at most 12.5 %
//!   from there on (16 sizes per power of two, and the next size is taken too when the exact one is not cached).
//! - Cached bytes above both [`CACHE_FLOOR`] and twice the highest use go back at once, least needed first.
//! - Blocks that nobody needed for a whole [`IDLE_SECS`] window go back at its end, as long as more than
//!   [`CACHE_FLOOR`] is cached. So the memory of a phase with other shapes is not kept for ever.

#![forbid(unsafe_code)]

use std::fmt;

/// Smallest block, and the alignment of all blocks, in bytes.
pub(super) const MIN_BLOCK: usize = 1 << MIN_LOG2;
/// Blocks from this size on are mapped pages; smaller ones come from the system allocator.
pub(super) const BIG_BLOCK: usize = 1 << BIG_LOG2;
/// So many cached bytes are kept without looking closer.
pub(super) const CACHE_FLOOR: usize = 256 << 20;
/// Length of the window after which unneeded blocks go back, in seconds.
pub(super) const IDLE_SECS: u64 = 30;
/// The clock is read once in so many frees.
const FREES_PER_CLOCK_READ: u64 = 256;

const MIN_LOG2: usize = 6;
const BIG_LOG2: usize = 20;
const MAX_LOG2: usize = 46;
const SMALL_STEPS_LOG2: usize = 2;
const BIG_STEPS_LOG2: usize = 4;
const FIRST_BIG: usize = 1 + ((BIG_LOG2 - MIN_LOG2) << SMALL_STEPS_LOG2);
/// How many block sizes there are.
pub(super) const NUM_CLASSES: usize = FIRST_BIG + ((MAX_LOG2 - BIG_LOG2) << BIG_STEPS_LOG2);

/// One of the block sizes, by its number from small to large.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SizeClass(u16);

impl SizeClass {
    /// The smallest block that holds `bytes`; none above 64 TiB.
    #[inline]
    pub(super) fn of(bytes: usize) -> Option<Self> {
        if bytes <= MIN_BLOCK {
            return Some(Self(0));
        }
        if bytes > 1 << MAX_LOG2 {
            return None;
        }
        let last = bytes - 1;
        let log2 = last.ilog2() as usize;
        let (first, base_log2, steps_log2) = if log2 < BIG_LOG2 {
            (1, MIN_LOG2, SMALL_STEPS_LOG2)
        } else {
            (FIRST_BIG, BIG_LOG2, BIG_STEPS_LOG2)
        };
        let step = (last - (1 << log2)) >> (log2 - steps_log2);
        Some(Self((first + ((log2 - base_log2) << steps_log2) + step) as u16))
    }

    /// Bytes of a block of this class.
    pub(super) fn size(self) -> usize {
        let number = self.index();
        if number == 0 {
            return MIN_BLOCK;
        }
        let (above, base_log2, steps_log2) = if number < FIRST_BIG {
            (number - 1, MIN_LOG2, SMALL_STEPS_LOG2)
        } else {
            (number - FIRST_BIG, BIG_LOG2, BIG_STEPS_LOG2)
        };
        let log2 = base_log2 + (above >> steps_log2);
        let step = above & ((1 << steps_log2) - 1);
        (1 << log2) + ((step + 1) << (log2 - steps_log2))
    }

    /// Whether blocks of this class are mapped pages.
    pub(super) fn is_big(self) -> bool {
        self.index() >= FIRST_BIG - 1
    }

    /// The class's number, below [`NUM_CLASSES`].
    pub(super) fn index(self) -> usize {
        usize::from(self.0)
    }

    fn next_larger(self) -> Option<Self> {
        (self.index() + 1 < NUM_CLASSES).then(|| Self(self.0 + 1))
    }

    /// All classes, from small to large.
    pub(super) fn all() -> impl DoubleEndedIterator<Item = Self> {
        (0..NUM_CLASSES as u16).map(Self)
    }
}

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
    /// Blocks taken from the system so far.
    pub total_system_allocs: u64,
    /// Blocks given back to the system so far.
    pub total_system_frees: u64,
}

impl PoolStats {
    /// Blocks that are handed out now.
    pub fn active_allocs(&self) -> u64 {
        self.num_allocs - self.num_frees
    }

    /// Blocks held from the system now, in use or cached.
    pub fn total_active_allocs(&self) -> u64 {
        self.total_system_allocs - self.total_system_frees
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

/// Where the memory of an allocation comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// A cached block of this class; it is already counted as in use.
    Cached(SizeClass),
    /// The system. [`Ledger::commit`] or [`Ledger::cancel`] must follow.
    System,
    /// Nowhere: the limit does not allow another block.
    Refused,
}

/// Free blocks of one class.
#[derive(Clone, Copy)]
struct Shelf {
    cached: u32,
    /// Fewest that were cached at any moment of the window: so many were not needed.
    idle: u32,
}

/// The books of one pool.
pub(super) struct Ledger {
    stats: PoolStats,
    /// Highest use ever, which decides what may stay cached.
    highest_use: usize,
    shelves: [Shelf; NUM_CLASSES],
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
            highest_use: 0,
            shelves: [Shelf { cached: 0, idle: 0 }; NUM_CLASSES],
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

    /// Decides where a block of `class` comes from.
    #[inline]
    pub(super) fn take(&mut self, class: SizeClass) -> Source {
        let cached = |class: &SizeClass| self.shelves[class.index()].cached > 0;
        let larger = || class.next_larger().filter(|_| class.is_big());
        if let Some(found) = Some(class).filter(cached).or_else(|| larger().filter(cached)) {
            let shelf = &mut self.shelves[found.index()];
            shelf.cached -= 1;
            shelf.idle = shelf.idle.min(shelf.cached);
            self.count_allocation(found);
            return Source::Cached(found);
        }
        let reserved = self.stats.reserved + class.size();
        if self.stats.limit.is_some_and(|limit| reserved > limit) {
            return Source::Refused;
        }
        self.stats.reserved = reserved;
        Source::System
    }

    /// The system gave the block that [`Source::System`] asked for.
    pub(super) fn commit(&mut self, class: SizeClass) {
        self.stats.total_system_allocs += 1;
        self.count_allocation(class);
    }

    /// The system had no memory for [`Source::System`]: no counter has changed.
    pub(super) fn cancel(&mut self, class: SizeClass) {
        self.stats.reserved -= class.size();
    }

    #[inline]
    fn count_allocation(&mut self, class: SizeClass) {
        let size = class.size();
        self.stats.num_allocs += 1;
        self.stats.in_use += size;
        self.stats.max_in_use = self.stats.max_in_use.max(self.stats.in_use);
        self.highest_use = self.highest_use.max(self.stats.in_use);
        self.stats.max_alloc_size = self.stats.max_alloc_size.max(size);
    }

    /// A block came back and is cached now.
    #[inline]
    pub(super) fn put(&mut self, class: SizeClass) {
        self.stats.num_frees += 1;
        self.stats.in_use -= class.size();
        self.shelves[class.index()].cached += 1;
    }

    /// A cached block goes back to the system. False if there is none of this class.
    pub(super) fn give_back(&mut self, class: SizeClass) -> bool {
        let shelf = &mut self.shelves[class.index()];
        if shelf.cached == 0 {
            return false;
        }
        shelf.cached -= 1;
        shelf.idle = shelf.idle.saturating_sub(1);
        self.stats.reserved -= class.size();
        self.stats.total_system_frees += 1;
        true
    }

    /// A class of which a block must go back at once, because more is cached than a pool may keep.
    #[inline]
    pub(super) fn over_cap(&self) -> Option<SizeClass> {
        if self.stats.cached() <= CACHE_FLOOR.max(2 * self.highest_use) {
            return None;
        }
        let idle_bytes = |class: &SizeClass| class.size() * self.shelves[class.index()].idle as usize;
        let least_needed = SizeClass::all().max_by_key(idle_bytes).filter(|class| idle_bytes(class) > 0);
        least_needed.or_else(|| SizeClass::all().rev().find(|class| self.shelves[class.index()].cached > 0))
    }

    /// Whether the clock should be read to see if a window has ended.
    #[inline]
    pub(super) fn wants_clock(&self) -> bool {
        self.stats.num_frees.is_multiple_of(FREES_PER_CLOCK_READ)
    }

    /// Whether the window has ended at `now_secs` (of any clock that does not go back).
    pub(super) fn window_ends(&self, now_secs: u64) -> bool {
        now_secs.saturating_sub(self.window_start_secs) >= IDLE_SECS
    }

    /// How many blocks of `class` nobody needed in the window, if enough is cached to care.
    pub(super) fn idle(&self, class: SizeClass) -> u32 {
        if self.stats.cached() > CACHE_FLOOR { self.shelves[class.index()].idle } else { 0 }
    }

    /// Starts the next window.
    pub(super) fn start_window(&mut self, now_secs: u64) {
        self.window_start_secs = now_secs;
        for shelf in &mut self.shelves {
            shelf.idle = shelf.cached;
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
        match ledger.take(class(bytes)) {
            Source::Cached(found) => found,
            Source::System => {
                ledger.commit(class(bytes));
                class(bytes)
            }
            Source::Refused => panic!("refused {bytes} bytes: {}", ledger.stats()),
        }
    }

    #[test]
    fn sizes_round_up_to_their_class() {
        for (bytes, size, why) in [
            (0, 64, "nothing still has an address"),
            (1, 64, "smallest block"),
            (64, 64, "exact"),
            (65, 80, "four steps from 64 to 128"),
            (80, 80, "exact"),
            (81, 96, "next step"),
            (113, 128, "last step"),
            (129, 160, "four steps from 128 to 256"),
            (1000, 1024, "kilobyte"),
            (MIB - 1, MIB, "last small class"),
            (MIB, MIB, "exact"),
            (MIB + 1, MIB + MIB / 16, "sixteen steps from 1 to 2 MiB"),
            (4 * MIB, 4 * MIB, "exact"),
            (4 * MIB + 1, 4 * MIB + MIB / 4, "sixteen steps from 4 to 8 MiB"),
            (100 * MIB, 100 * MIB, "25/16 of 64 MiB"),
            (1 << 46, 1 << 46, "largest block"),
        ] {
            assert_eq!(class(bytes).size(), size, "{bytes} bytes: {why}");
        }
        assert_eq!(SizeClass::of((1 << 46) + 1), None);
        assert_eq!(SizeClass::of(usize::MAX), None);
    }

    #[test]
    fn classes_are_numbered_by_size_and_find_themselves() {
        let sizes: Vec<usize> = SizeClass::all().map(SizeClass::size).collect();
        assert!(sizes.is_sorted_by(|a, b| a < b));
        for (index, &size) in sizes.iter().enumerate() {
            assert_eq!(class(size).index(), index);
            assert_eq!(class(size).is_big(), size >= BIG_BLOCK, "{size}");
            if index > 0 {
                assert_eq!(class(sizes[index - 1] + 1).index(), index);
            }
        }
    }

    #[test]
    fn waste_stays_within_its_bounds() {
        for pair in SizeClass::all().collect::<Vec<_>>().windows(2) {
            let (least, size) = (pair[0].size() + 1, pair[1].size());
            let bound = if least > BIG_BLOCK { 1.0 / 16.0 } else { 0.25 };
            assert!((size - least) as f64 / least as f64 <= bound, "{least} bytes in a block of {size}");
        }
    }

    #[test]
    fn a_freed_block_is_used_again_and_every_counter_is_exact() {
        let mut ledger = Ledger::new(None);
        let block = take(&mut ledger, 1000);
        ledger.put(block);
        assert_eq!(ledger.take(class(900)), Source::Cached(class(1024)), "896 < 900 <= 1024");
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
        assert_eq!((expected.active_allocs(), expected.total_active_allocs(), expected.cached()), (1, 1, 0));
    }

    #[test]
    fn a_big_request_takes_the_next_size_but_no_larger_one() {
        let mut ledger = Ledger::new(None);
        let big = take(&mut ledger, 8 * MIB);
        ledger.put(big);
        assert_eq!(ledger.take(class(7 * MIB)), Source::System, "8 MiB is more than 12.5 % above 7 MiB");
        ledger.cancel(class(7 * MIB));
        assert_eq!(
            ledger.take(class(7 * MIB + 3 * MIB / 4)),
            Source::Cached(big),
            "7.75 MiB, else the next: 8"
        );
        let small = take(&mut ledger, 512);
        ledger.put(small);
        assert_eq!(ledger.take(class(448)), Source::System, "small blocks are used for their own class only");
    }

    #[test]
    fn peaks_start_again_without_changing_what_is_kept() {
        let mut ledger = Ledger::new(None);
        let kept = take(&mut ledger, 1024);
        let large = take(&mut ledger, 320 * MIB);
        ledger.put(large);
        ledger.reset_peaks(PeakReset::Zero);
        assert_eq!((ledger.stats().max_in_use, ledger.stats().max_alloc_size), (0, 320 * MIB));
        assert_eq!(ledger.over_cap(), None, "320 MiB were needed once and may stay");
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
        assert_eq!(ledger.take(class(1)), Source::Refused);
        ledger.put(blocks[0]);
        assert_eq!(ledger.take(class(2 * MIB)), Source::Refused, "the freed block is cached, not gone");
        assert!(ledger.give_back(blocks[0]));
        assert!(!ledger.give_back(blocks[0]), "there is no second one");
        assert_eq!(ledger.take(class(2 * MIB)), Source::System);
        assert_eq!(ledger.stats().to_string(), "in use 62914560, reserved 65011712, limit 67108864");
    }

    #[test]
    fn an_allocation_that_the_system_refused_leaves_no_trace() {
        let mut ledger = Ledger::new(None);
        assert_eq!(ledger.take(class(MIB)), Source::System);
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
                assert_eq!(ledger.over_cap(), None);
            }
            assert_eq!(ledger.stats().total_system_allocs > before, step == 0, "step {step}");
        }
    }

    #[test]
    fn cached_bytes_are_capped_and_unneeded_blocks_go_first() {
        let mut ledger = Ledger::new(None);
        // needed again and again, one at a time: 300 MiB is the highest use
        let hot = take(&mut ledger, 300 * MIB);
        ledger.put(hot);
        let cold = take(&mut ledger, 200 * MIB);
        ledger.put(cold);
        ledger.start_window(0);
        assert_eq!(take(&mut ledger, 300 * MIB), hot);
        ledger.put(hot);
        assert_eq!(ledger.over_cap(), None, "500 MiB cached, 600 MiB allowed");
        let last = take(&mut ledger, 150 * MIB);
        ledger.put(last);
        assert_eq!(ledger.over_cap(), Some(cold), "650 MiB cached; the window saw no use for 200 MiB");
        assert!(ledger.give_back(cold));
        assert_eq!(ledger.over_cap(), None);
    }

    #[test]
    fn without_idle_blocks_the_largest_goes_first() {
        let mut ledger = Ledger::new(None);
        for bytes in [100 * MIB, 140 * MIB, 120 * MIB] {
            let block = take(&mut ledger, bytes);
            ledger.put(block);
        }
        assert_eq!(ledger.over_cap(), Some(class(140 * MIB)), "364 MiB cached, 288 MiB allowed");
    }

    #[test]
    fn blocks_that_a_window_did_not_need_are_idle() {
        let mut ledger = Ledger::new(None);
        let blocks: Vec<SizeClass> = (0..4).map(|_| take(&mut ledger, 100 * MIB)).collect();
        blocks.iter().for_each(|&block| ledger.put(block));
        assert_eq!(ledger.idle(blocks[0]), 0, "the first window saw them all in use");
        assert!(!ledger.window_ends(IDLE_SECS - 1));
        assert!(ledger.window_ends(IDLE_SECS));
        ledger.start_window(IDLE_SECS);
        let block = take(&mut ledger, 100 * MIB);
        ledger.put(block);
        assert_eq!(ledger.idle(block), 3, "one of four was needed");
        assert!(ledger.give_back(block) && ledger.give_back(block));
        assert_eq!(ledger.idle(block), 0, "200 MiB may stay cached for ever");
    }
}
