//! Graphs have the scales advance in replays, and captures and warm-ups leave them alone.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tch::{Kind, Tensor};
use voltaic::callback::LambdaCallback;
use voltaic::graph::{HpuGraph, ModuleCacher, make_graphed_callables};
use voltaic::nn::{Forward, ModuleExt, te};
use voltaic::precision::fp8::{
    AmaxComputeAlgo, DelayedScaling, Float8CurrentScaling, Fp8Format, Recipe, fp8_autocast,
    set_measurement_mode,
};
use voltaic::trainer::{GraphMode, TrainerBuilder, seed_everything};
use voltaic::{Module, ffi};

use crate::alone;
use crate::compare::assert_same;
use crate::operators::{HPU, start_hpu};
use crate::runs::{Net, left_by as left_of, loaders, no_counts, plugin, waves};
use crate::silent::silent;

fn recipe(format: Fp8Format, rows: usize) -> Recipe {
    DelayedScaling {
        fp8_format: format,
        amax_history_len: rows,
        amax_compute_algo: AmaxComputeAlgo::Max,
        reduce_amax: false,
        ..DelayedScaling::default()
    }
    .into()
}

fn layer() -> te::Linear {
    let layer = te::Linear::new(4, 3).unwrap();
    for (index, parameter) in layer.parameters().iter().enumerate() {
        parameter.set_data(&(waves(&parameter.size(), index as f64) * 0.3).to_device(HPU)).unwrap();
        let zeros = parameter.tensor().zeros_like();
        ffi::set_grad(parameter.leaf(), &zeros).unwrap();
    }
    layer
}

/// Forward and backward; gradients are added to those that are there.
fn step(layer: &dyn Forward, x: &Tensor, recipe: &Recipe) -> anyhow::Result<Tensor> {
    let y = {
        let _fp8 = fp8_autocast(true, Some(recipe.clone()))?;
        layer.forward(x)?
    };
    y.f_mean(Kind::Float)?.f_backward()?;
    Ok(y.f_detach()?)
}

fn left_by(layer: &dyn Module) -> Vec<(String, Tensor)> {
    let grads = layer.named_parameters().into_iter().map(|(fqn, parameter)| (fqn, parameter.grad()));
    let all = grads.chain(te::fp8_state_dict(layer).unwrap());
    no_counts(all.map(|(name, tensor)| (name, tensor.to_device(crate::operators::CPU))).collect())
}

#[test]
fn largest_magnitudes_advance_in_replays() {
    let _alone = alone();
    start_hpu();
    let sizes = [1.0, 10.0, 100.0, 10.0, 1.0, 10.0, 100.0, 100.0, 1.0, 1.0, 100.0];
    for format in [Fp8Format::E5M2, Fp8Format::Hybrid] {
        for rows in [1, 2, 3] {
            let recipe = recipe(format, rows);
            let inputs: Vec<Tensor> =
                sizes.iter().map(|size| (waves(&[2, 4], 1.0) * *size).to_device(HPU)).collect();
            let eager = layer();
            ffi::manual_seed(5).unwrap(); // HYBRID rounds gradients at random
            let expected: Vec<Tensor> = inputs.iter().map(|x| step(&eager, x, &recipe).unwrap()).collect();

            let graphed = layer();
            ffi::manual_seed(5).unwrap();
            let _ = step(&graphed, &inputs[0], &recipe).unwrap(); // without a capture: the first one makes no scales
            let (graph, mut x) = (HpuGraph::new(), inputs[1].copy());
            let y = graph.capture(|| step(&graphed, &x, &recipe)).unwrap();
            assert!(y.equal(&expected[1]), "the capture is a step, too");
            for index in 2..inputs.len() {
                x.copy_(&inputs[index]);
                graph.replay().unwrap();
                assert!(y.equal(&expected[index]), "{format:?}, {rows} rows, {index}");
                let plain = inputs[index].linear(graphed.weight.tensor(), graphed.bias.as_deref());
                let error = ((&y - &plain).norm() / plain.norm()).double_value(&[]);
                let saturates = match index {
                    5 => rows == 1,
                    6 => true,
                    10 => rows <= 2,
                    3 | 4 | 7 | 8 | 9 => false,
                    _ => continue,
                };
                assert_eq!(error > 0.3, saturates, "{format:?}, {rows} rows, {index}: {error}");
            }
            assert_same(&format!("{format:?}, {rows} rows"), &left_by(&graphed), &left_by(&eager));
        }
    }
}

