//! Offload to files (ZeRO-Infinity, arXiv:2104.07857): a run whose optimizer, or whose shards of the weights, are in files is the run
//! without, bit for bit; it resumes, leaves no files, and ends on all ranks if a disk fails.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

use voltaic::callback::{Callback, LambdaCallback};
use voltaic::checkpoint::Checkpoint;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::ffi::FileBackend;
use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::nn::{Forward, Linear, init};
use voltaic::optim::{AdamW, Optimizers};
use voltaic::strategy::{
    Aio, OffloadDevice, OffloadOptimizer, OffloadParam, Strategy, Zero, ZeroConfig, ZeroStage,
};
use voltaic::trainer::TrainerBuilder;
use voltaic::{Kind, Module, Tensor};

use crate::ladder::trained;
use crate::models::{Batch, loaders, numbered, numbers, squares};
use crate::ranks::{assert_same, folder_of_rank, output, silent, weights};
use crate::resume::Saver;
use crate::shards::SaveAfter;
use crate::signal::signal_self;

const WIDTH: i64 = 1024;
const FAULT: &str = "VOLTAIC_TEST_FAULT";

/// Two layers whose parts and shards on two ranks are large enough for files, between two that are not.
#[derive(Module)]
struct Wide {
    first: Linear,
    one: Linear,
    two: Linear,
    last: Linear,
}

impl Wide {
    fn new() -> Self {
        let linear = |inputs, outputs| Linear::new(inputs, outputs).unwrap();
        let net = numbered(Self {
            first: linear(5, WIDTH),
            one: linear(WIDTH, WIDTH),
            two: linear(WIDTH, WIDTH),
            last: linear(WIDTH, 3),
        });
        for layer in [&net.one, &net.two, &net.last] {
            layer.weight.set_data(&(layer.weight.tensor().shallow_clone() * 0.1)).unwrap();
        }
        net
    }
}

lightning_module!(Wide, Batch, AdamW::new(0.001), |net, (x, y), _| {
    let hidden = net.first.forward(&x.to_kind(net.first.weight.kind()))?.relu();
    let hidden = net.two.forward(&net.one.forward(&hidden)?.relu())?.relu();
    Ok(squares(&net.last.forward(&hidden)?.to_kind(Kind::Float), y))
});

/// Where things are, and how files are moved.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Offload {
    optimizer: OffloadDevice,
    params: OffloadDevice,
    pipeline: bool,
    backend: FileBackend,
    /// Buffers for the optimizer: three are needed at a time, and one more holds the gradients.
    buffers: u64,
    max_in_cpu: u64,
}

const NONE: Offload = Offload {
    optimizer: OffloadDevice::None,
    params: OffloadDevice::None,
    pipeline: false,
    backend: FileBackend::Auto,
    buffers: 4,
    max_in_cpu: 0,
};
const FILES: Offload = Offload { optimizer: OffloadDevice::Nvme, pipeline: true, buffers: 8, ..NONE };

fn offloading(ranks: usize, accelerator: &str, folder: &Path, offload: Offload) -> TrainerBuilder {
    let nvme_path = Some(folder.join("nvme").display().to_string());
    silent(ranks, "zero3", folder).accelerator(accelerator).strategy(move |world| {
        let config = ZeroConfig {
            reduce_bucket_size: 100_000,
            param_persistence_threshold: 0,
            prefetch_bucket_size: 1_200_000,
            max_reuse_distance: 0,
            offload_optimizer: OffloadOptimizer {
                device: offload.optimizer,
                nvme_path: nvme_path.clone(),
                buffer_count: offload.buffers,
                pipeline: offload.pipeline,
                ..OffloadOptimizer::default()
            },
            offload_param: OffloadParam {
                device: offload.params,
                nvme_path: nvme_path.clone(),
                buffer_count: 2,
                buffer_size: 1 << 20,
                max_in_cpu: offload.max_in_cpu,
                ..OffloadParam::default()
            },
            aio: Aio { backend: offload.backend, ..Aio::default() },
            ..ZeroConfig::of_stage(ZeroStage::Three)
        };
        Ok(Box::new(Zero::new(world, config)) as Box<dyn Strategy>)
    })
}

/// What files this process has open that have no name any more, by the end of the name that they had, and the handle.
fn open_files(folder: &Path) -> Vec<(String, PathBuf)> {
    let folder = fs::canonicalize(folder).unwrap().join("nvme/zero_stage_3");
    let handles = fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let named = handles.filter_map(|handle| {
        let target = fs::read_link(&handle).ok()?;
        let below = target.strip_prefix(&folder).ok()?.to_str()?.strip_suffix(" (deleted)")?.to_owned();
        Some((below, handle))
    });
    let mut named: Vec<_> = named.collect();
    named.sort();
    named
}

