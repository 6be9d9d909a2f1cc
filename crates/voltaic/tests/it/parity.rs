//! Whole training runs against PyTorch's losses; see fixtures/parity/make_fixtures.py.

#![allow(clippy::unwrap_used, reason = "the helpers of tests may fail as the tests do")]

use std::path::PathBuf;

use serde_json::{Value, json};
use tch::{Kind, Tensor};
use voltaic::nn::Parameter;
use voltaic::optim::*;

const IMAGES: i64 = 16;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parity").join(name)
}

/// The script's `images`.
fn images(step: usize) -> (Tensor, Tensor) {
    let int = (Kind::Int64, tch::Device::Cpu);
    let double = (Kind::Double, tch::Device::Cpu);
    let classes = (Tensor::arange(IMAGES, int) * 7 + step as i64 * 3).remainder(10);
    let frequency = (classes.to_kind(Kind::Double) * 0.03 + 0.11).unsqueeze(1);
    let waves = (Tensor::arange(784, double) * frequency).sin();
    let index = Tensor::arange(IMAGES * 784, double).reshape([IMAGES, 784]);
    let disturbance = (index * 12.9 + step as f64 * 7.7).sin() * 0.5;
    let wrong = (&classes * 3 + step as i64 + 1).remainder(10);
    let labels = wrong.where_self(&Tensor::arange(IMAGES, int).remainder(4).eq(0), &classes);
    ((waves + disturbance).to_kind(Kind::Float), labels)
}

fn mlp_loss(params: &[(String, Parameter)], (x, y): &(Tensor, Tensor)) -> Tensor {
    let [w1, b1, w2, b2] = params else { panic!("an mlp has four parameters") };
    let hidden = x.linear(w1.1.tensor(), Some(b1.1.tensor())).relu();
    hidden.linear(w2.1.tensor(), Some(b2.1.tensor())).cross_entropy_for_logits(y)
}

/// Trains as the script's `train` does, from the saved weights.
fn train(losses: &Value, class_path: &str, variant: &str) -> Vec<f64> {
    let mut params: Vec<(String, Parameter)> = Tensor::read_safetensors(fixture("mlp.safetensors"))
        .unwrap()
        .into_iter()
        .map(|(name, tensor)| (name, Parameter::new(tensor)))
        .collect();
    let order = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"];
    params.sort_by_key(|(name, _)| order.iter().position(|n| n == name));
    let config = json!({"class_path": class_path, "init_args": losses["optimizers"][class_path]});
    let config: OptimizerConfig = serde_json::from_value(config).unwrap();
    let mut optimizer = config.build(vec![ParamGroupSpec::new(params.clone())]).unwrap();
    let mut schedule: Option<Box<dyn LrScheduler>> = match &losses["schedules"][variant] {
        Value::Null => None,
        _ if variant == "LambdaLR" => {
            Some(LambdaLr::new(|step| 1.0 / (1.0 + step as f64)).build(optimizer.param_groups_mut()).unwrap())
        }
        args => {
            let config = json!({"class_path": variant, "init_args": args});
            let config: LrSchedulerConfig = serde_json::from_value(config).unwrap();
            Some(config.build(optimizer.param_groups_mut()).unwrap())
        }
    };
    let accumulate =
        if variant == "accumulate" { losses["accumulate"].as_u64().unwrap() as usize } else { 1 };
    let mut results = Vec::new();
    for step in 0..losses["steps"].as_u64().unwrap() as usize {
        let mut total = 0.0;
        optimizer.zero_grad().unwrap();
        for micro in 0..accumulate {
            let loss = mlp_loss(&params, &images(step * accumulate + micro));
            (&loss / accumulate as f64).backward();
            total += loss.double_value(&[]) / accumulate as f64;
        }
        if variant == "clip" {
            let _norm =
                clip_grad_norm(params.iter().map(|(_, p)| p.tensor()), losses["clip"].as_f64().unwrap())
                    .unwrap();
        }
        optimizer.step().unwrap();
        if let Some(schedule) = &mut schedule {
            schedule.step(optimizer.param_groups_mut(), Some(total)).unwrap();
        }
        results.push(total);
    }
    results
}

fn mlp_matches(class_path: &str) {
    let losses: Value =
        serde_json::from_str(&std::fs::read_to_string(fixture("losses.json")).unwrap()).unwrap();
    let variants = losses["losses"]["mlp"][class_path].as_object().unwrap();
    assert_eq!(variants.len(), 15);
    for (variant, expected) in variants {
        let actual = train(&losses, class_path, variant);
        for (step, (actual, expected)) in actual.iter().zip(expected.as_array().unwrap()).enumerate() {
            let expected = expected.as_f64().unwrap();
            let error = (actual / expected - 1.0).abs();
            assert!(error < 1e-5, "{class_path} {variant} step {step}: {actual} is not {expected}");
        }
    }
}

#[test]
fn mlp_with_sgd_gives_pytorchs_losses() {
    mlp_matches("SGD");
}

#[test]
fn mlp_with_adam_gives_pytorchs_losses() {
    mlp_matches("Adam");
}

#[test]
fn mlp_with_adamw_gives_pytorchs_losses() {
    mlp_matches("AdamW");
}
