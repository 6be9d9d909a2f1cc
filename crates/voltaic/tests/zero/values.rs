//! Weight, gradient and states of a parameter by name, whole and this rank's, whatever is sharded (DeepSpeed's test_zero_tensor_fragment).

use std::path::Path;
use std::sync::{Arc, Mutex};

use voltaic::callback::Callback;
use voltaic::module::{HookContext, LightningModule};
use voltaic::nn::{Callable, Linear, ModuleExt};
use voltaic::optim::{ParamValue, Sgd};
use voltaic::trainer::TrainerBuilder;
use voltaic::{Kind, Module, Tensor};

use crate::models::{Batch, Kernels, Odd, Small, loaders, numbers};
use crate::ranks::{STAGES, assert_same, assert_within, on_ranks, silent, weights};
use crate::shards::staged;

pub type Seen = Vec<(String, Tensor)>;

/// Reads all values of all trained parameters before a step and after it, and writes some.
struct Values {
    seen: Arc<Mutex<Seen>>,
    sets: bool,
}

fn names(module: &dyn Module) -> Vec<(String, Vec<i64>)> {
    let trained = module.named_parameters().into_iter().filter(|(_, parameter)| parameter.requires_grad());
    trained.map(|(fqn, parameter)| (fqn, parameter.size())).collect()
}

pub fn host(tensor: &Tensor) -> Tensor {
    tensor.to_device(tch::Device::Cpu)
}

/// What all ranks have of a value, in their order, is all of it if it is sharded.
fn check_local(ctx: &HookContext, fqn: &str, value: ParamValue<'_>, whole: &Tensor) {
    let optimizer = ctx.optimizers().iter().find(|optimizer| {
        optimizer.param_groups().iter().flat_map(|group| group.params()).any(|(own, _)| own == fqn)
    });
    let own = optimizer.unwrap().local_value(fqn, value).unwrap().map(|own| host(&own));
    let own = own.unwrap_or_else(|| Tensor::zeros([0], (Kind::Float, tch::Device::Cpu)));
    let own: Vec<f32> = Vec::try_from(&own).unwrap();
    let all = ctx.process_group().unwrap().all_gather_object(&own).unwrap();
    let expected: Vec<f32> = Vec::try_from(whole.view(-1)).unwrap();
    let is_whole = all.iter().all(|own| *own == expected);
    assert!(is_whole || all.concat() == expected, "{value} of {fqn}");
}

impl Callback for Values {
    fn on_before_optimizer_step(&mut self, ctx: &mut HookContext, module: &dyn Module) -> anyhow::Result<()> {
        let mut seen = Vec::new();
        for (fqn, size) in names(module) {
            let weight = host(&ctx.full_fp32_param(&fqn)?);
            assert_eq!((weight.size(), weight.kind()), (size.clone(), Kind::Float));
            check_local(ctx, &fqn, ParamValue::Fp32Weight, &weight);
            seen.push((format!("weight.{fqn}"), weight));
            if let Some(grad) = ctx.full_grad(&fqn)?.map(|grad| host(&grad)) {
                assert_eq!(grad.size(), size);
                check_local(ctx, &fqn, ParamValue::Gradient, &grad);
                if self.sets && ctx.global_step() == 2 {
                    ctx.set_full_grad(&fqn, &(&grad * 0.5))?;
                    assert_eq!(host(&ctx.full_grad(&fqn)?.unwrap()), &grad * 0.5);
                }
                seen.push((format!("grad.{fqn}"), grad));
            }
        }
        self.seen.lock().unwrap().append(&mut seen);
        Ok(())
    }

