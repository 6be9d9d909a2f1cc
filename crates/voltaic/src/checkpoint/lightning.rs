//! Lightning's `.ckpt` files and plain state dicts as checkpoints, and back.
//!
//! Layout: `docs/checkpoints.md`, and `trainer/connectors/checkpoint_connector.py` of Lightning 2.6. Optimizers and schedules
//! are recognised by the keys of their states, since such files do not name them.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value as Json, json};
use tch::{Kind, Tensor};

use crate::accelerator::rng::global_seed;
use crate::checkpoint::checkpoint::{Checkpoint, CheckpointMeta, TrainingState};
use crate::checkpoint::extra_state::{fp8_states, is_extra_state};
use crate::checkpoint::loop_state::LoopState;
use crate::checkpoint::masters::MASTER;
use crate::checkpoint::pickle::Value;
use crate::checkpoint::progress::Progress;
use crate::error::{CheckpointError, Problem, Result};
use crate::precision::GradScaler;

/// The key of Lightning's version in its files.
const VERSION: &str = "pytorch-lightning_version";
/// The version of Lightning whose files are written.
const LIGHTNING_VERSION: &str = "2.6.6";

/// A converted checkpoint, and what was left out, one sentence each.
#[derive(Debug)]
pub struct Converted<T> {
    /// The checkpoint.
    pub value: T,
    /// What the other format has no place for.
    pub notes: Vec<String>,
}

fn refuse<T>(what: impl Into<String>, remedy: &'static str) -> Result<T> {
    let module = "a checkpoint of voltaic".to_owned();
    Err(CheckpointError::Mismatch { module, problem: Problem::new(what, remedy) }.into())
}

/// Makes a checkpoint of what [`read_torch`](crate::checkpoint::read_torch) gave: a Lightning checkpoint, or a state dict,
/// also within a dictionary as `state_dict`.
///
/// `param_names` are the fqn of the optimizer's parameters in its order; without them the order is that of the weights, as for
/// an optimizer made from `model.parameters()`.
///
/// # Errors
/// [`CheckpointError::Mismatch`] if a weight is not a tensor, if voltaic does not have the optimizer or schedule, or if its parameters
/// cannot be matched with the weights.
pub fn from_lightning(
    file: &Value,
    param_names: Option<&[String]>,
    weights_only: bool,
) -> Result<Converted<Checkpoint>> {
    let state_dict = file.get("state_dict").unwrap_or(file);
    let mut weights = weights_of(state_dict)?;
    let fp8 = fp8_states(state_dict)?;
    let mut notes = Vec::new();
    for wrapper in take_wrappers_off(&mut weights, file.get(VERSION).is_some()) {
        notes.push(format!(
            "`{wrapper}.` is taken off the names of weights: a wrapper of PyTorch has put it there"
        ));
    }
    let count = |key: &str| file.get(key).and_then(Value::as_i64).and_then(|n| u64::try_from(n).ok());
    let hyper_parameters = match file.get("hyper_parameters").map(Value::to_json) {
        Some(Ok(json)) => json,
        Some(Err(path)) => {
            notes.push(format!("hyper_parameters are left out, since JSON cannot hold {path}"));
            Json::Null
        }
        None => Json::Null,
    };
    let meta = CheckpointMeta {
        epoch: count("epoch").unwrap_or(0),
        global_step: count("global_step").unwrap_or(0),
        hyper_parameters,
        ..CheckpointMeta::default()
    };
    let training = match file.get("optimizer_states").and_then(Value::items) {
        Some(optimizers) if !weights_only && file.get("loops").is_some() => {
            Some(TrainingState { fp8, ..training_of(file, optimizers, &weights, param_names, &mut notes)? })
        }
        _ => {
            if !fp8.is_empty() {
                notes.push(
                    "the fp8 scales (_extra_state) are left out, since they belong to a state of training"
                        .to_owned(),
                );
            }
            None
        }
    };
    Ok(Converted { value: Checkpoint { weights, training, meta, ..Checkpoint::default() }, notes })
}

