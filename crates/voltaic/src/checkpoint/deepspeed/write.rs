//! A checkpoint of voltaic in DeepSpeed's folders.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::mem::Discriminant;
use std::path::Path;

use serde_json::{Value as Json, json};
use tch::{Device, Kind, Tensor};

use super::folder::{LATEST, LATEST_UNIVERSAL, MODEL_STATES, OPTIM_STATES, UNIVERSAL, is_folder_name};
use super::layout::{FlatParam, Fragment, chunk_fragments, flat_fragments, flat_numel, partition_numel};
use crate::checkpoint::atomic::{temporary_folder, write_atomically};
use crate::checkpoint::checkpoint::{Checkpoint, TrainingState};
use crate::checkpoint::lightning::{optimizer, scheduler, to_lightning};
use crate::checkpoint::loop_state::LoopState;
use crate::checkpoint::masters::{MASTER, may_have_master};
use crate::checkpoint::pickle::Value;
use crate::checkpoint::torch_file::write_torch;
use crate::error::{CheckpointError, ConfigError, Error, Problem, Result};
use crate::precision::LossScaler;

/// The version of DeepSpeed whose files are written.
const DEEPSPEED_VERSION: &str = "0.19.8";
/// Of what `ds_to_universal.py` reads.
const UNIVERSAL_VERSION: f64 = 0.4;
/// Schedules of DeepSpeed, which keep the batch alone.
const SCHEDULES: [&str; 5] = ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"];
const SCALERS: &str = "deepspeed.runtime.fp16.loss_scaler";
const WEIGHTS: &str = "write the weights alone: --to=state_dict or --to=safetensors";

/// How DeepSpeed's folders are written.
#[derive(Debug, Clone)]
pub struct DeepSpeedWrite {
    /// The stage of ZeRO: 1, 2 or 3.
    pub stage: u8,
    /// The number of ranks that the states are divided among, at least 1.
    pub partitions: usize,
    /// The name of the folder; `global_step<N>` unless given, or `global_step<N>_universal`.
    pub tag: Option<String>,
    /// A universal checkpoint: a folder for each parameter, in stage 1 and 2, for any number of ranks. It is what `ds_to_universal.py` makes of
    /// the folder of a stage.
    pub is_universal: bool,
}

/// Writes a checkpoint as DeepSpeed 0.19 does, to be resumed there by as many ranks as there are partitions, and read by its
/// `zero_to_fp32.py` and `ds_to_universal.py`. The folder also has what Lightning keeps. Returns what is left out, one sentence each.
///
/// A weight that is neither trained nor equal to one that is, is written as a frozen parameter if its name ends with `weight` or `bias`,
/// and as a buffer otherwise: a checkpoint does not tell them apart.
///
/// # Errors
/// If the checkpoint has no training state, or not one optimizer; if the folder of the tag exists or cannot be written.
///
/// Source: `deepspeed/runtime/engine.py`, `runtime/zero/stage_1_and_2.py`, `runtime/zero/stage3.py`, `checkpoint/ds_to_universal.py`.
pub fn write_deepspeed(checkpoint: &Checkpoint, path: &Path, how: &DeepSpeedWrite) -> Result<Vec<String>> {
    let DeepSpeedWrite { stage, is_universal, .. } = *how;
    let ranks = if is_universal { 1 } else { how.partitions };
    if is_universal && stage == 3 {
        let what = "3, whose ranks have their weights beside the folders of the parameters";
        return Err(ConfigError::new("stage", what, "write a universal checkpoint of stage 1 or 2").into());
    }
    if !(1..=3).contains(&stage) {
        let what = format!("{stage} is no stage whose states are divided");
        return Err(ConfigError::new("stage", what, "use 1, 2 or 3").into());
    }
    if !(1..=1 << 16).contains(&ranks) {
        let what = format!("{ranks} partitions cannot be written");
        return Err(
            ConfigError::new("partitions", what, "use the number of ranks that resume, at least 1").into()
        );
    }
    let (suffix, latest) = if is_universal { ("_universal", LATEST_UNIVERSAL) } else { ("", LATEST) };
    let of_step = || format!("global_step{}{suffix}", checkpoint.meta.global_step);
    let tag = how.tag.clone().unwrap_or_else(of_step);
    if tag.is_empty() || tag.contains(['/', '\\', '\n']) || [".", ".."].contains(&tag.as_str()) {
        let what = format!("{tag:?} is not the name of a folder");
        return Err(ConfigError::new("tag", what, "use a name such as global_step100").into());
    }
    let folder = path.join(&tag);
    if folder.symlink_metadata().is_ok() {
        let what = format!("{} is there already", folder.display());
        return Err(ConfigError::new("tag", what, "give another --tag or output, or move it away").into());
    }
    let written = Written::of(checkpoint, stage, ranks)?;
    let (temporary, _lock, _) = temporary_folder(&folder)?;
    let done = if is_universal { written.write_universal(&temporary) } else { written.write(&temporary) };
    let done =
        done.and_then(|()| fs::rename(&temporary, &folder).map_err(|e| Error::io("rename to", &folder, e)));
    if let Err(error) = done {
        let _ = fs::remove_dir_all(&temporary);
        return Err(error);
    }
    write_atomically(&path.join(latest), |file| std::io::Write::write_all(file, tag.as_bytes()))?;
    Ok(written.notes)
}

