//! The curves of a run as a picture, drawn from its `metrics.csv`.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Once;

use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};

use super::logger::DEVICE_STATS;
use crate::checkpoint::temporary_file;
use crate::error::{ConfigError, Error, Result};

/// A part of DejaVu Sans (Bitstream Vera licence, beside the file), so that no system font is needed.
static FONT: &[u8] = include_bytes!("../../assets/DejaVuSans-ascii.ttf");
const PANEL: (u32, u32) = (900, 380);
const COLORS: [RGBColor; 6] = [
    RGBColor(31, 119, 180),
    RGBColor(255, 127, 14),
    RGBColor(44, 160, 44),
    RGBColor(214, 39, 40),
    RGBColor(148, 103, 189),
    RGBColor(140, 86, 75),
];

/// A metric over steps.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Line {
    pub name: String,
    pub points: Vec<(f64, f64)>,
    /// Pixels.
    pub width: u32,
}

/// Lines that share an axis, below a caption.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Panel {
    pub caption: String,
    pub lines: Vec<Line>,
    /// What the axis shows.
    pub y: Range<f64>,
}

/// Draws the metrics of a CSV file with a `step` column: one panel per family (`train_loss` and `val_loss` share
/// one), one line per metric. A metric with a single value is drawn as a point. Statistics of the device are left out;
/// [`plot_memory`](super::plot_memory) draws them.
///
/// # Errors
/// If the CSV file cannot be read or the picture cannot be written.
pub fn plot_metrics(csv_path: &Path, png_path: &Path) -> Result<()> {
    write_picture(&metric_panels(named(read_lines(csv_path)?)), png_path)
}

/// Draws the metrics of several runs, each a name and its CSV file, as [`plot_metrics`] does: a panel has the lines of all runs, named
/// by metric and run.
///
/// # Errors
/// As [`plot_metrics`]; if no file has a metric.
pub fn plot_runs(runs: &[(String, PathBuf)], png_path: &Path) -> Result<()> {
    let panels = run_panels(runs)?;
    if panels.is_empty() {
        let files: Vec<String> = runs.iter().map(|(_, path)| path.display().to_string()).collect();
        let what = format!("no metric has a value in {}", files.join(", "));
        return Err(ConfigError::new("plot", what, "give runs that have logged a metric").into());
    }
    write_picture(&panels, png_path)
}

fn run_panels(runs: &[(String, PathBuf)]) -> Result<Vec<Panel>> {
    let mut lines = Vec::new();
    for (run, csv_path) in runs {
        let of_run = named(read_lines(csv_path)?).into_iter();
        lines.extend(of_run.map(|(metric, line)| {
            let name = format!("{metric} {run}");
            (metric, Line { name, ..line })
        }));
    }
    Ok(metric_panels(lines))
}

/// Lines with the metrics that they are of.
fn named(lines: Vec<Line>) -> Vec<(String, Line)> {
    lines.into_iter().map(|line| (line.name.clone(), line)).collect()
}

/// Draws panels below each other; nothing if there are none.
pub(super) fn write_picture(panels: &[Panel], png_path: &Path) -> Result<()> {
    register_fonts();
    if panels.is_empty() {
        return Ok(());
    }
    let height = PANEL.1 * panels.len() as u32;
    let temporary = temporary_file(png_path, ".tmp.png")?;
    draw(panels, temporary.path(), height)
        .map_err(|error| Error::io("draw", png_path, std::io::Error::other(error.to_string())))?;
    temporary.persist(png_path).map(drop).map_err(|error| Error::io("rename to", png_path, error.error))
}

/// Makes the font known, once.
pub(super) fn register_fonts() {
    static REGISTER: Once = Once::new();
    REGISTER.call_once(|| {
        // fails only if the bytes are no font, which the test below would show
        let _ = register_font("sans-serif", FontStyle::Normal, FONT);
    });
}

/// `val_loss`, `train_loss_step` and `loss` are of the family `loss`.
fn family(metric: &str) -> &str {
    let name = ["train_", "val_", "test_", "train/", "val/", "test/"]
        .iter()
        .find_map(|prefix| metric.strip_prefix(prefix))
        .unwrap_or(metric);
    let name = name.split("/dataloader_idx_").next().unwrap_or(name);
    ["_step", "_epoch"].iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name)
}

