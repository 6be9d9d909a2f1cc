//! From processes to numbers: what each peer did in a case, and whether the targets are met.

use serde::Serialize;

use crate::cases::{
    BASELINE, COMPILED, Case, GRAPHS, Hardware, Malloc, OURS, Peer, Precision, Rival, SHARDED, Work,
};
use crate::process::{Outcome, Peak};

/// Losses compared between peers that do the same work: rounding grows from step to step, ten times each on resnet18.
const NUM_COMPARED: usize = 4;
const LOSS_TOLERANCE: f64 = 1e-3;
/// In bfloat16 a rounding the other way is 0.4 %.
const BF16_LOSS_TOLERANCE: f64 = 1e-2;
/// For the mean loss of peers with dropout masks of their own.
const MASKS_TOLERANCE: f64 = 0.1;
/// Seconds from the start of the process to the first step.
const START_TARGET_SECS: f64 = 0.5;
/// How many times faster than in float32 voltaic should train these in bf16-mixed.
const BF16_GAINS: [(&str, f64); 1] = [("gpt-mini", 1.7)];
/// Part of the baseline's peak of memory.
const MEMORY_TARGET: f64 = 0.5;

/// The same of a GPU's, where both have libtorch's allocator.
const CUDA_MEMORY_TARGET: f64 = 1.0;

/// What the processes of one peer did in a case, by round.
#[derive(Debug)]
pub struct Runs {
    pub peer: &'static Peer,
    pub outcomes: Vec<Outcome>,
}

/// Peers side by side.
#[derive(Debug, Serialize)]
pub struct Table {
    pub title: String,
    pub workload: &'static str,
    pub precision: Precision,
    pub num_threads: usize,
    pub malloc: Malloc,
    pub num_processes: usize,
    pub hardware: Hardware,
    pub gflop_per_step: f64,
    pub rows: Vec<Row>,
}

/// A row of a table.
#[derive(Debug, Serialize)]
pub struct Row {
    pub peer: &'static str,
    /// Over processes, of the median step of each.
    pub step_ms: Spread,
    /// Over processes, of what the process that reports used of the processors in a step.
    pub cpu_ms: Spread,
    /// Distance of the quartiles of the steps within a process, as part of their median.
    pub quartile_distance: f64,
    /// How many times faster than the baseline in the same round.
    pub speed: Spread,
    /// The same of the best processes.
    pub best_speed: f64,
    pub items_per_sec: f64,
    /// At the best process.
    pub gflops: f64,
    pub share_of_peak: f64,
    /// From the start of the process to the start of the first step.
    pub start_secs: f64,
    /// The first step, in which compilation is: median and longest.
    pub first_step_secs: Spread,
    pub peak_rss_mb: f64,
    /// Of the device; none on the CPU.
    pub peak_device_mb: Option<f64>,
    /// Cores that others used: the most in any process.
    pub others: f64,
    /// Processes thrown away because others were busy.
    pub num_repeats: usize,
    pub work: Work,
    /// It divides states among processes.
    pub shards: bool,
    /// Why the losses do not show that the work was done; nothing if they do.
    pub wrong_losses: Option<String>,
    /// Median step of each process.
    pub rounds_ms: Vec<f64>,
}

/// Smallest, middle and largest value.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    pub min: f64,
    pub median: f64,
    pub max: f64,
}

impl Spread {
    fn of(values: impl Iterator<Item = f64>) -> Self {
        let values = sorted(&values.collect::<Vec<f64>>());
        match values[..] {
            [] => Self { min: f64::NAN, median: f64::NAN, max: f64::NAN },
            [min, ..] => Self { min, median: quantile(&values, 0.5), max: quantile(&values, 1.0) },
        }
    }
}

/// Of sorted values, with linear interpolation.
fn quantile(sorted: &[f64], part: f64) -> f64 {
    let place = (sorted.len() - 1) as f64 * part;
    let (low, high) = (place.floor() as usize, place.ceil() as usize);
    sorted[low] + (sorted[high] - sorted[low]) * place.fract()
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values
}

/// Median step of a process.
pub fn median_ms(outcome: &Outcome) -> f64 {
    1e3 * quantile(&sorted(&outcome.report.step_secs), 0.5)
}

