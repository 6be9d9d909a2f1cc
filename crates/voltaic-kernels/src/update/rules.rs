//! How optimizers change numbers. Sums and products are rounded where libtorch's loops round them, so that results are the same bits.

use crate::element::Element;

/// What a step of an optimizer does to each number, with its hyper-parameters as the loop takes them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum UpdateRule {
    /// States `exp_avg`, `exp_avg_sq` and, with amsgrad, `max_exp_avg_sq`.
    Adam(AdamNumbers),
    /// State `momentum_buffer` if there is momentum.
    Sgd(SgdNumbers),
    /// State `sum`.
    Adagrad(AdagradNumbers),
    /// State `exp_avg`.
    Lion(LionNumbers),
}

/// Hyper-parameters of Adam and AdamW, as `torch.optim.AdamW` has them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamRule {
    /// Learning rate.
    pub lr: f64,
    /// Decay rates of the two moments.
    pub betas: (f64, f64),
    /// Term of the denominator.
    pub eps: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Takes the decay from the weights, in place of adding it to the gradient.
    pub decoupled: bool,
    /// Divides by the largest second moment so far.
    pub amsgrad: bool,
    /// Ascends.
    pub maximize: bool,
    /// Which step this is, from 1 on; infinity for moments that are not corrected for their start at 0.
    pub step: f64,
}

/// [`AdamRule`] as the loop takes it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamNumbers {
    direction: f32,
    penalty: Option<f32>,
    kept: f32,
    /// What the first moment moves by, towards the gradient; or from there, if that is less.
    mix: f32,
    starts_at_grad: bool,
    beta2: f32,
    mix2: f32,
    root: f32,
    eps: f32,
    step_size: f32,
    pub(crate) amsgrad: bool,
}

impl From<AdamRule> for UpdateRule {
    fn from(rule: AdamRule) -> Self {
        let AdamRule { lr, betas: (beta1, beta2), weight_decay, step, .. } = rule;
        let corrections = [1.0 - beta1.powf(step), 1.0 - beta2.powf(step)];
        let mix = (1.0 - beta1) as f32;
        let starts_at_grad = mix.abs() >= 0.5;
        Self::Adam(AdamNumbers {
            direction: direction(rule.maximize),
            penalty: (!rule.decoupled && weight_decay != 0.0).then_some(weight_decay as f32),
            kept: if rule.decoupled { (1.0 - lr * weight_decay) as f32 } else { 1.0 },
            mix: if starts_at_grad { mix - 1.0 } else { mix },
            starts_at_grad,
            beta2: beta2 as f32,
            mix2: (1.0 - beta2) as f32,
            root: corrections[1].sqrt() as f32,
            eps: rule.eps as f32,
            step_size: -(lr / corrections[0]) as f32,
            amsgrad: rule.amsgrad,
        })
    }
}

/// Hyper-parameters of SGD, as `torch.optim.SGD` has them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SgdRule {
    /// Learning rate.
    pub lr: f64,
    /// L2 penalty.
    pub weight_decay: f64,
    /// Momentum factor; 0 for none.
    pub momentum: f64,
    /// Part of the gradient that is kept out of the momentum.
    pub dampening: f64,
    /// Looks ahead along the momentum.
    pub nesterov: bool,
    /// Ascends.
    pub maximize: bool,
    /// The momentum begins with the gradient of this step.
    pub is_first_step: bool,
}

/// [`SgdRule`] as the loop takes it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SgdNumbers {
    direction: f32,
    penalty: Option<f32>,
    momentum: Option<f32>,
    mix: f32,
    nesterov: bool,
    is_first_step: bool,
    step_size: f32,
}

impl From<SgdRule> for UpdateRule {
    fn from(rule: SgdRule) -> Self {
        Self::Sgd(SgdNumbers {
            direction: direction(rule.maximize),
            penalty: unless_zero(rule.weight_decay),
            momentum: unless_zero(rule.momentum),
            mix: (1.0 - rule.dampening) as f32,
            nesterov: rule.nesterov,
            is_first_step: rule.is_first_step,
            step_size: -rule.lr as f32,
        })
    }
}

