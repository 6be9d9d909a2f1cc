//! Parameters that lie one behind the other in one tensor, of which each rank has a shard.

use std::ops::Range;

use tch::{Kind, Tensor};

use crate::distributed::ProcessGroup;
use crate::error::{ConfigError, Result};
use crate::ffi;
use crate::nn::Parameter;

/// Parameters start, and shards end, at multiples of so many elements: kernels then meet the same groups of elements in a shard
/// as in the unsharded parameter, and give the same bits.
const ALIGN: usize = 16;

/// Elements of a shard that may be left free so that kernels are cut between their outputs.
const SLACK: usize = 1024;

/// A parameter and its place.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub fqn: String,
    pub parameter: Parameter,
    /// First element in the flat tensor.
    pub start: usize,
    pub numel: usize,
    pub shape: Vec<i64>,
    /// The order of its elements in memory.
    pub order: MemoryOrder,
}

/// Where the parameters of a unit lie, and which shard of them a rank has.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    pub places: Vec<Place>,
    /// Elements of a rank's shard.
    pub shard_len: usize,
    pub ranks: usize,
    pub kind: Kind,
    /// Where the weights are, and what is computed with them.
    pub device: tch::Device,
    /// Where a rank's shard is, its gradients and what the optimizer keeps of it.
    pub storage: tch::Device,
    /// Where the weight shard is: what sharded weights are gathered from.
    pub weight_shard_storage: tch::Device,
    /// Offloaded tensors are in pinned memory.
    pub pins: bool,
    /// Whether the shard, and what the optimizer keeps of it, are in files between steps.
    pub swaps_shard: bool,
    /// Whether the weight shard is in a file.
    pub swaps_weight_shard: bool,
}

impl Layout {
    /// Of parameters of one dtype and device, at least one.
    pub fn of(parameters: Vec<(String, Parameter)>, ranks: usize) -> Self {
        let (kind, device) =
            parameters.first().map_or((Kind::Float, tch::Device::Cpu), |(_, p)| (p.kind(), p.device()));
        let mut orders: Vec<MemoryOrder> =
            parameters.iter().map(|(_, parameter)| MemoryOrder::of(parameter.leaf())).collect();
        let sizes = |orders: &[MemoryOrder]| -> Vec<Size> {
            let numels = parameters.iter().map(|(_, parameter)| parameter.numel());
            numels.zip(orders).map(|(numel, order)| Size { numel, step: order.step() }).collect()
        };
        let (starts, shard_len) = arrange(&sizes(&orders), ranks).unwrap_or_else(|| {
            orders.iter_mut().for_each(|order| *order = MemoryOrder::Rows);
            side_by_side(&sizes(&orders), ranks)
        });
        let place = |(((fqn, parameter), start), order): (((String, Parameter), usize), MemoryOrder)| {
            let (numel, shape) = (parameter.numel(), parameter.size());
            Place { fqn, parameter, start, numel, shape, order }
        };
        let places = parameters.into_iter().zip(starts).zip(orders).map(place).collect();
        let (storage, weight_shard_storage) = (device, device);
        let (pins, swaps_shard, swaps_weight_shard) = (false, false, false);
        Self {
            places,
            shard_len,
            ranks,
            kind,
            device,
            storage,
            weight_shard_storage,
            pins,
            swaps_shard,
            swaps_weight_shard,
        }
    }

    /// The parameters in messages: the first, and how many more there are.
    pub fn title(&self) -> String {
        match &self.places[..] {
            [] => String::new(),
            [only] => only.fqn.clone(),
            [first, more @ ..] => format!("{} and {} more", first.fqn, more.len()),
        }
    }

    /// Whether a rank's shard is on another device than the weights.
    pub fn is_stored_apart(&self) -> bool {
        self.storage != self.device
    }

