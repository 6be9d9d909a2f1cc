//! The hooks, in two tables: what each is called, when it is called, and what logging in it means. The enums, the methods of
//! `Callback` and `LightningModule`, how these are called, and the setters of `LambdaCallback` are made from the tables.

use super::logged::{Level, Phase};

/// The hooks that may change the module. `each_hook!(then (arguments))` is `then!` with the arguments and the table.
macro_rules! each_hook {
    ($then:ident $arguments:tt) => {
        $then! {
            $arguments
            /// Called once before the sanity check, when module and optimizers are in place.
            on_fit_start = OnFitStart: Train, Denied;
            /// Called once at the very end of fit.
            on_fit_end = OnFitEnd: Train, Denied;
            /// Called before the validation batches that are run to find mistakes early.
            on_sanity_check_start = OnSanityCheckStart: Eval, Denied;
            /// Called after them.
            on_sanity_check_end = OnSanityCheckEnd: Eval, Denied;
            /// Called before the first epoch.
            on_train_start = OnTrainStart: Train, EpochOnly;
            /// Called after the last epoch.
            on_train_end = OnTrainEnd: Train, Denied;
            /// Called before the first batch of an epoch.
            on_train_epoch_start = OnTrainEpochStart: Train, EpochOnly;
            /// Called after the last batch and validation of an epoch.
            on_train_epoch_end = OnTrainEpochEnd: Train, EpochOnly;
            /// Called before each training step, the batch in `ctx.batch()`; `ctx.batch_mut()` may change it.
            on_train_batch_start = OnTrainBatchStart: Train, Step;
            /// Called after each training step, what it gave in `ctx.outputs()`, its loss in `ctx.loss()`, the batch in `ctx.batch()`.
            on_train_batch_end = OnTrainBatchEnd: Train, Step;
            /// Called before validation, in evaluation mode.
            on_validation_start = OnValidationStart: Eval, EpochOnly;
            /// Called after `on_validation_epoch_end`, when the metrics are complete.
            on_validation_end = OnValidationEnd: Eval, Denied;
            /// Called after `on_validation_start`.
            on_validation_epoch_start = OnValidationEpochStart: Eval, EpochOnly;
            /// Called after the last validation batch; what it logs is part of the result.
            on_validation_epoch_end = OnValidationEpochEnd: Eval, EpochOnly;
            /// Called before each validation step, the batch in `ctx.batch()`; `ctx.batch_mut()` may change it.
            on_validation_batch_start = OnValidationBatchStart: Eval, Epoch;
            /// Called after each validation step, what it gave in `ctx.outputs()`, the batch in `ctx.batch()`.
            on_validation_batch_end = OnValidationBatchEnd: Eval, Epoch;
            /// Called before testing, in evaluation mode.
            on_test_start = OnTestStart: Eval, EpochOnly;
            /// Called after `on_test_epoch_end`.
            on_test_end = OnTestEnd: Eval, Denied;
            /// Called after `on_test_start`.
            on_test_epoch_start = OnTestEpochStart: Eval, EpochOnly;
            /// Called after the last test batch; what it logs is part of the result.
            on_test_epoch_end = OnTestEpochEnd: Eval, EpochOnly;
            /// Called before each test step, the batch in `ctx.batch()`; `ctx.batch_mut()` may change it.
            on_test_batch_start = OnTestBatchStart: Eval, Epoch;
            /// Called after each test step, what it gave in `ctx.outputs()`, the batch in `ctx.batch()`.
            on_test_batch_end = OnTestBatchEnd: Eval, Epoch;
            /// Called before prediction, in evaluation mode.
            on_predict_start = OnPredictStart: Eval, Denied;
            /// Called after `on_predict_epoch_end`.
            on_predict_end = OnPredictEnd: Eval, Denied;
            /// Called after `on_predict_start`.
            on_predict_epoch_start = OnPredictEpochStart: Eval, Denied;
            /// Called after the last prediction batch.
            on_predict_epoch_end = OnPredictEpochEnd: Eval, Denied;
            /// Called before each prediction step, the batch in `ctx.batch()`; `ctx.batch_mut()` may change it.
            on_predict_batch_start = OnPredictBatchStart: Eval, Denied;
            /// Called after each prediction step, what it gave in `ctx.outputs()`, its result in `ctx.prediction()`, the batch in `ctx.batch()`.
            on_predict_batch_end = OnPredictBatchEnd: Eval, Denied;
        }
    };
}
pub(crate) use each_hook;

/// The hooks around backward and the optimizer, as [`each_hook`].
macro_rules! each_step_hook {
    ($then:ident $arguments:tt) => {
        $then! {
            $arguments
            /// Called before the gradients are dropped.
            on_before_zero_grad = OnBeforeZeroGrad: Train, Step;
            /// Called before the backward pass.
            on_before_backward = OnBeforeBackward: Train, Step;
            /// Called after each backward pass, before clipping.
            on_after_backward = OnAfterBackward: Train, Step;
            /// Called before each optimizer step, before clipping; gradients are complete.
            on_before_optimizer_step = OnBeforeOptimizerStep: Train, Step;
        }
    };
}
pub(crate) use each_step_hook;

/// Methods of a trait with these arguments, which do nothing unless they are implemented.
macro_rules! hook_methods {
    ($arguments:tt $($(#[$doc:meta])* $method:ident = $variant:ident: $phase:ident, $level:ident;)*) => {$(
        $(#[$doc])*
        fn $method $arguments -> anyhow::Result<()> {
            Ok(())
        }
    )*};
}
pub(super) use hook_methods;

/// `each_hook!(call_method (hook, Hook, object, (arguments)))` calls the method of a hook.
macro_rules! call_method {
    (
        ($hook:expr, $enum:ident, $object:expr, $arguments:tt)
        $($(#[$doc:meta])* $method:ident = $variant:ident: $phase:ident, $level:ident;)*
    ) => {
        match $hook {
            $($enum::$variant => $object.$method $arguments,)*
        }
    };
}
pub(super) use call_method;

/// Properties of a hook, or of a method of the module that does a part of the run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HookFacts {
    pub name: &'static str,
    pub phase: Phase,
    pub level: Level,
}

impl HookFacts {
    /// A part of a training step: a method such as `backward`.
    pub(crate) const fn of_training_step(name: &'static str) -> Self {
        Self { name, phase: Phase::Train, level: Level::Step }
    }
}

macro_rules! hook_enum {
    (
        ($(#[$enum_doc:meta])* $enum:ident)
        $($(#[$doc:meta])* $method:ident = $variant:ident: $phase:ident, $level:ident;)*
    ) => {
        $(#[$enum_doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $enum {
            $($(#[$doc])* $variant,)*
        }

        impl $enum {
            /// All of them.
            pub const ALL: [Self; [$(stringify!($variant)),*].len()] = [$(Self::$variant),*];

            /// The name of its method.
            pub const fn name(self) -> &'static str {
                self.facts().name
            }

            pub(crate) const fn facts(self) -> HookFacts {
                match self {
                    $(Self::$variant => HookFacts {
                        name: stringify!($method),
                        phase: Phase::$phase,
                        level: Level::$level,
                    },)*
                }
            }
        }
    };
}

each_hook!(hook_enum(
    /// A hook that may change the module. In the order in which a run calls them first.
    Hook
));

each_step_hook!(hook_enum(
    /// A hook around backward and the optimizer. It sees the module only to read: with manual optimization it runs within
    /// `training_step`.
    StepHook
));
