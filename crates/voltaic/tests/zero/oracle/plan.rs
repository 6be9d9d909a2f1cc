//! What a random run is: settings of a trainer, what its module does, and how it is interrupted.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use voltaic::Kind;

use crate::random_runs::one;

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Average {
    None,
    Ema,
    /// All weights count the same.
    Equal,
    Swa,
}

/// A hook that fails, or a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Hook {
    BatchStart,
    TrainingStep,
    BeforeBackward,
    AfterBackward,
    BeforeStep,
    BatchEnd,
    ValidationStart,
    /// Of the second batch.
    ValidationStep,
    ValidationEpochEnd,
    ValidationEnd,
    EpochEnd,
    TrainEnd,
}

impl Hook {
    /// Whether the batch is undone.
    pub fn is_within_batch(self) -> bool {
        use Hook::{AfterBackward, BatchStart, BeforeBackward, BeforeStep, TrainingStep};
        matches!(self, BatchStart | TrainingStep | BeforeBackward | AfterBackward | BeforeStep)
    }

    fn is_of_validation(self) -> bool {
        use Hook::{ValidationEnd, ValidationEpochEnd, ValidationStart, ValidationStep};
        matches!(self, ValidationStart | ValidationStep | ValidationEpochEnd | ValidationEnd)
    }
}

/// The checkpoint from which a second run resumes. Batches are counted over all epochs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Restart {
    None,
    /// Saved after a batch.
    Batch(usize),
    /// Saved in `on_train_epoch_end` of the last epoch.
    LastEpoch,
    /// Saved in `on_train_end`.
    TrainEnd,
    /// The last one of `ModelCheckpoint`.
    ModelCheckpoint,
    /// That of `OnExceptionCheckpoint`: the hook fails in this batch, or at its first call after it.
    Failure(usize, Hook),
}

#[derive(Debug, Clone)]
pub struct Plan {
    pub accelerator: &'static str,
    pub ranks: usize,
    /// A name, or `deepspeed` and a stage.
    pub strategy: &'static str,
    pub precision: &'static str,
    pub epochs: usize,
    /// Of an epoch.
    pub batches: usize,
    pub batch_size: usize,
    /// The last batch of an epoch lacks a sample on each rank.
    pub is_last_short: bool,
    /// Batches of an accumulation window.
    pub window: usize,
    pub average: Average,
    /// The epoch from which SWA averages, counted from 1.
    pub swa_start: usize,
    /// Validation after so many batches, or after an epoch if 0.
    pub val_every: Option<usize>,
    /// The second layer is used in odd batches only.
    pub alternates: bool,
    /// The second layer is frozen until the second epoch.
    pub thaws: bool,
    /// The last bias is frozen.
    pub is_frozen: bool,
    /// Manual optimization.
    pub is_manual: bool,
    /// AdamW in place of SGD.
    pub is_adam: bool,
    pub momentum: f64,
    pub clip: Option<f64>,
    /// The batch in which no rank has a loss, counted over all epochs.
    pub no_loss: Option<usize>,
    pub restart: Restart,
    pub is_graphed: bool,
    pub profiler: Option<&'static str>,
    /// With DeepSpeed: where the optimizer and the shards of the weights are, and the share of it that is there.
    pub offload: (&'static str, &'static str, f64),
    /// How files are moved: the system calls, and buffers of the optimizer and of shards.
    pub aio: (&'static str, u64, u64),
    /// Whether the optimizer's files are read ahead, and written behind.
    pub pipeline: (bool, bool),
    /// The modules whose calls are checkpointed.
    pub checkpointed: Option<&'static str>,
    /// Inputs of these calls are kept on the host, with DeepSpeed's settings.
    pub on_host: bool,
}

/// Where something may be kept.
const PLACES: [&str; 3] = ["none", "cpu", "nvme"];

impl Plan {
    /// The run of a seed.
    pub fn of(seed: u64, ranks: usize, accelerator: &'static str) -> Self {
        let rng = &mut StdRng::seed_from_u64(seed);
        let average =
            one(rng, [Average::None, Average::Ema, Average::Ema, Average::Swa, Average::Swa, Average::Equal]);
        let epochs = rng.random_range(1..4) + usize::from(average == Average::Swa);
        let batches = rng.random_range(2..7);
        let batch = |rng: &mut StdRng| rng.random_range(0..epochs * batches);
        let undivided = if ranks == 1 { "auto" } else { "ddp_find_unused_parameters_true" };
        let divided = ["zero1", "zero2", "zero3", "deepspeed1", "deepspeed2", "deepspeed3"];
        let mut plan = Self {
            accelerator,
            ranks,
            strategy: if rng.random_range(0..3) == 0 { undivided } else { one(rng, divided) },
            precision: one(
                rng,
                ["32-true", "32-true", "64-true", "64-true", "bf16-true", "bf16-mixed", "16-mixed"],
            ),
            epochs,
            batches,
            batch_size: rng.random_range(1..4),
            is_last_short: rng.random_range(0..3) == 0,
            window: one(rng, [1, 1, 2, 3, 4]),
            average,
            swa_start: rng.random_range(1..=epochs),
            val_every: one(rng, [None, Some(0), Some(0), Some(1), Some(2)]),
            alternates: rng.random_range(0..3) == 0,
            thaws: rng.random_range(0..3) == 0,
            is_frozen: rng.random_range(0..6) == 0,
            is_manual: rng.random_range(0..5) == 0,
            is_adam: rng.random(),
            momentum: one(rng, [0.0, 0.9]),
            clip: one(rng, [None, None, None, Some(0.1)]),
            no_loss: (rng.random_range(0..5) == 0).then(|| batch(rng)),
            restart: Self::restart(rng, batch),
            is_graphed: rng.random_range(0..3) == 0,
            profiler: one(rng, [None, None, None, None, Some("simple"), Some("pytorch")]),
            offload: (one(rng, PLACES), one(rng, PLACES), one(rng, [1.0, 1.0, 0.5])),
            checkpointed: one(rng, [None, None, Some("Linear"), Some("second")]),
            on_host: rng.random(),
            aio: (one(rng, ["auto", "threads"]), one(rng, [3, 4, 8]), one(rng, [1, 2])),
            pipeline: (rng.random(), rng.random()),
        };
        plan.reconcile();
        plan
    }

