//! Modules that are made when a run begins.

use voltaic::data::Stage;
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::{Dropout, Forward, Linear, ModuleExt};
use voltaic::optim::{AdamW, Optimizers, StepLr};
use voltaic::trainer::{BatchSizeFinderConfig, LearningRateFinderConfig, seed_everything};
use voltaic::{Kind, Module, Tensor};

use crate::ddp::assert_same;
use crate::probe::{loaders, silent};
use crate::rng::seeded;

/// Its layer is made when a run begins.
#[derive(Module)]
struct Late {
    layer: Option<Linear>,
    dropout: Dropout,
    #[module(skip)]
    is_manual: bool,
}

impl Late {
    fn new() -> Self {
        Self { layer: None, dropout: Dropout::new(0.25).unwrap(), is_manual: false }
    }

    fn weights(&self) -> Vec<(String, Tensor)> {
        self.state_dict().into_iter().map(|(name, t)| (name, t.to_device(tch::Device::Cpu).copy())).collect()
    }
}

impl LightningModule for Late {
    type Batch = Tensor;

    fn configure_model(&mut self) -> anyhow::Result<()> {
        if self.layer.is_none() {
            self.layer = Some(Linear::new(2, 3)?);
        }
        Ok(())
    }

    fn training_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let out = self.layer.as_ref().expect("made").forward(&self.dropout.forward(batch)?)?;
        let loss = out.f_square()?.f_mean(Kind::Float)?;
        if self.is_manual {
            ctx.manual_backward(&loss)?;
            // windows of four batches, which do not end with the epochs
            if (ctx.current_epoch() * 6 + ctx.batch_idx() as u64 + 1).is_multiple_of(4) {
                ctx.optimizer(0)?.step()?;
                ctx.optimizer(0)?.zero_grad()?;
            }
            return Ok(loss.f_detach()?);
        }
        Ok(loss)
    }

    fn validation_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<()> {
        ctx.log("val_loss", self.layer.as_ref().expect("made").forward(batch)?.f_mean(Kind::Float)?);
        Ok(())
    }

    fn automatic_optimization(&self) -> bool {
        !self.is_manual
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(Optimizers::new(AdamW::new(0.05)).scheduler(StepLr::new(1, 0.5)))
    }
}

#[test]
fn a_search_leaves_a_module_that_it_has_completed_as_it_was() {
    let _rng = seeded(1);
    let whole = {
        seed_everything(5).unwrap();
        let mut net = Late::new();
        net.configure_model().unwrap();
        net.weights()
    };
    let trainer = silent().max_epochs(1).build().unwrap();
    let config = LearningRateFinderConfig { num_training_steps: 20, ..Default::default() };
    seed_everything(5).unwrap();
    let mut net = Late::new();
    trainer.lr_find(&mut net, &mut loaders(), &config).unwrap();
    assert_same(&net.weights(), &whole);
    trainer.lr_find(&mut net, &mut loaders(), &config).unwrap();
    assert_same(&net.weights(), &whole);
    let config = BatchSizeFinderConfig { max_val: 8, ..Default::default() };
    for stage in [Stage::Fit, Stage::Validate] {
        seed_everything(5).unwrap();
        let mut net = Late::new();
        assert_eq!(
            trainer.scale_batch_size(&mut net, &mut loaders(), stage, &config).unwrap(),
            if stage == Stage::Fit { 8 } else { 4 }
        );
        assert_same(&net.weights(), &whole);
    }
    seed_everything(5).unwrap();
    let mut net = Late::new();
    trainer.measure_flops(&mut net, &mut loaders()).unwrap();
    assert_same(&net.weights(), &whole);
}
