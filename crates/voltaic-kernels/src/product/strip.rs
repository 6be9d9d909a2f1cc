//! Products of matrices by AVX-512, with the right factor in strips: of float32 by fused multiplications, of bfloat16 by
//! dot products of pairs. Sums are float32.

use std::array;

use crate::element::Bf16;
use crate::kernel::{Kernel, blocks};
use crate::processor::lanes::{InLanes, LANES, Lanes};
use crate::processor::{run_vectorized, run_with_dots};
use crate::product::matrix::{Matrix, MatrixMut};
use crate::product::strips::{COLUMNS, Numbers, Packed, Strips, has_strips, pack};
use crate::scratch::{Scratch as ThreadScratch, WithScratch};

/// Rows of a tile, as many as have their sums in registers.
const ROWS: usize = 8;
/// Lanes of the left factor that are worked on at a time: half a megabyte, which the second cache holds.
const MAX_BLOCK: usize = 1 << 17;
/// Columns of the left factor that are read where they are; more of them, each in a page of its own, are brought together.
const NEAR: usize = 128;

/// A number format of factors.
pub trait StripFactor: Packed {
    /// Whether the processor has products of them.
    fn can_multiply() -> bool;

    /// Adds the products of what is in 32 bits of the left factor and in each lane of the right one.
    ///
    /// # Safety
    /// The processor must have such products.
    unsafe fn add_products(sums: Lanes, left: u32, right: Lanes) -> Lanes;

    /// Runs a kernel compiled for them.
    fn run_vectorized<K: Kernel>(kernel: K) -> K::Output;
}

impl StripFactor for f32 {
    fn can_multiply() -> bool {
        has_strips()
    }

    #[inline(always)]
    unsafe fn add_products(sums: Lanes, left: u32, right: Lanes) -> Lanes {
        sums.add_product(Self::from_bits(left), right)
    }

    fn run_vectorized<K: Kernel>(kernel: K) -> K::Output {
        run_vectorized(kernel)
    }
}

impl StripFactor for Bf16 {
    fn can_multiply() -> bool {
        has_bf16_products()
    }

    #[inline(always)]
    unsafe fn add_products(sums: Lanes, left: u32, right: Lanes) -> Lanes {
        // SAFETY: as this function asks.
        unsafe { sums.add_dots(left, right) }
    }

    fn run_vectorized<K: Kernel>(kernel: K) -> K::Output {
        run_with_dots(kernel)
    }
}

/// `out = a b`, or `out += a b` if `adds`, on this thread.
///
/// # Panics
/// If the shapes do not fit, or the processor has no such products ([`has_bf16_products`]).
pub fn multiply_by_strips<T: StripFactor>(out: MatrixMut, a: Matrix<T>, b: Strips<T>, adds: bool) {
    b.check_product(&out, &a);
    let ([rows, columns], depth) = (out.shape(), a.shape()[1]);
    let (out, [to_out, _]) = out.into_parts();
    let product = StripProduct { shape: [rows, columns, depth], out, to_out, a: Numbers::new(a), b, adds };
    // SAFETY: the constructors of the matrices checked that their numbers lie in their slices; `out` is borrowed mutably,
    // so it is none of the others.
    unsafe { product.run() };
}

/// Whether the processor has dot products of bfloat16.
pub fn has_bf16_products() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx512bf16") && has_strips();
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// A product of matrices by their addresses.
pub(crate) struct StripProduct<'a, T, O> {
    /// Rows, columns, depth.
    pub shape: [usize; 3],
    pub out: *mut O,
    /// From row to row; columns are next to each other.
    pub to_out: isize,
    pub a: Numbers<T>,
    /// Of such depth and columns.
    pub b: Strips<'a, T>,
    pub adds: bool,
}

thread_local! {
    /// A part of the left factor.
    static LEFT: ThreadScratch<Vec<u32>> = ThreadScratch::default();
}

impl<T: StripFactor, O: InLanes> StripProduct<'_, T, O> {
    /// # Safety
    /// All numbers of the factors must be readable, those of `out` writable and in none of the others; without `adds` those
    /// of `out` may be uninitialised.
    ///
    /// # Panics
    /// If the processor has no such products.
    pub unsafe fn run(self) {
        assert!(T::can_multiply(), "no AVX-512, or none with dot products of bfloat16");
        let [rows, _, depth] = self.shape;
        let lanes = depth.div_ceil(T::PER_LANE).max(1);
        LEFT.with_borrow_mut(|strips| {
            for rows in blocks(0..rows, (MAX_BLOCK / lanes).max(1).next_multiple_of(COLUMNS)) {
                let out = self.out.wrapping_offset(rows.start as isize * self.to_out);
                // SAFETY: as this function asks.
                let left = unsafe { Left::new(self.a.at_row(rows.start), [rows.len(), depth], strips) };
                T::run_vectorized(Block { product: &self, left, out, rows: rows.len() });
            }
        });
    }
}

