//! `DeviceStatsMonitor`: which rows it adds to `metrics.csv`, what is in them, and the picture.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

use tempfile::TempDir;
use voltaic::Module;
use voltaic::callback::{Callback, DeviceStatsMonitor, DeviceStatsMonitorConfig};
use voltaic::data::Loaders;
use voltaic::logger::CsvLogger;
use voltaic::module::HookContext;
use voltaic::trainer::{CallbackConfig, Trainer, TrainerBuilder};

use crate::probe::{Probe, loader, loaders, names, own_process, plays, silent, text_of};

const MEMORY: [&str; 10] = [
    "Limit",
    "InUse",
    "MaxInUse",
    "NumAllocs",
    "NumFrees",
    "ActiveAllocs",
    "MaxAllocSize",
    "TotalSystemAllocs",
    "TotalSystemFrees",
    "TotalActiveAllocs",
];
const CPU: [&str; 3] = ["cpu_percent", "cpu_vm_percent", "cpu_swap_percent"];

/// A row of `metrics.csv`: its cells that are not empty.
type Row = BTreeMap<String, f64>;

fn rows(csv: &Path) -> Vec<Row> {
    let text = std::fs::read_to_string(csv).unwrap();
    let mut lines = text.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let header = lines.next().unwrap();
    lines
        .map(|cells| {
            assert_eq!(cells.len(), header.len());
            let cells = header.iter().zip(cells).filter(|(_, cell)| !cell.is_empty());
            cells.map(|(name, cell)| (name.to_string(), cell.parse().unwrap())).collect()
        })
        .collect()
}

/// Rows of a hook, their metrics without the hook's name.
fn of_hook(rows: &[Row], hook: &str) -> Vec<Row> {
    let prefix = format!("DeviceStatsMonitor.{hook}/");
    let short = |(name, value): (&String, &f64)| (name.trim_start_matches(&prefix).to_owned(), *value);
    let of_hook = |row: &&Row| row.keys().any(|name| name.starts_with(&prefix));
    rows.iter().filter(of_hook).map(|row| row.iter().map(short).collect()).collect()
}

fn steps(rows: &[Row], hook: &str) -> Vec<u64> {
    of_hook(rows, hook).iter().map(|row| row["step"] as u64).collect()
}

fn logging_to(root: &Path) -> TrainerBuilder {
    silent().default_root_dir(root).with_logger(CsvLogger::new(root).plots(false))
}

fn csv_of(root: &Path, version: u32) -> std::path::PathBuf {
    root.join(format!("lightning_logs/version_{version}/metrics.csv"))
}

/// What the device says of itself at the end of each batch for which the loggers are due.
#[derive(Default, Clone)]
struct Seen(Arc<Mutex<Vec<Row>>>);

impl Callback for Seen {
    fn on_train_batch_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        if let Some(step) = ctx.log_step() {
            let stats = ctx.device_stats()?.into_iter().map(|(name, value)| (name.to_owned(), value));
            let of_row = [("step".to_owned(), step as f64)];
            self.0.lock().unwrap().push(stats.chain(of_row).collect());
        }
        Ok(())
    }
}

