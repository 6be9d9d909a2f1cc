//! A step of an optimizer in one pass over memory: weights, gradients and states of float32 or 16 bits are read, updated in float32, and
//! written rounded to their formats; weights of float32 may be written rounded to 16 bits beside, too.

use std::mem::take;

use crate::element::Element;
use crate::kernel::{Kernel, blocks};
use crate::processor::run_vectorized;
use crate::threads::{GRAIN, threads_for};
use crate::update::numbers::{Numbers, NumbersMut};
use crate::update::rules::{Block, UpdateRule};
use crate::views::for_units;

/// Numbers that are worked on at once: copies of them in float32 lie in the first cache.
const BLOCK: usize = 256;
/// Threads' parts of a parameter are multiples of as many numbers, which are whole lines of the cache and whole vectors.
const CUT: usize = 64;

/// What a step does to a parameter, or a part of one.
#[derive(Debug)]
pub struct Update<'a> {
    /// How.
    pub rule: UpdateRule,
    /// Weights.
    pub weights: NumbersMut<'a>,
    /// The gradient, as long.
    pub grad: Numbers<'a>,
    /// The states, as long; those that the rule does not have are left alone.
    pub states: [NumbersMut<'a>; 3],
    /// Where the new weights are written rounded, as long.
    pub rounded: Option<NumbersMut<'a>>,
}

/// Updates parameters. The results do not depend on the number of threads, nor on whether a parameter is in several parts, if these are
/// multiples of 8 numbers (16 if weights and states have 16 bits) but for the last one.
///
/// # Panics
/// If the lengths of a parameter's slices differ.
pub fn update(updates: Vec<Update<'_>>) {
    let mut pieces = Vec::with_capacity(updates.len());
    for update in updates {
        let len = update.weights.len();
        let states = update.states.iter().take(update.rule.num_states()).map(NumbersMut::len);
        let lens = states.chain([update.grad.len()]).chain(update.rounded.iter().map(NumbersMut::len));
        lens.for_each(|other| assert_eq!(other, len, "slices of one parameter"));
        // with states of float32 the steps are those of float32, whatever is rounded
        let in_a_vector = update.weights.in_a_vector().min(update.states[0].in_a_vector());
        pieces.push(Piece { tail: len % in_a_vector, update });
    }
    let total: usize = pieces.iter().map(Piece::len).sum();
    let threads = threads_for(total, GRAIN).max(1);
    if threads == 1 {
        return pieces.into_iter().for_each(run_vectorized);
    }
    let mut shares = shares(pieces, total.div_ceil(threads));
    for_units(&mut shares, 1, 1, |_, shares| {
        shares.iter_mut().flat_map(take).for_each(run_vectorized);
    });
}

/// Parts of about as many numbers.
fn shares(pieces: Vec<Piece<'_>>, len: usize) -> Vec<Vec<Piece<'_>>> {
    let (mut shares, mut share, mut room) = (Vec::new(), Vec::new(), len);
    for mut piece in pieces {
        while piece.len() > room {
            let (first, rest) = piece.split_at(room.div_ceil(CUT) * CUT);
            share.push(first);
            shares.push(take(&mut share));
            (piece, room) = (rest, len);
        }
        room -= piece.len();
        share.push(piece);
    }
    shares.push(share);
    shares
}

/// A part of an update, and how many numbers at its end are the last of a parameter and too few for a vector.
struct Piece<'a> {
    update: Update<'a>,
    tail: usize,
}

impl Piece<'_> {
    fn len(&self) -> usize {
        self.update.weights.len()
    }

    /// The first numbers, and the others.
    fn split_at(self, at: usize) -> (Self, Self) {
        let Self { update: Update { rule, weights, grad, states, rounded }, tail } = self;
        let at = at.min(weights.len());
        let (weights, other_weights) = weights.split_at(at);
        let (grad, other_grad) = grad.split_at(at);
        let [a, b, c] = states.map(|state| state.split_at(at));
        let (rounded, other_rounded) = rounded.map(|rounded| rounded.split_at(at)).unzip();
        let first = Update { rule, weights, grad, states: [a.0, b.0, c.0], rounded };
        let (weights, grad, rounded) = (other_weights, other_grad, other_rounded);
        let rest = Update { rule, weights, grad, states: [a.1, b.1, c.1], rounded };
        let is_cut = rest.weights.len() > 0;
        (
            Self { update: first, tail: if is_cut { 0 } else { tail } },
            Self { update: rest, tail: if is_cut { tail } else { 0 } },
        )
    }
}