fn refuse<T>(what: impl Into<String>, remedy: &'static str) -> Result<T> {
    let module = "a checkpoint of DeepSpeed".to_owned();
    Err(CheckpointError::Mismatch { module, problem: Problem::new(what, remedy) }.into())
}

/// What is written.
struct Written<'a> {
    checkpoint: &'a Checkpoint,
    state: LoopState,
    stage: u8,
    ranks: usize,
    weights: HashMap<&'a str, &'a Tensor>,
    /// Trained parameters of each group.
    flats: Vec<Vec<FlatParam>>,
    /// By fqn and kind.
    states: HashMap<(&'a str, &'a str), &'a Tensor>,
    /// Kinds of the states of each group that are not numbers, and its step.
    kinds: Vec<(BTreeSet<&'a str>, Option<f64>)>,
    settings: Vec<Value>,
    tied: Vec<(&'a str, &'a str)>,
    frozen: Vec<FlatParam>,
    buffers: Vec<&'a str>,
    notes: Vec<String>,
}

impl<'a> Written<'a> {
    fn of(checkpoint: &'a Checkpoint, stage: u8, ranks: usize) -> Result<Self> {
        if let Some(shard) = checkpoint.shards.first() {
            let what = format!("the checkpoint has a shard of {} only", shard.name);
            return refuse(what, "read it with Checkpoint::load, which makes tensors whole");
        }
        let Some(training) = &checkpoint.training else {
            return refuse(
                "the checkpoint has weights only, DeepSpeed's partitions hold an optimizer's state",
                WEIGHTS,
            );
        };
        let state: LoopState = serde_json::from_value(training.json.clone()).or_else(|error| {
            refuse(format!("the training state is not understood: {error}"), "use another checkpoint")
        })?;
        let ([(name, groups)], [tensors]) = (&state.optimizers[..], &training.optimizers[..]) else {
            let what = format!("the checkpoint has {} optimizers, DeepSpeed has one", state.optimizers.len());
            return refuse(what, WEIGHTS);
        };
        let weights: HashMap<&str, &Tensor> =
            checkpoint.weights.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let mut notes = left_out(training, &state);
        let flats = flats_of(groups, &weights)?;
        let mut states = HashMap::new();
        for (name, tensor) in tensors {
            let Some((kind, fqn)) = name.split_once('.') else { continue };
            states.insert((fqn, kind), tensor);
        }
        let kinds = kinds_of(&flats, &states, &mut notes)?;
        let settings = settings_of(name, groups, &mut notes);
        let mut written = Self {
            checkpoint,
            stage,
            ranks,
            weights,
            flats,
            states,
            kinds,
            settings,
            tied: Vec::new(),
            frozen: Vec::new(),
            buffers: Vec::new(),
            notes,
            state,
        };
        written.sort_others()?;
        Ok(written)
    }

