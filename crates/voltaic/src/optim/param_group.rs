//! Parameters together with the hyper-parameters that apply to them.

use std::collections::HashSet;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tch::{Kind, Tensor};

use super::problems::Problems;
use super::unsharded_params::UnshardedParameters;
use crate::config::setters;
use crate::error::Result;
use crate::ffi;
use crate::nn::Parameter;

/// Parameters as the user groups them: what is not set here is as in the optimizer's own settings.
///
/// ```no_run
/// # use voltaic::optim::ParamGroupSpec;
/// # fn groups(decayed: Vec<(String, voltaic::nn::Parameter)>, others: Vec<(String, voltaic::nn::Parameter)>)
/// # -> [ParamGroupSpec; 2] {
/// [ParamGroupSpec::new(decayed).weight_decay(0.1), ParamGroupSpec::new(others).weight_decay(0.0).lr(1e-4)]
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct ParamGroupSpec {
    pub(super) params: Vec<(String, Parameter)>,
    pub(super) overrides: Overrides,
    pub(super) unsharded: Option<Arc<dyn UnshardedParameters>>,
    pub(super) name: Option<String>,
    pub(super) float32_states: bool,
}

/// The hyper-parameters that a group may set for itself.
macro_rules! overrides {
    ($($(#[$doc:meta])* $name:ident: $type:ty,)*) => {
        /// Hyper-parameters that a group sets for itself.
        #[derive(Debug, Clone, Default)]
        pub(super) struct Overrides {
            $(pub(super) $name: Option<$type>,)*
            /// The matrices of [`MuonWithAuxAdam`](super::MuonWithAuxAdam).
            pub(super) are_matrices: bool,
        }

        impl Overrides {
            /// Reports those that are set although optimizer `name` does not have them.
            pub(super) fn refuse_others(&self, name: &str, known: &[&str], problems: &mut Problems) {
                for (key, is_set) in [$((stringify!($name), self.$name.is_some())),*] {
                    if is_set && !known.contains(&key) {
                        problems.add(key, format!("is not a setting of {name}"), "remove it");
                    }
                }
            }
        }

        impl ParamGroupSpec {$(
            $(#[$doc])*
            #[must_use]
            pub fn $name(mut self, $name: $type) -> Self {
                self.overrides.$name = Some($name);
                self
            }
        )*}
    };
}

impl ParamGroupSpec {
    /// A group of parameters with their fqn, as [`ModuleExt::named_parameters`] gives them.
    ///
    /// [`ModuleExt::named_parameters`]: crate::nn::ModuleExt::named_parameters
    pub fn new(params: impl IntoIterator<Item = (String, Parameter)>) -> Self {
        Self {
            params: params.into_iter().collect(),
            overrides: Overrides::default(),
            unsharded: None,
            name: None,
            float32_states: false,
        }
    }

    /// The parameters with their fqn.
    pub fn params(&self) -> &[(String, Parameter)] {
        &self.params
    }

    /// The shape of a parameter of the group, or of the one that it is a shard of.
    pub(super) fn shape(&self, parameter: &Parameter) -> Vec<i64> {
        let shape = self.unsharded.as_ref().and_then(|unsharded| unsharded.shape(parameter));
        shape.unwrap_or_else(|| parameter.size())
    }

    /// What unshards parameters, if ranks have shards of them.
    pub fn unsharded(&self) -> Option<&Arc<dyn UnshardedParameters>> {
        self.unsharded.as_ref()
    }

    setters! {
        /// Keeps the states of parameters in bfloat16 and float16 in float32, and computes their updates in it, also without master
        /// weights; the parameters are rounded after each step. Moments take 8 bytes a weight, copies none between steps. DeepSpeed's
        /// `bf16_master_weights_and_grads` without `bf16_optimizer_states`.
        #[must_use]
        float32_states: bool;
        /// Names this group, for [`LearningRateMonitor`](crate::callback::LearningRateMonitor): `lr-AdamW/decayed`.
        #[must_use]
        name: impl Into<String> = Some(name.into());
    }
}

overrides! {
    /// Sets the learning rate of this group.
    lr: f64,
    /// Sets the weight decay of this group.
    weight_decay: f64,
    /// Sets whether this group ascends.
    maximize: bool,
    /// Sets the momentum of this group (SGD).
    momentum: f64,
    /// Sets the dampening of this group (SGD).
    dampening: f64,
    /// Sets whether this group uses Nesterov momentum (SGD).
    nesterov: bool,
    /// Sets the decay rates of this group (Adam, AdamW).
    betas: (f64, f64),
    /// Sets the term in the denominator of this group (Adam, AdamW).
    eps: f64,
    /// Sets whether this group keeps the maximum of the second moments (Adam, AdamW).
    amsgrad: bool,
}

/// Parameters of an optimizer with the hyper-parameters in force, which schedules and callbacks may change between
/// steps.
#[derive(Debug)]
pub struct ParamGroup {
    params: Vec<(String, Parameter)>,
    /// For each parameter, the unit that it is updated in.
    units: Vec<usize>,
    unsharded: Option<Arc<dyn UnshardedParameters>>,
    name: Option<String>,
    /// See [`ParamGroupSpec::float32_states`].
    pub(super) float32_states: bool,
    /// Learning rate of the next step.
    pub lr: f64,
    /// Learning rate that a schedule started from; absent before a schedule is built.
    pub initial_lr: Option<f64>,
    /// Weight decay.
    pub weight_decay: f64,
    /// Whether the objective is ascended.
    pub maximize: bool,
    /// Hyper-parameters that belong to the kind of optimizer.
    pub options: GroupOptions,
}

/// Hyper-parameters of a group that belong to the kind of optimizer; the fields are settings of the same names.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
#[non_exhaustive]
#[allow(missing_docs)] // the settings say what they are
pub enum GroupOptions {
    /// Those of [`Sgd`](super::Sgd).
    Sgd { momentum: f64, dampening: f64, nesterov: bool },
    /// Those of [`Adam`](super::Adam) and [`AdamW`](super::AdamW).
    Adam {
        betas: (f64, f64),
        eps: f64,
        amsgrad: bool,
        /// PyTorch's groups do not have it: it is saved only if it is off.
        #[serde(default = "yes", skip_serializing_if = "is_yes")]
        bias_correction: bool,
    },
    /// Those of [`RmsProp`](super::RmsProp).
    RmsProp { alpha: f64, eps: f64, momentum: f64, centered: bool },
    /// Those of [`Adagrad`](super::Adagrad).
    Adagrad { lr_decay: f64, eps: f64 },
    /// Those of [`Adadelta`](super::Adadelta).
    Adadelta { rho: f64, eps: f64 },
    /// Those of [`Lamb`](super::Lamb).
    Lamb {
        betas: (f64, f64),
        eps: f64,
        eps_inside_sqrt: bool,
        bias_correction: bool,
        /// `min_coeff` and `max_coeff`.
        coeffs: (f64, f64),
    },
    /// Those of [`Lion`](super::Lion).
    Lion { betas: (f64, f64) },
    /// Those of [`Muon`](super::Muon).
    Muon {
        momentum: f64,
        nesterov: bool,
        ns_coefficients: (f64, f64, f64),
        ns_steps: u64,
        eps: f64,
        adjust_lr_fn: AdjustLr,
    },
    /// Those of the matrices of [`MuonWithAuxAdam`](super::MuonWithAuxAdam); its other groups have those of Adam.
    MuonWithAuxAdam { momentum: f64, ns_method: NsMethod },
}

impl GroupOptions {
    /// Both decay rates, if the optimizer has two.
    fn betas_mut(&mut self) -> Option<&mut (f64, f64)> {
        match self {
            Self::Adam { betas, .. } | Self::Lamb { betas, .. } | Self::Lion { betas } => Some(betas),
            _ => None,
        }
    }

    /// What momentum schedules cycle.
    fn momentum_mut(&mut self) -> Option<&mut f64> {
        match self {
            Self::Sgd { momentum, .. }
            | Self::RmsProp { momentum, .. }
            | Self::Muon { momentum, .. }
            | Self::MuonWithAuxAdam { momentum, .. } => Some(momentum),
            _ => self.betas_mut().map(|betas| &mut betas.0),
        }
    }
}

/// Which Newton-Schulz iteration [`MuonWithAuxAdam`](super::MuonWithAuxAdam) takes; both have five steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NsMethod {
    /// On the product of the matrix with its transpose, in float16, or in float32 on a CPU. Less work for matrices that are not square.
    #[default]
    Gram,
    /// On the matrix, in bfloat16.
    Standard,
}

/// How the learning rate of [`Muon`](super::Muon) follows the shape of a matrix with `a` rows and `b` columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AdjustLr {
    /// `sqrt(max(1, a / b))` times the rate.
    #[default]
    Original,
    /// `0.2 sqrt(max(a, b))` times the rate, which gives changes of AdamW's size (arXiv:2502.16982).
    MatchRmsAdamw,
}

/// What a state says that was saved before there was a choice.
fn yes() -> bool {
    true
}

fn is_yes(flag: &bool) -> bool {
    *flag
}

/// A group's hyper-parameters as they are saved.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct SavedGroup {
    pub(super) params: Vec<String>,
    lr: f64,
    initial_lr: Option<f64>,
    weight_decay: f64,
    maximize: bool,
    #[serde(flatten)]
    pub(super) options: GroupOptions,
}