    fn on_train_batch_end(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        let mut seen = Vec::new();
        for (fqn, size) in names(module) {
            let numel: i64 = size.iter().product();
            for kind in ["exp_avg", "exp_avg_sq", "step"] {
                let Ok(state) = ctx.full_optimizer_state(&fqn, kind).map(|state| host(&state)) else {
                    continue;
                }; // it had no gradient yet
                assert_eq!(state.size(), if kind == "step" { Vec::new() } else { size.clone() });
                if kind != "step" {
                    check_local(ctx, &fqn, ParamValue::State(kind), &state);
                }
                seen.push((format!("{kind}.{fqn}"), state));
            }
            if !self.sets || numel == 0 {
                continue;
            }
            if ctx.global_step() == 1 {
                let values = numbers(&size, 9.0) * 0.2;
                ctx.set_full_fp32_param(&fqn, &values)?;
                assert_eq!(host(&ctx.full_fp32_param(&fqn)?), values, "{fqn}");
            }
            if ctx.global_step() == 3 && ctx.full_optimizer_state(&fqn, "exp_avg").is_ok() {
                let values = numbers(&size, 11.0) * 0.01;
                ctx.set_full_optimizer_state(&fqn, "exp_avg", &values)?;
                assert_eq!(host(&ctx.full_optimizer_state(&fqn, "exp_avg")?), values, "{fqn}");
                ctx.set_full_optimizer_state(&fqn, "step", &Tensor::from(7.0_f32))?;
                assert_eq!(ctx.full_optimizer_state(&fqn, "step")?.double_value(&[]), 7.0);
            }
        }
        self.seen.lock().unwrap().append(&mut seen);
        Ok(())
    }
}

pub fn seen<M: LightningModule<Batch = Batch> + Module>(
    builder: TrainerBuilder,
    sets: bool,
    mut net: M,
) -> (Seen, Seen) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let mut trainer = builder.max_epochs(1).callback(Values { seen: seen.clone(), sets }).build().unwrap();
    trainer.fit(&mut net, &mut loaders(24)).unwrap();
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    // of a parameter without elements nobody keeps a state
    let seen = seen.into_iter().filter(|(name, value)| value.numel() > 0 && !name.ends_with(".empty"));
    (seen.map(|(name, value)| (name, value.shallow_clone())).collect(), weights(&net))
}

fn equal(ranks: usize, folder: &Path) {
    let ddp = || silent(ranks, "ddp_find_unused_parameters_true", folder);
    for sets in [false, true] {
        let expected = [
            seen(ddp(), sets, Small::new()),
            seen(ddp(), sets, Odd::new()),
            seen(ddp(), sets, Kernels::new()),
        ];
        assert!(expected.iter().all(|(seen, _)| seen.len() > 50));
        for stage in STAGES {
            let builder = || staged(ranks, stage, folder);
            let own = [
                seen(builder(), sets, Small::new()),
                seen(builder(), sets, Odd::new()),
                seen(builder(), sets, Kernels::new()),
            ];
            for ((seen, end), (expected, expected_end)) in own.iter().zip(&expected) {
                assert_same(&format!("{stage} {sets}: values"), seen, expected);
                assert_same(&format!("{stage} {sets}: weights"), end, expected_end);
            }
        }
        // in bfloat16 with float32 copies, which are what is read and written
        let low = |builder: TrainerBuilder, has_masters| {
            seen(builder.precision("bf16-true"), sets, Small { has_masters, ..Small::new() })
        };
        let expected = low(silent(ranks, "ddp", folder), true);
        for stage in STAGES {
            let (seen, end) = low(staged(ranks, stage, folder), false);
            let first = |all: &Seen| -> Seen {
                let masters = all.iter().filter(|(name, _)| !name.starts_with("weight")).take(8);
                masters.map(|(name, value)| (name.clone(), value.shallow_clone())).collect()
            };
            assert_within(&format!("{stage} bf16"), &first(&seen), &first(&expected.0), 1e-6);
            assert_within(&format!("{stage} bf16"), &end, &expected.1, 1e-6);
        }
    }
}

on_ranks_tests! {
    two_ranks_have_the_values_of_ddp: 2, equal;
    #[ignore = "a long form, which make stress runs"]
    three_ranks_have_the_values_of_ddp: 3, equal;
    what_is_not_there_is_an_error_on_all_ranks: 2, wrong;
    two_trainers_take_turns: 2, two_trainers;
}

