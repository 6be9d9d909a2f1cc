//! Products of matrices: of float32 by AMX, gemm or AVX-512, of bfloat16 by AVX-512 or the MKL.

use std::ops::Range;
use std::slice;
#[cfg(target_arch = "x86_64")]
use std::sync::atomic::{AtomicBool, Ordering};

use voltaic_sys as sys;

use super::guard::guard_some;
use super::{GRAIN, Shared, address, scratch};
#[cfg(target_arch = "x86_64")]
use crate::ffi::amx_product::{Tiles, has_tiles};
use crate::ffi::lanes::InLanes;
use crate::ffi::matrix::{Matrix, MatrixMut, Product};
use crate::ffi::mkl::{is_for_mkl, multiply_by_mkl};
use crate::ffi::scratch::{Scratch as ThreadScratch, WithScratch};
use crate::ffi::simd::run_vectorized;
use crate::ffi::strip_product::{StripFactor, StripProduct};
use crate::ffi::strips::{COLUMNS, Numbers, Strips, pack_into};
use crate::ffi::threads::parallel_for;
use crate::kernels::{Addend, Bf16, RoundRows, Turn, blocks, sized};

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
/// With fewer rows, or numbers to sum up, it costs more to bring `b` into strips than they save.
const WORTH_STRIPS: usize = 8;
/// A turned matrix is worth a thread by as many of its rows.
const TURNED_ROWS: usize = 16;

pub(super) extern "C" fn product(call: *const sys::vt_product) -> i32 {
    // SAFETY: the shim passes a description that lives during the call.
    guard_some("product", || multiply(unsafe { &*call }))
}

/// As [`product`], most of them by AVX-512 from strips.
pub(super) extern "C" fn product_by_strips(call: *const sys::vt_product) -> i32 {
    guard_some("product_by_strips", || {
        // SAFETY: the shim passes a description that lives during the call.
        let call = unsafe { &*call };
        Products::<f32>::new(call).run_by_strips().is_some() || multiply(call)
    })
}

/// Of bfloat16 by the dot products of AVX-512.
pub(super) extern "C" fn product_bf16_by_strips(call: *const sys::vt_product) -> i32 {
    guard_some("product_bf16_by_strips", || {
        // SAFETY: the shim passes a description that lives during the call.
        Products::<Bf16>::new(unsafe { &*call }).run_by_strips().is_some()
    })
}

/// As [`product`], for those alone that tiles are faster at than the MKL.
pub(super) extern "C" fn large_product(call: *const sys::vt_product) -> i32 {
    guard_some("large_product", || {
        // SAFETY: the shim passes a description that lives during the call.
        Products::<f32>::new(unsafe { &*call }).run_by_tiles().unwrap_or(false)
    })
}

/// By tiles or gemm; false for what is libtorch's.
fn multiply(call: &sys::vt_product) -> bool {
    let product = Products::<f32>::new(call);
    if let Some(is_done) = product.run_by_tiles() {
        return is_done;
    }
    let [_, rows, _, depth] = product.shape;
    let [_, down, right] = product.to_b;
    let long = if rows < MANY_ROWS { LONG_FOR_FEW_ROWS } else { LONG };
    if down != 1 || right == 1 || depth <= long {
        product.run();
        return true;
    }
    if rows >= MANY_ROWS {
        return product.run_with_turned_b().is_some();
    }
    rows >= FEW_ROWS && product.run_with_turned_rows().is_some()
}

/// A product for each batch.
#[derive(Clone, Copy)]
struct Products<T> {
    /// Batches, rows, columns, depth.
    shape: [usize; 4],
    out: Shared<T>,
    a: Shared<T>,
    b: Shared<T>,
    /// From batch to batch, row to row and column to column.
    to_out: [isize; 3],
    to_a: [isize; 3],
    to_b: [isize; 3],
    adds: bool,
}

impl<T: Copy + Send + Sync> Products<T> {
    fn new(call: &sys::vt_product) -> Self {
        let strides = |strides: [i64; 3]| strides.map(|stride| stride as isize);
        Self {
            shape: [call.batches, call.rows, call.columns, call.depth].map(|length| length as usize),
            out: Shared(call.out.cast()),
            a: Shared(call.a.cast_mut().cast()),
            b: Shared(call.b.cast_mut().cast()),
            to_out: strides(call.out_strides),
            to_a: strides(call.a_strides),
            to_b: strides(call.b_strides),
            adds: call.adds != 0,
        }
    }

