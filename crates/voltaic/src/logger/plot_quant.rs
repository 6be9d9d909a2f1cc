//! The picture of what quantization has done to each layer.

use std::path::Path;

use plotters::prelude::*;

use super::plot::register_fonts;
use crate::error::{Error, Result};
use crate::nn::quant::LayerReport;

const WIDTH: u32 = 900;
/// Pixels of a layer, and of the rest.
const LAYER: u32 = 22;
const REST: u32 = 110;
/// Layers that have a line of their own; of more, the first are drawn.
const MOST_LAYERS: usize = 200;

const COLORS: [RGBColor; 2] = [RGBColor(31, 119, 180), RGBColor(255, 127, 14)];

/// Draws for each layer the error of its weight and of what it was given, in percent of their root mean square.
///
/// # Errors
/// If there is nothing to draw, or the picture cannot be written.
pub fn plot_quantization(layers: &[LayerReport], png_path: &Path) -> Result<()> {
    register_fonts();
    let layers = &layers[..layers.len().min(MOST_LAYERS)];
    draw(layers, png_path)
        .map_err(|error| Error::io("draw", png_path, std::io::Error::other(error.to_string())))
}

fn draw(layers: &[LayerReport], path: &Path) -> anyhow::Result<()> {
    let errors =
        |layer: &LayerReport| [layer.weight_error, layer.input_error].map(|error| error.map(|it| 100.0 * it));
    let most = layers.iter().flat_map(errors).flatten().fold(0.0, f64::max);
    if layers.is_empty() {
        anyhow::bail!("no layer is quantized");
    }
    let rows = layers.len();
    let root = BitMapBackend::new(path, (WIDTH, REST + LAYER * rows as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption("error of float8 by layer", ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(220)
        .build_cartesian_2d(0.0..(most * 1.1).max(1e-6), 0.0..rows as f64)?;
    chart
        .configure_mesh()
        .x_desc("percent of the root mean square")
        .y_labels(0)
        .disable_y_mesh()
        .light_line_style(TRANSPARENT)
        .draw()?;
    for (side, color) in COLORS.into_iter().enumerate() {
        let bars = layers.iter().enumerate().filter_map(|(row, layer)| {
            let top = rows as f64 - row as f64 - 0.1 - 0.4 * side as f64;
            Some(Rectangle::new([(0.0, top - 0.4), (errors(layer)[side]?, top)], color.filled()))
        });
        chart
            .draw_series(bars)?
            .label(["weight", "input"][side])
            .legend(move |(x, y)| Rectangle::new([(x, y - 4), (x + 18, y + 4)], color.filled()));
    }
    let area = chart.plotting_area();
    let (xs, ys) = area.get_pixel_range();
    let style = ("sans-serif", 13).into_font().color(&BLACK);
    for (row, layer) in layers.iter().enumerate() {
        let height = f64::from(ys.end - ys.start) / rows as f64;
        let y = ys.start + (height * (row as f64 + 0.5)) as i32 - 7;
        let text: String = layer.fqn.chars().take(32).collect();
        root.draw(&Text::new(text, (xs.start - 212, y), style.clone()))?;
    }
    chart
        .configure_series_labels()
        .background_style(WHITE.mix(0.8))
        .border_style(RGBColor(200, 200, 200))
        .position(SeriesLabelPosition::LowerRight)
        .draw()?;
    root.present()?;
    Ok(())
}
