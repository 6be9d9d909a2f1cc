//! The roll call: every rank counts itself in, and rank 0 publishes a verdict.
//!
//! What a rank asks of the store does not depend on how many there are. Ranks count up one counter, which rank 0 polls, and set
//! their bit in a counter that [`BITS`] ranks share, which rank 0 reads to name those that are missing. A rank whose facts have
//! another digest than rank 0's leaves them for rank 0 to compare. Ranks wait for the verdict on the server, without polling.
//!
//! Rank 0 opens a *round* when it starts, and the others join the newest one. So ranks that are restarted meet again
//! whatever their launcher calls the attempt: the nodes of a `torchrun` count restarts each for itself.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::deadline::within;
use super::facts::{Facts, differences};
use super::host::host_name;
use super::placement::{RankPlacement, refuse};
use crate::error::{NAMED_RANKS, Problem, Result, TorchError, name_ranks};
use crate::ffi::{JobSecret, Store};

/// How much longer than rank 0 the others wait for its verdict.
const VERDICT_GRACE: Duration = Duration::from_secs(5);
/// After this time a rank logs which ranks it waits for.
pub(super) const NOTICE: Duration = Duration::from_secs(10);
/// Longest time between two looks of rank 0.
const LONGEST_PAUSE: Duration = Duration::from_millis(200);
/// First and longest time for which another rank waits on the server before it looks for a newer round.
const FIRST_WAIT: Duration = Duration::from_millis(200);
const LONGEST_WAIT: Duration = Duration::from_secs(2);
/// Ranks whose facts differ and are compared; the others are not read.
const COMPARED: i64 = 64;
/// Ranks that share a counter, with a bit each.
pub(super) const BITS: usize = 32;
const SAME_SIZE: &str = "use the same trainer.devices, trainer.num_nodes and WORLD_SIZE everywhere";
const ALONE: &str = "use a port that only this job uses, and set VOLTAIC_JOB_SECRET";
const OWN_RANK: &str = "give each process a rank of its own: NODE_RANK for each node, or RANK and LOCAL_RANK";

const SAME_VERSION: &str = "start the same program, with the same version of voltaic, on all ranks";
/// How to fix a difference between ranks.
pub(super) const SAME_RUN: &str = "start all ranks with the same program and configuration, or name what may differ in \
                                   allow_differences of trainer.strategy";

/// What a rank brings along.
#[derive(Debug, Clone, Default)]
pub(super) struct Terms {
    /// What must be the same on all ranks.
    pub facts: Facts,
    /// Keys of those that may differ all the same.
    pub allowed: Vec<String>,
}

/// Rank 0 as it opens a round, and another rank whose facts are not rank 0's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Arrival {
    world_size: usize,
    host: String,
    pid: u32,
    /// Of its facts.
    digest: [u8; 32],
    /// Empty for rank 0.
    facts: Facts,
}

impl Arrival {
    /// What a rank has left in the store, or why it is not an arrival.
    fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        serde_json::from_slice(bytes).map_err(|error| unreadable(bytes, &error))
    }
}

/// The number of a round as rank 0 writes it.
fn round_number(bytes: &[u8]) -> Result<i64, String> {
    let number = std::str::from_utf8(bytes).ok().and_then(|text| text.parse().ok());
    number.filter(|number| *number > 0).ok_or_else(|| unreadable(bytes, &"not a number from 1"))
}

/// The beginning of what cannot be read, and why.
fn unreadable(bytes: &[u8], why: &impl std::fmt::Display) -> String {
    let start = bytes[..bytes.len().min(40)].escape_ascii();
    let why: String = why.to_string().chars().take(120).flat_map(char::escape_default).collect();
    format!("{} bytes, `{start}`, that are not understood ({why})", bytes.len())
}

/// Rank 0's answer when all ranks have arrived, or when it gives up.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Verdict {
    /// What is wrong, and how to fix it.
    problem: Option<Problem>,
    /// How often the ranks have been started again.
    attempt: u64,
    /// See [`Round::nonce`].
    nonce: String,
    /// Rank 0 has been started again and has opened another round.
    #[serde(default)]
    is_superseded: bool,
}

