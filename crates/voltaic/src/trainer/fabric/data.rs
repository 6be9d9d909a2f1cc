//! The data of a [`Fabric`](super::Fabric): this rank's batches, and where the loop stands in them.

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::data::{Batch, BatchIter, DataLoader, EpochRange};
use crate::device::Device;
use crate::error::Result;

/// Where a loop stands in its data, which its loaders share.
#[derive(Debug, Default)]
pub(super) struct Place {
    /// The seed of loaders that have none of their own: of the first that was set up, or of a checkpoint.
    pub seed: Option<u64>,
    /// Batches of an epoch of the first loader that was set up, which has the training data, and their size.
    pub shape: Option<(usize, Option<usize>)>,
    pub epoch: u64,
    /// Batches of the epoch that this loader has given.
    pub batch_idx: u64,
}

impl Place {
    /// Whether the epoch has no batch left.
    pub fn epoch_ended(&self) -> bool {
        self.batch_idx > 0 && self.shape.is_some_and(|(batches, _)| self.batch_idx >= batches as u64)
    }
}

pub(super) fn locked(place: &Mutex<Place>) -> MutexGuard<'_, Place> {
    place.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A loader whose batches are this rank's, on its device.
pub struct FabricDataLoader<B: Batch> {
    pub(super) loader: DataLoader<B>,
    pub(super) place: Arc<Mutex<Place>>,
    pub(super) is_first: bool,
    pub(super) device: Device,
    pub(super) dtype: Option<tch::Kind>,
}

impl<B: Batch> FabricDataLoader<B> {
    /// The batches of an epoch, which decides their order.
    ///
    /// # Errors
    /// As [`DataLoader::iter`].
    pub fn epoch(&self, epoch: u64) -> Result<FabricBatches<B>> {
        self.iter(EpochRange::epoch(epoch))
    }

    /// Some batches of an epoch, such as those after a checkpoint: `loader.iter(fabric.position())`.
    ///
    /// # Errors
    /// As [`DataLoader::iter`].
    pub fn iter(&self, range: EpochRange) -> Result<FabricBatches<B>> {
        let mut loader = self.loader.clone(); // its seed may be that of a checkpoint now
        if let Some(seed) = locked(&self.place).seed {
            loader.set_seed(seed);
        }
        let place = self.is_first.then(|| (self.place.clone(), range));
        Ok(FabricBatches { batches: loader.iter(range)?, place, device: self.device, dtype: self.dtype })
    }
}

impl<B: Batch> Deref for FabricDataLoader<B> {
    type Target = DataLoader<B>;

    fn deref(&self) -> &DataLoader<B> {
        &self.loader
    }
}

/// The batches of a [`FabricDataLoader`].
pub struct FabricBatches<B: Batch> {
    batches: BatchIter<B>,
    /// Of the training data: what is to be told of each batch, and which is the next.
    place: Option<(Arc<Mutex<Place>>, EpochRange)>,
    device: Device,
    dtype: Option<tch::Kind>,
}

impl<B: Batch> Iterator for FabricBatches<B> {
    type Item = Result<B>;

    fn next(&mut self) -> Option<Result<B>> {
        let moved = |batch: B| {
            let batch = batch.move_to(self.device)?;
            match self.dtype {
                Some(dtype) => batch.to_dtype(dtype),
                None => Ok(batch),
            }
        };
        let batch = self.batches.next()?.and_then(moved);
        if let (Some((place, next)), Ok(_)) = (&mut self.place, &batch) {
            next.first_batch += 1;
            let mut place = locked(place);
            (place.epoch, place.batch_idx) = (next.epoch, next.first_batch as u64);
        }
        Some(batch)
    }
}
