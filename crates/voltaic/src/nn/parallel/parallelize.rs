//! Divides the layers of a module among the ranks of a group, in place.

use std::collections::HashMap;
use std::sync::Arc;

use tch::Tensor;

use super::mode::{Parallel, ParallelMode, Side};
use super::plan::{ColwiseParallel, ParallelPlan, ParallelStyle, RowwiseParallel};
use super::shard::{Division, TensorShard};
use crate::distributed::{ProcessGroup, collective_scope};
use crate::error::{ConfigError, ConfigProblem, Problem, Result};
use crate::nn::calls::reach::unwrapped;
use crate::nn::calls::which::fits;
use crate::nn::layers::attention::MultiheadAttention;
use crate::nn::layers::dropout::Dropout;
use crate::nn::layers::embedding::Embedding;
use crate::nn::layers::linear::Linear;
use crate::nn::module::{Member, Module};
use crate::nn::parameter::Parameter;
use crate::nn::quant::convert::has_inference_layers;
use crate::nn::tree::ModuleExt;

/// Stands for the key in errors about a layer.
const KEY: &str = "tensor_parallel";

/// Divides the layers that the plan names among the ranks of a group, in place: each rank keeps its slices of their weights, and the
/// layers exchange what they need in forward and backward. Outputs and gradients are those of the whole module, as far as sums in another
/// order allow; the ranks must get the same inputs. Ranks start from the weights of rank 0.
///
/// [`Linear`], [`Embedding`] and [`MultiheadAttention`] can be divided, evenly or not. State dicts keep the whole tensors:
/// [`ModuleExt::state_dict`] gathers them, and [`ModuleExt::load_state_dict`] takes each rank's slices.
///
/// ```no_run
/// use voltaic::nn::parallel::{ColwiseParallel, ParallelPlan, RowwiseParallel, parallelize_module};
/// # use voltaic::distributed::World;
/// # use voltaic::models::{Mlp, MlpConfig};
/// # fn f(world: World, mlp: &Mlp) -> voltaic::Result<()> {
/// let plan = ParallelPlan::new()
///     .layer("layers.0", ColwiseParallel::default())
///     .layer("layers.2", RowwiseParallel::default());
/// if let Some(group) = world.mesh().tp.group() {
///     parallelize_module(mlp, group, &plan)?;
/// }
/// # Ok(())
/// # }
/// ```
///
/// Modules that count heads themselves must take that number from the tensors, as `x.unflatten(-1, [-1, head_dim])` does.
///
/// Source: `torch.distributed.tensor.parallel.parallelize_module`.
///
/// # Collective
/// All ranks of the group, with the same plan.
///
/// # Errors
/// [`ConfigError`] if the plan names no layer, or one that cannot be divided so; if weights that are tied would be divided in different
/// ways; if the module is divided already. Nothing is changed then.
pub fn parallelize_module(
    module: &(impl ModuleExt + ?Sized),
    group: &Arc<ProcessGroup>,
    plan: &ParallelPlan,
) -> Result<()> {
    parallelize(module.as_dyn(), group, plan, Values::OfRankZero)
}

/// Where the values of a divided module come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Values {
    /// Its own, on rank 0.
    OfRankZero,
    /// They are loaded afterwards: weights that have no memory yet are not drawn.
    Loaded,
}