    /// A copy of a tensor in another dtype and on another device; in pinned memory if it is offloaded, and that is to be so.
    pub fn stored(&self, tensor: &Tensor, kind: Kind, device: tch::Device) -> Result<Tensor> {
        let is_offloaded = device == tch::Device::Cpu && device != self.device;
        let copy = copied_to(tensor, kind, device)?;
        match is_offloaded && self.pins {
            true => {
                let pinned = ffi::empty_pinned(&copy)?;
                pinned.shallow_clone().f_copy_(&copy)?;
                Ok(pinned)
            }
            false => Ok(copy),
        }
    }

    /// Whether nothing of the unit is on another device than the weights.
    pub fn has_shard_beside_weights(&self) -> bool {
        !self.is_stored_apart() && self.weight_shard_storage == self.device
    }

    /// Elements of the flat tensor.
    pub fn len(&self) -> usize {
        self.shard_len * self.ranks
    }

    /// A flat tensor of this layout, whose values are not set but for zeros between the parameters.
    pub fn empty_flat(&self, kind: Kind) -> Result<Tensor> {
        let flat = Tensor::f_empty([self.len() as i64], (kind, self.device))?;
        let ends = [0].into_iter().chain(self.places.iter().map(|place| place.start + place.numel));
        let starts = self.places.iter().map(|place| place.start).chain([self.len()]);
        for (end, start) in ends.zip(starts).filter(|(end, start)| end < start) {
            let _ = narrow(&flat, end..start)?.f_zero_()?;
        }
        Ok(flat)
    }

    /// Unsharded tensors like the parameters, from what each rank has of them; this one has `sharded_params`. Zeros where no rank has any.
    ///
    /// # Collective
    /// All ranks of `group` must call it.
    pub fn unsharded(
        &self,
        rank: usize,
        group: Option<&ProcessGroup>,
        sharded_params: &[Option<Tensor>],
        kind: Kind,
    ) -> Result<Vec<Tensor>> {
        let _no_grad = tch::no_grad_guard();
        let len = [self.shard_len as i64];
        let shard = Tensor::f_zeros(len, (kind, self.device))?;
        for (place, sharded) in self.places.iter().zip(sharded_params) {
            if let Some(sharded) = sharded {
                self.param_shard(&shard, place, rank)?.f_copy_(sharded)?;
            }
        }
        let flat = match group {
            Some(group) if self.shard_len > 0 => group.all_gather(&shard)?.f_view([-1_i64])?,
            _ => shard,
        };
        self.views(&flat)
    }

    /// A view of a flat tensor for each parameter, with its shape and order in memory.
    pub fn views(&self, flat: &Tensor) -> Result<Vec<Tensor>> {
        let view = |place: &Place| place.shaped(&narrow(flat, place.start..place.start + place.numel)?);
        self.places.iter().map(view).collect()
    }

    /// Parameters that were given other data ([`Parameter::set_data`]) become views of the flat tensor again, with its values.
    pub fn take_data(&self, flat: &Tensor) -> Result<()> {
        let (first, element) = (flat.data_ptr().addr(), self.kind.elt_size_in_bytes());
        let is_elsewhere = |place: &&Place| {
            place.numel > 0 && place.parameter.leaf().data_ptr().addr() != first + place.start * element
        };
        for (index, place) in self.places.iter().enumerate().filter(|(_, place)| is_elsewhere(place)) {
            let leaf = place.parameter.leaf();
            let (own, found) = ((&place.shape, self.kind), (&leaf.size(), leaf.kind()));
            if own != found || leaf.device() != self.device {
                let what = format!(
                    "{} has become {found:?} on {:?}, and was {own:?} on {:?}",
                    place.fqn,
                    leaf.device(),
                    self.device
                );
                let remedy = "move and cast modules before the fit";
                return Err(ConfigError::new("trainer.strategy", what, remedy).into());
            }
            let _no_grad = tch::no_grad_guard();
            let mut view = self.views(flat)?.swap_remove(index);
            view.f_copy_(leaf)?;
            leaf.shallow_clone().f_set_data(&view)?;
        }
        Ok(())
    }

