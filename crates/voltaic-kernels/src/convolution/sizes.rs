//! Sizes of convolutions.

use crate::views::Dtype;

/// A convolution of images without groups and dilation; pairs are of rows and columns.
#[derive(Debug, Clone, Copy)]
pub struct Convolution {
    /// Of all its tensors.
    pub dtype: Dtype,
    /// Whether images, or weights, had the channels last before they were laid out so for the kernels.
    pub are_channels_last: bool,
    /// How many.
    pub images: usize,
    /// Numbers of a pixel.
    pub in_channels: usize,
    /// Numbers of a pixel of the output.
    pub out_channels: usize,
    /// Pixels of an image.
    pub in_size: [usize; 2],
    /// Pixels of an output.
    pub out_size: [usize; 2],
    /// Pixels that an output sees.
    pub kernel: [usize; 2],
    /// From output to output, in pixels of the image.
    pub stride: [usize; 2],
    /// Pixels around an image that are 0, on each side.
    pub padding: [usize; 2],
}

impl Convolution {
    /// Numbers of all images.
    pub fn in_len(&self) -> usize {
        self.images * self.in_size[0] * self.in_size[1] * self.in_channels
    }

    /// Pixels of all outputs.
    pub fn out_pixels(&self) -> usize {
        self.images * self.out_size[0] * self.out_size[1]
    }

    /// Numbers of all outputs.
    pub fn out_len(&self) -> usize {
        self.out_pixels() * self.out_channels
    }

    /// Numbers that one output is made of.
    pub(crate) fn depth(&self) -> usize {
        self.kernel[0] * self.kernel[1] * self.in_channels
    }

    /// Numbers of the weight.
    pub fn weight_len(&self) -> usize {
        self.out_channels * self.depth()
    }
}

/// At most `most` parts of `len`: how many, and how long each but the last. Neither is 0.
pub(crate) fn parts(len: usize, most: usize) -> [usize; 2] {
    let part = len.div_ceil(most);
    [len.div_ceil(part), part]
}
