//! `bench-runner generation`: the text that voltaic and its peers generate with the weights of one gpt-mini, and how fast.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, ensure};
use measure::generate::{GenerateJob, GenerateReport, GenerateTask, TaskReport};
use measure::micro::quartiles;
use serde::Serialize;

use crate::cases::Program;
use crate::process::Launcher;
use crate::report::{Machine, first_line};

/// Tokens that the model sees.
const CONTEXT: usize = 256;
/// The runner compares all others with it.
const REFERENCE: &str = "pytorch f32";
/// Two processes that share the layers.
const TP_2: &str = "tp2";
/// How many times as fast as one process two should be at a prefill.
const TP_2_TARGET: f64 = 1.5;
/// How many times as fast as the fastest peer voltaic should be in float32.
const FLOAT32_TARGET: f64 = 1.3;
/// Formats whose weights have as many bits, voltaic's and llama.cpp's.
const ALIKE: [(&str, &str); 3] = [("f32", "f32"), ("bf16", "f16"), ("fp8", "q8_0")];

/// A way to generate.
#[derive(Debug)]
struct Peer {
    name: &'static str,
    program: Program,
    variant: &'static str,
    format: &'static str,
    /// What the root mean square of the logits' differences to the reference's may be, as part of theirs.
    tolerance: f64,
    /// Each of its tokens must be the reference's.
    is_same: bool,
}

const PEERS: [Peer; 17] = [
    peer(REFERENCE, Program::TorchGenerate, "plain", "f32"),
    peer("pytorch bf16", Program::TorchGenerate, "plain", "bf16"),
    peer("pytorch int8", Program::TorchGenerate, "plain", "int8"),
    peer("torch-compile f32", Program::TorchGenerate, "compiled", "f32"),
    peer("torch-compile bf16", Program::TorchGenerate, "compiled", "bf16"),
    peer("candle f32", Program::Candle, "plain", "f32"),
    // its GELU is an approximation
    Peer { tolerance: 2e-2, is_same: false, ..peer("llama.cpp f32", Program::LlamaCpp, "plain", "f32") },
    peer("llama.cpp f16", Program::LlamaCpp, "plain", "f16"),
    peer("llama.cpp q8_0", Program::LlamaCpp, "plain", "q8_0"),
    peer("voltaic f32", Program::Voltaic, "eager", "f32"),
    peer("voltaic bf16", Program::Voltaic, "eager", "bf16"),
    peer("voltaic fp8", Program::Voltaic, "eager", "fp8"),
    peer("voltaic-graphs f32", Program::Voltaic, "graphs", "f32"),
    peer("voltaic-graphs bf16", Program::Voltaic, "graphs", "bf16"),
    peer("voltaic-graphs fp8", Program::Voltaic, "graphs", "fp8"),
    peer("voltaic-tp2 f32", Program::Voltaic, TP_2, "f32"),
    peer("voltaic-tp2 bf16", Program::Voltaic, TP_2, "bf16"),
];

const fn peer(name: &'static str, program: Program, variant: &'static str, format: &'static str) -> Peer {
    let (tolerance, is_same) = match format.as_bytes() {
        b"f32" => (1e-4, true),
        b"bf16" | b"f16" => (5e-2, false),
        _ => (0.25, false), // one byte for each weight
    };
    Peer { name, program, variant, format, tolerance, is_same }
}

/// What is measured of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Part {
    Prefill,
    Decode,
}

/// A task, and what of it is compared.
struct Case {
    title: &'static str,
    part: Part,
    task: GenerateTask,
}

fn cases() -> [Case; 3] {
    let token = |place: usize| (place * place * 7 + place * 3 + 11) as i64 % CONTEXT as i64;
    let prompts = |count: usize| (0..count).map(|index| vec![10 + 7 * index as i64]).collect();
    let decode =
        |count| GenerateTask { prompts: prompts(count), new_tokens: CONTEXT - 1, warmup: 1, times: 3 };
    let prefill =
        GenerateTask { prompts: vec![(0..CONTEXT).map(token).collect()], new_tokens: 1, warmup: 2, times: 9 };
    [
        Case { title: "prefill of 256 tokens", part: Part::Prefill, task: prefill },
        Case { title: "one token at a time", part: Part::Decode, task: decode(1) },
        Case { title: "8 sequences, one token at a time", part: Part::Decode, task: decode(8) },
    ]
}

/// All that was measured in one run.
#[derive(Debug, Serialize)]
struct Results {
    machine: Machine,
    date: String,
    commit: String,
    num_rounds: usize,
    num_threads: usize,
    tables: Vec<Table>,
    verdicts: Vec<Verdict>,
}

