//! Memory that the kernel can move to and from a disk without a copy of its own.

use tch::{Kind, Tensor};

use crate::error::Result;

/// What addresses, offsets and lengths of direct transfers are multiples of, in bytes: a page, which is a multiple of any
/// disk's block.
pub const DIRECT_ALIGN: usize = 4096;

/// Memory of the host that begins at a multiple of [`DIRECT_ALIGN`] and is as long as one: a tensor of bytes.
#[derive(Debug)]
pub struct AlignedBuffer(Tensor);

impl AlignedBuffer {
    /// At least so many bytes, the values of which are not set. With `pinned_for` a GPU copies from it and to it by itself; the memory
    /// is pinned then.
    ///
    /// # Errors
    /// If memory is short.
    pub fn new(bytes: usize, pinned_for: Option<tch::Device>) -> Result<Self> {
        let bytes = bytes.next_multiple_of(DIRECT_ALIGN);
        let all = Tensor::f_empty([(bytes + DIRECT_ALIGN) as i64], (Kind::Uint8, tch::Device::Cpu))?;
        let all = match pinned_for {
            Some(device) => all.f_pin_memory(device)?,
            None => all,
        };
        let address = all.data_ptr().addr();
        let first = address.next_multiple_of(DIRECT_ALIGN) - address;
        Ok(Self(all.f_narrow(0, first as i64, bytes as i64)?))
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.0.numel()
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first `numel` elements as a tensor of one dimension, which shares the memory. It must not be used while a transfer has the
    /// buffer.
    ///
    /// # Errors
    /// If there are fewer.
    pub fn tensor(&self, kind: Kind, numel: usize) -> Result<Tensor> {
        let bytes = self.0.f_narrow(0, 0, (numel * kind.elt_size_in_bytes()) as i64)?;
        Ok(bytes.f_view_dtype(kind)?)
    }

    /// The first `len` bytes as a tensor, as [`AlignedBuffer::tensor`].
    ///
    /// # Errors
    /// If there are fewer.
    pub fn bytes(&self, len: usize) -> Result<Tensor> {
        self.tensor(Kind::Uint8, len)
    }

    pub(super) fn address(&self) -> usize {
        self.0.data_ptr().addr()
    }
}
