//! Runs of several ranks when things go badly.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;
use voltaic::callback::{Callback, LambdaCallback, ModelCheckpoint, ModelCheckpointConfig};
use voltaic::checkpoint::{Checkpoint, CheckpointIo, write_atomically};
use voltaic::logger::{Logger, RunFolders};
use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::optim::Optimizers;
use voltaic::profiler::{SimpleProfiler, SimpleProfilerConfig};
use voltaic::strategy::DdpConfig;
use voltaic::{Module, Tensor};

use crate::ddp::{FOLDER, Net, alone, assert_same, builder, finish, folder_of_parent, loaders, weights};
use crate::probe::{files, own_process, plays, silent, text_of};

fn kill_self() {
    let pid = std::process::id().to_string();
    Command::new("kill").args(["-KILL", &pid]).status().unwrap();
    std::thread::sleep(Duration::from_secs(60));
}

/// The net, with what goes wrong in the forward of rank 1.
#[derive(Module)]
struct Faulty {
    net: Net,
    #[module(skip)]
    fault: String,
}

lightning_module!(Faulty, (Tensor, Tensor), |net| net.net.configure_optimizers(), |net, batch, ctx| {
    let loss = net.net.training_step(batch, ctx)?;
    if ctx.process_group().is_some_and(|group| group.rank() == 1) && ctx.batch_idx() == 2 {
        match net.fault.as_str() {
            "killed in forward" => kill_self(),
            "hangs" => std::thread::sleep(Duration::from_secs(60)),
            "fails" => anyhow::bail!("the data of rank 1 is broken"),
            _ => {}
        }
    }
    Ok(loss)
});

/// What goes wrong between backward and the step.
struct Fault(String);

impl Callback for Fault {
    fn on_before_optimizer_step(
        &mut self,
        ctx: &mut HookContext,
        _module: &dyn Module,
    ) -> anyhow::Result<()> {
        // rank 1 is gone when rank 0 is in the middle of its all_reduce
        if self.0 == "killed in a collective" && ctx.global_step() == 1 {
            let Some(group) = ctx.process_group() else { return Ok(()) };
            if group.rank() == 1 {
                std::thread::spawn(|| {
                    std::thread::sleep(Duration::from_millis(100));
                    kill_self();
                });
            }
            let tensor = Tensor::zeros([1], (voltaic::Kind::Float, tch::Device::Cpu));
            loop {
                group.all_reduce(&tensor, voltaic::distributed::ReduceOp::Sum)?;
            }
        }
        Ok(())
    }
}

fn train(fault: &str) {
    if fault == "killed in the rendezvous" && std::env::var("LOCAL_RANK").is_ok_and(|rank| rank == "1") {
        kill_self();
    }
    let config = DdpConfig { timeout_secs: 2.0, ..DdpConfig::default() };
    let builder = silent().max_epochs(2).limit_val_batches(0).devices(2).strategy(config);
    let builder = builder.default_root_dir(folder_of_parent());
    let built = builder.callback(Fault(fault.to_owned())).build();
    let mut trainer = built.unwrap_or_else(|error| fail(&error));
    let mut module = Faulty { net: Net::new(), fault: fault.to_owned() };
    trainer.fit(&mut module, &mut loaders(None)).unwrap_or_else(|error| fail(&error));
}

fn fail(error: &voltaic::Error) -> ! {
    eprintln!("error: {error}");
    std::process::exit(1)
}

/// Runs with a fault; returns the output and how long it took.
fn run(fault: &str, folder: &Path) -> (Output, Duration) {
    let started = Instant::now();
    let mut command = own_process(fault);
    let output = command.env(FOLDER, folder).stdout(Stdio::piped()).stderr(Stdio::piped()).output().unwrap();
    (output, started.elapsed())
}

