//! `te::Linear`, converted layers, and what they compute.

use tch::{Kind, Tensor};
use voltaic::Module;
use voltaic::nn::{
    Forward, Linear, ModuleExt, ModuleHooks, MultiheadAttention, Relu, Sequential, checkpoint,
    checkpoint_with, te,
};
use voltaic::precision::fp8::{
    DelayedScaling, Float8CurrentScaling, Fp8Format, Fp8Settings, Recipe, RowwiseScaling, fp8_autocast,
    is_fp8_enabled,
};
use voltaic::precision::{HpuPrecisionPlugin, autocast};

use crate::alone;
use crate::compare::assert_same;
use crate::operators::CPU;

fn waves(size: &[i64], phase: f64) -> Tensor {
    let numel: i64 = size.iter().product();
    (Tensor::arange(numel, (Kind::Float, CPU)) * 1.7 + phase).sin().reshape(size)
}

fn hybrid() -> Recipe {
    DelayedScaling { fp8_format: Fp8Format::Hybrid, ..DelayedScaling::default() }.into()
}

/// All recipes, in both formats.
fn recipes() -> Vec<Recipe> {
    let of = |fp8_format| -> [Recipe; 3] {
        [
            DelayedScaling { fp8_format, ..DelayedScaling::default() }.into(),
            Float8CurrentScaling { fp8_format, ..Float8CurrentScaling::default() }.into(),
            RowwiseScaling { fp8_format, ..RowwiseScaling::default() }.into(),
        ]
    };
    [of(Fp8Format::E5M2), of(Fp8Format::Hybrid)].concat()
}

fn set(layer: &impl ModuleExt) {
    for (index, parameter) in layer.parameters().iter().enumerate() {
        parameter.set_data(&(waves(&parameter.size(), index as f64) * 0.2)).unwrap();
    }
}

/// Output, and gradients of the input and of all parameters, in the second step of a recipe.
fn step(layer: &(impl Forward + ModuleExt), x: &Tensor, recipe: Option<&Recipe>) -> Vec<Tensor> {
    let mut results = Vec::new();
    for _ in 0..2 {
        layer.zero_grads();
        let x = x.detach().set_requires_grad(true);
        let y = {
            let _fp8 = recipe.map(|recipe| fp8_autocast(true, Some(recipe.clone())).unwrap());
            layer.forward(&x).unwrap()
        };
        let loss = (&y * waves(&y.size(), 0.3).to_kind(y.kind())).sum(Kind::Float);
        // as the trainer does, so that recomputations find the module
        ModuleHooks::new().within(layer.as_dyn(), || loss.backward()).unwrap();
        results = vec![y.detach(), x.grad()];
        results.extend(layer.parameters().iter().map(|parameter| parameter.grad()));
    }
    results
}

trait ZeroGrads {
    fn zero_grads(&self);
}

impl<M: ModuleExt> ZeroGrads for M {
    fn zero_grads(&self) {
        for parameter in self.parameters() {
            let mut grad = parameter.grad();
            if grad.defined() {
                let _ = grad.zero_();
            }
        }
    }
}

fn relative(a: &Tensor, b: &Tensor) -> f64 {
    let (a, b) = (a.to_kind(Kind::Double), b.to_kind(Kind::Double));
    ((a - &b).norm() / b.norm()).double_value(&[])
}

/// What casts in `dtype` make of `x`, in float64: libtorch's cast of `x 2^floor(log2(max / amax))`, with the largest magnitude along
/// `dims` or of all numbers.
fn through_float8(x: &Tensor, dtype: Kind, dims: Option<i64>) -> Tensor {
    let max = if dtype == Kind::Float8e4m3fn { 240.0 } else { 57344.0 };
    let amax = match dims {
        Some(dim) => x.abs().amax([dim].as_slice(), true),
        None => x.abs().max(),
    };
    let scale = (amax.reciprocal() * max).log2().floor().exp2();
    ((x * &scale).to_kind(dtype).to_kind(Kind::Float) / scale).to_kind(Kind::Double)
}

