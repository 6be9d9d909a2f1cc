//! Voltaic's kernels for the CPU against libtorch's in float64, which they leave alone.

#![allow(clippy::unwrap_used)]

mod attention;
mod beside;
#[path = "../support/compare.rs"]
mod compare;
mod convolutions;
mod drawn;
mod edges;
mod elements;
mod layouts;
mod norms;
mod products;
mod semantics;
#[path = "../support/silent.rs"]
mod silent;
mod steps;
mod training;
mod unseen;

use tch::{Kind, Tensor};
use voltaic::accelerator::{HpuEmulator, HpuSettings};

/// Puts the kernels in, which a program without optimization does not do by itself.
fn install() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        voltaic::ffi::set_environment("VOLTAIC_CPU_KERNELS", "1");
        HpuEmulator::init(HpuSettings::default()).unwrap(); // libtorch asks for devices once
    });
    assert!(voltaic::ffi::install_kernels().unwrap(), "this processor has no vectors");
}

/// The same values with the channels last in memory.
fn channels_last(images: &Tensor) -> Tensor {
    images.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2])
}

/// Fails if a number of `a` is further from that of `expected` than `tolerance`, relative to the largest.
fn assert_close(what: &str, a: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!(a.size(), expected.size(), "{what}");
    let (a, expected) = (a.to_kind(Kind::Double), expected.to_kind(Kind::Double));
    let scale = expected.abs().max().double_value(&[]).max(1e-30);
    let difference = (a - expected).abs().max().double_value(&[]) / scale;
    assert!(difference <= tolerance, "{what}: {difference:e} apart");
}
