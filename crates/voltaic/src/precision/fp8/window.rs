//! In which steps largest magnitudes are measured, and scales made of them.

use super::recipe::DelayedScaling;

/// Whether the largest magnitudes of a forward pass are measured. `run_cnt` counts the passes of a layer from 1 on. With an interval
/// these are the last ones before scales are made: as many as the history has rows.
pub(super) fn is_measured(run_cnt: u64, recipe: &DelayedScaling) -> bool {
    let DelayedScaling { interval, amax_history_len, .. } = *recipe;
    interval == 1 || run_cnt % interval >= interval.saturating_sub(amax_history_len as u64)
}

/// Whether a forward pass makes scales of what was measured before it.
pub(super) fn is_updated(run_cnt: u64, recipe: &DelayedScaling) -> bool {
    recipe.interval == 1 || run_cnt.is_multiple_of(recipe.interval)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_passes_before_an_update_are_measured() {
        let of = |interval, amax_history_len| {
            let recipe = DelayedScaling { interval, amax_history_len, ..DelayedScaling::default() };
            let passes = (1..=12_u64).map(|pass| (is_measured(pass, &recipe), is_updated(pass, &recipe)));
            passes.collect::<Vec<_>>()
        };
        assert!(of(1, 1).iter().chain(&of(1, 5)).all(|pass| *pass == (true, true)));
        for (interval, history, measured) in [
            (4, 1, &[3, 7, 11][..]),
            (4, 2, &[2, 3, 6, 7, 10, 11]),
            (4, 9, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
        ] {
            for (pass, (is_measured, is_updated)) in (1..).zip(of(interval, history)) {
                assert_eq!(is_measured, measured.contains(&pass), "{pass} of {interval}, {history}");
                assert_eq!(is_updated, pass % interval == 0, "{pass} of {interval}, {history}");
            }
        }
    }
}
