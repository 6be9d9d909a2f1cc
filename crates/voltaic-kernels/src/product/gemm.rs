//! Products of float32 matrices by the `gemm` crate.

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
