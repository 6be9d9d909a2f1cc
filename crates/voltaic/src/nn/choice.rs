//! Which segments keep their activations, given how much memory there is for that.

/// What a segment costs.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Cost {
    /// Bytes that it keeps for backward if it is not recomputed, beside inputs and weights.
    pub bytes: u64,
    /// Seconds of its forward pass, which a recomputation takes again.
    pub secs: f64,
}

/// Steps that the budget is divided into.
const STEPS: usize = 2048;

/// The segments to keep: those whose recomputation would take the most time, all together, within `budget` bytes. Sizes are rounded up
/// to 1/2048 of the budget, so that what is chosen fits. Source: the 0/1 knapsack problem, by dynamic programming.
pub(crate) fn kept_within(costs: &[Cost], budget: u64) -> Vec<bool> {
    let unit = budget.div_ceil(STEPS as u64).max(1);
    let room = (budget / unit) as usize;
    let mut best = vec![0.0_f64; room + 1];
    let mut takes = vec![vec![false; room + 1]; costs.len()];
    for (cost, takes) in costs.iter().zip(&mut takes) {
        let size = cost.bytes.div_ceil(unit);
        let Some(size) = usize::try_from(size).ok().filter(|size| *size <= room) else { continue };
        for at in (size..=room).rev() {
            let with = best[at - size] + cost.secs;
            if with > best[at] {
                (best[at], takes[at]) = (with, true);
            }
        }
    }
    let (mut at, mut kept) = (room, vec![false; costs.len()]);
    for (index, cost) in costs.iter().enumerate().rev() {
        if takes[index][at] {
            kept[index] = true;
            at -= cost.bytes.div_ceil(unit) as usize;
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(costs: &[(u64, f64)]) -> Vec<Cost> {
        costs.iter().map(|&(bytes, secs)| Cost { bytes, secs }).collect()
    }

    #[test]
    fn the_least_time_within_the_budget() {
        let costs = of(&[(60, 6.0), (50, 5.5), (50, 5.4), (10, 0.1)]);
        assert_eq!(kept_within(&costs, 100), [false, true, true, false]);
        assert_eq!(kept_within(&costs, 70), [true, false, false, true]);
        assert_eq!(kept_within(&costs, 9), [false; 4]);
        assert_eq!(kept_within(&costs, 1 << 40), [true; 4]);
        assert_eq!(kept_within(&costs, 0), [false; 4]);
        assert_eq!(kept_within(&[], 10), Vec::<bool>::new());
    }

    #[test]
    fn what_is_chosen_is_the_best_of_all_choices_and_fits() {
        let mut number = 7_u64;
        let mut next = |below: u64| {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (number >> 33) % below
        };
        for _ in 0..50 {
            let costs: Vec<Cost> =
                (0..8).map(|_| Cost { bytes: next(300), secs: next(100) as f64 }).collect();
            let budget = next(1500);
            let total = |chosen: &dyn Fn(usize) -> bool| {
                let own = costs.iter().enumerate().filter(|(index, _)| chosen(*index));
                own.fold((0, 0.0), |(bytes, secs), (_, cost)| (bytes + cost.bytes, secs + cost.secs))
            };
            let kept = kept_within(&costs, budget);
            let (bytes, secs) = total(&|index| kept[index]);
            assert!(bytes <= budget);
            let all = (0..256_usize).map(|bits| total(&|index| bits >> index & 1 == 1));
            let best = all.filter(|(bytes, _)| *bytes <= budget).map(|(_, secs)| secs).fold(0.0, f64::max);
            assert!((secs - best).abs() < 1e-9, "{costs:?} {budget}: {secs}, not {best}");
        }
    }
}
