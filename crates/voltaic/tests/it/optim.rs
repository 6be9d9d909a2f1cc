//! Optimizers and clipping against PyTorch's results; see fixtures/optim/make_fixtures.py.

#![allow(clippy::unwrap_used, clippy::panic, reason = "the helpers of tests may fail as the tests do")]

use std::collections::HashMap;
use std::path::PathBuf;

use serde_json::{Value, json};
use tch::{Kind, Tensor};
use voltaic::Error;
use voltaic::nn::{Member, Module, ModuleExt, Parameter};
use voltaic::optim::*;

const SHAPES: [(&str, &[i64]); 4] =
    [("fc1.weight", &[5, 3]), ("fc1.bias", &[5]), ("fc2.weight", &[2, 5]), ("scale", &[])];
const STEPS: usize = 10;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/optim").join(name)
}

pub(crate) fn json_fixture(name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(fixture(name)).unwrap()).unwrap()
}

fn tensor_fixture(name: &str) -> HashMap<String, Tensor> {
    Tensor::read_safetensors(fixture(name)).unwrap().into_iter().collect()
}

/// The script's `wave`.
pub(crate) fn wave(shape: &[i64], seed: usize, scale: f64) -> Tensor {
    let len = shape.iter().product::<i64>();
    let angle = Tensor::arange(len, (Kind::Double, tch::Device::Cpu)) * 0.7 + seed as f64 * 1.3 + 0.1;
    (angle.sin() * scale).to_kind(Kind::Float).reshape(shape)
}

fn params(dtype: Kind) -> Vec<(String, Parameter)> {
    let shapes = SHAPES.iter().enumerate();
    shapes
        .map(|(i, (name, shape))| ((*name).to_owned(), Parameter::new(wave(shape, i, 0.5).to_kind(dtype))))
        .collect()
}

/// Makes `grad` the gradient of `param`, through a backward pass.
fn set_grad(param: &Parameter, grad: &Tensor) {
    (param.tensor() * grad).sum(param.kind()).backward();
}

struct Case {
    config: OptimizerConfig,
    lr: f64,
    groups: bool,
    skips: bool,
    dtype: Kind,
}

impl Case {
    fn parse(case: &Value) -> Self {
        let dtype = if case["dtype"] == "float32" { Kind::Float } else { Kind::BFloat16 };
        Self {
            config: serde_json::from_value(
                json!({"class_path": case["class_path"], "init_args": case["init_args"]}),
            )
            .unwrap(),
            lr: case["init_args"]["lr"].as_f64().unwrap(),
            groups: case["groups"].as_bool().unwrap(),
            skips: case["skips"].as_bool().unwrap(),
            dtype,
        }
    }

    fn build(&self, params: &[(String, Parameter)]) -> Box<dyn Optimizer> {
        let groups = if self.groups {
            let (first, second) = params.split_at(2);
            vec![
                ParamGroupSpec::new(first.to_vec()),
                ParamGroupSpec::new(second.to_vec()).lr(self.lr * 0.5).weight_decay(0.2),
            ]
        } else {
            vec![ParamGroupSpec::new(params.to_vec())]
        };
        self.config.build(groups).unwrap()
    }

    fn train(
        &self,
        optimizer: &mut dyn Optimizer,
        params: &[(String, Parameter)],
        steps: std::ops::Range<usize>,
    ) {
        for step in steps {
            optimizer.zero_grad().unwrap();
            for (i, (_, param)) in params.iter().enumerate() {
                let skipped = self.skips && ((i == 1 && step % 3 == 0) || (i == 2 && step < 2));
                if !skipped {
                    let grad = wave(SHAPES[i].1, 100 + 10 * step + i, 0.3).to_kind(self.dtype);
                    set_grad(param, &grad);
                }
            }
            optimizer.step().unwrap();
        }
    }
}

