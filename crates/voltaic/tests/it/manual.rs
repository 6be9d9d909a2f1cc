//! Manual optimization: the module runs backward, optimizers and schedules itself.

use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::{Callable, Linear, ModuleExt, Parameter};
use voltaic::optim::{
    AdamW, BuildOptimizer, Lamb, Lion, Optimizers, ParamGroupSpec, RmsProp, Sgd, StepLr, clip_grad_norm,
};
use voltaic::precision::HpuPrecisionPlugin;
use voltaic::trainer::PluginConfig;
use voltaic::{Kind, Module, Tensor};

use crate::probe::{Events, has_hpu, loaders, silent};

/// Two weights with an optimizer each; the second is trained on what the first makes of the batch.
#[derive(Module)]
struct Pair {
    first: Parameter,
    second: Parameter,
    #[module(skip)]
    step: fn(&Pair, &Tensor, &mut StepContext) -> anyhow::Result<()>,
    #[module(skip)]
    is_automatic: bool,
    #[module(skip)]
    has_sgd_only: bool,
}

impl Pair {
    fn new(step: fn(&Pair, &Tensor, &mut StepContext) -> anyhow::Result<()>) -> Self {
        let weight = |value: f32| Parameter::new(Tensor::from_slice(&[value, 1.0]));
        Self { first: weight(1.0), second: weight(2.0), step, is_automatic: false, has_sgd_only: false }
    }

    fn losses(&self, batch: &Tensor) -> (Tensor, Tensor) {
        let hidden = (batch * self.first.tensor()).tanh();
        let output = (&hidden * self.second.tensor()).mean(Kind::Float);
        (hidden.square().mean(Kind::Float), output)
    }

    fn weights(&self) -> Vec<f32> {
        self.parameters().iter().flat_map(|p| Vec::<f32>::try_from(p.detach()).unwrap()).collect()
    }
}

impl LightningModule for Pair {
    type Batch = Tensor;

    fn automatic_optimization(&self) -> bool {
        self.is_automatic
    }

    fn training_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        (self.step)(self, batch, ctx)?;
        Ok(ctx.no_loss())
    }

    fn validation_step(&self, _batch: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<()> {
        Ok(())
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        let group = |name: &str, p: &Parameter| [ParamGroupSpec::new([(name.to_owned(), p.clone())])];
        let second = match self.has_sgd_only {
            true => Optimizers::new(Sgd::new(0.5)),
            false => Optimizers::new(AdamW::new(0.1)),
        };
        Ok(Optimizers::new(Sgd::new(0.5).momentum(0.9))
            .groups(group("first", &self.first))
            .scheduler(StepLr::new(2, 0.5))
            .and(second.groups(group("second", &self.second))))
    }
}

