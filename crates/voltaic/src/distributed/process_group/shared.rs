//! State that a group shares with its operations in progress, and the report when one of them fails.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::Tensor;

use crate::distributed::connect::Connector;
use crate::distributed::flight::inquest::{Failed, Inquest, RankReport};
use crate::distributed::flight::record;
use crate::distributed::flight::watchdog::Watchdog;
use crate::error::{CollectiveFailure, ConfigError, DistributedError, Error, TorchError, TorchErrorKind};
use crate::ffi::{Backend, HostPeers, Store, next_ticket};

#[derive(Debug)]
pub(super) struct Shared {
    pub state: Mutex<State>,
    /// If all members share memory.
    pub host_peers: Option<HostPeers>,
    /// Where members report failures; of this group alone.
    pub store: Arc<Store>,
    /// This process's place among the members.
    pub rank: usize,
    /// Global ranks of the members, in order.
    pub members: Vec<usize>,
    /// What the members are called in records, if they are some of the run's ranks only.
    pub label: Option<Arc<str>>,
    /// Makes groups of some of the members.
    pub connector: Connector,
    /// Finds out where ranks are.
    pub watchdog: Arc<Watchdog>,
    /// Ranks that take no part in operations now; shared with all groups that were split from one.
    pub absent: Arc<Mutex<Option<AbsentRanks>>>,
    /// Operations come from another thread than those of the group that it was made from, and have no order with them.
    pub is_of_thread: bool,
}

/// Ranks that take no part in operations for a while.
#[derive(Debug)]
pub(crate) struct AbsentRanks {
    /// Their global ranks.
    pub ranks: Vec<usize>,
    pub why: String,
}

/// Locked to start an operation, so that the sequence number is the order.
#[derive(Debug)]
pub(super) struct State {
    /// NCCL or HCCL, for tensors on their devices.
    pub library: Option<Backend>,
    /// For all other tensors.
    pub gloo: Backend,
    /// Operations started so far.
    pub started: u64,
    /// Groups of some of the members made so far.
    pub splits: u64,
    /// Calls and bytes so far, by operation.
    pub traffic: BTreeMap<&'static str, (u64, u64)>,
}

impl State {
    /// What exchanges such a tensor.
    pub fn backend_for(&self, tensor: &Tensor) -> &Backend {
        self.library.as_ref().filter(|_| !is_on_host(tensor)).unwrap_or(&self.gloo)
    }
}

/// Whether a tensor, if there is one, is in memory of the host.
fn is_on_host(tensor: &Tensor) -> bool {
    !tensor.defined() || tensor.device() == tch::Device::Cpu
}

/// An operation as far as errors need it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Call {
    pub op: &'static str,
    pub seq: u64,
    pub bytes: usize,
    /// The only other member that takes part.
    pub peer: Option<usize>,
    /// See [`next_ticket`].
    pub ticket: u64,
    /// In the record of this process's operations.
    pub number: u64,
}

impl Shared {
    /// Whether Gloo exchanges such a tensor, or memory that ranks share.
    pub fn is_for_gloo(&self, tensor: &Tensor) -> bool {
        !self.connector.has_library() || is_on_host(tensor)
    }