impl Verdict {
    /// What rank 0 has left in the store, or why it is not a verdict.
    fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        serde_json::from_slice(bytes).map_err(|error| unreadable(bytes, &error))
    }

    fn problem(reason: String, remedy: &'static str) -> Self {
        Self { problem: Some(Problem::new(reason, remedy)), ..Self::default() }
    }
}

/// A round in which all ranks have arrived.
#[derive(Debug)]
pub(super) struct Round {
    /// Of this round alone.
    pub store: Arc<Store>,
    /// How often the ranks have been started again, the same for all of them.
    pub attempt: u64,
    /// A text of this round, which no other has.
    pub nonce: String,
}

/// A rank that was in the round of this store has been started again, so that it will take no part.
pub(super) fn is_abandoned(round: &Store) -> bool {
    round.has(ABANDONED).unwrap_or(false)
}

/// Keys of a round.
const FIRST: &str = "first";
const ABANDONED: &str = "abandoned";
const MISFIT: &str = "misfit";
const RESTARTED: &str = "restarted";
const VERDICT: &str = "verdict";
/// How many other ranks have arrived, and how many of them have other facts than rank 0.
const ARRIVED: &str = "arrived";
const DIFFERING: &str = "differing";
/// Keys of all rounds.
const ROUNDS: &str = "rounds";
const NEWEST: &str = "newest";
/// Names the job of rank 0, in the part of the store that all see.
const JOB: &str = "job";
/// What the store says of a value that does not come from a rank.
const NOT_SEALED: &str = "not sealed with";

/// Where the ranks of a group meet.
#[derive(Debug)]
pub(super) struct Meeting {
    /// The part of the store that belongs to this group.
    pub store: Arc<Store>,
    /// The part that all jobs see.
    pub hello: Arc<Store>,
    /// The name of this job's keys.
    pub job: String,
}

/// Returns when all ranks have arrived.
///
/// It ends in time even if the store does not answer: a request waits for as long as the system takes to notice that a
/// network is cut.
pub(super) fn roll_call(
    placement: &RankPlacement,
    meeting: Meeting,
    timeout: Duration,
    terms: Terms,
) -> Result<Round> {
    let Meeting { store, hello, job } = meeting;
    let limit = timeout + 2 * VERDICT_GRACE;
    let call = Call { placement: placement.clone(), store, hello, job, timeout, terms };
    within(limit, move || call.answer()).unwrap_or_else(|| {
        let reason = format!("the store has not answered for {} s", limit.as_secs_f32());
        Err(refuse(placement, reason, "check the network to MASTER_ADDR"))
    })
}

struct Call {
    placement: RankPlacement,
    store: Arc<Store>,
    hello: Arc<Store>,
    job: String,
    timeout: Duration,
    terms: Terms,
}

impl Call {
    fn answer(&self) -> Result<Round> {
        let (store, verdict) = if self.placement.rank == 0 { self.lead()? } else { self.follow()? };
        match verdict.problem {
            Some(Problem { what, remedy }) => Err(refuse(&self.placement, what, remedy)),
            None => Ok(Round { store: Arc::new(store), attempt: verdict.attempt, nonce: verdict.nonce }),
        }
    }

    /// A rank belongs to the launcher that was first to start it.
    fn claim(&self) -> Result<()> {
        let Some(launcher) = &self.placement.launcher else { return Ok(()) };
        let key = format!("owner/{}", self.placement.rank);
        if self.store.add(&format!("claims/{}", self.placement.rank), 1).map_err(|e| self.lost(&e))? > 1
            && let Ok(owner) = self.store.get(&key, VERDICT_GRACE)
        {
            return if owner == launcher.as_bytes() { Ok(()) } else { Err(self.taken()) };
        }
        self.store.set(&key, launcher.as_bytes()).map_err(|e| self.lost(&e))
    }

