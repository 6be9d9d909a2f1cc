//! What ranks decide together.

/// What one rank has been asked by a signal or by its callbacks, on which all ranks have to act together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Votes {
    /// Ctrl-C.
    pub interrupt: bool,
    /// SIGTERM.
    pub terminate: bool,
    /// A callback asked to stop training.
    pub stop: bool,
    /// SIGHUP.
    pub hangup: bool,
    /// SIGUSR1, by which Slurm announces that the job's time is over.
    pub notice: bool,
    /// SIGUSR2, if Slurm is configured to announce it by that.
    pub notice_2: bool,
    /// A rank could not write what it keeps for all, such as rows of loggers: all ranks end with its error.
    pub failure: bool,
    /// How many ranks have no loss in this batch.
    pub without_loss: usize,
}

impl Votes {
    /// How many there are.
    pub const COUNT: usize = 8;

    /// What either of two asks.
    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            interrupt: self.interrupt || other.interrupt,
            terminate: self.terminate || other.terminate,
            stop: self.stop || other.stop,
            hangup: self.hangup || other.hangup,
            notice: self.notice || other.notice,
            notice_2: self.notice_2 || other.notice_2,
            failure: self.failure || other.failure,
            without_loss: 0, // of one batch
        }
    }

    /// The votes as numbers, to be summed over the ranks; the last is [`Votes::without_loss`].
    pub fn numbers(self) -> [f32; Self::COUNT] {
        let Self { interrupt, terminate, stop, hangup, notice, notice_2, failure, without_loss } = self;
        let [a, b, c, d, e, f, g] = [interrupt, terminate, stop, hangup, notice, notice_2, failure]
            .map(|vote| f32::from(u8::from(vote)));
        [a, b, c, d, e, f, g, without_loss as f32]
    }

    /// The votes of all ranks, from the sums of their numbers.
    pub fn from_numbers(numbers: [f32; Self::COUNT]) -> Self {
        let [interrupt, terminate, stop, hangup, notice, notice_2, failure, _] =
            numbers.map(|sum| sum != 0.0);
        let without_loss = numbers[Self::COUNT - 1] as usize;
        Self { interrupt, terminate, stop, hangup, notice, notice_2, failure, without_loss }
    }
}