    /// Tells what the weights are that the optimizer does not have.
    fn sort_others(&mut self) -> Result<()> {
        let mut trained: HashMap<(Vec<i64>, Discriminant<Kind>), Vec<&'a str>> = HashMap::new();
        let names: BTreeSet<&str> = self.flats.iter().flatten().map(|param| param.name.as_str()).collect();
        for (name, tensor) in self.checkpoint.weights.iter().filter(|(name, _)| names.contains(name.as_str()))
        {
            trained.entry((tensor.size(), kind_of(tensor))).or_default().push(name);
        }
        for (name, tensor) in
            self.checkpoint.weights.iter().filter(|(name, _)| !names.contains(name.as_str()))
        {
            let alike = trained.get(&(tensor.size(), kind_of(tensor))).into_iter().flatten();
            let mut first = None;
            for other in alike {
                if tensor.numel() > 0 && self.weights[other].f_equal(tensor)? {
                    first = Some(*other);
                    break;
                }
            }
            let last = name.rsplit('.').next().unwrap_or(name);
            let is_named_so = last.ends_with("weight") || last.ends_with("bias");
            match (first, FlatParam::new(name, &tensor.size())) {
                (Some(first), _) => self.tied.push((name, first)),
                (None, Some(param)) if tensor.is_floating_point() && is_named_so => self.frozen.push(param),
                _ => self.buffers.push(name),
            }
        }
        if !self.frozen.is_empty() {
            let names: Vec<&str> = self.frozen.iter().map(|param| param.name.as_str()).collect();
            self.notes.push(format!(
                "written as frozen parameters, since no optimizer has them: {}",
                names.join(", ")
            ));
        }
        Ok(())
    }

    fn write(&self, folder: &Path) -> Result<()> {
        let is_bf16 = self.has(Kind::BFloat16);
        for rank in 0..self.ranks {
            if self.stage == 3 {
                let name = format!("zero_pp_rank_{rank}_mp_rank_00{MODEL_STATES}");
                write_torch(&self.model_states(rank)?, &folder.join(name))?;
            }
            let prefix = if is_bf16 { "bf16_" } else { "" };
            let name = format!("{prefix}zero_pp_rank_{rank}_mp_rank_00{OPTIM_STATES}");
            write_torch(&self.optim_states(rank)?, &folder.join(name))?;
        }
        if self.stage < 3 {
            write_torch(&self.model_states(0)?, &folder.join(format!("mp_rank_00{MODEL_STATES}")))?;
        }
        Ok(())
    }

