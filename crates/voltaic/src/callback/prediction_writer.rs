//! Writes predictions to files, or wherever one's own writer puts them.

use std::fmt;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::checkpoint::write_weights;
use crate::error::Result;
use crate::lightning::Callback;
use crate::module::HookContext;
use crate::nn::Module;

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
    /// What `predict_step` gave; on the device.
    pub prediction: Tensor,
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
            batch_indices: self.batch_indices.clone(),
            ..*self
        }
    }
}

/// Where predictions go. Each rank has a writer of its own and sees its own batches.
#[allow(unused_variables)]
pub trait WritePredictions: Send {
    /// Writes what was predicted for a batch; called if the interval is `batch` or `batch_and_epoch`.
    ///
    /// # Errors
    /// Any error ends the run.
    fn write_on_batch_end(&mut self, ctx: &HookContext, batch: &PredictedBatch) -> anyhow::Result<()> {
        anyhow::bail!("this writer does not write single batches; use write_interval=epoch")
    }

    /// Writes all that was predicted, in the order of loaders and batches; called if the interval is `epoch` or
    /// `batch_and_epoch`.
    ///
    /// # Errors
    /// Any error ends the run.
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
/// `-<rank>` is there if there are several ranks. With `write_interval=batch` and `trainer.return_predictions(false)` no
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
        Self::new(config.write_interval, SafetensorsWriter { output_dir: config.output_dir })
    }
}

impl fmt::Debug for PredictionWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PredictionWriter").field("interval", &self.interval).finish_non_exhaustive()
    }
}

impl Callback for PredictionWriter {
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
        let Some(prediction) = ctx.prediction() else { return Ok(()) };
        let batch = PredictedBatch {
            prediction: prediction.shallow_clone(),
            batch_indices: ctx.batch_indices().to_vec(),
            batch_idx: ctx.batch_idx(),
            dataloader_idx: ctx.dataloader_idx(),
        };
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
        if self.interval.is_on_epoch() {
            let batches = std::mem::take(&mut self.batches);
            self.writer.write_on_epoch_end(ctx, &batches)?;
        }
        Ok(())
    }
}

/// Writes safetensors files.
struct SafetensorsWriter {
    output_dir: Option<PathBuf>,
}

impl SafetensorsWriter {
    fn folder(&self, ctx: &HookContext) -> PathBuf {
        self.output_dir.clone().unwrap_or_else(|| ctx.log_dir().join("predictions"))
    }
}

/// `<stem>.safetensors`, with the rank behind the stem if there are several.
fn path(ctx: &HookContext, folder: &Path, stem: &str) -> PathBuf {
    let rank = ctx.process_group().map(|group| format!("-{}", group.rank())).unwrap_or_default();
    folder.join(format!("{stem}{rank}.safetensors"))
}

fn indices(of: &[usize]) -> Result<Tensor> {
    let indices: Vec<i64> = of.iter().map(|&index| index as i64).collect();
    Ok(Tensor::f_from_slice(&indices)?)
}

/// Predictions one after the other; `None` if their shapes do not fit.
fn joined(batches: &[&PredictedBatch]) -> Option<Tensor> {
    let (first, rest) = batches.split_first()?;
    let (kind, size) = (first.prediction.kind(), first.prediction.size());
    let (_, tail) = size.split_first()?;
    let fits = rest.iter().all(|batch| {
        let size = batch.prediction.size();
        batch.prediction.kind() == kind && size.split_first().is_some_and(|(_, own)| own == tail)
    });
    let tensors: Vec<&Tensor> = batches.iter().map(|batch| &batch.prediction).collect();
    fits.then(|| Tensor::f_cat(&tensors, 0).ok()).flatten()
}

impl WritePredictions for SafetensorsWriter {
    fn write_on_batch_end(&mut self, ctx: &HookContext, batch: &PredictedBatch) -> anyhow::Result<()> {
        let folder = self.folder(ctx).join(batch.dataloader_idx.to_string());
        let tensors = [
            ("prediction".to_owned(), batch.prediction.shallow_clone()),
            ("batch_indices".to_owned(), indices(&batch.batch_indices)?),
        ];
        Ok(write_weights(&tensors, &path(ctx, &folder, &batch.batch_idx.to_string()))?)
    }

    fn write_on_epoch_end(&mut self, ctx: &HookContext, batches: &[PredictedBatch]) -> anyhow::Result<()> {
        let mut tensors = Vec::new();
        let last = batches.last().map_or(0, |batch| batch.dataloader_idx + 1);
        for dataloader_idx in 0..last {
            let own: Vec<&PredictedBatch> =
                batches.iter().filter(|batch| batch.dataloader_idx == dataloader_idx).collect();
            let name = |what: &str| format!("dataloader_{dataloader_idx}.{what}");
            match joined(&own) {
                Some(all) => tensors.push((name("prediction"), all)),
                None => tensors.extend(own.iter().map(|batch| {
                    (name(&format!("{}.prediction", batch.batch_idx)), batch.prediction.shallow_clone())
                })),
            }
            let samples: Vec<usize> = own.iter().flat_map(|batch| batch.batch_indices.clone()).collect();
            tensors.push((name("batch_indices"), indices(&samples)?));
        }
        if tensors.is_empty() {
            // a rank without a batch has a file, too
            tensors.push((
                "dataloader_0.batch_indices".to_owned(),
                Tensor::f_zeros([0], (Kind::Int64, tch::Device::Cpu))?,
            ));
        }
        Ok(write_weights(&tensors, &path(ctx, &self.folder(ctx), "predictions"))?)
    }
}
