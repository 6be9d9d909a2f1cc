//! What a rank keeps in files between optimizer steps (ZeRO-Infinity, arXiv:2104.07857): the shards of units, and the states that the
//! optimizer keeps of them.
//!
//! A tensor that is swapped has its file as memory: who reads or writes it between two steps, such as a checkpoint, does so through the
//! system's cache of files, which is no memory of the process. A step passes the cache by: the tensors of a unit get buffers for memory,
//! into which the files are read ahead of the update, and from which they are written while the next unit is updated.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tch::{Kind, Tensor};

use super::config::ZeroConfig;
use super::unit::{STEP, Unit};
use super::weight_shard::{ShardFile, SharedStore};
use crate::dtype::{DtypeNames, bytes_of};
use crate::error::{ConfigError, Error, Result};
use crate::ffi::{AlignedBuffer, FileEngine, ReleasableStorage, describe_storage};
use crate::strategy::offload::OffloadDevice;
use crate::swap::{StoreStats, SwapFolder, SwapOptions, SwapStore};

/// The names of a shard and of its gradients beside those of states, such as `exp_avg`.
const SHARD: &str = "";
const GRAD: &str = "gradient";

/// What a rank keeps in files.
#[derive(Debug, Default)]
pub(super) struct Files {
    /// Shards of units, and states of optimizers.
    pub optimizer: Option<Swapper>,
    /// Shards of weights.
    params: Option<SharedStore>,
    /// Elements of further shards that stay in memory of the host.
    left_in_cpu: usize,
    /// Who reads and writes them.
    engine: Option<Arc<FileEngine>>,
    /// How long optimizer steps of this call took.
    pub updating: Duration,
    /// What was done before this call, and for how long.
    before: (StoreStats, Duration),
    /// Why a read or write of the present step failed.
    pub failure: Option<Error>,
    /// A step has failed half way: shards and states are not those of one step.
    pub is_torn: bool,
}

impl Files {
    /// Makes the folders that the settings ask for, without files. Weights have this dtype. Buffers are not pinned: a file is read into one
    /// again before the device has been asked whether it is done with it.
    pub fn open(config: &ZeroConfig, rank: usize, dtype: Kind) -> Result<Self> {
        let (optimizer, param) = (&config.offload_optimizer, &config.offload_param);
        let [swaps_optimizer, swaps_params] =
            [optimizer.device, param.device].map(|device| device == OffloadDevice::Nvme);
        if !swaps_optimizer && !swaps_params {
            return Ok(Self::default());
        }
        let engine = Arc::new(FileEngine::new(&config.aio.options(config.timeout))?);
        let count = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        let store = |kind: &str, path: &Option<String>, options: SwapOptions| {
            let Some(path) = path else {
                let key = format!("zero_optimization.{}.nvme_path", options.section);
                return Err(ConfigError::new(key, "is missing with device nvme", "name a folder").into());
            };
            let folder = SwapFolder::create(Path::new(path), kind, rank, &engine)?;
            tracing::info!(
                "{}: files of rank {rank} are moved by {}",
                folder.path().display(),
                engine.backend()
            );
            Ok::<_, Error>(SwapStore::new(folder, engine.clone(), options))
        };
        let mut files =
            Self { left_in_cpu: count(param.max_in_cpu), engine: Some(engine.clone()), ..Self::default() };
        let min_bytes = config.aio.min_bytes.map(count);
        if swaps_optimizer {
            let options = SwapOptions {
                section: "offload_optimizer",
                buffer_count: count(optimizer.buffer_count),
                buffer_bytes: None,
                min_bytes,
                pinned_for: None,
            };
            let store = store("optimizer", &optimizer.nvme_path, options)?;
            let [read, write] =
                [optimizer.pipeline_read, optimizer.pipeline_write].map(|is_on| is_on || optimizer.pipeline);
            files.optimizer = Some(Swapper::new(store, read, write));
        }
        if swaps_params {
            let options = SwapOptions {
                section: "offload_param",
                buffer_count: count(param.buffer_count),
                buffer_bytes: Some(count(param.buffer_size).saturating_mul(dtype.elt_size_in_bytes())),
                min_bytes,
                pinned_for: None,
            };
            let name = DtypeNames::of_kind(dtype).map_or("", |names| names.name);
            let store = store(&format!("{name}params"), &param.nvme_path, options)?;
            files.params = Some(Arc::new(Mutex::new(store)));
        }
        Ok(files)
    }

