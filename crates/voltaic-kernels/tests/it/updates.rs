//! Steps of optimizers against float64, in whole and in parts.

use voltaic_kernels::{
    AdagradRule, AdamRule, Bf16, Element, F16, LionRule, Numbers, NumbersMut, SgdRule, Update, UpdateRule,
    update,
};

use crate::random::Random;
use crate::{assert_close, use_threads};

const LENGTHS: [usize; 8] = [0, 1, 8, 15, 257, 1000, 4099, 70_001];
/// Of weights, gradient, states, and what is rounded: float32, bfloat16, float16.
const FORMATS: [[usize; 4]; 11] = [
    [0, 0, 0, 0],
    [0, 1, 0, 1],
    [0, 0, 0, 1],
    [0, 1, 0, 0],
    [0, 2, 0, 2],
    [0, 1, 1, 1],
    [0, 0, 2, 2],
    [1, 1, 0, 0],
    [1, 1, 1, 0],
    [2, 2, 0, 0],
    [1, 0, 2, 0],
];

/// Numbers in one of the formats.
#[derive(Clone, PartialEq, Debug)]
enum Row {
    Float32(Vec<f32>),
    Bfloat16(Vec<Bf16>),
    Float16(Vec<F16>),
}

impl Row {
    fn new(format: usize, numbers: &[f64]) -> Self {
        let numbers = numbers.iter().map(|number| *number as f32);
        match format {
            0 => Self::Float32(numbers.collect()),
            1 => Self::Bfloat16(numbers.map(Bf16::from_f32).collect()),
            _ => Self::Float16(numbers.map(F16::from_f32).collect()),
        }
    }

    fn all(&self) -> Vec<f64> {
        match self {
            Self::Float32(numbers) => numbers.iter().map(|number| f64::from(*number)).collect(),
            Self::Bfloat16(numbers) => numbers.iter().map(|number| number.to_f32().into()).collect(),
            Self::Float16(numbers) => numbers.iter().map(|number| number.to_f32().into()).collect(),
        }
    }

    /// What also tells apart what is not a number.
    fn bits(&self) -> Vec<u32> {
        match self {
            Self::Float32(numbers) => numbers.iter().map(|number| number.to_bits()).collect(),
            Self::Bfloat16(numbers) => numbers.iter().map(|number| number.0.into()).collect(),
            Self::Float16(numbers) => numbers.iter().map(|number| number.0.into()).collect(),
        }
    }

    fn tolerance(&self) -> f64 {
        match self {
            Self::Float32(_) => 2e-6,
            Self::Bfloat16(_) => 1.0 / 256.0 + 1e-6,
            Self::Float16(_) => 1.0 / 2048.0 + 1e-6,
        }
    }

    /// Numbers `start..end`.
    fn part(&self, start: usize, end: usize) -> Numbers<'_> {
        match self {
            Self::Float32(numbers) => Numbers::Float32(&numbers[start..end]),
            Self::Bfloat16(numbers) => Numbers::Bfloat16(&numbers[start..end]),
            Self::Float16(numbers) => Numbers::Float16(&numbers[start..end]),
        }
    }

    /// Parts that begin at 0 and at these places.
    fn parts(&mut self, cuts: &[usize]) -> Vec<NumbersMut<'_>> {
        match self {
            Self::Float32(numbers) => cut(numbers, cuts).into_iter().map(NumbersMut::Float32).collect(),
            Self::Bfloat16(numbers) => cut(numbers, cuts).into_iter().map(NumbersMut::Bfloat16).collect(),
            Self::Float16(numbers) => cut(numbers, cuts).into_iter().map(NumbersMut::Float16).collect(),
        }
    }
}

fn cut<'a, T>(mut numbers: &'a mut [T], cuts: &[usize]) -> Vec<&'a mut [T]> {
    let (mut parts, mut start) = (Vec::new(), 0);
    for cut in cuts {
        let (part, rest) = numbers.split_at_mut(cut - start);
        parts.push(part);
        (numbers, start) = (rest, *cut);
    }
    parts.push(numbers);
    parts
}

/// A parameter with all that belongs to it; the second moment is not negative.
#[derive(Clone)]
struct Parameter {
    weights: Row,
    grad: Row,
    states: [Row; 3],
    rounded: Option<Row>,
}

