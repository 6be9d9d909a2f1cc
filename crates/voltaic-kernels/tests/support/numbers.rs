//! Numbers to compute with; the tests and the benches use them.

use std::ffi::c_void;

use voltaic_kernels::{Bf16, Dtype, Element, Floats, FloatsMut};

/// Numbers in one of the two formats.
#[derive(Debug, Clone, PartialEq)]
pub enum Numbers {
    Float32(Vec<f32>),
    Bfloat16(Vec<Bf16>),
}

impl Numbers {
    /// Rounded to a format.
    pub fn new(dtype: Dtype, numbers: impl IntoIterator<Item = f64>) -> Self {
        let numbers = numbers.into_iter().map(|number| number as f32);
        match dtype {
            Dtype::Float32 => Self::Float32(numbers.collect()),
            Dtype::Bfloat16 => Self::Bfloat16(numbers.map(Bf16::from_f32).collect()),
        }
    }

    pub fn view(&self) -> Floats<'_> {
        match self {
            Self::Float32(numbers) => Floats::Float32(numbers),
            Self::Bfloat16(numbers) => Floats::Bfloat16(numbers),
        }
    }

    pub fn view_mut(&mut self) -> FloatsMut<'_> {
        match self {
            Self::Float32(numbers) => FloatsMut::Float32(numbers),
            Self::Bfloat16(numbers) => FloatsMut::Bfloat16(numbers),
        }
    }

    pub fn address(&mut self) -> *mut c_void {
        match self {
            Self::Float32(numbers) => numbers.as_mut_ptr().cast(),
            Self::Bfloat16(numbers) => numbers.as_mut_ptr().cast(),
        }
    }
}
