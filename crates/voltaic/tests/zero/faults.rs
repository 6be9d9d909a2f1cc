//! Ranks that die, stop or leave something out: all end within the time-out, and the last checkpoint is whole.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use voltaic::Module;
use voltaic::callback::Callback;
use voltaic::checkpoint::Checkpoint;
use voltaic::distributed::{ProcessGroup, ReduceOp, World, collective_scope};
use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::nn::{Forward, ModuleCall};
use voltaic::optim::{AdamW, BuildOptimizer, GradientClip, Optimizer, Optimizers, ParamGroupSpec};
use voltaic::strategy::{BuildStrategy, Strategy, Zero, ZeroConfig, ZeroStage};
use voltaic::{Result, Tensor};

use crate::models::{Batch, Small, loaders};
use crate::ranks::{folder_of_rank, on_ranks, output, runs_all, silent};
use crate::shards::SaveAfter;
use crate::signal::signal_self;

const FAULT: &str = "VOLTAIC_TEST_FAULT";

/// A stage with small units and one weight that stays; it waits for two seconds once the ranks have met.
fn impatient(stage: ZeroStage) -> impl BuildStrategy {
    move |world: World| {
        let config = ZeroConfig {
            reduce_bucket_size: 110,        // each layer's weight at least has its own
            param_persistence_threshold: 3, // of the second layer's bias
            prefetch_bucket_size: 0,
            max_reuse_distance: 0,
            timeout: Duration::from_secs(2),
            ..ZeroConfig::of_stage(stage)
        };
        Ok(Box::new(Zero::new(world, config)) as Box<dyn Strategy>)
    }
}

fn end_by(signal: &str) {
    signal_self(signal).unwrap();
    std::thread::sleep(Duration::from_secs(60));
}

/// Whether this is rank 1 in its third step, where all goes wrong.
static IS_THERE: AtomicBool = AtomicBool::new(false);

fn has_fault(fault: &str) -> bool {
    IS_THERE.load(Ordering::Relaxed) && std::env::var(FAULT).unwrap() == fault
}

/// Does what is asked in a phase.
fn fault(phase: &str) {
    if has_fault(&format!("killed in {phase}")) {
        end_by("-KILL");
    } else if has_fault(&format!("stopped in {phase}")) {
        end_by("-STOP");
    }
}

/// Others sum something in the third step.
fn sum_of_others(phase: &str, group: Option<&ProcessGroup>, batch: usize) -> anyhow::Result<()> {
    let is_left_out = std::env::var(FAULT).unwrap() == format!("left out in {phase}");
    let Some(group) = group.filter(|group| is_left_out && batch == 2 && group.rank() != 1) else {
        return Ok(());
    };
    let _named = collective_scope("of this test");
    Ok(group.all_reduce(&Tensor::zeros([7], (tch::Kind::Float, tch::Device::Cpu)), ReduceOp::Sum)?)
}

/// The net, with a fault in its forward.
#[derive(Module)]
struct Faulty {
    net: Small,
    #[module(skip)]
    stage: ZeroStage,
}

impl LightningModule for Faulty {
    type Batch = Batch;

    fn training_step(&self, (x, y): &Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let rank = ctx.process_group().map_or(0, |group| group.rank());
        IS_THERE.store(rank == 1 && ctx.batch_idx() == 2, Ordering::Relaxed);
        let hidden = self.net.first.forward(x)?.relu();
        fault("gather");
        if self.stage < ZeroStage::Three {
            sum_of_others("gather", ctx.process_group(), ctx.batch_idx())?;
        } else if has_fault("left out in gather") {
            self.net.first.weight.try_tensor()?; // others take the second layer's first
        }
        Ok((self.net.second.forward(&hidden)? - y).square().mean(tch::Kind::Float))
    }

    fn backward(&self, loss: &Tensor, ctx: &mut HookContext) -> anyhow::Result<()> {
        if self.stage < ZeroStage::Three {
            sum_of_others("backward", ctx.process_group(), ctx.batch_idx())?;
        } else if has_fault("left out in backward") {
            return Ok(()); // without the weights that it needs
        }
        Ok(loss.f_backward()?)
    }

    fn configure_gradient_clipping(
        &self,
        optimizer: &mut dyn Optimizer,
        clip: Option<GradientClip>,
        _ctx: &mut HookContext,
    ) -> anyhow::Result<()> {
        match clip.filter(|_| !has_fault("left out in step")) {
            Some(clip) => Ok(optimizer.clip(clip).map(drop)?),
            None => Ok(()),
        }
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Optimizers::new(FaultyAdamW).into()
    }
}

/// AdamW, with a fault when its parts of the weights have changed, and before others get them.
struct FaultyAdamW;

