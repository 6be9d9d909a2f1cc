//! Asks the data module and the module for loaders when it is their turn, and counts how many batches they give.

use crate::data::{Batch, DataLoader, DataModule, Remainder, Stage};
use crate::distributed::SubMesh;
use crate::error::{ConfigError, Result};
use crate::module::LightningModule;
use crate::strategy::StrategyPlan;
use crate::trainer::config::values::Limit;
use crate::trainer::plan::limits::{FitPlan, limit_batches};
use crate::trainer::plan::train_plan::TrainPlan;
use crate::trainer::session::hooks::guarded;
use crate::trainer::session::session::Session;

/// What a hook for loaders gives.
type Asked<B> = anyhow::Result<Vec<DataLoader<B>>>;

/// Loaders of a fit and what is known about them.
pub(crate) struct FitLoaders<B: Batch> {
    pub train: DataLoader<B>,
    pub val: Vec<DataLoader<B>>,
    pub plan: FitPlan,
    /// Epochs in which the loaders were requested.
    pub epoch_of_train: u64,
    pub epoch_of_val: u64,
}

/// Where an evaluation has its loaders from.
pub(crate) struct LoaderSource<M: LightningModule> {
    pub method: &'static str,
    pub limit_key: &'static str,
    pub limit: fn(&TrainPlan) -> Limit,
    of_data: fn(&mut dyn DataModule<Batch = M::Batch>) -> Asked<M::Batch>,
    of_module: fn(&mut M) -> Asked<M::Batch>,
}

impl<M: LightningModule> LoaderSource<M> {
    /// Of an evaluation, or of the validation within fit.
    pub fn of(stage: Stage) -> Self {
        match stage {
            Stage::Fit | Stage::Validate => Self::VALIDATION,
            Stage::Test => Self::TEST,
            Stage::Predict => Self::PREDICTION,
        }
    }

    const VALIDATION: Self = Self {
        method: "val_dataloader",
        limit_key: "limit_val_batches",
        limit: |plan| plan.limit_val,
        of_data: |data| data.val_dataloader(),
        of_module: M::val_dataloader,
    };
    const TEST: Self = Self {
        method: "test_dataloader",
        limit_key: "limit_test_batches",
        limit: |plan| plan.limit_test,
        of_data: |data| data.test_dataloader(),
        of_module: M::test_dataloader,
    };
    const PREDICTION: Self = Self {
        method: "predict_dataloader",
        limit_key: "limit_predict_batches",
        limit: |plan| plan.limit_predict,
        of_data: |data| data.predict_dataloader(),
        of_module: M::predict_dataloader,
    };
}

