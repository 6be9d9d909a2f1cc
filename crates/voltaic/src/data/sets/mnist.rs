//! MNIST: handwritten digits in idx files.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rand::rngs::StdRng;
use tch::{Kind, Tensor};

use super::idx;
use crate::data::dataset::Dataset;
use crate::data::dataset::index_tensor;
use crate::data::transforms::{Normalize, Transform};
use crate::error::{ConfigError, DataError};
use crate::ffi::{self, SharedTensor};
use crate::{Error, Result};

/// Mean of the training images' pixels, on a scale from 0 to 1.
pub const MNIST_MEAN: f64 = 0.1307;
/// Standard deviation of the training images' pixels, on a scale from 0 to 1.
pub const MNIST_STD: f64 = 0.3081;

const NUM_CLASSES: u8 = 10;

/// Unpacked content of the published files.
const MD5_SUMS: [(&str, &str); 4] = [
    ("train-images-idx3-ubyte", "6bbc9ace898e44ae57da46a324031adb"),
    ("train-labels-idx1-ubyte", "a25bea736e30d166cdddb491f175f624"),
    ("t10k-images-idx3-ubyte", "2646ac647ad5339dbf082846283269ea"),
    ("t10k-labels-idx1-ubyte", "27ae3e4e09519cfbb04c329615203637"),
];

/// Which of the two parts of MNIST.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MnistSplit {
    /// Images to train on: 60,000 in the full set.
    Train,
    /// Images to test on, by other writers: 10,000 in the full set.
    Test,
}

impl MnistSplit {
    fn file_name(self, content: &str) -> String {
        match self {
            Self::Train => format!("train-{content}"),
            Self::Test => format!("t10k-{content}"),
        }
    }

    fn images_in(self, folder: &Path) -> Result<PathBuf> {
        existing(folder, &self.file_name("images-idx3-ubyte"))
    }

    fn labels_in(self, folder: &Path) -> Result<PathBuf> {
        existing(folder, &self.file_name("labels-idx1-ubyte"))
    }
}

fn existing(folder: &Path, name: &str) -> Result<PathBuf> {
    idx::file_in(folder, name).ok_or_else(|| {
        DataError::Missing {
            path: folder.join(name),
            remedy: "it may also be compressed as .gz; `scripts/data.sh mnist` brings the full set, and data/digits of \
                     the repository holds a part of it"
                .into(),
        }
        .into()
    })
}

/// Images and labels as they are on disk.
#[derive(Debug)]
struct Digits {
    /// `[N, 1, H, W]`, uint8.
    images: SharedTensor,
    /// `[N]`, int64.
    labels: SharedTensor,
    len: usize,
}

/// Handwritten digits held in memory as bytes, one per pixel. Cloning is cheap; clones share the memory.
///
/// A batch is (images, labels): float32 `[B, channels, image_size, image_size]`, normalised, and int64 `[B]`.
///
/// ```no_run
/// use voltaic::data::{Dataset, Mnist, MnistSplit};
/// let train = Mnist::open("data/digits", MnistSplit::Train)?;
/// assert_eq!(train.len(), 12_000);
/// # Ok::<(), voltaic::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Mnist {
    digits: Arc<Digits>,
    normalize: Arc<Normalize>,
    channels: usize,
    transforms: Vec<Arc<dyn Transform>>,
}

impl Mnist {
    /// Reads `split` from the idx files of `folder`, plain or compressed (`.gz`).
    ///
    /// # Errors
    /// [`DataError::Missing`] if a file is not there, [`DataError::Corrupt`] if it is not what its header or its
    /// partner file promises, [`Error::Io`] if it cannot be read.
    pub fn open(folder: impl AsRef<Path>, split: MnistSplit) -> Result<Self> {
        let folder = folder.as_ref();
        let (images_path, labels_path) = (split.images_in(folder)?, split.labels_in(folder)?);
        let (images, labels) = (idx::read(&images_path, 3)?, idx::read(&labels_path, 1)?);
        let len = images.sizes[0];
        if labels.sizes[0] != len {
            let what = format!("{} labels, but {len} images in {}", labels.sizes[0], images_path.display());
            return Err(idx::corrupt(&labels_path, 4, what));
        }
        if let Some(at) = labels.bytes.iter().position(|&label| label >= NUM_CLASSES) {
            let what = format!("label {at} is {}, labels are 0 to 9", labels.bytes[at]);
            return Err(idx::corrupt(&labels_path, 8 + at as u64, what));
        }
        let (height, width) = (images.sizes[1] as i64, images.sizes[2] as i64);
        if height != width {
            let what = format!("images of {height} x {width} pixels, MNIST's are square");
            return Err(idx::corrupt(&images_path, 8, what));
        }
        let images = Tensor::f_from_slice(&images.bytes)?.f_view([len as i64, 1, height, width])?;
        let labels = Tensor::f_from_slice(&labels.bytes)?.f_to_kind(Kind::Int64)?;
        Ok(Self {
            digits: Arc::new(Digits {
                images: SharedTensor::new(&images),
                labels: SharedTensor::new(&labels),
                len,
            }),
            normalize: Arc::new(Normalize::new(&[MNIST_MEAN], &[MNIST_STD])?),
            channels: 1,
            transforms: Vec::new(),
        })
    }

