//! Keys that contradict each other are refused; those that others leave without effect are named in the log.

use voltaic::Error;
use voltaic::callback::{ModelSummary, ProgressBar};
use voltaic::graph::{CompileBackend, CompileConfig, CompileOptions};
use voltaic::trainer::{GradientClipAlgorithm, GraphMode, Trainer, TrainerBuilder};

use crate::probe::{Probe, loaders, short_fit, silent, voltaic};

type Build = fn(TrainerBuilder) -> TrainerBuilder;

fn refusal(build: Build) -> String {
    build(silent()).build().err().map(|error| error.to_string()).unwrap_or_default()
}

#[test]
fn a_limit_of_gradients_that_clips_nothing_is_refused() {
    let cases: [(Build, &str); 5] = [
        (
            |t| t.gradient_clip_algorithm(GradientClipAlgorithm::Value),
            "trainer.gradient_clip_algorithm: value without gradient_clip_val, so that nothing is clipped; set \
             trainer.gradient_clip_val, or remove it",
        ),
        (
            |t| t.gradient_clip_val(-1.0),
            "trainer.gradient_clip_val: -1 is not a limit; use a positive number, or 0 to clip nothing",
        ),
        (|t| t.gradient_clip_val(f64::NAN), "trainer.gradient_clip_val: NaN is not a limit"),
        (|t| t.gradient_clip_val(f64::INFINITY), "trainer.gradient_clip_val: inf is not a limit"),
        // 0 switches clipping off, as in Lightning, whatever else a file says of it
        (|t| t.gradient_clip_val(0.0).gradient_clip_algorithm(GradientClipAlgorithm::Norm), ""),
    ];
    for (build, expected) in cases {
        let error = refusal(build);
        assert!(error.starts_with(expected) && error.is_empty() == expected.is_empty(), "{error}");
    }
}

#[test]
fn compile_is_refused_beside_what_it_cannot_be_combined_with() {
    let cases: [(Build, &[&str]); 3] = [
        (
            |t| t.compile(CompileBackend::HpuBackend).graph(GraphMode::Step),
            &["compile=hpu_backend", "graph=step"],
        ),
        (
            |t| t.compile(CompileBackend::AotHpuTrainingBackend).graph(GraphMode::Modules),
            &[
                "compile=aot_hpu_training_backend",
                "graph=modules",
                "leave out trainer.compile or trainer.graph",
            ],
        ),
        (|t| t.compile(CompileBackend::HpuBackend).detect_anomaly(true), &["detect_anomaly"]),
    ];
    for (build, expected) in cases {
        let error = refusal(build);
        assert!(error.starts_with("trainer.compile: compile="), "{error}");
        expected.iter().for_each(|part| assert!(error.contains(part), "{part} is not in: {error}"));
    }
    // what is known when a fit begins
    let mut trainer = silent().compile(CompileBackend::AotHpuInferenceBackend).build().unwrap();
    let error = trainer.fit(&mut Probe::default(), &mut loaders()).unwrap_err().to_string();
    assert!(error.contains("trainer.compile: aot_hpu_inference_backend in a fit"), "{error}");
    trainer.validate(&mut Probe::default(), &mut loaders()).unwrap();
}

/// Of several ranks only a fit would record a step; the command line refuses it before it starts them.
#[test]
fn steps_of_ranks_are_refused_in_a_fit_alone() {
    let ways: [(Build, &str); 2] = [
        (|t| t.graph(GraphMode::Step), "graph=step"),
        (|t| t.compile(CompileBackend::HpuBackend), "compile=hpu_backend"),
    ];
    let two_ranks = [
        "--model=Mlp",
        "--data=MnistData",
        "--trainer.accelerator=cpu",
        "--trainer.strategy=ddp",
        "--trainer.devices=2",
    ];
    for (build, way) in ways {
        let mut trainer = build(silent().strategy("ddp").devices(1)).build().unwrap();
        let error = trainer.fit(&mut Probe::default(), &mut loaders()).unwrap_err().to_string();
        let refusal = format!("{way} with a strategy of ranks");
        assert!(error.contains(&refusal), "{error}");
        let error = trainer.show_graphs(&mut Probe::default(), &mut loaders()).unwrap_err().to_string();
        assert!(error.contains("compile=hpu_backend with a strategy of ranks"), "{error}");
        trainer.validate(&mut Probe::default(), &mut loaders()).unwrap();

        let way = format!("--trainer.{way}");
        let (status, error) = voltaic(&[&["fit", &way], &two_ranks[..]].concat(), &[]);
        assert!(status == Some(2) && error.matches(&refusal).count() == 1, "{status:?} {error}");
        let short = "--trainer.limit_test_batches=2";
        let (status, error) = voltaic(&[&["test", &way, short], &two_ranks[..]].concat(), &[]);
        assert!(status == Some(0), "{status:?} {error}");
    }
}

