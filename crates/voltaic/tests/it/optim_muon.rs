//! Muon against PyTorch's, and MuonWithAuxAdam against DeepSpeed's; see fixtures/optim/make_muon.py and make_muon_with_aux_adam.py.

#![allow(clippy::unwrap_used, reason = "the helpers of tests may fail as the tests do")]

use std::collections::HashMap;

use serde_json::{Value, json};
use tch::{Kind, Tensor};
use voltaic::nn::Parameter;
use voltaic::optim::{
    BuildOptimizer, GradientClip, GroupOptions, Optimizer, OptimizerConfig, ParamGroupSpec,
};

use crate::optim::wave;

type Shapes = &'static [(&'static str, &'static [i64])];

const SHAPES: Shapes = &[("wide", &[3, 8]), ("tall", &[9, 4]), ("square", &[6, 6])];

const ALL_SHAPES: Shapes = &[
    ("wide", &[3, 8]),
    ("tall", &[9, 4]),
    ("square", &[6, 6]),
    ("kernel", &[6, 2, 3, 2]),
    ("stack", &[2, 5, 3]),
    ("volume", &[2, 1, 2, 3, 4]),
    ("bias", &[5]),
    ("Embedding", &[4, 3]),
    ("lm_head", &[3, 4]),
];

fn fixture(name: &str) -> HashMap<String, Tensor> {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/optim").join(name);
    Tensor::read_safetensors(path).unwrap().into_iter().collect()
}

fn params(shapes: Shapes) -> Vec<(String, Parameter)> {
    let shapes = shapes.iter().enumerate();
    shapes.map(|(i, (name, shape))| ((*name).to_owned(), Parameter::new(wave(shape, i, 0.5)))).collect()
}

/// Ten steps with the gradients of the fixtures.
fn train(optimizer: &mut dyn Optimizer, params: &[(String, Parameter)]) {
    for step in 0..10 {
        optimizer.zero_grad().unwrap();
        for (i, (_, param)) in params.iter().enumerate() {
            let grad = wave(&param.size(), 100 + 10 * step + i, 0.3);
            (param.tensor() * grad).sum(Kind::Float).backward();
        }
        optimizer.step().unwrap();
    }
}

/// Compares weights within the first tolerance, and states within the second one.
fn compare(
    case: &str,
    expected: &HashMap<String, Tensor>,
    optimizer: &dyn Optimizer,
    params: &[(String, Parameter)],
    tolerances: (f64, f64),
) {
    let compare = |name: &str, own: &Tensor, tolerance: f64| {
        let expected = &expected[&format!("{case}/{name}")];
        let difference = (own - expected).abs().max().double_value(&[]);
        assert!(difference <= tolerance, "{case} {name}: differs by {difference}");
    };
    for (name, tensor) in optimizer.state_dict().tensors {
        compare(&name, &tensor, tolerances.1);
    }
    for (name, param) in params {
        compare(name, &param.detach(), tolerances.0);
    }
}

fn muon(init_args: Value) -> OptimizerConfig {
    serde_json::from_value(json!({"class_path": "torch.optim.Muon", "init_args": init_args})).unwrap()
}

