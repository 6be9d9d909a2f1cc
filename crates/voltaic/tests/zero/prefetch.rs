//! Weights that come ahead of their use, and stay until their next one, within bounds.

use std::path::Path;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use voltaic::callback::Callback;
use voltaic::module::HookContext;
use voltaic::nn::{Callable, Linear, ModuleExt, Parameter, RemovableHandle};
use voltaic::optim::Sgd;
use voltaic::strategy::{Strategy, Zero, ZeroConfig, ZeroStage};
use voltaic::trainer::TrainerBuilder;
use voltaic::{Kind, Module, Tensor};

use crate::ladder::{gpt, trained};
use crate::models::{Batch, Cnn, Odd, loaders, numbered, tokens};
use crate::ranks::{assert_same, on_ranks, silent};

/// Elements ahead, elements in memory, and elements before the next use.
pub type Bounds = [usize; 3];

pub const NONE: Bounds = [0, usize::MAX, 0];
pub const ALL: Bounds = [usize::MAX; 3];
/// Some of the networks' units, but not all, so that the bounds are met in the middle of a step.
pub const SOME: Bounds = [700, 2000, 900];

/// Stage 3 that lets no parameter stay, with bounds.
pub fn bounded(
    ranks: usize,
    folder: &Path,
    [prefetch_bucket_size, max_live_parameters, max_reuse_distance]: Bounds,
) -> TrainerBuilder {
    silent(ranks, "zero3", folder).strategy(move |world| {
        let config = ZeroConfig {
            param_persistence_threshold: 0,
            prefetch_bucket_size,
            max_live_parameters,
            max_reuse_distance,
            ..ZeroConfig::of_stage(ZeroStage::Three)
        };
        Ok(Box::new(Zero::new(world, config)) as Box<dyn Strategy>)
    })
}

/// Calls its layers in another order in each third step.
#[derive(Module)]
struct Changing {
    layers: Vec<Linear>,
    #[module(skip)]
    step: AtomicU64,
}

impl Changing {
    fn new() -> Self {
        let layers = (0..4).map(|_| Linear::new(5, 5).unwrap()).collect();
        numbered(Self { layers, step: AtomicU64::new(0) })
    }
}

lightning_module!(Changing, Batch, Sgd::new(0.05), |net, (x, y), _| {
    let order = match net.step.fetch_add(1, Ordering::Relaxed) % 3 {
        0 | 1 => [0, 1, 2, 3],
        _ => [0, 3, 2, 2],
    };
    let out = order.iter().try_fold(x.shallow_clone(), |x, layer| net.layers[*layer].call(&x))?;
    Ok((out.narrow(1, 0, 3) - y).square().mean(Kind::Float))
});

fn climb(ranks: usize, folder: &Path) {
    let ddp = || silent(ranks, "ddp_find_unused_parameters_true", folder).max_epochs(2);
    for bounds in [NONE, SOME, ALL] {
        let zero = || bounded(ranks, folder, bounds).max_epochs(2);
        let same = |name: &str, run: &dyn Fn(TrainerBuilder) -> Vec<(String, Tensor)>| {
            assert_same(&format!("{name} on {ranks} ranks, {bounds:?}"), &run(zero()), &run(ddp()));
        };
        same("gpt", &|builder| trained(builder, gpt(), tokens(16)));
        same("odd", &|builder| trained(builder, Odd::new(), loaders(24)));
        same("changing", &|builder| trained(builder, Changing::new(), loaders(24)));
    }
}

on_ranks_tests! {
    two_ranks_with_any_bounds_are_ddp: 2, climb;
    #[ignore = "a long form, which make stress runs"]
    four_ranks_with_any_bounds_are_ddp: 4, climb;
}

#[test]
fn emulated_hpus_are_ddp_with_no_weight_that_stays() {
    on_ranks("prefetch::emulated_hpus_are_ddp_with_no_weight_that_stays", 2, |ranks, folder| {
        for bounds in [NONE, ALL] {
            let run = |builder: TrainerBuilder| {
                trained(builder.accelerator("hpu").max_epochs(2), Cnn::new(), loaders(24))
            };
            let ddp = silent(ranks, "ddp", folder);
            assert_same(&format!("{bounds:?}"), &run(bounded(ranks, folder, bounds)), &run(ddp));
        }
    });
}

