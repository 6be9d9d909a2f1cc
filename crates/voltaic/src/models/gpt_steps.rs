//! How [`Gpt`] is trained: next-token loss, and AdamW that decays matrices only.

use tch::Tensor;

use super::gpt::{Gpt, loss_of};
use crate::module::{LightningModule, StepContext};
use crate::nn::ModuleExt;
use crate::optim::{AdamW, Optimizers, ParamGroupSpec};

impl LightningModule for Gpt {
    /// `(tokens, targets)`, both `int64 [batch, time]`; targets are the tokens shifted by one.
    type Batch = (Tensor, Tensor);

    fn training_step(
        &self,
        (tokens, targets): &Self::Batch,
        ctx: &mut StepContext,
    ) -> anyhow::Result<Tensor> {
        let loss = loss_of(&ctx.graphed(self, tokens)?, targets)?;
        ctx.log("train_loss", &loss).prog_bar(true);
        Ok(loss)
    }

    fn validation_step(&self, (tokens, targets): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        let loss = loss_of(&ctx.graphed(self, tokens)?, targets)?;
        ctx.log("val_loss", loss).prog_bar(true).sync_dist(true);
        Ok(())
    }

    fn test_step(&self, (tokens, targets): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        let loss = loss_of(&ctx.graphed(self, tokens)?, targets)?;
        ctx.log("test_loss", loss).prog_bar(true).sync_dist(true);
        Ok(())
    }

    /// The most likely next token at each position, `int64 [batch, time]`.
    fn predict_step(&self, (tokens, _): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        Ok(ctx.graphed(self, tokens)?.f_argmax(-1, false)?)
    }

    /// nanoGPT's AdamW: betas (0.9, 0.99), weight decay 0.1 on matrices, none on biases and norms.
    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        let (matrices, vectors): (Vec<_>, Vec<_>) =
            self.named_parameters().into_iter().partition(|(_, parameter)| parameter.dim() >= 2);
        let groups = [ParamGroupSpec::new(matrices), ParamGroupSpec::new(vectors).weight_decay(0.0)];
        Ok(Optimizers::new(AdamW::new(1e-3).betas((0.9, 0.99)).weight_decay(0.1)).groups(groups))
    }

    fn hyper_parameters(&self) -> serde_json::Value {
        serde_json::to_value(self.config()).unwrap_or_default()
    }
}