    /// Moves what a new unit has into files.
    pub fn take(&mut self, number: usize, unit: &mut Unit) -> Result<()> {
        if let Some(swapper) = &mut self.optimizer {
            swapper.swap_shard(number, unit)?;
        }
        let Some(store) = self.params.as_ref().filter(|_| unit.layout.swaps_weight_shard) else {
            return Ok(());
        };
        let len = unit.layout.shard_len;
        match self.left_in_cpu.checked_sub(len) {
            Some(left) => self.left_in_cpu = left,
            None => {
                let name = format!("{}_param", unit.ids.start());
                unit.put_weight_shard_into(ShardFile::new(store.clone(), name, unit.layout.kind, len))?;
            }
        }
        Ok(())
    }

    /// Whether nothing is to be in files.
    pub fn is_empty(&self) -> bool {
        self.optimizer.is_none() && self.params.is_none()
    }

    /// Takes this rank's shard of the mean gradients of one backward pass; sums of a window have this dtype unless they have one already. They are
    /// added to those in a file, if the unit's shard is in one.
    pub fn add_grads(&mut self, number: usize, unit: &mut Unit, shard: Tensor, dtype: Kind) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let dtype = unit.grads_dtype().unwrap_or(dtype);
        if let Some(swapper) = self.optimizer.as_mut().filter(|_| unit.takes_grads_in_file(dtype)) {
            if self.failure.is_none() {
                let shard = unit.moved.to(tch::Device::Cpu, &shard, false)?;
                self.failure = swapper.add_grads(number, unit, &shard.f_to_kind(dtype)?).err();
                if self.failure.is_none() {
                    return Ok(());
                }
            }
            unit.lose_grads_in_file(); // the step continues until all ranks know
        }
        unit.add_grads(shard, Some(dtype))
    }

    /// After a backward pass: waits until gradients are in files.
    pub fn finish_grads(&mut self) {
        if let Some(swapper) = self.optimizer.as_mut() {
            let done = swapper.finish();
            self.failure = self.failure.take().or(done.err());
        }
    }

    /// Forgets what was measured in an earlier call.
    pub fn begin_call(&mut self) {
        self.before = (self.all_stats().unwrap_or_default(), self.all_busy());
        self.updating = Duration::ZERO;
    }

    fn all_busy(&self) -> Duration {
        self.engine.as_ref().map_or(Duration::ZERO, |engine| engine.busy())
    }

    /// For how long files were read and written in this call.
    pub fn busy(&self) -> Duration {
        self.all_busy().saturating_sub(self.before.1)
    }

    /// What optimizers have read and written in this call, and what weights have.
    pub fn stats(&self) -> Option<StoreStats> {
        Some(self.all_stats()?.since(self.before.0))
    }

    fn all_stats(&self) -> Option<StoreStats> {
        let params =
            self.params.as_ref().map(|store| store.lock().unwrap_or_else(PoisonError::into_inner).stats());
        let optimizer = self.optimizer.as_ref().map(Swapper::stats);
        match (optimizer, params) {
            (Some(one), Some(other)) => Some(one.and(other)),
            (one, other) => one.or(other),
        }
    }
}

/// The swapped tensors of a rank.
#[derive(Debug)]
pub(super) struct Swapper {
    store: SwapStore,
    /// The files of the next unit are read while one is updated.
    pipeline_read: bool,
    /// The files of a unit are written while the next one is updated.
    pipeline_write: bool,
    /// By the number of the unit and the name of the state.
    tensors: BTreeMap<(usize, String), Swapped>,
}

/// A tensor as long as the shard of a unit.
#[derive(Debug)]
struct Swapped {
    /// What the optimizer's tensors are views of.
    flat: Tensor,
    storage: ReleasableStorage,
    /// In the store.
    name: String,
    /// The file as memory.
    mapped: Tensor,
    /// The memory of `flat` during an update.
    buffer: Option<AlignedBuffer>,
}

impl Swapped {
    fn has(&self, tensor: &Tensor) -> Result<bool> {
        Ok(describe_storage(tensor)?.0 == describe_storage(&self.flat)?.0)
    }

    /// Makes a buffer the memory until [`Swapped::leave_buffer`].
    fn use_buffer(&mut self, buffer: AlignedBuffer) -> Result<()> {
        self.storage.lend(&buffer.bytes(self.mapped.numel())?)?;
        self.buffer = Some(buffer);
        Ok(())
    }