#[test]
fn muon_gives_pytorchs_weights() {
    let expected = fixture("muon.safetensors");
    for (case, init_args) in [
        ("plain", json!({"lr": 0.02})),
        ("adamw_size", json!({"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0})),
        ("no_nesterov", json!({"lr": 0.05, "nesterov": false, "momentum": 0.8, "ns_steps": 3})),
    ] {
        let params = params(SHAPES);
        let mut optimizer = muon(init_args).build(vec![ParamGroupSpec::new(params.clone())]).unwrap();
        train(optimizer.as_mut(), &params);
        compare(case, &expected, optimizer.as_ref(), &params, (2e-3, 1e-6)); // ten updates whose elements are bfloat16
    }
}

fn muon_with_aux_adam(init_args: Value) -> OptimizerConfig {
    let class_path = "deepspeed.runtime.zero.muon.muon_optimizer.MuonWithAuxAdam";
    serde_json::from_value(json!({"class_path": class_path, "init_args": init_args})).unwrap()
}

#[test]
fn muon_with_aux_adam_gives_deepspeeds_weights() {
    let expected = fixture("muon_with_aux_adam.safetensors");
    for (case, init_args, tolerance) in [
        ("plain", json!({"lr": 0.02}), 1e-5),
        (
            "standard",
            json!({"muon_lr": 0.05, "momentum": 0.8, "ns_method": "standard", "weight_decay": 0.1}),
            5e-3, // ten updates whose elements are bfloat16
        ),
        (
            "gram",
            json!({
                "muon_lr": 0.05, "adam_lr": 0.01, "momentum": 0.8, "weight_decay": 0.1, "betas": [0.8, 0.9], "eps": 1e-6
            }),
            1e-5,
        ),
    ] {
        let params = params(ALL_SHAPES);
        let config = muon_with_aux_adam(init_args);
        let mut optimizer = config.build(vec![ParamGroupSpec::new(params.clone())]).unwrap();
        train(optimizer.as_mut(), &params);
        compare(case, &expected, optimizer.as_ref(), &params, (tolerance, 1e-6));
        assert_eq!(optimizer.state_dict().tensors.len(), 6 + 3 * 3, "a momentum, or two moments and a count");
    }
}

/// DeepSpeed's rule: the more specific setting counts, and each half takes those that it knows.
#[test]
fn groups_are_split_and_keep_their_own_settings() {
    let mut params = params(ALL_SHAPES);
    let of_second = params.split_off(3);
    let second = ParamGroupSpec::new(of_second).lr(0.5).weight_decay(0.3).momentum(0.7).eps(0.1);
    let config = muon_with_aux_adam(json!({"lr": 0.01, "adam_lr": 0.02, "weight_decay": 0.1}));
    let optimizer = config.build(vec![ParamGroupSpec::new(params), second]).unwrap();
    let groups: Vec<_> = optimizer
        .param_groups()
        .iter()
        .map(|group| {
            let names: Vec<&str> = group.params().iter().map(|(fqn, _)| fqn.as_str()).collect();
            (names.join(" "), group.lr, group.weight_decay, group.momentum())
        })
        .collect();
    let expected = [
        ("wide tall square", 0.01, 0.1, 0.95),
        ("kernel stack volume", 0.5, 0.3, 0.7),
        ("bias Embedding lm_head", 0.5, 0.3, 0.9),
    ];
    assert_eq!(groups, expected.map(|(names, lr, decay, momentum)| (names.to_owned(), lr, decay, momentum)));
    let GroupOptions::Adam { eps, betas, .. } = optimizer.param_groups()[2].options else { panic!() };
    assert_eq!((eps, betas), (0.1, (0.9, 0.95)));
}

#[test]
fn wrong_settings_of_muon_with_aux_adam_are_told_together() {
    let wrong = muon_with_aux_adam(json!({"muon_lr": -1.0, "momentum": 1.0, "betas": [0.9, 2.0]}));
    let group = ParamGroupSpec::new(params(SHAPES)).nesterov(true);
    let error = wrong.build(vec![group]).err().unwrap().to_string();
    for expected in
        ["init_args.muon_lr: -1 ", "init_args.momentum: 1 ", "betas[1]: 2 ", "[0].nesterov: is not a setting"]
    {
        assert!(error.contains(expected), "{expected}: {error}");
    }
    assert!(
        muon_with_aux_adam(json!({})).build(Vec::new()).err().unwrap().to_string().contains("no parameters")
    );
}

/// As DeepSpeed with ZeRO: the norm is that of updates and of the other gradients, and momentum has the gradients before.
#[test]
fn clipping_limits_the_updates_of_matrices() {
    let build = || {
        let params = params(ALL_SHAPES);
        let config = muon_with_aux_adam(json!({"lr": 0.1, "weight_decay": 0.2}));
        (config.build(vec![ParamGroupSpec::new(params.clone())]).unwrap(), params)
    };
    let backward = |params: &[(String, Parameter)]| {
        for (i, (_, param)) in params.iter().enumerate() {
            (param.tensor() * wave(&param.size(), 100 + i, 0.3)).sum(Kind::Float).backward();
        }
    };
    let ((mut clipped, own), (mut free, others)) = (build(), build());
    let before: Vec<Tensor> = own.iter().map(|(_, param)| param.detach().copy()).collect();
    for params in [&own, &others] {
        backward(params);
    }
    let squares = |of: &mut dyn Iterator<Item = Tensor>| {
        of.map(|x| x.square().sum(Kind::Double).double_value(&[])).sum()
    };
    let gradients: f64 = squares(&mut own.iter().skip(6).map(|(_, param)| param.grad()));
    let grads: Vec<Tensor> = own.iter().map(|(_, param)| param.grad().copy()).collect();
    let norm = clipped.grad_norm(2.0).unwrap().double_value(&[]);
    for ((_, param), grad) in own.iter().zip(&grads) {
        assert_eq!(param.grad(), *grad, "a norm changes nothing");
    }
    free.step().unwrap();
    clipped.clip(GradientClip::Norm(norm / 2.0)).unwrap();
    clipped.step().unwrap();
    let mut updates = Vec::new();
    for (((name, clipped), (_, free)), before) in own.iter().zip(&others).zip(&before).take(6) {
        let kept = before * (1.0 - 0.1 * 0.2);
        let (half, update) = (&kept - clipped.detach(), &kept - free.detach());
        assert!(half.allclose(&(&update * 0.5), 1e-4, 1e-6, false), "{name}");
        updates.push(update / 0.1);
    }
    let expected = (squares(&mut updates.into_iter()) + gradients).sqrt();
    assert!((norm - expected).abs() < 1e-3 * expected, "{norm}, not {expected}");
    let momenta = |optimizer: &dyn Optimizer| -> Vec<(String, Tensor)> {
        let tensors = optimizer.state_dict().tensors.into_iter();
        tensors.filter(|(name, _)| name.starts_with("momentum_buffer.")).collect()
    };
    assert_eq!(momenta(clipped.as_ref()), momenta(free.as_ref()));
}

#[test]
fn muon_is_for_matrices() {
    let vector = ("bias".to_owned(), Parameter::new(wave(&[3], 0, 1.0)));
    let error = muon(json!({"ns_steps": 2})).build(vec![ParamGroupSpec::new([vector])]).err().unwrap();
    let error = error.to_string();
    assert!(error.contains("bias has shape [3], and Muon is for matrices; give it to another"), "{error}");
    assert!(error.contains("or use MuonWithAuxAdam"), "{error}");
    let matrix = ("weight".to_owned(), Parameter::new(wave(&[3, 3], 0, 1.0)));
    let wrong = muon(json!({"ns_steps": 100, "momentum": 1.0}));
    assert_error!(wrong.build(vec![ParamGroupSpec::new([matrix])]), "ns_steps", "momentum");
}
