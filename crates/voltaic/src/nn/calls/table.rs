//! The modules of a tree by where they lie, and the hooks of each.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::nn::calls::entry::{Entry, Hook};
use crate::nn::module::{Identity, Member, Module, identity};
use crate::nn::tree::ModuleExt;

/// Hooks of one module.
pub(super) type Entries = Arc<[Arc<Entry>]>;

/// A module of the tree.
pub(super) struct Node {
    pub(super) fqn: Arc<str>,
    pub(super) type_name: &'static str,
    identity: Identity,
    entries: Entries,
    /// It was called.
    pub(super) was_called: bool,
}

impl Node {
    pub(super) fn entries(&self) -> Entries {
        self.entries.clone()
    }
}

/// The modules of a tree. It is valid as long as the tree is borrowed, and is checked again after that.
#[derive(Default)]
pub(super) struct Table {
    nodes: Vec<Node>,
    /// Modules without fields may lie at one place.
    places: HashMap<Identity, Vec<usize>>,
    /// Of the registry when the entries were sorted.
    version: Option<u64>,
}

impl Table {
    /// Makes it the table of `root`, which is cheap if nothing in that tree has moved.
    pub(super) fn refresh(&mut self, root: &dyn Module) {
        let mut known = self.nodes.iter();
        let is_same = same_places(root, &mut known) && known.next().is_none();
        if is_same && !self.nodes.is_empty() {
            return;
        }
        let called: Vec<_> = self
            .nodes
            .drain(..)
            .filter(|node| node.was_called)
            .map(|node| (node.fqn, node.type_name))
            .collect();
        self.places.clear();
        self.version = None;
        for (fqn, module) in root.named_modules() {
            let (identity, type_name) = (identity(module), module.type_name());
            self.places.entry(identity).or_default().push(self.nodes.len());
            let was_called = called.iter().any(|(known, name)| **known == *fqn && *name == type_name);
            self.nodes.push(Node { fqn: fqn.into(), type_name, identity, entries: Arc::new([]), was_called });
        }
    }

    /// Whether it is the table of the tree of `root`.
    pub(super) fn is_of(&self, root: &dyn Module) -> bool {
        self.nodes.first().is_some_and(|node| node.identity == identity(root))
    }

    /// Sorts the hooks of a registry to the modules. Returns those that they had.
    pub(super) fn sort(&mut self, entries: &[Arc<Entry>], version: u64) -> Vec<Entries> {
        self.version = Some(version);
        let sort = |node: &mut Node| {
            let fits = |entry: &&Arc<Entry>| entry.which.fits(&node.fqn, node.identity.1);
            std::mem::replace(&mut node.entries, entries.iter().filter(fits).cloned().collect())
        };
        self.nodes.iter_mut().map(sort).collect()
    }

    pub(super) fn version(&self) -> Option<u64> {
        self.version
    }

    pub(super) fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    pub(super) fn node(&self, index: usize) -> &Node {
        &self.nodes[index]
    }

    /// Notes that a module was called, also for its hooks. Returns whether it has any.
    pub(super) fn note_call(&mut self, index: usize) -> bool {
        let node = &mut self.nodes[index];
        node.was_called = true;
        node.entries.iter().for_each(|entry| entry.note_call());
        !node.entries.is_empty()
    }

    /// The module of this identity. Of several the one at `place` within `caller`, the module whose call it is within; else
    /// the first one below that; else the first.
    pub(super) fn find(
        &self,
        identity: Identity,
        caller: Option<usize>,
        place: Option<usize>,
    ) -> Option<usize> {
        let candidates = self.places.get(&identity)?;
        let (Some(caller), [_, _, ..]) = (caller, candidates.as_slice()) else {
            return candidates.first().copied();
        };
        let caller = &*self.nodes[caller].fqn;
        let below = |index: &&usize| {
            let fqn = &*self.nodes[**index].fqn;
            caller.is_empty() || fqn.strip_prefix(caller).is_some_and(|rest| rest.starts_with('.'))
        };
        let at_place = place.and_then(|place| {
            let fqn = if caller.is_empty() { place.to_string() } else { format!("{caller}.{place}") };
            candidates.iter().find(|index| *self.nodes[**index].fqn == *fqn)
        });
        at_place.or_else(|| candidates.iter().find(below)).or(candidates.first()).copied()
    }

    /// Hooks, other than watchers, none of whose modules was called, with those modules.
    pub(super) fn uncalled(&self) -> Vec<(&Arc<Entry>, Vec<&Node>)> {
        let mut found: Vec<(&Arc<Entry>, Vec<&Node>)> = Vec::new();
        for node in &self.nodes {
            for entry in node.entries.iter() {
                let is_watcher = matches!(entry.hook, Hook::Watcher(_));
                if is_watcher || entry.was_called.load(Ordering::Relaxed) {
                    continue;
                }
                match found.iter_mut().find(|(known, _)| known.id == entry.id) {
                    Some((_, nodes)) => nodes.push(node),
                    None => found.push((entry, vec![node])),
                }
            }
        }
        found
    }

    /// Whether a module below this one was called.
    pub(super) fn was_called_below(&self, node: &Node) -> bool {
        let below = |other: &&Node| {
            let rest = other.fqn.strip_prefix(&*node.fqn);
            rest.is_some_and(|rest| !rest.is_empty() && (node.fqn.is_empty() || rest.starts_with('.')))
        };
        self.nodes.iter().filter(below).any(|other| other.was_called)
    }
}

/// Whether the modules of the tree, in the order of `named_modules`, lie where the nodes say.
fn same_places(module: &dyn Module, known: &mut dyn Iterator<Item = &Node>) -> bool {
    if known.next().is_none_or(|node| node.identity != identity(module)) {
        return false;
    }
    let mut is_same = true;
    module.members(&mut |_, member| {
        if let Member::Module(child) = member {
            is_same = is_same && same_places(child, known);
        }
    });
    is_same
}
