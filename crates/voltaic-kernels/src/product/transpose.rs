//! Rows of a matrix as columns.

use std::array;

use crate::kernel::Kernel;

/// Rows and columns of a tile: a row is a line of the cache.
const TILE: usize = 16;

/// Writes a matrix with its rows as columns.
///
/// Tile by tile: what `gemm` does by itself, number by number over whole columns, throws itself out of the cache where the
/// rows lie far apart.
pub struct Turn<'a> {
    /// Rows of `output.len() / rows` numbers, the first at the start
    pub input: &'a [f32],
    /// From row to row of the input.
    pub stride: usize,
    /// Rows of the input.
    pub rows: usize,
    /// `[columns of the input, rows]`
    pub output: &'a mut [f32],
}

impl Kernel for Turn<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { input, stride, rows, output } = self;
        let columns = output.len() / rows;
        for top in (0..rows).step_by(TILE) {
            let height = TILE.min(rows - top);
            for left in (0..columns).step_by(TILE) {
                let width = TILE.min(columns - left);
                if height == TILE && width == TILE {
                    let tile: [&[f32]; TILE] = array::from_fn(|i| {
                        let start = (top + i) * stride + left;
                        &input[start..start + TILE]
                    });
                    for j in 0..TILE {
                        let start = (left + j) * rows + top;
                        let output = &mut output[start..start + TILE];
                        output.iter_mut().zip(tile).for_each(|(out, row)| *out = row[j]);
                    }
                } else {
                    for (i, j) in (0..height).flat_map(|i| (0..width).map(move |j| (i, j))) {
                        output[(left + j) * rows + top + i] = input[(top + i) * stride + left + j];
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_become_columns() {
        for (rows, columns, stride) in [(1, 1, 1), (16, 16, 16), (3, 40, 41), (40, 3, 3), (35, 50, 64)] {
            let input: Vec<f32> = (0..rows * stride).map(|i| i as f32).collect();
            let mut output = vec![0.0; rows * columns];
            Turn { input: &input, stride, rows, output: &mut output }.run();
            for (i, j) in (0..rows).flat_map(|i| (0..columns).map(move |j| (i, j))) {
                assert_eq!(output[j * rows + i], input[i * stride + j], "{rows} x {columns}");
            }
        }
    }
}
