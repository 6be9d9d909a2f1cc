//! Which slice of a tensor a rank has.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use tch::Tensor;

use crate::checkpoint::{Chunk, ShardSpec};
use crate::distributed::ProcessGroup;
use crate::error::{Problem, Result};

/// How the indices of a dimension are divided among ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Division {
    size: i64,
    /// By rank, in order: a range of each part.
    ranges: Vec<Vec<Range<i64>>>,
}

impl Division {
    /// Divides each of `parts` equal parts of a dimension of this size among so many ranks, in whole units of `unit` indices; earlier
    /// ranks get the units that are left over.
    pub fn new(size: i64, parts: i64, unit: i64, ranks: usize) -> Result<Self, Problem> {
        if parts < 1 || unit < 1 || size % (parts * unit) != 0 {
            let what = format!("{size} features are not {parts} part(s) in units of {unit}");
            return Err(Problem::new(what, "give parts and a unit whose product divides the features"));
        }
        let (part, ranks) = (size / parts, ranks as i64);
        let units = part / unit;
        if units < ranks {
            let what = match unit {
                1 => format!("{units} features for {ranks} ranks"),
                _ => format!("{units} units (heads) of {unit} features for {ranks} ranks"),
            };
            return Err(Problem::new(what, format!("use at most {units} ranks, or leave the layer whole")));
        }
        let first = |rank: i64| (rank * (units / ranks) + rank.min(units % ranks)) * unit;
        let of_rank = |rank: i64| {
            let own = first(rank)..first(rank + 1);
            (0..parts).map(|index| index * part + own.start..index * part + own.end).collect()
        };
        Ok(Self { size, ranges: (0..ranks).map(of_rank).collect() })
    }

    /// Indices of all ranks.
    pub fn size(&self) -> i64 {
        self.size
    }

    /// Indices of a rank.
    pub fn len(&self, rank: usize) -> i64 {
        self.of(rank).iter().map(|range| range.end - range.start).sum()
    }

    fn of(&self, rank: usize) -> &[Range<i64>] {
        self.ranges.get(rank).map_or(&[], Vec::as_slice)
    }

    /// The first index of a rank, of the first part.
    pub fn start(&self, rank: usize) -> i64 {
        self.of(rank).first().map_or(0, |range| range.start)
    }

    /// A rank's indices of a tensor that has all, without copying if they lie side by side.
    pub fn slice(&self, whole: &Tensor, dim: i64, rank: usize) -> Result<Tensor> {
        let narrow = |range: &Range<i64>| whole.f_narrow(dim, range.start, range.end - range.start);
        match self.of(rank) {
            [one] => Ok(narrow(one)?),
            several => Ok(Tensor::f_cat(&several.iter().map(narrow).collect::<Result<Vec<_>, _>>()?, dim)?),
        }
    }

    /// All indices, of the slices that the ranks of a group have.
    ///
    /// # Collective
    /// All ranks of the group.
    pub fn gather(&self, group: &ProcessGroup, local: &Tensor, dim: i64) -> Result<Tensor> {
        let _no_grad = tch::no_grad_guard();
        let ranks = group.world_size();
        let longest = (0..ranks).map(|rank| self.len(rank)).max().unwrap_or(0);
        let missing = longest - self.len(group.rank());
        let own = match missing {
            0 => local.f_detach()?,
            _ => {
                let mut size = local.size();
                let at = usize::try_from(dim).unwrap_or_default();
                size[at] = missing; // collectives need the same sizes on all ranks
                let padding = local.f_new_zeros(&size, (local.f_kind()?, local.device()))?;
                Tensor::f_cat(&[local.f_detach()?, padding], dim)?
            }
        };
        let gathered = group.all_gather(&own)?;
        let mut size = local.size();
        size[usize::try_from(dim).unwrap_or_default()] = self.size;
        let whole = local.f_new_empty(&size, (local.f_kind()?, local.device()))?;
        for rank in 0..ranks {
            let (from, mut at) = (gathered.f_get(rank as i64)?, 0);
            for range in self.of(rank) {
                let len = range.end - range.start;
                whole.f_narrow(dim, range.start, len)?.f_copy_(&from.f_narrow(dim, at, len)?)?;
                at += len;
            }
        }
        Ok(whole)
    }
}

/// The slice that this rank has of a parameter, and those of the others.
#[derive(Clone)]
pub struct TensorShard {
    group: Arc<ProcessGroup>,
    shape: Vec<i64>,
    dim: usize,
    division: Division,
}

impl fmt::Debug for TensorShard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Shard({}) of {:?}, rank {}", self.dim, self.shape, self.group.rank())
    }
}

