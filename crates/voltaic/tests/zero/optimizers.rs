//! Optimizers over parts of parameters are those over whole ones.

use serde_json::{Value, json};
use voltaic::Module;
use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::optim::{Lamb, Muon, Optimizer, OptimizerConfig, Optimizers};
use voltaic::strategy::DeepSpeedStrategy;
use voltaic::trainer::GraphMode;
use voltaic::{Error, Tensor};

use crate::models::{Batch, Small, loaders};
use crate::ranks::{assert_same, assert_within, on_ranks, silent, weights};

/// A small network with an optimizer by name.
#[derive(Module)]
struct With {
    net: Small,
    #[module(skip)]
    optimizer: OptimizerConfig,
    /// Steps that the optimizer has counted.
    #[module(skip)]
    counted: std::sync::Mutex<Vec<f64>>,
}

impl With {
    fn new(optimizer: impl Into<OptimizerConfig>) -> Self {
        Self { net: Small::new(), optimizer: optimizer.into(), counted: Default::default() }
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
        self.optimizer.clone().into()
    }

    fn optimizer_step(&self, optimizer: &mut dyn Optimizer, _ctx: &mut HookContext) -> anyhow::Result<()> {
        optimizer.step()?;
        let state = optimizer.state_dict().tensors.into_iter();
        let steps = state.filter(|(name, _)| name.starts_with("step."));
        *self.counted.lock().unwrap() = steps.map(|(_, count)| count.double_value(&[])).collect();
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
            for stage in ["zero1", "zero2", "zero3"] {
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
        for (class, init_args) in elementwise() {
            for precision in ["32-true", "16-mixed"] {
                let run = |graph: bool| {
                    let builder = silent(ranks, "auto", folder).accelerator("hpu").precision(precision);
                    let mut net = With::named(class, &init_args);
                    let mut trainer = builder
                        .graph(if graph { GraphMode::Step } else { GraphMode::Off })
                        .max_epochs(2)
                        .build()
                        .unwrap();
                    trainer.fit(&mut net, &mut loaders(24)).unwrap();
                    (weights(&net), trainer.graph_report().replayed_steps)
                };
                let ((own, replays), (expected, _)) = (run(true), run(false));
                assert!(replays > 0, "{class} with {precision}");
                // a replay reads the rate from memory, and rounds Lion's weight decay in another place
                let tolerance = if class == "Lion" { 1e-6 } else { 0.0 };
                assert_within(&format!("{class} with {precision}"), &own, &expected, tolerance);
            }
        }
    });
}

/// DeepSpeed's `TestZeroAdamOptimizerStepCount`.
#[test]
fn steps_are_counted_once_in_a_window() {
    on_ranks("optimizers::steps_are_counted_once_in_a_window", 2, |ranks, folder| {
        for stage in ["zero1", "zero2", "zero3"] {
            let mut trainer =
                silent(ranks, stage, folder).max_epochs(2).accumulate_grad_batches(2_u64).build().unwrap();
            let mut net = With::named("AdamW", &json!({"lr": 0.01}));
            trainer.fit(&mut net, &mut loaders(24)).unwrap();
            let counted = net.counted.lock().unwrap();
            assert!(!counted.is_empty(), "{stage}");
            assert!(
                counted.iter().all(|count| *count == trainer.global_step() as f64),
                "{stage}: {counted:?}"
            );
        }
    });
}

/// DeepSpeed's `TestZeroAllowUntestedOptimizer`; what needs whole matrices is refused in any case.
#[test]
fn others_are_refused_by_name() {
    on_ranks("optimizers::others_are_refused_by_name", 2, |ranks, folder| {
        let error = |optimizer: OptimizerConfig, allows: bool| -> Result<(), Error> {
            let settings =
                json!({"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": allows});
            let builder = silent(ranks, "auto", folder).strategy(DeepSpeedStrategy::settings(settings));
            builder.max_epochs(1).build().unwrap().fit(&mut With::new(optimizer), &mut loaders(24))
        };
        let lamb = || OptimizerConfig::from(Lamb::new(0.01));
        let found = error(lamb(), false).unwrap_err().to_string();
        assert!(
            found.contains("Lamb with zero1: it is not known to update each element by itself"),
            "{found}"
        );
        error(lamb(), true).unwrap();
        for allows in [false, true] {
            let found = error(Muon::new(0.01).into(), allows).unwrap_err().to_string();
            assert!(found.contains("Muon with zero1: it needs whole matrices"), "{found}");
        }
    });
}
