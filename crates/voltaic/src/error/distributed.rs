//! Errors between ranks.

use std::borrow::Cow;
use std::path::PathBuf;

use super::problem::Problem;

/// A failure of communication, or of another rank.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DistributedError {
    /// The ranks could not be brought together.
    #[error("rank {rank} of {world_size} could not join the others at {address}: {problem}")]
    Rendezvous {
        /// Global rank of this process.
        rank: usize,
        /// Ranks in all.
        world_size: usize,
        /// `host:port` of the store.
        address: String,
        /// What is wrong, and how to fix it.
        problem: Problem,
    },
    /// An operation between ranks failed.
    #[error("{0}")]
    Collective(Box<CollectiveFailure>),
    /// The ranks do not train the same model.
    #[error("rank {rank} has {what}; {}", self.remedy())]
    Mismatch {
        /// Global rank of this process.
        rank: usize,
        /// The first difference to rank 0.
        what: String,
    },
    /// The ranks do not run the same: other settings, optimizers or data.
    #[error("rank {rank} cannot continue with the others: {what}; {}", self.remedy())]
    Different {
        /// Global rank of this process.
        rank: usize,
        /// What differs, with the values of both ranks.
        what: String,
    },
    /// Parameters that got no gradient, so that their bucket cannot be averaged.
    #[error(
        "{} of the parameters took no part in the loss on rank {rank}: {}; {}",
        names.len(),
        shown(names),
        self.remedy()
    )]
    UnusedParameters {
        /// Global rank of this process.
        rank: usize,
        /// Their fqn.
        names: Vec<String>,
    },
}

/// What is known of an operation that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CollectiveFailure {
    /// The operation, such as `all_reduce`.
    pub op: &'static str,
    /// Global rank of this process.
    pub rank: usize,
    /// Ranks in all.
    pub world_size: usize,
    /// Global ranks of the members, if the group has some of the ranks only.
    pub group: Option<Vec<usize>>,
    /// Who called it: the names of the [scopes](crate::distributed::collective_scope) around the call.
    pub from: String,
    /// Global ranks that did not take part, as far as is known: the first of them.
    pub missing: Vec<usize>,
    /// How many others did not take part.
    pub more_missing: usize,
    /// Global ranks that were in another operation, and in which: the first of them.
    pub elsewhere: Vec<(usize, String)>,
    /// Where ranks that did not take part are, each as a sentence.
    pub last_seen: Vec<String>,
    /// Where the last operations of this rank are written.
    pub record: Option<PathBuf>,
    /// Which operation of the group it was, from 1.
    pub seq: u64,
    /// Size of this rank's tensor.
    pub bytes: usize,
    /// It took longer than the time-out.
    pub timed_out: bool,
    /// What the back end said.
    pub reason: String,
}

impl CollectiveFailure {
    /// How to fix it.
    pub fn remedy(&self) -> &'static str {
        if !self.elsewhere.is_empty() {
            "call the same operations, with tensors of the same size, in the same order on all ranks"
        } else if self.timed_out {
            "look at what the missing ranks do, or raise timeout_secs in trainer.strategy"
        } else {
            "look at the output of the rank that ended first"
        }
    }
}

impl DistributedError {
    /// How to fix it.
    pub fn remedy(&self) -> Cow<'_, str> {
        match self {
            Self::Rendezvous { problem, .. } => (&*problem.remedy).into(),
            Self::Collective(failure) => failure.remedy().into(),
            Self::Mismatch { .. } => {
                "build the same module, with the same trainable parameters, on all ranks".into()
            }
            Self::Different { .. } => {
                "give all ranks the same module, optimizers, data and seed, or name what may differ \
                in allow_differences of trainer.strategy"
                    .into()
            }
            Self::UnusedParameters { .. } => {
                "use all of them, freeze them with set_requires_grad(false), or set \
                find_unused_parameters=true in trainer.strategy (strategy=ddp_find_unused_parameters_true)"
                    .into()
            }
        }
    }
}

