//! Leaf modules: gathered and reduced as a whole, so that ranks may use other parts of them (DeepSpeed's `set_z3_leaf_modules`).

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;
use voltaic::nn::{Callable, Forward, Linear};
use voltaic::optim::AdamW;
use voltaic::strategy::{DeepSpeedStrategy, Strategy, Zero, ZeroConfig, ZeroStage};
use voltaic::trainer::TrainerBuilder;
use voltaic::{Kind, Module, Tensor};

use crate::ladder::trained;
use crate::models::{Batch, loaders, numbered};
use crate::ranks::{assert_same, assert_within, on_ranks, silent};

/// Experts, of which a rank calls one, the next in each batch; the last is never called.
#[derive(Module)]
struct Experts {
    all: Vec<Linear>,
    /// Used by all.
    shared: Linear,
    #[module(skip)]
    chosen: AtomicUsize,
}

impl Forward for Experts {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        let chosen = self.chosen.load(Ordering::Relaxed);
        Ok(self.all[chosen].call(x)?.relu() + self.shared.call(x)?)
    }
}

#[derive(Module)]
struct Mixture {
    first: Linear,
    experts: Vec<Experts>,
    last: Linear,
}

impl Mixture {
    fn new() -> Self {
        let experts = |_| Experts {
            all: (0..5).map(|_| Linear::new(7, 7).unwrap()).collect(),
            shared: Linear::new(7, 7).unwrap(),
            chosen: AtomicUsize::default(),
        };
        numbered(Self {
            first: Linear::new(5, 7).unwrap(),
            experts: (0..2).map(experts).collect(),
            last: Linear::new(7, 3).unwrap(),
        })
    }
}

lightning_module!(Mixture, Batch, AdamW::new(0.01), |net, (x, y), ctx| {
    let rank = ctx.process_group().map_or(0, |group| group.rank());
    let mut x = net.first.call(x)?;
    for (layer, experts) in net.experts.iter().enumerate() {
        let chosen = (rank * 2 + ctx.batch_idx() + layer) % 4;
        experts.chosen.store(chosen, Ordering::Relaxed);
        x = experts.call(&x)?;
    }
    Ok((net.last.call(&x)? - y).square().mean(Kind::Float))
});

fn zero(
    ranks: usize,
    folder: &Path,
    leaves: &'static [&'static str],
    [persistence, ahead]: [usize; 2],
) -> TrainerBuilder {
    silent(ranks, "zero3", folder).strategy(move |world| {
        let config = ZeroConfig {
            param_persistence_threshold: persistence,
            prefetch_bucket_size: ahead,
            max_reuse_distance: ahead,
            leaf_modules: leaves.iter().map(|name| (*name).to_owned()).collect(),
            ..ZeroConfig::of_stage(ZeroStage::Three)
        };
        Ok(Box::new(Zero::new(world, config)) as Box<dyn Strategy>)
    })
}

#[test]
fn ranks_may_call_other_experts_of_a_leaf_module() {
    on_ranks("leaf::ranks_may_call_other_experts_of_a_leaf_module", 2, |ranks, folder| {
        let run = |builder: TrainerBuilder, window: u64| {
            trained(builder.max_epochs(2).accumulate_grad_batches(window), Mixture::new(), loaders(24))
        };
        for window in [1, 3] {
            let expected = run(silent(ranks, "ddp_find_unused_parameters_true", folder), window);
            for leaves in [&["Experts"][..], &["experts.0", "experts.1"]] {
                for bounds in [[0, 0], [0, 1_000_000], [10, 0], [1000, 1000]] {
                    let what = format!("{leaves:?}, {bounds:?}, window of {window}");
                    // gradients of a window are averaged batch by batch, and summed in another order
                    let limit = if window == 1 { 0.0 } else { 1e-6 };
                    let found = run(zero(ranks, folder, leaves, bounds), window);
                    assert_within(&what, &found, &expected, limit);
                }
            }
            let settings = json!({
                "zero_optimization": {
                    "stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0,
                    "leaf_module": {"classes": ["models.moe.Experts"], "name_suffixes": ["last"]},
                },
            });
            let builder = silent(ranks, "auto", folder).strategy(DeepSpeedStrategy::settings(settings));
            if window == 1 {
                assert_same("DeepSpeed's settings", &run(builder, window), &expected);
            }
        }
    });
}

#[test]
fn without_them_the_remedy_is_named_and_a_name_of_nothing_is_refused() {
    let test = "leaf::without_them_the_remedy_is_named_and_a_name_of_nothing_is_refused";
    on_ranks(test, 2, |ranks, folder| {
        let run = |leaves: &'static [&'static str]| {
            let mut trainer = zero(ranks, folder, leaves, [0, 0]).max_epochs(1).build().unwrap();
            trainer.fit(&mut Mixture::new(), &mut loaders(24)).unwrap_err().to_string()
        };
        assert_contains!(run(&["Expert"]), "leaf_modules has `Expert`, and no module has that type or fqn");
        assert_contains!(run(&[]), "leaf_modules");
    });
}
