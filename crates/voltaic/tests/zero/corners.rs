//! What random runs have found: small modules and steps under each stage beside data-parallel training.

use std::path::Path;
use std::sync::Mutex;

use voltaic::callback::StochasticWeightAveraging;
use voltaic::nn::{AttentionMask, BatchNorm2d, Callable, Forward, Linear, MultiheadAttention, Parameter};
use voltaic::optim::{AdamW, Sgd};
use voltaic::trainer::TrainerBuilder;
use voltaic::{Kind, Module, Tensor};

use crate::checkpoints::resumed;
use crate::ladder::trained;
use crate::models::{Batch, loaders, numbered, squares};
use crate::prefetch::bounded;
use crate::ranks::{STAGES, assert_same, on_ranks, silent, weights};
use crate::shards::{SaveAfter, staged};
use crate::stage3::bare;

fn assert_equal_on_all_ranks(trainer: &voltaic::trainer::Trainer, own: &[(String, Tensor)]) {
    for (name, weight) in own {
        let first = weight.copy();
        trainer.world().group().unwrap().broadcast(&first, 0).unwrap();
        assert_eq!(&first, weight, "{name} is the same on all ranks");
    }
}

/// Parameters in a list, and one that is a number.
#[derive(Module)]
struct Listed {
    scales: Vec<Parameter>,
    number: Parameter,
}

impl Forward for Listed {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        let scaled = self.scales.iter().fold(x.shallow_clone(), |x, scale| x * scale.tensor());
        Ok(scaled * self.number.tensor())
    }
}

#[derive(Module)]
struct OfLists {
    listed: Listed,
    out: Linear,
}

impl OfLists {
    fn new() -> Self {
        let parameter = |size: &[i64]| Parameter::new(Tensor::zeros(size, (Kind::Float, tch::Device::Cpu)));
        let listed = Listed { scales: vec![parameter(&[5]), parameter(&[5])], number: parameter(&[]) };
        numbered(Self { listed, out: Linear::new(5, 3).unwrap() })
    }
}

lightning_module!(OfLists, Batch, AdamW::new(0.01), |net, (x, y), _| {
    let x = x.to_kind(net.out.weight.kind());
    Ok(squares(&net.out.call(&net.listed.call(&x)?)?.to_kind(Kind::Float), y))
});

#[test]
fn parameters_in_lists_and_numbers_are_trained() {
    on_ranks("corners::parameters_in_lists_and_numbers_are_trained", 2, |ranks, folder| {
        let run = |builder: TrainerBuilder| trained(builder.max_epochs(2), OfLists::new(), loaders(24));
        let expected = run(silent(ranks, "ddp", folder));
        for stage in STAGES {
            assert_same(stage, &run(staged(ranks, stage, folder)), &expected);
        }
        assert_same("bare", &run(bare(ranks, folder)), &expected);
    });
}

/// States and master weights of a parameter that is a number are read back.
fn resumes_with_numbers(ranks: usize, folder: &Path) {
    for precision in ["32-true", "bf16-true"] {
        for stage in STAGES {
            let path = folder.join(format!("{stage}-{precision}.ckpt"));
            let run = |from: Option<&Path>| {
                let builder = staged(ranks, stage, folder).precision(precision).max_epochs(2);
                let mut trainer = resumed(builder.callback(SaveAfter(2, path.clone())), from);
                let mut net = OfLists::new();
                trainer.fit(&mut net, &mut loaders(24)).unwrap();
                weights(&net)
            };
            let expected = run(None);
            assert_same(&format!("{stage} {precision}"), &run(Some(&path)), &expected);
        }
    }
}

on_ranks_tests! {
    two_ranks_resume_with_parameters_that_are_numbers: 2, resumes_with_numbers;
}

/// Uses a weight once more after the call of its module.
#[derive(Module)]
struct UsedAgain {
    input: Linear,
    layers: Vec<Linear>,
    out: Linear,
}

impl UsedAgain {
    fn new() -> Self {
        let layers = (0..2).map(|_| Linear::new(8, 8).unwrap()).collect();
        numbered(Self { input: Linear::new(5, 8).unwrap(), layers, out: Linear::new(8, 3).unwrap() })
    }
}

lightning_module!(UsedAgain, Batch, Sgd::new(0.05), |net, (x, y), _| {
    let x = net.input.call(x)?.tanh();
    let x = net.layers.iter().try_fold(x, |x, layer| Ok::<_, anyhow::Error>(layer.call(&x)?.tanh()))?;
    let x = &x + x.matmul(net.input.weight.tensor()).matmul(&net.input.weight.tr());
    Ok(squares(&net.out.call(&x)?, y))
});

#[test]
fn a_weight_that_is_touched_while_it_is_whole_stays() {
    on_ranks("corners::a_weight_that_is_touched_while_it_is_whole_stays", 2, |ranks, folder| {
        let run = |builder: TrainerBuilder| trained(builder.max_epochs(2), UsedAgain::new(), loaders(24));
        let expected = run(silent(ranks, "ddp", folder));
        // the first layer's weight is whole when it is touched, and others need its room before backward
        for bounds in [[200, 64, 1_000_000], [0, 64, 1_000_000], [1_000_000, 1_000_000, 0], [0, 0, 0]] {
            assert_same(&format!("{bounds:?}"), &run(bounded(ranks, folder, bounds)), &expected);
        }
    });
}

