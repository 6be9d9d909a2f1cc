//! The ring of this process's last operations.

use std::fmt;
use std::path::Path;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::time::{Duration, SystemTime};

use serde::Serialize;
use tch::{Kind, Tensor};

use super::scope::write_names;
use crate::device::Device;
use crate::dtype::DtypeNames;
use crate::error::Error;
use crate::ffi::{
    FLIGHT_ENTRIES, FLIGHT_WORDS, FlightMemory, collective_begins, collective_ends, monotonic_nanos,
};

/// That of this process; none if the system gives no memory.
static OWN: LazyLock<Option<FlightMemory>> = LazyLock::new(|| {
    let memory = FlightMemory::create().ok()?;
    memory.header(PID).store(u64::from(std::process::id()), Ordering::Relaxed);
    Some(memory)
});

/// Off while a benchmark measures what the record costs.
static IS_KEPT: AtomicBool = AtomicBool::new(true);

/// Ends the names of scopes of a thread that works beside training.
pub(crate) const IN_BACKGROUND: &str = "in the background";

/// Switches the record of operations off and on, to measure what it costs.
#[doc(hidden)]
pub fn keep_record(keeps: bool) {
    IS_KEPT.store(keeps, Ordering::Relaxed);
}

/// Numbers of the header.
pub(super) const PID: usize = 0;
const STARTED: usize = 1;
/// Groups of all ranks that the process is in: none once it has left by itself.
pub(super) const GROUPS: usize = 2;

/// Numbers of an entry.
const NUMBER: usize = 0;
const BEGAN: usize = 1;
const ENDED: usize = 2;
const STATE: usize = 3;
const SEQ: usize = 4;
const BYTES: usize = 5;
const PEER: usize = 6;
const DTYPE: usize = 7;
const DIMS: usize = 8;
const OP: usize = 8 + MAX_DIMS;
const SCOPE: usize = OP + 3;
const MAX_DIMS: usize = 5;
const NAME_BYTES: usize = (FLIGHT_WORDS - SCOPE) * 8;
/// There is no tensor.
const NONE: u64 = u64::MAX;

/// An operation as it is noted.
#[derive(Debug, Clone, Copy)]
pub(in crate::distributed) struct Noted<'a> {
    pub op: &'static str,
    /// Which operation of its group it is, from 1.
    pub seq: u64,
    pub bytes: usize,
    pub tensor: &'a Tensor,
    /// Global rank of the only other one that takes part.
    pub peer: Option<usize>,
    /// The members, if they are some of the ranks.
    pub group: Option<&'a str>,
}

/// Notes that an operation has begun; returns its number.
pub(in crate::distributed) fn begin(noted: Noted) -> u64 {
    let Some(memory) = OWN.as_ref().filter(|_| IS_KEPT.load(Ordering::Relaxed)) else { return 0 };
    let number = memory.header(STARTED).fetch_add(1, Ordering::Relaxed) + 1;
    let entry = memory.entry(number);
    let set = |at: usize, value: u64| entry[at].store(value, Ordering::Relaxed);
    set(NUMBER, 0); // readers must not take what follows for the previous operation
    fence(Ordering::Release);
    set(BEGAN, monotonic_nanos());
    set(ENDED, 0);
    set(STATE, State::UnderWay as u64);
    set(SEQ, noted.seq);
    set(BYTES, noted.bytes as u64);
    set(PEER, noted.peer.map_or(0, |peer| peer as u64 + 1));
    if noted.tensor.defined() {
        let dims = noted.tensor.dim();
        set(DTYPE, noted.tensor.kind() as u64 | (dims as u64) << 32);
        if dims <= MAX_DIMS {
            noted.tensor.size().iter().enumerate().for_each(|(at, &size)| set(DIMS + at, size as u64));
        } else {
            set(DIMS, noted.tensor.numel() as u64);
        }
    } else {
        set(DTYPE, NONE);
    }
    set_text(&entry[OP..SCOPE], noted.op.as_bytes());
    let mut names = [0; NAME_BYTES];
    let start = write_names(&mut names);
    match noted.group {
        None => set_text(&entry[SCOPE..], &names[start..]),
        Some(group) => {
            let text = format!("{group}: {}", String::from_utf8_lossy(&names[start..]));
            set_text(&entry[SCOPE..], text.as_bytes());
        }
    }
    entry[NUMBER].store(number, Ordering::Release);
    collective_begins(number, noted.op, device_of(noted.tensor), || details(&noted));
    number
}

