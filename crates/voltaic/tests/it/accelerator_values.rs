//! Accelerators given to the trainer as values, and plugins.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail the test")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tempfile::TempDir;
use voltaic::Device;
use voltaic::accelerator::{
    Accelerator, AcceleratorChoice, CpuAccelerator, CudaAccelerator, Devices, HpuAccelerator, accelerator,
};
use voltaic::checkpoint::HpuCheckpointIo;
use voltaic::error::{Problem, Result};
use voltaic::precision::HpuPrecisionPlugin;
use voltaic::trainer::{GraphMode, LearningRateFinderConfig, PluginConfig, TrainerConfig};

use crate::ddp::{self, assert_same, finish, folder_of_parent, run_ranks, weights};
use crate::probe::{Probe, has_hpu, loaders, plays, silent};

/// The CPU, with its steps counted.
#[derive(Debug, Clone)]
struct Counted {
    name: &'static str,
    refuses: bool,
    has_none: bool,
    setups: Arc<AtomicUsize>,
    steps: Arc<AtomicUsize>,
}

impl Counted {
    fn new() -> Self {
        Self { name: "cpu", refuses: false, has_none: false, setups: Arc::default(), steps: Arc::default() }
    }
}

impl Accelerator for Counted {
    fn name(&self) -> &'static str {
        self.name
    }

    fn description(&self) -> String {
        CpuAccelerator.description()
    }

    fn availability(&self) -> Result<(), Problem> {
        if self.refuses { Err(Problem::new("it is out of order", "repair it")) } else { Ok(()) }
    }

    fn device_count(&self) -> usize {
        3
    }

    fn auto_device_count(&self) -> usize {
        1
    }

    fn parse_devices(&self, devices: &Devices) -> Result<Vec<usize>, Problem> {
        if self.has_none { Ok(Vec::new()) } else { CpuAccelerator.parse_devices(devices) }
    }

    fn device(&self, index: usize) -> Device {
        CpuAccelerator.device(index)
    }

    fn setup(&self) -> Result<()> {
        self.setups.fetch_add(1, Ordering::Relaxed);
        CpuAccelerator.setup()
    }

    fn step_boundary(&self) -> Result<()> {
        self.steps.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn synchronize(&self, device: Device) -> Result<()> {
        CpuAccelerator.synchronize(device)
    }
}

#[test]
fn a_value_of_your_own_is_what_the_steps_use() {
    let mut expected = Probe::default();
    let mut trainer =
        silent().accelerator("cpu").max_epochs(2).accumulate_grad_batches(4_u64).build().unwrap();
    trainer.fit(&mut expected, &mut loaders()).unwrap();
    for graph in [GraphMode::Off, GraphMode::Step] {
        let counted = Counted::new();
        let builder = silent().accelerator(counted.clone()).max_epochs(2).accumulate_grad_batches(4_u64);
        let mut trainer = builder.graph(graph).build().unwrap();
        assert_eq!(trainer.config().accelerator, "cpu", "its name");
        assert!(counted.setups.load(Ordering::Relaxed) > 0);
        let mut module = Probe::default();
        trainer.fit(&mut module, &mut loaders()).unwrap();
        // 6 batches of an epoch make a window of 4 and one of 2
        assert_eq!((trainer.global_step(), counted.steps.load(Ordering::Relaxed)), (4, 4), "{graph}");
        assert_eq!(module.weights(), expected.weights());
    }
}

#[test]
fn names_and_values_replace_each_other() {
    let counted = Counted::new();
    let built = silent().accelerator(counted.clone()).accelerator("cpu").build().unwrap();
    assert_eq!((built.config().accelerator.as_str(), counted.setups.load(Ordering::Relaxed)), ("cpu", 0));
    let config = TrainerConfig { logger: Some(false.into()), ..TrainerConfig::default() };
    let built = silent().accelerator(counted.clone()).config(config.clone()).build().unwrap();
    assert_eq!(counted.setups.load(Ordering::Relaxed), 0, "config replaces the keys set before it");
    assert_eq!(built.config().accelerator, config.accelerator);
    silent().config(config).accelerator(counted.clone()).build().unwrap();
    assert!(counted.setups.load(Ordering::Relaxed) > 0);
    for choice in [
        AcceleratorChoice::from(String::from("CPU")),
        AcceleratorChoice::from(&String::from("cpu")),
        AcceleratorChoice::from(accelerator("cpu").unwrap()),
        AcceleratorChoice::from(CpuAccelerator),
    ] {
        assert_eq!(choice.resolve().unwrap().name(), "cpu");
    }
}

