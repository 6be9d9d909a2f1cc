//! Random programs with views, writes in place, casts and strides, compiled, forward and backward, beside a run in float64: compiled is as
//! near to it as the code is. Then without gradients, with what depends on weights alone frozen, while weights change between calls.
//!
//! `VOLTAIC_FUZZ=7` runs the program of a seed, `VOLTAIC_FUZZ=100..200` those of many.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tch::{Kind, Tensor};
use voltaic::graph::{CompileOptions, Compiler, GraphedModule};
use voltaic::nn::{Forward, Parameter};
use voltaic::{Module, ffi};

use crate::compile::{distance, factors};
use crate::compile_freezing::FREEZES;
use crate::random_runs::{cases, some};
use crate::support::{CPU, HPU, start};

/// All tensors of a program have this shape.
type Shape = [i64; 2];

/// What a step does with the tensors of these numbers, counted from the last one back; the result is another one.
#[derive(Debug, Clone, Copy)]
enum Step {
    Unary(u8, usize),
    Binary(u8, usize, usize),
    /// With a part of the second that repeats: a row, a column, a number.
    Repeated(u8, usize, usize),
    View(u8, usize),
    /// The first is written; its own memory, or a part of it.
    InPlace(u8, usize, usize),
    /// To 16 bits and back, or a new copy.
    Cast(u8, usize),
    /// Softmax, or the norm of a layer, whose weight or bias is a part of the second.
    Normalize(u8, usize, usize),
    /// Of the weight alone; or the weight itself, which later steps may write to.
    Weight(u8),
}

#[derive(Module, Debug)]
pub(crate) struct Program {
    #[module(skip)]
    pub(crate) shape: Shape,
    #[module(skip)]
    steps: Vec<Step>,
    weight: Parameter,
}

impl Program {
    pub(crate) fn of(seed: u64, (device, kind): (tch::Device, Kind)) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let shape = [[1, 1], [3, 4], [4, 4], [1, 7], [9, 1], [5, 300], [64, 33]][rng.random_range(0..7)];
        let count = rng.random_range(4..16);
        let steps = (0..count).map(|_| {
            let (kind, a, b) = (rng.random_range(0..8), rng.random_range(0..5), rng.random_range(0..5));
            match rng.random_range(0..20) {
                0..4 => Step::Unary(kind, a),
                4..8 => Step::Binary(kind, a, b),
                8..10 => Step::Repeated(kind, a, b),
                10..12 => Step::View(kind, a),
                12..14 => Step::InPlace(kind, a, b),
                14 => Step::Cast(kind, a),
                18.. => Step::Weight(kind),
                _ => Step::Normalize(kind, a, b),
            }
        });
        let steps = steps.collect();
        let weight = Parameter::new(Tensor::zeros(shape, (kind, device)));
        _ = weight.set_requires_grad(false);
        Self { shape, steps, weight }
    }

    /// Gives the weight the same numbers in each format.
    pub(crate) fn set_weight(&self, numbers: &Tensor) {
        let _no_grad = tch::no_grad_guard();
        self.weight.leaf().shallow_clone().copy_(numbers);
    }

    pub(crate) fn run(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        self.run_off(x, 0.0)
    }

    /// With each value that is read off by up to `off` of it, at random.
    fn run_off(&self, x: &Tensor, off: f64) -> anyhow::Result<Tensor> {
        let weight = off_by(self.weight.leaf(), off)?;
        // the input itself cannot be written
        let mut all = vec![weight.f_mul_scalar(0.5)?.f_tanh()?, x.f_mul_scalar(1.5)?, x.f_mul_scalar(0.5)?];
        for step in &self.steps {
            let at = |back: usize| all[all.len() - 1 - back % all.len()].shallow_clone();
            let read = |back: usize| off_by(&at(back), off);
            let next = match *step {
                Step::Unary(kind, a) => unary(kind, &read(a)?)?,
                Step::Binary(kind, a, b) => binary(kind, &read(a)?, &read(b)?)?,
                Step::Repeated(kind, a, b) => binary(kind, &read(a)?, &repeated(kind, &read(b)?)?)?,
                Step::View(kind, a) => self.view(kind, &at(a))?,
                Step::InPlace(kind, a, b) => in_place(kind, &at(a), &at(b))?,
                Step::Cast(kind, a) => cast(kind, &read(a)?)?,
                Step::Normalize(kind, a, b) => normalized(kind, &read(a)?, &read(b)?)?,
                Step::Weight(7) => self.weight.leaf().f_detach()?,
                Step::Weight(kind) => unary(kind, &weight)?,
            };
            all.push(next);
        }
        let last: Vec<Tensor> = all.iter().rev().take(3).map(Tensor::shallow_clone).collect();
        Ok(last[0].f_add(&last[1])?.f_add(&last[2])?)
    }

    fn view(&self, kind: u8, a: &Tensor) -> anyhow::Result<Tensor> {
        let [rows, columns] = self.shape;
        Ok(match kind {
            0 => a.f_transpose(0, 1)?.f_mul_scalar(1.5)?.f_transpose(0, 1)?,
            1 => a.f_reshape([-1])?.f_tanh()?.f_view([rows, columns])?,
            2 => Tensor::f_cat(&[a, a], 1)?.f_narrow(1, columns - 1, columns)?,
            3 => a.f_narrow(0, 0, 1)?.f_expand([rows, columns], false)?,
            4 => a.f_transpose(0, 1)?.f_contiguous()?.f_transpose(0, 1)?,
            5 => a.f_flip([0])?,
            6 => a.f_reshape([columns, rows])?.f_add_scalar(0.5)?.f_reshape([rows, columns])?,
            _ => a.f_detach()?,
        })
    }
}

