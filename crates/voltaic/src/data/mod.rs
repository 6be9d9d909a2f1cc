//! Data: datasets, the order of their samples, loaders with worker threads, and ready-made sets.
//!
//! A [`Dataset`] gives stacked samples by index, a [`Sampler`] chooses the indices of an epoch, a [`DataLoader`] puts
//! both together, and a [`DataModule`] holds the loaders of a run. Nothing here holds a position within an epoch:
//! the caller of [`DataLoader::iter`] does.

mod batch;
mod batch_iter;
mod dataloader;
mod datamodule;
mod dataset;
mod distributed_sampler;
mod sampler;
mod sets;
mod settings;
mod split_size;
mod text;
pub mod transforms;
mod vocabulary;

pub use crate::ffi::SharedTensor;
pub use batch::Batch;
pub use batch_iter::BatchIter;
pub use dataloader::{DataLoader, DataLoaderBuilder, EpochRange};
pub use datamodule::{DataModule, Loaders, Stage};
pub use dataset::{Dataset, Shareable, Subset, TensorBatch, TensorDataset, fractional_lengths, random_split};
pub use distributed_sampler::{DistributedSampler, Remainder};
pub use rand::rngs::StdRng;
pub use sampler::{RandomSampler, Sampler, SequentialSampler, WeightedRandomSampler};
pub use sets::mnist::{MNIST_MEAN, MNIST_STD, Mnist, MnistFiles, MnistSplit};
pub use sets::mnist_data::{MnistData, MnistDataConfig, MnistSet};
pub use sets::shakespeare_data::{ShakespeareData, ShakespeareDataConfig};
pub use split_size::SplitSize;
pub use text::TextDataset;
pub use vocabulary::{CharVocabulary, Tokenizer};
