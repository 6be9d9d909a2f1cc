//! Products of matrices by the MKL, which libtorch for x86-64 has in it.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use crate::element::{Bf16, Element};
use crate::host::loaded_symbol;
use crate::product::matrix::{Matrix, MatrixMut};

/// `gemm` as Fortran has it, with the columns of matrices in one piece: the factors' transpositions, rows, columns, depth,
/// alpha, the factors with their leading dimensions, beta, the result and its leading dimension.
pub type Gemm<T> = unsafe extern "C" fn(
    *const c_char,
    *const c_char,
    *const c_int,
    *const c_int,
    *const c_int,
    *const f32,
    *const T,
    *const c_int,
    *const T,
    *const c_int,
    *const f32,
    *mut f32,
    *const c_int,
);

/// A number that the MKL multiplies, with sums in float32.
pub trait MklFactor: Element {
    /// The function that does; none in a libtorch without the MKL.
    fn gemm() -> Option<Gemm<Self>>;
}

impl MklFactor for f32 {
    fn gemm() -> Option<Gemm<Self>> {
        static FOUND: OnceLock<Option<Gemm<f32>>> = OnceLock::new();
        // SAFETY: BLAS fixes the signature.
        *FOUND.get_or_init(|| unsafe { find(c"sgemm_") })
    }
}

impl MklFactor for Bf16 {
    fn gemm() -> Option<Gemm<Self>> {
        static FOUND: OnceLock<Option<Gemm<Bf16>>> = OnceLock::new();
        // SAFETY: the MKL's reference fixes the signature; its integers have 32 bits under this name.
        *FOUND.get_or_init(|| unsafe { find(c"gemm_bf16bf16f32_") })
    }
}

/// # Safety
/// A function of this name must have the signature.
unsafe fn find<T>(name: &CStr) -> Option<Gemm<T>> {
    // SAFETY: as this function asks; libtorch_cpu.so, which holds it, is never unloaded.
    loaded_symbol(name).map(|symbol| unsafe { std::mem::transmute::<*mut c_void, Gemm<T>>(symbol) })
}

/// Whether libtorch has products of bfloat16 by the MKL in it.
pub fn has_mkl_bf16() -> bool {
    Bf16::gemm().is_some()
}

/// Whether a matrix lies as the MKL takes it: its rows in one piece each, or its columns.
pub fn is_for_mkl<T>(matrix: &Matrix<T>) -> bool {
    takes(matrix.shape(), matrix.strides())
}

/// The same, by rows and columns, and from row to row and from column to column.
pub fn takes(shape: [usize; 2], strides: [usize; 2]) -> bool {
    order(shape, strides).is_some()
}

/// How a matrix lies, and from one row, or column, to the next.
fn order([rows, columns]: [usize; 2], [down, right]: [usize; 2]) -> Option<(&'static CStr, c_int)> {
    let (order, len, from_next) = if right == 1 || columns == 1 {
        (c"N", columns, if rows == 1 { columns } else { down })
    } else if down == 1 || rows == 1 {
        (c"T", rows, right)
    } else {
        return None;
    };
    Some((order, c_int::try_from(from_next).ok().filter(|_| from_next >= len)?))
}