/// Weights and state by name.
fn results(optimizer: &dyn Optimizer, params: &[(String, Parameter)]) -> HashMap<String, Tensor> {
    let weights = params.iter().map(|(name, param)| (name.clone(), param.detach()));
    weights.chain(optimizer.state_dict().tensors).collect()
}

fn assert_close(actual: &Tensor, expected: &Tensor, rtol: f64, atol: f64, what: &str) {
    assert_eq!(actual.size(), expected.size(), "{what}");
    assert_eq!(actual.kind(), expected.kind(), "{what}");
    let (a, e) = (actual.to_kind(Kind::Double), expected.to_kind(Kind::Double));
    let excess = ((&a - &e).abs() - (e.abs() * rtol + atol)).max().double_value(&[]);
    assert!(excess <= 0.0, "{what}: {a} is not {e}");
}

fn assert_bits(actual: &HashMap<String, Tensor>, expected: &HashMap<String, Tensor>, what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    for (name, tensor) in expected {
        assert!(actual[name].equal(tensor), "{what}: {name}");
    }
}

#[test]
fn optimizers_match_pytorch_loop_and_fused() {
    assert!(compare_with_fixture("optimizers") > 500);
}

#[test]
fn adagrad_and_others_match_pytorch_and_deepspeed() {
    assert!(compare_with_fixture("more") > 300);
}

/// Trains as each case of a fixture did, and compares weights and state. Gives how many tensors that were.
fn compare_with_fixture(fixture: &str) -> usize {
    // MKL's square roots are other ones on Intel's processors
    let is_intel = fixture == "more" && voltaic::kernels::is_intel();
    let maker = if is_intel { "_intel" } else { "" };
    let expected = tensor_fixture(&format!("{fixture}{maker}.safetensors"));
    let mut compared = 0;
    for case in json_fixture(&format!("{fixture}.json")).as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let case = Case::parse(case);
        let params = params(case.dtype);
        let mut optimizer = case.build(&params);
        case.train(optimizer.as_mut(), &params, 0..STEPS);
        let results = results(optimizer.as_ref(), &params);
        for kind in ["loop", "fused"] {
            let prefix = format!("{name}/{kind}/");
            let expected: Vec<_> =
                expected.iter().filter_map(|(key, t)| Some((key.strip_prefix(&prefix)?, t))).collect();
            if expected.is_empty() {
                continue;
            }
            assert_eq!(results.len(), expected.len(), "{prefix}: {:?}", results.keys());
            // float32: a few roundings in ten steps; bfloat16: one unit in the last place
            let (rtol, atol) = if case.dtype == Kind::Float { (1e-6, 1e-7) } else { (8e-3, 1e-4) };
            for (key, tensor) in expected {
                let actual = results.get(key).unwrap_or_else(|| panic!("{prefix}: no {key}"));
                assert_close(actual, tensor, rtol, atol, &format!("{prefix}{key}"));
                compared += 1;
            }
        }
    }
    compared
}

#[test]
fn loaded_state_continues_bit_for_bit() {
    let (first, more) = (json_fixture("optimizers.json"), json_fixture("more.json"));
    for case in first.as_array().unwrap().iter().chain(more.as_array().unwrap()) {
        let name = case["name"].as_str().unwrap();
        let case = Case::parse(case);
        let whole = params(case.dtype);
        let mut optimizer = case.build(&whole);
        case.train(optimizer.as_mut(), &whole, 0..STEPS);
        let expected = results(optimizer.as_ref(), &whole);

        for stop in [1, 4] {
            let first = params(case.dtype);
            let mut optimizer = case.build(&first);
            optimizer.param_groups_mut()[0].initial_lr = Some(0.1 + 0.2);
            case.train(optimizer.as_mut(), &first, 0..stop);
            let saved = optimizer.state_dict();
            let groups = saved.groups.to_string();
            let tensors = saved.tensors.iter().map(|(name, t)| (name.clone(), t.copy())).collect();

            let copies: Vec<_> =
                first.iter().map(|(n, p)| (n.clone(), Parameter::new(p.detach().copy()))).collect();
            let mut resumed = case.build(&copies);
            // what the resumed optimizer did before is forgotten
            let values: Vec<Tensor> = copies.iter().map(|(_, p)| p.detach().copy()).collect();
            case.train(resumed.as_mut(), &copies, 7..8);
            for ((_, param), value) in copies.iter().zip(&values) {
                param.set_data(value).unwrap();
            }
            resumed.param_groups_mut()[0].lr = 99.0;
            let groups = serde_json::from_str(&groups).unwrap();
            resumed.load_state_dict(OptimizerState { tensors, groups }).unwrap();
            assert_eq!(resumed.param_groups()[0].initial_lr, Some(0.1 + 0.2));
            case.train(resumed.as_mut(), &copies, stop..STEPS);
            assert_bits(&results(resumed.as_ref(), &copies), &expected, name);
        }
    }
}