    /// The shard of a flat tensor that a rank has.
    pub fn shard(&self, flat: &Tensor, rank: usize) -> Result<Tensor> {
        narrow(flat, self.shard_range(rank))
    }

    fn shard_range(&self, rank: usize) -> Range<usize> {
        rank * self.shard_len..(rank + 1) * self.shard_len
    }

    /// Which elements of a parameter, flattened, a rank has; perhaps none. In memory they may have another order.
    pub fn range(&self, place: &Place, rank: usize) -> Range<usize> {
        let shard = self.shard_range(rank);
        let within = |at: usize| at.clamp(place.start, place.start + place.numel) - place.start;
        within(shard.start)..within(shard.end)
    }

    /// The elements of a parameter in a rank's shard, as a view of it, in their order in memory.
    pub fn param_shard(&self, shard: &Tensor, place: &Place, rank: usize) -> Result<Tensor> {
        let range = self.range(place, rank);
        let first = (place.start + range.start).saturating_sub(rank * self.shard_len);
        let first = if range.is_empty() { 0 } else { first };
        narrow(shard, first..first + range.len())
    }
}

/// In which order a parameter's elements lie in memory, one behind the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum MemoryOrder {
    /// The last dimension first.
    Rows,
    /// Another one, within each index of the first dimension, such as a kernel's with the channels last.
    Permuted { stride: Vec<i64>, dims: Vec<i64>, row_len: usize },
}

impl MemoryOrder {
    /// That of a tensor, if it is one that is kept: others come into rows.
    pub fn of(tensor: &Tensor) -> Self {
        let (size, stride) = (tensor.size(), tensor.stride());
        let mut dims: Vec<usize> = (0..size.len()).collect();
        dims.sort_by_key(|dim| std::cmp::Reverse((stride[*dim], size[*dim])));
        let mut expected = 1;
        let is_dense = dims.iter().rev().filter(|dim| size[**dim] != 1).all(|dim| {
            let fits = stride[*dim] == expected;
            expected *= size[*dim];
            fits
        });
        let is_in_rows = tensor.is_contiguous() && stride.windows(2).all(|pair| pair[0] >= pair[1]);
        if !is_dense || is_in_rows || tensor.numel() == 0 || dims.first() != Some(&0) {
            return Self::Rows;
        }
        let row_len = tensor.numel() / size[0] as usize;
        Self::Permuted { stride, dims: dims.into_iter().map(|dim| dim as i64).collect(), row_len }
    }

    /// A parameter may be cut at multiples of so many elements: between two indices of the first dimension, if it is not in rows.
    fn step(&self) -> usize {
        match self {
            Self::Rows => ALIGN,
            Self::Permuted { row_len, .. } => {
                let shared = (1..=ALIGN)
                    .rev()
                    .find(|divisor| ALIGN.is_multiple_of(*divisor) && row_len.is_multiple_of(*divisor));
                row_len * ALIGN / shared.unwrap_or(1)
            }
        }
    }
}

impl Place {
    /// Elements that lie in memory as the parameter's, all of them, as a view with its shape.
    pub fn shaped(&self, elements: &Tensor) -> Result<Tensor> {
        Ok(match &self.order {
            MemoryOrder::Rows => elements.f_view(self.shape.as_slice())?,
            MemoryOrder::Permuted { stride, .. } => {
                elements.f_as_strided(self.shape.as_slice(), stride.as_slice(), None)?
            }
        })
    }

    /// Elements that lie in memory as the parameter's, in the order of the flattened parameter: all, or a rank's.
    pub fn to_rows(&self, elements: &Tensor) -> Result<Tensor> {
        let MemoryOrder::Permuted { dims, .. } = &self.order else { return Ok(elements.shallow_clone()) };
        let in_memory: Vec<i64> = dims.iter().map(|dim| self.shape[*dim as usize]).collect();
        let mut back = vec![0; dims.len()];
        dims.iter().enumerate().for_each(|(at, dim)| back[*dim as usize] = at as i64);
        reordered(elements, in_memory, &back)
    }

