//! Writes predictions to files, or wherever one's own writer puts them.

use std::collections::BTreeSet;
use std::fmt;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tch::{Kind, Tensor};

use crate::checkpoint::{read_weights, write_atomically, write_weights};
use crate::config::expand_home;
use crate::error::Result;
use crate::lightning::Callback;
use crate::module::{HookContext, OutputValue};
use crate::nn::{Module, ModuleExt as _};

/// Names in the files.
const PREDICTION: &str = "prediction";
const INDICES: &str = "batch_indices";

/// When predictions are written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WriteInterval {
    /// Those of each batch by themselves.
    #[default]
    Batch,
    /// All of them at the end.
    Epoch,
    /// Both.
    BatchAndEpoch,
}

impl WriteInterval {
    fn is_on_batch(self) -> bool {
        self != Self::Epoch
    }

    fn is_on_epoch(self) -> bool {
        self != Self::Batch
    }
}

/// Which files [`PredictionWriter`] writes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PredictionWriterConfig {
    /// Folder; `predictions` in that of the run unless set.
    pub output_dir: Option<PathBuf>,
    /// `batch` for a file per batch of each rank, `epoch` for one file at the end, `batch_and_epoch` for both.
    pub write_interval: WriteInterval,
    /// Continues after the batches whose files are in `output_dir`, of a run that was interrupted. Needs `output_dir`, and
    /// `write_interval=batch`.
    pub resume: bool,
}

/// What was predicted for a batch.
#[derive(Debug)]
pub struct PredictedBatch {
    /// What `predict_step` returned; on the device. Undefined (`!prediction.defined()`) if that was `ctx.no_prediction()`.
    pub prediction: Tensor,
    /// The tensors that it gave to `ctx.output`, with their names.
    pub named: Vec<(String, Tensor)>,
    /// Samples of the data set that the batch is made of, in its order.
    pub batch_indices: Vec<usize>,
    /// Place of the batch in its loader, on this rank.
    pub batch_idx: usize,
    /// Which of several loaders it is from.
    pub dataloader_idx: usize,
}

impl PredictedBatch {
    fn shallow_clone(&self) -> Self {
        Self {
            prediction: self.prediction.shallow_clone(),
            named: self.named.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect(),
            batch_indices: self.batch_indices.clone(),
            ..*self
        }
    }

    /// All tensors with their names: the one that was returned is `prediction`.
    fn tensors(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        let returned = self.prediction.defined().then_some((PREDICTION, &self.prediction));
        returned.into_iter().chain(self.named.iter().map(|(name, tensor)| (name.as_str(), tensor)))
    }

    fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.tensors().find(|(known, _)| *known == name).map(|(_, tensor)| tensor)
    }
}

/// Where predictions go. Each rank has a writer of its own and sees its own batches.
#[allow(unused_variables)]
pub trait WritePredictions: Send {
    /// Called with each batch before anything is written of it, whatever the interval: the place to refuse what cannot be
    /// written. Values that are no tensors are in `ctx.outputs()`.
    fn check(&self, ctx: &HookContext, batch: &PredictedBatch) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called before the first batch: the place to find out what is written already.
    fn begin(&mut self, ctx: &HookContext, module: &dyn Module) -> anyhow::Result<()> {
        Ok(())
    }

    /// How many batches of a loader are written already, from its beginning. Prediction continues after them.
    fn written(&self, dataloader_idx: usize) -> usize {
        0
    }

    /// Called on rank 0 when all ranks have written all.
    fn finish(&mut self, ctx: &HookContext) -> anyhow::Result<()> {
        Ok(())
    }

