//! Draws a token from logits, on the host in float32, so that all devices draw the same.

use std::collections::HashSet;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::config::GenerationConfig;
use crate::error::{ModuleError, Problem, Result};

/// Draws the tokens of one sequence.
pub(super) struct Sampler {
    rng: StdRng,
    seen: HashSet<i64>,
}

impl Sampler {
    /// For the sequence of this index that begins with `prompt`.
    pub fn new(config: &GenerationConfig, index: usize, prompt: &[i64]) -> Self {
        // far apart for neighbours: the golden ratio, as in SplitMix64
        let seed = config.seed ^ (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self { rng: StdRng::seed_from_u64(seed), seen: prompt.iter().copied().collect() }
    }

    /// The next token, for the logits of all.
    ///
    /// # Errors
    /// [`ModuleError::Input`] if no token has a logit that is a number.
    pub fn next(&mut self, logits: &[f32], config: &GenerationConfig) -> Result<i64> {
        let allowed = config.vocab_size.map_or(logits.len(), |n| logits.len().min(n as usize));
        let mut logits: Vec<f32> = logits[..allowed].to_vec();
        for &token in &self.seen {
            if let Some(logit) = usize::try_from(token).ok().and_then(|token| logits.get_mut(token)) {
                let penalty = config.repetition_penalty as f32;
                *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            }
        }
        let token = match config.temperature {
            0.0 => most_likely(&logits),
            temperature => self.draw(&mut logits, temperature as f32, config),
        };
        let token = token.ok_or_else(|| ModuleError::Input {
            layer: "generate".to_owned(),
            problem: Problem::new(
                format!("the model's {} logits of a next token are not finite", logits.len()),
                "use weights of a run whose loss is finite, or a higher precision",
            ),
        })?;
        self.seen.insert(token);
        Ok(token)
    }

    fn draw(&mut self, logits: &mut [f32], temperature: f32, config: &GenerationConfig) -> Option<i64> {
        let largest =
            logits.iter().copied().filter(|logit| !logit.is_nan()).fold(f32::NEG_INFINITY, f32::max);
        if !largest.is_finite() {
            return None;
        }
        if let Some(top_k) = config.top_k.filter(|&k| k < logits.len()) {
            let mut sorted: Vec<f32> = logits.to_vec();
            let (_, &mut least, _) = sorted.select_nth_unstable_by(top_k - 1, |a, b| b.total_cmp(a));
            logits.iter_mut().filter(|logit| **logit < least).for_each(|logit| *logit = f32::NEG_INFINITY);
        }
        // less the largest before the division, which a small temperature would make infinite
        let mut weights: Vec<f64> =
            logits.iter().map(|&logit| f64::from((logit - largest) / temperature).exp()).collect();
        weights.iter_mut().filter(|weight| weight.is_nan()).for_each(|weight| *weight = 0.0);
        if config.top_p < 1.0 {
            keep_nucleus(&mut weights, config.top_p);
        }
        let total: f64 = weights.iter().sum();
        let mut left = self.rng.random::<f64>() * total;
        let drawn = weights.iter().position(|&weight| {
            left -= weight;
            weight > 0.0 && left < 0.0
        });
        // rounding may leave a little
        drawn.or_else(|| weights.iter().rposition(|&weight| weight > 0.0)).map(|token| token as i64)
    }
}

/// The first of the largest.
fn most_likely(logits: &[f32]) -> Option<i64> {
    let mut best: Option<(usize, f32)> = None;
    for (token, &logit) in logits.iter().enumerate() {
        if !logit.is_nan() && best.is_none_or(|(_, largest)| logit > largest) {
            best = Some((token, logit));
        }
    }
    best.filter(|(_, logit)| logit.is_finite()).map(|(token, _)| token as i64)
}

/// Leaves the largest weights whose sum first reaches `top_p` of all, at least one, and makes the others 0.
fn keep_nucleus(weights: &mut [f64], top_p: f64) {
    let total: f64 = weights.iter().sum();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]).then(a.cmp(&b)));
    let mut sum = 0.0;
    for token in order {
        if sum >= top_p * total {
            weights[token] = 0.0;
        }
        sum += weights[token];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(logits: &[f32], config: &GenerationConfig) -> Vec<usize> {
        let mut counts = vec![0; logits.len()];
        let mut sampler = Sampler::new(config, 0, &[]);
        for _ in 0..20_000 {
            sampler.seen.clear();
            counts[sampler.next(logits, config).unwrap() as usize] += 1;
        }
        counts
    }

    /// Probabilities by hand: 8 : 4 : 2 : 1 : 1.
    #[test]
    fn tokens_are_drawn_by_their_probabilities() {
        let logits = [8.0_f32, 4.0, 2.0, 1.0, 1.0].map(f32::ln);
        let all = GenerationConfig::default();
        let cases = [
            (all.clone(), [8.0, 4.0, 2.0, 1.0, 1.0]),
            (GenerationConfig { temperature: 0.5, ..all.clone() }, [64.0, 16.0, 4.0, 1.0, 1.0]),
            (GenerationConfig { temperature: 0.0, ..all.clone() }, [1.0, 0.0, 0.0, 0.0, 0.0]),
            (GenerationConfig { top_k: Some(2), ..all.clone() }, [8.0, 4.0, 0.0, 0.0, 0.0]),
            (GenerationConfig { top_k: Some(4), ..all.clone() }, [8.0, 4.0, 2.0, 1.0, 1.0]), // the last two alike
            (GenerationConfig { top_p: 0.5, ..all.clone() }, [1.0, 0.0, 0.0, 0.0, 0.0]),
            (GenerationConfig { top_p: 0.6, ..all.clone() }, [8.0, 4.0, 0.0, 0.0, 0.0]),
            (GenerationConfig { top_p: 0.9, ..all.clone() }, [8.0, 4.0, 2.0, 1.0, 0.0]),
            (GenerationConfig { vocab_size: Some(3), ..all.clone() }, [8.0, 4.0, 2.0, 0.0, 0.0]),
            (GenerationConfig { top_k: Some(3), top_p: 0.8, ..all }, [8.0, 4.0, 0.0, 0.0, 0.0]),
        ];
        for (config, weights) in cases {
            let total: f64 = weights.iter().sum();
            for (count, weight) in draws(&logits, &config).into_iter().zip(weights) {
                let (p, n) = (weight / total, 20_000.0);
                let deviation = (n * p * (1.0 - p)).sqrt();
                assert!((count as f64 - n * p).abs() <= 4.5 * deviation, "{config:?}: {count} for {weight}");
            }
        }
    }

    #[test]
    fn what_was_seen_is_penalised_once() {
        let config =
            GenerationConfig { repetition_penalty: 2.0, temperature: 0.0, ..GenerationConfig::default() };
        // 3 becomes 1.5, -1 becomes -2
        let mut sampler = Sampler::new(&config, 0, &[0, 0, 7]);
        assert_eq!(sampler.next(&[3.0, 1.6, -1.0], &config).unwrap(), 1);
        assert_eq!(sampler.next(&[3.0, 1.6, -1.0], &config).unwrap(), 0);
        let mut sampler = Sampler::new(&config, 0, &[0]);
        assert_eq!(sampler.next(&[-1.0, -1.9], &config).unwrap(), 1);
    }

    #[test]
    fn logits_that_are_no_numbers_are_never_drawn() {
        for temperature in [0.0, 1.0] {
            let config = GenerationConfig { temperature, ..GenerationConfig::default() };
            let next = |logits: &[f32]| Sampler::new(&config, 0, &[]).next(logits, &config);
            assert_eq!(next(&[f32::NAN, 1.0, f32::NEG_INFINITY]).unwrap(), 1);
            for bad in [f32::NAN, f32::NEG_INFINITY, f32::INFINITY] {
                let error = next(&[bad, bad]).unwrap_err().to_string();
                assert!(error.contains("2 logits") && error.contains("finite"), "{error}");
            }
        }
    }

    #[test]
    fn a_temperature_near_0_takes_the_most_likely() {
        let config = GenerationConfig { temperature: 1e-30, ..GenerationConfig::default() };
        assert_eq!(draws(&[1.0, 2.0, 1.5], &config), [0, 20_000, 0]);
    }
}