#[test]
fn a_gradient_with_other_strides_is_read_in_the_right_order() {
    let grad = wave(&[5, 3], 9, 1.0);
    let updated = |transposed: bool| {
        let param = Parameter::new(Tensor::zeros([5, 3], (Kind::Float, tch::Device::Cpu)));
        let mut sgd =
            Sgd::new(1.0).build(vec![ParamGroupSpec::new([("w".to_owned(), param.clone())])]).unwrap();
        set_grad(&param, &grad);
        if transposed {
            let columns = grad.tr().contiguous().tr();
            assert_ne!(columns.stride(), grad.stride());
            param.grad().set_data(&columns);
        }
        sgd.step().unwrap();
        param.detach()
    };
    assert!(updated(true).equal(&updated(false)));
    assert!(updated(true).equal(&-&grad));
}

#[test]
fn float64_and_float32_parameters_share_a_group() {
    let double = Parameter::new(wave(&[3], 1, 1.0).to_kind(Kind::Double));
    let single = Parameter::new(wave(&[3], 1, 1.0));
    let group = ParamGroupSpec::new([("d".to_owned(), double.clone()), ("s".to_owned(), single.clone())]);
    let mut adam = Adam::new(0.1).build(vec![group]).unwrap();
    for _ in 0..3 {
        adam.zero_grad().unwrap();
        set_grad(&double, &wave(&[3], 5, 1.0).to_kind(Kind::Double));
        set_grad(&single, &wave(&[3], 5, 1.0));
        adam.step().unwrap();
    }
    assert_eq!(double.kind(), Kind::Double);
    assert_close(&double.detach().to_kind(Kind::Float), &single.detach(), 1e-5, 1e-6, "double and single");
}

#[test]
fn no_gradient_means_no_change_and_no_state() {
    let params = params(Kind::Float);
    let before: Vec<Tensor> = params.iter().map(|(_, p)| p.detach().copy()).collect();
    let mut adam = AdamW::new(0.1).build(vec![ParamGroupSpec::new(params.clone())]).unwrap();
    adam.step().unwrap();
    set_grad(&params[0].1, &wave(&[5, 3], 1, 1.0));
    adam.zero_grad().unwrap();
    assert!(!params[0].1.grad().defined());
    adam.step().unwrap();
    assert!(adam.state_dict().tensors.is_empty());
    for ((_, param), before) in params.iter().zip(&before) {
        assert!(param.detach().equal(before));
    }
}

