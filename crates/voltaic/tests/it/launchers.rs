//! Launchers themselves, where they are installed: Slurm, Open MPI's `mpirun` and `torchrun`.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use voltaic::Module;
use voltaic::callback::Callback;
use voltaic::checkpoint::Checkpoint;
use voltaic::distributed::{ClusterEnvironment, Variables};
use voltaic::module::HookContext;

use crate::ddp::{FOLDER, Net, alone, assert_same, builder, finish, folder_of_parent, loaders, weights};
use crate::distributed::free_port;
use crate::probe::{own_process, plays, text_of};

/// Exit code of `with_slurm.sh` where there is no Slurm for it.
const NO_SLURM: i32 = 77;
const PATIENCE: Duration = Duration::from_secs(60);

/// Leaves word in the second epoch, and waits there once for a signal.
struct Waits;

impl Callback for Waits {
    fn on_train_start(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        println!("\nbegins at step {}", ctx.global_step());
        Ok(())
    }

    fn on_train_batch_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        let is_first_time = std::env::var_os("SLURM_RESTART_COUNT").is_none();
        if (ctx.current_epoch(), ctx.batch_idx()) == (1, 2) && is_first_time {
            std::fs::write(folder_of_parent().join("trains"), "")?;
            wait_for(|| folder_of_parent().join("notified").exists());
            std::thread::sleep(Duration::from_millis(500)); // Slurm is asked to send it, and sends it then
        }
        Ok(())
    }
}

#[track_caller]
fn wait_for(mut is_there: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_there() {
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {}", what_is_there());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// What a rank does; both say which they are.
fn train() {
    let folder = folder_of_parent();
    let mut trainer = builder(&folder).devices(2).callback(Waits).build().unwrap();
    let world = trainer.world();
    let environment = ClusterEnvironment::detect(&Variables::of_process());
    println!("\nrank {} of {}, started by {environment:?}", world.rank, world.world_size);
    let mut net = Net::new();
    match trainer.fit(&mut net, &mut loaders(None)) {
        Ok(()) => finish(&trainer, &net, &folder),
        Err(voltaic::Error::Interrupted { signal, global_step }) => {
            println!("\ntold by {signal} at step {global_step}");
            std::process::exit(138)
        }
        Err(error) => panic!("{error}"),
    }
}

/// Runs this test in a Slurm of its own as `part`; false where there is no Slurm.
fn beside_slurm(part: &str, folder: &Path) -> bool {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/with_slurm.sh");
    let output = started_by(Command::new(script), &own_process(part), folder);
    if output.status.code() == Some(NO_SLURM) {
        println!("skipped: {}", String::from_utf8_lossy(&output.stderr));
        return false;
    }
    println!("{}", text_of(&output));
    true
}

/// The command with `own` behind it.
fn started_by(mut launcher: Command, own: &Command, folder: &Path) -> Output {
    launcher.arg(own.get_program()).args(own.get_args()).env(FOLDER, folder);
    launcher.envs(own.get_envs().filter_map(|(key, value)| Some((key, value?))));
    launcher.output().unwrap()
}

/// What a program of Slurm prints.
fn asked(program: &str, arguments: &[&str]) -> String {
    text_of(&Command::new(program).args(arguments).output().unwrap()).trim().to_owned()
}

/// Submits a job of two ranks that runs this test as `part`; returns its number.
fn submit(part: &str, folder: &Path) -> String {
    let own = own_process(part);
    let words: Vec<_> = own.get_args().map(|word| word.to_str().unwrap()).collect();
    let script = folder.join("job.sh");
    let text = format!(
        "#!/bin/bash\nexport {}='{part}'\nsrun --kill-on-bad-exit=1 '{}' {}\n",
        crate::process::PART,
        own.get_program().to_str().unwrap(),
        words.join(" ")
    );
    std::fs::write(&script, text).unwrap();
    let output = format!("--output={}", folder.join("job.txt").display());
    let options = ["--parsable", "--nodes=1", "--ntasks-per-node=2", "--job-name=train", "--requeue"];
    let options = options.into_iter().chain(["--open-mode=append", &output, script.to_str().unwrap()]);
    asked("sbatch", &options.collect::<Vec<_>>())
}

fn state_of(job: &str) -> String {
    let shown = asked("scontrol", &["--oneliner", "show", "job", job]);
    let word = shown.split(' ').find_map(|word| word.strip_prefix("JobState="));
    word.unwrap_or_else(|| panic!("{shown}")).to_owned()
}

/// What the job and Slurm's daemons have printed.
fn what_is_there() -> String {
    let mut text = printed(&folder_of_parent());
    for name in ["slurmctld.log", "slurmd.log"] {
        let conf = PathBuf::from(std::env::var_os("SLURM_CONF").unwrap_or_default());
        text += &std::fs::read_to_string(conf.with_file_name(name)).unwrap_or_default();
    }
    text
}

fn printed(folder: &Path) -> String {
    std::fs::read_to_string(folder.join("job.txt")).unwrap_or_default()
}

/// Notifies a job as `--signal=USR1@60` would, and lets Slurm start it again at once.
fn notify_and_wait(job: &str, folder: &Path) {
    asked("scancel", &["--signal=USR1", job]);
    std::fs::write(folder.join("notified"), "").unwrap();
    wait_for(|| ["PENDING", "FAILED", "COMPLETED"].contains(&state_of(job).as_str()));
    assert_eq!(state_of(job), "PENDING", "{}", printed(folder));
    asked("scontrol", &["update", &format!("JobId={job}"), "StartTime=now"]); // Slurm waits two minutes
    wait_for(|| ["FAILED", "COMPLETED"].contains(&state_of(job).as_str()));
    assert_eq!(state_of(job), "COMPLETED", "{}", printed(folder));
}

#[test]
fn slurm_starts_ranks_and_starts_them_again_after_its_notice() {
    if plays("rank") {
        return train();
    }
    let submits = || {
        let folder = folder_of_parent();
        let job = submit("rank", &folder);
        wait_for(|| folder.join("trains").exists());
        notify_and_wait(&job, &folder);
    };
    if plays("submits") {
        return submits();
    }
    let folder = TempDir::new().unwrap();
    if !beside_slurm("submits", folder.path()) {
        return;
    }
    let text = printed(folder.path());
    let expected = ["rank 0 of 2, started by Slurm", "rank 1 of 2, started by Slurm"];
    let expected = expected.into_iter().chain(["told by SIGUSR1 at step 10", "begins at step 10"]);
    expected.for_each(|words| assert!(text.contains(words), "{words}: {text}"));
    let saved = Checkpoint::load(folder.path().join("hpc_ckpt_1.ckpt")).unwrap();
    assert_eq!(saved.meta.global_step, 10, "the notice travels with the next gradients");
    let (_kept, uninterrupted, ..) = alone(2, 1);
    assert_same(&weights(folder.path()), &uninterrupted);
}

/// A program of the path, or the one that a variable names.
pub fn program(name: &str, variable: &str) -> Option<PathBuf> {
    if let Some(given) = std::env::var_os(variable) {
        return Some(given.into());
    }
    let path = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file());
    if found.is_none() {
        println!("skipped: there is no {name}, and {variable} names none");
    }
    found
}

/// Two ranks of a launcher end with the weights of one process.
fn two_ranks(launcher: Command, started_by_whom: &str) {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("notified"), "").unwrap();
    let text = text_of(&started_by(launcher, &own_process("rank"), folder.path()));
    for rank in 0..2 {
        let expected = format!("rank {rank} of 2, started by {started_by_whom}");
        assert!(text.contains(&expected), "{expected}: {text}");
    }
    let (_kept, expected, ..) = alone(2, 1);
    assert_same(&weights(folder.path()), &expected);
}

