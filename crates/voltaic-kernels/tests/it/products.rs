//! Products of matrices.

use voltaic_kernels::{BatchedProduct, Dtype, Machine, multiplies, multiply_batches};

use crate::random::Random;
use crate::{DTYPES, Numbers, rounding, use_threads};

/// Strides of `[batches, rows, columns]` that are not those of a dense tensor, and how many numbers they span.
fn strides(
    random: &mut Random,
    [batches, rows, columns]: [usize; 3],
    may_repeat: bool,
) -> ([isize; 3], usize) {
    let gap = random.one_of(&[0, 0, 1, 7]);
    let (down, right) = match random.between(0, 4) {
        0 | 1 => (columns + gap, 1),
        2 | 3 => (1, rows + gap),
        _ => (2 * columns + gap, 2),
    };
    let matrix = (rows.max(1) - 1) * down + (columns.max(1) - 1) * right + 1;
    let to_batch = if may_repeat && random.between(0, 3) == 0 { 0 } else { matrix + gap };
    ([to_batch, down, right].map(|stride| stride as isize), (batches - 1) * to_batch + matrix)
}

fn at([to_batch, down, right]: [isize; 3], batch: usize, i: usize, j: usize) -> usize {
    (batch as isize * to_batch + i as isize * down + j as isize * right) as usize
}

/// Whether a product was done here; fails if it is wrong, or wrote beside its output.
fn is_done(random: &mut Random, dtype: Dtype, shape: [usize; 4]) -> bool {
    let [batches, rows, columns, depth] = shape;
    let (out_strides, out_len) = strides(random, [batches, rows, columns], false);
    let (a_strides, a_len) = strides(random, [batches, rows, depth], true);
    let (b_strides, b_len) = strides(random, [batches, depth, columns], true);
    let mut numbers = |len: usize| Numbers::new(dtype, random.numbers(len));
    let (mut out, mut a, mut b) = (numbers(out_len), numbers(a_len), numbers(b_len));
    let (before, adds) = (out.clone(), random.is_heads());
    let call = BatchedProduct {
        dtype,
        shape,
        out: out.address(),
        a: a.address(),
        b: b.address(),
        out_strides,
        a_strides,
        b_strides,
        adds,
    };
    // SAFETY: the tensors have as many numbers, each of `out` in one place, and live during the call.
    if unsafe { multiply_batches(&call) }.is_none() {
        assert_eq!(out, before, "{call:?} is not done, and wrote");
        return false;
    }
    let mut is_written = vec![false; out_len];
    for (batch, i) in (0..batches).flat_map(|batch| (0..rows).map(move |i| (batch, i))) {
        for j in 0..columns {
            let place = at(out_strides, batch, i, j);
            let (mut sum, mut size) = (0.0, 0.0);
            if adds {
                (sum, size) = (before.at(place), before.at(place).abs());
            }
            for k in 0..depth {
                let term = a.at(at(a_strides, batch, i, k)) * b.at(at(b_strides, batch, k, j));
                (sum, size) = (sum + term, size + term.abs());
            }
            let tolerance = rounding(dtype) * sum.abs() + 1e-6 * size + 1e-30;
            assert!(
                (out.at(place) - sum).abs() <= tolerance,
                "{call:?}, {i}, {j}: {}, not {sum}",
                out.at(place)
            );
            is_written[place] = true;
        }
    }
    for (i, _) in is_written.iter().enumerate().filter(|(_, is_written)| !**is_written) {
        assert_eq!(out.at(i), before.at(i), "{call:?} wrote beside its output");
    }
    true
}

#[test]
fn products_of_any_layout_are_exact() {
    let mut random = Random::new(1);
    for dtype in DTYPES {
        let mut done = 0;
        for round in 0..400 {
            use_threads(1 + round % 3);
            let mut side = || match random.between(0, 9) {
                0 => 1,
                1..=7 => random.between(1, 40),
                _ => random.between(60, 150),
            };
            let shape = [1, side(), side(), side()];
            let batches = random.one_of(&[1, 1, 1, 2, 5]);
            done += u32::from(is_done(&mut random, dtype, [batches, shape[1], shape[2], shape[3]]));
        }
        let is_served = multiplies(&Machine::here(), dtype);
        assert!(done > 100 || !is_served, "{done} of 400 in {dtype:?}");
        println!("{done} of 400 in {dtype:?}");
    }
}

#[test]
fn long_and_narrow_products_are_exact() {
    let mut random = Random::new(2);
    for dtype in DTYPES {
        for round in 0..60 {
            use_threads(1 + round % 3);
            let (rows, columns) = (random.one_of(&[1, 8, 17, 130]), random.one_of(&[1, 5, 33, 70]));
            let depth = random.between(200, 700);
            is_done(&mut random, dtype, [1, rows, columns, depth]);
        }
    }
}

#[test]
fn large_products_are_exact_on_any_number_of_threads() {
    let mut random = Random::new(3);
    for dtype in DTYPES {
        for threads in 1..4 {
            use_threads(threads);
            is_done(&mut random, dtype, [1, 190, 150, 170]);
        }
    }
}

#[test]
fn products_of_no_rows_and_no_depth_are_empty_and_zero() {
    let mut random = Random::new(4);
    use_threads(2);
    for dtype in DTYPES {
        for shape in [[1, 0, 9, 9], [1, 9, 0, 9], [1, 9, 9, 0], [2, 40, 40, 0]] {
            is_done(&mut random, dtype, shape);
        }
    }
}