    /// Makes the file the memory again, and returns the buffer that was.
    fn leave_buffer(&mut self) -> Result<Option<AlignedBuffer>> {
        let Some(buffer) = self.buffer.take() else { return Ok(None) };
        self.storage.lend(&self.mapped)?;
        Ok(Some(buffer))
    }
}

impl Swapper {
    /// With a store that has no tensors.
    pub fn new(store: SwapStore, pipeline_read: bool, pipeline_write: bool) -> Self {
        Self { store, pipeline_read, pipeline_write, tensors: BTreeMap::new() }
    }

    /// What has been read and written.
    pub fn stats(&self) -> StoreStats {
        self.store.stats()
    }

    /// Moves the shard of a unit into a file, if it is not in one, and large enough.
    pub fn swap_shard(&mut self, number: usize, unit: &mut Unit) -> Result<()> {
        let key = (number, SHARD.to_owned());
        let Some(shard) = unit.swappable_shard() else { return Ok(()) };
        if self.tensors.get(&key).map_or(Ok(false), |swapped| swapped.has(shard))? {
            return Ok(());
        }
        let (kind, ids) = (shard.kind(), unit.ids.clone());
        let name = format!("{}_{}", ids.start(), ids.end());
        if let Some(flat) = self.add(key, name, kind, unit.layout.shard_len)? {
            unit.move_shard(flat)?;
        }
        Ok(())
    }

