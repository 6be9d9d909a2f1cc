//! Checkpointed segments: bit for bit what a plain call gives, from less memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::ffi::{GradHook, manual_seed, rng_state};
use voltaic::models::{Gpt, GptConfig};
use voltaic::module::LightningModule;
use voltaic::nn::{
    BatchNorm2d, Callable, CheckpointPolicy, CheckpointStats, Conv2d, Dropout, Forward, Gelu, LayerNorm,
    Linear, ModuleExt, ModuleHooks, checkpoint, checkpoint_fn, checkpoint_with, is_recomputing,
};
use voltaic::optim::AdamW;
use voltaic::trainer::{
    ActivationCheckpointing, ActivationCheckpointingConfig, ActivationMode, MemorySize, TrainerBuilder,
};
use voltaic::{Kind, Module, Tensor};

use crate::compare::assert_same;
use crate::ddp::numbers;
use crate::rng::seeded;
use crate::silent::silent;

/// Layers that save inputs, outputs, masks, statistics and views of weights.
#[derive(Module)]
struct Block {
    norm: LayerNorm,
    wide: Linear,
    gelu: Gelu,
    drop: Dropout,
    narrow: Linear,
    #[module(skip)]
    calls: Arc<AtomicUsize>,
}

impl Block {
    fn new() -> Self {
        Self {
            norm: LayerNorm::new(6).unwrap(),
            wide: Linear::new(6, 24).unwrap(),
            gelu: Gelu::new(),
            drop: Dropout::new(0.5).unwrap(),
            narrow: Linear::new(24, 6).unwrap(),
            calls: Arc::default(),
        }
    }
}

impl Forward for Block {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let hidden = self.gelu.call(&self.wide.call(&self.norm.call(x)?)?)?;
        let hidden = self.narrow.call(&self.drop.call(&hidden)?)?;
        Ok(x + hidden)
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    Plain,
    Blocks,
    /// All in one segment.
    Whole,
    /// Segments within a segment.
    Nested,
    /// Segments that keep products within one that keeps none, and the other way around.
    Saving,
    SavingAll,
}

const SAVED: [&str; 2] = ["matmul", "gelu"];

#[derive(Module)]
struct Tower {
    blocks: Vec<Block>,
    out: Linear,
    #[module(skip)]
    way: Way,
}

impl Tower {
    fn new(way: Way) -> Self {
        manual_seed(3).unwrap();
        Self { blocks: (0..3).map(|_| Block::new()).collect(), out: Linear::new(6, 2).unwrap(), way }
    }

    fn run(&self, x: &Tensor, checkpoints: bool) -> anyhow::Result<Tensor> {
        let call = |x: Tensor, block: &Block| match self.way {
            _ if !checkpoints => block.call(&x),
            Way::Saving => CheckpointPolicy::must_save(SAVED)?.checkpoint(block, &x),
            _ => checkpoint(block, &x),
        };
        self.out.call(&self.blocks.iter().try_fold(x.shallow_clone(), call)?)
    }
}

impl Forward for Tower {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        match self.way {
            Way::Plain => self.run(x, false),
            Way::Blocks => self.run(x, true),
            Way::Whole => checkpoint_with(self, x, |net, x| net.run(x, false)),
            Way::Nested | Way::Saving => checkpoint_with(self, x, |net, x| net.run(x, true)),
            Way::SavingAll => {
                CheckpointPolicy::must_save(SAVED)?.checkpoint_with(self, x, |net, x| net.run(x, true))
            }
        }
    }
}

/// Output, gradient of the input, gradients of the weights, and the generator's state after three steps.
fn found(net: &Tower, x: &Tensor) -> Vec<Tensor> {
    manual_seed(7).unwrap();
    let mut all = Vec::new();
    for step in 0..3 {
        let x = (x + f64::from(step)).detach().set_requires_grad(x.requires_grad());
        ModuleHooks::new()
            .within(net, || {
                let out = net.call(&x).unwrap();
                out.square().mean(Kind::Float).backward();
                all.extend([out.detach(), x.grad()]);
            })
            .unwrap();
    }
    all.extend(net.parameters().iter().map(|parameter| parameter.grad()));
    all.push(rng_state(0, 0).unwrap());
    all
}