/// Processes that still run with this folder in their environment.
fn orphans(folder: &Path) -> usize {
    let needle = format!("{FOLDER}={}", folder.display());
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let environments = processes.filter_map(|entry| std::fs::read(entry.path().join("environ")).ok());
    environments.filter(|bytes| String::from_utf8_lossy(bytes).contains(&needle)).count()
}

#[test]
fn a_rank_that_ends_or_hangs_takes_the_others_down() {
    let cases = [
        ("killed in the rendezvous", "launcher: rank 1 (local rank 1", "was killed by signal 9", 137),
        ("killed in forward", "launcher: rank 1 (local rank 1", "was killed by signal 9", 137),
        ("killed in a collective", "launcher: rank 1 (local rank 1", "was killed by signal 9", 137),
        ("fails", "launcher: rank 1 (local rank 1", "the data of rank 1 is broken", 1),
        ("hangs", "error: all_reduce (operation", "rank 1 did not take part", 1),
    ];
    for (fault, ..) in cases {
        if plays(fault) {
            return train(fault);
        }
    }
    for (fault, first, text, code) in cases {
        let folder = TempDir::new().unwrap();
        let (output, took) = run(fault, folder.path());
        let shown = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{fault}: {shown}");
        let lines: Vec<&str> = shown
            .lines()
            .filter(|line| line.starts_with("launcher:") || line.starts_with("error:"))
            .collect();
        assert!(lines.first().is_some_and(|line| line.starts_with(first)), "{fault}: {shown}");
        assert!(shown.contains(text), "{fault}: {shown}");
        // the hanging one has to run into its time-out of 2 s first
        assert!(took < Duration::from_secs(40), "{fault} took {took:?}: {shown}");
        assert_eq!(orphans(folder.path()), 0, "{fault}");
    }
}

/// Kills its process, once, when half of the second checkpoint is written.
struct KilledWhileSaving(usize);

impl CheckpointIo for KilledWhileSaving {
    fn save_checkpoint(
        &mut self,
        checkpoint: &Checkpoint,
        path: &Path,
        _storage_options: Option<&Value>,
    ) -> voltaic::Result<()> {
        self.0 += 1;
        if self.0 == 2 && std::env::var("VOLTAIC_RESTART_COUNT").is_ok_and(|count| count == "0") {
            checkpoint.save(&path.with_file_name("whole"))?;
            let bytes = std::fs::read(path.with_file_name("whole")).unwrap();
            write_atomically(path, |file| {
                file.write_all(&bytes[..bytes.len() / 2])?;
                file.flush()?;
                for saved in files(path.parent().unwrap()).iter().filter(|file| file.extension().is_some()) {
                    println!("there is {}", saved.file_name().unwrap().display());
                }
                kill_self();
                Ok(())
            })?;
        }
        checkpoint.save(path)
    }
}

#[test]
fn a_rank_killed_while_saving_leaves_the_checkpoint_before_which_others_go_on_from() {
    if plays("saving") {
        let folder = folder_of_parent();
        let builder = builder(&folder).devices(2).max_restarts(1_u64).enable_checkpointing(true);
        let mut trainer = builder.checkpoint_io(KilledWhileSaving(0)).build().unwrap();
        let mut net = Net::new();
        trainer.fit(&mut net, &mut loaders(None)).unwrap();
        return finish(&trainer, &net, &folder);
    }
    let folder = TempDir::new().unwrap();
    let output = own_process("saving").env(FOLDER, folder.path()).output().unwrap();
    let text = text_of(&output);
    let shown = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_contains!(&shown, "launcher: rank 0 (process", "was killed by signal 9");
    assert!(text.contains("there is epoch=0-step=6.ckpt") && text.contains(".tmp"), "{text}");
    let (_kept, expected, ..) = alone(2, 1);
    assert_same(&weights(folder.path()), &expected);
    for saved in files(&folder.path().join("checkpoints")) {
        Checkpoint::load(&saved).unwrap();
    }
}