    /// The memory that all members share, if such a tensor can go through it.
    pub fn host_peers_for(&self, tensor: &Tensor) -> Option<&HostPeers> {
        self.host_peers.as_ref().filter(|_| self.is_for_gloo(tensor))
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An error if no operation may start now.
    pub fn check_open(&self, op: &'static str) -> Result<(), ConfigError> {
        let absent = self.absent.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = |absent: &&AbsentRanks| {
            self.members.len() > 1 && absent.ranks.iter().any(|rank| self.members.contains(rank))
        };
        let Some(AbsentRanks { why, .. }) = absent.as_ref().filter(waits) else { return Ok(()) };
        let remedy = "give all ranks the same number of batches, or call it at the end of the evaluation";
        Err(ConfigError::new(op, why.clone(), remedy))
    }

    /// Gives an operation its number, and notes that it begins.
    pub fn next_call(
        &self,
        state: &mut State,
        op: &'static str,
        tensor: &Tensor,
        peer: Option<usize>,
    ) -> Call {
        state.started += 1;
        let seq = state.started;
        let bytes = if tensor.defined() { tensor.numel() * tensor.kind().elt_size_in_bytes() } else { 0 };
        let (calls, sum) = state.traffic.entry(op).or_default();
        (*calls, *sum) = (*calls + 1, *sum + bytes as u64);
        let global = peer.map(|peer| self.members[peer]);
        let group = self.label.as_deref();
        let number = record::begin(record::Noted { op, seq, bytes, tensor, peer: global, group });
        let ticket = if self.is_of_thread { 0 } else { next_ticket() };
        Call { op, seq, bytes, peer, ticket, number }
    }

    /// What is known of a failure: the ranks on which nothing failed in time are gone, or somewhere else.
    pub fn failure(&self, call: Call, error: &TorchError) -> Error {
        let Call { op, seq, bytes, peer, .. } = call;
        let (caller, record) = (record::caller(call.number), self.watchdog.write_record());
        let failed = Failed { op: op.to_owned(), seq, bytes, has_peer: peer.is_some() };
        let inquest = Inquest {
            store: self.store.clone(),
            watchdog: self.watchdog.clone(),
            rank: self.rank,
            members: self.members.clone(),
            failed: failed.clone(),
        };
        let report = inquest.hold();
        let global = |rank: &usize| self.members.get(*rank).copied();
        let (missing, num_missing) = match (peer, &report) {
            (Some(peer), _) => (vec![self.members[peer]], 1),
            (None, Some(report)) => (report.missing.iter().filter_map(global).collect(), report.num_missing),
            (None, None) => {
                // the store does not answer
                let others = self.members.iter().copied().filter(|rank| global(&self.rank) != Some(*rank));
                let missing = self.watchdog.not_in(others, op, seq);
                let total = missing.len();
                (missing, total)
            }
        };
        let RankReport { calls, last_seen, .. } = report.unwrap_or_else(|| RankReport {
            last_seen: self.watchdog.find_on_node(&missing),
            ..RankReport::default()
        });
        let differing =
            calls.iter().filter(|(other, _)| peer.is_none() && !other.has_peer && *other != failed);
        let elsewhere = differing.flat_map(|(Failed { op, seq, bytes, .. }, ranks)| {
            let text = format!("{op} (operation {seq}, {bytes} bytes)");
            ranks
                .iter()
                .filter(|rank| **rank != self.rank)
                .filter_map(global)
                .map(move |rank| (rank, text.clone()))
        });
        let reason = match error.kind {
            TorchErrorKind::Other => error.message.clone(),
            _ => error.to_string(),
        };
        let all = self.connector.place_of_all();
        DistributedError::Collective(Box::new(CollectiveFailure {
            op,
            rank: all.rank,
            world_size: all.size,
            group: self.label.is_some().then(|| self.members.clone()),
            from: match &self.label {
                None => caller,
                Some(label) => caller.trim_start_matches(&**label).trim_start_matches(": ").to_owned(),
            },
            more_missing: num_missing - missing.len(),
            missing,
            elsewhere: elsewhere.collect(),
            last_seen: last_seen.into_values().collect(),
            record,
            seq,
            bytes,
            timed_out: reason.contains("imed out"),
            reason: first_line(&reason),
        }))
        .into()
    }
}

/// Gloo's message without the place in its source that stands before it.
fn first_line(text: &str) -> String {
    let line = text.lines().next().unwrap_or(text);
    match line.split_once("] ") {
        Some((place, rest)) if place.starts_with('[') && place.contains("gloo/") => rest.to_owned(),
        _ => line.to_owned(),
    }
}
