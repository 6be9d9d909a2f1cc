//! The operations on tensors, each as one that waits and one that is started.

use std::borrow::Cow;

use tch::{Kind, Tensor};

use super::group::ProcessGroup;
use super::work::{Underway, Work};
use crate::error::{ConfigError, Result};
use crate::ffi::{Backend, HostPeers, ReduceOp};

fn refused<T>(op: &str, what: String, remedy: impl Into<Cow<'static, str>>) -> Result<T> {
    Err(ConfigError::new(op, what, remedy).into())
}

/// An empty tensor like `tensor`, of another size.
fn empty(tensor: &Tensor, size: &[i64]) -> Result<Tensor> {
    Ok(tensor.f_new_empty(size, (tensor.kind(), tensor.device()))?)
}

/// A tensor of 8 bits, which Gloo does not know, as bytes in the same memory; another one as it is.
fn as_bytes(tensor: &Tensor) -> Result<Tensor> {
    match tensor.kind() {
        Kind::Float8e4m3fn | Kind::Float8e5m2 => Ok(tensor.f_view_dtype(Kind::Uint8)?),
        _ => Ok(tensor.shallow_clone()),
    }
}

fn copy(tensor: &Tensor) -> Result<Tensor> {
    let mut copy = empty(tensor, &tensor.size())?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}

impl ProcessGroup {
    /// Replaces `tensor` on all ranks by the reduction of all. It must be contiguous.
    ///
    /// With Gloo the sum of two ranks is exact up to its one rounding; more ranks are added in ring order. Ranks on one
    /// host add float32 and bfloat16 in memory that they share, in their order and in float32.
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<()> {
        self.start_all_reduce(tensor, op)?.wait()
    }

    /// Starts [`ProcessGroup::all_reduce`].
    pub fn start_all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Work> {
        match self.shared.host_peers_for(tensor) {
            Some(host_peers) if op == ReduceOp::Sum && HostPeers::can_sum(tensor) => {
                self.begin("all_reduce", tensor, None, |_| {
                    host_peers.start_sum(tensor).map(Underway::Summing)
                })
            }
            _ => self.start("all_reduce", tensor, None, |backend| backend.all_reduce(tensor, op)),
        }
    }

    /// Replaces `tensor` on all ranks by that of rank `root`. It must be contiguous.
    pub fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<()> {
        self.start_broadcast(tensor, root)?.wait()
    }

    /// Starts [`ProcessGroup::broadcast`].
    pub fn start_broadcast(&self, tensor: &Tensor, root: usize) -> Result<Work> {
        self.check_peer("broadcast", root)?;
        let tensor = &as_bytes(tensor)?;
        self.start("broadcast", tensor, None, |backend| backend.broadcast(tensor, root))
    }

    /// Replaces `tensor` on rank `root` by the reduction of all; those of the others stay as they are. It must be
    /// contiguous.
    pub fn reduce(&self, tensor: &Tensor, root: usize, op: ReduceOp) -> Result<()> {
        self.start_reduce(tensor, root, op)?.wait()
    }

    /// Starts [`ProcessGroup::reduce`].
    pub fn start_reduce(&self, tensor: &Tensor, root: usize, op: ReduceOp) -> Result<Work> {
        self.check_peer("reduce", root)?;
        // the back ends leave parts of the sum in the others' tensors; Gloo has no mean here
        let divides = op == ReduceOp::Avg && self.shared.is_for_gloo(tensor);
        if divides && !tensor.is_floating_point() {
            let what = format!("the mean of {:?}, which is not a whole number", tensor.kind());
            return refused("reduce", what, "convert to a floating-point dtype, or use ReduceOp::Sum");
        }
        let op = if divides { ReduceOp::Sum } else { op };
        let given = tensor.f_detach()?;
        let is_root = self.rank() == root;
        let worked = if is_root { given.shallow_clone() } else { copy(&given)? };
        let work = self.start("reduce", &worked, None, |backend| backend.reduce(&worked, root, op))?;
        if !(divides && is_root) {
            return Ok(work);
        }
        let ranks = self.world_size() as f64;
        Ok(work.then(move || {
            let _no_grad = tch::no_grad_guard();
            let _ = given.shallow_clone().f_div_scalar_(ranks)?;
            Ok(())
        }))
    }

