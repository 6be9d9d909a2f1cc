//! Finds out on which ranks an operation has failed.
//!
//! Each rank on which it has failed counts itself in, and sets its bit in counters that [`BITS`] ranks share, one set of counters
//! for each operation that they were in. One of the ranks reads the counters and publishes what follows; the others read that.
//! A rank asks the store for the same however many ranks there are.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::watchdog::{ANSWER, Watchdog};
use crate::distributed::deadline::within;
use crate::distributed::roll_call::{BITS, bit_of, read_bits};
use crate::error::{NAMED_RANKS, TorchError};
use crate::ffi::Store;

/// How long a rank whose operation failed waits to see which ranks it failed on, too.
const INQUEST: Duration = Duration::from_secs(2);
/// How much longer it waits for a store that does not answer.
const GRACE: Duration = Duration::from_secs(1);
/// First and longest time between two reads of the number of ranks.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// The number of missing ranks that are asked for their position.
const ASKED: usize = 8;
/// Different operations that a report lists, and the ranks that it names for each.
const CALLS: i64 = 8;
const NAMED: usize = 4;

/// Keys of the group's store.
const FAILED: &str = "failed";
const CALL: &str = "failed_call";

/// The operation that has failed on a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::distributed) struct Failed {
    pub op: String,
    pub seq: u64,
    pub bytes: usize,
    pub has_peer: bool,
}

/// What is known of a failure. Ranks count within the group.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::distributed) struct RankReport {
    /// The first ranks on which nothing has failed in time.
    pub missing: Vec<usize>,
    /// How many there are.
    pub num_missing: usize,
    /// The operations that failed, and the first ranks that were in each.
    pub calls: Vec<(Failed, Vec<usize>)>,
    /// Where the first missing ranks are, by their global rank.
    pub last_seen: BTreeMap<usize, String>,
}

/// A rank of a group on which an operation has failed.
#[derive(Debug, Clone)]
pub(in crate::distributed) struct Inquest {
    /// Of the group alone.
    pub store: Arc<Store>,
    pub watchdog: Arc<Watchdog>,
    /// This process's place among the members.
    pub rank: usize,
    /// Global ranks.
    pub members: Vec<usize>,
    pub failed: Failed,
}

/// Where the report on a failure is, once the others have had their time.
struct Place {
    key: String,
    /// Whether this rank publishes it.
    is_author: bool,
    alarm: i64,
}

impl Inquest {
    /// What the ranks of the group report; `None` if the store is gone or out of reach.
    pub fn hold(self) -> Option<RankReport> {
        let first = self.clone();
        let place = within(INQUEST + GRACE, move || first.count().ok()).flatten()?;
        let mut report = within(3 * ANSWER + 2 * GRACE, {
            let own = self.clone();
            move || own.report(place).ok()
        })
        .flatten()?;
        // ranks of this node are seen better from here
        report.last_seen.extend(self.watchdog.find_on_node(&self.globals(&report.missing)));
        Some(report)
    }

    fn globals(&self, ranks: &[usize]) -> Vec<usize> {
        ranks.iter().take(ASKED).filter_map(|rank| self.members.get(*rank).copied()).collect()
    }

    /// The counters of this operation.
    fn bits(failed: &Failed) -> String {
        let Failed { op, seq, bytes, has_peer } = failed;
        format!("{CALL}/{op}/{seq}/{bytes}/{has_peer}")
    }

    /// Counts this rank in, and waits for the others while [`INQUEST`] lasts, not for those that have ended.
    fn count(&self) -> Result<Place, TorchError> {
        let size = self.members.len() as i64;
        let deadline = Instant::now() + if self.failed.has_peer { Duration::ZERO } else { INQUEST };
        let alarm = self.watchdog.raise_alarm()?;
        let call = Self::bits(&self.failed);
        if self.store.add(&format!("{call}/count"), 1)? == 1 {
            let number = self.store.add(CALL, 1)?;
            let text = serde_json::to_vec(&self.failed).unwrap_or_default();
            self.store.set(&format!("{CALL}/{number}"), &text)?;
        }
        let is_new = self.store.add(&format!("{FAILED}/{}/again", self.rank), 1)? == 1;
        if self.store.add(&format!("{call}/{}/again", self.rank), 1)? == 1 {
            let (key, bit) = bit_of(&call, self.rank);
            self.store.add(&key, bit)?;
        }
        let mut count = self.store.add(FAILED, i64::from(is_new))?;
        let mut pause = FIRST_PAUSE;
        while count < size && count + self.ended()? < size {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(LONGEST_PAUSE);
            count = self.store.add(FAILED, 0)?;
        }
        let key = format!("report/{count}");
        let is_author = self.store.add(&format!("{key}/claim"), 1)? == 1;
        Ok(Place { key, is_author, alarm })
    }

    /// How many ranks of this node have ended without a report.
    fn ended(&self) -> Result<i64, TorchError> {
        let mut ended = 0;
        for rank in self.members.iter().enumerate().filter(|(_, global)| self.watchdog.has_ended(**global)) {
            ended += i64::from(!self.store.has(&format!("{FAILED}/{}/again", rank.0))?);
        }
        Ok(ended)
    }

    fn report(&self, Place { key, is_author, alarm }: Place) -> Result<RankReport, TorchError> {
        if !is_author && let Some(text) = self.store.wait(&key, 2 * ANSWER + GRACE)? {
            return Ok(serde_json::from_slice(&text).unwrap_or_default());
        }
        // this is the author, or the author has ended
        let report = self.read(alarm)?;
        self.store.set(&key, &serde_json::to_vec(&report).unwrap_or_default())?;
        Ok(report)
    }

    /// Reads the counters: a request for each [`BITS`] ranks and operation.
    fn read(&self, alarm: i64) -> Result<RankReport, TorchError> {
        let size = self.members.len();
        let (mut calls, mut has_failed) = (Vec::new(), vec![false; size.next_multiple_of(BITS)]);
        for number in 1..=self.store.add(CALL, 0)?.min(CALLS) {
            let Some(text) = self.store.wait(&format!("{CALL}/{number}"), GRACE)? else { continue };
            let Ok(failed) = serde_json::from_slice::<Failed>(&text) else { continue };
            let bits = read_bits(&self.store, &Self::bits(&failed), size)?;
            let ranks = (0..size).filter(|rank| bits[*rank]);
            ranks.clone().for_each(|rank| has_failed[rank] = true);
            calls.push((failed, ranks.take(NAMED).collect()));
        }
        let missing = (0..size).filter(|rank| !has_failed[*rank]);
        let num_missing = missing.clone().count();
        let missing: Vec<usize> = missing.take(NAMED_RANKS).collect();
        let last_seen = self.watchdog.find(&self.globals(&missing), alarm);
        Ok(RankReport { missing, num_missing, calls, last_seen })
    }
}