    /// A folder for each parameter, with a file for the weight and each state, and one file for what they have in common.
    fn write_universal(&self, folder: &Path) -> Result<()> {
        write_torch(&self.model_states(0)?, &folder.join(format!("mp_rank_00{MODEL_STATES}")))?;
        let zero = folder.join(UNIVERSAL);
        let make = |folder: &Path| fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, e));
        make(&zero)?;
        for ((kinds, step), param) in self
            .kinds
            .iter()
            .zip(&self.flats)
            .flat_map(|(kinds, flat)| flat.iter().map(move |param| (kinds, param)))
        {
            let name = &param.name;
            if !is_folder_name(name) {
                return refuse(format!("{name:?} is no name of a parameter's folder"), WEIGHTS);
            }
            let own = zero.join(name);
            make(&own)?;
            let write = |kind: &str, value: &Value| write_torch(value, &own.join(format!("{kind}.pt")));
            let whole = |tensor: &Tensor| -> Result<Value> {
                let tensor = tensor.f_to_kind(Kind::Float)?.f_contiguous()?;
                Ok(Value::dict([("param", Value::Tensor(tensor)), ("cat_dim", Value::Int(0))]))
            };
            write("fp32", &whole(&self.master(name))?)?;
            for kind in kinds {
                write(kind, &whole(&self.state_of(param, kind)?)?)?;
            }
            step.map_or(Ok(()), |step| write("step", &Value::Tensor(Tensor::from(step as f32))))?;
        }
        // what partitions have beside their tensors
        const SHARDED: [&str; 3] =
            ["base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups"];
        let settings = self.settings.iter().map(copy_of).collect();
        let mut common = vec![(Value::Text("param_groups".to_owned()), Value::List(settings))];
        if let Value::Dict(entries) = self.optim_states(0)?
            && let Some((_, Value::Dict(own))) =
                entries.into_iter().find(|(key, _)| key.as_str() == Some("optimizer_state_dict"))
        {
            let is_common = |key: &Value| key.as_str().is_some_and(|key| !SHARDED.contains(&key));
            common.extend(own.into_iter().filter(|(key, _)| is_common(key)));
        }
        write_torch(&Value::Dict(common), &zero.join("optimizer_state.pt"))
    }

    /// A state of a parameter, with its shape; zeros if it has had no gradient.
    fn state_of(&self, param: &FlatParam, kind: &str) -> Result<Tensor> {
        match self.states.get(&(param.name.as_str(), kind)) {
            Some(tensor) => Ok(tensor.shallow_clone()),
            None => Ok(Tensor::f_zeros(&param.shape, (Kind::Float, Device::Cpu))?),
        }
    }

    fn has(&self, kind: Kind) -> bool {
        let mut trained = self.flats.iter().flatten();
        trained.any(|param| self.weights[param.name.as_str()].kind() == kind)
    }

    fn model_states(&self, rank: usize) -> Result<Value> {
        let is_placeholder = |name: &str| self.stage == 3 && !self.buffers.contains(&name);
        let mut module = Vec::new();
        for (name, tensor) in &self.checkpoint.weights {
            let tensor = match is_placeholder(name) {
                true => Tensor::f_zeros([0_i64], (tensor.kind(), Device::Cpu))?,
                false => tensor.shallow_clone(),
            };
            module.push((name.clone(), Value::Tensor(tensor)));
        }
        let shapes = |params: &[FlatParam]| {
            Value::dict(params.iter().map(|param| (param.name.clone(), Value::size(&param.shape))))
        };
        let mut fragments = Vec::new();
        for param in &self.frozen {
            let whole = self.weights[param.name.as_str()];
            let fragment = match self.stage {
                3 => {
                    let own = chunk_fragments(std::slice::from_ref(param), rank, self.ranks);
                    partition(param.chunk(self.ranks), &own, whole.kind(), &|_| Ok(whole.shallow_clone()))?
                }
                _ => whole.shallow_clone(),
            };
            fragments.push((param.name.clone(), Value::Tensor(fragment)));
        }
        let text = |text: &str| Value::Text(text.to_owned());
        let int = |int: u64| Value::Int(i64::try_from(int).unwrap_or(i64::MAX));
        let tied = self.tied.iter().map(|(alias, first)| ((*alias).to_owned(), text(first)));
        let skipped = self.state.loss_scaler.as_ref().map_or(0, LossScaler::skipped_steps);
        let mut entries = vec![
            ("module", Value::dict(module)),
            ("buffer_names", Value::List(self.buffers.iter().map(|name| text(name)).collect())),
            ("optimizer", Value::None),
            ("param_shapes", Value::List(self.flats.iter().map(|flat| shapes(flat)).collect())),
            ("frozen_param_shapes", shapes(&self.frozen)),
            ("shared_params", Value::dict(tied)),
            ("frozen_param_fragments", Value::dict(fragments)),
            ("lr_scheduler", self.lr_scheduler()),
            ("data_sampler", Value::None),
            ("random_ltd", Value::None),
            ("skipped_steps", int(skipped)),
            ("global_steps", int(self.state.progress.global_step)),
            ("dp_world_size", int(self.ranks as u64)),
            ("mp_world_size", Value::Int(1)),
            (
                "checkpoint_parallel_dimensions",
                Value::dict([("pp_degree", Value::Int(1)), ("tp_degree", Value::Int(1))]),
            ),
            ("ds_config", self.config()),
            ("ds_version", text(DEEPSPEED_VERSION)),
            (
                "universal_checkpoint_info",
                Value::dict([("universal_checkpoint_version", Value::Float(UNIVERSAL_VERSION))]),
            ),
        ];
        entries.extend(self.of_lightning()?);
        Ok(Value::dict(entries))
    }

    /// What Lightning keeps of a run, in its words.
    fn of_lightning(&self) -> Result<Vec<(&'static str, Value)>> {
        const KEYS: [&str; 8] = [
            "epoch",
            "global_step",
            "pytorch-lightning_version",
            "loops",
            "callbacks",
            "lr_schedulers",
            "hparams_name",
            "hyper_parameters",
        ];
        let training = self.checkpoint.training.as_ref().map(TrainingState::without_tensors);
        let meta = self.checkpoint.meta.clone();
        let Value::Dict(entries) =
            to_lightning(&Checkpoint { training, meta, ..Checkpoint::default() })?.value
        else {
            return Ok(Vec::new());
        };
        let known = entries.into_iter().filter_map(|(key, value)| {
            let key = KEYS.into_iter().find(|known| key.as_str() == Some(known))?;
            Some((key, value))
        });
        Ok(known.collect())
    }

    fn lr_scheduler(&self) -> Value {
        match &self.state.schedulers[..] {
            [saved] if saved["name"].as_str().is_some_and(|name| SCHEDULES.contains(&name)) => {
                let batch = saved["last_epoch"].as_i64().unwrap_or(0) - 1;
                Value::dict([("last_batch_iteration", Value::Int(batch))])
            }
            [saved] => scheduler(saved),
            _ => Value::None,
        }
    }

    fn config(&self) -> Value {
        let mut config = json!({"zero_optimization": {"stage": self.stage}});
        for (key, kind) in [("bf16", Kind::BFloat16), ("fp16", Kind::Half)] {
            if self.has(kind) {
                config[key] = json!({"enabled": true});
            }
        }
        if let [saved] = &self.state.schedulers[..] {
            config["scheduler"] = json!({"type": saved["name"]});
        }
        Value::from_json(&config)
    }

    fn optim_states(&self, rank: usize) -> Result<Value> {
        let mut weights = Vec::new();
        let mut paddings = Vec::new();
        let (mut states, mut mappings) = (Vec::new(), Vec::new());
        for (group, flat) in self.flats.iter().enumerate() {
            let (numel, fragments) = self.place(flat, rank);
            let own = fragments.last().map_or(0, |last| last.offset + last.len);
            let master = |param: &FlatParam| Ok(self.master(&param.name));
            let whole = partition(numel, &fragments, Kind::Float, &|index| master(&flat[index]))?;
            // stages 1 and 2 leave out the padding here
            let kept = if self.stage == 3 { numel } else { own };
            weights.push(Value::Tensor(whole.f_narrow(0, 0, kept as i64)?.f_contiguous()?));
            paddings.push(Value::Int((numel - own) as i64));
            let address = |fragment: &Fragment| {
                let numbers = [("numel", fragment.len), ("start", fragment.offset)];
                let numbers = numbers.map(|(key, number)| (key, Value::Int(number as i64)));
                let address = Value::built("deepspeed.utils.tensor_fragment", "fragment_address", numbers);
                (flat[fragment.param].name.clone(), address)
            };
            mappings.push(Value::dict(fragments.iter().map(address)));
            let (kinds, step) = &self.kinds[group];
            let mut entries = Vec::new();
            entries.extend(step.map(|step| ("step", Value::Tensor(Tensor::from(step as f32)))));
            for kind in kinds {
                let state = |index: usize| self.state_of(&flat[index], kind);
                entries.push((*kind, Value::Tensor(partition(numel, &fragments, Kind::Float, &state)?)));
            }
            if !entries.is_empty() {
                states.push((Value::Int(group as i64), Value::dict(entries)));
            }
        }
        let settings = self.settings.iter().map(copy_of).collect();
        let states = Value::dict([("state", Value::Dict(states)), ("param_groups", Value::List(settings))]);
        let (scaler, is_dynamic) = self.scaler();
        let ranks = Value::Int(self.ranks as i64);
        let mut own = vec![
            ("loss_scaler", scaler),
            ("dynamic_loss_scale", Value::Bool(is_dynamic)),
            ("overflow", Value::Bool(false)),
            ("zero_stage", Value::Int(self.stage.into())),
        ];
        match self.stage {
            3 => own.extend([
                ("partition_count", ranks),
                ("optimizer_state_dict", states),
                ("fp32_flat_groups", Value::List(weights)),
            ]),
            _ => own.extend([
                ("clip_grad", Value::Float(0.0)),
                ("base_optimizer_state", states),
                ("single_partition_of_fp32_groups", Value::List(weights)),
                ("group_paddings", Value::List(paddings)),
                (
                    "partition_count",
                    Value::List(self.flats.iter().map(|_| Value::Int(self.ranks as i64)).collect()),
                ),
                ("ds_version", Value::Text(DEEPSPEED_VERSION.to_owned())),
                ("param_slice_mappings", Value::List(mappings)),
            ]),
        }
        Ok(Value::dict([
            ("optimizer_state_dict", Value::dict(own)),
            ("ds_config", self.config()),
            ("ds_version", Value::Text(DEEPSPEED_VERSION.to_owned())),
        ]))
    }

    /// Elements of a rank's partition of a group, and what of the parameters is in it.
    fn place(&self, flat: &[FlatParam], rank: usize) -> (usize, Vec<Fragment>) {
        if self.stage == 3 {
            let numel = flat.iter().map(|param| param.chunk(self.ranks)).sum();
            return (numel, chunk_fragments(flat, rank, self.ranks));
        }
        let numel = partition_numel(flat_numel(flat).unwrap_or(0), self.ranks);
        (numel, flat_fragments(flat, rank * numel..(rank + 1) * numel))
    }

    /// The float32 weight of a parameter.
    fn master(&self, name: &str) -> Tensor {
        let weight = self.weights[name];
        let master = self.states.get(&(name, MASTER)).filter(|_| may_have_master(weight.kind()));
        master.copied().unwrap_or(weight).shallow_clone()
    }

    fn scaler(&self) -> (Value, bool) {
        let number = |json: &Json| Value::from_json(json);
        let saved = serde_json::to_value(&self.state.loss_scaler).unwrap_or_default();
        let dynamic = &saved["dynamic"];
        if dynamic.is_object() {
            let attributes = [
                ("cur_scale", number(&dynamic["cur_scale"])),
                ("cur_iter", number(&dynamic["cur_iter"])),
                ("last_overflow_iter", number(&dynamic["last_overflow_iter"])),
                ("scale_factor", Value::Float(2.0)),
                ("scale_window", number(&dynamic["scale_window"])),
                ("min_scale", number(&dynamic["min_scale"])),
                ("delayed_shift", number(&dynamic["hysteresis"])),
                ("cur_hysteresis", number(&dynamic["cur_hysteresis"])),
                ("consecutive_hysteresis", number(&dynamic["consecutive_hysteresis"])),
                ("raise_error_at_min_scale", Value::Bool(true)),
                ("dynamic", Value::Bool(true)),
                ("dtype", Value::named("torch", "float16")),
            ];
            return (Value::built(SCALERS, "DynamicLossScaler", attributes), true);
        }
        let scale = saved["static"]["scale"].as_f64().unwrap_or(1.0);
        let attributes = [("cur_scale", Value::Float(scale)), ("dynamic", Value::Bool(false))];
        (Value::built(SCALERS, "LossScaler", attributes), false)
    }
}