/// Rows of a case, the fastest first.
pub fn rows(case: Case, runs: &[Runs], peak: Peak) -> Vec<Row> {
    let baseline = runs.iter().find(|run| run.peer.name == BASELINE);
    let mut rows: Vec<Row> = runs.iter().map(|run| row(case, run, baseline, peak)).collect();
    rows.sort_by(|a, b| a.step_ms.min.total_cmp(&b.step_ms.min));
    rows
}

fn row(case: Case, runs: &Runs, baseline: Option<&Runs>, peak: Peak) -> Row {
    let rounds_ms: Vec<f64> = runs.outcomes.iter().map(median_ms).collect();
    let baseline_ms: Vec<f64> =
        baseline.into_iter().flat_map(|run| run.outcomes.iter().map(median_ms)).collect();
    let over = |value: &dyn Fn(&Outcome) -> f64| Spread::of(runs.outcomes.iter().map(value));
    let step_ms = Spread::of(rounds_ms.iter().copied());
    let best_baseline = baseline_ms.iter().copied().fold(f64::NAN, f64::min);
    let flops = case.flops() / (step_ms.min / 1e3);
    let peak = if case.precision == Precision::Bf16 { peak.bf16 } else { peak.fp32 };
    Row {
        peer: runs.peer.name,
        step_ms,
        cpu_ms: over(&|outcome| 1e3 * outcome.report.step_cpu_secs),
        quartile_distance: over(&|outcome| {
            let secs = sorted(&outcome.report.step_secs);
            (quantile(&secs, 0.75) - quantile(&secs, 0.25)) / quantile(&secs, 0.5)
        })
        .median,
        speed: Spread::of(baseline_ms.iter().zip(&rounds_ms).map(|(baseline, ours)| baseline / ours)),
        best_speed: best_baseline / step_ms.min,
        items_per_sec: case.items() as f64 / (step_ms.median / 1e3),
        gflops: flops / 1e9,
        share_of_peak: flops / (peak * case.num_processes as f64),
        start_secs: over(&|outcome| outcome.start_secs).median,
        first_step_secs: over(&|outcome| outcome.report.first_step_secs),
        peak_rss_mb: over(&|outcome| outcome.report.peak_rss_bytes as f64 / 1e6).median,
        peak_device_mb: runs
            .outcomes
            .iter()
            .filter_map(|outcome| Some(outcome.report.peak_device_bytes? as f64 / 1e6))
            .reduce(f64::max),
        others: over(&|outcome| outcome.others).max,
        num_repeats: runs.outcomes.iter().map(|outcome| outcome.num_repeats).sum(),
        work: runs.peer.work,
        shards: runs.peer.shards,
        wrong_losses: runs.outcomes.iter().find_map(|outcome| {
            let expected =
                baseline.and_then(|run| run.outcomes.first()).map(|first| &first.report.losses[..]);
            let is_bf16 = case.precision == Precision::Bf16;
            let tolerance = if is_bf16 { BF16_LOSS_TOLERANCE } else { LOSS_TOLERANCE };
            wrong_losses(runs.peer.work, &outcome.report.losses, expected, tolerance)
        }),
        rounds_ms,
    }
}

/// What is wrong with losses, if anything.
fn wrong_losses(work: Work, losses: &[f64], baseline: Option<&[f64]>, tolerance: f64) -> Option<String> {
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let deviates = |what: &str, own: f64, other: f64, tolerance: f64| {
        // a loss that is not a number deviates, too
        let agrees = ((own - other) / other).abs() <= tolerance;
        (!agrees).then(|| {
            format!("{what} is {own:.5}, {BASELINE}'s {other:.5}: apart by more than {tolerance:.0e}")
        })
    };
    match (work, baseline) {
        (Work::Same, Some(baseline)) => {
            let mut pairs = losses.iter().zip(baseline).take(NUM_COMPARED).enumerate();
            pairs.find_map(|(step, (own, other))| {
                deviates(&format!("the loss of step {step}"), *own, *other, tolerance)
            })
        }
        (Work::OwnMasks, Some(baseline)) => {
            deviates("the mean loss", mean(losses), mean(baseline), MASKS_TOLERANCE)
        }
        _ => {
            let quarter = losses.len().div_ceil(4);
            let (first, last) = (mean(&losses[..quarter]), mean(&losses[losses.len() - quarter..]));
            let falls = last < first;
            (!falls).then(|| format!("the loss does not fall: {first:.3} at first, {last:.3} at last"))
        }
    }
}