    /// Moves the states of a unit's sharded parameters into files that are not in one, and large enough. `states` has the index of each sharded parameter, the name
    /// of the state, and the tensor.
    pub fn swap_states(
        &mut self,
        number: usize,
        unit: &Unit,
        states: &[(usize, &str, Tensor)],
    ) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        for (index, state, tensor) in states {
            let is_like_param =
                *state != STEP && tensor.dim() == 1 && tensor.numel() == unit.range(*index).len();
            if !unit.layout.swaps_shard || !is_like_param || tensor.device() != tch::Device::Cpu {
                continue;
            }
            let key = (number, (*state).to_owned());
            let known = self.tensors.get(&key);
            if known.map_or(Ok(false), |swapped| swapped.has(tensor))? {
                continue;
            }
            let flat = match known.filter(|swapped| swapped.flat.kind() == tensor.kind()) {
                Some(swapped) => Some(swapped.flat.shallow_clone()),
                None => {
                    let name = format!("{state}-{}_{}", unit.ids.start(), unit.ids.end());
                    self.add(key, name, tensor.kind(), unit.layout.shard_len)?.map(Tensor::shallow_clone)
                }
            };
            let Some(flat) = flat else { continue };
            let mut view = unit.param_shard_in(&flat, *index)?;
            view.f_copy_(tensor)?;
            tensor.shallow_clone().f_set_data(&view)?;
        }
        Ok(())
    }

    /// Makes a file and the tensor whose memory it is; nothing if it is too small.
    fn add(&mut self, key: (usize, String), name: String, kind: Kind, len: usize) -> Result<Option<&Tensor>> {
        let bytes = len * kind.elt_size_in_bytes();
        if !self.store.swaps(bytes) {
            return Ok(None);
        }
        self.store.folder().check_room(bytes as u64)?;
        self.store.create(&name, bytes)?;
        let [Some(memory), Some(mapped)] = [self.store.map(&name)?, self.store.map(&name)?] else {
            return Ok(None);
        };
        let flat = memory.f_view_dtype(kind)?.f_narrow(0, 0, len as i64)?;
        let storage = ReleasableStorage::of(&flat);
        let swapped = Swapped { flat, storage, name, mapped, buffer: None };
        self.tensors.insert(key.clone(), swapped);
        Ok(self.tensors.get(&key).map(|swapped| &swapped.flat))
    }

    /// Adds gradients, which have the dtype that sums are rounded to, to those in the unit's file if there are some.
    fn add_grads(&mut self, number: usize, unit: &mut Unit, shard: &Tensor) -> Result<()> {
        let key = (number, GRAD.to_owned());
        let (kind, len) = (unit.shard_kind(), unit.layout.shard_len);
        if self.tensors.get(&key).is_none_or(|swapped| swapped.flat.kind() != kind) {
            self.add(key.clone(), format!("{}_{GRAD}_0_{len}", unit.ids.start()), kind, len)?;
        }
        let Some(swapped) = self.tensors.get(&key) else { return Ok(()) };
        let name = &swapped.name;
        if unit.has_grads() {
            let buffer = self.store.take(name)?;
            let mut own = buffer.tensor(kind, len)?;
            own.f_copy_(&own.f_to_kind(shard.kind())?.f_add_(shard)?)?;
            self.store.start_write(name, buffer)?;
        } else {
            let buffer = self.store.claim(name)?;
            buffer.tensor(kind, len)?.f_copy_(shard)?;
            self.store.start_write(name, buffer)?;
            unit.put_grads_into(&swapped.flat, shard.kind());
        }
        Ok(())
    }

    fn of_unit(&mut self, number: usize) -> impl Iterator<Item = (&str, &mut Swapped)> {
        let range = (number, String::new())..(number + 1, String::new());
        self.tensors.range_mut(range).map(|((_, state), swapped)| (state.as_str(), swapped))
    }

    /// What an update of a unit needs, in the store's names; the gradients, if they are in a file, last.
    fn needed(&mut self, number: usize, has_grads: bool) -> Vec<(bool, String)> {
        let all = self.of_unit(number).map(|(state, swapped)| (state == GRAD, swapped.name.clone()));
        let mut all: Vec<_> = all.filter(|(is_grad, _)| has_grads || !is_grad).collect();
        all.sort_by_key(|(is_grad, _)| *is_grad);
        all
    }

    /// Bytes of states in files.
    pub fn state_bytes(&self) -> usize {
        let states = self.tensors.iter().filter(|((_, state), _)| ![SHARD, GRAD].contains(&state.as_str()));
        states.map(|(_, swapped)| bytes_of(&swapped.flat)).sum()
    }

    /// Whether something of a unit is swapped.
    pub fn has(&self, number: usize) -> bool {
        self.tensors.range((number, String::new())..(number + 1, String::new())).next().is_some()
    }

    /// Before an update of a unit: reads its tensors into buffers, with the gradients if they are in a file. These have the file as memory if there are
    /// no buffers left.
    pub fn begin(&mut self, number: usize, has_grads: bool) -> Result<()> {
        for (is_grad, name) in self.needed(number, has_grads) {
            if is_grad && !self.store.has_buffer() {
                break;
            }
            let buffer = self.store.take(&name)?;
            if let Some((_, swapped)) = self.of_unit(number).find(|(_, swapped)| swapped.name == name) {
                swapped.use_buffer(buffer)?;
            }
        }
        Ok(())
    }

    /// In the place of [`Swapper::begin`] if a read or write has failed: memory whose values do not matter, so that this rank takes part in
    /// the step until all know.
    pub fn pretend(&mut self, number: usize) -> Result<()> {
        for (_, swapped) in self.of_unit(number).filter(|(_, swapped)| swapped.buffer.is_none()) {
            let buffer = AlignedBuffer::new(swapped.mapped.numel(), None)?;
            swapped.use_buffer(buffer)?;
        }
        Ok(())
    }

    /// Starts to read a unit's tensors, as far as there are buffers.
    pub fn read_ahead(&mut self, number: usize, has_grads: bool) -> Result<()> {
        if !self.pipeline_read {
            return Ok(());
        }
        for (_, name) in self.needed(number, has_grads) {
            if !self.store.start_read(&name)? {
                break;
            }
        }
        Ok(())
    }

    /// After an update of a unit: starts to write its tensors, but for the gradients.
    pub fn end(&mut self, number: usize) -> Result<()> {
        let mut left = Vec::new();
        for (state, swapped) in self.of_unit(number) {
            if let Some(buffer) = swapped.leave_buffer()? {
                left.push((state == GRAD, swapped.name.clone(), buffer));
            }
        }
        for (is_grad, name, buffer) in left {
            if is_grad {
                self.store.give_back(&name, buffer);
            } else {
                self.store.start_write(&name, buffer)?;
            }
        }
        if self.pipeline_write { Ok(()) } else { self.store.flush() }
    }

    /// Waits until all is in files.
    pub fn finish(&mut self) -> Result<()> {
        self.store.flush()
    }

    /// A read or write has failed: tensors have their files as memory, with what is there, and buffers are lost.
    pub fn abandon(&mut self) -> Result<()> {
        self.tensors.values_mut().try_for_each(|swapped| swapped.leave_buffer().map(drop))
    }
}
