//! Rows of a head.

use std::ops::Range;

use crate::element::Element;
use crate::product::matrix::Matrix;

/// Rows of `dim` numbers at equal distances, which may be less than `dim`, or 0: rows of a view may share numbers.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a, T> {
    pub(crate) data: &'a [T],
    pub(crate) len: usize,
    pub(crate) dim: usize,
    pub(crate) stride: usize,
}

impl<'a, T: Element> Rows<'a, T> {
    /// So many rows of `dim` numbers that start every `stride` numbers of `data`.
    pub fn new(data: &'a [T], [len, dim]: [usize; 2], stride: usize) -> Self {
        Self { data, len, dim, stride }
    }

    #[inline(always)]
    pub(crate) fn row(&self, i: usize) -> &'a [T] {
        &self.data[i * self.stride..i * self.stride + self.dim]
    }

    /// Some rows.
    pub(crate) fn matrix(&self, rows: Range<usize>) -> Matrix<'a, T> {
        Matrix::new(&self.data[rows.start * self.stride..], [rows.len(), self.dim], [self.stride, 1])
    }

    /// Some rows, as columns.
    pub(crate) fn transposed(&self, rows: Range<usize>) -> Matrix<'a, T> {
        Matrix::new(&self.data[rows.start * self.stride..], [self.dim, rows.len()], [1, self.stride])
    }
}
