//! Weights that a graph has computed results from which it keeps.

use std::ops::Range;

use tch::Tensor;

use crate::ffi::FrozenMemory;

/// The weights, and how they were when the results were computed.
#[derive(Debug)]
pub(super) struct FrozenWeights {
    /// Notes what is written to them without a new version: by replays, collectives and kernels.
    memory: FrozenMemory,
    weights: Vec<Tensor>,
    /// Their versions. That they lie where they lay is what each replay asks of all tensors.
    seen: Vec<i64>,
}

impl FrozenWeights {
    /// These, which lie in memory of these addresses.
    pub(super) fn new(weights: Vec<Tensor>, memory: Vec<Range<usize>>) -> Self {
        Self { weights, memory: FrozenMemory::new(memory), seen: Vec::new() }
    }

    /// Whether the results hold. If they do not, they are to be computed now, from the weights as they are.
    pub(super) fn hold(&mut self) -> bool {
        let was_fresh = self.memory.refresh();
        let now = self.weights.iter().map(Tensor::f_internal_version).collect::<Result<Vec<_>, _>>();
        // a tensor that was made in inference mode has no version, and may change unseen
        let Ok(now) = now else { return false };
        let holds = was_fresh && now == self.seen;
        self.seen = now;
        holds
    }

    /// What was to be computed was not.
    pub(super) fn forget(&mut self) {
        self.memory.forget();
    }
}
