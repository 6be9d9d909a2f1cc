//! Products of attention: by AVX-512 and AMX from right factors that are made ready once, else by the MKL or gemm.

use std::ops::Range;

use crate::attention::rows::Rows;
use crate::choice::attends_by_strips;
use crate::element::{Bf16, Element};
use crate::elementwise::pointwise::Convert;
use crate::held::held;
use crate::memory::sized;
use crate::processor::run_vectorized;
use crate::product::amx::Tiles;
use crate::product::matrix::{Matrix, MatrixMut};
use crate::product::multiply::multiply;
use crate::product::strip::multiply_by_strips;
use crate::product::strips::Strips;

/// Keys of a block from strips, so few that the first cache holds what is made of them.
const STRIPED_KEYS: usize = 64;

/// A number that products are made of; their sums are float32.
pub trait Factor: Element {
    /// Queries of a block. Fewer leave out more keys of a causal one, more make better use of what products prepare.
    const BLOCK: usize;

    /// What multiplies, to be set up for the products of a head.
    type Unit;

    /// A right factor that is ready for products.
    type Right<'a>: Copy;

    /// The most keys that the backward pass takes at a time.
    fn max_keys() -> usize {
        STRIPED_KEYS
    }

    /// Sets up what multiplies, on this thread.
    fn set_up() -> Self::Unit;

    /// Makes a right factor ready, in `strips` if it has to be brought into another order.
    fn prepare<'a>(b: Matrix<'a, Self>, strips: &'a mut Vec<u32>) -> Self::Right<'a>;

    /// `out = a b`, or `out += a b`, with a part of `b` by rows and columns that starts at multiples of 64.
    fn multiply(
        unit: &Self::Unit,
        out: MatrixMut,
        a: Matrix<Self>,
        b: (Self::Right<'_>, [Range<usize>; 2]),
        adds: bool,
    );

    /// Two buffers for such numbers.
    fn buffers(scratch: &mut FactorScratch) -> &mut [Vec<Self>; 2];
}

/// Buffers by number format.
#[derive(Debug, Default)]
pub struct FactorScratch {
    f32: [Vec<f32>; 2],
    bf16: [Vec<Bf16>; 2],
}
held!(FactorScratch { f32, bf16 });

/// A right factor of float32.
#[derive(Debug, Clone, Copy)]
pub enum F32Right<'a> {
    /// For AVX-512.
    Strips(Strips<'a, f32>),
    /// As it is.
    Matrix(Matrix<'a>),
}

impl Factor for f32 {
    const BLOCK: usize = 32;

    type Unit = ();

    type Right<'a> = F32Right<'a>;

    fn max_keys() -> usize {
        if attends_by_strips() { STRIPED_KEYS } else { usize::MAX } // the others are better at large products
    }

    fn set_up() {}

    fn prepare<'a>(b: Matrix<'a, Self>, strips: &'a mut Vec<u32>) -> F32Right<'a> {
        if attends_by_strips() { F32Right::Strips(Strips::new(b, strips)) } else { F32Right::Matrix(b) }
    }

    fn multiply(
        (): &(),
        out: MatrixMut,
        a: Matrix<Self>,
        (b, part): (F32Right, [Range<usize>; 2]),
        adds: bool,
    ) {
        match b {
            F32Right::Strips(b) => multiply_by_strips(out, a, b.part(part), adds),
            F32Right::Matrix(b) => multiply(out, a, b.part(part), adds),
        }
    }

    fn buffers(scratch: &mut FactorScratch) -> &mut [Vec<Self>; 2] {
        &mut scratch.f32
    }
}

/// For processors with AMX or the dot products of AVX-512.
impl Factor for Bf16 {
    const BLOCK: usize = 64;

    type Unit = Option<Tiles>;

    type Right<'a> = Strips<'a, Self>;

    fn set_up() -> Option<Tiles> {
        Tiles::set_up()
    }

    fn prepare<'a>(b: Matrix<'a, Self>, strips: &'a mut Vec<u32>) -> Strips<'a, Self> {
        Strips::new(b, strips)
    }

    fn multiply(
        unit: &Option<Tiles>,
        out: MatrixMut,
        a: Matrix<Self>,
        (b, part): (Strips<Self>, [Range<usize>; 2]),
        adds: bool,
    ) {
        match unit {
            Some(tiles) => tiles.multiply(out, a, b.part(part), adds),
            None => multiply_by_strips(out, a, b.part(part), adds),
        }
    }

    fn buffers(scratch: &mut FactorScratch) -> &mut [Vec<Self>; 2] {
        &mut scratch.bf16
    }
}

/// Factors that rows of a tensor of `T` can be made into.
pub trait FactorOf<T: Element>: Factor {
    /// `rows` as factors: themselves, or in `copy`.
    fn from_rows<'a>(rows: Rows<'a, T>, copy: &'a mut Vec<f32>) -> Rows<'a, Self>;
}

impl<T: Factor> FactorOf<T> for T {
    fn from_rows<'a>(rows: Rows<'a, T>, _copy: &'a mut Vec<f32>) -> Rows<'a, Self> {
        rows
    }
}

impl FactorOf<Bf16> for f32 {
    fn from_rows<'a>(rows: Rows<'a, Bf16>, copy: &'a mut Vec<f32>) -> Rows<'a, Self> {
        let shape = [rows.len, rows.dim];
        let copy = sized(copy, rows.len * rows.dim);
        for (i, copy) in copy.chunks_exact_mut(rows.dim).enumerate() {
            run_vectorized(Convert { numbers: rows.row(i), copy });
        }
        Rows::new(copy, shape, rows.dim)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_without_avx512_are_the_same() {
        let numbers: Vec<f32> = (0..70 * 40).map(|i| (i * 37 % 17) as f32 - 8.0).collect();
        let a = Matrix::new(&numbers, [5, 30], [40, 1]);
        for strides in [[40, 1], [1, 70]] {
            let b = Matrix::new(&numbers, [70, 40], strides);
            let parts = [32..62, 32..40];
            let product = |right: F32Right, adds| {
                let mut out = vec![0.5; 5 * 8];
                f32::multiply(&(), MatrixMut::dense(&mut out, [5, 8]), a, (right, parts.clone()), adds);
                out
            };
            let mut strips = Vec::new();
            for adds in [false, true] {
                let prepared = product(f32::prepare(b, &mut strips), adds);
                assert_eq!(product(F32Right::Matrix(b), adds), prepared);
            }
        }
    }
}
