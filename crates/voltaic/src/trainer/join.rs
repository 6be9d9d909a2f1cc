//! What a run with several ranks does besides training: joining them, dividing loaders, agreeing to stop, starting anew.

use std::io::Write;
use std::path::{Path, PathBuf};

use crate::accelerator::Accelerator;
use crate::checkpoint::write_atomically;
use crate::data::{Batch, DataLoader, Remainder};
use crate::distributed::{self, Placement, Variables, World};
use crate::error::{Error, Result};
use crate::module::{LightningModule, Requests, StepState};
use crate::strategy::{Ddp, SingleDevice, Strategy, StrategyConfig, StrategyPlan, Votes};
use crate::trainer::config::TrainerConfig;
use crate::trainer::plan::train_plan::TrainPlan;
use crate::trainer::session::anomaly::check_gradients;
use crate::trainer::session::hooks::{BatchFacts, Parts};
use crate::trainer::session::manual::again;
use crate::trainer::session::session::{Run, Session};

/// Where the newest checkpoint of a run is, for ranks that are started anew: two paths, one a line, the newest first.
const LAST_CHECKPOINT: &str = "last_checkpoint";

/// Finds out which rank this process is and joins the others. If nobody has started the ranks of this node, this call
/// does, and ends the process with them.
pub(crate) fn join(
    config: &TrainerConfig,
    plan: &mut TrainPlan,
    accelerator: &dyn Accelerator,
) -> Result<Box<dyn Strategy>> {
    let variables = Variables::of_process();
    let restarts = config.max_restarts > 0;
    let strategy = plan.ranks.strategy.clone();
    if strategy == StrategyPlan::SingleDevice {
        if config.strategy == StrategyConfig::from("auto") {
            variables.check_alone()?;
        }
        // a rank may have a trainer for itself, which its launcher does not look after
        if !restarts || variables.is_rank_of_launcher() {
            return Ok(Box::new(SingleDevice::default()));
        }
    }
    let placement = match plan.ranks.place(&variables, restarts)? {
        Placement::Single => return Ok(Box::new(SingleDevice::default())),
        Placement::Launcher(launch) => {
            let folder = plan.default_root_dir.join("rank_logs");
            let code = distributed::launch(&launch, config.max_restarts, &folder)?;
            std::process::exit(code.into());
        }
        Placement::Rank(placement) => placement,
    };
    let StrategyPlan::Ddp { name, config: ddp } = strategy else {
        let world = World::supervised(&placement, distributed::DEFAULT_TIMEOUT)?;
        return Ok(Box::new(SingleDevice::of(world)));
    };
    plan.device = plan.ranks.device_of(placement.local_rank)?;
    accelerator.setup()?; // decides the back end
    let world = World::join(&placement, plan.device, ddp.timeout())?;
    if let Some(group) = world.group().filter(|_| world.is_global_zero() && world.world_size > 1) {
        let nodes = plan.ranks.num_nodes;
        tracing::info!("{name}: {} ranks on {nodes} node(s), over {}", world.world_size, group.backend());
    }
    Ok(Box::new(Ddp::new(name, world, ddp)))
}

/// Leaves a training loader with this rank's part, padded so that all ranks have as many batches.
pub(crate) fn shard_train<B: Batch>(
    loader: &mut DataLoader<B>,
    plan: &TrainPlan,
    world: &World,
) -> Result<()> {
    shard(std::slice::from_mut(loader), plan, world, Remainder::Repeat)
}

/// Leaves evaluation loaders with this rank's part: each sample counts once.
pub(crate) fn shard_eval<B: Batch>(
    loaders: &mut [DataLoader<B>],
    plan: &TrainPlan,
    world: &World,
) -> Result<()> {
    shard(loaders, plan, world, Remainder::Exact)
}

fn shard<B: Batch>(
    loaders: &mut [DataLoader<B>],
    plan: &TrainPlan,
    world: &World,
    remainder: Remainder,
) -> Result<()> {
    if world.world_size == 1 || !plan.ranks.use_distributed_sampler {
        return Ok(());
    }
    loaders.iter_mut().try_for_each(|loader| loader.shard(world.rank, world.world_size, remainder))
}

impl Run {
    /// The ranks.
    pub(crate) fn world(&self) -> &World {
        self.strategy.world()
    }

