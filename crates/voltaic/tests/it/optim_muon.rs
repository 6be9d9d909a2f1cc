//! Muon against PyTorch's; see fixtures/optim/make_muon.py.

#![allow(clippy::unwrap_used, reason = "the helpers of tests may fail as the tests do")]

use std::collections::HashMap;

use serde_json::{Value, json};
use tch::{Kind, Tensor};
use voltaic::nn::Parameter;
use voltaic::optim::{BuildOptimizer, OptimizerConfig, ParamGroupSpec};

use crate::optim::wave;

const SHAPES: [(&str, [i64; 2]); 3] = [("wide", [3, 8]), ("tall", [9, 4]), ("square", [6, 6])];

fn muon(init_args: Value) -> OptimizerConfig {
    serde_json::from_value(json!({"class_path": "torch.optim.Muon", "init_args": init_args})).unwrap()
}

#[test]
fn muon_gives_pytorchs_weights() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/optim/muon.safetensors");
    let expected: HashMap<String, Tensor> = Tensor::read_safetensors(path).unwrap().into_iter().collect();
    for (case, init_args) in [
        ("plain", json!({"lr": 0.02})),
        ("adamw_size", json!({"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0})),
        ("no_nesterov", json!({"lr": 0.05, "nesterov": false, "momentum": 0.8, "ns_steps": 3})),
    ] {
        let shapes = SHAPES.iter().enumerate();
        let params: Vec<(String, Parameter)> = shapes
            .map(|(i, (name, shape))| ((*name).to_owned(), Parameter::new(wave(shape, i, 0.5))))
            .collect();
        let mut optimizer = muon(init_args).build(vec![ParamGroupSpec::new(params.clone())]).unwrap();
        for step in 0..10 {
            optimizer.zero_grad().unwrap();
            for (i, (_, param)) in params.iter().enumerate() {
                let grad = wave(&param.size(), 100 + 10 * step + i, 0.3);
                (param.tensor() * grad).sum(Kind::Float).backward();
            }
            optimizer.step().unwrap();
        }
        let compare = |name: &str, own: &Tensor, tolerance: f64| {
            let expected = &expected[&format!("{case}/{name}")];
            let difference = (own - expected).abs().max().double_value(&[]);
            assert!(difference <= tolerance, "{case} {name}: differs by {difference}");
        };
        for (name, tensor) in optimizer.state_dict().tensors {
            compare(&name, &tensor, 1e-6);
        }
        for (name, param) in &params {
            compare(name, &param.detach(), 2e-3); // ten updates whose elements are bfloat16
        }
    }
}

#[test]
fn muon_is_for_matrices() {
    let vector = ("bias".to_owned(), Parameter::new(wave(&[3], 0, 1.0)));
    let error = muon(json!({"ns_steps": 2})).build(vec![ParamGroupSpec::new([vector])]).err().unwrap();
    let error = error.to_string();
    assert!(error.contains("bias has shape [3], and Muon is for matrices; give it to another"), "{error}");
    let matrix = ("weight".to_owned(), Parameter::new(wave(&[3, 3], 0, 1.0)));
    let wrong = muon(json!({"ns_steps": 100, "momentum": 1.0}));
    let error = wrong.build(vec![ParamGroupSpec::new([matrix])]).err().unwrap().to_string();
    assert!(error.contains("ns_steps") && error.contains("momentum"), "{error}");
}
