//! Free pages of a pool: what blocks of another size are cut from.
//!
//! Plain arithmetic on addresses, without pointers or threads. Ranges next to each other are one; a block is cut from the
//! smallest range that it fits into.

#![forbid(unsafe_code)]

use std::ops::Range;

/// Size of the pages that ranges are made of, in bytes.
pub(super) const PAGE: usize = 4 << 10;
/// At least so much goes back to the system at a time, if there is as much.
const LEAST_GIVEN_BACK: usize = 2 << 20;

/// Bytes of whole pages that hold `bytes`.
pub(super) fn whole_pages(bytes: usize) -> usize {
    bytes.next_multiple_of(PAGE)
}

/// Free address ranges in ascending order, none empty and no two next to each other.
pub(super) struct Pages {
    ranges: Vec<Range<usize>>,
    bytes: usize,
}

impl Pages {
    pub(super) const fn new() -> Self {
        Self { ranges: Vec::new(), bytes: 0 }
    }

    /// Bytes of all ranges.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds a range that is free now.
    pub(super) fn insert(&mut self, range: Range<usize>) {
        self.bytes += range.len();
        let place = self.ranges.partition_point(|other| other.start < range.start);
        let joins_left = place > 0 && self.ranges[place - 1].end == range.start;
        let joins_right = self.ranges.get(place).is_some_and(|right| right.start == range.end);
        match (joins_left, joins_right) {
            (true, true) => self.ranges[place - 1].end = self.ranges.remove(place).end,
            (true, false) => self.ranges[place - 1].end = range.end,
            (false, true) => self.ranges[place].start = range.start,
            (false, false) => self.ranges.insert(place, range),
        }
    }

    /// The address of `bytes`, cut from the smallest range that has as much; the first of those.
    pub(super) fn cut(&mut self, bytes: usize) -> Option<usize> {
        let fitting = self.ranges.iter().enumerate().filter(|(_, range)| range.len() >= bytes);
        let (place, _) = fitting.min_by_key(|(_, range)| range.len())?;
        let start = self.ranges[place].start;
        self.cut_off(place, start..start + bytes);
        Some(start)
    }

    /// Takes a range out, to be given back to the system: of `wanted` bytes or a little more, less only if no range has as much.
    pub(super) fn give_back(&mut self, wanted: usize) -> Option<Range<usize>> {
        let (place, range) = self.ranges.iter().enumerate().max_by_key(|(_, range)| range.len())?;
        let bytes = whole_pages(wanted).max(LEAST_GIVEN_BACK).min(range.len());
        let range = range.end - bytes..range.end;
        self.cut_off(place, range.clone());
        Some(range)
    }

    /// Removes a part at one end of the range at `place`.
    fn cut_off(&mut self, place: usize, part: Range<usize>) {
        self.bytes -= part.len();
        let range = &mut self.ranges[place];
        if range.start == part.start {
            range.start = part.end;
        } else {
            range.end = part.start;
        }
        if range.start == range.end {
            self.ranges.remove(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::slice;

    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    fn pages(ranges: &[Range<usize>]) -> Pages {
        let mut pages = Pages::new();
        ranges.iter().for_each(|range| pages.insert(range.start * PAGE..range.end * PAGE));
        pages
    }

    fn ranges(pages: &Pages) -> Vec<Range<usize>> {
        pages.ranges.iter().map(|range| range.start / PAGE..range.end / PAGE).collect()
    }

    #[test]
    fn neighbours_become_one_range() {
        let both = pages(&[0..2, 6..8, 2..6]);
        assert!(ranges(&both).iter().eq([&(0..8)]));
        let left = pages(&[10..12, 0..2, 2..3]);
        assert_eq!(ranges(&left), [0..3, 10..12]);
        let right = pages(&[10..12, 8..10]);
        assert!(ranges(&right).iter().eq([&(8..12)]));
        assert_eq!(pages(&[0..1, 2..3, 4..5]).bytes(), 3 * PAGE);
    }

    #[test]
    fn a_block_comes_from_the_smallest_range_that_it_fits_into() {
        let mut pages = pages(&[0..9, 20..23, 30..34]);
        assert_eq!(pages.cut(3 * PAGE), Some(20 * PAGE), "fits exactly");
        assert_eq!(pages.cut(3 * PAGE), Some(30 * PAGE));
        assert_eq!(pages.cut(10 * PAGE), None);
        assert_eq!(ranges(&pages), [0..9, 33..34]);
        assert_eq!(pages.bytes(), 10 * PAGE);
    }

    #[test]
    fn the_end_of_the_largest_range_goes_back() {
        let mib = (1 << 20) / PAGE;
        let mut pages = pages(&[0..8 * mib, 100 * mib..101 * mib]);
        assert_eq!(pages.give_back(3 << 20), Some(5 << 20..8 << 20));
        assert_eq!(pages.give_back(1), Some(3 << 20..5 << 20), "not page by page");
        assert_eq!(pages.give_back(usize::MAX >> 1), Some(0..3 << 20), "no range has as much");
        assert_eq!(pages.give_back(1), Some(100 << 20..101 << 20));
        assert_eq!((pages.give_back(1), pages.bytes()), (None, 0));
    }

    #[test]
    fn random_cuts_and_returns_never_overlap_or_get_lost() {
        let mut rng = StdRng::seed_from_u64(3);
        let mut pages = pages(slice::from_ref(&(100..1100)));
        let mut taken: Vec<Range<usize>> = Vec::new();
        for _ in 0..4000 {
            let bytes = rng.random_range(1..40) * PAGE;
            match pages.cut(bytes) {
                Some(start) if rng.random_bool(0.6) => {
                    let range = start..start + bytes;
                    assert!(taken.iter().all(|other| other.end <= range.start || range.end <= other.start));
                    taken.push(range);
                }
                Some(start) => pages.insert(start..start + bytes),
                None if !taken.is_empty() => {
                    let range = taken.swap_remove(rng.random_range(0..taken.len()));
                    pages.insert(range);
                }
                None => {}
            }
            let held: usize = taken.iter().map(Range::len).sum();
            assert_eq!(pages.bytes() + held, 1000 * PAGE);
            assert!(pages.ranges.windows(2).all(|pair| pair[0].end < pair[1].start));
        }
        taken.into_iter().for_each(|range| pages.insert(range));
        assert!(ranges(&pages).iter().eq([&(100..1100)]));
    }
}