/// Takes off what `torch.compile` and, in files that are not Lightning's, PyTorch's DDP put before names. Returns what was there.
fn take_wrappers_off(weights: &mut [(String, Tensor)], is_lightning: bool) -> Vec<&'static str> {
    const COMPILE: &str = "_orig_mod";
    const DDP: &str = "module";
    let mut found = Vec::new();
    for (name, _) in &mut *weights {
        if name.split('.').any(|part| part == COMPILE) {
            *name = name.split('.').filter(|part| *part != COMPILE).collect::<Vec<_>>().join(".");
            found = vec![COMPILE];
        }
    }
    let of_ddp = |(name, _): &(String, Tensor)| name.split('.').next() == Some(DDP);
    if !is_lightning && !weights.is_empty() && weights.iter().all(of_ddp) {
        weights.iter_mut().for_each(|(name, _)| drop(name.drain(..=DDP.len())));
        found.push(DDP);
    }
    found
}

fn weights_of(state_dict: &Value) -> Result<Vec<(String, Tensor)>> {
    let Some(entries) = state_dict.entries() else {
        return refuse("the file holds no dictionary of weights", "save model.state_dict()");
    };
    let mut weights = Vec::with_capacity(entries.len());
    for (key, value) in entries {
        match (key, value) {
            (Value::Text(name), value) if is_extra_state(name, value) => {}
            (Value::Text(name), Value::Tensor(tensor)) => {
                weights.push((name.clone(), tensor.shallow_clone()))
            }
            (key, _) => {
                return refuse(
                    format!("the weight {key:?} is not a tensor"),
                    "save model.state_dict() by itself",
                );
            }
        }
    }
    Ok(weights)
}

fn training_of(
    file: &Value,
    optimizers: &[Value],
    weights: &[(String, Tensor)],
    param_names: Option<&[String]>,
    notes: &mut Vec<String>,
) -> Result<TrainingState> {
    let mut tensors = Vec::new();
    let mut named_groups = Vec::new();
    for optimizer in optimizers {
        let (name, groups, state) = optimizer_of(optimizer, weights, param_names)?;
        tensors.push(state);
        named_groups.push((name.to_owned(), groups));
    }
    let schedulers = file.get("lr_schedulers").and_then(Value::items).unwrap_or_default();
    let schedulers = schedulers.iter().map(scheduler_of).collect::<Result<Vec<_>>>()?;
    for (key, _) in file.get("callbacks").and_then(Value::entries).unwrap_or_default() {
        notes.push(format!("the state of callback {} is left out", key.as_str().unwrap_or("?")));
    }
    let progress = progress_of(file);
    if progress.batch_idx > 0 && !progress.epoch_ended {
        notes.push("the epoch continues at its batch, but in voltaic's order of samples".to_owned());
    }
    let state = LoopState {
        progress,
        metrics: json!({"train": [], "finished": []}), // nothing logged
        seed: global_seed(),
        num_training_batches: 0, // not known
        batch_size: None,
        world_size: None,
        optimizers: named_groups,
        schedulers,
        callbacks: Vec::new(),
        grad_scaler: scaler_of(file)?,
        loss_scaler: None,
        gradients: None,
        window: None,
        rows: Vec::new(),
        data: None,
        module: Json::Null,
        module_on_device: Vec::new(),
        pending_stop: None,
        slurm_job: None,
    };
    let json = serde_json::to_value(&state)
        .or_else(|error| refuse(error.to_string(), "convert the weights only"))?;
    Ok(TrainingState { optimizers: tensors, json, ..TrainingState::default() })
}

