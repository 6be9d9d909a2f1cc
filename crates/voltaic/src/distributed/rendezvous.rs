//! Brings ranks together: a store that all reach, a roll call, and the connections of a process group.

use std::collections::BTreeMap;
use std::net::ToSocketAddrs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::connect::{Connector, JoinOptions};
use super::facts::Facts;
use super::libraries;
use super::placement::{RankPlacement, refuse};
use super::process_group::ProcessGroup;
use super::roll_call::{NOTICE, Round, Terms, roll_call};
use crate::device::Device;
use crate::error::Result;
use crate::ffi::{CollectiveLibrary, Store, libtorch_version};

/// How long an unknown host name is asked for again: names of a cluster may come up after the process.
const NAME_PATIENCE: Duration = Duration::from_secs(5);

/// The store of a run. With a launcher that holds it, it outlives the ranks and what they are started again for.
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
    /// What the ranks can leave for those that are started again.
    pub run: RunStore,
    /// How often the ranks have been started again.
    pub attempt: u64,
}

/// Joins the ranks of `placement`, if they come for the same as this one.
pub(super) fn join(placement: &RankPlacement, options: &JoinOptions, terms: Terms) -> Result<Joined> {
    let library = libraries::for_ranks(placement.world_size, options.device)?;
    let (store, run) = open_group(placement, options.timeout)?;
    let mut facts = program(options.device, library.as_ref().map_or("gloo", CollectiveLibrary::name));
    facts.extend(terms.facts);
    let terms = Terms { facts, ..terms };
    let Round { store, attempt } = roll_call(placement, &store, options.timeout, terms)?;
    let connector = Connector::new(placement.clone(), *options, library, store.clone());
    let group = ProcessGroup::of_all(connector, store)?;
    Ok(Joined { group, run, attempt })
}

/// What is the same wherever one program runs, and on the devices of one kind.
fn program(device: Device, backend: &str) -> Facts {
    let mut facts = Facts::default();
    facts.add("voltaic", format!("version {}", env!("CARGO_PKG_VERSION")));
    facts.add("libtorch", format!("version {}", libtorch_version()));
    let device = device.to_string();
    let kind = device.split(':').next().unwrap_or_default();
    facts.add("backend", format!("{backend} for {kind}"));
    facts
}

/// The store of a group that is still to be joined, and of what outlives its ranks: both are this group's own.
pub(super) fn open_group(placement: &RankPlacement, timeout: Duration) -> Result<(Arc<Store>, RunStore)> {
    let store = open_store(placement, timeout)?;
    let generation = GENERATION.fetch_add(1, Ordering::Relaxed);
    let group = Arc::new(store.with_prefix(&format!("group{generation}"))?);
    Ok((group, RunStore(store.with_prefix(&format!("run{generation}"))?)))
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
                let reason = format!("MASTER_ADDR={} is not a known host: {error}", placement.master_addr);
                return Err(refuse(placement, reason, "set MASTER_ADDR to the name or address of node 0"));
            }
        }
    }
}
