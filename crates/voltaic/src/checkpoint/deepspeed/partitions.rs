//! Files of optimizer states: each rank has a part of the float32 weights and of the optimizer's tensors.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use tch::{Kind, Tensor};

use super::folder::refuse;
use super::layout::{FlatParam, Fragment, chunk_fragments, flat_fragments, flat_numel, partition_numel};
use super::model::{Contents, OTHER, count_of};
use crate::checkpoint::budget::ReadLimits;
use crate::checkpoint::pickle::Value;
use crate::error::Result;

/// A group of the optimizer.
#[derive(Debug)]
pub(super) struct Group {
    /// What is set, such as the learning rate.
    pub settings: Vec<(Value, Value)>,
    /// Its parameters.
    pub names: Vec<String>,
}

/// What the parameters have beside the weights of the module.
#[derive(Debug, Default)]
pub(super) struct States {
    pub groups: Vec<Group>,
    /// By the name of the parameter in the files: the float32 weight.
    pub masters: BTreeMap<String, Tensor>,
    /// By the name of the parameter: each state by its kind.
    pub states: BTreeMap<String, Vec<(String, Value)>>,
    pub loss_scaler: Option<Value>,
}

/// Tensors of a kind of a flat buffer that are being put together, one for each parameter, and the elements that are there.
type Gathered = BTreeMap<(usize, String), Vec<(Tensor, usize)>>;

/// The kind of the float32 weights.
const FP32: &str = "fp32";

/// What all ranks must agree on.
struct Shared {
    stage: i64,
    /// Elements of a partition of each buffer, in stages 1 and 2.
    partitions: Vec<usize>,
}

/// Reads the files of all ranks, one after the other.
pub(super) fn read(
    paths: &[PathBuf],
    mut flats: Vec<Vec<FlatParam>>,
    is_stage_3: bool,
    wants_states: bool,
    limits: ReadLimits,
) -> Result<States> {
    let mut found = States::default();
    let mut gathered = Gathered::new();
    let mut shared: Option<Shared> = None;
    for (rank, path) in paths.iter().enumerate() {
        let mut file = Contents::read(path, limits)?;
        let Some(own) = file.take("optimizer_state_dict") else {
            return file.refuse("it has no `optimizer_state_dict`: it is no file of ZeRO's optimizer states");
        };
        let mut own = Contents::of(own, path)?;
        let stage = stage_of(&own, is_stage_3)?;
        check_partition_count(&own, paths.len())?;
        if rank == 0 {
            add_paddings(&mut flats, &own)?;
        }
        let (weights, paddings) = weights_of(&mut own, stage, &flats)?;
        let partitions = match stage {
            3 => vec![0; flats.len()],
            _ => partitions_of(&own, &weights, &paddings, &flats, paths.len())?,
        };
        match &shared {
            None => shared = Some(Shared { stage, partitions }),
            Some(first) if (first.stage, &first.partitions) == (stage, &partitions) => {}
            Some(first) => {
                let what = format!(
                    "it is of stage {stage} with partitions of {partitions:?} elements, that of rank 0 of stage {} with {:?}",
                    first.stage, first.partitions
                );
                return refuse(path, what, "use files that were saved together");
            }
        }
        let Some(Shared { partitions, .. }) = &shared else { continue };
        let fragments: Vec<Vec<Fragment>> = flats
            .iter()
            .zip(partitions)
            .map(|(flat, partition)| match stage {
                3 => chunk_fragments(flat, rank, paths.len()),
                _ => flat_fragments(flat, rank * partition..(rank + 1) * partition),
            })
            .collect();
        for (buffer, tensor) in weights.iter().enumerate() {
            let at = (buffer, FP32);
            add(&mut gathered, at, &flats[buffer], &fragments[buffer], tensor, path)?;
        }
        if wants_states {
            let own_states = take_states(&mut own, stage)?;
            if rank == 0 {
                found.groups = groups_of(&own_states, &flats, path)?;
                found.loss_scaler = own.take("loss_scaler");
                add_counts(&mut found.states, &own_states, &flats);
            }
            add_states(&mut gathered, &own_states, &flats, &fragments)?;
        }
    }
    finish(gathered, &flats, &mut found, &paths[0])?;
    Ok(found)
}

