//! Weights and gradients that change outside the usual course of a step: written to by hand, frozen and unfrozen, given to
//! several optimizers, used after a step. None of it is lost or taken for something else without a word.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use voltaic::callback::{Callback, LambdaCallback};
use voltaic::checkpoint::Checkpoint;
use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::nn::{Callable, Linear, ModuleExt, Parameter};
use voltaic::optim::{AdamW, Optimizers, ParamGroupSpec, Sgd};
use voltaic::strategy::{Strategy, Zero, ZeroConfig, ZeroStage};
use voltaic::trainer::TrainerBuilder;
use voltaic::{Kind, Module, Tensor};

use crate::checkpoints::resumed;
use crate::ladder::trained;
use crate::models::{Batch, Small, all_loaders, loaders, numbered};
use crate::ranks::{STAGES, assert_same, on_ranks, on_ranks_in_turn, silent, weights};
use crate::shards::{SaveAfter, sorted, staged};
use crate::stage3::bare;

fn halve(module: &dyn Module, index: usize) {
    let _ = tch::no_grad(|| module.parameters()[index].tensor().shallow_clone().multiply_scalar_(0.5));
}

#[test]
fn what_is_written_before_a_step_is_stepped() {
    on_ranks("changes::what_is_written_before_a_step_is_stepped", 2, |ranks, folder| {
        for precision in ["32-true", "bf16-true"] {
            let run = |builder: TrainerBuilder, has_masters| {
                let builder = builder.precision(precision).max_epochs(1).callback(
                    LambdaCallback::new().on_before_optimizer_step(|ctx, module| {
                        if ctx.batch_idx() == 1 {
                            halve(module, 0);
                        }
                        Ok(())
                    }),
                );
                trained(builder, Small { has_masters, ..Small::new() }, loaders(24))
            };
            // master weights follow what is written to the weights, which those of an optimizer of its own do not
            let expected = match precision {
                "32-true" => run(silent(ranks, "ddp", folder), false),
                _ => run(staged(ranks, "zero1", folder), false),
            };
            for stage in STAGES {
                assert_same(
                    &format!("{stage} {precision}"),
                    &run(staged(ranks, stage, folder), false),
                    &expected,
                );
            }
        }
    });
}

/// Limits weights to a range in which all of them are.
struct Clamp;

impl Callback for Clamp {
    fn on_train_batch_end(&mut self, _ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        for parameter in module.parameters() {
            let _ = tch::no_grad(|| parameter.tensor().shallow_clone().clamp_(-100.0, 100.0));
        }
        Ok(())
    }
}

#[test]
fn what_changes_nothing_leaves_master_weights_alone() {
    on_ranks("changes::what_changes_nothing_leaves_master_weights_alone", 2, |ranks, folder| {
        for stage in STAGES {
            let run = |builder: TrainerBuilder| {
                trained(builder.precision("bf16-true").max_epochs(2), Small::new(), loaders(24))
            };
            let expected = run(staged(ranks, stage, folder));
            assert_same(stage, &run(staged(ranks, stage, folder).callback(Clamp)), &expected);
        }
    });
}

/// Writes to a weight after a batch.
struct AfterBatch(usize);

impl Callback for AfterBatch {
    fn on_train_batch_end(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        if (ctx.current_epoch(), ctx.batch_idx()) == (0, self.0) {
            halve(module, 0);
        }
        Ok(())
    }
}

fn written_is_saved(ranks: usize, folder: &Path) {
    for precision in ["32-true", "bf16-true"] {
        for stage in STAGES {
            let path = folder.join(format!("{stage}-{precision}.ckpt"));
            let run = |from: Option<&Path>| {
                let builder = staged(ranks, stage, folder).precision(precision).max_epochs(2);
                let builder = builder.callback(AfterBatch(2)).callback(SaveAfter(2, path.clone()));
                let mut trainer = resumed(builder, from);
                let mut net = Small::new();
                trainer.fit(&mut net, &mut loaders(24)).unwrap();
                weights(&net)
            };
            let expected = run(None);
            let what = format!("{stage} {precision}");
            assert_same(&what, &run(Some(&path)), &expected);
            if precision == "32-true" {
                let ddp = folder.join(format!("ddp-{stage}.ckpt"));
                let builder = silent(ranks, "ddp", folder).max_epochs(1);
                let builder = builder.callback(AfterBatch(2)).callback(SaveAfter(2, ddp.clone()));
                trained(builder, Small::new(), loaders(24));
                let read = |path: &Path| sorted(Checkpoint::load(path).unwrap().weights);
                assert_same(&what, &read(&path), &read(&ddp));
            }
        }
    }
}

on_ranks_tests! {
    what_is_written_before_a_checkpoint_is_in_it: 2, written_is_saved;
}