/// Lightning's precision plugin, which keeps the gradient scaler of `16-mixed`, and what it calls the fields.
const SCALER: &str = "MixedPrecision";
const SCALER_FIELDS: [(&str, &str); 5] = [
    ("scale", "scale"),
    ("growth_factor", "growth_factor"),
    ("backoff_factor", "backoff_factor"),
    ("growth_interval", "growth_interval"),
    ("growth_tracker", "_growth_tracker"),
];

fn scaler_of(file: &Value) -> Result<Option<GradScaler>> {
    let Some(saved) = file.get(SCALER) else { return Ok(None) };
    let fields = SCALER_FIELDS
        .iter()
        .filter_map(|&(own, theirs)| Some((own.to_owned(), saved.get(theirs)?.to_json().ok()?)));
    serde_json::from_value(Json::Object(fields.collect())).map(Some).or_else(|error| {
        refuse(format!("{SCALER} is not a gradient scaler: {error}"), "convert with --weights_only")
    })
}

fn scaler(saved: &GradScaler) -> Value {
    let json = serde_json::to_value(saved).unwrap_or_default();
    Value::dict(SCALER_FIELDS.map(|(own, theirs)| (theirs, Value::from_json(&json[own]))))
}

/// Follows a path of keys.
fn at<'v>(value: &'v Value, path: &[&str]) -> Option<&'v Value> {
    path.iter().try_fold(value, |value, key| value.get(key))
}

fn progress_of(file: &Value) -> Progress {
    let count = |path: &[&str]| {
        at(file, path).and_then(Value::as_i64).and_then(|n| u64::try_from(n).ok()).unwrap_or(0)
    };
    let current_epoch = count(&["epoch"]);
    let fit = ["loops", "fit_loop"];
    let in_fit = |path: &[&str]| count(&[&fit[..], path].concat());
    let epochs = in_fit(&["epoch_progress", "current", "processed"]);
    Progress {
        validation_is_open: false,
        schedules_are_open: false,
        validation_batches: Vec::new(),
        current_epoch,
        global_step: count(&["global_step"]),
        batch_idx: in_fit(&["epoch_loop.batch_progress", "current", "processed"]),
        total_batches: in_fit(&["epoch_loop.batch_progress", "total", "processed"]),
        epoch_ended: epochs > current_epoch,
        batches_that_stepped: in_fit(&["epoch_loop.state_dict", "_batches_that_stepped"]),
    }
}

/// Names of the parameters of an optimizer, in its order.
fn order_of(groups: &[Value], weights: &[(String, Tensor)], given: Option<&[String]>) -> Result<Vec<String>> {
    const REMEDY: &str =
        "give their names in the optimizer's order with --param_names FILE, or convert with --weights_only";
    let count: usize = groups.iter().filter_map(|group| Some(group.get("params")?.items()?.len())).sum();
    let own: Vec<String> = groups
        .iter()
        .filter_map(|group| group.get("param_names")?.items())
        .flatten()
        .filter_map(|name| name.as_str().map(str::to_owned))
        .collect();
    let names = if let Some(given) = given {
        given.to_vec()
    } else if own.len() == count {
        own
    } else if groups.len() > 1 {
        return refuse(format!("the optimizer has {} groups of unnamed parameters", groups.len()), REMEDY);
    } else {
        let mut seen = HashSet::new();
        let mut is_parameter = |name: &str, tensor: &Tensor| {
            let last = name.rsplit('.').next().unwrap_or(name);
            let is_buffer = matches!(last, "running_mean" | "running_var" | "num_batches_tracked");
            let is_tied = tensor.numel() > 0 && !seen.insert(tensor.data_ptr());
            !is_buffer && !is_tied && tensor.is_floating_point()
        };
        weights
            .iter()
            .filter(|(name, tensor)| is_parameter(name, tensor))
            .map(|(name, _)| name.clone())
            .collect()
    };
    if names.len() == count {
        return Ok(names);
    }
    refuse(format!("the optimizer has {count} parameters, {} names are known", names.len()), REMEDY)
}

type Named = Vec<(String, Tensor)>;

