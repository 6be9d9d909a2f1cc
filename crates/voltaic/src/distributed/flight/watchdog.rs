//! Finds out where the ranks are when one of them is missing.
//!
//! A thread of each rank looks four times a second whether an operation has failed anywhere, and whether a rank of this node has
//! ended. It then writes the record of this rank and leaves its position in the store, also while the rank itself is busy with
//! something that never ends. Ranks of one node read each other's records directly, those of stopped and killed ones, too.
//!
//! The first rank of a node asks the store for all of its ranks. It publishes the number of alarms in memory that the others of
//! its node read (its beacon), and once, under one key, where the records of all of them are. If the beacon stands still, since
//! that rank has been stopped or killed, the others ask the store themselves.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::record::{self, GROUPS, Owner, PID};
use crate::distributed::deadline::within;
use crate::distributed::host::host_name;
use crate::distributed::placement::RankPlacement;
use crate::error::TorchError;
use crate::ffi::{FlightMemory, Store};

/// How often it looks.
const TICK: Duration = Duration::from_millis(250);
/// Looks at a beacon that stands still before a rank asks the store itself.
const STILL: u32 = 2;
/// How long a rank waits for the first rank of its node to say where the records are.
const TABLE: Duration = Duration::from_secs(1);
/// How long a rank has to answer a request for its position.
pub(in crate::distributed) const ANSWER: Duration = Duration::from_millis(1500);

/// The folder below which this process writes its records.
static FOLDER: Mutex<Option<PathBuf>> = Mutex::new(None);

/// Says where the records of this process's operations are written when an operation fails: to `rank_logs` below `root`.
pub(crate) fn write_records_below(root: &Path) {
    let folder = std::path::absolute(root).unwrap_or_else(|_| root.to_path_buf()).join("rank_logs");
    *FOLDER.lock().unwrap_or_else(PoisonError::into_inner) = Some(folder);
}

/// Keys of the store.
const ALARM: &str = "alarm";

/// Numbers of a beacon: how often its rank has looked, and how many alarms it has seen.
const LOOKS: usize = 0;
const ALARMS: usize = 1;

/// Where the records of a node's ranks are, as their first rank publishes it.
#[derive(Debug, Default, Serialize, Deserialize)]
struct NodeTable {
    beacon: String,
    /// Ranks and addresses.
    records: Vec<(usize, String)>,
}

/// Where the record of a rank is.
#[derive(Debug, Serialize, Deserialize)]
struct Published {
    /// The first rank of its node.
    first: usize,
    address: String,
}

/// A rank's answer to a request for its position.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    /// The number of the alarm.
    alarm: i64,
    host: String,
    pid: u32,
    position: String,
}

/// Looks after the ranks while it lives.
#[derive(Debug)]
pub(in crate::distributed) struct Watchdog {
    seen: Arc<Seen>,
    /// Its end is that of the thread.
    _end: Sender<()>,
}

#[derive(Debug)]
struct Seen {
    rank: usize,
    /// The first rank of this node.
    first: usize,
    world_size: usize,
    attempt: u64,
    host: String,
    store: Store,
    /// Of this rank, if it is the first of its node.
    beacon: Option<FlightMemory>,
    /// The other ranks of this node.
    node_peers: Mutex<NodePeers>,
}

#[derive(Debug, Default)]
struct NodePeers {
    /// Whether all of this node are known.
    is_complete: bool,
    /// What the first rank has found so far.
    table: NodeTable,
    records: BTreeMap<usize, FlightMemory>,
    /// That of the first rank.
    beacon: Option<FlightMemory>,
    /// Those whose end has been reported.
    reported: BTreeSet<usize>,
}

