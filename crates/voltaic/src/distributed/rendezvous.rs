//! Brings ranks together: a store that all reach, a roll call, and the connections of a process group.

use std::collections::BTreeMap;
use std::net::ToSocketAddrs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::ProcessGroup;
use super::cluster::RankPlacement;
use super::process_group::gloo_interface;
use crate::device::Device;
use crate::error::{DistributedError, Error, Result};
use crate::ffi::{Backend, CollectiveLibrary, Seat, Store};

/// How long an unknown host name is asked for again: names of a cluster may come up after the process.
const NAME_PATIENCE: Duration = Duration::from_secs(5);
/// How much longer than rank 0 the others wait for its verdict.
const VERDICT_GRACE: Duration = Duration::from_secs(5);
const SAME_SIZE: &str = "use the same trainer.devices, trainer.num_nodes and WORLD_SIZE everywhere";

/// How ranks are joined.
#[derive(Debug, Clone, Copy)]
pub struct JoinOptions {
    /// The device of this rank, which decides the back end.
    pub device: Device,
    /// How long ranks wait for each other: now, and in each operation.
    pub timeout: Duration,
}

/// The store of a run. With a launcher that holds it, it outlives the ranks and what they are started anew for.
#[derive(Debug)]
pub struct RunStore(Store);

impl RunStore {
    /// Leaves a text under a key.
    ///
    /// # Errors
    /// [`TorchError`](crate::error::TorchError) if the store is gone.
    pub fn set(&self, key: &str, text: &str) -> Result<()> {
        Ok(self.0.set(&format!("run/{key}"), text.as_bytes())?)
    }

    /// The text under a key, if there is one.
    ///
    /// # Errors
    /// [`TorchError`](crate::error::TorchError) if the store is gone.
    pub fn get(&self, key: &str) -> Result<Option<String>> {
        let key = format!("run/{key}");
        if !self.0.has(&key)? {
            return Ok(None);
        }
        let bytes = self.0.get(&key, Duration::from_secs(10))?;
        Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
    }
}

/// Stores of this process by address: one connection each, kept to the end, since rank 0 may be the server.
static STORES: Mutex<BTreeMap<String, Arc<RunStore>>> = Mutex::new(BTreeMap::new());
/// Groups joined so far: all ranks join them in the same order.
static GENERATION: AtomicU64 = AtomicU64::new(0);

/// What a rank says when it arrives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Arrival {
    world_size: usize,
    host: String,
    pid: u32,
}

/// Joins the ranks of `placement`.
pub(super) fn join(
    placement: &RankPlacement,
    options: &JoinOptions,
) -> Result<(ProcessGroup, Arc<RunStore>)> {
    let is_alone = placement.world_size == 1; // nothing is exchanged
    let library = if is_alone { None } else { super::libraries::of(options.device)? };
    let run = open_store(placement, options.timeout)?;
    let generation = GENERATION.fetch_add(1, Ordering::Relaxed);
    let store = Arc::new(run.0.with_prefix(&format!("attempt{}/group{generation}", placement.attempt))?);
    roll_call(placement, &store, options.timeout)?;
    let (rank, world_size) = (placement.rank, placement.world_size);
    let backend = match library {
        None => gloo(placement, &store, options.timeout)?,
        Some(library) => communicator(library, placement, &store, options)?,
    };
    let name = library.map_or("gloo", |library| library.name());
    Ok((ProcessGroup::new(backend, name, store, rank, world_size), run))
}

fn gloo(placement: &RankPlacement, store: &Store, timeout: Duration) -> Result<Backend> {
    let named = std::env::var("GLOO_SOCKET_IFNAME").ok().filter(|name| !name.is_empty());
    let interface =
        gloo_interface(named, &placement.master_addr, placement.master_port).map_err(|reason| {
            refuse(placement, reason, "check MASTER_ADDR and the network, or set GLOO_SOCKET_IFNAME")
        })?;
    let (rank, world_size) = (placement.rank, placement.world_size);
    let backend = Backend::gloo(&store.with_prefix("gloo")?, rank, world_size, timeout, &interface).map_err(
        |error| {
            let remedy = "check that the nodes reach each other, or set GLOO_SOCKET_IFNAME";
            refuse(placement, format!("{interface:?}: {}", error.message), remedy)
        },
    )?;
    tracing::debug!("rank {rank} of {world_size} has joined over {interface:?}");
    Ok(backend)
}