/// Whether the folder that all ranks share is gone: the last of them to drop its files removes it.
fn is_removed(folder: &Path) -> bool {
    let deadline = Instant::now() + Duration::from_secs(20);
    while folder.exists() && Instant::now() < deadline {
        sleep(Duration::from_millis(5));
    }
    !folder.exists()
}

fn rank_of(ctx: &HookContext) -> usize {
    ctx.process_group().map_or(0, |group| group.rank())
}

/// What is in files after a step: parts and states of the two large layers, and their shards.
fn check_files(folder: PathBuf, offload: Offload, precision: &str) -> impl Callback {
    let dtype = if precision == "32-true" { "float32" } else { "bfloat16" };
    LambdaCallback::new().on_train_batch_end(move |ctx, _| {
        let rank = rank_of(ctx);
        let found: Vec<String> = open_files(&folder).into_iter().map(|(name, _)| name).collect();
        let mut expected = Vec::new();
        // the third parameter is the weight of the first large layer, the fifth that of the second
        for id in [2, 4] {
            if offload.optimizer == OffloadDevice::Nvme {
                let len =
                    (WIDTH * WIDTH) as usize / ctx.process_group().map_or(1, |group| group.world_size());
                expected.push(format!("optimizer/rank{rank}/{id}_gradient_0_{len}.tensor.swp"));
                let states = ["", "exp_avg-", "exp_avg_sq-"];
                for state in states.into_iter().take(if ctx.global_step() == 0 { 1 } else { 3 }) {
                    expected.push(format!("optimizer/rank{rank}/{state}{id}_{id}.tensor.swp"));
                }
            }
            if offload.params == OffloadDevice::Nvme && offload.max_in_cpu == 0 {
                expected.push(format!("{dtype}params/rank{rank}/{id}_param.tensor.swp"));
            }
        }
        expected.sort();
        assert_eq!(found, expected);
        Ok(())
    })
}

fn offloads() -> Vec<Offload> {
    use OffloadDevice::{Cpu, None, Nvme};
    let of = |optimizer, params| Offload { optimizer, params, ..FILES };
    vec![
        of(Nvme, None),
        Offload { pipeline: false, buffers: 3, backend: FileBackend::Threads, ..of(Nvme, Cpu) },
        of(Nvme, Nvme),
        Offload { backend: FileBackend::Threads, ..of(Cpu, Nvme) },
        of(None, Nvme),
        Offload { max_in_cpu: 1 << 30, buffers: 4, ..of(Nvme, Nvme) },
    ]
}

fn climb(ranks: usize, folder: &Path) {
    for (accelerator, precision) in [("cpu", "32-true"), ("cpu", "bf16-true"), ("hpu", "bf16-true")] {
        let run = |offload| {
            let builder = offloading(ranks, accelerator, folder, offload).precision(precision).max_epochs(2);
            let builder = builder.accumulate_grad_batches(2_u64).gradient_clip_val(0.05);
            trained(builder.callback(check_files(folder.into(), offload, precision)), Wide::new(), loaders(8))
        };
        let expected = run(NONE);
        let few = offloads().into_iter().step_by(if accelerator == "hpu" { 2 } else { 1 });
        for offload in few {
            assert_same(&format!("{precision} on {accelerator} with {offload:?}"), &run(offload), &expected);
            assert!(is_removed(&folder.join("nvme/zero_stage_3")), "nothing is left after a run");
        }
    }
}

fn go_on(ranks: usize, folder: &Path) {
    let run = |offload, from: Option<PathBuf>| {
        let builder = offloading(ranks, "cpu", folder, offload).precision("bf16-true").max_epochs(2);
        let saver = Saver(folder.join(format!("{:?}", offload.optimizer)));
        let mut trainer = builder.accumulate_grad_batches(2_u64).callback(saver).build().unwrap();
        if let Some(from) = from {
            trainer.ckpt_path(from);
        }
        let mut net = Wide::new();
        trainer.fit(&mut net, &mut loaders(12)).unwrap();
        weights(&net)
    };
    let files = Offload { params: OffloadDevice::Nvme, ..FILES };
    let expected = run(NONE, None);
    assert_same("without a break", &run(files, None), &expected);
    // a window is open after the first batch; what one run has saved the other goes on from
    for (by, from) in [(files, "Nvme/0.ckpt"), (files, "None/1.ckpt"), (NONE, "Nvme/1.ckpt")] {
        assert_same(from, &run(by, Some(folder.join(from))), &expected);
    }
}

