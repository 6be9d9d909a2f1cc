//! `DeviceStatsMonitor` on the emulated HPU, whose pool nobody else uses meanwhile.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use tempfile::TempDir;
use voltaic::accelerator::memory_stats;
use voltaic::callback::{Callback, DeviceStatsMonitor, DeviceStatsMonitorConfig};
use voltaic::data::Loaders;
use voltaic::logger::CsvLogger;
use voltaic::models::{Classifier, LeNet, LeNetConfig};
use voltaic::module::{Hook, HookContext};
use voltaic::trainer::seed_everything;
use voltaic::{Device, Module};

use crate::support::start;
use crate::trainer::{loader, trainer};

/// A row of `metrics.csv`: its cells that are not empty.
type Row = BTreeMap<String, f64>;

/// Notes the statistics of hpu:0 in each batch hook, named as the monitor names them.
#[derive(Default, Clone)]
struct Seen(Arc<Mutex<Vec<Row>>>);

impl Seen {
    fn note(&self, hook: &str) -> anyhow::Result<()> {
        let stats = memory_stats(Device::Hpu(0))?.metrics();
        let name = |metric: &str| format!("DeviceStatsMonitor.{hook}/{metric}");
        let row = stats.into_iter().map(|(metric, value)| (name(metric), value as f64)).collect();
        self.0.lock().unwrap().push(row);
        Ok(())
    }
}

impl Callback for Seen {
    fn on_hook(&mut self, hook: Hook, _: &mut HookContext, _: &mut dyn Module) -> anyhow::Result<()> {
        if hook.name().contains("_batch_") { self.note(hook.name()) } else { Ok(()) }
    }
}

/// Fits and tests; gives the monitor's rows and what the device said in each batch hook.
fn run(cpu_stats: Option<bool>) -> (Vec<Row>, Vec<Row>) {
    let root = TempDir::new().unwrap();
    seed_everything(4).unwrap();
    let mut net = Classifier::new(LeNet::new(LeNetConfig::default()).unwrap());
    let seen = Seen::default();
    let builder = trainer(root.path(), "hpu").log_every_n_steps(1_u64).num_sanity_val_steps(0_i64);
    let monitor = DeviceStatsMonitor::from(DeviceStatsMonitorConfig { cpu_stats });
    let builder = builder.with_logger(CsvLogger::new(root.path()).plots(false)).enable_checkpointing(false);
    let mut trainer = builder.callback(monitor).callback(seen.clone()).build().unwrap();
    let mut data = Loaders::new().train(loader()).val(loader()).test(loader());
    trainer.fit(&mut net, &mut data).unwrap();
    trainer.test(&mut net, &mut data).unwrap();
    let mut csv = csv_lines(&std::fs::read_to_string(trainer.log_dir().join("metrics.csv")).unwrap());
    csv.retain(|row| row.keys().any(|name| name.starts_with("DeviceStatsMonitor.")));
    let seen = seen.0.lock().unwrap().clone();
    (csv, seen)
}

fn csv_lines(text: &str) -> Vec<Row> {
    let mut lines = text.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let header = lines.next().unwrap();
    let row = |cells: Vec<&str>| {
        let cells = header.iter().zip(cells).filter(|(_, cell)| !cell.is_empty());
        cells.map(|(name, cell)| (name.to_string(), cell.parse().unwrap())).collect()
    };
    lines.map(row).collect()
}

/// The metric of a row, whatever its hook.
fn metric(row: &Row, metric: &str) -> f64 {
    let ending = format!("/{metric}");
    *row.iter().find(|(name, _)| name.ends_with(&ending)).unwrap().1
}

#[test]
fn rows_have_the_statistics_of_the_card_in_all_loops() {
    let _rng = start();
    let (rows, seen) = run(None);
    // an epoch has 3 batches of training and 3 of validation, the test 3; of evaluations the last batch is logged
    assert_eq!((seen.len(), rows.len()), (30, 18));
    let logged: Vec<&Row> = [0..6, 10..18, 22..24, 28..30].into_iter().flat_map(|at| &seen[at]).collect();
    for (row, expected) in rows.iter().zip(&logged) {
        let stats: Row =
            row.iter().filter(|(name, _)| name.contains('/')).map(|(n, v)| (n.clone(), *v)).collect();
        assert_eq!(stats, **expected);
        assert!(metric(row, "InUse") > 0.0 && metric(row, "MaxInUse") >= metric(row, "InUse"), "{row:?}");
        assert_eq!(metric(row, "Limit"), f64::from(96_u32) * f64::from(1 << 30));
    }
    assert!(metric(&rows[17], "NumAllocs") > metric(&rows[0], "NumAllocs") + 100.0);
}

#[test]
fn the_load_of_the_host_is_logged_beside_a_card_if_asked_for() {
    let _rng = start();
    for (cpu_stats, expected) in [(None, 10), (Some(true), 13), (Some(false), 10)] {
        let (rows, _) = run(cpu_stats);
        let widths: Vec<usize> = rows.iter().map(BTreeMap::len).collect();
        assert_eq!(widths, [expected + 1; 18], "{cpu_stats:?}, with the step");
    }
}