#[test]
fn clipping_matches_pytorch() {
    let expected = tensor_fixture("clip.safetensors");
    let with_grads = || {
        let params = params(Kind::Float);
        for (i, (_, param)) in params.iter().enumerate().filter(|(i, _)| *i != 1) {
            set_grad(param, &wave(SHAPES[i].1, 50 + i, 2.0));
        }
        params
    };
    let check = |case: &str, params: &[(String, Parameter)]| {
        for (name, param) in params {
            match expected.get(&format!("{case}/{name}")) {
                Some(grad) => assert_close(&param.grad(), grad, 1e-6, 0.0, &format!("{case}/{name}")),
                None => assert!(!param.grad().defined()),
            }
        }
    };
    for (case, max_norm, norm_type) in [
        ("norm_1.0_2.0", 1.0, 2.0),
        ("norm_1000.0_2.0", 1000.0, 2.0),
        ("norm_0.3_1.0", 0.3, 1.0),
        ("norm_0.5_inf", 0.5, f64::INFINITY),
        ("norm_2.0_3.0", 2.0, 3.0),
        ("norm_0.0_2.0", 0.0, 2.0),
    ] {
        let params = with_grads();
        let norm = clip_grad_norm_of_type(params.iter().map(|(_, p)| p), max_norm, norm_type).unwrap();
        assert_close(&norm, &expected[&format!("{case}/norm")], 1e-6, 0.0, case);
        check(case, &params);
    }
    let params = with_grads();
    clip_grad_value(params.iter().map(|(_, p)| p), 0.7).unwrap();
    check("value_0.7", &params);
}

#[test]
fn clipping_passes_non_finite_norms_on_and_refuses_senseless_bounds() {
    let param = Parameter::new(wave(&[3], 1, 1.0));
    let norm = clip_grad_norm([&param], 1.0).unwrap();
    assert_eq!((norm.double_value(&[]), norm.size()), (0.0, vec![]));
    set_grad(&param, &Tensor::from_slice(&[1.0_f32, f32::INFINITY, 2.0]));
    assert_eq!(clip_grad_norm([&param], 1.0).unwrap().double_value(&[]), f64::INFINITY);
    for bound in [-1.0, f64::NAN] {
        for error in
            [clip_grad_norm([&param], bound).unwrap_err(), clip_grad_value([&param], bound).unwrap_err()]
        {
            assert!(error.to_string().starts_with("trainer.gradient_clip_val: "), "{error}");
        }
    }
}

/// The text of an error in settings; checks that each line has a dotted key and a remedy.
pub(crate) fn config_error<T>(result: voltaic::Result<T>) -> String {
    let Err(Error::Config(error)) = result else { panic!("there is no ConfigError") };
    for problem in &error.problems {
        assert!(problem.key.contains('.') && !problem.problem.remedy.is_empty(), "{problem}");
    }
    error.to_string()
}

#[test]
fn settings_that_pytorch_refuses_are_refused_with_key_and_remedy() {
    let groups = || vec![ParamGroupSpec::new(params(Kind::Float))];
    let table: Vec<(Box<dyn BuildOptimizer>, &str)> = vec![
        (Box::new(Sgd::new(-0.1)), "optimizer.init_args.lr: -0.1 is not a finite number >= 0; set"),
        (Box::new(Sgd::new(f64::NAN)), "optimizer.init_args.lr: NaN"),
        (Box::new(Sgd::new(0.1).momentum(-1.0)), "optimizer.init_args.momentum: -1"),
        (Box::new(Sgd::new(0.1).weight_decay(-1.0)), "optimizer.init_args.weight_decay: -1"),
        (Box::new(Sgd::new(0.1).nesterov(true)), "optimizer.init_args.nesterov: true with momentum 0"),
        (
            Box::new(Sgd::new(0.1).momentum(0.9).dampening(0.1).nesterov(true)),
            "optimizer.init_args.nesterov: true with momentum 0.9 and dampening 0.1; set",
        ),
        (Box::new(Adam::new(f64::INFINITY)), "optimizer.init_args.lr: inf"),
        (Box::new(Adam::new(0.1).betas((1.0, 0.9))), "optimizer.init_args.betas[0]: 1 is not"),
        (Box::new(AdamW::new(0.1).betas((0.9, -0.1))), "optimizer.init_args.betas[1]: -0.1 is not"),
        (Box::new(AdamW::new(0.1).eps(-1e-8)), "optimizer.init_args.eps: -0.00000001"),
    ];
    for (config, expected) in table {
        assert_contains!(config_error(config.build(groups())), expected);
    }
    // all problems at once
    let error = config_error(AdamW::new(-1.0).betas((2.0, 2.0)).eps(-1.0).build(groups()));
    assert_eq!(error.lines().count(), 4, "{error}");
    // of a group
    let own = vec![ParamGroupSpec::new(params(Kind::Float)).lr(-1.0).momentum(0.9)];
    let error = config_error(AdamW::new(0.1).build(own));
    assert!(error.contains("optimizer.param_groups[0].lr: -1"), "{error}");
    assert!(error.contains("optimizer.param_groups[0].momentum: is not a setting of AdamW"), "{error}");
}

