//! Groups of some of a group's ranks.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::group::{ProcessGroup, Seat};
use super::shared::Shared;
use crate::distributed::connect::Place;
use crate::error::{ConfigError, Result};

impl ProcessGroup {
    /// A group of some of this group's ranks, which `ranks` names as they count in this group; `None` on the others. Its
    /// members keep their order, whatever the order of `ranks`, as with `torch.distributed.new_group`.
    ///
    /// The new group has this one's back end and time-out. Operations of the two are independent of each other, and a
    /// failure of one is none of the other.
    ///
    /// # Collective
    /// All ranks of this group, also those that are not named, with the same `ranks`, in the same order as its other
    /// operations. Returns when the members are connected.
    ///
    /// # Errors
    /// [`ConfigError`] on all ranks if a rank is not in this group or is named twice, if none is named, or if the ranks
    /// do not agree on them; [`DistributedError`](crate::error::DistributedError) if a rank is gone or does not come
    /// within the time-out. This group stays usable in the first case.
    pub fn new_group(&self, ranks: &[usize]) -> Result<Option<Self>> {
        self.split_as("new_group", &[ranks.to_vec()])
    }

    /// Divides this group: each rank gets the group of `groups` that names it, `None` if no group does. As
    /// `torch.distributed.split_group`; several groups are connected at once.
    ///
    /// # Collective
    /// As [`ProcessGroup::new_group`], with the same `groups` on all ranks.
    ///
    /// # Errors
    /// As [`ProcessGroup::new_group`]; also if a rank is in two groups.
    pub fn split(&self, groups: &[Vec<usize>]) -> Result<Option<Self>> {
        self.split_as("split", groups)
    }

    fn split_as(&self, op: &str, groups: &[Vec<usize>]) -> Result<Option<Self>> {
        let sorted = |ranks: &Vec<usize>| {
            let mut ranks = ranks.clone();
            ranks.sort_unstable();
            ranks
        };
        let groups: Vec<Vec<usize>> = groups.iter().map(sorted).collect();
        // first, so that ranks with other arguments are an error and not a time-out
        let asked = self.all_gather_object(&groups)?;
        if let Some(other) = asked.iter().position(|groups| *groups != asked[0]) {
            let what = format!("rank 0 names {:?}, rank {other} {:?}", asked[0], asked[other]);
            return Err(ConfigError::new(op, what, "call it with the same ranks on all ranks").into());
        }
        self.check_groups(op, &groups)?;
        let number = self.next_split();
        let own = groups.iter().enumerate().find_map(|(index, ranks)| {
            let rank = ranks.iter().position(|&rank| rank == self.rank())?;
            Some((index, Place { rank, size: ranks.len() }, ranks))
        });
        let Some((index, place, ranks)) = own else { return Ok(None) };
        let store = Arc::new(self.shared.store.with_prefix(&format!("split{number}/{index}"))?);
        let members = ranks.iter().map(|&rank| self.shared.members[rank]).collect();
        let Shared { connector, watchdog, absent, .. } = &*self.shared;
        let connected = connector.connect(&store, place)?;
        let seat = Seat { place, members, is_of_thread: false };
        let shared = (watchdog.clone(), absent.clone());
        Ok(Some(Self::of(connected, connector.clone(), store, shared, seat)))
    }

    fn next_split(&self) -> u64 {
        let mut state = self.shared.lock();
        state.splits += 1;
        state.splits
    }

    /// The same ranks once more, for another thread: its operations have no order with those of this group. It exchanges tensors of
    /// the host, by Gloo (`torch.distributed.new_group(backend="gloo")`).
    ///
    /// # Collective
    /// All ranks of this group, in the same order as its other operations. Returns when they are connected.
    ///
    /// # Errors
    /// [`DistributedError`](crate::error::DistributedError) if a rank is gone or does not come within the time-out.
    pub(crate) fn for_thread(&self) -> Result<Self> {
        let store = Arc::new(self.shared.store.with_prefix(&format!("thread{}", self.next_split()))?);
        let Shared { connector, watchdog, rank, members, .. } = &*self.shared;
        let place = Place { rank: *rank, size: members.len() };
        let connected = connector.connect_hosts(&store, place)?;
        let seat = Seat { place, members: members.clone(), is_of_thread: true };
        Ok(Self::of(connected, connector.clone(), store, (watchdog.clone(), Arc::default()), seat))
    }

    /// This group by another handle.
    pub(crate) fn shared(&self) -> Self {
        Self { shared: self.shared.clone() }
    }

    /// Whether this is the other group, and not one of the same ranks.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    fn check_groups(&self, op: &str, groups: &[Vec<usize>]) -> Result<()> {
        let mut seen = BTreeSet::new();
        for &rank in groups.iter().flatten() {
            self.check_peer(op, rank)?;
            if !seen.insert(rank) {
                let what = format!("rank {rank} is named twice in {groups:?}");
                return Err(ConfigError::new(op, what, "name each rank once").into());
            }
        }
        if groups.is_empty() || groups.iter().any(Vec::is_empty) {
            let what = format!("a group without ranks in {groups:?}");
            return Err(ConfigError::new(op, what, "name at least one rank").into());
        }
        Ok(())
    }
}