    /// Rank 0: opens a round, and waits for the others.
    fn lead(&self) -> Result<(Store, Verdict)> {
        let lost = |error: TorchError| self.lost(&error);
        self.claim()?;
        self.hello.set(JOB, self.job.as_bytes()).map_err(lost)?;
        let number = self.store.add(ROUNDS, 1).map_err(lost)?;
        if number < 1 {
            let reason = format!("another program writes to the store: {number} rounds");
            return Err(refuse(&self.placement, reason, ALONE));
        }
        if number > 1 && !self.placement.may_come_back() {
            return Err(self.taken());
        }
        let round = self.round(number)?;
        round.set(FIRST, &self.arrival(Facts::default())).map_err(lost)?;
        self.say_if_restarted(&round)?;
        self.store.set(NEWEST, number.to_string().as_bytes()).map_err(lost)?;
        if number > 1 {
            // ranks that wait in the round before are to join this one
            let superseded = Verdict { is_superseded: true, ..Verdict::default() };
            let superseded = serde_json::to_vec(&superseded).unwrap_or_default();
            self.round(number - 1)?.set(VERDICT, &superseded).map_err(lost)?;
        }
        let mut verdict = self.count(&round)?;
        // a store that ended with the ranks has forgotten the rounds before
        verdict.nonce = JobSecret::random_text();
        verdict.attempt = (number as u64 - 1).max(u64::from(round.has(RESTARTED).map_err(lost)?));
        round.set(VERDICT, &serde_json::to_vec(&verdict).unwrap_or_default()).map_err(lost)?;
        if verdict.problem.is_some() && self.placement.hosts_store {
            std::thread::sleep(2 * LONGEST_PAUSE); // the others have to read it
        }
        Ok((round, verdict))
    }

    /// Another rank: joins the newest round, and the next one if rank 0 is started again meanwhile.
    fn follow(&self) -> Result<(Store, Verdict)> {
        let lost = |error: TorchError| self.lost(&error);
        let mut pause = Pause::waiting(self.timeout);
        let (mut seen, mut joined): (i64, Option<Store>) = (0, None);
        loop {
            let newest = self.newest()?;
            if newest == 0 {
                self.is_of_this_job()?;
            }
            if newest > seen {
                seen = newest;
                joined = self.enter(newest)?;
                let grace = if joined.is_some() { VERDICT_GRACE } else { Duration::ZERO };
                pause = Pause::waiting(self.timeout + grace);
            }
            let Some(limit) = pause.next(LONGEST_WAIT, || self.log_waiting_for("rank 0")) else {
                let reason = format!("rank 0 did not answer within {} s", self.timeout.as_secs_f32());
                return Err(refuse(&self.placement, reason, "look at the output of rank 0"));
            };
            match joined.take() {
                Some(round) => {
                    let Some(verdict) = round.wait(VERDICT, limit).map_err(lost)? else {
                        joined = Some(round);
                        continue;
                    };
                    let verdict =
                        Verdict::from_bytes(&verdict).map_err(|what| self.strange("rank 0", &what))?;
                    if !verdict.is_superseded {
                        return Ok((round, verdict));
                    }
                }
                None if newest == 0 => {
                    self.store.wait(NEWEST, limit).map_err(lost)?;
                }
                // this rank has been started again, and rank 0 is to follow
                None => std::thread::sleep(limit.min(LONGEST_PAUSE)),
            }
        }
    }

    /// An error if rank 0 has another secret, so that this rank would wait for it in vain.
    fn is_of_this_job(&self) -> Result<()> {
        let lost = |error: TorchError| self.lost(&error);
        if !self.hello.has(JOB).map_err(lost)?
            || self.hello.get(JOB, VERDICT_GRACE).map_err(lost)? == self.job.as_bytes()
        {
            return Ok(());
        }
        let reason = "rank 0 has another VOLTAIC_JOB_SECRET, or belongs to another job";
        Err(refuse(
            &self.placement,
            reason,
            "use a port of its own for each job, and one VOLTAIC_JOB_SECRET for its ranks",
        ))
    }