/// The numbers of a group once the optimizer's settings and the group's own are merged.
pub(super) struct Merged {
    pub(super) lr: f64,
    pub(super) weight_decay: f64,
    pub(super) maximize: bool,
    pub(super) options: GroupOptions,
}

impl ParamGroup {
    pub(super) fn new(spec: ParamGroupSpec, merged: Merged) -> Self {
        let ParamGroupSpec { params, unsharded, name, float32_states, .. } = spec;
        let unit = |(_, shard): &(String, Parameter)| {
            unsharded.as_ref().map_or(0, |unsharded| unsharded.unit(shard))
        };
        let units = params.iter().map(unit).collect();
        let Merged { lr, weight_decay, maximize, options } = merged;
        let initial_lr = None;
        Self {
            params,
            units,
            unsharded,
            name,
            float32_states,
            lr,
            initial_lr,
            weight_decay,
            maximize,
            options,
        }
    }

    /// The parameters with their fqn and the unit that each is updated in.
    pub(super) fn by_unit(&self) -> impl Iterator<Item = (&(String, Parameter), usize)> {
        self.params.iter().zip(self.units.iter().copied())
    }

    /// Where the weights of a parameter of float32 are to be written in 16 bits too ([`UnshardedParameters::rounded`]).
    pub(super) fn rounded(&self, shard: &Parameter) -> Option<Tensor> {
        self.unsharded.as_ref().filter(|_| shard.kind() == Kind::Float)?.rounded(shard)
    }

