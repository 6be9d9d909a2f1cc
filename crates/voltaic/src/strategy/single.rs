//! Training without other ranks.

use tch::Tensor;

use super::strategy::Strategy;
use super::votes::Votes;
use crate::distributed::World;
use crate::error::Result;

/// One device, one process.
#[derive(Debug, Default)]
pub struct SingleDevice {
    world: World,
    votes: Votes,
}

impl SingleDevice {
    /// For a process that its launcher starts again if it fails.
    pub(crate) fn of(world: World) -> Self {
        Self { world, votes: Votes::default() }
    }
}

impl Strategy for SingleDevice {
    fn name(&self) -> &'static str {
        "single_device"
    }

    fn world(&self) -> &World {
        &self.world
    }

    fn begin_backward(&mut self, _loss: &Tensor, _syncs: bool, votes: Votes) -> Result<()> {
        self.votes = votes;
        Ok(())
    }

    fn end_backward(&mut self, done: Result<()>) -> Result<Votes> {
        done.map(|()| self.votes)
    }
}
