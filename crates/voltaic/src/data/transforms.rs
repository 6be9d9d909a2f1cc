//! Image transforms that work on a whole batch, shape `[B, C, H, W]`.
//!
//! Random ones draw from the batch's generator alone, so that a batch is the same for any number of workers.

use std::fmt;

use rand::RngExt;
use rand::rngs::StdRng;
use tch::{Kind, Tensor};

use super::batch::Batch;
use super::dataset::Dataset;
use crate::error::{ConfigError, DataError, Problem};
use crate::ffi::SharedTensor;
use crate::{Device, Result};

/// Changes a batch of images.
pub trait Transform: fmt::Debug + Send + Sync + 'static {
    /// The changed images; `images` may share memory with a dataset and must not be written to.
    ///
    /// # Errors
    /// Whatever goes wrong; the loader adds the batch and its indices.
    fn apply(&self, images: Tensor, rng: &mut StdRng) -> anyhow::Result<Tensor>;
}

/// Sizes of a batch of images.
fn image_sizes(images: &Tensor, by: &str) -> Result<(i64, i64, i64, i64)> {
    match images.size()[..] {
        [batch, channels, height, width] => Ok((batch, channels, height, width)),
        ref shape => Err(DataError::Shape {
            problem: Problem::new(
                format!("{by} was given a batch of shape {shape:?}"),
                "give images of shape [batch, channels, height, width]",
            ),
        }
        .into()),
    }
}

/// Pads each image on all sides and cuts a window of the old size out of it at a random place of its own.
#[derive(Debug, Clone, PartialEq)]
pub struct RandomCrop {
    padding: usize,
    fill: f64,
}

impl RandomCrop {
    /// Pads by `padding` pixels of value 0.
    pub fn new(padding: usize) -> Self {
        Self { padding, fill: 0.0 }
    }

    /// Pads with this value: that of black if the images are normalised already.
    pub fn fill(mut self, fill: f64) -> Self {
        self.fill = fill;
        self
    }
}

