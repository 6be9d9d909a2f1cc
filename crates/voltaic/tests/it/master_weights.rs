//! Optimizers that update bfloat16 parameters in float32 copies.

use std::collections::HashMap;

use tch::{Kind, Tensor};
use voltaic::nn::Parameter;
use voltaic::optim::*;

const SHAPES: [&[i64]; 3] = [&[5, 3], &[5], &[]];
const STEPS: usize = 12;

type Named = Vec<(String, Parameter)>;

fn wave(shape: &[i64], seed: usize) -> Tensor {
    let len = shape.iter().product::<i64>();
    let angle = Tensor::arange(len, (Kind::Double, tch::Device::Cpu)) * 0.7 + seed as f64 * 1.3 + 0.1;
    angle.sin().to_kind(Kind::BFloat16).reshape(shape)
}

fn params(dtype: Kind) -> Named {
    let made = SHAPES.iter().enumerate();
    made.map(|(i, shape)| (format!("p{i}"), Parameter::new(wave(shape, i).to_kind(dtype)))).collect()
}

/// Steps with the same bfloat16 gradients, whatever the dtype; the second parameter has none in some steps.
fn train(optimizer: &mut dyn Optimizer, params: &Named, steps: std::ops::Range<usize>) {
    for step in steps {
        optimizer.zero_grad().unwrap();
        for (i, (_, param)) in params.iter().enumerate().filter(|(i, _)| *i != 1 || step % 3 != 0) {
            let grad = wave(SHAPES[i], 100 + 10 * step + i).to_kind(param.kind());
            (param.tensor() * grad).sum(param.kind()).backward();
        }
        optimizer.step().unwrap();
    }
}

/// Each optimizer with master weights and without.
fn optimizers() -> Vec<(&'static str, [Box<dyn BuildOptimizer>; 2])> {
    fn pair<O: BuildOptimizer + 'static>(make: impl Fn(bool) -> O) -> [Box<dyn BuildOptimizer>; 2] {
        [Box::new(make(true)), Box::new(make(false))]
    }
    vec![
        ("SGD", pair(|masters| Sgd::new(1e-3).master_weights(masters))),
        ("momentum", pair(|masters| Sgd::new(1e-3).momentum(0.9).weight_decay(0.1).master_weights(masters))),
        ("Adam", pair(|masters| Adam::new(1e-3).amsgrad(true).master_weights(masters))),
        ("AdamW", pair(|masters| AdamW::new(1e-3).master_weights(masters))),
    ]
}

#[test]
fn parameters_are_the_rounded_results_of_float32() {
    for (name, [with, without]) in optimizers() {
        let (half, full, lossy) = (params(Kind::BFloat16), params(Kind::Float), params(Kind::BFloat16));
        let build = |config: &dyn BuildOptimizer, params: &Named| {
            config.build(vec![ParamGroupSpec::new(params.clone())]).unwrap()
        };
        let mut optimizer = build(&*with, &half);
        train(&mut *optimizer, &half, 0..STEPS);
        train(&mut *build(&*with, &full), &full, 0..STEPS); // float32 needs no copies
        train(&mut *build(&*without, &lossy), &lossy, 0..STEPS);
        let state: HashMap<String, Tensor> = optimizer.state_dict().tensors.into_iter().collect();
        for ((fqn, half), (_, full)) in half.iter().zip(&full) {
            assert_eq!(half.kind(), Kind::BFloat16);
            assert!(half.equal(&full.to_kind(Kind::BFloat16)), "{name} {fqn}");
            assert!(state[&format!("master_param.{fqn}")].equal(full.tensor()), "{name} {fqn}");
        }
        let is_same = half.iter().zip(&lossy).all(|((_, a), (_, b))| a.equal(b.tensor()));
        assert!(!is_same, "{name}: bfloat16 alone loses nothing here, so the test shows nothing");
    }
}