/// The columns of a CSV file but `step` and `epoch`, without those that have no value.
pub(super) fn read_lines(csv_path: &Path) -> Result<Vec<Line>> {
    let failed = |error: csv::Error| Error::io("read", csv_path, error.into());
    let mut reader = csv::Reader::from_path(csv_path).map_err(failed)?;
    let columns: Vec<String> = reader.headers().map_err(failed)?.iter().map(str::to_owned).collect();
    let step_column = columns.iter().position(|name| name == "step");
    let mut lines: Vec<Line> =
        columns.into_iter().map(|name| Line { name, points: Vec::new(), width: 2 }).collect();
    for (row, record) in reader.records().enumerate() {
        let record = record.map_err(failed)?;
        let step = step_column.and_then(|i| record.get(i)?.parse().ok()).unwrap_or(row as f64);
        for (cell, line) in record.iter().zip(&mut lines) {
            if let Some(value) = cell.parse::<f64>().ok().filter(|value| value.is_finite()) {
                line.points.push((step, value));
            }
        }
    }
    lines.retain(|line| line.name != "step" && line.name != "epoch" && !line.points.is_empty());
    Ok(lines)
}

/// Panels of lines, each with the metric that it is of.
fn metric_panels(lines: Vec<(String, Line)>) -> Vec<Panel> {
    let mut families: BTreeMap<String, Vec<Line>> = BTreeMap::new();
    for (metric, line) in lines.into_iter().filter(|(metric, _)| !metric.starts_with(DEVICE_STATS)) {
        families.entry(family(&metric).to_owned()).or_default().push(line);
    }
    let panel = |(caption, lines): (String, Vec<Line>)| {
        let y = range(lines.iter().flat_map(|line| &line.points).map(|point| point.1));
        Panel { caption, lines, y }
    };
    let mut panels: Vec<Panel> = families.into_iter().map(panel).collect();
    panels.sort_by_key(|panel| !panel.caption.contains("loss")); // losses first
    panels
}

/// Smallest and largest value with a margin, so that no line lies on the frame.
fn range(values: impl Iterator<Item = f64> + Clone) -> Range<f64> {
    let low = values.clone().fold(f64::INFINITY, f64::min);
    let high = values.fold(f64::NEG_INFINITY, f64::max);
    let margin = match high - low {
        difference if difference > 0.0 => difference * 0.05,
        _ if high == 0.0 => 0.05,
        _ => high.abs() * 0.05,
    };
    low - margin..high + margin
}

/// The axis of steps, at least one step to each side of a single one.
fn step_range(steps: impl Iterator<Item = f64> + Clone) -> Range<f64> {
    let range = range(steps.clone());
    match steps.clone().reduce(f64::min) {
        Some(first) if steps.reduce(f64::max) == Some(first) => first - 1.0..first + 1.0,
        _ => range,
    }
}

/// A step; nothing between two steps, where an axis of few steps has lines, too.
fn step_label(x: f64) -> String {
    let step = x.round();
    if (x - step).abs() < 1e-6 { format!("{:.0}", step + 0.0) } else { String::new() }
}

/// A value with enough digits to differ from the next of about ten lines of the axis.
fn value_label(y: f64, axis: &Range<f64>) -> String {
    let spacing = ((axis.end - axis.start) / 10.0).max(f64::MIN_POSITIVE);
    if y.abs() < spacing / 2.0 {
        return "0".to_owned();
    }
    let largest = axis.start.abs().max(axis.end.abs());
    if (1e-3..1e6).contains(&largest) {
        let decimals = (-spacing.log10()).ceil().clamp(0.0, 12.0) as usize;
        return format!("{y:.decimals$}");
    }
    let digits = (y.abs().log10().floor() - spacing.log10().floor()).clamp(0.0, 12.0) as usize;
    format!("{y:.digits$e}")
}