    /// Elements of the flattened parameter, all or a rank's, in the order in which they lie in memory.
    pub fn to_memory_order(&self, elements: &Tensor) -> Result<Tensor> {
        let MemoryOrder::Permuted { dims, .. } = &self.order else { return Ok(elements.shallow_clone()) };
        reordered(elements, self.shape.clone(), dims)
    }
}

/// Elements of whole indices of the first dimension, of which there may be fewer, with the dimensions in this order.
fn reordered(elements: &Tensor, mut shape: Vec<i64>, dims: &[i64]) -> Result<Tensor> {
    shape[0] = -1;
    if elements.numel() == 0 {
        return Ok(elements.shallow_clone());
    }
    Ok(elements.f_reshape(shape.as_slice())?.f_permute(dims)?.f_reshape([-1_i64])?)
}

/// A parameter that is to be placed.
#[derive(Debug, Clone, Copy)]
struct Size {
    numel: usize,
    /// It may be cut at multiples of so many elements.
    step: usize,
}

/// Where parameters start, one behind the other, and the length of a shard.
fn side_by_side(sizes: &[Size], ranks: usize) -> (Vec<usize>, usize) {
    let mut end = 0;
    let starts = sizes.iter().map(|size| {
        let start = end;
        end += size.numel.next_multiple_of(ALIGN);
        start
    });
    let starts = starts.collect();
    (starts, end.div_ceil(ranks).next_multiple_of(ALIGN))
}

/// The same with each parameter cut where it may be. Nothing if that takes more than a sixteenth more memory, and [`SLACK`].
fn arrange(sizes: &[Size], ranks: usize) -> Option<(Vec<usize>, usize)> {
    let (starts, least) = side_by_side(sizes, ranks);
    if sizes.iter().all(|size| size.step == ALIGN) {
        return Some((starts, least));
    }
    let mut shard_len = least;
    while shard_len <= least + least / 16 + SLACK {
        shard_len = match place(sizes, shard_len) {
            Ok((starts, end)) if end <= shard_len * ranks => return Some((starts, shard_len)),
            Ok((_, end)) => shard_len + (end - shard_len * ranks).div_ceil(ranks).next_multiple_of(ALIGN),
            Err(step) => shard_len.next_multiple_of(step),
        };
    }
    None
}

/// Where parameters start and the last one ends, with shards of this length.
///
/// # Errors
/// With the step of a parameter that is longer than a shard, if the length is no multiple of it.
fn place(sizes: &[Size], shard_len: usize) -> Result<(Vec<usize>, usize), usize> {
    let mut end = 0;
    let mut starts = Vec::with_capacity(sizes.len());
    for Size { numel, step } in sizes.iter().copied() {
        let mut start = end;
        let mut cut = (start / shard_len + 1) * shard_len;
        if cut < start + numel {
            start += (cut - start) % step;
            cut = if start == cut { cut + shard_len } else { cut };
            if cut + shard_len < start + numel && !shard_len.is_multiple_of(step) {
                return Err(step);
            }
            if cut < start + numel && !(cut - start).is_multiple_of(step) {
                return Err(step); // it starts with a shard, and is longer
            }
        }
        starts.push(start);
        end = start + numel.next_multiple_of(ALIGN);
    }
    Ok((starts, end))
}

pub(super) fn narrow(tensor: &Tensor, range: Range<usize>) -> Result<Tensor> {
    Ok(tensor.f_narrow(0, range.start as i64, range.len() as i64)?)
}

/// A copy in memory of its own.
pub(super) fn copied(tensor: &Tensor) -> Result<Tensor> {
    copied_to(tensor, tensor.kind(), tensor.device())
}

/// The same in another dtype and on another device.
pub(super) fn copied_to(tensor: &Tensor, kind: Kind, device: tch::Device) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    let mut copy = Tensor::f_empty(tensor.size(), (kind, device))?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}