/// [`parallelize_module`].
pub(crate) fn parallelize(
    module: &dyn Module,
    group: &Arc<ProcessGroup>,
    plan: &ParallelPlan,
    values: Values,
) -> Result<()> {
    let layers = layers_of(module, plan)?;
    if is_parallel(module, &layers, group)? {
        return Ok(());
    }
    if has_inference_layers(module) && group.world_size() > 1 {
        let what = format!("layers of {} measure or compute for fp8 inference", module.type_name());
        return Err(ConfigError::new(KEY, what, "leave it out; quantized layers are whole").into());
    }
    let mut divided = Vec::new();
    let mut problems = Vec::new();
    for (fqn, layer, style) in &layers {
        match layer.divide(*style, group) {
            Ok(layer) => divided.push((fqn, layer)),
            Err(Problem { what, remedy }) => {
                let what = format!("{fqn} ({}): {what}", layer.module().type_name());
                problems.push(ConfigProblem::new(KEY, what, remedy));
            }
        }
    }
    if !problems.is_empty() {
        return Err(ConfigError { problems }.into());
    }
    let shards = shards_of(module, &divided)?;
    if group.world_size() == 1 {
        return Ok(());
    }
    let _named = collective_scope("slices of the weights");
    let _no_grad = tch::no_grad_guard();
    for (_, parameter) in module.named_parameters() {
        match (shards.get(&parameter.id()), values) {
            (None, Values::OfRankZero) => parameter.update(|whole| of_rank_zero(group, whole))?,
            (None, Values::Loaded) => {}
            (Some(shard), Values::Loaded) if parameter.is_provisional() => {
                let options = (parameter.kind(), parameter.device());
                parameter.drop_provisional()?;
                parameter.set_shard(&Tensor::f_zeros(shard.local_shape(), options)?, shard.clone())?;
            }
            (Some(shard), _) => {
                let whole = parameter.try_tensor()?.f_detach()?;
                if values == Values::OfRankZero {
                    of_rank_zero(group, &whole)?;
                }
                parameter.set_shard(&shard.slice(&whole)?, shard.clone())?;
            }
        }
    }
    if values == Values::OfRankZero {
        module
            .named_buffers()
            .into_iter()
            .try_for_each(|(_, buffer)| of_rank_zero(group, &buffer.detach()))?;
    }
    for (_, layer) in divided {
        layer.modes.into_iter().for_each(|(mode, parallel)| mode.set(Some(parallel)));
    }
    Ok(())
}

/// Gives each rank all of the weights and layers of which it has slices.
///
/// # Collective
/// All ranks of the group.
pub(crate) fn make_whole(module: &dyn Module) -> Result<()> {
    for (_, parameter) in module.named_parameters() {
        if parameter.tensor_shard().is_some() {
            parameter.end_shard(&parameter.lasting()?)?;
        }
    }
    module.named_modules().into_iter().filter_map(|(_, module)| Layer::of(module)).for_each(|layer| {
        layer.mode().set(None);
    });
    Ok(())
}

/// Whether all ranks have slices of the same sizes.
pub(crate) fn is_even(module: &dyn Module) -> bool {
    module.parameters().iter().filter_map(Parameter::tensor_shard).all(|shard| shard.is_even())
}

/// Whether layers drop elements at random in training.
pub(crate) fn has_dropout(module: &dyn Module) -> bool {
    module.named_modules().into_iter().any(|(_, module)| {
        let dropout = unwrapped::<Dropout>(module).map(Dropout::p);
        dropout.or_else(|| unwrapped(module).map(MultiheadAttention::dropout_p)).is_some_and(|p| p > 0.0)
    })
}

/// The tensor becomes rank 0's.
fn of_rank_zero(group: &ProcessGroup, tensor: &Tensor) -> Result<()> {
    let tensor = tensor.f_detach()?;
    let dense = tensor.f_contiguous()?;
    group.broadcast(&dense, 0)?;
    if dense.data_ptr() != tensor.data_ptr() {
        tensor.shallow_clone().f_copy_(&dense)?;
    }
    Ok(())
}