/// Number of the HPU that a tensor is on.
fn device_of(tensor: &Tensor) -> Option<usize> {
    match tensor.defined().then(|| Device::of(tensor).ok())?? {
        Device::Hpu(index) => Some(index),
        _ => None,
    }
}

/// What a profile shows of an operation, as members of a JSON object; ranks have the same `seq` for the same operation.
fn details(noted: &Noted) -> String {
    let mut names = [0; NAME_BYTES];
    let start = write_names(&mut names);
    let text = |text: &str| serde_json::Value::from(text).to_string();
    let mut details = format!("\"seq\": {}, \"bytes\": {}", noted.seq, noted.bytes);
    if noted.tensor.defined() {
        let dtype = text(name_of(noted.tensor.kind() as i32));
        details += &format!(", \"dtype\": {dtype}, \"shape\": {:?}", noted.tensor.size());
    }
    if let Some(peer) = noted.peer {
        details += &format!(", \"peer\": {peer}");
    }
    details += &format!(", \"group\": {}", text(noted.group.unwrap_or("all ranks")));
    details + &format!(", \"from\": {}", text(&String::from_utf8_lossy(&names[start..])))
}

fn set_text(words: &[AtomicU64], text: &[u8]) {
    for (at, word) in words.iter().enumerate() {
        let mut bytes = [0; 8];
        let part = text.get(at * 8..).unwrap_or_default();
        let len = part.len().min(8);
        bytes[..len].copy_from_slice(&part[..len]);
        word.store(u64::from_ne_bytes(bytes), Ordering::Relaxed);
    }
}

fn text(words: &[u64]) -> String {
    let bytes: Vec<u8> =
        words.iter().flat_map(|word| word.to_ne_bytes()).take_while(|&byte| byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// How far an operation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(in crate::distributed) enum State {
    UnderWay = 0,
    Done = 1,
    Failed = 2,
}

/// Notes that an operation has ended.
pub(in crate::distributed) fn end(number: u64, state: State) {
    collective_ends(number);
    let Some(memory) = OWN.as_ref() else { return };
    let entry = memory.entry(number);
    // another may have its place by now
    if number != 0 && entry[NUMBER].load(Ordering::Relaxed) == number {
        entry[ENDED].store(monotonic_nanos(), Ordering::Relaxed);
        entry[STATE].store(state as u64, Ordering::Release);
    }
}

/// The memory of this process.
pub(super) fn own() -> Option<&'static FlightMemory> {
    OWN.as_ref()
}

/// An operation as it was noted.
#[derive(Debug, Clone, Serialize)]
pub(in crate::distributed) struct Entry {
    /// Counts the operations of the process.
    pub number: u64,
    /// Counts those of the group.
    pub seq: u64,
    pub op: String,
    pub state: State,
    /// Who called it.
    pub from: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dtype: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shape: Option<Vec<u64>>,
    pub bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<u64>,
    /// Seconds since 1970.
    pub began: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<f64>,
    #[serde(skip)]
    began_nanos: u64,
    #[serde(skip)]
    ended_nanos: u64,
}

impl Entry {
    /// None if it has been replaced by another, or is being.
    fn read(memory: &FlightMemory, number: u64) -> Option<Self> {
        let words = memory.entry(number);
        // operations count from 1; an entry without one has 0
        if number == 0 || words[NUMBER].load(Ordering::Acquire) != number {
            return None;
        }
        let read: Vec<u64> = words.iter().map(|word| word.load(Ordering::Relaxed)).collect();
        fence(Ordering::Acquire);
        if words[NUMBER].load(Ordering::Relaxed) != number {
            return None;
        }
        let has_tensor = read[DTYPE] != NONE;
        let dims = (read[DTYPE] >> 32) as usize;
        let known = if dims <= MAX_DIMS { dims } else { 1 };
        let code = read[DTYPE] as u32 as i32;
        Some(Self {
            number,
            seq: read[SEQ],
            op: text(&read[OP..SCOPE]),
            state: match read[STATE] {
                0 => State::UnderWay,
                1 => State::Done,
                _ => State::Failed,
            },
            from: text(&read[SCOPE..]),
            dtype: has_tensor.then(|| name_of(code)),
            shape: has_tensor.then(|| read[DIMS..DIMS + known].to_vec()),
            bytes: read[BYTES],
            peer: read[PEER].checked_sub(1),
            began: wall_clock(read[BEGAN]),
            ended: (read[ENDED] > 0).then(|| wall_clock(read[ENDED])),
            began_nanos: read[BEGAN],
            ended_nanos: read[ENDED],
        })
    }
}