/// Divides parameters, given by what must not be mixed and their elements, into units of at most `cap` elements. A larger one is
/// alone. Units are in the order in which backward completes their gradients: that whose first parameter is the last of the module
/// comes first, so that one with parameters of many layers does not hold back the others.
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
    let mut units: Vec<Vec<usize>> = units.into_iter().map(|(_, members)| members).collect();
    units.sort_by_key(|members| std::cmp::Reverse(members.last().copied()));
    units
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
        assert_eq!(assign(&[('a', 8), ('b', 4), ('a', 8)], 16), [vec![1], vec![2, 0]]);
        assert_eq!(assign(&[('a', 8), ('a', 99), ('a', 8)], 16), [vec![2], vec![1], vec![0]]);
        assert_eq!(assign(&[('a', 0), ('a', 0)], 16), [vec![1, 0]]);
        assert!(assign::<char>(&[], 16).is_empty());
    }

    fn channels_last(size: &[i64]) -> (String, Parameter) {
        let numel: i64 = size.iter().product();
        let numbers = Tensor::arange(numel, (Kind::Float, tch::Device::Cpu)).reshape(size);
        let order: Vec<i64> = vec![0, 2, 3, 1];
        let kept = numbers.permute(order).contiguous().permute([0_i64, 3, 1, 2]);
        (String::new(), Parameter::new(kept))
    }

    #[test]
    fn kernels_stay_in_their_order_and_are_cut_between_outputs() {
        let _no_grad = tch::no_grad_guard();
        for ranks in [1, 2, 3, 4] {
            let sizes: [&[i64]; 3] = [&[6, 1, 3, 3], &[64, 20, 3, 3], &[33, 5, 1, 1]];
            let params = sizes.iter().map(|size| channels_last(size)).chain([parameter(&[40])]);
            let layout = Layout::of(params.collect(), ranks);
            let flat = layout.empty_flat(Kind::Float).unwrap();
            for (place, mut view) in layout.places.iter().zip(layout.views(&flat).unwrap()).take(3) {
                assert_eq!(view.stride(), place.parameter.leaf().stride(), "{ranks} ranks");
                view.copy_(place.parameter.leaf());
                let rows = Tensor::arange(place.numel as i64, (Kind::Float, tch::Device::Cpu));
                for rank in 0..ranks {
                    let shard = layout.shard(&flat, rank).unwrap();
                    let own = layout.param_shard(&shard, place, rank).unwrap();
                    let in_rows = place.to_rows(&own).unwrap();
                    assert_eq!(in_rows, narrow(&rows, layout.range(place, rank)).unwrap(), "{ranks} ranks");
                    assert_eq!(place.to_memory_order(&in_rows).unwrap(), own);
                }
            }
        }
    }

    #[test]
    fn kernels_come_into_rows_where_cutting_them_would_take_much_memory() {
        let layout = Layout::of(vec![channels_last(&[4, 1000, 3, 3])], 7);
        assert_eq!(layout.places[0].order, MemoryOrder::Rows);
        assert!(layout.len() < 36_000 + 7 * ALIGN);
    }

    #[test]
    fn shards_are_all_of_a_parameter_and_fit_together() {
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
                let shards = (0..ranks).map(|rank| {
                    let shard = layout.shard(&flat, rank).unwrap();
                    layout.param_shard(&shard, place, rank).unwrap()
                });
                let unsharded = Tensor::cat(&shards.collect::<Vec<_>>(), 0);
                assert_eq!(unsharded, Tensor::arange(place.numel as i64, (Kind::Float, tch::Device::Cpu)));
            }
            let used: i64 = layout.places.iter().map(|place| place.numel as i64).sum();
            let zeros = flat.numel() as i64 - flat.count_nonzero(0).int64_value(&[]);
            assert!(zeros <= layout.len() as i64 - used + 3);
        }
    }
}
