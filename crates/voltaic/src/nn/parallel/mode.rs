//! How a layer is divided, which the layer itself keeps.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use tch::{Kind, Tensor};

use super::regions::{copy_to_group, gather_from_group, slice_for_group, sum_over_group};
use super::shard::Division;
use crate::distributed::ProcessGroup;
use crate::error::Result;
use crate::nn::fp8_linear::rounded_bias;
use crate::nn::parameter::Parameter;

/// A layer of which each rank of a group has a slice.
pub(crate) struct Parallel {
    pub group: Arc<ProcessGroup>,
    pub division: Division,
    pub side: Side,
}

/// What of a layer is divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// What it gives: output features, vectors of an embedding, heads of attention.
    Output { is_gathered: bool },
    /// What it takes: input features, indices of an embedding.
    Input,
}

impl Parallel {
    /// Size of this rank's slice.
    pub fn len(&self) -> i64 {
        self.division.len(self.group.rank())
    }

    /// The first index of this rank's slice.
    pub fn start(&self) -> i64 {
        self.division.start(self.group.rank())
    }

    /// The product of a linear layer, of which `product` computes this rank's part from an input with so many features. A bias that is
    /// added to the sum of the parts is rounded as a product in float8 rounds its own if `is_fp8`.
    pub fn product(
        &self,
        input: &Tensor,
        (in_features, bias, is_fp8): (i64, Option<&Parameter>, bool),
        product: impl FnOnce(&Tensor, i64, Option<&Parameter>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let Self { group, division, side } = self;
        match side {
            Side::Output { is_gathered } => {
                let output = product(&copy_to_group(group, input)?, in_features, bias)?;
                if *is_gathered { gather_from_group(group, division, &output) } else { Ok(output) }
            }
            Side::Input => {
                let is_whole = input.size().last() == Some(&division.size());
                let own = if is_whole { Some(slice_for_group(group, division, input)?) } else { None };
                let total =
                    sum_over_group(group, &product(own.as_ref().unwrap_or(input), self.len(), None)?)?;
                match (bias, total.f_kind()?) {
                    (Some(bias), Kind::Float) if is_fp8 => Ok(total.f_add(&rounded_bias(bias)?)?),
                    (Some(bias), kind) => Ok(total.f_add(&bias.f_to_kind(kind)?)?),
                    (None, _) => Ok(total),
                }
            }
        }
    }

    /// What a table of vectors gives for these indices, of which `look_up` has this rank's slice.
    pub fn look_up(
        &self,
        indices: &Tensor,
        look_up: impl FnOnce(&Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let Self { group, division, side } = self;
        match side {
            Side::Output { is_gathered } => {
                let own = look_up(indices)?;
                if *is_gathered { gather_from_group(group, division, &own) } else { Ok(own) }
            }
            Side::Input => {
                let start = self.start();
                let below = indices.f_ge(0)?.f_logical_and(&indices.f_lt(start)?)?;
                let above =
                    indices.f_ge(start + self.len())?.f_logical_and(&indices.f_lt(division.size())?)?;
                let of_others = below.f_logical_or(&above)?;
                // what is no index at all stays one that the look-up refuses
                let own = indices.f_sub_scalar(start)?.f_masked_fill(&of_others, 0)?;
                let found = look_up(&own)?.f_masked_fill(&of_others.f_unsqueeze(-1)?, 0)?;
                sum_over_group(group, &found)
            }
        }
    }
}

/// Whether and how a layer is divided.
#[derive(Default)]
pub(crate) struct ParallelMode(RefCell<Option<Arc<Parallel>>>);

impl ParallelMode {
    pub fn get(&self) -> Option<Arc<Parallel>> {
        self.0.borrow().clone()
    }

    pub fn set(&self, parallel: Option<Parallel>) {
        *self.0.borrow_mut() = parallel.map(Arc::new);
    }
}

impl fmt::Display for ParallelMode {
    /// What a layer's debug text says of it: nothing unless it is divided.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.get().map(|parallel| (parallel.side, parallel.group.rank(), parallel.group.world_size())) {
            None => Ok(()),
            Some((Side::Output { .. }, rank, ranks)) => write!(f, ", colwise {rank} of {ranks}"),
            Some((Side::Input, rank, ranks)) => write!(f, ", rowwise {rank} of {ranks}"),
        }
    }
}

impl fmt::Debug for ParallelMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ParallelMode({self})")
    }
}
