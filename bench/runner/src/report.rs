//! The results as JSON and as a page of tables.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::Context;
use serde::Serialize;

use crate::cases::{Hardware, WORKLOADS};
use crate::process::Peak;
use crate::summary::{Row, Table, Verdict};

/// All that was measured in one run.
#[derive(Debug, Serialize)]
pub struct Results {
    pub machine: Machine,
    /// Name and driver of the GPU that trained; none on the CPU.
    pub gpu: Option<String>,
    pub date: String,
    /// State of the source.
    pub commit: String,
    pub num_rounds: usize,
    /// Cores that others may use during a process before it is repeated.
    pub max_others: f64,
    pub peaks: Vec<(usize, Peak)>,
    pub tables: Vec<Table>,
    pub verdicts: Vec<Verdict>,
}

/// Where it was measured.
#[derive(Debug, Serialize)]
pub struct Machine {
    pub cpu: String,
    pub num_cpus: usize,
    pub memory_gib: f64,
}

impl Machine {
    pub fn this() -> anyhow::Result<Self> {
        let value = |file: &str, key: &str| -> anyhow::Result<String> {
            let text = fs::read_to_string(file).with_context(|| format!("read {file}"))?;
            let line = text.lines().find(|line| line.starts_with(key));
            let value = line.and_then(|line| line.split_once(':')).map(|(_, value)| value.trim().to_owned());
            Ok(value.unwrap_or_else(|| "unknown".to_owned()))
        };
        let memory = value("/proc/meminfo", "MemTotal")?;
        let kib: f64 = memory.trim_end_matches("kB").trim().parse().unwrap_or(f64::NAN);
        Ok(Self {
            cpu: value("/proc/cpuinfo", "model name")?,
            num_cpus: std::thread::available_parallelism()?.get(),
            memory_gib: kib / f64::from(1 << 20),
        })
    }
}

/// The first line that a command prints; `unknown` if it cannot be run.
pub fn first_line(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().ok().filter(|output| output.status.success());
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    text.and_then(|text| Some(text.lines().next()?.to_owned())).unwrap_or_else(|| "unknown".to_owned())
}

/// Writes `results.json` and `results.md` to a folder.
pub fn write(results: &Results, folder: &Path) -> anyhow::Result<()> {
    let write = |name: &str, text: String| {
        fs::write(folder.join(name), text).with_context(|| format!("write {}", folder.join(name).display()))
    };
    write("results.json", serde_json::to_string_pretty(results)? + "\n")?;
    write("results.md", markdown(results)?)
}

fn markdown(results: &Results) -> anyhow::Result<String> {
    let mut page = String::new();
    let Machine { cpu, num_cpus, memory_gib } = &results.machine;
    let gpu = results.gpu.as_ref().map(|gpu| format!("{gpu}; ")).unwrap_or_default();
    writeln!(page, "# Results\n\nWritten by `make bench`; [README.md](README.md) says how to read it.\n")?;
    writeln!(
        page,
        "{gpu}{num_cpus} CPUs {cpu}, {memory_gib:.0} GiB; {}; commit {}.",
        results.date, results.commit
    )?;
    let rounds = if results.num_rounds == 1 { "1 round" } else { &format!("{} rounds", results.num_rounds) };
    writeln!(
        page,
        "{rounds} of processes in turns; one during which others used more than {} cores was repeated, twice at most.\n",
        results.max_others
    )?;
    writeln!(page, "Matrix products by libtorch or voltaic, whichever is faster, the limit:\n")?;
    for (threads, peak) in &results.peaks {
        writeln!(
            page,
            "- threads {threads}: {:.0} GFLOP/s fp32, {:.0} bf16",
            peak.fp32 / 1e9,
            peak.bf16 / 1e9
        )?;
    }
    writeln!(page, "\n![step time relative to Lightning](results.png)\n\n## Targets\n")?;
    writeln!(page, "| case | target | reached | |\n|---|---|---|---|")?;
    for Verdict { case, target, reached, met } in &results.verdicts {
        writeln!(page, "| {case} | {target} | {reached} | {} |", if *met { "met" } else { "**missed**" })?;
    }
    for table in &results.tables {
        write_table(&mut page, table)?;
    }
    Ok(page)
}

fn write_table(page: &mut String, table: &Table) -> anyhow::Result<()> {
    let workload = WORKLOADS.iter().find(|workload| workload.name == table.workload);
    let (what, item) = workload.map_or(("", "items"), |workload| (workload.what, workload.item));
    writeln!(page, "\n## {}\n\n{what}; {:.3} GFLOP a step.\n", table.title, table.gflop_per_step)?;
    let is_on_gpu = table.hardware == Hardware::Cuda;
    let (gpu, line) = if is_on_gpu { ("of the GPU | ", "---|") } else { ("", "") };
    writeln!(
        page,
        "| peer | step ms best / median / worst | speed best/best | speed median (range) | {item}/s | GFLOP/s \
         | of peak | CPU ms | start s | first step s (longest) | peak MB | {gpu}others | repeats | losses |"
    )?;
    writeln!(page, "|---|---|---|---|---|---|---|---|---|---|---|{line}---|---|---|")?;
    for row in &table.rows {
        let Row { step_ms, speed, first_step_secs: first, .. } = row;
        let digits = if step_ms.min < 10.0 { 2 } else { 1 };
        write!(
            page,
            "| {} | {:.digits$} / {:.digits$} / {:.digits$} ",
            row.peer, step_ms.min, step_ms.median, step_ms.max
        )?;
        write!(page, "| {:.2} | {:.2} ({:.2}-{:.2}) ", row.best_speed, speed.median, speed.min, speed.max)?;
        write!(page, "| {:.0} | {:.1} | {:.0} % ", row.items_per_sec, row.gflops, 100.0 * row.share_of_peak)?;
        write!(page, "| {:.digits$} ", row.cpu_ms.median)?;
        write!(
            page,
            "| {:.2} | {:.2} ({:.2}) | {:.0} ",
            row.start_secs, first.median, first.max, row.peak_rss_mb
        )?;
        if is_on_gpu {
            write!(page, "| {:.0} ", row.peak_device_mb.unwrap_or(f64::NAN))?;
        }
        let losses = row.wrong_losses.as_deref().unwrap_or("agree");
        writeln!(page, "| {:.2} | {} | {losses} |", row.others, row.num_repeats)?;
    }
    Ok(())
}