fn assert_equal(what: &str, own: &[Tensor], expected: &[Tensor]) {
    assert_eq!(own.len(), expected.len());
    for (index, (own, expected)) in own.iter().zip(expected).enumerate() {
        assert_eq!(own.defined(), expected.defined(), "{what}: tensor {index}");
        assert!(!own.defined() || own.equal(expected), "{what}: tensor {index}");
    }
}

#[test]
fn a_checkpointed_call_is_a_plain_one_bit_for_bit() {
    let _seeded = seeded(1);
    for trained in [true, false] {
        let x = numbers(&[5, 6], 0.3).set_requires_grad(trained);
        let plain = found(&Tower::new(Way::Plain), &x);
        for way in [Way::Blocks, Way::Whole, Way::Nested, Way::Saving, Way::SavingAll] {
            let before = CheckpointStats::of_thread();
            let net = Tower::new(way);
            assert_equal(&format!("{way:?}, input trained: {trained}"), &found(&net, &x), &plain);
            let after = CheckpointStats::of_thread();
            let counts = [after.segments - before.segments, after.recomputed - before.recomputed];
            let calls = net.blocks[0].calls.load(Ordering::Relaxed);
            // the outer one is run again, and each block within it when its turn comes
            let expected = match way {
                Way::Blocks => ([9, 9], 6),
                Way::Whole => ([3, 3], 6),
                _ => ([3 + 9 + 9, 3 + 9], 9),
            };
            assert_eq!((counts, calls), expected, "{way:?}");
            assert!(after.dropped_bytes > before.dropped_bytes);
        }
    }
}

#[test]
fn frozen_weights_are_recomputed_with() {
    let _seeded = seeded(1);
    let x = numbers(&[5, 6], 0.1);
    let run = |way| {
        let net = Tower::new(way);
        net.blocks[0].set_requires_grad(false);
        net.blocks[1].wide.set_requires_grad(false);
        found(&net, &x)
    };
    let plain = run(Way::Plain);
    for way in [Way::Blocks, Way::Whole, Way::Nested] {
        assert_equal(&format!("{way:?}"), &run(way), &plain);
    }
}

#[test]
fn a_backward_pass_may_run_again() {
    let _seeded = seeded(1);
    for way in [Way::Nested, Way::Saving] {
        let (net, x) = (Tower::new(way), numbers(&[5, 6], 0.3).set_requires_grad(true));
        ModuleHooks::new()
            .within(&net, || {
                let loss = net.call(&x).unwrap().square().mean(Kind::Float);
                let grads = |keeps| Tensor::run_backward(&[&loss], &[&x], keeps, false);
                let first = grads(true);
                assert!(first[0].equal(&grads(true)[0]) && first[0].equal(&grads(false)[0]));
            })
            .unwrap();
    }
}

