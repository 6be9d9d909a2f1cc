//! Several optimizers: a GAN (arXiv:1406.2661) that draws digits. See docs/several_optimizers.md.

use voltaic::data::MnistData;
use voltaic::nn::LeakyRelu;
use voltaic::prelude::*;

#[derive(Module)]
struct Gan {
    generator: Sequential,     // noise [batch, 64] to images [batch, 784]
    discriminator: Sequential, // images to one logit each: above 0 for "real"
}

impl Gan {
    /// How far the discriminator is from calling all images real, or all drawn.
    fn loss(&self, images: &Tensor, are_real: bool) -> Result<Tensor> {
        let logits = self.discriminator.forward(images)?;
        let target = logits.full_like(f64::from(u8::from(are_real)));
        Ok(binary_cross_entropy_with_logits(&logits, &target)?)
    }
}

impl LightningModule for Gan {
    type Batch = (Tensor, Tensor);

    fn automatic_optimization(&self) -> bool {
        false // training_step calls backward and steps the optimizers
    }

    fn training_step(&self, (images, _): &Self::Batch, ctx: &mut StepContext) -> Result<Tensor> {
        let images = images.flatten(1, -1);
        let drawn =
            self.generator.forward(&Tensor::randn([images.size()[0], 64], (Kind::Float, images.device())))?;

        let g_loss = self.loss(&drawn, true)?;
        ctx.optimizer(0)?.zero_grad()?;
        ctx.manual_backward(&g_loss)?;
        ctx.optimizer(0)?.step()?;

        let d_loss = (self.loss(&images, true)? + self.loss(&drawn.detach(), false)?) / 2;
        ctx.optimizer(1)?.zero_grad()?; // also what g_loss left in the discriminator
        ctx.manual_backward(&d_loss)?;
        ctx.optimizer(1)?.step()?;

        ctx.log("g_loss", &g_loss).prog_bar(true);
        ctx.log("d_loss", &d_loss).prog_bar(true);
        let means = drawn.detach().mean_dim(0, false, Kind::Float) - images.mean_dim(0, false, Kind::Float);
        ctx.log("distance", means.abs().mean(Kind::Float)); // between the mean images
        Ok(ctx.no_loss())
    }

    fn configure_optimizers(&self) -> Result<Optimizers> {
        let parameters = self.named_parameters().into_iter();
        let (g, d): (Vec<_>, Vec<_>) = parameters.partition(|(name, _)| name.starts_with("generator."));
        let adam = |parameters| {
            Optimizers::new(Adam::new(1e-3).betas((0.5, 0.999))).groups([ParamGroupSpec::new(parameters)])
        };
        Ok(adam(g).and(adam(d)))
    }
}

fn perceptron(from: i64, to: i64) -> Result<Sequential> {
    Ok(Sequential::new().add(Linear::new(from, 128)?).add(LeakyRelu::new(0.2)).add(Linear::new(128, to)?))
}

fn main() -> Result<()> {
    seed_everything(42)?;
    let mut gan = Gan { generator: perceptron(64, 784)?, discriminator: perceptron(784, 1)? };
    let builder = Trainer::builder().accelerator("auto").max_epochs(3).limit_val_batches(0);
    let mut trainer = builder.log_every_n_steps(1_u64).build()?;
    trainer.fit(&mut gan, &mut MnistData::default())?;
    Ok(())
}