impl Watchdog {
    /// For a process that is one of these ranks; `round` is a store of these ranks alone.
    pub fn start(placement: &RankPlacement, round: &Store) -> Result<Self, TorchError> {
        let RankPlacement { rank, local_rank, world_size, attempt, .. } = *placement;
        let first = rank.saturating_sub(local_rank);
        let seen = Arc::new(Seen {
            rank,
            first,
            world_size,
            attempt,
            host: host_name(),
            store: round.with_prefix("flight")?,
            beacon: if rank == first { FlightMemory::create().ok() } else { None },
            node_peers: Mutex::default(),
        });
        if let Some(memory) = record::own() {
            memory.header(GROUPS).fetch_add(1, Ordering::AcqRel);
        }
        if attempt == 0 {
            seen.remove_records();
        }
        seen.publish()?;
        let (end, ended) = mpsc::channel();
        let watching = seen.clone();
        std::thread::spawn(move || watching.watch(&ended));
        Ok(Self { seen, _end: end })
    }

    /// Opens the records of the other ranks of this node, all of which have been started.
    pub fn meet_node_peers(&self) {
        let _ = self.seen.meet_node_peers(TABLE); // ranks that are not found are queried over the store
    }

    /// Writes the record of this rank; returns where it is.
    pub fn write_record(&self) -> Option<PathBuf> {
        self.seen.write_record()
    }

    /// Asks all ranks where they are; returns the number of the alarm.
    pub fn raise_alarm(&self) -> Result<i64, TorchError> {
        self.seen.store.add(ALARM, 1)
    }

    /// Where those of these ranks are that are of this node.
    pub fn find_on_node(&self, ranks: &[usize]) -> BTreeMap<usize, String> {
        self.seen.read_node_peers(ranks)
    }

    /// Where each of these ranks is, as far as it can be found out.
    pub fn find(&self, ranks: &[usize], alarm: i64) -> BTreeMap<usize, String> {
        let mut found = self.find_on_node(ranks);
        let others: Vec<usize> = ranks.iter().copied().filter(|rank| !found.contains_key(rank)).collect();
        if !others.is_empty() {
            let seen = self.seen.clone();
            let answers = within(2 * ANSWER, move || seen.collect_answers(&others, alarm));
            found.extend(answers.unwrap_or_default());
        }
        found
    }

    /// Whether a rank is known to have ended, so that it reports nothing.
    pub fn has_ended(&self, rank: usize) -> bool {
        self.seen.lock().records.get(&rank).is_some_and(|memory| !memory.has_owner())
    }

    /// Which of these ranks have not come to an operation, of those that this rank can see.
    pub fn not_in(&self, ranks: impl Iterator<Item = usize>, op: &str, seq: u64) -> Vec<usize> {
        let node_peers = self.seen.lock();
        let is_missing =
            |rank: &usize| node_peers.records.get(rank).is_some_and(|memory| !record::is_in(memory, op, seq));
        ranks.filter(is_missing).collect()
    }
}

