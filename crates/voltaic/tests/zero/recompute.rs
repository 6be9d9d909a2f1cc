//! Segments that are recomputed in backward: gradients, the order of weights and what is whole stay as they are without.

use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use voltaic::callback::Callback;
use voltaic::ffi::is_in_backward;
use voltaic::module::HookContext;
use voltaic::nn::{
    CallInterceptor, Callable, CheckpointStats, Forward, InterceptorLevel, Linear, ModuleExt,
    MultiheadAttention, Next, intercept_calls,
};
use voltaic::optim::Sgd;
use voltaic::trainer::{ActivationCheckpointingConfig, TrainerBuilder};
use voltaic::{Kind, Module, Tensor};

use crate::checkpoint::{Checkpoint, Gradients};
use crate::ladder::{gpt, trained};
use crate::models::{Batch, loaders, numbered, tokens};
use crate::prefetch::{ALL, Bounds, NONE, SOME, Whole, bounded};
use crate::ranks::{assert_same, on_ranks, silent};

#[derive(Module)]
struct Block {
    first: Linear,
    second: Linear,
}

impl Forward for Block {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        Ok(x + self.second.call(&self.first.call(x)?.f_tanh()?)?)
    }
}

#[derive(Module)]
struct Tower {
    blocks: Vec<Block>,
    out: Linear,
    /// How often the blocks are called.
    rounds: usize,
}

impl Tower {
    fn new() -> Self {
        let block = |_| Block { first: Linear::new(5, 5).unwrap(), second: Linear::new(5, 5).unwrap() };
        let blocks = (0..BLOCKS).map(block).collect();
        numbered(Self { blocks, out: Linear::new(5, 3).unwrap(), rounds: 1 })
    }

    fn called_twice() -> Self {
        Self { rounds: 2, ..Self::new() }
    }
}

lightning_module!(Tower, Batch, Sgd::new(0.05), |net, (x, y), _| {
    let blocks = (0..net.rounds).flat_map(|_| &net.blocks);
    let hidden = blocks.into_iter().try_fold(x.shallow_clone(), |x, block| block.call(&x))?;
    Ok((net.out.call(&hidden)? - y).square().mean(Kind::Float))
});

const BLOCKS: usize = 3;

fn is_segment(module: &dyn Module) -> bool {
    module.type_name() == "Block"
}

/// Counts the calls of the segments' code in backward.
#[derive(Default)]
struct Counter(Cell<usize>);

impl CallInterceptor for Counter {
    fn level(&self) -> InterceptorLevel {
        InterceptorLevel::Graph
    }

    fn intercepts(&self, module: &dyn Module) -> bool {
        is_segment(module)
    }

    fn call(&self, _: &dyn Module, inputs: &[Tensor], next: &Next) -> anyhow::Result<Vec<Tensor>> {
        self.0.set(self.0.get() + usize::from(is_in_backward()));
        next.run(inputs)
    }
}

/// Runs `body` with a checkpoint around each segment, and within it a counter. Both must have run.
fn checkpointed<R>(gradients: Gradients, body: impl FnOnce(&Rc<Checkpoint>) -> R) -> R {
    let (checkpoint, counter) =
        (Rc::new(Checkpoint::new(gradients, is_segment)), Rc::new(Counter::default()));
    let handles = [intercept_calls(checkpoint.clone()), intercept_calls(counter.clone())];
    let result = body(&checkpoint);
    drop(handles);
    assert!(checkpoint.recomputed() > 0);
    assert_eq!(counter.0.get(), checkpoint.recomputed(), "what is within a checkpoint is run again with it");
    result
}

