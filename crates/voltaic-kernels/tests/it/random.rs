//! Numbers that are the same in every run.

/// A linear congruential generator.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// From `low` to `high`, both included.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.next() as usize % (high - low + 1)
    }

    pub fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.between(0, all.len() - 1)]
    }

    pub fn is_heads(&mut self) -> bool {
        self.between(0, 1) == 1
    }

    /// From -1 to 1.
    pub fn number(&mut self) -> f64 {
        self.next() as f64 / (1_u64 << 30) as f64 - 1.0
    }

    pub fn numbers(&mut self, len: usize) -> Vec<f64> {
        (0..len).map(|_| self.number()).collect()
    }
}
