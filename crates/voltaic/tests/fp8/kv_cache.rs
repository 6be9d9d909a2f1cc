//! The cache of keys and values in float8: against libtorch's casts, by graphs, and in what memory.

use std::cell::RefCell;

use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use voltaic::Module;
use voltaic::generation::{CausalLm, GenerationConfig, Generations, Generator, KvCache};
use voltaic::models::{Gpt, GptConfig};
use voltaic::nn::quant::{self, Converted};
use voltaic::nn::{Callable, Embedding, Forward, KvCacheLayer, Linear, ModuleExt};
use voltaic::precision::fp8::{QuantConfig, QuantMode};

use crate::alone;
use crate::inference::{quantize, settings};
use crate::operators::{CPU, start_hpu};
use crate::runs::waves;

const VOCAB: i64 = 19;
const HEADS: i64 = 2;
const DIM: i64 = 4;

/// Attention over all tokens so far. It notes what it gives.
#[derive(Module)]
struct TwoHeads {
    tokens: Embedding,
    places: Embedding,
    qkv: Linear,
    k_cache: KvCacheLayer,
    v_cache: KvCacheLayer,
    head: Linear,
    #[module(skip)]
    logits: RefCell<Vec<Tensor>>,
}

impl TwoHeads {
    /// All numbers are eighths, so that keys and values are exact in float32 in whatever order they are summed.
    fn new() -> Self {
        let width = HEADS * DIM;
        let net = Self {
            tokens: Embedding::new(VOCAB, width).unwrap(),
            places: Embedding::new(40, width).unwrap(),
            qkv: Linear::new(width, 3 * width).unwrap(),
            k_cache: KvCacheLayer::new(),
            v_cache: KvCacheLayer::new(),
            head: Linear::new(width, VOCAB).unwrap(),
            logits: RefCell::default(),
        };
        for (number, parameter) in net.parameters().into_iter().enumerate() {
            parameter.set_data(&((waves(&parameter.size(), number as f64) * 12.0).round() / 8.0)).unwrap();
        }
        net
    }

    /// Queries, keys and values, `[batch, heads, time, dim]` each.
    fn states(&self, tokens: &Tensor, places: &Tensor) -> anyhow::Result<[Tensor; 3]> {
        let x = self.tokens.call(tokens)? + self.places.call(places)?;
        let qkv = self.qkv.call(&x)?.chunk(3, -1);
        Ok([0, 1, 2].map(|which| qkv[which].unflatten(-1, [HEADS, DIM]).transpose(1, 2)))
    }

    /// The logits after these tokens in float64, where keys and values are cast by libtorch with these scales.
    fn expected(&self, tokens: &[i64], casts: [Option<(f64, Kind)>; 2]) -> Tensor {
        let places = Tensor::arange(tokens.len() as i64, (Kind::Int64, CPU)).unsqueeze(0);
        let states = self.states(&Tensor::from_slice(tokens).unsqueeze(0), &places).unwrap();
        let [q, k, v] = states.map(|states| states.to_kind(Kind::Double));
        let cast = |states: Tensor, cast: Option<(f64, Kind)>| match cast {
            None => states,
            Some((scale, kind)) => {
                let most = if kind == Kind::Float8e4m3fn { 240.0 } else { 57344.0 };
                let codes = (states / scale).clamp(-most, most).to_kind(Kind::Float).to_kind(kind);
                codes.to_kind(Kind::Double) * scale
            }
        };
        let (k, v) = (cast(k, casts[0]), cast(v, casts[1]));
        let last = q.narrow(2, tokens.len() as i64 - 1, 1);
        let weights = (last.matmul(&k.transpose(-2, -1)) / (DIM as f64).sqrt()).softmax(-1, Kind::Double);
        let attended = weights.matmul(&v).transpose(1, 2).flatten(2, 3).squeeze_dim(1);
        let of = |parameter: &Tensor| parameter.to_kind(Kind::Double);
        attended.matmul(&of(&self.head.weight).tr()) + of(self.head.bias.as_ref().unwrap())
    }
}

impl CausalLm for TwoHeads {
    fn vocab_size(&self) -> i64 {
        VOCAB
    }

    fn context_length(&self) -> i64 {
        40
    }

    fn next_logits(&self, tokens: &Tensor, cache: &KvCache) -> anyhow::Result<Tensor> {
        let [q, k, v] = self.states(tokens, &cache.positions()?)?;
        let y = cache.attend_by(0, [&self.k_cache, &self.v_cache], &q, &k, &v)?;
        let logits = self.head.call(&cache.last(&y.transpose(1, 2).flatten(2, 3))?)?;
        self.logits.borrow_mut().push(logits.shallow_clone());
        Ok(logits)
    }
}

