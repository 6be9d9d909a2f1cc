//! `DataLoader`: a dataset, an order, a batch size, and how many threads load ahead.
//!
//! A loader holds no position. [`DataLoader::iter`] takes the epoch and the range of batches, so that a resumed run
//! continues in the middle of an epoch without loading what came before.

use std::fmt;
use std::sync::Arc;

use super::batch::Batch;
use super::batch_iter::{BatchIter, EpochPlan};
use super::dataset::Dataset;
use super::distributed_sampler::{DistributedSampler, Remainder};
use super::sampler::{RandomSampler, Sampler, SequentialSampler};
use crate::Result;
use crate::config::setters;
use crate::error::{ConfigError, DataError};

/// Batches that each worker loads ahead by default, as in PyTorch.
const DEFAULT_PREFETCH: usize = 2;

/// Which batches of which epoch to iterate over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EpochRange {
    /// Number of the epoch, from 0. Decides the shuffled order and the random numbers of transforms.
    pub epoch: u64,
    /// First batch, from 0; what lies before is skipped without loading it.
    pub first_batch: usize,
    /// At most so many batches; `None` means to the end of the epoch.
    pub num_batches: Option<usize>,
}

impl EpochRange {
    /// All batches of `epoch`.
    pub fn epoch(epoch: u64) -> Self {
        Self { epoch, ..Self::default() }
    }

    /// Starts at `first_batch`.
    pub fn from_batch(mut self, first_batch: usize) -> Self {
        self.first_batch = first_batch;
        self
    }

    /// Ends after `num_batches` batches.
    pub fn take(mut self, num_batches: usize) -> Self {
        self.num_batches = Some(num_batches);
        self
    }
}

