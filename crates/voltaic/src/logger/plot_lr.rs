//! The picture of a search for a learning rate.

use std::path::Path;

use plotters::prelude::*;

use super::plot::register_fonts;
use crate::error::{Error, Result};

const SIZE: (u32, u32) = (900, 420);

/// Draws losses over learning rates, which have a logarithmic axis, with a point at `suggestion`.
///
/// # Errors
/// If there is nothing to draw, or the picture cannot be written.
pub fn plot_lr_find(lrs: &[f64], losses: &[f64], suggestion: Option<f64>, png_path: &Path) -> Result<()> {
    register_fonts();
    let points: Vec<(f64, f64)> =
        lrs.iter().copied().zip(losses.iter().copied()).filter(|(_, loss)| loss.is_finite()).collect();
    draw(&points, suggestion, png_path)
        .map_err(|error| Error::io("draw", png_path, std::io::Error::other(error.to_string())))
}

fn draw(points: &[(f64, f64)], suggestion: Option<f64>, path: &Path) -> anyhow::Result<()> {
    let ([(low, _), ..], [.., (high, _)]) = (points, points) else {
        anyhow::bail!("no finite loss to draw");
    };
    let least = points.iter().map(|point| point.1).fold(f64::INFINITY, f64::min);
    let most = points.iter().map(|point| point.1).fold(f64::NEG_INFINITY, f64::max);
    let margin = (most - least).max(1e-9) * 0.05;
    let root = BitMapBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption("loss by learning rate", ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(64)
        .build_cartesian_2d((*low..high.max(low * 1.001)).log_scale(), least - margin..most + margin)?;
    chart.configure_mesh().x_desc("learning rate").x_label_formatter(&|x| format!("{x:.0e}")).draw()?;
    chart.draw_series(LineSeries::new(points.iter().copied(), RGBColor(31, 119, 180).stroke_width(2)))?;
    let marked = points.iter().copied().filter(|(lr, _)| suggestion == Some(*lr));
    chart.draw_series(marked.map(|point| Circle::new(point, 6, RGBColor(214, 39, 40).filled())))?;
    root.present()?;
    Ok(())
}
