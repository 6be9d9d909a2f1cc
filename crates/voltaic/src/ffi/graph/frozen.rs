//! Memory that graphs take for constant, and whether something has written to it that libtorch does not count.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

static FROZEN: Mutex<Vec<Weak<Frozen>>> = Mutex::new(Vec::new());

#[derive(Debug)]
struct Frozen {
    /// Addresses, ascending.
    ranges: Vec<Range<usize>>,
    is_fresh: AtomicBool,
}

/// Memory that results were computed from which a graph keeps.
#[derive(Debug)]
pub struct FrozenMemory(Arc<Frozen>);

impl FrozenMemory {
    /// Of these addresses, which do not overlap. Nothing has been computed from it.
    pub fn new(mut ranges: Vec<Range<usize>>) -> Self {
        ranges.sort_unstable_by_key(|range| range.start);
        let frozen = Arc::new(Frozen { ranges, is_fresh: AtomicBool::new(false) });
        let mut all = FROZEN.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|frozen| frozen.strong_count() > 0);
        all.push(Arc::downgrade(&frozen));
        Self(frozen)
    }

    /// Whether nothing was noted since the last call of this function. What is computed from the memory after it is new.
    pub fn refresh(&self) -> bool {
        self.0.is_fresh.swap(true, Ordering::AcqRel)
    }

    /// What was to be computed from the memory was not.
    pub fn forget(&self) {
        self.0.is_fresh.store(false, Ordering::Release);
    }
}

impl Frozen {
    fn overlaps(&self, written: &Range<usize>) -> bool {
        let first = self.ranges.partition_point(|range| range.end <= written.start);
        self.ranges.get(first).is_some_and(|range| range.start < written.end)
    }
}

fn for_each(note: impl Fn(&Frozen)) {
    let all = FROZEN.lock().unwrap_or_else(PoisonError::into_inner);
    all.iter().filter_map(Weak::upgrade).for_each(|frozen| note(&frozen));
}

/// Notes that memory was written to without a new version of a tensor.
pub fn note_write(written: &Range<usize>) {
    for_each(|frozen| {
        if frozen.overlaps(written) {
            frozen.is_fresh.store(false, Ordering::Release);
        }
    });
}

/// The same where it is not known which memory.
pub fn note_writes() {
    for_each(|frozen| frozen.is_fresh.store(false, Ordering::Release));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_to_a_part_of_the_memory_are_found() {
        let memory = FrozenMemory::new(vec![300..400, 100..200]);
        for (written, overlaps) in [
            (0..100, false),
            (200..300, false),
            (400..500, false),
            (0..101, true),
            (199..250, true),
            (350..351, true),
            (0..1000, true),
        ] {
            assert_eq!(memory.0.overlaps(&written), overlaps, "{written:?}");
        }
        memory.forget();
        assert!(!memory.refresh());
    }
}
