//! The lookup table.

use std::fmt;

use tch::Tensor;

use crate::error::{Error, ModuleError, Problem, Result};
use crate::nn::calls::call::within_call;
use crate::nn::check::{at_least, empty, refuse};
use crate::nn::init;
use crate::nn::misfit::note_misfit;
use crate::nn::module::{Forward, Module};
use crate::nn::parallel::mode::{ParallelMode, Side};
use crate::nn::parameter::Parameter;

/// Looks up a vector for each index, as `torch.nn.Embedding`.
///
/// Input: integers in `0..num_embeddings` of any shape `[*]`; output `[*, embedding_dim]`.
///
/// ```
/// use voltaic::nn::{Embedding, Forward};
/// # use voltaic::Tensor;
///
/// # fn main() -> anyhow::Result<()> {
/// let embedding = Embedding::new(65, 128)?;
/// let padded = Embedding::builder(65, 128).padding_idx(0).build()?;
/// let tokens = Tensor::from_slice2(&[[1_i64, 5, 64], [2, 0, 0]]);
/// assert_eq!(padded.forward(&tokens)?.size(), [2, 3, 128]);
/// # Ok(())
/// # }
/// ```
#[derive(Module)]
pub struct Embedding {
    /// Shape `[num_embeddings, embedding_dim]`, initially drawn from the standard normal distribution.
    pub weight: Parameter,
    num_embeddings: i64,
    embedding_dim: i64,
    padding_idx: Option<i64>,
    /// Whether this rank has a slice of it.
    #[module(skip)]
    pub(in crate::nn) parallel: ParallelMode,
}

impl Embedding {
    /// A table of `num_embeddings` vectors.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`] if a size is below 1.
    pub fn new(num_embeddings: i64, embedding_dim: i64) -> Result<Self> {
        Self::builder(num_embeddings, embedding_dim).build()
    }

    /// A table with options.
    pub fn builder(num_embeddings: i64, embedding_dim: i64) -> EmbeddingBuilder {
        EmbeddingBuilder { num_embeddings, embedding_dim, padding_idx: None }
    }

    /// Number of vectors.
    pub fn num_embeddings(&self) -> i64 {
        self.num_embeddings
    }

    /// Size of each vector.
    pub fn embedding_dim(&self) -> i64 {
        self.embedding_dim
    }

    /// Looks `own` up in this rank's part of the table, of the indices that were given.
    fn look_up(&self, own: &Tensor, padding_idx: i64, given: &Tensor) -> Result<Tensor> {
        let output = Tensor::f_embedding(&self.weight, own, padding_idx, false, false);
        output.map_err(|error| match self.misuse(given) {
            Some(what) => {
                let remedy = format!("give integers in 0..{}", self.num_embeddings);
                note_misfit(self);
                Error::from(ModuleError::Input {
                    layer: format!("{self:?}"),
                    problem: Problem::new(what, remedy),
                })
            }
            None => error.into(),
        })
    }

    /// Why libtorch refused these indices. Reads them back to the host.
    fn misuse(&self, indices: &Tensor) -> Option<String> {
        if !matches!(indices.f_kind(), Ok(tch::Kind::Int64 | tch::Kind::Int)) {
            return Some(format!("the input's dtype is {:?}", indices.f_kind().ok()?));
        }
        let smallest = indices.f_min().and_then(|index| index.f_int64_value(&[])).ok()?;
        let largest = indices.f_max().and_then(|index| index.f_int64_value(&[])).ok()?;
        (smallest < 0 || largest >= self.num_embeddings)
            .then(|| format!("the indices reach from {smallest} to {largest}"))
    }
}

impl Forward for Embedding {
    fn forward(&self, indices: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, indices, |indices| {
            Parameter::unshard_all([Some(&self.weight)])?;
            let padding_idx = self.padding_idx.unwrap_or(-1);
            let Some(parallel) = self.parallel.get() else {
                return Ok(self.look_up(indices, padding_idx, indices)?);
            };
            let own_padding_idx = match parallel.side {
                Side::Output { .. } => padding_idx,
                Side::Input => {
                    let own = padding_idx - parallel.start();
                    if (0..parallel.len()).contains(&own) { own } else { -1 }
                }
            };
            Ok(parallel.look_up(indices, |own| self.look_up(own, own_padding_idx, indices))?)
        })
    }
}

impl fmt::Debug for Embedding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Embedding({}, {}{})", self.num_embeddings, self.embedding_dim, self.parallel)
    }
}

/// Options of an [`Embedding`].
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until build()"]
pub struct EmbeddingBuilder {
    num_embeddings: i64,
    embedding_dim: i64,
    padding_idx: Option<i64>,
}

impl EmbeddingBuilder {
    /// The index of padding: its vector is 0 at first and gets no gradient (default: none).
    pub fn padding_idx(mut self, padding_idx: i64) -> Self {
        self.padding_idx = Some(padding_idx);
        self
    }

    /// Makes the table.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`] if a size is below 1, or the index of padding is none of the table's.
    pub fn build(self) -> Result<Embedding> {
        let Self { num_embeddings, embedding_dim, padding_idx } = self;
        let sizes = [("num_embeddings", &[num_embeddings][..]), ("embedding_dim", &[embedding_dim])];
        at_least("Embedding", 1, sizes)?;
        if let Some(index) = padding_idx.filter(|index| !(0..num_embeddings).contains(index)) {
            let remedy = format!("give an index in 0..{num_embeddings}");
            return refuse("Embedding", format!("padding_idx is {index}"), remedy);
        }
        let weight = Parameter::new(empty(&[num_embeddings, embedding_dim])?);
        init::normal_(&weight, 0.0, 1.0)?;
        if let Some(index) = padding_idx {
            init::zeros_(&weight.detach().f_select(0, index)?)?;
        }
        Ok(Embedding {
            weight,
            num_embeddings,
            embedding_dim,
            padding_idx,
            parallel: ParallelMode::default(),
        })
    }
}