fn kind_of(tensor: &Tensor) -> Discriminant<Kind> {
    std::mem::discriminant(&tensor.kind())
}

/// Parts of a training state that DeepSpeed has no place for.
fn left_out(training: &TrainingState, state: &LoopState) -> Vec<String> {
    let mut notes = Vec::new();
    let mut note = |is_there: bool, what: &str| {
        if is_there {
            notes.push(format!("{what} left out"));
        }
    };
    note(!training.grads.is_empty(), "gradients of an open accumulation window are");
    note(!training.module.is_empty(), "tensors of the module's on_save_checkpoint are");
    note(!training.fp8.is_empty(), "scales of layers in float8 are");
    note(!training.callbacks.is_empty() || !state.callbacks.is_empty(), "states of callbacks are");
    note(!training.metrics.is_empty(), "what metrics have accumulated in an unfinished epoch is");
    note(!training.rng.is_empty(), "random states are");
    note(state.schedulers.len() > 1, "schedules are, since DeepSpeed has one at most:");
    notes
}

/// The parameters of each group.
fn flats_of(groups: &Json, weights: &HashMap<&str, &Tensor>) -> Result<Vec<Vec<FlatParam>>> {
    let param = |name: &Json| {
        let name = name.as_str().unwrap_or_default();
        let shape = weights.get(name).map(|tensor| tensor.size());
        match shape.and_then(|shape| FlatParam::new(name, &shape)) {
            Some(param) => Ok(param),
            None => {
                refuse(format!("the optimizer has {name:?}, which is no weight"), "use another checkpoint")
            }
        }
    };
    let groups = groups.as_array().into_iter().flatten();
    groups.map(|group| group["params"].as_array().into_iter().flatten().map(param).collect()).collect()
}

