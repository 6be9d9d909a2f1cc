//! Products of large float32 matrices by Intel's tiles (AMX), which multiply bfloat16. Each number is split in three parts,
//! whose sum it is, and of the nine products of two numbers' parts the six largest are summed up, in float32; the others
//! are too small for it (Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For
//! Higher-Precision Computations", ARITH 2019). Since products of parts are exact, results are as near to the exact ones
//! as those of multiplications in float32.

use std::arch::asm;
use std::arch::x86_64::{
    __m512, __m512i, _CMP_UNORD_Q, _MM_HINT_T1, _mm_prefetch, _mm512_add_epi32, _mm512_and_si512,
    _mm512_castps_si512, _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_fmadd_ps, _mm512_maskz_loadu_epi32,
    _mm512_maskz_loadu_ps, _mm512_or_si512, _mm512_set1_epi32, _mm512_setzero_ps, _mm512_srli_epi32,
    _mm512_store_si512, _mm512_sub_ps,
};
use std::ops::Range;
use std::{ptr, slice};

use crate::kernel::blocks;
use crate::memory::sized;
use crate::processor::lanes::LANES;
use crate::processor::run_vectorized;
use crate::product::amx::{Tiles, load_sums, store_sums};
use crate::product::gemm::Product;
use crate::product::matrix::MatrixMut;
use crate::product::strips::{COLUMNS, Numbers, Store, transpose};
use crate::scratch::{Scratch as ThreadScratch, WithScratch};

/// Lines of a panel, numbers of each that go into one product of tiles, and so rows and columns of a block of the product.
pub(crate) const SIDE: usize = 2 * LANES;
/// Parts of a number.
const PARTS: usize = 3;
/// Pairs of bfloat16 in a tile.
const TILE: usize = LANES * LANES;
/// Those of [`SIDE`] numbers of each line of a panel.
const STEP: usize = 2 * PARTS * TILE;

/// The most numbers that are summed up before a block goes to memory.
const MAX_DEPTH: usize = 384;
/// Rows of the left factor whose panels are kept, and columns of the right one, whose panels the second cache holds.
const MAX_LINES: [usize; 2] = [1024, 384];

thread_local! {
    /// Panels of the left and the right factor.
    static PANELS: ThreadScratch<[Vec<u32>; 2]> = ThreadScratch::default();
}

impl Tiles {
    /// Computes a product on this thread. Returns whether all its numbers are finite; if not, some may be wrong, since
    /// infinity is not the sum of parts.
    ///
    /// # Safety
    /// As for [`Product::run`]. The columns of `out` must be next to each other, and rows or columns of each factor.
    pub(crate) unsafe fn multiply_split(&self, product: &Product) -> bool {
        let [rows, columns, depth] = product.shape;
        let [max_rows, max_columns] = MAX_LINES;
        let deep = depth.div_ceil(depth.div_ceil(MAX_DEPTH)).next_multiple_of(SIDE);
        let mut parts = blocks(0..rows, max_rows)
            .flat_map(|rows| blocks(0..depth, deep).map(move |depth| [rows.clone(), depth]))
            .flat_map(|[rows, depth]| {
                blocks(0..columns, max_columns).map(move |columns| [rows.clone(), columns, depth.clone()])
            })
            .map(|place| Part { product, order: Order::AllAtOnce, place })
            .peekable();
        PANELS.with_borrow_mut(|panels| {
            let mut is_finite = true;
            while let (true, Some(part)) = (is_finite, parts.next()) {
                // SAFETY: as this function asks; who has tiles has AVX-512.
                is_finite = unsafe { part.run(panels, parts.peek()) };
            }
            is_finite
        })
    }
}

