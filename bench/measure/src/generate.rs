//! What the runner and the programs that generate text say to each other: the word `generate` and a [`GenerateJob`] as arguments, a
//! [`GenerateReport`] as the last line of standard output. `peers/torch_generate.py` and `peers/llama_generate.py` speak the same.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context;
use serde::{Deserialize, Serialize};

/// First argument of a program that is to generate.
pub const GENERATE: &str = "generate";

/// What a program is to generate, with which weights. All take the most likely token each time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GenerateJob {
    /// Which of the program's ways, such as `graphs`.
    pub variant: String,
    /// Number format of the weights, such as `bf16`.
    pub format: String,
    /// Weights of gpt-mini in float32, a safetensors file with nanoGPT's names.
    pub weights: PathBuf,
    /// One after the other.
    pub tasks: Vec<GenerateTask>,
}

/// Prompts that are continued together, several times.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GenerateTask {
    /// All of one length.
    pub prompts: Vec<Vec<i64>>,
    /// For each prompt.
    pub new_tokens: usize,
    /// Times that are not measured.
    pub warmup: usize,
    /// Times that are measured.
    pub times: usize,
}

/// What a program measured of itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GenerateReport {
    /// For each task of the job.
    pub tasks: Vec<TaskReport>,
    /// Threads that the program says one operator may use.
    pub num_threads: usize,
    /// The most memory that was resident, in bytes.
    pub peak_rss_bytes: u64,
}

/// What a program did in a task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TaskReport {
    /// Seconds until the first token of each sequence was there, each time.
    pub prefill_secs: Vec<f64>,
    /// Seconds of all that follow, each time.
    pub decode_secs: Vec<f64>,
    /// The new tokens of each sequence.
    pub tokens: Vec<Vec<i64>>,
    /// Logits of the token after the first prompt.
    pub logits: Vec<f32>,
}

impl GenerateJob {
    /// The job in the program's second argument, if the first one is [`GENERATE`].
    ///
    /// # Errors
    /// If it is not the JSON of a job.
    pub fn from_args() -> anyhow::Result<Option<Self>> {
        let mut arguments = std::env::args().skip(1);
        if arguments.next().as_deref() != Some(GENERATE) {
            return Ok(None);
        }
        let job = arguments.next().unwrap_or_default();
        let remedy = "programs of the benchmark are started by `make bench-generation`";
        serde_json::from_str(&job)
            .map(Some)
            .with_context(|| format!("second argument: is not a job; {remedy}"))
    }
}

impl GenerateTask {
    /// Runs the task: `generate` continues the prompts and calls its argument once the first token of each is there.
    ///
    /// # Errors
    /// If `generate` fails, or never calls its argument.
    pub fn run(
        &self,
        logits: Vec<f32>,
        mut generate: impl FnMut(&mut dyn FnMut()) -> anyhow::Result<Vec<Vec<i64>>>,
    ) -> anyhow::Result<TaskReport> {
        let mut report =
            TaskReport { prefill_secs: Vec::new(), decode_secs: Vec::new(), tokens: Vec::new(), logits };
        for time in 0..self.warmup + self.times {
            let (start, mut first) = (Instant::now(), None);
            report.tokens = generate(&mut || {
                first.get_or_insert_with(|| start.elapsed().as_secs_f64());
            })?;
            let all = start.elapsed().as_secs_f64();
            let first = first.context("no first token")?;
            if time >= self.warmup {
                report.prefill_secs.push(first);
                report.decode_secs.push(all - first);
            }
        }
        Ok(report)
    }
}

impl GenerateReport {
    /// Prints the report of a job that is done.
    ///
    /// # Errors
    /// If the peak of memory is not known.
    pub fn print(tasks: Vec<TaskReport>, num_threads: usize) -> anyhow::Result<()> {
        let report = Self { tasks, num_threads, peak_rss_bytes: crate::peak_rss_bytes()? };
        println!("{}", serde_json::to_string(&report)?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_the_first_tokens_is_not_that_of_the_others() {
        let task = GenerateTask { prompts: vec![vec![1]], new_tokens: 2, warmup: 1, times: 2 };
        let pause = || std::thread::sleep(std::time::Duration::from_millis(5));
        let report = task
            .run(vec![0.5], |is_there| {
                is_there();
                pause();
                is_there(); // of another sequence
                Ok(vec![vec![2, 3]])
            })
            .unwrap();
        assert_eq!((report.prefill_secs.len(), report.decode_secs.len()), (2, 2));
        assert!(report.decode_secs.iter().all(|secs| *secs >= 0.005), "{report:?}");
        assert_eq!(report.tokens, [[2, 3]]);
        assert!(task.run(Vec::new(), |_| Ok(Vec::new())).is_err());
    }
}
