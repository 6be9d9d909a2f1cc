//! Convolutions of 3 x 3 by Winograd's minimal filtering: transformed tiles of images, times transformed weights, place by
//! place of the tiles. The products of many channels are by Intel's tiles (AMX) where they are.
//!
//! What is infinite or no number reaches all outputs of its tile, and sums of pixels overflow before an output does. So each
//! function tells whether all that it wrote is finite; else another is to compute it.

use std::array;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::choice::{Part, tiles_are_by_amx};
use crate::convolution::sizes::{Convolution, parts};
use crate::convolution::tiling::{Places, Tiling};
use crate::convolution::winograd::{Filtering, OutputTiles, TransformTiles, TransformWeights, WeightGrads};
use crate::held::held;
use crate::kernel::blocks;
use crate::memory::sized;
use crate::processor::lanes::LANES;
use crate::processor::run_vectorized;
use crate::product::amx::Tiles;
use crate::product::matrix::{Matrix, MatrixMut};
use crate::product::panels::Panels;
use crate::product::strip::multiply_by_strips;
use crate::product::strips::{COLUMNS, Strips};
use crate::scratch::{Scratch as ThreadScratch, WithScratch};
use crate::threads::{parallel_for, threads_for};
use crate::views::Shared;

/// Numbers of a channel that a thread works on at a time: of 64 channels they lie in the second cache in all their places, of
/// more in one.
const MAX_NUMBERS: usize = 2048;
/// Tiles that a thread sums up at a time for gradients of weights: with fewer, sums of many weights come and go too often.
const SUMMED_TILES: usize = 128;
/// Tiles that are worth a thread.
const MIN_TILES: usize = 32;
/// Numbers of all threads' sums: 128 MB.
const MAX_SUMS: usize = 1 << 25;
/// Weights of a kernel.
const TAPS: usize = 9;

thread_local! {
    static SCRATCH: ThreadScratch<Scratch> = ThreadScratch::default();
    /// What the threads of an operator share: transformed weights, or sums of their gradients.
    static SHARED: ThreadScratch<Vec<f32>> = ThreadScratch::default();
    /// The weights for AMX.
    static PANELS: ThreadScratch<Vec<u32>> = ThreadScratch::default();
    /// Weights in float32, if they are in another format.
    static NUMBERS: ThreadScratch<Vec<f32>> = ThreadScratch::default();
}

/// What a thread needs for its work, to be used again.
#[derive(Default)]
struct Scratch {
    /// Transformed tiles of images.
    tiles: Vec<f32>,
    /// Transformed tiles of gradients.
    grads: Vec<f32>,
    /// Sums in all places.
    sums: Vec<f32>,
    /// Of the left factor of a product by AMX.
    left_panels: Vec<u32>,
    /// Of the right one.
    right_panels: Vec<u32>,
    /// Weights of a strip, tap by tap.
    taps: [Vec<u32>; TAPS],
}
held!(Scratch { tiles, grads, sums, left_panels, right_panels, taps });

/// What the weights are read for.
#[derive(Clone, Copy)]
enum Direction {
    /// From inputs to outputs.
    Forward,
    /// From gradients of outputs to those of inputs.
    Backward,
}

// ---- outputs, and gradients of inputs ----

pub(crate) fn output<T: Filtering<N, M>, const N: usize, const M: usize>(
    call: &Convolution,
    input: &[T],
    weight: &[T],
    bias: Option<&[T]>,
    out: Shared<T>,
) -> bool {
    let to = Tiling::of_outputs(call.out_size, call.out_channels, M);
    let first = -(call.padding[0] as isize);
    let from = Tiling { size: call.in_size, channels: call.in_channels, first, ..to };
    NUMBERS.with_borrow_mut(|numbers| {
        let weight = T::widened(weight, numbers);
        let direction = Direction::Forward;
        Correlation { direction, images: call.images, input, from, weight, bias, out, to }.run()
    })
}

pub(crate) fn input_grad<T: Filtering<N, M>, const N: usize, const M: usize>(
    call: &Convolution,
    grad: &[T],
    weight: &[T],
    out: Shared<T>,
) -> bool {
    let to = Tiling::of_outputs(call.in_size, call.in_channels, M);
    let first = call.padding[0] as isize - 2;
    let from = Tiling { size: call.out_size, channels: call.out_channels, first, ..to };
    NUMBERS.with_borrow_mut(|numbers| {
        let weight = T::widened(weight, numbers);
        let direction = Direction::Backward;
        Correlation { direction, images: call.images, input: grad, from, weight, bias: None, out, to }.run()
    })
}

