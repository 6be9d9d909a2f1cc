//! Errors of data sets and loaders.

use std::path::PathBuf;

/// A data set or loader cannot give its samples.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A file does not hold what its format promises.
    #[error("{}: at byte {offset}: {what}; {remedy}", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Where in the file, in bytes from its start; of a compressed file, from the start of its unpacked content.
        offset: u64,
        /// What was expected and what was found.
        what: String,
        /// How to mend it.
        remedy: String,
    },
    /// A file of the data set is not there.
    #[error("{} is missing; {remedy}", path.display())]
    Missing {
        /// The file or folder looked for.
        path: PathBuf,
        /// How to mend it.
        remedy: String,
    },
    /// A data set was found in none of the places where it may be.
    #[error("{what} was found in none of {}; {remedy}", list(searched))]
    NotFound {
        /// The data set.
        what: String,
        /// The places, in the order of the search.
        searched: Vec<PathBuf>,
        /// How to mend it.
        remedy: String,
    },
    /// A file is complete but is not the published one.
    #[error("{}: md5 is {found}, the published file's is {expected}; {remedy}", path.display())]
    Checksum {
        /// The file.
        path: PathBuf,
        /// Published sum of the unpacked content.
        expected: String,
        /// Sum of what is there.
        found: String,
        /// How to mend it.
        remedy: String,
    },
    /// Tensors do not have the shapes that a data set or transform needs.
    #[error("{what}; {remedy}")]
    Shape {
        /// What was given.
        what: String,
        /// How to mend it.
        remedy: String,
    },
    /// An index lies beyond the data set.
    #[error("{by} names sample {index} of a dataset of {len}; indices count from 0 and must be below {len}")]
    Index {
        /// Who gave the index, such as a sampler.
        by: String,
        /// The index.
        index: usize,
        /// Number of samples.
        len: usize,
    },
    /// A batch could not be loaded: the data set's code returned an error or panicked.
    #[error(
        "batch {batch_idx} of epoch {epoch} (samples {indices}) could not be loaded: {source:#}; mend these samples or \
         the dataset's code (num_workers=0 runs it on the calling thread)"
    )]
    Batch {
        /// The epoch.
        epoch: u64,
        /// Place of the batch in the epoch, from 0.
        batch_idx: usize,
        /// Its samples, shortened if they are many.
        indices: String,
        /// What the data set's code said.
        source: anyhow::Error,
    },
    /// The sampler gave no usable order.
    #[error("sampler {sampler} gave no usable order for epoch {epoch}: {source:#}; mend the sampler")]
    Sampler {
        /// The sampler with its fields.
        sampler: String,
        /// The epoch.
        epoch: u64,
        /// What is wrong.
        source: anyhow::Error,
    },
    /// A loader thread could not be started, or ended before its time.
    #[error("loader worker {worker}: {what}; {remedy}")]
    Worker {
        /// Number of the worker, from 0.
        worker: usize,
        /// What happened.
        what: String,
        /// How to mend it.
        remedy: String,
    },
    /// A range of batches does not lie within the epoch.
    #[error(
        "first_batch {first_batch} lies beyond the epoch's {num_batches} batches; resume with the dataset, batch_size \
         and number of ranks that the position was saved with"
    )]
    Range {
        /// First batch asked for.
        first_batch: usize,
        /// Batches of the epoch.
        num_batches: usize,
    },
    /// A text holds what its vocabulary lacks, or too little.
    #[error("{what}; {remedy}")]
    Text {
        /// What is wrong.
        what: String,
        /// How to mend it.
        remedy: String,
    },
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}
