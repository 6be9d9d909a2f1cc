//! When the trainer does what: limits, validation, accumulation, stopping, schedules, clipping.

use tch::Tensor;
use voltaic::callback::Callback;
use voltaic::data::Loaders;
use voltaic::module::HookContext;
use voltaic::nn::Parameter;
use voltaic::optim::{
    Interval, LrSchedulerSpec, Optimizers, PlateauMode, ReduceLrOnPlateau, Sgd, StepLr, clip_grad_norm,
};
use voltaic::trainer::{GradientClipAlgorithm, TrainerBuilder};
use voltaic::{Kind, Module};

use crate::probe::{Events, LearningRates, Probe, loader, loaders, silent};

type Build = fn(TrainerBuilder) -> TrainerBuilder;

/// What happens in a fit of 6 training and 2 validation batches, and the optimizer steps at the end.
fn events(build: Build) -> (String, u64) {
    let events = Events::default();
    let builder = build(silent().num_sanity_val_steps(0).callback(events.clone()));
    let mut trainer = builder.build().unwrap();
    trainer.fit(&mut Probe::default(), &mut loaders()).unwrap();
    (events.text(), trainer.global_step())
}

fn check(cases: &[(&str, Build, &str, u64)]) {
    for (name, build, expected, steps) in cases {
        assert_eq!(events(*build), ((*expected).to_owned(), *steps), "{name}");
    }
}

#[test]
fn limits_take_a_number_or_a_fraction_of_batches() {
    check(&[
        ("no limit", |t| t.max_epochs(1), "t0* t1* t2* t3* t4* t5* V2 e", 6),
        ("train 2", |t| t.max_epochs(1).limit_train_batches(2), "t0* t1* V2 e", 2),
        ("train 0.5", |t| t.max_epochs(1).limit_train_batches(0.5), "t0* t1* t2* V2 e", 3),
        ("train 100", |t| t.max_epochs(1).limit_train_batches(100), "t0* t1* t2* t3* t4* t5* V2 e", 6),
        ("train 1 is one batch", |t| t.max_epochs(1).limit_train_batches(1), "t0* V2 e", 1),
        ("train 0", |t| t.max_epochs(1).limit_train_batches(0), "", 0),
        ("val 1", |t| t.max_epochs(1).limit_train_batches(1).limit_val_batches(1), "t0* V1 e", 1),
        ("val 0.5", |t| t.max_epochs(1).limit_train_batches(1).limit_val_batches(0.5), "t0* V1 e", 1),
        ("val 0", |t| t.max_epochs(1).limit_train_batches(1).limit_val_batches(0), "t0* e", 1),
    ]);
    for (key, build) in [
        ("trainer.limit_train_batches", (|t| t.limit_train_batches(0.1)) as Build),
        ("trainer.limit_val_batches", |t| t.limit_val_batches(0.1)),
    ] {
        let error = build(silent()).build().unwrap().fit(&mut Probe::default(), &mut loaders());
        let error = error.expect_err("a fraction of less than one batch").to_string();
        assert!(error.contains(key) && error.contains("less than one") && error.contains("; use"), "{error}");
    }
}

#[test]
fn validation_comes_when_the_keys_say() {
    check(&[
        ("every 2", |t| t.max_epochs(1).val_check_interval(2), "t0* t1* V2 t2* t3* V2 t4* t5* V2 e", 6),
        ("half", |t| t.max_epochs(1).val_check_interval(0.5), "t0* t1* t2* V2 t3* t4* t5* V2 e", 6),
        ("4 of 6", |t| t.max_epochs(1).val_check_interval(4), "t0* t1* t2* t3* V2 t4* t5* e", 6),
        (
            "4, across epochs: after 4, 8, 12, 16",
            |t| t.max_epochs(3).check_val_every_n_epoch(None).val_check_interval(4),
            "t0* t1* t2* t3* V2 t4* t5* e t0* t1* V2 t2* t3* t4* t5* V2 e t0* t1* t2* t3* V2 t4* t5* e",
            18,
        ),
        (
            "every second epoch",
            |t| t.max_epochs(3).limit_train_batches(1).check_val_every_n_epoch(2),
            "t0* e t0* V2 e t0* e",
            3,
        ),
        (
            "within every second epoch",
            |t| t.max_epochs(2).limit_train_batches(2).check_val_every_n_epoch(2).val_check_interval(1),
            "t0* t1* e t0* V2 t1* V2 e",
            4,
        ),
    ]);
    let error = silent().val_check_interval(7).build().unwrap().fit(&mut Probe::default(), &mut loaders());
    let error = error.expect_err("more than an epoch").to_string();
    assert!(error.contains("trainer.val_check_interval: 7 batches are more than the 6"), "{error}");
}

