//! Matrices in slices, and products of float32 ones by the `gemm` crate, or by the MKL on Intel's processors.

use std::ops::Range;

use super::mkl::{is_for_mkl, multiply_by_mkl, prefers_mkl};

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
    pub(super) fn at(&self, i: usize, j: usize) -> T
    where
        T: Copy,
    {
        self.data[i * self.strides[0] + j * self.strides[1]]
    }

    /// The address of the first number, and the strides.
    pub(super) fn into_parts(self) -> (*const T, [isize; 2]) {
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
    pub(super) fn into_data(self) -> &'a mut [f32] {
        self.data
    }

    /// The address of the first number, and the strides.
    pub(super) fn into_parts(self) -> (*mut f32, [isize; 2]) {
        (self.data.as_mut_ptr(), [self.shape[1] as isize, 1])
    }
}

/// `out = a b`, or `out += a b` if `adds`: on this thread within libtorch's threads, else on as many as the MKL likes.
///
/// # Panics
/// If the shapes do not fit.
pub fn multiply(out: MatrixMut, a: Matrix, b: Matrix, adds: bool) {
    let ([rows, depth], [height, columns]) = (a.shape, b.shape);
    assert!(
        depth == height && out.shape == [rows, columns],
        "{:?} of {:?} and {:?}",
        out.shape,
        a.shape,
        b.shape
    );
    if prefers_mkl() && is_for_mkl(&a) && is_for_mkl(&b) {
        return multiply_by_mkl(out, a, b, adds);
    }
    let shape = [rows, columns, depth];
    let ((out, to_out), (a, to_a), (b, to_b)) = (out.into_parts(), a.into_parts(), b.into_parts());
    let product = Product { shape, out, a, b, strides: [to_out, to_a, to_b], adds };
    // SAFETY: the constructors of the matrices checked that their numbers lie in their slices; `out` is borrowed
    // mutably, so it is none of the others.
    unsafe { product.run() };
}

/// A product of matrices by their addresses.
#[derive(Debug, Clone, Copy)]
pub(super) struct Product {
    /// Rows, columns, depth.
    pub shape: [usize; 3],
    pub out: *mut f32,
    pub a: *const f32,
    pub b: *const f32,
    /// Of `out`, `a` and `b`: from row to row, and from column to column.
    pub strides: [[isize; 2]; 3],
    pub adds: bool,
}

impl Product {
    /// # Safety
    /// All numbers of the matrices must be readable, those of `out` writable and in none of the others; without
    /// `adds` those of `out` may be uninitialised.
    pub unsafe fn run(self) {
        let [rows, columns, depth] = self.shape;
        let [out, a, b] = self.strides;
        let kept = if self.adds { 1.0 } else { 0.0 };
        // SAFETY: what gemm asks for is what this function does.
        unsafe {
            gemm::gemm(
                rows,
                columns,
                depth,
                self.out,
                out[1],
                out[0],
                self.adds,
                self.a,
                a[1],
                a[0],
                self.b,
                b[1],
                b[0],
                kept,
                1.0,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
    }
}