    /// Takes this rank's place in a round; none if it was taken before this rank was started again.
    fn enter(&self, number: i64) -> Result<Option<Store>> {
        let lost = |error: TorchError| self.lost(&error);
        let Self { placement, .. } = self;
        let round = self.round(number)?;
        let first = self.fits(&round)?;
        self.claim()?;
        if round.add(&format!("taken/{}", placement.rank), 1).map_err(lost)? > 1 {
            if !placement.may_come_back() {
                return Err(self.taken());
            }
            round.set(ABANDONED, placement.rank.to_string().as_bytes()).map_err(lost)?;
            return Ok(None);
        }
        self.say_if_restarted(&round)?;
        if first.digest != self.terms.facts.digest() {
            round.set(&facts_of(placement.rank), &self.arrival(self.terms.facts.clone())).map_err(lost)?;
            let number = round.add(DIFFERING, 1).map_err(lost)?;
            let rank = placement.rank.to_string();
            round.set(&format!("{DIFFERING}/{number}"), rank.as_bytes()).map_err(lost)?;
        }
        let (key, bit) = bit_of("present", placement.rank);
        round.add(&key, bit).map_err(lost)?;
        round.add(ARRIVED, 1).map_err(lost)?; // after all that rank 0 reads when all have arrived
        Ok(Some(round))
    }

    /// Rank 0's arrival, if it expects as many ranks; if it does not, both say so.
    fn fits(&self, round: &Store) -> Result<Arrival> {
        let lost = |error: TorchError| self.lost(&error);
        let own = self.placement.world_size;
        let first = round.get(FIRST, VERDICT_GRACE).map_err(lost)?;
        let first = Arrival::from_bytes(&first).map_err(|what| self.strange("rank 0", &what))?;
        if first.world_size == own {
            return Ok(first);
        }
        let Arrival { world_size: expected, host, pid, .. } = first;
        let rank = self.placement.rank;
        let reason = if rank < expected {
            let (pid, host) = (std::process::id(), host_name());
            let reason = format!(
                "rank 0 expects {expected} ranks, rank {rank} (process {pid} on {host}) expects {own}"
            );
            round.set(MISFIT, reason.as_bytes()).map_err(lost)?;
            reason
        } else {
            // rank 0 does not wait for it
            format!("this rank expects {own} ranks, rank 0 (process {pid} on {host}) expects {expected}")
        };
        Err(refuse(&self.placement, reason, SAME_SIZE))
    }

    /// Waits for all ranks, and compares what they bring along.
    fn count(&self, round: &Store) -> Result<Verdict> {
        let lost = |error: TorchError| self.lost(&error);
        let world_size = self.placement.world_size;
        let mut pause = Pause::until(self.timeout);
        loop {
            if round.has(MISFIT).map_err(lost)? {
                let reason = round.get(MISFIT, VERDICT_GRACE).map_err(lost)?;
                return Ok(Verdict::problem(String::from_utf8_lossy(&reason).into_owned(), SAME_SIZE));
            }
            let arrived = round.add(ARRIVED, 0).map_err(lost)?;
            if arrived + 1 >= world_size as i64 && self.missing(round)?.1 == 0 {
                return self.compare(round);
            }
            if round.has(ABANDONED).map_err(lost)? {
                let reason = "a rank has ended while the others were still to come".to_owned();
                return Ok(Verdict::problem(reason, "look at its output"));
            }
            let mut is_long = false;
            let next = pause.next(LONGEST_PAUSE, || is_long = true);
            if is_long || next.is_none() {
                let (first, total) = self.missing(round)?;
                let missing = name_ranks(&first, total);
                if next.is_none() && total == 0 {
                    return self.compare(round); // the last one has just arrived
                }
                if next.is_none() {
                    let limit = self.timeout.as_secs_f32();
                    let reason = format!("{missing} of {world_size} did not come within {limit} s");
                    let remedy = "look at their output, or raise timeout_secs in trainer.strategy";
                    return Ok(Verdict::problem(reason, remedy));
                }
                self.log_waiting_for(&missing);
            }
            std::thread::sleep(next.unwrap_or_default());
        }
    }

    /// The first ranks that have not arrived, and how many there are: a request for each [`BITS`] ranks.
    fn missing(&self, round: &Store) -> Result<(Vec<usize>, usize)> {
        let (present, world_size) =
            (read_bits(round, "present", self.placement.world_size), self.placement.world_size);
        let present = present.map_err(|error| self.lost(&error))?;
        let missing = (1..world_size).filter(|rank| !present[*rank]);
        Ok((missing.clone().take(NAMED_RANKS).collect(), missing.count()))
    }