/// Hyper-parameters of Adagrad, as `torch.optim.Adagrad` has them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdagradRule {
    /// Learning rate.
    pub lr: f64,
    /// The learning rate is divided by 1 plus this times the steps before.
    pub lr_decay: f64,
    /// Term of the denominator.
    pub eps: f64,
    /// L2 penalty.
    pub weight_decay: f64,
    /// Ascends.
    pub maximize: bool,
    /// Steps before this one.
    pub steps: f64,
}

/// [`AdagradRule`] as the loop takes it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdagradNumbers {
    direction: f32,
    penalty: Option<f32>,
    step_size: f32,
    divisor: f32,
    eps: f32,
}

impl From<AdagradRule> for UpdateRule {
    fn from(rule: AdagradRule) -> Self {
        Self::Adagrad(AdagradNumbers {
            direction: direction(rule.maximize),
            penalty: unless_zero(rule.weight_decay),
            step_size: rule.lr as f32,
            divisor: rule.steps as f32 * rule.lr_decay as f32 + 1.0,
            eps: rule.eps as f32,
        })
    }
}

/// Hyper-parameters of Lion (arXiv:2302.06675), as DeepSpeed has them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LionRule {
    /// Learning rate.
    pub lr: f64,
    /// Decay rates of the mean of gradients in the update, and of the one that is kept.
    pub betas: (f64, f64),
    /// Weight decay, which is taken from the weights.
    pub weight_decay: f64,
    /// Ascends.
    pub maximize: bool,
}

/// [`LionRule`] as the loop takes it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LionNumbers {
    direction: f32,
    kept: f32,
    betas: [f32; 2],
    mixes: [f32; 2],
    step_size: f32,
}

impl From<LionRule> for UpdateRule {
    fn from(LionRule { lr, betas: (beta1, beta2), weight_decay, maximize }: LionRule) -> Self {
        Self::Lion(LionNumbers {
            direction: direction(maximize),
            kept: (1.0 - lr * weight_decay) as f32,
            betas: [beta1 as f32, beta2 as f32],
            mixes: [(1.0 - beta1) as f32, (1.0 - beta2) as f32],
            step_size: lr as f32,
        })
    }
}

fn direction(maximize: bool) -> f32 {
    if maximize { -1.0 } else { 1.0 }
}

/// A term that is left out if its factor is 0.
fn unless_zero(factor: f64) -> Option<f32> {
    (factor != 0.0).then_some(factor as f32)
}

/// Defines a loop over as many states: function arguments, since the compiler knows of these that they do not overlap.
macro_rules! for_each {
    ($name:ident: $($state:ident => $changed:ident),*) => {
        #[inline(always)]
        #[allow(clippy::too_many_arguments, reason = "slices in a struct may overlap")]
        fn $name<W: Element, G: Element, S: Element, R: Element>(
            weights: &mut [W],
            rounded: &mut [R],
            grads: &[G],
            $($state: &mut [S],)*
            update: impl Fn(f32, f32, $(for_each!(@f32 $state)),*) -> (f32, $(for_each!(@f32 $state)),*),
        ) {
            let len = weights.len();
            let (rounded, grads) = (&mut rounded[..len], &grads[..len]);
            $(let $state = &mut $state[..len];)*
            for i in 0..len {
                let (weight, $($changed),*) =
                    update(weights[i].to_f32(), grads[i].to_f32(), $($state[i].to_f32()),*);
                weights[i] = W::from_f32(weight);
                rounded[i] = R::from_f32(weight);
                $($state[i] = S::from_f32($changed);)*
            }
        }
    };
    (@f32 $state:ident) => { f32 };
}