/// An optimizer: what is read of its groups, and states that voltaic's does not keep.
struct OptimizerClass {
    name: &'static str,
    options: &'static [&'static str],
    unused: &'static [&'static str],
}

const ADAM: &[&str] = &["betas", "eps", "amsgrad", "bias_correction"];

const OPTIMIZERS: [OptimizerClass; 7] = [
    OptimizerClass { name: "SGD", options: &["momentum", "dampening", "nesterov"], unused: &[] },
    OptimizerClass { name: "Adam", options: ADAM, unused: &[] },
    OptimizerClass { name: "AdamW", options: ADAM, unused: &[] },
    OptimizerClass { name: "RMSprop", options: &["alpha", "eps", "momentum", "centered"], unused: &["step"] },
    OptimizerClass { name: "Adagrad", options: &["lr_decay", "eps"], unused: &[] },
    OptimizerClass { name: "Adadelta", options: &["rho", "eps"], unused: &["step"] },
    OptimizerClass { name: "Lion", options: &["betas"], unused: &["step"] },
];

impl OptimizerClass {
    /// The class by its name, or else by the keys of a group.
    fn of(group: &Value, name: Option<&str>) -> Option<&'static Self> {
        let has = |keys: &[&str]| keys.iter().all(|key| group.get(key).is_some());
        let is_decoupled = match group.get("decoupled_weight_decay") {
            Some(flag) => matches!(flag, Value::Bool(true)),
            None => has(&["bias_correction"]), // DeepSpeed's Adam, unless its settings say otherwise
        };
        let name = match name {
            Some(name) => name,
            // PyTorch's and DeepSpeed's Muon, DeepSpeed's Lamb
            None if ["ns_steps", "use_muon", "max_coeff"].iter().any(|key| has(&[key])) => return None,
            None if has(&["momentum", "nesterov"]) => "SGD",
            None if has(&["betas", "eps"]) && (has(&["amsgrad"]) || has(&["bias_correction"])) => {
                if is_decoupled {
                    "AdamW"
                } else {
                    "Adam"
                }
            }
            None if has(&["alpha", "centered"]) => "RMSprop",
            None if has(&["lr_decay", "eps"]) => "Adagrad",
            None if has(&["rho", "eps"]) => "Adadelta",
            None if has(&["betas"]) && !has(&["eps"]) => "Lion",
            None => return None,
        };
        OPTIMIZERS.iter().find(|class| class.name == name)
    }
}