#[test]
fn the_sanity_check_is_a_part_of_validation_before_training() {
    let one = |t: TrainerBuilder| t.max_epochs(1).limit_train_batches(1);
    for (steps, expected) in [(None, "S2"), (Some(1), "S1"), (Some(-1), "S3"), (Some(7), "S3"), (Some(0), "")]
    {
        let events = Events::default();
        let mut builder = one(silent().callback(events.clone()));
        if let Some(steps) = steps {
            builder = builder.num_sanity_val_steps(steps);
        }
        let mut data = Loaders::new().train(loader(2)).val(loader(6));
        let mut trainer = builder.build().unwrap();
        trainer.fit(&mut Probe::logging(&[0.5]), &mut data).unwrap();
        assert_eq!(events.text(), format!("{expected} t0* V3 e").trim_start(), "{steps:?}");
        assert_eq!(trainer.metric("val_loss"), Some(0.5));
    }
}

#[test]
fn the_last_window_of_an_epoch_may_be_short() {
    check(&[
        ("4 of 6", |t| t.max_epochs(1).accumulate_grad_batches(4_u64), "t0 t1 t2 t3* t4 t5* V2 e", 2),
        (
            "a window never spans two epochs",
            |t| t.max_epochs(2).limit_train_batches(3).limit_val_batches(0).accumulate_grad_batches(2_u64),
            "t0 t1* t2* e t0 t1* t2* e",
            4,
        ),
        (
            "validation within a window",
            |t| t.max_epochs(1).accumulate_grad_batches(4_u64).val_check_interval(3),
            "t0 t1 t2 V2 t3* t4 t5* V2 e",
            2,
        ),
        (
            "max_steps counts optimizer steps",
            |t| t.max_steps(1).accumulate_grad_batches(4_u64),
            "t0 t1 t2 t3* e",
            1,
        ),
    ]);
}

#[test]
fn accumulated_gradients_are_the_mean_over_a_whole_window() {
    let fit = |batches: i32, accumulate: u64| {
        let mut net = Probe::default();
        let mut trainer = silent()
            .max_epochs(1)
            .limit_train_batches(batches)
            .limit_val_batches(0)
            .accumulate_grad_batches(accumulate)
            .build()
            .unwrap();
        trainer.fit(&mut net, &mut loaders()).unwrap();
        net.weights()
    };
    // sample i is [i, -i / 2]; batches have means 0.5, 2.5, 4.5, ...; the learning rate is 1/8
    assert_eq!(fit(1, 1), [1.0 - 0.5 / 8.0, 1.0 + 0.25 / 8.0]);
    assert_eq!(fit(2, 2), [1.0 - 1.5 / 8.0, 1.0 + 0.75 / 8.0]);
    // a short window is divided by the length of a whole one
    assert_eq!(fit(2, 4), [1.0 - 3.0 / 4.0 / 8.0, 1.0 + 1.5 / 4.0 / 8.0]);
}

#[test]
fn training_ends_at_the_first_limit() {
    check(&[
        ("steps within an epoch", |t| t.max_steps(4), "t0* t1* t2* t3* e", 4),
        ("steps over epochs", |t| t.max_steps(8), "t0* t1* t2* t3* t4* t5* V2 e t0* t1* e", 8),
        ("the earlier of the two", |t| t.max_steps(8).max_epochs(1), "t0* t1* t2* t3* t4* t5* V2 e", 6),
        ("exactly an epoch", |t| t.max_steps(6), "t0* t1* t2* t3* t4* t5* V2 e", 6),
        ("no epoch", |t| t.max_epochs(0), "", 0),
        ("no step", |t| t.max_steps(0), "", 0),
    ]);
}

struct StopAtOnce;

impl Callback for StopAtOnce {
    fn on_train_batch_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        ctx.request_stop("because");
        Ok(())
    }
}

#[test]
fn a_request_to_stop_waits_for_min_epochs_and_min_steps() {
    check(&[
        ("at once", |t| t.callback(StopAtOnce).max_epochs(9), "t0* V2 e", 1),
        (
            "min_epochs",
            |t| t.callback(StopAtOnce).max_epochs(9).limit_train_batches(2).min_epochs(2_u64),
            "t0* t1* V2 e t0* t1* V2 e",
            4,
        ),
        (
            "min_steps brings min_epochs=1",
            |t| t.callback(StopAtOnce).max_epochs(9).min_steps(3_u64),
            "t0* t1* t2* t3* t4* t5* V2 e",
            6,
        ),
        (
            "min_steps in the second epoch",
            |t| t.callback(StopAtOnce).max_epochs(9).limit_train_batches(2).min_steps(3_u64),
            "t0* t1* V2 e t0* V2 e",
            3,
        ),
    ]);
}