#[test]
fn recomputed_segments_train_as_plain_ones() {
    on_ranks("recompute::recomputed_segments_train_as_plain_ones", 2, |ranks, folder| {
        let tower = |builder: TrainerBuilder| trained(builder.max_epochs(2), Tower::new(), loaders(24));
        let gpt = |builder: TrainerBuilder| trained(builder.max_epochs(2), gpt(), tokens(16));
        let expected = [tower(silent(ranks, "ddp", folder)), gpt(silent(ranks, "ddp", folder))];
        for (way, bounds) in WAYS.into_iter().flat_map(|way| [NONE, SOME, ALL].map(|bounds| (way, bounds))) {
            let what = format!("{way:?}, {bounds:?}");
            let zero = || bounded(ranks, folder, bounds);
            assert_same(&what, &checkpointed(way, |_| tower(zero())), &expected[0]);
            assert_same(&what, &checkpointed(way, |_| gpt(zero())), &expected[1]);
        }
    });
}

/// Segments with weights in common: autograd sums their gradients up before they are sent, passes of their own do not.
#[test]
fn segments_that_share_weights_train_as_plain_ones_or_say_why_not() {
    on_ranks(
        "recompute::segments_that_share_weights_train_as_plain_ones_or_say_why_not",
        2,
        |ranks, folder| {
            let run =
                |builder: TrainerBuilder| trained(builder.max_epochs(2), Tower::called_twice(), loaders(24));
            let expected = run(silent(ranks, "ddp", folder));
            for bounds in [NONE, ALL] {
                let zero = || bounded(ranks, folder, bounds);
                assert_same("shared", &checkpointed(Gradients::Outer, |_| run(zero())), &expected);
                let error = checkpointed(Gradients::Nested, |_| {
                    let mut trainer = zero().max_epochs(1).build().unwrap();
                    trainer.fit(&mut Tower::called_twice(), &mut loaders(24)).unwrap_err().to_string()
                });
                assert!(error.contains("a second gradient of") && error.contains("autograd_grad"), "{error}");
            }
        },
    );
}

/// The trainer's own checkpoints: one graph, so that weights in common are no question. A recomputation's weights stay for the backward
/// pass, which gathers as much as a plain one.
#[test]
fn modules_that_the_trainer_checkpoints_train_as_plain_ones() {
    on_ranks("recompute::modules_that_the_trainer_checkpoints_train_as_plain_ones", 2, |ranks, folder| {
        let with = |builder: TrainerBuilder, names: &[&str]| {
            builder.activation_checkpointing(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>())
        };
        let tower = |builder: TrainerBuilder| trained(builder.max_epochs(2), Tower::new(), loaders(24));
        let twice =
            |builder: TrainerBuilder| trained(builder.max_epochs(2), Tower::called_twice(), loaders(24));
        let gpt = |builder: TrainerBuilder| trained(builder.max_epochs(2), gpt(), tokens(16));
        let ddp = || silent(ranks, "ddp", folder);
        let expected = [tower(ddp()), twice(ddp()), gpt(ddp())];
        let mut before = CheckpointStats::of_thread().recomputed;
        let names = [&["Block"][..], &["Linear"], &["blocks.0", "first"]];
        for stage in ["ddp", "zero1", "zero2", "zero3"] {
            let own = tower(with(silent(ranks, stage, folder), &["Block"]));
            assert_same(stage, &own, &expected[0]);
            let saving = |builder: TrainerBuilder| {
                builder.activation_checkpointing(ActivationCheckpointingConfig {
                    modules: vec!["Block".to_owned()],
                    save: vec!["matmul".to_owned(), "attention".to_owned()],
                    ..Default::default()
                })
            };
            let saved = CheckpointStats::of_thread().saved_bytes;
            assert_same(stage, &twice(saving(silent(ranks, stage, folder))), &expected[1]);
            assert_same(stage, &gpt(saving(silent(ranks, stage, folder))), &expected[2]);
            assert!(CheckpointStats::of_thread().saved_bytes > saved, "{stage}");
        }
        for (names, bounds) in
            names.into_iter().flat_map(|names| [NONE, SOME, ALL].map(|bounds| (names, bounds)))
        {
            let what = format!("{names:?}, {bounds:?}");
            let zero = |names| with(bounded(ranks, folder, bounds), names);
            assert_same(&what, &tower(zero(names)), &expected[0]);
            assert_same(&what, &twice(zero(names)), &expected[1]);
            assert_same(&what, &gpt(zero(&["transformer.h.*", "lm_head"])), &expected[2]);
            let now = CheckpointStats::of_thread().recomputed;
            assert!(now > before, "{what}");
            before = now;
        }
    });
}