    /// Whether the result is rows that do not overlap, of numbers that are next to each other.
    fn writes_rows(&self) -> bool {
        let ([_, rows, columns, _], [_, down, right]) = (self.shape, self.to_out);
        (columns == 1 || right == 1) && (rows == 1 || down >= columns as isize)
    }

    fn out_from(&self, batch: usize, row: usize, column: usize) -> *mut T {
        let [to_batch, down, right] = self.to_out;
        self.out.at(batch as isize * to_batch + row as isize * down + column as isize * right)
    }

    fn a_from(&self, batch: usize, row: usize) -> Numbers<T> {
        from(self.a, batch, self.to_a, [row, 0])
    }

    fn b_from(&self, batch: usize, column: usize) -> Numbers<T> {
        from(self.b, batch, self.to_b, [0, column])
    }

    /// Calls `part` for parts of the product on libtorch's threads: with a batch, rows and columns.
    fn split(&self, part: impl Fn(usize, Range<usize>, Range<usize>) + Sync) {
        let [batches, rows, columns, _] = self.shape;
        if batches > 1 {
            let whole = |batch| part(batch, 0..rows, 0..columns);
            parallel_for(batches, 1, |batches| batches.for_each(whole));
        } else if rows >= columns {
            parallel_for(rows.div_ceil(COLUMNS), MIN_STRIP / COLUMNS, |strips| {
                part(0, of_strips(strips, rows), 0..columns)
            });
        } else {
            parallel_for(columns.div_ceil(COLUMNS), MIN_STRIP / COLUMNS, |strips| {
                part(0, 0..rows, of_strips(strips, columns))
            });
        }
    }
}

/// A factor, from a row and a column of a batch on.
fn from<T>(
    factor: Shared<T>,
    batch: usize,
    [to_batch, down, right]: [isize; 3],
    place: [usize; 2],
) -> Numbers<T> {
    Numbers { data: factor.at(batch as isize * to_batch), strides: [down, right] }.at(place)
}

/// The columns of strips, of as many.
fn of_strips(strips: Range<usize>, columns: usize) -> Range<usize> {
    strips.start * COLUMNS..(strips.end * COLUMNS).min(columns)
}

impl<T: StripFactor + InLanes> Products<T> {
    /// Multiplies with `b` in strips, which all threads use. None, and nothing done, if that is not worth it, or there is no
    /// memory for them.
    fn run_by_strips(&self) -> Option<()> {
        let [batches, rows, columns, depth] = self.shape;
        if rows < WORTH_STRIPS || depth < WORTH_STRIPS || !self.writes_rows() {
            return None;
        }
        let (count, len) = (columns.div_ceil(COLUMNS), depth.div_ceil(T::PER_LANE) * COLUMNS);
        let scratch = scratch(batches * count * len)?;
        let all = Shared(scratch.data_ptr().cast());
        parallel_for(batches * count, GRAIN.div_ceil(len), |strips| {
            for strip in strips {
                let (batch, columns) = (strip / count, of_strips(strip % count..strip % count + 1, columns));
                // SAFETY: each strip is one thread's, and the shim holds `b`; there are strips on this processor.
                unsafe {
                    let b = self.b_from(batch, columns.start).transposed();
                    pack_into(all.slice_mut(strip * len..(strip + 1) * len), b, columns.len(), depth);
                }
            }
        });
        self.split(|batch, rows, columns| {
            // SAFETY: they were written above, and nobody changes them.
            let strips = unsafe { all.slice(batch * count * len..(batch + 1) * count * len) };
            let b = Strips::of_lanes(strips, [depth, self.shape[2]]).part([0..depth, columns.clone()]);
            let shape = [rows.len(), columns.len(), depth];
            let (out, a) = (self.out_from(batch, rows.start, columns.start), self.a_from(batch, rows.start));
            // SAFETY: the shim holds the tensors; `out` shares no memory with the others, and each part of it is written
            // by one thread.
            unsafe { StripProduct { shape, out, to_out: self.to_out[1], a, b, adds: self.adds }.run() };
        });
        Some(())
    }
}

impl Products<f32> {
    /// Multiplies by gemm on libtorch's threads.
    fn run(&self) {
        self.split(|batch, rows, columns| self.run_part(batch, rows, columns));
    }

    fn run_part(&self, batch: usize, rows: Range<usize>, columns: Range<usize>) {
        // SAFETY: the addresses, sizes and strides are those of tensors that the shim holds, or of this file's own
        // scratch; `out` shares no memory with the others, and each part of it is written by one thread.
        unsafe { self.part(batch, rows, columns).run() };
    }