/// Name, groups and tensors of an optimizer.
fn optimizer_of(
    optimizer: &Value,
    weights: &[(String, Tensor)],
    param_names: Option<&[String]>,
) -> Result<(&'static str, Json, Named)> {
    const REMEDY: &str = "convert with --weights_only";
    let groups = optimizer.get("param_groups").and_then(Value::items).unwrap_or_default();
    let Some(first) = groups.first() else { return refuse("an optimizer has no param_groups", REMEDY) };
    let class = optimizer.get(CLASS).and_then(Value::as_str);
    let Some(class) = OptimizerClass::of(first, class) else {
        let keys: Vec<&str> =
            first.entries().unwrap_or_default().iter().filter_map(|(k, _)| k.as_str()).collect();
        let known: Vec<&str> = OPTIMIZERS.iter().map(|class| class.name).collect();
        let what = format!("an optimizer with {} is none of {}", keys.join(", "), known.join(", "));
        return refuse(what, REMEDY);
    };
    let name = class.name;
    let order = order_of(groups, weights, param_names)?;
    let fqn = |index: &Value| index.as_i64().and_then(|i| order.get(usize::try_from(i).ok()?)).cloned();
    let mut saved = Vec::new();
    for group in groups {
        let params = group.get("params").and_then(Value::items).unwrap_or_default();
        let Some(params) = params.iter().map(fqn).collect::<Option<Vec<_>>>() else {
            return refuse("param_groups name parameters that are not there", REMEDY);
        };
        let mut json = Map::from_iter([("params".to_owned(), json!(params))]);
        for key in ["lr", "initial_lr", "weight_decay", "maximize"].iter().chain(class.options) {
            let value = match group.get(key) {
                Some(Value::Bool(flag)) => json!(flag),
                Some(value @ (Value::Tuple(_) | Value::List(_))) => value.to_json().unwrap_or_default(),
                Some(value) => json!(value.as_f64()),
                // optimizers of DeepSpeed do not have them
                None if ["maximize", "amsgrad"].contains(key) => json!(false),
                None if *key == "bias_correction" => continue,
                None => Json::Null,
            };
            json.insert((*key).to_owned(), value);
        }
        saved.push(Json::Object(json));
    }
    let shapes: HashMap<&str, Vec<i64>> =
        weights.iter().map(|(name, tensor)| (name.as_str(), tensor.size())).collect();
    let mut tensors = Vec::new();
    for (index, state) in optimizer.get("state").and_then(Value::entries).unwrap_or_default() {
        let Some(fqn) = fqn(index) else {
            return refuse(
                format!("the optimizer has state of parameter {index:?}, which it has not"),
                REMEDY,
            );
        };
        let shape = shapes.get(fqn.as_str());
        for (kind, value) in state.entries().unwrap_or_default() {
            let kind = kind.as_str().unwrap_or("?");
            if class.unused.contains(&kind) {
                continue;
            }
            let tensor = match value {
                Value::Tensor(tensor) => tensor.shallow_clone(),
                Value::Int(_) | Value::Float(_) => Tensor::from(value.as_f64().unwrap_or(0.0) as f32),
                _ => continue, // a momentum that has not begun
            };
            if kind != "step" && shape.is_some_and(|shape| *shape != tensor.size()) {
                let what =
                    format!("{kind} of parameter {index:?} has shape {:?}, {fqn} has another", tensor.size());
                return refuse(what, "give the names in the optimizer's order with --param_names FILE");
            }
            tensors.push((format!("{kind}.{fqn}"), tensor));
        }
    }
    Ok((name, Json::Array(saved), tensors))
}

/// The class of a schedule, by keys that no other has.
const SCHEDULES: [(&str, &[&str]); 11] = [
    ("StepLR", &["step_size", "gamma"]),
    ("MultiStepLR", &["milestones", "gamma"]),
    ("CosineAnnealingWarmRestarts", &["T_0", "T_mult"]),
    ("CosineAnnealingLR", &["T_max", "eta_min"]),
    ("ReduceLROnPlateau", &["patience", "num_bad_epochs"]),
    ("LinearLR", &["start_factor", "end_factor"]),
    ("ConstantLR", &["factor", "total_iters"]),
    ("PolynomialLR", &["power", "total_iters"]),
    ("OneCycleLR", &["total_steps"]),
    ("LambdaLR", &["lr_lambdas"]),
    ("ExponentialLR", &["gamma"]),
];

/// Where voltaic puts the class of a schedule into Lightning's files.
pub(super) const CLASS: &str = "_class_name";

fn scheduler_of(state: &Value) -> Result<Json> {
    let remedy = "convert with --weights_only";
    let field = |key: &str| state.get(key).and_then(|value| value.to_json().ok()).unwrap_or_default();
    if let Some(parts) = state.get("_schedulers").and_then(Value::items) {
        let parts = parts.iter().map(scheduler_of).collect::<Result<Vec<_>>>()?;
        return Ok(json!({
            "name": "SequentialLR", "last_epoch": field("last_epoch"), "last_lr": field("_last_lr"), "schedulers": parts,
        }));
    }
    let by_keys = || SCHEDULES.iter().find(|(_, keys)| keys.iter().all(|key| state.get(key).is_some()));
    let Some(name) = state.get(CLASS).and_then(Value::as_str).or_else(|| Some(by_keys()?.0)) else {
        let keys: Vec<&str> =
            state.entries().unwrap_or_default().iter().filter_map(|(k, _)| k.as_str()).collect();
        return refuse(format!("a schedule with {} is not known", keys.join(", ")), remedy);
    };
    let mut json = json!({"name": name, "last_epoch": field("last_epoch"), "last_lr": field("_last_lr")});
    let more: &[&str] = match name {
        "ReduceLROnPlateau" => &["best", "num_bad_epochs", "cooldown_counter"],
        "CosineAnnealingWarmRestarts" => &["T_cur", "T_i", "base_lrs"],
        _ => &["base_lrs"],
    };
    for key in more {
        let value = field(key);
        json[*key] = if *key == "best" && value.is_string() { Json::Null } else { value };
    }
    Ok(json)
}