    /// The tensors of all ranks in order, stacked: shape `[world_size, ..tensor.size()]`.
    pub fn all_gather(&self, tensor: &Tensor) -> Result<Tensor> {
        self.start_all_gather(tensor)?.wait()
    }

    /// Starts [`ProcessGroup::all_gather`].
    pub fn start_all_gather(&self, tensor: &Tensor) -> Result<Work<Tensor>> {
        let input = tensor.f_contiguous()?;
        let output = empty(&input, &self.stacked_size(&input))?;
        let work = self.start_all_gather_into(&output, &input)?;
        Ok(work.then(move || Ok(output)))
    }

    /// Fills `output` with the `input`s of all ranks in order, one behind the other in memory; both contiguous, `output`
    /// with `world_size` times as many elements (`all_gather_into_tensor`). `input` may be this rank's part of `output`.
    pub fn all_gather_into(&self, output: &Tensor, input: &Tensor) -> Result<()> {
        self.start_all_gather_into(output, input)?.wait()
    }

    /// Starts [`ProcessGroup::all_gather_into`].
    pub fn start_all_gather_into(&self, output: &Tensor, input: &Tensor) -> Result<Work> {
        self.check_parts("all_gather", output, input)?;
        let (flat, part) = (as_bytes(&output.f_view([-1_i64])?)?, as_bytes(&input.f_view([-1_i64])?)?);
        match self.shared.host_peers_for(&part) {
            Some(host_peers) if HostPeers::can_gather(&part) => {
                let start = |_: &Backend| host_peers.start_all_gather(&flat, &part).map(Underway::Summing);
                self.begin("all_gather", &part, None, start)
            }
            _ => self.start("all_gather", &part, None, |backend| backend.all_gather(&part, &flat)),
        }
    }

    /// Reduces the tensors of all ranks and returns this rank's part of the first dimension, which `world_size` must
    /// divide: shape `[n / world_size, ..]` from `[n, ..]`.
    pub fn reduce_scatter(&self, tensor: &Tensor, op: ReduceOp) -> Result<Tensor> {
        self.start_reduce_scatter(tensor, op)?.wait()
    }

    /// Starts [`ProcessGroup::reduce_scatter`].
    pub fn start_reduce_scatter(&self, tensor: &Tensor, op: ReduceOp) -> Result<Work<Tensor>> {
        let size = self.part_size("reduce_scatter", tensor)?;
        let input = tensor.f_contiguous()?;
        let output = empty(&input, &size)?;
        let work = self.start_reduce_scatter_into(&output, &input, op)?;
        Ok(work.then(move || Ok(output)))
    }

    /// Reduces the `input`s of all ranks and fills `output` with this rank's part; both contiguous, `input` with
    /// `world_size` times as many elements (`reduce_scatter_tensor`).
    pub fn reduce_scatter_into(&self, output: &Tensor, input: &Tensor, op: ReduceOp) -> Result<()> {
        self.start_reduce_scatter_into(output, input, op)?.wait()
    }

    /// Starts [`ProcessGroup::reduce_scatter_into`].
    pub fn start_reduce_scatter_into(&self, output: &Tensor, input: &Tensor, op: ReduceOp) -> Result<Work> {
        self.check_parts("reduce_scatter", input, output)?;
        let (flat, part) = (input.f_view([-1_i64])?, output.f_view([-1_i64])?);
        match self.shared.host_peers_for(&flat) {
            Some(host_peers) if op == ReduceOp::Sum && HostPeers::can_sum(&flat) => {
                let start =
                    |_: &Backend| host_peers.start_reduce_scatter(&part, &flat).map(Underway::Summing);
                self.begin("reduce_scatter", &flat, None, start)
            }
            _ => {
                self.start("reduce_scatter", &flat, None, |backend| backend.reduce_scatter(&flat, &part, op))
            }
        }
    }

