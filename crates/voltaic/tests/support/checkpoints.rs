//! Checkpoints that a test asks for, and runs that go on from them.

use std::path::{Path, PathBuf};

use voltaic::module::CheckpointRequest;
use voltaic::trainer::{Trainer, TrainerBuilder};

/// Asks for a checkpoint with all that a run goes on from.
pub fn full_checkpoint(path: PathBuf) -> CheckpointRequest {
    CheckpointRequest { path, weights_only: false, link_to: None, then_remove: Vec::new() }
}

/// A trainer that goes on from a checkpoint, if there is one.
pub fn resumed(builder: TrainerBuilder, ckpt: Option<&Path>) -> Trainer {
    let mut trainer = builder.build().unwrap();
    if let Some(ckpt) = ckpt {
        trainer.ckpt_path(ckpt);
    }
    trainer
}
