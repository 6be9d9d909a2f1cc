//! The physical limit: how fast this machine multiplies matrices, by libtorch's kernels or by voltaic's.

use std::time::Instant;

use tch::{Device, Kind, Tensor};
use voltaic::ffi;

const SIZE: i64 = 1024;
const ROUNDS: usize = 20;

/// Prints the best rate of `SIZE` x `SIZE` products in floating point operations per second, by number format.
pub fn print() -> anyhow::Result<()> {
    ffi::install_host_pool()?;
    let kinds = [Kind::Float, Kind::BFloat16];
    let by_libtorch = kinds.map(flops);
    ffi::install_kernels()?;
    let [fp32, bf16] = kinds.map(flops);
    let [libtorch_fp32, libtorch_bf16] = by_libtorch;
    let (fp32, bf16) = (fp32?.max(libtorch_fp32?), bf16?.max(libtorch_bf16?));
    println!("{}", serde_json::json!({ "fp32": fp32, "bf16": bf16 }));
    Ok(())
}

fn flops(kind: Kind) -> anyhow::Result<f64> {
    let draw = || Tensor::f_rand([SIZE, SIZE], (Kind::Float, Device::Cpu))?.f_to_kind(kind);
    let (a, b) = (draw()?, draw()?);
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        drop(a.f_matmul(&b)?);
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(2.0 * (SIZE as f64).powi(3) / best)
}
