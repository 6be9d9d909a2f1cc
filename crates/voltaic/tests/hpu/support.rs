//! What the tests share: the devices, and comparing them.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tch::Tensor;
use voltaic::Device;
use voltaic::accelerator::{HpuEmulator, HpuSettings};
use voltaic::ffi;

pub const CPU: tch::Device = tch::Device::Cpu;
/// How tch names hpu:0 and hpu:1.
pub const HPU: tch::Device = tch::Device::Cuda(64);
pub const HPU1: tch::Device = tch::Device::Cuda(65);

static GENERATORS: Mutex<()> = Mutex::new(());

/// Sets the emulator up, seeds all generators, and keeps other tests from drawing until the guard is dropped. Every
/// test begins with this.
pub fn start() -> MutexGuard<'static, ()> {
    let guard = GENERATORS.lock().unwrap_or_else(PoisonError::into_inner);
    HpuEmulator::init(HpuSettings::default()).unwrap();
    ffi::set_engine_multithreading(false).unwrap();
    ffi::set_thread_num_threads(1);
    ffi::manual_seed(1).unwrap();
    guard
}

/// The bytes of a tensor, as a number that equals for equal bytes only (but for hash collisions).
pub fn bits(tensor: &Tensor) -> Vec<u8> {
    let tensor = tensor.to_device(CPU).contiguous();
    let mut bytes = vec![0_u8; tensor.numel() * tensor.kind().elt_size_in_bytes()];
    tensor.copy_data_u8(&mut bytes, tensor.numel());
    bytes
}

/// Whether two tensors have the same dtype, shape and bytes, wherever they are.
pub fn same_bits(a: &Tensor, b: &Tensor) -> bool {
    a.kind() == b.kind() && a.size() == b.size() && bits(a) == bits(b)
}

/// Runs `f` for the CPU and for hpu:0 with the same seed; its results must be the same bits, and be on the device.
pub fn assert_same(what: &str, f: impl Fn(tch::Device) -> Vec<Tensor>) {
    let run = |device| {
        ffi::manual_seed(7).unwrap();
        f(device)
    };
    let (cpu, hpu) = (run(CPU), run(HPU));
    assert_eq!(cpu.len(), hpu.len(), "{what}");
    for (index, (cpu, hpu)) in cpu.iter().zip(&hpu).enumerate() {
        assert_eq!(Device::of(cpu).unwrap(), Device::Cpu, "{what}, result {index}");
        assert_eq!(Device::of(hpu).unwrap(), Device::Hpu(0), "{what}, result {index}");
        assert!(same_bits(cpu, hpu), "{what}, result {index}: cpu {cpu} and hpu {hpu} differ");
    }
}