/// In a process of its own, so that nobody else uses the host's pool.
#[test]
fn rows_have_the_names_steps_and_values_of_the_pool() {
    if !plays("device_stats") {
        text_of(&own_process("device_stats").output().unwrap());
        return;
    }
    let root = TempDir::new().unwrap();
    let seen = Seen::default();
    let builder = logging_to(root.path()).max_epochs(2).log_every_n_steps(4_u64);
    let mut trainer = builder.callback(DeviceStatsMonitor::new()).callback(seen.clone()).build().unwrap();
    let mut net = Probe::logging(&[0.5, 0.25]);
    trainer.fit(&mut net, &mut loaders()).unwrap();

    let rows = rows(&csv_of(root.path(), 0));
    let names: BTreeSet<&str> =
        rows.iter().flat_map(Row::keys).filter_map(|name| name.strip_prefix("DeviceStatsMonitor.")).collect();
    let expected: BTreeSet<String> = ["train_batch_start", "train_batch_end"]
        .into_iter()
        .chain(["validation_batch_start", "validation_batch_end"])
        .flat_map(|hook| MEMORY.into_iter().chain(CPU).map(move |metric| format!("on_{hook}/{metric}")))
        .collect();
    assert_eq!(names, expected.iter().map(String::as_str).collect());
    for (hook, expected) in [("on_train_batch", vec![3, 7, 11]), ("on_validation_batch", vec![5, 11])] {
        for moment in ["start", "end"] {
            assert_eq!(steps(&rows, &format!("{hook}_{moment}")), expected, "{hook}_{moment}");
        }
    }

    let ends = of_hook(&rows, "on_train_batch_end");
    for end in &ends {
        assert!(end["InUse"] > 0.0 && end["MaxInUse"] >= end["InUse"], "{end:?}");
        assert!(CPU.iter().all(|metric| (0.0..=100.0).contains(&end[*metric])), "{end:?}");
    }
    for (earlier, later) in ends.iter().zip(&ends[1..]) {
        for growing in ["NumAllocs", "NumFrees", "TotalSystemAllocs", "TotalSystemFrees"] {
            assert!(later[growing] > earlier[growing], "{growing} from {earlier:?} to {later:?}");
        }
    }
    let without_cpu: Vec<Row> = ends
        .into_iter()
        .map(|row| row.into_iter().filter(|(name, _)| !CPU.contains(&name.as_str())).collect())
        .collect();
    assert_eq!(without_cpu, *seen.0.lock().unwrap());
}

#[test]
fn rows_come_when_the_loggers_are_due() {
    for (every, accumulate, train, validation) in [
        (1_u64, 1_u64, vec![0, 1, 2, 3, 4, 5], vec![5]),
        (4, 1, vec![3], vec![5]),
        (50, 1, vec![], vec![5]),
        (0, 1, vec![], vec![]),
        (2, 4, vec![1, 1], vec![1]),
    ] {
        let root = TempDir::new().unwrap();
        let builder = logging_to(root.path()).max_epochs(1).log_every_n_steps(every);
        let builder = builder.accumulate_grad_batches(accumulate).callback(DeviceStatsMonitor::new());
        let mut net = Probe::logging(&[0.5]);
        builder.build().unwrap().fit(&mut net, &mut loaders()).unwrap();
        let rows = rows(&csv_of(root.path(), 0));
        for moment in ["start", "end"] {
            let found =
                ["train", "validation"].map(|name| steps(&rows, &format!("on_{name}_batch_{moment}")));
            assert_eq!(
                found,
                [train.clone(), validation.clone()],
                "every {every}, {accumulate} batches each"
            );
        }
    }
}

#[test]
fn an_evaluation_adds_two_rows_however_long_it_is() {
    for in_fit in [true, false] {
        let root = TempDir::new().unwrap();
        let builder = logging_to(root.path()).max_epochs(1).log_every_n_steps(1_u64);
        let mut trainer = builder.callback(DeviceStatsMonitor::new()).build().unwrap();
        let mut data = Loaders::new().train(loader(12)).val(loader(40)).val(loader(24));
        let mut net = Probe::logging(&[0.5]);
        if in_fit {
            trainer.fit(&mut net, &mut data).unwrap();
        } else {
            trainer.validate(&mut net, &mut data).unwrap();
        }
        let rows = rows(&csv_of(root.path(), 0));
        let step = if in_fit { 5 } else { 0 };
        for moment in ["start", "end"] {
            assert_eq!(steps(&rows, &format!("on_validation_batch_{moment}")), [step], "{in_fit}");
        }
    }
}

#[test]
fn cpu_stats_says_whether_the_load_of_the_host_is_logged() {
    for (cpu_stats, expected) in [(None, 13), (Some(true), 13), (Some(false), 10)] {
        let root = TempDir::new().unwrap();
        let monitor = DeviceStatsMonitor::from(DeviceStatsMonitorConfig { cpu_stats });
        let builder = logging_to(root.path()).max_epochs(1).log_every_n_steps(1_u64).callback(monitor);
        builder.build().unwrap().fit(&mut Probe::logging(&[0.5]), &mut loaders()).unwrap();
        let ends = of_hook(&rows(&csv_of(root.path(), 0)), "on_train_batch_end");
        let names: Vec<&str> = ends[0].keys().map(String::as_str).collect();
        assert_eq!(names.len(), expected + 1, "{cpu_stats:?}: {names:?} with the step");
        assert_eq!(names.contains(&"cpu_vm_percent"), expected == 13);
    }
}

