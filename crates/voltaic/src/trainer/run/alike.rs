//! Compares the ranks of a call before they do the same: module, seed, optimizers, loaders, and learning rates as they go.
//!
//! Ranks that differ would train something else without an error, or wait for each other until the time-out.

use std::fmt::Write;

use crate::data::DataLoader;
use crate::distributed::Facts;
use crate::error::Result;
use crate::module::LightningModule;
use crate::nn::ModuleExt;
use crate::optim::{ActiveLrScheduler, ParamGroup};
use crate::trainer::session::session::Session;
use crate::trainer::state::collect::saves_shards;

impl<M: LightningModule> Session<'_, M> {
    /// What is known of a call before the strategy prepares the module.
    ///
    /// # Collective
    /// As all of this file.
    pub(crate) fn check_module_alike(&self) -> Result<()> {
        if self.has_no_peers() {
            return Ok(());
        }
        let mut facts = Facts::default();
        let stage =
            if self.options.is_trial { "a trial of fit".to_owned() } else { self.run.at.stage.to_string() };
        facts.add("call", stage);
        let ckpt_path = self.options.ckpt_path.as_ref();
        facts.add("ckpt_path", ckpt_path.map_or_else(|| "not set".to_owned(), |path| format!("{path:?}")));
        facts.add("weights", format!("{:?}", self.run.weights));
        facts.add("seed", self.run.seed);
        facts.add("strategy", self.run.engine.strategy.name());
        facts.add("module", self.module.type_name());
        facts.add("module.automatic_optimization", self.module.automatic_optimization());
        for (fqn, parameter) in self.module.named_parameters() {
            let is_trained = if parameter.requires_grad() { "trained" } else { "frozen" };
            let (size, kind) = (parameter.full_size(), parameter.kind());
            facts.add(format!("module.{fqn}"), format!("{kind:?} of shape {size:?}, {is_trained}"));
        }
        for (fqn, buffer) in self.module.named_buffers() {
            let (size, kind) = (buffer.size(), buffer.kind());
            facts.add(format!("module.{fqn}"), format!("{kind:?} of shape {size:?}, a buffer"));
        }
        facts.add_json("module.hyper_parameters", &self.module.hyper_parameters());
        facts.add_json("data.hyper_parameters", &self.data.hyper_parameters());
        self.check_alike(&facts)
    }

    /// The optimizers and schedules with their settings.
    pub(crate) fn check_optimizers_alike(&self) -> Result<()> {
        if self.has_no_peers() {
            return Ok(());
        }
        let mut facts = Facts::default();
        facts.add("optimizers", self.training.optimizers.len());
        let is_sharded = saves_shards(self.run);
        for (index, optimizer) in self.training.optimizers.iter().enumerate() {
            let key = format!("optimizers.{index}");
            facts.add(key.as_str(), optimizer.name());
            for (number, group) in optimizer.param_groups().iter().enumerate() {
                of_group(&mut facts, &format!("{key}.groups.{number}"), group, is_sharded);
            }
        }
        for ActiveLrScheduler { optimizer, configured } in &self.training.schedulers {
            let key = format!("optimizers.{optimizer}.lr_scheduler");
            facts.add(key.as_str(), configured.scheduler.name());
            facts.add(format!("{key}.interval"), format!("{:?}", configured.interval));
            facts.add(format!("{key}.frequency"), configured.frequency);
            facts.add(format!("{key}.monitor"), configured.monitor.as_deref().unwrap_or("not set"));
        }
        self.check_alike(&facts)
    }

    /// The loaders of a kind, such as `train`, before the trainer divides them.
    pub(crate) fn check_loaders_alike(&self, kind: &str, loaders: &[DataLoader<M::Batch>]) -> Result<()> {
        if self.has_no_peers() {
            return Ok(());
        }
        let mut facts = Facts::default();
        facts.add(format!("data.{kind}"), format!("{} loaders", loaders.len()));
        for (index, loader) in loaders.iter().enumerate() {
            let key = format!("data.{kind}.{index}");
            let size = loader.batch_size().map_or_else(|| "not set".to_owned(), |size| size.to_string());
            facts.add(format!("{key}.batch_size"), size);
            facts.add(format!("{key}.shuffled"), loader.is_shuffled());
            facts.add(format!("{key}.drop_last"), loader.drop_last());
            if loader.is_shuffled() {
                facts.add(format!("{key}.seed"), loader.seed()); // or ranks would take parts of different orders
            }
            // a program that divides the samples itself may give each rank a data set of its own
            if self.plan.ranks.use_distributed_sampler && !loader.is_distributed() {
                facts.add(format!("{key}.samples"), loader.num_samples());
            }
            if kind == "train" {
                facts.add(format!("{key}.batches"), loader.num_batches());
            }
        }
        self.check_alike(&facts)
    }

    /// The learning rates and other settings in force, which schedules and callbacks have changed on each rank by itself.
    pub(crate) fn check_rates_alike(&self) -> Result<()> {
        if self.has_no_peers() {
            return Ok(());
        }
        let mut facts = Facts::default();
        for (index, optimizer) in self.training.optimizers.iter().enumerate() {
            for (number, group) in optimizer.param_groups().iter().enumerate() {
                let key = format!("optimizers.{index}.groups.{number}");
                facts.add(format!("{key}.lr"), group.lr);
                facts.add(format!("{key}.weight_decay"), group.weight_decay);
            }
        }
        self.check_alike(&facts)
    }

    fn has_no_peers(&self) -> bool {
        self.run.world().world_size == 1
    }

    fn check_alike(&self, facts: &Facts) -> Result<()> {
        self.run.world().check_alike(facts, &self.run.engine.strategy.allowed_differences())
    }
}

/// A group's hyper-parameters, and which parameters it has unless ranks hold shards of them.
fn of_group(facts: &mut Facts, key: &str, group: &ParamGroup, is_sharded: bool) {
    facts.add(format!("{key}.lr"), group.lr);
    facts.add(format!("{key}.weight_decay"), group.weight_decay);
    facts.add(format!("{key}.maximize"), group.maximize);
    facts.add_json(key, &serde_json::to_value(group.options).unwrap_or_default());
    if !is_sharded {
        let mut names = String::new();
        for (fqn, _) in group.params() {
            let _ = write!(names, "{}{fqn}", if names.is_empty() { "" } else { ", " });
        }
        facts.add(format!("{key}.params"), names);
    }
}
