//! The shard of the weights from which they are unsharded, where that is not the shard that the optimizer updates.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::{Kind, Tensor};

use super::flat::Layout;
use crate::dtype::bytes_of;
use crate::error::Result;
use crate::ffi;
use crate::optim::moved;
use crate::swap::SwapStore;

/// A store of shards of several units.
pub(super) type SharedStore = Arc<Mutex<SwapStore>>;

/// Copies of a unit's shard. A shard in host memory in float32 has one in the weights' dtype: beside it, so that half as many bytes
/// travel to the device, or in the weights themselves, where these stay on the host. An optimizer may write this one in its update.
/// Sharded weights have a copy where [`Layout::weight_shard_storage`] says, if the shard is elsewhere, or in a file.
#[derive(Debug, Default)]
pub(super) struct WeightShard {
    rounded: Option<Tensor>,
    stored: Option<Stored>,
    /// The shard has changed since the copies were made.
    is_stale: bool,
    /// The rounded copy as well: the optimizer has not written it.
    is_rounded_stale: bool,
}

/// What sharded weights are gathered from.
#[derive(Debug)]
enum Stored {
    Memory(Tensor),
    File(ShardFile),
}

/// The file of a shard.
#[derive(Debug, Clone)]
pub(super) struct ShardFile {
    store: SharedStore,
    name: String,
    kind: Kind,
    len: usize,
}

impl ShardFile {
    /// So many elements of this dtype.
    pub fn new(store: SharedStore, name: String, kind: Kind, len: usize) -> Self {
        Self { store, name, kind, len }
    }

    fn store(&self) -> MutexGuard<'_, SwapStore> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts to write values, which are rounded; `also` gets them, too.
    fn write(&self, values: &Tensor, also: Option<&Tensor>, moved: &Moved) -> Result<()> {
        let mut store = self.store();
        let buffer = store.claim(&self.name)?;
        let own = buffer.tensor(self.kind, self.len)?;
        moved.copy(&own, values)?;
        also.map_or(Ok(()), |to| moved.copy(to, &own))?;
        store.start_write(&self.name, buffer)
    }

    fn read(&self, to: &Tensor, moved: &Moved) -> Result<()> {
        let mut store = self.store();
        let buffer = store.take(&self.name)?;
        let copied = buffer.tensor(self.kind, self.len).and_then(|own| moved.copy(to, &own));
        store.give_back(&self.name, buffer);
        copied
    }
}

impl WeightShard {
    /// The copies that a shard needs. Weights that are not sharded have it at `own`.
    pub fn of(layout: &Layout, shard: &Tensor, own: Option<Tensor>) -> Result<Self> {
        let is_half = shard.kind() != layout.kind;
        let is_rounded = layout.is_stored_apart() && is_half;
        let is_sharded = own.is_none();
        let is_host = |own: &Tensor| own.device() == tch::Device::Cpu && shard.device() == own.device();
        let rounded = match own.filter(|own| is_half && is_host(own)) {
            Some(own) => Some(own),
            None => is_rounded.then(|| layout.stored(shard, layout.kind, layout.storage)).transpose()?,
        };
        // a shard in a file is not read for each gather
        let is_elsewhere =
            layout.weight_shard_storage != layout.storage || (layout.swaps_shard && !is_rounded);
        let stored = (is_sharded && is_elsewhere)
            .then(|| layout.stored(shard, layout.kind, layout.weight_shard_storage));
        let stored = stored.transpose()?.map(Stored::Memory);
        Ok(Self { rounded, stored, ..Self::default() })
    }

    /// Puts the shard into a file, and frees the copies in memory.
    pub fn put_into(&mut self, file: ShardFile, shard: &Tensor, moved: &Moved) -> Result<()> {
        file.store().create(&file.name, file.len * file.kind.elt_size_in_bytes())?;
        file.write(shard, None, moved)?;
        *self = Self { stored: Some(Stored::File(file)), ..Self::default() };
        Ok(())
    }

    /// The file of the shard, if it is in one.
    pub fn file(&self) -> Option<&ShardFile> {
        match &self.stored {
            Some(Stored::File(file)) => Some(file),
            _ => None,
        }
    }

    /// Starts to read the shard, if it is in a file. Returns false if all buffers are in use.
    pub fn read_ahead(&self) -> Result<bool> {
        let Some(file) = self.file().filter(|_| !self.is_stale) else { return Ok(true) };
        file.store().start_read(&file.name)
    }

    /// The shard has changed.
    pub fn set_stale(&mut self) {
        (self.is_stale, self.is_rounded_stale) = (true, true);
    }

