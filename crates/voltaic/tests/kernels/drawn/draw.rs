//! Numbers, sizes and layouts by chance, the same in every run.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tch::{Device, Kind, Tensor};

/// What chance gives.
pub struct Draw(StdRng);

/// What may be among the numbers of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Among {
    /// Finite numbers, with those next to 0 and both zeros.
    Finite,
    /// NaN, too.
    Nan,
    /// Infinities, too.
    All,
}

impl Draw {
    pub fn new(seed: u64) -> Self {
        Self(StdRng::seed_from_u64(seed))
    }

    /// Chance that what becomes of a call does not change for the next.
    pub fn another(&mut self) -> Self {
        Self(StdRng::seed_from_u64(self.0.random()))
    }

    /// From `low` to `high`, both included.
    pub fn between(&mut self, low: i64, high: i64) -> i64 {
        self.0.random_range(low..=high)
    }

    pub fn one_of<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.0.random_range(0..all.len())].clone()
    }

    /// Once in so many times.
    pub fn once_in(&mut self, times: i64) -> bool {
        self.between(1, times) == 1
    }

    /// The length of a side: seldom 0, often 1, mostly up to `usual`, at times up to `large`.
    pub fn side(&mut self, usual: i64, large: i64) -> i64 {
        match self.between(0, 19) {
            0 => 0,
            1 | 2 => 1,
            3 | 4 => self.between(usual, large),
            _ => self.between(1, usual),
        }
    }

    pub fn kind(&mut self) -> Kind {
        use Kind::{BFloat16, Double, Float, Half};
        self.one_of(&[Float, Float, Float, Float, BFloat16, BFloat16, BFloat16, BFloat16, Double, Half])
    }

    /// `len` numbers in one piece.
    fn numbers(&mut self, len: i64, kind: Kind, among: Among) -> Tensor {
        // by libtorch, since Rust's generators are slow without optimization
        tch::manual_seed(self.0.random_range(0..i64::MAX));
        let numbers = Tensor::empty([len], (Kind::Float, Device::Cpu)).uniform_(-1.0, 1.0);
        if len > 0 && self.once_in(3) {
            let (nan, inf) = (f32::NAN, f32::INFINITY);
            let edges: &[f32] = match among {
                Among::Finite => &[0.0, -0.0, 1e-40, -1e-45],
                Among::Nan => &[nan, 0.0, -0.0, 1e-40, -1e-45],
                Among::All => &[nan, inf, -inf, 0.0, -0.0, 1e-40, -1e-45],
            };
            for _ in 0..self.between(1, 3) {
                let place = self.between(0, len - 1);
                let _ = numbers.get(place).fill_(f64::from(self.one_of(edges)));
            }
        }
        numbers.to_kind(kind)
    }

    /// The name of a layout, and a tensor in it.
    pub fn tensor(&mut self, sizes: &[i64], kind: Kind, among: Among) -> (&'static str, Tensor) {
        let dim = sizes.len();
        let len = sizes.iter().product::<i64>();
        match self.between(0, 8) {
            0 if dim > 1 => ("permuted", self.permuted(sizes, kind, among)),
            1 if dim > 0 => ("sliced", self.sliced(sizes, kind, among)),
            2 if dim > 0 => {
                let some: Vec<i64> =
                    sizes.iter().map(|size| if self.once_in(2) { 1 } else { *size }).collect();
                let len = some.iter().product();
                ("expanded", self.numbers(len, kind, among).view(&*some).expand(sizes, false))
            }
            3 if dim > 1 && len > 0 => {
                let strides: Vec<i64> = sizes.iter().map(|_| self.between(0, 4)).collect();
                let extent: i64 = sizes.iter().zip(&strides).map(|(size, stride)| (size - 1) * stride).sum();
                ("overlapping", self.numbers(extent + 3, kind, among).as_strided(sizes, &*strides, 2))
            }
            4 => ("aside", self.numbers(len + 1, kind, among).narrow(0, 1, len).view(sizes)),
            5 | 6 if dim == 4 => {
                let last = [sizes[0], sizes[2], sizes[3], sizes[1]];
                ("channels last", self.numbers(len, kind, among).view(last).permute([0, 3, 1, 2]))
            }
            5 if dim > 1 => {
                let mut turned = sizes.to_vec();
                turned.swap(dim - 1, dim - 2);
                ("transposed", self.numbers(len, kind, among).view(&*turned).transpose(-1, -2))
            }
            _ => ("contiguous", self.numbers(len, kind, among).view(sizes)),
        }
    }

    fn permuted(&mut self, sizes: &[i64], kind: Kind, among: Among) -> Tensor {
        let mut order: Vec<i64> = (0..sizes.len() as i64).collect();
        for i in (1..order.len()).rev() {
            let j = self.between(0, i as i64) as usize;
            order.swap(i, j);
        }
        let permuted: Vec<i64> = order.iter().map(|dim| sizes[*dim as usize]).collect();
        let mut back = vec![0; order.len()];
        for (place, dim) in order.iter().enumerate() {
            back[*dim as usize] = place as i64;
        }
        self.numbers(sizes.iter().product(), kind, among).view(&*permuted).permute(back)
    }

    fn sliced(&mut self, sizes: &[i64], kind: Kind, among: Among) -> Tensor {
        let parts: Vec<[i64; 3]> =
            sizes.iter().map(|size| [self.between(0, 2), *size, self.between(1, 3)]).collect();
        let whole: Vec<i64> = parts.iter().map(|[first, size, step]| first + size * step).collect();
        let whole = self.numbers(whole.iter().product(), kind, among).view(&*whole);
        parts.iter().enumerate().fold(whole, |part, (dim, [first, size, step])| {
            part.slice(dim as i64, *first, first + size * step, *step)
        })
    }

    /// What an output is given as, for a result of these sizes. It may share memory with `input`, or with itself, where that is
    /// given: what libtorch does then, operators by element alone say.
    pub fn out(&mut self, sizes: &[i64], kind: Kind, input: Option<&Tensor>) -> (&'static str, Tensor) {
        let empty = |sizes: &[i64], kind| Tensor::zeros(sizes, (kind, Device::Cpu));
        match self.between(0, 7) {
            0 => ("empty", empty(&[0], kind)),
            1 => {
                let mut other = sizes.to_vec();
                if let Some(last) = other.last_mut() {
                    *last += 1;
                }
                ("larger", empty(&other, kind))
            }
            2 => {
                let other = if kind == Kind::Float { Kind::BFloat16 } else { Kind::Float };
                ("of another kind", empty(sizes, other))
            }
            3 if input.is_some_and(|input| input.size() == sizes) => {
                ("the input", input.unwrap().shallow_clone())
            }
            // one number further on in memory that both have
            4 if input.is_some_and(|x| x.size() == sizes && x.is_contiguous() && x.numel() > 0) => {
                let input = input.unwrap();
                let both = Tensor::zeros([input.numel() as i64 + 1], (input.kind(), Device::Cpu));
                both.narrow(0, 0, input.numel() as i64).copy_(&input.flatten(0, -1));
                let moved = both.narrow(0, 1, input.numel() as i64).view(sizes);
                ("beside the input", moved)
            }
            _ => match self.tensor(sizes, kind, Among::Finite) {
                ("expanded" | "overlapping", out) if input.is_none() => ("dense", out.contiguous()),
                out => out,
            },
        }
    }
}
