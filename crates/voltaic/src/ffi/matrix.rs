//! Products of matrices by the `gemm` crate.

/// A matrix of float32 in a slice; strides in numbers.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    data: &'a [f32],
    shape: [usize; 2],
    strides: [usize; 2],
}

/// A matrix to write to, one row after the other.
#[derive(Debug)]
pub struct MatrixMut<'a> {
    data: &'a mut [f32],
    shape: [usize; 2],
}

impl<'a> Matrix<'a> {
    /// A matrix whose number `[i, j]` is `data[i * strides[0] + j * strides[1]]`.
    ///
    /// # Panics
    /// If a number lies outside of `data`.
    pub fn new(data: &'a [f32], shape: [usize; 2], strides: [usize; 2]) -> Self {
        let [rows, columns] = shape;
        let last = rows.saturating_sub(1) * strides[0] + columns.saturating_sub(1) * strides[1];
        assert!(rows == 0 || columns == 0 || last < data.len(), "{shape:?} by {strides:?} in {}", data.len());
        Self { data, shape, strides }
    }

    /// A matrix with one row after the other.
    ///
    /// # Panics
    /// If `data` has another length.
    pub fn dense(data: &'a [f32], shape: [usize; 2]) -> Self {
        assert_eq!(data.len(), shape[0] * shape[1]);
        Self { data, shape, strides: [shape[1], 1] }
    }

    /// Rows as columns.
    pub fn transposed(self) -> Self {
        let ([rows, columns], [down, right]) = (self.shape, self.strides);
        Self { shape: [columns, rows], strides: [right, down], ..self }
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
}

/// `out = a b`, or `out += a b` if `adds`, on this thread.
///
/// # Panics
/// If the shapes do not fit.
pub fn multiply(out: MatrixMut, a: Matrix, b: Matrix, adds: bool) {
    assert!(a.shape[1] == b.shape[0] && out.shape == [a.shape[0], b.shape[1]], "{out:?} of {a:?} and {b:?}");
    let strides = [out.shape[1], 1];
    let product = Product {
        shape: [a.shape[0], b.shape[1], a.shape[1]],
        out: out.data.as_mut_ptr(),
        a: a.data.as_ptr(),
        b: b.data.as_ptr(),
        strides: [strides, a.strides, b.strides].map(|pair| pair.map(|stride| stride as isize)),
        adds,
    };
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
