//! The sizes that blocks have.

#![forbid(unsafe_code)]

/// Smallest block, and the alignment of all blocks, in bytes.
pub(super) const MIN_BLOCK: usize = 1 << MIN_LOG2;
/// Blocks from this size on are mapped pages; smaller ones come from the system allocator.
pub(super) const BIG_BLOCK: usize = 1 << BIG_LOG2;

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

    pub(super) fn next_larger(self) -> Option<Self> {
        (self.index() + 1 < NUM_CLASSES).then(|| Self(self.0 + 1))
    }

    /// All classes, from small to large.
    pub(super) fn all() -> impl DoubleEndedIterator<Item = Self> {
        (0..NUM_CLASSES as u16).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn class(bytes: usize) -> SizeClass {
        SizeClass::of(bytes).expect("a size that blocks have")
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
}
