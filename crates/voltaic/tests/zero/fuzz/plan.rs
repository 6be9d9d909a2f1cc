//! What a random run is: a tree of modules, what its steps do with them, and how it is trained.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use voltaic::ffi::FileBackend;

use crate::random_net::{Rule, Shape, When};
use crate::random_runs::{Activations, Average, Manual, maybe, one};

/// A checkpoint of an end, which another run resumes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum End {
    /// Of the last epoch.
    Epoch,
    /// Of training: asked for in `on_train_end`.
    Training,
    /// Of training, in a run of one epoch; the other trains for one more.
    Short,
}

/// What stage 3 has in files, down to single elements, and how they are moved.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct InFiles {
    pub optimizer: bool,
    pub params: bool,
    /// Elements of shards that stay in memory.
    pub max_in_cpu: u64,
    /// Buffers of the optimizer, and of shards.
    pub buffers: (u64, u64),
    pub pipeline_read: bool,
    pub pipeline_write: bool,
    pub backend: FileBackend,
    pub block_size: u64,
    pub sub_group_size: usize,
}

impl Default for InFiles {
    /// Nothing.
    fn default() -> Self {
        Self {
            optimizer: false,
            params: false,
            max_in_cpu: 0,
            buffers: (4, 5),
            pipeline_read: false,
            pipeline_write: false,
            backend: FileBackend::Auto,
            block_size: 1 << 20,
            sub_group_size: 1_000_000_000,
        }
    }
}

plan! {
    /// A run. Numbers that stand for modules and parameters are taken modulo how many there are.
    #[derive(Debug, Clone)]
    pub struct Plan {
        pub blocks: Vec<Shape>,
        /// Called a second time.
        pub twice: Option<usize> = None,
        /// Left out in each third step.
        pub skipped: Option<usize> = None,
        /// Never called.
        pub unused: Option<usize> = None,
        /// Modules are called in another order in each step.
        pub rotates: bool = false,
        pub in_place: bool = false,
        /// Called with what is detached, too.
        pub detached: Option<usize> = None,
        /// Called without grad, too.
        pub no_grad: Option<usize> = None,
        /// A parameter whose squares are a part of the loss.
        pub penalty: Option<usize> = None,
        /// The weight that comes into the network, used once more outside of its module, transposed.
        pub transposed: bool = false,
        /// The squares of the gradient of the inputs are a part of the loss.
        pub grad_penalty: bool = false,
        /// A parameter that is frozen from the beginning.
        pub frozen: Option<usize> = None,
        /// A parameter that is frozen in each other batch.
        pub switched: Option<usize> = None,
        /// One that is frozen until the second epoch.
        pub unfrozen: Option<usize> = None,
        pub by_hand: Option<(When, usize)> = None,
        /// Weights and their norms are read between batches.
        pub reads: bool = false,
        pub rule: Rule = Rule::Sgd,
        pub has_groups: bool = false,
        pub has_schedule: bool = false,
        pub window: u64 = 1,
        pub clip: Option<f64> = None,
        pub manual: Option<Manual> = None,
        /// The batch in which a rank has a NaN.
        pub nan: Option<usize> = None,
        pub average: Average = Average::None,
        pub validates: bool = false,
        /// The batch after which a checkpoint is saved, which another run resumes.
        pub saved: Option<usize> = None,
        /// Samples of the data in excess of what divides.
        pub excess: i64 = 0,
        pub batches: usize,
        pub has_masters: bool = false,
        pub reduce_bucket_size: usize = 1_000_000,
        pub persistence: usize = 0,
        pub prefetch: usize = 0,
        pub live: usize = 1_000_000,
        pub reuse: usize = 0,
        /// The batch in which no rank has a loss, counted over all epochs.
        pub no_loss: Option<usize> = None,
        /// It is the first of an accumulation window.
        pub opens_window: bool = false,
        /// All weights are of 16 bits.
        pub half: bool = false,
        pub end: Option<End> = None,
        /// What has its default in place of its own number: persistence, prefetch, live and reuse.
        pub defaults: [bool; 4] = [false; 4],
        /// Values of validation are logged for each step and for the epoch.
        pub logs_steps: bool = false,
        /// Validates once more after the fit, with more batches on some ranks.
        pub evaluates: bool = false,
        /// The block that is a leaf module, of whose experts ranks call different ones.
        pub leaf: Option<usize> = None,
        /// On an emulated HPU: the share of the optimizer, and whether the shards of the weights are in host memory.
        pub offload: Option<(f64, bool)> = None,
        /// The modules whose calls are checkpointed.
        pub checkpointed: Option<&'static str> = None,
        pub in_files: Option<InFiles> = None,
        /// What becomes of what they save.
        pub activations: Activations,
        /// States that go to the host after each second batch, a bit for each, and whether they are asked back.
        pub offloaded_states: Option<usize> = None,
        /// The fit begins with the weights of a file.
        pub initial: bool = false,
    }
}

