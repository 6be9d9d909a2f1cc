//! DeepSpeed's schedules against its own; see fixtures/deepspeed/make_schedules.py.

#![allow(clippy::unwrap_used, clippy::panic, reason = "the helpers of tests may fail as the tests do")]

use serde_json::{Value, json};
use tch::Tensor;
use voltaic::nn::Parameter;
use voltaic::optim::*;

use crate::optim::{config_error, json_fixture};

fn two_groups(adam: bool) -> Box<dyn Optimizer> {
    let param = |name: &str| (name.to_owned(), Parameter::new(Tensor::from_slice(&[0.0_f32])));
    let groups = vec![ParamGroupSpec::new([param("a")]), ParamGroupSpec::new([param("b")]).lr(0.02)];
    if adam { Adam::new(0.1).build(groups).unwrap() } else { Sgd::new(0.1).build(groups).unwrap() }
}

fn cases() -> Vec<Value> {
    json_fixture("../deepspeed/schedules.json").as_array().unwrap().clone()
}

fn built(case: &Value) -> (Box<dyn Optimizer>, Box<dyn LrScheduler>) {
    let mut optimizer = two_groups(case["adam"] == true);
    let written = json!({"class_path": case["class_path"], "init_args": case["init_args"]});
    let config: LrSchedulerConfig = serde_json::from_value(written).unwrap();
    let text = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<LrSchedulerConfig>(&text).unwrap(), config);
    let scheduler = config.build(optimizer.param_groups_mut()).unwrap();
    (optimizer, scheduler)
}

fn assert_step(optimizer: &dyn Optimizer, case: &Value, step: usize) {
    for (index, group) in optimizer.param_groups().iter().enumerate() {
        let close = |actual: f64, expected: &Value| {
            let expected = expected.as_f64().unwrap();
            let error = (actual - expected).abs();
            let (name, args) = (&case["class_path"], &case["init_args"]);
            assert!(error <= 1e-14, "{name} {args}: group {index}, step {step}: {actual} is not {expected}");
        };
        close(group.lr, &case["lrs"][step][index]);
        if let Some(betas) = group.betas() {
            close(betas.0, &case["betas"][step][index][0]);
            close(betas.1, &case["betas"][step][index][1]);
        }
    }
}

#[test]
fn deepspeeds_schedules_give_deepspeeds_rates_for_fifty_steps() {
    let cases = cases();
    assert!(cases.len() > 20);
    for case in &cases {
        let (mut optimizer, mut scheduler) = built(case);
        assert_eq!(scheduler.name(), case["class_path"]);
        for step in 0..=50 {
            if step > 0 {
                scheduler.step(optimizer.param_groups_mut(), None).unwrap();
            }
            assert_step(optimizer.as_ref(), case, step);
        }
    }
}

#[test]
fn deepspeeds_schedules_continue_from_their_saved_state() {
    for case in &cases() {
        let (mut optimizer, mut scheduler) = built(case);
        for step in 1..=50 {
            let (mut other, mut resumed) = built(case);
            let groups = serde_json::from_str(&optimizer.state_dict().groups.to_string()).unwrap();
            other.load_state_dict(OptimizerState { tensors: Vec::new(), groups }).unwrap();
            resumed
                .load_state_dict(&serde_json::from_str(&scheduler.state_dict().to_string()).unwrap())
                .unwrap();
            (optimizer, scheduler) = (other, resumed);
            scheduler.step(optimizer.param_groups_mut(), None).unwrap();
            assert_step(optimizer.as_ref(), case, step);
        }
    }
}

#[test]
fn the_schedule_of_the_printed_configuration_gives_its_rates() {
    let mut optimizer = two_groups(false);
    let schedule = WarmupDecayLr::new(4, 8).warmup_min_lr(0.02).warmup_max_lr(0.05);
    let schedule = schedule.warmup_type(WarmupType::Linear);
    let mut scheduler = schedule.build(optimizer.param_groups_mut()).unwrap();
    let mut rates = vec![scheduler.last_lr()[0]];
    for _ in 0..11 {
        scheduler.step(optimizer.param_groups_mut(), None).unwrap();
        rates.push(scheduler.last_lr()[0]);
    }
    let expected = [0.02, 0.02, 0.0275, 0.035, 0.0425, 0.05, 0.0425, 0.035, 0.0275, 0.02, 0.02, 0.02];
    for (step, (rate, expected)) in rates.iter().zip(expected).enumerate() {
        assert!((rate - expected).abs() < 1e-15, "step {step}: {rate} is not {expected}");
    }
}

#[test]
fn deepspeeds_schedules_refuse_settings_out_of_range() {
    let table: Vec<(Box<dyn BuildLrScheduler>, &str)> = vec![
        (Box::new(WarmupLr::new(0)), "lr_scheduler.init_args.warmup_num_steps: 0 is not at least 1"),
        (
            Box::new(WarmupLr::new(5).warmup_max_lr(vec![0.1; 3])),
            "lr_scheduler.init_args.warmup_max_lr: has 3 values for 2 param groups",
        ),
        (
            Box::new(WarmupDecayLr::new(5, 9).warmup_min_lr(vec![0.1])),
            "lr_scheduler.init_args.warmup_min_lr: has 1 values for 2 param groups",
        ),
        (
            Box::new(WarmupCosineLr::new(5, 9).cos_min_ratio(1.5)),
            "lr_scheduler.init_args.cos_min_ratio: 1.5 is not from 0 to 1",
        ),
        (
            Box::new(OneCycle::new(0.1, 0.2).cycle_first_step_size(0)),
            "lr_scheduler.init_args.cycle_first_step_size: 0 is not at least 1",
        ),
        (
            Box::new(OneCycle::new(0.1, f64::NAN)),
            "lr_scheduler.init_args.cycle_max_lr: NaN is not a finite number",
        ),
        (
            Box::new(LrRangeTest::new(0.1).lr_range_test_step_size(0)),
            "lr_scheduler.init_args.lr_range_test_step_size: 0 is not at least 1",
        ),
        (
            Box::new(WarmupLr::new(5).last_batch_iteration(-2)),
            "lr_scheduler.init_args.last_batch_iteration: -2 is not at least -1",
        ),
    ];
    for (config, expected) in table {
        let mut optimizer = two_groups(true);
        assert_contains!(config_error(config.build(optimizer.param_groups_mut())), expected);
        assert_eq!(optimizer.param_groups()[1].lr, 0.02, "a refused schedule changes nothing");
    }
}

#[test]
fn a_momentum_that_has_grown_to_1_is_an_error() {
    let mut optimizer = two_groups(true);
    let cycle = OneCycle::new(0.01, 0.1).cycle_first_step_size(1).decay_step_size(1).decay_mom_rate(0.1);
    let mut scheduler = cycle.build(optimizer.param_groups_mut()).unwrap();
    let errors: Vec<String> = (0..5)
        .filter_map(|_| scheduler.step(optimizer.param_groups_mut(), None).err())
        .map(|error| error.to_string())
        .collect();
    assert!(
        errors[0].contains("OneCycle: the momentum after step ") && errors[0].contains("decay_mom_rate"),
        "{errors:?}"
    );
    assert!(optimizer.param_groups()[0].momentum() < 1.0);
}