/// A checkpoint as a file of Lightning 2.6, for [`write_torch`](crate::checkpoint::write_torch).
///
/// # Errors
/// If its training state is not understood.
pub fn to_lightning(checkpoint: &Checkpoint) -> Result<Converted<Value>> {
    let mut notes = Vec::new();
    let int = |n: u64| Value::Int(i64::try_from(n).unwrap_or(i64::MAX));
    let mut file = vec![
        ("epoch", int(checkpoint.meta.epoch)),
        ("global_step", int(checkpoint.meta.global_step)),
        (VERSION, Value::Text(LIGHTNING_VERSION.to_owned())),
    ];
    let mut weights = checkpoint.weights.iter().collect::<Vec<_>>();
    let unused = Progress {
        current_epoch: checkpoint.meta.epoch,
        global_step: checkpoint.meta.global_step,
        ..Progress::default()
    };
    match &checkpoint.training {
        None => file.push(("loops", loops(&unused, 0, 0))),
        Some(training) => {
            let state: LoopState = serde_json::from_value(training.json.clone()).or_else(|error| {
                refuse(format!("its training state is not understood: {error}"), "use another checkpoint")
            })?;
            // readers match the optimizer's parameters with the weights by their order
            let names = state.optimizers.iter().flat_map(|(_, groups)| names_in(groups));
            let mut order: HashMap<&str, usize> = HashMap::new();
            for (at, name) in names.enumerate() {
                order.entry(name).or_insert(at);
            }
            weights.sort_by_key(|(name, _)| order.get(name.as_str()).copied().unwrap_or(usize::MAX));
            let steps = state.schedulers.iter().filter_map(|s| s["last_epoch"].as_u64()).sum();
            file.push(("loops", loops(&state.progress, state.num_training_batches, steps)));
            file.push(("callbacks", Value::Dict(Vec::new())));
            let optimizers = state.optimizers.iter().zip(&training.optimizers);
            let optimizers =
                optimizers.map(|((name, groups), tensors)| optimizer(name, groups, tensors, &mut notes));
            file.push(("optimizer_states", Value::List(optimizers.collect())));
            file.push(("lr_schedulers", Value::List(state.schedulers.iter().map(scheduler).collect())));
            if let Some(saved) = &state.grad_scaler {
                file.push((SCALER, scaler(saved)));
            }
            if !training.grads.is_empty() {
                notes.push("gradients of an open accumulation window are left out".to_owned());
            }
            if !training.fp8.is_empty() {
                notes.push("fp8 scales are left out".to_owned());
            }
            if !training.module.is_empty() {
                notes.push("tensors of the module's on_save_checkpoint are left out".to_owned());
            }
            if !state.callbacks.is_empty() {
                notes.push("states of callbacks are left out".to_owned());
            }
            notes.push(
                "random states and the position within shuffled data are left out: Lightning keeps none"
                    .to_owned(),
            );
        }
    }
    let weights = weights.into_iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
    file.push(("state_dict", state_dict(&weights.collect::<Vec<_>>())));
    if !checkpoint.meta.hyper_parameters.is_null() {
        file.push(("hparams_name", Value::Text("kwargs".to_owned())));
        file.push(("hyper_parameters", Value::from_json(&checkpoint.meta.hyper_parameters)));
    }
    Ok(Converted { value: Value::dict(file), notes })
}

