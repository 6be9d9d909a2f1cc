//! Callbacks: stopping early, averages of weights, searches for a learning rate and a batch size, predictions in files.

#[macro_use]
mod support;

use support::{LitClassifier, Short, report};
use voltaic::callback::{
    EmaWeightAveragingConfig, PredictionWriter, PredictionWriterConfig, WeightAveraging, WriteInterval,
};
use voltaic::data::MnistData;
use voltaic::models::{Classifier, Mlp, MlpConfig};
use voltaic::prelude::*;
use voltaic::trainer::{BatchSizeFinderConfig, LearningRateFinderConfig, TrainerBuilder};

fn main() -> Result<()> {
    support::run(blocks![
        early_stopping,
        weight_averaging,
        learning_rate_finder,
        batch_size_finder,
        predictions_in_files
    ])
}

fn on_one_hpu() -> TrainerBuilder {
    Trainer::builder().accelerator("hpu").devices(1).short()
}

/// Ends when `val_loss` has not fallen for three validations.
fn early_stopping() -> Result<()> {
    let stopping = EarlyStopping::monitor("val_loss")?;
    let mut trainer = on_one_hpu().max_epochs(50).limit_train_batches(20).callback(stopping).build()?;

    trainer.fit(&mut LitClassifier::new()?, &mut MnistData::default())?;
    println!("stopped after {} of 50 epochs", trainer.current_epoch());
    report(&trainer)
}

/// Validation, the checkpoint, and the module after the fit have the average of the weights.
fn weight_averaging() -> Result<()> {
    let average = WeightAveraging::ema(EmaWeightAveragingConfig { decay: 0.95, ..Default::default() })?;
    let plain = on_one_hpu().build()?;
    let averaged = on_one_hpu().callback(average).build()?;

    for mut trainer in [plain, averaged] {
        seed_everything(1)?;
        trainer.fit(&mut LitClassifier::new()?, &mut MnistData::default())?;
        println!("val_loss {:.6}", trainer.metric("val_loss").unwrap_or(f64::NAN));
    }
    Ok(())
}

/// Writes `lr_find.png`, and trains at the rate that it has found.
fn learning_rate_finder() -> Result<()> {
    let finder = LearningRateFinderConfig { num_training_steps: 50, ..Default::default() };
    let mut trainer = on_one_hpu().callbacks([finder]).build()?;

    trainer.fit(&mut LitClassifier::new()?, &mut MnistData::default())?;
    println!("lr {:.6}", trainer.found_lr().unwrap_or(f64::NAN));
    report(&trainer)
}

/// Trains with the largest batches for which the card has memory; `VOLTAIC_HPU_MEMORY=4MiB` makes an emulated one small.
fn batch_size_finder() -> Result<()> {
    let finder = BatchSizeFinderConfig { init_val: 64, max_val: 4096, ..Default::default() };
    let mut trainer = on_one_hpu().callbacks([finder]).build()?;

    trainer.fit(&mut LitClassifier::new()?, &mut MnistData::default())?;
    println!("batch_size {}", trainer.found_batch_size().unwrap_or(0));
    report(&trainer)
}

/// Writes `predictions/predictions.safetensors` instead of keeping all predictions in memory.
fn predictions_in_files() -> Result<()> {
    let writer = PredictionWriter::from(PredictionWriterConfig {
        output_dir: Some("predictions".into()),
        write_interval: WriteInterval::Epoch,
        ..Default::default()
    });
    let mut net = Classifier::new(Mlp::new(MlpConfig::default())?);
    let mut trainer = on_one_hpu().limit_predict_batches(4).callback(writer).build()?;

    trainer.fit(&mut net, &mut MnistData::default())?;
    trainer.return_predictions(false).predict(&mut net, &mut MnistData::default())?;
    for (name, tensor) in Tensor::read_safetensors("predictions/predictions.safetensors")? {
        println!("{name} {:?}", tensor.size());
    }
    Ok(())
}
