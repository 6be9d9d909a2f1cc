//! Kernels against float64, over shapes and strides that nobody would choose, on several threads.

#![allow(clippy::unwrap_used)]

mod attention;
mod convolutions;
mod elements;
mod norms;
#[path = "../support/numbers.rs"]
mod numbers;
mod products;
mod random;
mod updates;

use std::env;
use std::ffi::CString;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

use numbers::Numbers;
use voltaic_kernels::{Dtype, Element, Host, ask_for_all, set_host};

static THREADS: AtomicUsize = AtomicUsize::new(1);

/// So many threads from now on, if there is an OpenMP. It is libtorch's where `LIBTORCH` names one, which brings the MKL, too; kernels
/// find both as they do in voltaic.
fn use_threads(threads: usize) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let libtorch = env::var("LIBTORCH").map(|folder| format!("{folder}/lib/libtorch_cpu.so"));
        for library in [libtorch.unwrap_or_default(), "libgomp.so.1".to_owned()] {
            let library = CString::new(library).unwrap();
            // SAFETY: loads a library whose initialisers do nothing but set it up; it stays.
            unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        }
        set_host(Host { num_threads: || THREADS.load(Ordering::Relaxed), ..Host::default() });
        ask_for_all(true);
    });
    THREADS.store(threads, Ordering::Relaxed);
}

impl Numbers {
    fn at(&self, i: usize) -> f64 {
        match self {
            Self::Float32(numbers) => numbers[i].into(),
            Self::Bfloat16(numbers) => numbers[i].to_f32().into(),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Float32(numbers) => numbers.len(),
            Self::Bfloat16(numbers) => numbers.len(),
        }
    }

    fn all(&self) -> Vec<f64> {
        (0..self.len()).map(|i| self.at(i)).collect()
    }
}

/// Half of the distance between numbers next to 1, and what sums in float32 may add to it.
fn rounding(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::Float32 => 1e-6,
        Dtype::Bfloat16 => 1.0 / 256.0,
    }
}

const DTYPES: [Dtype; 2] = [Dtype::Float32, Dtype::Bfloat16];

/// Fails if a number is further from what it should be than `tolerance`, relative to `scale`.
fn assert_close(what: &str, numbers: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(numbers.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(1e-3_f64, |scale, number| scale.max(number.abs()));
    for (i, (number, expected)) in numbers.iter().zip(expected).enumerate() {
        let difference = (number - expected).abs() / scale;
        assert!(difference <= tolerance, "{what}: number {i} is {number}, not {expected}");
    }
}