/// Rows of the left factor, as lanes.
struct Left<T> {
    data: *const T,
    /// From strip of rows to strip, from row to row of one, and from lane to lane.
    strides: [isize; 3],
}

impl<T: StripFactor> Left<T> {
    /// Rows where they are, or brought into `strips`, which they need while they are used.
    ///
    /// # Safety
    /// The numbers must be readable, on a processor with strips.
    unsafe fn new(matrix: Numbers<T>, [rows, depth]: [usize; 2], strips: &mut Vec<u32>) -> Self {
        let ([down, right], per_lane) = (matrix.strides, T::PER_LANE as isize);
        let are_lanes = right == 1 && depth.is_multiple_of(T::PER_LANE);
        if are_lanes || T::PER_LANE == 1 && depth <= NEAR {
            return Self { data: matrix.data, strides: [COLUMNS as isize * down, down, right * per_lane] };
        }
        // SAFETY: as this function asks.
        let strips = unsafe { pack(strips, matrix, rows, depth) };
        let step = COLUMNS as isize * per_lane;
        let to_strip = depth.div_ceil(T::PER_LANE) as isize * step;
        Self { data: strips.as_ptr().cast(), strides: [to_strip, per_lane, step] }
    }
}

/// The product of some rows.
struct Block<'a, T, O> {
    product: &'a StripProduct<'a, T, O>,
    left: Left<T>,
    out: *mut O,
    rows: usize,
}

impl<T: StripFactor, O: InLanes> Kernel for Block<'_, T, O> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let StripProduct { shape: [_, columns, depth], to_out, b, adds, .. } = *self.product;
        let lanes = depth.div_ceil(T::PER_LANE);
        let [to_strip, down, step] = self.left.strides;
        for j in (0..columns).step_by(COLUMNS) {
            let (b, width) = (b.strip(j, lanes), COLUMNS.min(columns - j));
            for i in (0..self.rows).step_by(ROWS) {
                let rows = ROWS.min(self.rows - i);
                let strip = self.left.data.wrapping_offset((i / COLUMNS) as isize * to_strip);
                let first = strip.wrapping_offset((i % COLUMNS) as isize * down);
                // rows that are not there are the last one again
                let left = array::from_fn(|row| first.wrapping_offset(row.min(rows - 1) as isize * down));
                let out = self.out.wrapping_offset(i as isize * to_out).wrapping_add(j);
                // SAFETY: whoever made the product says that its numbers are there, and `run` that the processor is one
                // for them.
                unsafe {
                    let sums = multiply(left, step, b);
                    for (row, sums) in sums.into_iter().enumerate().take(rows) {
                        store(sums, out.wrapping_offset(row as isize * to_out), width, adds);
                    }
                }
            }
        }
    }
}

/// Sums over the lanes of a strip, for rows whose lanes are `step` numbers apart.
///
/// # Safety
/// The processor must have such products, and the rows as many lanes as the strip.
#[inline(always)]
unsafe fn multiply<T: StripFactor>(rows: [*const T; ROWS], step: isize, b: &[u32]) -> [[Lanes; 2]; ROWS] {
    // SAFETY: as this function asks.
    unsafe {
        let mut sums = [[Lanes::zero(); 2]; ROWS];
        for (k, b) in b.chunks_exact(COLUMNS).enumerate() {
            let right = [0, LANES].map(|j| f32::load(b.as_ptr().add(j).cast()));
            for (row, sums) in rows.iter().zip(&mut sums) {
                let left = row.wrapping_offset(k as isize * step).cast::<u32>().read_unaligned();
                *sums = [0, 1].map(|half| T::add_products(sums[half], left, right[half]));
            }
        }
        sums
    }
}

/// Writes `width` sums of a row, or adds them.
///
/// # Safety
/// The processor must have AVX-512, and there must be as many numbers.
#[inline(always)]
unsafe fn store<O: InLanes>(sums: [Lanes; 2], out: *mut O, width: usize, adds: bool) {
    for (sums, first) in sums.into_iter().zip((0..width).step_by(LANES)) {
        let (out, count) = (out.wrapping_add(first), LANES.min(width - first));
        // SAFETY: as this function asks.
        unsafe {
            let sums = if adds { sums + O::load_some(out, count) } else { sums };
            O::store_some(sums, out, count);
        }
    }
}
