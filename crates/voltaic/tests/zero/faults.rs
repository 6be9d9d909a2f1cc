//! Ranks that die, stop or leave something out: all end within the time-out, and the last checkpoint is whole.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use voltaic::Module;
use voltaic::callback::Callback;
use voltaic::checkpoint::Checkpoint;
use voltaic::distributed::World;
use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::nn::Forward;
use voltaic::optim::Optimizers;
use voltaic::strategy::{BuildStrategy, Strategy, Zero, ZeroConfig, ZeroStage};
use voltaic::{Result, Tensor};

use crate::models::{Batch, Small, loaders};
use crate::ranks::{folder_of_rank, output, silent};
use crate::shards::SaveAfter;

const FAULT: &str = "VOLTAIC_TEST_FAULT";

/// Stage 3 that gathers each weight when it is needed, and waits for two seconds.
struct Impatient;

impl BuildStrategy for Impatient {
    fn timeout(&self) -> Duration {
        Duration::from_secs(2)
    }

    fn build(self: Box<Self>, world: World) -> Result<Box<dyn Strategy>> {
        let config = ZeroConfig {
            param_persistence_threshold: 0,
            prefetch_bucket_size: 0,
            max_reuse_distance: 0,
            timeout: Duration::from_secs(2),
            ..ZeroConfig::of_stage(ZeroStage::Three)
        };
        Ok(Box::new(Zero::new(world, config)))
    }
}

fn signal_self(signal: &str) {
    let pid = std::process::id().to_string();
    Command::new("kill").args([signal, &pid]).status().unwrap();
    std::thread::sleep(Duration::from_secs(60));
}

/// Does what is asked in a phase, on rank 1 in its third step.
fn fault(phase: &str, rank: usize, batch: usize) {
    if rank != 1 || batch != 2 {
        return;
    }
    match std::env::var(FAULT).unwrap().split_once(" in ") {
        Some(("killed", at)) if at == phase => signal_self("-KILL"),
        Some(("stopped", at)) if at == phase => signal_self("-STOP"),
        _ => {}
    }
}

/// The net, with a fault in its forward.
#[derive(Module)]
struct Faulty {
    net: Small,
}

impl LightningModule for Faulty {
    type Batch = Batch;

    fn training_step(&self, (x, y): &Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let rank = ctx.process_group().map_or(0, |group| group.rank());
        let hidden = self.net.first.forward(x)?.relu();
        fault("gather", rank, ctx.batch_idx());
        let is_left_out = std::env::var(FAULT).unwrap() == "left out in gather";
        if is_left_out && rank == 1 && ctx.batch_idx() == 2 {
            self.net.first.weight.try_tensor()?; // others take the second layer's first
        }
        Ok((self.net.second.forward(&hidden)? - y).square().mean(tch::Kind::Float))
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        self.net.configure_optimizers()
    }
}

/// Faults between the parts of a step, and in saving.
struct Faults;

impl Callback for Faults {
    fn on_before_backward(&mut self, ctx: &mut HookContext, _module: &dyn Module) -> anyhow::Result<()> {
        fault("backward", ctx.process_group().map_or(0, |group| group.rank()), ctx.batch_idx());
        Ok(())
    }

    fn on_before_optimizer_step(
        &mut self,
        ctx: &mut HookContext,
        _module: &dyn Module,
    ) -> anyhow::Result<()> {
        fault("step", ctx.process_group().map_or(0, |group| group.rank()), ctx.batch_idx());
        Ok(())
    }

    fn on_save_checkpoint(
        &mut self,
        ctx: &mut HookContext,
        _checkpoint: &mut Checkpoint,
    ) -> anyhow::Result<()> {
        let rank = ctx.process_group().map_or(0, |group| group.rank());
        let batch = ctx.global_step() as usize - 1;
        fault("save", rank, batch);
        if rank == 1 && batch == 2 && std::env::var(FAULT).unwrap() == "full in save" {
            // its disk is full: a file may not grow any more
            let ignored = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
            signal_hook::flag::register(libc::SIGXFSZ, ignored).unwrap();
            let pid = std::process::id().to_string();
            let status = Command::new("prlimit").args(["--pid", &pid, "--fsize=512"]).status().unwrap();
            assert!(status.success());
        }
        Ok(())
    }
}

fn train(ranks: usize, folder: &Path) {
    let path = folder.join("saved.ckpt");
    let builder = silent(ranks, "ddp", folder).strategy(Impatient).gradient_clip_val(0.5).max_epochs(1);
    let builder = builder.callback(SaveAfter(1, path.clone())).callback(SaveAfter(2, path)).callback(Faults);
    let done = builder
        .build()
        .and_then(|mut trainer| trainer.fit(&mut Faulty { net: Small::new() }, &mut loaders(24)));
    let rank = std::env::var("RANK").unwrap_or_default();
    match done {
        Ok(()) => println!("\nrank {rank} has trained"),
        Err(error) => {
            eprintln!("\nerror on rank {rank}: {error}");
            std::process::exit(1)
        }
    }
}

#[test]
fn faults_end_all_ranks_and_leave_the_checkpoint() {
    if let Some(folder) = folder_of_rank() {
        return train(2, &folder);
    }
    let test = "faults::faults_end_all_ranks_and_leave_the_checkpoint";
    let folder = tempfile::tempdir().unwrap();
    // without a fault: the checkpoint after three steps, and after two
    let whole = output(test, 2, folder.path(), &[(FAULT, "none")]);
    assert!(whole.status.success(), "{}", String::from_utf8_lossy(&whole.stderr));
    for (fault, named) in [
        ("killed in gather", "weights of net.second"),
        ("stopped in gather", "weights of net.second"),
        ("left out in gather", "weights of net.second"),
        ("killed in backward", "weights of net.first"), // the second are still there
        ("stopped in backward", "weights of net.first"),
        ("killed in step", "step"),
        ("killed in save", "checkpoint"),
        ("stopped in save", "checkpoint"),
        ("full in save", "rank 1: cannot write"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let begun = Instant::now();
        let output = output(test, 2, folder.path(), &[(FAULT, fault)]);
        let logs = folder.path().join("rank_logs/rank_1.log");
        let shown = String::from_utf8_lossy(&output.stderr).into_owned()
            + &std::fs::read_to_string(logs).unwrap_or_default();
        assert!(!output.status.success() && begun.elapsed() < Duration::from_secs(60), "{fault}: {shown}");
        assert!(shown.contains(named), "{fault}: {shown}");
        if fault.starts_with("stopped") || fault.starts_with("killed") {
            assert!(shown.contains("rank 1"), "{fault}: {shown}");
        }
        // as it was after two steps
        let saved = Checkpoint::load(&folder.path().join("saved.ckpt")).unwrap();
        assert_eq!(saved.meta.global_step, 2, "{fault}");
        let left = std::fs::read_dir(folder.path()).unwrap().flatten().map(|entry| entry.file_name());
        let left: Vec<_> = left.filter(|name| name.to_string_lossy().ends_with(".tmp")).collect();
        assert!(left.is_empty(), "{fault}: {left:?}");
    }
    let saved = Checkpoint::load(&folder.path().join("saved.ckpt")).unwrap();
    assert_eq!(saved.meta.global_step, 3, "without a fault the second one takes its place");
}
