//! What a random run is: a network, what its steps and hooks do, and how it is trained.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::random_net::{Rule, Shape, When};
use crate::random_runs::{Activations, Average, Manual, maybe, one};

/// What is done by hand, to a parameter, in each third batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Deed {
    WriteWeight,
    WriteGrad,
    ReplaceGrad,
    DropGrad,
    /// Freezes it, or unfreezes it in the next of these batches.
    Freeze,
    SetRate,
    SetDecay,
    /// Its values in other memory.
    SetData,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Schedule {
    None,
    Step,
    Epoch,
    /// It cycles momentum, too.
    OneCycle,
}

/// How a step reads numbers of the host.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Reads {
    Nothing,
    Epoch,
    BatchIdx,
    GlobalStep,
}

/// What a step logs besides its loss.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Logs {
    Nothing,
    Tensor,
    /// A number that is always the same.
    Number,
    /// One that a hook sets in each batch.
    BatchNumber,
    /// One that a hook sets in each epoch.
    EpochNumber,
}

plan! {
    /// A run. Numbers that stand for modules and parameters are taken modulo how many there are.
    #[derive(Debug, Clone)]
    pub struct Plan {
        pub seed: u64,
        pub blocks: Vec<Shape>,
        /// Called a second time.
        pub twice: Option<usize> = None,
        /// Never called.
        pub unused: Option<usize> = None,
        pub in_place: bool = false,
        pub detached: Option<usize> = None,
        pub no_grad: Option<usize> = None,
        /// A parameter whose squares are a part of the loss.
        pub penalty: Option<usize> = None,
        pub grad_penalty: bool = false,
        /// The step writes to its batch.
        pub writes_batch: bool = false,
        pub frozen: Option<usize> = None,
        pub unfrozen: Option<usize> = None,
        pub by_hand: Option<(When, Deed, usize)> = None,
        /// A module whose mode is switched from epoch to epoch.
        pub modes: Option<usize> = None,
        pub reads: Reads = Reads::Nothing,
        pub logs: Logs = Logs::Nothing,
        pub gives_output: bool = false,
        /// The module drops gradients only in each so many windows.
        pub zeroes_every: usize = 1,
        pub rule: Rule = Rule::Sgd,
        pub has_groups: bool = false,
        pub schedule: Schedule = Schedule::None,
        pub window: u64 = 1,
        pub clip: Option<(bool, f64)> = None,
        pub precision: &'static str = "32-true",
        pub manual: Option<Manual> = None,
        pub average: Average = Average::None,
        pub validates: bool = false,
        /// Validation within an epoch.
        pub validates_within: bool,
        pub saved: Option<usize> = None,
        /// A second fit by the same trainer.
        pub again: bool = false,
        pub deterministic: bool = false,
        /// Samples of the data in excess of what divides.
        pub excess: i64 = 0,
        /// A hook leaves out a sample of each third batch.
        pub cuts: bool = false,
        pub batches: usize,
        pub epochs: i64,
        /// The modules whose calls are checkpointed.
        pub checkpointed: Option<&'static str> = None,
        /// What becomes of what they save.
        pub activations: Activations,
    }
}

fn deed(rng: &mut StdRng) -> (When, Deed, usize) {
    use When::{AfterBackward, BatchEnd, BatchStart, BeforeBackward, BeforeStep, BeforeZeroGrad, EpochStart};
    let when = [
        EpochStart,
        BatchStart,
        BatchStart,
        BeforeZeroGrad,
        BeforeBackward,
        AfterBackward,
        BeforeStep,
        BatchEnd,
    ];
    let deeds = [
        Deed::WriteWeight,
        Deed::WriteGrad,
        Deed::ReplaceGrad,
        Deed::DropGrad,
        Deed::Freeze,
        Deed::SetRate,
        Deed::SetDecay,
        Deed::SetData,
    ];
    (one(rng, when), one(rng, deeds), rng.random_range(0..64))
}

