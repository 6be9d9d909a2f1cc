//! Layers of which each rank has a slice: outputs and gradients are those of the whole layer.

use std::sync::Arc;

use voltaic::distributed::ProcessGroup;
use voltaic::models::{Gpt, GptConfig};
use voltaic::nn::functional::cross_entropy;
use voltaic::nn::parallel::{
    ColwiseParallel, ParallelPlan, ParallelStyle, RowwiseParallel, parallelize_module,
};
use voltaic::nn::{
    AttentionMask, Embedding, Forward, LayerNorm, Linear, ModuleExt, MultiheadAttention, quant,
};
use voltaic::precision::fp8::QuantConfig;
use voltaic::{Kind, Module, Tensor};

use crate::distributed::as_ranks;

const CPU: tch::Device = tch::Device::Cpu;
const SEED: u64 = 7;

fn numbers(size: &[i64]) -> Tensor {
    let count: i64 = size.iter().product();
    (Tensor::arange(count, (Kind::Double, CPU)) * 12.9898).sin().to_kind(Kind::Float).reshape(size)
}

fn tokens(vocab: i64, size: [i64; 2]) -> Tensor {
    (Tensor::arange(size[0] * size[1], (Kind::Int64, CPU)) * 7 + 3).remainder(vocab).reshape(size)
}

fn assert_close(what: &str, found: &Tensor, expected: &Tensor) {
    assert_eq!(found.size(), expected.size(), "{what}");
    let difference = (found - expected).abs().max().double_value(&[]);
    let scale = expected.abs().max().double_value(&[]).max(1.0);
    assert!(difference <= 1e-5 * scale, "{what} differs by {difference}");
}

/// Compares a divided module with the whole one: `run` gives outputs for an input. Ranks begin with different weights.
fn compare<M: Module>(
    name: &str,
    group: &Arc<ProcessGroup>,
    plan: &ParallelPlan,
    make: impl Fn() -> voltaic::Result<M>,
    input: &Tensor,
    run: impl Fn(&M, &Tensor) -> anyhow::Result<Tensor>,
) {
    let made = |seed| {
        voltaic::ffi::manual_seed(seed).unwrap();
        make().unwrap()
    };
    let (whole, divided) = (made(SEED), made(SEED + group.rank() as u64));
    parallelize_module(&divided, group, plan).unwrap();
    parallelize_module(&divided, group, plan).unwrap(); // once more changes nothing
    let with_grad = input.is_floating_point();
    let inputs = [0, 1].map(|_| input.detach().set_requires_grad(with_grad));
    let outputs = [run(&whole, &inputs[0]).unwrap(), run(&divided, &inputs[1]).unwrap()];
    assert_close(name, &outputs[1], &outputs[0]);
    for output in &outputs {
        (output * numbers(&output.size())).sum(Kind::Float).backward();
    }
    if with_grad {
        assert_close(&format!("{name}: gradient of the input"), &inputs[1].grad(), &inputs[0].grad());
    }
    let mut num_divided = 0;
    for ((fqn, own), (_, all)) in divided.named_parameters().into_iter().zip(whole.named_parameters()) {
        let expected = match own.tensor_shard() {
            Some(shard) => {
                num_divided += 1;
                assert_eq!(own.size(), shard.local_shape(), "{name}: {fqn}");
                assert_ne!(own.size(), all.size(), "{name}: {fqn} is whole");
                shard.slice(&all.grad()).unwrap()
            }
            None => all.grad(),
        };
        assert_close(&format!("{name}: gradient of {fqn}"), &own.grad(), &expected);
    }
    assert!(num_divided > 0, "{name}");

    let (own, all) = (divided.state_dict(), whole.state_dict());
    assert_eq!(own.len(), all.len());
    for ((fqn, own), (_, all)) in own.iter().zip(&all) {
        assert!(own.equal(all), "{name}: {fqn} in the state dict");
    }
    let changed: Vec<(String, Tensor)> =
        all.iter().map(|(fqn, tensor)| (fqn.clone(), tensor * 0.5)).collect();
    divided.load_state_dict(&changed, true).unwrap();
    for ((fqn, own), (_, changed)) in divided.state_dict().iter().zip(&changed) {
        assert!(own.equal(changed), "{name}: {fqn} when it was loaded");
    }
}

#[derive(Module)]
struct Two {
    first: Linear,
    second: Linear,
}

impl Two {
    fn new() -> voltaic::Result<Self> {
        Ok(Self { first: Linear::new(10, 13)?, second: Linear::builder(13, 7).build()? })
    }
}

impl Forward for Two {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        self.second.forward(&self.first.forward(input)?.relu())
    }
}

fn layer(fqn: &str, style: impl Into<ParallelStyle>) -> ParallelPlan {
    ParallelPlan::new().layer(fqn, style)
}

fn linear_layers(group: &Arc<ProcessGroup>) {
    let (col, row) = (ColwiseParallel::default(), RowwiseParallel::default());
    let x = numbers(&[3, 5, 10]);
    for (name, plan) in [
        ("columns and rows", layer("first", col).layer("second", row)),
        ("columns that all get", layer("first", col.gather_output())),
        ("rows of what all have", layer("second", row)),
        ("each for itself", layer("first", row).layer("second", row)),
    ] {
        compare(name, group, &plan, Two::new, &x, |two, x| two.forward(x));
    }
}

