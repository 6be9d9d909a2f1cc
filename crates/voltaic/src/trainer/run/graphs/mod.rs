//! Graphs of steps and updates, with `trainer.graph`.

pub(in crate::trainer) mod step;
pub(in crate::trainer) mod update;