/// Peers side by side.
#[derive(Debug, Serialize)]
struct Table {
    title: &'static str,
    part: Part,
    rows: Vec<Row>,
}

#[derive(Debug, Clone, Serialize)]
struct Row {
    peer: &'static str,
    /// Over processes, of the median time of each: milliseconds of a prefill, tokens a second otherwise; quartiles.
    value: [f64; 3],
    /// Tokens before the first one that is not the reference's, of all sequences, and of how many.
    same_tokens: (usize, usize),
    /// Root mean square of the logits' differences to the reference's, as part of theirs.
    error: f64,
    /// Cores that others used: the most in any process.
    others: f64,
}

/// A target, and what was reached.
#[derive(Debug, Serialize)]
struct Verdict {
    case: &'static str,
    target: String,
    reached: String,
    met: bool,
}

/// What a peer did, by round.
type Runs = Vec<(GenerateReport, f64)>;

/// Runs all peers in turns and writes `generation.json` and `generation.md` to `folder`.
pub fn run(
    bench: &Path,
    folder: &Path,
    num_rounds: usize,
    num_threads: usize,
    max_others: f64,
) -> anyhow::Result<()> {
    let launcher = Launcher::new(bench, max_others)?;
    let runs = measure(&launcher, num_rounds, num_threads)?;
    let tables = tables(&runs)?;
    let results = Results {
        machine: Machine::this()?,
        date: first_line("date", &["-u", "+%Y-%m-%d"]),
        commit: first_line("git", &["-C", &bench.to_string_lossy(), "describe", "--always", "--dirty"]),
        num_rounds,
        num_threads,
        verdicts: tables.iter().flat_map(verdicts).collect(),
        tables,
    };
    let write = |name: &str, text: String| {
        fs::write(folder.join(name), text).with_context(|| format!("write {}", folder.join(name).display()))
    };
    write("generation.json", serde_json::to_string_pretty(&results)? + "\n")?;
    write("generation.md", markdown(&results)?)?;
    println!("written to {}: generation.md, generation.json", folder.display());
    Ok(())
}

fn measure(launcher: &Launcher, num_rounds: usize, num_threads: usize) -> anyhow::Result<Vec<Runs>> {
    let folder = tempfile::tempdir()?;
    let tasks: Vec<GenerateTask> = cases().into_iter().map(|case| case.task).collect();
    let job = |variant: &str, format: &str, tasks| GenerateJob {
        variant: variant.to_owned(),
        format: format.to_owned(),
        weights: folder.path().join("gpt-mini.safetensors"),
        tasks,
    };
    launcher.generate(Program::Voltaic, &job("weights", "f32", Vec::new()), num_threads)?;
    let mut runs: Vec<Runs> = PEERS.iter().map(|_| Vec::new()).collect();
    let start = Instant::now();
    for round in 0..num_rounds {
        let mut turns: Vec<(&Peer, &mut Runs)> = PEERS.iter().zip(&mut runs).collect();
        if round % 2 == 1 {
            turns.reverse();
        }
        for (peer, runs) in turns {
            let tasks = if peer.variant == TP_2 { &tasks[..1] } else { &tasks[..] };
            let job = job(peer.variant, peer.format, tasks.to_vec());
            let (line, others) = launcher.generate(peer.program, &job, num_threads)?;
            let report: GenerateReport = serde_json::from_str(&line)
                .with_context(|| format!("{}: its last line is not a report: {line}", peer.name))?;
            let used = report.num_threads;
            ensure!(used == num_threads, "{}: uses {used} threads, not {num_threads}", peer.name);
            let secs = start.elapsed().as_secs();
            println!("{secs:>5} s  round {}/{num_rounds}  {}", round + 1, peer.name);
            runs.push((report, others));
        }
    }
    Ok(runs)
}

/// A table for each case.
///
/// # Errors
/// If a peer does not generate what the reference does.
fn tables(runs: &[Runs]) -> anyhow::Result<Vec<Table>> {
    let mut tables = Vec::new();
    for (at, case) in cases().into_iter().enumerate() {
        let reference = &runs[0].first().context("a run of the reference")?.0.tasks[at];
        let mut rows = Vec::new();
        for (peer, runs) in PEERS.iter().zip(runs) {
            // a graph is of steps of one token, and two processes are for what is large
            let other = if case.part == Part::Prefill { "graphs" } else { TP_2 };
            if peer.variant == other {
                continue;
            }
            let row =
                row(&case, peer, runs.iter().map(|(report, others)| (&report.tasks[at], *others)), reference);
            check(&row, peer, case.title)?;
            rows.push(row);
        }
        let sign = if case.part == Part::Prefill { 1.0 } else { -1.0 };
        rows.sort_by(|a, b| (sign * a.value[1]).total_cmp(&(sign * b.value[1])));
        tables.push(Table { title: case.title, part: case.part, rows });
    }
    Ok(tables)
}