/// A group may set those of the nine settings for itself that its optimizer has.
#[test]
fn groups_have_the_settings_of_their_optimizer() {
    type Set = fn(ParamGroupSpec) -> ParamGroupSpec;
    let settings: [(&str, Value, Set); 9] = [
        ("lr", json!(0.25), |group| group.lr(0.25)),
        ("weight_decay", json!(0.25), |group| group.weight_decay(0.25)),
        ("maximize", json!(true), |group| group.maximize(true)),
        ("momentum", json!(0.25), |group| group.momentum(0.25)),
        ("dampening", json!(0.25), |group| group.dampening(0.25)),
        ("nesterov", json!(false), |group| group.nesterov(false)),
        ("betas", json!([0.25, 0.5]), |group| group.betas((0.25, 0.5))),
        ("eps", json!(0.25), |group| group.eps(0.25)),
        ("amsgrad", json!(true), |group| group.amsgrad(true)),
    ];
    for class in OptimizerConfig::CLASSES {
        let mut init_args = json!({});
        if *class == "SGD" {
            init_args = json!({"momentum": 0.5, "nesterov": true}); // so that the group changes something
        }
        let config: OptimizerConfig =
            serde_json::from_value(json!({"class_path": class, "init_args": init_args})).unwrap();
        let known = json!(config)["init_args"].clone();
        for (key, value, set) in &settings {
            let shapes: &[&[i64]] = if *class == "Muon" { &[&[3, 2]] } else { &[&[3, 2], &[3]] };
            let params = shapes.iter().map(|shape| {
                let weight = Tensor::zeros(*shape, (Kind::Float, tch::Device::Cpu));
                (format!("weight{}", shape.len()), Parameter::new(weight))
            });
            let mut group = ParamGroupSpec::new(params);
            if *key == "dampening" && *class == "SGD" {
                group = group.nesterov(false); // which goes with no dampening
            }
            let built = config.build(vec![set(group)]);
            if known.get(*key).is_none() {
                let expected = format!("optimizer.param_groups[0].{key}: is not a setting of {class}");
                assert_contains!(config_error(built), &expected);
                continue;
            }
            let groups = built.unwrap().state_dict().groups;
            let is_set = groups.as_array().unwrap().iter().any(|group| group.get(*key) == Some(value));
            assert!(is_set, "{class} ignores the {key} of a group: {groups}");
        }
    }
}

#[test]
fn parameters_that_cannot_be_trained_are_refused() {
    let float = (Kind::Float, tch::Device::Cpu);
    let table: Vec<(Vec<(&str, Parameter)>, &str)> = vec![
        (vec![], "optimizer.param_groups: there are no parameters"),
        (
            vec![("w", Parameter::new(Tensor::zeros([2], (Kind::ComplexFloat, tch::Device::Cpu))))],
            "ComplexFloat",
        ),
        (vec![("w", Parameter::new(Tensor::zeros([1, 3], float).expand([2, 3], false)))], "gaps or overlaps"),
    ];
    for (params, expected) in table {
        let params = params.into_iter().map(|(name, param)| (name.to_owned(), param));
        assert_contains!(config_error(Adam::default().build(vec![ParamGroupSpec::new(params)])), expected);
    }
    let params = params(Kind::Float);
    let twice = vec![ParamGroupSpec::new(params.clone()), ParamGroupSpec::new(params[..1].to_vec())];
    let error = config_error(Adam::default().build(twice));
    assert!(error.contains("param_groups[1].params: fc1.weight appears more than once"), "{error}");
    let error = config_error(Adam::default().build(Vec::new()));
    assert!(error.contains("optimizer.param_groups: there are no parameters"), "{error}");
}

