//! Tensors by name in the files of a folder, and the buffers that they pass through.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tch::{Kind, Tensor};

use super::folder::{SwapFolder, mapped};
use crate::dtype::bytes_of;
use crate::error::{ConfigError, Error, Result};
use crate::ffi::{AlignedBuffer, DIRECT_ALIGN, FileEngine, NamedFile, Transfer};

/// Tensors of fewer bytes stay in memory: a disk takes as long for them as for as many.
const MIN_BYTES: usize = 1 << 20;

/// The error of a setting of buffers, with its name in a class's arguments, too.
fn too_small(section: &str, setting: &str, what: String, how: &str) -> Error {
    let argument = if section == "offload_param" { "params" } else { "optimizer" };
    let remedy = format!("raise {setting} ({argument}_{setting} as an argument of DeepSpeedStrategy){how}");
    ConfigError::new(format!("zero_optimization.{section}.{setting}"), what, remedy).into()
}

/// The buffers of a [`SwapStore`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SwapOptions {
    /// The section of the configuration, for errors: `offload_optimizer` or `offload_param`.
    pub section: &'static str,
    /// How many buffers there are at most; memory of one is allocated when it is needed first.
    pub buffer_count: usize,
    /// Most bytes of each, if there is a limit. A buffer has as many as the largest tensor.
    pub buffer_bytes: Option<usize>,
    /// Tensors of fewer bytes stay in memory; DeepSpeed's limit unless set: 1 MiB, or the engine's block size if that is more.
    pub min_bytes: Option<usize>,
    /// The GPU for which buffers are pinned, if any.
    pub pinned_for: Option<tch::Device>,
}

/// What a store has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Bytes in files.
    pub file_bytes: u64,
    /// Bytes of tensors that are too small for a file, and stay in memory.
    pub kept_bytes: usize,
    /// Bytes of buffers that have memory.
    pub buffer_bytes: usize,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// How long the caller has waited for reads and writes.
    pub waited: Duration,
}

impl StoreStats {
    /// Those of two stores.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            file_bytes: self.file_bytes + other.file_bytes,
            kept_bytes: self.kept_bytes + other.kept_bytes,
            buffer_bytes: self.buffer_bytes + other.buffer_bytes,
            read_bytes: self.read_bytes + other.read_bytes,
            written_bytes: self.written_bytes + other.written_bytes,
            waited: self.waited + other.waited,
        }
    }

    /// These without what was read and written before.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            read_bytes: self.read_bytes.saturating_sub(before.read_bytes),
            written_bytes: self.written_bytes.saturating_sub(before.written_bytes),
            waited: self.waited.saturating_sub(before.waited),
            ..self
        }
    }
}

/// A tensor: where it is, and how many bytes it has.
#[derive(Debug)]
struct Entry {
    bytes: usize,
    place: Place,
}

#[derive(Debug)]
enum Place {
    File(Arc<NamedFile>),
    /// Too small for a file; not there while it is lent.
    Memory(Option<AlignedBuffer>),
}

/// Tensors of one rank in files, by name. At any time a tensor is in its file, in a buffer on the way, or in the buffer that
/// [`SwapStore::take`] has given; then the caller gives it back by [`SwapStore::start_write`] or [`SwapStore::give_back`].
#[derive(Debug)]
pub struct SwapStore {
    // before the folder, which is removed when no file is there any more
    entries: HashMap<String, Entry>,
    folder: SwapFolder,
    engine: Arc<FileEngine>,
    options: SwapOptions,
    buffer_bytes: usize,
    free: Vec<AlignedBuffer>,
    /// Buffers that exist, wherever they are.
    num_buffers: usize,
    /// In the order in which they began, as writes.
    reads: Vec<(String, Transfer)>,
    writes: VecDeque<(String, Transfer)>,
    stats: StoreStats,
}

