//! Brings ranks together: a store that all reach, a roll call, and the connections of a process group.

use std::collections::BTreeMap;
use std::io;
use std::net::ToSocketAddrs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::deadline::{on_thread, within};
use super::host::gloo_interface;
use super::libraries;
use super::placement::{RankPlacement, refuse};
use super::process_group::ProcessGroup;
use super::roll_call::{NOTICE, Round, roll_call};
use crate::device::Device;
use crate::error::{Result, TorchError};
use crate::ffi::{Backend, CollectiveLibrary, Home, Neighbours, Seat, Store, shares_memory};

/// How long an unknown host name is asked for again: names of a cluster may come up after the process.
const NAME_PATIENCE: Duration = Duration::from_secs(5);
/// How often a rank that connects to the others looks whether one of them has ended.
const GLANCE: Duration = Duration::from_millis(200);

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
        Ok(self.0.set(key, text.as_bytes())?)
    }

    /// The text under a key, if there is one.
    ///
    /// # Errors
    /// [`TorchError`](crate::error::TorchError) if the store is gone.
    pub fn get(&self, key: &str) -> Result<Option<String>> {
        if !self.0.has(key)? {
            return Ok(None);
        }
        let bytes = self.0.get(key, Duration::from_secs(10))?;
        Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
    }
}

/// Stores of this process by address: one connection each, kept to the end, since rank 0 may be the server.
static STORES: Mutex<BTreeMap<String, Arc<Store>>> = Mutex::new(BTreeMap::new());
/// Groups joined so far: all ranks join them in the same order.
static GENERATION: AtomicU64 = AtomicU64::new(0);

/// Ranks that have been joined.
#[derive(Debug)]
pub(super) struct Joined {
    pub group: ProcessGroup,
    /// What the ranks can leave for those that are started anew.
    pub run: RunStore,
    /// How often the ranks have been started anew.
    pub attempt: u64,
}

/// Joins the ranks of `placement`.
pub(super) fn join(placement: &RankPlacement, options: &JoinOptions) -> Result<Joined> {
    let is_alone = placement.world_size == 1; // nothing is exchanged
    let library = if is_alone { None } else { libraries::of(options.device)? };
    let (store, run) = open_group(placement, options.timeout)?;
    let round = roll_call(placement, &store, options.timeout)?;
    let (rank, world_size) = (placement.rank, placement.world_size);
    let name = library.as_ref().map_or("gloo", |library| library.name());
    let (backend, neighbours) = match library {
        None => (gloo(placement, &round, options.timeout)?, neighbours(placement, &round, options.timeout)?),
        Some(library) => (communicator(library, placement, &round, options)?, None),
    };
    let Round { store, attempt } = round;
    let group = ProcessGroup::new(backend, name, store, rank, world_size).with_neighbours(neighbours);
    Ok(Joined { group, run, attempt })
}

/// The store of a group that is still to be joined, and of what outlives its ranks: both are this group's own.
pub(super) fn open_group(placement: &RankPlacement, timeout: Duration) -> Result<(Arc<Store>, RunStore)> {
    let store = open_store(placement, timeout)?;
    let generation = GENERATION.fetch_add(1, Ordering::Relaxed);
    let group = Arc::new(store.with_prefix(&format!("group{generation}"))?);
    Ok((group, RunStore(store.with_prefix(&format!("run{generation}"))?)))
}

fn gloo(placement: &RankPlacement, round: &Round, timeout: Duration) -> Result<Backend> {
    let named = std::env::var("GLOO_SOCKET_IFNAME").ok().filter(|name| !name.is_empty());
    let interface =
        gloo_interface(named, &placement.master_addr, placement.master_port).map_err(|reason| {
            refuse(placement, reason, "check MASTER_ADDR and the network, or set GLOO_SOCKET_IFNAME")
        })?;
    let (rank, world_size) = (placement.rank, placement.world_size);
    let store = round.store.with_prefix("gloo")?;
    let given = interface.clone();
    let connect = move || Backend::gloo(&store, rank, world_size, timeout, &given);
    let backend = connected(placement, round, connect)?.map_err(|error| {
        let remedy = "check that the nodes reach each other, or set GLOO_SOCKET_IFNAME";
        refuse(placement, format!("{interface:?}: {}", error.message), remedy)
    })?;
    tracing::debug!("rank {rank} of {world_size} has joined over {interface:?}");
    Ok(backend)
}

