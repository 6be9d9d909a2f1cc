//! Runs voltaic and its peers in turns on the same work, and writes tables, JSON and a picture.
//!
//! Settings are environment variables, so that `make bench ROUNDS=7` hands them on. `bench-runner generation` lets them
//! generate text, and `bench-runner micro` measures voltaic's own parts.

mod cases;
mod generation;
mod micro;
mod picture;
mod process;
mod report;
mod summary;

use std::env;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Instant;

use anyhow::{Context, bail, ensure};

use crate::cases::{
    BASELINE, Case, HARDWARE, Hardware, PEERS, PRECISIONS, Peer, Precision, WORKLOADS, Workload, cases,
};
use crate::process::{Launcher, Peak};
use crate::report::{Machine, Results, first_line};
use crate::summary::{Runs, Table};

/// What of all there is to run, and how often.
struct Settings {
    hardware: Hardware,
    num_rounds: usize,
    threads: Vec<usize>,
    workloads: Vec<&'static Workload>,
    precisions: Vec<&'static Precision>,
    peers: Vec<&'static Peer>,
    max_others: f64,
    folder: PathBuf,
}

impl Settings {
    fn from_env(bench: &Path) -> anyhow::Result<Self> {
        let threads =
            list("THREADS", "2")?.iter().map(|text| number("THREADS", text)).collect::<Result<_, _>>()?;
        let name = value("ACCELERATOR", "cpu");
        let hardware = HARDWARE.into_iter().find(|hardware| hardware.name() == name);
        let hardware =
            hardware.with_context(|| format!("ACCELERATOR: there is no `{name}`; use cpu or cuda"))?;
        let settings = Self {
            hardware,
            num_rounds: number("ROUNDS", &value("ROUNDS", "2"))?,
            threads,
            workloads: choose("WORKLOADS", &WORKLOADS, |workload| workload.name)?,
            precisions: choose("PRECISIONS", &PRECISIONS, |precision| precision.name())?,
            peers: choose("PEERS", &PEERS, |peer| peer.name)?,
            max_others: number("MAX_OTHERS", &value("MAX_OTHERS", "0.25"))?,
            folder: folder(bench)?,
        };
        let has_baseline = settings.peers.iter().any(|peer| peer.name == BASELINE);
        ensure!(has_baseline, "PEERS: {BASELINE} is not among them; add it, all others are compared with it");
        ensure!(settings.num_rounds > 0, "ROUNDS: is 0; give at least 1");
        ensure!(!settings.threads.contains(&0), "THREADS: has a 0; give numbers of threads such as 1,2");
        Ok(settings)
    }
}

fn value(name: &str, default: &str) -> String {
    env::var(name).ok().filter(|value| !value.is_empty()).unwrap_or_else(|| default.to_owned())
}

/// Where results go; makes the folder.
fn folder(bench: &Path) -> anyhow::Result<PathBuf> {
    let folder = PathBuf::from(value("OUT", &bench.join("../docs/benchmarks").to_string_lossy()));
    std::fs::create_dir_all(&folder).with_context(|| {
        format!("OUT: cannot make {}; give a folder that can be written", folder.display())
    })?;
    Ok(folder)
}

fn number<T: FromStr>(name: &str, text: &str) -> anyhow::Result<T> {
    text.parse().ok().with_context(|| {
        format!("{name}: `{text}` is not a number that it can be; give one such as {name}=1")
    })
}

fn list(name: &str, default: &str) -> anyhow::Result<Vec<String>> {
    let names: Vec<String> = value(name, default).split(',').map(|name| name.trim().to_owned()).collect();
    ensure!(
        !names.iter().any(String::is_empty),
        "{name}: has an empty entry; separate entries by one comma each"
    );
    Ok(names)
}

/// The entries of a table that a variable names; all if it is not set.
fn choose<T>(
    variable: &str,
    all: &'static [T],
    name_of: fn(&T) -> &'static str,
) -> anyhow::Result<Vec<&'static T>> {
    let known: Vec<&str> = all.iter().map(name_of).collect();
    let find = |name: &String| {
        let place = known.iter().position(|one| one == name);
        let place = place
            .with_context(|| format!("{variable}: there is no `{name}`; use some of {}", known.join(",")))?;
        Ok(&all[place])
    };
    list(variable, &known.join(","))?.iter().map(find).collect()
}