/// The stage that a file is of; `BF16_Optimizer`, which is one of stage 1, does not say it.
fn stage_of(own: &Contents, is_stage_3: bool) -> Result<i64> {
    let stage = own.get("zero_stage").map_or(Some(1), Value::as_i64);
    match stage {
        Some(stage @ 1..=3) if (stage == 3) == is_stage_3 => Ok(stage),
        Some(stage @ 1..=3) => {
            let what = format!("it is of stage {stage}, the model states are not");
            refuse(&own.path, what, "use files that were saved together")
        }
        _ => own.refuse(format!("its zero_stage is {:?}, not 1, 2 or 3", own.get("zero_stage"))),
    }
}

fn check_partition_count(own: &Contents, files: usize) -> Result<()> {
    let counts: Option<Vec<usize>> = match own.get("partition_count") {
        Some(Value::List(counts)) => counts.iter().map(count_of).collect(),
        Some(count) => count_of(count).map(|count| vec![count]),
        None => None,
    };
    let Some(counts) = counts.filter(|counts| !counts.is_empty()) else {
        return own.refuse("it has no partition_count");
    };
    match counts.iter().find(|count| **count != files) {
        None => Ok(()),
        Some(count) => refuse(
            &own.path,
            format!("the state was divided among {count} ranks, {files} files *_optim_states.pt are there"),
            "copy the files of all ranks, and remove those of an older run",
        ),
    }
}

/// Elements between parameters of stages 1 and 2, with `parameter_alignment`.
fn add_paddings(flats: &mut [Vec<FlatParam>], own: &Contents) -> Result<()> {
    let Some(paddings) = own.get("param_alignment_paddings").and_then(Value::items) else { return Ok(()) };
    if paddings.len() != flats.len() {
        let (found, expected) = (paddings.len(), flats.len());
        return own.refuse(format!("param_alignment_paddings has {found} groups, param_shapes {expected}"));
    }
    for (flat, paddings) in flats.iter_mut().zip(paddings) {
        let own_paddings: Option<Vec<usize>> =
            paddings.items().and_then(|paddings| paddings.iter().map(count_of).collect());
        match own_paddings {
            Some(paddings) if paddings.len() == flat.len() => {
                flat.iter_mut().zip(paddings).for_each(|(param, padding)| param.padding = padding);
            }
            _ => return own.refuse("param_alignment_paddings does not fit param_shapes"),
        }
    }
    Ok(())
}

/// This rank's float32 weights of each buffer, and the padding that was cut off.
fn weights_of(own: &mut Contents, stage: i64, flats: &[Vec<FlatParam>]) -> Result<(Vec<Tensor>, Vec<usize>)> {
    let key = if stage == 3 { "fp32_flat_groups" } else { "single_partition_of_fp32_groups" };
    let Some(Value::List(groups)) = own.take(key) else { return own.refuse(format!("it has no list {key}")) };
    if groups.len() != flats.len() {
        let (found, expected) = (groups.len(), flats.len());
        return own.refuse(format!("{key} has {found} groups, param_shapes of the model states {expected}"));
    }
    let mut weights = Vec::new();
    for group in groups {
        match group {
            Value::Tensor(tensor) if tensor.is_floating_point() => weights.push(tensor),
            other => return own.refuse(format!("{key} holds {other:?} where a tensor of weights must be")),
        }
    }
    let paddings = match own.get("group_paddings").and_then(Value::items) {
        Some(paddings) if paddings.len() == flats.len() => paddings.iter().map(count_of).collect(),
        Some(_) => None,
        None => Some(vec![0; flats.len()]),
    };
    let Some(paddings) = paddings else { return own.refuse("group_paddings does not fit param_shapes") };
    Ok((weights, paddings))
}

/// Elements of a partition of each buffer, in stages 1 and 2: the buffer fills those of all ranks, up to the padding.
fn partitions_of(
    own: &Contents,
    weights: &[Tensor],
    paddings: &[usize],
    flats: &[Vec<FlatParam>],
    ranks: usize,
) -> Result<Vec<usize>> {
    // BF16_Optimizer keeps the padding
    let is_cut = own.get("zero_stage").is_some();
    let of_group = |((weights, padding), flat): ((&Tensor, &usize), &Vec<FlatParam>)| {
        let partition = weights.numel().checked_add(if is_cut { *padding } else { 0 });
        let all = partition.and_then(|partition| partition.checked_mul(ranks));
        let needed = flat_numel(flat);
        match (partition, all, needed) {
            // older versions pad less
            (Some(partition), Some(all), Some(needed))
                if needed <= all && partition_numel(all, ranks) == partition_numel(needed, ranks) =>
            {
                Ok(partition)
            }
            _ => own.refuse(format!(
                "{ranks} partitions of {} elements and a padding of {padding} do not hold what param_shapes has: {} elements",
                weights.numel(),
                needed.map_or("too many".to_owned(), |needed| needed.to_string())
            )),
        }
    };
    weights.iter().zip(paddings).zip(flats).map(of_group).collect()
}

