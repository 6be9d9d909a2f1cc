//! What a random run is: a network, what its steps and hooks do, and how it is trained.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::random_runs::{Activations, Average, Manual, maybe, one};

/// A module from 8 features to 8.
#[derive(Debug, Clone, PartialEq)]
pub enum Shape {
    Linear {
        bias: bool,
    },
    /// Two layers with so many features between them.
    Bottleneck(i64),
    /// With the channels last in memory, perhaps.
    Conv {
        last: bool,
    },
    BatchNorm,
    LayerNorm,
    Embedding,
    Dropout,
    Attention,
    /// Parameters of its own: one for each feature, scalar, of one element, empty, and one that is never used.
    Bare,
    /// The weight of the layer that comes into the network, from another module.
    Tied,
    /// Views, slices, and operators in place on them.
    Views,
    /// A buffer that the forward pass updates and uses.
    Running,
    /// A buffer whose memory the forward pass replaces.
    Replaced,
    /// A tensor of the step before, which the module keeps and uses.
    Kept,
    /// A tensor of the step, which the module keeps and a hook reads.
    Stored,
    /// Times a number that a hook sets in each epoch.
    EpochFactor,
    /// Times a number that a hook sets in each batch.
    BatchFactor,
    /// Goes one of two ways by a flag that a hook sets in each epoch.
    EpochBranch,
    /// Goes one of two ways by what the data hold.
    DataBranch,
    /// As many rows as there are positive ones.
    Masked,
    /// Random numbers that it draws itself.
    Noise,
    /// Only used if the batch has an even number of samples.
    EvenOnly,
    /// Modules within one that has a parameter, which it uses before and after them.
    Nested(Vec<Shape>),
}

/// When somebody does something by hand.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum When {
    EpochStart,
    BatchStart,
    BeforeZeroGrad,
    BeforeBackward,
    AfterBackward,
    BeforeStep,
    BatchEnd,
}

/// What is done by hand, to a parameter, in each third batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Deed {
    WriteWeight,
    WriteGrad,
    ReplaceGrad,
    DropGrad,
    /// Freezes it, or thaws it in the next of these batches.
    Freeze,
    SetRate,
    SetDecay,
    /// Its values in other memory.
    SetData,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    AdamW,
    Adam,
    Sgd,
    Adagrad,
    RmsProp,
    Adadelta,
    Lion,
    Lamb,
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

/// A run. Numbers that stand for modules and parameters are taken modulo how many there are.
#[derive(Debug, Clone)]
pub struct Plan {
    pub seed: u64,
    pub blocks: Vec<Shape>,
    /// Called a second time.
    pub twice: Option<usize>,
    /// Never called.
    pub unused: Option<usize>,
    pub in_place: bool,
    pub detached: Option<usize>,
    pub no_grad: Option<usize>,
    /// A parameter whose squares are a part of the loss.
    pub penalty: Option<usize>,
    pub grad_penalty: bool,
    /// The step writes to its batch.
    pub writes_batch: bool,
    pub frozen: Option<usize>,
    pub thawed: Option<usize>,
    pub by_hand: Option<(When, Deed, usize)>,
    /// A module whose mode is switched from epoch to epoch.
    pub modes: Option<usize>,
    pub reads: Reads,
    pub logs: Logs,
    pub gives_output: bool,
    /// The module drops gradients only in each so many windows.
    pub zeroes_every: usize,
    pub rule: Rule,
    pub has_groups: bool,
    pub schedule: Schedule,
    pub window: u64,
    pub clip: Option<(bool, f64)>,
    pub precision: &'static str,
    pub manual: Option<Manual>,
    pub average: Average,
    pub validates: bool,
    /// Validation within an epoch.
    pub validates_within: bool,
    pub saved: Option<usize>,
    /// A second fit by the same trainer.
    pub again: bool,
    pub deterministic: bool,
    /// Samples of the data in excess of what divides.
    pub excess: i64,
    /// A hook leaves out a sample of each third batch.
    pub cuts: bool,
    pub batches: usize,
    pub epochs: i64,
    /// The modules whose calls are checkpointed.
    pub checkpointed: Option<&'static str>,
    /// What becomes of what they save.
    pub activations: Activations,
}

