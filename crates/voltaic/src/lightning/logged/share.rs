//! Logged values of several ranks: what becomes one number, and what is rank 0's.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::scope::Key;
use super::value::{LogValue, Number, ReduceFx, larger, smaller};
use crate::distributed::{ProcessGroup, ReduceOp, collective_scope};
use crate::error::Result;

/// A value of one rank, reduced over its part of an epoch.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct RankValue {
    pub key: Key,
    pub epoch_name: String,
    pub sync_dist: bool,
    pub reduce_fx: ReduceFx,
    pub reduced: Number,
    pub weight: f64,
}

impl RankValue {
    /// The value of the epoch. torch divides float32 by float32.
    fn value(&self) -> f64 {
        match self.reduce_fx {
            ReduceFx::Mean => f64::from(self.reduced.0 as f32 / self.weight as f32),
            _ => self.reduced.0,
        }
    }
}

/// Values of an epoch by hook and name, with their epoch name, the same on all ranks: those logged with `sync_dist` are reduced
/// over all ranks, means weighted by batch size; of others that of rank 0 counts, or of the first rank that has one.
pub(super) fn share(
    group: Option<&ProcessGroup>,
    own: Vec<RankValue>,
) -> Result<BTreeMap<Key, (String, f64)>> {
    let all = match group {
        Some(group) => {
            if group.rank() == 0 && group.world_size() > 1 {
                own.iter().filter(|value| !value.sync_dist).for_each(|value| warn_of_a_part(&value.key.1));
            }
            let _named = collective_scope("logged values");
            group.all_gather_object(&own)?
        }
        None => vec![own],
    };
    let mut merged: BTreeMap<Key, RankValue> = BTreeMap::new();
    for value in all.into_iter().flatten() {
        match merged.get_mut(&value.key) {
            None => {
                merged.insert(value.key.clone(), value);
            }
            Some(known) if known.sync_dist => {
                let (a, b) = (known.reduced.0, value.reduced.0);
                known.reduced = Number(match known.reduce_fx {
                    ReduceFx::Mean | ReduceFx::Sum => a + b,
                    ReduceFx::Min => smaller(a, b),
                    ReduceFx::Max => larger(a, b),
                });
                known.weight += value.weight;
            }
            Some(_) => {}
        }
    }
    Ok(merged.into_iter().map(|(key, value)| (key, (value.epoch_name.clone(), value.value()))).collect())
}

/// Says once that a value of an epoch is rank 0's.
fn warn_of_a_part(name: &str) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if SAID.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned()) {
        tracing::warn!(
            "{name} is of rank 0's part of the data; log it with sync_dist(true) for the value over all ranks"
        );
    }
}

/// The value of one step over all ranks. # Collective
pub(super) fn sync_step(group: &ProcessGroup, value: &LogValue, fx: ReduceFx) -> Result<LogValue> {
    let op = match fx {
        ReduceFx::Mean => ReduceOp::Avg,
        ReduceFx::Sum => ReduceOp::Sum,
        ReduceFx::Min => ReduceOp::Min,
        ReduceFx::Max => ReduceOp::Max,
    };
    let tensor = match value {
        LogValue::Host(number) => Tensor::from(*number as f32),
        LogValue::Metric(_) => return value.snapshot().map_err(Into::into), // shown as this rank has it
        LogValue::Tensor(tensor) => {
            tensor.f_detach()?.f_to_dtype(Kind::Float, false, true)?.f_reshape([] as [i64; 0])?
        }
    };
    let _named = collective_scope("sync_dist");
    group.all_reduce(&tensor, op)?;
    Ok(LogValue::from(tensor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_alone_keeps_its_values() {
        let value = |name: &str, reduce_fx| RankValue {
            key: ("training_step".to_owned(), name.to_owned()),
            epoch_name: format!("{name}_epoch"),
            sync_dist: true,
            reduce_fx,
            reduced: Number(6.0),
            weight: 4.0,
        };
        let shared = share(None, vec![value("mean", ReduceFx::Mean), value("sum", ReduceFx::Sum)]).unwrap();
        let expected = [("mean_epoch".to_owned(), 1.5), ("sum_epoch".to_owned(), 6.0)];
        assert!(shared.into_values().eq(expected));
    }
}