/// `all_reduce (operation 7, float32 [10, 3], from training_step / layers.3)`.
impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (operation {}", self.op, self.seq)?;
        if let (Some(dtype), Some(shape)) = (self.dtype, &self.shape) {
            write!(f, ", {dtype} {shape:?}")?;
        }
        if !self.from.is_empty() {
            write!(f, ", from {}", self.from)?;
        }
        write!(f, ")")
    }
}

fn name_of(code: i32) -> &'static str {
    crate::dtype::DTYPES
        .iter()
        .find(|dtype| dtype.kind.is_some_and(|kind: Kind| kind as i32 == code))
        .map_or("unknown dtype", |DtypeNames { name, .. }| name)
}

fn wall_clock(nanos: u64) -> f64 {
    let ago = Duration::from_nanos(monotonic_nanos().saturating_sub(nanos));
    let then = SystemTime::now().checked_sub(ago).unwrap_or(SystemTime::UNIX_EPOCH);
    then.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// Where a rank is, or was when it ended: in which operation, or after which.
pub(super) fn position(memory: &FlightMemory) -> String {
    let started = memory.header(STARTED).load(Ordering::Acquire);
    let seconds = |since: u64| Duration::from_nanos(monotonic_nanos().saturating_sub(since)).as_secs_f64();
    // the newest may be half written
    let entries =
        || (0..FLIGHT_ENTRIES as u64).filter_map(|back| Entry::read(memory, started.checked_sub(back)?));
    // the rank waits for the oldest operation in progress, unless that is one which it does not wait for
    let underway = entries().filter(|entry| entry.state == State::UnderWay);
    let waits_for = underway.min_by_key(|entry| (entry.from.contains(IN_BACKGROUND), entry.number));
    match (waits_for, entries().next()) {
        (Some(entry), _) => format!("in {entry}, which it began {:.1} s ago", seconds(entry.began_nanos)),
        (None, Some(entry)) => {
            let how = if entry.state == State::Failed { "failed" } else { "ended" };
            format!("after {entry}, which {how} {:.1} s ago", seconds(entry.ended_nanos))
        }
        (None, None) => "before its first operation".to_owned(),
    }
}

/// Who called an operation of this process.
pub(in crate::distributed) fn caller(number: u64) -> String {
    own().and_then(|memory| Entry::read(memory, number)).map(|entry| entry.from).unwrap_or_default()
}

/// Whether a rank has reached an operation.
pub(super) fn is_in(memory: &FlightMemory, op: &str, seq: u64) -> bool {
    let started = memory.header(STARTED).load(Ordering::Acquire);
    (0..FLIGHT_ENTRIES as u64)
        .filter_map(|back| Entry::read(memory, started.checked_sub(back)?))
        .any(|entry| entry.seq == seq && entry.op == op)
}

/// Who a record belongs to.
#[derive(Debug, Serialize)]
pub(super) struct Owner {
    pub rank: usize,
    pub pid: u64,
    pub host: String,
    pub attempt: u64,
    /// Where the rank is.
    pub position: String,
}

/// Writes a ring as lines of JSON, the owner first, then the operations in their order. The file is whole at any time: a rank's
/// failure and another rank's question may have it written twice at once.
pub(super) fn write(memory: &FlightMemory, owner: &Owner, path: &Path) -> Result<(), Error> {
    let started = memory.header(STARTED).load(Ordering::Acquire);
    let first = started.saturating_sub(FLIGHT_ENTRIES as u64) + 1;
    let entries = (first..=started).filter_map(|number| Entry::read(memory, number));
    let lines = std::iter::once(serde_json::to_string(owner))
        .chain(entries.map(|entry| serde_json::to_string(&entry)));
    let mut text = String::new();
    for line in lines {
        let line = line.map_err(|error| Error::io("write", path, error.into()))?;
        text.push_str(&line);
        text.push('\n');
    }
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(|error| Error::io("create", folder, error))?;
    }
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let mut unfinished = path.as_os_str().to_owned();
    unfinished.push(format!(".{}.{number}", std::process::id()));
    let written = std::fs::write(&unfinished, text).and_then(|()| std::fs::rename(&unfinished, path));
    written.map_err(|error| {
        let _ = std::fs::remove_file(&unfinished);
        Error::io("write", path, error)
    })
}