#[inline(always)]
fn each_of_one<W: Element, G: Element, R: Element>(
    weights: &mut [W],
    rounded: &mut [R],
    grads: &[G],
    update: impl Fn(f32, f32) -> f32,
) {
    let len = weights.len();
    let (rounded, grads) = (&mut rounded[..len], &grads[..len]);
    for i in 0..len {
        let weight = update(weights[i].to_f32(), grads[i].to_f32());
        weights[i] = W::from_f32(weight);
        rounded[i] = R::from_f32(weight);
    }
}

for_each!(each_of_two: a => new_a);
for_each!(each_of_three: a => new_a, b => new_b);
for_each!(each_of_four: a => new_a, b => new_b, c => new_c);

/// Numbers at one place in weights, what is rounded from them, gradient and states.
pub(crate) struct Block<'a, W, R, G, S> {
    pub weights: &'a mut [W],
    pub rounded: &'a mut [R],
    pub grads: &'a [G],
    pub states: [&'a mut [S]; 3],
}

impl UpdateRule {
    /// How many states it has.
    pub fn num_states(&self) -> usize {
        match self {
            Self::Adam(adam) => 2 + usize::from(adam.amsgrad),
            Self::Sgd(sgd) => sgd.momentum.is_some().into(),
            Self::Adagrad(_) | Self::Lion(_) => 1,
        }
    }

    /// Updates numbers. libtorch's loops do not round the last ones, too few for a vector, where they round the others.
    #[inline(always)]
    pub(crate) fn apply<W: Element, R: Element, G: Element, S: Element, const IS_TAIL: bool>(
        &self,
        block: Block<'_, W, R, G, S>,
    ) {
        match self {
            Self::Adam(adam) => adam.apply::<W, R, G, S, IS_TAIL>(block),
            Self::Sgd(sgd) => sgd.apply::<W, R, G, S, IS_TAIL>(block),
            Self::Adagrad(adagrad) => adagrad.apply(block),
            Self::Lion(lion) => lion.apply(block),
        }
    }
}

/// The product and the sum are rounded at once.
#[inline(always)]
fn fused(a: f32, b: f32, sum: f32) -> f32 {
    a.mul_add(b, sum)
}

impl AdamNumbers {
    #[inline(always)]
    fn apply<W: Element, R: Element, G: Element, S: Element, const IS_TAIL: bool>(
        self,
        Block { weights, rounded, grads, states: [means, squares, maxima] }: Block<'_, W, R, G, S>,
    ) {
        match (self.penalty, self.amsgrad) {
            (None, false) => each_of_three(weights, rounded, grads, means, squares, |w, g, m, v| {
                let (m, v) = self.moments::<IS_TAIL>(self.direction * g, m, v);
                (self.changed(w, m, v), m, v)
            }),
            (Some(penalty), false) => each_of_three(weights, rounded, grads, means, squares, |w, g, m, v| {
                let (m, v) = self.moments::<IS_TAIL>(fused(w, penalty, self.direction * g), m, v);
                (self.changed(w, m, v), m, v)
            }),
            (penalty, true) => {
                each_of_four(weights, rounded, grads, means, squares, maxima, |w, g, m, v, max| {
                    let g = self.direction * g;
                    let g = penalty.map_or(g, |penalty| fused(w, penalty, g));
                    let (m, v) = self.moments::<IS_TAIL>(g, m, v);
                    let max = if max < v || v.is_nan() { v } else { max };
                    (self.changed(w, m, max), m, v, max)
                })
            }
        }
    }

    #[inline(always)]
    fn moments<const IS_TAIL: bool>(&self, grad: f32, mean: f32, square: f32) -> (f32, f32) {
        let start = if self.starts_at_grad { grad } else { mean };
        let mean = fused(self.mix, grad - mean, start);
        let mixed = self.mix2 * grad;
        let square = match IS_TAIL {
            true => fused(square, self.beta2, mixed * grad),
            false => fused(mixed, grad, square * self.beta2),
        };
        (mean, square)
    }