/// Moments in float32 beside weights of 16 bits alone: as float32 whose weights are rounded after each step.
#[test]
fn states_may_be_float32_beside_weights_of_16_bits() {
    for (name, [_, without]) in optimizers() {
        let build = |params: &Named, are_float32: bool| {
            without.build(vec![ParamGroupSpec::new(params.clone()).float32_states(are_float32)]).unwrap()
        };
        let (half, full, lossy) = (params(Kind::BFloat16), params(Kind::Float), params(Kind::BFloat16));
        let (mut own, mut rounded) = (build(&half, true), build(&full, true));
        let mut of_halves = build(&lossy, false);
        train(&mut *of_halves, &lossy, 0..STEPS);
        for step in 0..STEPS {
            if step == 5 {
                let state = own.state_dict();
                own = build(&half, true);
                own.load_state_dict(state).unwrap();
            }
            train(&mut *own, &half, step..step + 1);
            train(&mut *rounded, &full, step..step + 1);
            for ((fqn, half), (_, full)) in half.iter().zip(&full) {
                full.set_data(&full.detach().to_kind(Kind::BFloat16).to_kind(Kind::Float)).unwrap();
                assert!(half.to_kind(Kind::Float).equal(full.tensor()), "{name} {fqn}, step {step}");
            }
        }
        let state = own.state_dict().tensors;
        for (name, tensor) in &state {
            assert!(tensor.kind() == Kind::Float && !name.starts_with("master_param"), "{name}");
        }
        let expected = rounded.state_dict().tensors;
        let same = state.iter().zip(&expected).all(|((a, x), (b, y))| a == b && x.equal(y));
        assert!(same && state.len() == expected.len(), "{name}");
        let halves: HashMap<String, Tensor> = of_halves.state_dict().tensors.into_iter().collect();
        let is_rounded = |(name, tensor): &(String, Tensor)| !halves[name].to_kind(Kind::Float).equal(tensor);
        assert!(
            state.is_empty() || state.iter().any(is_rounded),
            "{name}: states of 16 bits lose nothing here"
        );
    }
}

#[test]
fn they_are_saved_and_left_out_or_missed_by_others() {
    for (name, [with, without]) in optimizers() {
        let whole = params(Kind::BFloat16);
        train(&mut *with.build(vec![ParamGroupSpec::new(whole.clone())]).unwrap(), &whole, 0..STEPS);

        let first = params(Kind::BFloat16);
        let mut optimizer = with.build(vec![ParamGroupSpec::new(first.clone())]).unwrap();
        train(&mut *optimizer, &first, 0..5);
        let mut resumed = with.build(vec![ParamGroupSpec::new(first.clone())]).unwrap();
        resumed.load_state_dict(optimizer.state_dict()).unwrap();
        train(&mut *resumed, &first, 5..STEPS);
        for ((fqn, resumed), (_, whole)) in first.iter().zip(&whole) {
            assert!(resumed.equal(whole.tensor()), "{name} {fqn}");
        }

        let mut plain = without.build(vec![ParamGroupSpec::new(first.clone())]).unwrap();
        plain.load_state_dict(resumed.state_dict()).unwrap();
        let left = plain.state_dict().tensors;
        assert!(
            left.iter().all(|(state, _)| !state.starts_with("master_param")),
            "{name}: they are left out"
        );
        train(&mut *plain, &first, 1..2);
        let state = plain.state_dict();
        if state.tensors.is_empty() {
            continue;
        }
        // without any masters the weights are taken for them, and some of them are too few
        let mut some = resumed.state_dict();
        some.tensors.retain(|(name, _)| name != "master_param.p0");
        assert_error!(resumed.load_state_dict(some), "missing master_param.p0");
        resumed.load_state_dict(state).unwrap();
        train(&mut *resumed, &first, 2..3);
        let masters = resumed.state_dict().tensors.into_iter();
        let masters: HashMap<String, Tensor> = masters
            .filter_map(|(name, tensor)| Some((name.strip_prefix("master_param.")?.to_owned(), tensor)))
            .collect();
        for (fqn, param) in &first {
            let master = &masters[fqn];
            assert_eq!(master.kind(), Kind::Float, "{name} {fqn}");
            assert!(master.to_kind(Kind::BFloat16).equal(param.tensor()), "{name} {fqn}");
        }
    }
}

