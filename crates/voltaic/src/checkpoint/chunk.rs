//! Where elements lie in a tensor: rectangles of it, and what a rank has of one.

use std::ops::Range;

use tch::Tensor;

use crate::error::Result;

/// Corners of the chunks of one tensor; more would take too much memory to check. Those of 65,536 ranks that divide a matrix are fewer.
pub(super) const MAX_CORNERS: usize = 1 << 20;

/// A rectangle of a tensor: in each dimension so many indices from an offset, as in `ChunkStorageMetadata` of
/// torch.distributed.checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// The first index of each dimension.
    pub offsets: Vec<usize>,
    /// The number of indices of each dimension.
    pub sizes: Vec<usize>,
}

impl Chunk {
    /// All of a tensor of this shape.
    pub fn whole(shape: &[usize]) -> Self {
        Self { offsets: vec![0; shape.len()], sizes: shape.to_vec() }
    }

    /// The number of elements.
    pub fn numel(&self) -> usize {
        self.sizes.iter().product()
    }

    /// What is wrong with it as a part of a tensor of this shape.
    pub(super) fn problem(&self, shape: &[usize]) -> Option<String> {
        let Self { offsets, sizes } = self;
        let fits = |((offset, size), all): ((&usize, &usize), &usize)| {
            offset.checked_add(*size).is_some_and(|end| end <= *all)
        };
        let has_dims = [offsets.len(), sizes.len()] == [shape.len(); 2];
        let is_within = has_dims && offsets.iter().zip(sizes).zip(shape).all(fits);
        let what = || format!("has a chunk at {offsets:?} of {sizes:?}, which is not within {shape:?}");
        (!is_within).then(what)
    }

    /// The rectangles that a range of the flattened chunk consists of, in the order of its elements: at most one, and two for each
    /// dimension after the first.
    pub(super) fn rectangles(&self, range: Range<usize>) -> Vec<Self> {
        let mut found = Vec::new();
        self.add_rectangles(0, range, &mut found);
        found
    }

    /// The same for a chunk of one index in each dimension before `dim`.
    fn add_rectangles(&self, dim: usize, range: Range<usize>, found: &mut Vec<Self>) {
        if dim == self.sizes.len() {
            found.extend((!range.is_empty()).then(|| self.clone()));
            return;
        }
        let row: usize = self.sizes[dim + 1..].iter().product();
        let rows = |index: usize, count: usize| {
            let mut chunk = self.clone();
            chunk.offsets[dim] += index;
            chunk.sizes[dim] = count;
            chunk
        };
        let mut start = range.start;
        while start < range.end {
            let (index, first, left) = (start / row, start % row, range.end - start);
            if first == 0 && left >= row {
                let count = left / row;
                found.push(rows(index, count));
                start += count * row;
            } else {
                let len = left.min(row - first);
                rows(index, 1).add_rectangles(dim + 1, first..first + len, found);
                start += len;
            }
        }
    }

    /// Elements of this chunk, flattened, that are in another one of the same tensor, too.
    pub(super) fn runs(&self, other: &Self) -> Runs {
        let mut runs = Runs { own: 0, other: 0, len: 1, outer: Vec::new(), is_done: false };
        let (mut own_stride, mut other_stride, mut is_dense) = (1, 1, true);
        for dim in (0..self.sizes.len()).rev() {
            let (own_first, other_first) = (self.offsets[dim], other.offsets[dim]);
            let first = own_first.max(other_first);
            let size =
                (own_first + self.sizes[dim]).min(other_first + other.sizes[dim]).saturating_sub(first);
            runs.is_done |= size == 0;
            runs.own += (first - own_first) * own_stride;
            runs.other += (first - other_first) * other_stride;
            match is_dense {
                true => runs.len *= size,
                false => runs.outer.push(Outer { size, index: 0, own_stride, other_stride }),
            }
            is_dense &= size == self.sizes[dim] && size == other.sizes[dim];
            own_stride *= self.sizes[dim];
            other_stride *= other.sizes[dim];
        }
        runs
    }
}

/// A dimension of [`Runs`] in which elements do not lie side by side.
#[derive(Debug)]
struct Outer {
    size: usize,
    index: usize,
    own_stride: usize,
    other_stride: usize,
}

/// Elements that two chunks share and that lie side by side in both: the first of them in each flattened chunk, and their number. In
/// the order of the elements.
#[derive(Debug)]
pub(super) struct Runs {
    own: usize,
    other: usize,
    len: usize,
    /// The last dimension first.
    outer: Vec<Outer>,
    is_done: bool,
}

