//! The optimizer's step goes by unit: the weights of one travel while the next is updated.

use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};

use voltaic::distributed::ProcessGroup;
use voltaic::nn::{ModuleExt, Parameter};
use voltaic::optim::{AdamW, BuildOptimizer, Optimizer, Optimizers, ParamGroupSpec};
use voltaic::strategy::{Strategy, Zero, ZeroConfig, ZeroStage};
use voltaic::trainer::TrainerBuilder;
use voltaic::{Module, Result, Tensor};

use crate::ladder::trained;
use crate::models::{Batch, Small, loaders};
use crate::ranks::{assert_same, silent, weights};

const STAGES: [ZeroStage; 3] = [ZeroStage::One, ZeroStage::Two, ZeroStage::Three];

/// A stage with units of a parameter or two; in stage 3 those of more than so many elements are sharded.
fn staged(ranks: usize, stage: ZeroStage, folder: &Path, threshold: usize) -> TrainerBuilder {
    silent(ranks, "zero1", folder).strategy(move |world| {
        let config = ZeroConfig {
            reduce_bucket_size: 64,
            param_persistence_threshold: threshold,
            ..ZeroConfig::of_stage(stage)
        };
        Ok(Box::new(Zero::new(world, config)) as Box<dyn Strategy>)
    })
}

/// What was there when a unit's update began.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Update {
    unit: usize,
    /// How many all_gathers had been started.
    gathers: u64,
    /// How many parameters were not in memory.
    sharded: usize,
}

#[derive(Default)]
struct Notes {
    group: OnceLock<Arc<ProcessGroup>>,
    parameters: Mutex<Vec<Parameter>>,
    updates: Mutex<Vec<Update>>,
}

impl Notes {
    fn note(&self, unit: usize) {
        let traffic = self.group.get().unwrap().traffic();
        let gathers = traffic.get("all_gather").map_or(0, |(calls, _)| *calls);
        let sharded =
            self.parameters.lock().unwrap().iter().filter(|parameter| parameter.is_sharded()).count();
        self.updates.lock().unwrap().push(Update { unit, gathers, sharded });
    }
}

/// A small network whose optimizer notes its updates, unit by unit if it has units.
#[derive(Module)]
struct Noted {
    net: Small,
    #[module(skip)]
    notes: Arc<Notes>,
    #[module(skip)]
    has_units: bool,
}

lightning_module!(
    Noted,
    Batch,
    |net| Optimizers::new(NotingAdamW { notes: net.notes.clone(), has_units: net.has_units }),
    |net, (x, y), _| net.net.loss(x, y)
);

struct NotingAdamW {
    notes: Arc<Notes>,
    has_units: bool,
}

impl BuildOptimizer for NotingAdamW {
    fn name(&self) -> &'static str {
        "AdamW"
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn build(&self, groups: Vec<ParamGroupSpec>) -> Result<Box<dyn Optimizer>> {
        let inner = AdamW::new(0.01).build(groups)?;
        Ok(Box::new(Noting { inner, notes: self.notes.clone(), has_units: self.has_units }))
    }
}

struct Noting {
    inner: Box<dyn Optimizer>,
    notes: Arc<Notes>,
    has_units: bool,
}

impl Optimizer for Noting {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn step(&mut self) -> Result<()> {
        self.notes.note(0);
        self.inner.step()
    }

    fn num_units(&self) -> usize {
        if self.has_units { self.inner.num_units() } else { 1 }
    }

    fn step_unit(&mut self, unit: usize) -> Result<()> {
        if !self.has_units {
            return self.step();
        }
        self.notes.note(unit);
        self.inner.step_unit(unit)
    }

    as_in!(inner);
}

/// What updates were like in a run of six steps, and its weights.
fn noted(builder: TrainerBuilder, has_units: bool) -> (Vec<Update>, Vec<(String, Tensor)>) {
    let mut trainer = builder.max_epochs(1).build().unwrap();
    let mut net = Noted { net: Small::new(), notes: Arc::default(), has_units };
    let _ = net.notes.group.set(trainer.world().group().unwrap().clone());
    *net.notes.parameters.lock().unwrap() = net.net.parameters();
    trainer.fit(&mut net, &mut loaders(24)).unwrap();
    let updates = net.notes.updates.lock().unwrap().clone();
    (updates, weights(&net.net))
}

fn overlap(ranks: usize, folder: &Path) {
    let expected = trained(silent(ranks, "ddp", folder).max_epochs(1), Small::new(), loaders(24));
    for (stage, threshold) in STAGES.into_iter().map(|stage| (stage, 100)).chain([(ZeroStage::Three, 0)]) {
        let what = format!("{stage:?} with a threshold of {threshold}");
        let builder = || staged(ranks, stage, folder, threshold);
        let (updates, own) = noted(builder(), true);
        assert_same(&what, &own, &expected);
        let steps: Vec<&[Update]> = updates.chunk_by(|last, next| last.unit < next.unit).collect();
        assert_eq!(steps.len(), 6, "{what}: {updates:?}");
        // in the order of their updates; each but those that are sharded travels when it has been updated
        let is_whole = [3, 99, 33, 165].map(|numel| stage != ZeroStage::Three || numel <= threshold);
        let whole_before = |unit: usize| is_whole[..unit].iter().filter(|is_whole| **is_whole).count();
        for step in steps {
            let expected = (0..4).map(|unit| Update {
                unit,
                gathers: step[0].gathers + whole_before(unit) as u64,
                sharded: 4 - whole_before(4), // freed before the first update
            });
            assert_eq!(step, expected.collect::<Vec<_>>(), "{what}");
        }
        // one that knows no units updates all of them at once
        let (updates, own) = noted(builder(), false);
        assert_same(&what, &own, &expected);
        assert_eq!(updates.iter().map(|update| update.unit).collect::<Vec<_>>(), [0; 6], "{what}");
    }
}

on_ranks_tests! {
    weights_travel_while_the_next_unit_is_updated: 2, overlap;
}
