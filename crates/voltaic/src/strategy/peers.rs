//! What strategies of several ranks have in common: all start from the same module, and act on the same votes.

use tch::{Kind, Tensor};

use super::votes::Votes;
use crate::distributed::{ProcessGroup, Work, collective_scope};
use crate::dtype::bytes_of;
use crate::error::{ConfigError, DistributedError, Result};
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

/// An exchange of all ranks' votes in progress. They are gathered in memory of the host, so that no rank waits for its device,
/// and not summed, so that a rank waits until the others have sent theirs, and no longer.
#[derive(Debug)]
pub(super) struct SentVotes(Work<Tensor>);

impl SentVotes {
    /// Sends this rank's votes.
    pub fn start(group: &ProcessGroup, votes: Votes) -> Result<Self> {
        let _named = collective_scope("stops, signals and batches without a loss");
        group.start_all_gather(&Tensor::f_from_slice(&votes.numbers())?).map(Self)
    }

    /// Waits for those of all ranks. Returns them together.
    ///
    /// # Errors
    /// On all ranks, if the batch has a loss on some ranks only.
    pub fn receive(self) -> Result<Votes> {
        let all = Vec::<f32>::try_from(&self.0.wait()?.f_view([-1_i64])?)?;
        let all: Vec<&[f32]> = all.chunks_exact(Votes::COUNT).collect();
        let sums = std::array::from_fn(|at| all.iter().map(|numbers| numbers[at]).sum());
        let votes = Votes::from_numbers(sums);
        if [0, all.len()].contains(&votes.without_loss) {
            return Ok(votes);
        }
        let of = |has_loss: bool| {
            let has = |numbers: &[f32]| numbers[Votes::COUNT - 1] == 0.0;
            let ranks = all.iter().enumerate().filter(|(_, numbers)| has(numbers) == has_loss);
            ranks.map(|(rank, _)| format!("rank {rank}")).collect::<Vec<_>>().join(", ")
        };
        let what = format!("no loss on {} (ctx.no_loss()), but one on {}", of(false), of(true));
        let remedy = "return a loss on all ranks, such as the loss times 0.0, or on none";
        Err(ConfigError::new("training_step", what, remedy).into())
    }
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