#[test]
fn a_sparse_gradient_is_an_error_that_names_the_parameter() {
    let table = Parameter::new(wave(&[5, 3], 1, 1.0));
    let mut sgd =
        Sgd::new(0.1).build(vec![ParamGroupSpec::new([("wte".to_owned(), table.clone())])]).unwrap();
    let rows = Tensor::embedding(table.tensor(), &Tensor::from_slice(&[1_i64, 3]), -1, false, true);
    rows.sum(Kind::Float).backward();
    assert_error!(sgd.step(), "SGD: the gradient of wte is sparse; compute it densely");
}

#[test]
fn a_parameter_cast_after_the_first_step_is_an_error_with_its_name() {
    let params = params(Kind::Float);
    let mut adam = Adam::new(0.1).build(vec![ParamGroupSpec::new(params.clone())]).unwrap();
    for (_, param) in &params {
        set_grad(param, &Tensor::ones_like(param.tensor()));
    }
    adam.step().unwrap();
    adam.zero_grad().unwrap();
    let (_, weight) = &params[0];
    weight.set_data(&weight.detach().to_kind(Kind::Double)).unwrap();
    set_grad(weight, &Tensor::ones_like(weight.tensor()));
    assert_error!(adam.step(), "Adam: fc1.weight is Double[5, 3] on Cpu, but its exp_avg is Float");
}

#[test]
fn a_state_that_does_not_fit_is_refused_with_all_mismatches_and_changes_nothing() {
    let case = |params: &[(String, Parameter)]| {
        let mut adam = Adam::new(0.1).build(vec![ParamGroupSpec::new(params.to_vec())]).unwrap();
        for (_, param) in params {
            set_grad(param, &Tensor::ones_like(param.tensor()));
        }
        adam.step().unwrap();
        adam
    };
    let params = params(Kind::Float);
    let mut adam = case(&params);
    let mut state = adam.state_dict();
    let before: HashMap<String, Tensor> =
        adam.state_dict().tensors.into_iter().map(|(n, t)| (n, t.copy())).collect();
    state.tensors.retain(|(name, _)| name != "exp_avg.fc2.weight");
    state.tensors.push(("exp_avg.fc3.weight".to_owned(), Tensor::from(0.0_f32)));
    state.tensors[0].1 = wave(&[3, 5], 0, 1.0);
    state.groups[0]["params"][3] = json!("shift");
    state.groups[0]["lr"] = json!(7.0);
    let error = adam.load_state_dict(state).unwrap_err().to_string();
    for part in [
        "state dict does not fit Adam: ",
        "exp_avg.fc1.weight has shape [3, 5], not [5, 3]",
        "missing exp_avg.fc2.weight",
        "unexpected exp_avg.fc3.weight",
        "missing scale in param group 0",
        "unexpected shift in param group 0",
    ] {
        assert!(error.contains(part), "{error}\nlacks {part}");
    }
    assert_eq!(adam.param_groups()[0].lr, 0.1);
    assert_bits(&adam.state_dict().tensors.into_iter().collect(), &before, "state after the refusal");

    let sgd = Sgd::new(0.1).build(vec![ParamGroupSpec::new(params.clone())]).unwrap();
    assert_error!(adam.load_state_dict(sgd.state_dict()), "param group 0 is not one of Adam");
}

