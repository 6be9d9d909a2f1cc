//! A checkpoint of DeepSpeed as one of voltaic.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use serde_json::{Value as Json, json};
use tch::{Kind, Tensor};

use super::folder::{Folder, is_folder_name, refuse};
use super::layout::{FlatParam, own_name};
use super::model::{Contents, Model, OTHER, count_of, named};
use super::partitions::{Group, States, add_counts, groups_of, read as read_partitions};
use super::whole;
use crate::checkpoint::budget::ReadLimits;
use crate::checkpoint::checkpoint::Checkpoint;
use crate::checkpoint::lightning::{CLASS, Converted, from_lightning};
use crate::checkpoint::masters::{MASTER, may_have_master};
use crate::checkpoint::pickle::Value;
use crate::checkpoint::torch_file::read_torch_within;
use crate::error::{ConfigError, Error, Result};

/// How a checkpoint of DeepSpeed is read.
#[derive(Debug, Clone, Default)]
pub struct DeepSpeedRead {
    /// The folder of the checkpoint in the folder that is read; the one that `latest` names unless given.
    pub tag: Option<String>,
    /// Whether the training state is left out.
    pub weights_only: bool,
    /// Whether `weights_only` gives weights of 16 bits as the run had them; in float32 otherwise.
    pub keep_16_bits: bool,
    /// The fqn of the optimizer's parameters in its order: stage 0 does not save them.
    pub param_names: Option<Vec<String>>,
    /// What may be made of the files.
    pub limits: ReadLimits,
}

/// Keys of model states that Lightning reads from its own files.
const OF_LIGHTNING: [&str; 5] = ["epoch", "global_step", "loops", "callbacks", "hyper_parameters"];

/// Reads a checkpoint of DeepSpeed: the folder that it saved to, or the folder of a tag. Stages 0 to 3, universal checkpoints, and
/// those that Lightning's strategy saved are read. No code of their pickles is executed.
///
/// Weights are the float32 weights of the optimizer. Weights of 16 bits stay so where the training state is read, and their float32
/// weights are its master weights. Tied weights share their memory.
///
/// # Errors
/// [`CheckpointError::Unreadable`](crate::error::CheckpointError::Unreadable) if a file is missing, damaged or does not fit the others;
/// [`CheckpointError::Mismatch`](crate::error::CheckpointError::Mismatch) as
/// [`from_lightning`].
///
/// Source: `deepspeed/runtime/engine.py`, `deepspeed/utils/zero_to_fp32.py`, `deepspeed/checkpoint/ds_to_universal.py` of version 0.19.
pub fn read_deepspeed(path: &Path, how: &DeepSpeedRead) -> Result<Converted<Checkpoint>> {
    let folder = Folder::open(path, how.tag.as_deref())?;
    let mut model = Model::read(&folder, how.limits)?;
    let wants_states = !how.weights_only;
    let states = match (model.flats.clone(), &folder.universal) {
        (Some(flats), Some(zero)) => universal(zero, flats, wants_states, how.limits)?,
        (Some(flats), None) if !folder.optims.is_empty() => {
            read_partitions(&folder.optims, flats, folder.has_model_of_each, wants_states, how.limits)?
        }
        (Some(_), None) => {
            let what = "it has no files *_optim_states.pt, which hold the float32 weights";
            return refuse(&folder.path, what, "copy the files of all ranks");
        }
        (None, _) => whole::states(&mut model, how.param_names.as_deref(), wants_states)?,
    };
    if model.flats.is_some() && how.param_names.is_some() {
        let what = "its files have the names of the optimizer's parameters";
        return Err(ConfigError::new("param_names", what, "leave them out").into());
    }
    let mut notes = Vec::new();
    let States { groups, masters, states, loss_scaler } = states;
    let num_masters = masters.len();
    let (halves, num_rounded) = put_weights(&mut model, masters, how)?;
    if num_rounded > 0 {
        notes.push(format!(
            "{num_rounded} of {num_masters} weights are the optimizer's in float32, the run's have 16 bits"
        ));
    }
    check_whole(&model, &folder)?;
    let names: HashSet<&str> = model.weights().iter().map(|(name, _)| name.as_str()).collect();
    let unknown = states.keys().find(|name| !names.contains(own_name(name)));
    if let Some(unknown) = unknown {
        return model.rest.refuse(format!("it has states of {unknown}, which is no weight"));
    }
    let is_half = model.weights().iter().any(|(_, tensor)| tensor.kind() == Kind::Half);
    let (file, order) = as_lightning(&mut model, groups, states, halves, &mut notes)?;
    let order = order.filter(|_| wants_states);
    let mut converted = from_lightning(&file, order.as_deref(), how.weights_only || order.is_none())?;
    if let Some(training) = &mut converted.value.training {
        if let Some(scaler) = loss_scaler.filter(|_| is_half) {
            training.json["loss_scaler"] = scaler_of(&scaler, &model);
        }
    } else if wants_states {
        notes.push("it has no optimizer state: the training state is left out".to_owned());
    }
    converted.notes.extend(notes);
    Ok(converted)
}

