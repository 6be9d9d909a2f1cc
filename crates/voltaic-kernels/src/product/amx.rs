//! Products of bfloat16 matrices by Intel's tiles (AMX): 16 rows of 16 pairs of numbers times 16 pairs in 16 columns.

#[cfg(target_arch = "x86_64")]
use std::arch::asm;
use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::OnceLock;

use crate::element::Bf16;
use crate::held::held;
use crate::memory::sized;
use crate::processor::amx::has_amx;
use crate::processor::lanes::LANES;
use crate::processor::run_vectorized;
use crate::product::matrix::{Matrix, MatrixMut};
use crate::product::strips::{COLUMNS, Numbers, Packed, Store, Strips, has_strips, pack_tiles};
use crate::scratch::{Scratch as ThreadScratch, WithScratch};

/// Rows of a tile, and pairs in each.
const SIDE: usize = LANES;
/// Rows of the product that are worked on at a time, in two tiles.
const ROWS: usize = 2 * SIDE;

/// The tiles of this thread, with the shape that products want.
#[derive(Debug)]
pub struct Tiles {
    /// They are the thread's own.
    thread: PhantomData<*const ()>,
}

impl Tiles {
    /// Sets them up until this is dropped, and all others of this thread are; code that sets them up otherwise, as the MKL,
    /// must not run meanwhile. None if the processor does not have [`has_tiles`].
    pub fn set_up() -> Option<Self> {
        if !has_tiles() {
            return None;
        }
        SCOPES.with(|scopes| {
            scopes.enter(|| {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: AMX is there, and the shapes are those of its first palette.
                unsafe {
                    asm!("ldtilecfg [{}]", in(reg) &raw const SHAPES, options(nostack, readonly, preserves_flags));
                }
            });
        });
        Some(Self { thread: PhantomData })
    }

    /// `out = a b`, or `out += a b` if `adds`, on this thread, with sums in float32.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub fn multiply(&self, out: MatrixMut, a: Matrix<Bf16>, b: Strips<Bf16>, adds: bool) {
        let ([rows, columns], lanes) = (out.shape(), b.check_product(&out, &a));
        if rows == 0 || columns == 0 {
            return;
        }
        SCRATCH.with_borrow_mut(|scratch| {
            let Scratch { last, sums, left } = scratch;
            let (a, out) = (Left::new(a, left), out.into_data());
            for j in (0..columns).step_by(COLUMNS) {
                let (b, width) = (Right::new(b.strip(j, lanes), last), COLUMNS.min(columns - j));
                for i in (0..rows).step_by(ROWS) {
                    let count = ROWS.min(rows - i);
                    let place = &mut out[i * columns + j..];
                    if width == COLUMNS && count == ROWS {
                        // SAFETY: AMX is set up; `out` has such rows and columns from this place on.
                        unsafe { multiply(&a, i, &b, place.as_mut_ptr(), columns, adds) };
                        continue;
                    }
                    // SAFETY: AMX is set up; the sums are of a whole part.
                    unsafe { multiply(&a, i, &b, sums.as_flattened_mut().as_mut_ptr(), COLUMNS, false) };
                    run_vectorized(Store { tile: &sums[..count], width, out: place, columns, adds });
                }
            }
        });
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        SCOPES.with(|scopes| {
            scopes.leave(|| {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: they were set up; without their state threads are switched faster.
                unsafe {
                    asm!("tilerelease", options(nomem, nostack, preserves_flags));
                }
            });
        });
    }
}

/// How many [`Tiles`] of a thread there are: the first sets the registers up, and the last releases them. One that released
/// them while another is there would have that end in an illegal instruction.
struct Scopes(Cell<usize>);

impl Scopes {
    fn enter(&self, set_up: impl FnOnce()) {
        if self.0.get() == 0 {
            set_up();
        }
        self.0.set(self.0.get() + 1);
    }

    fn leave(&self, release: impl FnOnce()) {
        self.0.set(self.0.get() - 1);
        if self.0.get() == 0 {
            release();
        }
    }
}

thread_local! {
    static SCOPES: Scopes = const { Scopes(Cell::new(0)) };
}

/// What tiles are set up by: the first palette, and each of 16 rows of 64 bytes.
#[cfg(target_arch = "x86_64")]
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