    /// Whether the strategy has the master weight of a parameter ([`UnshardedParameters::has_master`]).
    pub(super) fn has_master_elsewhere(&self, shard: &Parameter) -> bool {
        self.unsharded.as_ref().is_some_and(|unsharded| unsharded.has_master(shard))
    }

    /// The parameters with their fqn.
    pub fn params(&self) -> &[(String, Parameter)] {
        &self.params
    }

    /// What [`ParamGroupSpec::name`] called it.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// What momentum schedules cycle: the momentum of SGD, the first decay rate of Adam.
    pub fn momentum(&self) -> f64 {
        let mut options = self.options;
        options.momentum_mut().map_or(0.0, |momentum| *momentum)
    }

    /// Sets what [`ParamGroup::momentum`] gives.
    pub fn set_momentum(&mut self, value: f64) {
        self.options.momentum_mut().into_iter().for_each(|momentum| *momentum = value);
    }

    /// Both decay rates, if the optimizer has two.
    pub fn betas(&self) -> Option<(f64, f64)> {
        let mut options = self.options;
        options.betas_mut().copied()
    }

    /// Sets what [`ParamGroup::betas`] gives; has no effect on an optimizer without them.
    pub fn set_betas(&mut self, value: (f64, f64)) {
        self.options.betas_mut().into_iter().for_each(|betas| *betas = value);
    }

