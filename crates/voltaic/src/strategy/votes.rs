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
}

impl Votes {
    /// What either of two asks.
    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            interrupt: self.interrupt || other.interrupt,
            terminate: self.terminate || other.terminate,
            stop: self.stop || other.stop,
        }
    }

    pub(crate) fn numbers(self) -> [f32; 3] {
        [self.interrupt, self.terminate, self.stop].map(|vote| f32::from(u8::from(vote)))
    }

    pub(crate) fn from_numbers(numbers: [f32; 3]) -> Self {
        let [interrupt, terminate, stop] = numbers.map(|sum| sum != 0.0);
        Self { interrupt, terminate, stop }
    }
}