impl PartialEq for TensorShard {
    fn eq(&self, other: &Self) -> bool {
        self.group.is_same(&other.group)
            && (&self.shape, self.dim, &self.division) == (&other.shape, other.dim, &other.division)
    }
}

impl TensorShard {
    /// Of a tensor of this shape, whose dimension `dim` is divided so among the ranks of the group.
    pub(crate) fn new(group: Arc<ProcessGroup>, shape: Vec<i64>, dim: usize, division: Division) -> Self {
        Self { group, shape, dim, division }
    }

    /// The same among the ranks of another group.
    pub(crate) fn among(&self, group: &Arc<ProcessGroup>) -> Self {
        Self { group: group.clone(), ..self.clone() }
    }

    /// Shape of the whole tensor.
    pub fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// The dimension that is divided.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// The ranks that have slices.
    pub fn group(&self) -> &Arc<ProcessGroup> {
        &self.group
    }

    /// Shape of this rank's slice.
    pub fn local_shape(&self) -> Vec<i64> {
        let mut shape = self.shape.clone();
        shape[self.dim] = self.division.len(self.group.rank());
        shape
    }

    /// Whether all ranks have as much.
    pub(crate) fn is_even(&self) -> bool {
        (0..self.group.world_size()).all(|rank| self.division.len(rank) == self.division.len(0))
    }

    /// A copy of this rank's slice of the whole tensor.
    ///
    /// # Errors
    /// libtorch's.
    pub fn slice(&self, whole: &Tensor) -> Result<Tensor> {
        let slice = self.division.slice(&whole.f_detach()?, self.dim as i64, self.group.rank())?;
        let mut copy = slice.f_new_empty(slice.size(), (slice.f_kind()?, slice.device()))?;
        copy.f_copy_(&slice)?;
        Ok(copy)
    }

    /// The whole tensor.
    ///
    /// # Collective
    /// All ranks of the group.
    ///
    /// # Errors
    /// [`DistributedError`](crate::error::DistributedError) if a rank is gone; if memory is short.
    pub fn whole(&self, local: &Tensor) -> Result<Tensor> {
        self.division.gather(&self.group, local, self.dim as i64)
    }

    /// Where the elements of this rank's slice lie, in the order that they have in it.
    pub(crate) fn spec(&self) -> ShardSpec {
        let sizes: Vec<usize> = self.shape.iter().map(|&size| size as usize).collect();
        let of_range = |range: &Range<i64>| {
            let mut chunk = Chunk::whole(&sizes);
            chunk.offsets[self.dim] = range.start as usize;
            chunk.sizes[self.dim] = (range.end - range.start) as usize;
            chunk
        };
        let chunks = self.division.of(self.group.rank()).iter().map(of_range).collect();
        ShardSpec::of_chunks(&self.shape, chunks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// First and end of each range, by rank.
    fn ranges(size: i64, parts: i64, unit: i64, ranks: usize) -> Vec<Vec<(i64, i64)>> {
        let ends = |range: Range<i64>| (range.start, range.end);
        let of_ranks = Division::new(size, parts, unit, ranks).unwrap().ranges.into_iter();
        of_ranks.map(|own| own.into_iter().map(ends).collect()).collect()
    }

    #[test]
    fn whole_units_of_each_part_are_divided_and_all_are_given() {
        assert_eq!(ranges(10, 1, 1, 3), [[(0, 4)], [(4, 7)], [(7, 10)]]);
        assert_eq!(ranges(12, 1, 4, 2), [[(0, 8)], [(8, 12)]]);
        assert_eq!(ranges(24, 3, 4, 2), [[(0, 4), (8, 12), (16, 20)], [(4, 8), (12, 16), (20, 24)]]);
        for (size, parts, unit, ranks) in [(64, 1, 1, 3), (96, 3, 8, 4), (30, 2, 5, 3)] {
            let all = ranges(size, parts, unit, ranks).into_iter().flatten();
            let mut all: Vec<i64> = all.flat_map(|(start, end)| start..end).collect();
            all.sort_unstable();
            assert_eq!(all, (0..size).collect::<Vec<_>>());
        }
    }

    #[test]
    fn what_cannot_be_divided_is_refused() {
        for (size, parts, unit, ranks, expected) in [
            (10, 1, 4, 2, "10 features are not 1 part(s) in units of 4"),
            (10, 0, 1, 2, "0 part(s)"),
            (2, 1, 1, 3, "2 features for 3 ranks"),
            (24, 3, 4, 3, "2 units (heads) of 4 features for 3 ranks; use at most 2 ranks"),
        ] {
            let problem = Division::new(size, parts, unit, ranks).unwrap_err();
            let text = format!("{}; {}", problem.what, problem.remedy);
            assert!(text.contains(expected), "{text}");
        }
    }
}
