//! What fails on one rank ends all: none goes on to a collective in which the others are missing.

use std::path::Path;

use crate::distributed::World;
use crate::error::{CheckpointError, Error, Problem, Result};

/// What this rank has read or written, if all ranks could do theirs; else the first error of a rank, on all.
///
/// # Collective
/// All ranks must call it.
///
/// # Errors
/// [`CheckpointError::OnRanks`] if a rank has failed. An error of the connections stays as it is, and nobody is asked.
pub(crate) fn agreed<T>(world: &World, action: &'static str, path: &Path, done: Result<T>) -> Result<T> {
    let Some(group) = world.group().filter(|group| group.world_size() > 1) else { return done };
    let (own, done) = match done {
        Ok(done) => (None, Some(done)),
        Err(error @ Error::Distributed(_)) => return Err(error), // nobody is there, or known to be there
        Err(error) => (Some(problem_of(error, world.rank)), None),
    };
    let failed = match (group.all_gather_object(&own), own) {
        (Err(_), Some(own)) => Some(own), // nobody hears it
        (all, _) => all?.into_iter().flatten().next(),
    };
    match (failed, done) {
        (None, Some(done)) => Ok(done),
        (failed, _) => {
            let problem = failed.unwrap_or_else(|| Problem::new("", ""));
            Err(CheckpointError::OnRanks { action, path: path.to_path_buf(), problem }.into())
        }
    }
}

/// What went wrong, and on which rank.
fn problem_of(error: Error, rank: usize) -> Problem {
    if let Error::Checkpoint(CheckpointError::OnRanks { problem, .. }) = error {
        return problem; // of another rank
    }
    let Problem { what, remedy } = error.into_problem("look at the file system of this rank");
    Problem::new(format!("rank {rank}: {what}"), remedy)
}
