//! Fine-tuning: weights from a safetensors file, a frozen layer, and two learning rates. See docs/fine_tuning.md.

use voltaic::callback::{BackboneFinetuning, BackboneFinetuningConfig};
use voltaic::data::MnistData;
use voltaic::prelude::*;
use voltaic::trainer::TrainerBuilder;

#[derive(Module)]
struct Net {
    first: Linear,
    second: Linear,
    head: Linear,
    classes: i64,
    body_lr: f64,
}

impl Net {
    fn new(classes: i64, body_lr: f64) -> Result<Self> {
        let (first, second) = (Linear::new(784, 128)?, Linear::new(128, 64)?);
        Ok(Self { first, second, head: Linear::new(64, classes)?, classes, body_lr })
    }
}

impl LightningModule for Net {
    type Batch = (Tensor, Tensor);

    fn training_step(&self, (images, labels): &Self::Batch, ctx: &mut StepContext) -> Result<Tensor> {
        let hidden = self.first.forward(&images.flatten(1, -1))?.relu();
        let logits = self.head.forward(&self.second.forward(&hidden)?.relu())?;
        let labels = labels.remainder(self.classes); // of two classes: whether a digit is odd
        ctx.log("train_acc", accuracy(&logits, &labels)?).on_step(false).on_epoch(true).prog_bar(true);
        Ok(cross_entropy(&logits, &labels)?)
    }

    fn configure_optimizers(&self) -> Result<Optimizers> {
        let parameters = self.named_parameters().into_iter(); // frozen ones, too: they stay as they are
        let (head, body): (Vec<_>, Vec<_>) = parameters.partition(|(name, _)| name.starts_with("head."));
        let groups =
            [ParamGroupSpec::new(body).lr(self.body_lr).name("body"), ParamGroupSpec::new(head).name("head")];
        Ok(Optimizers::new(AdamW::new(1e-3)).groups(groups))
    }
}

fn builder() -> TrainerBuilder {
    let rates = LearningRateMonitor::default();
    Trainer::builder().accelerator("auto").max_epochs(2).limit_val_batches(0).callback(rates)
}

fn main() -> Result<()> {
    seed_everything(42)?;
    let mut pretrained = Net::new(2, 1e-3)?;
    let mut pretraining = builder().build()?;
    pretraining.fit(&mut pretrained, &mut MnistData::default())?;
    pretraining.save_weights(&pretrained, "pretrained.safetensors", None)?; // stands for a file from elsewhere

    let mut net = Net::new(10, 1e-4)?;
    let mut weights = Checkpoint::load("pretrained.safetensors")?.weights;
    weights.retain(|(name, _)| !name.starts_with("head.")); // has two classes, not ten
    let keys = net.load_state_dict(&weights, false)?;
    println!("new: {}; not used: {}", keys.missing_keys.join(", "), keys.unexpected_keys.join(", "));
    net.first.set_requires_grad(false); // for good
    let second = BackboneFinetuningConfig {
        backbone: "second".into(),
        unfreeze_backbone_at_epoch: 1, // in epoch 0, the first, it is frozen
        train_bn: false,
    };
    let mut trainer = builder().callback(BackboneFinetuning::new(second)).build()?;
    trainer.fit(&mut net, &mut MnistData::default())?;
    Ok(())
}