/// Reads values by name in the course of a run, and changes some.
fn read_through(ranks: usize, folder: &Path) {
    let run = |offload| {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let kept = seen.clone();
        let callback = LambdaCallback::new().on_train_batch_end(move |ctx, _| {
            let mut seen = kept.lock().unwrap();
            for fqn in ["one.weight", "two.bias"] {
                let values = [
                    ctx.full_fp32_param(fqn)?,
                    ctx.full_optimizer_state(fqn, "exp_avg")?,
                    ctx.full_optimizer_state(fqn, "exp_avg_sq")?,
                ];
                seen.extend(values.into_iter().map(|value| (fqn.to_owned(), value)));
            }
            if ctx.batch_idx() == 1 {
                let halved = ctx.full_fp32_param("one.weight")? * 0.5;
                ctx.set_full_fp32_param("one.weight", &halved)?;
                let zeros = ctx.full_optimizer_state("two.weight", "exp_avg")?.zeros_like();
                ctx.set_full_optimizer_state("two.weight", "exp_avg", &zeros)?;
            }
            Ok(())
        });
        let builder = offloading(ranks, "cpu", folder, offload).precision("bf16-true").callback(callback);
        let end = trained(builder.max_epochs(1), Wide::new(), loaders(16));
        let mut seen = std::mem::take(&mut *seen.lock().unwrap());
        seen.extend(end);
        seen
    };
    let expected = run(NONE);
    for params in [OffloadDevice::None, OffloadDevice::Nvme] {
        assert_same(&format!("{params:?}"), &run(Offload { params, ..FILES }), &expected);
    }
}

/// In the third step rank 1 loses a file, or its life.
fn fail(folder: &Path) {
    let fault = std::env::var(FAULT).unwrap();
    let of_files = folder.to_path_buf();
    let callback = LambdaCallback::new().on_train_batch_start(move |ctx: &mut HookContext, _| {
        if rank_of(ctx) == 1 && ctx.batch_idx() == 2 {
            let (_, handle) =
                open_files(&of_files).into_iter().find(|(name, _)| name.contains("exp_avg-")).unwrap();
            match fault.as_str() {
                "cut" => drop(fs::OpenOptions::new().write(true).truncate(true).open(handle).unwrap()),
                _ => {
                    signal_self("-KILL").unwrap();
                    std::thread::sleep(std::time::Duration::from_secs(60));
                }
            }
        }
        Ok(())
    });
    let builder = offloading(2, "cpu", folder, FILES).callback(callback).max_epochs(1);
    let mut trainer = builder.callback(SaveAfter(1, folder.join("last.ckpt"))).build().unwrap();
    let error = trainer.fit(&mut Wide::new(), &mut loaders(20)).expect_err("rank 1 fails").to_string();
    eprintln!("rank {}: {error}", usize::from(!trainer.is_global_zero()));
    std::process::exit(1);
}

fn broken(test: &str, fault: &str) -> String {
    if let Some(folder) = folder_of_rank() {
        fail(&folder);
    }
    let folder = tempfile::tempdir().unwrap();
    let output = output(test, 2, folder.path(), &[(FAULT, fault)]);
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{text}");
    let left = Checkpoint::load(folder.path().join("last.ckpt")).expect("the last checkpoint is whole");
    assert_eq!(left.meta.global_step, 2);
    for (_, _, files) in walk(&folder.path().join("nvme")) {
        assert_eq!(files, [] as [PathBuf; 0], "a process that ends leaves no file");
    }
    text
}

/// Folders below one, with their names and files.
fn walk(folder: &Path) -> Vec<(PathBuf, usize, Vec<PathBuf>)> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let (folders, files): (Vec<_>, Vec<_>) =
        entries.map(|entry| entry.unwrap().path()).partition(|path| path.is_dir());
    let mut all = vec![(folder.to_path_buf(), folders.len(), files)];
    all.extend(folders.iter().flat_map(|folder| walk(folder)));
    all
}

#[test]
fn a_disk_that_fails_ends_all_ranks_and_leaves_the_checkpoint() {
    let text = broken("nvme::a_disk_that_fails_ends_all_ranks_and_leaves_the_checkpoint", "cut");
    for expected in
        ["rank 0: zero_optimization: rank 1: cannot read ", "rank 1: cannot read ", "the file has been cut"]
    {
        assert!(text.contains(expected), "no `{expected}` in {text}");
    }
}

