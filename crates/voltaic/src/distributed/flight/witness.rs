//! Finds out where the ranks are when one of them is missing.
//!
//! A thread of each rank looks twice a second whether an operation has failed anywhere, and whether a rank of this host has
//! ended. Then it writes the record of this rank, and leaves word for the others in the store: also while the rank itself
//! is busy with something that never ends. Ranks of one host read each other's records directly, those of stopped and
//! killed ones, too.

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
const TICK: Duration = Duration::from_millis(500);
/// How long a rank that is asked where it is has to answer.
const ANSWER: Duration = Duration::from_millis(1500);

/// The folder below which this process writes its records.
static FOLDER: Mutex<Option<PathBuf>> = Mutex::new(None);

/// Says where the records of this process's operations are written when an operation fails: to `rank_logs` below `root`.
pub(crate) fn write_records_below(root: &Path) {
    let folder = std::path::absolute(root).unwrap_or_else(|_| root.to_path_buf()).join("rank_logs");
    *FOLDER.lock().unwrap_or_else(PoisonError::into_inner) = Some(folder);
}

/// Keys of the store.
const ALARM: &str = "alarm";

/// What a rank answers when it is asked where it is.
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
pub(in crate::distributed) struct Witness {
    seen: Arc<Seen>,
    /// Its end is that of the thread.
    _end: Sender<()>,
}

#[derive(Debug)]
struct Seen {
    rank: usize,
    world_size: usize,
    attempt: u64,
    host: String,
    store: Store,
    /// Records of the other ranks of this host.
    neighbours: Mutex<Neighbours>,
}

#[derive(Debug)]
struct Neighbours {
    /// Whose address is asked for next; none when all of this host are known.
    next: Option<usize>,
    records: BTreeMap<usize, FlightMemory>,
    /// Those of which it has been said that they have ended.
    told: BTreeSet<usize>,
}

impl Witness {
    /// For a process that is one of these ranks; `round` is a store of these ranks alone.
    pub fn start(placement: &RankPlacement, round: &Store) -> Result<Self, TorchError> {
        let RankPlacement { rank, local_rank, world_size, attempt, .. } = *placement;
        let neighbours = Neighbours {
            next: Some(rank.saturating_sub(local_rank)),
            records: BTreeMap::new(),
            told: BTreeSet::new(),
        };
        let seen = Arc::new(Seen {
            rank,
            world_size,
            attempt,
            host: host_name(),
            store: round.with_prefix("flight")?,
            neighbours: Mutex::new(neighbours),
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

    /// Opens the records of the other ranks of this host, all of which have been started.
    pub fn meet_neighbours(&self) {
        let _ = self.seen.meet_neighbours(); // ranks that are not found are asked over the store
    }

    /// Writes the record of this rank; returns where it is.
    pub fn write_record(&self) -> Option<PathBuf> {
        self.seen.write_record()
    }

    /// Asks all ranks where they are; returns the number of the alarm.
    pub fn raise_alarm(&self) -> Result<i64, TorchError> {
        self.seen.store.add(ALARM, 1)
    }

    /// Where each of these ranks is, as far as it can be found out.
    pub fn find(&self, ranks: &[usize], alarm: Option<i64>) -> Vec<(usize, String)> {
        let mut found = self.seen.read_neighbours(ranks);
        let others: Vec<usize> = ranks.iter().copied().filter(|rank| !found.contains_key(rank)).collect();
        if let Some(alarm) = alarm.filter(|_| !others.is_empty()) {
            let seen = self.seen.clone();
            let answers = within(2 * ANSWER, move || seen.collect_answers(&others, alarm));
            found.extend(answers.unwrap_or_default());
        }
        found.into_iter().collect()
    }

    /// Whether a rank is known to have ended, so that it tells nothing.
    pub fn has_ended(&self, rank: usize) -> bool {
        self.seen.lock().records.get(&rank).is_some_and(|memory| !memory.has_owner())
    }

    /// Which of these ranks have not come to an operation, of those that this rank can see.
    pub fn not_in(&self, ranks: impl Iterator<Item = usize>, op: &str, seq: u64) -> Vec<usize> {
        let neighbours = self.seen.lock();
        let is_missing =
            |rank: &usize| neighbours.records.get(rank).is_some_and(|memory| !record::is_in(memory, op, seq));
        ranks.filter(is_missing).collect()
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        if let Some(memory) = record::own() {
            memory.header(GROUPS).fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Seen {
    fn lock(&self) -> MutexGuard<'_, Neighbours> {
        self.neighbours.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread.
    fn watch(&self, ended: &Receiver<()>) {
        let mut last = 0;
        while ended.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
            let _ = self.meet_neighbours();
            if let Ok(alarm) = self.store.add(ALARM, 0)
                && alarm > last
            {
                last = alarm;
                let _ = self.write_record();
                let _ = self.answer(alarm);
            }
            self.look_for_ended();
        }
    }

    fn publish(&self) -> Result<(), TorchError> {
        let address = record::own().and_then(FlightMemory::address).unwrap_or_default();
        self.store.set(&format!("record/{}", self.rank), format!("{} {address}", self.host).as_bytes())
    }

    /// Opens the records of the ranks of this host, which follow each other.
    fn meet_neighbours(&self) -> Result<(), TorchError> {
        loop {
            let Some(rank) = self.lock().next.filter(|&rank| rank < self.world_size) else { return Ok(()) };
            let key = format!("record/{rank}");
            if rank != self.rank {
                if !self.store.has(&key)? {
                    return Ok(()); // later
                }
                let text = String::from_utf8_lossy(&self.store.get(&key, ANSWER)?).into_owned();
                let (host, address) = text.split_once(' ').unwrap_or((&text, ""));
                let mut neighbours = self.lock();
                if host != self.host && rank > self.rank {
                    neighbours.next = None;
                    return Ok(());
                }
                if let Ok(memory) = FlightMemory::open(address) {
                    neighbours.records.insert(rank, memory);
                }
            }
            self.lock().next = Some(rank + 1);
        }
    }

    /// Tells of neighbours that have ended without leaving.
    fn look_for_ended(&self) {
        let mut ended = Vec::new();
        {
            let mut neighbours = self.lock();
            let Neighbours { records, told, .. } = &mut *neighbours;
            for (&rank, memory) in records.iter() {
                if !memory.has_owner()
                    && memory.header(GROUPS).load(Ordering::Acquire) > 0
                    && told.insert(rank)
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

    fn read_neighbours(&self, ranks: &[usize]) -> BTreeMap<usize, String> {
        let neighbours = self.lock();
        let known = ranks.iter().filter_map(|&rank| Some((rank, neighbours.records.get(&rank)?)));
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

    /// Tells who has raised an alarm where this rank is.
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
