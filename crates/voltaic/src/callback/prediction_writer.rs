//! Writes predictions to files, or wherever one's own writer puts them.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::checkpoint::write_weights;
use crate::config::expand_home;
use crate::error::Result;
use crate::lightning::Callback;
use crate::module::{HookContext, OutputValue};
use crate::nn::Module;

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
    /// `batch` for a file per batch, `epoch` for one file at the end, `batch_and_epoch` for both; each rank writes its own.
    pub write_interval: WriteInterval,
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
/// - `<output_dir>/predictions-<rank>.safetensors` has them for each loader, one batch after the other along dimension 0:
///   `dataloader_0.prediction`, `dataloader_0.batch_indices`; if their shapes do not fit, `dataloader_0.<batch_idx>.prediction`.
///
/// Tensors that `predict_step` gives by name (`ctx.output("boxes", &boxes)`) are written beside `prediction`, by their names. A
/// value that is no tensor is refused: write it with a [`WritePredictions`] of your own, which finds it in `ctx.outputs()`.
///
/// `-<rank>` is there if there are several ranks with other batches. With `write_interval=batch` and `trainer.return_predictions(false)` no
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
        Self::new(
            config.write_interval,
            SafetensorsWriter { output_dir: config.output_dir.map(expand_home), files: BTreeSet::new() },
        )
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

    fn on_predict_epoch_start(
        &mut self,
        _ctx: &mut HookContext,
        _module: &mut dyn Module,
    ) -> anyhow::Result<()> {
        self.batches.clear();
        Ok(())
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
        if self.interval.is_on_epoch() && ctx.device_mesh().tp.rank == 0 {
            let batches = std::mem::take(&mut self.batches);
            self.writer.write_on_epoch_end(ctx, &batches)?;
        }
        Ok(())
    }
}

/// Writes safetensors files.
struct SafetensorsWriter {
    output_dir: Option<PathBuf>,
    /// The file of the epoch, and folders of batches.
    files: BTreeSet<PathBuf>,
}

impl SafetensorsWriter {
    fn folder(&self, ctx: &HookContext) -> PathBuf {
        self.output_dir.clone().unwrap_or_else(|| ctx.log_dir().join("predictions"))
    }
}

/// `<stem>.safetensors`, with the rank behind the stem if there are several.
fn path(ctx: &HookContext, folder: &Path, stem: &str) -> PathBuf {
    let dp = &ctx.device_mesh().dp;
    let rank = if dp.size > 1 { format!("-{}", dp.rank) } else { String::new() };
    folder.join(format!("{stem}{rank}.safetensors"))
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