#[test]
fn mpirun_starts_ranks() {
    if plays("rank") {
        return train();
    }
    let Some(mpirun) = program("mpirun", "VOLTAIC_TEST_MPIRUN") else { return };
    let mut command = Command::new(mpirun);
    command.args(["--oversubscribe", "-n", "2", "-x", "MASTER_PORT"]);
    command.env("MASTER_PORT", free_port().to_string());
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    two_ranks(command, "Mpi");
}

#[test]
fn torchrun_starts_ranks() {
    if plays("rank") {
        return train();
    }
    let Some(torchrun) = program("torchrun", "VOLTAIC_TEST_TORCHRUN") else { return };
    let mut command = Command::new(torchrun);
    command.args(["--standalone", "--nproc-per-node=2", "--no-python"]);
    two_ranks(command, "TorchElastic");
}

/// Both start two nodes, each of which has the four variables and one rank.
#[test]
fn processes_of_launchers_can_be_nodes() {
    if plays("rank") {
        return train_on_nodes();
    }
    let Some(mpirun) = program("mpirun", "VOLTAIC_TEST_MPIRUN") else { return };
    let mut command = Command::new(mpirun);
    command.args(["--oversubscribe", "-n", "2", "bash", "-c"]);
    let variables = format!("export MASTER_ADDR=127.0.0.1 MASTER_PORT={} WORLD_SIZE=2", free_port());
    let own = "export NODE_RANK=$OMPI_COMM_WORLD_RANK; unset ${!OMPI_*} ${!PMIX_*}; exec \"$@\"";
    command.arg(format!("{variables}; {own}")).arg("node");
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    let folder = TempDir::new().unwrap();
    text_of(&started_by(command, &own_process("rank"), folder.path()));
    let (_kept, expected, ..) = alone(2, 1);
    assert_same(&weights(folder.path()), &expected);
}

fn train_on_nodes() {
    let folder = folder_of_parent();
    let mut trainer = builder(&folder).devices(1).num_nodes(2_u64).build().unwrap();
    let world = trainer.world();
    let environment = ClusterEnvironment::detect(&Variables::of_process());
    println!("\nrank {} of {}, started by {environment:?}", world.rank, world.world_size);
    let mut net = Net::new();
    trainer.fit(&mut net, &mut loaders(None)).unwrap();
    finish(&trainer, &net, &folder);
}
