//! What needs an NVIDIA GPU. On a machine without one each test says why it is skipped, unless VOLTAIC_REQUIRE_CUDA=1.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail the test")]

#[path = "../support/losses.rs"]
mod losses;
mod trainer;

use std::sync::{Mutex, MutexGuard, PoisonError};

use tch::{Kind, Tensor};
use voltaic::Device;
use voltaic::accelerator::{
    Accelerator, CudaAccelerator, mem_get_info, memory_stats, reset_accumulated_memory_stats,
    reset_peak_memory_stats,
};
use voltaic::ffi::{CollectiveApi, CollectiveLibrary, ReduceOp, Seat};
use voltaic::models::{LeNet, LeNetConfig};
use voltaic::nn::functional::cross_entropy;
use voltaic::nn::{Forward, ModuleExt};
use voltaic::optim::{AdamW, Optimizers};

const GPU: Device = Device::Cuda(0);
const ACCELERATOR: &str = "cuda";

/// Sets CUDA up; none, with a line that says why, if this machine has no GPU.
fn cuda(test: &str) -> Option<MutexGuard<'static, ()>> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    match CudaAccelerator.availability() {
        Ok(()) => {
            CudaAccelerator.setup().unwrap();
            Some(guard)
        }
        Err(reason) => {
            let is_required = std::env::var_os("VOLTAIC_REQUIRE_CUDA").is_some_and(|value| value == "1");
            assert!(!is_required, "VOLTAIC_REQUIRE_CUDA=1, but {reason}");
            println!("skipped {test}: {reason}");
            None
        }
    }
}

/// libtorch's library loads on a machine without GPU, too, if NVIDIA's own are beside it.
#[test]
fn without_a_gpu_the_set_up_says_what_is_missing_and_the_cpu_trains() {
    if CudaAccelerator.availability().is_ok() {
        return println!("skipped the set-up without GPU: this machine has one");
    }
    let error = CudaAccelerator.setup().unwrap_err().to_string();
    let is_told = ["finds no GPU", "cannot be loaded", "is not beside the libtorch"];
    assert!(error.starts_with("cuda") && is_told.iter().any(|what| error.contains(what)), "{error}");
    let sum = Tensor::ones([3], (Kind::Float, tch::Device::Cpu)).sum(Kind::Float);
    assert_eq!(sum.double_value(&[]), 3.0);
    println!("{error}");
}

#[test]
fn memory_statistics_are_those_of_the_allocator() {
    let Some(_guard) = cuda("memory statistics") else { return };
    let first = Tensor::zeros([256, 1024], (Kind::Float, GPU.into()));
    let before = memory_stats(GPU).unwrap();
    assert!(before.in_use >= 1 << 20 && before.limit > 1 << 30, "{before:?}");
    let second = Tensor::zeros([512, 1024], (Kind::Float, GPU.into()));
    let after = memory_stats(GPU).unwrap();
    assert_eq!(after.in_use - before.in_use, 2 << 20);
    assert_eq!(after.total_system_allocs, before.total_system_allocs + 1);
    drop(second);
    let freed = memory_stats(GPU).unwrap();
    assert_eq!((freed.in_use, freed.max_in_use), (before.in_use, after.max_in_use));
    assert_eq!(freed.total_system_frees, before.total_system_frees + 1);
    reset_peak_memory_stats(GPU).unwrap();
    assert_eq!(memory_stats(GPU).unwrap().max_in_use, freed.in_use);
    reset_accumulated_memory_stats(GPU).unwrap();
    drop(first);
    let last = memory_stats(GPU).unwrap();
    assert_eq!((last.num_allocs, last.num_frees), (0, 1));
    assert_eq!(
        last.active_allocs, last.total_active_allocs,
        "what was freed since the reset counts for neither"
    );
    let (free, total) = mem_get_info(GPU).unwrap();
    assert!(0 < free && free <= total && total == last.limit);
}

