//! Optimizers over parts of parameters are those over whole ones.

use serde_json::{Value, json};
use voltaic::Module;
use voltaic::Tensor;
use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::nn::ModuleExt;
use voltaic::optim::{AdamW, BuildOptimizer, Lamb, Optimizer, OptimizerConfig, Optimizers, ParamGroupSpec};
use voltaic::strategy::DeepSpeedStrategy;
use voltaic::trainer::{GraphMode, TrainerBuilder};

use crate::checkpoints::resumed;
use crate::models::{Batch, Small, loaders};
use crate::ranks::{STAGES, assert_same, assert_within, on_ranks, silent, weights};
use crate::shards::SaveAfter;

/// A small network with an optimizer by name.
#[derive(Module)]
struct With {
    net: Small,
    #[module(skip)]
    optimizer: OptimizerConfig,
    /// The optimizer gets parameters of two dimensions alone.
    #[module(skip)]
    matrices_only: bool,
    /// Steps that the optimizer has counted, if they are read: no graph can.
    #[module(skip)]
    counted: Option<std::sync::Mutex<Vec<f64>>>,
}

impl With {
    fn new(optimizer: impl Into<OptimizerConfig>) -> Self {
        Self { net: Small::new(), optimizer: optimizer.into(), matrices_only: false, counted: None }
    }

    fn named(class: &str, init_args: &Value) -> Self {
        let written = json!({"class_path": class, "init_args": init_args});
        Self::new(serde_json::from_value::<OptimizerConfig>(written).unwrap())
    }
}

impl LightningModule for With {
    type Batch = Batch;

    fn training_step(&self, (x, y): &Batch, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        self.net.loss(x, y)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        let optimizers = Optimizers::new(self.optimizer.clone());
        if !self.matrices_only {
            return Ok(optimizers);
        }
        let matrices = self.named_parameters().into_iter().filter(|(_, parameter)| parameter.dim() == 2);
        Ok(optimizers.groups([ParamGroupSpec::new(matrices)]))
    }

    fn optimizer_step(&self, optimizer: &mut dyn Optimizer, _ctx: &mut HookContext) -> anyhow::Result<()> {
        optimizer.step()?;
        if let Some(counted) = &self.counted {
            let state = optimizer.state_dict().tensors.into_iter();
            let steps = state.filter(|(name, _)| name.starts_with("step."));
            *counted.lock().unwrap() = steps.map(|(_, count)| count.double_value(&[])).collect();
        }
        Ok(())
    }
}

/// Those that update each element by itself.
fn elementwise() -> Vec<(&'static str, Value)> {
    vec![
        ("SGD", json!({"lr": 0.05, "momentum": 0.9, "nesterov": true})),
        ("Adam", json!({"lr": 0.01, "weight_decay": 0.1, "amsgrad": true})),
        ("AdamW", json!({"lr": 0.01, "bias_correction": false})),
        ("Adagrad", json!({"lr": 0.05, "lr_decay": 0.1})),
        ("RMSprop", json!({"lr": 0.01, "centered": true, "momentum": 0.5})),
        ("Adadelta", json!({"lr": 1.0})),
        ("Lion", json!({"lr": 0.01, "weight_decay": 0.1})),
    ]
}

#[test]
fn elementwise_optimizers_are_ddps() {
    on_ranks("optimizers::elementwise_optimizers_are_ddps", 2, |ranks, folder| {
        for (class, init_args) in elementwise() {
            let run = |strategy: &str, accelerator: &str, precision: &str| {
                let builder = silent(ranks, strategy, folder).accelerator(accelerator).precision(precision);
                let mut net = With::named(class, &init_args);
                builder.max_epochs(2).build().unwrap().fit(&mut net, &mut loaders(24)).unwrap();
                weights(&net)
            };
            let expected = run("ddp", "cpu", "32-true");
            for stage in STAGES {
                assert_same(&format!("{class} {stage}"), &run(stage, "cpu", "32-true"), &expected);
            }
            // float32 copies in each rank's part, and on an HPU
            let low = run("zero1", "hpu", "bf16-true");
            assert_same(&format!("{class} in bfloat16"), &run("zero2", "hpu", "bf16-true"), &low);
        }
    });
}

