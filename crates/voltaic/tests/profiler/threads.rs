//! What is recorded of other threads, and of ranges that are open when a recording ends.

use tempfile::TempDir;
use voltaic::lightning::{LightningModule, StepContext};
use voltaic::nn::{Callable, Linear};
use voltaic::optim::{Optimizers, Sgd};
use voltaic::profiler::{ProfilerSchedule, PyTorchProfiler, PyTorchProfilerConfig};
use voltaic::{Kind, Module, Tensor};

use super::{alone, config, count, events, loaders, trainer};

/// Enough ranges to fill the block in which libtorch keeps their events.
const MANY: usize = 3000;

/// Holds ranges open from the end of each recording to the next, and has a thread with a range and an operator in each step.
#[derive(Module)]
struct Net {
    layer: Linear,
    #[module(skip)]
    profiler: PyTorchProfiler,
}

impl LightningModule for Net {
    type Batch = Tensor;

    fn training_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        for number in 0..MANY {
            let name = format!("held {number}");
            if ctx.batch_idx() > 0 {
                self.profiler.stop(&name)?;
            }
            self.profiler.start(&name)?;
        }
        let profiler = &self.profiler;
        std::thread::scope(|scope| {
            let worker = scope.spawn(|| -> anyhow::Result<()> {
                let _range = profiler.profile("of \"another\" thread")?;
                let _ = Tensor::f_ones([1], (Kind::Float, tch::Device::Cpu))?.f_erfinv()?;
                Ok(())
            });
            worker.join().map_err(|_| anyhow::anyhow!("the thread panicked"))
        })??;
        Ok(self.layer.call(batch)?.f_mean(Kind::Float)?)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(Sgd::new(1e-3).into())
    }
}

#[test]
fn ranges_end_with_their_recording_and_other_threads_have_only_ranges() {
    let _alone = alone();
    let folder = TempDir::new().unwrap();
    let schedule = Some(ProfilerSchedule { skip_first: 0, wait: 0, warmup: 0, active: 1, repeat: 0 });
    let config = PyTorchProfilerConfig { schedule, ..config(folder.path()) };
    let profiler = PyTorchProfiler::new(&config).unwrap();
    let mut net = Net { layer: Linear::new(8, 4).unwrap(), profiler: profiler.clone() };
    let mut trainer =
        trainer(folder.path()).limit_val_batches(0).with_profiler(profiler.clone()).build().unwrap();
    trainer.fit(&mut net, &mut loaders(4)).unwrap();

    let traces = profiler.traces();
    assert_eq!(traces.len(), 4);
    for trace in &traces {
        let events = events(trace);
        let named = |name: &str| {
            let event = events.iter().find(|event| event["name"] == format!("[pl][profile]{name}"));
            event.unwrap_or_else(|| panic!("no {name} in {}", trace.display()))
        };
        for number in [0, MANY - 1] {
            let name = format!("[pl][profile]held {number}");
            assert_eq!(count(&events, &name), 1, "{name}");
        }
        let (step, other) = (named("run_training_batch"), named("of \"another\" thread"));
        assert_eq!((&step["pid"], &other["cat"]), (&other["pid"], &step["cat"]));
        assert_ne!(step["tid"], other["tid"]);
        let span = |event: &serde_json::Value| {
            let begins = event["ts"].as_f64().unwrap();
            (begins, begins + event["dur"].as_f64().unwrap())
        };
        assert!(span(step).0 < span(other).0 && span(other).1 < span(step).1, "{step} {other}");
        assert_ne!(count(&events, "aten::mean"), 0);
        assert_eq!(count(&events, "aten::erfinv"), 0);
    }
    assert_contains!(trainer.profiler_summary().unwrap(), "aten::mean");
}