/// Yields batches of a dataset, in an order that depends only on seed, epoch and rank: never on `num_workers`.
///
/// Cloning is cheap; clones share the dataset.
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use voltaic::data::{DataLoader, EpochRange, TensorDataset};
/// let x = Tensor::randn([10, 3], (Kind::Float, Device::Cpu));
/// let loader = DataLoader::new(TensorDataset::new(x)?).batch_size(4).shuffle(true).num_workers(2).build()?;
/// assert_eq!(loader.num_batches(), 3);
/// for batch in loader.iter(EpochRange::epoch(0))? {
///     let batch = batch?;
///     assert_eq!(batch.size()[1], 3);
/// }
/// # Ok::<(), voltaic::Error>(())
/// ```
pub struct DataLoader<B: Batch> {
    dataset: Arc<dyn Dataset<Batch = B>>,
    sampler: Arc<dyn Sampler>,
    batch_size: Option<usize>,
    drop_last: bool,
    num_workers: usize,
    prefetch: usize,
    seed: Option<u64>,
    default_seed: u64,
    /// For errors: the method that has given it, and its number if there are several.
    name: (&'static str, Option<usize>),
    rank: usize,
    repeats_epoch: bool,
}

impl<B: Batch> DataLoader<B> {
    /// Starts building a loader over `dataset`: batches of 1, in order, loaded on the calling thread.
    #[allow(
        clippy::new_ret_no_self,
        reason = "the one way to make a loader; `build` checks the settings together"
    )]
    pub fn new<D: Dataset<Batch = B>>(dataset: D) -> DataLoaderBuilder<B> {
        DataLoaderBuilder {
            dataset: Arc::new(dataset),
            batch_size: Some(1),
            shuffle: false,
            drop_last: false,
            num_workers: 0,
            prefetch: None,
            seed: None,
            sampler: None,
        }
    }

    /// Number of batches of an epoch, on this rank.
    pub fn num_batches(&self) -> usize {
        let (samples, size) = (self.num_samples(), self.batch_size.unwrap_or(1));
        if self.drop_last { samples / size } else { samples.div_ceil(size) }
    }

    /// Samples per batch (the last may have fewer); `None` if each sample of the dataset is a batch already.
    pub fn batch_size(&self) -> Option<usize> {
        self.batch_size
    }

    /// Samples that the sampler chooses per epoch, on this rank.
    pub fn num_samples(&self) -> usize {
        self.sampler.num_samples()
    }

    /// Whether the order of the samples is random.
    pub fn is_shuffled(&self) -> bool {
        self.sampler.is_shuffled()
    }

    /// Whether each rank gets samples of its own.
    pub fn is_distributed(&self) -> bool {
        self.sampler.is_distributed()
    }

    /// Whether an incomplete last batch is left out.
    pub fn drop_last(&self) -> bool {
        self.drop_last
    }

    /// Number of loader threads; 0 means that batches are loaded on the thread that iterates.
    pub fn num_workers(&self) -> usize {
        self.num_workers
    }

    /// Seed of the order and of random transforms.
    pub fn seed(&self) -> u64 {
        self.seed.unwrap_or(self.default_seed)
    }

    /// Sets the seed that is used if the loader was built without one; 0 before the first call.
    pub fn set_seed(&mut self, seed: u64) {
        self.default_seed = seed;
    }

    /// Names the loaders that a method has given, for their errors.
    pub(crate) fn name_all(loaders: &mut [Self], method: &'static str) {
        let has_several = loaders.len() > 1;
        for (number, loader) in loaders.iter_mut().enumerate() {
            loader.name = (method, has_several.then_some(number));
        }
    }

    /// Sets the samples per batch.
    ///
    /// # Errors
    /// [`ConfigError`] if each sample of the dataset is a batch already.
    pub fn set_batch_size(&mut self, batch_size: usize) -> Result<(), ConfigError> {
        if self.batch_size.is_none() {
            let what = "cannot be changed: each sample of the dataset is a batch already";
            return Err(ConfigError::new(
                "DataLoader.batch_size",
                what,
                "let the dataset give single samples",
            ));
        }
        if batch_size == 0 {
            return Err(ConfigError::new("DataLoader.batch_size", "0 samples", "use 1 or more"));
        }
        self.batch_size = Some(batch_size);
        Ok(())
    }

    /// Makes the loader give the same batches in every epoch: its samples in order, and what the data set or a sampler draws
    /// (places in a text, random transforms) as in the first epoch. Returns whether the samples were shuffled.
    pub(crate) fn repeat_first_epoch(&mut self) -> bool {
        self.repeats_epoch = true;
        let was_shuffled = self.sampler.is_shuffled();
        if was_shuffled {
            self.sampler = Arc::new(SequentialSampler::new(self.dataset.len()));
        }
        was_shuffled
    }

    /// Leaves this loader with the part of `rank` out of `world_size`, in the order that its sampler gives. Random
    /// transforms then draw other numbers on each rank. A loader whose sampler is distributed keeps its sampler.
    ///
    /// # Errors
    /// [`ConfigError`] if `rank` is not below `world_size`, or so few samples are left that there is no batch (with
    /// [`Remainder::Exact`] a rank may have none).
    pub fn shard(&mut self, rank: usize, world_size: usize, remainder: Remainder) -> Result<()> {
        let sampler: Arc<dyn Sampler> = if self.sampler.is_distributed() {
            self.sampler.clone()
        } else {
            Arc::new(DistributedSampler::wrap(self.sampler.clone(), rank, world_size)?.remainder(remainder))
        };
        let sharded = Self { sampler, rank, ..self.clone() };
        if sharded.num_batches() == 0 && remainder != Remainder::Exact {
            return Err(ConfigError::new(
                "DataLoader.batch_size",
                format!(
                    "{} samples divided among {world_size} ranks give no batch of {} with drop_last={}",
                    self.num_samples(),
                    self.batch_size.unwrap_or(1),
                    self.drop_last
                ),
                "use a smaller batch_size, fewer ranks, or drop_last=false",
            )
            .into());
        }
        *self = sharded;
        Ok(())
    }

    /// Iterates over batches of one epoch. Starts the worker threads, which end with the iterator.
    ///
    /// # Errors
    /// [`DataError::Sampler`] if the sampler gives no usable order, [`DataError::Range`] if `first_batch` lies beyond
    /// the epoch, [`DataError::Worker`] if a thread cannot be started.
    pub fn iter(&self, range: EpochRange) -> Result<BatchIter<B>> {
        let num_batches = self.num_batches();
        if range.first_batch > num_batches {
            return Err(DataError::Range { first_batch: range.first_batch, num_batches }.into());
        }
        let left = num_batches - range.first_batch;
        let end = range.first_batch + range.num_batches.unwrap_or(left).min(left);
        let drawn_epoch = if self.repeats_epoch { 0 } else { range.epoch };
        let plan = EpochPlan {
            loader: match self.name {
                (method, None) => method.to_owned(),
                (method, Some(number)) => format!("{method} {number}"),
            },
            dataset: self.dataset.clone(),
            indices: self.epoch_indices(drawn_epoch)?,
            batch_size: self.batch_size.unwrap_or(1),
            seed: self.seed(),
            epoch: range.epoch,
            drawn_epoch,
            rank: self.rank,
        };
        BatchIter::start(plan, range.first_batch, end, self.num_workers, self.prefetch)
    }

    /// The sampler's order, checked.
    fn epoch_indices(&self, epoch: u64) -> Result<Vec<usize>> {
        let failed = |source: anyhow::Error| DataError::Sampler {
            sampler: short(&format!("{:?}", self.sampler)),
            epoch,
            source,
        };
        let indices = self.sampler.indices(self.seed(), epoch).map_err(failed)?;
        let (expected, len) = (self.sampler.num_samples(), self.dataset.len());
        if indices.len() != expected {
            let found = indices.len();
            return Err(failed(anyhow::anyhow!("num_samples() is {expected}, indices() gave {found}")).into());
        }
        if let Some(&index) = indices.iter().find(|&&index| index >= len) {
            return Err(failed(DataError::Index { by: "it".to_owned(), index, len }.into()).into());
        }
        Ok(indices)
    }
}

