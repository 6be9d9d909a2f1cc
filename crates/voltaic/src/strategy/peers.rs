//! What strategies of several ranks have in common: all start from the same module, and act on the same votes.

use tch::{Kind, Tensor};

use super::votes::Votes;
use crate::distributed::{DeviceMesh, ProcessGroup, ReduceOp, SubMesh, collective_scope};
use crate::dtype::bytes_of;
use crate::error::{ConfigError, DistributedError, Error, Result};
use crate::nn::{Module, ModuleExt};

/// All ranks start from the values of rank 0.
///
/// # Errors
/// [`DistributedError::Mismatch`] on each rank whose module differs from rank 0's.
pub(super) fn start_equal(group: &ProcessGroup, module: &dyn Module) -> Result<()> {
    same_modules(group, module)?;
    let values = module.parameters().into_iter().map(|parameter| parameter.detach());
    broadcast(group, values.chain(module.named_buffers().into_iter().map(|(_, buffer)| buffer.detach())))
}

/// Buffers become rank 0's.
pub(super) fn broadcast_buffers(group: &ProcessGroup, module: &dyn Module) -> Result<()> {
    let _named = collective_scope("buffers");
    broadcast(group, module.named_buffers().into_iter().map(|(_, buffer)| buffer.detach()))
}

/// The votes of all ranks together.
pub(super) fn agree(group: &ProcessGroup, votes: Votes) -> Result<Votes> {
    let sums = Tensor::f_from_slice(&votes.numbers())?;
    group.all_reduce(&sums, ReduceOp::Sum)?;
    let mut numbers = [0_f32; Votes::COUNT];
    sums.f_copy_data(&mut numbers, Votes::COUNT)?;
    Ok(Votes::from_numbers(numbers))
}

/// The votes of all ranks, from those that the data-parallel ranks of each place in the other dimensions have put together.
pub(super) fn agree_beyond_dp(mesh: &DeviceMesh, votes: Votes) -> Result<Votes> {
    let groups = [&mesh.tp, &mesh.pp].into_iter().filter_map(SubMesh::group);
    groups.into_iter().try_fold(votes, |votes, group| agree(group, votes))
}

/// The error of a batch that has a loss on some ranks only.
///
/// # Collective
/// All ranks must call it.
pub(super) fn some_without_loss(group: &ProcessGroup, has_loss: bool) -> Result<Error> {
    let _named = collective_scope("ranks without a loss");
    let told = group.all_gather_object(&has_loss)?;
    let of = |wanted: bool| {
        let ranks = told.iter().enumerate().filter(|(_, has_loss)| **has_loss == wanted);
        ranks.map(|(rank, _)| format!("rank {rank}")).collect::<Vec<_>>().join(", ")
    };
    let what = format!("no loss on {} (ctx.no_loss()), but one on {}", of(false), of(true));
    let remedy = "return a loss on all ranks, such as the loss times 0.0, or on none";
    Ok(ConfigError::new("training_step", what, remedy).into())
}

/// Bytes of a message in which tensors become rank 0's, as in PyTorch's DDP.
const BROADCAST_BYTES: usize = 250 << 20;

/// All tensors become rank 0's, those of one dtype in messages of at most [`BROADCAST_BYTES`]; a larger tensor is alone.
fn broadcast(group: &ProcessGroup, tensors: impl Iterator<Item = Tensor>) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    let mut by_kind: Vec<(Kind, usize, Vec<Tensor>)> = Vec::new();
    for tensor in tensors {
        let bytes = bytes_of(&tensor);
        let of_kind = by_kind.iter_mut().find(|(kind, ..)| *kind == tensor.kind());
        match of_kind {
            None => by_kind.push((tensor.kind(), bytes, vec![tensor])),
            Some((_, sum, members)) => {
                if *sum + bytes > BROADCAST_BYTES {
                    broadcast_together(group, std::mem::take(members))?;
                    *sum = 0;
                }
                *sum += bytes;
                members.push(tensor);
            }
        }
    }
    by_kind.into_iter().try_for_each(|(_, _, members)| broadcast_together(group, members))
}

fn broadcast_together(group: &ProcessGroup, members: Vec<Tensor>) -> Result<()> {
    let flat: Vec<Tensor> =
        members.iter().map(|tensor| tensor.f_reshape([-1_i64])).collect::<Result<_, _>>()?;
    let flat = Tensor::f_cat(&flat, 0)?;
    group.broadcast(&flat, 0)?;
    if group.rank() == 0 {
        return Ok(());
    }
    let mut start = 0;
    for tensor in members {
        let len = tensor.numel() as i64;
        let values = flat.f_narrow(0, start, len)?.f_view(tensor.size().as_slice())?;
        tensor.shallow_clone().f_copy_(&values)?;
        start += len;
    }
    Ok(())
}

/// An error on each rank whose module differs from rank 0's.
pub(super) fn same_modules(group: &ProcessGroup, module: &dyn Module) -> Result<()> {
    let parameters = module.named_parameters().into_iter().map(|(fqn, p)| {
        let is_trained = if p.requires_grad() { "trained" } else { "frozen" };
        format!("{fqn} of shape {:?}, {:?}, {is_trained}", p.size(), p.kind())
    });
    let buffers = module
        .named_buffers()
        .into_iter()
        .map(|(fqn, b)| format!("{fqn} of shape {:?}, {:?}", b.size(), b.kind()));
    let own: Vec<String> = parameters.chain(buffers).collect();
    let first = group.broadcast_object(&own, 0)?;
    if own == first {
        return Ok(());
    }
    let at = own.iter().zip(&first).take_while(|(own, first)| own == first).count();
    let word = |list: &[String]| list.get(at).cloned().unwrap_or_else(|| "nothing more".to_owned());
    let what = format!("{} where rank 0 has {}", word(&own), word(&first));
    Err(DistributedError::Mismatch { rank: group.rank(), what }.into())
}