/// Names of the parameters of all groups, in their order.
fn names_in(groups: &Json) -> impl Iterator<Item = &str> {
    let params = groups.as_array().into_iter().flatten().filter_map(|group| group["params"].as_array());
    params.flatten().filter_map(Json::as_str)
}

/// The weights as a state dict.
pub fn state_dict(weights: &[(String, Tensor)]) -> Value {
    Value::dict(weights.iter().map(|(name, tensor)| (name.clone(), Value::Tensor(tensor.shallow_clone()))))
}

/// `{key: n, ...}`.
fn counts<const N: usize>(entries: [(&str, u64); N]) -> Value {
    Value::dict(entries.map(|(key, n)| (key, Value::Int(i64::try_from(n).unwrap_or(i64::MAX)))))
}

fn batch_progress(total: u64, current: u64, is_last: bool) -> Value {
    let all = |n| counts([("ready", n), ("completed", n), ("started", n), ("processed", n)]);
    Value::dict([("total", all(total)), ("current", all(current)), ("is_last_batch", Value::Bool(is_last))])
}

fn loops(progress: &Progress, num_training_batches: usize, scheduler_steps: u64) -> Value {
    let empty = || Value::Dict(Vec::new());
    let both = |value: &dyn Fn() -> Value| Value::dict([("total", value()), ("current", value())]);
    let (epoch, steps) = (progress.current_epoch, progress.global_step);
    let is_last = progress.epoch_ended || progress.batch_idx as usize >= num_training_batches.max(1);
    let is_begun = progress.total_batches > 0;
    let begun = epoch + u64::from(is_begun);
    let processed = epoch + u64::from(progress.epoch_ended);
    let epochs =
        || counts([("ready", begun), ("completed", epoch), ("started", begun), ("processed", processed)]);
    let step = || counts([("ready", steps), ("completed", steps)]);
    let zero_grad = || counts([("ready", steps), ("completed", steps), ("started", steps)]);
    let scheduler = || counts([("ready", scheduler_steps), ("completed", scheduler_steps)]);
    let none = || counts([("ready", 0), ("completed", 0)]);
    let optimizer = Value::dict([("step", both(&step)), ("zero_grad", both(&zero_grad))]);
    let fit = Value::dict([
        ("state_dict", empty()),
        ("epoch_loop.state_dict", counts([("_batches_that_stepped", progress.batches_that_stepped)])),
        ("epoch_loop.batch_progress", batch_progress(progress.total_batches, progress.batch_idx, is_last)),
        ("epoch_loop.scheduler_progress", both(&scheduler)),
        ("epoch_loop.automatic_optimization.state_dict", empty()),
        ("epoch_loop.automatic_optimization.optim_progress", Value::dict([("optimizer", optimizer)])),
        ("epoch_loop.manual_optimization.state_dict", empty()),
        ("epoch_loop.manual_optimization.optim_step_progress", both(&none)),
        ("epoch_loop.val_loop.state_dict", empty()),
        ("epoch_loop.val_loop.batch_progress", batch_progress(0, 0, false)),
        ("epoch_progress", both(&epochs)),
    ]);
    let zero = || counts([("ready", 0), ("completed", 0), ("started", 0), ("processed", 0)]);
    let predict = Value::dict([("state_dict", empty()), ("batch_progress", both(&zero))]);
    let evaluation =
        || Value::dict([("state_dict", empty()), ("batch_progress", batch_progress(0, 0, false))]);
    Value::dict([
        ("fit_loop", fit),
        ("validate_loop", evaluation()),
        ("test_loop", evaluation()),
        ("predict_loop", predict),
    ])
}

