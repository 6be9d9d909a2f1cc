//! Products of the matrices of tensors, on all threads: of float32 by AMX, gemm or AVX-512, of bfloat16 by AVX-512 or the MKL.

use std::ffi::c_void;
use std::ops::Range;
use std::slice;
#[cfg(target_arch = "x86_64")]
use std::sync::atomic::{AtomicBool, Ordering};

use crate::choice::{ProductKernel, ProductShape, product_kernels};
use crate::element::{Bf16, Element};
use crate::host::memory;
use crate::kernel::blocks;
use crate::memory::sized;
use crate::processor::lanes::InLanes;
use crate::processor::run_vectorized;
#[cfg(target_arch = "x86_64")]
use crate::product::amx::Tiles;
#[cfg(target_arch = "x86_64")]
use crate::product::few_rows;
use crate::product::gemm::Product;
use crate::product::matrix::{Matrix, MatrixMut};
use crate::product::mkl::multiply_by_mkl;
use crate::product::round::{Addend, RoundRows};
use crate::product::strip::{StripFactor, StripProduct};
use crate::product::strips::{COLUMNS, Numbers, Strips, pack_into};
use crate::product::transpose::Turn;
use crate::scratch::{Scratch, WithScratch};
use crate::threads::{GRAIN, parallel_for};
use crate::views::{Dtype, Shared};

/// Rows or columns of a product that are worth a thread.
const MIN_STRIP: usize = 64;
/// A turned matrix is worth a thread by as many of its rows.
const TURNED_ROWS: usize = 16;

/// A product of matrices for each batch: `out = a b`, or `out += a b` if it adds.
#[derive(Debug, Clone, Copy)]
pub struct BatchedProduct {
    /// Of all three.
    pub dtype: Dtype,
    /// Batches, rows, columns, depth.
    pub shape: [usize; 4],
    /// The first number of `[batches, rows, columns]`.
    pub out: *mut c_void,
    /// The first number of `[batches, rows, depth]`.
    pub a: *const c_void,
    /// The first number of `[batches, depth, columns]`.
    pub b: *const c_void,
    /// From batch to batch, row to row and column to column, in numbers.
    pub out_strides: [isize; 3],
    /// The same of `a`.
    pub a_strides: [isize; 3],
    /// The same of `b`.
    pub b_strides: [isize; 3],
    /// Whether `out` is added to.
    pub adds: bool,
}

impl BatchedProduct {
    fn shape(&self) -> ProductShape {
        let last = |[_, down, right]: [isize; 3]| [down, right];
        let [batches, rows, columns, depth] = self.shape;
        ProductShape {
            batches,
            rows,
            columns,
            depth,
            out: last(self.out_strides),
            a: last(self.a_strides),
            b: last(self.b_strides),
        }
    }
}

/// Multiplies by the kernel that serves such matrices, and gives which it was. None if the product is another's: `out` is as it
/// was then, unless it is one of AMX that is not finite, which leaves anything in it.
///
/// # Safety
/// The numbers of the factors must be there, at such strides, and written by nothing; those of `out` must be writable, each in one
/// place, in none of the others, and initialised if it adds.
pub unsafe fn multiply_batches(product: &BatchedProduct) -> Option<ProductKernel> {
    let shape = product.shape();
    let mut kernels = product_kernels(product.dtype, &shape);
    match product.dtype {
        Dtype::Float32 => {
            let product = Products::<f32>::new(product);
            kernels.find_map(|kernel| Some(product.run_by(kernel)?.then_some(kernel))).flatten()
        }
        Dtype::Bfloat16 => {
            let product = Products::<Bf16>::new(product);
            kernels.find_map(|kernel| Some(product.run_by(kernel)?.then_some(kernel))).flatten()
        }
    }
}