fn generated(net: &impl CausalLm, prompts: &[Vec<i64>], use_graph: bool) -> Generations {
    let config =
        GenerationConfig { max_new_tokens: 12, temperature: 0.0, use_graph, ..GenerationConfig::default() };
    Generator::new(net, config).unwrap().generate(prompts).unwrap()
}

fn tokens_of(done: &Generations) -> Vec<Vec<i64>> {
    done.sequences.iter().map(|sequence| sequence.tokens.clone()).collect()
}

/// The scale of each of the two, if it has one.
fn scales(net: &impl ModuleExt, kind: Kind) -> [Option<(f64, Kind)>; 2] {
    let named = quant::state_dict(net).unwrap();
    ["k_cache", "v_cache"].map(|fqn| {
        let found = named.iter().find(|(name, _)| *name == format!("{fqn}.input_scale"));
        found.map(|(_, scale)| (scale.double_value(&[0]), kind))
    })
}

fn apart(found: &Tensor, expected: &Tensor) -> f64 {
    let found = found.to_device(CPU).to_kind(Kind::Double);
    ((found - expected).abs().max() / expected.abs().max()).double_value(&[])
}

#[test]
fn attention_sees_what_casts_of_keys_and_values_give() {
    let _alone = alone();
    start_hpu();
    let folder = tempfile::tempdir().unwrap();
    let prompts = [vec![3, 1, 4, 1, 5, 9, 2, 6], vec![7, 7], vec![18]];
    let measured = |net: &TwoHeads| drop(generated(net, &prompts, false));
    let both = |more: Value| {
        let mut given = json!({"allowlist": {"types": ["KVCache"]}});
        given.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        given
    };
    for (given, kind, quantized) in [
        (both(json!({})), Kind::Float8e4m3fn, [true, true]),
        (both(json!({"fp8_config": "E5M2"})), Kind::Float8e5m2, [true, true]),
        (both(json!({"scale_method": "maxabs_arbitrary"})), Kind::Float8e4m3fn, [true, true]),
        (
            both(json!({"scale_method": "act_maxabs_hw_weights_pcs_maxabs_pow2"})),
            Kind::Float8e4m3fn,
            [true, true],
        ),
        (both(json!({"scale_method": "unit_scale"})), Kind::Float8e4m3fn, [true, true]),
        (both(json!({"blocklist": {"names": ["v_cache"]}})), Kind::Float8e4m3fn, [true, false]),
        (both(json!({"blocklist": {"names": ["k_cache"]}})), Kind::Float8e4m3fn, [false, true]),
    ] {
        let mut net = TwoHeads::new();
        net.eval();
        let plain = generated(&net, &prompts, false);
        quantize(&mut net, given.clone(), folder.path(), measured);
        let casts = scales(&net, kind);
        assert_eq!(casts.map(|cast| cast.is_some()), quantized, "{given}");
        net.logits.borrow_mut().clear();
        let alone = generated(&net, &prompts[..1], false);
        let mut tokens = prompts[0].clone();
        let noted = net.logits.take();
        assert_eq!(noted.len(), 12);
        let mut most_by_casts = 0.0_f64;
        for (logits, token) in noted.iter().zip(&alone.sequences[0].tokens) {
            let expected = net.expected(&tokens, casts);
            assert!(apart(logits, &expected) < 1e-5, "{given} after {tokens:?}");
            most_by_casts = most_by_casts.max(apart(&net.expected(&tokens, [None; 2]), &expected));
            tokens.push(*token);
        }
        assert!(most_by_casts > 1e-3, "{given}: casts change {most_by_casts}");
        // beside others, by a graph, and on an HPU
        let together = generated(&net, &prompts, false);
        assert_eq!(tokens_of(&together)[0], alone.sequences[0].tokens, "{given}");
        let parts = quantized.iter().map(|is| if *is { 1 } else { 4 }).sum::<usize>();
        assert_eq!(together.cache_bytes * 8, plain.cache_bytes * parts, "{given}");
        assert_eq!(tokens_of(&generated(&net, &prompts, true)), tokens_of(&together), "{given}");
        net.to_device(voltaic::Device::Hpu(0)).unwrap();
        for use_graph in [false, true] {
            let on_hpu = generated(&net, &prompts, use_graph);
            assert_eq!(tokens_of(&on_hpu), tokens_of(&together), "{given} graph {use_graph}");
            assert_eq!(on_hpu.cache_bytes, together.cache_bytes);
        }
    }
}

fn gpt(kind: Kind) -> Gpt {
    let config = GptConfig { vocab_size: VOCAB, n_layer: 2, n_head: 2, n_embd: 32, ..GptConfig::tiny() };
    let mut gpt = Gpt::new(config).unwrap();
    for (number, parameter) in gpt.parameters().into_iter().enumerate() {
        let values = waves(&parameter.size(), number as f64) * if parameter.dim() == 1 { 1.0 } else { 0.4 };
        parameter.set_data(&values).unwrap();
    }
    gpt.to_dtype(kind).unwrap();
    gpt.eval();
    gpt
}

