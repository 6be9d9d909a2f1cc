//! One process of a peer: start it, see how busy others are meanwhile, and again if they were too busy.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{env, fs, thread};

use anyhow::{Context, bail, ensure};
use measure::generate::{GENERATE, GenerateJob};
use measure::{Job, Report};
use serde::Deserialize;

use crate::cases::{Case, Hardware, Malloc, Peer, Precision, Program};

/// A process is repeated so often at most if others were busy.
const MAX_REPEATS: usize = 2;
/// How long to wait for others to become quiet before a process is started.
const MAX_WAIT: Duration = Duration::from_secs(20);
/// Ticks of the kernel's CPU accounting per second.
const TICKS_PER_SEC: f64 = 100.0;
/// glibc keeps what it has: <https://sourceware.org/glibc/manual/latest/html_node/Memory-Allocation-Tunables.html>
const HELD_MALLOC: [(&str, &str); 3] = [
    ("MALLOC_TRIM_THRESHOLD_", "4000000000"),
    ("MALLOC_MMAP_THRESHOLD_", "33554432"),
    ("MALLOC_TOP_PAD_", "67108864"),
];

/// Where the programs are, and what disturbs them too much.
pub struct Launcher {
    programs: PathBuf,
    python: PathBuf,
    scripts: PathBuf,
    compile_cache: PathBuf,
    /// Cores that others may use during a process.
    max_others: f64,
}

/// A process that has run.
#[derive(Debug)]
pub struct Outcome {
    pub report: Report,
    /// Seconds from the start of the process to the start of the first step.
    pub start_secs: f64,
    /// Cores that others used meanwhile.
    pub others: f64,
    /// Runs before this one that were thrown away.
    pub num_repeats: usize,
}

/// Operations per second of matrix products.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, serde::Serialize)]
pub struct Peak {
    pub fp32: f64,
    pub bf16: f64,
}

impl Launcher {
    /// The programs lie beside this one, the scripts in the folder of the benchmark's sources.
    pub fn new(bench: &Path, max_others: f64) -> anyhow::Result<Self> {
        let programs = env::current_exe()?.parent().context("this program lies in no folder")?.to_path_buf();
        let python =
            env::var_os("VOLTAIC_BENCH_PYTHON").map_or_else(|| bench.join(".venv/bin/python"), PathBuf::from);
        ensure!(python.exists(), "{}: is not there; run bench/setup.sh", python.display());
        let compile_cache = env::temp_dir().join(format!("voltaic-bench-{}", std::process::id()));
        Ok(Self { programs, python, scripts: bench.join("peers"), compile_cache, max_others })
    }

    /// Trains a workload with a peer.
    pub fn run(&self, peer: &Peer, case: Case) -> anyhow::Result<Outcome> {
        let Case { workload, precision, hardware, .. } = case;
        let steps = case.steps(peer).with_context(|| format!("{} is not trained there", case.title()))?;
        let job = Job {
            variant: peer.variant.to_owned(),
            workload: workload.name.to_owned(),
            precision: precision.name().to_owned(),
            warmup: steps.warmup,
            steps: steps.timed,
            processes: case.num_processes,
            accelerator: hardware.name().to_owned(),
            block: hardware.block(),
        };
        let job = serde_json::json!(job).to_string();
        let command = || self.command(peer.program, &[&job], case.num_threads, case.malloc);
        let (line, spawned_at, others, num_repeats) = self.measure_alone(command)?;
        let report: Report = serde_json::from_str(&line)
            .with_context(|| format!("{}: its last line is not a report: {line}", peer.name))?;
        let wrong = report.num_threads != case.num_threads;
        ensure!(!wrong, "{}: uses {} threads, not {}", peer.name, report.num_threads, case.num_threads);
        let start_secs = report.first_step_at - spawned_at;
        Ok(Outcome { report, start_secs, others, num_repeats })
    }

    /// Lets a program generate text; gives what it printed last, and the cores that others used.
    pub fn generate(
        &self,
        program: Program,
        job: &GenerateJob,
        num_threads: usize,
    ) -> anyhow::Result<(String, f64)> {
        let job = serde_json::json!(job).to_string();
        let command = || self.command(program, &[GENERATE, &job], num_threads, Malloc::Held);
        let (line, _, others, _) = self.measure_alone(command)?;
        Ok((line, others))
    }

    /// [`Launcher::measure`], again if others were too busy; gives how often it was repeated, too.
    fn measure_alone(&self, command: impl Fn() -> Command) -> anyhow::Result<(String, f64, f64, usize)> {
        let mut num_repeats = 0;
        loop {
            let (line, spawned_at, others) = self.measure(command())?;
            if others <= self.max_others || num_repeats == MAX_REPEATS {
                return Ok((line, spawned_at, others, num_repeats));
            }
            num_repeats += 1;
        }
    }

