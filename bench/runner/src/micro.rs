//! `bench-runner micro`: runs the benchmarks of voltaic's own parts and writes what they measured beside their targets.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::{env, fs};

use anyhow::{Context, ensure};
use measure::micro::{FILE, Row};
use serde::Serialize;

use crate::report::{Machine, first_line};

/// A benchmark whose numbers have targets.
pub struct Bench {
    /// As `cargo bench --bench` takes it.
    pub name: &'static str,
    /// What it compares.
    about: &'static str,
}

pub const BENCHES: [Bench; 12] = [
    Bench { name: "overhead", about: "What the trainer costs per step beside a bare loop of the same calls" },
    Bench { name: "calls", about: "The call of a module beside its code, with and without hooks" },
    Bench { name: "host_pool", about: "Training steps with the memory pool beside libtorch's allocator" },
    Bench {
        name: "lengths",
        about: "Steps of changing lengths with the memory pool beside libtorch's allocator",
    },
    Bench {
        name: "record",
        about: "A step of two ranks with the record of operations beside the same step without it",
    },
    Bench { name: "graph", about: "A replayed training step beside the same step as code" },
    Bench {
        name: "hpu",
        about: "Operators and training steps on the emulated HPU beside the CPU; says nothing about a real card",
    },
    Bench { name: "profiler", about: "Training steps of GPT-mini under a profiler beside plain ones" },
    Bench { name: "swap", about: "Reads and writes of swapped tensors beside a plain loop past the cache" },
    Bench {
        name: "update",
        about: "AdamW's step of 10^8 weights beside PyTorch's fused one and DeepSpeedCPUAdam",
    },
    Bench {
        name: "activations",
        about: "GPT-mini with checkpointed blocks beside plain steps, and beside PyTorch's",
    },
    Bench { name: "kernels", about: "Operators by voltaic's kernels beside libtorch's" },
];

/// All that was measured in one run.
#[derive(Debug, Serialize)]
struct Results {
    machine: Machine,
    date: String,
    commit: String,
    /// Load of the machine before the run: processes that wanted to run, over the last minute.
    load_before: f64,
    rows: Vec<Row>,
}

/// Runs benchmarks and writes what they measured to `micro.json` and `micro.md` in `folder`; `bench` is that of the benchmark's
/// sources.
pub fn run(bench: &Path, folder: &Path, wanted: &[&Bench]) -> anyhow::Result<()> {
    let load_before = load()?;
    let mut rows = Vec::new();
    for wanted in wanted {
        rows.extend(rows_of(bench, wanted.name)?);
    }
    let root = bench.join("..");
    let results = Results {
        machine: Machine::this()?,
        date: first_line("date", &["-u", "+%Y-%m-%d"]),
        commit: first_line("git", &["-C", &root.to_string_lossy(), "describe", "--always", "--dirty"]),
        load_before,
        rows,
    };
    let write = |name: &str, text: String| {
        fs::write(folder.join(name), text).with_context(|| format!("write {}", folder.join(name).display()))
    };
    write("micro.json", serde_json::to_string_pretty(&results)? + "\n")?;
    write("micro.md", markdown(&results)?)?;
    let missed = results.rows.iter().filter(|row| !row.is_met()).count();
    println!(
        "\n{} of {} targets met; written to {}: micro.md, micro.json",
        results.rows.len() - missed,
        results.rows.len(),
        folder.display()
    );
    Ok(())
}

/// What one benchmark measured. It prints its own tables meanwhile.
fn rows_of(bench: &Path, name: &str) -> anyhow::Result<Vec<Row>> {
    let file = env::temp_dir().join(format!("voltaic-bench-{}-{name}.jsonl", std::process::id()));
    println!("\n{name}:");
    let cargo = env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let mut command = Command::new(&cargo);
    command.args(["bench", "--quiet", "--package", "voltaic", "--bench", name]);
    let status = command.current_dir(bench.join("..")).env(FILE, &file).status();
    let text = fs::read_to_string(&file).unwrap_or_default();
    let _ = fs::remove_file(&file); // may not be there
    let status = status.with_context(|| format!("run {cargo}; set CARGO to the program's path"))?;
    ensure!(status.success(), "cargo bench --bench {name}: {status}; its message is above");
    let rows: Vec<Row> = text
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()
        .with_context(|| format!("cargo bench --bench {name}: wrote what is not a row"))?;
    ensure!(!rows.is_empty(), "cargo bench --bench {name}: recorded no number; it has to call Row::record");
    Ok(rows)
}

fn load() -> anyhow::Result<f64> {
    let text = fs::read_to_string("/proc/loadavg").context("read /proc/loadavg")?;
    text.split_whitespace().next().and_then(|word| word.parse().ok()).context("/proc/loadavg: has no number")
}

fn markdown(results: &Results) -> anyhow::Result<String> {
    let mut page = String::new();
    let Machine { cpu, num_cpus, memory_gib } = &results.machine;
    writeln!(page, "# What voltaic's own parts cost\n")?;
    writeln!(
        page,
        "Written by `make bench-micro`. Median and quartiles; what is compared takes turns within one run. One thread.\n"
    )?;
    writeln!(
        page,
        "{num_cpus} CPUs {cpu}, {memory_gib:.0} GiB; {}; commit {}; load before the run {:.1}.",
        results.date, results.commit, results.load_before
    )?;
    for Bench { name, about } in BENCHES {
        let rows: Vec<&Row> = results.rows.iter().filter(|row| row.bench == name).collect();
        if rows.is_empty() {
            continue;
        }
        writeln!(page, "\n## {name}\n\n{about}.\n")?;
        writeln!(page, "| what | median | quartiles | target | |\n|---|---|---|---|---|")?;
        for row in rows {
            let [low, middle, high] = row.quartiles;
            let unit = if row.unit.is_empty() { String::new() } else { format!(" {}", row.unit) };
            let met = if row.is_met() { "met" } else { "**missed**" };
            writeln!(
                page,
                "| {} | {middle:.2}{unit} | {low:.2} to {high:.2} | {} | {met} |",
                row.what,
                row.target_text()
            )?;
        }
    }
    Ok(page)
}

#[cfg(test)]
mod tests {
    use measure::micro::Target;

    use super::*;

    #[test]
    fn the_page_has_each_number_beside_its_target() {
        let row = |bench: &str, what: &str, unit: &str, value, target| {
            Row::of(bench, what, unit, vec![value], target)
        };
        let results = Results {
            machine: Machine { cpu: "a CPU".to_owned(), num_cpus: 2, memory_gib: 8.0 },
            date: "2026-01-02".to_owned(),
            commit: "abc".to_owned(),
            load_before: 0.25,
            rows: vec![
                row("graph", "MLP: eager over replay", "", 2.5, Target::AtLeast(2.0)),
                row("overhead", "bare trainer", "us", 25.0, Target::AtMost(20.0)),
            ],
        };
        let page = markdown(&results).unwrap();
        let overhead = page.find("## overhead").unwrap();
        assert!(overhead < page.find("## graph").unwrap(), "in the order they run: {page}");
        assert!(!page.contains("## hpu"), "which was not run");
        assert!(
            page.contains("| MLP: eager over replay | 2.50 | 2.50 to 2.50 | at least 2 | met |"),
            "{page}"
        );
        assert!(
            page.contains("| bare trainer | 25.00 us | 25.00 to 25.00 | at most 20 | **missed** |"),
            "{page}"
        );
        assert!(
            page.contains("2 CPUs a CPU, 8 GiB; 2026-01-02; commit abc; load before the run 0.2."),
            "{page}"
        );
    }
}