    /// The tensors of all ranks in order on rank `root`, stacked: shape `[world_size, ..tensor.size()]`; nothing on the
    /// others.
    pub fn gather(&self, tensor: &Tensor, root: usize) -> Result<Option<Tensor>> {
        self.start_gather(tensor, root)?.wait()
    }

    /// Starts [`ProcessGroup::gather`].
    pub fn start_gather(&self, tensor: &Tensor, root: usize) -> Result<Work<Option<Tensor>>> {
        self.check_peer("gather", root)?;
        let input = tensor.f_contiguous()?;
        let output =
            if self.rank() == root { Some(empty(&input, &self.stacked_size(&input))?) } else { None };
        let target = output.as_ref().unwrap_or(&input);
        let work = self.start("gather", &input, None, |backend| backend.gather(&input, target, root))?;
        Ok(work.then(move || Ok(output)))
    }

    /// Fills `output`, contiguous, with this rank's part of what rank `root` gives: `input` of shape
    /// `[world_size, ..output.size()]`, which the others leave out.
    pub fn scatter(&self, output: &Tensor, input: Option<&Tensor>, root: usize) -> Result<()> {
        self.start_scatter(output, input, root)?.wait()
    }

    /// Starts [`ProcessGroup::scatter`].
    pub fn start_scatter(&self, output: &Tensor, input: Option<&Tensor>, root: usize) -> Result<Work> {
        const OP: &str = "scatter";
        self.check_peer(OP, root)?;
        let expected = self.stacked_size(output);
        let input = match input {
            _ if self.rank() != root => None,
            Some(input) if input.size() == expected && input.kind() == output.kind() => {
                Some(input.f_contiguous()?)
            }
            Some(input) => {
                let (size, kind) = (input.size(), input.kind());
                let what = format!("input has shape {size:?} and {kind:?}");
                let remedy = format!("give shape {expected:?} and {:?}, a part for each rank", output.kind());
                return refused(OP, what, remedy);
            }
            None => return refused(OP, format!("no input on rank {root}"), "give it on rank `root`"),
        };
        let source = input.as_ref().unwrap_or(output);
        self.start(OP, output, None, |backend| backend.scatter(source, output, root))
    }

    /// Sends each rank its part of the first dimension, which `world_size` must divide, and returns the parts that come
    /// from all ranks in their order, in the same shape.
    pub fn all_to_all(&self, tensor: &Tensor) -> Result<Tensor> {
        self.start_all_to_all(tensor)?.wait()
    }

    /// Starts [`ProcessGroup::all_to_all`].
    pub fn start_all_to_all(&self, tensor: &Tensor) -> Result<Work<Tensor>> {
        let rows = self.part_size("all_to_all", tensor)?[0];
        let splits = vec![rows; self.world_size()];
        self.start_all_to_all_with_splits(tensor, &splits, &splits)
    }

    /// [`ProcessGroup::all_to_all`] with parts of different lengths: rows of the first dimension for each rank, and from
    /// each rank, which must be as many as that rank sends (`all_to_all_single`).
    pub fn all_to_all_with_splits(
        &self,
        tensor: &Tensor,
        input_splits: &[i64],
        output_splits: &[i64],
    ) -> Result<Tensor> {
        self.start_all_to_all_with_splits(tensor, input_splits, output_splits)?.wait()
    }

