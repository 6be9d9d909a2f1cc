//! Attention of all heads of a tensor.

use std::ffi::c_void;

use voltaic_kernels::{
    Attention, Bf16, CacheFormat, CachedAttention, CachedRows, Dtype, E4m3, E5m2, Element, Float8Format,
    HeadTensor, attend_cached, attention, attention_backward, decode, encode,
};

use crate::random::Random;
use crate::{DTYPES, Numbers, assert_close, use_threads};

/// A tensor `[batches, heads, rows, dim]` with its strides, rows in one piece.
struct Heads {
    numbers: Numbers,
    strides: [usize; 3],
    shape: [usize; 4],
}

impl Heads {
    /// In one of several layouts, with numbers between that nobody reads.
    fn new(random: &mut Random, dtype: Dtype, shape: [usize; 4]) -> Self {
        let [batches, heads, rows, dim] = shape;
        let gap = random.one_of(&[0, 0, 3]);
        let strides = if random.is_heads() {
            let row = heads * dim + gap; // [batches, rows, heads, dim]
            [rows * row, dim, row]
        } else {
            let row = dim + gap;
            [heads * rows * row, rows * row, row]
        };
        let len = batches * strides[0] + gap;
        Self { numbers: Numbers::new(dtype, random.numbers(len)), strides, shape }
    }

    fn tensor(&mut self) -> HeadTensor {
        HeadTensor { data: self.numbers.address(), strides: self.strides.map(|stride| stride as isize) }
    }

    /// Rows of a head.
    fn head(&self, batch: usize, head: usize) -> Vec<Vec<f64>> {
        let [to_batch, to_head, to_row] = self.strides;
        let start = batch * to_batch + head * to_head;
        let row = |i: usize| (0..self.shape[3]).map(|k| self.numbers.at(start + i * to_row + k)).collect();
        (0..self.shape[2]).map(row).collect()
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Adds `factor` times a row.
fn add(sum: &mut [f64], row: &[f64], factor: f64) {
    sum.iter_mut().zip(row).for_each(|(sum, number)| *sum += factor * number);
}

struct Expected {
    out: Vec<Vec<f64>>,
    log_sum_exp: Vec<Vec<f64>>,
    grads: [Vec<Vec<f64>>; 3],
}

fn expected([query, key, value, grad]: [Vec<Vec<f64>>; 4], scale: f64, is_causal: bool) -> Expected {
    let zeros = |rows: &[Vec<f64>]| rows.iter().map(|row| vec![0.0; row.len()]).collect::<Vec<_>>();
    let (mut out, mut log_sum_exp) = (zeros(&query), Vec::new());
    let mut grads = [zeros(&query), zeros(&key), zeros(&value)];
    for (i, row) in query.iter().enumerate() {
        let seen = if is_causal { key.len().min(i + 1) } else { key.len() };
        let scores: Vec<f64> = key[..seen].iter().map(|key| scale * dot(row, key)).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
        log_sum_exp.push(vec![max + sum.ln()]);
        let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp() / sum).collect();
        for (weight, value) in weights.iter().zip(&value) {
            add(&mut out[i], value, *weight);
        }
        let delta = dot(&out[i], &grad[i]);
        for (j, weight) in weights.iter().enumerate() {
            add(&mut grads[2][j], &grad[i], *weight);
            let grad_score = weight * (dot(&grad[i], &value[j]) - delta) * scale;
            add(&mut grads[0][i], &key[j], grad_score);
            add(&mut grads[1][j], row, grad_score);
        }
    }
    Expected { out, log_sum_exp, grads }
}

#[test]
fn heads_of_any_layout_attend_as_in_float64() {
    let mut random = Random::new(8);
    for round in 0..60 {
        use_threads(1 + round % 4);
        let dtype = DTYPES[round % 2];
        let [batches, heads] = [random.between(1, 3), random.between(1, 3)];
        let [queries, keys] = [random.between(1, 150), random.between(1, 150)];
        let (dim, is_causal) = (random.between(1, 70), random.is_heads());
        let of_queries = [batches, heads, queries, dim];
        let of_keys = [batches, heads, keys, dim];
        let mut tensor = |shape| Heads::new(&mut random, dtype, shape);
        let [mut query, mut out, mut grad_out, mut grad_query] = [of_queries; 4].map(&mut tensor);
        let [mut key, mut value, mut grad_key, mut grad_value] = [of_keys; 4].map(&mut tensor);
        let mut log_sum_exp = Heads {
            numbers: Numbers::new(Dtype::Float32, vec![0.0; batches * heads * queries]),
            strides: [heads * queries, queries, 1],
            shape: [batches, heads, queries, 1],
        };
        let scale = 1.0 / (dim as f64).sqrt();
        let call = Attention {
            dtype,
            is_causal,
            scale: scale as f32,
            batches,
            heads,
            queries,
            keys,
            dim,
            query: query.tensor(),
            key: key.tensor(),
            value: value.tensor(),
            out: out.tensor(),
            grad_out: grad_out.tensor(),
            grad_query: grad_query.tensor(),
            grad_key: grad_key.tensor(),
            grad_value: grad_value.tensor(),
            log_sum_exp: log_sum_exp.tensor(),
        };
        // SAFETY: the tensors have such sizes and strides, and live during the calls.
        unsafe {
            attention(&call);
            attention_backward(&call);
        }
        let tolerance = if dtype == Dtype::Float32 { 2e-5 } else { 0.03 };
        let what = format!("{of_queries:?} of {keys} keys, {dtype:?}, causal {is_causal}");
        for (batch, head) in (0..batches).flat_map(|batch| (0..heads).map(move |head| (batch, head))) {
            let of = |tensor: &Heads| tensor.head(batch, head).concat();
            let inputs = [&query, &key, &value, &grad_out].map(|tensor| tensor.head(batch, head));
            let expected = expected(inputs, scale, is_causal);
            assert_close(&what, &of(&out), &expected.out.concat(), tolerance);
            assert_close(&what, &of(&log_sum_exp), &expected.log_sum_exp.concat(), tolerance);
            let grads = [&grad_query, &grad_key, &grad_value];
            for (grad, expected) in grads.into_iter().zip(&expected.grads) {
                assert_close(&what, &of(grad), &expected.concat(), tolerance);
            }
        }
    }
}

/// Numbers of a cache, in words so that they lie where those of 4 bytes may.
struct Cache {
    format: CacheFormat,
    words: Vec<u32>,
}

impl Cache {
    fn new(format: CacheFormat, len: usize) -> Self {
        let mut cache = Self { format, words: vec![0; len] };
        (0..len).for_each(|at| cache.set(at, f64::NAN)); // whatever is read unasked is seen
        cache
    }