/// Kinds of states of each group, and the steps that it has done: the most of its parameters.
fn kinds_of<'a>(
    flats: &[Vec<FlatParam>],
    states: &HashMap<(&'a str, &'a str), &'a Tensor>,
    notes: &mut Vec<String>,
) -> Result<Vec<(BTreeSet<&'a str>, Option<f64>)>> {
    let mut by_name: HashMap<&str, BTreeMap<&'a str, &'a Tensor>> = HashMap::new();
    for (&(fqn, kind), tensor) in states {
        by_name.entry(fqn).or_default().insert(kind, tensor);
    }
    let mut found = Vec::new();
    for flat in flats {
        let (mut kinds, mut steps) = (BTreeSet::new(), Vec::new());
        for FlatParam { name, shape, .. } in flat {
            for (kind, tensor) in by_name.get(name.as_str()).into_iter().flatten() {
                match *kind {
                    MASTER => {}
                    "step" => steps.push(tensor.f_double_value(&[])?),
                    _ if tensor.size() == *shape => drop(kinds.insert(*kind)),
                    _ => {
                        let what = format!("{kind} of {name} has shape {:?}, not {shape:?}", tensor.size());
                        return refuse(what, "use another checkpoint");
                    }
                }
            }
        }
        let step = steps.iter().copied().reduce(f64::max);
        if steps.iter().any(|own| Some(*own) != step) || (!steps.is_empty() && steps.len() < flat.len()) {
            notes.push(
                "parameters of a group have done different numbers of steps: each has the most now"
                    .to_owned(),
            );
        }
        found.push((kinds, step));
    }
    Ok(found)
}