#[test]
fn data_that_a_parameter_is_given_is_trained_or_refused() {
    on_ranks("changes::data_that_a_parameter_is_given_is_trained_or_refused", 2, |ranks, folder| {
        let run = |builder: TrainerBuilder| {
            let mut net = Small::new();
            let mut trainer = builder
                .max_epochs(2)
                .callback(LambdaCallback::new().on_train_batch_start(|ctx, module| {
                    if ctx.batch_idx() == 1 {
                        let parameter = &module.parameters()[0];
                        let other = tch::no_grad(|| parameter.tensor() * 0.5);
                        parameter.set_data(&other)?;
                    }
                    Ok(())
                }))
                .build()
                .unwrap();
            trainer.fit(&mut net, &mut loaders(24)).map(|()| weights(&net))
        };
        let expected = run(silent(ranks, "ddp", folder)).unwrap();
        for stage in STAGES {
            // the small weights of zero3 stay whole
            assert_same(stage, &run(silent(ranks, stage, folder)).unwrap(), &expected);
        }
        assert_error!(run(bare(ranks, folder)), "first.weight: its strategy keeps the values");
    });
}

/// Its second layer is frozen at first.
#[derive(Module)]
struct Unfreezing {
    net: Small,
    #[module(skip)]
    unfreezes_in_step: bool,
}

impl Unfreezing {
    fn new(unfreezes_in_step: bool) -> Self {
        let net = Small::new();
        net.second.set_requires_grad(false);
        Self { net, unfreezes_in_step }
    }

    fn unfreeze(&self, batch: usize) {
        if batch == 2 {
            self.net.second.set_requires_grad(true);
        }
    }
}

impl LightningModule for Unfreezing {
    type Batch = Batch;

    fn on_train_batch_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        if !self.unfreezes_in_step {
            self.unfreeze(ctx.batch_idx());
        }
        Ok(())
    }

    fn training_step(&self, batch: &Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        if self.unfreezes_in_step {
            self.unfreeze(ctx.batch_idx());
        }
        self.net.training_step(batch, ctx)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        AdamW::new(0.01).into()
    }
}

#[test]
fn parameters_that_are_unfrozen_are_trained_alike_on_all_ranks() {
    const NAME: &str = "changes::parameters_that_are_unfrozen_are_trained_alike_on_all_ranks";
    on_ranks(NAME, 2, |ranks, folder| {
        for unfreezes_in_step in [false, true] {
            let run = |builder: TrainerBuilder| {
                let mut net = Unfreezing::new(unfreezes_in_step);
                let before = net.net.second.weight.tensor().copy();
                let mut trainer = builder.max_epochs(1).build().unwrap();
                trainer.fit(&mut net, &mut loaders(24)).unwrap();
                assert!(!net.net.second.weight.tensor().equal(&before), "it was trained");
                let own = weights(&net);
                for (name, weight) in &own {
                    let first = weight.copy();
                    trainer.world().group().unwrap().broadcast(&first, 0).unwrap();
                    assert_eq!(&first, weight, "{name} is the same on all ranks");
                }
                own
            };
            let expected = run(silent(ranks, "ddp", folder));
            for stage in STAGES {
                assert_same(stage, &run(silent(ranks, stage, folder)), &expected);
            }
            assert_same("bare", &run(bare(ranks, folder)), &expected);
        }
    });
}

/// Two layers, each with an optimizer of its own, that are stepped one after the other.
#[derive(Module)]
struct Two {
    maker: Linear,
    judge: Linear,
    /// The second loss is computed before the first step.
    #[module(skip)]
    is_late: bool,
    /// Gradients flow to one optimizer's parameters at a time.
    #[module(skip)]
    toggles: bool,
}

impl Two {
    fn new(is_late: bool, toggles: bool) -> Self {
        numbered(Self {
            toggles,
            maker: Linear::new(5, 7).unwrap(),
            judge: Linear::new(7, 3).unwrap(),
            is_late,
        })
    }

    fn loss(&self, (x, y): &Batch) -> anyhow::Result<Tensor> {
        Ok((self.judge.call(&self.maker.call(x)?.tanh())? - y).square().mean(Kind::Float))
    }
}

lightning_module!(
    Two,
    Batch,
    manual(|net| {
        let of = |name: &str| {
            let all = net.named_parameters().into_iter();
            ParamGroupSpec::new(all.filter(|(fqn, _)| fqn.starts_with(name)).collect::<Vec<_>>())
        };
        let maker = Optimizers::new(Sgd::new(0.1).momentum(0.9)).groups([of("maker")]);
        maker.and(Optimizers::new(AdamW::new(0.02)).groups([of("judge")]))
    }),
    |net, batch, ctx| {
        let early = net.loss(batch)?;
        if net.toggles {
            ctx.toggle_optimizer(1)?;
        }
        ctx.optimizer(1)?.zero_grad()?;
        let first = net.loss(batch)?;
        ctx.manual_backward(&first)?;
        ctx.optimizer(1)?.step()?;
        if net.toggles {
            ctx.toggle_optimizer(0)?;
        }
        let second = if net.is_late { early } else { net.loss(batch)? };
        ctx.optimizer(0)?.zero_grad()?;
        ctx.manual_backward(&second)?;
        ctx.optimizer(0)?.step()?;
        ctx.untoggle_optimizer()?;
        Ok(second.detach())
    }
);