pub(super) fn optimizer(name: &str, groups: &Json, tensors: &Named, notes: &mut Vec<String>) -> Value {
    let mut order: Vec<String> = Vec::new();
    let mut saved = Vec::new();
    for group in groups.as_array().into_iter().flatten() {
        let mut entries: Vec<(String, Value)> = Vec::new();
        for (key, value) in group.as_object().into_iter().flatten() {
            match (key.as_str(), value) {
                ("params", _) | ("initial_lr", Json::Null) => {}
                ("betas", Json::Array(betas)) => {
                    entries.push((key.clone(), Value::Tuple(betas.iter().map(Value::from_json).collect())));
                }
                _ => entries.push((key.clone(), Value::from_json(value))),
            }
        }
        let mut add = |key: &str, value| entries.push((key.to_owned(), value));
        add("foreach", Value::None);
        add("differentiable", Value::Bool(false));
        add("fused", Value::None);
        if name != "SGD" {
            add("capturable", Value::Bool(false));
            add("decoupled_weight_decay", Value::Bool(name == "AdamW"));
        }
        let first = order.len();
        order.extend(
            group["params"].as_array().into_iter().flatten().filter_map(|n| Some(n.as_str()?.to_owned())),
        );
        add("params", Value::List((first..order.len()).map(|i| Value::Int(i as i64)).collect()));
        saved.push(Value::dict(entries));
    }
    let mut by_fqn: HashMap<&str, Vec<(&str, &Tensor)>> = HashMap::new();
    for (name, tensor) in tensors {
        let Some((kind, fqn)) = name.split_once('.') else { continue };
        by_fqn.entry(fqn).or_default().push((kind, tensor));
    }
    let mut state: Vec<(Value, Value)> = Vec::new();
    for (index, fqn) in order.iter().enumerate() {
        let of_param = by_fqn.get(fqn.as_str()).into_iter().flatten().filter_map(|&(kind, tensor)| {
            if kind == MASTER {
                notes.push(format!("the float32 copy of {fqn} is left out"));
                return None;
            }
            let tensor = if kind == "step" {
                tensor
                    .f_to_kind(Kind::Float)
                    .and_then(|t| t.f_reshape([] as [i64; 0]))
                    .unwrap_or_else(|_| tensor.shallow_clone())
            } else {
                tensor.shallow_clone()
            };
            Some((kind.to_owned(), Value::Tensor(tensor)))
        });
        let entries: Vec<(String, Value)> = of_param.collect();
        if !entries.is_empty() {
            state.push((Value::Int(index as i64), Value::dict(entries)));
        }
    }
    Value::dict([("state", Value::Dict(state)), ("param_groups", Value::List(saved))])
}

/// State of a schedule under PyTorch's names; what the class is made with stays the user's.
pub(super) fn scheduler(saved: &Json) -> Value {
    let mut entries: Vec<(String, Value)> = Vec::new();
    for (key, value) in saved.as_object().into_iter().flatten() {
        match key.as_str() {
            // PyTorch keeps it as one more attribute
            "name" => entries.push((CLASS.to_owned(), Value::from_json(value))),
            "last_lr" => entries.push(("_last_lr".to_owned(), Value::from_json(value))),
            "schedulers" => {
                let parts = value.as_array().into_iter().flatten().map(scheduler).collect();
                entries.push(("_schedulers".to_owned(), Value::List(parts)));
            }
            "best" if value.is_null() => {}
            _ => entries.push((key.clone(), Value::from_json(value))),
        }
    }
    let steps = saved["last_epoch"].as_i64().unwrap_or(0) + 1;
    if saved["name"] != "ReduceLROnPlateau" {
        entries.push(("_step_count".to_owned(), Value::Int(steps)));
    }
    if saved["name"] == "LambdaLR" {
        let groups = saved["base_lrs"].as_array().map_or(0, Vec::len);
        entries.push(("lr_lambdas".to_owned(), Value::List((0..groups).map(|_| Value::None).collect())));
    }
    Value::dict(entries)
}