/// A layer that can be divided.
#[derive(Clone, Copy)]
pub(super) enum Layer<'a> {
    Linear(&'a Linear),
    Embedding(&'a Embedding),
    Attention(&'a MultiheadAttention),
}

impl<'a> Layer<'a> {
    pub fn of(module: &'a dyn Module) -> Option<Self> {
        let linear = || unwrapped(module).map(Self::Linear);
        let embedding = || unwrapped(module).map(Self::Embedding);
        linear().or_else(embedding).or_else(|| unwrapped(module).map(Self::Attention))
    }

    fn module(self) -> &'a dyn Module {
        match self {
            Self::Linear(layer) => layer,
            Self::Embedding(layer) => layer,
            Self::Attention(layer) => layer,
        }
    }

    fn mode(self) -> &'a ParallelMode {
        match self {
            Self::Linear(layer) => &layer.parallel,
            Self::Embedding(layer) => &layer.parallel,
            Self::Attention(layer) => &layer.parallel,
        }
    }

    fn divide(self, style: ParallelStyle, group: &Arc<ProcessGroup>) -> Result<Divided<'a>, Problem> {
        let ranks = group.world_size();
        match (self, style) {
            (Self::Linear(layer), ParallelStyle::Colwise(ColwiseParallel { parts, unit, gather_output })) => {
                let division = Division::new(layer.out_features(), parts, unit, ranks)?;
                let side = Side::Output { is_gathered: gather_output };
                let of_bias = layer.bias.as_ref().map(|bias| (bias, 0));
                let slices = [Some((&layer.weight, 0)), of_bias].into_iter().flatten().collect();
                Ok(Divided::one(&layer.parallel, group, division, side, slices))
            }
            (Self::Linear(layer), ParallelStyle::Rowwise(RowwiseParallel { unit })) => {
                let division = Division::new(layer.in_features(), 1, unit, ranks)?;
                Ok(Divided::one(&layer.parallel, group, division, Side::Input, vec![(&layer.weight, 1)]))
            }
            (
                Self::Embedding(layer),
                ParallelStyle::Colwise(ColwiseParallel { parts, unit, gather_output }),
            ) => {
                if parts != 1 {
                    return Err(Problem::new(format!("vectors of {parts} parts"), "leave parts out"));
                }
                let division = Division::new(layer.embedding_dim(), 1, unit, ranks)?;
                let side = Side::Output { is_gathered: gather_output };
                Ok(Divided::one(&layer.parallel, group, division, side, vec![(&layer.weight, 1)]))
            }
            (Self::Embedding(layer), ParallelStyle::Rowwise(RowwiseParallel { unit })) => {
                let division = Division::new(layer.num_embeddings(), 1, unit, ranks)?;
                Ok(Divided::one(&layer.parallel, group, division, Side::Input, vec![(&layer.weight, 0)]))
            }
            (Self::Attention(layer), ParallelStyle::Colwise(_)) => Self::divide_heads(layer, group),
            (Self::Attention(_), ParallelStyle::Rowwise(_)) => {
                let what = "attention is divided by heads".to_owned();
                Err(Problem::new(what, "name it with ColwiseParallel"))
            }
        }
    }

    /// The heads of the projections, and the features of these heads in what follows.
    fn divide_heads(
        layer: &'a MultiheadAttention,
        group: &Arc<ProcessGroup>,
    ) -> Result<Divided<'a>, Problem> {
        let (embed_dim, head_dim, ranks) = (layer.embed_dim(), layer.head_dim(), group.world_size());
        let packed = Division::new(3 * embed_dim, 3, head_dim, ranks)?;
        let heads = Division::new(embed_dim, 1, head_dim, ranks)?;
        let parallel = |side| Parallel { group: group.clone(), division: heads.clone(), side };
        let mut slices =
            vec![(&layer.in_proj_weight, 0, packed.clone()), (&layer.out_proj.weight, 1, heads.clone())];
        slices.extend(layer.in_proj_bias.as_ref().map(|bias| (bias, 0, packed)));
        let modes = vec![
            (&layer.parallel, parallel(Side::Output { is_gathered: false })),
            (&layer.out_proj.parallel, parallel(Side::Input)),
        ];
        Ok(Divided { modes, slices })
    }
}