/// Settings of the groups under PyTorch's names, each with the index of its flat tensor.
fn settings_of(name: &str, groups: &Json, notes: &mut Vec<String>) -> Vec<Value> {
    let Value::Dict(entries) = optimizer(name, groups, &Vec::new(), notes) else { return Vec::new() };
    let groups = entries.into_iter().find(|(key, _)| key.as_str() == Some("param_groups"));
    let Some((_, Value::List(mut groups))) = groups else { return Vec::new() };
    for (index, group) in groups.iter_mut().enumerate() {
        let Value::Dict(entries) = group else { continue };
        entries.retain(|(key, _)| key.as_str() != Some("params"));
        entries.push((Value::Text("params".to_owned()), Value::List(vec![Value::Int(index as i64)])));
    }
    groups
}

/// A copy of settings.
fn copy_of(value: &Value) -> Value {
    match value {
        Value::Bool(flag) => Value::Bool(*flag),
        Value::Int(int) => Value::Int(*int),
        Value::Float(float) => Value::Float(*float),
        Value::Text(text) => Value::Text(text.clone()),
        Value::List(items) => Value::List(items.iter().map(copy_of).collect()),
        Value::Tuple(items) => Value::Tuple(items.iter().map(copy_of).collect()),
        Value::Dict(entries) => {
            Value::Dict(entries.iter().map(|(key, value)| (copy_of(key), copy_of(value))).collect())
        }
        _ => Value::None,
    }
}

/// A flat tensor of so many elements with these fragments, and zeros between them.
fn partition(
    numel: usize,
    fragments: &[Fragment],
    kind: Kind,
    whole: &dyn Fn(usize) -> Result<Tensor>,
) -> Result<Tensor> {
    let own = Tensor::f_zeros([numel as i64], (kind, Device::Cpu))?;
    for Fragment { param, start, offset, len } in fragments {
        let flat = whole(*param)?.f_detach()?.f_reshape([-1_i64])?;
        let part = flat.f_narrow(0, *start as i64, *len as i64)?;
        own.f_narrow(0, *offset as i64, *len as i64)?.f_copy_(&part)?;
    }
    Ok(own)
}