impl Forward for Program {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        self.run(x)
    }
}

/// `a`, each number off by up to `off` of it, at random.
fn off_by(a: &Tensor, off: f64) -> Result<Tensor, tch::TchError> {
    if off == 0.0 {
        return Ok(a.shallow_clone());
    }
    a.f_mul(&a.f_detach()?.f_rand_like()?.f_mul_scalar(2.0 * off)?.f_add_scalar(1.0 - off)?)
}

fn unary(kind: u8, a: &Tensor) -> anyhow::Result<Tensor> {
    Ok(match kind {
        0 => a.f_mul_scalar(-0.75)?,
        1 => a.f_add_scalar(1.25)?,
        2 => a.f_gelu("none")?,
        3 => a.f_gelu("tanh")?,
        4 => a.f_tanh()?,
        5 => a.f_sigmoid()?,
        6 => a.f_neg()?,
        _ => a.f_div_scalar(3.0)?,
    })
}

fn binary(kind: u8, a: &Tensor, b: &Tensor) -> anyhow::Result<Tensor> {
    Ok(match kind {
        0..3 => a.f_add(b)?,
        3 => a.f_sub(b)?,
        4..6 => a.f_mul(&b.f_tanh()?)?,
        6 => a.f_div(&b.f_mul(b)?.f_add_scalar(1.0)?)?,
        _ => a.f_sub(&b.f_mul_scalar(2.0)?)?,
    })
}

fn repeated(kind: u8, b: &Tensor) -> anyhow::Result<Tensor> {
    Ok(match kind % 4 {
        0 => b.f_narrow(0, 0, 1)?,
        1 => b.f_narrow(1, 0, 1)?,
        2 => b.f_narrow(0, 0, 1)?.f_reshape([-1])?,
        _ => b.f_mean(b.kind())?,
    })
}

fn in_place(kind: u8, a: &Tensor, b: &Tensor) -> anyhow::Result<Tensor> {
    let mut a = a.shallow_clone();
    let factor = b.f_detach()?.f_sigmoid()?;
    _ = match kind {
        0 => a.f_add_(b)?,
        1 => a.f_mul_(&factor)?,
        2 => a.f_narrow(0, 0, 1)?.f_add_(&Tensor::from(0.25))?,
        3 => a.f_narrow(1, 0, 1)?.f_mul_(&factor.f_narrow(1, 0, 1)?)?,
        4 => a.f_transpose(0, 1)?.f_sub_(&factor.f_transpose(0, 1)?)?,
        5 => a.f_mul_(&Tensor::from(0.5))?,
        6 => a.f_reshape([-1])?.f_add_(&factor.f_reshape([-1])?)?,
        _ => a.f_div_(&Tensor::from(1.5))?,
    };
    Ok(a)
}