/// The communicator of NCCL or HCCL, whose id rank 0 leaves in the store.
fn communicator(
    library: CollectiveLibrary,
    placement: &RankPlacement,
    store: &Store,
    options: &JoinOptions,
) -> Result<Backend> {
    const KEY: &str = "communicator";
    let JoinOptions { device, timeout } = *options;
    let remedy = "see what the library logs: NCCL_DEBUG=INFO, or HABANA_LOGS";
    let failed = |error: crate::error::TorchError| refuse(placement, error.message, remedy);
    let id = if placement.rank == 0 {
        let id = library.unique_id().map_err(failed)?;
        store.set(KEY, &id)?;
        id
    } else {
        store.get(KEY, timeout).map_err(failed)?
    };
    let seat = Seat { rank: placement.rank, size: placement.world_size, device, timeout };
    match within(timeout, move || library.join(&id, seat)) {
        Some(joined) => joined.map_err(failed),
        None => {
            let name = library.name();
            let reason = format!("{name} has not connected the ranks within {} s", timeout.as_secs_f32());
            Err(refuse(placement, reason, remedy))
        }
    }
}

fn refuse(placement: &RankPlacement, reason: impl Into<String>, remedy: &str) -> Error {
    DistributedError::Rendezvous {
        rank: placement.rank,
        world_size: placement.world_size,
        address: format!("{}:{}", placement.master_addr, placement.master_port),
        reason: reason.into(),
        remedy: remedy.to_owned(),
    }
    .into()
}

/// Connects to the store, or becomes its server.
fn open_store(placement: &RankPlacement, timeout: Duration) -> Result<Arc<RunStore>> {
    let (host, port) = (placement.master_addr.as_str(), placement.master_port);
    let address = format!("{host}:{port}");
    let mut stores = STORES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(store) = stores.get(&address).filter(|_| port != 0) {
        return Ok(store.clone());
    }
    resolve(placement)?;
    let (store, _) = Store::tcp(host, port, placement.hosts_store, timeout).map_err(|error| {
        let in_use = error.message.contains("EADDRINUSE") || error.message.contains("already in use");
        if placement.hosts_store && in_use {
            let reason = format!("MASTER_PORT={port} is in use on this host");
            return refuse(placement, reason, "set MASTER_PORT to a free port, the same for all ranks");
        }
        let reason = format!("nothing answers within {} s: {}", timeout.as_secs_f32(), error.message);
        let remedy = "check MASTER_ADDR and MASTER_PORT, and that rank 0 has been started";
        refuse(placement, reason, remedy)
    })?;
    let store = Arc::new(RunStore(store));
    stores.insert(address, store.clone());
    Ok(store)
}

/// An unknown host is better said at once than after the time-out.
fn resolve(placement: &RankPlacement) -> Result<()> {
    let deadline = Instant::now() + NAME_PATIENCE;
    loop {
        let resolved = (placement.master_addr.as_str(), placement.master_port).to_socket_addrs();
        match resolved {
            Ok(_) => return Ok(()),
            Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(500)),
            Err(error) => {
                let reason = format!("MASTER_ADDR={} is no known host: {error}", placement.master_addr);
                return Err(refuse(placement, reason, "set MASTER_ADDR to the name or address of node 0"));
            }
        }
    }
}

/// [`answer`] with an end: a request to a store waits for as long as the system takes to notice that a network is cut.
fn roll_call(placement: &RankPlacement, store: &Arc<Store>, timeout: Duration) -> Result<()> {
    let limit = timeout + 2 * VERDICT_GRACE;
    let (thread_placement, thread_store) = (placement.clone(), store.clone());
    within(limit, move || answer(&thread_placement, &thread_store, timeout)).unwrap_or_else(|| {
        let reason = format!("the store has not answered for {} s", limit.as_secs_f32());
        Err(refuse(placement, reason, "check the network to MASTER_ADDR"))
    })
}