/// Where a legend hides the least of the lines, and how high it is as a part of the axis.
fn legend_place(panel: &Panel, steps: &Range<f64>) -> (SeriesLabelPosition, f64, usize) {
    // of what plotters draws: letters of about 7 pixels, lines of 16, around a margin
    let letters = panel.lines.iter().map(|line| line.name.chars().count()).max().unwrap_or(0);
    let width = (letters as f64 * 7.0 + 60.0) / f64::from(PANEL.0 - 100);
    let height = (panel.lines.len() as f64 * 16.0 + 30.0) / f64::from(PANEL.1 - 90);
    let place = |value: f64, axis: &Range<f64>| (value - axis.start) / (axis.end - axis.start);
    let points: Vec<(f64, f64)> = panel.lines.iter().flat_map(|line| along(&line.points)).collect();
    let hidden = |is_right: bool, is_upper: bool| {
        let is_hidden = |&&(step, value): &&(f64, f64)| {
            let (x, y) = (place(step, steps), place(value, &panel.y));
            let (x, y) = (if is_right { 1.0 - x } else { x }, if is_upper { 1.0 - y } else { y });
            x <= width && y <= height
        };
        points.iter().filter(is_hidden).count()
    };
    let corners = [
        (SeriesLabelPosition::UpperRight, hidden(true, true)),
        (SeriesLabelPosition::UpperLeft, hidden(false, true)),
        (SeriesLabelPosition::LowerRight, hidden(true, false)),
        (SeriesLabelPosition::LowerLeft, hidden(false, false)),
    ];
    let [first, rest @ ..] = corners;
    let (corner, hidden) =
        rest.into_iter().fold(first, |best, next| if next.1 < best.1 { next } else { best });
    (corner, height, hidden)
}

/// The points of a line, and some between two of them.
fn along(points: &[(f64, f64)]) -> impl Iterator<Item = (f64, f64)> {
    const BETWEEN: usize = 16;
    let between = points.windows(2).flat_map(|pair| {
        let ((x0, y0), (x1, y1)) = (pair[0], pair[1]);
        (0..BETWEEN).map(move |i| {
            let part = i as f64 / BETWEEN as f64;
            (x0 + (x1 - x0) * part, y0 + (y1 - y0) * part)
        })
    });
    between.chain(points.last().copied())
}

/// A panel with room above its lines for the legend, if that would hide a part of them in every corner.
fn with_room(panel: &Panel, steps: &Range<f64>) -> (SeriesLabelPosition, Range<f64>) {
    match legend_place(panel, steps) {
        (corner, _, 0) => (corner, panel.y.clone()),
        (_, height, _) => {
            let height = height.min(0.6);
            let room = (panel.y.end - panel.y.start) * height / (1.0 - height);
            (SeriesLabelPosition::UpperRight, panel.y.start..panel.y.end + room)
        }
    }
}