#[test]
fn the_cache_of_a_gpt_takes_half_the_memory_of_bfloat16_and_is_measured_by_plain_passes() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let prompts = [vec![1, 2, 3, 4], vec![5, 6]];
    let passes = |gpt: &Gpt| {
        let tokens = Tensor::arange(48, (Kind::Int64, CPU)).remainder(VOCAB).view([2, 24]);
        drop(tch::no_grad(|| gpt.forward(&tokens).unwrap()));
    };
    let plain = generated(&gpt(Kind::BFloat16), &prompts, false);
    // two layers, keys and values, two sequences of 4 + 11 tokens, 32 numbers each
    assert_eq!(plain.cache_bytes, 2 * 2 * 2 * 15 * 32 * 2);
    for (given, bytes) in [
        (json!({}), plain.cache_bytes / 2),
        (json!({"blocklist": {"types": ["KVCache"]}}), plain.cache_bytes),
        (json!({"blocklist": {"types": ["VLLMKVCache"], "names": ["c_attn"]}}), plain.cache_bytes),
        (json!({"blocklist": {"names": ["h.1.attn"]}}), plain.cache_bytes * 3 / 4),
        // it has no scales for caches, which stay
        (json!({"scale_method": "maxabs_pow2"}), plain.cache_bytes),
    ] {
        let mut net = gpt(Kind::BFloat16);
        quantize(&mut net, given.clone(), folder.path(), passes);
        let done = generated(&net, &prompts, false);
        assert_eq!(done.cache_bytes, bytes, "{given}");
        assert_eq!(tokens_of(&generated(&net, &prompts, true)), tokens_of(&done), "{given}");
        let file = folder.path().join("gpt.safetensors");
        quant::save(&net, &file).unwrap();
        let mut loaded = gpt(Kind::BFloat16);
        quant::load(&mut loaded, &file).unwrap();
        assert_eq!(generated(&loaded, &prompts, false).sequences, done.sequences, "{given}");
        assert_eq!(generated(&loaded, &prompts, false).cache_bytes, bytes, "{given}");
    }
}

#[test]
fn files_know_the_format_of_a_cache_without_weights_beside_it() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let prompts = [vec![3, 1, 4, 1, 5, 9, 2, 6]];
    let mut net = TwoHeads::new();
    net.eval();
    let given = json!({"allowlist": {"types": ["KVCache"]}, "fp8_config": "E5M2"});
    quantize(&mut net, given, folder.path(), |net| drop(generated(net, &prompts, false)));
    let file = folder.path().join("cache.safetensors");
    quant::save(&net, &file).unwrap();
    let mut loaded = TwoHeads::new();
    loaded.eval();
    quant::load(&mut loaded, &file).unwrap();
    net.logits.borrow_mut().clear();
    let _ = [generated(&net, &prompts, false), generated(&loaded, &prompts, false)];
    for (own, other) in net.logits.take().iter().zip(loaded.logits.take()) {
        assert!(own.equal(&other));
    }
}

#[test]
fn a_cache_that_was_not_measured_is_named() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let mut net = TwoHeads::new();
    net.eval();
    let config = settings(json!({"dump_stats_path": folder.path().join("measure")}));
    let measure =
        quant::convert(&mut net, &QuantConfig { mode: QuantMode::Measure, ..config.clone() }).unwrap();
    assert_eq!(measure, Converted::Measured(4));
    let _ = net.qkv.forward(&Tensor::ones([1, HEADS * DIM], (Kind::Float, Device::Cpu))).unwrap();
    quant::finish_measurements(&net, folder.path()).unwrap();
    let done = quant::convert(&mut net, &config).unwrap();
    let unmeasured = ["k_cache", "v_cache", "head"].map(str::to_owned).to_vec();
    assert_eq!(done, Converted::Quantized { layers: 1, unmeasured });
    let config = GenerationConfig { max_new_tokens: 2, temperature: 0.0, ..GenerationConfig::default() };
    let error = Generator::new(&net, config).unwrap().generate(&[vec![1]]).unwrap_err();
    assert_contains!(format!("{error:#}"), "Layer 'k_cache' was called but was not quantized");
    // replays would not measure
    let mut net = TwoHeads::new();
    net.eval();
    quant::convert(&mut net, &settings(json!({"mode": "MEASURE"}))).unwrap();
    let config = GenerationConfig { use_graph: true, max_new_tokens: 4, ..GenerationConfig::default() };
    let error = Generator::new(&net, config).unwrap().generate(&[vec![1]]).unwrap_err();
    assert!(format!("{error:#}").contains("which replays do not do"), "{error:#}");
}
