//! Weight, gradient and states of one parameter, by name.

use std::fmt;

use tch::{Kind, Tensor};

use super::param_group::ParamGroup;
use crate::checkpoint::MASTER;
use crate::error::{ConfigError, Result};
use crate::ffi;
use crate::nn::Parameter;

/// Something that an optimizer has of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParamValue<'a> {
    /// The weight in float32: the copy that is updated, if there is one beside a weight of 16 bits.
    Fp32Weight,
    /// The gradient that the next step takes.
    Gradient,
    /// A state, such as `exp_avg`.
    State(&'a str),
}

impl fmt::Display for ParamValue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fp32Weight => f.write_str("weight"),
            Self::Gradient => f.write_str("gradient"),
            Self::State(kind) => f.write_str(kind),
        }
    }
}

/// An optimizer whose parameters are not sharded.
pub(super) struct Unsharded<'a> {
    name: &'static str,
    groups: &'a [ParamGroup],
    states: Vec<(String, Tensor)>,
}

/// A parameter by its name.
///
/// # Errors
/// If the optimizer has none of that name.
pub(crate) fn parameter<'a>(
    name: &'static str,
    groups: &'a [ParamGroup],
    fqn: &str,
) -> Result<&'a Parameter> {
    let mut params = groups.iter().flat_map(ParamGroup::params);
    if let Some((_, parameter)) = params.find(|(own, _)| own == fqn) {
        return Ok(parameter);
    }
    let names: Vec<&str> = groups.iter().flat_map(ParamGroup::params).map(|(own, _)| own.as_str()).collect();
    let shown = names.iter().take(5).copied().collect::<Vec<_>>().join(", ");
    let more = if names.len() > 5 { format!(" and {} more", names.len() - 5) } else { String::new() };
    let what = format!("{name} has no parameter `{fqn}`; it has {shown}{more}");
    Err(ConfigError::new("optimizer", what, "use a name of module.named_parameters()").into())
}

/// The error for a state that is not there; `kinds` are those that are.
pub(crate) fn no_state(name: &'static str, fqn: &str, kind: &str, kinds: &[String]) -> crate::error::Error {
    let what = match kinds.is_empty() {
        true => format!("{name} has no states of {fqn} yet, and so no `{kind}`"),
        false => format!("{name} has no state `{kind}` of {fqn}; it has {}", kinds.join(", ")),
    };
    let remedy = "use one of these; states come with the first step in which the parameter has a gradient";
    ConfigError::new("optimizer", what, remedy).into()
}

/// What is wrong with values of this shape, if something is.
pub(crate) fn shape_problem(
    fqn: &str,
    value: ParamValue<'_>,
    expected: &[i64],
    given: &[i64],
) -> Option<ConfigError> {
    let what = format!("values of shape {given:?} for the {value} of {fqn}, which has {expected:?}");
    let remedy = "give values of that shape";
    (expected != given).then(|| ConfigError::new("optimizer", what, remedy))
}

/// Kinds of the states of a parameter.
pub(crate) fn kinds(states: &[(String, Tensor)], fqn: &str) -> Vec<String> {
    let of = states.iter().filter_map(|(name, _)| name.split_once('.').filter(|(_, own)| *own == fqn));
    of.map(|(kind, _)| kind.to_owned()).collect()
}

impl<'a> Unsharded<'a> {
    /// One of this name, with its states by `<kind>.<fqn>`.
    pub fn of(name: &'static str, groups: &'a [ParamGroup], states: Vec<(String, Tensor)>) -> Self {
        Self { name, groups, states }
    }

    fn state(&self, fqn: &str, kind: &str) -> Option<&Tensor> {
        let name = format!("{kind}.{fqn}");
        self.states.iter().find(|(own, _)| *own == name).map(|(_, state)| state)
    }

    fn existing(&self, fqn: &str, kind: &str) -> Result<&Tensor> {
        self.state(fqn, kind).ok_or_else(|| no_state(self.name, fqn, kind, &kinds(&self.states, fqn)))
    }

    /// A copy in float32; `None` for a gradient that is not there.
    pub fn get(&self, fqn: &str, value: ParamValue<'_>) -> Result<Option<Tensor>> {
        let _no_grad = tch::no_grad_guard();
        let parameter = parameter(self.name, self.groups, fqn)?;
        let shared = match value {
            ParamValue::Fp32Weight => match self.state(fqn, MASTER) {
                Some(master) => master.shallow_clone(),
                None => parameter.lasting()?,
            },
            ParamValue::Gradient => parameter.grad(),
            ParamValue::State(kind) => self.existing(fqn, kind)?.shallow_clone(),
        };
        if !shared.defined() {
            return Ok(None);
        }
        Ok(Some(shared.f_detach()?.f_to_dtype(Kind::Float, false, true)?.f_contiguous()?))
    }

    /// Writes values, of this shape.
    pub fn set(&self, fqn: &str, value: ParamValue<'_>, values: &Tensor) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let parameter = parameter(self.name, self.groups, fqn)?;
        let size = match value {
            ParamValue::State(kind) => self.existing(fqn, kind)?.size(),
            _ => parameter.size(),
        };
        if let Some(problem) = shape_problem(fqn, value, &size, &values.size()) {
            return Err(problem.into());
        }
        let write = |target: &Tensor| -> Result<()> { Ok(target.f_detach()?.f_copy_(values)?) };
        match value {
            ParamValue::Fp32Weight => {
                parameter.update(write)?;
                self.state(fqn, MASTER).map_or(Ok(()), write)
            }
            ParamValue::Gradient
                if parameter.grad().defined() && parameter.grad().kind() == parameter.kind() =>
            {
                write(&parameter.grad())
            }
            ParamValue::Gradient => {
                let grad =
                    values.f_to_device(parameter.device())?.f_to_dtype(parameter.kind(), false, true)?;
                Ok(ffi::set_grad(parameter.leaf(), &grad)?)
            }
            ParamValue::State(kind) => write(self.existing(fqn, kind)?),
        }
    }
}
