//! Trains any network that gives logits: cross-entropy, accuracy, and by default Adam.

use tch::Tensor;

use crate::data::Stage;
use crate::module::{LightningModule, StepContext};
use crate::nn::functional::{accuracy, cross_entropy};
use crate::nn::{Forward, Member, Module, await_forward, within_call};
use crate::optim::{Adam, Optimizers};

/// A network with the steps of a classifier. Its state dict is the network's own, without a prefix.
///
/// A batch is `(inputs, labels)`: whatever the network takes, and `int64` class numbers `[batch]`. Logs `train_loss`
/// each step, and `val_loss`, `val_acc`, `test_loss`, `test_acc` per epoch. Validation and testing give `logits`
/// (`[batch, classes]`) to the hooks after each batch.
///
/// ```
/// use voltaic::models::{Classifier, LeNet, LeNetConfig};
/// # fn main() -> voltaic::Result<()> {
/// let net = Classifier::new(LeNet::new(LeNetConfig::default())?);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Classifier<N: Forward> {
    net: N,
    hyper_parameters: serde_json::Value,
}

impl<N: Forward> Classifier<N> {
    /// Trains `net`.
    pub fn new(net: N) -> Self {
        Self { net, hyper_parameters: serde_json::Value::Null }
    }

    /// Keeps the settings that made the network, for logs and checkpoints.
    #[must_use]
    pub fn with_hyper_parameters(mut self, hyper_parameters: serde_json::Value) -> Self {
        self.hyper_parameters = hyper_parameters;
        self
    }

    /// The network.
    pub fn net(&self) -> &N {
        &self.net
    }

    fn evaluate(
        &self,
        (inputs, labels): &(Tensor, Tensor),
        stage: Stage,
        ctx: &mut StepContext,
    ) -> anyhow::Result<()> {
        let logits = ctx.graphed(&self.net, inputs)?;
        let prefix = if stage == Stage::Test { "test" } else { "val" };
        ctx.log(&format!("{prefix}_loss"), cross_entropy(&logits, labels)?).prog_bar(true).sync_dist(true);
        ctx.log(&format!("{prefix}_acc"), accuracy(&logits, labels)?).prog_bar(true).sync_dist(true);
        ctx.output("logits", &logits);
        Ok(())
    }
}

impl<N: Forward> Module for Classifier<N> {
    fn members<'a>(&'a self, visit: &mut dyn FnMut(&str, Member<'a>)) {
        self.net.members(visit);
    }

    fn children_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&str, &'a mut dyn Module)) {
        self.net.children_mut(visit);
    }

    fn set_training(&mut self, training: bool) {
        self.net.set_training(training);
    }

    fn is_training(&self) -> Option<bool> {
        self.net.is_training()
    }

    fn wrapped(&self) -> Option<&dyn Module> {
        Some(&self.net)
    }

    fn type_name(&self) -> &'static str {
        self.net.type_name()
    }
}

/// The network's.
impl<N: Forward> Forward for Classifier<N> {
    fn forward(&self, inputs: &Tensor) -> anyhow::Result<Tensor> {
        within_call(self, inputs, |inputs| {
            await_forward(&self.net);
            self.net.forward(inputs)
        })
    }
}

impl<N: Forward> LightningModule for Classifier<N> {
    type Batch = (Tensor, Tensor);

    fn training_step(&self, (inputs, labels): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let loss = cross_entropy(&ctx.graphed(&self.net, inputs)?, labels)?;
        ctx.log("train_loss", &loss).prog_bar(true);
        Ok(loss)
    }

    fn validation_step(&self, batch: &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        self.evaluate(batch, Stage::Validate, ctx)
    }

    fn test_step(&self, batch: &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        self.evaluate(batch, Stage::Test, ctx)
    }

    /// The most likely class of each input, `int64 [batch]`.
    fn predict_step(&self, (inputs, _): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        Ok(ctx.graphed(&self.net, inputs)?.f_argmax(1, false)?)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(Adam::new(1e-3).into())
    }

    fn hyper_parameters(&self) -> serde_json::Value {
        self.hyper_parameters.clone()
    }
}