/// What is written to a weight counts; the copy is not taken for it.
#[test]
fn what_is_written_to_a_weight_or_its_copy_is_stepped() {
    let sgd = |params: &Named| {
        Sgd::new(1e-3).master_weights(true).build(vec![ParamGroupSpec::new(params.clone())]).unwrap()
    };
    let ones = Tensor::full([5, 3], 0.75, (Kind::Float, tch::Device::Cpu));
    let finer = Tensor::full([5, 3], 0.1, (Kind::Float, tch::Device::Cpu)); // not a number of bfloat16
    let writes: [(&Tensor, &dyn Fn(&mut dyn Optimizer, &Named)); 3] = [
        (&ones, &|_, params| params[0].1.tensor().detach().copy_(&ones)),
        (&finer, &|optimizer, _| optimizer.set_full_value("p0", ParamValue::Fp32Weight, &finer).unwrap()),
        (&finer, &|optimizer, _| {
            optimizer.set_master_weights(&[("p0".to_owned(), finer.shallow_clone())]).unwrap();
        }),
    ];
    for (number, (written, write)) in writes.into_iter().enumerate() {
        for saves in [false, true] {
            let params = params(Kind::BFloat16);
            let mut optimizer = sgd(&params);
            train(&mut *optimizer, &params, 0..3);
            write(&mut *optimizer, &params);
            if saves {
                let state = optimizer.state_dict();
                optimizer.load_state_dict(state).unwrap();
            }
            train(&mut *optimizer, &params, 3..4);
            let expected = written - wave(SHAPES[0], 130).to_kind(Kind::Float) * 1e-3;
            let masters = optimizer.master_weights().unwrap();
            let difference = (&masters[0].1 - &expected).abs().max().double_value(&[]);
            assert!(
                masters[0].0 == "p0" && difference < 1e-7,
                "write {number}, saves: {saves}: {difference}"
            );
            assert!(params[0].1.tensor().equal(&masters[0].1.to_kind(Kind::BFloat16)));
        }
    }
}

/// An edit counts where it changed the weight: the copies of all other elements keep their digits.
#[test]
fn an_edit_counts_where_it_changed_the_weight() {
    for (name, [with, _]) in optimizers() {
        let [(edited, mut own), (plain, mut expected)] = [(), ()].map(|()| {
            let params = params(Kind::BFloat16);
            let optimizer = with.build(vec![ParamGroupSpec::new(params.clone())]).unwrap();
            (params, optimizer)
        });
        for step in 0..STEPS {
            train(&mut *own, &edited, step..step + 1);
            train(&mut *expected, &plain, step..step + 1);
            let clamp = |weight: &Tensor| drop(weight.shallow_clone().clamp_(-100.0, 100.0));
            tch::no_grad(|| edited.iter().for_each(|(_, param)| clamp(param.tensor())));
        }
        let expected = expected.master_weights().unwrap();
        for ((fqn, own), (_, expected)) in own.master_weights().unwrap().iter().zip(&expected) {
            assert!(own.equal(expected), "{name} {fqn}");
        }
        let _ = tch::no_grad(|| edited[0].1.tensor().shallow_clone().get(2).fill_(3.0));
        let _ = expected[0].1.get(2).fill_(3.0);
        assert!(own.master_weights().unwrap()[0].1.equal(&expected[0].1), "{name}: one row is written");
    }
}

/// ZeRO saves copies of parameters that have had no gradient yet, beside which there are no states.
#[test]
fn a_copy_alone_is_taken() {
    for (name, [with, _]) in optimizers() {
        let all = params(Kind::BFloat16);
        let mut optimizer = with.build(vec![ParamGroupSpec::new(all.clone())]).unwrap();
        train(&mut *optimizer, &all, 0..3);
        let mut state = optimizer.state_dict();
        state.tensors.retain(|(own, _)| !own.ends_with(".p1") || own == "master_param.p1");
        let find = |state: &OptimizerState, own: &str| {
            state.tensors.iter().find(|(name, _)| name == own).map(|(_, tensor)| tensor.copy())
        };
        let copy = find(&state, "master_param.p1").unwrap();
        let mut resumed = with.build(vec![ParamGroupSpec::new(all.clone())]).unwrap();
        resumed.load_state_dict(state).unwrap();
        assert!(find(&resumed.state_dict(), "master_param.p1").unwrap().equal(&copy), "{name}");
        train(&mut *resumed, &all, 4..5);
        assert!(!find(&resumed.state_dict(), "master_param.p1").unwrap().equal(&copy), "{name}");
    }
}

#[test]
fn a_configuration_file_can_ask_for_them() {
    let text = r#"{"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.1, "master_weights": true}}"#;
    let config: OptimizerConfig = serde_json::from_str(text).unwrap();
    assert_eq!(config, OptimizerConfig::AdamW(AdamW::new(0.1).master_weights(true)));
}
