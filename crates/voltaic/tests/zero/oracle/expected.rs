//! The same training as a loop in plain tch, in one process, which uses nothing of voltaic.

use voltaic::optim::Interval;
use voltaic::{Kind, Tensor};

use super::plan::{Average, Plan};
use crate::models::{Batch, numbers};

/// Of the exponential moving average.
pub const DECAY: f64 = 0.8;
/// Of a schedule's step.
pub const GAMMA: f64 = 0.9;
/// Weights and biases in the order of the module.
const SIZES: [&[i64]; 6] = [&[8, 5], &[8], &[8, 8], &[8], &[3, 8], &[3]];
const SECOND: [usize; 2] = [2, 3];
const LAST_BIAS: usize = 5;

/// What a run has come to.
pub struct Outcome {
    pub weights: Vec<Tensor>,
    pub val_losses: Vec<f64>,
    pub steps: u64,
}

/// The first value of a parameter.
pub fn initial(number: usize) -> Tensor {
    numbers(SIZES[number], number as f64) * 0.4
}

/// Inputs `[n, 5]` and targets `[n, 3]` of training and validation.
pub fn data(plan: &Plan) -> [Batch; 2] {
    let of = |samples: i64, phase: f64| (numbers(&[samples, 5], phase), numbers(&[samples, 3], phase + 1.0));
    [of(plan.samples().1, 3.0), of(plan.val_samples(), 5.0)]
}

/// Mean of the squares of the errors.
fn loss(plan: &Plan, weights: &[Tensor], (x, y): &Batch, step: usize) -> Tensor {
    let linear = |x: &Tensor, at: usize| x.linear(&weights[at], Some(&weights[at + 1]));
    let mut h = linear(&x.to_kind(plan.kind()), 0).tanh();
    if plan.uses_second(step) {
        h = linear(&h, 2).tanh();
    }
    (linear(&h, 4) - y).square().mean(plan.kind())
}

/// What an optimizer keeps of a parameter.
struct State {
    momentum: Tensor,
    squares: Tensor,
    steps: i32,
}

struct Loop<'a> {
    plan: &'a Plan,
    weights: Vec<Tensor>,
    grads: Vec<Option<Tensor>>,
    states: Vec<Option<State>>,
    average: Vec<Tensor>,
    num_averaged: u64,
    /// Steps of the schedule.
    num_scheduled: i32,
}

fn copy_of(tensors: &[Tensor]) -> Vec<Tensor> {
    tensors.iter().map(Tensor::copy).collect()
}

impl Loop<'_> {
    fn is_trained(&self, number: usize, step: usize) -> bool {
        let is_frozen = self.plan.is_frozen && number == LAST_BIAS;
        !(is_frozen || SECOND.contains(&number) && self.plan.frozen.contains(&step))
    }

    /// Adds the gradients of a batch.
    fn backward(&mut self, (x, y): &Batch, step: usize) {
        let (batch, samples) = self.plan.samples();
        let of_epoch = (step % self.plan.batches) as i64;
        let part = |of: &Tensor| of.slice(0, of_epoch * batch, ((of_epoch + 1) * batch).min(samples), 1);
        let all = self.weights.iter().enumerate();
        let leaves: Vec<Tensor> = all
            .map(|(number, weight)| weight.detach().set_requires_grad(self.is_trained(number, step)))
            .collect();
        (loss(self.plan, &leaves, &(part(x), part(y)), step) / self.plan.window as f64).backward();
        for (sum, leaf) in self.grads.iter_mut().zip(&leaves) {
            if leaf.requires_grad() && leaf.grad().defined() {
                *sum = Some(sum.take().map_or_else(|| leaf.grad(), |sum| sum + leaf.grad()));
            }
        }
    }

    fn clip(&mut self, max_norm: f64) {
        let squares = |grad: &Tensor| grad.square().sum(Kind::Double).double_value(&[]);
        let norm = self.grads.iter().flatten().map(squares).sum::<f64>().sqrt();
        let factor = (max_norm / (norm + 1e-6)).min(1.0);
        self.grads.iter_mut().flatten().for_each(|grad| *grad = &*grad * factor);
    }

    /// A step of each weight that has a gradient.
    fn step(&mut self) {
        if let Some(max_norm) = self.plan.clip {
            self.clip(max_norm);
        }
        let (plan, lr) = (self.plan, self.plan.lr() * GAMMA.powi(self.num_scheduled));
        for (number, grad) in self.grads.iter_mut().enumerate() {
            let Some(grad) = grad.take() else { continue };
            let (weight, state) = (&mut self.weights[number], &mut self.states[number]);
            *weight = match plan.is_adam {
                true => adam(weight, &grad, state, (lr, plan.eps())),
                false => sgd(weight, &grad, state, (lr, plan.momentum)),
            };
        }
        self.num_scheduled += i32::from(plan.schedule == Some(Interval::Step));
    }

    /// Weights become a part of the average.
    fn average(&mut self) {
        let part = match self.plan.average {
            Average::Ema => 1.0 - DECAY,
            _ => 1.0 / (self.num_averaged + 1) as f64,
        };
        for (average, weight) in self.average.iter_mut().zip(&self.weights) {
            *average =
                if self.num_averaged == 0 { weight.copy() } else { &*average + (weight - &*average) * part };
        }
        self.num_averaged += 1;
    }
}