#[test]
fn lenet_trains_as_on_the_cpu() {
    let Some(_guard) = cuda("training") else { return };
    let losses = |device: Device| -> Vec<f64> {
        voltaic::ffi::manual_seed(1).unwrap();
        let net = LeNet::new(LeNetConfig::default()).unwrap();
        let images = Tensor::rand([64, 1, 28, 28], (Kind::Float, tch::Device::Cpu));
        let labels = Tensor::randint(10, [64], (Kind::Int64, tch::Device::Cpu));
        net.to_device(device).unwrap();
        let mut optimizer =
            Optimizers::from(AdamW::new(1e-3)).build(net.as_dyn()).unwrap().remove(0).optimizer;
        let (images, labels) = (images.to_device(device.into()), labels.to_device(device.into()));
        let step = |_| {
            let loss = cross_entropy(&net.forward(&images).unwrap(), &labels).unwrap();
            optimizer.zero_grad().unwrap();
            loss.backward();
            optimizer.step().unwrap();
            loss.double_value(&[])
        };
        (0..20).map(step).collect()
    };
    let (cpu, gpu) = (losses(Device::Cpu), losses(GPU));
    CudaAccelerator.synchronize(GPU).unwrap();
    for (step, (cpu, gpu)) in cpu.iter().zip(&gpu).enumerate() {
        assert!((cpu - gpu).abs() <= 2e-3 * cpu.abs(), "step {step}: cpu {cpu}, cuda {gpu}");
    }
    assert!(gpu[19] < gpu[0]);
}

#[test]
fn out_of_memory_is_an_error_and_the_process_goes_on() {
    let Some(_guard) = cuda("out of memory") else { return };
    let (_, total) = {
        let _there = Tensor::zeros([1], (Kind::Float, GPU.into()));
        mem_get_info(GPU).unwrap()
    };
    let error = Tensor::f_empty([total as i64], (Kind::Float, GPU.into())).unwrap_err().to_string();
    assert!(error.contains("out of memory"), "{error}");
    let small = Tensor::ones([1024], (Kind::Float, GPU.into()));
    assert_eq!(small.sum(Kind::Float).double_value(&[]), 1024.0);
}

#[test]
fn nccl_reduces_on_a_stream_of_its_own() {
    let Some(_guard) = cuda("NCCL with one rank") else { return };
    let library = CollectiveLibrary::open(CollectiveApi::Nccl, &["libnccl.so.2"]).unwrap();
    let seat = Seat { rank: 0, size: 1, device: GPU, timeout: std::time::Duration::from_secs(60) };
    let backend = library.join(&library.unique_id().unwrap(), seat).unwrap();
    for device in [tch::Device::from(GPU), tch::Device::Cpu] {
        // the sum is only right if the operation waits for the multiplication before it
        let tensor = Tensor::ones([1 << 22], (Kind::Float, device)) * 3.0;
        let work = backend.all_reduce(&tensor, ReduceOp::Avg).unwrap();
        work.wait().unwrap();
        assert_eq!(tensor.sum(Kind::Double).double_value(&[]), 3.0 * f64::from(1 << 22), "{device:?}");
        let gathered = tensor.empty_like();
        backend.all_gather(&tensor, &gathered).unwrap().wait().unwrap();
        assert!(gathered.equal(&tensor), "{device:?}");
    }
    backend.barrier().unwrap().wait().unwrap();
}

#[test]
fn two_gpus_train_as_two_processes_on_the_cpu() {
    let Some(_guard) = cuda("DDP over NCCL") else { return };
    if CudaAccelerator.device_count() < 2 {
        println!("skipped DDP over NCCL: this machine has {} GPU", CudaAccelerator.device_count());
        return;
    }
    let last_loss = |accelerator: &str| -> f64 {
        let folder = tempfile::tempdir().unwrap();
        let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/mlp.yaml");
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_voltaic"));
        command.args(["fit", "--config", recipe, "--trainer.devices=2", "--trainer.strategy=ddp"]);
        command.args(["--trainer.max_epochs=1", "--trainer.limit_train_batches=12"]);
        command.args(["--trainer.limit_val_batches=2", "--trainer.enable_progress_bar=false"]);
        command.arg(format!("--trainer.accelerator={accelerator}"));
        command.arg(format!("--trainer.default_root_dir={}", folder.path().display()));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let metrics = folder.path().join("lightning_logs/version_0/metrics.csv");
        let text = std::fs::read_to_string(metrics).unwrap();
        let mut lines = text.lines();
        let column = lines.next().unwrap().split(',').position(|name| name == "val_loss").unwrap();
        lines.filter_map(|line| line.split(',').nth(column)?.parse().ok()).next_back().unwrap()
    };
    let (cpu, gpu) = (last_loss("cpu"), last_loss("cuda"));
    assert!((cpu - gpu).abs() <= 2e-3 * cpu.abs(), "cpu {cpu}, cuda {gpu}");
}

#[test]
fn cards_are_listed() {
    let Some(_guard) = cuda("list of GPUs") else { return };
    let cards = CudaAccelerator.cards();
    assert!(cards.len() >= CudaAccelerator.device_count() && cards[0].memory.is_some(), "{cards:?}");
    assert!(cards[0].driver.is_some() && cards[0].uuid.is_some(), "{cards:?}");
}
