//! Connects ranks that have met at a store: Gloo, memory that they share, or a library's communicator.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::Tensor;

use super::deadline::{on_thread, within};
use super::host::{gloo_interface, host_name};
use super::placement::{RankPlacement, refuse};
use super::roll_call::is_abandoned;
use crate::device::Device;
use crate::error::{Result, TorchError, TorchErrorKind};
use crate::ffi::{
    Backend, CollectiveLibrary, HostPeers, JobSecret, Listeners, OwnRegion, SEAL_BYTES, Seat, Store,
    shares_memory,
};

/// How often a rank that connects to the others looks whether one of them has ended.
const GLANCE: Duration = Duration::from_millis(200);
/// How much longer than the time-out, which holds for each step, all steps of connecting may take.
const GRACE: Duration = Duration::from_secs(10);

/// How ranks are joined.
#[derive(Debug, Clone, Copy)]
pub struct JoinOptions {
    /// The device of this rank, which decides the back end.
    pub device: Device,
    /// How long ranks wait for each other: now, and in each operation.
    pub timeout: Duration,
}

/// Connects this process to others: to all ranks of the run, and to the members of groups among them.
#[derive(Debug, Clone)]
pub(super) struct Connector {
    /// This process among all ranks.
    placement: RankPlacement,
    device: Device,
    /// How long ranks wait for each other, in milliseconds.
    timeout: Arc<AtomicU64>,
    /// Gloo, if there is none.
    library: Option<CollectiveLibrary>,
    /// Of the round in which all ranks met.
    round: Arc<Store>,
    /// A text of that round, which no other has.
    nonce: String,
}

/// This process among the members of a group.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub rank: usize,
    pub size: usize,
}

/// The ways to the other members of a group.
#[derive(Debug)]
pub(super) struct Connected {
    /// For tensors on a device whose memory Gloo does not reach.
    pub library: Option<Backend>,
    /// For all other tensors.
    pub gloo: Backend,
    /// For those of Gloo's that go through shared memory, if all members share it.
    pub host_peers: Option<HostPeers>,
}

impl Connector {
    pub fn new(
        placement: RankPlacement,
        options: JoinOptions,
        library: Option<CollectiveLibrary>,
        round: Arc<Store>,
        nonce: String,
    ) -> Self {
        let JoinOptions { device, timeout } = options;
        let connector = Self { placement, device, timeout: Arc::default(), library, round, nonce };
        connector.set_timeout(timeout);
        connector
    }

    fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout.load(Ordering::Relaxed))
    }

    /// Changes how long ranks wait for each other in groups that are connected from now on.
    pub fn set_timeout(&self, timeout: Duration) {
        self.timeout.store(timeout.as_millis().try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// This process among all ranks.
    pub fn place_of_all(&self) -> Place {
        Place { rank: self.placement.rank, size: self.placement.world_size }
    }

    /// This process among the ranks of the run, as its launcher placed it.
    pub fn placement(&self) -> &RankPlacement {
        &self.placement
    }

    /// Whether NCCL or HCCL exchanges the tensors of devices.
    pub fn has_library(&self) -> bool {
        self.library.is_some()
    }

    /// As c10d names the back end.
    pub fn backend_name(&self) -> &'static str {
        self.library.as_ref().map_or("gloo", CollectiveLibrary::name)
    }

    /// Connects to the other members of a group, whose store is `store`. Returns when all are connected.
    pub fn connect(&self, store: &Arc<Store>, place: Place) -> Result<Connected> {
        let library = self.library.map(|library| self.communicator(library, store, place)).transpose()?;
        Ok(Connected { library, gloo: self.gloo(store, place)?, host_peers: self.host_peers(store, place)? })
    }

    /// The same for tensors of the host alone, by Gloo.
    pub fn connect_hosts(&self, store: &Arc<Store>, place: Place) -> Result<Connected> {
        Ok(Connected { library: None, gloo: self.gloo(store, place)?, host_peers: None })
    }

    fn gloo(&self, store: &Arc<Store>, Place { rank, size }: Place) -> Result<Backend> {
        let (placement, timeout) = (&self.placement, self.timeout());
        let named = std::env::var("GLOO_SOCKET_IFNAME").ok().filter(|name| !name.is_empty());
        let interface =
            gloo_interface(named, &placement.master_addr, placement.master_port).map_err(|reason| {
                refuse(placement, reason, "check MASTER_ADDR and the network, or set GLOO_SOCKET_IFNAME")
            })?;
        let store = store.with_prefix("gloo")?;
        let given = interface.clone();
        let proof = placement.secret.clone().map(|secret| (secret, self.nonce.clone()));
        let connect = move || {
            let before = Listeners::now();
            let backend = Backend::gloo(&store, rank, size, timeout, &given)?;
            match proof {
                Some((secret, nonce)) if size > 1 => prove(&backend, Place { rank, size }, &secret, &nonce)?,
                _ => {}
            }
            // each two members are connected: who comes now is a stranger
            let closed = Listeners::now().close_to_others(&before);
            tracing::debug!("{closed} port(s) of Gloo are closed to others");
            Ok::<_, TorchError>(backend)
        };
        let backend = self.connected(connect)?.map_err(|error| {
            let remedy = "check that the nodes reach each other, or set GLOO_SOCKET_IFNAME";
            refuse(placement, format!("{interface:?}: {}", error.message), remedy)
        })?;
        tracing::debug!("rank {rank} of {size} has joined over {interface:?}");
        Ok(backend)
    }

    /// Memory that all members share, if they are on one host, may reach each other's, and none has
    /// `VOLTAIC_SHARED_MEMORY=0`.
    fn host_peers(&self, store: &Arc<Store>, Place { rank, size }: Place) -> Result<Option<HostPeers>> {
        if size == 1 {
            return Ok(None);
        }
        let timeout = self.timeout();
        let store = store.with_prefix("memory")?;
        let home = if shares_memory()? {
            OwnRegion::new()
        } else {
            Err(io::Error::other("VOLTAIC_SHARED_MEMORY=0"))
        };
        let host = host_name();
        let connect = move || {
            let exchange = Exchange { store: &store, rank, size, timeout };
            let own = home.as_ref().map_or_else(|error| Err(error.to_string()), |home| Ok(home.address()));
            let addresses = exchange.address(&host, own)?;
            let (addresses, home) = match (addresses, home) {
                (Ok(addresses), Ok(home)) => (addresses, home),
                (refusal, _) => return Ok((None, Some(refusal.err().unwrap_or_default()))),
            };
            let opened = home.open_others(rank, &addresses, timeout);
            let refusal = exchange.refusal(opened.as_ref().err().map(io::Error::to_string))?;
            Ok::<_, TorchError>((opened.ok().filter(|_| refusal.is_none()), refusal))
        };
        let remedy = "check that the nodes reach each other";
        let (host_peers, refusal) =
            self.connected(connect)?.map_err(|error| refuse(&self.placement, error.message, remedy))?;
        if let Some(host_peers) = &host_peers {
            host_peers.share_order();
        }
        match refusal {
            None => tracing::debug!("rank {rank} of {size} shares memory with the others"),
            Some(reason) => tracing::debug!("ranks share no memory: {reason}"),
        }
        Ok(host_peers)
    }

    /// What `connect` gives, unless a rank that it waits for has ended.
    fn connected<T: Send + 'static>(&self, connect: impl FnOnce() -> T + Send + 'static) -> Result<T> {
        let receiver = on_thread(connect);
        let limit = self.timeout() + GRACE;
        let deadline = Instant::now() + limit;
        loop {
            match receiver.recv_timeout(GLANCE) {
                Ok(done) => return Ok(done),
                Err(RecvTimeoutError::Timeout) if Instant::now() >= deadline => {
                    let reason = format!("the ranks were not connected within {} s", limit.as_secs_f32());
                    let remedy = "check that the nodes reach each other, or set GLOO_SOCKET_IFNAME";
                    return Err(refuse(&self.placement, reason, remedy));
                }
                Err(RecvTimeoutError::Timeout) if !self.is_abandoned() => {}
                Err(_) => {
                    let reason = "a rank has ended while the others connected to it";
                    return Err(refuse(&self.placement, reason, "look at its output"));
                }
            }
        }
    }

    /// Whether a rank has ended; not if the store does not answer, which the deadline is for.
    fn is_abandoned(&self) -> bool {
        let round = self.round.clone();
        within(GLANCE, move || is_abandoned(&round)).unwrap_or(false)
    }

    /// The communicator of NCCL or HCCL, whose id the first member leaves in the store.
    fn communicator(
        &self,
        library: CollectiveLibrary,
        store: &Arc<Store>,
        Place { rank, size }: Place,
    ) -> Result<Backend> {
        const KEY: &str = "communicator";
        let (device, timeout) = (self.device, self.timeout());
        let remedy = "see what the library logs: NCCL_DEBUG=INFO, or HABANA_LOGS";
        let failed = |error: TorchError| refuse(&self.placement, error.message, remedy);
        let shared = store.clone();
        let id = self.connected(move || {
            if rank > 0 {
                return shared.get(KEY, timeout);
            }
            let id = library.unique_id()?;
            shared.set(KEY, &id)?;
            Ok(id)
        })?;
        let id = id.map_err(failed)?;
        let seat = Seat { rank, size, device, timeout };
        match within(timeout, move || library.join(&id, seat)) {
            Some(joined) => joined.map_err(failed),
            None => {
                let name = library.name();
                let reason = format!("{name} has not connected the ranks within {} s", timeout.as_secs_f32());
                Err(refuse(&self.placement, reason, remedy))
            }
        }
    }
}

