//! Metrics give torchmetrics' values on random inputs (fixtures/metrics/make_random.py), and refuse what they would count wrongly.

use serde::Deserialize;
use tch::{Kind, Tensor};
use voltaic::Result;
use voltaic::metrics::{
    Accuracy, Auroc, Average, ConfusionMatrix, F1Score, MeanMetric, MeanSquaredError, Metric, Perplexity,
};

#[derive(Deserialize)]
struct Plain {
    shape: Vec<i64>,
    is_float: bool,
    values: Vec<f64>,
}

impl Plain {
    fn tensor(&self) -> Tensor {
        let kind = if self.is_float { Kind::Float } else { Kind::Int64 };
        Tensor::from_slice(&self.values).to_kind(kind).reshape(&self.shape)
    }
}

#[derive(Deserialize)]
struct Case {
    metric: String,
    #[serde(default)]
    num_classes: i64,
    average: Option<String>,
    top_k: Option<i64>,
    ignore_index: Option<i64>,
    squared: Option<bool>,
    batches: Vec<(Plain, Plain)>,
    /// None where there is no value.
    value: Vec<Option<f64>>,
}

impl Case {
    fn average(&self) -> Average {
        match self.average.as_deref() {
            Some("macro") => Average::Macro,
            Some("weighted") => Average::Weighted,
            Some("none") => Average::None,
            _ => Average::Micro,
        }
    }

    fn value_of<M: Metric>(
        &self,
        metric: M,
        update: impl Fn(&M, &Tensor, &Tensor) -> Result<()>,
    ) -> Vec<f64> {
        for (preds, target) in &self.batches {
            update(&metric, &preds.tensor(), &target.tensor()).unwrap();
        }
        Vec::try_from(metric.compute().unwrap().to_kind(Kind::Double).flatten(0, -1)).unwrap()
    }

    fn value(&self) -> Vec<f64> {
        let classes = self.num_classes;
        match self.metric.as_str() {
            "Accuracy" => {
                let metric = Accuracy::new(classes, self.average()).top_k(self.top_k.unwrap());
                let metric = self.ignore_index.map_or(metric.clone(), |ignored| metric.ignore_index(ignored));
                self.value_of(metric, Accuracy::update)
            }
            "F1Score" => self.value_of(F1Score::new(classes, self.average()), F1Score::update),
            "ConfusionMatrix" => self.value_of(ConfusionMatrix::new(classes), ConfusionMatrix::update),
            "Auroc" if classes == 1 => self.value_of(Auroc::binary(), Auroc::update),
            "Auroc" => self.value_of(Auroc::multiclass(classes), Auroc::update),
            "MeanSquaredError" => {
                let metric = MeanSquaredError::new().squared(self.squared.unwrap());
                self.value_of(metric, MeanSquaredError::update)
            }
            "Perplexity" => {
                let metric = Perplexity::new();
                let metric = self.ignore_index.map_or(metric.clone(), |ignored| metric.ignore_index(ignored));
                self.value_of(metric, Perplexity::update)
            }
            other => panic!("{other} is not known here"),
        }
    }
}

#[test]
fn values_are_torchmetrics_on_random_inputs() {
    let text = include_str!("../fixtures/metrics/random.json");
    let cases: Vec<Case> = serde_json::from_str(text).unwrap();
    let mut wrong = Vec::new();
    for (seed, case) in cases.iter().enumerate() {
        let value = case.value();
        let is_near = |(own, expected): (&f64, &Option<f64>)| match expected {
            Some(expected) => (own - expected).abs() <= 2e-6 * expected.abs().max(1.0),
            None => own.is_nan(),
        };
        if value.len() != case.value.len() || !value.iter().zip(&case.value).all(is_near) {
            let Case { metric, num_classes, average, top_k, ignore_index, .. } = case;
            let settings = format!("{metric} of {num_classes}, {average:?}, {top_k:?}, {ignore_index:?}");
            wrong.push(format!("{seed}: {settings}: {value:?}, not {:?}", case.value));
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

#[test]
fn what_would_be_counted_wrongly_is_refused() {
    let classes = |values: &[i64]| Tensor::from_slice(values);
    let scores = |size: [i64; 2]| Tensor::zeros(size, (Kind::Float, tch::Device::Cpu));
    let two = || classes(&[0, 1]);
    for (preds, target, expected) in [
        (scores([2, 4]), two(), "[2, 3] is needed for 3 classes"),
        (scores([2, 2]), two(), "[2, 3] is needed for 3 classes"),
        (scores([2, 3]), two().reshape([1, 2]), "does not fit"),
        (Tensor::from_slice(&[0.9_f32, 1.1]), two(), "predicted classes are Float, not integers"),
        (scores([2, 3]), Tensor::from_slice(&[0.0_f32, 1.0]), "targets are Float, not integers"),
        (two(), classes(&[0, 3]), "class is not among 0 to 2; give"),
        (two(), classes(&[0, -1]), "class is not among 0 to 2; give"),
        (classes(&[0, 4]), two(), "class is not among 0 to 2; give"),
        (classes(&[0, -1]), classes(&[1, 1]), "class is not among 0 to 2; give"),
    ] {
        let results = [
            Accuracy::new(3, Average::Macro).update(&preds, &target),
            F1Score::new(3, Average::Macro).update(&preds, &target),
            ConfusionMatrix::new(3).update(&preds, &target),
        ];
        for result in results {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(expected) && !error.contains("frame #"), "{preds} {target}: {error}");
        }
    }
    let three = Tensor::from_slice(&[0.1_f32, 0.9, 0.5]);
    for target in [classes(&[0, 1, 1]).reshape([3, 1]), classes(&[0, 1, 1]).reshape([1, 3])] {
        assert_error!(Auroc::binary().update(&three, &target), "targets [3], not");
    }
    let (binary, multiclass) = (Auroc::binary(), Auroc::multiclass(3));
    binary.update(&three, &classes(&[0, 1, 2])).unwrap();
    multiclass.update(&scores([2, 3]), &classes(&[0, 3])).unwrap();
    for (found, last) in [(binary.compute(), 1), (multiclass.compute(), 2)] {
        assert_error!(found, &format!("a target is not among 0 to {last}; give"));
    }
}

#[test]
fn what_does_not_count_has_no_influence() {
    let target = Tensor::from_slice(&[1_i64, -100]);
    let mut logits = [0.5_f32, 0.25, f32::NEG_INFINITY, 1.0];
    let mut values = Vec::new();
    for padding in [f32::NEG_INFINITY, f32::NAN, 0.0] {
        logits[2] = padding;
        let perplexity = Perplexity::new().ignore_index(-100);
        perplexity.update(&Tensor::from_slice(&logits).reshape([2, 2]), &target).unwrap();
        values.push(perplexity.compute().unwrap().double_value(&[]));
    }
    assert!(values[0] > 1.0 && values.iter().all(|value| *value == values[0]), "{values:?}");
    let nothing = MeanMetric::new();
    nothing.update(&Tensor::from_slice(&[3.0_f32]), 0.0).unwrap();
    assert!(nothing.compute().unwrap().double_value(&[]).is_nan(), "a mean of nothing is no number");
    let empty = Tensor::zeros([0, 3], (Kind::Float, tch::Device::Cpu));
    let accuracy = Accuracy::new(3, Average::Macro);
    accuracy.update(&empty, &Tensor::zeros([0], (Kind::Int64, tch::Device::Cpu))).unwrap();
    assert_eq!(accuracy.compute().unwrap().double_value(&[]), 0.0);
}