/// What a rank has seen of its node's beacon.
#[derive(Debug, Default)]
struct Looks {
    /// How often this rank has looked.
    own: u32,
    last: u64,
    /// How often it has stood still.
    still: u32,
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        if let Some(memory) = record::own() {
            memory.header(GROUPS).fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Seen {
    fn lock(&self) -> MutexGuard<'_, NodePeers> {
        self.node_peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread.
    fn watch(&self, ended: &Receiver<()>) {
        let (mut last, mut looks) = (0, Looks::default());
        while ended.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
            let _ = self.meet_node_peers(Duration::ZERO);
            if let Some(alarm) = self.alarms(&mut looks)
                && alarm > last
            {
                last = alarm;
                let _ = self.write_record();
                let _ = self.answer(alarm);
            }
            self.look_for_ended();
        }
    }

    /// How many alarms there have been: by the beacon of this node as long as it moves, else by the store. None if it is not
    /// time to ask the store.
    fn alarms(&self, seen: &mut Looks) -> Option<i64> {
        seen.own += 1;
        if self.rank != self.first {
            if let Some(beacon) = &self.lock().beacon {
                let looks = beacon.header(LOOKS).load(Ordering::Acquire);
                seen.still = if looks == seen.last { seen.still + 1 } else { 0 };
                seen.last = looks;
                if seen.still < STILL {
                    return i64::try_from(beacon.header(ALARMS).load(Ordering::Acquire)).ok();
                }
            }
            if !seen.own.is_multiple_of(STILL) {
                return None;
            }
        }
        let alarms = self.store.add(ALARM, 0).ok()?;
        if let Some(beacon) = &self.beacon {
            beacon.header(ALARMS).store(alarms.unsigned_abs(), Ordering::Release);
            beacon.header(LOOKS).fetch_add(1, Ordering::AcqRel);
        }
        Some(alarms)
    }

    fn publish(&self) -> Result<(), TorchError> {
        let address = record::own().and_then(FlightMemory::address).unwrap_or_default();
        let published = Published { first: self.first, address };
        let text = serde_json::to_vec(&published).unwrap_or_default();
        self.store.set(&format!("record/{}", self.rank), &text)
    }

    /// Opens the records of the ranks of this node, which follow each other.
    fn meet_node_peers(&self, limit: Duration) -> Result<(), TorchError> {
        if self.lock().is_complete {
            return Ok(());
        }
        let key = format!("node/{}", self.first);
        let table = if self.rank == self.first {
            let Some(table) = self.collect_table(limit)? else { return Ok(()) };
            self.store.set(&key, &serde_json::to_vec(&table).unwrap_or_default())?;
            table
        } else {
            if limit.is_zero() && !self.store.has(&key)? {
                return Ok(()); // later
            }
            let Some(text) = self.store.wait(&key, limit.max(ANSWER))? else { return Ok(()) };
            serde_json::from_slice(&text).unwrap_or_default()
        };
        let mut node_peers = self.lock();
        for (rank, address) in table.records.iter().filter(|(rank, _)| *rank != self.rank) {
            if let Ok(memory) = FlightMemory::open(address) {
                node_peers.records.insert(*rank, memory);
            }
        }
        node_peers.beacon = FlightMemory::open(&table.beacon).ok();
        node_peers.is_complete = true;
        Ok(())
    }

    /// Where the records of the ranks of this node are, when all have published theirs. One after the other, up to the first rank
    /// of the next node.
    fn collect_table(&self, limit: Duration) -> Result<Option<NodeTable>, TorchError> {
        let mut table = std::mem::take(&mut self.lock().table);
        let mut is_complete = true;
        while self.first + table.records.len() < self.world_size {
            let rank = self.first + table.records.len();
            let key = format!("record/{rank}");
            let text = match limit.is_zero() && !self.store.has(&key)? {
                true => None,
                false => self.store.wait(&key, limit.max(ANSWER))?,
            };
            let Some(text) = text else {
                is_complete = false;
                break;
            };
            match serde_json::from_slice::<Published>(&text) {
                Ok(Published { first, address }) if first == self.first => {
                    table.records.push((rank, address))
                }
                _ => break,
            }
        }
        if !is_complete {
            self.lock().table = table; // continues from there
            return Ok(None);
        }
        table.beacon = self.beacon.as_ref().and_then(FlightMemory::address).unwrap_or_default();
        Ok(Some(table))
    }

    /// Reports ranks of this node that have ended without leaving.
    fn look_for_ended(&self) {
        let mut ended = Vec::new();
        {
            let mut node_peers = self.lock();
            let NodePeers { records, reported, .. } = &mut *node_peers;
            for (&rank, memory) in records.iter() {
                if !memory.has_owner()
                    && memory.header(GROUPS).load(Ordering::Acquire) > 0
                    && reported.insert(rank)
                {
                    ended.push((rank, self.describe(rank, memory)));
                }
            }
        }
        for (_, text) in &ended {
            tracing::warn!("{text}");
        }
        if !ended.is_empty() {
            let _ = self.write_record();
        }
    }

    /// Where a neighbour is; keeps its record if it cannot do so itself.
    fn describe(&self, rank: usize, memory: &FlightMemory) -> String {
        let pid = memory.header(PID).load(Ordering::Relaxed);
        let position = record::position(memory);
        let state = match memory.has_owner() {
            false => ", which has ended",
            true if is_stopped(pid) => ", which a signal has stopped",
            true => "",
        };
        if !state.is_empty()
            && let Some(path) = self.path(rank)
            && !path.exists()
        {
            let owner = self.owner(rank, pid, position.clone());
            let _ = record::write(memory, &owner, &path);
        }
        let is = if memory.has_owner() { "is" } else { "was" };
        format!("rank {rank} (process {pid}{state}) {is} {position}")
    }

    fn read_node_peers(&self, ranks: &[usize]) -> BTreeMap<usize, String> {
        let node_peers = self.lock();
        let known = ranks.iter().filter_map(|&rank| Some((rank, node_peers.records.get(&rank)?)));
        known.map(|(rank, memory)| (rank, self.describe(rank, memory))).collect()
    }

    fn owner(&self, rank: usize, pid: u64, position: String) -> Owner {
        Owner { rank, pid, host: self.host.clone(), attempt: self.attempt, position }
    }

    /// Where the record of a rank is written.
    fn path(&self, rank: usize) -> Option<PathBuf> {
        let folder = FOLDER.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
        Some(folder.join(format!("{}{}.jsonl", prefix(rank), self.attempt)))
    }

    fn write_record(&self) -> Option<PathBuf> {
        let (memory, path) = (record::own()?, self.path(self.rank)?);
        let owner = self.owner(self.rank, std::process::id().into(), record::position(memory));
        match record::write(memory, &owner, &path) {
            Ok(()) => Some(path),
            Err(error) => {
                tracing::warn!("the record of the last operations could not be written: {error}");
                None
            }
        }
    }

    /// Removes what an earlier run has left.
    fn remove_records(&self) {
        let Some(folder) = FOLDER.lock().unwrap_or_else(PoisonError::into_inner).clone() else { return };
        let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
        for file in files {
            if file.file_name().to_string_lossy().starts_with(&prefix(self.rank)) {
                let _ = std::fs::remove_file(file.path());
            }
        }
    }

    /// Leaves the position of this rank for those that have raised an alarm.
    fn answer(&self, alarm: i64) -> Result<(), TorchError> {
        let position = record::own().map(record::position).unwrap_or_default();
        let answer = Answer { alarm, host: self.host.clone(), pid: std::process::id(), position };
        let text = serde_json::to_vec(&answer).unwrap_or_default();
        self.store.set(&format!("position/{}", self.rank), &text)
    }

    /// What ranks answer to an alarm.
    fn collect_answers(&self, ranks: &[usize], alarm: i64) -> BTreeMap<usize, String> {
        let deadline = Instant::now() + ANSWER;
        let mut answers = BTreeMap::new();
        while answers.len() < ranks.len() && Instant::now() < deadline {
            for &rank in ranks {
                if !answers.contains_key(&rank)
                    && let Some(answer) = self.answer_of(rank)
                    && answer.alarm >= alarm
                {
                    let Answer { host, pid, position, .. } = answer;
                    answers.insert(rank, format!("rank {rank} (process {pid} on {host}) is {position}"));
                }
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let silent = ranks.iter().filter(|rank| !answers.contains_key(rank)).copied().collect::<Vec<_>>();
        answers.extend(silent.into_iter().map(|rank| (rank, format!("rank {rank} does not answer"))));
        answers
    }

    fn answer_of(&self, rank: usize) -> Option<Answer> {
        let key = format!("position/{rank}");
        if !self.store.has(&key).ok()? {
            return None;
        }
        serde_json::from_slice(&self.store.get(&key, ANSWER).ok()?).ok()
    }
}

fn prefix(rank: usize) -> String {
    format!("collectives_rank_{rank}_attempt_")
}

/// Whether a process has been stopped, as by SIGSTOP or a debugger.
fn is_stopped(pid: u64) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // the name, in brackets, may hold anything
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['T', 't']))
}