    /// The files and folders written, for [`Callback::files`].
    fn files(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Writes what was predicted for a batch; called if the interval is `batch` or `batch_and_epoch`.
    fn write_on_batch_end(&mut self, ctx: &HookContext, batch: &PredictedBatch) -> anyhow::Result<()> {
        anyhow::bail!("this writer does not write single batches; use write_interval=epoch")
    }

    /// Writes all that was predicted, in the order of loaders and batches; called if the interval is `epoch` or
    /// `batch_and_epoch`.
    fn write_on_epoch_end(&mut self, ctx: &HookContext, batches: &[PredictedBatch]) -> anyhow::Result<()> {
        anyhow::bail!("this writer does not write whole epochs; use write_interval=batch")
    }
}

/// Gives predictions to a writer, by batch, all together, or both. Lightning's `BasePredictionWriter`, with a writer for
/// safetensors files:
///
/// - `<output_dir>/<dataloader_idx>/<batch_idx>-<rank>.safetensors` has `prediction` and `batch_indices` (`int64`);
/// - `<output_dir>/predictions.safetensors` has them for each loader, one batch after the other along dimension 0:
///   `dataloader_0.prediction`, `dataloader_0.batch_indices`; if their shapes do not fit, `dataloader_0.<batch_idx>.prediction`. Of several
///   ranks it has each sample once, in the order of the data set. Rank 0 makes it of the files of the ranks, `predictions-<rank>`, which
///   stay where it does not see them all, or where predictions have no row for each sample.
///
/// Tensors that `predict_step` gives by name (`ctx.output("boxes", &boxes)`) are written beside `prediction`, by their names. A
/// value that is no tensor is refused: write it with a [`WritePredictions`] of your own, which finds it in `ctx.outputs()`.
///
/// `-<rank>` is there if there are several ranks with other batches. With `resume=true`, a run that was interrupted continues after
/// the batches whose files are there; `predictions.json` tells the ranks and weights that they are of, and others are refused. With `write_interval=batch` and `trainer.return_predictions(false)` no
/// prediction is kept in memory.
pub struct PredictionWriter {
    interval: WriteInterval,
    writer: Box<dyn WritePredictions>,
    /// Those of the epoch, if they are written at its end.
    batches: Vec<PredictedBatch>,
}

impl PredictionWriter {
    /// Gives predictions to your own writer.
    pub fn new(interval: WriteInterval, writer: impl WritePredictions + 'static) -> Self {
        Self { interval, writer: Box::new(writer), batches: Vec::new() }
    }
}

impl From<PredictionWriterConfig> for PredictionWriter {
    /// Writes safetensors files.
    fn from(config: PredictionWriterConfig) -> Self {
        let PredictionWriterConfig { output_dir, write_interval, resume } = config;
        let resumes = resume.then_some(write_interval);
        let output_dir = output_dir.map(expand_home);
        Self::new(write_interval, SafetensorsWriter { output_dir, resumes, ..Default::default() })
    }
}

impl fmt::Debug for PredictionWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PredictionWriter").field("interval", &self.interval).finish_non_exhaustive()
    }
}

impl Callback for PredictionWriter {
    fn files(&self) -> Vec<PathBuf> {
        self.writer.files()
    }

    fn predicted_batches(&self, dataloader_idx: usize) -> usize {
        self.writer.written(dataloader_idx)
    }

    fn on_predict_epoch_start(
        &mut self,
        ctx: &mut HookContext,
        module: &mut dyn Module,
    ) -> anyhow::Result<()> {
        self.batches.clear();
        agreed(ctx, self.writer.begin(ctx, module))
    }

    fn on_predict_batch_end(
        &mut self,
        ctx: &mut HookContext,
        _module: &mut dyn Module,
    ) -> anyhow::Result<()> {
        if ctx.device_mesh().tp.rank > 0 {
            return Ok(()); // which has what another rank writes
        }
        let outputs = ctx.outputs();
        let named = outputs.named().filter_map(|(name, value)| match value {
            OutputValue::Tensor(tensor) => Some((name.to_owned(), tensor.shallow_clone())),
            OutputValue::Value { .. } => None,
        });
        let batch = PredictedBatch {
            prediction: outputs.prediction().map_or_else(Tensor::new, Tensor::shallow_clone),
            named: named.collect(),
            batch_indices: ctx.batch_indices().to_vec(),
            batch_idx: ctx.batch_idx(),
            dataloader_idx: ctx.dataloader_idx(),
        };
        self.writer.check(ctx, &batch)?;
        if self.interval.is_on_epoch() {
            self.batches.push(batch.shallow_clone());
        }
        if self.interval.is_on_batch() {
            self.writer.write_on_batch_end(ctx, &batch)?;
        }
        Ok(())
    }