/// What `body` gives on a thread of its own; none if it takes longer than `limit`, and then it is left alone.
pub(super) fn within<T: Send + 'static>(
    limit: Duration,
    body: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(body()));
    receiver.recv_timeout(limit).ok()
}

/// Every rank says that it is there; rank 0 waits for all, and tells them how it went.
fn answer(placement: &RankPlacement, store: &Store, timeout: Duration) -> Result<()> {
    let (rank, world_size) = (placement.rank, placement.world_size);
    let lost = |error: crate::error::TorchError| {
        refuse(placement, format!("the store is gone: {}", error.message), "look at the output of rank 0")
    };
    if store.add(&format!("taken/{rank}"), 1).map_err(lost)? > 1 {
        let reason = format!("another process is rank {rank} already");
        let remedy = "give each process a rank of its own: NODE_RANK for each node, or RANK and LOCAL_RANK";
        return Err(refuse(placement, reason, remedy));
    }
    let arrival = Arrival { world_size, host: host_name(), pid: std::process::id() };
    let text = serde_json::to_vec(&arrival).unwrap_or_default();
    store.set(&format!("arrival/{rank}"), &text).map_err(lost)?;
    let verdict = if rank == 0 {
        let verdict = count(world_size, store, timeout);
        store.set("verdict", verdict.as_bytes()).map_err(lost)?;
        verdict
    } else {
        match store.get("verdict", timeout + VERDICT_GRACE) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) => {
                let reason =
                    format!("rank 0 did not answer within {} s: {}", timeout.as_secs_f32(), error.message);
                return Err(refuse(placement, reason, "look at the output of rank 0"));
            }
        }
    };
    if let Some((reason, remedy)) = verdict.split_once("; ") {
        return Err(refuse(placement, reason, remedy));
    }
    // rank 0 looks at the ranks that it expects only
    let first = store.get("arrival/0", VERDICT_GRACE).map_err(lost)?;
    match serde_json::from_slice::<Arrival>(&first) {
        Ok(first) if first.world_size != world_size => {
            let Arrival { world_size: expected, host, pid } = first;
            let reason = format!(
                "this rank expects {world_size} ranks, rank 0 (process {pid} on {host}) expects {expected}"
            );
            Err(refuse(placement, reason, SAME_SIZE))
        }
        _ => Ok(()),
    }
}

/// Waits for all ranks; empty if all came and agree, else what is wrong and a remedy.
fn count(world_size: usize, store: &Store, timeout: Duration) -> String {
    let deadline = Instant::now() + timeout;
    let mut missing = Vec::new();
    for rank in 0..world_size {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let arrival = store.get(&format!("arrival/{rank}"), left);
        let arrival = arrival.ok().and_then(|bytes| serde_json::from_slice::<Arrival>(&bytes).ok());
        match arrival {
            None => missing.push(rank.to_string()),
            Some(arrival) if arrival.world_size != world_size => {
                return format!(
                    "rank 0 expects {world_size} ranks, rank {rank} (process {} on {}) expects {}; {SAME_SIZE}",
                    arrival.pid, arrival.host, arrival.world_size
                );
            }
            Some(_) => {}
        }
    }
    match missing.as_slice() {
        [] => String::new(),
        [rank] => format!(
            "rank {rank} of {world_size} did not come within {} s; look at its output, or raise timeout_secs in \
             trainer.strategy",
            timeout.as_secs_f32()
        ),
        ranks => format!(
            "ranks {} of {world_size} did not come within {} s; look at their output, or raise timeout_secs in \
             trainer.strategy",
            ranks.join(", "),
            timeout.as_secs_f32()
        ),
    }
}

fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "unknown host".to_owned(), |name| name.trim().to_owned())
}