/// On an HPU, steps by graphs are steps as usual, also with autocast to float16 and a scaled loss.
#[test]
fn graphs_follow_all_optimizers() {
    on_ranks("optimizers::graphs_follow_all_optimizers", 1, |ranks, folder| {
        let others = [
            ("Lamb", json!({"lr": 0.01, "weight_decay": 0.1})),
            ("Muon", json!({"lr": 0.01, "weight_decay": 0.1})),
            ("MuonWithAuxAdam", json!({"lr": 0.01, "weight_decay": 0.1})),
        ];
        for (class, init_args) in elementwise().into_iter().chain(others) {
            for precision in ["32-true", "16-mixed"] {
                let run = |graph: bool| {
                    let builder = silent(ranks, "auto", folder).accelerator("hpu").precision(precision);
                    let mut net = With::named(class, &init_args);
                    net.matrices_only = class == "Muon";
                    // clips updates, which take the place of gradients
                    let clips = class == "MuonWithAuxAdam";
                    let mut trainer = builder
                        .gradient_clip_val(if clips { 0.5 } else { 0.0 })
                        .graph(if graph { GraphMode::Step } else { GraphMode::Off })
                        .max_epochs(2)
                        .build()
                        .unwrap();
                    trainer.fit(&mut net, &mut loaders(24)).unwrap();
                    let report = trainer.graph_report();
                    (weights(&net), report.replayed_steps, report.replayed_updates)
                };
                let ((own, steps, updates), (expected, ..)) = (run(true), run(false));
                assert!(steps > 0 && (updates > 0 || precision != "32-true"), "{class} with {precision}");
                assert_same(&format!("{class} with {precision}"), &own, &expected);
            }
        }
    });
}

/// DeepSpeed's `TestZeroAdamOptimizerStepCount`.
#[test]
fn steps_are_counted_once_in_a_window() {
    on_ranks("optimizers::steps_are_counted_once_in_a_window", 2, |ranks, folder| {
        for stage in STAGES {
            let mut trainer =
                silent(ranks, stage, folder).max_epochs(2).accumulate_grad_batches(2_u64).build().unwrap();
            let mut net = With::named("AdamW", &json!({"lr": 0.01}));
            net.counted = Some(Default::default());
            trainer.fit(&mut net, &mut loaders(24)).unwrap();
            let counted = net.counted.as_ref().unwrap().lock().unwrap();
            assert!(!counted.is_empty(), "{stage}");
            assert!(
                counted.iter().all(|count| *count == trainer.global_step() as f64),
                "{stage}: {counted:?}"
            );
        }
    });
}

/// Two groups, one of them without parameters.
#[derive(Module)]
struct Grouped {
    net: Small,
    #[module(skip)]
    has_empty: bool,
}

impl LightningModule for Grouped {
    type Batch = Batch;

    fn training_step(&self, (x, y): &Batch, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        self.net.loss(x, y)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        let mut groups = vec![ParamGroupSpec::new(self.named_parameters()).lr(0.02)];
        if self.has_empty {
            groups.insert(0, ParamGroupSpec::new([]).weight_decay(0.0));
            groups.push(ParamGroupSpec::new([]));
        }
        Ok(Optimizers::new(AdamW::new(0.01)).groups(groups))
    }
}

