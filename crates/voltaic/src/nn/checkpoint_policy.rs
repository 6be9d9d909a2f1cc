//! Selective activation checkpointing: which operators' results a segment keeps.

use std::fmt;
use std::sync::Arc;

use crate::error::{ConfigError, Error, Problem, Result};
use crate::ffi::SavePolicy;

/// Names for several operators.
const GROUPS: [(&str, &[&str]); 2] = [
    (
        "matmul",
        &[
            "mm",
            "addmm",
            "bmm",
            "baddbmm",
            "addbmm",
            "mv",
            "addmv",
            "dot",
            "_addmm_activation",
            "_scaled_mm",
            "_int_mm",
        ],
    ),
    (
        "attention",
        &[
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
            "_flash_attention_forward",
            "_efficient_attention_forward",
            "_cudnn_attention_forward",
        ],
    ),
];

/// What a checkpointed segment keeps beside its inputs: the results of some operators. Its recomputation takes them in place of computing
/// them again, so that memory and time lie between those of a plain call and those of a segment that keeps nothing (the default).
///
/// ```
/// use voltaic::nn::{CheckpointPolicy, Forward, Linear, Module};
/// use voltaic::Tensor;
///
/// #[derive(Module)]
/// struct Net {
///     l1: Linear,
///     l2: Linear,
///     #[module(skip)]
///     policy: CheckpointPolicy, // CheckpointPolicy::must_save(["matmul", "attention"])?
/// }
///
/// impl Forward for Net {
///     fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
///         self.policy.checkpoint_with(self, x, |net, x| {
///             net.l2.forward(&net.l1.forward(x)?.f_gelu("none")?)
///         })
///     }
/// }
/// ```
///
/// Clones share the operators.
///
/// Source: `torch.utils.checkpoint.create_selective_checkpoint_contexts` with `CheckpointPolicy.MUST_SAVE` for these operators and
/// `PREFER_RECOMPUTE` for all others.
#[derive(Clone, Default)]
pub struct CheckpointPolicy {
    names: Vec<String>,
    operators: Option<Arc<SavePolicy>>,
}

impl CheckpointPolicy {
    /// Keeps the results of these operators: `matmul` (products of matrices), `attention` (fused kernels; attention that is computed from
    /// products is of `matmul`), or the name of an operator as libtorch has it, `convolution` or `aten::native_layer_norm`.
    ///
    /// An operator that is made of others is not seen: name those. One that draws random numbers is run again, and so is one
    /// whose result is changed in place afterwards.
    ///
    /// # Errors
    /// [`ConfigError`] with the first name that is that of no operator that computes new tensors.
    pub fn must_save<S: Into<String>>(names: impl IntoIterator<Item = S>) -> Result<Self> {
        let names = names.into_iter().map(Into::into).collect();
        let of = Self::of(names);
        Ok(of.map_err(|Problem { what, remedy }| {
            ConfigError::new("CheckpointPolicy::must_save", what, remedy)
        })?)
    }

    /// [`CheckpointPolicy::must_save`], with the problem alone.
    pub(crate) fn of(names: Vec<String>) -> std::result::Result<Self, Problem> {
        let mut operators = SavePolicy::default();
        for name in &names {
            let group = GROUPS.iter().find(|(group, _)| group == name).map(|(_, group)| *group);
            let mut found = 0;
            for operator in group.unwrap_or(&[name.as_str()]) {
                let added = match operator.contains("::") {
                    true => operators.add(operator),
                    false => operators.add(&format!("aten::{operator}")),
                };
                found += added.map_err(|error| Error::from(error).into_problem("name other operators"))?;
            }
            if found == 0 {
                let what = format!("`{name}` is no operator that computes new tensors");
                let groups = GROUPS.map(|(group, _)| group).join(", ");
                let remedy = "or an operator of libtorch such as convolution; of one that is made of others name those";
                return Err(Problem::new(what, format!("use {groups}, {remedy}")));
            }
        }
        Ok(Self { operators: (!names.is_empty()).then(|| Arc::new(operators)), names })
    }

    /// The names that it was made from.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    pub(super) fn operators(&self) -> Option<&SavePolicy> {
        self.operators.as_deref()
    }
}

impl fmt::Debug for CheckpointPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CheckpointPolicy").field(&self.names).finish()
    }
}

impl PartialEq for CheckpointPolicy {
    fn eq(&self, other: &Self) -> bool {
        self.names == other.names
    }
}