/// `|a| |b|` in float64, which bounds the effect of relative errors of the factors.
fn magnitudes(a: &Tensor, b: &Tensor) -> Tensor {
    a.to_kind(Kind::Double).abs().matmul(&b.to_kind(Kind::Double).abs())
}

#[test]
fn each_recipe_gives_the_products_of_its_casts() {
    let _alone = alone();
    let (x, layer) = (waves(&[4, 8, 32], 0.7), te::Linear::new(32, 16).unwrap());
    set(&layer);
    let plain = step(&layer, &x, None);
    let (weight, bias) = (layer.weight.tensor(), layer.bias.as_ref().unwrap().tensor());
    assert!(
        relative(&plain[0], &(x.matmul(&weight.tr()) + bias)) < 1e-6,
        "without a region it is nn::Linear"
    );
    let (rows, grad) = (x.reshape([-1, 32]), waves(&[32, 16], 0.3)); // of the output, as `step` has it
    for recipe in recipes() {
        let own = step(&layer, &x, Some(&recipe));
        let (format, by_row) = (recipe.fp8_format(), matches!(recipe, Recipe::RowwiseScaling(_)));
        let (forward, backward) = match format {
            Fp8Format::E5M2 => (Kind::Float8e5m2, Kind::Float8e5m2),
            Fp8Format::Hybrid => (Kind::Float8e4m3fn, Kind::Float8e5m2),
        };
        // a row-wise scale is of the numbers that are summed with it
        let cast = |x: &Tensor, dtype: Kind, dim: i64| through_float8(x, dtype, by_row.then_some(dim));
        let bias = bias.to_kind(Kind::BFloat16).to_kind(Kind::Double);
        let output = cast(&rows, forward, 1).matmul(&cast(weight, forward, 1).tr()) + bias;
        assert!(relative(&own[0].reshape([-1, 16]), &output) < 1e-6, "{recipe:?}");
        let factors = [
            (cast(&grad, backward, 1), cast(weight, backward, 0)),
            (cast(&grad, backward, 0).tr(), cast(&rows, backward, 0)),
        ];
        for (index, (gradient, other)) in factors.iter().enumerate() {
            let own = own[1 + index].reshape([-1, 32]).to_kind(Kind::Double);
            if format == Fp8Format::E5M2 {
                assert!(relative(&own, &gradient.matmul(other)) < 1e-6, "{recipe:?}, gradient {index}");
                continue;
            }
            // HYBRID rounds gradients at random to a neighbour, 2^-2 away at most with E5M2's 2 bits of fraction, and 2^-3 from the
            // nearest one
            let exact = if index == 0 { grad.shallow_clone() } else { grad.tr() }.to_kind(Kind::Double);
            let error = (&own - exact.matmul(other)).abs();
            let limit = magnitudes(&exact, other) * 0.25 + 1e-6;
            assert!(bool::try_from(error.le_tensor(&limit).all()).unwrap(), "{recipe:?}, gradient {index}");
            assert!(relative(&own, &exact.matmul(other)) > 1e-3, "gradients are cast");
        }
        assert!(relative(&own[3], &plain[3]) < 1e-6, "the gradient of the bias is not cast");
        for (own, plain) in own.iter().zip(&plain) {
            assert_eq!((own.kind(), own.size()), (plain.kind(), plain.size()));
        }
    }
}

#[test]
fn the_environment_says_whether_gradients_are_rounded_at_random() {
    const NAME: &str = "layers::the_environment_says_whether_gradients_are_rounded_at_random";
    const FLAG: &str = "PT_TE_FORCE_SR_BWD";
    let Ok(value) = std::env::var(FLAG) else {
        for value in ["true", "1", "false", "0"] {
            let program = std::env::current_exe().unwrap();
            let child = std::process::Command::new(program)
                .args(["--exact", NAME])
                .env(FLAG, value)
                .output()
                .unwrap();
            let printed = String::from_utf8_lossy(&child.stdout);
            assert!(child.status.success() && printed.contains("1 passed"), "{value}: {printed}");
        }
        return;
    };
    for fp8_format in [Fp8Format::E5M2, Fp8Format::Hybrid] {
        let recipe: Recipe = DelayedScaling { fp8_format, ..DelayedScaling::default() }.into();
        let gradient = |seed: i64| {
            tch::manual_seed(seed);
            let layer = te::Linear::new(32, 16).unwrap();
            set(&layer);
            step(&layer, &waves(&[8, 32], 0.7), Some(&recipe)).swap_remove(1)
        };
        let is_random = ["true", "1"].contains(&value.as_str());
        assert_eq!(!gradient(1).equal(&gradient(2)), is_random, "{fp8_format:?}, {value}");
    }
}