#[test]
fn a_checkpointed_step_gathers_as_much_as_a_plain_one() {
    on_ranks("recompute::a_checkpointed_step_gathers_as_much_as_a_plain_one", 2, |ranks, folder| {
        let gathered = |bounds: Bounds, names: &[&str]| {
            let found = |epochs: i64| {
                let names = names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
                let most = Arc::new(AtomicI64::new(0));
                let whole = Whole { most: most.clone(), hooks: Mutex::default() };
                let own = Batches { is_on: Arc::default(), all: true, none_stays: bounds == NONE };
                let builder = bounded(ranks, folder, bounds).max_epochs(epochs).callback(own).callback(whole);
                let mut trainer = builder.activation_checkpointing(names).build().unwrap();
                trainer.fit(&mut Tower::new(), &mut loaders(240)).unwrap();
                let traffic = trainer.world().group().unwrap().traffic();
                (traffic.get("all_gather").copied().unwrap_or_default().1, most.load(Ordering::Relaxed))
            };
            let (twice, once) = (found(2), found(1));
            (twice.0 - once.0, once.1)
        };
        let layer = 5 * 5 + 5;
        for (bounds, whole) in [(NONE, 2 * layer), (ALL, (2 * BLOCKS as i64 + 1) * layer)] {
            let (plain, own) = (gathered(bounds, &[]), gathered(bounds, &["Block"]));
            assert!(plain.0.abs_diff(own.0) < 2048, "{bounds:?}: {} and {}", own.0, plain.0);
            assert!(own.1 <= whole, "{bounds:?}: {} elements were whole", own.1);
        }
    });
}

const WAYS: [Gradients; 2] = [Gradients::Outer, Gradients::Nested];

/// Recomputes in the batches with an even number, or in all; checks after backward that no weight is whole where none may stay.
struct Batches {
    is_on: Arc<AtomicBool>,
    all: bool,
    none_stays: bool,
}

impl Callback for Batches {
    fn on_train_batch_start(&mut self, ctx: &mut HookContext, _: &mut dyn Module) -> anyhow::Result<()> {
        self.is_on.store(self.all || ctx.batch_idx().is_multiple_of(2), Ordering::Relaxed);
        Ok(())
    }

    fn on_after_backward(&mut self, _: &mut HookContext, module: &dyn Module) -> anyhow::Result<()> {
        let named = module.named_parameters().into_iter();
        let whole: Vec<String> = named.filter(|(_, p)| !p.is_sharded()).map(|(fqn, _)| fqn).collect();
        assert!(!self.none_stays || whole.is_empty(), "{whole:?} are whole after backward");
        Ok(())
    }
}

/// Bytes that all-gathers of an epoch bring to a rank.
fn gathered(ranks: usize, folder: &Path, bounds: Bounds, recomputes: Option<(&Rc<Checkpoint>, bool)>) -> u64 {
    let found = |epochs: i64| {
        let mut builder = bounded(ranks, folder, bounds).max_epochs(epochs);
        if let Some((checkpoint, all)) = recomputes {
            let is_on = checkpoint.is_on.clone();
            builder = builder.callback(Batches { is_on, all, none_stays: bounds == NONE });
        }
        let mut trainer = builder.build().unwrap();
        trainer.fit(&mut Tower::new(), &mut loaders(240)).unwrap();
        let traffic = trainer.world().group().unwrap().traffic();
        traffic.get("all_gather").copied().unwrap_or_default().1
    };
    found(2) - found(1)
}

