//! Scale sequences against a transcription of the formulas in Python (`fixtures/fp8/make_fixtures.py`), through the public layer.

use serde::Deserialize;
use tch::{Kind, Tensor};
use voltaic::nn::{Forward, ModuleExt, te};
use voltaic::precision::fp8::{
    AmaxComputeAlgo, AmaxFn, DelayedScaling, Fp8Format, ScalingFactorFn, fp8_autocast, set_measurement_mode,
};

use crate::alone;

#[derive(Deserialize)]
struct Case {
    format: String,
    algo: String,
    rows: usize,
    margin: i64,
    interval: u64,
    amaxes: Vec<f32>,
    scales: Vec<f32>,
}

/// A named tensor of the only layer's state.
pub fn state(layer: &te::Linear, name: &str) -> Tensor {
    let named = te::fp8_state_dict(layer).unwrap();
    named.into_iter().find(|(known, _)| known == &format!("/{name}")).unwrap().1
}

fn numbers(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.reshape(-1).to_kind(Kind::Float)).unwrap()
}

/// Runs the layer on inputs of these magnitudes, with gradients of the same; gives the scale of the input and that of the gradient
/// after each step.
fn run(layer: &te::Linear, recipe: &DelayedScaling, amaxes: &[f32]) -> Vec<[f32; 2]> {
    let step = |amax: &f32| {
        let x = Tensor::from_slice(&[*amax, 0.0, -amax / 2.0]).reshape([1, 3]);
        let y = {
            let _fp8 = fp8_autocast(true, Some(recipe.clone().into())).unwrap();
            layer.forward(&x).unwrap()
        };
        let grad = Tensor::from_slice(&[amax / 4.0, *amax]).reshape([1, 2]);
        (y * grad).sum(Kind::Float).backward();
        [numbers(&state(layer, "scale_fwd"))[0], numbers(&state(layer, "scale_bwd"))[0]]
    };
    amaxes.iter().map(step).collect()
}

#[test]
fn scales_are_those_of_the_formulas() {
    let _alone = alone();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/fp8/scales.json");
    let cases: Vec<Case> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut counts = [0; 2];
    for case in cases {
        let Case { format, algo, rows, margin, interval, amaxes, scales } = case;
        let algo = if algo == "max" { AmaxComputeAlgo::Max } else { AmaxComputeAlgo::MostRecent };
        let recipe = DelayedScaling {
            fp8_format: if format == "E4M3" { Fp8Format::Hybrid } else { Fp8Format::E5M2 },
            amax_compute_algo: algo,
            amax_history_len: rows,
            margin,
            interval,
            ..DelayedScaling::default()
        };
        let layer = te::Linear::builder(3, 2).bias(false).build().unwrap();
        let found = run(&layer, &recipe, &amaxes);
        let forward: Vec<f32> = found.iter().map(|scales| scales[0]).collect();
        assert_eq!(forward, scales, "{recipe:?}");
        counts[0] += 1;
        if format == "E5M2" {
            let backward: Vec<f32> = found.iter().map(|scales| scales[1]).collect();
            assert_eq!(backward, scales, "{recipe:?}");
            counts[1] += 1;
        }
    }
    assert_eq!(counts, [432, 216]);
}