    fn address(&mut self) -> *mut c_void {
        self.words.as_mut_ptr().cast()
    }

    fn bytes(&self) -> usize {
        match self.format {
            CacheFormat::Float32 => 4,
            CacheFormat::Bfloat16 => 2,
            CacheFormat::Float8(_) => 1,
        }
    }

    fn set(&mut self, at: usize, number: f64) {
        let number = number as f32;
        let bits = match self.format {
            CacheFormat::Float32 => number.to_bits(),
            CacheFormat::Bfloat16 => Bf16::from_f32(number).0.into(),
            CacheFormat::Float8(Float8Format::E4m3) => encode::<E4m3>(number).into(),
            CacheFormat::Float8(Float8Format::E5m2) => encode::<E5m2>(number).into(),
        };
        let per_word = 4 / self.bytes();
        let shift = at % per_word * 8 * self.bytes();
        let mask = (u32::MAX >> (32 - 8 * self.bytes())) << shift;
        let word = &mut self.words[at / per_word];
        *word = *word & !mask | bits << shift;
    }

    fn at(&self, at: usize) -> f64 {
        let per_word = 4 / self.bytes();
        let bits = self.words[at / per_word] >> (at % per_word * 8 * self.bytes());
        let number = match self.format {
            CacheFormat::Float32 => f32::from_bits(bits),
            CacheFormat::Bfloat16 => Bf16(bits as u16).to_f32(),
            CacheFormat::Float8(Float8Format::E4m3) => decode::<E4m3>(bits as u8),
            CacheFormat::Float8(Float8Format::E5m2) => decode::<E5m2>(bits as u8),
        };
        number.into()
    }