impl Parameter {
    /// Formats of weights, gradient, states, and of what is rounded, if it is not 0.
    fn new(
        random: &mut Random,
        len: usize,
        [of_weights, of_grad, of_states, of_rounded]: [usize; 4],
    ) -> Self {
        let mut numbers = || random.numbers(len);
        let weights = Row::new(of_weights, &numbers());
        let grad = Row::new(of_grad, &numbers());
        let squares =
            |numbers: Vec<f64>| numbers.into_iter().map(|number| number * number).collect::<Vec<f64>>();
        let first = Row::new(of_states, &numbers());
        let others = [squares(numbers()), squares(numbers())].map(|numbers| Row::new(of_states, &numbers));
        let [second, third] = others;
        let rounded = (of_rounded > 0).then(|| Row::new(of_rounded, &vec![0.0; len]));
        Self { weights, grad, states: [first, second, third], rounded }
    }

    fn step(&mut self, rule: UpdateRule, cuts: &[usize]) {
        let ends: Vec<usize> = cuts.iter().copied().chain([self.weights.all().len()]).collect();
        let starts = [0].into_iter().chain(cuts.iter().copied());
        let grads: Vec<_> = starts.zip(ends).map(|(start, end)| self.grad.part(start, end)).collect();
        let [a, b, c] = &mut self.states;
        let mut states = [a.parts(cuts), b.parts(cuts), c.parts(cuts)].map(Vec::into_iter);
        let mut rounded = self.rounded.as_mut().map(|rounded| rounded.parts(cuts).into_iter());
        let parts = self.weights.parts(cuts).into_iter().zip(grads).map(|(weights, grad)| Update {
            rule,
            weights,
            grad,
            states: states.each_mut().map(|parts| parts.next().unwrap()),
            rounded: rounded.as_mut().and_then(Iterator::next),
        });
        update(parts.collect());
    }
}

/// Rules, and what they do to weight, gradient and states in float64.
type Exact = fn(f64, f64, [f64; 3]) -> (f64, [f64; 3]);

fn rules() -> Vec<(UpdateRule, Exact)> {
    let adam = AdamRule {
        lr: 0.01,
        betas: (0.9, 0.99),
        eps: 1e-3,
        weight_decay: 0.1,
        decoupled: true,
        amsgrad: false,
        maximize: false,
        step: 3.0,
    };
    let sgd = SgdRule {
        lr: 0.1,
        weight_decay: 0.1,
        momentum: 0.9,
        dampening: 0.2,
        nesterov: false,
        maximize: false,
        is_first_step: false,
    };
    fn moments(g: f64, [m, v, max]: [f64; 3], beta1: f64) -> [f64; 3] {
        [beta1 * m + (1.0 - beta1) * g, 0.99 * v + 0.01 * g * g, max]
    }
    fn change([m, ..]: [f64; 3], v: f64, corrections: [f64; 2]) -> f64 {
        0.01 * m / corrections[0] / ((v / corrections[1]).sqrt() + 1e-3)
    }
    vec![
        (adam.into(), |w, g, states| {
            let states = moments(g, states, 0.9);
            let corrections = [1.0 - 0.9_f64.powi(3), 1.0 - 0.99_f64.powi(3)];
            (w * (1.0 - 0.001) - change(states, states[1], corrections), states)
        }),
        (
            AdamRule { decoupled: false, amsgrad: true, maximize: true, betas: (0.3, 0.99), ..adam }.into(),
            |w, g, states| {
                let mut states = moments(0.1 * w - g, states, 0.3);
                states[2] = states[2].max(states[1]);
                let corrections = [1.0 - 0.3_f64.powi(3), 1.0 - 0.99_f64.powi(3)];
                (w - change(states, states[2], corrections), states)
            },
        ),
        (AdamRule { step: f64::INFINITY, weight_decay: 0.0, ..adam }.into(), |w, g, states| {
            let states = moments(g, states, 0.9);
            (w - change(states, states[1], [1.0; 2]), states)
        }),
        (sgd.into(), |w, g, [b, ..]| {
            let b = 0.9 * b + 0.8 * (g + 0.1 * w);
            (w - 0.1 * b, [b, 0.0, 0.0])
        }),
        (SgdRule { nesterov: true, dampening: 0.0, maximize: true, ..sgd }.into(), |w, g, [b, ..]| {
            let g = 0.1 * w - g;
            let b = 0.9 * b + g;
            (w - 0.1 * (g + 0.9 * b), [b, 0.0, 0.0])
        }),
        (SgdRule { is_first_step: true, weight_decay: 0.0, ..sgd }.into(), |w, g, _| {
            (w - 0.1 * g, [g, 0.0, 0.0])
        }),
        (SgdRule { momentum: 0.0, weight_decay: 0.0, ..sgd }.into(), |w, g, states| (w - 0.1 * g, states)),
        (
            AdagradRule { lr: 0.1, lr_decay: 0.5, eps: 1e-3, weight_decay: 0.1, maximize: false, steps: 2.0 }
                .into(),
            |w, g, [sum, ..]| {
                let g = g + 0.1 * w;
                let sum = sum + g * g;
                (w - 0.05 * g / (sum.sqrt() + 1e-3), [sum, 0.0, 0.0])
            },
        ),
        (
            LionRule { lr: 0.01, betas: (0.5, 0.75), weight_decay: 0.5, maximize: false }.into(),
            |w, g, [m, ..]| {
                let towards = 0.5 * m + 0.5 * g;
                let sign = if towards == 0.0 { 0.0 } else { towards.signum() };
                (w * 0.995 - 0.01 * sign, [0.75 * m + 0.25 * g, 0.0, 0.0])
            },
        ),
    ]
}

