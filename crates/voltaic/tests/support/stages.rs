//! A module whose steps give known values, and a callback that looks for them: lightning-Habana's `test_stages_correct`.

use std::sync::{Arc, Mutex};

use voltaic::callback::Callback;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::module::{Hook, HookContext, LightningModule, StepContext};
use voltaic::nn::Parameter;
use voltaic::optim::{Optimizers, Sgd};
use voltaic::trainer::TrainerBuilder;
use voltaic::{Kind, Module, Tensor};

/// Its losses are 1, its outputs `x` 2 and `y` 3, its predictions 4, and `product` is the batch times its weight.
#[derive(Module)]
pub struct Stages {
    pub weight: Parameter,
    #[module(skip)]
    pub is_manual: bool,
}

impl Stages {
    pub fn new() -> Self {
        let weight = Parameter::new(Tensor::from_slice(&[2_f32, 3.0]));
        Self { weight, is_manual: false }
    }
}

impl LightningModule for Stages {
    type Batch = Tensor;

    fn training_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let product = batch.f_mul(self.weight.tensor())?;
        ctx.output("product", &product);
        ctx.output("column", &batch.f_narrow(1, 1, 1)?); // a view of the batch
        let mean = product.f_mean(Kind::Float)?;
        let loss = mean.f_sub(&mean.f_detach()?)?.f_add_scalar(1.0)?; // 1, with the gradient of the mean
        if self.is_manual {
            ctx.optimizer(0)?.zero_grad()?;
            ctx.manual_backward(&loss)?;
            ctx.optimizer(0)?.step()?;
        }
        Ok(loss)
    }

    fn validation_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<()> {
        ctx.output("product", &batch.f_mul(self.weight.tensor())?);
        ctx.output("x", &batch.f_zeros_like()?.f_add_scalar(2.0)?);
        Ok(())
    }

    fn test_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<()> {
        ctx.output("product", &batch.f_mul(self.weight.tensor())?);
        ctx.output("y", &batch.f_zeros_like()?.f_add_scalar(3.0)?);
        Ok(())
    }

    fn predict_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        ctx.output("product", &batch.f_mul(self.weight.tensor())?);
        Ok(batch.f_zeros_like()?.f_add_scalar(4.0)?)
    }

    fn automatic_optimization(&self) -> bool {
        !self.is_manual
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Sgd::new(0.125).into()
    }

    fn on_train_batch_end(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        assert_eq!(ctx.batch::<Tensor>()?.size(), ctx.outputs().tensor("product")?.size());
        assert!(ctx.outputs().loss().is_some());
        Ok(())
    }
}

/// Checks each batch and what was given for it; keeps the products.
#[derive(Default, Clone)]
pub struct Checks {
    weight: Arc<Mutex<Vec<f32>>>,
    /// What each batch end was given: the hook, and `product`.
    pub seen: Arc<Mutex<Vec<(Hook, Tensor)>>>,
}

fn all_are(tensor: &Tensor, value: f64) -> bool {
    tensor.numel() > 0 && tensor.eq(value).all().int64_value(&[]) == 1
}

impl Callback for Checks {
    fn on_hook(&mut self, hook: Hook, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        let values = |weight: &Tensor| Vec::<f32>::try_from(weight.detach().to(tch::Device::Cpu)).unwrap();
        let (is_start, is_end) = (hook.name().ends_with("batch_start"), hook.name().ends_with("batch_end"));
        if !is_start && !is_end {
            let error = ctx.batch::<Tensor>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("{} is not about a batch", hook.name())), "{error}");
            return Ok(());
        }
        let batch = ctx.batch::<Tensor>()?;
        if is_start {
            *self.weight.lock().unwrap() = values(module.downcast_mut::<Stages>()?.weight.tensor());
            assert_eq!(ctx.outputs().named().len(), 0, "nothing was given yet");
            assert!(ctx.loss().is_none() && ctx.prediction().is_none());
            return Ok(());
        }
        let outputs = ctx.outputs();
        let product = outputs.tensor("product")?;
        assert!(!product.requires_grad());
        let weight = Tensor::from_slice(&self.weight.lock().unwrap()).to(product.device());
        assert!(product.equal(&(batch * weight)), "{}: the product of this batch", hook.name());
        match hook {
            Hook::OnTrainBatchEnd => {
                let loss = outputs.loss().unwrap();
                assert!(outputs.tensor("column")?.equal(&batch.narrow(1, 1, 1)));
                assert!(!loss.requires_grad() && loss.equal(ctx.loss().unwrap()));
            }
            Hook::OnValidationBatchEnd => assert!(all_are(outputs.tensor("x")?, 2.0)),
            Hook::OnTestBatchEnd => assert!(all_are(outputs.tensor("y")?, 3.0)),
            _ => assert!(all_are(ctx.prediction().unwrap(), 4.0)),
        }
        self.seen.lock().unwrap().push((hook, product.shallow_clone()));
        Ok(())
    }
}

impl Checks {
    pub fn count(&self, hook: Hook) -> usize {
        self.seen.lock().unwrap().iter().filter(|(seen, _)| *seen == hook).count()
    }
}

/// Batches of two samples without a pattern that a mistake could hide in.
pub fn loader(samples: i64) -> DataLoader<Tensor> {
    let x = Tensor::arange(samples * 2, (Kind::Float, tch::Device::Cpu)).sin().reshape([samples, 2]);
    DataLoader::new(TensorDataset::new(x).unwrap()).batch_size(2).shuffle(true).seed(3).build().unwrap()
}

/// All four stages of a trainer made of `builder`, with two epochs of ten batches and a sanity check; the losses of a window
/// of `accumulate` batches are checked, too. Gives the callback and the number of replayed steps.
pub fn run(builder: TrainerBuilder, module: &mut Stages, accumulate: u64) -> (Checks, u64) {
    let checks = Checks::default();
    let losses = Arc::new(Mutex::new(Vec::new()));
    let kept = losses.clone();
    let window = voltaic::callback::LambdaCallback::new().on(Hook::OnTrainBatchEnd, move |ctx, _| {
        kept.lock().unwrap().push(ctx.outputs().loss().unwrap().double_value(&[]));
        Ok(())
    });
    let mut trainer = builder
        .max_epochs(2)
        .accumulate_grad_batches(accumulate)
        .num_sanity_val_steps(1)
        .callback(checks.clone())
        .callback(window)
        .build()
        .unwrap();
    let mut data = Loaders::new().train(loader(20)).val(loader(6)).test(loader(4)).predict(loader(4));
    trainer.fit(module, &mut data).unwrap();
    let expected = 1.0 / accumulate as f64;
    assert!(losses.lock().unwrap().iter().all(|loss| (loss - expected).abs() < 1e-6));
    let replayed = trainer.graph_report().replayed_steps;
    trainer.validate(module, &mut data).unwrap();
    trainer.test(module, &mut data).unwrap();
    trainer.predict(module, &mut data).unwrap();
    (checks, replayed)
}