#[cfg(target_arch = "x86_64")]
static SHAPES: Shapes = Shapes {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// Whether the processor has these tiles, and the system lets this process use them, which it has to be asked for.
pub fn has_tiles() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| has_strips() && has_amx() && are_granted())
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn are_granted() -> bool {
    /// `ARCH_REQ_XCOMP_PERM`, and the state of the tiles' numbers, of Linux's `arch_prctl`.
    const REQUEST: [libc::c_long; 2] = [0x1023, 18];
    let [request, state] = REQUEST;
    // SAFETY: the call takes two numbers and allows this process another state of its registers.
    unsafe { libc::syscall(libc::SYS_arch_prctl, request, state) == 0 }
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
fn are_granted() -> bool {
    false
}

/// Aligned to lines of the cache.
#[repr(C, align(64))]
struct Scratch {
    /// The last rows of a strip, with zeros behind them.
    last: [u32; SIDE * COLUMNS],
    sums: [[f32; COLUMNS]; ROWS],
    left: Vec<u32>,
}
held!(Scratch { left });

impl Default for Scratch {
    fn default() -> Self {
        Self { last: [0; SIDE * COLUMNS], sums: [[0.0; COLUMNS]; ROWS], left: Vec::new() }
    }
}

thread_local! {
    static SCRATCH: ThreadScratch<Scratch> = ThreadScratch::default();
}

/// A left factor, in tiles.
struct Left {
    data: *const u8,
    /// Bytes from row to row, from a tile to that of the next columns, and to that of the next rows.
    strides: [usize; 3],
    /// Tiles next to each other, and below each other.
    tiles: [usize; 2],
}

#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code))]
impl Left {
    /// As it is, if it is made of whole tiles whose rows are in one piece; else in `copy`, filled up with zeros.
    fn new(matrix: Matrix<Bf16>, copy: &mut Vec<u32>) -> Self {
        let [rows, depth] = matrix.shape();
        let tiles = [depth.div_ceil(SIDE * Bf16::PER_LANE), rows.div_ceil(SIDE)];
        let numbers = Numbers::new(matrix);
        let [down, right] = numbers.strides;
        if right == 1 && depth % (SIDE * Bf16::PER_LANE) == 0 && rows % SIDE == 0 {
            let row = down as usize * size_of::<Bf16>();
            let strides = [row, SIDE * size_of::<u32>(), SIDE * row];
            return Self { data: numbers.data.cast(), strides, tiles };
        }
        let row = SIDE * size_of::<u32>();
        let strides = [row, SIDE * row, tiles[0] * SIDE * row];
        let copy = sized(copy, tiles[0] * tiles[1] * SIDE * SIDE);
        // SAFETY: the constructor of the matrix checked that its numbers lie in its slice; AMX comes with AVX-512.
        unsafe { pack_tiles(copy, numbers, rows, depth) };
        Self { data: copy.as_ptr().cast(), strides, tiles }
    }

    /// The first tile of these rows; the last one if there are no such rows.
    fn tile(&self, row: usize) -> *const u8 {
        self.data.wrapping_add((row / SIDE).min(self.tiles[1] - 1) * self.strides[2])
    }
}

/// A strip in tiles of [`SIDE`] rows of pairs.
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code))]
struct Right<'a> {
    whole: &'a [u32],
    /// What is left over, with zeros behind it.
    last: Option<&'a [u32]>,
}

impl<'a> Right<'a> {
    fn new(strip: &'a [u32], last: &'a mut [u32; SIDE * COLUMNS]) -> Self {
        let (whole, rest) = strip.split_at(strip.len() / last.len() * last.len());
        last[..rest.len()].copy_from_slice(rest);
        last[rest.len()..].fill(0);
        Self { whole, last: (!rest.is_empty()).then_some(last) }
    }
}

/// Loads 32 rows and columns of a product from `upper` and, from the 17th row on, from `lower`, its rows `out_bytes` apart; zeros
/// if the register is 0. For `asm!`, with label 3 behind it.
#[cfg(target_arch = "x86_64")]
macro_rules! load_sums {
    ($adds:literal) => {
        concat!(
            "test ",
            $adds,
            ", ",
            $adds,
            "\n",
            "jz 2f\n",
            "tileloadd tmm0, [{upper} + {out_bytes}]\n",
            "tileloadd tmm1, [{upper} + {out_bytes} + 64]\n",
            "tileloadd tmm2, [{lower} + {out_bytes}]\n",
            "tileloadd tmm3, [{lower} + {out_bytes} + 64]\n",
            "jmp 3f\n",
            "2:\n",
            "tilezero tmm0\n",
            "tilezero tmm1\n",
            "tilezero tmm2\n",
            "tilezero tmm3",
        )
    };
}