#[test]
fn class_paths_are_pytorchs_and_mistakes_get_a_hint() {
    let read = |text: &str| serde_json::from_str::<OptimizerConfig>(text).map_err(|e| e.to_string());
    for text in [r#"{"class_path": "SGD"}"#, r#"{"class_path": "torch.optim.SGD", "init_args": {}}"#] {
        assert_eq!(read(text), Ok(Sgd::default().into()));
    }
    assert_eq!(
        read(r#"{"class_path": "AdamW", "init_args": {"lr": 0.5, "betas": [0.8, 0.9]}}"#),
        Ok(AdamW::new(0.5).betas((0.8, 0.9)).into())
    );
    let schedule = |text: &str| serde_json::from_str::<LrSchedulerConfig>(text).map_err(|e| e.to_string());
    for name in ["StepLR", "StepLr", "torch.optim.lr_scheduler.StepLR"] {
        let text = format!(r#"{{"class_path": "{name}", "init_args": {{"step_size": 3}}}}"#);
        assert_eq!(schedule(&text), Ok(StepLr::new(3, 0.1).into()));
    }
    for (text, expected) in [
        (
            r#"{"class_path": "AdmW"}"#,
            "AdmW is not an optimizer; did you mean AdamW? there are SGD, Adam, AdamW, Adagrad",
        ),
        (r#"{"class_path": "Xyz"}"#, "Xyz is not an optimizer; there are SGD, Adam, AdamW, Adagrad"),
        (r#"{"class_path": "Adam", "init_args": {"lrr": 1}}"#, "init_args.lrr of Adam: unknown field `lrr`"),
        (r#"{"class_path": "Adam", "init_args": {"betas": [0.9]}}"#, "init_args.betas of Adam: "),
        (r#"{"class_path": "Adam", "args": {}}"#, "unknown field `args`"),
    ] {
        assert_error!(read(text), expected);
    }
    assert_error!(schedule(r#"{"class_path": "CosineAnealingLR"}"#), "did you mean CosineAnnealingLR?");
    assert_error!(schedule(r#"{"class_path": "StepLR"}"#), "init_args of StepLR: missing field `step_size`");
}

struct Pair {
    weight: Parameter,
    frozen: Parameter,
}

impl Module for Pair {
    fn members<'a>(&'a self, visit: &mut dyn FnMut(&str, Member<'a>)) {
        visit("weight", Member::Parameter(&self.weight));
        visit("frozen", Member::Parameter(&self.frozen));
    }

    fn children_mut<'a>(&'a mut self, _visit: &mut dyn FnMut(&str, &'a mut dyn Module)) {}
}

fn pair() -> Pair {
    let pair =
        Pair { weight: Parameter::new(wave(&[3], 1, 1.0)), frozen: Parameter::new(wave(&[3], 2, 1.0)) };
    let _ = pair.frozen.set_requires_grad(false);
    pair
}

#[test]
fn optimizers_take_all_parameters_and_leave_frozen_ones_alone() {
    let hook = || -> anyhow::Result<Optimizers> { AdamW::new(1e-3).into() };
    let net = pair();
    let mut built = hook().unwrap().build(&net).unwrap();
    assert_eq!(built.len(), 1);
    let groups = built[0].optimizer.param_groups();
    let names: Vec<&str> = groups[0].params().iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!((groups.len(), names), (1, vec!["weight", "frozen"]));
    assert!(built[0].scheduler.is_none());
    // a frozen parameter has state from its first gradient on
    let mut step_with_state = || {
        (net.weight.tensor() + net.frozen.tensor()).sum(Kind::Float).backward();
        built[0].optimizer.step().unwrap();
        built[0].optimizer.state_dict().tensors.iter().filter(|(name, _)| name.ends_with(".frozen")).count()
    };
    let before = net.frozen.tensor().copy();
    assert_eq!(step_with_state(), 0);
    assert!(net.frozen.tensor().equal(&before));
    let _ = net.frozen.set_requires_grad(true);
    assert_eq!(step_with_state(), 3, "step and two averages");
    assert!(!net.frozen.tensor().equal(&before));

    let net = pair();
    let groups = [ParamGroupSpec::new(net.named_parameters()).lr(0.5)];
    let spec = LrSchedulerSpec::new(StepLr::new(1, 0.5)).interval(Interval::Step).frequency(2).name("rate");
    let optimizers = Optimizers::new(Sgd::new(0.1)).groups(groups).scheduler(spec).and(Adam::new(0.2));
    let mut built = optimizers.build(&net).unwrap();
    assert_eq!(built[0].optimizer.param_groups()[0].params().len(), 2);
    let ConfiguredOptimizer { optimizer, scheduler: Some(schedule) } = &mut built[0] else { panic!() };
    assert_eq!((schedule.interval, schedule.frequency), (Interval::Step, 2));
    assert_eq!((schedule.name.as_deref(), &schedule.monitor), (Some("rate"), &None));
    schedule.scheduler.step(optimizer.param_groups_mut(), None).unwrap();
    assert_eq!(optimizer.param_groups()[0].lr, 0.25);
    assert_eq!(optimizer.param_groups()[0].initial_lr, Some(0.5));
    assert!(Optimizers::none().build(&net).unwrap().is_empty());
}

#[test]
fn a_plateau_schedule_needs_a_monitor_and_the_others_take_none() {
    let build = |spec: LrSchedulerSpec| Optimizers::new(Sgd::new(0.1)).scheduler(spec).build(&pair());
    assert_contains!(
        config_error(build(ReduceLrOnPlateau::default().into())),
        "lr_scheduler.monitor: is not set, but ReduceLROnPlateau follows a metric; "
    );
    assert_contains!(
        config_error(build(LrSchedulerSpec::new(StepLr::new(1, 0.5)).monitor("val_loss"))),
        "lr_scheduler.monitor: val_loss is set, but StepLR follows no metric; "
    );
    let error = config_error(build(LrSchedulerSpec::new(StepLr::new(1, 0.5)).frequency(0)));
    assert!(error.contains("lr_scheduler.frequency: 0"), "{error}");
    let built = build(LrSchedulerSpec::new(ReduceLrOnPlateau::default()).monitor("val_loss")).unwrap();
    assert_eq!(built[0].scheduler.as_ref().unwrap().monitor.as_deref(), Some("val_loss"));
}

/// Adam without correction of its moments, as DeepSpeed has it: the moments as they are.
#[test]
fn adam_without_bias_correction_takes_the_moments_as_they_are() {
    let params = params(Kind::Float);
    let config = AdamW::new(0.01).bias_correction(false).weight_decay(0.1);
    let mut optimizer = config.build(vec![ParamGroupSpec::new(params.clone())]).unwrap();
    let mut expected: Vec<[Tensor; 3]> = params
        .iter()
        .map(|(_, param)| {
            let weights = param.detach().to_kind(Kind::Double);
            [weights.copy(), weights.zeros_like(), weights.zeros_like()]
        })
        .collect();
    for step in 0..STEPS {
        optimizer.zero_grad().unwrap();
        for (i, (_, param)) in params.iter().enumerate() {
            let grad = wave(SHAPES[i].1, 100 + 10 * step + i, 0.3);
            set_grad(param, &grad);
            let grad = grad.to_kind(Kind::Double);
            let [weights, mean, square] = &mut expected[i];
            *mean = &*mean * 0.9 + &grad * 0.1;
            *square = &*square * 0.999 + &grad * &grad * 0.001;
            *weights = &*weights * (1.0 - 0.01 * 0.1) - &*mean / (square.sqrt() + 1e-8) * 0.01;
        }
        optimizer.step().unwrap();
    }
    for ((name, param), [weights, ..]) in params.iter().zip(&expected) {
        assert_close(&param.detach(), &weights.to_kind(Kind::Float), 1e-5, 1e-6, name);
    }
    let steps = optimizer.state_dict().tensors.into_iter().filter(|(name, _)| name.starts_with("step."));
    assert!(steps.map(|(_, count)| count).all(|count| count.double_value(&[]) == STEPS as f64));
}