fn normalized(kind: u8, a: &Tensor, b: &Tensor) -> anyhow::Result<Tensor> {
    let row = b.f_narrow(0, 0, 1)?.f_reshape([-1])?;
    let norm = |shape: &[i64], weight: Option<&Tensor>, bias: Option<&Tensor>| {
        a.f_layer_norm(shape, weight, bias, 0.1, false)
    };
    let size = a.size();
    Ok(match kind {
        0 => a.f_softmax(-1, a.kind())?,
        1 => a.f_log_softmax(-1, a.kind())?,
        2 => a.f_softmax(0, a.kind())?,
        3 => norm(&size, None, None)?,
        4 => norm(&size, Some(b), None)?,
        5 => norm(&size[1..], None, Some(&row))?,
        6 => norm(&size[1..], Some(&row), Some(&row))?,
        _ => norm(&size[1..], Some(&row), None)?,
    })
}

fn cast(kind: u8, a: &Tensor) -> anyhow::Result<Tensor> {
    let is_wide = a.kind() == Kind::Double; // of which a cast to 16 bits would keep nothing
    Ok(match kind {
        0..4 if !is_wide => a.f_to_kind(Kind::BFloat16)?.f_to_kind(a.kind())?,
        4..6 if !is_wide => a.f_to_kind(Kind::Float)?.f_mul_scalar(1.125)?.f_to_kind(a.kind())?,
        4..6 => a.f_mul_scalar(1.125)?,
        _ => a.copy(),
    })
}

/// The result and the gradient of the input.
fn passes(call: impl Fn(&Tensor) -> anyhow::Result<Tensor>, x: &Tensor) -> anyhow::Result<[Tensor; 2]> {
    let x = x.f_detach()?.copy().f_set_requires_grad(true)?;
    let y = call(&x)?;
    y.f_mul(&factors(&y))?.f_sum(y.kind())?.f_backward()?;
    Ok([y.f_detach()?, x.grad()])
}

#[derive(Debug, Default)]
struct Counts {
    programs: usize,
    nonsense: usize,
    leaks: usize,
    replays: u64,
    fused: usize,
    frozen: usize,
}

/// A program in float64, as code, and compiled, with the same weight.
struct Forms {
    exact: Program,
    eager: Program,
    own: GraphedModule<Program>,
}

impl Forms {
    fn of(seed: u64, format: (tch::Device, Kind), options: CompileOptions) -> Result<Self, String> {
        let compiler = Compiler::new("hpu_backend").map_err(|e| e.to_string())?.options(options);
        Ok(Self {
            exact: Program::of(seed, (CPU, Kind::Double)),
            eager: Program::of(seed, format),
            own: compiler.wrap(Program::of(seed, format)),
        })
    }

    fn set_weight(&self, numbers: &Tensor) {
        [&self.exact, &self.eager, self.own.module()].iter().for_each(|program| program.set_weight(numbers));
    }

    /// What differs in a call; none if the code is refused.
    fn compare(&self, x: &Tensor, has_grad: bool, call: u32) -> Result<Option<()>, String> {
        let (device, kind) = (self.eager.weight.device(), self.eager.weight.kind());
        let input = x.to_kind(kind).to_device(device);
        let run = |code: &dyn Fn(&Tensor) -> anyhow::Result<Tensor>, x: &Tensor| match has_grad {
            true => passes(code, x),
            false => tch::no_grad(|| Ok([code(x)?, Tensor::zeros([1], (kind, device))])),
        };
        // autograd refuses some writes
        let exact = run(&|x| self.exact.run(x), &x.to_kind(Kind::Double));
        let (Ok(exact), Ok(eager)) = (exact, run(&|x| self.eager.run(x), &input)) else { return Ok(None) };
        let own = run(&|x| self.own.forward(x), &input).map_err(|error| format!("compiled: {error}"))?;
        // as far as a value may be off that is rounded once; in the program in float64
        let off = if kind == Kind::Float { 2f64.powi(-24) } else { 2f64.powi(-9) };
        let rounded = || run(&|x| self.exact.run_off(x, off), &x.to_kind(Kind::Double));
        // what is off may add up to little in the code by chance; without gradients more is fused
        let unit = match (kind, has_grad) {
            (Kind::Float, true) => 1e-6,
            (Kind::Float, false) => 4e-6,
            _ => 8e-2,
        };
        for (index, what) in ["result", "gradient"].into_iter().enumerate() {
            if own[index].kind() != eager[index].kind() {
                return Err(format!("{what} of call {call}: {:?}", own[index].kind()));
            }
            let (off, usual) = (distance(&own[index], &exact[index]), distance(&eager[index], &exact[index]));
            let is_near = |allowed: f64| off <= 3.0 * usual + allowed; // not if it is no number
            if !is_near(unit)
                && !is_nothing(&own[index], &exact[index], unit)
                && !is_near(unit + 4.0 * cancelled(&exact[index], index, rounded)?)
            {
                return Err(format!("{what} of call {call} is off by {off}, that of the code by {usual}"));
            }
        }
        Ok(Some(()))
    }
}