/// Puts the float32 weights in the place of the module's, unless these have 16 bits and stay. Returns the float32 weights of those that
/// stay, and how many were replaced that do not.
fn put_weights(
    model: &mut Model,
    masters: BTreeMap<String, Tensor>,
    how: &DeepSpeedRead,
) -> Result<(HashMap<String, Tensor>, usize)> {
    let (mut halves, mut num_rounded) = (HashMap::new(), 0);
    for (name, master) in masters {
        let name = own_name(&name).to_owned();
        let known = model.get(&name);
        let kind = known.map_or(Kind::Float, Tensor::kind);
        let is_placeholder = known.is_none_or(|tensor| tensor.numel() == 0);
        if let Some(tensor) = known.filter(|tensor| !is_placeholder && tensor.size() != master.size()) {
            let (own, other) = (tensor.size(), master.size());
            return model
                .rest
                .refuse(format!("{name} has shape {own:?} in the module, {other:?} in ZeRO's partitions"));
        }
        num_rounded += usize::from(may_have_master(kind));
        let stays = may_have_master(kind) && (!how.weights_only || how.keep_16_bits);
        match (stays, is_placeholder) {
            (false, _) => model.set(&name, master),
            (true, true) => {
                model.set(&name, master.f_to_kind(kind)?);
                halves.insert(name, master);
            }
            (true, false) => drop(halves.insert(name, master)),
        }
    }
    for (alias, first) in model.tied.clone() {
        match model.get(&first).map(Tensor::shallow_clone) {
            Some(tensor) => model.set(&alias, tensor),
            None => return model.rest.refuse(format!("{alias} is tied to {first}, which is no weight")),
        }
    }
    num_rounded -= halves.len();
    Ok((halves, num_rounded))
}

/// In stage 3 a weight that no rank has a part of is empty.
fn check_whole(model: &Model, folder: &Folder) -> Result<()> {
    if !folder.has_model_of_each {
        return Ok(());
    }
    let flats = model.flats.iter().flatten().flatten();
    let known: HashSet<&str> = flats.map(|flat| own_name(&flat.name)).collect();
    let buffers: HashSet<&str> = model.buffers.iter().map(String::as_str).collect();
    let aliases: HashSet<&str> = model.tied.iter().map(|(alias, _)| alias.as_str()).collect();
    let is_gone = |(name, tensor): &&(String, Tensor)| {
        let name = name.as_str();
        tensor.size() == [0] && ![&known, &buffers, &aliases].iter().any(|names| names.contains(name))
    };
    // a frozen one has a shape of its own
    let frozen: HashSet<&String> = model.frozen.iter().collect();
    match model.weights().iter().filter(is_gone).find(|(name, _)| !frozen.contains(name)) {
        Some((name, _)) => model.rest.refuse(format!("no rank has a part of {name}")),
        None => Ok(()),
    }
}

