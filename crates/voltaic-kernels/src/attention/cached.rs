//! Attention of the newest token of each sequence over a cache of keys and values, of which only the part is read that is filled.

use std::ffi::c_void;
use std::ops::Range;

use crate::attention::rows::Rows;
use crate::attention::softmax::{OneRow, Scores, WeightedSum};
use crate::element::{Bf16, Element};
use crate::elementwise::pointwise::Convert;
use crate::float8::cast::{Float8Format, from_float8};
use crate::held::held;
use crate::kernel::{LANES, blocks};
use crate::memory::sized;
use crate::processor::run_vectorized;
use crate::scratch::{Scratch, WithScratch};
use crate::threads::parallel_for;
use crate::views::{Dtype, FloatsMut, Shared, slice_mut_of, slice_of};

/// Rows that are read at a time: those of float8 are widened into the first cache.
const ROWS: usize = 64;

/// A format that a cache has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheFormat {
    /// 32 bits.
    Float32,
    /// 16 bits.
    Bfloat16,
    /// 8 bits.
    Float8(Float8Format),
}

/// The keys or the values of all sequences.
#[derive(Debug, Clone, Copy)]
pub struct CachedRows {
    /// Those of the newest token, `[batch, head, dim]`, a row in one piece.
    pub new: *mut c_void,
    /// From batch to batch and from head to head of these, in numbers.
    pub strides: [isize; 2],
    /// All, `[batch, head, slot, dim]`, dense.
    pub cache: *mut c_void,
    /// Of both.
    pub format: CacheFormat,
    /// Numbers of a row.
    pub dim: usize,
    /// What numbers are multiplied by.
    pub scale: f32,
}

/// Attention of one query of each sequence, whose key and value go to the cache.
#[derive(Debug, Clone, Copy)]
pub struct CachedAttention<'a> {
    /// Of queries and output.
    pub dtype: Dtype,
    /// What scores are multiplied with.
    pub scale: f32,
    /// Heads of a sequence.
    pub heads: usize,
    /// Tokens of each sequence that the cache has room for.
    pub capacity: usize,
    /// Where the newest token goes.
    pub slot: usize,
    /// Of each sequence how many tokens it has before the newest one: they lie in the slots before that one's.
    pub positions: &'a [i64],
    /// `[batch, head, dim]`, a row in one piece.
    pub query: *mut c_void,
    /// From batch to batch and from head to head of queries, in numbers.
    pub strides: [isize; 2],
    /// `[batch, head, dim]` of the values, dense.
    pub out: *mut c_void,
    /// The keys.
    pub keys: CachedRows,
    /// The values.
    pub values: CachedRows,
}

/// What a thread needs, to be used again.
#[derive(Debug, Default)]
struct CachedScratch {
    query: Vec<f32>,
    scores: Vec<f32>,
    wide: Vec<f32>,
    out: Vec<f32>,
}
held!(CachedScratch { query, scores, wide, out });

thread_local! {
    static SCRATCH: Scratch<CachedScratch> = Scratch::default();
}

/// Some rows of a cache.
enum SomeRows<'a> {
    Float32(&'a [f32]),
    Bfloat16(&'a [Bf16]),
    Float8(&'a [u8], Float8Format),
}

impl CacheFormat {
    fn bytes(self) -> usize {
        match self {
            Self::Float32 => 4,
            Self::Bfloat16 => 2,
            Self::Float8(_) => 1,
        }
    }
}

impl CachedRows {
    /// Copies the newest row of a head into the cache.
    ///
    /// # Safety
    /// Both must be there, and nothing else use the row in the cache.
    unsafe fn append(&self, head: [usize; 2], row: usize) {
        let bytes = self.format.bytes();
        let from = head[0] as isize * self.strides[0] + head[1] as isize * self.strides[1];
        let from = Shared(self.new.cast::<u8>()).at(from * bytes as isize);
        let to = Shared(self.cache.cast::<u8>()).at((row * self.dim * bytes) as isize);
        // SAFETY: as this function asks.
        unsafe { slice_mut_of(to, self.dim * bytes).copy_from_slice(slice_of(from, self.dim * bytes)) };
    }

    /// # Safety
    /// The rows must be there for `'a`, written by nothing.
    unsafe fn some<'a>(&self, rows: Range<usize>) -> SomeRows<'a> {
        let (start, len) = ((rows.start * self.dim) as isize, rows.len() * self.dim);
        // SAFETY: as this function asks.
        unsafe {
            match self.format {
                CacheFormat::Float32 => SomeRows::Float32(slice_of(Shared(self.cache.cast()).at(start), len)),
                CacheFormat::Bfloat16 => {
                    SomeRows::Bfloat16(slice_of(Shared(self.cache.cast()).at(start), len))
                }
                CacheFormat::Float8(format) => {
                    SomeRows::Float8(slice_of(Shared(self.cache.cast()).at(start), len), format)
                }
            }
        }
    }
}

/// What is done with some rows, in whatever format they are.
trait WithRows {
    fn run<T: Element>(self, rows: Rows<'_, T>);
}

impl SomeRows<'_> {
    fn with(self, dim: usize, wide: &mut Vec<f32>, run: impl WithRows) {
        fn rows<T: Element>(numbers: &[T], dim: usize) -> Rows<'_, T> {
            Rows::new(numbers, [numbers.len() / dim, dim], dim)
        }
        match self {
            Self::Float32(numbers) => run.run(rows(numbers, dim)),
            Self::Bfloat16(numbers) => run.run(rows(numbers, dim)),
            Self::Float8(codes, format) => {
                let wide = sized(wide, codes.len());
                from_float8(codes, FloatsMut::Float32(wide), format, 1.0);
                run.run(rows(wide, dim));
            }
        }
    }
}

struct OfScores<'a> {
    query: &'a [f32],
    scores: &'a mut [f32],
}