    fn on_predict_epoch_end(
        &mut self,
        ctx: &mut HookContext,
        _module: &mut dyn Module,
    ) -> anyhow::Result<()> {
        let batches = std::mem::take(&mut self.batches);
        let done = match self.interval.is_on_epoch() && ctx.device_mesh().tp.rank == 0 {
            true => self.writer.write_on_epoch_end(ctx, &batches),
            false => Ok(()),
        };
        agreed(ctx, done)?;
        if ctx.is_global_zero() { self.writer.finish(ctx) } else { Ok(()) }
    }
}

/// An error on all ranks if one has it.
///
/// # Collective
/// All ranks must call it.
fn agreed(ctx: &HookContext, done: anyhow::Result<()>) -> anyhow::Result<()> {
    let Some(group) = ctx.process_group() else { return done };
    let own = done.as_ref().err().map(|error| format!("{error:#}"));
    let all = group.all_gather_object(&own)?;
    done?;
    let failed = all.iter().enumerate().find_map(|(rank, error)| Some((rank, error.as_ref()?)));
    failed.map_or(Ok(()), |(rank, error)| Err(anyhow::anyhow!("rank {rank}: {error}")))
}

/// Writes safetensors files.
#[derive(Default)]
struct SafetensorsWriter {
    output_dir: Option<PathBuf>,
    /// When it writes, if it continues after the files of batches that are there.
    resumes: Option<WriteInterval>,
    /// In which folders files of batches are, and what is behind their numbers, once it goes on.
    found: Option<(PathBuf, String)>,
    /// The file of the epoch, and folders of batches.
    files: BTreeSet<PathBuf>,
}

impl SafetensorsWriter {
    fn folder(&self, ctx: &HookContext) -> PathBuf {
        self.output_dir.clone().unwrap_or_else(|| ctx.log_dir().join("predictions"))
    }

    /// What the files of a run are of, in `predictions.json`: rank 0 compares it with that of the run before.
    fn check_origin(folder: &Path, origin: &Value) -> anyhow::Result<()> {
        let path = folder.join("predictions.json");
        match std::fs::read(&path) {
            Ok(text) => {
                let before: Value = serde_json::from_slice(&text)
                    .with_context(|| format!("{} is no JSON; remove the folder", path.display()))?;
                let is_same = before == *origin;
                let remedy = "resume with those, or name another output_dir";
                anyhow::ensure!(
                    is_same,
                    "predictions in {} are of {before}, not of {origin}; {remedy}",
                    folder.display()
                );
                Ok(())
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                std::fs::create_dir_all(folder)?;
                Ok(write_atomically(&path, |file| file.write_all(origin.to_string().as_bytes()))?)
            }
            Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
        }
    }
}

/// What is behind the stem of a file's name if there are several ranks.
fn suffix(ranks: usize, rank: usize) -> String {
    let rank = if ranks > 1 { format!("-{rank}") } else { String::new() };
    format!("{rank}.safetensors")
}

/// `<stem>.safetensors`, with the rank behind the stem if there are several.
fn path(ctx: &HookContext, folder: &Path, stem: &str) -> PathBuf {
    let dp = &ctx.device_mesh().dp;
    folder.join(format!("{stem}{}", suffix(dp.size, dp.rank)))
}

/// Tells weights apart: their names, shapes and sums. Of weights that are sharded, no sums.
fn digest(module: &dyn Module) -> Result<String> {
    let _no_grad = tch::no_grad_guard();
    let mut hasher = crc32fast::Hasher::new();
    for (name, parameter) in module.named_parameters() {
        hasher.update(format!("{name}{:?}", parameter.size()).as_bytes());
        if !parameter.is_sharded() {
            let values = parameter.leaf().f_to_device(tch::Device::Cpu)?.f_to_kind(Kind::Double)?; // sync point
            for sum in [values.f_sum(Kind::Double)?, values.f_square()?.f_sum(Kind::Double)?] {
                hasher.update(&sum.f_double_value(&[])?.to_le_bytes());
            }
        }
    }
    Ok(format!("{:08x}", hasher.finalize()))
}