    fn part(&self, batch: usize, rows: Range<usize>, columns: Range<usize>) -> Product {
        let Self { to_out, to_a, to_b, .. } = *self;
        Product {
            shape: [rows.len(), columns.len(), self.shape[3]],
            out: self.out_from(batch, rows.start, columns.start),
            a: self.a_from(batch, rows.start).data,
            b: self.b_from(batch, columns.start).data,
            strides: [to_out, to_a, to_b].map(|[_, down, right]| [down, right]),
            adds: self.adds,
        }
    }

    /// Multiplies by AMX, if that can be done and is worth it. False if another has to do it once more, since some numbers
    /// are not finite.
    #[cfg(target_arch = "x86_64")]
    fn run_by_tiles(&self) -> Option<bool> {
        let [_, rows, columns, _] = self.shape;
        if !has_tiles() || !self.part(0, 0..rows, 0..columns).is_for_tiles() {
            return None;
        }
        let is_finite = AtomicBool::new(true);
        self.split(|batch, rows, columns| {
            let tiles = Tiles::set_up().expect("has_tiles()");
            // SAFETY: as in `run_part`; the whole product is for tiles.
            if !unsafe { tiles.multiply_split(&self.part(batch, rows, columns)) } {
                is_finite.store(false, Ordering::Relaxed);
            }
        });
        Some(is_finite.into_inner())
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn run_by_tiles(&self) -> Option<bool> {
        None
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

/// Rows and columns of what a thread multiplies at a time in bfloat16: a megabyte of sums, which the second cache holds.
const BLOCK: usize = 512;

thread_local! {
    /// In float32, until they are rounded.
    static SUMS: ThreadScratch<Vec<f32>> = ThreadScratch::default();
}

/// Of bfloat16 by the MKL.
pub(super) extern "C" fn product_bf16_by_mkl(call: *const sys::vt_product) -> i32 {
    guard_some("product_bf16_by_mkl", || {
        // SAFETY: the shim passes a description that lives during the call.
        let product = Products::<Bf16>::new(unsafe { &*call });
        let [_, rows, columns, _] = product.shape;
        let is_taken = product.writes_rows()
            && is_for_mkl(&product.a(0, 0..rows))
            && is_for_mkl(&product.b(0, 0..columns));
        if is_taken {
            product.split(|batch, rows, columns| product.run_part(batch, rows, columns));
        }
        is_taken
    })
}

impl Products<Bf16> {
    fn run_part(&self, batch: usize, rows: Range<usize>, columns: Range<usize>) {
        SUMS.with_borrow_mut(|sums| {
            for rows in blocks(rows, BLOCK) {
                for columns in blocks(columns.clone(), BLOCK) {
                    self.run_block(batch, rows.clone(), columns, sums);
                }
            }
        });
    }

    fn run_block(&self, batch: usize, rows: Range<usize>, columns: Range<usize>, sums: &mut Vec<f32>) {
        let sums = sized(sums, rows.len() * columns.len());
        let (a, b) = (self.a(batch, rows.clone()), self.b(batch, columns.clone()));
        multiply_by_mkl(MatrixMut::dense(sums, [rows.len(), columns.len()]), a, b, false);
        let down = self.to_out[1];
        let out = self.out_from(batch, rows.start, columns.start);
        let stride = if self.shape[1] == 1 { columns.len() } else { down as usize };
        // SAFETY: the shim passes a tensor with room for the result, which shares no memory with the others; its rows do
        // not overlap, and each part of them belongs to one thread.
        let output = unsafe { Shared(out).slice_mut(0..(rows.len() - 1) * stride + columns.len()) };
        let addend = if self.adds { Addend::Output } else { Addend::Zero };
        run_vectorized(RoundRows { sums, width: columns.len(), output, stride, addend });
    }

    fn a(&self, batch: usize, rows: Range<usize>) -> Matrix<'_, Bf16> {
        self.matrix(self.a_from(batch, rows.start), [rows.len(), self.shape[3]])
    }

    fn b(&self, batch: usize, columns: Range<usize>) -> Matrix<'_, Bf16> {
        self.matrix(self.b_from(batch, columns.start), [self.shape[3], columns.len()])
    }

    fn matrix(&self, numbers: Numbers<Bf16>, shape: [usize; 2]) -> Matrix<'_, Bf16> {
        let strides = numbers.strides.map(|stride| stride as usize);
        let len = (shape[0] - 1) * strides[0] + (shape[1] - 1) * strides[1] + 1;
        // SAFETY: from the first number of a factor that the shim holds to its last; nobody writes to it.
        Matrix::new(unsafe { slice::from_raw_parts(numbers.data, len) }, shape, strides)
    }
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