fn draw(panels: &[Panel], path: &Path, height: u32) -> anyhow::Result<()> {
    let root = BitMapBackend::new(path, (PANEL.0, height)).into_drawing_area();
    root.fill(&WHITE)?;
    let lines = panels.iter().flat_map(|panel| &panel.lines);
    let steps = step_range(lines.flat_map(|line| &line.points).map(|point| point.0));
    for (area, panel) in root.split_evenly((panels.len(), 1)).iter().zip(panels) {
        let (corner, y) = with_room(panel, &steps);
        let mut chart = ChartBuilder::on(area)
            .caption(&panel.caption, ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(36)
            .y_label_area_size(64)
            .build_cartesian_2d(steps.clone(), y.clone())?;
        chart
            .configure_mesh()
            .x_desc("step")
            .x_label_formatter(&|x| step_label(*x))
            .y_label_formatter(&|value| value_label(*value, &y))
            .light_line_style(TRANSPARENT)
            .bold_line_style(RGBColor(225, 225, 225))
            .draw()?;
        for (i, Line { name, points, width }) in panel.lines.iter().enumerate() {
            let color = COLORS[i % COLORS.len()];
            chart
                .draw_series(LineSeries::new(points.iter().copied(), color.stroke_width(*width)))?
                .label(name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
            if points.len() <= 50 {
                chart
                    .draw_series(points.iter().map(|&point| Circle::new(point, width + 1, color.filled())))?;
            }
        }
        chart
            .configure_series_labels()
            .background_style(WHITE.mix(0.8))
            .border_style(RGBColor(200, 200, 200))
            .position(corner)
            .draw()?;
    }
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_of_a_family_share_a_panel() {
        for (metric, expected) in [
            ("train_loss_step", "loss"),
            ("val_loss", "loss"),
            ("loss", "loss"),
            ("test_acc", "acc"),
            ("val_acc/dataloader_idx_1", "acc"),
            ("lr-Adam", "lr-Adam"),
        ] {
            assert_eq!(family(metric), expected, "{metric}");
        }
    }

    #[test]
    fn statistics_of_the_device_are_no_curves() {
        let line = |name: &str| Line { name: name.to_owned(), points: vec![(0.0, 1.0)], width: 2 };
        let stats = line("DeviceStatsMonitor.on_train_batch_end/InUse");
        let panels = metric_panels(named(vec![stats, line("train_loss")]));
        assert_eq!(
            panels,
            [Panel { caption: "loss".to_owned(), lines: vec![line("train_loss")], y: 0.95..1.05 }]
        );
    }

    #[test]
    fn lines_of_several_runs_share_panels() {
        let folder = tempfile::tempdir().expect("temp folder");
        let run = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).expect("writable");
            (name.to_owned(), path)
        };
        let runs =
            [run("a", "step,val_loss\n0,2.0\n1,1.0\n"), run("b", "step,val_loss,val_acc\n0,4.0,0.5\n")];
        let panels = run_panels(&runs).expect("both are read");
        let names: Vec<(&str, Vec<&str>)> = panels
            .iter()
            .map(|panel| {
                (panel.caption.as_str(), panel.lines.iter().map(|line| line.name.as_str()).collect())
            })
            .collect();
        assert_eq!(names, [("loss", vec!["val_loss a", "val_loss b"]), ("acc", vec!["val_acc b"])]);
        assert!(panels[0].y.start < 1.0 && panels[0].y.end > 4.0, "{:?}", panels[0].y);
    }

    #[test]
    fn labels_of_an_axis_differ_and_are_short() {
        for (axis, values, expected) in [
            (0.0018..0.0021, vec![0.0019, 0.00195, 0.002], vec!["0.00190", "0.00195", "0.00200"]),
            (0.0..1.0, vec![0.0, 0.1, 0.9], vec!["0", "0.1", "0.9"]),
            (0.0..2500.0, vec![0.0, 500.0], vec!["0", "500"]),
            (1e-6..9e-6, vec![2e-6, 3e-6], vec!["2.0e-6", "3.0e-6"]),
            (0.0..3e9, vec![5e8, 2.5e9], vec!["5e8", "2.5e9"]),
        ] {
            let labels: Vec<String> = values.iter().map(|&value| value_label(value, &axis)).collect();
            assert_eq!(labels, expected, "{axis:?}");
        }
        assert_eq!(step_range([7.0, 7.0].into_iter()), 6.0..8.0);
        assert_eq!([6.0, 6.5, 7.0, -0.0].map(step_label), ["6", "", "7", "0"]);
        let constant = range([0.002].into_iter());
        assert!(constant.start > 0.0018 && constant.end < 0.0022, "{constant:?}");
    }

    #[test]
    fn the_legend_hides_no_line() {
        let panel = |lines: &[&[(f64, f64)]]| {
            let line = |(i, points): (usize, &&[(f64, f64)])| Line {
                name: format!("val_metric_{i}"),
                points: points.to_vec(),
                width: 2,
            };
            let y = range(lines.iter().copied().flatten().map(|point| point.1));
            Panel { caption: "metric".to_owned(), lines: lines.iter().enumerate().map(line).collect(), y }
        };
        let steps = 0.0..10.0;
        let rising: &[_] = &[(0.0, 0.0), (10.0, 1.0)];
        let falling: &[_] = &[(0.0, 1.0), (10.0, 0.0)];
        for (lines, corner) in [
            (vec![falling], SeriesLabelPosition::UpperRight),
            (vec![rising], SeriesLabelPosition::UpperLeft),
            (
                vec![&[(0.0, 0.5), (5.0, 1.0), (10.0, 1.0)][..], &[(0.0, 1.0)]],
                SeriesLabelPosition::LowerRight,
            ),
        ] {
            let panel = panel(&lines);
            let (chosen, y) = with_room(&panel, &steps);
            assert_eq!((format!("{chosen:?}"), &y), (format!("{corner:?}"), &panel.y));
        }
        let crossing = panel(&[rising, falling, &[(0.0, 0.0), (10.0, 0.0)]]);
        let (_, y) = with_room(&crossing, &steps);
        assert!(y.end > crossing.y.end && y.start == crossing.y.start, "{y:?}");
    }

    #[test]
    fn a_picture_is_drawn_also_of_one_point_and_gaps() {
        let folder = tempfile::tempdir().expect("temp folder");
        let (csv, png) = (folder.path().join("metrics.csv"), folder.path().join("curves.png"));
        std::fs::write(&csv, "step,train_loss,val_acc\n0,2.5,\n1,inf,\n2,1.5,0.5\n").expect("writable");
        plot_metrics(&csv, &png).expect("draws");
        let picture = std::fs::read(&png).expect("readable");
        assert_eq!(&picture[..8], b"\x89PNG\r\n\x1a\n");
        assert!(picture.len() > 5000, "labels and lines take more than {} bytes", picture.len());
    }
}
