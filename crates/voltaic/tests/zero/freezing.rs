//! Results of weights that compiled calls keep, where ranks train the weights.

use std::path::Path;
use std::sync::{Arc, Mutex};

use voltaic::graph::{CompileOptions, Compiler};
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::{Callable, Forward, Linear};
use voltaic::optim::{AdamW, Optimizers};
use voltaic::{Module, Tensor};

use crate::models::{Batch, all_loaders, numbered, numbers, squares};
use crate::ranks::{STAGES, on_ranks, silent};

/// Computes its weight from the one that it trains.
#[derive(Module)]
struct Computed {
    layer: Linear,
}

impl Forward for Computed {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        let weight = self.layer.weight.f_mul_scalar(2.0)?.f_tanh()?.f_transpose(0, 1)?.f_contiguous()?;
        Ok(x.f_matmul(&weight)?)
    }
}

/// Trains as usual, and evaluates by calls that may be compiled.
#[derive(Module)]
struct Evaluated {
    net: Computed,
    #[module(skip)]
    seen: Arc<Mutex<Vec<f64>>>,
}

impl LightningModule for Evaluated {
    type Batch = Batch;

    fn training_step(&self, (x, y): &Batch, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        Ok(squares(&self.net.call(x)?, y))
    }

    fn validation_step(&self, (x, y): &Batch, _ctx: &mut StepContext) -> anyhow::Result<()> {
        let loss = squares(&self.net.call(x)?, y);
        self.seen.lock().unwrap().push(loss.double_value(&[]));
        Ok(())
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        AdamW::new(0.05).into()
    }
}

/// Losses of validation in a fit, after it, and with other weights, by the code or by calls that keep what they compute of weights.
fn losses(ranks: usize, strategy: &str, folder: &Path, freezes: bool) -> Vec<f64> {
    let layer = Linear::builder(5, 3).bias(false).build().unwrap();
    let mut net = numbered(Evaluated { net: Computed { layer }, seen: Arc::default() });
    let options = CompileOptions { use_graph_freezing: Some(true), ..CompileOptions::default() };
    let compiler = Compiler::new("hpu_backend").unwrap().options(options);
    let compiled = freezes.then(|| compiler.inplace(&net.net));
    let mut trainer = silent(ranks, strategy, folder).max_epochs(4).build().unwrap();
    trainer.fit(&mut net, &mut all_loaders(24)).unwrap();
    trainer.validate(&mut net, &mut all_loaders(24)).unwrap();
    let others = numbers(&[3, 5], 9.0);
    tch::no_grad(|| net.net.layer.weight.leaf().shallow_clone().copy_(&others));
    trainer.validate(&mut net, &mut all_loaders(24)).unwrap();
    if let Some(compiled) = compiled {
        let num_frozen = compiled.plan_stats().iter().map(|plan| plan.num_frozen).sum::<usize>();
        assert_eq!((compiled.refusal(), num_frozen), (None, 3), "{strategy}: product, tanh and copy");
        assert!(compiled.stats().hits >= 6, "{strategy}: {}", compiled.stats());
    }
    net.seen.lock().unwrap().clone()
}

/// With each strategy ranks see the weights of now, which collectives, parts of optimizers and releases change.
#[test]
fn compiled_evaluation_has_the_weights_of_now_on_two_ranks() {
    let test = "freezing::compiled_evaluation_has_the_weights_of_now_on_two_ranks";
    on_ranks(test, 2, |ranks, folder| {
        for strategy in ["ddp"].into_iter().chain(STAGES) {
            let [own, expected] = [true, false].map(|freezes| losses(ranks, strategy, folder, freezes));
            assert_eq!(own.len(), expected.len());
            assert!(expected.windows(2).any(|pair| (pair[0] - pair[1]).abs() > 1e-3), "{expected:?}");
            for (at, (own, expected)) in own.iter().zip(&expected).enumerate() {
                assert!((own - expected).abs() <= 1e-6, "{strategy}, loss {at}: {own} and {expected}");
            }
        }
    });
}