#[test]
fn functions_of_the_user_make_scales() {
    let _alone = alone();
    let own_amax = |history: &Tensor| Ok(history.f_amax([0_i64].as_slice(), false)?.f_mul_scalar(2.0)?);
    let half = DelayedScaling {
        amax_compute_algo: AmaxComputeAlgo::Custom(AmaxFn::new(own_amax)),
        amax_history_len: 3,
        ..DelayedScaling::default()
    };
    let max = DelayedScaling {
        amax_compute_algo: AmaxComputeAlgo::Max,
        amax_history_len: 3,
        ..DelayedScaling::default()
    };
    let amaxes = [3.0, 100.0, 2.0, 1.0, 1.0, 1.0];
    let layer = || te::Linear::new(3, 2).unwrap();
    let found = run(&layer(), &half, &amaxes);
    let twice = run(&layer(), &max, &amaxes);
    assert_eq!(found[0], [1.0; 2]);
    assert!(found[1..].iter().zip(&twice[1..]).all(|(half, whole)| half.map(|scale| scale * 2.0) == *whole));

    let own_scale = |amax: &Tensor, scale: &Tensor, fp8_max: f64, recipe: &DelayedScaling| {
        assert_eq!((fp8_max, recipe.margin, amax.size()), (57344.0, 0, scale.size()));
        Ok((amax.f_mul_scalar(0.0)? + 0.3 * fp8_max) / amax)
    };
    let recipe = DelayedScaling {
        scaling_factor_compute_algo: Some(ScalingFactorFn::new(own_scale)),
        amax_history_len: 2,
        ..DelayedScaling::default()
    };
    let found = run(&layer(), &recipe, &[3.0, 100.0, 2.0]);
    let expected = [3.0, 100.0].map(|amax| (0.3 * 57344.0 / amax) as f32);
    assert_eq!([found[1][0], found[2][0]], expected, "the most recent one");
}

#[test]
fn histories_change_their_length_and_keep_the_newest() {
    let _alone = alone();
    let layer = te::Linear::new(3, 2).unwrap();
    let recipe = |rows| DelayedScaling {
        amax_history_len: rows,
        amax_compute_algo: AmaxComputeAlgo::Max,
        ..DelayedScaling::default()
    };
    let history = || {
        let rows = state(&layer, "amax_history_fwd").select(1, 0);
        let index = state(&layer, "amax_history_index_fwd").int64_value(&[0]);
        (numbers(&rows), index)
    };
    run(&layer, &recipe(3), &[1.0, 2.0, 3.0, 4.0]);
    assert_eq!(history(), (vec![4.0, 2.0, 3.0], 0));
    run(&layer, &recipe(2), &[5.0]);
    assert_eq!(history(), (vec![5.0, 4.0], 0), "3 and 4 stayed, then 5 came");
    run(&layer, &recipe(4), &[6.0]);
    assert_eq!(history(), (vec![5.0, 6.0, 0.0, 4.0], 1));
    run(&layer, &recipe(1), &[7.0]);
    assert_eq!(history(), (vec![7.0], 0));
}

#[test]
fn measuring_by_hand() {
    let _alone = alone();
    let layer = te::Linear::new(3, 2).unwrap();
    let recipe = DelayedScaling { interval: 100, ..DelayedScaling::default() };
    assert!(run(&layer, &recipe, &[4.0, 4.0]).iter().all(|scales| *scales == [1.0; 2]));
    set_measurement_mode(true, true);
    let measured = run(&layer, &recipe, &[8.0, 8.0]);
    set_measurement_mode(true, false);
    let unmeasured = run(&layer, &recipe, &[64.0, 64.0]);
    set_measurement_mode(false, false);
    assert_eq!((measured[0][0], measured[1][0]), (1.0, 4096.0));
    assert_eq!([unmeasured[0][0], unmeasured[1][0]], [4096.0; 2], "of the last that was measured");
}

#[test]
fn state_has_the_same_size_after_many_steps_and_layers_are_not_parameters() {
    let _alone = alone();
    let layer = te::Linear::new(3, 2).unwrap();
    let recipe = DelayedScaling { amax_history_len: 4, ..DelayedScaling::default() };
    let sizes = || {
        let named = te::fp8_state_dict(&layer).unwrap().into_iter();
        named.map(|(name, tensor)| (name, tensor.size())).collect::<Vec<_>>()
    };
    assert!(sizes().is_empty());
    run(&layer, &recipe, &[1.0]);
    let first = sizes();
    run(&layer, &recipe, &[1.0; 10_000]);
    assert_eq!(first, sizes());
    let names: Vec<String> = layer.state_dict().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["weight", "bias"]);
}