/// Memory that all ranks share, if they are on one host, may reach each other's, and none has `VOLTAIC_SHARED_MEMORY=0`.
fn neighbours(placement: &RankPlacement, round: &Round, timeout: Duration) -> Result<Option<Neighbours>> {
    let (rank, world_size) = (placement.rank, placement.world_size);
    if world_size == 1 {
        return Ok(None);
    }
    let store = round.store.with_prefix("memory")?;
    let home = if shares_memory()? { Home::new() } else { Err(io::Error::other("VOLTAIC_SHARED_MEMORY=0")) };
    let told = move |stage: &str, mine: &str| {
        store.set(&format!("{stage}/{rank}"), mine.as_bytes())?;
        let told = |rank| store.get(&format!("{stage}/{rank}"), timeout);
        let texts = (0..world_size).map(|rank| Ok(String::from_utf8_lossy(&told(rank)?).into_owned()));
        texts.collect::<Result<Vec<_>, TorchError>>()
    };
    let connect = move || {
        let addresses = told("address", &home.as_ref().map_or_else(|_| String::new(), Home::address))?;
        let opened = home.and_then(|home| home.open_others(rank, &addresses, timeout));
        let reasons = told("refusal", &opened.as_ref().err().map_or_else(String::new, io::Error::to_string))?;
        let refusal = reasons.into_iter().find(|reason| !reason.is_empty());
        Ok::<_, TorchError>((opened.ok().filter(|_| refusal.is_none()), refusal))
    };
    let remedy = "check that the nodes reach each other";
    let (neighbours, refusal) =
        connected(placement, round, connect)?.map_err(|error| refuse(placement, error.message, remedy))?;
    match refusal {
        None => tracing::debug!("rank {rank} of {world_size} shares memory with the others"),
        Some(reason) => tracing::debug!("ranks share no memory: {reason}"),
    }
    Ok(neighbours)
}

/// What `connect` gives, unless a rank that it waits for has ended.
fn connected<T: Send + 'static>(
    placement: &RankPlacement,
    round: &Round,
    connect: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    let receiver = on_thread(connect);
    loop {
        match receiver.recv_timeout(GLANCE) {
            Ok(done) => return Ok(done),
            Err(RecvTimeoutError::Timeout) if !round.is_abandoned() => {}
            Err(_) => {
                let reason = "a rank has ended while the others connected to it";
                return Err(refuse(placement, reason, "look at its output"));
            }
        }
    }
}

/// The communicator of NCCL or HCCL, whose id rank 0 leaves in the store.
fn communicator(
    library: CollectiveLibrary,
    placement: &RankPlacement,
    round: &Round,
    options: &JoinOptions,
) -> Result<Backend> {
    const KEY: &str = "communicator";
    let JoinOptions { device, timeout } = *options;
    let remedy = "see what the library logs: NCCL_DEBUG=INFO, or HABANA_LOGS";
    let failed = |error: crate::error::TorchError| refuse(placement, error.message, remedy);
    let id = if placement.rank == 0 {
        let id = library.unique_id().map_err(failed)?;
        round.store.set(KEY, &id)?;
        id
    } else {
        round.store.get(KEY, timeout).map_err(failed)?
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

/// Connects to the store, or becomes its server.
fn open_store(placement: &RankPlacement, timeout: Duration) -> Result<Arc<Store>> {
    let (host, port) = (placement.master_addr.as_str(), placement.master_port);
    let address = format!("{host}:{port}");
    let mut stores = STORES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(store) = stores.get(&address).filter(|_| port != 0) {
        return Ok(store.clone());
    }
    resolve(placement)?;
    let _waits = (!placement.hosts_store).then(|| say_that_it_waits(placement));
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
    let store = Arc::new(store);
    stores.insert(address, store.clone());
    Ok(store)
}

/// Tells the user, when it begins to be long; not at all if what it returns is dropped before.
fn say_that_it_waits(placement: &RankPlacement) -> mpsc::Sender<()> {
    let (end, waiting) = mpsc::channel();
    let RankPlacement { rank, world_size, master_addr, master_port, .. } = placement.clone();
    std::thread::spawn(move || {
        if waiting.recv_timeout(NOTICE) == Err(RecvTimeoutError::Timeout) {
            tracing::info!("rank {rank} of {world_size} waits for rank 0 at {master_addr}:{master_port}");
        }
    });
    end
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