/// `out = a b`, or `out += a b` if `adds`, by panels.
///
/// # Safety
/// As for [`multiply_split`](Tiles::multiply_split); the panels must be of the rows of `a`, packed as a left factor, and of the
/// columns of `b`, as a right one, both of `depth` numbers.
pub(crate) unsafe fn multiply_panels(out: MatrixMut, depth: usize, [a, b]: [&[u32]; 2], adds: bool) {
    let ([rows, columns], nothing) = (out.shape(), ptr::null());
    let (out, to_out) = out.into_parts();
    let shape = [rows, columns, depth];
    let product = Product { shape, out, a: nothing, b: nothing, strides: [to_out, [0; 2], [0; 2]], adds };
    let part = Part { product: &product, order: Order::SmallFirst, place: shape.map(|len| 0..len) };
    let (panel, bands) = (panel_len(depth), rows.div_ceil(SIDE));
    for (strip, j) in b.chunks_exact(panel).zip((0..).step_by(SIDE)) {
        let next_strip = strip.as_ptr_range().end;
        for (band, i) in a.chunks_exact(panel).zip((0..).step_by(SIDE)) {
            let soon = [
                Soon::NOTHING,
                Soon::of_panel(next_strip, panel, i / SIDE, bands),
                part.soon([i, j], panel / STEP),
            ];
            // SAFETY: as this function asks.
            unsafe { part.run_block([i, j], [band, strip], &soon) };
        }
    }
}

/// Places of 32 bits of a panel: of [`SIDE`] lines of `depth` numbers.
pub(crate) fn panel_len(depth: usize) -> usize {
    depth.div_ceil(SIDE) * STEP
}

/// How products of parts are added up.
#[derive(Debug, Clone, Copy)]
enum Order {
    /// All of a step, for which its parts are loaded once.
    AllAtOnce,
    /// The small ones of all steps, which round less while the sums are small, too; then the large ones: half the
    /// error.
    SmallFirst,
}

/// What some numbers of some rows and columns add to a product.
struct Part<'a> {
    product: &'a Product,
    order: Order,
    /// Rows, columns, depth.
    place: [Range<usize>; 3],
}