impl WithRows for OfScores<'_> {
    fn run<T: Element>(self, key: Rows<'_, T>) {
        run_vectorized(Scores { query: self.query, key, scores: self.scores });
    }
}

struct OfValues<'a> {
    weights: &'a [f32],
    out: &'a mut [f32],
}

impl WithRows for OfValues<'_> {
    fn run<T: Element>(self, value: Rows<'_, T>) {
        run_vectorized(WeightedSum { weights: self.weights, value, out: self.out });
    }
}

/// Puts the newest key and value of each sequence into the cache, and attends to those of the sequence's tokens.
///
/// # Safety
/// All tensors must be there with such sizes and strides and be used by nothing else; `out` and the caches share no memory with others.
///
/// # Panics
/// If the slot is not in the cache, or a sequence has more tokens than slots.
pub unsafe fn attend_cached(call: &CachedAttention) {
    // SAFETY: as this function asks.
    unsafe {
        match call.dtype {
            Dtype::Float32 => attend::<f32>(call),
            Dtype::Bfloat16 => attend::<Bf16>(call),
        }
    }
}

/// A description that threads share.
struct SharedCall<'a>(&'a CachedAttention<'a>);

// SAFETY: threads read the description; `attend` says why what they write is theirs.
unsafe impl Sync for SharedCall<'_> {}

impl SharedCall<'_> {
    fn get(&self) -> &CachedAttention<'_> {
        self.0
    }
}

/// # Safety
/// As [`attend_cached`].
unsafe fn attend<T: Element>(call: &CachedAttention) {
    assert!(call.slot < call.capacity, "slot {} of {}", call.slot, call.capacity);
    let is_known = |position: &i64| usize::try_from(*position).is_ok_and(|position| position <= call.slot);
    assert!(call.positions.iter().all(is_known), "positions {:?} at slot {}", call.positions, call.slot);
    let shared = &SharedCall(call);
    parallel_for(call.positions.len() * call.heads, 1, |part| {
        SCRATCH.with_borrow_mut(|scratch| {
            for item in part {
                // SAFETY: as this function asks; an item has a head of its own in the caches and in the output.
                unsafe { shared.get().head::<T>(item, scratch) };
            }
        });
    });
}

impl CachedAttention<'_> {
    /// # Safety
    /// As [`attend_cached`], of the head number `item`, which nothing else uses.
    unsafe fn head<T: Element>(&self, item: usize, scratch: &mut CachedScratch) {
        let (keys, values) = (&self.keys, &self.values);
        let head = [item / self.heads, item % self.heads];
        let end = item * self.capacity + self.slot + 1;
        let seen = end - 1 - self.positions[head[0]] as usize..end;
        let CachedScratch { query, scores, wide, out } = scratch;
        let query = sized(query, keys.dim);
        let (scores, weights) = {
            let len = seen.len().next_multiple_of(LANES); // compilers are slow at what is left over
            sized(scores, 2 * len).split_at_mut(len)
        };
        let out = sized(out, values.dim);
        let at = head[0] as isize * self.strides[0] + head[1] as isize * self.strides[1];
        // SAFETY: as this function asks, here and below.
        let numbers = unsafe { slice_of(Shared(self.query.cast::<T>()).at(at), keys.dim) };
        run_vectorized(Convert { numbers, copy: query });
        // SAFETY: the row is one of the head's.
        unsafe {
            keys.append(head, end - 1);
            values.append(head, end - 1);
        }
        for rows in blocks(seen.clone(), ROWS) {
            let scores = &mut scores[rows.start - seen.start..rows.end - seen.start];
            // SAFETY: these rows were written before.
            unsafe { keys.some(rows) }.with(keys.dim, wide, OfScores { query, scores });
        }
        let sum =
            run_vectorized(OneRow { scores, weights, visible: seen.len(), scale: self.scale * keys.scale });
        out.fill(0.0);
        for rows in blocks(seen.clone(), ROWS) {
            let weights = &weights[rows.start - seen.start..rows.end - seen.start];
            // SAFETY: as above.
            unsafe { values.some(rows) }.with(values.dim, wide, OfValues { weights, out });
        }
        let factor = values.scale / sum;
        out.iter_mut().for_each(|number| *number *= factor);
        let to = Shared(self.out.cast::<T>()).at((item * values.dim) as isize);
        // SAFETY: the part of the output that is this head's.
        run_vectorized(Convert { numbers: out, copy: unsafe { slice_mut_of(to, values.dim) } });
    }
}
