//! A callback made of closures.

use crate::checkpoint::Checkpoint;
use crate::data::Stage;
use crate::error::Error;
use crate::lightning::Callback;
use crate::module::HookContext;
use crate::nn::Module;

type Hook = Box<dyn FnMut(&mut HookContext, &mut dyn Module) -> anyhow::Result<()> + Send>;
type SharedHook = Box<dyn FnMut(&mut HookContext, &dyn Module) -> anyhow::Result<()> + Send>;
type ExceptionHook = Box<dyn FnMut(&mut HookContext, &Error) + Send>;
type SaveHook = Box<dyn FnMut(&mut HookContext, &mut Checkpoint) -> anyhow::Result<()> + Send>;
type LoadHook = Box<dyn FnMut(&Checkpoint) -> anyhow::Result<()> + Send>;
type StageHook = Box<dyn FnMut(Stage, &mut dyn Module) -> anyhow::Result<()> + Send>;

/// Makes the struct with a closure for each hook, the setters, and the hooks that call them.
macro_rules! lambda_callback {
    ($($hook:ident),*; $($shared:ident),*; $($stage:ident),*) => {
        /// Runs closures at hooks, for what is not worth a type of its own. Source: Lightning's `LambdaCallback`.
        ///
        /// ```
        /// use voltaic::callback::LambdaCallback;
        /// let callback = LambdaCallback::new().on_train_epoch_end(|ctx, _module| {
        ///     println!("epoch {} is done", ctx.current_epoch());
        ///     Ok(())
        /// });
        /// ```
        #[derive(Default)]
        pub struct LambdaCallback {
            $($hook: Option<Hook>,)*
            $($shared: Option<SharedHook>,)*
            $($stage: Option<StageHook>,)*
            on_exception: Option<ExceptionHook>,
            on_save_checkpoint: Option<SaveHook>,
            on_load_checkpoint: Option<LoadHook>,
        }

        impl LambdaCallback {
            /// Without closures.
            pub fn new() -> Self {
                Self::default()
            }

            $(
                #[doc = concat!("Sets what runs at [`Callback::", stringify!($hook), "`].")]
                #[must_use]
                pub fn $hook(
                    mut self,
                    hook: impl FnMut(&mut HookContext, &mut dyn Module) -> anyhow::Result<()> + Send + 'static,
                ) -> Self {
                    self.$hook = Some(Box::new(hook));
                    self
                }
            )*
            $(
                #[doc = concat!("Sets what runs at [`Callback::", stringify!($shared), "`].")]
                #[must_use]
                pub fn $shared(
                    mut self,
                    hook: impl FnMut(&mut HookContext, &dyn Module) -> anyhow::Result<()> + Send + 'static,
                ) -> Self {
                    self.$shared = Some(Box::new(hook));
                    self
                }
            )*
            $(
                #[doc = concat!("Sets what runs at [`Callback::", stringify!($stage), "`].")]
                #[must_use]
                pub fn $stage(
                    mut self,
                    hook: impl FnMut(Stage, &mut dyn Module) -> anyhow::Result<()> + Send + 'static,
                ) -> Self {
                    self.$stage = Some(Box::new(hook));
                    self
                }
            )*

            /// Sets what runs at [`Callback::on_exception`].
            #[must_use]
            pub fn on_exception(mut self, hook: impl FnMut(&mut HookContext, &Error) + Send + 'static) -> Self {
                self.on_exception = Some(Box::new(hook));
                self
            }

            /// Sets what runs at [`Callback::on_save_checkpoint`].
            #[must_use]
            pub fn on_save_checkpoint(
                mut self,
                hook: impl FnMut(&mut HookContext, &mut Checkpoint) -> anyhow::Result<()> + Send + 'static,
            ) -> Self {
                self.on_save_checkpoint = Some(Box::new(hook));
                self
            }

            /// Sets what runs at [`Callback::on_load_checkpoint`].
            #[must_use]
            pub fn on_load_checkpoint(
                mut self,
                hook: impl FnMut(&Checkpoint) -> anyhow::Result<()> + Send + 'static,
            ) -> Self {
                self.on_load_checkpoint = Some(Box::new(hook));
                self
            }
        }

        impl Callback for LambdaCallback {
            fn saves_on_exception(&self) -> bool {
                self.on_exception.is_some() // it may
            }

            fn on_exception(&mut self, ctx: &mut HookContext, error: &Error) {
                if let Some(hook) = &mut self.on_exception {
                    hook(ctx, error);
                }
            }

            fn on_save_checkpoint(
                &mut self,
                ctx: &mut HookContext,
                checkpoint: &mut Checkpoint,
            ) -> anyhow::Result<()> {
                self.on_save_checkpoint.as_mut().map_or(Ok(()), |hook| hook(ctx, checkpoint))
            }

            fn on_load_checkpoint(&mut self, checkpoint: &Checkpoint) -> anyhow::Result<()> {
                self.on_load_checkpoint.as_mut().map_or(Ok(()), |hook| hook(checkpoint))
            }

            $(
                fn $hook(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
                    self.$hook.as_mut().map_or(Ok(()), |hook| hook(ctx, module))
                }
            )*
            $(
                fn $shared(&mut self, ctx: &mut HookContext, module: &dyn Module) -> anyhow::Result<()> {
                    self.$shared.as_mut().map_or(Ok(()), |hook| hook(ctx, module))
                }
            )*
            $(
                fn $stage(&mut self, stage: Stage, module: &mut dyn Module) -> anyhow::Result<()> {
                    self.$stage.as_mut().map_or(Ok(()), |hook| hook(stage, module))
                }
            )*
        }
    };
}

lambda_callback! {
    on_fit_start, on_fit_end, on_sanity_check_start, on_sanity_check_end,
    on_train_start, on_train_end, on_train_epoch_start, on_train_epoch_end, on_train_batch_start, on_train_batch_end,
    on_validation_start, on_validation_end, on_validation_epoch_start, on_validation_epoch_end,
    on_validation_batch_start, on_validation_batch_end,
    on_test_start, on_test_end, on_test_epoch_start, on_test_epoch_end, on_test_batch_start, on_test_batch_end,
    on_predict_start, on_predict_end, on_predict_epoch_start, on_predict_epoch_end,
    on_predict_batch_start, on_predict_batch_end;
    on_before_zero_grad, on_before_backward, on_after_backward, on_before_optimizer_step;
    setup, teardown
}