    fn row(&self, row: usize, dim: usize) -> Vec<f64> {
        (0..dim).map(|k| self.at(row * dim + k)).collect()
    }
}

const CACHE_FORMATS: [CacheFormat; 4] = [
    CacheFormat::Float32,
    CacheFormat::Bfloat16,
    CacheFormat::Float8(Float8Format::E4m3),
    CacheFormat::Float8(Float8Format::E5m2),
];

#[test]
fn the_newest_tokens_attend_to_the_filled_part_of_a_cache_as_in_float64() {
    let mut random = Random::new(9);
    for round in 0..120 {
        use_threads(1 + round % 4);
        let dtype = DTYPES[round % 2];
        let [batches, heads] = [random.between(1, 4), random.between(1, 3)];
        let capacity = random.between(1, 200);
        let slot = random.between(0, capacity - 1);
        let positions: Vec<i64> = (0..batches).map(|_| random.between(0, slot) as i64).collect();
        let scale = random.number();
        let mut query = Heads::new(&mut random, dtype, [batches, heads, 1, 40]);
        // the tokens before the newest are there
        let mut of = |dim: usize| {
            let format = random.one_of(&CACHE_FORMATS);
            let mut cache = Cache::new(format, batches * heads * capacity * dim);
            for head in 0..batches * heads {
                let first = slot - positions[head / heads] as usize;
                for at in (head * capacity + first) * dim..(head * capacity + slot) * dim {
                    cache.set(at, 4.0 * random.number());
                }
            }
            let mut new = Cache { format, words: vec![0; batches * heads * dim + 7] };
            let numbers = random.numbers(batches * heads * dim + 7);
            numbers.into_iter().enumerate().for_each(|(at, number)| new.set(at, 4.0 * number));
            // batches or heads first
            let strides = if random.is_heads() { [heads * dim, dim] } else { [dim, batches * dim] };
            (new, cache, strides, random.number(), dim)
        };
        let (mut keys, mut values) = (of(40), of([40, 7, 64][round % 3]));
        let rows =
            |(new, cache, strides, scale, dim): &mut (Cache, Cache, [usize; 2], f64, usize)| CachedRows {
                new: new.address(),
                strides: strides.map(|stride| stride as isize),
                cache: cache.address(),
                format: new.format,
                dim: *dim,
                scale: *scale as f32,
            };
        let mut out = Numbers::new(dtype, vec![0.0; batches * heads * values.4]);
        let call = CachedAttention {
            dtype,
            scale: scale as f32,
            heads,
            capacity,
            slot,
            positions: &positions,
            query: query.numbers.address(),
            strides: [query.strides[0] as isize, query.strides[1] as isize],
            out: out.address(),
            keys: rows(&mut keys),
            values: rows(&mut values),
        };
        // SAFETY: the tensors have such sizes and strides, and live during the call.
        unsafe { attend_cached(&call) };
        let tolerance = if dtype == Dtype::Float32 { 2e-5 } else { 0.01 };
        let what =
            format!("slot {slot} of {capacity}, {dtype:?}, {:?}, {:?}", keys.0.format, values.0.format);
        for (head, out) in out.all().chunks_exact(values.4).enumerate() {
            let [batch, own] = [head / heads, head % heads];
            let seen = slot - positions[batch] as usize..slot + 1;
            let rows = |(new, cache, strides, scale, dim): &(Cache, Cache, [usize; 2], f64, usize)| {
                let start = batch * strides[0] + own * strides[1];
                let newest: Vec<f64> = (start..start + dim).map(|at| new.at(at)).collect();
                assert_eq!(cache.row(head * capacity + slot, *dim), newest, "{what}");
                let row = |row| cache.row(head * capacity + row, *dim).iter().map(|x| x * scale).collect();
                seen.clone().map(row).collect::<Vec<Vec<f64>>>()
            };
            let (keys, values) = (rows(&keys), rows(&values));
            let query = query.head(batch, own);
            let scores: Vec<f64> = keys.iter().map(|key| scale * dot(&query[0], key)).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
            let mut expected = vec![0.0; out.len()];
            for (score, value) in scores.iter().zip(&values) {
                add(&mut expected, value, (score - max).exp() / sum);
            }
            assert_close(&what, out, &expected, tolerance);
        }
    }
}
