//! Plans for modules whose user gives none: what modules say of themselves, DeepSpeed's `injection_policy`, and its rules for names
//! (AutoTP).

use std::collections::BTreeMap;

use super::parallelize::Layer;
use super::plan::{ColwiseParallel, ParallelPlan, ParallelStyle, RowwiseParallel, join};
use crate::error::{ConfigError, Result};
use crate::nn::calls::reach::unwrapped;
use crate::nn::calls::which::fits;
use crate::nn::layers::norm::LayerNorm;
use crate::nn::module::Module;
use crate::nn::named::is_member;
use crate::nn::tree::ModuleExt;

/// DeepSpeed's names of layers that are row-wise wherever they stand.
const ROWWISE: [&str; 3] = ["out_proj", "o_proj", "down_proj"];
/// Names of projections to the heads of attention, of which a module must say how many it has.
const HEADS: [&str; 14] = [
    "c_attn",
    "qkv",
    "qkv_proj",
    "query_key_value",
    "Wqkv",
    "W_pack",
    "q_proj",
    "k_proj",
    "v_proj",
    "query",
    "key",
    "value",
    "in_proj",
    "to_qkv",
];

/// Row-wise layers by the type of the module that they are in: DeepSpeed's `injection_policy`.
pub(crate) type InjectionPolicy = BTreeMap<String, Vec<String>>;

/// What all modules of the tree say of themselves ([`Module::parallel_plan`]).
pub(crate) fn own_plan(root: &dyn Module) -> ParallelPlan {
    let mut plan = ParallelPlan::new();
    for (fqn, module) in root.named_modules() {
        plan = plan.below(&fqn, module.parallel_plan().unwrap_or_default());
    }
    plan
}

/// A layer of a block that a rule is about.
struct Candidate<'a> {
    fqn: String,
    /// Within the block.
    name: String,
    layer: Option<Layer<'a>>,
}

/// Linear layers and norms of a module in order; those of attention are one.
fn candidates<'a>(block: &'a dyn Module, fqn: &str) -> Vec<Candidate<'a>> {
    let mut found: Vec<Candidate<'a>> = Vec::new();
    let mut attention: Option<String> = None;
    for (name, module) in block.named_modules() {
        if name.is_empty() || attention.as_ref().is_some_and(|outer| is_member(&name, outer)) {
            continue;
        }
        let layer = Layer::of(module).filter(|layer| !matches!(layer, Layer::Embedding(_)));
        if matches!(layer, Some(Layer::Attention(_))) {
            attention = Some(name.clone());
        }
        if layer.is_some() || unwrapped::<LayerNorm>(module).is_some() {
            found.push(Candidate { fqn: join(fqn, &name), name, layer });
        }
    }
    found
}