#[test]
fn each_optimizer_has_its_own_small_parameters() {
    on_ranks("changes::each_optimizer_has_its_own_small_parameters", 2, |ranks, folder| {
        for (precision, toggles) in [("32-true", false), ("32-true", true), ("bf16-true", false)] {
            let run = |builder: TrainerBuilder| {
                trained(builder.precision(precision).max_epochs(2), Two::new(false, toggles), loaders(24))
            };
            let expected = match precision {
                "32-true" => run(silent(ranks, "ddp_find_unused_parameters_true", folder)),
                _ => run(silent(ranks, "zero1", folder)),
            };
            for stage in STAGES {
                let what = format!("{stage} {precision}");
                assert_same(&what, &run(silent(ranks, stage, folder)), &expected);
                assert_same(&what, &run(staged(ranks, stage, folder)), &expected);
            }
        }
    });
}

/// What was computed before a step needs weights that are gone: PyTorch refuses it.
#[test]
fn a_loss_from_before_a_step_is_refused_after_it() {
    on_ranks("changes::a_loss_from_before_a_step_is_refused_after_it", 2, |ranks, folder| {
        let run = |builder: TrainerBuilder| {
            let mut trainer = builder.max_epochs(1).build().unwrap();
            trainer.fit(&mut Two::new(true, false), &mut loaders(8)).unwrap_err().to_string()
        };
        for strategy in ["ddp", "zero1", "zero2", "zero3"] {
            let error = run(silent(ranks, strategy, folder));
            assert!(error.contains("modified by an inplace operation"), "{strategy}: {error}");
        }
        let error = run(bare(ranks, folder));
        assert!(error.contains("modified by an inplace operation"), "bare: {error}");
    });
}

/// Has no loss in each second batch, and else this part of it.
#[derive(Module)]
struct Half {
    net: Small,
    #[module(skip)]
    part: f64,
}

lightning_module!(Half, Batch, |net| net.net.configure_optimizers(), |net, batch, ctx| {
    if ctx.batch_idx() % 2 == 1 {
        return Ok(ctx.no_loss());
    }
    Ok(net.net.training_step(batch, ctx)? * net.part)
});

fn step_without_the_last_loss(ranks: usize, folder: &Path) {
    let run = |strategy: &str, window: u64, part: f64| {
        let builder = silent(ranks, strategy, folder).max_epochs(1).accumulate_grad_batches(window);
        let mut net = Half { net: Small::new(), part };
        builder.build().unwrap().fit(&mut net, &mut loaders(24)).unwrap();
        weights(&net)
    };
    let strategies: &[&str] = match ranks {
        1 => &["auto", "zero1", "zero2", "zero3"],
        _ => &["ddp", "ddp_find_unused_parameters_true", "zero1", "zero2", "zero3"],
    };
    // a window of two divides the loss by two
    let (expected, halved) = (run(strategies[0], 1, 1.0), run(strategies[0], 1, 0.5));
    for strategy in strategies {
        assert_same(strategy, &run(strategy, 1, 1.0), &expected);
        assert_same(strategy, &run(strategy, 2, 1.0), &halved);
    }
}

#[test]
fn a_window_whose_last_batch_has_no_loss_steps_with_the_others() {
    let test = "changes::a_window_whose_last_batch_has_no_loss_steps_with_the_others";
    on_ranks_in_turn(test, &[(1, step_without_the_last_loss), (2, step_without_the_last_loss)]);
}

/// Calls two layers of the same size in an order that depends on the rank.
#[derive(Module)]
struct Apart {
    layers: Vec<Linear>,
    /// In which a rank has another order.
    #[module(skip)]
    batch: usize,
}

impl LightningModule for Apart {
    type Batch = Batch;

    fn training_step(&self, (x, y): &Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let rank = ctx.process_group().map_or(0, |group| group.rank());
        let order = if rank == 1 && ctx.batch_idx() == self.batch { [1, 0] } else { [0, 1] };
        let out = order.iter().try_fold(x.shallow_clone(), |x, at| self.layers[*at].call(&x))?;
        Ok((out.narrow(1, 0, 3) - y).square().mean(Kind::Float))
    }