impl Kernel for Piece<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { update: Update { rule, weights, grad, states, rounded }, tail } = self;
        let [a, b, c] = states;
        match (weights, rounded, grad, (a, b, c)) {
            (
                NumbersMut::Float32(weights),
                None,
                Numbers::Float32(grads),
                (NumbersMut::Float32(a), NumbersMut::Float32(b), NumbersMut::Float32(c)),
            ) => {
                let none = &mut vec![(); weights.len()][..]; // takes no memory
                apply(rule, tail, Block { weights, rounded: none, grads, states: [a, b, c] });
            }
            (
                NumbersMut::Float32(weights),
                Some(NumbersMut::Bfloat16(rounded)),
                Numbers::Bfloat16(grads),
                (NumbersMut::Float32(a), NumbersMut::Float32(b), NumbersMut::Float32(c)),
            ) => apply(rule, tail, Block { weights, rounded, grads, states: [a, b, c] }),
            (
                NumbersMut::Bfloat16(weights),
                None,
                Numbers::Bfloat16(grads),
                (NumbersMut::Float32(a), NumbersMut::Float32(b), NumbersMut::Float32(c)),
            ) => {
                let none = &mut vec![(); weights.len()][..];
                apply(rule, tail, Block { weights, rounded: none, grads, states: [a, b, c] });
            }
            (NumbersMut::Bfloat16(weights), None, Numbers::Bfloat16(grads), (a, b, c))
                if [&a, &b, &c].iter().all(|state| state.is_bfloat16_or_none()) =>
            {
                let none = &mut vec![(); weights.len()][..];
                let states = [a, b, c].map(NumbersMut::into_bfloat16);
                apply(rule, tail, Block { weights, rounded: none, grads, states });
            }
            (weights, rounded, grad, (a, b, c)) => {
                let update = Update { rule, weights, grad, states: [a, b, c], rounded };
                Piece { update, tail }.run_in_blocks();
            }
        }
    }
}

/// Updates numbers whose formats the loops know, and the last ones as libtorch does.
#[inline(always)]
fn apply<W: Element, R: Element, G: Element, S: Element>(
    rule: UpdateRule,
    tail: usize,
    block: Block<'_, W, R, G, S>,
) {
    let Block { weights, rounded, grads, states } = block;
    let end = weights.len() - tail;
    let (weights, last_weights) = weights.split_at_mut(end);
    let (rounded, last_rounded) = rounded.split_at_mut(end);
    let (grads, last_grads) = grads.split_at(end);
    let [a, b, c] = states.map(|state| state.split_at_mut(end.min(state.len())));
    let states = [a.0, b.0, c.0];
    rule.apply::<_, _, _, _, false>(Block { weights, rounded, grads, states });
    let (weights, rounded, grads, states) = (last_weights, last_rounded, last_grads, [a.1, b.1, c.1]);
    rule.apply::<_, _, _, _, true>(Block { weights, rounded, grads, states });
}

impl Piece<'_> {
    /// The same for numbers of any formats, by way of copies in float32.
    #[inline(always)]
    fn run_in_blocks(self) {
        let Self { update, tail } = self;
        let Update { rule, mut weights, grad, mut states, mut rounded } = update;
        let end = weights.len() - tail;
        let mut scratch = [[0.0; BLOCK]; 5];
        for range in blocks(0..end, BLOCK).chain((tail > 0).then_some(end..end + tail)) {
            let [of_weights, of_grad, of_states @ ..] = &mut scratch;
            let [a, b, c] = &mut states;
            let [of_a, of_b, of_c] = of_states;
            let wide = weights.wide(&range, of_weights);
            let block = Block {
                weights: &mut *wide,
                rounded: &mut vec![(); range.len()][..],
                grads: grad.wide(&range, of_grad),
                states: [a.wide(&range, of_a), b.wide(&range, of_b), c.wide(&range, of_c)],
            };
            match range.start == end {
                false => rule.apply::<_, _, _, _, false>(block),
                true => rule.apply::<_, _, _, _, true>(block),
            }
            if let Some(rounded) = &mut rounded {
                rounded.round(&range, wide);
            }
            weights.round(&range, of_weights);
            for (state, wide) in states.iter_mut().zip(&*of_states) {
                state.round(&range, wide);
            }
        }
    }
}
