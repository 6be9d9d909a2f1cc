//! Writes safetensors files tensor by tensor: one tensor at a time is in memory twice.

use std::collections::HashMap;
use std::io::{self, Seek, SeekFrom, Write};

use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use tch::Tensor;

/// A tensor of a file to be written.
#[derive(Debug, Clone)]
pub(super) struct Planned {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
}

impl Planned {
    pub fn num_bytes(&self) -> Option<usize> {
        let numel = self.shape.iter().try_fold(1_usize, |numel, &size| numel.checked_mul(size))?;
        Some(numel.checked_mul(self.dtype.bitsize())? / 8)
    }
}

/// Tensors are checked in blocks of so many bytes where only some of them are read.
pub(super) const BLOCK: usize = 1 << 16;

/// What has been written: length and CRC-32 of all, what comes before the tensors, and the CRC-32 of each block of what follows.
#[derive(Debug)]
pub(super) struct Written {
    pub bytes: u64,
    pub crc: u32,
    pub header: Vec<u8>,
    pub blocks: Vec<u32>,
}

/// Counts what goes through.
struct Counting<W> {
    inner: W,
    crc: crc32fast::Hasher,
    bytes: u64,
    /// Of the block that is not complete, and its length.
    block: (crc32fast::Hasher, usize),
    blocks: Vec<u32>,
}

impl<W: Write> Counting<W> {
    /// Writes bytes of tensors.
    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.inner.write_all(bytes)?;
        self.bytes += bytes.len() as u64;
        let mut left = bytes;
        while !left.is_empty() {
            let (piece, rest) = left.split_at(left.len().min(BLOCK - self.block.1));
            self.block.0.update(piece);
            self.block.1 += piece.len();
            left = rest;
            if self.block.1 == BLOCK {
                self.end_block();
            }
        }
        Ok(())
    }

    fn end_block(&mut self) {
        let (block, len) = std::mem::take(&mut self.block);
        self.crc.combine(&block);
        self.blocks.extend((len > 0).then(|| block.finalize()));
    }
}

/// Writes a whole file: `bytes_of` gives the contents of the tensor at an index of `planned`, and is called once for each.
///
/// # Errors
/// Those of the writer and of `bytes_of`; if a tensor has not the bytes that were planned.
pub(super) fn write_tensors(
    writer: impl Write,
    planned: &[Planned],
    metadata: HashMap<String, String>,
    bytes_of: &mut dyn FnMut(usize) -> io::Result<Vec<u8>>,
) -> io::Result<Written> {
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let mut order: Vec<usize> = (0..planned.len()).collect();
    // wide elements first, so that all are aligned; as safetensors itself does
    order.sort_by(|&a, &b| {
        planned[b].dtype.cmp(&planned[a].dtype).then_with(|| planned[a].name.cmp(&planned[b].name))
    });
    let mut at = 0_usize;
    let mut infos = Vec::with_capacity(planned.len());
    for &index in &order {
        let tensor = &planned[index];
        let len = tensor.num_bytes().and_then(|len| Some((len, at.checked_add(len)?)));
        let Some((_, end)) = len else { return Err(invalid(format!("{} is too large", tensor.name))) };
        let (dtype, shape) = (tensor.dtype, tensor.shape.clone());
        infos.push((tensor.name.clone(), TensorInfo { dtype, shape, data_offsets: (at, end) }));
        at = end;
    }
    let header = Metadata::new(Some(metadata), infos).map_err(|error| invalid(error.to_string()))?;
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let header = [&(header.len() as u64).to_le_bytes()[..], &header].concat();
    let mut crc = crc32fast::Hasher::new();
    crc.update(&header);
    let (bytes, block, blocks) = (header.len() as u64, Default::default(), Vec::new());
    let mut file = Counting { inner: writer, crc, bytes, block, blocks };
    file.inner.write_all(&header)?;
    for index in order {
        let bytes = bytes_of(index)?;
        if Some(bytes.len()) != planned[index].num_bytes() {
            return Err(invalid(format!("{} has {} bytes", planned[index].name, bytes.len())));
        }
        file.put(&bytes)?;
    }
    file.end_block();
    Ok(Written { bytes: file.bytes, crc: file.crc.finalize(), header, blocks: file.blocks })
}

/// Why a file with these tensors could not be written, with its size; of the same kind.
pub(super) fn of_size(error: io::Error, planned: &[Planned]) -> io::Error {
    let bytes: usize = planned.iter().filter_map(Planned::num_bytes).sum();
    io::Error::new(error.kind(), format!("{error}, of a file with {bytes} bytes of tensors"))
}

/// Writes over bytes at `at` in what has been written.
pub(super) fn patch(writer: &mut (impl Write + Seek), at: u64, bytes: &[u8]) -> io::Result<()> {
    writer.seek(SeekFrom::Start(at))?;
    writer.write_all(bytes)?;
    writer.seek(SeekFrom::End(0)).map(drop)
}

/// The bytes of a tensor, copied from its device.
pub(super) fn bytes_of(tensor: &Tensor) -> io::Result<Vec<u8>> {
    let copy = || {
        let tensor = tensor.f_detach()?.f_to_device(tch::Device::Cpu)?.f_contiguous()?;
        let mut bytes = vec![0_u8; tensor.numel() * tensor.kind().elt_size_in_bytes()];
        if !bytes.is_empty() {
            tensor.f_copy_data_u8(&mut bytes, tensor.numel())?;
        }
        Ok::<_, tch::TchError>(bytes)
    };
    copy().map_err(io::Error::other)
}