/// Texts that members exchange over the store: rank 0 of the group reads those of all, and the others what it makes of them.
struct Exchange<'a> {
    store: &'a Store,
    rank: usize,
    size: usize,
    timeout: Duration,
}

impl Exchange<'_> {
    /// The addresses of all members, or why they share no memory. Rank 0 stops at the first one of another host.
    fn address(
        &self,
        host: &str,
        own: Result<String, String>,
    ) -> Result<Result<Vec<String>, String>, TorchError> {
        let own = own.map(|address| (host.to_owned(), address));
        self.collect("address", &own, |texts: &mut dyn Iterator<Item = Member>| {
            let mut addresses = Vec::new();
            for text in texts {
                match text? {
                    Ok((other, address)) if other == host => addresses.push(address),
                    Ok((other, _)) => return Ok(Err(format!("ranks are on {host} and on {other}"))),
                    Err(reason) => return Ok(Err(reason)),
                }
            }
            Ok(Ok(addresses))
        })
    }

    /// The first reason of a member.
    fn refusal(&self, own: Option<String>) -> Result<Option<String>, TorchError> {
        self.collect(
            "refusal",
            &own,
            |texts: &mut dyn Iterator<Item = Result<Option<String>, TorchError>>| {
                for reason in texts {
                    if let Some(reason) = reason? {
                        return Ok(Some(reason));
                    }
                }
                Ok(None)
            },
        )
    }

    fn collect<T: Serialize + DeserializeOwned, U: Serialize + DeserializeOwned>(
        &self,
        stage: &str,
        own: &T,
        reduce: impl FnOnce(&mut dyn Iterator<Item = Result<T, TorchError>>) -> Result<U, TorchError>,
    ) -> Result<U, TorchError> {
        let Self { store, rank, size, timeout } = *self;
        let unreadable = |error: serde_json::Error| {
            TorchError::new("store get", TorchErrorKind::Other, &format!("{stage}: {error}"))
        };
        let get = |key: String| store.get(&key, timeout);
        store.set(&format!("{stage}/{rank}"), &serde_json::to_vec(own).map_err(unreadable)?)?;
        let all = format!("{stage}/all");
        if rank > 0 {
            return serde_json::from_slice(&get(all)?).map_err(unreadable);
        }
        let read = |rank| serde_json::from_slice(&get(format!("{stage}/{rank}"))?).map_err(unreadable);
        let reduced = reduce(&mut (0..size).map(read))?;
        store.set(&all, &serde_json::to_vec(&reduced).map_err(unreadable)?)?;
        Ok(reduced)
    }
}

/// Host and address of a member's memory, or why it shares none.
type Member = Result<Result<(String, String), String>, TorchError>;

/// Each member proves to each other one, over the connection between them, that it has the job's secret. Ports are visible before
/// the ranks are connected, so a stranger may have connected in the place of a rank.
fn prove(
    backend: &Backend,
    Place { rank, size }: Place,
    secret: &JobSecret,
    nonce: &str,
) -> Result<(), TorchError> {
    let proof = |from: usize, to: usize| {
        let ranks = [from as u64, to as u64].map(u64::to_le_bytes);
        secret.seal(&[b"member", nonce.as_bytes(), &ranks[0], &ranks[1]])
    };
    let own: Vec<u8> = (0..size).flat_map(|to| proof(rank, to)).collect();
    let fail = |what: &dyn std::fmt::Display| {
        TorchError::new("ProcessGroupGloo", TorchErrorKind::Other, &what.to_string())
    };
    let input = Tensor::f_from_slice(&own).map_err(|error| fail(&error))?;
    let output = input.f_zeros_like().map_err(|error| fail(&error))?;
    let splits = vec![SEAL_BYTES as i64; size];
    backend.all_to_all(&input, &splits, &output, &splits)?.wait()?;
    let received: Vec<u8> = Vec::try_from(&output).map_err(|error| fail(&error))?;
    let is_strange = |from: &usize| received[from * SEAL_BYTES..][..SEAL_BYTES] != proof(*from, rank);
    match (0..size).find(is_strange) {
        None => Ok(()),
        Some(from) => Err(fail(&format!(
            "what has connected as rank {from} of the group does not have this job's secret"
        ))),
    }
}