    /// The hyper-parameters by the names under which they are saved.
    pub(crate) fn hyper_parameters(&self) -> Map<String, Value> {
        let mut named = Map::new();
        named.insert("lr".to_owned(), json!(self.lr));
        named.insert("initial_lr".to_owned(), json!(self.initial_lr));
        named.insert("weight_decay".to_owned(), json!(self.weight_decay));
        named.insert("maximize".to_owned(), json!(self.maximize));
        if let Value::Object(options) = json!(self.options) {
            named.extend(options);
        }
        named
    }

    pub(super) fn save(&self) -> Value {
        let names: Vec<&str> = self.params.iter().map(|(fqn, _)| fqn.as_str()).collect();
        let mut saved = Map::from_iter([("params".to_owned(), json!(names))]);
        saved.extend(self.hyper_parameters());
        Value::Object(saved)
    }

    pub(super) fn load(&mut self, saved: &SavedGroup) {
        self.lr = saved.lr;
        self.initial_lr = saved.initial_lr;
        self.weight_decay = saved.weight_decay;
        self.maximize = saved.maximize;
        self.options = saved.options;
    }
}

/// Checks what any optimizer needs of its parameters.
pub(super) fn check_params(groups: &[ParamGroupSpec], problems: &mut Problems) -> Result<()> {
    let key = |index: usize| format!("param_groups[{index}].params");
    let remedy = "give the optimizer the parameters to train, such as module.named_parameters()";
    // a group may be empty, as in PyTorch, such as one for frozen layers
    if groups.iter().all(|group| group.params.is_empty()) {
        problems.add("param_groups", "there are no parameters", remedy);
    }
    let (mut seen, mut names, mut groups_by_name) = (HashSet::new(), HashSet::new(), HashSet::new());
    for (index, group) in groups.iter().enumerate() {
        if let Some(name) = group.name.as_deref().filter(|name| !groups_by_name.insert(*name)) {
            let what = format!("two groups are named {name}");
            problems.add(format!("param_groups[{index}].name"), what, "give each group a name of its own");
        }
        for (fqn, parameter) in &group.params {
            if !seen.insert(ffi::tensor_id(parameter.leaf())?) {
                let what = format!("{fqn} appears more than once");
                problems.add(key(index), what, "list each parameter, and each set of tied ones, once");
            } else if !names.insert(fqn.as_str()) {
                let what = format!("two parameters are named {fqn}");
                problems.add(key(index), what, "give each parameter a name of its own");
            }
            let kind = parameter.kind();
            if !matches!(kind, Kind::Float | Kind::Double | Kind::BFloat16 | Kind::Half) {
                let what = format!("{fqn} has dtype {kind:?}");
                let remedy = "train float32, float64, bfloat16 or float16 parameters (a complex one: as two real ones)";
                problems.add(key(index), what, remedy);
            } else if !ffi::is_dense(parameter.leaf())? {
                let what = format!("{fqn} does not fill its memory without gaps or overlaps");
                problems.add(key(index), what, "make the parameter from tensor.contiguous()");
            }
        }
    }
    Ok(())
}

/// The groups of an optimizer; `problems` are those of its settings, and `merge` gives the numbers of one group.
pub(super) fn build_groups(
    specs: Vec<ParamGroupSpec>,
    mut problems: Problems,
    merge: impl Fn(&Overrides, &mut Problems) -> Merged,
) -> Result<Vec<ParamGroup>> {
    let are_well_set = problems.len() == 0;
    let mut of_params = Problems::new("optimizer");
    check_params(&specs, &mut of_params)?;
    problems.append(of_params);
    let mut groups = Vec::with_capacity(specs.len());
    for (index, spec) in specs.into_iter().enumerate() {
        let mut of_group = Problems::new(format!("optimizer.param_groups[{index}]"));
        let merged = merge(&spec.overrides, &mut of_group);
        if are_well_set {
            problems.append(of_group); // what is wrong with the optimizer's settings is wrong in every group: say it once
        }
        groups.push(ParamGroup::new(spec, merged));
    }
    problems.finish()?;
    Ok(groups)
}
