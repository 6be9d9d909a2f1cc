//! Matrices in slices.

use std::ops::Range;

/// A matrix in a slice; strides in numbers.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a, T = f32> {
    data: &'a [T],
    shape: [usize; 2],
    strides: [usize; 2],
}

/// A matrix to write to, one row after the other.
#[derive(Debug)]
pub struct MatrixMut<'a> {
    data: &'a mut [f32],
    shape: [usize; 2],
}

impl<'a, T> Matrix<'a, T> {
    /// A matrix whose number `[i, j]` is `data[i * strides[0] + j * strides[1]]`.
    ///
    /// # Panics
    /// If a number lies outside of `data`.
    pub fn new(data: &'a [T], shape: [usize; 2], strides: [usize; 2]) -> Self {
        let [rows, columns] = shape;
        let last = rows.saturating_sub(1) * strides[0] + columns.saturating_sub(1) * strides[1];
        assert!(rows == 0 || columns == 0 || last < data.len(), "{shape:?} by {strides:?} in {}", data.len());
        Self { data, shape, strides }
    }

    /// A matrix with one row after the other.
    ///
    /// # Panics
    /// If `data` has another length.
    pub fn dense(data: &'a [T], shape: [usize; 2]) -> Self {
        assert_eq!(data.len(), shape[0] * shape[1]);
        Self { data, shape, strides: [shape[1], 1] }
    }

    /// Rows as columns.
    pub fn transposed(self) -> Self {
        let ([rows, columns], [down, right]) = (self.shape, self.strides);
        Self { shape: [columns, rows], strides: [right, down], ..self }
    }

    /// Some of its rows and columns.
    ///
    /// # Panics
    /// If it does not have them.
    pub fn part(self, [rows, columns]: [Range<usize>; 2]) -> Self {
        assert!(
            rows.end <= self.shape[0] && columns.end <= self.shape[1],
            "{rows:?}, {columns:?} of {:?}",
            self.shape
        );
        let data = &self.data[rows.start * self.strides[0] + columns.start * self.strides[1]..];
        Self { data, shape: [rows.len(), columns.len()], ..self }
    }

    /// Rows and columns.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// From row to row and from column to column, in numbers.
    pub fn strides(&self) -> [usize; 2] {
        self.strides
    }

    #[cfg(test)]
    pub(crate) fn at(&self, i: usize, j: usize) -> T
    where
        T: Copy,
    {
        self.data[i * self.strides[0] + j * self.strides[1]]
    }

    /// The address of the first number, and the strides.
    pub(crate) fn into_parts(self) -> (*const T, [isize; 2]) {
        (self.data.as_ptr(), self.strides.map(|stride| stride as isize))
    }
}

impl<'a> MatrixMut<'a> {
    /// A matrix with one row after the other.
    ///
    /// # Panics
    /// If `data` has another length.
    pub fn dense(data: &'a mut [f32], shape: [usize; 2]) -> Self {
        assert_eq!(data.len(), shape[0] * shape[1]);
        Self { data, shape }
    }

    /// Rows and columns.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Its numbers.
    pub(crate) fn into_data(self) -> &'a mut [f32] {
        self.data
    }

    /// The address of the first number, and the strides.
    pub(crate) fn into_parts(self) -> (*mut f32, [isize; 2]) {
        (self.data.as_mut_ptr(), [self.shape[1] as isize, 1])
    }
}
