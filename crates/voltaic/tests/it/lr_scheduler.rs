//! Learning rate schedules against PyTorch's; see fixtures/optim/make_fixtures.py.

#![allow(clippy::unwrap_used, clippy::panic, reason = "the helpers of tests may fail as the tests do")]

use serde_json::{Value, json};
use tch::Tensor;
use voltaic::nn::Parameter;
use voltaic::optim::*;

use crate::optim::{config_error, json_fixture};

fn two_groups(adam: bool) -> Box<dyn Optimizer> {
    let param = |name: &str| (name.to_owned(), Parameter::new(Tensor::from_slice(&[0.0_f32])));
    let groups = vec![ParamGroupSpec::new([param("a")]), ParamGroupSpec::new([param("b")]).lr(0.02)];
    if adam {
        Adam::new(0.1).build(groups).unwrap()
    } else {
        Sgd::new(0.1).momentum(0.9).build(groups).unwrap()
    }
}

fn schedule(case: &Value, optimizer: &mut dyn Optimizer) -> Box<dyn LrScheduler> {
    let groups = optimizer.param_groups_mut();
    if case["class_path"] == "LambdaLR" {
        return LambdaLr::new(|step| 0.95_f64.powf(step as f64) / (1.0 + step as f64)).build(groups).unwrap();
    }
    let config: LrSchedulerConfig =
        serde_json::from_value(json!({"class_path": case["class_path"], "init_args": case["init_args"]}))
            .unwrap();
    // what is written is read back as the same
    let text = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<LrSchedulerConfig>(&text).unwrap(), config);
    config.build(groups).unwrap()
}

fn assert_curve(optimizer: &dyn Optimizer, case: &Value, step: usize) {
    for (index, group) in optimizer.param_groups().iter().enumerate() {
        for (what, actual) in [("lrs", group.lr), ("momentums", group.momentum())] {
            let Some(expected) = case[what][step][index].as_f64() else { continue };
            let error = (actual - expected).abs();
            assert!(
                error <= 1e-12 * expected.abs(),
                "{} {} {what} of group {index} at step {step}: {actual} is not {expected}",
                case["class_path"],
                case["init_args"]
            );
        }
    }
}

#[test]
fn schedules_match_pytorch_for_fifty_steps() {
    let fixture = json_fixture("schedules.json");
    let curves = fixture["curves"].as_array().unwrap();
    assert!(curves.len() > 20);
    for case in curves {
        let mut optimizer = two_groups(case["optimizer"] == "adam");
        let mut scheduler = schedule(case, optimizer.as_mut());
        assert_eq!(scheduler.name(), case["class_path"]);
        assert_eq!(case["lrs"].as_array().unwrap().len(), 51);
        for step in 0..=50 {
            if step > 0 {
                scheduler.step(optimizer.param_groups_mut(), None).unwrap();
            }
            assert_curve(optimizer.as_ref(), case, step);
            let rates: Vec<f64> = optimizer.param_groups().iter().map(|group| group.lr).collect();
            assert_eq!(scheduler.last_lr(), rates);
        }
    }
}

#[test]
fn plateau_schedules_match_pytorch() {
    for case in json_fixture("schedules.json")["plateaus"].as_array().unwrap() {
        let mut optimizer = two_groups(false);
        let mut scheduler = schedule(case, optimizer.as_mut());
        for (step, metric) in case["metrics"].as_array().unwrap().iter().enumerate() {
            // through its saved state at every step
            let state = serde_json::from_str(&scheduler.state_dict().to_string()).unwrap();
            let mut fresh = schedule(case, two_groups(false).as_mut());
            fresh.load_state_dict(&state).unwrap();
            scheduler = fresh;
            scheduler.step(optimizer.param_groups_mut(), metric.as_f64()).unwrap();
            assert_curve(optimizer.as_ref(), case, step);
        }
        let error = scheduler.step(optimizer.param_groups_mut(), None).unwrap_err().to_string();
        assert!(error.starts_with("ReduceLROnPlateau: ") && error.contains("; log the metric"), "{error}");
    }
}

#[test]
fn loaded_schedules_continue_bit_for_bit() {
    for case in json_fixture("schedules.json")["curves"].as_array().unwrap() {
        let is_adam = case["optimizer"] == "adam";
        let mut whole = two_groups(is_adam);
        let mut whole_schedule = schedule(case, whole.as_mut());
        for stop in 0..30 {
            let mut resumed = two_groups(is_adam);
            let mut resumed_schedule = schedule(case, resumed.as_mut());
            let groups = serde_json::from_str(&whole.state_dict().groups.to_string()).unwrap();
            resumed.load_state_dict(OptimizerState { tensors: Vec::new(), groups }).unwrap();
            let state = serde_json::from_str(&whole_schedule.state_dict().to_string()).unwrap();
            resumed_schedule.load_state_dict(&state).unwrap();
            whole_schedule.step(whole.param_groups_mut(), None).unwrap();
            resumed_schedule.step(resumed.param_groups_mut(), None).unwrap();
            for (a, b) in whole.param_groups().iter().zip(resumed.param_groups()) {
                assert_eq!((a.lr, a.momentum()), (b.lr, b.momentum()), "{case} after {stop}");
            }
        }
    }
}

#[test]
fn a_schedule_refuses_another_schedules_state() {
    let mut optimizer = two_groups(false);
    let mut step = StepLr::new(3, 0.5).build(optimizer.param_groups_mut()).unwrap();
    let cosine = CosineAnnealingLr::new(9).build(optimizer.param_groups_mut()).unwrap();
    assert_error!(step.load_state_dict(&cosine.state_dict()), "StepLR: it is a state of CosineAnnealingLR; ");
    let mut state = step.state_dict();
    state["last_lr"] = json!([0.1]);
    assert_error!(step.load_state_dict(&state), "for 1 param groups, not 2");
}

