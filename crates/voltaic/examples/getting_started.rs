//! "A model of your own" of README.md.

use voltaic::prelude::*;

#[derive(Module)] // names the parameters: fc1.weight, fc1.bias, fc2.weight, ...
struct Net {
    fc1: Linear,
    fc2: Linear,
}

impl LightningModule for Net {
    type Batch = (Tensor, Tensor); // images [batch, 1, 28, 28] and labels [batch]

    fn training_step(&self, (images, labels): &Self::Batch, ctx: &mut StepContext) -> Result<Tensor> {
        let hidden = self.fc1.forward(&images.flatten(1, -1))?.relu();
        let loss = cross_entropy(&self.fc2.forward(&hidden)?, labels)?;
        ctx.log("train_loss", &loss).prog_bar(true);
        Ok(loss)
    }

    fn configure_optimizers(&self) -> Result<Optimizers> {
        Ok(AdamW::new(1e-3).into())
    }
}

fn main() -> Result<()> {
    seed_everything(42)?;
    let mut net = Net { fc1: Linear::new(784, 256)?, fc2: Linear::new(256, 10)? };
    let mut data = voltaic::data::MnistData::default();
    // "hpu" is emulated where there is no Gaudi card; "cpu", "cuda" and "auto" are others
    let mut trainer = Trainer::builder().accelerator("hpu").max_epochs(3).limit_val_batches(0).build()?;
    trainer.fit(&mut net, &mut data)?;
    Ok(())
}