#[test]
fn a_killed_rank_leaves_no_files() {
    broken("nvme::a_killed_rank_leaves_no_files", "kill");
}

/// Predicts alone: its steps and optimizers fail.
#[derive(Module)]
struct Predicting {
    net: Wide,
}

impl LightningModule for Predicting {
    type Batch = Tensor;

    fn training_step(&self, _x: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        anyhow::bail!("it does not train")
    }

    fn predict_step(&self, x: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let Wide { first, one, two, last } = &self.net;
        let hidden = first.forward(&x.to_kind(first.weight.kind()))?.relu();
        Ok(last.forward(&two.forward(&one.forward(&hidden)?.relu())?.relu())?.to_kind(Kind::Float))
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        anyhow::bail!("it has no optimizer")
    }
}

/// ZeRO-Inference: weights that no rank has whole come from host memory or files, as they are needed, and there is no optimizer.
fn predict(ranks: usize, folder: &Path) {
    let whole = Predicting { net: Wide::new() };
    let path = folder.join("weights.ckpt");
    Checkpoint { weights: weights(&whole), ..Checkpoint::default() }.save(&path).unwrap();
    let x = numbers(&[12, 5], 1.0);
    let Wide { first, one, two, last } = &whole.net;
    let expected = tch::no_grad(|| {
        let hidden = one.forward(&first.forward(&x).unwrap().relu()).unwrap().relu();
        last.forward(&two.forward(&hidden).unwrap().relu()).unwrap()
    });
    for (accelerator, precision, params) in [
        ("cpu", "32-true", OffloadDevice::None),
        ("cpu", "32-true", OffloadDevice::Nvme),
        ("cpu", "bf16-true", OffloadDevice::Nvme),
        ("hpu", "32-true", OffloadDevice::Cpu),
        ("hpu", "32-true", OffloadDevice::Nvme),
    ] {
        let name = format!("{accelerator} {precision} {params:?}");
        let offload = Offload { params, ..NONE };
        let (in_folder, kept) =
            (folder.to_path_buf(), if precision == "32-true" { "float32" } else { "bfloat16" });
        let check = LambdaCallback::new().on_predict_batch_end(move |ctx, _| {
            let found: Vec<String> = open_files(&in_folder).into_iter().map(|(name, _)| name).collect();
            let file = |id| format!("{kept}params/rank{}/{id}_param.tensor.swp", rank_of(ctx));
            let expected = if params == OffloadDevice::Nvme { vec![file(2), file(4)] } else { Vec::new() };
            assert_eq!(found, expected);
            Ok(())
        });
        let builder = offloading(ranks, accelerator, folder, offload).precision(precision).callback(check);
        let mut trainer = builder.build().unwrap();
        let linear = |inputs, outputs| Linear::new(inputs, outputs).unwrap();
        let mut net = init::deferred(|| Predicting {
            net: Wide {
                first: linear(5, WIDTH),
                one: linear(WIDTH, WIDTH),
                two: linear(WIDTH, WIDTH),
                last: linear(WIDTH, 3),
            },
        });
        let loader = DataLoader::new(TensorDataset::new(x.copy()).unwrap()).batch_size(2).build().unwrap();
        trainer.ckpt_path(path.as_path());
        let found = trainer.predict(&mut net, &mut Loaders::new().predict(loader)).unwrap();
        let found = Tensor::cat(&found[0], 0).to_device(tch::Device::Cpu);
        let own: Vec<i64> =
            (0..12).filter(|sample| *sample as usize % ranks == trainer.world().rank).collect();
        let expected = expected.index_select(0, &Tensor::from_slice(&own));
        let difference = (found - &expected).abs().max().double_value(&[]);
        let tolerance = if precision == "32-true" { 1e-5 } else { 0.05 };
        assert!(difference <= tolerance * expected.abs().max().double_value(&[]), "{name}: {difference}");
        assert!(net.net.one.weight.is_sharded(), "{name}: the module stays sharded");
        drop(net);
    }
}

on_ranks_tests! {
    two_ranks_predict_with_weights_from_host_and_files: 2, predict;
    files_change_no_bit: 2, climb;
    a_run_with_files_resumes_bit_for_bit: 2, go_on;
    values_in_files_are_read_and_changed_by_name: 2, read_through;
}
