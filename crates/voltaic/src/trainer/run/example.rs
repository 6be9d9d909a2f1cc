//! The module's forward pass on its example inputs, before the first batch.

use std::sync::{Arc, Mutex};

use tch::Tensor;

use crate::accelerator::rng;
use crate::callback::{ModelSummary, watch_sizes};
use crate::data::Batch;
use crate::error::Result;
use crate::module::{CallSizes, LightningModule};
use crate::nn::{ModuleExt, ModuleHooks, UnshardWatch, set_training, set_training_modes, training_modes};
use crate::trainer::config::callbacks::is_a;
use crate::trainer::session::hooks::{guarded, without_panic};
use crate::trainer::session::session::Session;

impl<M: LightningModule> Session<'_, M> {
    /// Notes the sizes of each layer's inputs and outputs for `ModelSummary`, if the module has example inputs. Random numbers,
    /// modes and gradients are afterwards as they were.
    ///
    /// # Collective
    /// All ranks must call it: weights may be sharded over them.
    pub(crate) fn run_example(&mut self) -> Result<()> {
        self.run.facts.example_sizes = None;
        let rng = rng::states(self.plan.device)?;
        let Some(inputs) = guarded(|| Ok(self.module.example_input_array()))
            .map_err(|source| self.hook_error("example_input_array", source))?
        else {
            return Ok(());
        };
        let has_summary = self.run.callbacks.iter().any(|callback| is_a::<ModelSummary>(callback.as_ref()));
        if self.run.world().of_rank_zero(has_summary)? {
            let sizes = self.sizes_of(inputs)?;
            self.run.facts.example_sizes = Some(Arc::new(sizes));
        }
        rng::set_states(&rng)
    }

    fn sizes_of(&mut self, inputs: Vec<Tensor>) -> Result<CallSizes> {
        let mut inputs = inputs.move_to(self.plan.device)?;
        if let Some(dtype) = self.plan.precision.true_dtype() {
            inputs = inputs.to_dtype(dtype)?;
        }
        let (calls, sizes) = (ModuleHooks::new(), Arc::new(Mutex::new(CallSizes::new())));
        let _watch = watch_sizes(&calls, &sizes);
        let modes = training_modes(self.module);
        set_training(self.module, false);
        self.run.engine.strategy.begin_forward(self.module, true)?;
        let watch = UnshardWatch::begin();
        let done = {
            let _no_grad = tch::no_grad_guard();
            let _region = self.plan.enter_precision()?;
            let module = &*self.module;
            calls.within(module.as_dyn(), || without_panic(|| module.forward_example(&inputs)))
        };
        set_training_modes(self.module, &mut modes.into_iter());
        if let Some(failure) = watch.end() {
            return Err(failure);
        }
        done?.map_err(|source| self.hook_error("forward_example", source))?;
        let sizes = sizes.lock().map(|mut sizes| std::mem::take(&mut *sizes));
        Ok(sizes.unwrap_or_default())
    }
}