impl<M: LightningModule> Session<'_, M> {
    /// The loaders of a fit: for training, and for validation unless the sanity check has them already.
    pub(crate) fn fit_loaders(
        &mut self,
        val: Option<Vec<DataLoader<M::Batch>>>,
    ) -> Result<FitLoaders<M::Batch>> {
        let train = self.train_dataloader()?;
        let val = match val {
            Some(val) => val,
            None if self.plan.limit_val.is_none() => Vec::new(),
            None => self.val_dataloader()?,
        };
        self.check_batch_size(&train)?;
        let plan = self.fit_plan(&train, &val)?;
        self.warn_of_shuffled(&val);
        let (batches, every) = (plan.num_training_batches as u64, self.plan.log_every_n_steps);
        if !self.run.loggers.is_empty() && batches < every {
            tracing::warn!(
                "an epoch has {batches} batches, fewer than trainer.log_every_n_steps={every}: set a smaller number to \
                 see values of steps"
            );
        }
        Ok(FitLoaders {
            train,
            val,
            plan,
            epoch_of_train: self.next_epoch(),
            epoch_of_val: self.next_epoch(),
        })
    }

    /// An error if the batches are not what DeepSpeed's settings say.
    fn check_batch_size(&self, train: &DataLoader<M::Batch>) -> Result<()> {
        let StrategyPlan::DeepSpeed(deepspeed) = &self.plan.ranks.strategy else { return Ok(()) };
        let Some(size) = train.batch_size().filter(|_| !self.options.is_trial) else { return Ok(()) };
        let ranks = self.run.world().mesh().dp.size;
        Ok(deepspeed.check_loader(size, self.plan.accumulate_grad_batches, ranks)?)
    }

    /// Says on rank 0 if data to evaluate on is shuffled.
    pub(crate) fn warn_of_shuffled(&self, loaders: &[DataLoader<M::Batch>]) {
        if self.run.world().is_global_zero() && loaders.iter().any(DataLoader::is_shuffled) {
            tracing::warn!("a loader for evaluation shuffles its data; leave out shuffle(true) there");
        }
    }

    fn fit_plan(&mut self, train: &DataLoader<M::Batch>, val: &[DataLoader<M::Batch>]) -> Result<FitPlan> {
        let validates = !self.plan.limit_val.is_none();
        if validates && self.plan.val_check_time.is_some() && self.run.world().world_size > 1 {
            let what = format!("by time with {} ranks, whose clocks differ", self.run.world().world_size);
            let remedy = "use a number of batches, or a fraction of an epoch";
            return Err(ConfigError::new("trainer.val_check_interval", what, remedy).into());
        }
        let available: Vec<usize> = val.iter().map(DataLoader::num_batches).collect();
        let mut plan = FitPlan::new(self.plan, train.num_batches(), &available)?;
        plan.has_val_batches = self.run.world().of_rank_zero(plan.has_val_batches)?;
        let facts = &mut self.run.facts;
        facts.num_training_batches = plan.num_training_batches;
        facts.train_batch_size = train.batch_size();
        facts.num_eval_batches = plan.num_val_batches.iter().sum();
        facts.validates_at_epoch_end = plan.val_check_batch == plan.num_training_batches;
        Ok(plan)
    }

    /// The epoch in progress or to come.
    fn next_epoch(&self) -> u64 {
        self.run.at.progress.current_epoch + u64::from(self.run.at.progress.epoch_ended)
    }

    fn train_dataloader(&mut self) -> Result<DataLoader<M::Batch>> {
        let action = self.profile_data("train_dataloader")?;
        let train = guarded(|| self.data.train_dataloader());
        let mut train = train.map_err(|source| self.hook_error("train_dataloader", source))?;
        drop(action);
        if train.is_none() {
            train = self.module_method("train_dataloader", |module| module.train_dataloader())?;
        }
        let Some(mut train) = train else {
            let remedy = "implement train_dataloader of the data module or of the module, or give Loaders a train loader";
            return Err(ConfigError::new("data", "there is no training loader", remedy).into());
        };
        train.set_seed(self.run.seed);
        DataLoader::name_all(std::slice::from_mut(&mut train), "train_dataloader");
        self.set_batch_size(std::slice::from_mut(&mut train))?;
        if self.plan.overfits && train.repeat_first_epoch() {
            tracing::warn!(
                "overfit_batches: the training data is not shuffled, so that the batches stay the same"
            );
        }
        self.check_loaders_alike("train", std::slice::from_ref(&train))?;
        shard_train(&mut train, self.plan, &self.run.world().mesh().dp)?;
        Ok(train)
    }

    /// Gives the loaders of this call the batch size that was found for it, if one was.
    pub(crate) fn set_batch_size(&mut self, loaders: &mut [DataLoader<M::Batch>]) -> Result<()> {
        self.run.facts.num_samples = loaders.iter().map(DataLoader::num_samples).max().unwrap_or(0);
        match self.options.batch_size {
            Some(size) => Ok(loaders.iter_mut().try_for_each(|loader| loader.set_batch_size(size))?),
            None => Ok(()),
        }
    }

    pub(crate) fn val_dataloader(&mut self) -> Result<Vec<DataLoader<M::Batch>>> {
        let mut val = self.ask_for(&LoaderSource::VALIDATION)?;
        for loader in &mut val {
            loader.set_seed(self.run.seed);
            if self.plan.overfits {
                loader.repeat_first_epoch();
            }
        }
        self.check_loaders_alike("val", &val)?;
        shard_eval(&mut val, self.plan, &self.run.world().mesh().dp)?;
        Ok(val)
    }

    /// Loaders for an evaluation: the data's, else the module's, which may have none either.
    pub(crate) fn ask_for(&mut self, source: &LoaderSource<M>) -> Result<Vec<DataLoader<M::Batch>>> {
        let action = self.profile_data(source.method)?;
        let loaders = guarded(|| (source.of_data)(self.data));
        let mut loaders = loaders.map_err(|error| self.hook_error(source.method, error))?;
        drop(action);
        if loaders.is_empty() {
            let _action = self.profile_hook(source.method)?;
            let of_module = guarded(|| (source.of_module)(self.module));
            loaders = of_module.map_err(|error| self.hook_error(source.method, error))?;
        }
        DataLoader::name_all(&mut loaders, source.method);
        Ok(loaders)
    }

    /// How many batches validation takes from each loader.
    pub(crate) fn num_val_batches(&self, val: &[DataLoader<M::Batch>]) -> Result<Vec<usize>> {
        let available: Vec<usize> = val.iter().map(DataLoader::num_batches).collect();
        Ok(limit_batches(self.plan.key_of_limit("limit_val_batches"), self.plan.limit_val, &available)?)
    }

    /// Asks for the training loader again if `reload_dataloaders_every_n_epochs` says so.
    pub(crate) fn reload_train_dataloader(&mut self, loaders: &mut FitLoaders<M::Batch>) -> Result<()> {
        let (epoch, every) =
            (self.run.at.progress.current_epoch, self.plan.reload_dataloaders_every_n_epochs);
        if every > 0 && epoch >= loaders.epoch_of_train.saturating_add(every) {
            loaders.train = self.train_dataloader()?;
            loaders.epoch_of_train = epoch;
            loaders.plan = self.fit_plan(&loaders.train, &loaders.val)?;
        }
        Ok(())
    }

    /// Continues a fit that does not validate.
    pub(crate) fn drop_val_loaders(&mut self, loaders: &mut FitLoaders<M::Batch>) -> Result<()> {
        loaders.val.clear();
        loaders.plan = self.fit_plan(&loaders.train, &[])?;
        Ok(())
    }

    /// The same for validation, which asks when it is due.
    pub(crate) fn reload_val_dataloader(&mut self, loaders: &mut FitLoaders<M::Batch>) -> Result<()> {
        let (epoch, every) =
            (self.run.at.progress.current_epoch, self.plan.reload_dataloaders_every_n_epochs);
        if every > 0 && epoch >= loaders.epoch_of_val.saturating_add(every) {
            loaders.val = self.val_dataloader()?;
            loaders.epoch_of_val = epoch;
            loaders.plan = self.fit_plan(&loaders.train, &loaders.val)?;
        }
        Ok(())
    }
}

/// Leaves a training loader with this rank's part, padded so that all ranks have as many batches.
fn shard_train<B: Batch>(loader: &mut DataLoader<B>, plan: &TrainPlan, dp: &SubMesh) -> Result<()> {
    shard(std::slice::from_mut(loader), plan, dp, Remainder::Repeat)
}

/// Leaves evaluation loaders with this rank's part: each sample counts once.
pub(crate) fn shard_eval<B: Batch>(
    loaders: &mut [DataLoader<B>],
    plan: &TrainPlan,
    dp: &SubMesh,
) -> Result<()> {
    shard(loaders, plan, dp, Remainder::Exact)
}

fn shard<B: Batch>(
    loaders: &mut [DataLoader<B>],
    plan: &TrainPlan,
    dp: &SubMesh,
    remainder: Remainder,
) -> Result<()> {
    if dp.size == 1 || !plan.ranks.use_distributed_sampler {
        return Ok(());
    }
    loaders.iter_mut().try_for_each(|loader| loader.shard(dp.rank, dp.size, remainder))
}