    /// The checkpoint to go on from, for ranks that were started anew after a failure; else `ckpt_path`.
    ///
    /// # Collective
    /// All ranks must call it. Rank 0 decides: a rank that does not find the file says so when it reads it.
    pub(crate) fn after_restart(&mut self, ckpt_path: Option<String>) -> Result<Option<String>> {
        self.fits += 1;
        let world = self.world();
        let Some(store) = world.store() else { return Ok(ckpt_path) };
        if world.attempt == 0 {
            return self.forget_note().map(|()| ckpt_path);
        }
        let mut known = store.get(&self.note_key())?;
        if let (None, Some(path)) = (&known, self.note_file()) {
            known = std::fs::read_to_string(path).ok();
        }
        let found = known.as_deref().into_iter().flat_map(str::lines).find(|path| Path::new(path).exists());
        match world.of_rank_zero(found.map(str::to_owned))? {
            Some(path) => Ok(Some(path)),
            None => {
                if world.is_global_zero() {
                    tracing::info!(
                        "no checkpoint is known from before the failure: starting from the beginning"
                    );
                }
                Ok(ckpt_path)
            }
        }
    }

    /// Notes a checkpoint that a run can go on from.
    pub(crate) fn note_checkpoint(&self, path: &Path) -> Result<()> {
        let Some(store) = self.world().store() else { return Ok(()) };
        let absolute = std::path::absolute(path).unwrap_or_else(|_| PathBuf::from(path));
        let before = store.get(&self.note_key())?.unwrap_or_default();
        let before = before.lines().next().unwrap_or_default();
        let note = format!("{}\n{before}", absolute.display());
        store.set(&self.note_key(), &note)?;
        match self.note_file() {
            Some(path) => write_atomically(&path, |file| file.write_all(note.as_bytes())),
            None => Ok(()),
        }
    }

    /// Called when a fit is over: nobody has to go on with it.
    pub(crate) fn forget_note(&self) -> Result<()> {
        let Some(path) = self.note_file() else { return Ok(()) };
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::io("remove", path, error))
            }
            _ => Ok(()),
        }
    }

    /// A fit that is started anew must not take the checkpoint of a later one of the same trainer.
    fn note_key(&self) -> String {
        format!("{LAST_CHECKPOINT}/{}", self.fits)
    }

    /// Where rank 0 leaves its note if it would be lost in the store.
    fn note_file(&self) -> Option<PathBuf> {
        let run = self.world().forgetful_run()?;
        let run: String = run.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let name = format!(".{LAST_CHECKPOINT}.{run}.{}", self.fits);
        Some(self.facts.default_root_dir.join(name))
    }
}

/// What this rank has been asked.
fn votes(signal: Option<&str>, requests: &Requests) -> Votes {
    Votes {
        interrupt: signal == Some("SIGINT"),
        terminate: signal == Some("SIGTERM"),
        stop: requests.stop.is_some(),
    }
}

impl Parts<'_> {
    /// The module's backward; with `syncs` all ranks have the mean gradients and know each other's votes afterwards. With
    /// `detect_anomaly` the gradients are checked.
    pub(crate) fn backward<M: LightningModule>(
        &mut self,
        mut state: StepState<'_>,
        module: &M,
        batch: &BatchFacts<'_>,
        loss: &tch::Tensor,
        syncs: bool,
    ) -> Result<()> {
        let scaled = self.grad_scaler.as_ref().map(|scaler| scaler.scale(loss)).transpose()?;
        *self.has_scaled |= scaled.is_some();
        let loss = scaled.as_ref().unwrap_or(loss);
        let _action = self.profiling.of_strategy(self.strategy.name(), "backward")?;
        self.strategy.begin_backward(loss, syncs, votes(self.signal, self.requests))?;
        let of_call = again(&mut state);
        let done = self.module_call(of_call, module, "backward", batch, |m, ctx| m.backward(loss, ctx));
        *self.agreed = self.agreed.or(self.strategy.end_backward(done)?);
        if self.grad_scaler.is_some() {
            return Ok(()); // which leaves out steps whose gradients are not finite
        }
        check_gradients(self.anomaly, module, state.progress)
    }
}

impl<M: LightningModule> Session<'_, M> {
    /// Lets all ranks know what any of them has been asked; where there is no backward that does.
    pub(crate) fn agree(&mut self) -> Result<()> {
        let agreed = self.run.strategy.agree(votes(self.signals.received(), &self.run.requests))?;
        self.run.agreed = self.run.agreed.or(agreed);
        Ok(())
    }

    /// Somebody asked to stop, and all ranks know.
    pub(crate) fn is_asked_to_stop(&self) -> bool {
        if self.run.world().world_size > 1 { self.run.agreed.stop } else { self.run.requests.stop.is_some() }
    }

    /// The signal on which to end, known to all ranks.
    pub(crate) fn agreed_signal(&self) -> Option<&'static str> {
        if self.run.world().world_size == 1 {
            return self.signals.received();
        }
        let Votes { interrupt, terminate, .. } = self.run.agreed;
        interrupt.then_some("SIGINT").or(terminate.then_some("SIGTERM"))
    }
}