impl Part<'_> {
    /// The rows of the left factor.
    fn left(&self) -> Lines {
        let ([rows, _, depth], [_, strides, _]) = (&self.place, self.product.strides);
        let all = Numbers { data: self.product.a, strides };
        Lines { numbers: all.at([rows.start, depth.start]), count: rows.len(), depth: depth.len() }
    }

    /// The columns of the right one.
    fn right(&self) -> Lines {
        let ([_, columns, depth], [_, _, strides]) = (&self.place, self.product.strides);
        let all = Numbers { data: self.product.b, strides }.transposed();
        Lines { numbers: all.at([columns.start, depth.start]), count: columns.len(), depth: depth.len() }
    }

    /// The place of a row and a column in the product.
    fn out(&self, [i, j]: [usize; 2]) -> *mut f32 {
        let ([rows, columns, _], [down, _]) = (&self.place, self.product.strides[0]);
        self.product.out.wrapping_offset((rows.start + i) as isize * down).wrapping_add(columns.start + j)
    }

    /// The block after the one of such a row and column, in such a number of steps.
    fn soon(&self, [i, j]: [usize; 2], steps: usize) -> Soon {
        let next = if j + SIDE < self.place[1].len() { [i, j + SIDE] } else { [i + SIDE, 0] };
        let (pairs, down) = (SIDE.div_ceil(steps), self.product.strides[0][0]);
        Soon::new(self.out(next).cast_const(), pairs, [down, pairs as isize * down])
    }

    /// Returns whether all numbers are finite, if they are complete.
    ///
    /// # Safety
    /// As for [`Tiles::multiply_split`], with tiles set up. Whoever is not the first part of its rows finds these in `panels`.
    #[target_feature(enable = "avx512f")]
    unsafe fn run(&self, [left, right]: &mut [Vec<u32>; 2], next: Option<&Self>) -> bool {
        let [rows, columns, depth] = &self.place;
        let panel = panel_len(depth.len());
        let [bands, strips] = [rows, columns].map(|lines| lines.len().div_ceil(SIDE));
        let (left, right) = (sized(left, bands * panel), sized(right, strips * panel));
        for (strip, j) in right.chunks_exact_mut(panel).zip((0..).step_by(SIDE)) {
            // SAFETY: as this function asks.
            unsafe { self.right().from(j).pack(strip, Factor::Right) };
        }
        let mut zeros = [_mm512_setzero_ps(); 2];
        for (band, i) in left.chunks_exact_mut(panel).zip((0..).step_by(SIDE)) {
            let lines = self.left().from(i);
            let is_first = columns.start == 0;
            if is_first {
                // SAFETY: as this function asks.
                unsafe { lines.pack(band, Factor::Left) };
            }
            let next_band = band.as_ptr_range().end;
            for (j, strip) in right.chunks_exact(panel).enumerate() {
                let soon = [
                    if is_first {
                        Soon::of_lines(lines.from(SIDE), j, strips)
                    } else {
                        Soon::of_panel(next_band, panel, j, strips)
                    },
                    next.map_or(Soon::NOTHING, |next| {
                        Soon::of_lines(next.right().from(j * SIDE), i / SIDE, bands)
                    }),
                    self.soon([i, j * SIDE], panel / STEP),
                ];
                // SAFETY: as this function asks.
                unsafe {
                    self.run_block([i, j * SIDE], [band, strip], &soon);
                    self.add_zeros([i, j * SIDE], &mut zeros);
                }
            }
        }
        let is_complete = depth.end == self.product.shape[2];
        !is_complete || zeros.iter().all(|zero| _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(*zero, *zero) == 0)
    }

    /// The block from such a row and column on, by panels.
    ///
    /// # Safety
    /// As for [`run`](Self::run), with panels of such rows and columns.
    #[target_feature(enable = "avx512f")]
    unsafe fn run_block(&self, place: [usize; 2], panels: [&[u32]; 2], soon: &[Soon; 3]) {
        let down = self.product.strides[0][0];
        let (out, adds) = (self.out(place), self.product.adds || self.place[2].start > 0);
        let [height, width] = self.size_of_block(place);
        // SAFETY: as this function asks; a block that is not whole is computed beside the product.
        unsafe {
            if [height, width] == [SIDE; 2] {
                multiply(self.order, panels, out, down, adds, soon);
            } else {
                let mut tile = [[0.0; COLUMNS]; SIDE];
                let sums = tile.as_flattened_mut().as_mut_ptr();
                multiply(self.order, panels, sums, COLUMNS as isize, false, soon);
                let out = slice::from_raw_parts_mut(out, (height - 1) * down as usize + width);
                run_vectorized(Store { tile: &tile[..height], width, out, columns: down as usize, adds });
            }
        }
    }

    /// Adds the numbers of a block times 0, which is NaN if one is not finite.
    ///
    /// # Safety
    /// As for [`run_block`](Self::run_block), which must have written the numbers.
    #[target_feature(enable = "avx512f")]
    unsafe fn add_zeros(&self, place: [usize; 2], zeros: &mut [__m512; 2]) {
        let ([height, width], down) = (self.size_of_block(place), self.product.strides[0][0]);
        let mask = u32::MAX >> (SIDE - width);
        for row in 0..height {
            for (half, zero) in zeros.iter_mut().enumerate() {
                let place = self.out(place).wrapping_offset(row as isize * down).wrapping_add(half * LANES);
                // SAFETY: the mask leaves out columns that are not there.
                let numbers = unsafe { _mm512_maskz_loadu_ps((mask >> (half * LANES)) as u16, place) };
                *zero = _mm512_fmadd_ps(numbers, _mm512_setzero_ps(), *zero);
            }
        }
    }

    /// Rows and columns of the block from such a row and column on.
    fn size_of_block(&self, [i, j]: [usize; 2]) -> [usize; 2] {
        [self.place[0].len() - i, self.place[1].len() - j].map(|rest| SIDE.min(rest))
    }
}