/// A product for each batch, of such numbers.
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
    fn new(product: &BatchedProduct) -> Self {
        Self {
            shape: product.shape,
            out: Shared(product.out.cast()),
            a: Shared(product.a.cast_mut().cast()),
            b: Shared(product.b.cast_mut().cast()),
            to_out: product.out_strides,
            to_a: product.a_strides,
            to_b: product.b_strides,
            adds: product.adds,
        }
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

    /// Calls `part` for parts of the product on all threads: with a batch, rows and columns.
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
    /// Multiplies with `b` in strips, which all threads use. None, and nothing done, if there is no memory for them.
    fn run_by_strips(&self) -> Option<()> {
        let [batches, _, columns, depth] = self.shape;
        let (count, len) = (columns.div_ceil(COLUMNS), depth.div_ceil(T::PER_LANE) * COLUMNS);
        let memory = memory(batches * count * len)?;
        let all = Shared(memory.start().cast::<u32>());
        parallel_for(batches * count, GRAIN.div_ceil(len), |strips| {
            for strip in strips {
                let (batch, columns) = (strip / count, of_strips(strip % count..strip % count + 1, columns));
                // SAFETY: each strip is one thread's, and `b` is there; there are strips on this processor.
                unsafe {
                    let b = self.b_from(batch, columns.start).transposed();
                    pack_into(all.slice_mut(strip * len..(strip + 1) * len), b, columns.len(), depth);
                }
            }
        });
        self.split(|batch, rows, columns| {
            // SAFETY: they were written above, and nothing changes them.
            let strips = unsafe { all.slice(batch * count * len..(batch + 1) * count * len) };
            let b = Strips::of_lanes(strips, [depth, self.shape[2]]).part([0..depth, columns.clone()]);
            let shape = [rows.len(), columns.len(), depth];
            let (out, a) = (self.out_from(batch, rows.start, columns.start), self.a_from(batch, rows.start));
            // SAFETY: the tensors are there; `out` shares no memory with the others, and each part of it is written
            // by one thread.
            unsafe { StripProduct { shape, out, to_out: self.to_out[1], a, b, adds: self.adds }.run() };
        });
        Some(())
    }
}

/// Multiplications of few rows that are worth a thread.
#[cfg(target_arch = "x86_64")]
const FEW_ROWS_GRAIN: usize = 1 << 18;

