//! Metrics give torchmetrics' values (fixtures/metrics/make_fixtures.py).

use serde_json::Value;
use tch::{Kind, Tensor};
use voltaic::metrics::{
    Accuracy, Auroc, Average, ConfusionMatrix, F1Score, MeanMetric, MeanSquaredError, Metric, Perplexity,
};

use crate::probe::{Probe, loaders, silent};

const CPU: tch::Device = tch::Device::Cpu;
const SIZE: i64 = 10;
const CLASSES: i64 = 4;

fn inputs(batch: i64) -> (Tensor, Tensor) {
    let i = Tensor::arange(SIZE * CLASSES, (Kind::Double, CPU)) + 100 * batch;
    let logits = (i * 1.7).sin().reshape([SIZE, CLASSES]).to_kind(Kind::Float);
    let target = (Tensor::arange(SIZE, (Kind::Int64, CPU)) * 5 + batch * 2).remainder(7).remainder(CLASSES);
    (logits, target)
}

fn binary(batch: i64) -> (Tensor, Tensor) {
    let i = Tensor::arange(SIZE, (Kind::Double, CPU));
    let scores = ((i * 2.3 + batch).sin() * 4).round() / 8 + 0.5;
    let target = (Tensor::arange(SIZE, (Kind::Int64, CPU)) * 5 + batch).remainder(3).remainder(2);
    (scores.to_kind(Kind::Float), target)
}

/// Compares a metric over the batches with torchmetrics, also with the batches in two metrics that are merged.
fn check<M: Metric>(name: &str, make: impl Fn() -> M, update: impl Fn(&M, i64)) {
    let text =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/metrics/metrics.json"));
    let all: Value = serde_json::from_str(&text.unwrap()).unwrap();
    let expected: Vec<f64> = serde_json::from_value(all[name].clone()).unwrap();
    let numbers = |metric: &M| {
        Vec::<f64>::try_from(metric.compute().unwrap().flatten(0, -1).to_kind(Kind::Double)).unwrap()
    };
    let (whole, first, second) = (make(), make(), make());
    assert!(whole.compute().expect_err("empty").to_string().contains("update has to be called"));
    for batch in 0..3 {
        update(&whole, batch);
        update(if batch == 0 { &first } else { &second }, batch);
    }
    second.merge(&first.state().named().unwrap()).unwrap();
    for metric in [&whole, &second] {
        let found = numbers(metric);
        assert_eq!(found.len(), expected.len(), "{name}");
        for (a, b) in found.iter().zip(&expected) {
            assert!((a - b).abs() <= 1e-6 * b.abs().max(1.0), "{name}: {found:?} for {expected:?}");
        }
    }
    whole.reset();
    assert!(whole.compute().is_err() && whole.state().named().unwrap().is_empty());
}

#[test]
fn values_are_torchmetrics() {
    for (name, average) in [
        ("micro", Average::Micro),
        ("macro", Average::Macro),
        ("weighted", Average::Weighted),
        ("none", Average::None),
    ] {
        let add = |m: &Accuracy, batch| m.update(&inputs(batch).0, &inputs(batch).1).unwrap();
        check(&format!("accuracy_{name}"), || Accuracy::new(CLASSES, average), add);
        let add = |m: &F1Score, batch| m.update(&inputs(batch).0, &inputs(batch).1).unwrap();
        check(&format!("f1_{name}"), || F1Score::new(CLASSES, average), add);
    }
    let add = |m: &Accuracy, batch| m.update(&inputs(batch).0, &inputs(batch).1).unwrap();
    for k in [2, 3] {
        for (name, average) in [("micro", Average::Micro), ("macro", Average::Macro)] {
            check(&format!("accuracy_top{k}_{name}"), || Accuracy::new(CLASSES, average).top_k(k), add);
        }
    }
    check("accuracy_ignore", || Accuracy::new(CLASSES, Average::Micro).ignore_index(1), add);
    check(
        "confusion",
        || ConfusionMatrix::new(CLASSES),
        |m, b| m.update(&inputs(b).0, &inputs(b).1).unwrap(),
    );
    check("auroc_binary", Auroc::binary, |m, b| m.update(&binary(b).0, &binary(b).1).unwrap());
    check(
        "auroc_macro",
        || Auroc::multiclass(CLASSES),
        |m, b| {
            m.update(&inputs(b).0.softmax(1, Kind::Float), &inputs(b).1).unwrap();
        },
    );
    let error = |m: &MeanSquaredError, b| m.update(&inputs(b).0, &inputs(b).0.cos()).unwrap();
    check("mse", MeanSquaredError::new, error);
    check("rmse", || MeanSquaredError::new().squared(false), error);
    let add = |m: &Perplexity, b| m.update(&inputs(b).0.unsqueeze(0), &inputs(b).1.unsqueeze(0)).unwrap();
    check("perplexity", Perplexity::new, add);
    check("perplexity_ignore", || Perplexity::new().ignore_index(1), add);
    check("mean", MeanMetric::new, |m, b| m.update(&inputs(b).0.mean(Kind::Float), (b + 1) as f64).unwrap());
}

#[test]
fn shapes_that_do_not_fit_are_named() {
    let (logits, target) = inputs(0);
    let errors = [
        Accuracy::new(CLASSES, Average::Micro).update(&logits, &target.narrow(0, 0, 3)),
        Accuracy::new(CLASSES, Average::Micro).top_k(9).update(&logits, &target),
        Auroc::binary().update(&logits, &target),
        MeanSquaredError::new().update(&logits, &target),
        Perplexity::new().update(&logits, &logits),
        MeanMetric::new().merge(&[("other".to_owned(), logits)]),
    ];
    for error in errors {
        assert_contains!(error.expect_err("refused").to_string(), '[', "shape");
    }
}

#[test]
fn a_metric_is_logged_with_its_value_over_the_epoch() {
    let accuracy = std::sync::Arc::new(Accuracy::new(2, Average::Micro));
    let of_step = std::sync::Arc::clone(&accuracy);
    let mut net = Probe {
        validate: Some(Box::new(move |_, loss, ctx| {
            let right = Tensor::from_slice(&[0_i64, 1, 1]);
            let preds = if ctx.batch_idx() == 0 { right.shallow_clone() } else { right.zeros_like() };
            of_step.update(&preds, &right)?;
            // each batch gives the value so far; the last one is that of the epoch
            ctx.log("val_acc", of_step.compute()?).reduce_fx(voltaic::module::ReduceFx::Min);
            Ok(loss)
        })),
        ..Probe::default()
    };
    let metrics = silent().build().unwrap().validate(&mut net, &mut loaders()).unwrap();
    assert_eq!(metrics, [("val_acc".to_owned(), f64::from(4.0_f32 / 6.0))]);
}