#[test]
fn backends_of_compile_are_known_by_name() {
    let (status, error) = short_fit(&["--trainer.compile=hpu_backnd"], &[]);
    assert!(status == Some(2) && error.contains("did you mean `hpu_backend`"), "{status:?} {error}");
    let (status, error) = short_fit(&["--trainer.compile=aot_hpu_training_backend"], &[]);
    let warning = "*** Usage of deprecated backend! Please use hpu_backend. ***";
    assert!(status == Some(0) && error.matches(warning).count() == 1, "{status:?} {error}");
    let (status, error) = short_fit(&["--trainer.compile=hpu_backend"], &[]);
    assert!(status == Some(0) && !error.contains("deprecated"), "{status:?} {error}");
}

#[test]
fn options_of_compile_have_an_effect_or_say_that_they_have_none() {
    let key = "--trainer.compile.options";
    let idle = "decomposition_mode enable_allreduce_graph_split enable_sfg force_static_compile inference \
        keep_input_mutations reassign_copy_ reassign_full_copy remove_unnecessary_clones use_boxed_input \
        use_cpp_partitioner use_inplace_allreduce use_inplace_index_copy";
    for value in ["true", "false"] {
        let given: Vec<String> =
            idle.split_whitespace().map(|option| format!("{key}.{option}={value}")).collect();
        let arguments: Vec<&str> = given.iter().map(String::as_str).collect();
        let (status, error) = short_fit(&arguments, &[]);
        assert_eq!(status, Some(0), "{error}");
        for option in idle.split_whitespace() {
            let line = format!("trainer.compile.options.{option} has no effect: ");
            assert_eq!(error.matches(&line).count(), 1, "{line} {error}");
        }
    }
    for (option, expected) in [
        ("discard_frozen_params=true", "the weights of a compiled module stay there"),
        ("use_eager_fallbak=false", "did you mean trainer.compile.options.use_eager_fallback"),
        ("in_place=2", "in_place"),
    ] {
        let (status, error) = short_fit(&[&format!("{key}.{option}")], &[]);
        assert!(status == Some(2) && error.contains(expected), "{option}: {status:?} {error}");
    }
    let (status, error) = short_fit(
        &[
            "--trainer.compile.backend=aot_hpu_inference_backend",
            &format!("{key}.discard_frozen_params=false"),
        ],
        &[],
    );
    assert!(status == Some(2) && error.contains("aot_hpu_inference_backend in a fit"), "{status:?} {error}");
}

#[test]
fn a_backend_with_standard_settings_is_written_as_its_name() {
    let options = CompileOptions { in_place: Some(false), ..CompileOptions::default() };
    let plain = CompileConfig::from(CompileBackend::HpuBackend);
    assert_eq!(serde_json::to_value(plain).unwrap(), "hpu_backend");
    let others = [CompileConfig { options, ..plain }, CompileConfig { recompile_limit: Some(3), ..plain }];
    for config in others {
        let written = serde_json::to_value(config).unwrap();
        assert_eq!(written["backend"], "hpu_backend");
        assert_eq!(serde_json::from_value::<CompileConfig>(written).unwrap(), config);
    }
}

#[test]
fn a_minimum_above_the_maximum_is_refused() {
    let error = refusal(|t| t.max_epochs(3).min_epochs(4_u64).max_steps(10).min_steps(11_u64));
    let expected = "trainer.min_epochs: 4 is above max_epochs=3, at which training ends; use 3 or less, or a larger \
                    trainer.max_epochs\ntrainer.min_steps: 11 is above max_steps=10, at which training ends; use 10 \
                    or less, or a larger trainer.max_steps";
    assert_eq!(error, expected);
    let fine: [Build; 4] = [
        |t| t.max_epochs(3).min_epochs(3_u64),
        |t| t.max_epochs(-1).min_epochs(9_u64),
        |t| t.max_steps(5).min_epochs(2000_u64),
        |t| t.min_epochs(9_u64).max_epochs(9).fast_dev_run(true),
    ];
    fine.into_iter().for_each(|build| assert_eq!(refusal(build), ""));
}