/// The files of all ranks as one, each sample once, in the order of the data set. `None` if there are not rows of each sample.
fn in_order(parts: &[Vec<(String, Tensor)>]) -> Result<Option<Vec<(String, Tensor)>>> {
    let mut all = Vec::new();
    let names: BTreeSet<&str> = parts.iter().flatten().map(|(name, _)| name.as_str()).collect();
    let of = |part: &[(String, Tensor)], own: &str| {
        part.iter().find(|(name, _)| name == own).map(|(_, tensor)| tensor.shallow_clone())
    };
    for name in &names {
        let Some((loader, rest)) = name.split_once('.') else { return Ok(None) };
        let samples_of = format!("{loader}.{INDICES}");
        let (mut samples, mut rows) = (Vec::new(), Vec::new());
        for part in parts {
            let Some(own) = of(part, &samples_of).filter(|own| own.numel() > 0) else { continue };
            let Some(values) = of(part, name) else { return Ok(None) };
            if rest.contains('.') || values.size().first() != own.size().first() {
                return Ok(None);
            }
            samples.extend(Vec::<i64>::try_from(&own)?);
            rows.push(values);
        }
        let Some(rows) = joined(&rows.iter().collect::<Vec<_>>()) else { return Ok(None) };
        let mut order: Vec<(i64, i64)> = samples.into_iter().zip(0..).collect();
        order.sort_unstable();
        order.dedup_by_key(|(sample, _)| *sample);
        let order: Vec<i64> = order.into_iter().map(|(_, row)| row).collect();
        all.push(((*name).to_owned(), rows.f_index_select(0, &Tensor::f_from_slice(&order)?)?));
    }
    Ok(Some(all))
}

fn indices(of: &[usize]) -> Result<Tensor> {
    let indices: Vec<i64> = of.iter().map(|&index| index as i64).collect();
    Ok(Tensor::f_from_slice(&indices)?)
}

/// The tensors of a name one after the other; `None` if their shapes do not fit.
fn joined(tensors: &[&Tensor]) -> Option<Tensor> {
    let (first, rest) = tensors.split_first()?;
    let (kind, size) = (first.kind(), first.size());
    let (_, tail) = size.split_first()?;
    let fits = rest.iter().all(|tensor| {
        let size = tensor.size();
        tensor.kind() == kind && size.split_first().is_some_and(|(_, own)| own == tail)
    });
    fits.then(|| Tensor::f_cat(tensors, 0).ok()).flatten()
}

impl WritePredictions for SafetensorsWriter {
    fn check(&self, ctx: &HookContext, batch: &PredictedBatch) -> anyhow::Result<()> {
        let remedy = "give tensors (numbers) to ctx.output(), or write it with PredictionWriter::new(interval, writer of your own)";
        for (name, value) in ctx.outputs().named() {
            if let OutputValue::Value { type_name, .. } = value {
                anyhow::bail!(
                    "predict_step gave `{name}`, a {type_name}: PredictionWriter writes tensors into safetensors files; {remedy}"
                );
            }
            anyhow::ensure!(
                name != INDICES && !(name == PREDICTION && batch.prediction.defined()),
                "predict_step gave `{name}`, but PredictionWriter writes something else under this name; use another name"
            );
        }
        anyhow::ensure!(
            batch.tensors().next().is_some(),
            "predict_step gave nothing for batch {} that PredictionWriter could write; return a tensor, or {remedy}",
            batch.batch_idx
        );
        Ok(())
    }

    fn begin(&mut self, ctx: &HookContext, module: &dyn Module) -> anyhow::Result<()> {
        let Some(interval) = self.resumes else { return Ok(()) };
        let Some(folder) = self.output_dir.clone() else {
            anyhow::bail!("PredictionWriter: resume needs the folder of the run before; set output_dir");
        };
        let is_by_batch = interval == WriteInterval::Batch;
        anyhow::ensure!(
            is_by_batch,
            "PredictionWriter: resume needs a file for each batch; set write_interval=batch"
        );
        let dp = &ctx.device_mesh().dp;
        if ctx.is_global_zero() {
            let origin = json!({"ranks": dp.size, "weights": digest(module)?});
            Self::check_origin(&folder, &origin)?;
        }
        self.found = Some((folder, suffix(dp.size, dp.rank)));
        Ok(())
    }