#[test]
fn the_output_has_the_dtype_of_activations() {
    let _alone = alone();
    for (input, weights, casts, output) in [
        (Kind::Float, Kind::Float, false, Some(Kind::Float)),
        (Kind::BFloat16, Kind::BFloat16, false, Some(Kind::BFloat16)),
        (Kind::Half, Kind::Half, false, Some(Kind::Half)),
        (Kind::Float, Kind::Float, true, Some(Kind::BFloat16)),
        (Kind::BFloat16, Kind::Float, true, Some(Kind::BFloat16)),
        (Kind::BFloat16, Kind::BFloat16, true, Some(Kind::BFloat16)),
        (Kind::BFloat16, Kind::Float, false, None),
        (Kind::Float, Kind::BFloat16, false, None),
    ] {
        for recipe in recipes() {
            let layer = te::Linear::new(8, 4).unwrap();
            layer.to_dtype(weights).unwrap();
            let x = waves(&[3, 8], 0.0).to_kind(input).set_requires_grad(true);
            let y = {
                let _casts = casts.then(|| autocast(voltaic::Device::Cpu, Kind::BFloat16).unwrap());
                let _fp8 = fp8_autocast(true, Some(recipe)).unwrap();
                layer.forward(&x)
            };
            let Some(output) = output else {
                assert_error!(y, "Data types for parameters must match when outside of autocasted");
                continue;
            };
            let y = y.unwrap();
            assert_eq!(y.kind(), output, "{input:?} {weights:?} {casts}");
            y.sum(Kind::Float).backward();
            assert_eq!((x.grad().kind(), layer.weight.grad().kind()), (input, weights));
            assert_eq!(layer.bias.as_ref().unwrap().grad().kind(), weights);
        }
    }
}

#[test]
fn regions_nest_and_evaluation_leaves_scales_alone() {
    let _alone = alone();
    let layer = te::Linear::new(8, 4).unwrap();
    let x = waves(&[3, 8], 0.0) * 50.0;
    assert!(!is_fp8_enabled());
    {
        let _outer = fp8_autocast(true, None).unwrap();
        assert!(is_fp8_enabled());
        {
            let _inner = fp8_autocast(false, Some(hybrid())).unwrap();
            assert!(!is_fp8_enabled());
            let _ = layer.forward(&x).unwrap();
        }
        assert!(is_fp8_enabled() && te::fp8_state_dict(&layer).unwrap().is_empty());
        let _ = layer.forward(&x).unwrap();
        let before = te::fp8_state_dict(&layer).unwrap();
        {
            let _no_grad = tch::no_grad_guard();
            for _ in 0..3 {
                let _ = layer.forward(&(&x * 7.0)).unwrap();
            }
        }
        for ((name, before), (_, after)) in before.iter().zip(&te::fp8_state_dict(&layer).unwrap()) {
            assert!(before.equal(after), "{name}");
        }
    }
    assert!(!is_fp8_enabled());
}

#[test]
fn no_rows_and_wrong_sizes() {
    let _alone = alone();
    let layer = te::Linear::new(8, 4).unwrap();
    let _fp8 = fp8_autocast(true, Some(hybrid())).unwrap();
    let empty = Tensor::zeros([0, 8], (Kind::Float, CPU)).set_requires_grad(true);
    let y = layer.forward(&empty).unwrap();
    assert_eq!(y.size(), [0, 4]);
    y.sum(Kind::Float).backward();
    assert_error!(layer.forward(&Tensor::zeros([2, 7], (Kind::Float, CPU))), "last dimension must be 8");
    assert_eq!(layer.forward(&waves(&[8], 0.0)).unwrap().size(), [4], "one row without a batch");
}