/// Puts this rank's fragments where they belong.
fn add(
    gathered: &mut Gathered,
    (buffer, kind): (usize, &str),
    flat: &[FlatParam],
    fragments: &[Fragment],
    tensor: &Tensor,
    path: &Path,
) -> Result<()> {
    let needed = fragments.last().map_or(0, |last| last.offset + last.len);
    if tensor.numel() < needed {
        let found = tensor.numel();
        let what = format!("{kind} of group {buffer} has {found} elements, its parameters need {needed}");
        return refuse(path, what, OTHER);
    }
    let whole = gathered.entry((buffer, kind.to_owned())).or_default();
    if whole.is_empty() {
        for param in flat {
            let zeros = Tensor::f_zeros([param.numel as i64], (tensor.kind(), tch::Device::Cpu))?;
            whole.push((zeros, 0));
        }
    }
    let tensor = tensor.f_reshape([-1_i64])?;
    for fragment in fragments {
        let (target, filled) = &mut whole[fragment.param];
        let len = fragment.len as i64;
        target.f_narrow(0, fragment.start as i64, len)?.f_copy_(&tensor.f_narrow(
            0,
            fragment.offset as i64,
            len,
        )?)?;
        *filled += fragment.len;
    }
    Ok(())
}

/// Adds the states of this rank that are not numbers.
fn add_states(
    gathered: &mut Gathered,
    states: &Contents,
    flats: &[Vec<FlatParam>],
    fragments: &[Vec<Fragment>],
) -> Result<()> {
    let by_buffer = by_buffer(states);
    for (buffer, (flat, fragments)) in flats.iter().zip(fragments).enumerate() {
        for (kind, value) in by_buffer.get(&buffer).into_iter().copied().flatten() {
            if let (Some(kind), Value::Tensor(tensor)) = (kind.as_str(), value)
                && !is_count(kind, value)
            {
                add(gathered, (buffer, kind), flat, fragments, tensor, &states.path)?;
            }
        }
    }
    Ok(())
}

/// Whether a state is a number of all parameters of a buffer.
fn is_count(kind: &str, value: &Value) -> bool {
    match value {
        Value::Tensor(tensor) => kind == "step" || tensor.dim() == 0,
        Value::Int(_) | Value::Float(_) => true,
        _ => false,
    }
}

/// Adds the states that are numbers, which are those of each parameter of the buffer.
pub(super) fn add_counts(
    found: &mut BTreeMap<String, Vec<(String, Value)>>,
    states: &Contents,
    flats: &[Vec<FlatParam>],
) {
    let by_buffer = by_buffer(states);
    for (buffer, flat) in flats.iter().enumerate() {
        for (kind, value) in by_buffer.get(&buffer).into_iter().copied().flatten() {
            if let Some(kind) = kind.as_str().filter(|kind| is_count(kind, value)) {
                add_count(found, flat, kind, value);
            }
        }
    }
}

/// States that one process has of all parameters, those of each buffer flat.
pub(super) fn of_one(
    flats: &[Vec<FlatParam>],
    masters: &[&Tensor],
    states: &Contents,
    wants_states: bool,
    path: &Path,
) -> Result<States> {
    let (mut found, mut gathered) = (States::default(), Gathered::new());
    let fragments: Vec<Vec<Fragment>> =
        flats.iter().map(|flat| flat_fragments(flat, 0..usize::MAX)).collect();
    if !masters.is_empty() && masters.len() != flats.len() {
        let (found, expected) = (masters.len(), flats.len());
        return refuse(path, format!("it has {found} float32 weights of {expected} parameters"), OTHER);
    }
    for (buffer, master) in masters.iter().enumerate() {
        add(&mut gathered, (buffer, FP32), &flats[buffer], &fragments[buffer], master, path)?;
    }
    if wants_states {
        found.groups = groups_of(states, flats, path)?;
        add_counts(&mut found.states, states, flats);
        add_states(&mut gathered, states, flats, &fragments)?;
    }
    finish(gathered, flats, &mut found, path)?;
    Ok(found)
}