impl SwapStore {
    /// Without tensors.
    pub fn new(folder: SwapFolder, engine: Arc<FileEngine>, options: SwapOptions) -> Self {
        Self {
            entries: HashMap::new(),
            folder,
            engine,
            buffer_bytes: 0,
            options,
            free: Vec::new(),
            num_buffers: 0,
            reads: Vec::new(),
            writes: VecDeque::new(),
            stats: StoreStats::default(),
        }
    }

    /// Whether a tensor of so many bytes goes into a file.
    pub fn swaps(&self, bytes: usize) -> bool {
        bytes >= self.options.min_bytes.unwrap_or_else(|| MIN_BYTES.max(self.engine.block_size())).max(1)
    }

    /// Whether a tensor of this name is there.
    pub fn has(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// The folder of the files.
    pub fn folder(&self) -> &SwapFolder {
        &self.folder
    }

    /// What has been done.
    pub fn stats(&self) -> StoreStats {
        StoreStats { buffer_bytes: self.num_buffers * self.buffer_bytes, ..self.stats }
    }

    /// Makes a tensor of so many bytes, whose values are not set, in the place of one of that name.
    ///
    /// # Errors
    /// [`ConfigError`] if it is larger than a buffer; if the disk is full, or memory is short.
    pub fn create(&mut self, name: &str, bytes: usize) -> Result<()> {
        self.remove(name)?;
        let place = if self.swaps(bytes) {
            self.check_size(name, bytes)?;
            let file = self.folder.file(&format!("{name}.tensor.swp"), padded(bytes) as u64)?;
            self.stats.file_bytes += padded(bytes) as u64;
            Place::File(file)
        } else {
            let memory = AlignedBuffer::new(bytes, self.options.pinned_for)?;
            self.stats.kept_bytes += memory.len();
            Place::Memory(Some(memory))
        };
        self.entries.insert(name.to_owned(), Entry { bytes, place });
        Ok(())
    }

    /// Buffers become as long as this tensor; an error if they must not.
    fn check_size(&mut self, name: &str, bytes: usize) -> Result<()> {
        let SwapOptions { section, buffer_bytes, .. } = self.options;
        if bytes <= self.buffer_bytes {
            return Ok(());
        }
        let Some(buffer_bytes) = buffer_bytes.filter(|most| bytes > *most) else {
            self.flush()?;
            self.buffer_bytes = padded(bytes);
            return Ok(());
        };
        let what = format!("{name} has {bytes} bytes, and a buffer {buffer_bytes}");
        Err(too_small(section, "buffer_size", what, ", which counts elements, or use more ranks"))
    }

    /// Stores a copy of a tensor in the place of one of that name, and waits until it is there.
    ///
    /// # Errors
    /// As [`SwapStore::create`]; if it cannot be written.
    pub fn put(&mut self, name: &str, values: &Tensor) -> Result<()> {
        let bytes = bytes_of(values);
        if self.entries.get(name).is_none_or(|entry| entry.bytes != bytes) {
            self.create(name, bytes)?;
        }
        let buffer = self.claim(name)?;
        let mut place = buffer.tensor(values.kind(), values.numel())?;
        place.f_copy_(&values.f_reshape([-1_i64])?)?;
        self.start_write(name, buffer)?;
        self.flush()
    }

    /// A copy of a tensor: so many elements of this dtype, in one dimension.
    ///
    /// # Errors
    /// As [`SwapStore::take`].
    pub fn get(&mut self, name: &str, kind: Kind, numel: usize) -> Result<Tensor> {
        let buffer = self.take(name)?;
        let copy = buffer.tensor(kind, numel).and_then(|values| Ok(values.f_to_dtype(kind, false, true)?));
        self.give_back(name, buffer);
        copy
    }

    /// The file of a tensor as memory, padded to whole blocks: bytes are read when they are used, and what is written gets into the file. `None` if
    /// the tensor has no file. Between [`SwapStore::take`] and the end of the write the memory must not be used. A disk that fails then
    /// ends the process by a signal.
    ///
    /// # Errors
    /// If there is no such tensor, a write of it failed, or the system does not map it.
    pub fn map(&mut self, name: &str) -> Result<Option<Tensor>> {
        let Some(file) = self.file_of(name)? else { return Ok(None) };
        self.finish_write_of(name)?;
        mapped(&file, padded(self.entry(name)?.bytes)).map(Some)
    }

    /// Forgets a tensor, whose file vanishes.
    ///
    /// # Errors
    /// If a write of it failed.
    pub fn remove(&mut self, name: &str) -> Result<()> {
        self.finish_write_of(name)?;
        if let Some(read) = self.read_of(name) {
            let buffer = self.wait(read)?;
            self.free.push(buffer);
        }
        match self.entries.remove(name) {
            Some(Entry { bytes, place: Place::File(_) }) => self.stats.file_bytes -= padded(bytes) as u64,
            Some(Entry { bytes, place: Place::Memory(_) }) => self.stats.kept_bytes -= padded(bytes),
            None => {}
        }
        Ok(())
    }

    /// Starts to read a tensor ahead of [`SwapStore::take`]. Returns whether it is on its way, or needs no reading: false if all
    /// buffers are in use.
    ///
    /// # Errors
    /// If there is no such tensor, or a write of it failed.
    pub fn start_read(&mut self, name: &str) -> Result<bool> {
        if self.is_read(name) {
            return Ok(true);
        }
        let Some(file) = self.file_of(name)? else { return Ok(true) };
        self.finish_write_of(name)?;
        self.collect_written()?;
        let Some(buffer) = self.free_buffer()? else { return Ok(false) };
        self.read_into(name, &file, buffer)?;
        Ok(true)
    }

    fn read_into(&mut self, name: &str, file: &Arc<NamedFile>, buffer: AlignedBuffer) -> Result<()> {
        let bytes = padded(self.entry(name)?.bytes);
        let read = self.engine.start_read(file, 0, buffer, bytes)?;
        self.stats.read_bytes += bytes as u64;
        self.reads.push((name.to_owned(), read));
        Ok(())
    }

    /// The buffer with a tensor: reads it, if that was not started, and waits for it.
    ///
    /// # Errors
    /// [`ConfigError`] if all buffers are in use; if it cannot be read, or another one cannot be written.
    pub fn take(&mut self, name: &str) -> Result<AlignedBuffer> {
        if !self.is_read(name) {
            let Some(file) = self.file_of(name)? else { return self.claim(name) };
            self.finish_write_of(name)?;
            let buffer = self.buffer()?;
            self.read_into(name, &file, buffer)?;
        }
        let read = self.read_of(name).ok_or_else(|| unknown(name))?;
        self.wait(read)
    }

    /// A buffer for new values of a tensor, which is not read.
    ///
    /// # Errors
    /// As [`SwapStore::take`].
    pub fn claim(&mut self, name: &str) -> Result<AlignedBuffer> {
        if let Entry { place: Place::Memory(memory), .. } = self.entry_mut(name)? {
            return memory.take().ok_or_else(|| unknown(name));
        }
        self.finish_write_of(name)?;
        self.buffer()
    }

    /// Starts to write a tensor, whose buffer this is.
    ///
    /// # Errors
    /// If there is no such tensor. That it cannot be written is the error of a later call.
    pub fn start_write(&mut self, name: &str, buffer: AlignedBuffer) -> Result<()> {
        let Some(file) = self.file_of(name)? else {
            self.give_back(name, buffer);
            return Ok(());
        };
        self.finish_write_of(name)?;
        let bytes = padded(self.entry(name)?.bytes);
        let write = self.engine.start_write(&file, 0, buffer, bytes)?;
        self.stats.written_bytes += bytes as u64;
        self.writes.push_back((name.to_owned(), write));
        Ok(())
    }

    /// Takes the buffer of a tensor back that has not changed, or is not to be kept.
    pub fn give_back(&mut self, name: &str, buffer: AlignedBuffer) {
        match self.entries.get_mut(name).map(|entry| &mut entry.place) {
            Some(Place::Memory(memory)) => *memory = Some(buffer),
            _ => self.free.push(buffer),
        }
    }

    /// Whether [`SwapStore::take`] finds a buffer, perhaps after it has waited for a write.
    pub fn has_buffer(&self) -> bool {
        let is_free = !self.free.is_empty() || self.num_buffers < self.options.buffer_count;
        is_free || !self.writes.is_empty() || !self.reads.is_empty()
    }

    /// Waits until all that was written is in its file.
    ///
    /// # Errors
    /// If something could not be written.
    pub fn flush(&mut self) -> Result<()> {
        while !self.writes.is_empty() {
            self.finish_oldest_write()?;
        }
        Ok(())
    }

    fn entry(&self, name: &str) -> Result<&Entry> {
        self.entries.get(name).ok_or_else(|| unknown(name))
    }

    fn entry_mut(&mut self, name: &str) -> Result<&mut Entry> {
        self.entries.get_mut(name).ok_or_else(|| unknown(name))
    }

    fn file_of(&self, name: &str) -> Result<Option<Arc<NamedFile>>> {
        Ok(match &self.entry(name)?.place {
            Place::File(file) => Some(file.clone()),
            Place::Memory(_) => None,
        })
    }

    /// A buffer that is not in use, if there is one or one may be made.
    fn free_buffer(&mut self) -> Result<Option<AlignedBuffer>> {
        while let Some(buffer) = self.free.pop() {
            if buffer.len() >= self.buffer_bytes {
                return Ok(Some(buffer));
            }
            self.num_buffers -= 1; // from before a larger tensor came
        }
        if self.num_buffers >= self.options.buffer_count {
            return Ok(None);
        }
        let buffer = AlignedBuffer::new(self.buffer_bytes, self.options.pinned_for)?;
        self.num_buffers += 1;
        Ok(Some(buffer))
    }

    fn is_read(&self, name: &str) -> bool {
        self.reads.iter().any(|(read, _)| read == name)
    }

    fn read_of(&mut self, name: &str) -> Option<Transfer> {
        let at = self.reads.iter().position(|(read, _)| read == name)?;
        Some(self.reads.remove(at).1)
    }

    /// A buffer, for which it waits until something is written, or gives up what was read ahead last.
    fn buffer(&mut self) -> Result<AlignedBuffer> {
        loop {
            if let Some(buffer) = self.free_buffer()? {
                return Ok(buffer);
            }
            if self.writes.is_empty() {
                if let Some((_, read)) = self.reads.pop() {
                    let buffer = self.wait(read)?;
                    self.free.push(buffer);
                    continue; // it may be from before a larger tensor came
                }
                let SwapOptions { section, buffer_count, .. } = self.options;
                let what = format!("all {buffer_count} buffers are in use, and one more is needed");
                return Err(too_small(section, "buffer_count", what, ""));
            }
            self.finish_oldest_write()?;
        }
    }

    /// Takes the buffers of writes that are done.
    fn collect_written(&mut self) -> Result<()> {
        while self.writes.front().is_some_and(|(_, write)| write.is_done()) {
            self.finish_oldest_write()?;
        }
        Ok(())
    }

    fn finish_write_of(&mut self, name: &str) -> Result<()> {
        while self.writes.iter().any(|(written, _)| written == name) {
            self.finish_oldest_write()?;
        }
        Ok(())
    }

    fn finish_oldest_write(&mut self) -> Result<()> {
        let Some((_, write)) = self.writes.pop_front() else { return Ok(()) };
        let buffer = self.wait(write)?;
        self.free.push(buffer);
        Ok(())
    }

    fn wait(&mut self, transfer: Transfer) -> Result<AlignedBuffer> {
        let start = Instant::now();
        let done = transfer.wait();
        self.stats.waited += start.elapsed();
        self.num_buffers -= usize::from(done.is_err()); // lost
        done
    }
}

/// Bytes of the file of a tensor of so many.
fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(DIRECT_ALIGN)
}

fn unknown(name: &str) -> crate::error::Error {
    let what = format!("{name} is not stored, or its buffer is lent");
    ConfigError::new("swap", what, "put it there first, and give its buffer back").into()
}