impl InFiles {
    fn of(rng: &mut StdRng) -> Self {
        Self {
            optimizer: rng.random_range(0..4) > 0,
            params: rng.random_range(0..4) > 0,
            max_in_cpu: one(rng, [0, 0, 50, 1_000_000]),
            // AdamW needs three at a time, and one more for the gradients
            buffers: (one(rng, [3, 4, 5, 8]), one(rng, [1, 2, 5])),
            pipeline_read: rng.random(),
            pipeline_write: rng.random(),
            backend: one(rng, [FileBackend::Auto, FileBackend::Threads]),
            block_size: one(rng, [1, 4096, 1 << 20]),
            sub_group_size: one(rng, [16, 100, 1_000_000]),
        }
    }
}

impl Plan {
    /// The run of a seed.
    pub fn of(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let rng = &mut rng;
        let blocks = (0..rng.random_range(1..5)).map(|_| Shape::random(rng, 0, false)).collect();
        let manual = Manual::random(rng);
        use When::{AfterBackward, BatchEnd, BatchStart, BeforeBackward, BeforeStep, EpochEnd, Forward};
        let hands = [BatchStart, Forward, BeforeBackward, AfterBackward, BeforeStep, BatchEnd, EpochEnd];
        let hand = one(rng, hands);
        let mut plan = Self {
            blocks,
            twice: maybe(rng, 4),
            skipped: maybe(rng, 4),
            unused: maybe(rng, 6),
            rotates: rng.random_range(0..4) == 0,
            in_place: rng.random(),
            detached: maybe(rng, 6),
            no_grad: maybe(rng, 6),
            penalty: maybe(rng, 4),
            transposed: rng.random_range(0..4) == 0,
            grad_penalty: rng.random_range(0..6) == 0,
            frozen: maybe(rng, 5),
            switched: maybe(rng, 6),
            unfrozen: maybe(rng, 6),
            by_hand: maybe(rng, 3).map(|number| (hand, number)),
            reads: rng.random_range(0..3) == 0,
            rule: one(rng, [Rule::AdamW, Rule::AdamW, Rule::Sgd, Rule::Adagrad, Rule::RmsProp]),
            has_groups: rng.random(),
            has_schedule: rng.random(),
            window: one(rng, [1, 1, 1, 2, 3]),
            clip: one(rng, [None, None, None, Some(0.05)]),
            manual: (rng.random_range(0..5) == 0).then_some(manual),
            nan: maybe(rng, 12),
            average: Average::random(rng),
            validates: rng.random_range(0..3) == 0,
            saved: maybe(rng, 3),
            excess: one(rng, [0, 0, 1, 3]),
            batches: rng.random_range(2..5),
            has_masters: rng.random(),
            reduce_bucket_size: one(rng, [1, 16, 64, 300, 1_000_000]),
            persistence: one(rng, [0, 0, 1, 8, 40, 100_000]),
            prefetch: one(rng, [0, 50, 200, 1_000_000]),
            live: one(rng, [0, 64, 300, 1_000_000]),
            reuse: one(rng, [0, 100, 1_000_000]),
            no_loss: maybe(rng, 5),
            opens_window: rng.random(),
            half: rng.random_range(0..6) == 0,
            end: maybe(rng, 4).map(|number| [End::Epoch, End::Training, End::Short][number % 3]),
            defaults: [(); 4].map(|()| rng.random_range(0..4) == 0),
            logs_steps: rng.random(),
            evaluates: rng.random_range(0..4) == 0,
            leaf: maybe(rng, 4),
            offload: maybe(rng, 3).map(|number| ([0.0, 0.5, 1.0, 1.0][number % 4], number % 3 == 0)),
            checkpointed: one(rng, [None, None, Some("Block"), Some("Linear"), Some("blocks.*")]),
            in_files: None,
            activations: Activations::random(rng),
            offloaded_states: None,
            initial: false,
        };
        if plan.half && rng.random() {
            plan.average = one(rng, [Average::Ema, Average::Ema, Average::Swa]);
        }
        let files = InFiles::of(rng);
        plan.in_files = maybe(rng, 3).map(|_| files);
        plan.offloaded_states = maybe(rng, 2);
        plan.initial = rng.random_range(0..3) == 0;
        plan.reconcile();
        plan
    }