/// A file as Lightning's, and the optimizer's parameters in its order, if there is one.
fn as_lightning(
    model: &mut Model,
    groups: Vec<Group>,
    mut states: BTreeMap<String, Vec<(String, Value)>>,
    mut halves: HashMap<String, Tensor>,
    notes: &mut Vec<String>,
) -> Result<(Value, Option<Vec<String>>)> {
    let mut file: Vec<(String, Value)> = Vec::new();
    for key in OF_LIGHTNING {
        file.extend(model.rest.take(key).map(|value| (key.to_owned(), value)));
    }
    let has = |file: &[(String, Value)], key: &str| file.iter().any(|(own, _)| own == key);
    if !has(&file, "global_step") {
        let steps = model.rest.get("global_steps").and_then(Value::as_i64).unwrap_or(0);
        file.push(("global_step".to_owned(), Value::Int(steps)));
    }
    if !has(&file, "loops") {
        file.push(("loops".to_owned(), Value::Dict(Vec::new())));
        if !groups.is_empty() {
            notes.push(
                "DeepSpeed keeps no position within an epoch: training goes on at the beginning of one"
                    .to_owned(),
            );
        }
    }
    let config = model.rest.get("ds_config").map(Value::to_json).and_then(Result::ok).unwrap_or_default();
    let rates: Vec<Value> = groups.iter().map(|group| rate_of(&group.settings)).collect();
    let schedules = match model.rest.take("lr_schedulers") {
        Some(Value::List(schedules)) => schedules,
        _ => model.rest.take("lr_scheduler").into_iter().collect(),
    };
    let schedules = schedules.into_iter().map(|schedule| schedule_of(schedule, &config, &rates, notes));
    file.push(("lr_schedulers".to_owned(), Value::List(schedules.flatten().collect())));
    let extra_states = std::mem::take(&mut model.extra_states);
    let weights =
        model.weights().iter().map(|(name, tensor)| (name.clone(), Value::Tensor(tensor.shallow_clone())));
    let entries: Vec<(String, Value)> = weights.chain(extra_states).collect();
    file.push(("state_dict".to_owned(), Value::dict(entries)));
    if groups.is_empty() {
        return Ok((Value::dict(file), None));
    }
    let (mut order, mut saved, mut of_params) = (Vec::new(), Vec::new(), Vec::new());
    for Group { mut settings, names } in groups {
        let first = order.len();
        for name in names {
            let mut entries = states.remove(&name).unwrap_or_default();
            let own = own_name(&name).to_owned();
            entries.extend(halves.remove(&own).map(|master| (MASTER.to_owned(), Value::Tensor(master))));
            if !entries.is_empty() {
                of_params.push((Value::Int(order.len() as i64), Value::dict(entries)));
            }
            order.push(own);
        }
        let params = (first..order.len()).map(|index| Value::Int(index as i64)).collect();
        settings.push((Value::Text("params".to_owned()), Value::List(params)));
        saved.push(Value::Dict(settings));
    }
    let mut optimizer = vec![("state", Value::Dict(of_params)), ("param_groups", Value::List(saved))];
    optimizer.extend(class_of(&config).map(|name| (CLASS, Value::Text(name.to_owned()))));
    file.push(("optimizer_states".to_owned(), Value::List(vec![Value::dict(optimizer)])));
    Ok((Value::dict(file), Some(order)))
}

/// The optimizer that DeepSpeed made by its settings, where its groups do not tell it from another one.
fn class_of(config: &Json) -> Option<&'static str> {
    let optimizer = &config["optimizer"];
    match optimizer["type"].as_str()?.to_ascii_lowercase().as_str() {
        "adam" if optimizer["params"]["adam_w_mode"] == json!(false) => Some("Adam"),
        "adam" | "adamw" => Some("AdamW"),
        _ => None,
    }
}

fn rate_of(settings: &[(Value, Value)]) -> Value {
    let rate = settings.iter().find(|(key, _)| key.as_str() == Some("lr"));
    Value::Float(rate.and_then(|(_, rate)| rate.as_f64()).unwrap_or(0.0))
}

/// A schedule's state. Those of DeepSpeed keep the batch alone.
fn schedule_of(schedule: Value, config: &Json, rates: &[Value], notes: &mut Vec<String>) -> Option<Value> {
    let Some(batch) = schedule.get("last_batch_iteration").and_then(Value::as_i64) else {
        return Some(schedule);
    };
    let Some(name) = config["scheduler"]["type"].as_str() else {
        notes.push("the state of a schedule is left out: the settings do not name its class".to_owned());
        return None;
    };
    let rates = || Value::List(rates.iter().map(|rate| Value::Float(rate.as_f64().unwrap_or(0.0))).collect());
    Some(Value::dict([
        (CLASS, Value::Text(name.to_owned())),
        ("last_epoch", Value::Int(batch.saturating_add(1))),
        ("_last_lr", rates()),
        ("base_lrs", rates()),
    ]))
}