/// A target, and what was reached.
#[derive(Debug, Serialize)]
pub struct Verdict {
    pub case: String,
    pub target: String,
    pub reached: String,
    pub met: bool,
}

/// The targets of a case. Best process against best process, since slow modes of a process hit all peers at random.
pub fn verdicts(case: Case, rows: &[Row]) -> Vec<Verdict> {
    let row = |name| rows.iter().find(|row| row.peer == name);
    let (Some(ours), Some(baseline)) = (row(OURS), row(BASELINE)) else { return Vec::new() };
    let verdict = |target: String, reached: String, met| Verdict { case: case.title(), target, reached, met };
    let wanted = case.target();
    let faster = |what: &str, row: &Row, than: &str, rival: &Row| {
        let speed = speed(row, rival);
        let reached = if rival.peer == than { String::new() } else { format!(" that of {}", rival.peer) };
        verdict(
            format!("{what}{wanted} times the speed of {than}"),
            format!("{speed:.2} times{reached}"),
            speed >= wanted,
        )
    };
    if case.hardware == Hardware::Cuda {
        let mut verdicts = vec![faster("", ours, BASELINE, baseline)];
        if let (Some(own), Some(theirs)) = (ours.peak_device_mb, baseline.peak_device_mb) {
            let target = format!("at most {CUDA_MEMORY_TARGET} of {BASELINE}'s memory of the GPU");
            let share = own / theirs;
            verdicts.push(verdict(target, format!("{share:.2} of it"), share <= CUDA_MEMORY_TARGET));
        }
        return verdicts;
    }
    let mut verdicts = vec![match case.workload.rival {
        Rival::Best if case.num_processes == 1 => {
            let eager = fastest(rows.iter().filter(|row| row.peer != COMPILED)).unwrap_or(baseline);
            faster("", ours, "the fastest peer that does not compile", eager)
        }
        _ => faster("", ours, BASELINE, baseline),
    }];
    if case.num_processes > 1 {
        verdicts.extend(sharding(case, rows));
        return verdicts;
    }
    if let Some(burn) = row("burn").filter(|_| case.workload.name == "mlp") {
        let speed = speed(ours, burn);
        verdicts.push(verdict("faster than burn".into(), format!("{speed:.2} times its speed"), speed > 1.0));
    }
    if let (Rival::Best, Some(graphs)) = (case.workload.rival, row(GRAPHS)) {
        let rival = fastest(rows.iter()).unwrap_or(baseline);
        verdicts.push(faster("with graphs ", graphs, "the fastest peer", rival));
    }
    if let (Some(graphs), Some(compiled)) = (row(GRAPHS), row(COMPILED)) {
        let speed = speed(graphs, compiled);
        let target = format!("with graphs as fast as {COMPILED}");
        verdicts.push(verdict(target, format!("{speed:.2} times its speed"), speed >= 1.0));
    }
    let memory = ours.peak_rss_mb / baseline.peak_rss_mb;
    verdicts.push(verdict(
        format!("at most {MEMORY_TARGET} of {BASELINE}'s memory"),
        format!("{memory:.2} of it"),
        memory <= MEMORY_TARGET,
    ));
    verdicts.push(verdict(
        format!("first step within {START_TARGET_SECS} s"),
        format!("{:.2} s", ours.start_secs),
        ours.start_secs <= START_TARGET_SECS,
    ));
    verdicts
}

/// States divided among processes: against voltaic's DDP, and against the fastest peer that divides some. Medians over rounds of
/// ratios within a round, in which processes of all took turns.
fn sharding(case: Case, rows: &[Row]) -> Vec<Verdict> {
    let row = |name| rows.iter().find(|row| row.peer == name);
    let mut verdicts = Vec::new();
    let mut judge = |target: String, reached: String, met| {
        verdicts.push(Verdict { case: case.title(), target, reached, met });
    };
    for (name, wanted) in SHARDED {
        let Some(own) = row(name) else { continue };
        if let Some(ddp) = row(OURS) {
            let share = in_turns(own, ddp);
            judge(
                format!("{name} at least {wanted} of the speed of DDP"),
                format!("{share:.2}"),
                share >= wanted,
            );
        }
        let peers = rows.iter().filter(|row| row.shards && !row.peer.starts_with(OURS));
        let fastest = peers.map(|peer| (in_turns(own, peer), peer)).min_by(|a, b| a.0.total_cmp(&b.0));
        if let Some((speed, peer)) = fastest {
            let reached = format!("{speed:.2} times the speed of {}", peer.peer);
            judge(format!("{name} faster than fully_shard and DeepSpeed"), reached, speed > 1.0);
        }
    }
    verdicts
}