    fn test_step(&self, batch: &Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        self.training_step(batch, ctx).map(drop)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Sgd::new(0.05).into()
    }
}

#[test]
fn ranks_that_need_other_weights_end_with_an_error() {
    let test = "changes::ranks_that_need_other_weights_end_with_an_error";
    on_ranks(test, 2, |ranks, folder| {
        for batch in [0, 1] {
            let layers = (0..2).map(|_| Linear::new(5, 5).unwrap()).collect();
            let mut trainer = bare(ranks, folder).max_epochs(1).build().unwrap();
            let error = trainer.fit(&mut numbered(Apart { layers, batch }), &mut loaders(24)).unwrap_err();
            assert_contains!(error.to_string(), "weights of layers.");
        }
        // no operation of another kind or size tells ranks apart here
        let layers = (0..2).map(|_| Linear::new(5, 5).unwrap()).collect();
        let mut trainer = bare(ranks, folder).build().unwrap();
        let error = trainer.test(&mut numbered(Apart { layers, batch: 1 }), &mut all_loaders(8)).unwrap_err();
        let what = "rank 1 exchanged weights of layers.1 where rank 0 exchanged weights of layers.0";
        assert!(error.to_string().contains(what), "{error}");
    });
}

/// A layer with a scale that the ranks use in batches of their own.
#[derive(Module)]
struct Scaled {
    layers: Vec<Linear>,
    /// Below the default threshold: it stays whole.
    scale: Parameter,
}

lightning_module!(Scaled, Batch, Sgd::new(0.05), |net, (x, y), ctx| {
    let rank = ctx.process_group().map_or(0, |group| group.rank());
    let out = net.layers.iter().try_fold(x.shallow_clone(), |x, layer| layer.call(&x))?;
    let out = if ctx.batch_idx() % 2 == rank { out * net.scale.tensor() } else { out };
    Ok((out.narrow(1, 0, 3) - y).square().mean(Kind::Float))
});

#[test]
fn a_parameter_that_stays_whole_may_be_used_on_one_rank_only() {
    on_ranks("changes::a_parameter_that_stays_whole_may_be_used_on_one_rank_only", 2, |ranks, folder| {
        let run = |builder: TrainerBuilder| {
            let layers = (0..3).map(|_| Linear::new(5, 5).unwrap()).collect();
            let scale = Parameter::new(Tensor::ones([5], (Kind::Float, tch::Device::Cpu)));
            let mut net = numbered(Scaled { layers, scale });
            builder.max_epochs(2).build().unwrap().fit(&mut net, &mut loaders(24)).unwrap();
            weights(&net)
        };
        let expected = run(silent(ranks, "ddp_find_unused_parameters_true", folder));
        for persistence in [6_usize, 1000] {
            let zero = silent(ranks, "zero3", folder).strategy(move |world| {
                let config = ZeroConfig {
                    param_persistence_threshold: persistence,
                    ..ZeroConfig::of_stage(ZeroStage::Three)
                };
                Ok(Box::new(Zero::new(world, config)) as Box<dyn Strategy>)
            });
            assert_same(&format!("threshold {persistence}"), &run(zero), &expected);
        }
    });
}

/// One rank has no loss in one batch.
#[derive(Module)]
struct Without {
    net: Small,
    #[module(skip)]
    batch: usize,
    #[module(skip)]
    seen: AtomicUsize,
}

lightning_module!(Without, Batch, |net| net.net.configure_optimizers(), |net, batch, ctx| {
    let rank = ctx.process_group().map_or(0, |group| group.rank());
    net.seen.store(ctx.batch_idx(), Ordering::Relaxed);
    match rank == 1 && ctx.batch_idx() == net.batch {
        true => Ok(ctx.no_loss()),
        false => net.net.training_step(batch, ctx),
    }
});

#[test]
fn a_rank_without_a_loss_is_named_in_that_step() {
    let test = "changes::a_rank_without_a_loss_is_named_in_that_step";
    on_ranks(test, 2, |ranks, folder| {
        for strategy in ["ddp", "ddp_find_unused_parameters_true", "zero1", "zero2", "zero3"] {
            for (batch, window) in [(0, 1_u64), (3, 1), (3, 2)] {
                let builder = silent(ranks, strategy, folder).max_epochs(1).accumulate_grad_batches(window);
                let mut net = Without { net: Small::new(), batch, seen: AtomicUsize::default() };
                let error = builder.build().unwrap().fit(&mut net, &mut loaders(24)).unwrap_err().to_string();
                let what = "no loss on rank 1 (ctx.no_loss()), but one on rank 0";
                let case = format!("{strategy}, batch {batch}, window of {window}: {error}");
                assert!(error.contains(what) && net.seen.load(Ordering::Relaxed) == batch, "{case}");
            }
        }
    });
}
