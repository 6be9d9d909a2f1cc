//! What DeepSpeed's tests of sharded parameters assert, with their numbers where their layout does not matter:
//! `TestZero3ParamPartitioningBase`, `TestZero3ParamPartitioningManyParams`, `TestZeroUnbalancedGradients`, `TestZeroEmptyPartition`,
//! `TestZeroDtypeCocktail`.

use std::sync::Mutex;

use serde_json::json;
use voltaic::callback::LambdaCallback;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::nn::{Callable, Forward, ModuleExt, Parameter};
use voltaic::optim::Sgd;
use voltaic::strategy::DeepSpeedStrategy;
use voltaic::{Kind, Module, Tensor};

use crate::ladder::trained;
use crate::models::{Batch, Small, loaders};
use crate::ranks::{STAGES, assert_same, on_ranks, silent, weights};
use crate::stage3::bare;

const CPU: (Kind, tch::Device) = (Kind::Float, tch::Device::Cpu);

/// Multiplies by its weight.
#[derive(Module)]
pub struct Times {
    pub weight: Parameter,
}

impl Forward for Times {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        Ok(x * self.weight.tensor())
    }
}

/// Multiplications one after the other.
#[derive(Module)]
struct Chain {
    layers: Vec<Times>,
    /// What each layer gave, and what was in memory between two layers.
    #[module(skip)]
    seen: Mutex<Vec<(f64, f64, Vec<bool>)>>,
}

impl Chain {
    /// Weights of 3 x 5: layer i has `i + 1` in its first 8 elements, twice that in the others.
    fn new(layers: usize, factor: impl Fn(usize) -> f64) -> Self {
        let weight = |layer: usize| {
            let values = (0..15).map(|at| factor(layer) * if at < 8 { 1.0 } else { 2.0 });
            let values: Vec<f32> = values.map(|value| value as f32).collect();
            Times { weight: Parameter::new(Tensor::from_slice(&values).view([3, 5])) }
        };
        Self { layers: (0..layers).map(weight).collect(), seen: Mutex::default() }
    }
}

lightning_module!(Chain, Batch, Sgd::new(0.125), |net, (x, _), _| {
    let mut x = x.view([3, 5]);
    for layer in &net.layers {
        x = layer.call(&x)?;
        let ends = x.flatten(0, 1);
        let sharded = net.layers.iter().map(|layer| layer.weight.is_sharded()).collect();
        net.seen.lock().unwrap().push((ends.double_value(&[0]), ends.double_value(&[14]), sharded));
    }
    Ok(x.sum(Kind::Float))
});

/// Ones for each of two ranks, so many times.
fn ones(times: i64) -> Loaders<Batch> {
    let x = Tensor::ones([2 * times, 15], CPU);
    let data = TensorDataset::new((x.copy(), x)).unwrap();
    Loaders::new().train(DataLoader::new(data).batch_size(1).build().unwrap())
}

#[test]
fn layers_compute_with_what_all_ranks_hold() {
    on_ranks("partitioning::layers_compute_with_what_all_ranks_hold", 2, |ranks, folder| {
        let mut net = Chain::new(3, |layer| layer as f64 + 1.0);
        bare(ranks, folder).max_epochs(1).build().unwrap().fit(&mut net, &mut ones(3)).unwrap();
        let seen = net.seen.lock().unwrap().clone();
        // by hand, for the first and the last element, whose weights are 1, 2, 3 and 2, 4, 6: the gradient of a weight is the product of
        // the two others
        let (mut first, mut last) = ([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]);
        for step in 0..3 {
            for layer in 0..3 {
                let product = |weights: &[f64; 3]| weights[..=layer].iter().product::<f64>();
                let (own_first, own_last, sharded) = &seen[3 * step + layer];
                let near = |own: f64, expected: f64| (own - expected).abs() <= 1e-5 * expected.abs().max(1.0);
                let found = format!("step {step}, layer {layer}: {own_first}, {own_last}");
                assert!(near(*own_first, product(&first)), "{found}, not {}", product(&first));
                assert!(near(*own_last, product(&last)), "{found}, not {}", product(&last));
                // between two layers nothing is whole; once the order is known, the last one stays for backward, where it is the first
                let stays = layer == 2 && step > 0;
                assert_eq!(*sharded, [true, true, !stays], "{found}");
            }
            for weights in [&mut first, &mut last] {
                let [a, b, c] = *weights;
                *weights = [a - 0.125 * b * c, b - 0.125 * a * c, c - 0.125 * a * b];
            }
        }
        for (layer, times) in net.layers.iter().enumerate() {
            let flat = times.weight.tensor().flatten(0, 1);
            let own = [flat.double_value(&[0]), flat.double_value(&[14])];
            for (own, expected) in own.into_iter().zip([first[layer], last[layer]]) {
                assert!((own - expected).abs() <= 1e-4 * expected.abs().max(1.0), "{own}, not {expected}");
            }
        }
    });
}