impl Transform for RandomCrop {
    fn apply(&self, images: Tensor, rng: &mut StdRng) -> anyhow::Result<Tensor> {
        let (batch, _, height, width) = image_sizes(&images, "RandomCrop")?;
        let fits = (1..=1 << 20).contains(&height.max(width)) && self.padding <= height.max(width) as usize;
        if !fits {
            return Err(DataError::Shape {
                problem: Problem::new(
                    format!("RandomCrop pads images of {height} x {width} by {} pixels", self.padding),
                    "pad by no more than the size of the images",
                ),
            }
            .into());
        }
        let padding = self.padding as i64;
        let padded = images.f_pad([padding; 4], "constant", self.fill)?;
        let windows = (0..batch)
            .map(|place| {
                let (top, left) = (rng.random_range(0..=2 * padding), rng.random_range(0..=2 * padding));
                Ok(padded.f_select(0, place)?.f_narrow(1, top, height)?.f_narrow(2, left, width)?)
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(Tensor::f_stack(&windows, 0)?)
    }
}

/// Mirrors each image left to right with a given probability.
#[derive(Debug, Clone, PartialEq)]
pub struct RandomHorizontalFlip {
    probability: f64,
}

impl RandomHorizontalFlip {
    /// Flips with `probability`, usually 0.5.
    ///
    /// # Errors
    /// [`ConfigError`] if it does not lie between 0 and 1.
    pub fn new(probability: f64) -> Result<Self> {
        if !(0.0..=1.0).contains(&probability) {
            let what = format!("{probability} is not a probability");
            return Err(
                ConfigError::new("RandomHorizontalFlip.probability", what, "choose one from 0 to 1").into()
            );
        }
        Ok(Self { probability })
    }
}

impl Transform for RandomHorizontalFlip {
    fn apply(&self, images: Tensor, rng: &mut StdRng) -> anyhow::Result<Tensor> {
        let (batch, ..) = image_sizes(&images, "RandomHorizontalFlip")?;
        let flips: Vec<bool> = (0..batch).map(|_| rng.random_bool(self.probability)).collect();
        let flips = Tensor::f_from_slice(&flips)?.f_view([-1, 1, 1, 1])?;
        Ok(images.f_flip([3])?.f_where_self(&flips, &images)?)
    }
}

/// Subtracts a mean and divides by a standard deviation, per channel; unsigned bytes are first scaled to 0 to 1.
///
/// Same values as torchvision's `ToTensor` and `Normalize`, to the bit.
#[derive(Debug)]
pub struct Normalize {
    mean: Vec<f64>,
    std: Vec<f64>,
    /// Both as tensors of shape `[C, 1, 1]`, for more than one channel.
    tensors: Option<(SharedTensor, SharedTensor)>,
}

impl Normalize {
    /// One mean and standard deviation per channel, or one of each for all channels.
    ///
    /// # Errors
    /// [`ConfigError`] if there are none, or not as many of both, or a standard deviation is not positive.
    pub fn new(mean: &[f64], std: &[f64]) -> Result<Self> {
        let problem = |what: String, remedy: &'static str| ConfigError::new("Normalize", what, remedy);
        if mean.is_empty() || mean.len() != std.len() {
            let what = format!("{} means and {} standard deviations", mean.len(), std.len());
            return Err(problem(what, "give one of each per channel, or one for all").into());
        }
        if !mean.iter().all(|mean| mean.is_finite()) || !std.iter().all(|std| std.is_finite() && *std > 0.0) {
            let what = format!("mean {mean:?}, std {std:?}");
            return Err(problem(what, "give finite means and positive standard deviations").into());
        }
        let column = |values: &[f64]| -> Result<SharedTensor> {
            let column = Tensor::f_from_slice(values)?.f_to_kind(Kind::Float)?.f_view([-1, 1, 1])?;
            Ok(SharedTensor::new(&column))
        };
        let tensors = if mean.len() > 1 { Some((column(mean)?, column(std)?)) } else { None };
        Ok(Self { mean: mean.to_vec(), std: std.to_vec(), tensors })
    }
}

impl Transform for Normalize {
    fn apply(&self, images: Tensor, _rng: &mut StdRng) -> anyhow::Result<Tensor> {
        let (_, channels, ..) = image_sizes(&images, "Normalize")?;
        if self.mean.len() > 1 && self.mean.len() as i64 != channels {
            return Err(DataError::Shape {
                problem: Problem::new(
                    format!("Normalize has {} means, the images have {channels} channels", self.mean.len()),
                    "give one mean and standard deviation per channel, or one for all",
                ),
            }
            .into());
        }
        let images = if images.f_kind()? == Kind::Uint8 {
            let mut scaled = images.f_to_kind(Kind::Float)?;
            let _ = scaled.f_div_scalar_(255.0)?;
            scaled
        } else {
            images
        };
        let mut centred;
        match &self.tensors {
            Some((mean, std)) => {
                let device = Device::of(&images)?.tch();
                centred = images.f_sub(&mean.get().f_to_device(device)?)?;
                let _ = centred.f_div_(&std.get().f_to_device(device)?)?;
            }
            None => {
                centred = images.f_sub_scalar(self.mean[0])?;
                let _ = centred.f_div_scalar_(self.std[0])?;
            }
        }
        Ok(centred)
    }
}

/// A dataset of (images, anything) whose images pass through transforms, in the order they were added.
#[derive(Debug)]
pub struct Transformed<D> {
    dataset: D,
    transforms: Vec<Box<dyn Transform>>,
}

impl<D> Transformed<D> {
    /// `dataset` with no transform yet.
    pub fn new(dataset: D) -> Self {
        Self { dataset, transforms: Vec::new() }
    }

    /// Adds a transform after those that are there.
    pub fn then(mut self, transform: impl Transform) -> Self {
        self.transforms.push(Box::new(transform));
        self
    }
}

impl<Y, D> Dataset for Transformed<D>
where
    D: Dataset<Batch = (Tensor, Y)>,
    (Tensor, Y): Batch,
{
    type Batch = (Tensor, Y);

    fn len(&self) -> usize {
        self.dataset.len()
    }

    fn batch(&self, indices: &[usize], rng: &mut StdRng) -> anyhow::Result<(Tensor, Y)> {
        let (mut images, rest) = self.dataset.batch(indices, rng)?;
        for transform in &self.transforms {
            images = transform.apply(images, rng)?;
        }
        Ok((images, rest))
    }
}