#[test]
fn hpus_have_the_values_of_ddp() {
    on_ranks("values::hpus_have_the_values_of_ddp", 2, |ranks, folder| {
        let ddp = silent(ranks, "ddp", folder).accelerator("hpu");
        let (expected, expected_end) = seen(ddp, true, Small::new());
        for stage in ["zero1", "zero3"] {
            let (own, end) = seen(staged(ranks, stage, folder).accelerator("hpu"), true, Small::new());
            assert_same(stage, &own, &expected);
            assert_same(stage, &end, &expected_end);
        }
    });
}

/// Asks for what is not there, and for other things on other ranks.
struct Wrong(Arc<Mutex<Vec<String>>>);

impl Callback for Wrong {
    fn on_train_batch_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        let mut errors = vec![
            ctx.full_fp32_param("third.weight").unwrap_err().to_string(),
            ctx.full_optimizer_state("first.weight", "momentum").unwrap_err().to_string(),
            ctx.set_full_fp32_param("first.weight", &numbers(&[5, 33], 1.0)).unwrap_err().to_string(),
            ctx.set_full_optimizer_state("first.bias", "exp_avg", &numbers(&[7], 1.0))
                .unwrap_err()
                .to_string(),
            ctx.set_full_optimizer_state("first.bias", "max", &numbers(&[7], 1.0)).unwrap_err().to_string(),
        ];
        let rank = ctx.process_group().unwrap().rank() as i64;
        let other = ctx.set_full_fp32_param("first.weight", &numbers(&[33, 5 + rank], 1.0));
        errors.extend(other.err().map(|error| error.to_string()));
        self.0.lock().unwrap().append(&mut errors);
        Ok(())
    }
}

fn wrong(ranks: usize, folder: &Path) {
    for stage in ["ddp", "zero1", "zero2", "zero3"] {
        let errors = Arc::new(Mutex::new(Vec::new()));
        let builder = staged(ranks, stage, folder);
        let mut trainer = builder.max_steps(1).callback(Wrong(errors.clone())).build().unwrap();
        trainer.fit(&mut Small::new(), &mut loaders(8)).unwrap();
        let errors = errors.lock().unwrap();
        let expected = [
            "has a parameter `third.weight`",
            "no state `momentum` of first.weight; it has ",
            "values of shape [5, 33] for the weight of first.weight, which has [33, 5]",
            "values of shape [7] for the exp_avg of first.bias, which has [33]",
            "no state `max` of first.bias",
        ];
        for (error, expected) in errors.iter().zip(expected) {
            assert!(error.contains(expected), "{stage}: {error}");
        }
        if stage != "ddp" {
            assert!(errors[5].contains("rank 1: values of shape [33, 6]"), "{stage}: {}", errors[5]);
            let all = trainer.world().group().unwrap().all_gather_object(&*errors).unwrap();
            assert!(all.iter().all(|of_rank| *of_rank == all[0]), "{stage}: {all:?}");
        }
    }
}

/// Writes this rank's elements alone.
struct Local;

impl Callback for Local {
    fn on_train_batch_end(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        for (fqn, _) in names(module) {
            for value in [ParamValue::Fp32Weight, ParamValue::State("exp_avg")] {
                let optimizer = &mut ctx.optimizers_mut()[0];
                let own = optimizer.local_value(&fqn, value)?.unwrap();
                optimizer.set_local_value(&fqn, value, &(&own * 0.5))?;
                assert_eq!(optimizer.local_value(&fqn, value)?.unwrap(), own * 0.5);
                let error = optimizer.set_local_value(&fqn, value, &numbers(&[1000], 1.0)).unwrap_err();
                assert!(error.to_string().contains("values of shape [1000]"), "{error}");
            }
        }
        Ok(())
    }
}

#[test]
fn elements_of_a_rank_are_written() {
    on_ranks("values::elements_of_a_rank_are_written", 2, |ranks, folder| {
        let run = |builder: TrainerBuilder| {
            let mut net = Small::new();
            let mut trainer = builder.max_epochs(1).callback(Local).build().unwrap();
            trainer.fit(&mut net, &mut loaders(16)).unwrap();
            weights(&net)
        };
        let expected = run(silent(ranks, "ddp", folder));
        for stage in STAGES {
            assert_same(stage, &run(staged(ranks, stage, folder)), &expected);
        }
    });
}