    /// After all ranks have arrived: compares what must be the same on all.
    fn compare(&self, round: &Store) -> Result<Verdict> {
        let lost = |error: TorchError| self.lost(&error);
        let mut others = Vec::new();
        for number in 1..=round.add(DIFFERING, 0).map_err(lost)?.min(COMPARED) {
            let rank = round.get(&format!("{DIFFERING}/{number}"), VERDICT_GRACE).map_err(lost)?;
            let Some(rank) = std::str::from_utf8(&rank).ok().and_then(|rank| rank.parse().ok()) else {
                let what = unreadable(&rank, &"not a rank");
                return Ok(Verdict::problem(format!("a rank has sent {what}"), SAME_VERSION));
            };
            match Arrival::from_bytes(&round.get(&facts_of(rank), VERDICT_GRACE).map_err(lost)?) {
                Ok(arrival) => others.push((rank, arrival.facts)),
                Err(what) => {
                    return Ok(Verdict::problem(format!("rank {rank} has sent {what}"), SAME_VERSION));
                }
            }
        }
        others.sort_by_key(|(rank, _)| *rank);
        Ok(match differences(&self.terms.facts, &others, &self.terms.allowed) {
            None => Verdict::default(),
            Some(what) => Verdict::problem(what, SAME_RUN),
        })
    }

    fn log_waiting_for(&self, whom: &str) {
        let RankPlacement { rank, world_size, master_addr, master_port, .. } = &self.placement;
        tracing::info!("rank {rank} of {world_size} waits for {whom} at {master_addr}:{master_port}");
    }

    fn say_if_restarted(&self, round: &Store) -> Result<()> {
        if self.placement.attempt == 0 {
            return Ok(());
        }
        round.set(RESTARTED, b"1").map_err(|error| self.lost(&error))
    }

    /// Number of the newest round, from 1; 0 if there is none.
    fn newest(&self) -> Result<i64> {
        let lost = |error: TorchError| self.lost(&error);
        if !self.store.has(NEWEST).map_err(lost)? {
            return Ok(0);
        }
        let number = self.store.get(NEWEST, VERDICT_GRACE).map_err(lost)?;
        round_number(&number).map_err(|what| self.strange("rank 0", &what))
    }

    fn round(&self, number: i64) -> Result<Store> {
        Ok(self.store.with_prefix(&format!("round{number}"))?)
    }

    fn arrival(&self, facts: Facts) -> Vec<u8> {
        let world_size = self.placement.world_size;
        let digest = self.terms.facts.digest();
        let arrival = Arrival { world_size, host: host_name(), pid: std::process::id(), digest, facts };
        serde_json::to_vec(&arrival).unwrap_or_default()
    }

    fn taken(&self) -> crate::Error {
        let reason = format!("another process is rank {} already", self.placement.rank);
        refuse(&self.placement, reason, OWN_RANK)
    }

    fn strange(&self, whose: &str, what: &str) -> crate::Error {
        refuse(&self.placement, format!("{whose} has sent {what}"), SAME_VERSION)
    }

    fn lost(&self, error: &TorchError) -> crate::Error {
        if error.message.contains(NOT_SEALED) {
            let reason = format!(
                "another program writes to the store: {}",
                error.message.lines().next().unwrap_or_default()
            );
            return refuse(&self.placement, reason, ALONE);
        }
        let reason = format!("the store is gone: {}", error.message);
        refuse(&self.placement, reason, "look at the output of rank 0")
    }
}

/// Where a rank leaves its facts.
fn facts_of(rank: usize) -> String {
    format!("facts/{rank}")
}

/// The counter in which a rank has a bit, and the bit.
pub(super) fn bit_of(key: &str, rank: usize) -> (String, i64) {
    (format!("{key}/{}", rank / BITS), 1 << (rank % BITS))
}

/// Which of so many ranks have set their bit.
pub(super) fn read_bits(store: &Store, key: &str, size: usize) -> Result<Vec<bool>, TorchError> {
    let mut bits = Vec::with_capacity(size);
    while bits.len() < size {
        let counter = store.add(&bit_of(key, bits.len()).0, 0)?;
        bits.extend((0..BITS.min(size - bits.len())).map(|bit| counter >> bit & 1 == 1));
    }
    Ok(bits)
}

/// Looks again, at first often.
struct Pause {
    next: Duration,
    deadline: Instant,
    notice: Option<Instant>,
}