    /// Measures how fast matrices are multiplied.
    pub fn peak(&self, num_threads: usize, hardware: Hardware) -> anyhow::Result<Peak> {
        let (variant, workload, precision) = ("bare".into(), "matmul".into(), Precision::Fp32.name().into());
        let (accelerator, block) = (hardware.name().to_owned(), hardware.block());
        let job = Job { variant, workload, precision, warmup: 0, steps: 0, processes: 1, accelerator, block };
        let job = serde_json::json!(job).to_string();
        let (line, ..) = self.measure(self.command(Program::Voltaic, &[&job], num_threads, Malloc::Held))?;
        serde_json::from_str(&line).with_context(|| format!("matmul: its last line is not a rate: {line}"))
    }

    fn command(&self, program: Program, arguments: &[&str], num_threads: usize, malloc: Malloc) -> Command {
        let python = |script: &str| {
            let mut command = Command::new(&self.python);
            command.arg(self.scripts.join(script));
            command
        };
        let mut command = match program {
            Program::Voltaic => Command::new(self.programs.join("bench-voltaic")),
            Program::Burn => Command::new(self.programs.join("../peers/release/peer-burn")),
            Program::Candle => Command::new(self.programs.join("../peers/release/peer-candle")),
            Program::Torch => python("torch_peers.py"),
            Program::TorchGenerate => python("torch_generate.py"),
            Program::LlamaCpp => python("llama_generate.py"),
        };
        command.args(arguments);
        for name in ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"] {
            command.env(name, num_threads.to_string());
        }
        for (name, value) in HELD_MALLOC {
            match malloc {
                Malloc::Held => command.env(name, value),
                Malloc::Stock => command.env_remove(name),
            };
        }
        // with a cache of its own, the first process of torch.compile compiles and the others find the result
        command.env("TORCHINDUCTOR_CACHE_DIR", &self.compile_cache);
        command.stdin(Stdio::null());
        command
    }

    /// Runs a command; gives its last line, when it was started (seconds since 1970), and the cores others used.
    fn measure(&self, mut command: Command) -> anyhow::Result<(String, f64, f64)> {
        self.wait_for_quiet()?;
        let before = CpuTime::now()?;
        let spawned_at = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
        let output = command.output().with_context(|| format!("start {command:?}"))?;
        let others = CpuTime::now()?.others_since(&before);
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            bail!("{command:?} failed ({}){}:\n{text}", output.status, hint(output.status));
        }
        let text = String::from_utf8_lossy(&output.stdout);
        let line = text.lines().last().with_context(|| format!("{command:?} printed nothing"))?;
        Ok((line.to_owned(), spawned_at, others))
    }

    fn wait_for_quiet(&self) -> anyhow::Result<()> {
        let waited = Instant::now();
        while waited.elapsed() < MAX_WAIT {
            let before = CpuTime::now()?;
            thread::sleep(Duration::from_millis(300));
            if CpuTime::now()?.others_since(&before) <= self.max_others {
                break;
            }
        }
        Ok(())
    }
}

/// What to do about an end that has a known cause.
fn hint(status: ExitStatus) -> &'static str {
    const SIGILL: i32 = 4;
    if status.signal() == Some(SIGILL) {
        "; this machine may have AMX without describing it (docs/kernels.md): set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 \
         for all peers"
    } else {
        ""
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        // left behind it would only take space
        let _ = fs::remove_dir_all(&self.compile_cache);
    }
}

/// What all processors, and this process with its children, have worked.
struct CpuTime {
    at: Instant,
    all: f64,
    own: f64,
}

impl CpuTime {
    fn now() -> anyhow::Result<Self> {
        let all = fs::read_to_string("/proc/stat").context("read /proc/stat; the benchmark needs Linux")?;
        let own = fs::read_to_string("/proc/self/stat").context("read /proc/self/stat")?;
        // cpu user nice system idle iowait irq softirq steal
        let all = all.lines().next().unwrap_or_default().split_whitespace().skip(1);
        let all = all.enumerate().filter(|(column, _)| ![3, 4].contains(column) && *column < 8);
        // after the name in brackets: utime stime cutime cstime are the 12th to the 15th
        let own = own.rsplit(')').next().unwrap_or_default().split_whitespace().skip(11).take(4);
        Ok(Self { at: Instant::now(), all: secs(all.map(|(_, text)| text))?, own: secs(own)? })
    }

    /// Cores that others have used since.
    fn others_since(&self, before: &Self) -> f64 {
        let busy = (self.all - before.all) - (self.own - before.own);
        (busy / self.at.duration_since(before.at).as_secs_f64()).max(0.0)
    }
}

fn secs<'a>(ticks: impl Iterator<Item = &'a str>) -> anyhow::Result<f64> {
    let ticks = ticks.map(str::parse::<f64>).sum::<Result<f64, _>>().context("CPU times of /proc")?;
    Ok(ticks / TICKS_PER_SEC)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_work_is_not_that_of_others() {
        let before = CpuTime::now().unwrap();
        let mut now = CpuTime::now().unwrap();
        // on a busy machine it takes a while until a process has worked for five ticks
        while now.own - before.own < 0.05 {
            assert!(now.at.duration_since(before.at) < Duration::from_secs(60), "{}", now.own - before.own);
            now = CpuTime::now().unwrap();
        }
        assert!(now.all >= before.all);
    }
}