struct Correlation<'a, T, const N: usize, const M: usize> {
    direction: Direction,
    images: usize,
    input: &'a [T],
    /// How the input is cut.
    from: Tiling,
    /// `[outputs, 3, 3, inputs]` of the convolution
    weight: &'a [f32],
    bias: Option<&'a [T]>,
    /// Dense; nothing else uses it.
    out: Shared<T>,
    /// How the output is cut.
    to: Tiling,
}

impl<T: Filtering<N, M>, const N: usize, const M: usize> Correlation<'_, T, N, M> {
    const PLACES: usize = N * N;

    /// Whether all outputs are finite.
    fn run(&self) -> bool {
        SHARED.with_borrow_mut(|numbers| {
            let places = Places::in_strips([self.from.channels, self.to.channels]);
            let numbers = sized(numbers, Self::PLACES * places.step());
            self.transform_weights(Shared(numbers.as_mut_ptr()), places);
            PANELS.with_borrow_mut(|panels| self.compute_all(Weights::new(places, numbers, panels)))
        })
    }

    fn compute_all(&self, weights: Weights) -> bool {
        let [rows, columns] = self.to.tiles;
        let are_finite = AtomicBool::new(true);
        parallel_for(self.images * rows, MIN_TILES.div_ceil(columns), |part| {
            SCRATCH.with_borrow_mut(|scratch| {
                for rows in blocks(part, (MAX_NUMBERS / Self::PLACES).div_ceil(columns)) {
                    if !self.compute(rows, weights, scratch) {
                        are_finite.store(false, Ordering::Relaxed);
                    }
                }
            });
        });
        are_finite.into_inner()
    }

    /// Writes all places.
    fn transform_weights(&self, out: Shared<f32>, places: Places) {
        let [depth, width] = places.shape;
        parallel_for(width.div_ceil(COLUMNS), 1, |strips| {
            SCRATCH.with_borrow_mut(|Scratch { taps, .. }| {
                for strip in strips {
                    let columns = strip * COLUMNS..((strip + 1) * COLUMNS).min(width);
                    let taps = self.taps(columns, taps);
                    let place = |place: usize| {
                        let start = place * places.step() + strip * depth * COLUMNS;
                        // SAFETY: there are as many numbers; each strip is written by one thread, in each place.
                        unsafe { out.slice_mut(start..start + depth * COLUMNS) }
                    };
                    let out = array::from_fn(|i| array::from_fn(|j| place(i * N + j)));
                    run_vectorized(TransformWeights::<T, N, M> { taps, out, format: PhantomData });
                }
            });
        });
    }

    /// The weights of some columns, tap by tap: `[from][columns]`, with 0 in columns that are not there.
    fn taps<'a>(&self, columns: Range<usize>, strips: &'a mut [Vec<u32>; TAPS]) -> [&'a [f32]; TAPS] {
        let (depth, width) = (self.from.channels, self.to.channels);
        let mut all = strips.iter_mut().enumerate();
        array::from_fn(|_| {
            let (tap, strips) = all.next().expect("one for each tap");
            let (first, strides) = match self.direction {
                Direction::Forward => ((columns.start * TAPS + tap) * depth, [1, TAPS * depth]),
                Direction::Backward => ((TAPS - 1 - tap) * width + columns.start, [TAPS * width, 1]),
            };
            let tap = Matrix::new(&self.weight[first..], [depth, columns.len()], strides);
            Strips::new(tap, strips).numbers()
        })
    }

    fn compute(&self, rows: Range<usize>, weights: Weights, scratch: &mut Scratch) -> bool {
        let [depth, width] = weights.places.shape;
        let tiles = rows.len() * self.to.tiles[1];
        let (of_inputs, of_sums) = (Places::in_rows([tiles, depth]), Places::in_rows([tiles, width]));
        let inputs = sized(&mut scratch.tiles, Self::PLACES * of_inputs.step());
        run_vectorized(TransformTiles {
            images: self.input,
            tiling: self.from,
            are_grads: false,
            rows: rows.clone(),
            places: of_inputs,
            out: inputs,
        });
        let sums = sized(&mut scratch.sums, Self::PLACES * of_sums.step());
        let amx = weights.panels.and_then(|_| Tiles::set_up());
        let all = sums.chunks_exact_mut(of_sums.step()).zip(of_inputs.of(inputs));
        for (place, (sums, inputs)) in all.enumerate() {
            let sums = MatrixMut::dense(&mut sums[..of_sums.len()], of_sums.shape);
            let inputs = Matrix::dense(inputs, of_inputs.shape);
            match (&amx, weights.panels(place)) {
                (Some(amx), Some(weights)) => {
                    let inputs = Panels::of_rows(inputs, &mut scratch.left_panels);
                    amx.multiply_panels(sums, inputs, weights, false);
                }
                _ => multiply_by_strips(sums, inputs, weights.strips(place), false),
            }
        }
        let lines = self.to.lines(&rows);
        let line = self.to.size[1] * width;
        // SAFETY: `out` is dense and has all images; each row of tiles has lines of its own.
        let out = unsafe { self.out.slice_mut(lines.start * line..lines.end * line) };
        run_vectorized(OutputTiles { sums, tiling: self.to, rows, bias: self.bias, out })
    }
}