/// One step of a two-player game, as it would be written without a trainer but for `ctx`.
fn both(net: &Pair, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<()> {
    ctx.toggle_optimizer(0)?;
    assert!(!net.second.requires_grad() && net.first.requires_grad());
    let (loss, _) = net.losses(batch);
    ctx.optimizer(0)?.zero_grad()?;
    ctx.manual_backward(&loss)?;
    let _ = clip_grad_norm([&net.first], 0.25)?;
    ctx.optimizer(0)?.step()?;
    ctx.untoggle_optimizer()?;
    assert!(net.second.requires_grad());

    ctx.toggle_optimizer(1)?;
    let (_, loss) = net.losses(batch);
    ctx.optimizer(1)?.zero_grad()?;
    ctx.manual_backward(&loss)?;
    ctx.optimizer(1)?.step()?;
    ctx.untoggle_optimizer()?;
    ctx.lr_scheduler_step(0, None)?;
    ctx.log("first_loss", 1.0);
    Ok(())
}

#[test]
fn two_optimizers_do_what_a_bare_loop_does() {
    let mut net = Pair::new(both);
    let events = Events::default();
    let mut trainer =
        silent().max_epochs(2).num_sanity_val_steps(0).callback(events.clone()).build().unwrap();
    trainer.fit(&mut net, &mut loaders()).unwrap();
    assert_eq!(trainer.global_step(), 24, "each optimizer step counts");
    assert!(events.text().starts_with("t0* t1* t2*"), "{}", events.text());

    let bare = Pair::new(both);
    let group = |name: &str, p: &Parameter| vec![ParamGroupSpec::new([(name.to_owned(), p.clone())])];
    let mut sgd = Sgd::new(0.5).momentum(0.9).build(group("first", &bare.first)).unwrap();
    let mut adamw = AdamW::new(0.1).build(group("second", &bare.second)).unwrap();
    for step in 0..12_i64 {
        let i = (step % 6) * 2;
        let batch = Tensor::from_slice(&[i as f32, i as f32 * -0.5, i as f32 + 1.0, (i as f32 + 1.0) * -0.5]);
        let batch = batch.reshape([2, 2]);
        sgd.zero_grad().unwrap();
        bare.losses(&batch).0.backward();
        let _ = clip_grad_norm([&bare.first], 0.25).unwrap();
        sgd.step().unwrap();
        adamw.zero_grad().unwrap();
        bare.losses(&batch).1.backward();
        adamw.step().unwrap();
        sgd.param_groups_mut()[0].lr = 0.5 * 0.5_f64.powi((step as i32 + 1) / 2);
    }
    assert_eq!(net.weights(), bare.weights());
}

/// Leaves the trainer out, which scales losses.
fn own_backward(net: &Pair, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<()> {
    net.losses(batch).0.f_backward()?;
    ctx.optimizer(0)?.step()?;
    Ok(())
}

#[test]
fn gradients_that_were_not_scaled_are_not_unscaled() {
    if !has_hpu() {
        return;
    }
    let fit = |precision: &str| {
        let mut trainer = silent().accelerator("hpu").devices(1).precision(precision).build().unwrap();
        trainer.fit(&mut Pair::new(own_backward), &mut loaders())
    };
    fit("32-true").unwrap();
    assert_error!(fit("16-mixed"), "divided by 65536", "ctx.manual_backward(&loss)");
}

/// Both losses are scaled before the first step, which is left out: its gradients are infinite in float32.
fn overflows(net: &Pair, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<()> {
    ctx.manual_backward(&(net.losses(batch).0 * 1e36))?;
    ctx.manual_backward(&net.losses(batch).1)?;
    ctx.optimizer(0)?.step()?;
    ctx.optimizer(1)?.step()?;
    Ok(())
}

#[test]
fn all_optimizers_of_a_step_have_the_same_loss_scale() {
    if !has_hpu() {
        return;
    }
    // a list without the operators of this step: float16 would have no room for the scale, the first gradient
    let folder = tempfile::tempdir().unwrap();
    let list = folder.path().join("linear.txt");
    std::fs::write(&list, "linear\n").unwrap();
    let fit = |precision: &str| {
        let mut net = Pair { has_sgd_only: true, ..Pair::new(overflows) };
        let lists = (precision != "32-true").then(|| list.clone());
        let plugin = HpuPrecisionPlugin { bf16_file_path: lists, ..HpuPrecisionPlugin::new(precision) };
        let builder = silent().accelerator("hpu").plugins(vec![PluginConfig::HpuPrecisionPlugin(plugin)]);
        let mut trainer = builder.max_steps(2).num_sanity_val_steps(0).build().unwrap();
        trainer.fit(&mut net, &mut loaders()).unwrap();
        (net.weights(), trainer.grad_scaler().cloned())
    };
    let ((scaled, scaler), (full, _)) = (fit("16-mixed"), fit("32-true"));
    let scaler = scaler.unwrap();
    assert_eq!((scaler.num_skipped_steps(), scaler.get_scale()), (1, 32768.0));
    assert_eq!(scaled[..2], [1.0, 1.0], "the first was left out");
    assert!(scaled[2] != 2.0 && (scaled[2] - full[2]).abs() < 1e-6, "{scaled:?} for {full:?}");
}

/// A layer that is trained by hand, or by the trainer.
#[derive(Module)]
struct Either {
    layer: Linear,
    #[module(skip)]
    is_automatic: bool,
    #[module(skip)]
    optimizer: fn() -> Optimizers,
}

impl LightningModule for Either {
    type Batch = Tensor;

    fn automatic_optimization(&self) -> bool {
        self.is_automatic
    }

    fn training_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let loss = self.layer.call(batch)?.to_kind(Kind::Float).square().mean(Kind::Float);
        if !self.is_automatic {
            ctx.optimizer(0)?.zero_grad()?;
            ctx.manual_backward(&loss)?;
            ctx.optimizer(0)?.step()?;
        }
        Ok(loss)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok((self.optimizer)())
    }
}

/// Backward and the optimizer run without autocast, as those of the trainer: a list of HPUs has `mul`.
#[test]
fn steps_by_hand_in_16_bits_equal_automatic_ones() {
    if !has_hpu() {
        return;
    }
    let optimizers: [fn() -> Optimizers; 4] = [
        || Sgd::new(0.01).momentum(0.9).into(),
        || RmsProp::new(0.01).into(),
        || Lion::new(0.01).into(),
        || Lamb::new(0.01).into(),
    ];
    for precision in ["bf16-mixed", "16-mixed"] {
        for (number, optimizer) in optimizers.into_iter().enumerate() {
            let fit = |is_automatic: bool| {
                let layer = Linear::new(2, 3).unwrap();
                layer
                    .weight
                    .set_data(&Tensor::from_slice2(&[[0.3f32, -0.2], [0.7, 0.4], [-0.6, 0.1]]))
                    .unwrap();
                layer.bias.as_ref().unwrap().set_data(&Tensor::from_slice(&[0.1f32, 0.2, -0.3])).unwrap();
                let mut net = Either { layer, is_automatic, optimizer };
                let builder = silent().accelerator("hpu").devices(1).precision(precision).max_epochs(2);
                let mut trainer = builder.limit_val_batches(0).build().unwrap();
                trainer.fit(&mut net, &mut loaders()).unwrap();
                let weights = net.parameters();
                let weights = weights.iter().map(|p| p.detach().to_device(tch::Device::Cpu).flatten(0, -1));
                let weights = Tensor::cat(&weights.collect::<Vec<_>>(), 0);
                (Vec::<f32>::try_from(weights).unwrap(), trainer.grad_scaler().map(|s| s.num_skipped_steps()))
            };
            assert_eq!(fit(false), fit(true), "{precision}, optimizer {number}");
        }
    }
}

#[test]
fn what_belongs_to_the_other_kind_of_optimization_is_refused() {
    let fit = |net: &mut Pair, build: fn(voltaic::trainer::TrainerBuilder) -> _| -> String {
        let builder: voltaic::trainer::TrainerBuilder = build(silent().max_epochs(1));
        builder.build().unwrap().fit(net, &mut loaders()).unwrap_err().to_string()
    };
    let error = fit(&mut Pair::new(both), |t| t.accumulate_grad_batches(2_u64).gradient_clip_val(1.0));
    assert!(error.contains("trainer.accumulate_grad_batches: 2 with manual optimization; step"), "{error}");
    assert!(error.contains("trainer.gradient_clip_val: Norm(1.0) with manual optimization; call"), "{error}");
    let error = fit(&mut Pair::new(|_, _, ctx| ctx.optimizer(2)?.step().map_err(Into::into)), |t| t);
    assert!(error.contains("optimizer(2), but configure_optimizers gave 2; they count from 0"), "{error}");
    let mut net = Pair::new(|net, batch, ctx| {
        let loss = net.losses(batch).0;
        ctx.manual_backward(&loss)?;
        ctx.manual_backward(&loss)
    });
    let error = fit(&mut net, |t| t);
    assert!(
        error.contains(
            "backward has gone through the graph of this loss before, which freed it; add up losses"
        ) && !error.contains("retain_graph"),
        "{error}"
    );
    let mut net = Pair::new(|_, _, ctx| ctx.lr_scheduler_step(1, None));
    assert_contains!(fit(&mut net, |t| t), "lr_scheduler_step: schedule 1 of 1; configure one");
    let mut net = Pair { is_automatic: true, ..Pair::new(both) };
    assert_contains!(fit(&mut net, |t| t), "2 optimizers with automatic optimization; return exactly one");
}

/// A window of the module's own stays open while the trainer validates.
#[test]
fn validation_leaves_gradients_alone_that_wait_for_a_step() {
    fn every_second(net: &Pair, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<()> {
        if ctx.batch_idx().is_multiple_of(2) {
            ctx.optimizer(0)?.zero_grad()?;
        }
        ctx.manual_backward(&net.losses(batch).0)?;
        if !ctx.batch_idx().is_multiple_of(2) {
            ctx.optimizer(0)?.step()?;
        }
        Ok(())
    }
    let run = |validates: bool| {
        let mut net = Pair::new(every_second);
        let builder = silent().max_epochs(1).limit_val_batches(if validates { 1.0 } else { 0.0 });
        builder.val_check_interval(1).build().unwrap().fit(&mut net, &mut loaders()).unwrap();
        net.weights()
    };
    assert_eq!(run(true), run(false));
}
