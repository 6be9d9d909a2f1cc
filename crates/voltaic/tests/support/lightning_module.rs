//! Modules that are a training step and optimizers, and nothing else.

/// Implements `LightningModule`: `lightning_module!(Net, Batch, Sgd::new(0.1), |net, (x, y), ctx| net.loss(x, y))`. Optimizers that
/// depend on the module are `|net| net.optimizers()`; with `manual(Sgd::new(0.1))` the step runs backward and the optimizers
/// itself.
macro_rules! lightning_module {
    (@ $module:ty, $batch:ty, |$net:pat_param| $optimizers:expr, $step:expr, $is_automatic:literal) => {
        impl ::voltaic::module::LightningModule for $module {
            type Batch = $batch;

            fn automatic_optimization(&self) -> bool {
                $is_automatic
            }

            fn training_step(
                &self,
                batch: &$batch,
                ctx: &mut ::voltaic::module::StepContext,
            ) -> ::anyhow::Result<::voltaic::Tensor> {
                type Step = fn(
                    &$module,
                    &$batch,
                    &mut ::voltaic::module::StepContext,
                ) -> ::anyhow::Result<::voltaic::Tensor>;
                let step: Step = $step;
                step(self, batch, ctx)
            }

            fn configure_optimizers(&self) -> ::anyhow::Result<::voltaic::optim::Optimizers> {
                let configure: fn(&$module) -> ::anyhow::Result<::voltaic::optim::Optimizers> =
                    |$net| ($optimizers).into();
                configure(self)
            }
        }
    };
    ($module:ty, $batch:ty, manual(|$net:ident| $optimizers:expr), $step:expr) => {
        lightning_module!(@ $module, $batch, |$net| $optimizers, $step, false);
    };
    ($module:ty, $batch:ty, |$net:ident| $optimizers:expr, $step:expr) => {
        lightning_module!(@ $module, $batch, |$net| $optimizers, $step, true);
    };
    ($module:ty, $batch:ty, manual($optimizers:expr), $step:expr) => {
        lightning_module!(@ $module, $batch, |_| $optimizers, $step, false);
    };
    ($module:ty, $batch:ty, $optimizers:expr, $step:expr) => {
        lightning_module!(@ $module, $batch, |_| $optimizers, $step, true);
    };
}