/// How many times as fast as a rival, median of the rounds.
fn in_turns(row: &Row, rival: &Row) -> f64 {
    let ratios = row.rounds_ms.iter().zip(&rival.rounds_ms).map(|(own, rival)| rival / own);
    Spread::of(ratios).median
}

/// How many times as fast as a rival, best against best.
fn speed(row: &Row, rival: &Row) -> f64 {
    rival.step_ms.min / row.step_ms.min
}

/// The peer with the fastest process.
fn fastest<'a>(rows: impl Iterator<Item = &'a Row>) -> Option<&'a Row> {
    let peers = rows.filter(|row| !row.peer.starts_with(OURS));
    peers.min_by(|a, b| a.step_ms.min.total_cmp(&b.step_ms.min))
}

/// What voltaic gains by a shorter number format, in tables that have their like in float32.
pub fn gains_of_bf16(tables: &[Table]) -> Vec<Verdict> {
    let ours = |table: &Table| table.rows.iter().find(|row| row.peer == OURS).map(|row| row.step_ms.min);
    let mut verdicts = Vec::new();
    for table in tables.iter().filter(|table| table.precision == Precision::Bf16) {
        let is_like = |other: &&Table| {
            other.precision == Precision::Fp32
                && other.malloc == table.malloc
                && (other.workload, other.num_threads) == (table.workload, table.num_threads)
                && other.num_processes == table.num_processes
        };
        let wanted = BF16_GAINS.iter().find(|(name, _)| *name == table.workload);
        let fp32 = tables.iter().find(is_like).and_then(ours);
        if let (Some((_, wanted)), Some(fp32), Some(bf16)) = (wanted, fp32, ours(table)) {
            verdicts.push(Verdict {
                case: table.title.clone(),
                target: format!("{wanted} times its own speed in fp32"),
                reached: format!("{:.2} times", fp32 / bf16),
                met: fp32 / bf16 >= *wanted,
            });
        }
    }
    verdicts
}

/// Where computing outweighs what is exchanged, so that a second process should be worth it.
const SCALES: &str = "cnn";