impl std::fmt::Display for CollectiveFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { op, rank, world_size, group, from, missing, more_missing, elsewhere, seq, bytes, .. } =
            self;
        write!(f, "{op} (operation {seq}, {bytes} bytes")?;
        if !from.is_empty() {
            write!(f, ", from {from}")?;
        }
        write!(f, ")")?;
        if let Some(members) = group {
            write!(f, " among {}", name_ranks(members, members.len()))?;
        }
        write!(f, " failed on rank {rank} of {world_size}")?;
        if !missing.is_empty() {
            write!(f, ", {} did not take part", name_ranks(missing, missing.len() + more_missing))?;
        }
        for (rank, call) in elsewhere {
            write!(f, ", rank {rank} was in {call}")?;
        }
        write!(f, ": {}", self.reason)?;
        for seen in &self.last_seen {
            write!(f, "; {seen}")?;
        }
        if let Some(record) = &self.record {
            write!(f, "; the last operations of this rank are in {}", record.display())?;
        }
        write!(f, "; {}", self.remedy())
    }
}

/// Most ranks that a message names.
pub(crate) const NAMED_RANKS: usize = 32;

/// `rank 1`, `ranks 1, 2`, or the first [`NAMED_RANKS`] of them `and 9 more`; `total` counts those that are not in `ranks`, too.
pub(crate) fn name_ranks(ranks: &[usize], total: usize) -> String {
    let s = if total == 1 { "" } else { "s" };
    let list: Vec<String> = ranks.iter().take(NAMED_RANKS).map(usize::to_string).collect();
    let more = match total.saturating_sub(list.len()) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("rank{s} {}{more}", list.join(", "))
}

fn shown(names: &[String]) -> String {
    const MAX: usize = 5;
    let more = names.len().saturating_sub(MAX);
    let shown = names[..names.len().min(MAX)].join(", ");
    if more > 0 { format!("{shown} and {more} more") } else { shown }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_some_of_many_ranks() {
        assert_eq!(name_ranks(&[7], 1), "rank 7");
        assert_eq!(name_ranks(&[1, 2], 2), "ranks 1, 2");
        assert_eq!(name_ranks(&[1, 2], 10_000), "ranks 1, 2 and 9998 more");
        let many: Vec<usize> = (0..65_536).collect();
        let text = name_ranks(&many, many.len());
        assert!(text.len() < 200 && text.ends_with(", 31 and 65504 more"), "{text}");
    }

    #[test]
    fn a_failed_collective_names_everything_known() {
        let failure = CollectiveFailure {
            op: "all_reduce",
            rank: 0,
            world_size: 4,
            group: None,
            from: String::new(),
            missing: vec![1, 3],
            more_missing: 0,
            elsewhere: Vec::new(),
            last_seen: Vec::new(),
            record: None,
            seq: 7,
            bytes: 4096,
            timed_out: true,
            reason: "timed out".to_owned(),
        };
        let text = |failure| DistributedError::Collective(Box::new(failure)).to_string();
        let expected = "all_reduce (operation 7, 4096 bytes) failed on rank 0 of 4, ranks 1, 3 did not take part: timed \
             out; look at what the missing ranks do, or raise timeout_secs in trainer.strategy";
        assert_eq!(text(failure.clone()), expected);
        let elsewhere = vec![(2, "barrier (operation 7, 0 bytes)".to_owned())];
        let failure =
            CollectiveFailure { group: Some(vec![0, 2]), missing: Vec::new(), elsewhere, ..failure };
        let expected = "all_reduce (operation 7, 4096 bytes) among ranks 0, 2 failed on rank 0 of 4, rank 2 was in \
             barrier (operation 7, 0 bytes): timed out; call the same operations, with tensors of the same size, in the \
             same order on all ranks";
        assert_eq!(text(failure), expected);
    }
}