#[test]
fn schedules_out_of_range_are_refused() {
    let table: Vec<(Box<dyn BuildLrScheduler>, &str)> = vec![
        (Box::new(StepLr::new(0, 0.1)), "lr_scheduler.init_args.step_size: 0"),
        (Box::new(ExponentialLr::new(f64::NAN)), "lr_scheduler.init_args.gamma: NaN"),
        (Box::new(ConstantLr::new(1.5, 3)), "lr_scheduler.init_args.factor: 1.5"),
        (Box::new(LinearLr::warmup(0.0, 3)), "lr_scheduler.init_args.start_factor: 0"),
        (Box::new(CosineAnnealingLr::new(0)), "lr_scheduler.init_args.T_max: 0"),
        (Box::new(CosineAnnealingWarmRestarts::new(0)), "lr_scheduler.init_args.T_0: 0"),
        (Box::new(OneCycleLr::new(0.1, 0)), "lr_scheduler.init_args.total_steps: 0"),
        (
            Box::new(OneCycleLr::new(vec![0.1], 9)),
            "lr_scheduler.init_args.max_lr: has 1 values for 2 param groups",
        ),
        (Box::new(ReduceLrOnPlateau::default().factor(1.0)), "lr_scheduler.init_args.factor: 1"),
        (Box::new(LinearWarmupCosine::new(5, 5)), "lr_scheduler.init_args.total_iters: 5 is not more than"),
        (
            Box::new(SequentialLr::new(
                [StepLr::new(1, 0.1).into(), ReduceLrOnPlateau::default().into()],
                [3],
            )),
            "lr_scheduler.init_args.schedulers[1]: ReduceLROnPlateau cannot be part of a sequence",
        ),
        (
            Box::new(SequentialLr::new([StepLr::new(1, 0.1).into()], [3])),
            "lr_scheduler.init_args.milestones: has 1 values for 1 schedulers",
        ),
    ];
    for (config, expected) in table {
        assert_contains!(config_error(config.build(two_groups(false).param_groups_mut())), expected);
    }
}

#[test]
fn schedules_that_end_or_give_no_number_are_errors() {
    let mut optimizer = two_groups(false);
    let mut cycle = OneCycleLr::new(0.1, 3).build(optimizer.param_groups_mut()).unwrap();
    for _ in 0..3 {
        cycle.step(optimizer.param_groups_mut(), None).unwrap();
    }
    let error = cycle.step(optimizer.param_groups_mut(), None).unwrap_err().to_string();
    assert!(error.contains("OneCycleLR: step 4 lies behind the end of the cycle of 3 steps; set"), "{error}");
    let mut lambda = LambdaLr::new(|step| if step < 2 { 1.0 } else { f64::NAN })
        .build(optimizer.param_groups_mut())
        .unwrap();
    lambda.step(optimizer.param_groups_mut(), None).unwrap();
    let before: Vec<f64> = optimizer.param_groups().iter().map(|group| group.lr).collect();
    let error = lambda.step(optimizer.param_groups_mut(), None).unwrap_err().to_string();
    assert!(error.contains("LambdaLR: the learning rate at step 2 is NaN; "), "{error}");
    assert_eq!(before, optimizer.param_groups().iter().map(|group| group.lr).collect::<Vec<_>>());
}

#[test]
fn warmup_then_cosine_is_the_sequence_of_the_two() {
    let (mut one, mut two) = (two_groups(false), two_groups(false));
    let mut short =
        LinearWarmupCosine::new(4, 20).start_factor(0.1).eta_min(1e-3).build(one.param_groups_mut()).unwrap();
    let parts = [LinearLr::warmup(0.1, 4).into(), CosineAnnealingLr::new(16).eta_min(1e-3).into()];
    let mut long = SequentialLr::new(parts, [4]).build(two.param_groups_mut()).unwrap();
    for _ in 0..20 {
        assert_eq!(short.last_lr(), long.last_lr());
        short.step(one.param_groups_mut(), None).unwrap();
        long.step(two.param_groups_mut(), None).unwrap();
    }
    assert!((short.last_lr()[0] - 1e-3).abs() < 1e-15, "{:?}", short.last_lr());
}

/// Calls `visit` with the name and schema of each setting below `schema`.
fn settings(schema: &Value, visit: &mut dyn FnMut(&str, &Value)) {
    match schema {
        Value::Object(members) => {
            for (name, setting) in members.get("properties").and_then(Value::as_object).into_iter().flatten()
            {
                visit(name, setting);
            }
            members.values().for_each(|member| settings(member, visit));
        }
        Value::Array(members) => members.iter().for_each(|member| settings(member, visit)),
        _ => {}
    }
}

#[test]
fn every_setting_has_a_help_text() {
    let mut seen = Vec::new();
    for schema in [schemars::schema_for!(OptimizerConfig), schemars::schema_for!(LrSchedulerConfig)] {
        settings(schema.as_value(), &mut |name, setting| {
            if !["class_path", "init_args"].contains(&name) {
                assert!(setting["description"].is_string(), "{name}: {setting}");
                seen.push(name.to_owned());
            }
        });
    }
    for name in ["betas", "momentum", "T_max", "milestones", "min_lr"] {
        assert!(seen.iter().any(|seen| seen == name), "{name} is not in {seen:?}");
    }
}
