//! Products of float32 matrices by the part of the `gemm` crate that is for float32: the whole takes minutes to compile.

/// A product of matrices by their addresses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Product {
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
        let Self { shape: [mut rows, mut columns, depth], strides: [mut out, mut a, mut b], .. } = self;
        let (mut left, mut right) = (self.a, self.b);
        // the kernels write columns: of rows, the transposed product is computed
        if out[1].abs() < out[0].abs() {
            (rows, columns) = (columns, rows);
            (left, right) = (right, left);
            let transposed = |[from_row, from_column]: [isize; 2]| [from_column, from_row];
            (out, a, b) = (transposed(out), transposed(b), transposed(a));
        }
        let kept = if self.adds { 1.0 } else { 0.0 };
        // SAFETY: what gemm asks for is what this function does.
        unsafe {
            gemm_f32::gemm::f32::get_gemm_fn()(
                rows,
                columns,
                depth,
                self.out,
                out[1],
                out[0],
                self.adds,
                left,
                a[1],
                a[0],
                right,
                b[1],
                b[0],
                kept,
                1.0,
                false,
                false,
                false,
                gemm_common::Parallelism::None,
            );
        }
    }
}
