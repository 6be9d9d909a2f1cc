//! Products of float32 matrices in slices, by the `gemm` crate, or by the MKL on Intel's processors.

use crate::choice::prefers_mkl;
use crate::product::gemm::Product;
use crate::product::matrix::{Matrix, MatrixMut};
use crate::product::mkl::{is_for_mkl, multiply_by_mkl};

/// `out = a b`, or `out += a b` if `adds`: on this thread within libtorch's threads, else on as many as the MKL likes.
///
/// # Panics
/// If the shapes do not fit.
pub fn multiply(out: MatrixMut, a: Matrix, b: Matrix, adds: bool) {
    let ([rows, depth], [height, columns]) = (a.shape(), b.shape());
    assert!(
        depth == height && out.shape() == [rows, columns],
        "{:?} of {:?} and {:?}",
        out.shape(),
        a.shape(),
        b.shape()
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
