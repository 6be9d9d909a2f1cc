//! Integration tests, one module per theme.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::type_complexity,
    missing_docs,
    reason = "a test that panics has failed"
)]

#[macro_use]
#[path = "../support/assert_error.rs"]
mod assert_error;
#[macro_use]
#[path = "../support/lightning_module.rs"]
mod lightning_module;

mod accelerator_values;
mod activation_checkpointing;
mod autograd;
mod backbone_finetuning;
mod batch_size_finder;
mod bundle;
mod callbacks;
mod calls;
mod calls_in_runs;
#[path = "../support/checkpoint.rs"]
mod checkpoint;
mod checkpoint_io;
#[path = "../support/checkpoints.rs"]
mod checkpoints;
mod class_paths;
mod cli;
#[path = "../support/compare.rs"]
mod compare;
#[path = "../support/compile.rs"]
mod compile;
mod config;
mod config_print;
mod config_problems;
mod contract;
mod contract_module;
mod contradictions;
mod convert;
mod data;
mod data_sets;
mod ddp;
mod ddp_alike;
mod ddp_elastic;
mod ddp_faults;
mod ddp_network;
mod ddp_nodes;
mod ddp_resume;
mod ddp_unused;
mod deepspeed;
mod deepspeed_folders;
mod deepspeed_schedules;
mod device_stats;
mod devices;
mod distributed;
mod env;
mod extreme_values;
mod fabric;
mod fabric_steps;
mod find_checkpoint;
mod flops;
mod frames;
mod from_checkpoint;
mod gaudi_documents;
mod generation;
mod graph;
mod graph_blocks;
mod graph_conditions;
mod graph_first_step;
mod graph_metrics;
mod graph_modules;
mod graph_show;
mod hangs;
#[path = "../support/heavy.rs"]
mod heavy;
mod hints;
mod hook_names;
mod hook_outputs;
mod hooks;
mod host_memory;
mod host_pool;
mod hostile_checkpoint;
mod hostile_config;
mod inference;
mod initial_weights;
mod interceptors;
mod kill;
mod last_checkpoint;
mod launchers;
mod layers;
mod libtorch;
mod loggers;
mod logging;
mod loss_scaler;
#[path = "../support/losses.rs"]
mod losses;
mod lr_scheduler;
mod manual;
mod master_weights;
mod memory;
mod mesh;
mod metric_objects;
mod metrics;
mod metrics_random;
mod model_parallel;
mod models;
mod narrow_grads;
mod new_crate;
mod nn;
mod nn_errors;
mod no_validation_step;
mod optim;
mod optim_muon;
mod output;
mod own_loaders;
mod parity;
mod prediction_writer;
mod probe;
#[path = "../support/process.rs"]
mod process;
mod process_groups;
mod profilers;
mod quantize;
mod recipes;
mod resume;
mod resume_other_batches;
mod resume_state;
mod rng;
mod saved_state;
mod sharded;
#[path = "../support/signal.rs"]
mod signal;
mod signals;
#[path = "../support/silent.rs"]
mod silent;
#[path = "../support/stages.rs"]
mod stages;
mod strangers;
mod summary;
mod swa;
mod swap;
mod tensor_parallel;
mod trainer;
mod trainer_arguments;
mod trainer_errors;
mod trainer_files;
mod trainer_precision;
mod trainer_rules;
mod unshard;
