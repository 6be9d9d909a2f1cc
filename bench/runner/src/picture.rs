//! The picture: how many times faster than Lightning each peer is, a panel per table.

use std::path::Path;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontStyle, register_font};

use crate::cases::OURS;
use crate::report::Results;
use crate::summary::Table;

/// The font that voltaic draws its curves with.
static FONT: &[u8] = include_bytes!("../../../crates/voltaic/assets/DejaVuSans-ascii.ttf");
const COLUMNS: usize = 2;
const WIDTH: u32 = 1200;
const BAR: i32 = 24;
const HEAD: i32 = 40;
/// Where bars start: names stand left of it.
const NAMES: i32 = 150;
/// Room for numbers right of the longest bar.
const NUMBERS: i32 = 150;
const BLUE: RGBColor = RGBColor(31, 119, 180);
const PALE_BLUE: RGBColor = RGBColor(158, 198, 226);
const GREY: RGBColor = RGBColor(190, 190, 190);
const LINE: RGBColor = RGBColor(90, 90, 90);

/// Draws the bars of all tables.
pub fn draw(results: &Results, path: &Path) -> anyhow::Result<()> {
    register_font("sans-serif", FontStyle::Normal, FONT).map_err(|_| {
        anyhow::anyhow!("the font beside voltaic's source is none; restore crates/voltaic/assets")
    })?;
    let num_bars = results.tables.iter().map(|table| table.rows.len()).max().unwrap_or(0);
    let panel_height = HEAD as u32 + num_bars as u32 * BAR as u32 + 16;
    let num_lines = results.tables.len().div_ceil(COLUMNS) as u32;
    let root = BitMapBackend::new(path, (WIDTH, panel_height * num_lines)).into_drawing_area();
    root.fill(&WHITE)?;
    for (area, table) in root.split_evenly((num_lines as usize, COLUMNS)).iter().zip(&results.tables) {
        draw_table(area, table)?;
    }
    root.present()?;
    Ok(())
}

fn draw_table(
    area: &DrawingArea<BitMapBackend<'_>, plotters::coord::Shift>,
    table: &Table,
) -> anyhow::Result<()> {
    let title = format!("{}: speed, Lightning = 1", table.title);
    area.draw_text(&title, &text(17, &BLACK, HPos::Left), (NAMES, HEAD / 2))?;
    let longest = table.rows.iter().map(|row| row.best_speed).fold(1.0, f64::max);
    let room = area.dim_in_pixel().0 as i32 - NAMES - NUMBERS;
    let x_of = |speed: f64| NAMES + (f64::from(room) * speed / longest) as i32;
    for (place, row) in table.rows.iter().enumerate() {
        let (top, bottom) = (HEAD + place as i32 * BAR, HEAD + place as i32 * BAR + BAR - 6);
        let middle = (top + bottom) / 2;
        let color = match row.peer {
            OURS => BLUE,
            peer if peer.starts_with(OURS) => PALE_BLUE,
            _ => GREY,
        };
        area.draw(&Rectangle::new([(NAMES, top), (x_of(row.best_speed), bottom)], color.filled()))?;
        area.draw_text(row.peer, &text(14, &BLACK, HPos::Right), (NAMES - 8, middle))?;
        let digits = if row.step_ms.min < 10.0 { 2 } else { 0 };
        let numbers = format!("{:.2}   {:.digits$} ms", row.best_speed, row.step_ms.min);
        area.draw_text(&numbers, &text(13, &LINE, HPos::Left), (x_of(row.best_speed.max(1.0)) + 6, middle))?;
    }
    let bottom = HEAD + table.rows.len() as i32 * BAR;
    area.draw(&PathElement::new([(x_of(1.0), HEAD - 4), (x_of(1.0), bottom)], LINE.stroke_width(1)))?;
    Ok(())
}

fn text(size: i32, color: &RGBColor, side: HPos) -> TextStyle<'_> {
    TextStyle::from(("sans-serif", size).into_font()).color(color).pos(Pos::new(side, VPos::Center))
}
