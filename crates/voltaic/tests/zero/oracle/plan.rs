//! What a random run is: settings of a trainer, what its module does, and how it is interrupted.

use std::ops::Range;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use voltaic::Kind;
use voltaic::optim::Interval;

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

/// Which batches do not use the second layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Skips {
    None,
    Even,
    All,
}

/// The run that goes on from the checkpoint of a batch, where it is another one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Then {
    pub ranks: usize,
    pub strategy: &'static str,
    pub batch_size: usize,
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
    pub skips: Skips,
    /// The second layer is frozen in these batches, counted over all epochs.
    pub frozen: Range<usize>,
    /// The last bias is frozen.
    pub is_frozen: bool,
    /// Manual optimization.
    pub is_manual: bool,
    /// AdamW in place of SGD.
    pub is_adam: bool,
    pub momentum: f64,
    /// A step is so short that weights of 16 bits keep no trace of it; their float32 copies do.
    pub has_short_steps: bool,
    /// When the learning rate becomes smaller.
    pub schedule: Option<Interval>,
    pub clip: Option<f64>,
    /// The batch in which no rank has a loss, counted over all epochs.
    pub no_loss: Option<usize>,
    pub restart: Restart,
    pub then: Option<Then>,
    /// A loop of `Fabric`'s calls in place of the trainer.
    pub is_own_loop: bool,
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
        let unsharded = if ranks == 1 { "auto" } else { "ddp_find_unused_parameters_true" };
        let sharded = ["zero1", "zero2", "zero3", "deepspeed1", "deepspeed2", "deepspeed3"];
        let mut plan = Self {
            accelerator,
            ranks,
            strategy: if rng.random_range(0..3) == 0 { unsharded } else { one(rng, sharded) },
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
            skips: if rng.random_range(0..3) == 0 { Skips::Even } else { Skips::None },
            frozen: 0..if rng.random_range(0..3) == 0 { batches } else { 0 },
            is_frozen: rng.random_range(0..6) == 0,
            is_manual: rng.random_range(0..5) == 0,
            is_adam: rng.random(),
            momentum: one(rng, [0.0, 0.9]),
            has_short_steps: false,
            schedule: None,
            clip: one(rng, [None, None, None, Some(0.1)]),
            no_loss: (rng.random_range(0..5) == 0).then(|| batch(rng)),
            restart: Self::restart(rng, batch),
            then: None,
            is_own_loop: false,
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
        // a branch that differs after two equal captures is not seen
        self.is_graphed &= self.no_loss.is_none() && (self.skips == Skips::None || self.window == 1);
        // a validation before the next step saves nothing
        if self.restart == Restart::ModelCheckpoint && (1..self.window).contains(&self.val_every.unwrap_or(0))
        {
            self.restart = Restart::None;
        }
        self.is_last_short &= self.batch_size > 1;
    }

    /// The run of a seed that another strategy and number of ranks go on with, some with other batches.
    pub fn moved(seed: u64) -> Self {
        let ranks = 1 + seed as usize % 2;
        let mut plan = Self::of(seed, ranks, "cpu");
        let rng = &mut StdRng::seed_from_u64(!seed);
        let strategies = ["ddp_find_unused_parameters_true", "zero1", "zero2", "zero3"];
        let strategy = |rng: &mut StdRng, ranks| match one(rng, strategies) {
            name if ranks == 1 && !name.starts_with("zero") => "auto",
            name => name,
        };
        plan.strategy = strategy(rng, ranks);
        plan.precision = one(rng, ["bf16-true", "bf16-true", "bf16-true", "32-true", "64-true"]);
        plan.has_short_steps = plan.is_low();
        let (others, global_batch) = one(rng, [(1, 2), (1, 4), (2, 2), (2, 4), (3, 6)]);
        (plan.batches, plan.batch_size) = (12 / global_batch, global_batch / ranks);
        (plan.is_last_short, plan.is_manual, plan.is_graphed) = (false, false, false);
        (plan.average, plan.val_every, plan.profiler, plan.no_loss) = (Average::None, None, None, None);
        plan.skips = one(rng, [Skips::None, Skips::Even, Skips::All]);
        let all = plan.epochs * plan.batches;
        let first = if rng.random() { 0 } else { rng.random_range(0..all) };
        plan.frozen = first..rng.random_range(first..=all);
        plan.is_frozen = rng.random();
        plan.is_adam = rng.random();
        plan.schedule = one(rng, [None, Some(Interval::Step), Some(Interval::Epoch)]);
        let mut at = rng.random_range(0..all);
        let strategy = strategy(rng, others);
        let mut batch_size = global_batch / others;
        if rng.random_range(0..3) == 0 {
            batch_size = [1, 2, 3, 4, 6, 12][rng.random_range(0..6)].max(others) / others;
            while !plan.steps_after(at) {
                at += 1; // gradients of a window are not those of other batches
            }
        }
        plan.restart = Restart::Batch(at);
        plan.then = Some(Then { ranks: others, strategy, batch_size });
        plan.is_own_loop = rng.random_range(0..3) == 0;
        plan
    }

    /// The same in a loop of the user's own, as far as it has it.
    pub fn of_own_loop(mut self, schedule: Option<Interval>) -> Self {
        (self.average, self.val_every, self.profiler) = (Average::None, None, None);
        (self.is_manual, self.is_graphed, self.schedule) = (false, false, schedule);
        self.restart = match self.restart {
            Restart::Batch(at) | Restart::Failure(at, _) => Restart::Batch(at),
            _ => Restart::None,
        };
        self.no_loss = self.no_loss.filter(|at| !self.steps_after(*at)); // a step needs gradients
        self.has_short_steps = self.is_low(); // longer ones may diverge
        self
    }

    /// The learning rate.
    pub fn lr(&self) -> f64 {
        let lr = if self.is_adam { 0.02 } else { 0.2 };
        // long steps of rounded gradients may diverge
        lr / if self.has_short_steps {
            32.0
        } else if self.is_low() {
            4.0
        } else {
            1.0
        }
    }

    /// AdamW's `eps`. A large one does not divide by gradients that have few digits.
    pub fn eps(&self) -> f64 {
        if self.has_short_steps { 0.1 } else { 1e-4 }
    }

    /// Whether a batch, counted over all epochs, uses the second layer.
    pub fn uses_second(&self, step: usize) -> bool {
        match self.skips {
            Skips::None => true,
            Skips::Even => step % 2 == 1,
            Skips::All => false,
        }
    }

    /// The second run.
    pub fn second(&self) -> Self {
        match self.then {
            None => self.clone(),
            Some(Then { ranks, strategy, batch_size }) => {
                let batches = self.batches * self.ranks * self.batch_size / (ranks * batch_size);
                Self { ranks, strategy, batch_size, batches, ..self.clone() }
            }
        }
    }

    /// Each run, and which batches of its own, counted over all epochs, it trains: no sample that was seen, but for the last window of
    /// other batches, which ends the epoch.
    pub fn parts(&self) -> Vec<(Self, Range<usize>)> {
        let (Some(_), Restart::Batch(at)) = (self.then, self.restart) else {
            return vec![(self.clone(), 0..self.epochs * self.batches)];
        };
        let second = self.second();
        let (epoch, done) = (at / self.batches, at % self.batches + 1);
        let next = if done == self.batches {
            second.batches
        } else if second.batches == self.batches {
            done
        } else {
            let last = second.batches - 1;
            let unseen = (done * second.batches).div_ceil(self.batches);
            unseen.next_multiple_of(self.window).min(last - last % self.window)
        };
        let all = epoch * second.batches + next..self.epochs * second.batches;
        vec![(self.clone(), 0..at + 1), (second, all)]
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