/// Gradients travel once, and weights for the forward and the backward pass, unless they stay between the two.
#[test]
fn a_step_gathers_weights_twice_unless_they_stay() {
    on_ranks("prefetch::a_step_gathers_weights_twice_unless_they_stay", 2, |ranks, folder| {
        // two ranks' parts of a convolution, a norm and a linear layer; the last one is needed again at once
        let [conv, norm, out] = [32_u64, 16, 128];
        let cases = [
            (NONE, 2 * conv + 2 * norm + out),
            (ALL, conv + norm + out),
            ([0, 300, usize::MAX], 2 * conv + norm + out),
        ];
        for ((bounds, gathered), window) in cases.into_iter().flat_map(|case| [(case, 1_u64), (case, 4)]) {
            let traffic = |epochs: i64| {
                let builder = bounded(ranks, folder, bounds).accumulate_grad_batches(window);
                let mut trainer = builder.max_epochs(epochs).build().unwrap();
                trainer.fit(&mut Cnn::new(), &mut loaders(240)).unwrap();
                let traffic = trainer.world().group().unwrap().traffic();
                ["reduce_scatter", "all_gather"].map(|op| traffic.get(op).copied().unwrap_or_default().1)
            };
            // what an epoch adds
            let ([reduced, found], [reduced_before, found_before]) = (traffic(2), traffic(1));
            let steps = 240 / 2 / ranks as u64;
            let whole = ranks as u64 * (conv + norm + out);
            assert_eq!(reduced - reduced_before, 4 * steps * whole, "{bounds:?}");
            let told = 2048; // what ranks tell each other at the end of an epoch
            let expected = 4 * steps * gathered;
            let found = found - found_before;
            let what = format!("{bounds:?}, window of {window}: {found}, not {expected}");
            assert!((expected..expected + told).contains(&found), "{what}");
        }
    });
}

/// The most elements of sharded weights that a module's call found whole.
pub struct Whole {
    pub most: Arc<AtomicI64>,
    pub hooks: Mutex<Vec<RemovableHandle>>,
}

impl Callback for Whole {
    fn on_train_start(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        let count = {
            let (params, most) = (module.parameters(), self.most.clone());
            move || {
                let whole = |parameter: &&Parameter| parameter.is_kept() && !parameter.is_sharded();
                let sum: usize = params.iter().filter(whole).map(|parameter| parameter.numel()).sum();
                most.fetch_max(sum as i64, Ordering::Relaxed);
                Ok(())
            }
        };
        let backward = count.clone();
        let hooks = ctx.module_hooks();
        self.hooks.lock().unwrap().extend([
            hooks.register_forward_hook("*", move |_, _, _| count()),
            hooks.register_full_backward_pre_hook("*", move |_, _| backward()),
        ]);
        Ok(())
    }
}

#[test]
fn whole_weights_stay_within_their_bound() {
    on_ranks("prefetch::whole_weights_stay_within_their_bound", 2, |ranks, folder| {
        let most = |bounds: Bounds| {
            let most = Arc::new(AtomicI64::new(0));
            let callback = Whole { most: most.clone(), hooks: Mutex::default() };
            let builder = bounded(ranks, folder, bounds).callback(callback).max_epochs(2);
            trained(builder, Deep::new(), loaders(24));
            most.load(Ordering::Relaxed)
        };
        let layer = 5 * 5 + 5;
        assert_eq!(most(ALL), 12 * layer, "after the forward pass all are there");
        // a layer's 30 elements lie in 64
        for layers in [1, 2, 5] {
            let found = most([usize::MAX, 64 * layers, usize::MAX]);
            assert!(found <= layers as i64 * layer, "{layers}: {found}");
        }
        assert_eq!(most(NONE), layer);
    });
}

/// Twelve layers alike.
#[derive(Module)]
struct Deep {
    layers: Vec<Linear>,
}

impl Deep {
    fn new() -> Self {
        numbered(Self { layers: (0..12).map(|_| Linear::new(5, 5).unwrap()).collect() })
    }
}

lightning_module!(Deep, Batch, Sgd::new(0.05), |net, (x, y), _| {
    let out = net.layers.iter().try_fold(x.shallow_clone(), |x, layer| layer.call(&x))?;
    Ok((out.narrow(1, 0, 3) - y).square().mean(Kind::Float))
});