/// Whether a name is this one, or ends so after a dot.
fn has_suffix(name: &str, suffix: &str) -> bool {
    name.strip_suffix(suffix).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// Divides the layers of a block: `is_rowwise` by input features, the others by output features. Behind the last of them that is
/// row-wise all ranks get all features.
fn divide(block: &[Candidate<'_>], is_rowwise: impl Fn(usize) -> bool, unit: &Unit) -> ParallelPlan {
    let last = (0..block.len()).rev().find(|&at| is_rowwise(at));
    let mut plan = ParallelPlan::new();
    for (at, Candidate { fqn, layer, .. }) in block.iter().enumerate() {
        let style: ParallelStyle = match layer {
            Some(Layer::Attention(_)) => ColwiseParallel::default().into(),
            Some(Layer::Linear(linear)) if is_rowwise(at) => {
                RowwiseParallel::default().unit(unit.of(linear.in_features())).into()
            }
            Some(Layer::Linear(linear)) => {
                let style = ColwiseParallel::default().unit(unit.of(linear.out_features()));
                if last.is_some_and(|last| at > last) { style.gather_output().into() } else { style.into() }
            }
            _ => continue,
        };
        plan = plan.layer(fqn.clone(), style);
    }
    plan
}

/// Features that stay together if there are enough: DeepSpeed's `tp_grain_size`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unit {
    pub grain: i64,
    pub ranks: i64,
}

impl Unit {
    fn of(self, features: i64) -> i64 {
        let fits = self.grain > 0 && features % self.grain == 0 && features / self.grain >= self.ranks;
        if fits { self.grain } else { 1 }
    }
}

/// A plan by DeepSpeed's rules: in each block of a list of blocks, a linear layer before a norm is row-wise, and so are those with
/// known names; all others are column-wise. `None` if there is no such block.
///
/// # Errors
/// If a block has attention that does not say how many heads it has.
pub(crate) fn auto_tp(root: &dyn Module, unit: Unit) -> Result<Option<ParallelPlan>> {
    let mut plan = own_plan(root);
    let declared: Vec<String> = plan.layers.iter().map(|(fqn, _)| fqn.clone()).collect();
    let mut blocks: Vec<String> = Vec::new();
    for (fqn, module) in root.named_modules() {
        let is_element = fqn.rsplit('.').next().is_some_and(|name| name.parse::<usize>().is_ok());
        if !is_element || Layer::of(module).is_some() || blocks.iter().any(|outer| is_member(&fqn, outer)) {
            continue;
        }
        let layers = candidates(module, &fqn);
        let is_open = |it: &&Candidate<'_>| {
            matches!(it.layer, Some(Layer::Linear(_))) && !declared.iter().any(|known| fits(known, &it.fqn))
        };
        if !layers.iter().any(|it| is_open(&it)) {
            continue; // it says so itself
        }
        let is_norm = |at: usize| layers[at].layer.is_none();
        let is_rowwise = |at: usize| {
            let next = (at + 1) % layers.len();
            let last_name = layers[at].name.rsplit('.').next().unwrap_or_default();
            matches!(layers[at].layer, Some(Layer::Linear(_)))
                && (is_norm(next) || ROWWISE.contains(&last_name))
        };
        if !(0..layers.len()).any(is_rowwise) {
            continue;
        }
        let is_heads = |it: &&Candidate<'_>| HEADS.contains(&it.name.rsplit('.').next().unwrap_or_default());
        if let Some(heads) = layers.iter().filter(is_open).find(is_heads) {
            let what = format!(
                "{} seems to be of attention, and how many features a head has is not known",
                heads.fqn
            );
            let remedy = "give the module #[module(parallel_plan = ..)], which says how it is divided, or an injection_policy";
            return Err(ConfigError::new("tensor_parallel", what, remedy).into());
        }
        plan.layers.extend(divide(&layers, is_rowwise, &unit).layers);
        blocks.push(fqn);
    }
    Ok((!plan.is_empty()).then_some(plan))
}

/// A plan by an `injection_policy`: in modules of a type, the layers whose names end so are row-wise, and all other linear layers are
/// column-wise. What other modules say of themselves counts, too.
///
/// DeepSpeed compares a name with its parent's before it, so that a direct child `l1` is never row-wise there; here it is.
///
/// # Errors
/// If there is no module of a type, or no layer of a name in it.
pub(crate) fn by_policy(root: &dyn Module, policy: &InjectionPolicy, unit: Unit) -> Result<ParallelPlan> {
    const KEY: &str = "injection_policy";
    let modules = root.named_modules();
    let mut plan = own_plan(root); // which knows heads and packed projections
    for (type_name, suffixes) in policy {
        let of_type: Vec<_> = modules.iter().filter(|(_, module)| module.type_name() == type_name).collect();
        if of_type.is_empty() {
            let what = format!("`{type_name}` is the type of no module of {}", root.type_name());
            let mut known: Vec<&str> = modules.iter().map(|(_, module)| module.type_name()).collect();
            known.sort_unstable();
            known.dedup();
            return Err(ConfigError::new(KEY, what, format!("use one of {}", known.join(", "))).into());
        }
        let mut outermost: Vec<&str> = Vec::new();
        let mut unused: Vec<&String> = suffixes.iter().collect();
        for (fqn, module) in of_type {
            if outermost.iter().any(|outer| is_member(fqn, outer)) {
                continue;
            }
            outermost.push(fqn);
            let layers = candidates(*module, fqn);
            let fits = |at: usize, suffix: &str| {
                matches!(layers[at].layer, Some(Layer::Linear(_))) && has_suffix(&layers[at].name, suffix)
            };
            unused.retain(|suffix| !(0..layers.len()).any(|at| fits(at, suffix)));
            let is_rowwise = |at: usize| suffixes.iter().any(|suffix| fits(at, suffix));
            plan.layers.extend(divide(&layers, is_rowwise, &unit).layers);
        }
        if let Some(suffix) = unused.first() {
            let what = format!("`{suffix}` is the end of no name of a linear layer in {type_name}");
            let remedy = "name the layers whose outputs are summed, such as attn.out";
            return Err(ConfigError::new(KEY, what, remedy).into());
        }
    }
    Ok(plan)
}