/// Weight decay 0.01, apart from the gradient; betas 0.9 and 0.999.
fn adam(weight: &Tensor, grad: &Tensor, state: &mut Option<State>, (lr, eps): (f64, f64)) -> Tensor {
    let new = || State { momentum: grad.zeros_like(), squares: grad.zeros_like(), steps: 0 };
    let State { momentum, squares, steps } = state.take().unwrap_or_else(new);
    let (momentum, squares) = (momentum * 0.9 + grad * 0.1, squares * 0.999 + grad.square() * 0.001);
    let steps = steps + 1;
    let root = (&squares / (1.0 - 0.999_f64.powi(steps))).sqrt() + eps;
    let weight = weight * (1.0 - lr * 0.01) - &momentum / root * (lr / (1.0 - 0.9_f64.powi(steps)));
    *state = Some(State { momentum, squares, steps });
    weight
}

fn sgd(weight: &Tensor, grad: &Tensor, state: &mut Option<State>, (lr, factor): (f64, f64)) -> Tensor {
    let momentum = match state.take() {
        Some(state) => state.momentum * factor + grad,
        None => grad.copy(),
    };
    let weight = weight - &momentum * lr;
    *state = Some(State { momentum, squares: grad.zeros_like(), steps: 0 });
    weight
}

/// The first value of a parameter in the dtype of the plan, rounded.
pub fn first(plan: &Plan, number: usize) -> Tensor {
    match plan.precision {
        "bf16-true" => initial(number).to_kind(Kind::BFloat16).to_kind(Kind::Float),
        _ => initial(number).to_kind(plan.kind()),
    }
}

/// Trains as the plan says, without interruptions.
pub fn train(plan: &Plan) -> Outcome {
    let weights: Vec<Tensor> = (0..SIZES.len()).map(|number| first(plan, number)).collect();
    let none = || weights.iter().map(|_| None).collect();
    let (states, grads) = (weights.iter().map(|_| None).collect(), none());
    let (average, num_averaged, parts) = (copy_of(&weights), 0, plan.parts());
    let mut run =
        Loop { plan, average, weights: copy_of(&weights), grads, states, num_averaged, num_scheduled: 0 };
    let [train, val] = data(plan);
    let (mut val_losses, mut steps) = (Vec::new(), 0);
    for (plan, step) in parts.iter().flat_map(|(plan, steps)| steps.clone().map(move |step| (plan, step))) {
        run.plan = plan;
        if step.is_multiple_of(plan.batches) {
            if plan.average == Average::Swa && step / plan.batches + 1 >= plan.swa_start {
                run.average();
            }
            if !plan.is_deepspeed() {
                run.grads = none();
            }
        }
        if plan.no_loss != Some(step) {
            run.backward(&train, step);
        }
        if plan.steps_after(step) {
            run.step();
            steps += 1;
            if matches!(plan.average, Average::Ema | Average::Equal) {
                run.average();
            }
        }
        let ends_epoch = (step + 1).is_multiple_of(plan.batches);
        run.num_scheduled += i32::from(ends_epoch && plan.schedule == Some(Interval::Epoch));
        if plan.validates_after(step) {
            let is_averaged = matches!(plan.average, Average::Ema | Average::Equal) && run.num_averaged > 0;
            let weights = if is_averaged { &run.average } else { &run.weights };
            val_losses.push(loss(plan, weights, &val, 1).double_value(&[]));
        }
    }
    let weights = if run.num_averaged > 0 { run.average } else { run.weights };
    Outcome { weights, val_losses, steps }
}
