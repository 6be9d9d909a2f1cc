//! Products of float32 matrices.

use std::ops::Range;

use tch::{Kind, Tensor};
use voltaic_sys as sys;

use super::{GRAIN, Shared};
use crate::ffi::matrix::Product;
use crate::ffi::simd::run_vectorized;
use crate::ffi::threads::parallel_for;
use crate::kernels::Turn;

/// Rows or columns of a product that are worth a thread.
const MIN_STRIP: usize = 64;
/// Columns of `b` that are longer, and lie in one piece, are turned before gemm, which is slow at it.
const LONG: usize = 512;
/// With fewer rows it is cheaper to turn those of `a` and of the result.
const MANY_ROWS: usize = 128;
/// The same as [`LONG`], with fewer rows.
const LONG_FOR_FEW_ROWS: usize = 256;
/// With still fewer libtorch, which reads `b` as it is, is faster.
const FEW_ROWS: usize = 16;
/// A turned matrix is worth a thread by as many of its rows.
const TURNED_ROWS: usize = 16;

pub(super) extern "C" fn product(call: *const sys::vt_product) -> i32 {
    // SAFETY: the shim passes a description that lives during the call.
    let product = Products::new(unsafe { &*call });
    let [_, rows, _, depth] = product.shape;
    let [_, down, right] = product.to_b;
    let long = if rows < MANY_ROWS { LONG_FOR_FEW_ROWS } else { LONG };
    let is_done = if down != 1 || right == 1 || depth <= long {
        product.run();
        true
    } else if rows >= MANY_ROWS {
        product.run_with_turned_b().is_some()
    } else {
        rows >= FEW_ROWS && product.run_with_turned_rows().is_some()
    };
    is_done.into()
}

/// A product for each batch.
#[derive(Clone, Copy)]
struct Products {
    /// Batches, rows, columns, depth.
    shape: [usize; 4],
    out: Shared<f32>,
    a: Shared<f32>,
    b: Shared<f32>,
    /// From batch to batch, row to row and column to column.
    to_out: [isize; 3],
    to_a: [isize; 3],
    to_b: [isize; 3],
    adds: bool,
}

impl Products {
    fn new(call: &sys::vt_product) -> Self {
        let strides = |strides: [i64; 3]| strides.map(|stride| stride as isize);
        Self {
            shape: [call.batches, call.rows, call.columns, call.depth].map(|length| length as usize),
            out: Shared(call.out),
            a: Shared(call.a.cast_mut()),
            b: Shared(call.b.cast_mut()),
            to_out: strides(call.out_strides),
            to_a: strides(call.a_strides),
            to_b: strides(call.b_strides),
            adds: call.adds != 0,
        }
    }

    /// Multiplies by gemm on libtorch's threads.
    fn run(&self) {
        let [batches, rows, columns, _] = self.shape;
        if batches > 1 {
            let whole = |batch| self.run_part(batch, 0..rows, 0..columns);
            parallel_for(batches, 1, |part| part.for_each(whole));
        } else if rows >= columns {
            parallel_for(rows, MIN_STRIP, |part| self.run_part(0, part, 0..columns));
        } else {
            parallel_for(columns, MIN_STRIP, |part| self.run_part(0, 0..rows, part));
        }
    }

    fn run_part(&self, batch: usize, rows: Range<usize>, columns: Range<usize>) {
        let (batch, row, column) = (batch as isize, rows.start as isize, columns.start as isize);
        let Self { to_out, to_a, to_b, .. } = *self;
        let part = Product {
            shape: [rows.len(), columns.len(), self.shape[3]],
            out: self.out.at(batch * to_out[0] + row * to_out[1] + column * to_out[2]),
            a: self.a.at(batch * to_a[0] + row * to_a[1]),
            b: self.b.at(batch * to_b[0] + column * to_b[2]),
            strides: [to_out, to_a, to_b].map(|[_, down, right]| [down, right]),
            adds: self.adds,
        };
        // SAFETY: the addresses, sizes and strides are those of tensors that the shim holds, or of this file's own
        // scratch; `out` shares no memory with the others, and each part of it is written by one thread.
        unsafe { part.run() };
    }

    /// With the columns of `b` as rows. None, and nothing done, if that is not for these matrices.
    fn run_with_turned_b(mut self) -> Option<()> {
        let [1, _, columns, depth] = self.shape else { return None };
        let scratch = scratch(depth * columns)?;
        let turned = address(&scratch);
        turn(self.b, self.to_b[2], [columns, depth], turned);
        (self.b, self.to_b) = (turned, [0, columns as isize, 1]);
        self.run();
        Some(())
    }

    /// With the rows of `a` as columns, and those of the result until it is complete.
    fn run_with_turned_rows(mut self) -> Option<()> {
        let [1, rows, columns, depth] = self.shape else { return None };
        if self.to_out[1..] != [columns as isize, 1] || !self.to_a[1..].contains(&1) {
            return None;
        }
        let scratch = scratch(rows * (columns + depth))?;
        let turned_out = address(&scratch);
        let turned_a = Shared(turned_out.at((rows * columns) as isize));
        if self.to_a[2] == 1 {
            turn(self.a, self.to_a[1], [rows, depth], turned_a);
            (self.a, self.to_a) = (turned_a, [0, 1, rows as isize]);
        }
        if self.adds {
            turn(self.out, columns as isize, [rows, columns], turned_out);
        }
        let turned = Self { out: turned_out, to_out: [0, 1, rows as isize], ..self };
        parallel_for(columns, MIN_STRIP, |part| turned.run_part(0, 0..rows, part));
        turn(turned_out, rows as isize, [columns, rows], self.out);
        Some(())
    }
}

/// Memory for `len` numbers; None if there is none left.
fn scratch(len: usize) -> Option<Tensor> {
    Tensor::f_empty([len as i64], (Kind::Float, tch::Device::Cpu)).ok()
}

fn address(scratch: &Tensor) -> Shared<f32> {
    Shared(scratch.data_ptr().cast())
}

/// Writes a matrix of such rows and columns, rows `stride` apart, as a dense one of its columns, on libtorch's threads.
fn turn(input: Shared<f32>, stride: isize, [rows, columns]: [usize; 2], output: Shared<f32>) {
    let stride = stride as usize;
    let bands = columns.div_ceil(TURNED_ROWS);
    parallel_for(bands, (GRAIN / rows / TURNED_ROWS).max(1), |part| {
        let (first, end) = (part.start * TURNED_ROWS, (part.end * TURNED_ROWS).min(columns));
        // SAFETY: callers pass a matrix of `rows` by `columns` numbers and one of the same size that shares no memory with
        // it; parts do not overlap.
        let (input, output) = unsafe {
            (input.slice(first..(rows - 1) * stride + end), output.slice_mut(first * rows..end * rows))
        };
        run_vectorized(Turn { input, stride, rows, output });
    });
}