impl Runs {
    /// Whether the chunks share nothing.
    pub fn is_empty(&self) -> bool {
        self.is_done
    }
}

impl Iterator for Runs {
    type Item = (usize, usize, usize);

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_done {
            return None;
        }
        let run = (self.own, self.other, self.len);
        self.is_done = true;
        for outer in &mut self.outer {
            outer.index += 1;
            if outer.index < outer.size {
                self.own += outer.own_stride;
                self.other += outer.other_stride;
                self.is_done = false;
                break;
            }
            outer.index = 0;
            self.own -= (outer.size - 1) * outer.own_stride;
            self.other -= (outer.size - 1) * outer.other_stride;
        }
        Some(run)
    }
}

/// What is wrong with chunks that should be all elements of a tensor of this shape, each once. The shape has no more elements than
/// can be counted.
///
/// A function that is constant on rectangles is zero if and only if its differences at their corners are: each chunk counts +1 or -1
/// at its corners, and so does the whole tensor; the first corner where the two differ is the first element that is in no chunk, or
/// in several. This takes the time of sorting, in any number of dimensions. `corners_left` is how many corners may still be looked at.
pub(super) fn cover_problem<'a>(
    shape: &[usize],
    chunks: impl ExactSizeIterator<Item = &'a Chunk> + Clone,
    corners_left: &mut usize,
) -> Option<String> {
    if let Some(problem) = chunks.clone().find_map(|chunk| chunk.problem(shape)) {
        return Some(problem);
    }
    if chunks.clone().any(|chunk| chunk.sizes.contains(&0)) {
        return Some("has a chunk without elements".to_owned());
    }
    if shape.contains(&0) {
        return None; // it has no elements, and no chunk has any
    }
    let whole = Chunk::whole(shape);
    let is_cut = |dim: &usize| chunks.clone().any(|chunk| chunk.sizes[*dim] != shape[*dim]);
    let cut: Vec<usize> = (0..shape.len()).filter(is_cut).collect();
    let num_corners = u32::try_from(cut.len()).ok().and_then(|cut| 1_usize.checked_shl(cut));
    let total = num_corners.and_then(|corners| corners.checked_mul(chunks.len() + 1));
    let (Some(num_corners), Some(total)) =
        (num_corners, total.filter(|total| *total <= MAX_CORNERS.min(*corners_left)))
    else {
        return Some(format!("has {} chunks that cut {} dimensions: too many", chunks.len(), cut.len()));
    };
    *corners_left -= total;
    // indices of a corner in the order of the elements, and in the lowest bit whether it counts -1
    let mut corners: Vec<u128> = Vec::with_capacity(total);
    for (chunk, is_of_whole) in chunks.map(|chunk| (chunk, false)).chain([(&whole, true)]) {
        for ends in 0..num_corners {
            let index = cut.iter().enumerate().fold(0_u128, |index, (bit, &dim)| {
                let end = if ends >> bit & 1 == 1 { chunk.sizes[dim] } else { 0 };
                index * (shape[dim] as u128 + 1) + (chunk.offsets[dim] + end) as u128
            });
            let is_negative = (ends.count_ones() % 2 == 1) != is_of_whole;
            corners.push(index << 1 | u128::from(is_negative));
        }
    }
    corners.sort_unstable();
    let count = |same: &[u128]| same.iter().map(|corner| 1 - 2 * (corner & 1) as i64).sum::<i64>();
    let differs = corners.chunk_by(|a, b| a >> 1 == b >> 1).find(|same| count(same) != 0)?;
    let mut left = differs[0] >> 1;
    let mut element = vec![0; shape.len()];
    for &dim in cut.iter().rev() {
        let radix = shape[dim] as u128 + 1;
        (element[dim], left) = ((left % radix) as usize, left / radix);
    }
    Some(match count(differs) {
        -1 => format!("has element {element:?} in no chunk"),
        more => format!("has element {element:?} in {} chunks", more + 1),
    })
}

/// What a rank has of a tensor: a range of the elements of some chunks, one behind the other, each in row-major order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardSpec {
    /// Shape of the whole tensor.
    pub shape: Vec<i64>,
    /// All of the tensor, or the rows or columns that tensor parallelism gives the rank: several chunks if it divides the parts of a
    /// packed weight.
    pub chunks: Vec<Chunk>,
    /// Elements of the flattened chunks: all, or the range that ZeRO gives the rank, perhaps an empty one.
    pub range: Range<usize>,
}