/// Stores what [`load_sums`] loaded.
#[cfg(target_arch = "x86_64")]
macro_rules! store_sums {
    () => {
        concat!(
            "tilestored [{upper} + {out_bytes}], tmm0\n",
            "tilestored [{upper} + {out_bytes} + 64], tmm1\n",
            "tilestored [{lower} + {out_bytes}], tmm2\n",
            "tilestored [{lower} + {out_bytes} + 64], tmm3",
        )
    };
}

#[cfg(target_arch = "x86_64")]
pub(crate) use {load_sums, store_sums};

/// 32 rows of a product, from row `row` of `a` on, and 32 columns.
///
/// # Safety
/// AMX must be there and set up; `out` must be writable, its rows `columns` numbers apart.
#[cfg(target_arch = "x86_64")]
unsafe fn multiply(a: &Left, row: usize, b: &Right, out: *mut f32, columns: usize, adds: bool) {
    let [row_bytes, step, _] = a.strides;
    let whole = b.whole.len() / (SIDE * COLUMNS);
    let mut left = [a.tile(row), a.tile(row + SIDE)];
    let parts = [(b.whole, whole), (b.last.unwrap_or_default(), usize::from(b.last.is_some()))];
    let mut adds = adds;
    for (right, count) in parts {
        if count == 0 {
            continue;
        }
        // SAFETY: as this function asks; the factors have `count` tiles more.
        unsafe {
            asm!(
                load_sums!("{adds:e}"),
                "3:",
                "tileloadd tmm6, [{right} + {strip_bytes}]",
                "tileloadd tmm4, [{first} + {row_bytes}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{right} + {strip_bytes} + 64]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{second} + {row_bytes}]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {first}, {step}",
                "add {second}, {step}",
                "add {right}, {tile_bytes}",
                "dec {count}",
                "jnz 3b",
                store_sums!(),
                adds = in(reg) u32::from(adds),
                upper = in(reg) out,
                lower = in(reg) out.wrapping_add(SIDE * columns),
                out_bytes = in(reg) columns * size_of::<f32>(),
                first = inout(reg) left[0],
                second = inout(reg) left[1],
                row_bytes = in(reg) row_bytes,
                step = in(reg) step,
                right = inout(reg) right.as_ptr() => _,
                strip_bytes = in(reg) COLUMNS * size_of::<u32>(),
                tile_bytes = const SIDE * COLUMNS * size_of::<u32>(),
                count = inout(reg) count => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
        adds = true;
    }
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn multiply(_a: &Left, _row: usize, _b: &Right, _out: *mut f32, _columns: usize, _adds: bool) {
    unreachable!("has_tiles() is false here");
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::element::Element;

    #[test]
    fn tiles_are_set_up_once_and_released_with_the_last() {
        let (scopes, calls) = (Scopes(Cell::new(0)), RefCell::new(Vec::new()));
        let enter = || scopes.enter(|| calls.borrow_mut().push("set up"));
        let leave = || scopes.leave(|| calls.borrow_mut().push("release"));
        for (step, expected) in [
            (&enter as &dyn Fn(), 1), // the outer
            (&enter, 1),
            (&enter, 1),
            (&leave, 1),
            (&leave, 1), // the outer is still there
            (&enter, 1),
            (&leave, 1),
            (&leave, 2),
            (&enter, 3),
            (&leave, 4),
        ] {
            step();
            assert_eq!(calls.borrow().len(), expected);
        }
        assert_eq!(*calls.borrow(), ["set up", "release", "set up", "release"]);
    }

    #[test]
    fn tiles_multiply_after_others_within_are_dropped() {
        let Some(tiles) = Tiles::set_up() else { return }; // no AMX
        let numbers = vec![Bf16::from_f32(1.0); 64 * 64];
        let matrix = Matrix::dense(&numbers, [64, 64]);
        let mut strips = Vec::new();
        let right = Strips::new(matrix, &mut strips);
        let product = |tiles: &Tiles| {
            let mut out = vec![0.0; 64 * 64];
            tiles.multiply(MatrixMut::dense(&mut out, [64, 64]), matrix, right, false);
            out
        };
        let within = Tiles::set_up().map(|tiles| product(&tiles));
        assert_eq!(within.unwrap(), product(&tiles));
    }
}
