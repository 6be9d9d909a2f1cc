//! What lightning-Habana's own tests of its profiler look for: all stages, their steps, nested ranges, callbacks by their state.

use std::collections::BTreeSet;

use tempfile::TempDir;
use voltaic::callback::{EarlyStopping, EarlyStoppingConfig};
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::lightning::{LightningModule, StepContext};
use voltaic::nn::{Callable, Linear};
use voltaic::optim::{Optimizers, Sgd};
use voltaic::profiler::{HpuProfiler, HpuProfilerConfig};
use voltaic::{Kind, Module, Tensor};

use super::{alone, events, trainer};

#[derive(Module)]
struct Net {
    layer: Linear,
    #[module(skip)]
    profiler: HpuProfiler,
}

impl Net {
    fn loss(&self, x: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let loss = self.layer.call(x)?.f_mean(Kind::Float)?;
        ctx.log("loss", &loss);
        ctx.log("other", &loss);
        Ok(loss)
    }
}

impl LightningModule for Net {
    type Batch = Tensor;

    fn training_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let _a = self.profiler.profile("a")?;
        let one = Tensor::f_ones([1], (Kind::Float, tch::Device::Cpu))?;
        {
            let _b = self.profiler.profile("b")?;
            let _zero = Tensor::f_zeros([1], (Kind::Float, tch::Device::Cpu))?;
        }
        let _c = self.profiler.profile("c")?;
        let _two = one.f_add(&one)?;
        self.loss(batch, ctx)
    }

    fn validation_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<()> {
        self.loss(batch, ctx).map(drop)
    }

    fn test_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<()> {
        self.loss(batch, ctx).map(drop)
    }

    fn predict_step(&self, batch: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        self.layer.call(batch)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(Sgd::new(1e-3).into())
    }
}

fn loader() -> DataLoader<Tensor> {
    let data = Tensor::ones([16, 8], (Kind::Float, tch::Device::Cpu));
    DataLoader::new(TensorDataset::new(data).unwrap()).batch_size(2).build().unwrap()
}

fn profiler(folder: &TempDir) -> HpuProfiler {
    HpuProfiler::new(&HpuProfilerConfig {
        dirpath: Some(folder.path().to_owned()),
        filename: Some("profiler".to_owned()),
        ..HpuProfilerConfig::default()
    })
    .unwrap()
}

#[test]
fn each_stage_has_a_report_and_its_steps() {
    let _alone = alone();
    for stage in ["validate", "test", "predict", "fit"] {
        let folder = TempDir::new().unwrap();
        let profiler = profiler(&folder);
        let mut net = Net { layer: Linear::new(8, 4).unwrap(), profiler: profiler.clone() };
        let mut trainer = trainer(folder.path())
            .limit_val_batches(if stage == "validate" { 8 } else { 0 })
            .with_profiler(profiler.clone())
            .build()
            .unwrap();
        let step = match stage {
            "validate" => {
                trainer.validate(&mut net, &mut Loaders::new().val(loader())).unwrap();
                "validation_step"
            }
            "test" => {
                trainer.test(&mut net, &mut Loaders::new().test(loader())).unwrap();
                "test_step"
            }
            "predict" => {
                trainer.predict(&mut net, &mut Loaders::new().predict(loader())).unwrap();
                "predict_step"
            }
            _ => {
                trainer.fit(&mut net, &mut Loaders::new().train(loader())).unwrap();
                "training_step"
            }
        };
        let report = std::fs::read_to_string(folder.path().join(format!("{stage}-profiler.txt"))).unwrap();
        assert!(report.contains("aten::linear"), "{stage}: {report}");
        let [trace] = &profiler.traces()[..] else { panic!("{stage}: {:?}", profiler.traces()) };
        let name = trace.file_name().unwrap().to_str().unwrap();
        assert!(name.starts_with(&format!("{stage}-profiler-")), "{name}");
        let events = events(trace);
        let steps = events.iter().filter(|event| event["name"].as_str().unwrap().ends_with(step));
        assert_eq!(steps.filter(|event| event["cat"] == "user_annotation").count(), 3, "{stage}");
    }
}

#[test]
fn nested_ranges_are_within_each_other() {
    let _alone = alone();
    let folder = TempDir::new().unwrap();
    let profiler = profiler(&folder);
    let mut net = Net { layer: Linear::new(8, 4).unwrap(), profiler: profiler.clone() };
    let early = |monitor: &str| {
        let config = EarlyStoppingConfig { monitor: monitor.to_owned(), ..EarlyStoppingConfig::default() };
        EarlyStopping::new(config).unwrap()
    };
    let mut trainer = trainer(folder.path())
        .limit_val_batches(0)
        .callback(early("loss"))
        .callback(early("other"))
        .with_profiler(profiler.clone())
        .build()
        .unwrap();
    trainer.fit(&mut net, &mut Loaders::new().train(loader())).unwrap();
    let events = events(&profiler.traces()[0]);
    let span = |name: &str| {
        let event = events.iter().find(|event| event["name"] == format!("[pl][profile]{name}")).unwrap();
        let begins = event["ts"].as_f64().unwrap();
        (begins, begins + event["dur"].as_f64().unwrap())
    };
    let (a, b, c) = (span("a"), span("b"), span("c"));
    assert!(a.0 <= b.0 && b.1 <= c.0 && c.1 <= a.1, "{a:?} {b:?} {c:?}");
    let within_b: BTreeSet<&str> = events
        .iter()
        .filter(|event| event["ts"].as_f64() >= Some(b.0) && event["ts"].as_f64() < Some(b.1))
        .map(|event| event["name"].as_str().unwrap())
        .collect();
    let expected = ["[pl][profile]b", "aten::empty", "aten::zero_", "aten::zeros"];
    assert_eq!(within_b, BTreeSet::from(expected));
    let callbacks: BTreeSet<&str> = events
        .iter()
        .map(|event| event["name"].as_str().unwrap())
        .filter(|name| name.contains("[Callback]EarlyStopping") && name.ends_with("on_train_batch_end"))
        .collect();
    assert_eq!(callbacks.len(), 2, "{callbacks:?}");
}
