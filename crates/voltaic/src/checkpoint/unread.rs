//! The part of a checkpoint that ranks read once it is decided which elements each of them has.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tch::Tensor;

use super::checkpoint::Checkpoint;
use super::chunk::ShardSpec;
use super::format::{PREFIX, named_tensors, optimizer_name, unreadable};
use super::masters::parameter_of;
use super::one_file::OneFile;
use super::shards::folder::is_folder;
use super::shards::read::Shards;
use crate::distributed::ProcessGroup;
use crate::error::{Error, Result};

/// Weights, states of optimizers, and gradients that were sharded, of a checkpoint that has been opened.
pub(crate) enum Unread {
    /// A folder, of which each rank reads its own elements.
    Folder(Box<Shards>),
    /// A file that rank 0 reads for all: all ranks ask for the same tensors, in the same order.
    File(Box<OneFile>),
    /// One that this rank has read as a whole.
    Memory(Box<Loaded>),
}

/// Tensors of a checkpoint by their names in a file, shared with it.
pub(crate) struct Loaded {
    path: PathBuf,
    tensors: BTreeMap<String, Tensor>,
    /// Gradients of an open window, the same on all ranks.
    grads: Vec<String>,
}

impl Loaded {
    /// Takes the gradients out of a checkpoint if it has those of one rank, and shares the rest.
    pub(crate) fn of(checkpoint: &mut Checkpoint, path: &Path) -> Self {
        let named = named_tensors(checkpoint).into_iter();
        let tensors = named.map(|(name, tensor)| (name, tensor.shallow_clone())).collect();
        let own = checkpoint.training.as_mut().filter(|training| training.ranks.is_empty());
        let grads = own.map(|training| std::mem::take(&mut training.grads)).unwrap_or_default();
        let grads = grads.into_iter().map(|(fqn, _)| fqn).collect();
        Self { path: path.to_path_buf(), tensors, grads }
    }

    fn named(&self, name: &str) -> Result<&Tensor> {
        let tensor = self.tensors.get(name);
        tensor.ok_or_else(|| unreadable(&self.path, format!("it has no tensor {name}")))
    }

    fn shard(&self, name: &str, shard: &ShardSpec) -> Result<Tensor> {
        let whole = self.named(name)?;
        if whole.size() != shard.shape {
            let what = format!("{name} has shape {:?}, this run has {:?}", whole.size(), shard.shape);
            return Err(unreadable(&self.path, what));
        }
        let own = shard.of(whole)?;
        // the rest of the tensor need not stay in memory
        if own.numel() == whole.numel() {
            return Ok(own);
        }
        let mut copy = own.f_empty_like()?;
        copy.f_copy_(&own)?;
        Ok(copy)
    }
}

impl Unread {
    /// Opens a checkpoint that several ranks read: what all of them need, and the rest.
    ///
    /// # Collective
    /// All ranks of the group.
    ///
    /// # Errors
    /// As [`Shards::open`], perhaps on this rank alone, and [`OneFile::open`].
    pub(crate) fn of_ranks(path: &Path, group: &Arc<ProcessGroup>) -> Result<(Checkpoint, Self)> {
        if group.broadcast_object(&is_folder(path), 0)? {
            let shards = Shards::open(path)?;
            return Ok((shards.rest(group.rank(), group.world_size())?, Self::Folder(Box::new(shards))));
        }
        let file = OneFile::open(path, group)?;
        Ok((file.rest()?, Self::File(Box::new(file))))
    }

    /// A checkpoint that this rank has read as a whole.
    pub(crate) fn of_checkpoint(mut checkpoint: Checkpoint, path: &Path) -> (Checkpoint, Self) {
        let loaded = Loaded::of(&mut checkpoint, path);
        (checkpoint, Self::Memory(Box::new(loaded)))
    }

    /// Names and shapes of the weights.
    pub(crate) fn weights(&self) -> Vec<(&str, Vec<i64>)> {
        let shape_of = |shape: &[usize]| shape.iter().map(|&size| size as i64).collect();
        match self {
            Self::Folder(shards) => shards.weights().map(|(name, shape)| (name, shape_of(shape))).collect(),
            Self::File(file) => file.weights().map(|(name, shape)| (name, shape_of(shape))).collect(),
            Self::Memory(loaded) => {
                let weights = loaded.tensors.iter().filter(|(name, _)| !name.starts_with(PREFIX));
                weights.map(|(name, tensor)| (name.as_str(), tensor.size())).collect()
            }
        }
    }

