//! Kernels against float64, over shapes and strides that nobody would choose, on several threads.

#![allow(clippy::unwrap_used)]

mod attention;
mod convolutions;
mod elements;
mod norms;
mod products;
mod random;

use std::env;
use std::ffi::CString;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

use voltaic_kernels::{Bf16, Dtype, Element, Floats, FloatsMut, Host, ask_for_all, set_host};

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

/// Numbers in one of the two formats.
#[derive(Debug, Clone, PartialEq)]
enum Numbers {
    Float32(Vec<f32>),
    Bfloat16(Vec<Bf16>),
}

impl Numbers {
    /// Rounded to a format.
    fn new(dtype: Dtype, numbers: impl IntoIterator<Item = f64>) -> Self {
        let numbers = numbers.into_iter().map(|number| number as f32);
        match dtype {
            Dtype::Float32 => Self::Float32(numbers.collect()),
            Dtype::Bfloat16 => Self::Bfloat16(numbers.map(Bf16::from_f32).collect()),
        }
    }

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

    fn view(&self) -> Floats<'_> {
        match self {
            Self::Float32(numbers) => Floats::Float32(numbers),
            Self::Bfloat16(numbers) => Floats::Bfloat16(numbers),
        }
    }

    fn view_mut(&mut self) -> FloatsMut<'_> {
        match self {
            Self::Float32(numbers) => FloatsMut::Float32(numbers),
            Self::Bfloat16(numbers) => FloatsMut::Bfloat16(numbers),
        }
    }

    fn address(&mut self) -> *mut std::ffi::c_void {
        match self {
            Self::Float32(numbers) => numbers.as_mut_ptr().cast(),
            Self::Bfloat16(numbers) => numbers.as_mut_ptr().cast(),
        }
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
