//! What a group and its operations under way hold together, and what is found out when one of them fails.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::distributed::connect::Connector;
use crate::distributed::deadline::within;
use crate::error::{CollectiveFailure, DistributedError, Error, TorchError, TorchErrorKind};
use crate::ffi::{Backend, Neighbours, Store, next_ticket};

/// How long a rank whose operation failed waits to see which ranks it failed on, too.
const INQUEST: Duration = Duration::from_secs(2);
/// How much longer it waits for a store that does not answer.
const INQUEST_GRACE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Shared {
    pub state: Mutex<State>,
    /// If all members share memory.
    pub neighbours: Option<Neighbours>,
    /// Where members tell each other of failures; of this group alone.
    pub store: Arc<Store>,
    /// This process's place among the members.
    pub rank: usize,
    /// Global ranks of the members, in order.
    pub members: Vec<usize>,
    /// Makes groups of some of the members.
    pub connector: Connector,
}

/// Locked to start an operation, so that the sequence number is the order.
#[derive(Debug)]
pub(super) struct State {
    pub backend: Backend,
    /// Operations started so far.
    pub started: u64,
    /// Groups of some of the members made so far.
    pub splits: u64,
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
}

/// What a member says when an operation has failed on it.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Failed {
    op: String,
    seq: u64,
    bytes: usize,
    has_peer: bool,
}

impl Shared {
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether these are some of the run's ranks only.
    fn is_part(&self) -> bool {
        self.members.len() < self.connector.place_of_all().size
    }

    /// What is known of a failure: the ranks on which nothing failed in time are gone, or somewhere else.
    pub fn failure(&self, call: Call, error: &TorchError) -> Error {
        let Call { op, seq, bytes, peer, .. } = call;
        let told = self.tell(call);
        let others = (0..self.members.len()).filter(|&other| other != self.rank);
        let missing: Vec<usize> = match peer {
            Some(peer) => vec![peer],
            None => {
                told.iter().flat_map(|told| others.clone().filter(|rank| !told.contains_key(rank))).collect()
            }
        };
        let is_other = |failed: &Failed| {
            peer.is_none()
                && !failed.has_peer
                && (failed.op.as_str(), failed.seq, failed.bytes) != (op, seq, bytes)
        };
        let differing = told.iter().flatten().filter(|(_, failed)| is_other(failed));
        let elsewhere = differing.map(|(&rank, Failed { op, seq, bytes, .. })| {
            (self.members[rank], format!("{op} (operation {seq}, {bytes} bytes)"))
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
            group: self.is_part().then(|| self.members.clone()),
            missing: missing.into_iter().map(|rank| self.members[rank]).collect(),
            elsewhere: elsewhere.collect(),
            seq,
            bytes,
            timed_out: reason.contains("imed out"),
            reason: first_line(&reason),
        }))
        .into()
    }

    /// Tells the others that this member's operation has failed, and returns what they tell; nothing if the store is gone
    /// or out of reach, and with it all that could be known.
    fn tell(&self, Call { op, seq, bytes, peer, .. }: Call) -> Option<BTreeMap<usize, Failed>> {
        let failed = Failed { op: op.to_owned(), seq, bytes, has_peer: peer.is_some() };
        let (store, rank, size) = (self.store.clone(), self.rank, self.members.len());
        let waits = peer.is_none();
        within(INQUEST + INQUEST_GRACE, move || inquest(&store, rank, size, &failed, waits).ok()).flatten()
    }
}

/// Gives an operation its number.
pub(super) fn next_call(state: &mut State, op: &'static str, tensor: &Tensor, peer: Option<usize>) -> Call {
    state.started += 1;
    let bytes = if tensor.defined() { tensor.numel() * tensor.kind().elt_size_in_bytes() } else { 0 };
    Call { op, seq: state.started, bytes, peer, ticket: next_ticket() }
}

/// What the members tell on which something fails while [`INQUEST`] lasts.
fn inquest(
    store: &Store,
    rank: usize,
    size: usize,
    failed: &Failed,
    waits: bool,
) -> Result<BTreeMap<usize, Failed>, TorchError> {
    let key = |rank: usize| format!("failed/{rank}");
    let deadline = Instant::now() + if waits { INQUEST } else { Duration::ZERO };
    store.set(&key(rank), &serde_json::to_vec(failed).unwrap_or_default())?;
    let mut told = BTreeMap::new();
    while told.len() + 1 < size && Instant::now() < deadline {
        for other in (0..size).filter(|&other| other != rank) {
            if !told.contains_key(&other) && store.has(&key(other))? {
                let text = store.get(&key(other), INQUEST_GRACE)?;
                if let Ok(failed) = serde_json::from_slice(&text) {
                    told.insert(other, failed);
                }
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(told)
}

/// Gloo's message without the place in its source that stands before it.
fn first_line(text: &str) -> String {
    let line = text.lines().next().unwrap_or(text);
    match line.split_once("] ") {
        Some((place, rest)) if place.starts_with('[') && place.contains("gloo/") => rest.to_owned(),
        _ => line.to_owned(),
    }
}