/// Whether all terms cancelled: what is left of numbers near one is what rounding leaves.
fn is_nothing(own: &Tensor, exact: &Tensor, unit: f64) -> bool {
    let largest = |tensor: &Tensor| tensor.abs().max().double_value(&[]);
    largest(exact) < 1e-3 * unit && largest(own) < unit
}

/// How far rounding alone moves a result, relative to its largest number: much, where terms cancel. By ten runs with values off at random.
fn cancelled(
    exact: &Tensor,
    index: usize,
    rounded: impl Fn() -> anyhow::Result<[Tensor; 2]>,
) -> Result<f64, String> {
    (0..10).try_fold(0.0, |most: f64, _| {
        let rounded = rounded().map_err(|error| error.to_string())?;
        Ok(most.max(distance(&rounded[index], exact)))
    })
}

/// What differs in a case; nothing if the code itself is refused.
fn case(seed: u64, counts: &mut Counts) -> Result<(), String> {
    ffi::manual_seed(seed).map_err(|e| e.to_string())?;
    let format = ([CPU, HPU][seed as usize % 2], [Kind::Float, Kind::BFloat16][seed as usize / 2 % 2]);
    counts.programs += 1;
    for (options, has_grad) in [(CompileOptions::default(), true), (FREEZES, false)] {
        let forms = Forms::of(seed, format, options)?;
        let numbers = || Tensor::randn(forms.exact.shape, (Kind::Float, CPU)).to_kind(Kind::BFloat16);
        let x = numbers();
        for call in 0..5 {
            if call % 3 == 0 || call == 2 && seed.is_multiple_of(3) {
                forms.set_weight(&numbers());
            }
            let x = (&x + f64::from(call) * 0.25).to_kind(Kind::BFloat16);
            let compared = forms.compare(&x, has_grad, call);
            if compared
                .map_err(|error| format!("{error}, has_grad {has_grad}\n  {:?}", forms.eager))?
                .is_none()
            {
                counts.nonsense += usize::from(has_grad);
                break;
            }
        }
        let plans = forms.own.plan_stats();
        counts.replays += forms.own.stats().hits;
        counts.fused += plans.iter().map(|plan| plan.num_fused).sum::<usize>();
        counts.frozen += plans.iter().map(|plan| plan.num_frozen).sum::<usize>();
        match forms.own.refusal() {
            // `a.add_(a.gelu())` leaks in autograd itself unless backward runs: `a` and its `grad_fn` hold references to each other
            Some(refusal) if refusal.contains("keeps its result") => counts.leaks += 1,
            Some(refusal) => return Err(format!("refused: {refusal}\n  {:?}", forms.eager)),
            None => {}
        }
    }
    Ok(())
}

#[test]
fn compiled_programs_are_as_exact_as_the_code() {
    let _rng = start();
    let mut counts = Counts::default();
    cases("", some(150, 10_000), |seed| case(seed, &mut counts).map(|()| true));
    println!("{counts:?}");
    assert!(2 * counts.nonsense <= counts.programs, "{counts:?}");
    assert!(1000 * counts.leaks <= counts.programs.max(1000), "{counts:?}");
    assert!(
        counts.programs < 10
            || (counts.replays > 0 && counts.fused > counts.programs && counts.frozen > counts.programs),
        "{counts:?}"
    );
}