#[test]
fn a_weight_is_cast_at_the_first_microbatch_only() {
    let _alone = alone();
    let (x, layer) = (waves(&[3, 8], 0.0), te::Linear::new(8, 4).unwrap());
    set(&layer);
    let _fp8 = fp8_autocast(true, Some(hybrid())).unwrap();
    let _ = layer.forward(&x).unwrap();
    let first = layer.forward_microbatch(&x, true).unwrap();
    let _ = tch::no_grad(|| layer.weight.tensor().shallow_clone().fill_(0.0));
    let later = layer.forward_microbatch(&x, false).unwrap();
    assert!(first.equal(&later), "the kept weight counts");
    assert!(!first.equal(&layer.forward(&x).unwrap()));
}

#[test]
fn minimize_memory_gives_the_same_gradients() {
    let _alone = alone();
    let x = waves(&[3, 8], 0.0);
    let run = |minimize: bool| {
        let layer = te::Linear::builder(8, 4).minimize_memory(minimize).build().unwrap();
        set(&layer);
        step(&layer, &x, Some(&DelayedScaling::default().into()))
    };
    for (kept, again) in run(false).iter().zip(&run(true)) {
        assert!(kept.equal(again));
    }
}

/// A layer that is called twice, so that its scales change within a pass.
#[derive(Module)]
struct Twice {
    fc: te::Linear,
    is_checkpointed: bool,
}

impl Forward for Twice {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        let call = |x: &Tensor| -> anyhow::Result<Tensor> {
            match self.is_checkpointed {
                true => checkpoint_with(self, x, |net, x| Ok(net.fc.forward(x)?.relu().square())),
                false => Ok(self.fc.forward(x)?.relu().square()),
            }
        };
        call(&(call(input)? * 30.0))
    }
}

#[test]
fn a_recomputation_takes_the_scales_of_its_forward_pass_and_measures_nothing() {
    let _alone = alone();
    let run = |is_checkpointed: bool| {
        let net = Twice { fc: te::Linear::new(8, 8).unwrap(), is_checkpointed };
        set(&net);
        let results = step(&net, &waves(&[5, 8], 0.0), Some(&DelayedScaling::default().into()));
        let state = te::fp8_state_dict(&net).unwrap().into_iter().map(|(_, tensor)| tensor);
        results.into_iter().chain(state).collect::<Vec<_>>()
    };
    let (plain, checkpointed) = (run(false), run(true));
    for (index, (plain, checkpointed)) in plain.iter().zip(&checkpointed).enumerate() {
        assert!(plain.equal(checkpointed), "{index}: {plain} {checkpointed}");
    }
    // of a whole module, too: what is put into its histories before the backward pass is there after it
    let layer = te::Linear::new(8, 8).unwrap();
    set(&layer);
    let loss = {
        let _fp8 = fp8_autocast(true, Some(hybrid())).unwrap();
        checkpoint(&layer, &waves(&[5, 8], 0.0)).unwrap().sum(Kind::Float)
    };
    let forward = |state: Vec<(String, Tensor)>| {
        state.into_iter().filter(|(name, _)| !name.ends_with("_bwd") && !name.ends_with("update_amax"))
    };
    let mut state = te::fp8_state_dict(&layer).unwrap();
    for (_, history) in state.iter_mut().filter(|(name, _)| name.contains("amax_history_fwd")) {
        assert!(history.min().double_value(&[]) > 0.0, "the forward pass has measured");
        let _ = history.fill_(7.0);
    }
    te::load_fp8_state_dict(&layer, &state).unwrap();
    ModuleHooks::new().within(&layer, || loss.backward()).unwrap();
    let after: Vec<_> = forward(te::fp8_state_dict(&layer).unwrap()).collect();
    assert_same("measured before", &after, &forward(state).collect::<Vec<_>>());
    assert!(layer.weight.grad().defined());
}