/// Transformed weights, in all places.
#[derive(Clone, Copy)]
struct Weights<'a> {
    places: Places,
    numbers: &'a [f32],
    /// For AMX, if that is the faster.
    panels: Option<&'a [u32]>,
}

impl<'a> Weights<'a> {
    fn new(places: Places, numbers: &'a [f32], panels: &'a mut Vec<u32>) -> Self {
        let weights = Self { places, numbers, panels: None };
        if !tiles_are_by_amx(Part::Output, places.shape) {
            return weights;
        }
        let (count, len) = (numbers.len() / places.step(), weights.panels_len());
        let panels = sized(panels, count * len);
        let all = Shared(panels.as_mut_ptr());
        parallel_for(count, 1, |some| {
            for place in some {
                // SAFETY: there are panels for all places, and each is written once.
                let panels = unsafe { all.slice_mut(place * len..(place + 1) * len) };
                Panels::of_strips(weights.strips(place), panels);
            }
        });
        Self { panels: Some(panels), ..weights }
    }

    fn strips(&self, place: usize) -> Strips<'a, f32> {
        let numbers = &self.numbers[place * self.places.step()..][..self.places.len()];
        Strips::of_numbers(numbers, self.places.shape)
    }

    fn panels(&self, place: usize) -> Option<Panels<'a>> {
        let len = self.panels_len();
        let panels = &self.panels?[place * len..(place + 1) * len];
        Some(Panels::of_numbers(panels, self.places.shape))
    }

    /// Of the panels of a place.
    fn panels_len(&self) -> usize {
        let [depth, width] = self.places.shape;
        Panels::len(width, depth)
    }
}

// ---- gradients of weights ----

pub(crate) fn weight_grad<T: Filtering<N, M>, const N: usize, const M: usize>(
    call: &Convolution,
    grad: &[T],
    input: &[T],
    out: Shared<T>,
) -> bool {
    let grads = Tiling::of_outputs(call.out_size, call.out_channels, M);
    let first = -(call.padding[0] as isize);
    let inputs = Tiling { size: call.in_size, channels: call.in_channels, first, ..grads };
    WeightGrad { images: call.images, grad, grads, input, inputs, out }.run()
}

struct WeightGrad<'a, T, const N: usize, const M: usize> {
    images: usize,
    grad: &'a [T],
    grads: Tiling,
    input: &'a [T],
    inputs: Tiling,
    /// Dense `[outputs, 3, 3, inputs]`; nothing else uses it.
    out: Shared<T>,
}

/// What a thread sums up: some rows of tiles for some outputs.
struct Share {
    rows: Range<usize>,
    outputs: Range<usize>,
}