    /// Checks that the four files of `folder` are the published ones, by md5 of their unpacked content. Takes a
    /// fraction of a second in an optimised build.
    ///
    /// # Errors
    /// [`DataError::Checksum`] for a file that differs, [`DataError::Missing`], [`DataError::Corrupt`] or
    /// [`Error::Io`] for one that cannot be read.
    pub fn verify(folder: impl AsRef<Path>) -> Result<()> {
        for (name, expected) in MD5_SUMS {
            let path = existing(folder.as_ref(), name)?;
            let found = idx::md5_of_content(&path)?;
            if found != expected {
                let expected = expected.to_owned();
                let remedy = "remove it and run `scripts/data.sh mnist`".into();
                return Err(DataError::Checksum { path, expected, found, remedy }.into());
            }
        }
        Ok(())
    }

    /// Normalises with this mean and standard deviation, on a scale from 0 to 1, in place of MNIST's own.
    ///
    /// # Errors
    /// [`ConfigError`] if `std` is not positive.
    pub fn normalize(mut self, mean: f64, std: f64) -> Result<Self> {
        self.normalize = Arc::new(Normalize::new(&[mean], &[std])?);
        Ok(self)
    }

    /// Pads the images with black to `image_size` pixels in height and width: 32 is what LeNet-5's authors used and
    /// what networks for CIFAR expect.
    ///
    /// # Errors
    /// [`ConfigError`] if that is smaller than the images are.
    pub fn image_size(mut self, image_size: usize) -> Result<Self> {
        let size = self.size();
        if image_size < size {
            let what = format!("{image_size} pixels, the images have {size}");
            return Err(ConfigError::new("Mnist.image_size", what, format!("choose {size} or more")).into());
        }
        if image_size > size {
            let (before, all) = (((image_size - size) / 2) as i64, (image_size - size) as i64);
            let padding = [before, all - before, before, all - before];
            let images = self.digits.images.get().f_pad(padding, "constant", 0.0)?;
            let labels = SharedTensor::new(self.digits.labels.get());
            self.digits =
                Arc::new(Digits { images: SharedTensor::new(&images), labels, len: self.digits.len });
        }
        Ok(self)
    }

    /// Repeats the grey channel `channels` times: 3 for networks made for colour images.
    ///
    /// # Errors
    /// [`ConfigError`] if it is 0.
    pub fn channels(mut self, channels: usize) -> Result<Self> {
        if channels == 0 {
            let (what, remedy) = ("0 channels", "choose 1, or 3 for networks made for colour images");
            return Err(ConfigError::new("Mnist.channels", what, remedy).into());
        }
        self.channels = channels;
        Ok(self)
    }

    /// Adds a random transform of the raw images, uint8 `[B, 1, H, W]`, before they are normalised.
    pub fn transform(mut self, transform: impl Transform) -> Self {
        self.transforms.push(Arc::new(transform));
        self
    }

    /// Height and width of the images in pixels.
    pub fn size(&self) -> usize {
        self.digits.images.get().size()[3] as usize
    }

    /// Labels of all samples: int64 `[len]`, 0 to 9.
    pub fn labels(&self) -> Tensor {
        self.digits.labels.get().shallow_clone()
    }

    fn load(&self, indices: &[usize], rng: &mut StdRng) -> anyhow::Result<(Tensor, Tensor)> {
        let index = index_tensor(indices)?;
        let labels = self.digits.labels.get().f_index_select(0, &index)?;
        let mut images = self.digits.images.get().f_index_select(0, &index)?;
        for transform in &self.transforms {
            images = transform.apply(images, rng)?;
        }
        let mut images = self.normalize.apply(images, rng)?;
        if self.channels > 1 {
            images = images.f_expand([-1, self.channels as i64, -1, -1], false)?.f_contiguous()?;
        }
        Ok((images, labels))
    }
}

impl Dataset for Mnist {
    type Batch = (Tensor, Tensor);

    fn len(&self) -> usize {
        self.digits.len
    }

    fn batch(&self, indices: &[usize], rng: &mut StdRng) -> anyhow::Result<(Tensor, Tensor)> {
        // 64 images are just large enough for libtorch to wake a second thread, which takes longer than the work
        ffi::with_one_thread(|| self.load(indices, rng))
    }
}

/// Where MNIST's files are and how many images they hold, from their headers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MnistFiles {
    /// The folder.
    pub folder: PathBuf,
    /// Images to train on.
    pub num_train: usize,
    /// Images to test on.
    pub num_test: usize,
}

impl MnistFiles {
    /// Reads the headers of the image files in `folder`.
    ///
    /// # Errors
    /// [`DataError::Missing`], [`DataError::Corrupt`] or [`Error::Io`] as for [`Mnist::open`].
    pub fn of(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let count = |split: MnistSplit| -> Result<usize, Error> {
            Ok(idx::read_sizes(&split.images_in(folder)?, 3)?[0])
        };
        let (num_train, num_test) = (count(MnistSplit::Train)?, count(MnistSplit::Test)?);
        Ok(Self { folder: folder.to_owned(), num_train, num_test })
    }

    /// Whether `folder` seems to hold MNIST's files, complete or not.
    pub(super) fn are_in(folder: &Path) -> bool {
        idx::file_in(folder, &MnistSplit::Train.file_name("images-idx3-ubyte")).is_some()
    }

    /// Whether this is the full set: 60,000 and 10,000 images.
    pub fn is_full(&self) -> bool {
        (self.num_train, self.num_test) == (60_000, 10_000)
    }
}

impl fmt::Display for MnistFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = if self.is_full() { "full MNIST" } else { "a subset of MNIST" };
        let (train, test) = (self.num_train, self.num_test);
        write!(f, "{part}: {train} training and {test} test images from {}", self.folder.display())
    }
}
