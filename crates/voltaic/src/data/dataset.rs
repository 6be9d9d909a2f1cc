//! Datasets: samples by index, given as stacked batches.

use std::marker::PhantomData;
use std::sync::Arc;

use rand::rngs::StdRng;
use tch::Tensor;

use super::batch::Batch;
use crate::Result;
use crate::device::Device;
use crate::error::{ConfigError, DataError, Problem};
use crate::ffi::{self, SharedTensor};

/// What threads can share: every type that is `Send` and `Sync`. It says what to write where a [`Dataset`] is not.
#[diagnostic::on_unimplemented(
    message = "the threads of a loader cannot share `{Self}`",
    label = "a field is not `Send` and `Sync`, such as a `Tensor`",
    note = "a field that holds a `Tensor` is a `SharedTensor`, and one of `Vec<Tensor>` a `Vec<SharedTensor>`",
    note = "a data set that only picks rows of tensors is `TensorDataset::new((x, y))?`"
)]
pub trait Shareable {}

impl<T: Send + Sync + ?Sized> Shareable for T {}

/// No type implements it.
#[doc(hidden)]
pub trait Never {}

// It never applies. With a single implementation, rustc would look into it and name a pointer within tch instead of this trait.
impl<T: ?Sized> Shareable for T where PhantomData<T>: Never {}

/// Samples that can be reached by their index.
///
/// Samples are requested by the batch, not one by one, so that a dataset held in memory can gather them with one
/// operator. Loader threads call [`Dataset::batch`] at the same time on the same dataset, hence `Sync`: a field that holds a tensor is a
/// [`SharedTensor`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a data set",
    note = "tensors become one by `TensorDataset::new((x, y))?`, also a tensor alone",
    note = "for anything else implement `Dataset`: how many samples there are, and those of some indices as tensors"
)]
pub trait Dataset: Shareable + Send + Sync + 'static {
    /// What [`Dataset::batch`] gives.
    type Batch: Batch;

    /// Number of samples.
    fn len(&self) -> usize;

    /// Whether there is no sample.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The samples `indices`, stacked in that order.
    ///
    /// Random transforms draw from `rng` and from nothing else: its state depends only on the loader's seed, the
    /// epoch, the batch's place in it and the rank, so the values are the same for any `num_workers`.
    ///
    /// # Errors
    /// Whatever goes wrong; the loader adds the batch and its indices.
    fn batch(&self, indices: &[usize], rng: &mut StdRng) -> anyhow::Result<Self::Batch>;
}

impl<D: Dataset + ?Sized> Dataset for Arc<D> {
    type Batch = D::Batch;

    fn len(&self) -> usize {
        (**self).len()
    }

    fn batch(&self, indices: &[usize], rng: &mut StdRng) -> anyhow::Result<Self::Batch> {
        (**self).batch(indices, rng)
    }
}

/// Batches that a [`TensorDataset`] can hold: a tensor, a pair or a triple of tensors, or a `Vec` of them.
pub trait TensorBatch: Batch {
    /// The tensors in order.
    fn into_tensors(self) -> Vec<Tensor>;

    /// The batch made of what `gather` gives for each of `tensors`, which are as many as `into_tensors` gave.
    ///
    /// # Errors
    /// That of `gather`.
    fn gathered(tensors: &[SharedTensor], gather: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self>;
}

impl TensorBatch for Tensor {
    fn into_tensors(self) -> Vec<Tensor> {
        vec![self]
    }

    fn gathered(tensors: &[SharedTensor], gather: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        gather(tensors[0].get())
    }
}

impl TensorBatch for (Tensor, Tensor) {
    fn into_tensors(self) -> Vec<Tensor> {
        vec![self.0, self.1]
    }

    fn gathered(tensors: &[SharedTensor], gather: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok((gather(tensors[0].get())?, gather(tensors[1].get())?))
    }
}

impl TensorBatch for (Tensor, Tensor, Tensor) {
    fn into_tensors(self) -> Vec<Tensor> {
        vec![self.0, self.1, self.2]
    }

    fn gathered(tensors: &[SharedTensor], gather: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok((gather(tensors[0].get())?, gather(tensors[1].get())?, gather(tensors[2].get())?))
    }
}

impl TensorBatch for Vec<Tensor> {
    fn into_tensors(self) -> Vec<Tensor> {
        self
    }

    fn gathered(tensors: &[SharedTensor], gather: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        tensors.iter().map(|tensor| gather(tensor.get())).collect()
    }
}

/// Tensors whose dimension 0 counts the samples, as `torch.utils.data.TensorDataset`.
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use voltaic::data::{Dataset, TensorDataset};
/// let x = Tensor::randn([100, 8], (Kind::Float, Device::Cpu));
/// let y = Tensor::zeros([100], (Kind::Int64, Device::Cpu));
/// let dataset = TensorDataset::new((x, y))?;
/// assert_eq!(dataset.len(), 100);
/// # Ok::<(), voltaic::Error>(())
/// ```
#[derive(Debug)]
pub struct TensorDataset<T: TensorBatch> {
    tensors: Vec<SharedTensor>,
    len: usize,
    batch: PhantomData<fn() -> T>,
}

impl<T: TensorBatch> TensorDataset<T> {
    /// Wraps tensors of equal size in dimension 0. They share memory with the dataset and must not be changed in
    /// place from now on.
    ///
    /// # Errors
    /// [`DataError::Shape`] if there is no tensor, one is a scalar, or their sizes in dimension 0 differ.
    pub fn new(tensors: T) -> Result<Self> {
        let tensors = tensors.into_tensors();
        let sizes: Vec<Vec<i64>> = tensors.iter().map(Tensor::size).collect();
        let len = sizes.first().and_then(|size| size.first()).copied();
        let Some(len) = len.filter(|len| sizes.iter().all(|size| size.first() == Some(len))) else {
            return Err(DataError::Shape {
                problem: Problem::new(
                    format!("TensorDataset was given tensors of shapes {sizes:?}"),
                    "give tensors whose dimension 0, the number of samples, is the same",
                ),
            }
            .into());
        };
        let tensors = tensors.iter().map(SharedTensor::new).collect();
        Ok(Self { tensors, len: len as usize, batch: PhantomData })
    }
}

impl<T: TensorBatch> Dataset for TensorDataset<T> {
    type Batch = T;

