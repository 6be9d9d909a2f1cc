//! The ten metrics of an HPU's memory.

use crate::run;

/// In the order of the documents' table.
const METRICS: [&str; 10] = [
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

#[test]
fn device_stats_monitor() {
    let ran = run("device_stats_monitor", "device_stats_monitor");
    let values = METRICS.map(|metric| {
        let column = ran.column(0, &format!("DeviceStatsMonitor.on_train_batch_end/{metric}"));
        assert_eq!(column.len(), 60, "{metric} at each step");
        assert!(column.iter().all(|value| *value >= 0.0 && value.fract() == 0.0), "{metric}: {column:?}");
        column
    });
    let [limit, in_use, max_in_use, allocs, frees, active, ..] = &values;
    for step in 0..60 {
        assert!(0.0 < in_use[step] && in_use[step] <= max_in_use[step] && max_in_use[step] <= limit[step]);
        assert_eq!(allocs[step] - frees[step], active[step], "what was allocated and not freed");
    }
    assert!(allocs[59] > allocs[0], "each step allocates");
    assert!(in_use[59] < 2.0 * in_use[1], "and gives it back");
    // the layer, its gradient and Adam's two moments, of 7850 float32 each
    assert!(in_use[59] >= 4.0 * 4.0 * 7850.0, "{}", in_use[59]);
    let picture = ran.folder.path().join("lightning_logs/version_0/memory.png");
    assert!(std::fs::read(picture).unwrap().starts_with(b"\x89PNG"));
}