#[test]
fn steps_are_those_of_each_number_whatever_the_formats() {
    let mut random = Random::new(31);
    for (i, (rule, exact)) in rules().into_iter().enumerate() {
        for formats in FORMATS {
            for len in LENGTHS {
                use_threads(1 + len % 3);
                let before = Parameter::new(&mut random, len, formats);
                // sums of Adagrad are not negative
                let before = match rule {
                    UpdateRule::Adagrad(_) => {
                        let [a, b, c] = before.states.clone();
                        Parameter { states: [b, a, c], ..before }
                    }
                    _ => before,
                };
                let mut after = before.clone();
                after.step(rule, &[]);
                let [a, b, c] = before.states.each_ref().map(Row::all);
                let grads = before.grad.all();
                let numbers = before.weights.all().into_iter().zip(grads).enumerate();
                let expected: Vec<_> = numbers.map(|(i, (w, g))| exact(w, g, [a[i], b[i], c[i]])).collect();
                let what = format!("rule {i}, {formats:?}, {len} numbers");
                let weights: Vec<f64> = expected.iter().map(|(w, _)| *w).collect();
                let own = after.weights.all();
                assert_close(&what, &own, &weights, after.weights.tolerance().max(3e-6));
                for state in 0..3 {
                    let (own, tolerance) = (&after.states[state], after.states[state].tolerance());
                    match state < rule.num_states() {
                        true => {
                            let values: Vec<f64> = expected.iter().map(|(_, states)| states[state]).collect();
                            assert_close(&format!("{what}, state {state}"), &own.all(), &values, tolerance);
                        }
                        false => assert_eq!(*own, before.states[state], "{what}: a state of another rule"),
                    }
                }
                if let Some(rounded) = &after.rounded {
                    assert_eq!(*rounded, Row::new(formats[3], &own), "{what}: rounded");
                }
            }
        }
    }
}

#[test]
fn threads_and_parts_change_no_bit() {
    let mut random = Random::new(32);
    for (rule, _) in rules() {
        for (len, cuts) in [
            (100_003, vec![16, 48, 65_536]),
            (100_003, vec![99_984]),
            (70_000, vec![32_768, 65_536, 69_984]),
            (203, vec![192]),
            (31, vec![16]),
        ] {
            for formats in [[0, 1, 0, 1], [1, 1, 0, 0], [1, 1, 1, 0]] {
                let before = Parameter::new(&mut random, len, formats);
                use_threads(1);
                let mut whole = before.clone();
                whole.step(rule, &[]);
                for threads in 1..=3 {
                    use_threads(threads);
                    let mut parts = before.clone();
                    parts.step(rule, &cuts);
                    let what = format!("{rule:?}, {formats:?}, {len} numbers at {cuts:?} by {threads}");
                    assert!(parts.weights.bits() == whole.weights.bits(), "{what}");
                    assert!(parts.states == whole.states && parts.rounded == whole.rounded, "{what}: states");
                }
            }
        }
    }
}
