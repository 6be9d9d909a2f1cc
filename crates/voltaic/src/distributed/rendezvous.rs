//! Brings ranks together: a store that all reach, a roll call, and the connections of a process group.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use super::connect::{Connector, JoinOptions};
use super::deadline::within;
use super::facts::Facts;
use super::host::{check_open_files, is_loopback, listen};
use super::libraries;
use super::placement::{RankPlacement, refuse};
use super::process_group::ProcessGroup;
use super::roll_call::{Meeting, NOTICE, Round, Terms, roll_call};
use crate::device::Device;
use crate::error::{Result, TorchError, TorchErrorKind};
use crate::ffi::{CollectiveLibrary, JobSecret, Store, libtorch_version};

/// How long an unknown host name is looked up again: names of a cluster may appear after the process has started.
const NAME_PATIENCE: Duration = Duration::from_secs(5);
/// How much longer than the time-out a connection to a store that does not answer, and a request, is waited for.
const SILENCE: Duration = Duration::from_secs(2);
/// How long a request of a run to its store may take.
const REQUEST: Duration = Duration::from_secs(10);

/// The store of a run. With a launcher that holds it, it outlives the ranks and what they are started again for.
#[derive(Debug)]
pub struct RunStore(Arc<Store>);

impl RunStore {
    /// Leaves a text under a key.
    ///
    /// # Errors
    /// [`TorchError`](crate::error::TorchError) if the store is gone.
    pub fn set(&self, key: &str, text: &str) -> Result<()> {
        let (key, text) = (key.to_owned(), text.to_owned());
        self.ask(move |store| store.set(&key, text.as_bytes()))
    }

    /// The text under a key, if there is one.
    ///
    /// # Errors
    /// [`TorchError`](crate::error::TorchError) if the store is gone.
    pub fn get(&self, key: &str) -> Result<Option<String>> {
        let key = key.to_owned();
        let get = move |store: &Store| match store.has(&key)? {
            true => store.get(&key, REQUEST).map(Some),
            false => Ok(None),
        };
        Ok(self.ask(get)?.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// What the store answers, or that it does not.
    fn ask<T: Send + 'static>(
        &self,
        request: impl FnOnce(&Store) -> Result<T, TorchError> + Send + 'static,
    ) -> Result<T> {
        let store = self.0.clone();
        let silent = || {
            let what = format!("the store has not answered for {} s", (REQUEST + SILENCE).as_secs());
            Err(TorchError::new("store", TorchErrorKind::Other, &what))
        };
        Ok(within(REQUEST + SILENCE, move || request(&store)).unwrap_or_else(silent)?)
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
    warn_of_trust(placement);
    let (meeting, run) = open_group(placement, options.timeout)?;
    let mut facts = program(options.device, library.as_ref().map_or("gloo", CollectiveLibrary::name));
    facts.extend(terms.facts);
    let terms = Terms { facts, ..terms };
    let Round { store, attempt, nonce } = roll_call(placement, meeting, options.timeout, terms)?;
    let connector = Connector::new(placement.clone(), *options, library, store.clone(), nonce);
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
pub(super) fn open_group(placement: &RankPlacement, timeout: Duration) -> Result<(Meeting, RunStore)> {
    check_open_files(placement.world_size)?;
    let store = open_store(placement, timeout)?;
    let job = job_name(placement.secret.as_ref());
    let hello = Arc::new(store.with_prefix("hello")?);
    let store = own_part(&store, placement.secret.as_ref(), &job)?;
    let generation = GENERATION.fetch_add(1, Ordering::Relaxed);
    let group = Arc::new(store.with_prefix(&format!("group{generation}"))?);
    Ok((
        Meeting { store: group, hello, job },
        RunStore(Arc::new(store.with_prefix(&format!("run{generation}"))?)),
    ))
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
    let in_use = || {
        let reason = format!("MASTER_PORT={port} is in use on this host");
        refuse(placement, reason, "set MASTER_PORT to a free port, the same for all ranks")
    };
    let server = placement.hosts_store.then(|| listen(host, port)).transpose().map_err(|error| {
        if error.kind() == ErrorKind::AddrInUse {
            return in_use();
        }
        refuse(placement, format!("cannot listen: {error}"), "check MASTER_ADDR and MASTER_PORT")
    })?;
    let name = host.to_owned();
    let made =
        within(timeout + SILENCE, move || Store::tcp(&name, port, server, timeout)).unwrap_or_else(|| {
            let what = match TcpStream::connect((host, port)) {
                Ok(_) => {
                    "what listens there accepts connections, and does not answer as a store does".to_owned()
                }
                Err(error) => format!("nothing accepts connections there: {error}"),
            };
            Err(TorchError::new("TCPStore", TorchErrorKind::Other, &what))
        });
    let (store, _) = made.map_err(|error| {
        if placement.hosts_store
            && (error.message.contains("EADDRINUSE") || error.message.contains("already in use"))
        {
            return in_use();
        }
        let seconds = timeout.as_secs_f32();
        let reason = match connects(host, port) {
            Ok(()) => format!("nothing answers within {seconds} s: {}", error.message),
            Err(error) => {
                format!("nothing answers within {seconds} s: nothing accepts connections ({error})")
            }
        };
        let remedy = "check MASTER_ADDR and MASTER_PORT, and that rank 0 has been started";
        refuse(placement, reason, remedy)
    })?;
    let store = Arc::new(store);
    stores.insert(address, store.clone());
    Ok(store)
}

/// Whether something accepts connections at an address.
fn connects(host: &str, port: u16) -> std::io::Result<()> {
    let mut last = Err(ErrorKind::AddrNotAvailable.into());
    for address in (host, port).to_socket_addrs()? {
        last = TcpStream::connect_timeout(&address, SILENCE).map(drop);
        if last.is_ok() {
            break;
        }
    }
    last
}

/// The part of a store that only processes with the job's secret can find and write to: its keys have a prefix derived from the
/// secret, and its values are sealed. A process of another job that connects by mistake is not taken for a rank, and values of a
/// stranger who has read the keys are rejected.
fn own_part(store: &Store, secret: Option<&JobSecret>, job: &str) -> Result<Store> {
    match secret {
        Some(secret) => Ok(store.sealed(secret)?.with_prefix(job)?),
        None => Ok(store.with_prefix(job)?),
    }
}

/// The name of a job's keys, by which no other job with a secret goes.
fn job_name(secret: Option<&JobSecret>) -> String {
    let of =
        |secret: &JobSecret| secret.seal(&[b"name"])[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    secret.map_or_else(|| "open".to_owned(), of)
}

/// Warns once that without a secret the network is trusted.
fn warn_of_trust(placement: &RankPlacement) {
    static ONCE: Once = Once::new();
    let RankPlacement { rank, world_size, secret, master_addr, .. } = placement;
    if *rank == 0 && *world_size > 1 && secret.is_none() && !is_loopback(master_addr) {
        ONCE.call_once(|| {
            tracing::warn!(
                "VOLTAIC_JOB_SECRET is not set: any process that reaches {master_addr} is believed to be a rank, as by \
                 PyTorch; set it to the same random text on all nodes, or make sure that only they reach each other"
            );
        });
    }
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
