//! Trains the head of a network alone at first, and the pretrained rest with it from an epoch on.

use std::collections::{BTreeSet, HashSet};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use voltaic_macros::Defaults;

use crate::data::Stage;
use crate::error::ConfigError;
use crate::lightning::Callback;
use crate::module::HookContext;
use crate::nn::{Member, Module, ModuleExt, is_member, join_fqn};

/// What [`BackboneFinetuning`] freezes, and until when.
#[derive(Defaults, Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct BackboneFinetuningConfig {
    /// Fqn of the module that is frozen at first.
    #[default("backbone".to_owned())]
    pub backbone: String,
    /// Epoch, from 0, from which on it is trained.
    #[default(10)]
    pub unfreeze_backbone_at_epoch: u64,
    /// Train its batch normalization from the start. If false, its running statistics stay as they are until then, too.
    #[default(true)]
    pub train_bn: bool,
}

/// Freezes one module of a network, and trains it from an epoch on, at the learning rate of its group of parameters. What was frozen
/// before the fit stays frozen. Source: Lightning's `BackboneFinetuning`, which trains that, too.
///
/// ```
/// # use voltaic::callback::{BackboneFinetuning, BackboneFinetuningConfig};
/// # use voltaic::prelude::*;
/// let backbone = BackboneFinetuningConfig { backbone: "features".into(), unfreeze_backbone_at_epoch: 2, train_bn: false };
/// let trainer = Trainer::builder().max_epochs(4).callback(BackboneFinetuning::new(backbone));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackboneFinetuning {
    config: BackboneFinetuningConfig,
    /// Fqns of the parameters that it has frozen and not unfrozen again.
    frozen: BTreeSet<String>,
}

impl BackboneFinetuning {
    /// From its configuration.
    pub fn new(config: BackboneFinetuningConfig) -> Self {
        Self { config, frozen: BTreeSet::new() }
    }

    /// Freezes what is trained of the backbone, or lets that be trained again.
    fn set_frozen(&mut self, module: &mut dyn Module, is_frozen: bool) -> anyhow::Result<()> {
        let Self { config, frozen } = self;
        let mut found = false;
        each_module(module, "", &mut |fqn, module| {
            if fqn != config.backbone && !is_member(fqn, &config.backbone) {
                return;
            }
            found = true;
            let (mut own, mut is_batch_norm) = (Vec::new(), false);
            module.members(&mut |name, member| match member {
                Member::Parameter(parameter) => own.push((join_fqn(fqn, name), parameter.clone())),
                Member::Buffer(_) => is_batch_norm |= name == "num_batches_tracked",
                Member::Module(_) => {}
            });
            if is_batch_norm && config.train_bn {
                return;
            }
            for (fqn, parameter) in own {
                if is_frozen && parameter.requires_grad() {
                    frozen.insert(fqn.clone());
                }
                if frozen.contains(&fqn) {
                    _ = parameter.set_requires_grad(!is_frozen);
                }
            }
            if is_batch_norm {
                module.set_training(!is_frozen);
            }
        });
        if !found {
            let names: Vec<String> = module.named_children().into_iter().map(|(name, _)| name).collect();
            let what = format!("{:?} is no module of {}", config.backbone, module.type_name());
            let remedy = format!("name one of its modules: {}", names.join(", "));
            return Err(ConfigError::new("BackboneFinetuning.backbone", what, remedy).into());
        }
        if frozen.is_empty() {
            let what = format!("nothing in {:?} is trained: all of it was frozen before", config.backbone);
            let remedy =
                "call set_requires_grad(true) on what is to be trained later, or leave the callback out";
            return Err(ConfigError::new("BackboneFinetuning.backbone", what, remedy).into());
        }
        if !is_frozen {
            frozen.clear();
        }
        Ok(())
    }

    fn unfreeze_if_due(&mut self, ctx: &HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        let is_due = ctx.current_epoch() >= self.config.unfreeze_backbone_at_epoch;
        if is_due && !self.frozen.is_empty() { self.set_frozen(module, false) } else { Ok(()) }
    }
}

/// Visits a module and all below it, with their fqn.
fn each_module(module: &mut dyn Module, fqn: &str, visit: &mut dyn FnMut(&str, &mut dyn Module)) {
    visit(fqn, module);
    module.children_mut(&mut |name, child| {
        each_module(child, &join_fqn(fqn, name), visit);
    });
}

impl Callback for BackboneFinetuning {
    // before the strategy looks which parameters are trained
    fn setup(&mut self, stage: Stage, module: &mut dyn Module) -> anyhow::Result<()> {
        if stage == Stage::Fit { self.set_frozen(module, true) } else { Ok(()) }
    }

    fn on_fit_start(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        self.set_frozen(module, true)?; // again for the mode, which the trainer has set since
        let optimizers = ctx.optimizers().iter().flat_map(|optimizer| optimizer.param_groups());
        let known: HashSet<&str> =
            optimizers.flat_map(|group| group.params()).map(|(fqn, _)| fqn.as_str()).collect();
        let all = module.named_parameters().into_iter();
        let mut frozen = all.map(|(fqn, _)| fqn).filter(|fqn| self.frozen.contains(fqn));
        let Some(fqn) = frozen.find(|fqn| !known.contains(fqn.as_str())) else { return Ok(()) };
        let what = format!(
            "no optimizer has {fqn}, which is to be trained from epoch {} on",
            self.config.unfreeze_backbone_at_epoch
        );
        let remedy = "give optimizers all parameters in configure_optimizers, not only those that require grad; they leave \
                      frozen ones alone; or freeze it yourself before the fit, if it is not to be trained";
        Err(ConfigError::new("BackboneFinetuning.backbone", what, remedy).into())
    }

    /// A resumed run may be past that epoch, or in the midst of it.
    fn on_train_start(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        self.unfreeze_if_due(ctx, module)
    }

    fn on_train_epoch_start(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        self.unfreeze_if_due(ctx, module)
    }
}