#[test]
fn conversion_keeps_weights_and_skips_what_it_is_told_to() {
    let _alone = alone();
    let net = || {
        let inner = Sequential::new().add(Linear::new(4, 4).unwrap()).add(Linear::new(4, 2).unwrap());
        Sequential::new().add(Linear::new(8, 4).unwrap()).add(Relu).add(inner)
    };
    let converted = |settings: &Fp8Settings| {
        let net = net();
        let before: Vec<Tensor> = net.parameters().iter().map(|p| p.tensor().copy()).collect();
        let done = te::convert(&net, settings);
        assert!(net.parameters().iter().zip(&before).all(|(own, before)| own.tensor().equal(before)));
        done.map(|done| (done, te::convert(&net, settings).unwrap()))
    };
    let had = |layers| te::Converted::HadLayers(layers);
    assert_eq!(converted(&Fp8Settings::default()).unwrap(), (te::Converted::Layers(3), had(3)));
    let small = Fp8Settings { min_weights: 16, ..Fp8Settings::default() };
    assert_eq!(converted(&small).unwrap(), (te::Converted::Layers(2), had(2)));
    let named = Fp8Settings { exclude_layers: vec!["2".to_owned()], ..Fp8Settings::default() };
    assert_eq!(converted(&named).unwrap(), (te::Converted::Layers(1), had(1)));
    let wrong = Fp8Settings { exclude_layers: vec!["lm_head".to_owned()], ..Fp8Settings::default() };
    assert!(converted(&wrong).unwrap_err().to_string().contains("`lm_head` is no module"));

    let mut own = net();
    let plugin = HpuPrecisionPlugin { replace_layers: true, ..HpuPrecisionPlugin::new("fp8") };
    plugin.convert_modules(&mut own).unwrap();
    assert_eq!(te::convert(&own, &Fp8Settings::default()).unwrap(), had(3));
    let error = HpuPrecisionPlugin::new("bf16-mixed").convert_modules(&mut own).unwrap_err().to_string();
    assert!(error.contains("convert_modules is for precision fp8 alone"), "{error}");
}

#[test]
fn the_output_projection_of_attention_computes_in_float8() {
    let _alone = alone();
    let attention = MultiheadAttention::new(16, 2).unwrap();
    let x = waves(&[5, 3, 16], 0.0);
    let plain = attention.forward(&x).unwrap();
    assert_eq!(te::convert(&attention, &Fp8Settings::default()).unwrap(), te::Converted::Layers(1));
    assert!(plain.equal(&attention.forward(&x).unwrap()));
    let _fp8 = fp8_autocast(true, None).unwrap();
    let own = attention.forward(&x).unwrap();
    assert!(!own.equal(&plain) && relative(&own, &plain) < 0.15, "{}", relative(&own, &plain));
}

/// Output and gradients of attention whose factors went through float8, in float64; those of the backward pass through E5M2 at the nearest.
fn attention_through_float8(
    inputs: &[Tensor],
    grad: &Tensor,
    mask: Option<&Tensor>,
    forward: Kind,
) -> Vec<Tensor> {
    let back = Kind::Float8e5m2;
    let cast = |x: &Tensor, dtype: Kind| through_float8(&x.to_kind(Kind::Float), dtype, None);
    let [q, k, v] = [0, 1, 2].map(|index| cast(&inputs[index], forward));
    let scores = q.matmul(&k.transpose(-2, -1)) * 0.25;
    let scores = match mask {
        Some(mask) if mask.kind() == Kind::Bool => scores.masked_fill(&mask.logical_not(), f64::NEG_INFINITY),
        Some(mask) => scores + mask.to_kind(Kind::Double),
        None => scores,
    };
    let weights = scores.softmax(-1, Kind::Double);
    let output = cast(&weights, forward).matmul(&v);
    let [q, k, v] = [0, 1, 2].map(|index| cast(&inputs[index], back));
    let grad = cast(grad, back);
    let of_value = cast(&weights, back).transpose(-2, -1).matmul(&grad);
    let of_weights = grad.matmul(&v.transpose(-2, -1));
    let mean = (&of_weights * &weights).sum_dim_intlist([-1_i64].as_slice(), true, Kind::Double);
    let of_scores = cast(&((of_weights - mean) * weights * 0.25), back);
    vec![output, of_scores.matmul(&k), of_scores.transpose(-2, -1).matmul(&q), of_value]
}