    fn restart(rng: &mut StdRng, batch: impl Fn(&mut StdRng) -> usize) -> Restart {
        let at = batch(rng);
        let hook = one(
            rng,
            [
                Hook::BatchStart,
                Hook::TrainingStep,
                Hook::BeforeBackward,
                Hook::AfterBackward,
                Hook::BeforeStep,
                Hook::BatchEnd,
                Hook::ValidationStart,
                Hook::ValidationStep,
                Hook::ValidationEpochEnd,
                Hook::ValidationEnd,
                Hook::EpochEnd,
                Hook::TrainEnd,
            ],
        );
        let others = [
            Restart::None,
            Restart::Batch(at),
            Restart::LastEpoch,
            Restart::TrainEnd,
            Restart::ModelCheckpoint,
        ];
        if rng.random() { Restart::Failure(at, hook) } else { one(rng, others) }
    }

    /// Leaves out what cannot go together, or what the loop beside it does not know.
    fn reconcile(&mut self) {
        if let Restart::Failure(at, _) = self.restart
            && self.is_divided()
            && self.ranks > 1
        {
            self.restart = Restart::Batch(at); // there is no checkpoint of a failure, as each rank would have to save
        }
        if let Restart::Failure(at, hook) = &mut self.restart
            && hook.is_of_validation()
        {
            *at = (*at).min((self.epochs - 1) * self.batches); // there is a validation after it
            self.val_every = self.val_every.or(Some(0));
        }
        if self.is_manual {
            (self.clip, self.no_loss) = (None, None);
            // a batch with steps by hand is not undone
            if matches!(self.restart, Restart::Failure(_, hook) if hook.is_within_batch()) {
                self.restart = Restart::None;
            }
            if self.restart != Restart::None {
                self.window = 1; // its gradients are the module's own, and not in checkpoints
            }
        }
        let ends = |at: &usize| self.window > 1 && self.steps_after(*at);
        self.no_loss = self.no_loss.filter(|at| !ends(at)); // the last batch of a window needs one
        if self.is_deepspeed() && self.precision != "32-true" {
            self.precision = "bf16-true";
        }
        if self.accelerator == "hpu" {
            self.precision = match self.precision {
                "64-true" => "32-true",
                "16-mixed" => "bf16-mixed",
                other => other,
            };
        }
        self.is_adam &= !self.is_low(); // it divides by small gradients, which have few digits
        if self.strategy != "deepspeed3" {
            (self.offload.1, self.offload.2) = ("none", 1.0);
        }
        self.is_graphed &= self.strategy == "auto" && !self.is_manual;
        self.is_last_short &= self.batch_size > 1;
    }

    /// The learning rate.
    pub fn lr(&self) -> f64 {
        if self.is_adam { 0.02 } else { 0.2 }
    }

    pub fn is_deepspeed(&self) -> bool {
        self.strategy.starts_with("deepspeed")
    }

    /// Whether ranks, if there are some, divide the states of optimizers.
    pub fn is_divided(&self) -> bool {
        self.strategy.starts_with("zero") || self.is_deepspeed()
    }

    /// Whether something is computed in 16 bits.
    pub fn is_low(&self) -> bool {
        !matches!(self.precision, "32-true" | "64-true")
    }

    /// The dtype of losses.
    pub fn kind(&self) -> Kind {
        if self.precision == "64-true" { Kind::Double } else { Kind::Float }
    }

    /// Whether an optimizer steps after this batch, counted over all epochs. DeepSpeed's windows do not end with an epoch.
    pub fn steps_after(&self, step: usize) -> bool {
        if self.is_deepspeed() {
            return (step + 1).is_multiple_of(self.window);
        }
        let of_epoch = step % self.batches + 1;
        of_epoch.is_multiple_of(self.window) || of_epoch == self.batches
    }

    /// Whether there is a validation after this batch, counted over all epochs.
    pub fn validates_after(&self, step: usize) -> bool {
        let of_epoch = step % self.batches + 1;
        match self.val_every {
            None => false,
            Some(0) => of_epoch == self.batches,
            Some(every) => of_epoch.is_multiple_of(every),
        }
    }

    /// Samples of all ranks in a batch, and in an epoch.
    pub fn samples(&self) -> (i64, i64) {
        let batch = self.ranks * self.batch_size;
        let missing = if self.is_last_short { self.ranks } else { 0 };
        (batch as i64, (self.batches * batch - missing) as i64)
    }

    pub fn val_samples(&self) -> i64 {
        4 * self.ranks as i64
    }
}
