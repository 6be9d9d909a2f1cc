//! The trainer of most tests.

use voltaic::trainer::{Trainer, TrainerBuilder};

/// A trainer that prints nothing and writes nothing unless told to.
pub fn silent() -> TrainerBuilder {
    Trainer::builder()
        .logger(false)
        .enable_checkpointing(false)
        .enable_progress_bar(false)
        .enable_model_summary(false)
}