#[test]
fn a_second_fit_starts_again() {
    let events = Events::default();
    let builder = silent().max_epochs(2).limit_train_batches(2).num_sanity_val_steps(0);
    let mut trainer = builder.callback(events.clone()).callback(StopAtOnce).build().unwrap();
    for _ in 0..2 {
        trainer.fit(&mut Probe::logging(&[0.5, 0.25]), &mut loaders()).unwrap();
        assert_eq!((trainer.global_step(), trainer.metric("val_loss")), (1, Some(0.5)));
    }
    assert_eq!(events.text(), "t0* V2 e t0* V2 e");
}

#[test]
fn fast_dev_run_tries_everything_and_saves_nothing() {
    check(&[
        ("true", |t| t.fast_dev_run(true), "t0* V1 e", 1),
        ("3", |t| t.fast_dev_run(3_u64).max_epochs(7), "t0* t1* t2* V2 e", 3),
    ]);
    let root = tempfile::TempDir::new().unwrap();
    let mut trainer = voltaic::trainer::Trainer::builder()
        .default_root_dir(root.path())
        .with_logger(voltaic::logger::CsvLogger::new(root.path()))
        .enable_progress_bar(false)
        .enable_model_summary(false)
        .fast_dev_run(true)
        .build()
        .unwrap();
    trainer.fit(&mut Probe::logging(&[0.5]), &mut loaders()).unwrap();
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
    assert_eq!(trainer.metric("val_loss"), Some(0.5), "metrics are there all the same");
}

/// Learning rates of the batches of a fit, relative to the first.
fn learning_rates(spec: fn() -> LrSchedulerSpec, build: Build) -> Vec<f64> {
    let rates = LearningRates::default();
    let mut net = Probe::logging(&[1.0, 1.0, 2.0, 2.0]);
    net.optimizers = Box::new(move || Optimizers::new(Sgd::new(0.5)).scheduler(spec()));
    let builder = silent().num_sanity_val_steps(0).callback(rates.clone());
    build(builder).build().unwrap().fit(&mut net, &mut loaders()).unwrap();
    let rates = rates.0.lock().unwrap();
    rates.iter().map(|rate| rate / 0.5).collect()
}

#[test]
fn schedules_are_stepped_by_epoch_or_by_step() {
    fn halving() -> LrSchedulerSpec {
        LrSchedulerSpec::new(StepLr::new(1, 0.5))
    }
    fn plateau() -> LrSchedulerSpec {
        LrSchedulerSpec::new(ReduceLrOnPlateau::new(PlateauMode::Min).patience(0).factor(0.5))
            .monitor("val_loss")
    }
    let cases: [(&str, fn() -> LrSchedulerSpec, Build, &[f64]); 9] = [
        ("epoch", halving, |t| t.max_epochs(3).limit_train_batches(2), &[1.0, 1.0, 0.5, 0.5, 0.25, 0.25]),
        (
            "every second epoch",
            || halving().frequency(2),
            |t| t.max_epochs(4).limit_train_batches(1),
            &[1.0, 1.0, 0.5, 0.5],
        ),
        ("step", || halving().interval(Interval::Step), |t| t.max_steps(3), &[1.0, 0.5, 0.25]),
        (
            "every second batch of an epoch, as in Lightning",
            || halving().interval(Interval::Step).frequency(2),
            |t| t.max_epochs(2).limit_train_batches(3),
            &[1.0, 1.0, 0.5, 0.5, 0.5, 0.25],
        ),
        (
            "every third batch, of those with an optimizer step",
            || halving().interval(Interval::Step).frequency(3),
            |t| t.max_epochs(2).accumulate_grad_batches(2_u64),
            &[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5],
        ),
        (
            "step, accumulating",
            || halving().interval(Interval::Step),
            |t| t.max_epochs(1).limit_train_batches(5).accumulate_grad_batches(2_u64),
            &[1.0, 1.0, 0.5, 0.5, 0.25],
        ),
        // 1, 1 (no better: halved), 2 (no better: halved), ...
        ("plateau", plateau, |t| t.max_epochs(4).limit_train_batches(1), &[1.0, 1.0, 0.5, 0.25]),
        (
            "plateau by step, validation each batch",
            || plateau().interval(Interval::Step),
            |t| t.max_epochs(2).limit_train_batches(2).val_check_interval(1),
            &[1.0, 1.0, 0.5, 0.25],
        ),
        (
            "plateau by step, validation every second batch",
            || plateau().interval(Interval::Step).frequency(2),
            |t| t.max_epochs(2).limit_train_batches(4).val_check_interval(2),
            &[1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25],
        ),
    ];
    for (name, spec, build, expected) in cases {
        assert_eq!(learning_rates(spec, build), expected, "{name}");
    }
}