/// Weights come once more for the recomputation, unless they stay for the backward pass; the order of the step is that of the
/// plain one, also where only some of the steps recompute.
#[test]
fn recomputation_gathers_weights_again_and_is_not_in_the_order() {
    on_ranks("recompute::recomputation_gathers_weights_again_and_is_not_in_the_order", 2, |ranks, folder| {
        let (steps, blocks) = (60, BLOCKS as u64);
        let [layer, out] = [32, 16]; // elements that a rank gets of a layer of a block, and of the last one
        let told = 2048; // bytes that ranks tell each other at the end of an epoch
        let assert_layers = |found: u64, layers: u64, what: &str| {
            let expected = 4 * steps * (layers * layer + out);
            assert!((expected..expected + told).contains(&found), "{what}: {found}, not {expected}");
        };
        // the last layer is needed again at once, as is each block's second one after its recomputation
        let (plain, recomputed, stay) = (4 * blocks, 5 * blocks, 2 * blocks);
        assert_layers(gathered(ranks, folder, NONE, None), plain, "plain");
        assert_layers(gathered(ranks, folder, ALL, None), stay, "plain, all stay");
        for way in WAYS {
            checkpointed(way, |checkpoint| {
                let found = |bounds, all| gathered(ranks, folder, bounds, Some((checkpoint, all)));
                assert_layers(found(NONE, true), recomputed, "all steps");
                // the other half of the steps is plain
                let half = 4 * steps * layer * (recomputed - plain) / 2;
                assert_layers(found(NONE, false) - half, plain, "each second step");
                for all in [true, false] {
                    assert_layers(found(ALL, all), stay, "all stay");
                }
            });
        }
    });
}

#[test]
fn no_more_than_a_segment_is_whole_in_its_recomputation() {
    on_ranks("recompute::no_more_than_a_segment_is_whole_in_its_recomputation", 2, |ranks, folder| {
        let layer = 5 * 5 + 5;
        for (way, layers) in [(Gradients::Outer, 2), (Gradients::Nested, 1)] {
            let most = Arc::new(AtomicI64::new(0));
            let callback = Whole { most: most.clone(), hooks: Mutex::default() };
            let builder = bounded(ranks, folder, NONE).callback(callback).max_epochs(2);
            checkpointed(way, |_| trained(builder, Tower::new(), loaders(24)));
            assert_eq!(most.load(Ordering::Relaxed), layers * layer, "{way:?}");
        }
    });
}

#[derive(Module)]
struct Attending {
    input: Linear,
    attention: MultiheadAttention,
    out: Linear,
}

lightning_module!(Attending, Batch, Sgd::new(0.05), |net, (x, y), _| {
    let x = net.input.call(x)?.unsqueeze(1);
    Ok((net.out.call(&net.attention.call(&x)?.squeeze_dim(1))? - y).square().mean(Kind::Float))
});

/// Attention has weights of its own beside those of the layer it ends with, and may be recomputed.
#[test]
fn weights_of_attention_do_not_stay_whole_after_backward() {
    on_ranks("recompute::weights_of_attention_do_not_stay_whole_after_backward", 2, |ranks, folder| {
        let net = || {
            numbered(Attending {
                input: Linear::new(5, 8).unwrap(),
                attention: MultiheadAttention::new(8, 2).unwrap(),
                out: Linear::new(8, 3).unwrap(),
            })
        };
        let expected = trained(silent(ranks, "ddp", folder).max_epochs(2), net(), loaders(24));
        for names in [&[][..], &["MultiheadAttention"], &["Linear"], &["input", "attention"]] {
            let own = Batches { is_on: Arc::default(), all: true, none_stays: true };
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            let builder = bounded(ranks, folder, NONE).max_epochs(2).callback(own);
            let found = trained(builder.activation_checkpointing(names.clone()), net(), loaders(24));
            assert_same(&format!("{names:?}"), &found, &expected);
        }
    });
}