/// What two processes do against one, of voltaic and of the baseline.
pub fn scaling(tables: &[Table]) -> Vec<Verdict> {
    let best =
        |table: &Table, name| table.rows.iter().find(|row| row.peer == name).map(|row| row.step_ms.min);
    let verdict = |table: &Table| {
        let alone = tables.iter().find(|other| {
            other.num_processes == 1
                && (other.workload, other.precision) == (table.workload, table.precision)
                && (other.num_threads, other.malloc) == (table.num_threads, table.malloc)
        })?;
        // each process does the work of one step, in the time that one alone takes if nothing is lost
        let efficiency = |name| Some(best(alone, name)? / best(table, name)?);
        let (ours, baseline) = (efficiency(OURS)?, efficiency(BASELINE)?);
        Some(Verdict {
            case: table.title.clone(),
            target: format!("scales at least as well as {BASELINE}, {:.0} %", 100.0 * baseline),
            reached: format!("{:.0} % of twice the speed of one process", 100.0 * ours),
            met: ours >= baseline,
        })
    };
    let is_judged = |table: &&Table| table.num_processes > 1 && table.workload == SCALES;
    tables.iter().filter(is_judged).filter_map(verdict).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::WORKLOADS;

    #[test]
    fn quantiles_are_interpolated() {
        assert_eq!(quantile(&[1.0, 2.0, 4.0], 0.5), 2.0);
        assert_eq!(quantile(&[1.0, 2.0], 0.25), 1.25);
        assert_eq!(Spread::of([3.0, 1.0].into_iter()), Spread { min: 1.0, median: 2.0, max: 3.0 });
    }

    fn row(peer: &'static str, ms: f64) -> Row {
        let spread = Spread { min: ms, median: ms, max: ms };
        Row {
            peer,
            step_ms: spread,
            cpu_ms: spread,
            quartile_distance: 0.0,
            speed: spread,
            best_speed: 100.0 / ms,
            items_per_sec: 1.0,
            gflops: 1.0,
            share_of_peak: 1.0,
            start_secs: 0.1,
            first_step_secs: spread,
            peak_rss_mb: 1.0,
            peak_device_mb: None,
            others: 0.0,
            num_repeats: 0,
            work: Work::Same,
            shards: false,
            wrong_losses: None,
            rounds_ms: vec![ms],
        }
    }

    #[test]
    fn rivals_are_those_of_the_workload() {
        let rows = [
            row(OURS, 60.0),
            row(GRAPHS, 50.0),
            row(BASELINE, 100.0),
            row("pytorch-fused", 80.0),
            row(COMPILED, 55.0),
        ];
        let speeds = |name: &str| -> Vec<(String, bool)> {
            let workload = WORKLOADS.iter().find(|workload| workload.name == name).unwrap();
            let case = Case {
                workload,
                precision: Precision::Bf16,
                num_threads: 1,
                malloc: Malloc::Held,
                num_processes: 1,
                hardware: Hardware::Cpu,
            };
            let verdicts = verdicts(case, &rows).into_iter();
            verdicts.filter(|v| v.target.contains("times the speed")).map(|v| (v.reached, v.met)).collect()
        };
        assert_eq!(speeds("gpt-tiny"), [("1.67 times".to_owned(), true)]);
        let of_the_best = [
            ("1.33 times that of pytorch-fused".to_owned(), true),
            ("1.10 times that of torch-compile".to_owned(), false),
        ];
        assert_eq!(speeds("gpt-mini"), of_the_best);
    }

    #[test]
    fn divided_states_are_judged_by_the_median_of_the_rounds() {
        let sharded =
            |peer, rounds: [f64; 3]| Row { shards: true, rounds_ms: rounds.to_vec(), ..row(peer, 1.0) };
        let rows = [
            Row { rounds_ms: vec![90.0, 95.0, 50.0], ..row(OURS, 1.0) },
            sharded("voltaic-zero1", [100.0, 100.0, 100.0]),
            sharded("fully-shard", [130.0, 120.0, 80.0]),
            sharded("deepspeed-1", [110.0, 99.0, 90.0]),
        ];
        let workload = WORKLOADS.iter().find(|workload| workload.name == "cnn").unwrap();
        let (precision, malloc) = (Precision::Fp32, Malloc::Held);
        let hardware = Hardware::Cpu;
        let case = Case { workload, precision, num_threads: 1, malloc, num_processes: 2, hardware };
        let found = sharding(case, &rows).into_iter().map(|v| (v.reached, v.met)).collect::<Vec<_>>();
        let expected =
            [("0.90".to_owned(), false), ("0.99 times the speed of deepspeed-1".to_owned(), false)];
        assert_eq!(found, expected);
    }

    #[test]
    fn losses_of_other_work_are_found() {
        let baseline = Some(&[2.0, 1.9, 1.8, 1.7, 1.6, 1.5, 1.4, 1.3, 9.0][..]);
        let losses = [2.0, 1.9, 1.8, 1.7, 1.6, 1.5, 1.4, 1.3, 1.0];
        assert_eq!(wrong_losses(Work::Same, &losses, baseline, 1e-3), None);
        for wrong in [2.01, f64::NAN] {
            assert!(wrong_losses(Work::Same, &[wrong, 1.9, 1.8], baseline, 1e-3).is_some());
        }
        assert!(wrong_losses(Work::OwnMasks, &[2.0, 1.0], Some(&[2.0, 2.0]), 1e-3).is_some());
        assert_eq!(wrong_losses(Work::OwnMasks, &[2.0, 1.9], Some(&[2.0, 2.0]), 1e-3), None);
        assert_eq!(wrong_losses(Work::OwnDraw, &[2.0, 1.9, 1.0, 0.9], None, 1e-3), None);
        assert!(wrong_losses(Work::OwnDraw, &[1.0, 1.0, 1.0], None, 1e-3).is_some());
    }
}