    /// An optimizer has changed the shard, and has written what it changed to [`WeightShard::rounded`], too.
    pub fn set_written(&mut self) {
        self.is_stale = true;
    }

    /// What an optimizer may write rounded weights to: always the same tensor.
    pub fn rounded(&self) -> Option<&Tensor> {
        self.rounded.as_ref()
    }

    /// Whether the copies are to be made again.
    pub fn is_stale(&self) -> bool {
        self.is_stale
    }

    /// Copies what the weights are gathered from, as the shard is now.
    pub fn copy_to(&mut self, to: &Tensor, shard: &Tensor, moved: &Moved) -> Result<()> {
        self.bring_up_to_date(Some(to), shard, moved)
    }

    /// Copies the shard as it is now, if it has changed; before it is far away.
    pub fn refresh(&mut self, shard: &Tensor, moved: &Moved) -> Result<()> {
        self.bring_up_to_date(None, shard, moved)
    }

    fn bring_up_to_date(&mut self, to: Option<&Tensor>, shard: &Tensor, moved: &Moved) -> Result<()> {
        let (is_stale, is_rounded_stale) =
            (std::mem::take(&mut self.is_stale), std::mem::take(&mut self.is_rounded_stale));
        let mut last = shard;
        let memory = match &self.stored {
            Some(Stored::File(file)) => {
                return match (is_stale, to) {
                    (true, to) => file.write(shard, to, moved),
                    (false, Some(to)) => file.read(to, moved),
                    (false, None) => Ok(()),
                };
            }
            Some(Stored::Memory(shard)) => Some(shard),
            None => None,
        };
        let copies = [(self.rounded.as_ref(), is_rounded_stale), (memory, is_stale)].into_iter();
        for (copy, is_stale) in copies.filter_map(|(copy, is_stale)| Some((copy?, is_stale))) {
            if is_stale {
                moved.copy(copy, last)?;
            }
            last = copy;
        }
        let is_there = |to: &&Tensor| to.data_ptr() == last.data_ptr();
        to.filter(|to| !is_there(to)).map_or(Ok(()), |to| moved.copy(to, last))
    }

    /// Moves the shard in memory to a device, perhaps for a while; in pinned memory if that is asked for.
    pub fn place(&mut self, device: tch::Device, pins: bool) -> Result<()> {
        match &mut self.stored {
            Some(Stored::Memory(shard)) if shard.device() != device => {
                *shard = moved(shard, device, pins)?;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Bytes of the copies on a device.
    pub fn bytes_on(&self, device: tch::Device) -> usize {
        let shard = match &self.stored {
            Some(Stored::Memory(shard)) => Some(shard),
            _ => None,
        };
        let copies = [self.rounded.as_ref(), shard].into_iter().flatten();
        copies.filter(|copy| copy.device() == device).map(bytes_of).sum()
    }
}

/// Bytes that went between the device and host memory.
#[derive(Debug, Default)]
pub(super) struct Moved {
    pub to_device: AtomicUsize,
    pub to_host: AtomicUsize,
    pub steps: AtomicUsize,
}

impl Moved {
    /// Counts from zero again.
    pub fn clear(&self) {
        for count in [&self.to_device, &self.to_host, &self.steps] {
            count.store(0, Ordering::Relaxed);
        }
    }

    /// Copies values into a tensor, which may be on another device and of another dtype. The caller does not wait for a copy from
    /// pinned memory.
    pub fn copy(&self, to: &Tensor, from: &Tensor) -> Result<()> {
        self.note(to.device(), from);
        match to.device() {
            tch::Device::Cpu => Ok(to.shallow_clone().f_copy_(from)?),
            _ => Ok(ffi::copy_async(to, from)?),
        }
    }

    /// A tensor on this device, the same one if it is there. What comes to pinned memory is there after
    /// [`synchronize`](ffi::synchronize).
    pub fn to(&self, device: tch::Device, tensor: &Tensor, pins: bool) -> Result<Tensor> {
        self.note(device, tensor);
        if !pins || device != tch::Device::Cpu || tensor.device() == device {
            return Ok(tensor.f_to_device(device)?);
        }
        let pinned = ffi::empty_pinned(tensor)?;
        ffi::copy_async(&pinned, tensor)?;
        Ok(pinned)
    }

    fn note(&self, to: tch::Device, from: &Tensor) {
        let count = match (from.device(), to) {
            (from, to) if from == to => return,
            (_, tch::Device::Cpu) => &self.to_host,
            _ => &self.to_device,
        };
        count.fetch_add(bytes_of(from), Ordering::Relaxed);
    }
}
