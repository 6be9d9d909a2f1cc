//! Factors of float32 products by Intel's tiles (AMX) that serve more than once: split and brought into order beforehand.

#[cfg(target_arch = "x86_64")]
use crate::memory::{LINE, sized};
use crate::product::amx::Tiles;
#[cfg(target_arch = "x86_64")]
use crate::product::amx::has_tiles;
use crate::product::matrix::{Matrix, MatrixMut};
#[cfg(target_arch = "x86_64")]
use crate::product::split::{Factor, Lines, SIDE, multiply_panels, panel_len};
use crate::product::strips::Strips;
#[cfg(target_arch = "x86_64")]
use crate::product::strips::{COLUMNS, Numbers};

/// A factor in panels: rows of a left one, columns of a right one.
#[derive(Debug, Clone, Copy)]
pub struct Panels<'a> {
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code))]
    numbers: &'a [u32],
    /// Rows, or columns.
    lines: usize,
    /// Numbers of each.
    depth: usize,
}

#[cfg(target_arch = "x86_64")]
impl<'a> Panels<'a> {
    /// Numbers of 32 bits that so many lines take.
    pub fn len(lines: usize, depth: usize) -> usize {
        lines.div_ceil(SIDE) * panel_len(depth)
    }

    /// Brings the rows of a left factor into panels.
    ///
    /// # Panics
    /// If the processor does not have [`has_tiles`].
    pub fn of_rows(matrix: Matrix, panels: &'a mut Vec<u32>) -> Self {
        assert!(has_tiles(), "no AMX");
        let [lines, depth] = matrix.shape();
        let numbers = sized(panels, Self::len(lines, depth));
        let rows = Lines { numbers: Numbers::new(matrix), count: lines, depth };
        for (panel, first) in numbers.chunks_exact_mut(panel_len(depth)).zip((0..).step_by(SIDE)) {
            // SAFETY: the constructor of the matrix checked that its numbers lie in its slice; `sized` aligns panels.
            unsafe { rows.from(first).pack(panel, Factor::Left) };
        }
        Self { numbers, lines, depth }
    }

    /// Brings the strips of a right factor into `panels`, which start with a line of the cache.
    ///
    /// # Panics
    /// If the processor does not have [`has_tiles`], or `panels` have another [`len`](Self::len) or start.
    pub fn of_strips(strips: Strips<f32>, panels: &'a mut [u32]) -> Self {
        assert!(has_tiles(), "no AMX");
        let [depth, lines] = strips.shape();
        assert_eq!(panels.len(), Self::len(lines, depth), "{lines} columns of {depth}");
        assert_eq!(panels.as_ptr().align_offset(LINE), 0);
        for (panel, first) in panels.chunks_exact_mut(panel_len(depth)).zip((0..).step_by(COLUMNS)) {
            let strip = strips.strip(first, depth).as_ptr().cast();
            let columns = Numbers { data: strip, strides: [1, COLUMNS as isize] };
            // SAFETY: a strip has as many numbers; panels are as long as many lines of the cache.
            unsafe { Lines { numbers: columns, count: COLUMNS, depth }.pack(panel, Factor::Right) };
        }
        Self { numbers: panels, lines, depth }
    }

    /// Panels of a right factor of this shape, [written](Self::of_strips) before.
    ///
    /// # Panics
    /// If they have another [`len`](Self::len).
    pub fn of_numbers(numbers: &'a [u32], [depth, lines]: [usize; 2]) -> Self {
        assert_eq!(numbers.len(), Self::len(lines, depth), "{lines} columns of {depth}");
        Self { numbers, lines, depth }
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl<'a> Panels<'a> {
    pub fn len(_lines: usize, _depth: usize) -> usize {
        unreachable!("has_tiles() is false here");
    }

    pub fn of_rows(_matrix: Matrix, _panels: &'a mut Vec<u32>) -> Self {
        unreachable!("has_tiles() is false here");
    }

    pub fn of_strips(_strips: Strips<f32>, _panels: &'a mut [u32]) -> Self {
        unreachable!("has_tiles() is false here");
    }

    pub fn of_numbers(_numbers: &'a [u32], _shape: [usize; 2]) -> Self {
        unreachable!("has_tiles() is false here");
    }
}

impl Tiles {
    /// `out = a b`, or `out += a b` if `adds`, on this thread. What is infinite becomes a NaN.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub fn multiply_panels(&self, out: MatrixMut, a: Panels, b: Panels, adds: bool) {
        let shape = [a.lines, b.lines, a.depth, b.depth];
        assert!(out.shape() == shape[..2] && a.depth == b.depth, "{:?} of {shape:?}", out.shape());
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `out` is borrowed mutably; panels are of such lines, and tiles are set up.
        unsafe {
            multiply_panels(out, a.depth, [a.numbers, b.numbers], adds);
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = adds;
    }
}
