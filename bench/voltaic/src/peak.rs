//! The physical limit: how fast this machine multiplies matrices, by libtorch's kernels or by voltaic's.

use std::time::Instant;

use tch::{Device, Kind, Tensor};
use voltaic::accelerator::{Accelerator, accelerator};
use voltaic::ffi;

const SIZE: i64 = 1024;
/// Large enough for a GPU to have work for all its units.
const DEVICE_SIZE: i64 = 8192;
const ROUNDS: usize = 20;
const KINDS: [Kind; 2] = [Kind::Float, Kind::BFloat16];

/// Prints the best rate of products of square matrices in floating point operations per second, by number format.
pub fn print(name: &str) -> anyhow::Result<()> {
    let accelerator = accelerator(name)?;
    accelerator.setup()?;
    let rates = if name == "cpu" { of_host(&*accelerator)? } else { of_device(&*accelerator)? };
    let [fp32, bf16] = rates;
    println!("{}", serde_json::json!({ "fp32": fp32, "bf16": bf16 }));
    Ok(())
}

fn of_device(accelerator: &dyn Accelerator) -> anyhow::Result<[f64; 2]> {
    let [fp32, bf16] = KINDS.map(|kind| flops(accelerator, kind, DEVICE_SIZE));
    Ok([fp32?, bf16?])
}

fn of_host(cpu: &dyn Accelerator) -> anyhow::Result<[f64; 2]> {
    ffi::install_host_pool()?;
    let [libtorch_fp32, libtorch_bf16] = KINDS.map(|kind| flops(cpu, kind, SIZE));
    ffi::install_kernels()?;
    let [fp32, bf16] = KINDS.map(|kind| flops(cpu, kind, SIZE));
    Ok([fp32?.max(libtorch_fp32?), bf16?.max(libtorch_bf16?)])
}

fn flops(accelerator: &dyn Accelerator, kind: Kind, size: i64) -> anyhow::Result<f64> {
    let device = accelerator.device(0);
    let draw = || Tensor::f_rand([size, size], (Kind::Float, Device::from(device)))?.f_to_kind(kind);
    let (a, b) = (draw()?, draw()?);
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        accelerator.synchronize(device)?;
        let start = Instant::now();
        drop(a.f_matmul(&b)?);
        accelerator.synchronize(device)?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(2.0 * (size as f64).powi(3) / best)
}
