//! States divided among ranks (ZeRO): the same as data-parallel training.

mod command;
mod ladder;
mod models;
mod ranks;
mod resume;
mod stage3;