/// What becomes of a layer.
struct Divided<'a> {
    modes: Vec<(&'a ParallelMode, Parallel)>,
    slices: Vec<(&'a Parameter, usize, Division)>,
}

impl<'a> Divided<'a> {
    fn one(
        mode: &'a ParallelMode,
        group: &Arc<ProcessGroup>,
        division: Division,
        side: Side,
        slices: Vec<(&'a Parameter, usize)>,
    ) -> Self {
        let slices = slices.into_iter().map(|(parameter, dim)| (parameter, dim, division.clone())).collect();
        Self { modes: vec![(mode, Parallel { group: group.clone(), division, side })], slices }
    }
}

type Named<'a> = (String, Layer<'a>, ParallelStyle);

/// The layers that the plan names, each once.
fn layers_of<'a>(module: &'a dyn Module, plan: &ParallelPlan) -> Result<Vec<Named<'a>>> {
    let all: Vec<(String, &dyn Module)> = module.named_modules();
    let mut layers: Vec<Named<'a>> = Vec::new();
    for (name, style) in &plan.layers {
        let mut named = all.iter().filter(|(fqn, _)| fits(name, fqn)).peekable();
        if named.peek().is_none() {
            let what = format!("the plan names `{name}`, and {} has no such module", module.type_name());
            return Err(ConfigError::new(KEY, what, "use an fqn of module.named_modules()").into());
        }
        for (fqn, found) in named {
            let Some(layer) = Layer::of(*found) else {
                let what = format!("the plan names {fqn}, which is a {}", found.type_name());
                let remedy = "name a Linear, an Embedding or a MultiheadAttention";
                return Err(ConfigError::new(KEY, what, remedy).into());
            };
            if !layers.iter().any(|(_, known, _)| std::ptr::eq(known.mode(), layer.mode())) {
                layers.push((fqn.clone(), layer, *style));
            }
        }
    }
    Ok(layers)
}

/// Whether all layers are divided among as many ranks already. They exchange their results in this group from now on, which may be that
/// of another trainer.
fn is_parallel(module: &dyn Module, layers: &[Named<'_>], group: &Arc<ProcessGroup>) -> Result<bool> {
    let known: Vec<_> =
        layers.iter().filter_map(|(fqn, layer, _)| Some((fqn, layer.mode().get()?))).collect();
    let Some((fqn, _)) = known.first() else { return Ok(false) };
    let place = |group: &ProcessGroup| (group.rank(), group.world_size());
    if known.len() == layers.len() && known.iter().all(|(_, parallel)| place(&parallel.group) == place(group))
    {
        for (_, module) in module.named_modules() {
            if let Some(layer) = Layer::of(module)
                && let Some(own) = layer.mode().get()
            {
                let (division, side) = (own.division.clone(), own.side);
                layer.mode().set(Some(Parallel { group: group.clone(), division, side }));
            }
        }
        for parameter in module.parameters() {
            if let Some(shard) = parameter.tensor_shard() {
                parameter.note_shard(Arc::new(shard.among(group)));
            }
        }
        return Ok(true);
    }
    let what = format!("{fqn} is divided already, by another plan or among other ranks");
    Err(ConfigError::new(KEY, what, "create a new module, and load its weights").into())
}

/// The slices by parameter. Tied weights must be divided in the same way wherever they are used.
fn shards_of(
    module: &dyn Module,
    divided: &[(&String, Divided<'_>)],
) -> Result<HashMap<u64, Arc<TensorShard>>> {
    let mut shards: HashMap<u64, (String, Arc<TensorShard>)> = HashMap::new();
    let differs = |fqn: &str, other: &str| -> crate::Error {
        let what =
            format!("{fqn} and {other} share a weight, and the plan does not divide it in the same way");
        let remedy = "divide an embedding with RowwiseParallel and the layer that shares its weight with \
                      ColwiseParallel, or leave both whole";
        ConfigError::new(KEY, what, remedy).into()
    };
    for (fqn, layer) in divided {
        for (parameter, dim, division) in &layer.slices {
            let Some((_, parallel)) = layer.modes.first() else { continue };
            let (group, shape) = (parallel.group.clone(), parameter.size());
            let shard = Arc::new(TensorShard::new(group, shape, *dim, division.clone()));
            match shards.get(&parameter.id()) {
                Some((other, known)) if *known != shard => return Err(differs(fqn, other)),
                Some(_) => {}
                None => drop(shards.insert(parameter.id(), ((*fqn).clone(), shard))),
            }
        }
    }
    for (name, found) in module.named_modules() {
        let mut result = Ok(());
        found.members(&mut |_, member| {
            if let Member::Parameter(parameter) = member
                && let Some((other, _)) = shards.get(&parameter.id())
            {
                let is_divided = divided
                    .iter()
                    .any(|(_, layer)| layer.slices.iter().any(|(known, ..)| std::ptr::eq(*known, parameter)));
                if !is_divided && result.is_ok() {
                    result = Err(differs(&name, other));
                }
            }
        });
        result?;
    }
    Ok(shards.into_iter().map(|(id, (_, shard))| (id, shard)).collect())
}