/// DeepSpeed's `TestEmptyParameterGroup`; also from a checkpoint, and with a window that an epoch does not fill.
#[test]
fn a_group_may_be_empty() {
    on_ranks("optimizers::a_group_may_be_empty", 2, |ranks, folder| {
        for precision in ["32-true", "bf16-true"] {
            for stage in ["ddp", "zero1", "zero2", "zero3"] {
                if (stage, precision) == ("ddp", "bf16-true") {
                    continue; // without master weights
                }
                let path = folder.join(format!("{stage}-{precision}.ckpt"));
                let fit = |has_empty: bool, epochs: i64, from: Option<&std::path::Path>| {
                    let builder =
                        silent(ranks, stage, folder).precision(precision).accumulate_grad_batches(2_u64);
                    let builder = builder.max_epochs(epochs).callback(SaveAfter(2, path.clone()));
                    let mut trainer = resumed(builder, from);
                    let mut net = Grouped { net: Small::new(), has_empty };
                    trainer.fit(&mut net, &mut loaders(5 * 2 * ranks as i64)).unwrap();
                    assert_eq!(
                        trainer.global_step(),
                        3 * epochs as u64,
                        "the last of five batches steps alone"
                    );
                    weights(&net)
                };
                let (expected, own) = (fit(false, 2, None), fit(true, 2, None));
                assert_same(&format!("{stage} {precision}"), &own, &expected);
                let resumed = fit(true, 2, Some(&path));
                assert_same(&format!("{stage} {precision}, resumed"), &resumed, &expected);
            }
        }
    });
}

/// A window that an epoch does not fill is DDP's.
#[test]
fn a_window_ends_with_its_epoch() {
    on_ranks("optimizers::a_window_ends_with_its_epoch", 2, |ranks, folder| {
        let run = |strategy: &str| {
            let builder = silent(ranks, strategy, folder).accumulate_grad_batches(3_u64).max_epochs(2);
            let mut net = Small::new();
            builder.build().unwrap().fit(&mut net, &mut loaders(5 * 2 * ranks as i64)).unwrap();
            weights(&net)
        };
        let expected = run("ddp");
        for stage in STAGES {
            // two and later stages add up means of batches, ddp takes the mean of sums
            let tolerance = if stage == "zero1" { 0.0 } else { 5e-5 };
            assert_within(stage, &run(stage), &expected, tolerance);
        }
    });
}

/// An optimizer of a user's own that may not be able to work on parts.
struct Own {
    needs_whole: bool,
}

impl BuildOptimizer for Own {
    fn name(&self) -> &'static str {
        "Own"
    }

    fn needs_unsharded_parameters(&self) -> bool {
        self.needs_whole
    }

    fn build(&self, groups: Vec<ParamGroupSpec>) -> voltaic::Result<Box<dyn Optimizer>> {
        AdamW::new(0.01).build(groups)
    }
}

#[derive(Module)]
struct WithOwn {
    net: Small,
    #[module(skip)]
    needs_whole: bool,
}

lightning_module!(
    WithOwn,
    Batch,
    |net| Optimizers::new(Own { needs_whole: net.needs_whole }),
    |net, (x, y), _| net.net.loss(x, y)
);

/// DeepSpeed's `TestZeroAllowUntestedOptimizer`; what needs unsharded parameters, as Lamb for its norms, is refused in any case.
#[test]
fn others_are_refused_by_name() {
    on_ranks("optimizers::others_are_refused_by_name", 2, |ranks, folder| {
        fn error<M: LightningModule<Batch = Batch>>(
            builder: TrainerBuilder,
            allows: bool,
            mut net: M,
        ) -> String {
            let settings =
                json!({"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": allows});
            let builder = builder.strategy(DeepSpeedStrategy::settings(settings)).max_epochs(1);
            let done = builder.build().unwrap().fit(&mut net, &mut loaders(24));
            done.map_or_else(|error| error.to_string(), |()| "none".to_owned())
        }
        let builder = || silent(ranks, "auto", folder);
        for allows in [false, true] {
            let lamb = error(builder(), allows, With::new(OptimizerConfig::from(Lamb::new(0.01))));
            assert!(lamb.contains("Lamb with zero1: it needs unsharded parameters"), "{lamb}");
            let own = |needs_whole| error(builder(), allows, WithOwn { net: Small::new(), needs_whole });
            assert!(own(true).contains("Own with zero1: it needs unsharded parameters"), "{}", own(true));
            let unknown = "Own with zero1: it is not known to update each element by itself";
            let (expected, own) = (if allows { "none" } else { unknown }, own(false));
            assert!(own.contains(expected), "{own}");
        }
    });
}