impl ShardSpec {
    /// All of a tensor.
    pub fn whole(shape: &[i64]) -> Self {
        Self::of_chunk(shape, Chunk::whole(&usizes(shape)))
    }

    /// A range of the flattened tensor.
    pub fn flat(shape: &[i64], range: Range<usize>) -> Self {
        Self { range, ..Self::whole(shape) }
    }

    /// All of a chunk. [`ShardSpec::range`] may then be narrowed to a part of the flattened chunk.
    pub fn of_chunk(shape: &[i64], chunk: Chunk) -> Self {
        Self::of_chunks(shape, vec![chunk])
    }

    /// All of some chunks.
    pub fn of_chunks(shape: &[i64], chunks: Vec<Chunk>) -> Self {
        Self { shape: shape.to_vec(), range: 0..chunks.iter().map(Chunk::numel).sum(), chunks }
    }

    /// The same elements of another tensor of this shape, flattened; a view if they lie side by side.
    ///
    /// # Errors
    /// libtorch's, if it has another shape.
    pub fn of(&self, whole: &Tensor) -> Result<Tensor> {
        let flat = |chunk: &Chunk| -> Result<Tensor> {
            let mut own = whole.f_detach()?;
            for (dim, (&offset, &size)) in chunk.offsets.iter().zip(&chunk.sizes).enumerate() {
                own = own.f_narrow(dim as i64, offset as i64, size as i64)?;
            }
            Ok(own.f_reshape([-1_i64])?)
        };
        let flat = match &self.chunks[..] {
            [one] => flat(one)?,
            several => Tensor::f_cat(&several.iter().map(flat).collect::<Result<Vec<_>>>()?, 0)?,
        };
        Ok(flat.f_narrow(0, self.range.start as i64, self.range.len() as i64)?)
    }

    /// What is wrong with it.
    pub(super) fn problem(&self) -> Option<String> {
        let Self { shape, chunks, range } = self;
        let shape = usizes(shape);
        chunks.iter().find_map(|chunk| chunk.problem(&shape)).or_else(|| {
            let numel = chunks.iter().map(Chunk::numel).sum();
            let is_within = range.start <= range.end && range.end <= numel;
            (!is_within).then(|| format!("has elements {range:?} of chunks of {numel}"))
        })
    }

    /// The rectangles that it consists of, in the order of its elements.
    pub(super) fn rectangles(&self) -> Vec<Chunk> {
        let (mut found, mut first) = (Vec::new(), 0);
        for chunk in &self.chunks {
            let (start, end) = (first, first + chunk.numel());
            let own = self.range.start.clamp(start, end)..self.range.end.clamp(start, end);
            found.extend(chunk.rectangles(own.start - start..own.end - start));
            first = end;
        }
        found
    }
}