#[test]
fn a_run_without_logger_refuses_the_monitor() {
    let named = CallbackConfig::DeviceStatsMonitor(DeviceStatsMonitorConfig::default());
    let mut config = silent().build().unwrap().config().clone();
    config.callbacks = vec![named];
    for builder in [silent().callback(DeviceStatsMonitor::new()), Trainer::builder().config(config)] {
        let error = builder.build().err().unwrap().to_string();
        let expected = "trainer.logger: false, but DeviceStatsMonitor has to have a logger; \
                        set trainer.logger=true, or remove the callback";
        assert!(error.contains(expected), "{error}");
    }
    // a trial run logs nothing by design
    let mut trial =
        silent().logger(true).fast_dev_run(true).callback(DeviceStatsMonitor::new()).build().unwrap();
    trial.fit(&mut Probe::default(), &mut loaders()).unwrap();
}

#[test]
fn a_resumed_run_logs_at_the_steps_that_are_left() {
    let root = TempDir::new().unwrap();
    let fit = |max_steps: i64, ckpt: Option<&Path>| {
        let builder = logging_to(root.path()).max_epochs(2).max_steps(max_steps).log_every_n_steps(3_u64);
        let mut trainer =
            builder.enable_checkpointing(true).callback(DeviceStatsMonitor::new()).build().unwrap();
        if let Some(ckpt) = ckpt {
            trainer.ckpt_path(ckpt.to_str().unwrap());
        }
        trainer.fit(&mut Probe::logging(&[0.5, 0.25]), &mut loaders()).unwrap();
        (trainer.best_model_path().unwrap(), trainer.log_dir().join("metrics.csv"))
    };
    let (ckpt, first) = fit(6, None);
    let (_, rest) = fit(-1, Some(&ckpt));
    let (_, whole) = fit(-1, None);
    for (csv, train, validation) in
        [(first, vec![2, 5], vec![5]), (rest, vec![8, 11], vec![11]), (whole, vec![2, 5, 8, 11], vec![5, 11])]
    {
        let rows = rows(&csv);
        for moment in ["start", "end"] {
            assert_eq!(steps(&rows, &format!("on_train_batch_{moment}")), train, "{}", csv.display());
            assert_eq!(steps(&rows, &format!("on_validation_batch_{moment}")), validation);
        }
    }
}

#[test]
fn the_command_line_takes_the_monitor_and_shows_its_picture() {
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/mlp.yaml");
    let root = TempDir::new().unwrap();
    let extra = root.path().join("extra.yaml");
    std::fs::write(&extra, "trainer: {callbacks: [{class_path: DeviceStatsMonitor}]}").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_voltaic"));
    command.current_dir(root.path()).args(["fit", "--trainer.accelerator=cpu", "--trainer.max_epochs=1"]);
    command.args(["--trainer.log_every_n_steps=2", "--trainer.limit_train_batches=6"]);
    command.args(["--trainer.limit_val_batches=3", "--config"]).arg(&recipe).arg("--config").arg(&extra);
    command.arg("--trainer.callbacks.cpu_stats=false");
    let output = text_of(&command.output().unwrap());
    let run = root.path().join("lightning_logs/version_0");
    for (label, file) in [("curves", "curves.png"), ("memory", "memory.png")] {
        assert!(output.lines().any(|line| line.starts_with(label) && line.ends_with(file)), "{output}");
        assert!(std::fs::read(run.join(file)).unwrap().starts_with(b"\x89PNG"), "{file}");
    }
    let rows = rows(&run.join("metrics.csv"));
    for (hook, expected) in [("on_train_batch_end", vec![1, 3, 5]), ("on_validation_batch_end", vec![5])] {
        assert_eq!(steps(&rows, hook), expected);
        assert!(of_hook(&rows, hook).iter().all(|row| row.len() == MEMORY.len() + 1), "no load of the host");
    }
}

#[test]
fn there_is_no_picture_of_memory_without_the_monitor() {
    let root = TempDir::new().unwrap();
    let mut trainer = silent()
        .logger(true)
        .default_root_dir(root.path())
        .max_epochs(1)
        .log_every_n_steps(1_u64)
        .build()
        .unwrap();
    trainer.fit(&mut Probe::logging(&[0.5]), &mut loaders()).unwrap();
    assert_eq!(names(trainer.log_dir()), ["curves.png", "metrics.csv"]);
}