#[test]
fn values_that_cannot_be_used_are_refused_with_the_reason() {
    let error = |value: Counted| silent().accelerator(value).build().err().unwrap().to_string();
    let refused = error(Counted { refuses: true, ..Counted::new() });
    assert_eq!(refused, "trainer.accelerator: cpu is not available: it is out of order; repair it");
    let unknown = error(Counted { name: "npu", ..Counted::new() });
    assert!(
        unknown.contains("trainer.accelerator: the accelerator `npu` that the program gives"),
        "{unknown}"
    );
    assert!(unknown.contains("one of cpu, cuda, hpu"), "{unknown}");
    assert_contains!(
        error(Counted { name: "hpu", ..Counted::new() }),
        "its devices are of another kind (cpu); let Accelerator::name return cpu"
    );
    assert_contains!(
        error(Counted { has_none: true, ..Counted::new() }),
        "trainer.devices: cpu gives no device for it; let Accelerator::parse_devices"
    );
    if CudaAccelerator.availability().is_err() {
        let of = |error: voltaic::Error| error.to_string();
        let by_value = silent().accelerator(CudaAccelerator).build().err().map(of);
        assert_eq!(by_value, silent().accelerator("cuda").build().err().map(of), "the same as by name");
    }
}

#[test]
fn a_search_runs_on_the_value_too() {
    let counted = Counted::new();
    let trainer = silent().accelerator(counted.clone()).build().unwrap();
    let config = LearningRateFinderConfig { num_training_steps: 5, ..LearningRateFinderConfig::default() };
    trainer.lr_find(&mut Probe::default(), &mut loaders(), &config).unwrap();
    let steps = counted.steps.load(Ordering::Relaxed);
    assert!(steps > 0, "{steps}");
}

#[test]
fn hpus_are_given_as_a_value() {
    if !has_hpu() {
        return;
    }
    let run = |choice: AcceleratorChoice| {
        let mut trainer = silent()
            .accelerator(choice)
            .devices("auto")
            .precision("bf16-mixed")
            .max_epochs(1)
            .build()
            .unwrap();
        assert_eq!(trainer.config().accelerator, "hpu");
        let mut module = Probe {
            train: Box::new(|_, loss, _| {
                anyhow::ensure!(Device::of(&loss)? == Device::Hpu(0));
                Ok(loss)
            }),
            ..Probe::default()
        };
        trainer.fit(&mut module, &mut loaders()).unwrap();
        module.weight.tensor().to_device(tch::Device::Cpu)
    };
    let hpu = HpuAccelerator::from_env().unwrap();
    assert_eq!((hpu.auto_device_count(), hpu.device_count()), (1, 8));
    assert!(run(hpu.into()).equal(&run("hpu".into())));
}

#[test]
fn each_rank_makes_the_value_again() {
    if plays("ranks") {
        let (folder, counted) = (folder_of_parent(), Counted::new());
        let builder = ddp::builder(&folder).accelerator(counted.clone()).devices(2);
        let mut trainer = builder.build().unwrap();
        let mut net = ddp::Net::new();
        trainer.fit(&mut net, &mut ddp::loaders(None)).unwrap();
        assert_eq!(counted.steps.load(Ordering::Relaxed) as u64, trainer.global_step(), "on every rank");
        return finish(&trainer, &net, &folder);
    }
    if plays("hpus") {
        let folder = folder_of_parent();
        let hpus = HpuAccelerator::from_env().unwrap();
        let mut trainer = ddp::builder(&folder).accelerator(hpus).devices(2).build().unwrap();
        assert_eq!(trainer.strategy(), "hpu_parallel");
        let mut net = ddp::Net::new();
        trainer.fit(&mut net, &mut ddp::loaders(None)).unwrap();
        return finish(&trainer, &net, &folder);
    }
    let (_kept, expected, ..) = ddp::alone(2, 1);
    for part in ["ranks", "hpus"] {
        let folder = TempDir::new().unwrap();
        run_ranks(part, folder.path());
        assert_same(&weights(folder.path()), &expected);
    }
}

#[test]
fn plugins_are_given_as_they_are() {
    let precision = HpuPrecisionPlugin::new("bf16-mixed");
    let refused = |builder: voltaic::trainer::TrainerBuilder| builder.check().err().unwrap().to_string();
    for (index, builder) in [
        (0, silent().plugins([precision.clone()])),
        (0, silent().plugins(vec![PluginConfig::HpuPrecisionPlugin(precision.clone())])),
        (0, silent().plugin(precision.clone())),
        (1, silent().plugin(HpuCheckpointIo).plugin(precision.clone())),
    ] {
        let error = refused(builder.accelerator("cpu"));
        let expected = format!("trainer.plugins.{index}.device: device hpu on accelerator cpu");
        assert!(error.contains(&expected), "{error}");
    }
    let twice = silent().accelerator("cpu").plugin(HpuCheckpointIo).plugin(PluginConfig::HpuCheckpointIo);
    assert!(refused(twice).contains("a class is given twice"));
    silent().accelerator("cpu").plugin(precision).plugins([HpuCheckpointIo]).check().unwrap();
}
