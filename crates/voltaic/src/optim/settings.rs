//! The settings of optimizers: `#[settings]` on a struct is the table of its hyper-parameters, [`optimizer!`] says which of them
//! a group of parameters has.

use super::param_group::{Merged, Overrides, ParamGroup, ParamGroupSpec, build_groups};
use super::problems::Problems;
use crate::error::Result;

/// Settings of an optimizer that all groups share.
pub(super) trait Settings: Sized {
    /// Name of the optimizer, such as `AdamW`.
    const NAME: &'static str;

    /// Settings that a group may set for itself.
    const PER_GROUP: &'static [&'static str];

    /// These settings with those that a group sets for itself.
    fn with_overrides(&self, own: &Overrides) -> Self;

    /// Reports what is wrong with the settings.
    fn check(&self, problems: &mut Problems);

    /// The numbers of a group with these settings.
    fn merged(&self) -> Merged;

    /// The groups with their settings.
    fn groups(&self, specs: Vec<ParamGroupSpec>) -> Result<Vec<ParamGroup>> {
        let mut problems = Problems::new("optimizer.init_args");
        self.check(&mut problems);
        build_groups(specs, problems, |own, problems| {
            let settings = self.with_overrides(own);
            settings.check(problems);
            own.refuse_others(Self::NAME, Self::PER_GROUP, problems);
            settings.merged()
        })
    }
}

/// Arguments of PyTorch's classes that change no result.
pub(super) fn no_effect() -> serde_json::Value {
    let groups = "a group is updated at once where it can be";
    serde_json::json!({"foreach": groups, "fused": groups, "verbose": "LearningRateMonitor logs the rates"})
}

/// Arguments of PyTorch's classes that there are none of.
pub(super) fn refused() -> serde_json::Value {
    serde_json::json!({
        "capturable": {"what": "graphs capture each optimizer", "remedy": "remove it", "unless_off": true},
        "decoupled_weight_decay": {"what": "Adam adds the decay to the gradient", "remedy": "use AdamW", "unless_off": true},
        "differentiable": {"what": "there is no gradient through a step", "remedy": "remove it", "unless_off": true},
        "last_epoch": {"what": "schedules begin at 0", "remedy": "remove it: a resumed run restores it", "unless_off": -1},
    })
}

/// `optimizer!(Lion = "Lion", |lion| options)`: the optimizer's name, and the options of a group with these settings. `also` names a
/// method that checks settings together.
macro_rules! optimizer {
    ($type:ident = $name:literal, |$settings:ident| $options:expr $(, also $check:ident)?) => {
        impl $type {
            /// The standard settings with another learning rate.
            pub fn new(lr: f64) -> Self {
                Self { lr, ..Self::default() }
            }
        }

        impl $crate::optim::settings::Settings for $type {
            const NAME: &'static str = $name;
            const PER_GROUP: &'static [&'static str] = Self::PER_GROUP;

            fn with_overrides(&self, own: &$crate::optim::param_group::Overrides) -> Self {
                self.with_overrides(own)
            }

            fn check(&self, problems: &mut $crate::optim::problems::Problems) {
                self.check_each(problems);
                $(self.$check(problems);)?
            }

            fn merged(&self) -> $crate::optim::param_group::Merged {
                let $settings = self;
                $crate::optim::param_group::Merged {
                    lr: self.lr,
                    weight_decay: self.weight_decay,
                    maximize: self.maximize,
                    options: $options,
                }
            }
        }

        $crate::optim::optimizers::into_optimizers!($type);
    };
}
pub(super) use optimizer;