fn row<'a>(
    case: &Case,
    peer: &Peer,
    runs: impl Iterator<Item = (&'a TaskReport, f64)>,
    reference: &TaskReport,
) -> Row {
    let (mut values, mut most, mut same, mut error) = (Vec::new(), 0.0_f64, usize::MAX, 0.0_f64);
    for (report, others) in runs {
        values.push(match case.part {
            Part::Prefill => 1e3 * quartiles(report.prefill_secs.clone())[1],
            Part::Decode => {
                let tokens = case.task.prompts.len() * (case.task.new_tokens - 1);
                tokens as f64 / quartiles(report.decode_secs.clone())[1]
            }
        });
        same = same.min(same_tokens(&report.tokens, &reference.tokens));
        error = error.max(relative_error(&report.logits, &reference.logits));
        most = most.max(others);
    }
    let all = case.task.prompts.len() * case.task.new_tokens;
    Row { peer: peer.name, value: quartiles(values), same_tokens: (same, all), error, others: most }
}

/// Tokens before the first one that differs, of all sequences.
fn same_tokens(own: &[Vec<i64>], reference: &[Vec<i64>]) -> usize {
    let same = |(own, reference): (&Vec<i64>, &Vec<i64>)| {
        own.iter().zip(reference).take_while(|(own, reference)| own == reference).count()
    };
    own.iter().zip(reference).map(same).sum()
}

/// Not a number if the lengths differ.
fn relative_error(own: &[f32], reference: &[f32]) -> f64 {
    if own.len() != reference.len() {
        return f64::NAN;
    }
    let square =
        |values: &mut dyn Iterator<Item = f32>| values.map(|value| f64::from(value).powi(2)).sum::<f64>();
    let errors = square(&mut own.iter().zip(reference).map(|(own, reference)| own - reference));
    (errors / square(&mut reference.iter().copied())).sqrt()
}

/// Whether a peer generates what the reference does: the same tokens in float32, and logits within what its format rounds.
fn check(row: &Row, peer: &Peer, case: &str) -> anyhow::Result<()> {
    let (error, tolerance, (same, all)) = (row.error, peer.tolerance, row.same_tokens);
    ensure!(
        error <= tolerance,
        "{case}: {}: its logits differ by {error:.1e} of {REFERENCE}'s, which may be {tolerance:.0e}; do not compare its time",
        peer.name
    );
    ensure!(
        !peer.is_same || same == all,
        "{case}: {}: {same} of {all} tokens are {REFERENCE}'s; do not compare its time",
        peer.name
    );
    Ok(())
}

/// The targets of a case, by the faster one of voltaic's two ways.
fn verdicts(table: &Table) -> Vec<Verdict> {
    let speed = |row: &Row| if table.part == Part::Prefill { 1.0 / row.value[1] } else { row.value[1] };
    let fastest = |is_one: &dyn Fn(&str) -> bool| {
        let rows = table.rows.iter().filter(|row| is_one(row.peer));
        rows.max_by(|a, b| speed(a).total_cmp(&speed(b)))
    };
    let mut verdicts = Vec::new();
    for (format, rival_format) in ALIKE {
        let is_ours = |name: &str| name.starts_with("voltaic") && !name.contains(TP_2);
        let ours = fastest(&|name| is_ours(name) && name.ends_with(&format!(" {format}")));
        let rival = fastest(&|name| match (table.part, format) {
            (Part::Decode, "f32") => !name.starts_with("voltaic") && name.ends_with(" f32"),
            _ => name == format!("llama.cpp {rival_format}"),
        });
        let (Some(ours), Some(rival)) = (ours, rival) else { continue };
        let (target, who) = match (table.part, format) {
            (Part::Decode, "f32") => (FLOAT32_TARGET, "the fastest peer in float32".to_owned()),
            _ => (1.0, rival.peer.to_owned()),
        };
        let reached = speed(ours) / speed(rival);
        verdicts.push(Verdict {
            case: table.title,
            target: format!("{}: {target} times the speed of {who}", ours.peer),
            reached: format!("{reached:.2} times that of {}", rival.peer),
            met: reached >= target,
        });
        if let Some(both) = fastest(&|name| name == format!("voltaic-tp2 {format}")) {
            let reached = speed(both) / speed(ours);
            verdicts.push(Verdict {
                case: table.title,
                target: format!("{}: {TP_2_TARGET} times the speed of one process", both.peer),
                reached: format!("{reached:.2} times that of {}", ours.peer),
                met: reached >= TP_2_TARGET,
            });
        }
    }
    verdicts
}