    /// Leaves out what cannot go together, or would make a comparison meaningless.
    fn reconcile(&mut self) {
        if self.manual.is_some() {
            (self.window, self.clip, self.average) = (1, None, Average::None);
            if self.manual.is_some_and(|manual| manual.drops_every > 1) {
                // gradients between batches are not in checkpoints then
                (self.saved, self.end) = (None, None);
            }
            self.no_loss = None; // a step by hand returns what it likes
        }
        if self.window > 1 || self.clip.is_some() || self.manual.is_some() {
            self.rule = Rule::Sgd; // sums may be rounded otherwise, and rules that divide by gradients make much of it
        }
        if self.average == Average::Swa && self.end == Some(End::Short) {
            self.end = Some(End::Training); // how it averages depends on the number of epochs
        }
        if self.leaf.is_some() {
            (self.penalty, self.grad_penalty) = (None, false); // its weights are for its forward only
        }
        let is_frozen = self.frozen.or(self.switched).or(self.unfrozen).is_some();
        if self.is_low() && self.has_masters && self.average != Average::None && is_frozen && self.validates {
            self.by_hand = None; // the average of a frozen weight without a float32 copy is rounded at each validation
        }
        self.half &= !self.is_wide();
        self.offloaded_states = self.offloaded_states.filter(|_| self.offload.is_some()); // else all are on the host
        if self.is_wide() || self.has(&Shape::Double) {
            (self.offload, self.offloaded_states) = (None, None); // HPUs have no float64
        }
        if !self.is_exact() {
            (self.nan, self.grad_penalty) = (None, false); // they make much of it, too
            self.half &= self.manual.is_none(); // steps add up several gradients, in float32 where there are copies
            self.reads &= !self.half; // sums over tensors do, too, where each number has three digits
        }
        self.initial &= !self.is_low(); // ZeRO keeps the float32 of the file, the loop beside it has 16 bits
    }

    /// Whether each stage adds up the same numbers in the same order as data-parallel training.
    pub fn is_exact(&self) -> bool {
        let once = |manual: Manual| manual.drops_every == 1 && !manual.again;
        self.window == 1 && self.clip.is_none() && self.manual.is_none_or(once)
    }

    /// Whether all weights are of 64 bits. The normalization of two samples multiplies differences in rounding, by thousands in a few
    /// steps: only float64 leaves enough digits to compare.
    pub fn is_wide(&self) -> bool {
        !self.is_exact() && self.has(&Shape::BatchNorm)
    }

    /// Whether it has parameters of 16 bits.
    pub fn is_low(&self) -> bool {
        self.half || (self.has(&Shape::Low) && !self.is_wide())
    }

    /// Whether there is no loss in a step, counted over all epochs.
    pub fn has_no_loss(&self, step: usize) -> bool {
        let Some(at) = self.no_loss.map(|at| at % (2 * self.batches)) else { return false };
        let of_epoch = at % self.batches;
        let within = of_epoch % self.window as usize;
        // the last of a window needs a loss if others had one
        let is_last = within + 1 == self.window as usize || of_epoch + 1 == self.batches;
        let excess = if self.opens_window || is_last { within } else { 0 };
        step == at - excess
    }

    /// Whether it has such a module.
    pub fn has(&self, shape: &Shape) -> bool {
        shape.is_among(&self.blocks)
    }
}