#[test]
fn attention_in_float8_gives_the_products_of_its_casts() {
    let _alone = alone();
    let (shape, grad) = ([2, 3, 6, 16], waves(&[2, 3, 6, 16], 0.3));
    let inputs = [0.0, 1.0, 2.0].map(|phase| waves(&shape, phase));
    let run = |recipe: Option<&Recipe>, mask: Option<&Tensor>, is_causal: bool| {
        let attention = te::FusedAttention::new(0.0).unwrap();
        tch::manual_seed(3);
        let mut results = Vec::new();
        for _ in 0..3 {
            let inputs = inputs.each_ref().map(|input| input.copy().set_requires_grad(true));
            let [query, key, value] = &inputs;
            let y = {
                let _fp8 = recipe.map(|recipe| fp8_autocast(true, Some(recipe.clone())).unwrap());
                attention.attend(query, key, value, mask, is_causal).unwrap()
            };
            (&y * &grad).sum(Kind::Float).backward();
            results = [y.detach()].into_iter().chain(inputs.iter().map(|input| input.grad())).collect();
        }
        (results, te::fp8_state_dict(&attention).unwrap().len())
    };
    let earlier = Tensor::ones([6, 6], (Kind::Bool, CPU)).tril(0);
    let near = earlier.logical_and(&Tensor::ones([6, 6], (Kind::Bool, CPU)).triu(-2));
    let added = waves(&[6, 6], 3.0);
    for (mask, is_causal) in [(None, false), (None, true), (Some(&near), false), (Some(&added), false)] {
        let (plain, _) = run(None, mask, is_causal);
        for recipe in recipes() {
            if matches!(recipe, Recipe::RowwiseScaling(_)) {
                continue;
            }
            let (own, states) = run(Some(&recipe), mask, is_causal);
            assert_eq!(states > 0, matches!(recipe, Recipe::DelayedScaling(_)), "{recipe:?}");
            let seen = if is_causal { Some(&earlier) } else { mask };
            let is_hybrid = recipe.fp8_format() == Fp8Format::Hybrid;
            let forward = if is_hybrid { Kind::Float8e4m3fn } else { Kind::Float8e5m2 };
            let expected = attention_through_float8(&inputs, &grad, seen, forward);
            for (index, (own, expected)) in own.iter().zip(&expected).enumerate() {
                // weights and gradients of scores that lie between two codes may go to the other one in float32: one in a thousand or
                // so, by 2^-2 of its value. HYBRID rounds the gradients of output and scores at random, each with a deviation of 2^-3
                // of its value at most: the sum of squares doubles in differences from the mean of a row
                let limit = if is_hybrid && index > 0 { 0.35 } else { 0.01 };
                let error = relative(own, expected);
                assert!(error < limit, "{recipe:?}, {is_causal}, {index}: {error}");
            }
            for (own, plain) in own.iter().zip(&plain) {
                assert!(relative(own, plain) > 1e-3, "{recipe:?} computes in float8");
                assert_eq!((own.kind(), own.size()), (plain.kind(), plain.size()));
            }
        }
    }
    let _fp8 = fp8_autocast(true, Some(RowwiseScaling::default().into())).unwrap();
    let x = waves(&shape, 0.0);
    assert_error!(te::FusedAttention::new(0.0).unwrap().attend(&x, &x, &x, None, false), "RowwiseScaling");
}

#[test]
fn dropped_attention_weights_are_dropped_in_backward_too() {
    let _alone = alone();
    let attention = te::FusedAttention::new(0.5).unwrap();
    let _fp8 = fp8_autocast(true, Some(hybrid())).unwrap();
    tch::manual_seed(3);
    let value = waves(&[1, 1, 4, 8], 2.0).set_requires_grad(true);
    let x = Tensor::zeros([1, 1, 4, 8], (Kind::Float, CPU));
    let y = attention.attend(&x, &x, &value, None, false).unwrap();
    y.sum(Kind::Float).backward();
    // weights are 1/4, dropped or doubled: column sums of them are multiples of 1/2
    let sums = value.grad().select(3, 0) * 2.0;
    assert!(
        sums.equal(&sums.round()) && sums.min().double_value(&[]) < sums.max().double_value(&[]),
        "{sums}"
    );
}
