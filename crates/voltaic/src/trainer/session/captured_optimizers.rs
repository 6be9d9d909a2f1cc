//! Optimizers whose steps a training step has captured by hand: whether a replay still does what they would do.

use crate::error::Result;
use crate::optim::Optimizer;

/// Those of one fit.
#[derive(Debug, Default)]
pub(crate) struct CapturedOptimizers(Vec<Captured>);

#[derive(Debug)]
struct Captured {
    optimizer_idx: usize,
    /// What [`Optimizer::prepare_replay`] gave.
    prepared: Option<u64>,
    learning_rates: Vec<f64>,
}

impl CapturedOptimizers {
    /// A step of this optimizer was captured, the first perhaps, which makes its state.
    pub fn note(&mut self, optimizer_idx: usize, optimizer: &mut dyn Optimizer) -> Result<()> {
        let prepared = optimizer.prepare_replay()?;
        self.0.retain(|captured| captured.optimizer_idx != optimizer_idx);
        self.0.push(Captured { optimizer_idx, prepared, learning_rates: learning_rates(optimizer) });
        Ok(())
    }

    /// Puts the learning rates in force where replays read them. Gives what has changed since the capture that a replay
    /// would not follow.
    pub fn refresh(&self, optimizers: &mut [Box<dyn Optimizer>]) -> Result<Option<String>> {
        let mut changed = None;
        for captured in &self.0 {
            let Some(optimizer) = optimizers.get_mut(captured.optimizer_idx) else { continue };
            let prepared = optimizer.prepare_replay()?;
            let what = match (captured.prepared, prepared) {
                (Some(before), Some(now)) if before != now => {
                    "works on other tensors, or with other numbers than a learning rate,"
                }
                (None, _) if captured.learning_rates != learning_rates(optimizer.as_ref()) => {
                    "does not implement prepare_replay and has got another learning rate"
                }
                _ => continue,
            };
            changed = Some(format!("optimizer {} ({}) {what}", captured.optimizer_idx, optimizer.name()));
        }
        Ok(changed)
    }
}

fn learning_rates(optimizer: &dyn Optimizer) -> Vec<f64> {
    optimizer.param_groups().iter().map(|group| group.lr).collect()
}