/// `out = a b`, or `out += a b` if `adds`, with sums in float32: on this thread within libtorch's threads, else on as
/// many as it likes.
///
/// # Panics
/// If the shapes do not fit, without the MKL, or for matrices that have neither their rows nor their columns in one piece.
pub fn multiply_by_mkl<T: MklFactor>(out: MatrixMut, a: Matrix<T>, b: Matrix<T>, adds: bool) {
    let (shape, [rows, depth], [height, columns]) = (out.shape(), a.shape(), b.shape());
    assert!(depth == height && shape == [rows, columns], "{shape:?} of {:?} and {:?}", a.shape(), b.shape());
    let gemm = T::gemm().expect("a libtorch with the MKL");
    let ((order_a, next_a), (order_b, next_b)) = order(a.shape(), a.strides())
        .zip(order(b.shape(), b.strides()))
        .expect("rows or columns in one piece");
    let [rows, columns, depth] =
        [rows, columns, depth].map(|length| c_int::try_from(length).expect("32 bits"));
    let (a, b, kept) = (a.into_parts().0, b.into_parts().0, if adds { 1.0 } else { 0.0 });
    let out = out.into_data().as_mut_ptr();
    // SAFETY: the constructors of the matrices checked that their numbers lie in their slices; `out`, dense, is borrowed
    // mutably, so it is none of the others. What has its rows in one piece is to Fortran the matrix of its columns, so
    // the factors change places.
    unsafe {
        gemm(
            order_b.as_ptr(),
            order_a.as_ptr(),
            &columns,
            &rows,
            &depth,
            &1.0,
            b,
            &next_b,
            a,
            &next_a,
            &kept,
            out,
            &columns,
        );
    }
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::process::Command;

    use super::*;

    /// Set in the process that has the MKL.
    const CHILD: &str = "VOLTAIC_TEST_MKL";

    /// Runs the test below in a process that has the libtorch that `LIBTORCH` names from its start.
    fn in_process_with_libtorch() {
        let libtorch = env::var("LIBTORCH").map(|folder| format!("{folder}/lib/libtorch_cpu.so"));
        let test = "product::mkl::tests::products_of_matrices_by_rows_and_columns_are_exact";
        let mut command = Command::new(env::current_exe().unwrap());
        command.args([test, "--exact"]).env(CHILD, "1").env("LD_PRELOAD", libtorch.unwrap_or_default());
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
    }

    fn numbers(len: usize, seed: usize) -> Vec<Bf16> {
        (0..len).map(|i| Bf16::from_f32(((i * 37 + seed * 11) % 17) as f32 - 8.0)).collect()
    }

    #[test]
    fn products_of_matrices_by_rows_and_columns_are_exact() {
        if env::var_os(CHILD).is_none() {
            return in_process_with_libtorch();
        }
        if !has_mkl_bf16() {
            return; // an aarch64, or no libtorch
        }
        for [rows, columns, depth] in [[1, 1, 1], [3, 1, 4], [1, 5, 2], [7, 6, 1], [33, 17, 50]] {
            for order in 0..4 {
                let (left, right) = (numbers(rows * depth, 1), numbers(depth * columns, 2));
                let strides =
                    |[rows, columns]: [usize; 2], is_turned| if is_turned { [1, rows] } else { [columns, 1] };
                let a = Matrix::new(&left, [rows, depth], strides([rows, depth], order & 1 != 0));
                let b = Matrix::new(&right, [depth, columns], strides([depth, columns], order & 2 != 0));
                assert!(is_for_mkl(&a) && is_for_mkl(&b));
                for adds in [false, true] {
                    let mut out = vec![0.5; rows * columns];
                    multiply_by_mkl(MatrixMut::dense(&mut out, [rows, columns]), a, b, adds);
                    for (i, j) in (0..rows).flat_map(|i| (0..columns).map(move |j| (i, j))) {
                        let at = |numbers: &[Bf16], [down, right]: [usize; 2], i: usize, j: usize| {
                            numbers[i * down + j * right].to_f32()
                        };
                        let pair = |k| at(&left, a.strides(), i, k) * at(&right, b.strides(), k, j);
                        let exact = (0..depth).map(pair).sum::<f32>() + if adds { 0.5 } else { 0.0 };
                        assert_eq!(out[i * columns + j], exact, "{rows} x {columns} x {depth}, {order}");
                    }
                }
            }
        }
    }

    #[test]
    fn scattered_matrices_are_refused() {
        let numbers = numbers(100, 0);
        assert!(!is_for_mkl(&Matrix::new(&numbers, [3, 4], [20, 2])));
        assert!(is_for_mkl(&Matrix::new(&numbers, [3, 4], [20, 1])));
        assert!(is_for_mkl(&Matrix::new(&numbers, [3, 1], [20, 2])), "a column of rows of one number");
        assert!(!is_for_mkl(&Matrix::new(&numbers, [3, 4], [1, 1])), "rows within each other");
    }
}