impl BuildOptimizer for FaultyAdamW {
    fn name(&self) -> &'static str {
        "AdamW"
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn build(&self, groups: Vec<ParamGroupSpec>) -> Result<Box<dyn Optimizer>> {
        Ok(Box::new(Stepped(AdamW::new(0.01).build(groups)?)))
    }
}

struct Stepped(Box<dyn Optimizer>);

impl Optimizer for Stepped {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn step(&mut self) -> Result<()> {
        self.0.step()?;
        fault("weights");
        Ok(())
    }

    as_in!(0);
}

/// Faults between the parts of a step, and in saving.
struct Faults;

impl Callback for Faults {
    fn on_train_start(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        // the gradients of the second layer are on their way then
        let hook = |_: &ModuleCall<'_>, _: &mut [Option<Tensor>]| {
            fault("reduce");
            Ok(())
        };
        let _ = ctx.module_hooks().register_full_backward_pre_hook("net.first", hook);
        Ok(())
    }

    fn on_before_backward(&mut self, _ctx: &mut HookContext, _module: &dyn Module) -> anyhow::Result<()> {
        fault("backward");
        Ok(())
    }

    fn on_before_optimizer_step(
        &mut self,
        _ctx: &mut HookContext,
        _module: &dyn Module,
    ) -> anyhow::Result<()> {
        fault("step");
        Ok(())
    }

    fn on_save_checkpoint(
        &mut self,
        ctx: &mut HookContext,
        _checkpoint: &mut Checkpoint,
    ) -> anyhow::Result<()> {
        if ctx.global_step() < 3 {
            return Ok(());
        }
        fault("save");
        if has_fault("full in save") {
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

fn train(ranks: usize, stage: ZeroStage, folder: &Path) {
    let path = folder.join("saved.ckpt");
    let builder =
        silent(ranks, "ddp", folder).strategy(impatient(stage)).gradient_clip_val(0.5).max_epochs(1);
    let builder = builder.callback(SaveAfter(1, path.clone())).callback(SaveAfter(2, path)).callback(Faults);
    let done = builder
        .build()
        .and_then(|mut trainer| trainer.fit(&mut Faulty { net: Small::new(), stage }, &mut loaders(24)));
    match done {
        Ok(()) => println!("\na rank has trained"),
        Err(error) => {
            eprintln!("\nerror of a rank: {error}");
            std::process::exit(1)
        }
    }
}

/// Runs with a fault, and looks for these words in what is said.
fn run(test: &str, fault: &str, named: &[&str]) {
    let (folder, begun) = (tempfile::tempdir().unwrap(), Instant::now());
    let output = output(test, 2, folder.path(), &[(FAULT, fault)]);
    let logs = folder.path().join("rank_logs/rank_1.log");
    let shown = String::from_utf8_lossy(&output.stderr).into_owned()
        + &std::fs::read_to_string(logs).unwrap_or_default();
    let took = begun.elapsed();
    assert!(!output.status.success() && took < Duration::from_secs(60), "{test}, {fault}, {took:?}: {shown}");
    for named in named {
        assert!(shown.contains(named), "{test}, {fault}: `{named}` is missing: {shown}");
    }
    for bad in ["in  (operation", "operation 0,", "Exception raised from", "frame #"] {
        assert!(!shown.contains(bad), "{test}, {fault}: `{bad}`: {shown}");
    }
    // as it was after two steps
    let saved = Checkpoint::load(folder.path().join("saved.ckpt")).unwrap();
    assert_eq!(saved.meta.global_step, 2, "{fault}");
    let left = std::fs::read_dir(folder.path()).unwrap().flatten().map(|entry| entry.file_name());
    let left: Vec<_> = left.filter(|name| name.to_string_lossy().ends_with(".tmp")).collect();
    assert!(left.is_empty(), "{fault}: {left:?}");
}

/// All faults of a stage.
fn all_faults(test: &str, stage: ZeroStage) {
    if let Some(folder) = folder_of_rank() {
        return train(2, stage, &folder);
    }
    // without a fault: the checkpoint after three steps, and after two
    let folder = tempfile::tempdir().unwrap();
    let whole = output(test, 2, folder.path(), &[(FAULT, "none")]);
    assert!(whole.status.success(), "{}", String::from_utf8_lossy(&whole.stderr));
    let saved = Checkpoint::load(folder.path().join("saved.ckpt")).unwrap();
    assert_eq!(saved.meta.global_step, 3, "without a fault the second one takes its place");

    const REDUCE: &str = "gradients of net.";
    const ELSEWHERE: &str = "rank 1 was in ";
    let divides_weights = stage == ZeroStage::Three;
    let backward = "stops, signals and batches without a loss";
    let forward = if divides_weights { "weights of net.second" } else { backward };
    let left_out = |weights| if divides_weights { weights } else { "of this test" };
    let cases: [(&str, [&str; 3]); 16] = [
        ("killed in gather", [forward, "rank 1 (", "has ended) was "]),
        ("stopped in gather", [forward, "rank 1 (", "a signal has stopped) is "]),
        ("left out in gather", [left_out("weights of net.second"), "failed on rank 0 of 2", ELSEWHERE]),
        ("killed in backward", [backward, "rank 1 (", "has ended) was "]),
        ("stopped in backward", [backward, "rank 1 (", "a signal has stopped) is "]),
        ("left out in backward", [left_out("weights of net.first"), "failed on rank 0 of 2", ELSEWHERE]),
        ("killed in reduce", [REDUCE, "rank 1 (", "reduce_scatter (operation "]),
        ("stopped in reduce", [REDUCE, "rank 1 (", "reduce_scatter (operation "]),
        ("killed in step", ["from configure_gradient_clipping", "rank 1 (", "has ended) was "]),
        ("stopped in step", ["from configure_gradient_clipping", "rank 1 (", "a signal has stopped) is "]),
        ("left out in step", ["from configure_gradient_clipping", "failed on rank 0 of 2", ELSEWHERE]),
        ("killed in weights", ["weights of net.", "rank 1 (", "all_gather (operation "]),
        ("stopped in weights", ["weights of net.", "rank 1 (", "all_gather (operation "]),
        ("killed in save", ["checkpoint", "rank 1 (", "has ended) was "]),
        ("stopped in save", ["checkpoint", "rank 1 (", "a signal has stopped) is "]),
        ("full in save", ["checkpoint", "rank 1: cannot write", "rank-1.safetensors"]),
    ];
    // each phase and each fault once or twice; of a stage that has the same code as others fewer will do
    let few =
        ["stopped in gather", "killed in reduce", "left out in step", "killed in weights", "full in save"];
    let more = ["left out in gather", "stopped in backward", "left out in backward", "killed in save"];
    let is_chosen = |fault: &str| few.contains(&fault) || (divides_weights && more.contains(&fault));
    let cases: Vec<_> = cases.into_iter().filter(|(fault, _)| runs_all() || is_chosen(fault)).collect();
    // they mostly wait
    for some in cases.chunks(5) {
        std::thread::scope(|scope| {
            for (fault, named) in some {
                let thread = std::thread::Builder::new().name(test.to_owned());
                thread.spawn_scoped(scope, || run(test, fault, named)).unwrap();
            }
        });
    }
}

#[test]
#[ignore = "a long form, which make stress runs"]
fn faults_end_all_ranks_of_stage_1_and_leave_the_checkpoint() {
    all_faults("faults::faults_end_all_ranks_of_stage_1_and_leave_the_checkpoint", ZeroStage::One);
}

#[test]
#[ignore = "a long form, which make stress runs"]
fn faults_end_all_ranks_of_stage_2_and_leave_the_checkpoint() {
    all_faults("faults::faults_end_all_ranks_of_stage_2_and_leave_the_checkpoint", ZeroStage::Two);
}

#[test]
fn faults_end_all_ranks_of_stage_3_and_leave_the_checkpoint() {
    all_faults("faults::faults_end_all_ranks_of_stage_3_and_leave_the_checkpoint", ZeroStage::Three);
}

#[test]
fn what_rank_0_cannot_save_after_a_fit_is_an_error_on_all() {
    let test = "faults::what_rank_0_cannot_save_after_a_fit_is_an_error_on_all";
    let text = on_ranks(test, 2, |ranks, folder| {
        for strategy in ["ddp", "zero3"] {
            let mut trainer = silent(ranks, strategy, folder).max_epochs(1).build().unwrap();
            let (mut net, mut data) = (Small::new(), loaders(8));
            trainer.fit(&mut net, &mut data).unwrap();
            std::fs::write(folder.join("file"), "").unwrap();
            let (path, begun) = (folder.join("file/saved.ckpt"), Instant::now());
            let of_weights = trainer.save_weights(&net, &path, None).unwrap_err();
            let of_all = trainer.save_checkpoint(&mut net, &mut data, &path, None).unwrap_err();
            for error in [of_weights, of_all] {
                let text = error.to_string();
                let named =
                    text.starts_with("cannot save ") && text.contains("/file/saved.ckpt: rank 0: cannot ");
                assert!(named, "{strategy}: {text}");
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "nobody waits for rank 0");
            // and the group is still of use
            trainer.save_weights(&net, folder.join(format!("{strategy}.ckpt")), None).unwrap();
            println!("saved by {strategy}");
        }
    });
    if let Some(text) = text {
        assert!(text.contains("saved by ddp") && text.contains("saved by zero3"), "{text}");
    }
}