/// Which factor of a product lines are of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Factor {
    /// Its rows.
    Left,
    /// Its columns.
    Right,
}

/// Rows of a left factor, or columns of a right one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lines {
    /// Strides from line to line, and along a line; one of them is 1.
    pub numbers: Numbers<f32>,
    pub count: usize,
    pub depth: usize,
}

impl Lines {
    /// Without the first lines.
    pub fn from(self, first: usize) -> Self {
        Self { numbers: self.numbers.at_row(first), count: self.count.saturating_sub(first), ..self }
    }

    /// Brings the first [`SIDE`] lines, filled up with zeros, into a panel: `panel[step of 32 numbers][half of the lines]
    /// [part][row of a tile][pair]`. A pair is of numbers 16 apart; rows of a tile are lines of a left factor with pairs of
    /// their numbers, or for a right one pairs of numbers of all lines.
    ///
    /// # Safety
    /// The numbers must be readable; the processor must have AVX-512; the panel must be aligned to 64 bytes.
    #[target_feature(enable = "avx512f")]
    pub unsafe fn pack(&self, panel: &mut [u32], factor: Factor) {
        let is_along_line = self.numbers.strides[1] == 1;
        let is_turned = is_along_line != (factor == Factor::Left);
        for (step, first) in panel.chunks_exact_mut(STEP).zip((0..).step_by(SIDE)) {
            for (tiles, line) in step.chunks_exact_mut(PARTS * TILE).zip([0, LANES]) {
                let squares = [first, first + LANES].map(|first| self.square([line, first], is_along_line));
                let mut store = |row: usize, numbers: [__m512i; 2]| {
                    for (tile, part) in tiles.chunks_exact_mut(TILE).zip(split(numbers)) {
                        // SAFETY: a row has 512 bits, and the panel is aligned.
                        unsafe { _mm512_store_si512(tile[row * LANES..][..LANES].as_mut_ptr().cast(), part) };
                    }
                };
                // SAFETY: as this function asks.
                let vector = |half: usize, i: usize| unsafe { squares[half].vector(i) };
                if is_turned {
                    let columns = [0, 1].map(|half| transpose(std::array::from_fn(|i| vector(half, i))));
                    (0..LANES).for_each(|i| store(i, columns.map(|columns| columns[i])));
                } else {
                    (0..LANES).for_each(|i| store(i, [0, 1].map(|half| vector(half, i))));
                }
            }
        }
    }

    /// 16 lines, and as many of their numbers.
    fn square(&self, [line, first]: [usize; 2], is_along_line: bool) -> Square {
        let [to_line, to_next] = self.numbers.strides;
        let (lines, numbers) = (self.count.saturating_sub(line), self.depth.saturating_sub(first));
        let (stride, [count, len]) =
            if is_along_line { (to_line, [lines, numbers]) } else { (to_next, [numbers, lines]) };
        Square {
            data: self.numbers.at([line, first]).data,
            stride,
            count,
            mask: u16::MAX.checked_shr(LANES.saturating_sub(len) as u32).unwrap_or(0),
            soon: SIDE as isize * to_next,
        }
    }
}

/// 16 vectors in memory.
struct Square {
    data: *const f32,
    /// From vector to vector.
    stride: isize,
    /// Vectors, and numbers of each, that are there.
    count: usize,
    mask: u16,
    /// From a vector to that which takes its place in the next step.
    soon: isize,
}

impl Square {
    /// A vector, filled up with zeros; asks for the one of the next step.
    ///
    /// # Safety
    /// Those that are there must be readable; the processor must have AVX-512.
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn vector(&self, i: usize) -> __m512i {
        let data = self.data.wrapping_offset(i as isize * self.stride);
        // SAFETY: the mask leaves out what is not there; asking for memory is a hint, which does nothing if there is none.
        unsafe {
            _mm_prefetch::<_MM_HINT_T1>(data.wrapping_offset(self.soon).cast());
            _mm512_maskz_loadu_epi32(if i < self.count { self.mask } else { 0 }, data.cast())
        }
    }
}