#[test]
fn graphed_callables_leave_the_scales_alone_until_they_are_called() {
    let _alone = alone();
    start_hpu();
    for format in [Fp8Format::E5M2, Fp8Format::Hybrid] {
        let recipe = recipe(format, 1);
        let sample = (waves(&[2, 4], 1.0) * 40.0).to_device(HPU);
        let inputs: Vec<Tensor> = (0..4).map(|i| waves(&[2, 4], f64::from(i)).to_device(HPU)).collect();
        let eager = layer();
        ffi::manual_seed(5).unwrap();
        let expected: Vec<Tensor> = inputs.iter().map(|x| step(&eager, x, &recipe).unwrap()).collect();
        let own = layer();
        ffi::manual_seed(5).unwrap();
        let graphed = {
            let _fp8 = fp8_autocast(true, Some(recipe.clone())).unwrap();
            make_graphed_callables(own, &sample, 2).unwrap()
        };
        for (name, tensor) in te::fp8_state_dict(&graphed).unwrap() {
            let untouched = if name.contains("scale") { 1.0 } else { 0.0 };
            if name.contains("scale") || name.contains("amax_history") {
                assert!(tensor.eq(untouched).all().int64_value(&[]) == 1, "{format:?} {name}: {tensor}");
            }
        }
        for (input, expected) in inputs.iter().zip(&expected) {
            let _fp8 = fp8_autocast(true, Some(recipe.clone())).unwrap();
            let y = graphed.forward(input).unwrap();
            y.mean(Kind::Float).backward();
            assert!(y.equal(expected), "{format:?}");
        }
        let scales = |module: &dyn voltaic::Module| no_counts(te::fp8_state_dict(module).unwrap());
        assert_same(&format!("{format:?}"), &scales(&graphed), &scales(&eager));
    }
}

#[test]
fn an_interval_is_refused_in_captures() {
    let _alone = alone();
    start_hpu();
    let recipe: Recipe = DelayedScaling { interval: 4, ..DelayedScaling::default() }.into();
    let (layer, x) = (layer(), waves(&[2, 4], 1.0).to_device(HPU));
    let _ = step(&layer, &x, &recipe).unwrap();
    assert_error!(HpuGraph::new().capture(|| step(&layer, &x, &recipe)), "the fp8 recipe has an interval");
}

#[test]
fn passes_measure_by_hand_as_without_graphs() {
    let _alone = alone();
    start_hpu();
    let recipe = recipe(Fp8Format::E5M2, 2);
    // by hand or not, and whether they measure: in runs of several passes, so that there are replays, then in any order
    let mut by_hand = StdRng::seed_from_u64(3);
    let mut hits = 0;
    for case in 0..40 {
        let mut drawn = || (by_hand.random_bool(0.7), by_hand.random_bool(0.5));
        let runs = (0..6).flat_map(|_| [drawn(); 4]).collect::<Vec<_>>();
        let modes = runs.into_iter().chain((0..12).map(|_| drawn())).collect::<Vec<_>>();
        let (eager, cached) = (layer(), ModuleCacher::new([1, 10][case % 2]).wrap(layer()));
        let graphed = {
            let _fp8 = fp8_autocast(true, Some(recipe.clone())).unwrap();
            make_graphed_callables(layer(), &waves(&[2, 4], 1.0).to_device(HPU), 2).unwrap()
        };
        for (index, (is_manual, measures)) in modes.iter().enumerate() {
            set_measurement_mode(*is_manual, *measures);
            let x = (waves(&[2, 4], 1.0) * 10.0_f64.powi((index % 3) as i32)).to_device(HPU);
            let expected = step(&eager, &x, &recipe).unwrap();
            for (what, net) in [("ModuleCacher", &cached as &dyn Forward), ("a graphed callable", &graphed)] {
                let same = step(net, &x, &recipe).unwrap().equal(&expected);
                assert!(same, "case {case}, pass {index} of {modes:?} by {what}: {}", cached.stats());
            }
        }
        hits += cached.stats().hits;
        assert_same(&format!("case {case}"), &left_by(&cached), &left_by(&eager));
    }
    set_measurement_mode(false, true);
    assert!(hits > 0);
}