#[test]
fn gradients_are_clipped_as_by_hand() {
    let fit = |build: Build| {
        let mut net = Probe::default();
        let builder = silent().max_epochs(1).limit_train_batches(3).limit_val_batches(0);
        build(builder).build().unwrap().fit(&mut net, &mut loaders()).unwrap();
        net.weights()
    };
    let by_hand = |clip: &dyn Fn(&Parameter)| {
        let weight = Parameter::new(Tensor::ones([2], (Kind::Float, tch::Device::Cpu)));
        for batch in loader(6).iter(voltaic::data::EpochRange::epoch(0)).unwrap() {
            let mut grad = weight.grad();
            if grad.defined() {
                let _ = grad.zero_();
            }
            (batch.unwrap() * weight.tensor())
                .sum_dim_intlist(1, false, Kind::Float)
                .mean(Kind::Float)
                .backward();
            clip(&weight);
            let _ = tch::no_grad(|| weight.shallow_clone().g_sub_(&(weight.grad() * 0.125)));
        }
        Vec::<f32>::try_from(weight.tensor()).unwrap()
    };
    let free = by_hand(&|_| {});
    let norm = by_hand(&|weight| drop(clip_grad_norm([weight], 1.0).unwrap()));
    let value = by_hand(&|weight| drop(weight.grad().clamp_(-1.0, 1.0)));
    assert!(free != norm && norm != value && free != value);
    assert_eq!(fit(|t| t), free);
    assert_eq!(fit(|t| t.gradient_clip_val(1.0)), norm);
    assert_eq!(
        fit(|t| t.gradient_clip_val(1.0).gradient_clip_algorithm(GradientClipAlgorithm::Value)),
        value
    );
    assert_eq!(fit(|t| t.gradient_clip_val(0.0)), free, "0 means no clipping");
}

#[test]
fn hooks_at_the_end_of_validation_know_the_values_of_this_epoch() {
    /// What hooks at the end of validation and of testing know.
    #[derive(Clone, Default)]
    struct Known(std::sync::Arc<std::sync::Mutex<Vec<(bool, Option<f64>)>>>);
    impl Callback for Known {
        fn on_validation_epoch_end(
            &mut self,
            ctx: &mut HookContext,
            _: &mut dyn Module,
        ) -> anyhow::Result<()> {
            self.0.lock().unwrap().push((ctx.is_sanity_check(), ctx.metric("val_loss")));
            // what is logged here is added to what is known already
            let double = ctx.metric("val_loss").unwrap() * 2.0;
            ctx.log("double", double);
            Ok(())
        }
        fn on_test_epoch_end(&mut self, ctx: &mut HookContext, _: &mut dyn Module) -> anyhow::Result<()> {
            self.0.lock().unwrap().push((false, ctx.metric("val_loss")));
            Ok(())
        }
        fn on_train_start(&mut self, ctx: &mut HookContext, _: &mut dyn Module) -> anyhow::Result<()> {
            assert_eq!(ctx.metric("val_loss"), None, "the sanity check leaves nothing behind");
            Ok(())
        }
    }
    let known = Known::default();
    let mut trainer = silent().max_epochs(2).callback(known.clone()).build().unwrap();
    trainer.fit(&mut Probe::logging(&[0.5, 0.25]), &mut loaders()).unwrap();
    assert_eq!(*known.0.lock().unwrap(), [(true, Some(0.5)), (false, Some(0.5)), (false, Some(0.25))]);
    assert_eq!((trainer.metric("val_loss"), trainer.metric("double")), (Some(0.25), Some(0.5)));
    known.0.lock().unwrap().clear();
    trainer.validate(&mut Probe::logging(&[0.75, 0.75, 0.75]), &mut loaders()).unwrap(); // epoch 2
    assert_eq!(*known.0.lock().unwrap(), [(false, Some(0.75))]);
}