/// Pairs of the upper, middle and lower parts of numbers, the first ones' in the lower half: what is left over of a number
/// is rounded to bfloat16, halves away from zero, and then subtracted, twice; the rest is a bfloat16.
#[target_feature(enable = "avx512f")]
#[inline]
fn split(numbers: [__m512i; 2]) -> [__m512i; PARTS] {
    let (half, upper) = (_mm512_set1_epi32(0x8000), _mm512_set1_epi32(!0xffff));
    let mut rest = numbers.map(|numbers| _mm512_castsi512_ps(numbers));
    let mut round = || {
        let rounded =
            rest.map(|rest| _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(rest), half), upper));
        for (rest, rounded) in rest.iter_mut().zip(rounded) {
            *rest = _mm512_sub_ps(*rest, _mm512_castsi512_ps(rounded));
        }
        pair(rounded)
    };
    let (first, second) = (round(), round());
    let [low, high] = rest.map(|rest| _mm512_castps_si512(rest));
    [first, second, pair([low, _mm512_and_si512(high, upper)])]
}

/// The upper halves of numbers; the lower ones of the second must be 0.
#[target_feature(enable = "avx512f")]
#[inline]
fn pair([first, second]: [__m512i; 2]) -> __m512i {
    _mm512_or_si512(_mm512_srli_epi32::<16>(first), second)
}

/// Loads a part of a factor, by its place in a step in bytes: of the first half of the lines, and of the second.
macro_rules! load {
    ($first:literal, $second:literal, $factor:literal, $place:literal) => {
        concat!(
            "tileloadd ",
            $first,
            ", [",
            $factor,
            " + {row} + ",
            $place,
            "]\n",
            "tileloadd ",
            $second,
            ", [",
            $factor,
            " + {row} + ",
            $place,
            " + 3072]",
        )
    };
}

/// Loads a part of the left factor.
macro_rules! left {
    ($place:literal) => {
        load!("tmm4", "tmm5", "{left}", $place)
    };
}

/// Loads a part of the right factor.
macro_rules! right {
    ($place:literal) => {
        load!("tmm6", "tmm7", "{right}", $place)
    };
}

/// Adds the products of the parts that are loaded.
macro_rules! products {
    () => {
        concat!(
            "tdpbf16ps tmm0, tmm4, tmm6\n",
            "tdpbf16ps tmm1, tmm4, tmm7\n",
            "tdpbf16ps tmm2, tmm5, tmm6\n",
            "tdpbf16ps tmm3, tmm5, tmm7",
        )
    };
}

/// Lines of the cache that are asked for while a block is worked on: pairs of them, some in each step. Asked for at once
/// they would hold it up.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Soon {
    at: *const u8,
    /// Pairs of a step.
    pairs: usize,
    /// Bytes from pair to pair, and from the last one of a step to the first of the next.
    strides: [isize; 2],
}

impl Soon {
    /// What is never there.
    const NOTHING: Self = Self { at: ptr::null(), pairs: 1, strides: [0; 2] };

    /// From pair to pair, and from the first one of a step to that of the next, in numbers.
    fn new<T>(at: *const T, pairs: usize, strides: [isize; 2]) -> Self {
        let [stride, step] = strides.map(|stride| stride * size_of::<T>() as isize);
        Self { at: at.cast(), pairs, strides: [stride, step - pairs as isize * stride] }
    }