/// Changes a view of a module's output in place, the output being a view itself.
#[derive(Module)]
struct InPlace {
    input: Linear,
    attention: MultiheadAttention,
    out: Linear,
}

lightning_module!(InPlace, Batch, Sgd::new(0.05), |net, (x, y), _| {
    let x = net.input.call(x)?.view([-1, 1, 8]);
    let mut out = net.attention.attend(&x, &x, &x, &AttentionMask::default())?.view([-1, 8]);
    out += 0.125;
    Ok(squares(&net.out.call(&out.leaky_relu_())?, y))
});

#[test]
fn outputs_that_are_views_may_be_changed_in_place() {
    on_ranks("corners::outputs_that_are_views_may_be_changed_in_place", 2, |ranks, folder| {
        let run = |builder: TrainerBuilder| {
            let attention = MultiheadAttention::new(8, 2).unwrap();
            let net =
                InPlace { input: Linear::new(5, 8).unwrap(), attention, out: Linear::new(8, 3).unwrap() };
            trained(builder.max_epochs(2), numbered(net), loaders(24))
        };
        let expected = run(silent(ranks, "ddp", folder));
        assert_same("zero3", &run(staged(ranks, "zero3", folder)), &expected);
        assert_same("bare", &run(bare(ranks, folder)), &expected);
    });
}

/// Uses a layer in the first batch of a window alone.
#[derive(Module)]
struct Sometimes {
    layer: Linear,
    sometimes: Linear,
}

lightning_module!(Sometimes, Batch, Sgd::new(0.05), |net, (x, y), ctx| {
    let out = net.layer.call(x)?;
    let loss = squares(&out, y);
    if ctx.batch_idx() % 2 == 1 {
        return Ok(loss);
    }
    Ok(loss + net.sometimes.call(&out)?.square().mean(Kind::Float))
});

#[test]
fn a_gradient_from_the_beginning_of_a_window_is_averaged() {
    on_ranks("corners::a_gradient_from_the_beginning_of_a_window_is_averaged", 2, |ranks, folder| {
        let path = folder.join("open.ckpt");
        let run = |builder: TrainerBuilder, from: Option<&Path>| {
            let builder = builder.accumulate_grad_batches(2_u64).max_epochs(1);
            let mut trainer = resumed(builder.callback(SaveAfter(2, path.clone())), from);
            let layers = (Linear::new(5, 3).unwrap(), Linear::new(3, 4).unwrap());
            let mut net = numbered(Sometimes { layer: layers.0, sometimes: layers.1 });
            let before = net.sometimes.weight.tensor().copy();
            trainer.fit(&mut net, &mut loaders(24)).unwrap();
            assert!(!net.sometimes.weight.tensor().equal(&before), "it was trained");
            let own = weights(&net);
            assert_equal_on_all_ranks(&trainer, &own);
            own
        };
        let ddp = || silent(ranks, "ddp_find_unused_parameters_true", folder);
        let expected = run(ddp(), None);
        assert_same("resumed", &run(ddp(), Some(&path)), &expected);
        assert_same("zero1", &run(silent(ranks, "zero1", folder), None), &expected);
    });
}

/// Takes a gradient within its step.
#[derive(Module)]
struct Penalized {
    norm: BatchNorm2d,
    out: Linear,
    #[module(skip)]
    losses: Mutex<Vec<f64>>,
}

lightning_module!(Penalized, Batch, Sgd::new(0.05), |net, (x, y), _| {
    let x = x.copy().set_requires_grad(true);
    let normed = net.norm.call(&x.view([-1, 5, 1, 1]))?.view([-1, 5]);
    let loss = squares(&net.out.call(&normed)?.tanh(), y);
    let grads = Tensor::f_run_backward(&[&loss], &[&x], true, true)?;
    let loss = loss + grads[0].square().mean(Kind::Float);
    net.losses.lock().unwrap().push(loss.double_value(&[]));
    Ok(loss)
});

/// Averaging weights runs the step once more for running statistics.
#[test]
fn a_step_that_takes_gradients_averages_weights() {
    on_ranks("corners::a_step_that_takes_gradients_averages_weights", 2, |ranks, folder| {
        let run = |builder: TrainerBuilder| {
            let (norm, out) = (BatchNorm2d::new(5).unwrap(), Linear::new(5, 3).unwrap());
            let mut net = numbered(Penalized { norm, out, losses: Mutex::default() });
            let builder = builder.callback(StochasticWeightAveraging::new(0.02).unwrap()).max_epochs(4);
            builder.build().unwrap().fit(&mut net, &mut loaders(16)).unwrap();
            (weights(&net), net.losses.into_inner().unwrap())
        };
        let expected = run(silent(ranks, "ddp", folder));
        for stage in STAGES {
            let (own, losses) = run(staged(ranks, stage, folder));
            assert_same(stage, &own, &expected.0);
            assert_eq!(losses, expected.1, "{stage}");
        }
    });
}