fn main() -> anyhow::Result<()> {
    let bench = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    match env::args().nth(1).as_deref() {
        None => {}
        Some("micro") => {
            let wanted = choose("BENCHES", &micro::BENCHES, |bench| bench.name)?;
            return micro::run(&bench, &folder(&bench)?, &wanted);
        }
        Some("generation") => {
            let num_rounds = number("ROUNDS", &value("ROUNDS", "3"))?;
            ensure!(num_rounds > 0, "ROUNDS: is 0; give at least 1");
            let num_threads = number("THREADS", &value("THREADS", "1"))?;
            let max_others = number("MAX_OTHERS", &value("MAX_OTHERS", "0.25"))?;
            return generation::run(&bench, &folder(&bench)?, num_rounds, num_threads, max_others);
        }
        Some(other) => {
            bail!("first argument: is `{other}`; use `generation`, `micro`, or none to train beside peers")
        }
    }
    let settings = Settings::from_env(&bench)?;
    let launcher = Launcher::new(&bench, settings.max_others)?;
    let (cases, runs, peaks) = measure(&settings, &launcher)?;
    let mut tables = Vec::new();
    let mut verdicts = Vec::new();
    for (case, runs) in cases.into_iter().zip(runs) {
        let peak = peaks
            .iter()
            .find(|(threads, _)| *threads == case.num_threads)
            .context("each case has its peak")?
            .1;
        let rows = summary::rows(case, &runs, peak);
        verdicts.extend(summary::verdicts(case, &rows));
        tables.push(Table {
            title: case.title(),
            workload: case.workload.name,
            precision: case.precision,
            num_threads: case.num_threads,
            malloc: case.malloc,
            gflop_per_step: case.flops() / 1e9,
            num_processes: case.num_processes,
            hardware: case.hardware,
            rows,
        });
    }
    verdicts.extend(summary::gains_of_bf16(&tables));
    verdicts.extend(summary::scaling(&tables));
    let results = Results {
        machine: Machine::this()?,
        gpu: (settings.hardware == Hardware::Cuda)
            .then(|| first_line("nvidia-smi", &["--query-gpu=name,driver_version", "--format=csv,noheader"])),
        date: first_line("date", &["-u", "+%Y-%m-%d"]),
        commit: value(
            "COMMIT",
            &first_line("git", &["-C", &bench.to_string_lossy(), "describe", "--always", "--dirty"]),
        ),
        num_rounds: settings.num_rounds,
        max_others: settings.max_others,
        peaks,
        tables,
        verdicts,
    };
    report::write(&results, &settings.folder)?;
    picture::draw(&results, &settings.folder.join("results.png"))?;
    println!("written to {}: results.md, results.json, results.png", settings.folder.display());
    let mut rows =
        results.tables.iter().flat_map(|table| table.rows.iter().map(move |row| (&table.title, row)));
    let wrong =
        rows.find_map(|(title, row)| Some(format!("{title}: {}: {}", row.peer, row.wrong_losses.as_ref()?)));
    ensure!(
        wrong.is_none(),
        "{}; do not compare their times before the cause is found",
        wrong.unwrap_or_default()
    );
    Ok(())
}

type Measured = (Vec<Case>, Vec<Vec<Runs>>, Vec<(usize, Peak)>);

/// Runs every peer once per round in each case, in alternating order.
fn measure(settings: &Settings, launcher: &Launcher) -> anyhow::Result<Measured> {
    let cases = cases(settings.hardware, &settings.workloads, &settings.precisions, &settings.threads);
    ensure!(!cases.is_empty(), "WORKLOADS: none of them is trained on {}", settings.hardware.name());
    let mut runs: Vec<Vec<Runs>> = cases.iter().map(|case| runs_of(case, &settings.peers)).collect();
    let mut peaks: Vec<(usize, Peak)> = Vec::new();
    let start = Instant::now();
    for round in 0..settings.num_rounds {
        for &threads in &settings.threads {
            let peak = launcher.peak(threads, settings.hardware)?;
            match peaks.iter_mut().find(|(known, _)| *known == threads) {
                Some((_, best)) => {
                    *best = Peak { fp32: best.fp32.max(peak.fp32), bf16: best.bf16.max(peak.bf16) };
                }
                None => peaks.push((threads, peak)),
            }
        }
        for (case, runs) in cases.iter().zip(&mut runs) {
            let mut turns: Vec<&mut Runs> = runs.iter_mut().collect();
            if round % 2 == 1 {
                turns.reverse();
            }
            for run in turns {
                let outcome = launcher.run(run.peer, *case)?;
                let secs = start.elapsed().as_secs();
                let (num_rounds, ms) = (settings.num_rounds, summary::median_ms(&outcome));
                println!(
                    "{secs:>5} s  round {}/{num_rounds}  {}: {}: {ms:.2} ms",
                    round + 1,
                    case.title(),
                    run.peer.name
                );
                run.outcomes.push(outcome);
            }
        }
    }
    Ok((cases, runs, peaks))
}

fn runs_of(case: &Case, peers: &[&'static Peer]) -> Vec<Runs> {
    peers.iter().filter(|peer| case.takes(peer)).map(|&peer| Runs { peer, outcomes: Vec::new() }).collect()
}
