//! Where the elements of parameters lie in the partitions of DeepSpeed's ranks.
//!
//! Source: `deepspeed/runtime/zero/stage_1_and_2.py`, `stage3.py`, `partition_parameters.py`; `deepspeed/utils/zero_to_fp32.py`.

use std::ops::Range;

/// The part of a name that Lightning's wrapper adds.
const WRAPPER: &str = "_forward_module.";

/// The name of a weight in the module itself.
pub(super) fn own_name(name: &str) -> &str {
    name.strip_prefix(WRAPPER).unwrap_or(name)
}

/// A parameter of a flat buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FlatParam {
    /// The name in the files.
    pub name: String,
    pub shape: Vec<i64>,
    pub numel: usize,
    /// Elements without a meaning that follow it in the buffer.
    pub padding: usize,
}

impl FlatParam {
    /// `None` if the shape has a negative size, or more elements than can be counted.
    pub fn new(name: &str, shape: &[i64]) -> Option<Self> {
        let numel = shape.iter().try_fold(1_usize, |numel, &size| {
            numel.checked_mul(usize::try_from(size).ok()?).filter(|numel| *numel <= i64::MAX as usize)
        })?;
        Some(Self { name: name.to_owned(), shape: shape.to_vec(), numel, padding: 0 })
    }

    /// The part of each of so many ranks, in stage 3.
    pub fn chunk(&self, ranks: usize) -> usize {
        self.numel.div_ceil(ranks.max(1))
    }
}

/// Elements of a parameter that lie side by side in the partition of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fragment {
    /// Index of the parameter in the buffer.
    pub param: usize,
    /// The first of its elements.
    pub start: usize,
    /// Where it lies in the partition.
    pub offset: usize,
    pub len: usize,
}

/// Elements of a buffer, `None` if they cannot be counted.
pub(super) fn flat_numel(params: &[FlatParam]) -> Option<usize> {
    params.iter().try_fold(0_usize, |sum, param| sum.checked_add(param.numel)?.checked_add(param.padding))
}

/// Stages 1 and 2: what a partition has that is this range of the buffer, in which the parameters lie one behind the other.
pub(super) fn flat_fragments(params: &[FlatParam], partition: Range<usize>) -> Vec<Fragment> {
    let (mut found, mut at) = (Vec::new(), 0);
    for (param, FlatParam { numel, padding, .. }) in params.iter().enumerate() {
        let (first, end) = (at.max(partition.start), (at + numel).min(partition.end));
        if first < end {
            let (start, offset) = (first - at, first - partition.start);
            found.push(Fragment { param, start, offset, len: end - first });
        }
        at += numel + padding;
    }
    found
}

/// Stage 3: each parameter is cut into as many chunks as there are ranks, and a rank has its chunks one behind the other.
pub(super) fn chunk_fragments(params: &[FlatParam], rank: usize, ranks: usize) -> Vec<Fragment> {
    let (mut found, mut offset) = (Vec::new(), 0);
    for (param, flat) in params.iter().enumerate() {
        let chunk = flat.chunk(ranks);
        let start = (rank * chunk).min(flat.numel);
        let len = chunk.min(flat.numel - start);
        found.extend((len > 0).then_some(Fragment { param, start, offset, len }));
        offset += chunk;
    }
    found
}

/// Elements of a partition of stages 1 and 2, which DeepSpeed makes even.
pub(super) fn partition_numel(total: usize, ranks: usize) -> usize {
    2 * total.div_ceil(2 * ranks.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(numels: &[usize]) -> Vec<FlatParam> {
        let param = |numel: &usize| FlatParam::new("w", &[*numel as i64]).expect("is small");
        numels.iter().map(param).collect()
    }

    /// How often each element is in a partition.
    fn counts(params: &[FlatParam], of_ranks: impl IntoIterator<Item = Vec<Fragment>>) -> Vec<Vec<usize>> {
        let mut counts: Vec<Vec<usize>> = params.iter().map(|param| vec![0; param.numel]).collect();
        for fragment in of_ranks.into_iter().flatten() {
            let range = fragment.start..fragment.start + fragment.len;
            counts[fragment.param][range].iter_mut().for_each(|count| *count += 1);
        }
        counts
    }

    #[test]
    fn each_element_is_in_one_partition() {
        for numels in [&[35, 15, 15][..], &[1], &[0, 3, 0], &[7; 9]] {
            let params = params(numels);
            let once: Vec<Vec<usize>> = numels.iter().map(|numel| vec![1; *numel]).collect();
            for ranks in 1..6 {
                let partition = partition_numel(flat_numel(&params).expect("is small"), ranks);
                let flat =
                    (0..ranks).map(|rank| flat_fragments(&params, rank * partition..(rank + 1) * partition));
                assert_eq!(counts(&params, flat), once, "{numels:?} on {ranks}");
                let chunks = (0..ranks).map(|rank| chunk_fragments(&params, rank, ranks));
                assert_eq!(counts(&params, chunks), once, "{numels:?} on {ranks}");
            }
        }
    }

    #[test]
    fn fragments_lie_where_deepspeed_has_them() {
        // fixtures/deepspeed/checkpoints/stage1, of whose second rank DeepSpeed says so
        let params = params(&[35, 15, 15]);
        assert_eq!(partition_numel(65, 2), 34);
        let fragment = |param, start, offset, len| Fragment { param, start, offset, len };
        assert_eq!(flat_fragments(&params, 0..34), [fragment(0, 0, 0, 34)]);
        let second = [fragment(0, 34, 0, 1), fragment(1, 0, 1, 15), fragment(2, 0, 16, 15)];
        assert_eq!(flat_fragments(&params, 34..68), second);
        let chunks = [fragment(0, 18, 0, 17), fragment(1, 8, 18, 7), fragment(2, 8, 26, 7)];
        assert_eq!(chunk_fragments(&params, 1, 2), chunks);
    }

    #[test]
    fn shapes_that_cannot_be_counted_are_none() {
        assert!(FlatParam::new("w", &[-1]).is_none());
        assert!(FlatParam::new("w", &[i64::MAX, 3]).is_none());
        assert_eq!(FlatParam::new("w", &[]).map(|param| param.numel), Some(1));
    }
}