impl Pause {
    fn until(timeout: Duration) -> Self {
        let now = Instant::now();
        Self { next: Duration::from_millis(2), deadline: now + timeout, notice: Some(now + NOTICE) }
    }

    /// For waits on the server.
    fn waiting(timeout: Duration) -> Self {
        Self { next: FIRST_WAIT, ..Self::until(timeout) }
    }

    /// How long to wait now; none when the time is over. Calls `log` once, when it begins to be long.
    fn next(&mut self, longest: Duration, log: impl FnOnce()) -> Option<Duration> {
        let now = Instant::now();
        if now >= self.deadline {
            return None;
        }
        if self.notice.is_some_and(|notice| now >= notice) {
            self.notice = None;
            log();
        }
        let next = self.next.min(self.deadline - now);
        self.next = (self.next * 3 / 2).min(longest);
        Some(next)
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    /// `make stress` sets it to a million.
    fn tries() -> u64 {
        std::env::var("VOLTAIC_STRESS_TRIES").ok().and_then(|text| text.parse().ok()).unwrap_or(20_000)
    }

    /// Changes a few bytes of what a rank may send: cuts, doubles, replaces, inserts.
    fn mutate(bytes: &mut Vec<u8>, rng: &mut StdRng) {
        const TOKENS: [&[u8]; 10] = [
            b"null",
            b"-1",
            b"1e999",
            b"\"",
            b"[[",
            b"{}",
            b"\xff\xfe",
            b"18446744073709551616",
            b"\\u0000",
            b"}",
        ];
        for _ in 0..rng.random_range(1..5) {
            let at = rng.random_range(0..=bytes.len());
            match rng.random_range(0..5) {
                0 => bytes.truncate(at),
                1 if at < bytes.len() => bytes[at] = rng.random(),
                2 => bytes.extend_from_within(at.min(bytes.len())..),
                3 if at < bytes.len() => drop(bytes.remove(at)),
                _ => drop(bytes.splice(at..at, TOKENS[rng.random_range(0..TOKENS.len())].iter().copied())),
            }
            bytes.truncate(1 << 16);
        }
    }

    #[test]
    fn whatever_a_rank_sends_is_read_or_refused_in_a_short_message() {
        let mut facts = Facts::default();
        facts.add("trainer.precision", "32-true");
        facts.add("module.name", "\u{1F600}\"\\");
        let digest = facts.digest();
        let arrival = Arrival { world_size: 2, host: "node".to_owned(), pid: 7, digest, facts };
        let verdict = Verdict::problem("a reason".to_owned(), "a remedy");
        let seeds = [
            serde_json::to_vec(&arrival).unwrap(),
            serde_json::to_vec(&verdict).unwrap(),
            serde_json::to_vec(&Verdict::default()).unwrap(),
            b"12".to_vec(),
            "[".repeat(100_000).into_bytes(),
        ];
        assert_eq!(Arrival::from_bytes(&seeds[0]), Ok(arrival.clone()));
        assert_eq!(Verdict::from_bytes(&seeds[1]), Ok(verdict));
        assert_eq!(round_number(&seeds[3]), Ok(12));
        assert!(round_number(b"0").is_err() && round_number(b"-3").is_err() && round_number(b"").is_err());
        let mut rng = StdRng::seed_from_u64(7);
        let (started, mut accepted) = (Instant::now(), 0_u64);
        for _ in 0..tries() {
            let mut bytes = seeds[rng.random_range(0..seeds.len())].clone();
            mutate(&mut bytes, &mut rng);
            let read = [
                Arrival::from_bytes(&bytes).map(|read| {
                    // what was read is compared without a panic, and named in a short message
                    let told = differences(&arrival.facts, &[(1, read.facts)], &[]);
                    assert!(told.is_none_or(|told| told.len() < 1 << 14));
                }),
                Verdict::from_bytes(&bytes).map(drop),
                round_number(&bytes).map(|number| assert!(number > 0)),
            ];
            accepted += u64::from(read.iter().any(Result::is_ok));
            for refused in read.into_iter().filter_map(Result::err) {
                assert!(refused.len() < 2000 && refused.is_ascii(), "{refused}");
            }
        }
        println!("roll call: {} inputs in {:.1?}, {accepted} accepted", tries(), started.elapsed());
    }
}