/// A sampler's debug text may hold a weight per sample.
fn short(text: &str) -> String {
    const MAX_CHARS: usize = 120;
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

impl<B: Batch> Clone for DataLoader<B> {
    fn clone(&self) -> Self {
        Self { dataset: self.dataset.clone(), sampler: self.sampler.clone(), ..*self }
    }
}

impl<B: Batch> fmt::Debug for DataLoader<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataLoader")
            .field("num_samples", &self.num_samples())
            .field("batch_size", &self.batch_size)
            .field("is_shuffled", &self.is_shuffled())
            .field("drop_last", &self.drop_last)
            .field("num_workers", &self.num_workers)
            .field("seed", &self.seed)
            .finish_non_exhaustive()
    }
}

/// Settings of a [`DataLoader`] to be.
pub struct DataLoaderBuilder<B: Batch> {
    dataset: Arc<dyn Dataset<Batch = B>>,
    batch_size: Option<usize>,
    shuffle: bool,
    drop_last: bool,
    num_workers: usize,
    prefetch: Option<usize>,
    seed: Option<u64>,
    sampler: Option<Arc<dyn Sampler>>,
}

impl<B: Batch> DataLoaderBuilder<B> {
    /// Samples per batch; 1 by default.
    pub fn batch_size(mut self, batch_size: usize) -> Self {
        self.batch_size = Some(batch_size);
        self
    }

    /// For a dataset whose samples are batches already: each is asked for alone (PyTorch's `batch_size=None`).
    pub fn unbatched(mut self) -> Self {
        self.batch_size = None;
        self
    }

    setters! {
        /// Whether each epoch has a random order of its own; in order by default.
        shuffle: bool;
        /// Whether an incomplete last batch is left out; it is kept by default.
        drop_last: bool;
        /// Number of threads that load ahead; by default 0, which loads on the thread that iterates.
        num_workers: usize;
        /// Batches that each worker may hold ready; 2 by default.
        prefetch: usize = Some(prefetch);
        /// Seed of the order and of random transforms; without it, that of the run.
        seed: u64 = Some(seed);
        /// Chooses the samples by a sampler, in place of `shuffle`.
        sampler: impl Sampler = Some(Arc::new(sampler));
    }

    /// The loader.
    ///
    /// # Errors
    /// [`ConfigError`] with all settings that cannot be used: an empty dataset, a batch size or prefetch of 0, a
    /// sampler together with `shuffle`, prefetch without workers, `drop_last` that leaves no batch.
    pub fn build(self) -> Result<DataLoader<B>> {
        let mut error = ConfigError { problems: Vec::new() };
        let mut problem = |key: &str, what: String, remedy: &'static str| {
            error.problems.extend(ConfigError::new(format!("DataLoader.{key}"), what, remedy).problems);
        };
        let len = self.dataset.len();
        if len == 0 {
            problem("dataset", "it has no samples".to_owned(), "give a dataset with at least one sample");
        }
        if self.batch_size == Some(0) {
            problem("batch_size", "0 samples per batch".to_owned(), "set batch_size to 1 or more");
        }
        if self.sampler.is_some() && self.shuffle {
            let what = "true, and a sampler is set, which decides the order too".to_owned();
            problem("shuffle", what, "leave one of the two out");
        }
        match (self.num_workers, self.prefetch) {
            (_, Some(0)) => {
                problem(
                    "prefetch",
                    "0 batches ahead".to_owned(),
                    "set prefetch to 1 or more, or num_workers=0",
                );
            }
            (0, Some(prefetch)) => {
                let what = format!("{prefetch} batches ahead, but num_workers=0 loads none ahead");
                problem("prefetch", what, "set num_workers to 1 or more, or leave prefetch out");
            }
            _ => {}
        }
        let sampler = self.sampler.unwrap_or_else(|| {
            if self.shuffle {
                Arc::new(RandomSampler::new(len))
            } else {
                Arc::new(SequentialSampler::new(len))
            }
        });
        let samples = sampler.num_samples();
        match self.batch_size {
            Some(size) if self.drop_last && len > 0 && samples < size => {
                let what = format!("true, and {samples} samples do not fill a single batch of {size}");
                problem("drop_last", what, "use a smaller batch_size or drop_last=false");
            }
            None if self.drop_last => {
                let what = "true, but an unbatched loader has no incomplete batch".to_owned();
                problem("drop_last", what, "leave drop_last out, or set a batch_size");
            }
            _ => {}
        }
        if !error.problems.is_empty() {
            return Err(error.into());
        }
        Ok(DataLoader {
            dataset: self.dataset,
            sampler,
            batch_size: self.batch_size,
            drop_last: self.drop_last,
            num_workers: self.num_workers,
            prefetch: self.prefetch.unwrap_or(DEFAULT_PREFETCH),
            seed: self.seed,
            default_seed: 0,
            name: ("DataLoader", None),
            rank: 0,
            repeats_epoch: false,
        })
    }
}