#[test]
fn a_hundred_layers_come_and_go() {
    on_ranks("partitioning::a_hundred_layers_come_and_go", 2, |ranks, folder| {
        let mut net = Chain::new(100, |layer| if layer % 2 == 0 { 0.5 } else { 1.0 });
        bare(ranks, folder).max_epochs(1).build().unwrap().fit(&mut net, &mut ones(1)).unwrap();
        let seen = net.seen.lock().unwrap();
        assert_eq!(seen.len(), 100);
        // 50 factors 0.5 and 50 factors 1; twice that each in the last element
        assert_eq!((seen[99].0, seen[99].1), (0.5_f64.powi(50), 2.0_f64.powi(50)));
        assert!(seen.iter().all(|(_, _, sharded)| sharded.iter().all(|sharded| *sharded)));
    });
}

#[test]
fn parameters_that_are_switched_off_for_a_step_are_left_alone() {
    on_ranks(
        "partitioning::parameters_that_are_switched_off_for_a_step_are_left_alone",
        2,
        |ranks, folder| {
            let run = |strategy: &str| {
                let builder = silent(ranks, strategy, folder).max_epochs(2).callback(
                    LambdaCallback::new().on_train_batch_start(|ctx, module| {
                        let parameters = module.parameters();
                        let off = ctx.batch_idx() % parameters.len();
                        for (index, parameter) in parameters.iter().enumerate() {
                            let _ = parameter.set_requires_grad(index != off);
                        }
                        Ok(())
                    }),
                );
                trained(builder, Small::new(), loaders(24))
            };
            let expected = run("ddp_find_unused_parameters_true");
            for stage in STAGES {
                assert_same(stage, &run(stage), &expected);
            }
        },
    );
}

/// Three ranks, and parameters that one of them holds alone.
#[test]
fn ranks_that_hold_nothing_take_part() {
    on_ranks("partitioning::ranks_that_hold_nothing_take_part", 3, |ranks, folder| {
        let run = |strategy: &str| {
            let mut net = Chain::new(1, |_| 1.0);
            let mut trainer = silent(ranks, strategy, folder).max_epochs(1).build().unwrap();
            trainer.fit(&mut net, &mut ones(3)).unwrap();
            weights(&net)
        };
        let expected = run("ddp");
        for stage in STAGES {
            assert_same(stage, &run(stage), &expected);
        }
    });
}

#[test]
fn gradients_travel_in_the_dtype_of_the_settings() {
    on_ranks("partitioning::gradients_travel_in_the_dtype_of_the_settings", 2, |ranks, folder| {
        for stage in 1..=3 {
            let bytes = |more: serde_json::Value, precision: &str| {
                let mut all = json!({"zero_optimization": {"stage": stage}});
                all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
                let builder = silent(ranks, "auto", folder).strategy(DeepSpeedStrategy::settings(all));
                let mut trainer = builder.precision(precision).max_epochs(1).build().unwrap();
                trainer.fit(&mut Small::new(), &mut loaders(24)).unwrap();
                trainer.world().group().unwrap().traffic()["reduce_scatter"].1
            };
            let full = bytes(json!({}), "32-true");
            for dtype in ["fp16", "bf16"] {
                assert_eq!(2 * bytes(json!({"communication_data_type": dtype}), "32-true"), full, "{dtype}");
            }
            let low = json!({"bf16": {"enabled": true}});
            assert_eq!(2 * bytes(low, "bf16-true"), full, "stage {stage}: the dtype of the weights");
            let wide = json!({"bf16": {"enabled": true}, "communication_data_type": "fp32"});
            assert_eq!(bytes(wide, "bf16-true"), full, "stage {stage}");
        }
    });
}