    /// The `turn`th of `turns` parts of the first [`SIDE`] lines: in each step the [`SIDE`] numbers of the lines that the same
    /// step of a panel has.
    fn of_lines(lines: Lines, turn: usize, turns: usize) -> Self {
        let [to_line, to_next] = lines.numbers.strides;
        let along_line = (to_line, SIDE as isize);
        let (stride, step) = if to_next == 1 { along_line } else { (to_next, SIDE as isize * to_next) };
        let pairs = SIDE.div_ceil(turns);
        Self::new(lines.numbers.data.wrapping_offset((turn * pairs) as isize * stride), pairs, [stride, step])
    }

    /// The `turn`th of `turns` parts of a panel.
    fn of_panel(panel: *const u32, len: usize, turn: usize, turns: usize) -> Self {
        const PAIR: usize = 2 * LANES;
        let pairs = (STEP / PAIR).div_ceil(turns);
        Self::new(
            panel.wrapping_add(turn * len / turns),
            pairs,
            [PAIR, pairs * PAIR].map(|stride| stride as isize),
        )
    }
}

/// Asks for the lines of a step.
macro_rules! ask {
    ($prefetch:literal, $at:literal, $offset:literal) => {
        concat!(
            "mov {count}, [{soon} + ",
            $offset,
            " + 8]\n",
            "4:\n",
            $prefetch,
            " [",
            $at,
            "]\n",
            $prefetch,
            " [",
            $at,
            " + 64]\n",
            "add ",
            $at,
            ", [{soon} + ",
            $offset,
            " + 16]\n",
            "dec {count}\n",
            "jnz 4b\n",
            "add ",
            $at,
            ", [{soon} + ",
            $offset,
            " + 24]",
        )
    };
}

/// The product of two panels, [`SIDE`] rows and columns of it. Asks for memory: of the left factor, of the right one, and of
/// the product, to write to it.
///
/// # Safety
/// Tiles must be set up; panels must be of one length; `out` must be writable, its rows `down` numbers apart.
unsafe fn multiply(
    order: Order,
    [left, right]: [&[u32]; 2],
    out: *mut f32,
    down: isize,
    adds: bool,
    soon: &[Soon; 3],
) {
    // where the second turn ends, if there is one
    let first = match order {
        Order::AllAtOnce => ptr::null(),
        Order::SmallFirst => right.as_ptr(),
    };
    // SAFETY: as this function asks.
    unsafe {
        asm!(
            load_sums!("{count:e}"),
            "3:",
            left!("0"),
            "test {first}, {first}",
            "jnz 5f",
            right!("0"), products!(),
            "5:",
            ask!("prefetcht1", "{left_soon}", "0"),
            right!("2048"), products!(),
            right!("1024"), products!(),
            ask!("prefetcht1", "{right_soon}", "32"),
            left!("1024"), products!(),
            right!("0"), products!(),
            ask!("prefetchw", "{out_soon}", "64"),
            left!("2048"), products!(),
            "add {left}, {step}",
            "add {right}, {step}",
            "dec {steps}",
            "jnz 3b",
            "test {first}, {first}",
            "jz 7f",
            "6:", // backwards
            "sub {left}, {step}",
            "sub {right}, {step}",
            left!("0"), right!("0"), products!(),
            "cmp {right}, {first}",
            "jnz 6b",
            "7:",
            store_sums!(),
            count = inout(reg) u64::from(adds) => _, // afterwards it counts pairs
            upper = in(reg) out,
            lower = in(reg) out.wrapping_offset(LANES as isize * down),
            out_bytes = in(reg) down * size_of::<f32>() as isize,
            left = inout(reg) left.as_ptr() => _,
            right = inout(reg) right.as_ptr() => _,
            first = in(reg) first,
            row = in(reg) LANES * size_of::<u32>(),
            step = const STEP * size_of::<u32>(),
            steps = inout(reg) left.len() / STEP => _,
            soon = in(reg) soon.as_ptr(),
            left_soon = inout(reg) soon[0].at => _,
            right_soon = inout(reg) soon[1].at => _,
            out_soon = inout(reg) soon[2].at => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}