/// Goes backward from outputs that are not scalars, with gradients of its own.
#[derive(Module)]
struct Vectors {
    first: Linear,
    second: Linear,
}

lightning_module!(Vectors, Batch, manual(Sgd::new(0.05).momentum(0.9)), |net, (x, y), ctx| {
    let out = net.second.call(&net.first.call(x)?.relu())?;
    let gradient = (&out - y).detach() * 0.1;
    ctx.optimizer(0)?.zero_grad()?;
    let error = ctx.manual_backward_with_gradient(&out, &gradient.narrow(1, 0, 2)).unwrap_err();
    assert!(error.to_string().contains("a gradient of shape [2, 2] for an output of shape [2, 3]"));
    ctx.manual_backward_with_gradient(&out, &gradient)?;
    ctx.optimizer(0)?.step()?;
    Ok(ctx.no_loss())
});

#[test]
fn backward_from_an_output_that_is_no_scalar() {
    on_ranks("values::backward_from_an_output_that_is_no_scalar", 2, |ranks, folder| {
        let run = |builder: TrainerBuilder| {
            let Small { first, second, .. } = Small::new();
            let mut net = Vectors { first, second };
            let mut trainer = builder.max_epochs(1).build().unwrap();
            trainer.fit(&mut net, &mut loaders(16)).unwrap();
            weights(&net)
        };
        let expected = run(silent(ranks, "ddp", folder));
        let before = weights(&Small::new());
        assert!(expected.iter().zip(&before).all(|((_, own), (_, before))| !own.equal(before)));
        for stage in STAGES {
            assert_same(stage, &run(staged(ranks, stage, folder)), &expected);
        }
    });
}

/// Two trainers in one process, each with a module of its own, by turns; one that begins while the other trains.
struct Within(Option<Box<dyn FnOnce() + Send>>);

impl Callback for Within {
    fn on_train_batch_end(&mut self, _ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        self.0.take().into_iter().for_each(|body| body());
        Ok(())
    }
}

fn two_trainers(ranks: usize, folder: &Path) {
    let builder = |stage: &str| staged(ranks, stage, folder).max_epochs(1);
    for stage in STAGES {
        let alone = |epochs: usize| {
            let mut net = Small::new();
            let mut trainer = builder(stage).build().unwrap();
            (0..epochs).for_each(|_| trainer.fit(&mut net, &mut loaders(16)).unwrap());
            weights(&net)
        };
        let (one, two) = (alone(1), alone(2));
        let (mut a, mut b) = (Small::new(), Small::new());
        let (mut of_a, mut of_b) = (builder(stage).build().unwrap(), builder(stage).build().unwrap());
        of_a.fit(&mut a, &mut loaders(16)).unwrap();
        of_b.fit(&mut b, &mut loaders(16)).unwrap();
        assert_same(stage, &weights(&a), &one);
        of_a.fit(&mut a, &mut loaders(16)).unwrap();
        assert_same(stage, &weights(&b), &one);
        of_b.fit(&mut b, &mut loaders(16)).unwrap();
        assert_same(stage, &weights(&a), &two);
        assert_same(stage, &weights(&b), &two);
        let inner: Arc<Mutex<Option<Seen>>> = Arc::default();
        let (kept, root) = (inner.clone(), folder.to_path_buf());
        let body = Box::new(move || {
            let mut net = Small::new();
            let mut within = staged(ranks, stage, &root).max_epochs(1).build().unwrap();
            within.fit(&mut net, &mut loaders(16)).unwrap();
            *kept.lock().unwrap() = Some(weights(&net));
        });
        let mut net = Small::new();
        let mut outer = builder(stage).callback(Within(Some(body))).build().unwrap();
        outer.fit(&mut net, &mut loaders(16)).unwrap();
        assert_same(stage, &weights(&net), &one);
        assert_same(stage, inner.lock().unwrap().as_ref().unwrap(), &one);
    }
}
