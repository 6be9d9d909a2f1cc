//! What of a plan must be the same on all ranks.

use std::fmt::Debug;

use serde_json::Value;

use crate::callback::Callback;
use crate::distributed::Facts;
use crate::strategy::StrategyPlan;
use crate::trainer::config::TrainerConfig;
use crate::trainer::config::callbacks::is_display;
use crate::trainer::config::values::Limit;
use crate::trainer::plan::ranks::RankPlan;
use crate::trainer::plan::train_plan::TrainPlan;

/// What of the plan decides what a rank computes and when it meets the others; not its device, and not where it logs.
pub(crate) fn facts(config: &TrainerConfig, plan: &TrainPlan, callbacks: &[Box<dyn Callback>]) -> Facts {
    let mut facts = Facts::default();
    let mut add = |key: &str, value: String| facts.add(format!("trainer.{key}"), value);
    // all fields are named, so that a new one is decided about
    let TrainPlan {
        device: _,
        ranks,
        precision,
        fp8,
        op_lists,
        lists_are_default: _,
        logs_casts: _,
        max_epochs,
        min_epochs,
        max_steps,
        min_steps,
        limit_train,
        limit_val,
        limit_test,
        limit_predict,
        val_check_interval,
        val_check_time,
        max_time,
        overfits,
        deterministic,
        benchmark,
        inference_mode,
        detect_anomaly,
        barebones,
        enable_autolog_hparams: _,
        save_on_signal,
        requeue_signal,
        check_val_every_n_epoch,
        num_sanity_val_steps,
        log_every_n_steps,
        accumulate_grad_batches,
        clip,
        reload_dataloaders_every_n_epochs,
        graph,
        compile,
        activations,
        checkpoints: _,
        fast_dev_run,
        default_root_dir: _,
    } = plan;
    add("precision", precision.to_string());
    add("plugins.fp8", optional(fp8.as_ref()));
    add("plugins.op_lists", optional(op_lists.as_ref()));
    add("max_epochs", optional(max_epochs.as_ref()));
    add("min_epochs", min_epochs.to_string());
    add("max_steps", optional(max_steps.as_ref()));
    add("min_steps", min_steps.to_string());
    add("limit_train_batches", limit(limit_train));
    add("limit_val_batches", limit(limit_val));
    add("limit_test_batches", limit(limit_test));
    add("limit_predict_batches", limit(limit_predict));
    add("val_check_interval", limit(val_check_interval));
    add("val_check_interval.time", optional(val_check_time.as_ref()));
    add("max_time", optional(max_time.as_ref()));
    add("overfit_batches", overfits.to_string());
    add("deterministic", optional(deterministic.as_ref()));
    add("benchmark", optional(benchmark.as_ref()));
    add("inference_mode", inference_mode.to_string());
    add("detect_anomaly", detect_anomaly.to_string());
    add("barebones", barebones.to_string());
    add("save_on_signal", save_on_signal.to_string());
    add("plugins.requeue_signal", optional(requeue_signal.as_ref()));
    add("check_val_every_n_epoch", optional(check_val_every_n_epoch.as_ref()));
    add("num_sanity_val_steps", optional(num_sanity_val_steps.as_ref()));
    add("log_every_n_steps", log_every_n_steps.to_string());
    add("accumulate_grad_batches", accumulate_grad_batches.to_string());
    add("gradient_clip_val", optional(clip.as_ref()));
    add("reload_dataloaders_every_n_epochs", reload_dataloaders_every_n_epochs.to_string());
    add("graph", graph.to_string());
    add("compile", format!("{compile:?}"));
    add("activation_checkpointing", format!("{activations:?}"));
    add("fast_dev_run", fast_dev_run.to_string());
    add("max_restarts", config.max_restarts.to_string());
    facts.extend(of_ranks(ranks));
    facts.extend(of_callbacks(config, callbacks));
    facts
}

fn of_ranks(ranks: &RankPlan) -> Facts {
    let RankPlan {
        devices: _,
        devices_is_auto: _,
        num_nodes,
        strategy,
        use_distributed_sampler,
        sync_batchnorm,
    } = ranks;
    let mut facts = Facts::default();
    facts.add("trainer.num_nodes", num_nodes);
    facts.add("trainer.use_distributed_sampler", use_distributed_sampler);
    facts.add("trainer.sync_batchnorm", sync_batchnorm);
    match strategy {
        StrategyPlan::SingleDevice => facts.add("trainer.strategy", "single_device"),
        StrategyPlan::Ddp { name, config, tp } => {
            facts.add("trainer.strategy", name);
            facts.add("trainer.strategy.tensor_parallel_size", tp);
            let config = serde_json::to_value(config).unwrap_or_default();
            facts.add_json("trainer.strategy", &config);
        }
        StrategyPlan::DeepSpeed(plan) => {
            facts.add("trainer.strategy", plan.name);
            facts.add("trainer.strategy.settings", format!("{:?}", plan.settings));
        }
        StrategyPlan::Inference(plan) => {
            facts.add("trainer.strategy", plan.name);
            facts.add("trainer.strategy.settings", format!("{:?}", plan.settings.config));
        }
        StrategyPlan::Zero(config) => {
            facts.add("trainer.strategy", config.stage.name());
            facts.add("trainer.strategy.settings", format!("{config:?}"));
        }
    }
    facts
}

/// Callbacks by their settings, those of the program by the key of their state; without those that only show something.
fn of_callbacks(config: &TrainerConfig, callbacks: &[Box<dyn Callback>]) -> Facts {
    let mut facts = Facts::default();
    let named = callbacks.iter().filter(|callback| !is_display(callback.as_ref())).map(|callback| {
        let (key, name) = (callback.state_key(), callback.type_name());
        // a path may be another on each node
        if key.contains('/') { name.rsplit("::").next().unwrap_or(name).to_owned() } else { key }
    });
    facts.add("trainer.callbacks", named.collect::<Vec<_>>().join(", "));
    let configured =
        config.callbacks.iter().map(|callback| serde_json::to_value(callback).unwrap_or_default());
    let mut configured = Value::Array(configured.collect());
    drop_paths(&mut configured);
    facts.add_json("trainer.callbacks", &configured);
    facts
}

/// Folders may be others on each node, and rank 0 alone writes to most of them.
fn drop_paths(value: &mut Value) {
    match value {
        Value::Object(members) => {
            members.retain(|name, _| !matches!(name.as_str(), "dirpath" | "output_dir"));
            members.iter_mut().for_each(|(_, value)| drop_paths(value));
        }
        Value::Array(members) => members.iter_mut().for_each(drop_paths),
        _ => {}
    }
}

fn optional(value: Option<&impl Debug>) -> String {
    value.map_or_else(|| "not set".to_owned(), |value| format!("{value:?}"))
}

/// As it is written: `1.0` is all batches, `1` is one.
fn limit(limit: &Limit) -> String {
    match limit {
        Limit::Batches(batches) => batches.to_string(),
        Limit::Fraction(fraction) => format!("{fraction:?}"),
    }
}
