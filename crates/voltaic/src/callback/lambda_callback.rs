//! A callback made of closures.

use std::collections::HashMap;

use crate::checkpoint::Checkpoint;
use crate::data::Stage;
use crate::error::Error;
use crate::lightning::{Callback, Hook, HookContext, StepHook, each_hook, each_step_hook};
use crate::nn::Module;

type Closure = Box<dyn FnMut(&mut HookContext, &mut dyn Module) -> anyhow::Result<()> + Send>;
type StepClosure = Box<dyn FnMut(&mut HookContext, &dyn Module) -> anyhow::Result<()> + Send>;
type ExceptionClosure = Box<dyn FnMut(&mut HookContext, &Error) + Send>;
type SaveClosure = Box<dyn FnMut(&mut HookContext, &mut Checkpoint) -> anyhow::Result<()> + Send>;
type LoadClosure = Box<dyn FnMut(&Checkpoint) -> anyhow::Result<()> + Send>;
type StageClosure = Box<dyn FnMut(Stage, &mut dyn Module) -> anyhow::Result<()> + Send>;

/// Runs closures at hooks, for what is not worth a type of its own. Source: Lightning's `LambdaCallback`.
///
/// ```
/// use voltaic::callback::LambdaCallback;
/// use voltaic::module::Hook;
/// let callback = LambdaCallback::new().on_train_epoch_end(|ctx, _module| {
///     println!("epoch {} is done", ctx.current_epoch());
///     Ok(())
/// });
/// // the same closure at several hooks
/// let callback = [Hook::OnTestStart, Hook::OnTestEnd].into_iter().fold(callback, |callback, hook| {
///     callback.on(hook, move |_ctx, _module| {
///         println!("{}", hook.name());
///         Ok(())
///     })
/// });
/// ```
#[derive(Default)]
pub struct LambdaCallback {
    hooks: HashMap<Hook, Closure>,
    step_hooks: HashMap<StepHook, StepClosure>,
    setup: Option<StageClosure>,
    teardown: Option<StageClosure>,
    on_exception: Option<ExceptionClosure>,
    on_save_checkpoint: Option<SaveClosure>,
    on_load_checkpoint: Option<LoadClosure>,
}

impl LambdaCallback {
    /// Without closures.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets what runs at a hook.
    #[must_use]
    pub fn on(
        mut self,
        hook: Hook,
        closure: impl FnMut(&mut HookContext, &mut dyn Module) -> anyhow::Result<()> + Send + 'static,
    ) -> Self {
        self.hooks.insert(hook, Box::new(closure));
        self
    }

    /// Sets what runs at a hook around backward or the optimizer.
    #[must_use]
    pub fn on_step(
        mut self,
        hook: StepHook,
        closure: impl FnMut(&mut HookContext, &dyn Module) -> anyhow::Result<()> + Send + 'static,
    ) -> Self {
        self.step_hooks.insert(hook, Box::new(closure));
        self
    }

    /// Sets what runs at [`Callback::setup`].
    #[must_use]
    pub fn setup(
        mut self,
        closure: impl FnMut(Stage, &mut dyn Module) -> anyhow::Result<()> + Send + 'static,
    ) -> Self {
        self.setup = Some(Box::new(closure));
        self
    }

    /// Sets what runs at [`Callback::teardown`].
    #[must_use]
    pub fn teardown(
        mut self,
        closure: impl FnMut(Stage, &mut dyn Module) -> anyhow::Result<()> + Send + 'static,
    ) -> Self {
        self.teardown = Some(Box::new(closure));
        self
    }

    /// Sets what runs at [`Callback::on_exception`].
    #[must_use]
    pub fn on_exception(mut self, closure: impl FnMut(&mut HookContext, &Error) + Send + 'static) -> Self {
        self.on_exception = Some(Box::new(closure));
        self
    }

    /// Sets what runs at [`Callback::on_save_checkpoint`].
    #[must_use]
    pub fn on_save_checkpoint(
        mut self,
        closure: impl FnMut(&mut HookContext, &mut Checkpoint) -> anyhow::Result<()> + Send + 'static,
    ) -> Self {
        self.on_save_checkpoint = Some(Box::new(closure));
        self
    }

    /// Sets what runs at [`Callback::on_load_checkpoint`].
    #[must_use]
    pub fn on_load_checkpoint(
        mut self,
        closure: impl FnMut(&Checkpoint) -> anyhow::Result<()> + Send + 'static,
    ) -> Self {
        self.on_load_checkpoint = Some(Box::new(closure));
        self
    }
}

/// A setter by the name of each hook: `on_fit_start(closure)` is `on(Hook::OnFitStart, closure)`.
macro_rules! setters {
    (
        ($on:ident, $hook:ident, $module:ty)
        $($(#[$doc:meta])* $method:ident = $variant:ident: $phase:ident, $level:ident;)*
    ) => {
        impl LambdaCallback {$(
            #[doc = concat!("Sets what runs at [`Callback::", stringify!($method), "`].")]
            #[must_use]
            pub fn $method(
                self,
                closure: impl FnMut(&mut HookContext, $module) -> anyhow::Result<()> + Send + 'static,
            ) -> Self {
                self.$on($hook::$variant, closure)
            }
        )*}
    };
}

each_hook!(setters(on, Hook, &mut dyn Module));
each_step_hook!(setters(on_step, StepHook, &dyn Module));

impl Callback for LambdaCallback {
    fn saves_on_exception(&self) -> bool {
        self.on_exception.is_some() // it may ask for a checkpoint
    }

    fn setup(&mut self, stage: Stage, module: &mut dyn Module) -> anyhow::Result<()> {
        self.setup.as_mut().map_or(Ok(()), |closure| closure(stage, module))
    }

    fn teardown(&mut self, stage: Stage, module: &mut dyn Module) -> anyhow::Result<()> {
        self.teardown.as_mut().map_or(Ok(()), |closure| closure(stage, module))
    }

    fn on_exception(&mut self, ctx: &mut HookContext, error: &Error) {
        if let Some(closure) = &mut self.on_exception {
            closure(ctx, error);
        }
    }

    fn on_save_checkpoint(
        &mut self,
        ctx: &mut HookContext,
        checkpoint: &mut Checkpoint,
    ) -> anyhow::Result<()> {
        self.on_save_checkpoint.as_mut().map_or(Ok(()), |closure| closure(ctx, checkpoint))
    }

    fn on_load_checkpoint(&mut self, checkpoint: &Checkpoint) -> anyhow::Result<()> {
        self.on_load_checkpoint.as_mut().map_or(Ok(()), |closure| closure(checkpoint))
    }

    fn on_hook(&mut self, hook: Hook, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        self.hooks.get_mut(&hook).map_or(Ok(()), |closure| closure(ctx, module))
    }

    fn on_step_hook(
        &mut self,
        hook: StepHook,
        ctx: &mut HookContext,
        module: &dyn Module,
    ) -> anyhow::Result<()> {
        self.step_hooks.get_mut(&hook).map_or(Ok(()), |closure| closure(ctx, module))
    }
}
