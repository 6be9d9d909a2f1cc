//! The losses of a run.

use std::sync::{Arc, Mutex};

use voltaic::Module;
use voltaic::callback::Callback;
use voltaic::module::HookContext;

/// Notes the loss of each batch, divided by `accumulate_grad_batches`.
#[derive(Default, Clone)]
pub struct Losses(pub Arc<Mutex<Vec<f64>>>);

impl Callback for Losses {
    fn on_train_batch_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        self.0.lock().unwrap().push(ctx.loss().unwrap().double_value(&[]));
        Ok(())
    }
}
