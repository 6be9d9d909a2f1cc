//! Where metrics go, and metrics of a whole epoch.

#[macro_use]
mod support;

use support::{LitClassifier, Short};
use voltaic::data::{MnistData, MnistDataConfig};
use voltaic::logger::{CsvLoggerConfig, JsonLinesLoggerConfig, LoggerConfig, TensorBoardLoggerConfig};
use voltaic::metrics::{Auroc, Average, F1Score};
use voltaic::prelude::*;

fn main() -> Result<()> {
    support::run(blocks![csv_tensorboard_and_json_lines, f1_and_auroc_of_an_epoch])
}

/// `tensorboard --logdir lightning_logs` shows the event file.
fn csv_tensorboard_and_json_lines() -> Result<()> {
    let loggers = vec![
        LoggerConfig::Csv(CsvLoggerConfig::default()),
        LoggerConfig::TensorBoard(TensorBoardLoggerConfig::default()),
        LoggerConfig::JsonLines(JsonLinesLoggerConfig::default()),
    ];
    let mut trainer = Trainer::builder()
        .accelerator("hpu")
        .devices(1)
        .short()
        .logger(loggers)
        .callback(LearningRateMonitor::default())
        .build()?;

    trainer.fit(&mut LitClassifier::new()?, &mut MnistData::default())?;
    for file in trainer.files() {
        println!("{}", file.display());
    }
    Ok(())
}

/// The metrics are fields of the model.
#[derive(Module)]
struct Scored {
    net: Linear,
    f1: F1Score,
    auroc: Auroc,
}

impl LightningModule for Scored {
    type Batch = (Tensor, Tensor);

    fn training_step(&self, (x, y): &Self::Batch, _ctx: &mut StepContext) -> Result<Tensor> {
        Ok(cross_entropy(&self.net.forward(&x.f_flatten(1, -1)?)?, y)?)
    }

    fn validation_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> Result<()> {
        let logits = self.net.forward(&x.f_flatten(1, -1)?)?;
        self.f1.update(&logits, y)?;
        self.auroc.update(&logits.f_softmax(-1, None::<Kind>)?, y)?;
        ctx.log("val_f1", &self.f1); // the object, not a number: the trainer computes it when the epoch is over
        ctx.log("val_auroc", &self.auroc);
        Ok(())
    }

    fn configure_optimizers(&self) -> Result<Optimizers> {
        Ok(Adam::new(0.001).into())
    }
}

/// The value is that of the epoch, however it was cut into batches: a mean of the batches' values would differ.
fn f1_and_auroc_of_an_epoch() -> Result<()> {
    let mut net = Scored {
        net: Linear::new(28 * 28, 10)?,
        f1: F1Score::new(10, Average::Macro),
        auroc: Auroc::multiclass(10),
    };
    let mut trainer =
        Trainer::builder().accelerator("hpu").devices(1).short().limit_val_batches(1.0).build()?;
    trainer.fit(&mut net, &mut MnistData::default())?;

    for batch_size in [64, 100, 1200] {
        let mut data = MnistData::new(MnistDataConfig { batch_size, ..MnistDataConfig::default() });
        let metrics = trainer.validate(&mut net, &mut data)?;
        println!("in batches of {batch_size}: {metrics:?}");
    }
    Ok(())
}