    /// Starts [`ProcessGroup::all_to_all_with_splits`].
    pub fn start_all_to_all_with_splits(
        &self,
        tensor: &Tensor,
        input_splits: &[i64],
        output_splits: &[i64],
    ) -> Result<Work<Tensor>> {
        const OP: &str = "all_to_all";
        let ranks = self.world_size();
        let mut size = tensor.size();
        for splits in [input_splits, output_splits] {
            if splits.len() != ranks || splits.iter().any(|rows| *rows < 0) {
                let what = format!("splits {splits:?} for {ranks} ranks");
                return refused(OP, what, "give a number of rows, from 0, for each rank");
            }
        }
        let rows: i64 = input_splits.iter().sum();
        if size.first() != Some(&rows) {
            let what = format!("shape {size:?} with splits {input_splits:?}");
            return refused(OP, what, "the splits must add up to the first dimension");
        }
        size[0] = output_splits.iter().sum();
        let input = tensor.f_contiguous()?;
        let output = empty(&input, &size)?;
        let start = |backend: &Backend| backend.all_to_all(&input, input_splits, &output, output_splits);
        let work = self.start(OP, &input, None, start)?;
        Ok(work.then(move || Ok(output)))
    }

    /// Sends a tensor to rank `peer`, which must call [`ProcessGroup::recv`].
    pub fn send(&self, tensor: &Tensor, peer: usize) -> Result<()> {
        self.start_send(tensor, peer)?.wait()
    }

    /// Starts [`ProcessGroup::send`] (`isend`).
    pub fn start_send(&self, tensor: &Tensor, peer: usize) -> Result<Work> {
        self.check_partner("send", peer)?;
        let tensor = tensor.f_contiguous()?;
        self.start("send", &tensor, Some(peer), |backend| backend.send(&tensor, peer))
    }

    /// Fills a contiguous tensor with what rank `peer` sends.
    pub fn recv(&self, tensor: &Tensor, peer: usize) -> Result<()> {
        self.start_recv(tensor, peer)?.wait()
    }

    /// Starts [`ProcessGroup::recv`] (`irecv`).
    pub fn start_recv(&self, tensor: &Tensor, peer: usize) -> Result<Work> {
        self.check_partner("recv", peer)?;
        self.start("recv", tensor, Some(peer), |backend| backend.recv(tensor, peer))
    }

    /// Returns when all ranks have called it.
    pub fn barrier(&self) -> Result<()> {
        self.start_barrier()?.wait()
    }

    /// Starts [`ProcessGroup::barrier`].
    pub fn start_barrier(&self) -> Result<Work> {
        self.start("barrier", &Tensor::new(), None, Backend::barrier)
    }

    fn stacked_size(&self, part: &Tensor) -> Vec<i64> {
        std::iter::once(self.world_size() as i64).chain(part.size()).collect()
    }

    /// The size of a rank's part of `tensor`.
    fn part_size(&self, op: &str, tensor: &Tensor) -> Result<Vec<i64>> {
        let (mut size, ranks) = (tensor.size(), self.world_size() as i64);
        match size.first_mut() {
            Some(first) if *first % ranks == 0 => {
                *first /= ranks;
                Ok(size)
            }
            _ => {
                let what = format!("shape {size:?} cannot be divided among {ranks} ranks");
                refused(op, what, "pad the first dimension")
            }
        }
    }

    /// Whether `whole` has room for as many `part`s as there are ranks.
    fn check_parts(&self, op: &str, whole: &Tensor, part: &Tensor) -> Result<()> {
        let (len, parts) = (whole.numel(), part.numel() * self.world_size());
        if len != parts || whole.kind() != part.kind() {
            let what = format!("{len} elements of {:?} for {parts} of {:?}", whole.kind(), part.kind());
            return refused(op, what, "the whole has world_size times the elements of a part, and its dtype");
        }
        if !whole.is_contiguous() || !part.is_contiguous() {
            return refused(op, "a tensor that is not contiguous".to_owned(), "call contiguous() first");
        }
        Ok(())
    }

    fn check_partner(&self, op: &str, peer: usize) -> Result<()> {
        if peer == self.rank() {
            return refused(op, format!("rank {peer} with itself"), "name another rank");
        }
        self.check_peer(op, peer)
    }
}