    /// Whether two names are those of one tensor.
    pub(crate) fn are_one(&self, first: &str, other: &str) -> bool {
        match self {
            Self::Folder(shards) => shards.are_one(first, other),
            Self::File(_) | Self::Memory(_) => false,
        }
    }

    /// A whole tensor.
    ///
    /// # Errors
    /// As [`Shards::whole`] and [`OneFile::whole`].
    pub(crate) fn whole(&self, name: &str) -> Result<Tensor> {
        match self {
            Self::Folder(shards) => shards.whole(name),
            Self::File(file) => file.whole(name),
            Self::Memory(loaded) => loaded.named(name).map(Tensor::shallow_clone),
        }
    }

    /// The elements of a shard of a tensor that has its shape.
    ///
    /// # Errors
    /// As [`Shards::shard`] and [`OneFile::shard`].
    pub(crate) fn shard(&self, name: &str, shard: &ShardSpec) -> Result<Tensor> {
        match self {
            Self::Folder(shards) => shards.shard(name, shard),
            Self::File(file) => file.shard(name, shard),
            Self::Memory(loaded) => loaded.shard(name, shard),
        }
    }

    /// Names of the states of an optimizer, as in a file, with what follows its number.
    pub(crate) fn optimizer_states(&self, index: usize) -> Vec<(&str, &str)> {
        match self {
            Self::Folder(shards) => shards.optimizer_states(index).collect(),
            Self::File(file) => file.optimizer_states(index).collect(),
            Self::Memory(loaded) => {
                let prefix = optimizer_name(index, "");
                let named = loaded.tensors.keys();
                named.filter_map(|name| Some((name.as_str(), name.strip_prefix(prefix.as_str())?))).collect()
            }
        }
    }

    /// Names of master weights, by the fqn of the parameter; of so many optimizers.
    pub(crate) fn masters(&self, num_optimizers: usize) -> HashMap<&str, &str> {
        let states = (0..num_optimizers).flat_map(|index| self.optimizer_states(index));
        states.filter_map(|(name, state)| Some((parameter_of(state)?, name))).collect()
    }

    /// Whether a tensor is a number, and not one like a parameter.
    pub(crate) fn is_number(&self, name: &str) -> bool {
        match self {
            Self::Folder(shards) => shards.is_number(name),
            Self::File(file) => file.is_number(name),
            Self::Memory(loaded) => loaded.tensors.get(name).is_some_and(|tensor| tensor.dim() == 0),
        }
    }

    /// Parameters whose gradients are the same for all ranks, and have had one on some rank.
    pub(crate) fn shared_grads(&self) -> Vec<&str> {
        match self {
            Self::Folder(shards) => shards.shared_grads().collect(),
            Self::File(_) => Vec::new(),
            Self::Memory(loaded) => loaded.grads.iter().map(String::as_str).collect(),
        }
    }

    /// Whether all ranks must take part in what follows, also one that has failed.
    fn is_shared(&self) -> bool {
        matches!(self, Self::File(_))
    }
}

/// The first failure of a rank that has to continue, since others wait for it in collectives.
pub(crate) struct Failures<'a> {
    unread: &'a Unread,
    first: Option<Error>,
}

impl<'a> Failures<'a> {
    /// In reading this.
    pub(crate) fn of(unread: &'a Unread) -> Self {
        Self { unread, first: None }
    }

    /// Keeps the error of a step for the end, unless what follows is this rank's alone.
    pub(crate) fn note(&mut self, done: Result<()>) -> Result<()> {
        match done {
            Err(error) if self.unread.is_shared() => {
                self.first.get_or_insert(error);
                Ok(())
            }
            done => done,
        }
    }

    /// How it went.
    pub(crate) fn end(self) -> Result<()> {
        self.first.map_or(Ok(()), Err)
    }
}
