//! What the runner and the programs it measures say to each other: a [`Job`] as the only argument, a [`Report`] as the
//! last line of standard output. `peers/torch_peers.py` speaks the same.

pub mod generate;
pub mod micro;
pub mod peer;

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use serde::{Deserialize, Serialize};

/// What a program is to train, and how.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// Which of the program's ways to train, such as `bare`.
    pub variant: String,
    /// Name of the workload, such as `mlp`.
    pub workload: String,
    /// Number format: `32-true` or `bf16-mixed`.
    pub precision: String,
    /// Steps that are not measured.
    pub warmup: usize,
    /// Steps that are measured.
    pub steps: usize,
    /// Processes that train together, each with batches of its own.
    #[serde(default = "one")]
    pub processes: usize,
    /// What trains: `cpu` or `cuda`.
    #[serde(default = "cpu")]
    pub accelerator: String,
    /// Steps from one wait for the device to the next, of which the mean is taken. A device works while the program goes on,
    /// so that a single step cannot be timed without changing it; on the CPU it can, and this is 1.
    #[serde(default = "one")]
    pub block: usize,
}

fn one() -> usize {
    1
}

fn cpu() -> String {
    "cpu".to_owned()
}

impl Job {
    /// The job in the program's first argument.
    ///
    /// # Errors
    /// If there is none, or it is not the JSON of a job.
    pub fn from_args() -> anyhow::Result<Self> {
        let remedy = "programs of the benchmark are started by `make bench`; give a job such as \
                      '{\"variant\":\"bare\",\"workload\":\"mlp\",\"precision\":\"32-true\",\"warmup\":3,\"steps\":10}'";
        let argument =
            std::env::args().nth(1).with_context(|| format!("first argument: is missing; {remedy}"))?;
        serde_json::from_str(&argument).with_context(|| format!("first argument: is not a job; {remedy}"))
    }

    /// Steps to train: one more than is timed, since a step ends where the next one starts.
    pub fn total_steps(&self) -> usize {
        self.warmup + self.steps + 1
    }

    /// Whether to wait for the device before the next step, after so many.
    pub fn waits_after(&self, num_steps: usize) -> bool {
        num_steps.is_multiple_of(self.block)
    }
}

/// What a program measured of itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// When the first step started, in seconds since 1970.
    pub first_step_at: f64,
    /// Duration of the very first step in seconds: compilation is in it.
    pub first_step_secs: f64,
    /// Duration of each measured step in seconds, from its start to the start of the next one: the mean of each block.
    pub step_secs: Vec<f64>,
    /// What the process used of the processors in a measured step, in seconds, all threads together: the mean.
    pub step_cpu_secs: f64,
    /// Loss of each step, those of the warm-up included.
    pub losses: Vec<f64>,
    /// Threads that the program says one operator may use.
    pub num_threads: usize,
    /// The most memory that was resident, in bytes.
    pub peak_rss_bytes: u64,
    /// The most memory of the device that was in use, in bytes; none on the CPU.
    #[serde(default)]
    pub peak_device_bytes: Option<u64>,
}

/// Takes the time at the start of each step.
#[derive(Debug, Default)]
pub struct StepClock {
    first_step_at: f64,
    starts: Vec<Instant>,
    /// What the process had used of the processors then, in seconds.
    cpu_secs: Vec<f64>,
}

impl StepClock {
    /// To be called first thing in each step.
    pub fn tick(&mut self) {
        if self.starts.is_empty() {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            self.first_step_at = now.as_secs_f64();
        }
        self.starts.push(Instant::now());
        self.cpu_secs.push(cpu_secs());
    }

    /// Steps begun so far.
    pub fn num_steps(&self) -> usize {
        self.starts.len()
    }

    /// Prints the report of a job that is done.
    ///
    /// # Errors
    /// If fewer steps were trained than the job asks for, they are no whole blocks, or the peak of memory is not known.
    pub fn print_report(
        &self,
        job: &Job,
        losses: Vec<f64>,
        num_threads: usize,
        peak_device_bytes: Option<u64>,
    ) -> anyhow::Result<()> {
        let secs: Vec<f64> = self.starts.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
        anyhow::ensure!(
            secs.len() >= job.warmup + job.steps && job.steps > 0,
            "{} steps of {} were timed, the job asks for {} + {}; train {} steps, and give steps above 0",
            secs.len(),
            job.workload,
            job.warmup,
            job.steps,
            job.total_steps()
        );
        anyhow::ensure!(
            job.block > 0 && job.waits_after(job.warmup) && job.waits_after(job.steps),
            "warmup {} and steps {} must be multiples of block, which is {}",
            job.warmup,
            job.steps,
            job.block
        );
        let blocks = secs[job.warmup..].chunks_exact(job.block);
        let report = Report {
            first_step_at: self.first_step_at,
            first_step_secs: secs[0],
            step_secs: blocks.map(|block| block.iter().sum::<f64>() / job.block as f64).collect(),
            step_cpu_secs: (self.cpu_secs[job.warmup + job.steps] - self.cpu_secs[job.warmup])
                / job.steps as f64,
            losses,
            num_threads,
            peak_rss_bytes: peak_rss_bytes()?,
            peak_device_bytes,
        };
        println!("{}", serde_json::to_string(&report)?);
        Ok(())
    }
}

/// User and system time of this process, in seconds.
fn cpu_secs() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + 1e-9 * time.tv_nsec as f64
}

/// Peak of this process's resident memory, in bytes.
fn peak_rss_bytes() -> anyhow::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status").context("read /proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    Ok(1024 * kib.context("/proc/self/status: has no VmHWM; the benchmark needs Linux")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(warmup: usize, steps: usize) -> Job {
        let (variant, workload, precision) = ("bare".into(), "mlp".into(), "32-true".into());
        Job { variant, workload, precision, warmup, steps, processes: 1, accelerator: cpu(), block: 1 }
    }

    #[test]
    fn a_job_survives_its_line() {
        let job = job(3, 10);
        let line = serde_json::to_string(&job).unwrap();
        assert_eq!(serde_json::from_str::<Job>(&line).unwrap(), job);
        assert_eq!(job.total_steps(), 14);
    }

    #[test]
    fn too_few_steps_are_an_error() {
        let job = job(1, 2);
        let mut clock = StepClock::default();
        (0..3).for_each(|_| clock.tick());
        let error = clock.print_report(&job, Vec::new(), 1, None).unwrap_err().to_string();
        assert_eq!(
            error,
            "2 steps of mlp were timed, the job asks for 1 + 2; train 4 steps, and give steps above 0"
        );
        clock.tick();
        clock.print_report(&job, Vec::new(), 1, None).unwrap();
    }

    #[test]
    fn blocks_must_be_whole() {
        let job = Job { block: 2, ..job(2, 3) };
        assert_eq!([0, 1, 2].map(|steps| job.waits_after(steps)), [true, false, true]);
        let mut clock = StepClock::default();
        (0..6).for_each(|_| clock.tick());
        let error = clock.print_report(&job, Vec::new(), 1, None).unwrap_err().to_string();
        assert_eq!(error, "warmup 2 and steps 3 must be multiples of block, which is 2");
        clock.print_report(&Job { steps: 2, ..job }, Vec::new(), 1, None).unwrap();
    }
}