    fn written(&self, dataloader_idx: usize) -> usize {
        let Some((folder, suffix)) = &self.found else { return 0 };
        let folder = folder.join(dataloader_idx.to_string());
        (0..).take_while(|batch: &usize| folder.join(format!("{batch}{suffix}")).exists()).count()
    }

    fn finish(&mut self, ctx: &HookContext) -> anyhow::Result<()> {
        let (folder, ranks) = (self.folder(ctx), ctx.device_mesh().dp.size);
        let parts: Vec<PathBuf> =
            (0..ranks).map(|rank| folder.join(format!("predictions{}", suffix(ranks, rank)))).collect();
        if ranks == 1 || !self.files.contains(&parts[0]) {
            return Ok(());
        }
        let all = match parts.iter().all(|part| part.exists()) {
            true => in_order(&parts.iter().map(|part| read_weights(part)).collect::<Result<Vec<_>>>()?)?,
            false => None,
        };
        let Some(all) = all else {
            tracing::info!("predictions of each rank stay in a file of their own in {}", folder.display());
            return Ok(());
        };
        let path = folder.join("predictions.safetensors");
        write_weights(&all, &path)?;
        for part in &parts {
            std::fs::remove_file(part).with_context(|| format!("cannot remove {}", part.display()))?;
            self.files.remove(part);
        }
        self.files.insert(path);
        Ok(())
    }

    fn files(&self) -> Vec<PathBuf> {
        self.files.iter().cloned().collect()
    }

    fn write_on_batch_end(&mut self, ctx: &HookContext, batch: &PredictedBatch) -> anyhow::Result<()> {
        let folder = self.folder(ctx).join(batch.dataloader_idx.to_string());
        let mut tensors: Vec<(String, Tensor)> =
            batch.tensors().map(|(name, tensor)| (name.to_owned(), tensor.shallow_clone())).collect();
        tensors.push((INDICES.to_owned(), indices(&batch.batch_indices)?));
        write_weights(&tensors, &path(ctx, &folder, &batch.batch_idx.to_string()))?;
        self.files.insert(folder);
        Ok(())
    }

    fn write_on_epoch_end(&mut self, ctx: &HookContext, batches: &[PredictedBatch]) -> anyhow::Result<()> {
        let mut tensors = Vec::new();
        let last = batches.last().map_or(0, |batch| batch.dataloader_idx + 1);
        for dataloader_idx in 0..last {
            let own: Vec<&PredictedBatch> =
                batches.iter().filter(|batch| batch.dataloader_idx == dataloader_idx).collect();
            let mut names: Vec<&str> = Vec::new();
            for (name, _) in own.iter().flat_map(|batch| batch.tensors()) {
                if !names.contains(&name) {
                    names.push(name);
                }
            }
            for name in names {
                let of_name: Vec<(usize, &Tensor)> =
                    own.iter().filter_map(|batch| Some((batch.batch_idx, batch.tensor(name)?))).collect();
                let parts: Vec<&Tensor> = of_name.iter().map(|(_, tensor)| *tensor).collect();
                let all = (parts.len() == own.len()).then(|| joined(&parts)).flatten();
                match all {
                    Some(all) => tensors.push((format!("dataloader_{dataloader_idx}.{name}"), all)),
                    None => tensors.extend(of_name.iter().map(|(batch_idx, tensor)| {
                        (format!("dataloader_{dataloader_idx}.{batch_idx}.{name}"), tensor.shallow_clone())
                    })),
                }
            }
            let samples: Vec<usize> = own.iter().flat_map(|batch| batch.batch_indices.clone()).collect();
            tensors.push((format!("dataloader_{dataloader_idx}.{INDICES}"), indices(&samples)?));
        }
        if tensors.is_empty() {
            // a rank without a batch has a file, too
            let none = Tensor::f_zeros([0], (Kind::Int64, tch::Device::Cpu))?;
            tensors.push((format!("dataloader_0.{INDICES}"), none));
        }
        let path = path(ctx, &self.folder(ctx), "predictions");
        write_weights(&tensors, &path)?;
        self.files.insert(path);
        Ok(())
    }
}