fn markdown(results: &Results) -> anyhow::Result<String> {
    let mut page = String::new();
    let Machine { cpu, num_cpus, memory_gib } = &results.machine;
    writeln!(
        page,
        "# Generating text\n\nWritten by `make bench-generation`; [README.md](README.md) says how to read it.\n"
    )?;
    writeln!(
        page,
        "{num_cpus} CPUs {cpu}, {memory_gib:.0} GiB; {}; commit {}. {} rounds of processes in turns, threads {}.\n",
        results.date, results.commit, results.num_rounds, results.num_threads
    )?;
    writeln!(page, "| case | target | reached | |\n|---|---|---|---|")?;
    for Verdict { case, target, reached, met } in &results.verdicts {
        writeln!(page, "| {case} | {target} | {reached} | {} |", if *met { "met" } else { "**missed**" })?;
    }
    for Table { title, part, rows } in &results.tables {
        let unit = if *part == Part::Prefill { "ms" } else { "tokens/s" };
        writeln!(page, "\n## {title}\n")?;
        writeln!(
            page,
            "| peer | {unit}: median (quartiles) | tokens as {REFERENCE}'s | logits' error | others |"
        )?;
        writeln!(page, "|---|---|---|---|---|")?;
        for Row { peer, value: [low, middle, high], same_tokens: (same, all), error, others } in rows {
            let digits = usize::from(*part == Part::Prefill);
            writeln!(
                page,
                "| {peer} | {middle:.digits$} ({low:.digits$} to {high:.digits$}) | {same} of {all} | {error:.1e} | {others:.2} |"
            )?;
        }
    }
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(peer: &'static str, value: f64) -> Row {
        Row { peer, value: [value; 3], same_tokens: (8, 8), error: 0.0, others: 0.0 }
    }

    #[test]
    fn formats_are_compared_with_those_of_as_many_bits() {
        let rows = [
            ("voltaic f32", 300.0),
            ("voltaic-graphs f32", 330.0),
            ("torch-compile f32", 250.0),
            ("llama.cpp f32", 240.0),
            ("voltaic bf16", 800.0),
            ("llama.cpp f16", 840.0),
            ("pytorch bf16", 9000.0),
        ];
        let table =
            |part| Table { title: "", part, rows: rows.map(|(peer, value)| row(peer, value)).to_vec() };
        let found = |part| -> Vec<(String, bool)> {
            verdicts(&table(part)).into_iter().map(|verdict| (verdict.reached, verdict.met)).collect()
        };
        let decode =
            [("1.32 times that of torch-compile f32", true), ("0.95 times that of llama.cpp f16", false)];
        assert_eq!(found(Part::Decode), decode.map(|(reached, met)| (reached.to_owned(), met)));
        // milliseconds
        let prefill =
            [("0.80 times that of llama.cpp f32", false), ("1.05 times that of llama.cpp f16", true)];
        assert_eq!(found(Part::Prefill), prefill.map(|(reached, met)| (reached.to_owned(), met)));
    }

    #[test]
    fn a_peer_that_generates_something_else_is_refused() {
        let peer = |name| PEERS.iter().find(|peer| peer.name == name).unwrap();
        let of = |error, same| Row { error, same_tokens: (same, 8), ..row("", 1.0) };
        assert!(check(&of(1e-6, 8), peer("voltaic f32"), "").is_ok());
        assert!(check(&of(1e-6, 7), peer("voltaic f32"), "").is_err());
        assert!(check(&of(1e-2, 8), peer("candle f32"), "").is_err());
        assert!(check(&of(1e-2, 3), peer("voltaic bf16"), "").is_ok());
        for name in ["voltaic bf16", "llama.cpp q8_0"] {
            assert!(
                check(&of(1.0, 8), peer(name), "").is_err()
                    && check(&of(f64::NAN, 8), peer(name), "").is_err()
            );
        }
        assert_eq!(same_tokens(&[vec![1, 2, 3], vec![4, 5]], &[vec![1, 9, 3], vec![4, 5]]), 3);
        assert!((relative_error(&[1.0, 1.0], &[1.0, 2.0]) - 0.2_f64.sqrt()).abs() < 1e-9);
        assert!(relative_error(&[1.0], &[1.0, 2.0]).is_nan());
    }
}
