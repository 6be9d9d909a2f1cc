//! Operations between ranks.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::{Kind, Tensor};

use super::deadline::within;
use crate::error::{CollectiveFailure, ConfigError, DistributedError, Error, Result, TorchError};
use crate::ffi::{Backend, Neighbours, ReduceOp, Store, Summing, Work};

/// How long a rank whose operation failed waits to see which ranks it failed on, too.
const INQUEST: Duration = Duration::from_secs(2);
/// How much longer it waits for a store that does not answer.
const INQUEST_GRACE: Duration = Duration::from_secs(1);

/// Ranks that are connected.
///
/// All ranks call the same operations in the same order, with tensors of the same shape and dtype, on the devices that the
/// back end serves: Gloo the CPU and emulated HPUs, whose memory it reads and writes where it is; NCCL GPUs and HCCL
/// Gaudi cards, which tensors of the host pass through. An operation fails if a rank is gone, or does not come within
/// the time-out; after that the group is of no use.
///
/// # Collective
/// All methods but [`ProcessGroup::send`], [`ProcessGroup::recv`] and the getters: all ranks must call them.
///
/// # Errors
/// [`DistributedError::Collective`] if an operation fails.
#[derive(Debug)]
pub struct ProcessGroup {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// Locked to start an operation, so that the sequence number is the order.
    backend: Mutex<(Backend, u64)>,
    name: &'static str,
    /// If all ranks share memory.
    neighbours: Option<Neighbours>,
    /// Where ranks tell each other of failures.
    store: Arc<Store>,
    rank: usize,
    world_size: usize,
}

/// An operation under way; its tensors must be left alone until [`Pending::wait`] returns. Dropping it waits, too.
#[derive(Debug)]
pub struct Pending {
    work: Underway,
    call: Call,
    group: Arc<Shared>,
}

/// By the back end, or by memory that ranks share.
#[derive(Debug)]
enum Underway {
    Work(Work),
    Summing(Summing),
}

/// An operation as far as errors need it.
#[derive(Debug, Clone, Copy)]
struct Call {
    op: &'static str,
    seq: u64,
    bytes: usize,
    /// The only other rank that takes part.
    peer: Option<usize>,
}

impl Pending {
    /// Waits until the operation is done.
    ///
    /// # Errors
    /// [`DistributedError::Collective`].
    pub fn wait(self) -> Result<()> {
        let Self { work, call, group } = self;
        let done = match work {
            Underway::Work(work) => work.wait(),
            Underway::Summing(summing) => summing.wait(),
        };
        done.map_err(|error| group.failure(call, &error))
    }
}

impl ProcessGroup {
    /// A group over a back end that is connected. `store` is this group's own.
    pub(crate) fn new(
        backend: Backend,
        name: &'static str,
        store: Arc<Store>,
        rank: usize,
        world_size: usize,
    ) -> Self {
        let backend = Mutex::new((backend, 0));
        Self { shared: Arc::new(Shared { backend, name, neighbours: None, store, rank, world_size }) }
    }

    /// The group with memory that all ranks share, if they do.
    pub(crate) fn with_neighbours(self, neighbours: Option<Neighbours>) -> Self {
        let shared = Arc::into_inner(self.shared).map(|shared| Shared { neighbours, ..shared });
        Self { shared: Arc::new(shared.expect("a group that was just made is used by nobody else")) }
    }

    /// Global rank of this process.
    pub fn rank(&self) -> usize {
        self.shared.rank
    }

    /// Ranks in the group.
    pub fn world_size(&self) -> usize {
        self.shared.world_size
    }

