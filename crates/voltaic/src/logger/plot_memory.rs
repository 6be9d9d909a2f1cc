//! The memory of the device over a run, drawn from what `DeviceStatsMonitor` has logged.

use std::path::Path;

use super::logger::DEVICE_STATS;
use super::plot::{Line, Panel, read_lines, write_picture};
use crate::error::Result;

const MIB: f64 = (1 << 20) as f64;
const GIB: f64 = (1 << 30) as f64;
/// The limit is drawn if at least this part of it was in use; else it would press the curves to the ground.
const LIMIT_IN_SIGHT: f64 = 0.5;
/// Height of the axis over the highest line, which leaves room for the legend.
const HEADROOM: f64 = 1.6;

/// Draws the `InUse` and `MaxInUse` that [`DeviceStatsMonitor`](crate::callback::DeviceStatsMonitor) has logged to a CSV
/// file, in MiB or GiB over steps: a panel each for training, validation and test. No picture if there are none.
///
/// # Errors
/// If the CSV file cannot be read or the picture cannot be written.
pub fn plot_memory(csv_path: &Path, png_path: &Path) -> Result<()> {
    write_picture(&memory_panels(&read_lines(csv_path)?), png_path)
}

fn memory_panels(lines: &[Line]) -> Vec<Panel> {
    ["train", "validation", "test"].iter().filter_map(|loop_name| memory_panel(lines, loop_name)).collect()
}

fn memory_panel(lines: &[Line], loop_name: &str) -> Option<Panel> {
    let find = |metric: &str, moment: &str| {
        let column = format!("{DEVICE_STATS}on_{loop_name}_batch_{moment}/{metric}");
        lines.iter().find(|line| line.name == column)
    };
    let mut shown = Vec::new();
    for metric in ["MaxInUse", "InUse"] {
        // the end of a batch is often as its start, which then shows as a broad line below
        for (moment, width) in [("start", 6), ("end", 2)] {
            let name = format!("{metric}, batch {moment}");
            shown.extend(find(metric, moment).map(|line| Line { name, width, ..line.clone() }));
        }
    }
    let in_use = highest(&shown)?;
    if let Some(limit) = find("Limit", "end")
        && limit.points.iter().any(|&(_, limit)| limit > 0.0 && in_use >= limit * LIMIT_IN_SIGHT)
    {
        shown.push(Line { name: "Limit".to_owned(), ..limit.clone() });
    }
    let (unit, bytes) = if in_use >= GIB { ("GiB", GIB) } else { ("MiB", MIB) };
    for (_, value) in shown.iter_mut().flat_map(|line| &mut line.points) {
        *value /= bytes;
    }
    let top = highest(&shown).filter(|&highest| highest > 0.0).unwrap_or(1.0) * HEADROOM;
    Some(Panel { caption: format!("device memory, {loop_name} ({unit})"), lines: shown, y: 0.0..top })
}

fn highest(lines: &[Line]) -> Option<f64> {
    lines.iter().flat_map(|line| &line.points).map(|&(_, value)| value).reduce(f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(name: &str, points: &[(f64, f64)]) -> Line {
        Line { name: format!("DeviceStatsMonitor.{name}"), points: points.to_vec(), width: 2 }
    }

    /// Caption, and names and first values of the lines.
    fn shown(panel: &Panel) -> (&str, Vec<(&str, f64)>) {
        let lines = panel.lines.iter().map(|line| (line.name.as_str(), line.points[0].1));
        (&panel.caption, lines.collect())
    }

    #[test]
    fn panels_have_a_unit_that_fits_and_the_limit_if_it_is_near() {
        for (in_use, limit, caption, expected, top) in [
            (3.0 * MIB, 0.0, "device memory, train (MiB)", vec![("InUse, batch end", 3.0)], 3.0),
            (3.0 * MIB, 96.0 * GIB, "device memory, train (MiB)", vec![("InUse, batch end", 3.0)], 3.0),
            (
                3.0 * GIB,
                4.0 * GIB,
                "device memory, train (GiB)",
                vec![("InUse, batch end", 3.0), ("Limit", 4.0)],
                4.0,
            ),
        ] {
            let columns = [
                column("on_train_batch_end/Limit", &[(0.0, limit)]),
                column("on_train_batch_end/InUse", &[(0.0, in_use)]),
                column("on_train_batch_end/NumAllocs", &[(0.0, 7.0)]),
            ];
            let panels = memory_panels(&columns);
            assert_eq!(panels.iter().map(shown).collect::<Vec<_>>(), [(caption, expected)]);
            assert_eq!(panels[0].y, 0.0..top * HEADROOM);
        }
    }

    #[test]
    fn each_loop_has_a_panel_with_starts_and_ends() {
        let columns = [
            column("on_test_batch_end/MaxInUse", &[(6.0, 2.0 * MIB)]),
            column("on_train_batch_end/InUse", &[(0.0, MIB)]),
            column("on_train_batch_start/InUse", &[(0.0, 0.5 * MIB), (1.0, MIB)]),
            column("on_validation_batch_end/cpu_percent", &[(0.0, 50.0)]),
        ];
        let panels = memory_panels(&columns);
        let train = vec![("InUse, batch start", 0.5), ("InUse, batch end", 1.0)];
        let expected = [
            ("device memory, train (MiB)", train),
            ("device memory, test (MiB)", vec![("MaxInUse, batch end", 2.0)]),
        ];
        assert_eq!(panels.iter().map(shown).collect::<Vec<_>>(), expected);
        assert!(memory_panels(&columns[3..]).is_empty());
    }
}