#[test]
fn a_display_cannot_be_given_and_switched_off() {
    let error = Trainer::builder()
        .enable_progress_bar(false)
        .enable_model_summary(false)
        .callback(ProgressBar::default())
        .callback(ProgressBar::default())
        .callback(ModelSummary::default())
        .build()
        .err()
        .unwrap()
        .to_string();
    for expected in [
        "trainer.enable_progress_bar: false, but the callback ProgressBar is given; remove one of the two",
        "trainer.enable_model_summary: false, but the callback ModelSummary is given; remove one of the two",
        "trainer.callbacks: 2 callbacks of type ProgressBar; give one",
    ] {
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn anomalies_are_found_with_manual_optimization_too() {
    use voltaic::{Kind, Module, Tensor};

    #[derive(Module)]
    struct Manual {
        inner: Probe,
        #[module(skip)]
        of_gradient: bool,
    }
    lightning_module!(Manual, Tensor, manual(|net| net.inner.configure_optimizers()), |net, batch, ctx| {
        let zero = net.inner.weight.tensor() * 0.0;
        let bad = if net.of_gradient { zero.sqrt() } else { zero.log() };
        let loss = bad.sum(Kind::Float) + batch.mean(Kind::Float);
        ctx.manual_backward(&loss)?;
        Ok(ctx.no_loss())
    });
    for (of_gradient, expected) in
        [(false, "the loss is not finite"), (true, "the gradient of inner.weight is not finite")]
    {
        let mut net = Manual { inner: Probe::default(), of_gradient };
        let fit = |anomaly: bool, net: &mut Manual| {
            let builder = silent().max_epochs(1).limit_val_batches(0).detect_anomaly(anomaly);
            builder.build().unwrap().fit(net, &mut loaders())
        };
        let error = fit(true, &mut net).unwrap_err();
        let Error::Hook { source, .. } = &error else { panic!("{error}") };
        assert!(matches!(source.downcast_ref(), Some(Error::Anomaly { .. })), "{error}");
        assert!(format!("{error:#} {source:#}").contains(expected), "{source:#}");
        fit(false, &mut net).unwrap();
    }
}

#[test]
fn what_has_no_effect_is_named_in_the_log() {
    let off = "switches validation off";
    let cases: [(&[&str], &[&str]); 6] = [
        (&[], &[]),
        (
            &["--trainer.overfit_batches=1"],
            &[
                "limit_train_batches has no effect: overfit_batches",
                "limit_val_batches has no effect: overfit",
            ],
        ),
        (
            &[
                "--trainer.limit_val_batches=0",
                "--trainer.val_check_interval=1",
                "--trainer.num_sanity_val_steps=1",
            ],
            &[
                &format!("val_check_interval has no effect: limit_val_batches=0 {off}"),
                &format!("num_sanity_val_steps has no effect: limit_val_batches=0 {off}"),
            ],
        ),
        (
            &[
                "--trainer.log_every_n_steps=1",
                "--trainer.benchmark=true",
                "--trainer.check_val_every_n_epoch=2",
            ],
            &[
                "log_every_n_steps has no effect: there is no logger",
                "benchmark has no effect: cuDNN runs on cuda only, not on cpu",
                "check_val_every_n_epoch has no effect: 2 is above max_epochs=1: nothing is validated",
            ],
        ),
        (
            &["--trainer.fast_dev_run=true"],
            &[
                "fast_dev_run: a short run that logs and saves nothing",
                "max_epochs has no effect: fast_dev_run",
            ],
        ),
        (&["--trainer.gradient_clip_val=1", "--trainer.num_sanity_val_steps=0"], &[]),
    ];
    for (arguments, expected) in cases {
        let (code, log) = short_fit(arguments, &[]);
        assert_eq!(code, Some(0), "{log}");
        for expected in expected {
            assert_eq!(log.matches(expected).count(), 1, "{arguments:?} {expected}: {log}");
        }
        assert_eq!(
            log.matches("has no effect").count(),
            expected.iter().filter(|e| e.contains("has")).count()
        );
    }
}

/// The lines of a refused run, without `error: `.
fn refused(arguments: &[&str]) -> Vec<String> {
    let (code, log) = voltaic(&[&["fit"], arguments].concat(), &[]);
    assert_eq!(code, Some(2), "{log}");
    log.lines().map(|line| line.trim_start_matches("error: ").to_owned()).collect()
}

#[test]
fn the_problems_of_all_sections_are_reported_together() {
    let wrong = "--model=Gpt --data=ShakespeareData --data.num_workers=-1 --trainer.precision=bf17 --trainer.max_epochs=-2 \
        --trainer.nonsense=1 --trainer.limit_val_batches=x --optimizer=SGD --optimizer.lr=-1 --lr_scheduler=StepLR \
        --lr_scheduler.step_size=0";
    let lines = refused(&wrong.split_whitespace().collect::<Vec<_>>());
    for key in [
        "data.num_workers (from command line): ",
        "trainer.nonsense (from command line): unknown key",
        "trainer.limit_val_batches (from command line): ",
        "trainer.precision (from command line): ",
        "trainer.max_epochs (from command line): -2 is below -1",
        "optimizer.lr (from command line): ",
        "lr_scheduler.step_size (from command line): ",
    ] {
        assert_eq!(lines.iter().filter(|line| line.starts_with(key)).count(), 1, "{key}: {lines:#?}");
    }
    assert_eq!(lines.len(), 7, "{lines:#?}");
}

#[test]
fn a_default_in_place_of_a_mistake_causes_no_second_problem() {
    let arguments = ["--model=Mlp", "--data=MnistData", "--trainer.accelerator=cpu"];
    let clip = ["--trainer.gradient_clip_val=much", "--trainer.gradient_clip_algorithm=value"];
    let lines = refused(&[&arguments[..], &clip].concat());
    assert_eq!(lines.len(), 1, "{lines:#?}");
    // without a class there is no optimizer, which is not a reason to complain of its schedule
    let lines = refused(
        &[&arguments[..], &["--optimizer.lr=1", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1"]]
            .concat(),
    );
    assert_eq!(lines.len(), 1, "{lines:#?}");
    assert!(lines[0].contains("no class is chosen for optimizer"), "{lines:#?}");
    // nor is a class that is not there
    let lines = refused(&["--model=Mpl", "--data=MnistData", "--trainer.max_epochs=-2"]);
    assert_eq!(lines.len(), 2, "{lines:#?}");
}
