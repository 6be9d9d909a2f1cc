//! Kernels that stand in for libtorch's appear below the operators that they serve, with which one the table chose.

use tempfile::TempDir;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::kernels::{
    Convolution, Dtype, Machine, Operator, Part, ProductShape, convolution_kernel, factor_kernel,
    product_kernel, serves,
};
use voltaic::lightning::{LightningModule, StepContext};
use voltaic::nn::{Callable, Conv2d, Linear};
use voltaic::optim::{Optimizers, Sgd};
use voltaic::profiler::{HpuProfiler, HpuProfilerConfig};
use voltaic::{Kind, Module, Tensor};

use super::{alone, count, events, trainer};

/// A layer, a convolution with the channels last, and attention; each is called once in a step, in float32.
#[derive(Module)]
struct Known {
    linear: Linear,
    conv: Conv2d,
}

const IMAGES: i64 = 8;

impl LightningModule for Known {
    type Batch = Tensor;

    fn training_step(&self, batch: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let images = batch.view([IMAGES, 16, 16, 16]).permute([0, 3, 1, 2]); // the channels are last
        let seen = self.conv.call(&images)?;
        let heads = seen.permute([0, 2, 3, 1]).reshape([IMAGES, 4, 16, 64]);
        let attended = Tensor::f_scaled_dot_product_attention::<&Tensor>(
            &heads, &heads, &heads, None, 0.0, true, None, false,
        )?;
        let out = self.linear.call(&attended.f_reshape([-1, 64])?)?;
        Ok(out.f_gelu("none")?.f_mean(Kind::Float)?)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(Sgd::new(1e-3).into())
    }
}

fn fitted(folder: &TempDir) -> (HpuProfiler, voltaic::trainer::Trainer) {
    let profiler = HpuProfiler::new(&HpuProfilerConfig {
        dirpath: Some(folder.path().to_owned()),
        row_limit: None,
        ..HpuProfilerConfig::default()
    })
    .unwrap();
    let mut net = Known {
        linear: Linear::new(64, 32).unwrap(),
        conv: Conv2d::builder(16, 16, 3).padding(1).build().unwrap(),
    };
    let data = Tensor::randn([IMAGES * 8, 16 * 16 * 16], (Kind::Float, tch::Device::Cpu));
    let loader =
        DataLoader::new(TensorDataset::new(data).unwrap()).batch_size(IMAGES as usize).build().unwrap();
    let builder = trainer(folder.path()).limit_val_batches(0).with_profiler(profiler.clone());
    let mut trainer = builder.build().unwrap();
    trainer.fit(&mut net, &mut Loaders::new().train(loader)).unwrap();
    (profiler, trainer)
}

#[test]
fn kernels_have_the_names_that_the_table_chose() {
    let _alone = alone();
    let folder = TempDir::new().unwrap();
    let (profiler, trainer) = fitted(&folder);
    let events = events(&profiler.traces()[0]);
    let report = trainer.profiler_summary().unwrap();

    let machine = Machine::here();
    // [512, 64] times the transposed weight [32, 64]
    let shape =
        ProductShape { batches: 1, rows: 512, columns: 32, depth: 64, out: [32, 1], a: [64, 1], b: [1, 64] };
    let mut expected = Vec::new();
    if let Some(kernel) = product_kernel(Dtype::Float32, &shape) {
        expected.push(("aten::addmm", format!("product ({kernel:?})")));
    }
    let sizes = Convolution {
        dtype: Dtype::Float32,
        are_channels_last: true,
        images: IMAGES as usize,
        in_channels: 16,
        out_channels: 16,
        in_size: [16; 2],
        out_size: [16; 2],
        kernel: [3; 2],
        stride: [1; 2],
        padding: [1; 2],
    };
    if let Some(kernel) = convolution_kernel(&sizes, Part::Output, false) {
        expected.push(("aten::convolution", format!("convolution ({kernel:?})")));
    }
    if let Some(kernel) = convolution_kernel(&sizes, Part::WeightGrad, false) {
        expected.push(("aten::convolution_backward", format!("convolution_weight_grad ({kernel:?})")));
    }
    if serves(&machine, Operator::Attention) {
        let kernel = factor_kernel(Dtype::Float32);
        let operator = "aten::_scaled_dot_product_flash_attention_for_cpu";
        expected.push((operator, format!("attention ({kernel:?})")));
    }
    if serves(&machine, Operator::Gelu) {
        expected.push(("aten::gelu", "gelu".to_owned()));
    }
    for (operator, kernel) in expected {
        assert!(count(&events, &format!("voltaic::{kernel}")) >= 3, "{operator} by {kernel}\n{report}");
        let row = report.lines().find(|line| line.split_whitespace().next() == Some(operator));
        let row = row.unwrap_or_else(|| panic!("no row of {operator}\n{report}"));
        assert!(row.contains(&kernel), "{kernel}: {row}");
    }
    // questions of which kernel it is are no kernels
    assert!(!report.contains("convolves"), "{report}");
    assert_eq!(count(&events, "voltaic::convolves"), 0);
}