fn embeddings(group: &Arc<ProcessGroup>) {
    let make = || Embedding::builder(11, 8).padding_idx(5).build();
    let indices = tokens(11, [4, 6]);
    for (name, style) in [
        ("vocabulary", ParallelStyle::from(RowwiseParallel::default())),
        ("vectors", ColwiseParallel::default().gather_output().into()),
    ] {
        compare(name, group, &layer("", style), make, &indices, |table, x| table.forward(x));
    }
    let table = make().unwrap();
    parallelize_module(&table, group, &layer("", RowwiseParallel::default())).unwrap();
    for bad in [-1_i64, 11] {
        assert_error!(table.forward(&Tensor::from_slice(&[3, bad])), "give integers in 0..11");
    }
}

fn attention(group: &Arc<ProcessGroup>) {
    let make = || MultiheadAttention::builder(20, 5).batch_first(true).build();
    let plan = layer("", ColwiseParallel::default());
    let x = numbers(&[2, 6, 20]);
    let by_head = numbers(&[10, 6, 6]);
    compare("self-attention", group, &plan, make, &x, |attention, x| attention.forward(x));
    compare("cross-attention", group, &plan, make, &x, |attention, x| {
        let mask = AttentionMask { attn_mask: Some(&by_head), ..AttentionMask::default() };
        Ok(attention.attend(x, &(x * 2.0), &(x + 1.0), &mask)?)
    });
    compare("attention weights", group, &plan, make, &x, |attention, x| {
        let (output, weights) = attention.attend_with_weights(x, x, x, &AttentionMask::causal())?;
        Ok(Tensor::cat(&[output, weights], -1))
    });
}

/// By what its modules say of themselves.
fn language_model(group: &Arc<ProcessGroup>) {
    let config = GptConfig {
        vocab_size: 23,
        block_size: 12,
        n_layer: 2,
        n_head: 4,
        n_embd: 16,
        dropout: 0.0,
        bias: true,
    };
    let gpt = Gpt::new(config.clone()).unwrap();
    let mut plan = ParallelPlan::new();
    for (fqn, module) in gpt.named_modules() {
        plan = plan.below(&fqn, module.parallel_plan().unwrap_or_default());
    }
    let ids = tokens(23, [3, 12]);
    let targets = tokens(23, [3, 12]).roll([1_i64], [1_i64]);
    compare(
        "gpt",
        group,
        &plan,
        || Gpt::new(config.clone()),
        &ids,
        |gpt, ids| {
            let logits = gpt.forward(ids)?;
            let loss = cross_entropy(&logits.flatten(0, 1), &targets.flatten(0, 1))?;
            Ok(Tensor::cat(&[logits.flatten(0, -1) * 0.01, loss.unsqueeze(0)], 0))
        },
    );
}

fn all(group: &Arc<ProcessGroup>) {
    linear_layers(group);
    embeddings(group);
    attention(group);
    language_model(group);
}

#[test]
fn two_ranks_compute_what_one_does() {
    as_ranks(2, |group| all(&group));
}

#[test]
fn three_ranks_have_slices_of_different_sizes() {
    as_ranks(3, |group| all(&group));
}

#[test]
#[ignore = "repeats two_ranks_compute_what_one_does on more ranks"]
fn four_ranks_compute_what_one_does() {
    as_ranks(4, |group| all(&group));
}

#[derive(Module)]
struct Tied {
    table: Embedding,
    head: Linear,
    norm: LayerNorm,
}

#[test]
fn plans_that_do_not_fit_are_refused_and_change_nothing() {
    as_ranks(2, |group| {
        let head = Linear::builder(4, 8).bias(false).build().unwrap();
        let mut net = Tied { table: Embedding::new(8, 4).unwrap(), head, norm: LayerNorm::new(4).unwrap() };
        net.table.weight = net.head.weight.clone();
        let (col, row) = (ColwiseParallel::default(), RowwiseParallel::default());
        for (plan, expected) in [
            (layer("heads", col), "the plan names `heads`, and Tied has no such module"),
            (layer("norm", col), "the plan names norm, which is a LayerNorm"),
            (layer("head", col.unit(3)), "head (Linear): 8 features are not 1 part(s) in units of 3"),
            (layer("head", row.unit(4)), "1 units (heads) of 4 features for 2 ranks"),
            (layer("head", col.gather_output()), "table and head share a weight"),
            (layer("head", row).layer("table", row), "table and head share a weight"),
        ] {
            assert_error!(parallelize_module(&net, &group, &plan), expected);
            assert!(net.parameters().iter().all(|parameter| parameter.tensor_shard().is_none()));
        }
        let plan = layer("head", col.gather_output()).layer("table", row);
        parallelize_module(&net, &group, &plan).unwrap();
        assert_eq!(
            format!("{:?}", net.head),
            format!("Linear(4, 8, bias=false, colwise {} of 2)", group.rank())
        );
        assert_error!(net.head.forward(&numbers(&[2, 5])), "last dimension must be 4");
        let error = quant::convert(&mut net, &QuantConfig::measure()).unwrap_err().to_string();
        assert!(error.contains("the layers of Tied are sharded over ranks"), "{error}");
        let mut measured = Linear::new(8, 8).unwrap();
        quant::convert(&mut measured, &QuantConfig::measure()).unwrap();
        let error = parallelize_module(&measured, &group, &layer("", col)).unwrap_err().to_string();
        assert!(error.contains("measure or compute for fp8 inference; leave it out"), "{error}");
    });
}