    fn len(&self) -> usize {
        self.len
    }

    fn batch(&self, indices: &[usize], _rng: &mut StdRng) -> anyhow::Result<T> {
        let index = index_tensor(indices)?;
        Ok(T::gathered(&self.tensors, |tensor| {
            let device = Device::of(tensor)?;
            if device == Device::Cpu {
                return Ok(tensor.f_index_select(0, &index)?);
            }
            Ok(tensor.f_index_select(0, &index.f_to_device(device.tch())?)?)
        })?)
    }
}

/// `indices` as an int64 tensor on the CPU, shape `[indices.len()]`.
pub(in crate::data) fn index_tensor(indices: &[usize]) -> Result<Tensor> {
    let indices: Vec<i64> = indices.iter().map(|&index| index as i64).collect();
    Ok(Tensor::f_from_slice(&indices)?)
}

/// Some samples of another dataset, in an order of their own.
#[derive(Debug, Clone)]
pub struct Subset<D> {
    dataset: D,
    indices: Arc<[usize]>,
}

impl<D: Dataset> Subset<D> {
    /// The samples `indices` of `dataset`; an index may occur more than once.
    ///
    /// # Errors
    /// [`DataError::Index`] if an index lies beyond the dataset.
    pub fn new(dataset: D, indices: impl Into<Arc<[usize]>>) -> Result<Self> {
        let indices = indices.into();
        let len = dataset.len();
        if let Some(&index) = indices.iter().find(|&&index| index >= len) {
            return Err(DataError::Index { by: "Subset".to_owned(), index, len }.into());
        }
        Ok(Self { dataset, indices })
    }

    /// Indices into the dataset underneath.
    pub fn indices(&self) -> &[usize] {
        &self.indices
    }

    /// The dataset underneath.
    pub fn dataset(&self) -> &D {
        &self.dataset
    }
}

impl<D: Dataset> Dataset for Subset<D> {
    type Batch = D::Batch;

    fn len(&self) -> usize {
        self.indices.len()
    }

    fn batch(&self, indices: &[usize], rng: &mut StdRng) -> anyhow::Result<D::Batch> {
        let inner: Vec<usize> = indices.iter().map(|&index| self.indices[index]).collect();
        self.dataset.batch(&inner, rng)
    }
}

/// Splits a dataset at random into parts of the given lengths, each sample in exactly one part.
///
/// Same parts as `torch.utils.data.random_split(dataset, lengths, Generator().manual_seed(seed))`.
///
/// # Errors
/// [`ConfigError`] if the lengths do not add up to the dataset's.
pub fn random_split<D: Dataset>(dataset: D, lengths: &[usize], seed: u64) -> Result<Vec<Subset<Arc<D>>>> {
    let len = dataset.len();
    if lengths.iter().sum::<usize>() != len {
        return Err(ConfigError::new(
            "random_split.lengths",
            format!(
                "{lengths:?} add up to {}, but the dataset has {len} samples",
                lengths.iter().sum::<usize>()
            ),
            "choose lengths that add up to the dataset's (`fractional_lengths` makes them from fractions)",
        )
        .into());
    }
    let dataset = Arc::new(dataset);
    let order = ffi::randperm(len, seed)?;
    let mut rest = order.as_slice();
    let mut parts = Vec::with_capacity(lengths.len());
    for &length in lengths {
        let (part, after) = rest.split_at(length);
        parts.push(Subset::new(dataset.clone(), part)?);
        rest = after;
    }
    Ok(parts)
}

/// Lengths for [`random_split`] from fractions that add up to 1: each rounded down, what remains handed out one by
/// one from the first, as PyTorch does.
///
/// # Errors
/// [`ConfigError`] if a fraction lies outside 0 to 1 or their sum is not 1.
pub fn fractional_lengths(len: usize, fractions: &[f64]) -> Result<Vec<usize>> {
    let sum: f64 = fractions.iter().sum();
    if !fractions.iter().all(|fraction| (0.0..=1.0).contains(fraction)) || (sum - 1.0).abs() > 1e-6 {
        return Err(ConfigError::new(
            "random_split.fractions",
            format!("{fractions:?} add up to {sum}"),
            "choose fractions between 0 and 1 that add up to 1",
        )
        .into());
    }
    let mut lengths: Vec<usize> =
        fractions.iter().map(|fraction| (len as f64 * fraction).floor() as usize).collect();
    let rest = len.saturating_sub(lengths.iter().sum());
    let parts = lengths.len();
    for place in 0..rest {
        lengths[place % parts] += 1;
    }
    Ok(lengths)
}