    #[inline(always)]
    fn changed(&self, weight: f32, mean: f32, square: f32) -> f32 {
        weight * self.kept + self.step_size * mean / (square.sqrt() / self.root + self.eps)
    }
}

impl SgdNumbers {
    #[inline(always)]
    fn apply<W: Element, R: Element, G: Element, S: Element, const IS_TAIL: bool>(
        self,
        block: Block<'_, W, R, G, S>,
    ) {
        match self.penalty {
            Some(penalty) => self.directed::<_, _, _, _, IS_TAIL>(block, |w, g| fused(w, penalty, g)),
            None => self.directed::<_, _, _, _, IS_TAIL>(block, |_, g| g),
        }
    }

    #[inline(always)]
    fn directed<W: Element, R: Element, G: Element, S: Element, const IS_TAIL: bool>(
        self,
        Block { weights, rounded, grads, states: [buffers, ..] }: Block<'_, W, R, G, S>,
        with_penalty: impl Fn(f32, f32) -> f32,
    ) {
        let grad = |w: f32, g: f32| with_penalty(w, self.direction * g);
        let changed = |w: f32, g: f32| fused(g, self.step_size, w);
        let Some(momentum) = self.momentum else {
            return each_of_one(weights, rounded, grads, |w, g| changed(w, grad(w, g)));
        };
        let later = |b: f32, g: f32| match IS_TAIL {
            true => fused(b, momentum, g * self.mix),
            false => fused(g, self.mix, b * momentum),
        };
        let ahead = |b: f32, g: f32| fused(b, momentum, g);
        match (self.is_first_step, self.nesterov) {
            (true, false) => each_of_two(weights, rounded, grads, buffers, |w, g, _| {
                let b = grad(w, g);
                (changed(w, b), b)
            }),
            (true, true) => each_of_two(weights, rounded, grads, buffers, |w, g, _| {
                let b = grad(w, g);
                (changed(w, ahead(b, b)), b)
            }),
            (false, false) => each_of_two(weights, rounded, grads, buffers, |w, g, b| {
                let b = later(b, grad(w, g));
                (changed(w, b), b)
            }),
            (false, true) => each_of_two(weights, rounded, grads, buffers, |w, g, b| {
                let g = grad(w, g);
                let b = later(b, g);
                (changed(w, ahead(b, g)), b)
            }),
        }
    }
}

impl AdagradNumbers {
    #[inline(always)]
    fn apply<W: Element, R: Element, G: Element, S: Element>(
        self,
        Block { weights, rounded, grads, states: [sums, ..] }: Block<'_, W, R, G, S>,
    ) {
        let change = |w: f32, g: f32, sum: f32| {
            let sum = fused(g, g, sum);
            (w - self.step_size * g / (sum.sqrt() + self.eps) / self.divisor, sum)
        };
        match self.penalty {
            Some(penalty) => each_of_two(weights, rounded, grads, sums, |w, g, sum| {
                change(w, self.direction * g + w * penalty, sum)
            }),
            None => {
                each_of_two(weights, rounded, grads, sums, |w, g, sum| change(w, self.direction * g, sum))
            }
        }
    }
}

impl LionNumbers {
    #[inline(always)]
    fn apply<W: Element, R: Element, G: Element, S: Element>(
        self,
        Block { weights, rounded, grads, states: [means, ..] }: Block<'_, W, R, G, S>,
    ) {
        each_of_two(weights, rounded, grads, means, |w, g, m| {
            let g = self.direction * g;
            let mixed = |i: usize| m * self.betas[i] + g * self.mixes[i];
            let towards = mixed(0);
            let is = |is: bool| if is { 1.0 } else { 0.0 };
            let sign: f32 = is(towards > 0.0) - is(towards < 0.0); // 0 for NaN, as libtorch's
            (w * self.kept - sign * self.step_size, mixed(1))
        });
    }
}
