//! Parameters that lie one behind the other in one tensor, of which each rank has a part.

use std::ops::Range;

use tch::{Kind, Tensor};

use crate::error::Result;
use crate::nn::Parameter;

/// Parameters start, and parts end, at multiples of so many elements: kernels then meet the same groups of elements in a part
/// as in the whole parameter, and give the same bits.
const ALIGN: usize = 16;

/// A parameter and its place.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub fqn: String,
    pub parameter: Parameter,
    /// First element in the flat tensor.
    pub start: usize,
    pub numel: usize,
    pub shape: Vec<i64>,
}

/// Where the parameters of a unit lie, and which part of them a rank has.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    pub places: Vec<Place>,
    /// Elements of a rank's part.
    pub part_len: usize,
    pub ranks: usize,
    pub kind: Kind,
    pub device: tch::Device,
}

impl Layout {
    /// Of parameters of one dtype and device, at least one.
    pub fn of(parameters: Vec<(String, Parameter)>, ranks: usize) -> Self {
        let (kind, device) =
            parameters.first().map_or((Kind::Float, tch::Device::Cpu), |(_, p)| (p.kind(), p.device()));
        let mut start = 0;
        let mut places = Vec::with_capacity(parameters.len());
        for (fqn, parameter) in parameters {
            let (numel, shape) = (parameter.numel(), parameter.size());
            places.push(Place { fqn, parameter, start, numel, shape });
            start += numel.next_multiple_of(ALIGN);
        }
        let part_len = start.div_ceil(ranks).next_multiple_of(ALIGN);
        Self { places, part_len, ranks, kind, device }
    }

    /// The parameters in messages: the first, and how many more there are.
    pub fn title(&self) -> String {
        match &self.places[..] {
            [] => String::new(),
            [only] => only.fqn.clone(),
            [first, more @ ..] => format!("{} and {} more", first.fqn, more.len()),
        }
    }

    /// Elements of the flat tensor.
    pub fn len(&self) -> usize {
        self.part_len * self.ranks
    }

    /// A flat tensor of this layout, whose values are not set but for zeros between the parameters.
    pub fn empty_flat(&self, kind: Kind) -> Result<Tensor> {
        let flat = Tensor::f_empty([self.len() as i64], (kind, self.device))?;
        let ends = self.places.iter().map(|place| place.start + place.numel);
        let starts = self.places.iter().skip(1).map(|place| place.start).chain([self.len()]);
        for (end, start) in ends.zip(starts).filter(|(end, start)| end < start) {
            let _ = narrow(&flat, end..start)?.f_zero_()?;
        }
        Ok(flat)
    }

    /// A view of a flat tensor for each parameter, with its shape.
    pub fn views(&self, flat: &Tensor) -> Result<Vec<Tensor>> {
        let view = |place: &Place| {
            let part = narrow(flat, place.start..place.start + place.numel)?;
            Ok(part.f_view(place.shape.as_slice())?)
        };
        self.places.iter().map(view).collect()
    }

    /// The part of a flat tensor that a rank has.
    pub fn part(&self, flat: &Tensor, rank: usize) -> Result<Tensor> {
        narrow(flat, self.part_range(rank))
    }

    fn part_range(&self, rank: usize) -> Range<usize> {
        rank * self.part_len..(rank + 1) * self.part_len
    }

    /// Which elements of a parameter, flattened, a rank has; perhaps none.
    pub fn range(&self, place: &Place, rank: usize) -> Range<usize> {
        let part = self.part_range(rank);
        let within = |at: usize| at.clamp(place.start, place.start + place.numel) - place.start;
        within(part.start)..within(part.end)
    }

    /// The elements of a parameter in a rank's part, as a view of it.
    pub fn slice(&self, part: &Tensor, place: &Place, rank: usize) -> Result<Tensor> {
        let range = self.range(place, rank);
        let first = (place.start + range.start).saturating_sub(rank * self.part_len);
        let first = if range.is_empty() { 0 } else { first };
        narrow(part, first..first + range.len())
    }
}