/// A shape of libtorch's, whose sizes are not negative.
pub(super) fn usizes(shape: &[i64]) -> Vec<usize> {
    shape.iter().map(|&size| size as usize).collect()
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    /// A shape, and its rectangles if it is cut at random, each in one dimension.
    fn cut(rng: &mut StdRng) -> (Vec<usize>, Vec<Chunk>) {
        let shape: Vec<usize> = (0..rng.random_range(0..5)).map(|_| rng.random_range(1..6)).collect();
        let mut chunks = vec![Chunk::whole(&shape)];
        for _ in 0..rng.random_range(0..8) {
            let at = rng.random_range(0..chunks.len());
            let dims: Vec<usize> = (0..shape.len()).filter(|&dim| chunks[at].sizes[dim] > 1).collect();
            let Some(&dim) = dims.get(rng.random_range(0..dims.len().max(1))) else { continue };
            let mut rest = chunks[at].clone();
            let first = rng.random_range(1..rest.sizes[dim]);
            (rest.offsets[dim], rest.sizes[dim]) = (rest.offsets[dim] + first, rest.sizes[dim] - first);
            chunks[at].sizes[dim] = first;
            chunks.push(rest);
        }
        (shape, chunks)
    }

    /// In how many chunks each element is, by going through all of them.
    fn counts(shape: &[usize], chunks: &[Chunk]) -> Vec<(Vec<usize>, usize)> {
        let elements = (0..shape.iter().product()).map(|flat: usize| {
            let mut left = flat;
            let mut element: Vec<usize> =
                shape.iter().rev().map(|size| (left % size, left /= size).0).collect();
            element.reverse();
            element
        });
        let is_in = |chunk: &Chunk, element: &[usize]| {
            let mut dims = element.iter().zip(chunk.offsets.iter().zip(&chunk.sizes));
            dims.all(|(at, (offset, size))| (*offset..offset + size).contains(at))
        };
        elements.map(|at| (at.clone(), chunks.iter().filter(|chunk| is_in(chunk, &at)).count())).collect()
    }

    #[test]
    fn the_first_element_that_is_not_covered_once_is_found() {
        let mut rng = StdRng::seed_from_u64(7);
        let mut found = [0; 3];
        for _ in 0..4000 {
            let (shape, mut chunks) = cut(&mut rng);
            match rng.random_range(0..4) {
                0 => drop(chunks.swap_remove(rng.random_range(0..chunks.len()))),
                1 => chunks.push(chunks[rng.random_range(0..chunks.len())].clone()),
                2 if !shape.is_empty() => {
                    let (at, dim) = (rng.random_range(0..chunks.len()), rng.random_range(0..shape.len()));
                    let offset = rng.random_range(0..shape[dim]);
                    chunks[at].offsets[dim] = offset;
                    chunks[at].sizes[dim] = rng.random_range(1..=shape[dim] - offset);
                }
                _ => {}
            }
            let expected = counts(&shape, &chunks).into_iter().find(|(_, count)| *count != 1);
            let expected = expected.map(|(element, count)| match count {
                0 => format!("has element {element:?} in no chunk"),
                count => format!("has element {element:?} in {count} chunks"),
            });
            found[expected.as_ref().map_or(0, |text| 1 + usize::from(text.ends_with("chunks")))] += 1;
            assert_eq!(
                cover_problem(&shape, chunks.iter(), &mut MAX_CORNERS.clone()),
                expected,
                "{shape:?} {chunks:?}"
            );
        }
        assert!(found.iter().all(|count| *count > 500), "{found:?}");
    }

    #[test]
    fn chunks_that_would_take_too_long_to_check_are_refused() {
        let shape = vec![2; 40];
        let half = |offset| Chunk { offsets: vec![offset; 40], sizes: vec![1; 40] };
        let problem = cover_problem(&shape, [half(0), half(1)].iter(), &mut MAX_CORNERS.clone()).unwrap();
        assert_eq!(problem, "has 2 chunks that cut 40 dimensions: too many");
        // many rows, in any order
        let rows = |row: usize| Chunk { offsets: vec![row * 7 % 100_003, 0], sizes: vec![1, 9] };
        let mut rows: Vec<Chunk> = (0..100_003).map(rows).collect();
        let problem = |rows: &[Chunk]| cover_problem(&[100_003, 9], rows.iter(), &mut MAX_CORNERS.clone());
        assert_eq!(problem(&rows), None);
        rows[5].offsets[0] += 1;
        assert_eq!(problem(&rows).unwrap(), "has element [35, 0] in no chunk");
    }

    #[test]
    fn runs_and_rectangles_are_the_elements_of_a_shard() {
        let mut rng = StdRng::seed_from_u64(11);
        for _ in 0..2000 {
            let (shape, chunks) = cut(&mut rng);
            let sizes: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
            let numel = sizes.iter().product::<i64>();
            let whole = Tensor::arange(numel, (tch::Kind::Int64, tch::Device::Cpu)).view(sizes.as_slice());
            let chunk = chunks[rng.random_range(0..chunks.len())].clone();
            let mut shard = ShardSpec::of_chunk(&sizes, chunk);
            let start = rng.random_range(0..=shard.range.end);
            shard.range = start..rng.random_range(start..=shard.range.end);
            assert_eq!(shard.problem(), None);
            let expected = Vec::<i64>::try_from(shard.of(&whole).unwrap()).unwrap();
            let rectangles = shard.rectangles();
            assert!(rectangles.len() < (2 * shape.len()).max(2), "{shard:?} {rectangles:?}");
            // from the chunks of the whole tensor into the rectangles, which lie one behind the other
            let mut own = vec![-1; expected.len()];
            let mut first = 0;
            for wanted in &rectangles {
                for stored in &chunks {
                    let of = ShardSpec::of_chunk(&sizes, stored.clone()).of(&whole).unwrap();
                    let of = Vec::<i64>::try_from(of).unwrap();
                    for (from, to, len) in stored.runs(wanted) {
                        own[first + to..first + to + len].copy_from_slice(&of[from..from + len]);
                    }
                }
                first += wanted.numel();
            }
            assert_eq!(own, expected, "{shard:?}");
        }
    }
}