#[test]
fn several_inputs_and_outputs_of_any_dtype() {
    let _seeded = seeded(1);
    let run = |checkpoints: bool| {
        let x = numbers(&[4, 3], 0.2).set_requires_grad(true);
        let (indices, mask) = (Tensor::from_slice(&[2_i64, 0]), Tensor::from_slice(&[true, false, true]));
        let code = |(x, indices, mask): &(Tensor, Tensor, Tensor)| -> anyhow::Result<(Tensor, Tensor)> {
            let picked = x.f_index_select(0, indices)?.f_masked_fill(mask, 0.5)?.f_exp()?;
            let largest = picked.f_argmax(1, false)?;
            Ok((picked, largest))
        };
        let args = (x.shallow_clone(), indices, mask);
        let (picked, largest) = if checkpoints { checkpoint_fn(&args, code) } else { code(&args) }.unwrap();
        assert!(!largest.requires_grad());
        picked.square().sum(Kind::Float).backward();
        [picked.detach(), largest, x.grad()]
    };
    assert_equal("checkpoint_fn", &run(true), &run(false));
    // a mask that may be missing comes in the closure, and so may a tensor that is trained
    for mask in [None, Some(Tensor::from_slice(&[true, false, true]))] {
        let run = |checkpoints: bool| {
            let x = numbers(&[4, 3], 0.2).set_requires_grad(true);
            let scale = numbers(&[3], 0.4).set_requires_grad(true);
            let scaled = scale.exp();
            let mask = mask.as_ref().map(Tensor::shallow_clone);
            let args = (x.shallow_clone(), scaled.shallow_clone());
            let code = move |(x, scale): &(Tensor, Tensor)| -> anyhow::Result<Tensor> {
                let y = x.f_mul(scale)?.f_sigmoid()?;
                Ok(match &mask {
                    Some(mask) => y.f_masked_fill(mask, 0.0)?,
                    None => y,
                })
            };
            let out = if checkpoints { checkpoint_fn(&args, code) } else { code(&args) }.unwrap();
            out.square().sum(Kind::Float).backward();
            [out.detach(), x.grad(), scale.grad()]
        };
        assert_equal("mask", &run(true), &run(false));
    }
}

#[test]
fn batches_count_once_for_running_statistics() {
    let _seeded = seeded(1);
    #[derive(Module)]
    struct Net {
        conv: Conv2d,
        norm: BatchNorm2d,
        #[module(skip)]
        checkpoints: bool,
    }
    impl Net {
        fn run(&self, x: &Tensor) -> anyhow::Result<Tensor> {
            Ok(self.norm.call(&self.conv.call(x)?)?.f_relu()?)
        }
    }
    let run = |checkpoints| {
        manual_seed(3).unwrap();
        let (conv, norm) = (Conv2d::new(2, 3, 3).unwrap(), BatchNorm2d::new(3).unwrap());
        let net = Net { conv, norm, checkpoints };
        for step in 0..3 {
            let x = numbers(&[2, 2, 5, 5], f64::from(step));
            let step = || {
                let out = if net.checkpoints { checkpoint_with(&net, &x, Net::run) } else { net.run(&x) };
                out.unwrap().square().mean(Kind::Float).backward();
            };
            ModuleHooks::new().within(&net, step).unwrap();
        }
        let mut all: Vec<Tensor> = net.parameters().iter().map(|parameter| parameter.grad()).collect();
        all.extend(net.named_buffers().iter().map(|(_, buffer)| buffer.tensor().copy()));
        all
    };
    assert_equal("batch norm", &run(true), &run(false));
}