pub(super) fn narrow(tensor: &Tensor, range: Range<usize>) -> Result<Tensor> {
    Ok(tensor.f_narrow(0, range.start as i64, range.len() as i64)?)
}

/// A copy in memory of its own.
pub(super) fn copied(tensor: &Tensor) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    let mut copy = Tensor::f_empty(tensor.size(), (tensor.kind(), tensor.device()))?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}

/// Divides parameters, given by what must not be mixed and their elements, into units of at most `cap` elements; the last
/// parameter comes first, since its gradient does. A larger one is alone.
pub(super) fn assign<K: PartialEq>(params: &[(K, usize)], cap: usize) -> Vec<Vec<usize>> {
    let mut units: Vec<(usize, Vec<usize>)> = Vec::new();
    // by key: its open unit
    let mut open: Vec<(&K, usize)> = Vec::new();
    for (index, (key, numel)) in params.iter().enumerate().rev() {
        let known = open.iter().position(|(known, _)| *known == key);
        let fits = known.filter(|&at| units[open[at].1].0 + numel <= cap);
        match (fits, known) {
            (Some(at), _) => {
                let (size, members) = &mut units[open[at].1];
                *size += numel;
                members.push(index);
            }
            (None, known) => {
                units.push((*numel, vec![index]));
                match known {
                    Some(at) => open[at].1 = units.len() - 1,
                    None => open.push((key, units.len() - 1)),
                }
            }
        }
    }
    units.into_iter().map(|(_, members)| members).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameter(size: &[i64]) -> (String, Parameter) {
        (String::new(), Parameter::new(Tensor::ones(size, (Kind::Float, tch::Device::Cpu))))
    }

    #[test]
    fn units_fill_from_the_last_parameter_and_hold_one_kind() {
        assert_eq!(assign(&[('a', 8), ('a', 8), ('a', 8)], 16), [vec![2, 1], vec![0]]);
        assert_eq!(assign(&[('a', 8), ('b', 4), ('a', 8)], 16), [vec![2, 0], vec![1]]);
        assert_eq!(assign(&[('a', 8), ('a', 99), ('a', 8)], 16), [vec![2], vec![1], vec![0]]);
        assert_eq!(assign(&[('a', 0), ('a', 0)], 16), [vec![1, 0]]);
        assert!(assign::<char>(&[], 16).is_empty());
    }

    #[test]
    fn parts_are_all_of_a_parameter_and_fit_together() {
        for ranks in [1, 2, 3, 4, 7] {
            let params = vec![parameter(&[5, 7]), parameter(&[0]), parameter(&[1]), parameter(&[40])];
            let layout = Layout::of(params, ranks);
            assert!(layout.len() >= 35 + 1 + 40);
            let flat = layout.empty_flat(Kind::Float).unwrap();
            for (place, mut view) in layout.places.iter().zip(layout.views(&flat).unwrap()) {
                assert_eq!(view.size(), place.shape);
                view.copy_(
                    &Tensor::arange(place.numel as i64, (Kind::Float, tch::Device::Cpu)).view_(&place.shape),
                );
            }
            for place in &layout.places {
                let parts = (0..ranks).map(|rank| {
                    let part = layout.part(&flat, rank).unwrap();
                    layout.slice(&part, place, rank).unwrap()
                });
                let whole = Tensor::cat(&parts.collect::<Vec<_>>(), 0);
                assert_eq!(whole, Tensor::arange(place.numel as i64, (Kind::Float, tch::Device::Cpu)));
            }
            let used: i64 = layout.places.iter().map(|place| place.numel as i64).sum();
            let zeros = flat.numel() as i64 - flat.count_nonzero(0).int64_value(&[]);
            assert!(zeros <= layout.len() as i64 - used + 3);
        }
    }
}