fn add_count(
    states: &mut BTreeMap<String, Vec<(String, Value)>>,
    flat: &[FlatParam],
    kind: &str,
    value: &Value,
) {
    for param in flat {
        let value = match value {
            Value::Tensor(tensor) => Value::Tensor(tensor.shallow_clone()),
            Value::Int(int) => Value::Int(*int),
            other => Value::Float(other.as_f64().unwrap_or(0.0)),
        };
        states.entry(param.name.clone()).or_default().push((kind.to_owned(), value));
    }
}

/// The optimizer's own state.
fn take_states(own: &mut Contents, stage: i64) -> Result<Contents> {
    let key = if stage == 3 { "optimizer_state_dict" } else { "base_optimizer_state" };
    match own.take(key) {
        Some(states @ Value::Dict(_)) => Contents::of(states, &own.path),
        Some(Value::List(_)) => refuse(
            &own.path,
            format!("{key} is without the settings of the groups, as elastic_checkpoint saves it"),
            "convert with --weights_only",
        ),
        _ => refuse(&own.path, format!("it has no {key}"), "convert with --weights_only"),
    }
}

/// States of each buffer.
fn by_buffer(states: &Contents) -> HashMap<usize, &[(Value, Value)]> {
    let entries = states.get("state").and_then(Value::entries).unwrap_or_default();
    entries.iter().filter_map(|(buffer, state)| Some((count_of(buffer)?, state.entries()?))).collect()
}

/// Settings of the groups, each with its parameters: those of the buffers that it names.
pub(super) fn groups_of(states: &Contents, flats: &[Vec<FlatParam>], path: &Path) -> Result<Vec<Group>> {
    const REMEDY: &str = "convert with --weights_only";
    let Some(groups) = states.get("param_groups").and_then(Value::items) else {
        return refuse(path, "the optimizer has no param_groups", REMEDY);
    };
    let mut found = Vec::new();
    let mut seen = vec![false; flats.len()];
    for group in groups {
        let buffers: Option<Vec<usize>> =
            group.get("params").and_then(Value::items).and_then(|own| own.iter().map(count_of).collect());
        let mut names = Vec::new();
        for buffer in buffers.unwrap_or_default() {
            match seen.get_mut(buffer) {
                Some(seen) if !*seen => *seen = true,
                _ => {
                    let what = format!("a param group names buffer {buffer} of {}", flats.len());
                    return refuse(path, what, REMEDY);
                }
            }
            names.extend(flats[buffer].iter().map(|param| param.name.clone()));
        }
        let settings = group.entries().unwrap_or_default().iter().filter_map(|(key, value)| {
            let key = key.as_str().filter(|key| !["params", "param_names"].contains(key))?;
            Some((Value::Text(key.to_owned()), plain(value)?))
        });
        found.push(Group { settings: settings.collect(), names });
    }
    match seen.iter().position(|seen| !seen) {
        Some(buffer) if !flats[buffer].is_empty() => {
            refuse(path, format!("no param group names buffer {buffer}"), REMEDY)
        }
        _ => Ok(found),
    }
}

/// A copy of a setting: a number, text, or some of them.
fn plain(value: &Value) -> Option<Value> {
    Some(match value {
        Value::None => Value::None,
        Value::Bool(flag) => Value::Bool(*flag),
        Value::Int(int) => Value::Int(*int),
        Value::Float(float) => Value::Float(*float),
        Value::Text(text) => Value::Text(text.clone()),
        Value::Tensor(_) => Value::Float(value.as_f64()?),
        Value::Tuple(items) | Value::List(items) => {
            Value::Tuple(items.iter().map(plain).collect::<Option<_>>()?)
        }
        _ => return None,
    })
}

/// All elements must have been there.
fn finish(gathered: Gathered, flats: &[Vec<FlatParam>], found: &mut States, path: &Path) -> Result<()> {
    for ((buffer, kind), tensors) in gathered {
        for (param, (tensor, filled)) in flats[buffer].iter().zip(tensors) {
            if filled != param.numel {
                let FlatParam { name, numel, .. } = param;
                let what = format!("the ranks have {filled} of {numel} elements of {kind} of {name}");
                return refuse(path, what, "copy the files of all ranks");
            }
            let tensor = tensor.f_reshape(&param.shape)?;
            if kind == FP32 {
                found.masters.insert(param.name.clone(), tensor.f_to_kind(Kind::Float)?);
            } else {
                let states = found.states.entry(param.name.clone()).or_default();
                states.push((kind.clone(), Value::Tensor(tensor)));
            }
        }
    }
    Ok(())
}