fn shape(rng: &mut StdRng, depth: usize) -> Shape {
    let most = if depth > 1 { 26 } else { 28 };
    match rng.random_range(0..most) {
        0..=2 => Shape::Linear { bias: rng.random() },
        3 => Shape::Bottleneck([1, 3, 7, 33][rng.random_range(0..4)]),
        4 => Shape::Conv { last: rng.random() },
        5 => Shape::BatchNorm,
        6 => Shape::LayerNorm,
        7 => Shape::Embedding,
        8 => Shape::Dropout,
        9 => Shape::Attention,
        10 | 11 => Shape::Bare,
        12 => Shape::Tied,
        13 | 14 => Shape::Views,
        15 => Shape::Running,
        16 => Shape::Noise,
        17 | 18 => Shape::EvenOnly,
        19 => one(rng, [Shape::Kept, Shape::BatchFactor, Shape::DataBranch, Shape::Masked]),
        20 => Shape::Replaced,
        21 => Shape::Stored,
        22 => one(rng, [Shape::EpochFactor, Shape::EpochBranch]),
        23 => Shape::BatchNorm,
        24 | 25 => Shape::Linear { bias: true },
        _ => Shape::Nested((0..rng.random_range(1..3)).map(|_| shape(rng, depth + 1)).collect()),
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
        let blocks = (0..rng.random_range(1..4)).map(|_| shape(rng, 0)).collect();
        let manual = Manual { toggles: rng.random(), drops_every: one(rng, [1, 1, 2]), again: rng.random() };
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
            thawed: maybe(rng, 6),
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
            average: one(rng, [Average::None, Average::None, Average::None, Average::Ema, Average::Swa]),
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
            activations: one(
                rng,
                [Activations::Recompute, Activations::Save, Activations::Save, Activations::Offload],
            ),
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
        fn is_among(shapes: &[Shape], shape: &Shape) -> bool {
            shapes.iter().any(|own| match own {
                Shape::Nested(inner) => is_among(inner, shape),
                own => own == shape,
            })
        }
        is_among(&self.blocks, shape)
    }

    /// Leaves out the named parts of it, to find out which one a failure needs.
    pub fn without(mut self, parts: &str) -> Self {
        for part in parts.split(',').filter(|part| !part.is_empty()) {
            match part {
                "twice" => self.twice = None,
                "checkpointed" => self.checkpointed = None,
                "unused" => self.unused = None,
                "in_place" => self.in_place = false,
                "detached" => self.detached = None,
                "no_grad" => self.no_grad = None,
                "penalty" => self.penalty = None,
                "grad_penalty" => self.grad_penalty = false,
                "writes_batch" => self.writes_batch = false,
                "frozen" => self.frozen = None,
                "thawed" => self.thawed = None,
                "by_hand" => self.by_hand = None,
                "modes" => self.modes = None,
                "reads" => self.reads = Reads::Nothing,
                "logs" => self.logs = Logs::Nothing,
                "output" => self.gives_output = false,
                "zeroes" => self.zeroes_every = 1,
                "rule" => self.rule = Rule::Sgd,
                "groups" => self.has_groups = false,
                "schedule" => self.schedule = Schedule::None,
                "window" => self.window = 1,
                "clip" => self.clip = None,
                "precision" => self.precision = "32-true",
                "manual" => self.manual = None,
                "average" => self.average = Average::None,
                "validates" => self.validates = false,
                "saved" => self.saved = None,
                "again" => self.again = false,
                "deterministic" => self.deterministic = false,
                "excess" => self.excess = 0,
                "cuts" => self.cuts = false,
                block => drop(self.blocks.remove(block.parse().expect("a part or the number of a block"))),
            }
        }
        self.reconcile();
        self
    }
}
