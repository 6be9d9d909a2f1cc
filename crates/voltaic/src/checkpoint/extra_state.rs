//! The `_extra_state` of layers of Habana's transformer engine in state dicts: scales and histories, pickled.
//!
//! Source: `get_extra_state` of `habana_frameworks.torch.hpex.experimental.transformer_engine`.

use tch::{Kind, TchError, Tensor};

use crate::checkpoint::budget::{Budget, ReadLimits};
use crate::checkpoint::pickle::{self, Value};
use crate::checkpoint::torch_file::read_torch_bytes;
use crate::error::{CheckpointError, Problem, Result};

const NAME: &str = "_extra_state";

/// The layer whose extra state has this name.
fn fqn_of(name: &str) -> Option<&str> {
    name.strip_suffix(NAME).and_then(|fqn| if fqn.is_empty() { Some(fqn) } else { fqn.strip_suffix('.') })
}

/// Whether an entry of a state dict is the extra state of a layer: bytes, as a tensor or a buffer.
pub(in crate::checkpoint) fn is_extra_state(name: &str, value: &Value) -> bool {
    let is_bytes = match value {
        Value::Bytes(_) => true,
        Value::Tensor(tensor) => tensor.kind() == Kind::Uint8 && tensor.dim() == 1,
        _ => false,
    };
    is_bytes && fqn_of(name).is_some()
}

/// The scales and histories of the transformer engine's layers in a file of [`read_torch`](crate::checkpoint::read_torch): a state dict, also
/// within a dictionary as `state_dict`. `te::load_fp8_state_dict` takes them. Checkpoints of training
/// have them already. Nothing of the pickles is executed.
///
/// # Errors
/// [`CheckpointError::Mismatch`] if an `_extra_state` is something else.
pub fn fp8_extra_state(file: &Value) -> Result<Vec<(String, Tensor)>> {
    fp8_states(file.get("state_dict").unwrap_or(file))
}

/// The same of a state dict.
pub(super) fn fp8_states(state_dict: &Value) -> Result<Vec<(String, Tensor)>> {
    let mut named = Vec::new();
    for (key, value) in state_dict.entries().unwrap_or_default() {
        let Some((name, fqn)) = key.as_str().and_then(|name| Some((name, fqn_of(name)?))) else { continue };
        if !is_extra_state(name, value) {
            continue;
        }
        let tensors = read(value).and_then(|state| tensors_of(&state)).map_err(|what| {
            let what = format!("{name} is no state of the transformer engine that can be read: {what}");
            let problem = Problem::new(what, "remove it from the state dict");
            CheckpointError::Mismatch { module: "fp8 scales".to_owned(), problem }
        })?;
        named.extend(tensors.into_iter().map(|(name, tensor)| (format!("{fqn}/{name}"), tensor)));
    }
    Ok(named)
}

/// What is pickled: a bare pickle, or what `torch.save` has written.
fn read(value: &Value) -> Result<Value, String> {
    let of_tensor: Vec<u8>;
    let bytes = match value {
        Value::Bytes(bytes) => bytes,
        Value::Tensor(tensor) => {
            of_tensor = Vec::<u8>::try_from(tensor).map_err(|error: TchError| error.to_string())?;
            &of_tensor
        }
        _ => return Err("it has no bytes".to_owned()),
    };
    if bytes.starts_with(b"PK\x03\x04") {
        return read_torch_bytes(bytes);
    }
    let mut budget = Budget::new(bytes.len() as u64, ReadLimits::default());
    pickle::read(bytes, &mut budget, &mut |stored, _| Err(format!("storage {} is not there", stored.key)))
}

type Named = Vec<(String, Tensor)>;

/// Tensors by the names of [`Fp8State`](crate::precision::fp8::Fp8State); none of a layer that has not computed in float8.
fn tensors_of(state: &Value) -> Result<Named, String> {
    match state {
        Value::None => return Ok(Vec::new()),
        Value::Dict(_) => {}
        _ => return Err("it is no dictionary".to_owned()),
    }
    let mut named = Vec::new();
    let mut has_amaxes = [false; 2];
    for (part, is_backward) in [("fwd", false), ("hybrid", false), ("bwd", true)] {
        let of = |name: &str| state.get(&format!("{name}_{part}"));
        let tensor = |name: &str, kind: Kind| -> Result<Tensor, String> {
            let tensor = of(name).and_then(Value::as_tensor);
            let tensor = tensor.ok_or_else(|| format!("{name}_{part} is missing or no tensor"))?;
            tensor.f_to_kind(kind).map_err(|error| error.to_string())
        };
        if part == "hybrid" && of("scale").is_none() {
            continue;
        }
        let scale = tensor("scale", Kind::Float)?;
        let scale_inv = match of("scale_inv") {
            None => scale.f_reciprocal().map_err(|error| error.to_string())?,
            Some(_) => tensor("scale_inv", Kind::Float)?,
        };
        let history = tensor("amax_history", Kind::Float)?;
        let largest = history.f_count_nonzero(None).and_then(|count| count.f_int64_value(&[]));
        has_amaxes[usize::from(is_backward)] |= largest.map_err(|error| error.to_string())? > 0;
        let index = tensor("amax_history_index", Kind::Int)?;
        let tensors = [scale, scale_inv, history, index];
        let names = ["scale", "scale_inv", "amax_history", "amax_history_index"];
        named.extend(names.into_iter().zip(tensors).map(|(name, tensor)| (format!("{name}_{part}"), tensor)));
    }
    let run_cnt = state.get("extra_fp8_variables").and_then(|extra| extra.get("run_cnt")?.as_i64());
    named.push(("run_cnt".to_owned(), Tensor::from_slice(&[run_cnt.unwrap_or(0)])));
    // older versions have one flag for both passes
    let is_set = |pass: &str, has_amaxes: bool| {
        let flags = state.get(&format!("update_amax_{pass}"));
        let flag = flags.and_then(|flags| flags.get(&format!("{pass}_enabled")).or(flags.get("enabled")));
        if let Some(Value::Bool(flag)) = flag { *flag } else { has_amaxes }
    };
    let measured = [is_set("fwd", has_amaxes[0]), is_set("bwd", has_amaxes[1])].map(i64::from);
    named.push(("update_amax".to_owned(), Tensor::from_slice(&measured)));
    Ok(named)
}