#[cfg(target_arch = "x86_64")]
impl<T: Element> Products<T> {
    /// Multiplies few rows with the columns of `b` as they lie. None, and nothing done, if there is no memory for the rows.
    fn run_by_dots(&self) -> Option<()> {
        use few_rows::{COLUMNS, ROWS};
        let [_, rows, columns, depth] = self.shape;
        let memory = memory(rows * depth)?;
        let wide = Shared(memory.start());
        for row in 0..rows {
            // SAFETY: the numbers of `a` lie next to each other and are there; the memory is this call's.
            unsafe {
                let (from, to) = (
                    slice::from_raw_parts(self.a_from(0, row).data, depth),
                    wide.slice_mut(row * depth..(row + 1) * depth),
                );
                to.iter_mut().zip(from).for_each(|(to, from)| *to = from.to_f32());
            }
        }
        // SAFETY: written above, and it is not changed.
        let a = unsafe { wide.slice(0..rows * depth) };
        let next = self.to_b[2] * COLUMNS as isize;
        parallel_for(columns.div_ceil(COLUMNS), FEW_ROWS_GRAIN.div_ceil(rows * depth * COLUMNS), |groups| {
            for first in groups.map(|group| group * COLUMNS) {
                // what a last group lacks is its last column again
                let each = [0, 1, 2, 3].map(|at| self.b_from(0, (first + at).min(columns - 1)).data);
                for (group, some) in a.chunks(ROWS * depth).enumerate() {
                    // SAFETY: the columns lie in one piece each and are there; there is AVX-512, as the table asks.
                    let sums = unsafe { few_rows::dots(some, each, depth, next) };
                    for (row, sums) in (group * ROWS..rows).zip(sums) {
                        for (column, sum) in (first..columns).zip(sums) {
                            let out = self.out_from(0, row, column);
                            // SAFETY: the place is one of the output, and each column belongs to one thread; it is initialised if it
                            // is added to.
                            unsafe {
                                *out = T::from_f32(if self.adds { (*out).to_f32() + sum } else { sum })
                            };
                        }
                    }
                }
            }
        });
        Some(())
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl<T: Element> Products<T> {
    fn run_by_dots(&self) -> Option<()> {
        unreachable!("there is no AVX-512 here")
    }
}

impl Products<f32> {
    /// Whether the product is complete. None if the kernel finds no memory: the next one is to do it.
    fn run_by(&self, kernel: ProductKernel) -> Option<bool> {
        match kernel {
            ProductKernel::Dots => self.run_by_dots().map(|()| true),
            ProductKernel::Strips => self.run_by_strips().map(|()| true),
            ProductKernel::Split => Some(self.run_by_tiles()),
            ProductKernel::Gemm => {
                self.run();
                Some(true)
            }
            ProductKernel::GemmOfTurnedRight => self.run_with_turned_b().map(|()| true),
            ProductKernel::GemmOfTurnedRows => self.run_with_turned_rows().map(|()| true),
            ProductKernel::Mkl => unreachable!("the MKL's float32 is libtorch's"),
        }
    }

    /// Multiplies by gemm on all threads.
    fn run(&self) {
        self.split(|batch, rows, columns| self.run_part(batch, rows, columns));
    }

    fn run_part(&self, batch: usize, rows: Range<usize>, columns: Range<usize>) {
        // SAFETY: the addresses, sizes and strides are those of tensors that are there, or of this file's own
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

    /// Multiplies by AMX. False if another has to do it once more, since some numbers are not finite.
    #[cfg(target_arch = "x86_64")]
    fn run_by_tiles(&self) -> bool {
        let is_finite = AtomicBool::new(true);
        self.split(|batch, rows, columns| {
            let tiles = Tiles::set_up().expect("has_tiles()");
            // SAFETY: as in `run_part`; the whole product is for tiles.
            if !unsafe { tiles.multiply_split(&self.part(batch, rows, columns)) } {
                is_finite.store(false, Ordering::Relaxed);
            }
        });
        is_finite.into_inner()
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn run_by_tiles(&self) -> bool {
        unreachable!("has_tiles() is false here")
    }

    /// With the columns of `b` as rows. None, and nothing done, if there is no memory.
    fn run_with_turned_b(mut self) -> Option<()> {
        let [_, _, columns, depth] = self.shape;
        let memory = memory(depth * columns)?;
        let turned = Shared(memory.start());
        turn(self.b, self.to_b[2], [columns, depth], turned);
        (self.b, self.to_b) = (turned, [0, columns as isize, 1]);
        self.run();
        Some(())
    }

    /// With the rows of `a` as columns, and those of the result until it is complete. None, and nothing done, if there is no
    /// memory.
    fn run_with_turned_rows(mut self) -> Option<()> {
        let [_, rows, columns, depth] = self.shape;
        let memory = memory(rows * (columns + depth))?;
        let turned_out = Shared(memory.start());
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
    static SUMS: Scratch<Vec<f32>> = Scratch::default();
}

impl Products<Bf16> {
    /// As for float32.
    fn run_by(&self, kernel: ProductKernel) -> Option<bool> {
        match kernel {
            ProductKernel::Dots => self.run_by_dots().map(|()| true),
            ProductKernel::Strips => self.run_by_strips().map(|()| true),
            ProductKernel::Mkl => {
                self.run_by_mkl();
                Some(true)
            }
            _ => unreachable!("kernels of float32"),
        }
    }

    /// Multiplies by the MKL on all threads.
    fn run_by_mkl(&self) {
        self.split(|batch, rows, columns| self.run_part(batch, rows, columns));
    }

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
        // SAFETY: the output has room for the result, which shares no memory with the others; its rows do
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
        // SAFETY: from the first number of a factor that is there to its last; nothing writes to it.
        Matrix::new(unsafe { slice::from_raw_parts(numbers.data, len) }, shape, strides)
    }
}

/// Writes a matrix of such rows and columns, rows `stride` apart, as a dense one of its columns, on all threads.
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