fn train_until_told() {
    let builder = builder(&folder_of_parent()).devices(2).max_epochs(-1).save_on_signal(true).callback(
        LambdaCallback::new().on_train_batch_end(|ctx, _| {
            if ctx.global_step() == 3 && ctx.is_global_zero() {
                println!("\ntraining");
            }
            if plays("stuck") && ctx.global_step() == 3 {
                std::thread::sleep(Duration::from_secs(60));
            }
            Ok(())
        }),
    );
    let mut trainer = builder.build().unwrap_or_else(|error| fail(&error));
    match trainer.fit(&mut Net::new(), &mut loaders(None)) {
        Err(voltaic::Error::Interrupted { signal, .. }) => {
            println!("\nrank {} was told by {signal}", trainer.world().rank);
            std::process::exit(if signal == "SIGINT" { 130 } else { 143 })
        }
        outcome => panic!("{outcome:?}"),
    }
}

fn tell(launcher: &Child, signal: &str) {
    assert!(Command::new("kill").args([signal, &launcher.id().to_string()]).status().unwrap().success());
}

#[test]
fn signals_to_the_launcher_reach_all_ranks() {
    if plays("endless") || plays("stuck") {
        return train_until_told();
    }
    for (part, signals, code, told) in [
        ("endless", &["-INT"][..], Some(130), "SIGINT"),
        ("endless", &["-TERM"], Some(143), "SIGTERM"),
        ("stuck", &["-INT", "-INT"], Some(130), ""), // the second is for the impatient
        ("stuck", &["-KILL"], None, ""),
    ] {
        let folder = TempDir::new().unwrap();
        let mut command = own_process(part);
        let mut launcher =
            command.env(FOLDER, folder.path()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(launcher.stdout.take().unwrap()).lines().map_while(Result::ok);
        assert!(lines.any(|line| line == "training"), "{part}");
        for (number, signal) in signals.iter().enumerate() {
            if number > 0 {
                std::thread::sleep(Duration::from_millis(300)); // signals of one kind that come at once are one
            }
            tell(&launcher, signal);
        }
        let output = lines.collect::<Vec<_>>().join("\n"); // ends when all who could write are gone
        let status = launcher.wait().unwrap();
        assert_eq!(status.code(), code, "{part} {signals:?}: {output}");
        if !told.is_empty() {
            let log = std::fs::read_to_string(folder.path().join("rank_logs/rank_1.log")).unwrap();
            assert!(output.contains(&format!("rank 0 was told by {told}")), "{output}");
            assert!(log.contains(&format!("rank 1 was told by {told}")), "{log}");
            let saved = Checkpoint::load(folder.path().join("checkpoints/on_signal.ckpt")).unwrap();
            assert_eq!(saved.training.unwrap().ranks.len(), 1, "with what rank 1 has to itself");
        }
        let deadline = Instant::now() + Duration::from_secs(10); // killed ones take a moment to vanish
        while orphans(folder.path()) > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(orphans(folder.path()), 0, "{part} {signals:?}");
    }
}

/// What rank 0 does alone, and fails at: a call of its logger, or a file.
const LONE_ACTIONS: [&str; 7] =
    ["begin", "log_hyperparams", "log_metrics", "save", "finalize", "weights", "profile"];

/// Has one call that fails.
struct FailingLogger(&'static str);

impl FailingLogger {
    fn call(&self, name: &str) -> voltaic::Result<()> {
        if name != self.0 {
            return Ok(());
        }
        Err(voltaic::error::ConfigError::new("logger", format!("{name}: the disk is full"), "make room")
            .into())
    }
}

impl Logger for FailingLogger {
    fn log_dir(&self) -> Option<&Path> {
        None
    }

    fn begin(&mut self, _folders: &mut RunFolders) -> voltaic::Result<()> {
        self.call("begin")
    }

    fn log_hyperparams(&mut self, _hyper_parameters: &Value) -> voltaic::Result<()> {
        self.call("log_hyperparams")
    }

    fn log_metrics(&mut self, _metrics: &[(String, f64)], _step: u64) -> voltaic::Result<()> {
        self.call("log_metrics")
    }

    fn save(&mut self) -> voltaic::Result<()> {
        self.call("save")
    }

    fn finalize(&mut self, _success: bool) -> voltaic::Result<()> {
        self.call("finalize")
    }
}

/// Cannot save weights.
struct FullDisk;

impl CheckpointIo for FullDisk {
    fn save_checkpoint(&mut self, _: &Checkpoint, path: &Path, _: Option<&Value>) -> voltaic::Result<()> {
        let what = format!("{}: the disk is full", path.display());
        Err(voltaic::error::ConfigError::new("checkpoint", what, "make room").into())
    }
}

/// The net, which has a hyper-parameter.
#[derive(Module)]
struct Described(Net);

impl LightningModule for Described {
    type Batch = (Tensor, Tensor);

    fn training_step(&self, batch: &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        self.0.training_step(batch, ctx)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        self.0.configure_optimizers()
    }

    fn hyper_parameters(&self) -> Value {
        serde_json::json!({"width": 3})
    }
}

fn train_until_rank_0_fails(action: &'static str, strategy: &str) -> voltaic::Result<()> {
    let folder = folder_of_parent();
    let builder =
        builder(&folder).devices(2).strategy(strategy).limit_val_batches(0).log_every_n_steps(1_u64);
    let builder = match action {
        "weights" => {
            let config =
                ModelCheckpointConfig { save_weights_only: true, ..ModelCheckpointConfig::default() };
            let callback = ModelCheckpoint::new(config)?;
            builder.enable_checkpointing(true).checkpoint_io(FullDisk).callback(callback)
        }
        // the folder of the reports is a file
        "profile" => {
            let dirpath = Some(folder.join("file"));
            builder.with_profiler(SimpleProfiler::new(SimpleProfilerConfig { dirpath, ..Default::default() }))
        }
        _ => builder.with_logger(FailingLogger(action)),
    };
    builder.build()?.fit(&mut Described(Net::new()), &mut loaders(None))
}

#[test]
fn what_rank_0_cannot_write_ends_all_ranks_with_its_error() {
    let cases = LONE_ACTIONS.into_iter().flat_map(|action| [(action, "ddp"), (action, "zero2")]);
    for (action, strategy) in cases.clone() {
        if plays(&format!("{action} {strategy}")) {
            let error = train_until_rank_0_fails(action, strategy).expect_err("rank 0 cannot write");
            eprintln!("error: {error}");
            // a program that lives on does not tell the others by its end
            let is_rank_0 = std::env::var("LOCAL_RANK").map_or(true, |rank| rank == "0");
            std::thread::sleep(Duration::from_secs(if is_rank_0 { 4 } else { 0 }));
            std::process::exit(1);
        }
    }
    // each action with one of the strategies
    let few = cases.enumerate().filter(|(index, _)| index % 4 == 0 || index % 4 == 3);
    for (_, (action, strategy)) in few {
        let folder = TempDir::new().unwrap();
        std::fs::write(folder.path().join("file"), "").unwrap();
        let mut command = own_process(&format!("{action} {strategy}"));
        let output = command.env(FOLDER, folder.path()).output().unwrap();
        let own = String::from_utf8_lossy(&output.stderr).into_owned();
        let other = std::fs::read_to_string(folder.path().join("rank_logs/rank_1.log")).unwrap_or_default();
        let of_rank_1 = other.lines().find(|line| line.contains("error: ")).unwrap_or_default();
        assert!(own.contains("error: "), "{action} {strategy}: {own}");
        let expected = if action == "profile" { "rank " } else { "rank 0: " };
        assert!(of_rank_1.contains(expected), "{action} {strategy}: {own}\nrank 1: {other}");
        assert!(!other.contains("imed out"), "{action} {strategy}: {other}");
    }
}