    /// The back end: `gloo`, `nccl` or `hccl`.
    pub fn backend(&self) -> &'static str {
        self.shared.name
    }

    /// Whether sums go through memory that all ranks share, which are on one host then.
    pub fn shares_memory(&self) -> bool {
        self.shared.neighbours.is_some()
    }

    /// Replaces `tensor` on all ranks by the reduction of all. It must be contiguous.
    ///
    /// With Gloo the sum of two ranks is exact up to its one rounding; more ranks are added in ring order. Ranks on one
    /// host add float32 and bfloat16 in memory that they share, in their order and in float32.
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<()> {
        self.start_all_reduce(tensor, op)?.wait()
    }

    /// Starts [`ProcessGroup::all_reduce`].
    pub fn start_all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Pending> {
        match &self.shared.neighbours {
            Some(neighbours) if op == ReduceOp::Sum && Neighbours::can_sum(tensor) => {
                self.begin("all_reduce", tensor, None, |_| {
                    neighbours.start_sum(tensor).map(Underway::Summing)
                })
            }
            _ => self.start("all_reduce", tensor, None, |backend| backend.all_reduce(tensor, op)),
        }
    }

    /// Replaces `tensor` on all ranks by that of rank `root`. It must be contiguous.
    pub fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<()> {
        self.check_peer("broadcast", root)?;
        self.start("broadcast", tensor, None, |backend| backend.broadcast(tensor, root))?.wait()
    }

    /// The tensors of all ranks in order, stacked: shape `[world_size, ..tensor.size()]`.
    pub fn all_gather(&self, tensor: &Tensor) -> Result<Tensor> {
        let input = tensor.f_contiguous()?;
        let size: Vec<i64> = std::iter::once(self.world_size() as i64).chain(tensor.size()).collect();
        let output = input.f_new_empty(&size, (input.kind(), input.device()))?;
        let flat = output.f_flatten(0, -1)?;
        let flat_input = input.f_reshape([-1_i64])?;
        self.start("all_gather", &input, None, |backend| backend.all_gather(&flat_input, &flat))?.wait()?;
        Ok(output)
    }

    /// Reduces the tensors of all ranks and returns this rank's part of the first dimension, which `world_size` must
    /// divide: shape `[n / world_size, ..]` from `[n, ..]`.
    pub fn reduce_scatter(&self, tensor: &Tensor, op: ReduceOp) -> Result<Tensor> {
        let mut size = tensor.size();
        let ranks = self.world_size() as i64;
        match size.first_mut() {
            Some(first) if *first % ranks == 0 => *first /= ranks,
            _ => {
                let what = format!("shape {:?} cannot be divided among {ranks} ranks", tensor.size());
                return Err(ConfigError::new("reduce_scatter", what, "pad the first dimension").into());
            }
        }
        let input = tensor.f_contiguous()?;
        let output = input.f_new_empty(&size, (input.kind(), input.device()))?;
        self.start("reduce_scatter", &input, None, |backend| backend.reduce_scatter(&input, &output, op))?
            .wait()?;
        Ok(output)
    }

    /// Sends a tensor to rank `peer`, which must call [`ProcessGroup::recv`].
    pub fn send(&self, tensor: &Tensor, peer: usize) -> Result<()> {
        self.check_peer("send", peer)?;
        let tensor = tensor.f_contiguous()?;
        self.start("send", &tensor, Some(peer), |backend| backend.send(&tensor, peer))?.wait()
    }

    /// Fills a contiguous tensor with what rank `peer` sends.
    pub fn recv(&self, tensor: &Tensor, peer: usize) -> Result<()> {
        self.check_peer("recv", peer)?;
        self.start("recv", tensor, Some(peer), |backend| backend.recv(tensor, peer))?.wait()
    }

    /// Returns when all ranks have called it.
    pub fn barrier(&self) -> Result<()> {
        self.start("barrier", &Tensor::new(), None, Backend::barrier)?.wait()
    }

    /// The value that rank `root` gives; others' arguments are not looked at.
    pub fn broadcast_object<T: Serialize + DeserializeOwned>(&self, value: &T, root: usize) -> Result<T> {
        let bytes = if self.rank() == root { to_bytes(value)? } else { Vec::new() };
        let len = Tensor::from(bytes.len() as i64);
        self.broadcast(&len, root)?;
        let len = len.f_int64_value(&[])?;
        let data = if self.rank() == root {
            Tensor::f_from_slice(&bytes)?
        } else {
            Tensor::f_zeros([len], (Kind::Uint8, tch::Device::Cpu))?
        };
        self.broadcast(&data, root)?;
        from_bytes(&data)
    }

    /// The values that the ranks give, in their order.
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Vec<T>> {
        let bytes = to_bytes(value)?;
        let lens = self.all_gather(&Tensor::from(bytes.len() as i64))?;
        let lens: Vec<i64> = Vec::try_from(&lens)?;
        let max = lens.iter().copied().max().unwrap_or(0);
        let mut padded = bytes;
        padded.resize(max as usize, 0);
        let all = self.all_gather(&Tensor::f_from_slice(&padded)?)?;
        let parts = lens.into_iter().enumerate();
        parts.map(|(rank, len)| from_bytes(&all.f_get(rank as i64)?.f_narrow(0, 0, len)?)).collect()
    }

    /// What each rank gives, on rank `root` in the order of the ranks; nothing on the others.
    pub fn gather_bytes(&self, bytes: &[u8], root: usize) -> Result<Vec<Vec<u8>>> {
        self.check_peer("gather_bytes", root)?;
        let lens = self.all_gather(&Tensor::from(bytes.len() as i64))?;
        let lens: Vec<i64> = Vec::try_from(&lens)?;
        if self.rank() != root {
            if !bytes.is_empty() {
                self.send(&Tensor::f_from_slice(bytes)?, root)?;
            }
            return Ok(Vec::new());
        }
        let receive = |(rank, &len): (usize, &i64)| {
            if rank == root {
                return Ok(bytes.to_vec());
            }
            let data = Tensor::f_zeros([len], (Kind::Uint8, tch::Device::Cpu))?;
            if len > 0 {
                self.recv(&data, rank)?;
            }
            to_vec(&data)
        };
        lens.iter().enumerate().map(receive).collect()
    }

    /// The sum over the ranks as a new tensor, through which gradients flow: the gradient of each rank's input is the
    /// sum over the ranks of the outputs'.
    ///
    /// # Collective
    /// In backward, too.
    pub fn differentiable_sum(&self, tensor: &Tensor) -> Result<Tensor> {
        let mut backend = self.shared.lock();
        let call = self.shared.next(&mut backend, "all_reduce", tensor, None);
        let sum = backend.0.differentiable_sum(tensor);
        drop(backend);
        sum.map_err(|error| self.shared.failure(call, &error))
    }

    fn start(
        &self,
        op: &'static str,
        tensor: &Tensor,
        peer: Option<usize>,
        body: impl FnOnce(&Backend) -> Result<Work, TorchError>,
    ) -> Result<Pending> {
        self.begin(op, tensor, peer, |backend| body(backend).map(Underway::Work))
    }

    fn begin(
        &self,
        op: &'static str,
        tensor: &Tensor,
        peer: Option<usize>,
        body: impl FnOnce(&Backend) -> Result<Underway, TorchError>,
    ) -> Result<Pending> {
        if tensor.defined() && !tensor.is_contiguous() {
            let what = format!("a tensor of shape {:?} that is not contiguous", tensor.size());
            return Err(ConfigError::new(op, what, "call contiguous() first").into());
        }
        let mut backend = self.shared.lock();
        let call = self.shared.next(&mut backend, op, tensor, peer);
        let work = body(&backend.0);
        drop(backend);
        match work {
            Ok(work) => Ok(Pending { work, call, group: self.shared.clone() }),
            Err(error) => Err(self.shared.failure(call, &error)),
        }
    }

    fn check_peer(&self, op: &str, peer: usize) -> Result<()> {
        if peer < self.world_size() {
            return Ok(());
        }
        let what = format!("rank {peer} of {}", self.world_size());
        Err(ConfigError::new(op, what, "ranks count from 0 to world_size - 1").into())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, (Backend, u64)> {
        self.backend.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives an operation its number.
    fn next(
        &self,
        backend: &mut MutexGuard<'_, (Backend, u64)>,
        op: &'static str,
        tensor: &Tensor,
        peer: Option<usize>,
    ) -> Call {
        backend.1 += 1;
        let bytes = if tensor.defined() { tensor.numel() * tensor.kind().elt_size_in_bytes() } else { 0 };
        Call { op, seq: backend.1, bytes, peer }
    }

    /// What is known of a failure: the ranks on which nothing failed in time are gone, or somewhere else.
    fn failure(&self, call: Call, error: &TorchError) -> Error {
        let Call { op, seq, bytes, peer } = call;
        let missing = match peer {
            Some(peer) => vec![peer],
            None => self.missing(),
        };
        let reason = if error.kind == crate::error::TorchErrorKind::Other {
            error.message.clone()
        } else {
            error.to_string()
        };
        DistributedError::Collective(Box::new(CollectiveFailure {
            op,
            rank: self.rank,
            world_size: self.world_size,
            missing,
            seq,
            bytes,
            timed_out: reason.contains("imed out"),
            reason: first_line(&reason),
        }))
        .into()
    }

    /// Tells the others that this rank's group has failed, and returns those that do not tell the same; none if the
    /// store is gone or out of reach, and with it all that could be known.
    fn missing(&self) -> Vec<usize> {
        let (store, rank, world_size) = (self.store.clone(), self.rank, self.world_size);
        let silent = within(INQUEST + INQUEST_GRACE, move || inquest(&store, rank, world_size).ok());
        silent.flatten().unwrap_or_default()
    }
}

/// The ranks on which nothing fails while [`INQUEST`] lasts.
fn inquest(store: &Store, rank: usize, world_size: usize) -> Result<Vec<usize>, TorchError> {
    let key = |rank: usize| format!("failed/{rank}");
    let deadline = Instant::now() + INQUEST;
    let mut silent: Vec<usize> = (0..world_size).filter(|&other| other != rank).collect();
    store.set(&key(rank), b"1")?;
    while !silent.is_empty() && Instant::now() < deadline {
        let mut still = Vec::new();
        for other in silent {
            if !store.has(&key(other))? {
                still.push(other);
            }
        }
        silent = still;
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(silent)
}

/// Gloo's message without the place in its source that stands before it.
fn first_line(text: &str) -> String {
    let line = text.lines().next().unwrap_or(text);
    match line.split_once("] ") {
        Some((place, rest)) if place.starts_with('[') && place.contains("gloo/") => rest.to_owned(),
        _ => line.to_owned(),
    }
}

fn to_bytes<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|error| Error::io("serialize", "a value for other ranks", error.into()))
}

fn to_vec(data: &Tensor) -> Result<Vec<u8>> {
    let mut bytes = vec![0_u8; data.numel()];
    data.f_copy_data(&mut bytes, data.numel())?;
    Ok(bytes)
}

fn from_bytes<T: DeserializeOwned>(data: &Tensor) -> Result<T> {
    serde_json::from_slice(&to_vec(data)?)
        .map_err(|error| Error::io("read", "a value of another rank", error.into()))
}