/// DeepSpeed's loss scaler, as that of a run.
fn scaler_of(scaler: &Value, model: &Model) -> Json {
    let number = |key: &str, otherwise: f64| scaler.get(key).and_then(Value::as_f64).unwrap_or(otherwise);
    let count = |key: &str, otherwise: i64| scaler.get(key).and_then(Value::as_i64).unwrap_or(otherwise);
    let is_true = |key: &str| matches!(scaler.get(key), Some(Value::Bool(true)));
    let skipped = model.rest.get("skipped_steps").and_then(count_of).unwrap_or(0);
    let scale = number("cur_scale", 1.0);
    if !is_true("dynamic") {
        return json!({"static": {"scale": scale, "skipped_steps": skipped}});
    }
    json!({"dynamic": {
        "cur_scale": scale,
        "cur_iter": count("cur_iter", 0).max(0),
        "last_overflow_iter": count("last_overflow_iter", -1),
        "cur_hysteresis": count("cur_hysteresis", 1).max(0),
        "scale_window": count("scale_window", 1000).max(1),
        "min_scale": number("min_scale", 1.0),
        "hysteresis": count("delayed_shift", 1).max(0),
        "consecutive_hysteresis": is_true("consecutive_hysteresis"),
        "skipped_steps": skipped,
    }})
}

/// A universal checkpoint: a folder for each parameter, with a file for the weight and each state.
fn universal(
    zero: &Path,
    flats: Vec<Vec<FlatParam>>,
    wants_states: bool,
    limits: ReadLimits,
) -> Result<States> {
    let mut found = States::default();
    if wants_states {
        let path = zero.join("optimizer_state.pt");
        let mut common = Contents::read(&path, limits)?;
        found.loss_scaler = common.take("loss_scaler");
        // stage 3 has the state of rank 0 here, of which the steps count
        if let Some(own) = common.take("optimizer_state_dict") {
            let own = Contents::of(own, &path)?;
            found.groups = groups_of(&own, &flats, &path)?;
            add_counts(&mut found.states, &own, &flats);
        } else {
            found.groups = groups_of(&common, &flats, &path)?;
        }
    }
    for param in flats.iter().flatten() {
        if !is_folder_name(&param.name) {
            return refuse(zero, format!("{:?} is no name of a parameter's folder", param.name), OTHER);
        }
        let folder = zero.join(&param.name);
        let mut kinds = vec!["fp32".to_owned()];
        if wants_states {
            kinds.extend(kinds_in(&folder)?);
        }
        for kind in &kinds {
            let path = folder.join(format!("{kind}.pt"));
            let value = read_torch_within(&path, limits)?;
            if kind == "step" {
                let states = found.states.entry(param.name.clone()).or_default();
                states.extend(value.as_f64().map(|step| (kind.clone(), Value::Float(step))));
                continue;
            }
            let tensor = whole_of(value, param, &path)?;
            match kind.as_str() {
                "fp32" => drop(found.masters.insert(param.name.clone(), tensor.f_to_kind(Kind::Float)?)),
                _ => {
                    let states = found.states.entry(param.name.clone()).or_default();
                    states.push((kind.clone(), Value::Tensor(tensor)));
                }
            }
        }
    }
    Ok(found)
}

/// The states in a parameter's folder, each in its file; none if it had no gradient.
fn kinds_in(folder: &Path) -> Result<Vec<String>> {
    let failed = |error| Error::io("read folder", folder, error);
    let mut kinds = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
        kinds.extend(name.strip_suffix(".pt").filter(|kind| *kind != "fp32").map(str::to_owned));
    }
    kinds.sort();
    Ok(kinds)
}

/// The tensor of a parameter's file, which has its shape, or is flat.
fn whole_of(value: Value, param: &FlatParam, path: &Path) -> Result<Tensor> {
    let tensor = match value {
        Value::Tensor(tensor) => Some(tensor),
        value => named(value).and_then(|entries| {
            let param = entries.into_iter().find(|(name, _)| name == "param")?.1;
            param.as_tensor().map(Tensor::shallow_clone)
        }),
    };
    let Some(tensor) = tensor else {
        return refuse(path, "it has no tensor `param`", "convert to a universal checkpoint again");
    };
    if tensor.size() != param.shape && tensor.size() != [param.numel as i64] {
        let what = format!("its tensor has shape {:?}, the parameter {:?}", tensor.size(), param.shape);
        return refuse(path, what, "convert to a universal checkpoint again");
    }
    Ok(tensor.f_reshape(&param.shape)?)
}
