//! Traces as PyTorch's own tools read them.

use std::path::Path;
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::lightning::{LightningModule, StepContext};
use voltaic::models::{LeNet, LeNetConfig};
use voltaic::nn::Forward;
use voltaic::nn::functional::cross_entropy;
use voltaic::optim::{AdamW, Optimizers};
use voltaic::profiler::{HpuProfiler, HpuProfilerConfig};
use voltaic::{Kind, Module, Tensor};

use crate::{alone, count, events, trainer};

/// Two convolutions and three linear layers.
#[derive(Module)]
struct Classifier {
    net: LeNet,
}

impl LightningModule for Classifier {
    type Batch = Tensor;

    fn training_step(&self, images: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let targets = Tensor::zeros([4], (Kind::Int64, images.device()));
        Ok(cross_entropy(&self.net.forward(images)?, &targets)?)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(AdamW::new(1e-3).into())
    }
}

/// The trace of three steps on an accelerator.
fn trace(folder: &Path, accelerator: &str) -> std::path::PathBuf {
    let config = HpuProfilerConfig {
        dirpath: Some(folder.to_owned()),
        filename: Some("lenet".to_owned()),
        profile_memory: true,
        record_shapes: true,
        ..HpuProfilerConfig::default()
    };
    let profiler = HpuProfiler::new(&config).unwrap();
    let images = Tensor::randn([4 * 8, 1, 28, 28], (Kind::Float, tch::Device::Cpu));
    let loader = DataLoader::new(TensorDataset::new(images).unwrap()).batch_size(4).build().unwrap();
    let builder = trainer(folder).accelerator(accelerator).devices(1).limit_val_batches(0);
    let mut trainer = builder.with_profiler(profiler.clone()).build().unwrap();
    let mut module = Classifier { net: LeNet::new(LeNetConfig::default()).unwrap() };
    trainer.fit(&mut module, &mut Loaders::new().train(loader)).unwrap();
    profiler.traces().remove(0)
}

/// Calls of three steps, each of which runs every layer forward and backward once.
const CALLS: [(&str, usize); 7] = [
    ("aten::conv2d", 2 * 3),
    ("aten::convolution_backward", 2 * 3),
    ("aten::linear", 3 * 3),
    ("aten::addmm", 3 * 3),
    ("aten::cross_entropy_loss", 3),
    ("aten::max_pool2d", 2 * 3),
    ("aten::_fused_adamw_", 3),
];

#[test]
fn layers_and_optimizer_are_counted_exactly() {
    let _alone = alone();
    for accelerator in ["cpu", "hpu"] {
        let folder = TempDir::new().unwrap();
        let events = events(&trace(folder.path(), accelerator));
        for (name, times) in CALLS {
            let host: Vec<Value> = events.iter().filter(|event| event["cat"] == "cpu_op").cloned().collect();
            assert_eq!(count(&host, name), times, "{name} on {accelerator}");
        }
    }
}

#[test]
fn tensorboards_plugin_reads_what_was_recorded() {
    let _alone = alone();
    let python = std::env::var("VOLTAIC_TEST_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let has_plugin = Command::new(&python).args(["-c", "import torch_tb_profiler"]).output();
    if !has_plugin.is_ok_and(|output| output.status.success()) {
        println!("{python} has no torch_tb_profiler: `pip install torch-tb-profiler`; nothing was read");
        return;
    }
    let folder = TempDir::new().unwrap();
    let traces = ["cpu", "hpu"].map(|accelerator| trace(folder.path(), accelerator));
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/profiler/read_traces.py");
    let output = Command::new(&python).arg(script).args(&traces).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let read: Value = serde_json::from_slice(&output.stdout).unwrap();
    let [host, device] = &read.as_array().unwrap()[..] else { panic!("{read}") };
    for found in [host, device] {
        assert_eq!(found["steps"], serde_json::json!(["2", "3", "4"]));
        for (name, times) in CALLS {
            assert_eq!(found["operators"][name], times, "{name}");
        }
        assert!(found["memory_events"].as_u64().unwrap() > 50);
    }
    assert_eq!((&host["has_kernel"], &device["has_kernel"]), (&false.into(), &true.into()));
    assert_eq!(host["memory_of"], serde_json::json!(["CPU"]));
    // which is what the plugin calls any device
    assert_eq!(device["memory_of"], serde_json::json!(["CPU", "GPU0"]));
    assert_eq!(device["devices"][0], "emulated gaudi2");
    assert_eq!(device["has_memcpy"], true);
    for (name, times) in [("aten::convolution", 6), ("aten::addmm", 9), ("aten::_fused_adamw_", 3)] {
        assert_eq!(device["kernels"][name], times, "{name}");
        assert!(device["device_us"][name].as_f64().unwrap() > 0.0, "{name} has no time on the device");
    }
}
