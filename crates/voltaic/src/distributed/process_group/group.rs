//! The process group, and how it starts operations.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tch::Tensor;

use super::shared::{AbsentRanks, Shared, State};
use super::work::{Underway, Work};
use crate::distributed::connect::{Connected, Connector, Place};
use crate::distributed::flight::record;
use crate::distributed::flight::watchdog::Watchdog;
use crate::error::{ConfigError, Result, TorchError, name_ranks};
use crate::ffi::{self, Backend, Store};

/// Ranks that are connected.
///
/// All members call the same operations in the same order, with tensors of the same shape and dtype, on the devices that
/// the back ends serve: Gloo the CPU and emulated HPUs, whose memory it reads and writes where it is; NCCL GPUs and HCCL
/// Gaudi cards. Beside NCCL and HCCL there is Gloo for tensors of the host, so that exchanging them waits for no device. An operation
/// fails if a rank is gone, or does not come within the time-out; after that the group is of no use.
///
/// Each operation has a form that waits, and one that starts it and gives a [`Work`] to wait for: `all_reduce` and
/// `start_all_reduce`. Ranks in arguments count within the group; those in errors are global.
///
/// # Collective
/// All methods but `send`, `recv`, their `start_` forms and the getters: all members must call them, in the same order.
///
/// # Errors
/// [`DistributedError::Collective`](crate::error::DistributedError::Collective) if an operation fails;
/// [`ConfigError`] before anything is sent, if an argument does not fit.
#[derive(Debug)]
pub struct ProcessGroup {
    pub(super) shared: Arc<Shared>,
}

/// This process in a group that is being made.
pub(super) struct Seat {
    pub place: Place,
    /// Global ranks of all.
    pub members: Vec<usize>,
    pub is_of_thread: bool,
}

impl ProcessGroup {
    /// The group of all ranks. `store` is this group's own.
    pub(in crate::distributed) fn of_all(connector: Connector, store: Arc<Store>) -> Result<Self> {
        let place = connector.place_of_all();
        let watchdog = Arc::new(Watchdog::start(connector.placement(), &store)?);
        let absent = Arc::default();
        let connected = connector.connect(&store, place)?;
        let seat = Seat { place, members: (0..place.size).collect(), is_of_thread: false };
        let group = Self::of(connected, connector, store, (watchdog, absent), seat);
        group.shared.watchdog.meet_node_peers();
        Ok(group)
    }

    /// A group of ranks that are connected.
    pub(super) fn of(
        connected: Connected,
        connector: Connector,
        store: Arc<Store>,
        (watchdog, absent): (Arc<Watchdog>, Arc<Mutex<Option<AbsentRanks>>>),
        Seat { place, members, is_of_thread }: Seat,
    ) -> Self {
        let Connected { library, gloo, host_peers } = connected;
        let state = Mutex::new(State { library, gloo, started: 0, splits: 0, traffic: BTreeMap::new() });
        let is_part = members.len() < connector.place_of_all().size;
        let label = is_part.then(|| format!("among {}", name_ranks(&members, members.len())).into());
        let shared = Shared {
            state,
            host_peers,
            store,
            rank: place.rank,
            members,
            label,
            connector,
            watchdog,
            absent,
            is_of_thread,
        };
        Self { shared: Arc::new(shared) }
    }

    /// This process's rank in the group, from 0; in the group of all ranks its global rank.
    pub fn rank(&self) -> usize {
        self.shared.rank
    }

    /// Ranks in the group.
    pub fn world_size(&self) -> usize {
        self.shared.members.len()
    }

    /// Global ranks of the members, by their rank in the group (`torch.distributed.get_process_group_ranks`).
    pub fn global_ranks(&self) -> &[usize] {
        &self.shared.members
    }

    /// The back end for tensors on the devices of the ranks: `gloo`, `nccl` or `hccl`.
    pub fn backend(&self) -> &'static str {
        self.shared.connector.backend_name()
    }

    /// Changes how long operations of this group, and of groups split from it later, wait for other ranks. All members are to
    /// set the same; nothing is exchanged.
    ///
    /// # Errors
    /// The back end's.
    pub(crate) fn set_timeout(&self, timeout: Duration) -> Result<()> {
        self.shared.connector.set_timeout(timeout);
        if let Some(host_peers) = &self.shared.host_peers {
            host_peers.set_timeout(timeout);
        }
        let state = self.shared.lock();
        state.library.iter().chain([&state.gloo]).try_for_each(|backend| backend.set_timeout(timeout))?;
        Ok(())
    }

    /// Refuses operations of this rank with ranks that take no part in them, in this group and in those that were split from it;
    /// with `None`, allows them again.
    pub(crate) fn set_absent(&self, absent: Option<AbsentRanks>) {
        *self.shared.absent.lock().unwrap_or_else(PoisonError::into_inner) = absent;
    }

    /// Whether sums of what Gloo exchanges go through memory that all members share, which are on one host then.
    pub fn shares_memory(&self) -> bool {
        self.shared.host_peers.is_some()
    }

    /// What this rank has exchanged in this group so far: for each operation, how often it was called, and the bytes of the
    /// tensors that this rank gave to it.
    pub fn traffic(&self) -> BTreeMap<&'static str, (u64, u64)> {
        self.shared.lock().traffic.clone()
    }

    /// The sum over the ranks as a new tensor, through which gradients flow: the gradient of each rank's input is the
    /// sum over the ranks of the outputs'.
    ///
    /// # Collective
    /// In backward, too.
    pub fn differentiable_sum(&self, tensor: &Tensor) -> Result<Tensor> {
        self.shared.check_open("all_reduce")?;
        let mut state = self.shared.lock();
        let call = self.shared.next_call(&mut state, "all_reduce", tensor, None);
        ffi::Summing::finish_before(call.ticket);
        let sum = state.backend_for(tensor).differentiable_sum(tensor);
        drop(state);
        record::end(call.number, if sum.is_ok() { record::State::Done } else { record::State::Failed });
        sum.map_err(|error| self.shared.failure(call, &error))
    }

    /// Starts an operation of the back end.
    pub(super) fn start(
        &self,
        op: &'static str,
        tensor: &Tensor,
        peer: Option<usize>,
        body: impl FnOnce(&Backend) -> Result<ffi::Work, TorchError>,
    ) -> Result<Work> {
        self.begin(op, tensor, peer, |backend| body(backend).map(Underway::Work))
    }

    pub(super) fn begin(
        &self,
        op: &'static str,
        tensor: &Tensor,
        peer: Option<usize>,
        body: impl FnOnce(&Backend) -> Result<Underway, TorchError>,
    ) -> Result<Work> {
        self.shared.check_open(op)?;
        if tensor.defined() && !tensor.is_contiguous() {
            let what = format!("a tensor of shape {:?} that is not contiguous", tensor.size());
            return Err(ConfigError::new(op, what, "call contiguous() first").into());
        }
        let mut state = self.shared.lock();
        let call = self.shared.next_call(&mut state, op, tensor, peer);
        let underway = body(state.backend_for(tensor));
        drop(state);
        match underway {
            Ok(underway) => Ok(Work::new(underway, call, self.shared.clone())),
            Err(error) => {
                record::end(call.number, record::State::Failed);
                Err(self.shared.failure(call, &error))
            }
        }
    }

    pub(super) fn check_peer(&self, op: &str, peer: usize) -> Result<()> {
        if peer < self.world_size() {
            return Ok(());
        }
        let what = format!("rank {peer} of {}", self.world_size());
        Err(ConfigError::new(op, what, "ranks count from 0 to world_size - 1").into())
    }
}
