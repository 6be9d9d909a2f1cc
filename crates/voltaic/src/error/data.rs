//! Errors of data sets and loaders.

use std::borrow::Cow;
use std::path::PathBuf;

use super::problem::Problem;

/// A data set or loader cannot give its samples.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A file does not hold what its format promises.
    #[error("{}: at byte {offset}: {problem}", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Where in the file, in bytes from its start; of a compressed file, from the start of its unpacked content.
        offset: u64,
        /// What is wrong, and how to fix it.
        problem: Problem,
    },
    /// A file of the data set is not there.
    #[error("{} is missing; {remedy}", path.display())]
    Missing {
        /// The file or folder looked for.
        path: PathBuf,
        /// How to fix it.
        remedy: Cow<'static, str>,
    },
    /// A data set was found in none of the places where it may be.
    #[error("{what} was found in none of {}; {remedy}", list(searched))]
    NotFound {
        /// The data set.
        what: String,
        /// The places, in the order of the search.
        searched: Vec<PathBuf>,
        /// How to fix it.
        remedy: Cow<'static, str>,
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
        /// How to fix it.
        remedy: Cow<'static, str>,
    },
    /// Tensors do not have the shapes that a data set or transform needs.
    #[error("{problem}")]
    Shape {
        /// What is wrong, and how to fix it.
        problem: Problem,
    },
    /// An index lies beyond the data set.
    #[error("{by} names sample {index} of a dataset of {len}; {}", self.remedy())]
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
        "batch {batch_idx} of epoch {epoch} of {loader} (samples {indices}) could not be loaded: {source:#}; {}",
        self.remedy()
    )]
    Batch {
        /// The loader, such as `train_dataloader`, or `val_dataloader 1` of several.
        loader: String,
        /// The epoch.
        epoch: u64,
        /// Place of the batch in the epoch, from 0.
        batch_idx: usize,
        /// Its samples, shortened if they are many.
        indices: String,
        /// What the data set's code said.
        r#source: anyhow::Error,
    },
    /// The sampler gave no usable order.
    #[error("sampler {sampler} gave no usable order for epoch {epoch}: {source:#}; {}", self.remedy())]
    Sampler {
        /// The sampler with its fields.
        sampler: String,
        /// The epoch.
        epoch: u64,
        /// What is wrong.
        r#source: anyhow::Error,
    },
    /// A loader thread could not be started, or ended before its time.
    #[error("loader worker {worker}: {problem}")]
    Worker {
        /// Number of the worker, from 0.
        worker: usize,
        /// What is wrong, and how to fix it.
        problem: Problem,
    },
    /// A range of batches does not lie within the epoch.
    #[error("first_batch {first_batch} lies beyond the epoch's {num_batches} batches; {}", self.remedy())]
    Range {
        /// First batch asked for.
        first_batch: usize,
        /// Batches of the epoch.
        num_batches: usize,
    },
    /// A text holds what its vocabulary lacks, or too little.
    #[error("{problem}")]
    Text {
        /// What is wrong, and how to fix it.
        problem: Problem,
    },
}

impl DataError {
    /// How to fix it.
    pub fn remedy(&self) -> Cow<'_, str> {
        match self {
            Self::Corrupt { problem, .. }
            | Self::Shape { problem }
            | Self::Worker { problem, .. }
            | Self::Text { problem } => (&*problem.remedy).into(),
            Self::Missing { remedy, .. } | Self::NotFound { remedy, .. } | Self::Checksum { remedy, .. } => {
                (&**remedy).into()
            }
            Self::Index { len, .. } => format!("indices count from 0 and must be below {len}").into(),
            Self::Batch { .. } => {
                "fix these samples or the dataset's code (num_workers=0 runs it on the calling thread)".into()
            }
            Self::Sampler { .. } => "fix the sampler".into(),
            Self::Range { .. } => {
                "resume with the dataset, batch_size and number of ranks that the position was saved with"
                    .into()
            }
        }
    }
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}
