//! What kernels use of libtorch.

use tch::{Kind, Tensor};

use crate::kernels::{self, Host, Memory};

/// Lets kernels use libtorch's threads and memory.
pub(super) fn hand_in_host() {
    kernels::set_host(Host { num_threads: || tch::get_num_threads().max(1) as usize, memory: tensor_memory });
}

fn tensor_memory(len: usize) -> Option<Memory> {
    let tensor = Tensor::f_empty([len as i64], (Kind::Float, tch::Device::Cpu)).ok()?;
    Some(Memory::new(tensor.data_ptr().cast(), Box::new(tensor)))
}