impl<T: Filtering<N, M>, const N: usize, const M: usize> WeightGrad<'_, T, N, M> {
    const PLACES: usize = N * N;

    /// How sums lie.
    fn of_sums(&self) -> Places {
        Places::in_rows([self.grads.channels, self.inputs.channels])
    }

    /// Each thread sums up some of the tiles, for all outputs unless the sums would be too many; then all sums are added.
    /// Gives whether all gradients are finite.
    fn run(&self) -> bool {
        let (outputs, inputs) = (self.grads.channels, self.inputs.channels);
        let places = self.of_sums();
        let len = Self::PLACES * places.step();
        let [rows, columns] = self.grads.tiles;
        let rows = self.images * rows;
        let threads = threads_for(rows, MIN_TILES.div_ceil(columns));
        let most = threads.min(MAX_SUMS / len).max(1);
        let [parts, part] = parts(rows, most);
        let group = outputs.div_ceil(threads / parts).next_multiple_of(LANES);
        let shares: Vec<_> = blocks(0..rows, part)
            .flat_map(|rows| {
                blocks(0..outputs, group).map(move |outputs| Share { rows: rows.clone(), outputs })
            })
            .collect();
        let groups = outputs.div_ceil(group);
        SHARED.with_borrow_mut(|sums| {
            let sums = sized(sums, parts * len);
            let all = Shared(sums.as_mut_ptr());
            parallel_for(shares.len(), 1, |some| {
                SCRATCH.with_borrow_mut(|scratch| {
                    for share in some {
                        let first = share / groups * len;
                        self.sum(&shares[share], all, first, scratch);
                    }
                });
            });
            let (sums, are_finite) = (&*sums, AtomicBool::new(true));
            parallel_for(outputs, COLUMNS, |outputs| {
                let start = outputs.start * inputs;
                // SAFETY: `out` has all weights; each thread writes those of other outputs.
                let out = unsafe { self.out.slice_mut(TAPS * start..TAPS * outputs.end * inputs) };
                if !run_vectorized(WeightGrads { sums, places, outputs, out }) {
                    are_finite.store(false, Ordering::Relaxed);
                }
            });
            are_finite.into_inner()
        })
    }

    /// Writes the sums of a share; those of its rows start with number `first`.
    fn sum(&self, share: &Share, all: Shared<f32>, first: usize, scratch: &mut Scratch) {
        let (outputs, inputs, columns) = (self.grads.channels, self.inputs.channels, self.grads.tiles[1]);
        let of_sums = self.of_sums();
        let amx = tiles_are_by_amx(Part::WeightGrad, of_sums.shape).then(Tiles::set_up).flatten();
        for rows in blocks(share.rows.clone(), SUMMED_TILES.div_ceil(columns)) {
            let (tiles, adds) = (rows.len() * columns, rows.start > share.rows.start);
            let (of_grads, of_pixels) =
                (Places::in_rows([tiles, outputs]), Places::in_strips([tiles, inputs]));
            let grads = sized(&mut scratch.grads, Self::PLACES * of_grads.step());
            run_vectorized(TransformTiles {
                images: self.grad,
                tiling: self.grads,
                are_grads: true,
                rows: rows.clone(),
                places: of_grads,
                out: grads,
            });
            let pixels = sized(&mut scratch.tiles, Self::PLACES * of_pixels.step());
            run_vectorized(TransformTiles {
                images: self.input,
                tiling: self.inputs,
                are_grads: false,
                rows,
                places: of_pixels,
                out: pixels,
            });
            for (place, (grads, pixels)) in of_grads.of(grads).zip(of_pixels.of(pixels)).enumerate() {
                let start = first + place * of_sums.step() + share.outputs.start * inputs;
                let shape = [share.outputs.len(), inputs];
                // SAFETY: there are sums of all outputs in all places for these rows; no other share has those outputs.
                let sums = unsafe { all.slice_mut(start..start + shape[0] * shape[1]) };
                let sums = MatrixMut::dense(sums, shape);
                let grads = Matrix::dense(grads, of_grads.shape).part([0..tiles, share.outputs.clone()]);
                let (grads, pixels) = (grads.transposed(), Strips::of_numbers(pixels, of_pixels.shape));
                let Some(amx) = &amx else {
                    multiply_by_strips(sums, grads, pixels, adds);
                    continue;
                };
                let panels = sized(&mut scratch.right_panels, Panels::len(inputs, tiles));
                let pixels = Panels::of_strips(pixels, panels);
                let grads = Panels::of_rows(grads, &mut scratch.left_panels);
                amx.multiply_panels(sums, grads, pixels, adds);
            }
        }
    }
}