impl Plan {
    /// The run of a seed.
    pub fn of(seed: u64) -> Self {
        let rng = &mut StdRng::seed_from_u64(seed);
        let blocks = (0..rng.random_range(1..4)).map(|_| Shape::random(rng, 0, true)).collect();
        let manual = Manual::random(rng);
        let by_hand = deed(rng);
        let rules = [
            Rule::AdamW,
            Rule::Adam,
            Rule::Sgd,
            Rule::Sgd,
            Rule::Adagrad,
            Rule::RmsProp,
            Rule::Adadelta,
            Rule::Lion,
            Rule::Lamb,
        ];
        let precisions =
            ["32-true", "32-true", "32-true", "32-true", "bf16-mixed", "bf16-mixed", "16-mixed", "bf16-true"];
        let mut plan = Self {
            seed,
            blocks,
            twice: maybe(rng, 4),
            unused: maybe(rng, 6),
            in_place: rng.random(),
            detached: maybe(rng, 6),
            no_grad: maybe(rng, 6),
            penalty: maybe(rng, 4),
            grad_penalty: rng.random_range(0..6) == 0,
            writes_batch: rng.random_range(0..6) == 0,
            frozen: maybe(rng, 5),
            unfrozen: maybe(rng, 6),
            by_hand: (rng.random_range(0..3) == 0).then_some(by_hand),
            modes: maybe(rng, 6),
            reads: match rng.random_range(0..15) {
                0 => Reads::Epoch,
                1 => Reads::BatchIdx,
                2 => Reads::GlobalStep,
                _ => Reads::Nothing,
            },
            logs: one(
                rng,
                [
                    Logs::Nothing,
                    Logs::Tensor,
                    Logs::Tensor,
                    Logs::Tensor,
                    Logs::Number,
                    Logs::BatchNumber,
                    Logs::EpochNumber,
                ],
            ),
            gives_output: rng.random_range(0..4) == 0,
            zeroes_every: one(rng, [1, 1, 1, 1, 1, 2]),
            rule: one(rng, rules),
            has_groups: rng.random(),
            schedule: one(rng, [Schedule::None, Schedule::Step, Schedule::Epoch, Schedule::OneCycle]),
            window: one(rng, [1, 1, 1, 2, 3]),
            clip: one(rng, [None, None, None, Some((true, 0.05)), Some((false, 0.01))]),
            precision: one(rng, precisions),
            manual: (rng.random_range(0..8) == 0).then_some(manual),
            average: Average::random(rng),
            validates: rng.random_range(0..3) == 0,
            validates_within: rng.random(),
            saved: maybe(rng, 4),
            again: rng.random_range(0..8) == 0,
            deterministic: rng.random_range(0..8) == 0,
            excess: one(rng, [0, 0, 1, 2]),
            cuts: rng.random_range(0..5) == 0,
            batches: rng.random_range(3..9),
            epochs: rng.random_range(2..5),
            checkpointed: one(rng, [None, None, Some("Block"), Some("Linear"), Some("blocks.*")]),
            activations: Activations::random(rng),
        };
        // drawn last, so that the cases before it was there stay as they are
        if plan.precision == "32-true" && rng.random_range(0..4) == 0 {
            plan.precision = "fp8";
        }
        plan.reconcile();
        plan
    }

    /// Leaves out what cannot go together.
    fn reconcile(&mut self) {
        if self.manual.is_some() {
            (self.window, self.clip, self.average) = (1, None, Average::None);
            if self.manual.is_some_and(|manual| manual.drops_every > 1) {
                (self.saved, self.validates) = (None, false); // gradients between batches are not in checkpoints
            }
        }
        if self.zeroes_every > 1 {
            self.saved = None; // the same
        }
        // a module that goes on from what it has kept does not do the same twice
        let goes_on = [Shape::Running, Shape::Replaced, Shape::Kept, Shape::Stored];
        if goes_on.iter().any(|shape| self.has(shape)) {
            self.checkpointed = self.checkpointed.filter(|modules| *modules == "Linear");
        }
    }

    /// Whether it has such a module.
    pub fn has(&self, shape: &Shape) -> bool {
        shape.is_among(&self.blocks)
    }
}