#[test]
fn a_gradient_is_complete_once() {
    let _seeded = seeded(1);
    let net = Tower::new(Way::Nested);
    for parameter in net.parameters() {
        let told = Arc::new(AtomicUsize::new(0));
        let own = told.clone();
        let count = move || {
            own.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        let _hook = GradHook::register(parameter.leaf(), count).unwrap();
        found(&net, &numbers(&[5, 6], 0.3));
        assert_eq!(told.load(Ordering::Relaxed), 3);
    }
}

#[test]
fn a_recomputation_ends_when_all_is_there() {
    #[derive(Module)]
    struct Net {
        first: Linear,
        second: Linear,
        last: Linear,
    }
    let _seeded = seeded(1);
    let linear = || Linear::new(4, 4).unwrap();
    let net = Net { first: linear(), second: linear(), last: linear() };
    net.last.set_requires_grad(false);
    let done = Arc::new(AtomicUsize::new(0));
    let own = done.clone();
    let x = numbers(&[3, 4], 0.0);
    let step = || {
        let own = own.clone();
        let out = checkpoint_with(&net, &x, move |net: &Net, x: &Tensor| {
            let hidden = net.second.call(&net.first.call(x)?)?;
            own.fetch_add(1, Ordering::Relaxed); // the last one saves its input before it computes
            Ok(hidden)
        });
        out.unwrap().sum(Kind::Float).backward();
    };
    ModuleHooks::new().within(&net, step).unwrap();
    assert_eq!(done.load(Ordering::Relaxed), 1, "the forward pass alone came so far");
    assert!(net.first.weight.grad().defined() && net.second.weight.grad().defined());
}

#[test]
fn what_goes_wrong_is_said() {
    let _seeded = seeded(1);
    let net = Tower::new(Way::Blocks);
    let x = numbers(&[5, 6], 0.3);
    let error = net.call(&x).unwrap().sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert_contains!(&error, "a checkpointed Block cannot be run again", "ModuleHooks::within");

    let fails = checkpoint_fn(&x.set_requires_grad(true), |x| {
        anyhow::ensure!(!is_recomputing(), "this time it fails");
        Ok(x.f_exp()?)
    });
    assert_error!(fails.unwrap().sum(Kind::Float).f_backward(), "this time it fails");

    let fewer = checkpoint_fn(&x, |x| Ok(if is_recomputing() { x.shallow_clone() } else { x.f_exp()? }));
    let error = fewer.unwrap().sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert_contains!(&error, "saves 0 tensors, and its forward pass 1", "do the same each time");

    let others =
        checkpoint_fn(&x, |x| Ok(if is_recomputing() { x.f_narrow(0, 0, 2)?.f_exp()? } else { x.f_exp()? }));
    let error = others.unwrap().sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert!(error.contains("[2, 6] of Float on cpu, not [5, 6] of Float on cpu"), "{error}");

    let y = x.exp();
    let out = checkpoint_fn(&y, |y| Ok(y.f_sin()?)).unwrap();
    let _ = y.detach().f_add_scalar_(1.0).unwrap();
    assert_error!(out.sum(Kind::Float).f_backward(), "modified by an inplace operation");

    let panics = checkpoint_fn(&x, |x| {
        assert!(!is_recomputing(), "this one panics");
        Ok(x.f_exp()?)
    });
    let error = panics.unwrap().sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert!(error.contains("the recomputation panicked: this one panics"), "{error}");
}

#[test]
fn nothing_is_kept_but_the_input() {
    let _seeded = seeded(1);
    let x = numbers(&[64, 64], 0.3).set_requires_grad(true);
    let code = |x: &Tensor| Ok((0..8).try_fold(x.shallow_clone(), |x, _| x.f_sin())?);
    let before = CheckpointStats::of_thread().dropped_bytes;
    let out = checkpoint_fn(&x, code).unwrap();
    assert_eq!(CheckpointStats::of_thread().dropped_bytes - before, 7 * 64 * 64 * 4, "seven of eight inputs");
    out.sum(Kind::Float).backward();
    let grad = x.grad();
    let x = x.detach().set_requires_grad(true);
    code(&x).unwrap().sum(Kind::Float).backward();
    assert!(grad.equal(&x.grad()));
    let before = CheckpointStats::of_thread();
    let _ = tch::no_grad(|| checkpoint_fn(&x, code)).unwrap();
    assert_eq!(CheckpointStats::of_thread(), before, "without grad it is a plain call");
}

type Batch = (Tensor, Tensor);

fn gpt() -> Gpt {
    gpt_with(0.2)
}

/// Without dropout attention is one operator.
fn gpt_with(dropout: f64) -> Gpt {
    manual_seed(5).unwrap();
    let config = GptConfig {
        vocab_size: 61,
        block_size: 16,
        n_layer: 3,
        n_head: 2,
        n_embd: 24,
        dropout,
        ..GptConfig::tiny()
    };
    Gpt::new(config).unwrap()
}

fn tokens() -> Loaders<Batch> {
    let tokens = (numbers(&[24, 17], 0.5) * 1e4).abs().to_kind(Kind::Int64).remainder(61);
    let (x, y) = (tokens.narrow(1, 0, 16).copy(), tokens.narrow(1, 1, 16).copy());
    Loaders::new().train(DataLoader::new(TensorDataset::new((x, y)).unwrap()).batch_size(4).build().unwrap())
}

fn trained<M: LightningModule<Batch = Batch> + Module>(
    builder: TrainerBuilder,
    mut net: M,
) -> Vec<(String, Tensor)> {
    manual_seed(11).unwrap();
    builder.max_epochs(2).build().unwrap().fit(&mut net, &mut tokens()).unwrap();
    net.named_parameters().into_iter().map(|(name, parameter)| (name, parameter.copy())).collect()
}

#[test]
fn a_trainer_checkpoints_modules_by_name() {
    let _seeded = seeded(1);
    let settings: [(&str, fn(TrainerBuilder) -> TrainerBuilder); 5] = [
        ("plain", |builder| builder),
        ("accumulation", |builder| builder.accumulate_grad_batches(2_u64)),
        ("bf16-mixed", |builder| builder.precision("bf16-mixed")),
        ("bf16-true", |builder| builder.precision("bf16-true")),
        ("graph", |builder| builder.graph(voltaic::trainer::GraphMode::Step)),
    ];
    for (what, with) in settings {
        let expected = trained(with(silent()), gpt());
        for names in [&["Block"][..], &["transformer.h.*"], &["FeedForward", "attn"]] {
            let before = CheckpointStats::of_thread();
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            let label = format!("{what}, {names:?}");
            let own = trained(with(silent()).activation_checkpointing(names), gpt());
            assert_same(&label, &own, &expected);
            let after = CheckpointStats::of_thread();
            assert!(after.recomputed > before.recomputed, "{label}");
            assert_eq!(after.recomputed - before.recomputed, after.segments - before.segments, "{label}");
        }
    }
}

#[test]
fn a_name_of_no_module_is_refused() {
    let _seeded = seeded(1);
    let mut trainer =
        silent().max_epochs(1).activation_checkpointing(vec!["Blok".to_owned()]).build().unwrap();
    let error = trainer.fit(&mut gpt(), &mut tokens()).unwrap_err().to_string();
    assert!(
        error
            .contains("trainer.activation_checkpointing: `Blok` is neither the type nor the fqn of a module"),
        "{error}"
    );
    assert!(error.contains("Block, CausalSelfAttention"), "{error}");
}

#[test]
fn the_modules_that_save_the_most_time_are_kept_within_the_budget() {
    let _seeded = seeded(1);
    let fit = |settings: ActivationCheckpointingConfig| {
        let before = CheckpointStats::of_thread();
        let own = trained(silent().activation_checkpointing(settings), gpt());
        let after = CheckpointStats::of_thread();
        (own, after.segments - before.segments, after.dropped_bytes - before.dropped_bytes)
    };
    let of = |budget: Option<MemorySize>| ActivationCheckpointingConfig {
        modules: vec!["Block".to_owned()],
        budget,
        ..Default::default()
    };
    let (expected, steps) = (trained(silent(), gpt()), 12);
    let (own, segments, bytes) = fit(of(None));
    assert_same("no budget", &own, &expected);
    assert_eq!(segments, 3 * steps);
    let block = bytes / segments;
    for kept in 0..=3 {
        let bytes = kept * (block + block / 100); // sizes are rounded up
        let text = || MemorySize::Text(format!("{}KiB", bytes / 1024));
        let budget = if kept == 2 { text() } else { MemorySize::Bytes(bytes) };
        let (own, segments, _) = fit(of(Some(budget)));
        assert_same(&format!("{kept} are kept"), &own, &expected);
        assert_eq!(
            segments,
            3 + (steps - 1) * (3 - kept),
            "all in the first step, and then those that are not kept"
        );
    }
    let offload = ActivationCheckpointingConfig { mode: ActivationMode::Offload, ..of(None) };
    let (own, segments, _) = fit(offload);
    assert_same("offload", &own, &expected);
    assert_eq!(segments, 0);
    for (budget, mode, expected) in [
        (
            "much",
            ActivationMode::Recompute,
            "activation_checkpointing.budget: `much` is not a size of memory",
        ),
        ("1GiB", ActivationMode::Offload, "a budget with mode=offload"),
    ] {
        let settings =
            ActivationCheckpointingConfig { mode, ..of(Some(MemorySize::Text(budget.to_owned()))) };
        assert_error!(silent().activation_checkpointing(settings).build(), expected);
    }
    assert_error!(
        silent().activation_checkpointing(ActivationCheckpointingConfig::default()).build(),
        "activation_checkpointing.modules: no module is named"
    );
}

/// A step that runs a backward pass of its own: the squares of the gradient of its inputs are a part of the loss.
#[derive(Module)]
struct Penalized {
    tower: Tower,
}

lightning_module!(Penalized, Tensor, AdamW::new(0.01), |net, x, _| {
    let x = x.copy().set_requires_grad(true);
    let loss = net.tower.call(&x)?.square().mean(Kind::Float);
    let grads = Tensor::f_run_backward(&[&loss], &[&x], true, true)?;
    Ok(loss + grads[0].square().mean(Kind::Float))
});

#[test]
fn a_gradient_of_a_gradient_goes_through_segments() {
    let _seeded = seeded(1);
    let run = |builder: TrainerBuilder, way| {
        let mut net = Penalized { tower: Tower::new(way) };
        let data = TensorDataset::new(numbers(&[12, 6], 0.3)).unwrap();
        let mut loaders = Loaders::new().train(DataLoader::new(data).batch_size(4).build().unwrap());
        builder.max_epochs(2).build().unwrap().fit(&mut net, &mut loaders).unwrap();
        net.named_parameters().into_iter().map(|(name, of)| (name, of.copy())).collect::<Vec<_>>()
    };
    let expected = run(silent(), Way::Plain);
    for way in [Way::Blocks, Way::Whole, Way::Nested, Way::Saving, Way::SavingAll] {
        assert_same(&format!("{way:?}"), &run(silent(), way), &expected);
    }
    assert_same("named", &run(silent().activation_checkpointing(["Block"]), Way::Plain), &expected);
}

/// Results of the named operators are those of the forward pass: they are not computed again, and all others are.
#[test]
fn named_operators_are_not_computed_again() {
    let _seeded = seeded(1);
    let run = |policy: Option<&[&str]>| {
        let (x, w) = (numbers(&[4, 3], 0.2), numbers(&[3, 3], 0.4).set_requires_grad(true));
        // a recomputation would multiply, and take the sine of, other numbers
        let code = |(x, w): &(Tensor, Tensor)| -> anyhow::Result<Tensor> {
            let other = if is_recomputing() { 0.5 } else { 0.0 };
            let product = x.f_add_scalar(other)?.f_mm(w)?;
            Ok(product.f_sin()?.f_exp()?)
        };
        let args = (x, w.shallow_clone());
        let out = match policy {
            Some(names) => {
                CheckpointPolicy::must_save(names.iter().copied()).unwrap().checkpoint_fn(&args, code)
            }
            None => code(&args),
        };
        out.unwrap().sum(Kind::Float).backward();
        // of the weight it is that of the other inputs in any case: what saves it is computed again
        w.grad()
    };
    let (plain, none, all) = (run(None), run(Some(&[])), run(Some(&["matmul", "sin"])));
    let shift = |grad: &Tensor| (grad - &plain).abs().max().double_value(&[]);
    assert!(shift(&none) > 0.1 && shift(&all) > 0.1 && (&none - &all).abs().max().double_value(&[]) > 0.1);
    // exp saves its result, sin its argument: from the kept ones comes the gradient of the product
    let (x, w) = (numbers(&[4, 3], 0.2), numbers(&[3, 3], 0.4));
    let of = |product: &Tensor| product.sin().exp() * product.cos();
    let expected = (&x + 0.5).tr().mm(&of(&x.mm(&w)));
    assert!((&all - &expected).abs().max().double_value(&[]) < 1e-6, "{all} {expected}");
    let expected = (&x + 0.5).tr().mm(&of(&(&x + 0.5).mm(&w)));
    assert!((&none - &expected).abs().max().double_value(&[]) < 1e-6);
}

#[test]
fn what_is_kept_by_name_may_be_changed_in_place_or_draw_random_numbers() {
    let _seeded = seeded(1);
    let names = ["matmul", "native_dropout", "bernoulli", "attention", "native_layer_norm"];
    let run = |checkpoints: bool| {
        manual_seed(9).unwrap();
        let x = numbers(&[2, 2, 6, 6], 0.2).set_requires_grad(true);
        let code = |x: &Tensor| -> anyhow::Result<Tensor> {
            let attended =
                Tensor::f_scaled_dot_product_attention(x, x, x, None::<Tensor>, 0.0, true, None, false)?;
            let dropped = Tensor::f_scaled_dot_product_attention(
                x,
                x,
                &attended,
                None::<Tensor>,
                0.3,
                false,
                None,
                false,
            )?;
            let product = dropped.f_matmul(x)?.f_relu_()?;
            let product = product.f_dropout(0.5, true)?.f_layer_norm(
                [6],
                None::<Tensor>,
                None::<Tensor>,
                1e-5,
                false,
            )?;
            Ok(product.f_matmul(&attended)?.f_dropout(0.2, true)?)
        };
        let before = CheckpointStats::of_thread().saved_bytes;
        let out = if checkpoints {
            CheckpointPolicy::must_save(names).unwrap().checkpoint_fn(&x, code)
        } else {
            code(&x)
        };
        assert_eq!(CheckpointStats::of_thread().saved_bytes > before, checkpoints);
        let out = out.unwrap();
        out.square().sum(Kind::Float).backward();
        [out.detach(), x.grad(), rng_state(0, 0).unwrap()]
    };
    assert_equal("changed and random", &run(true), &run(false));
}

#[test]
fn a_trainer_keeps_the_results_of_named_operators() {
    let _seeded = seeded(1);
    let of = |save: &[&str], budget| ActivationCheckpointingConfig {
        modules: vec!["Block".to_owned()],
        save: save.iter().map(|name| (*name).to_owned()).collect(),
        budget,
        ..Default::default()
    };
    let settings: [fn(TrainerBuilder) -> TrainerBuilder; 3] = [
        |builder| builder,
        |builder| builder.precision("bf16-mixed").accumulate_grad_batches(2_u64),
        |builder| builder.graph(voltaic::trainer::GraphMode::Step),
    ];
    for (with, dropout) in settings.into_iter().flat_map(|with| [(with, 0.0), (with, 0.2)]) {
        let expected = trained(with(silent()), gpt_with(dropout));
        let fit = |save: &[&str]| {
            let before = CheckpointStats::of_thread();
            let own = trained(with(silent()).activation_checkpointing(of(save, None)), gpt_with(dropout));
            assert_same(&format!("{save:?}"), &own, &expected);
            let after = CheckpointStats::of_thread();
            assert!(after.recomputed > before.recomputed);
            [after.saved_bytes - before.saved_bytes, after.dropped_bytes - before.dropped_bytes]
        };
        let [none, products, both] = [fit(&[]), fit(&["matmul"]), fit(&["matmul", "attention"])];
        let what = format!("dropout {dropout}: {none:?} {products:?} {both:?}");
        assert!(none[0] == 0 && products[0] > 0 && none[1] > products[1], "{what}");
        assert_eq!(
            (both[0] > products[0], both[1] < products[1]),
            (dropout == 0.0, dropout == 0.0),
            "{what}"
        );
    }
    let kept = of(&["matmul"], Some(MemorySize::Bytes(1 << 30)));
    let expected = trained(silent(), gpt());
    assert_same("budget", &trained(silent().activation_checkpointing(kept), gpt()), &expected);
    for name in ["lineer", "linear", "add_", "transpose", "aten::nope", "a\0b"] {
        assert_error!(
            silent().activation_checkpointing(of(&[name], None)).build(),
            "trainer.activation_checkpointing.save: ",
            "is no operator that computes new tensors",
            "use matmul, attention, or"
        );
    }
    let offload = ActivationCheckpointingConfig { mode: ActivationMode::Offload, ..of(&["matmul"], None) };
    assert_error!(silent().activation_checkpointing(offload).build(), "operators to save with mode=offload");
    let text = r#"{"modules": ["Block"], "save": ["matmul", "attention"]}"#;
    let parsed: ActivationCheckpointing = serde_json::from_str(text).unwrap();
    assert_eq!(parsed, of(&["matmul", "attention"], None).into());
}

/// Tensors that may be missing go in and come out, integers and masks among them.
#[test]
fn what_may_be_missing_goes_through_a_segment() {
    type Args = (Tensor, Option<Tensor>, Option<Tensor>);
    let _seeded = seeded(1);
    #[derive(Module)]
    struct Net {
        linear: Linear,
    }
    impl Callable<Args> for Net {
        type Output = (Tensor, Option<Tensor>, Option<Tensor>);
        fn forward_with(&self, (x, mask, indices): &Args) -> anyhow::Result<Self::Output> {
            let y = self.linear.call(x)?.f_sigmoid()?;
            let y = match mask {
                Some(mask) => y.f_masked_fill(mask, 0.25)?.f_exp()?,
                None => y,
            };
            let picked = indices.as_ref().map(|indices| y.f_index_select(0, indices)).transpose()?;
            let largest = mask.as_ref().map(|_| y.f_argmax(1, false)).transpose()?;
            Ok((y, picked, largest))
        }
    }
    manual_seed(3).unwrap();
    let net = Net { linear: Linear::new(3, 3).unwrap() };
    let masks = [None, Some(Tensor::from_slice(&[true, false, true]))];
    let indices = [None, Some(Tensor::from_slice(&[2_i64, 0]))];
    for (mask, indices) in masks.iter().flat_map(|mask| indices.iter().map(move |indices| (mask, indices))) {
        let run = |way: usize| {
            let x = numbers(&[4, 3], 0.2).set_requires_grad(true);
            let copy = |of: &Option<Tensor>| of.as_ref().map(Tensor::shallow_clone);
            let args: Args = (x.shallow_clone(), copy(mask), copy(indices));
            let step = || {
                let (y, picked, largest) = match way {
                    0 => net.call(&args),
                    1 => checkpoint(&net, &args),
                    _ => checkpoint_with(&net, &args, Net::forward_with),
                }
                .unwrap();
                assert_eq!((picked.is_some(), largest.is_some()), (indices.is_some(), mask.is_some()));
                let sum = y.square().sum(Kind::Float);
                let sum = picked.iter().fold(sum, |sum, picked| sum + picked.exp().sum(Kind::Float));
                net.linear.weight.leaf().shallow_clone().zero_grad();
                sum.backward();
                let or_none = |of: Option<Tensor>| of.map_or_else(Tensor::new, |of| of.detach());
                vec![y.detach(), or_none(picked), or_none(largest), x.grad(), net.linear.weight.grad().copy()]
            };
            // hooks of calls, and of the backward pass, get undefined tensors
            let hooks = ModuleHooks::new();
            let _handle = hooks.register_full_backward_hook("", |_, _, _| Ok(()));
            hooks.within(&net, step).unwrap()
        };
        let plain = run(0);
        assert_equal("checkpoint", &run(1), &plain);
        assert_equal("checkpoint_with", &run(2), &plain);
    }
}