/// A run of a network that its steps call by `ctx.graphed`: what it leaves, with its last loss, and its replays.
fn run(accelerator: &str, graph: GraphMode, builder: TrainerBuilder) -> (Vec<(String, Tensor)>, u64) {
    seed_everything(4).unwrap();
    let mut net = Net::new(false);
    let mut trainer = builder.max_epochs(2).accelerator(accelerator).devices(1).graph(graph).build().unwrap();
    trainer.fit(&mut net, &mut loaders(32, 4)).unwrap();
    let mut left = no_counts(left_of(&net));
    for name in ["train_loss", "val_loss"] {
        left.push((name.to_owned(), Tensor::from(trainer.metric(name).unwrap())));
    }
    (left, trainer.graph_report().modules.iter().map(|(_, stats)| stats.hits).sum())
}

#[test]
fn modules_that_a_step_calls_by_graphs_train_as_without() {
    let _alone = alone();
    start_hpu();
    let with = |recipe: Recipe| silent().plugins([plugin(recipe, false)]);
    let builder = |case: &str| match case {
        "E5M2" => with(recipe(Fp8Format::E5M2, 1)),
        "HYBRID" => with(recipe(Fp8Format::Hybrid, 3)),
        "current scaling" => with(Float8CurrentScaling { fp8_format: Fp8Format::Hybrid, margin: 0 }.into()),
        "accumulation" => with(recipe(Fp8Format::Hybrid, 3)).accumulate_grad_batches(3_u64),
        _ => with(recipe(Fp8Format::Hybrid, 3)).activation_checkpointing(vec!["first".to_owned()]),
    };
    for case in ["E5M2", "HYBRID", "current scaling", "accumulation", "checkpointed"] {
        let (eager, _) = run("hpu", GraphMode::Off, builder(case));
        let (graphed, replays) = run("hpu", GraphMode::Modules, builder(case));
        // 16 steps: a capture of the first pass, which makes no scales, then two of those that do
        assert!(replays >= 12, "{case}: {replays}");
        assert_same(case, &graphed, &eager);
    }
    let (eager, _) = run("cpu", GraphMode::Off, silent().precision("fp8"));
    let (graphed, replays) = run("cpu", GraphMode::Modules, silent().precision("fp8"));
    assert!(replays >= 12, "cpu: {replays}");
    assert_same("cpu", &graphed, &eager);
}

#[test]
fn runs_that_measure_by_hand_train_as_without_graphs() {
    let _alone = alone();
    start_hpu();
    for accumulation in [1_u64, 3] {
        let builder = || {
            let by_hand = LambdaCallback::new().on_train_batch_start(|ctx, _| {
                set_measurement_mode(true, ctx.batch_idx() % 8 < 5);
                Ok(())
            });
            let plugin = plugin(recipe(Fp8Format::Hybrid, 3), false);
            silent().plugins([plugin]).callback(by_hand).accumulate_grad_batches(accumulation)
        };
        let (eager, _) = run("hpu", GraphMode::Off, builder());
        for graph in [GraphMode::Modules, GraphMode::Step] {
            let (graphed, replays) = run("hpu", graph, builder());
            assert!(replays > 0 || graph == GraphMode::Step);
            assert_same(&format!("{graph:?}, {accumulation} batches a step"), &graphed, &eager);
        }
        set_measurement_mode(false, true);
    }
}
