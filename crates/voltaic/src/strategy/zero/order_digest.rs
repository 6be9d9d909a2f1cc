//! A digest of the order in which a rank has gathered units, which ranks compare: with different orders, weights of the same size would
//! be mixed up without an error.

use std::collections::VecDeque;

/// The number of gathers that are kept to report where ranks differ.
const REMEMBERED: usize = 4096;

/// Numbers of [`OrderDigest::numbers`].
pub(super) const NUMBERS: usize = 3;

/// What a rank has gathered since ranks last compared.
#[derive(Debug, Default)]
pub(super) struct OrderDigest {
    hash: u64,
    count: u64,
    /// The last units.
    last: VecDeque<usize>,
}

impl OrderDigest {
    /// Notes that a unit is gathered.
    pub fn note(&mut self, unit: usize) {
        // splitmix64
        self.hash = (self.hash ^ (unit as u64 + 1)).wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.hash = (self.hash ^ (self.hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        self.hash = (self.hash ^ (self.hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        self.hash ^= self.hash >> 31;
        self.count += 1;
        if self.last.len() == REMEMBERED {
            self.last.pop_front();
        }
        self.last.push_back(unit);
    }

    /// A digest, in numbers whose sum over thousands of ranks is exact in float32.
    pub fn numbers(&self) -> [f32; NUMBERS] {
        std::array::from_fn(|at| (self.hash >> (12 * at) & 0xfff) as f32)
    }

    /// The number of the first unit that is remembered, and those from there on.
    pub fn last(&self) -> (u64, Vec<usize>) {
        (self.count - self.last.len() as u64, self.last.iter().copied().collect())
    }

    /// Starts again, after ranks have compared.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

/// The first rank that has gathered something else than rank 0, and what both have gathered there.
pub(super) fn first_difference(all: &[(u64, Vec<usize>)]) -> Option<(usize, Option<usize>, Option<usize>)> {
    let (first_of_zero, zero) = all.first()?;
    all.iter().enumerate().skip(1).find_map(|(rank, (first, own))| {
        let from = *first.max(first_of_zero);
        let until = (first + own.len() as u64).max(first_of_zero + zero.len() as u64);
        let at = |first: u64, units: &[usize], place: u64| units.get((place - first) as usize).copied();
        (from..until).find_map(|place| {
            let (own, zero) = (at(*first, own, place), at(*first_of_zero, zero, place));
            (own != zero).then_some((rank, own, zero))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(units: impl IntoIterator<Item = usize>) -> OrderDigest {
        let mut digest = OrderDigest::default();
        units.into_iter().for_each(|unit| digest.note(unit));
        digest
    }

    #[test]
    fn orders_differ_in_their_digests() {
        assert_eq!(of([0, 1, 2]).numbers(), of([0, 1, 2]).numbers());
        for other in [&[0, 2, 1][..], &[0, 1], &[0, 1, 2, 2], &[1, 1, 2]] {
            assert_ne!(of([0, 1, 2]).numbers(), of(other.iter().copied()).numbers(), "{other:?}");
        }
        let mut cleared = of([5]);
        cleared.clear();
        assert_eq!(cleared.numbers(), of([]).numbers());
    }

    #[test]
    fn the_first_difference_is_found() {
        let all = |orders: &[&[usize]]| -> Vec<_> {
            orders.iter().map(|order| of(order.iter().copied()).last()).collect()
        };
        assert_eq!(first_difference(&all(&[&[0, 1], &[0, 1], &[0, 1]])), None);
        assert_eq!(first_difference(&all(&[&[0, 1], &[0, 1], &[0, 2]])), Some((2, Some(2), Some(1))));
        assert_eq!(first_difference(&all(&[&[0, 1], &[0]])), Some((1, None, Some(1))));
        let long = |last: usize| (0..REMEMBERED + 5).map(|at| at % 7).chain([last]);
        assert_eq!(first_difference(&[of(long(1)).last(), of(long(2)).last()]), Some((1, Some(2), Some(1))));
    }
}
