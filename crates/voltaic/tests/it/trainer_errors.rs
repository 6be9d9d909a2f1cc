//! What goes wrong, and what the user reads then.

use std::time::{Duration, Instant};

use tempfile::TempDir;
use voltaic::Error;
use voltaic::callback::{ModelCheckpoint, ModelCheckpointConfig};
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::nn::{Forward, Linear, ModuleExt, Relu, Sequential};
use voltaic::optim::{Adam, Interval, LrSchedulerSpec, Optimizers, PlateauMode, ReduceLrOnPlateau, Sgd};
use voltaic::{Kind, Module, Tensor};

use crate::probe::{
    Defaults, Events, Probe, Step, loader, loaders, names, own_process, plays, silent, text_of,
};
use crate::rng::seeded;

/// The error of a fit and the events until then.
fn failure(mut net: Probe) -> (Error, String) {
    let events = Events::default();
    let builder = silent().max_epochs(1).num_sanity_val_steps(0).callback(events.clone());
    let error = builder.build().unwrap().fit(&mut net, &mut loaders()).expect_err("the fit fails");
    (error, events.text())
}

fn failing(step: impl Fn(u64) -> anyhow::Result<()> + Send + 'static) -> Probe {
    Probe {
        train: Box::new(move |_, loss, ctx| {
            step(ctx.global_step())?;
            Ok(loss)
        }),
        ..Probe::default()
    }
}

#[test]
fn an_error_of_the_user_names_hook_and_step_and_keeps_its_causes() {
    let (error, events) = failure(failing(|step| {
        anyhow::ensure!(step < 2, anyhow::anyhow!("the cause").context("no luck"));
        Ok(())
    }));
    assert_eq!(events, "t0* t1* x");
    let Error::Hook { hook, epoch, global_step, .. } = &error else { panic!("{error}") };
    assert_eq!((*hook, *epoch, *global_step), ("training_step", 0, 2));
    assert_eq!(
        error.to_string(),
        "training_step failed in epoch 0 at global_step 2 on rank 0: no luck: the cause"
    );
}

#[test]
fn a_panic_in_a_step_is_an_error_with_message_and_place_and_nothing_is_printed() {
    if !plays("panic") {
        let output = own_process("panic").output().unwrap();
        text_of(&output);
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
        return;
    }
    let (error, events) = failure(failing(|step| {
        assert!(step < 1, "step {step} is one too many");
        Ok(())
    }));
    assert_eq!(events, "t0* x");
    let text = error.to_string();
    let expected =
        "training_step failed in epoch 0 at global_step 1 on rank 0: panicked: step 1 is one too many at ";
    assert!(text.starts_with(expected) && text.contains("trainer_errors.rs:"), "{text}");
    // libtorch's refusals come as panics of tch
    let (error, _) = failure(Probe {
        train: Box::new(|net, loss, _| {
            let _ =
                net.weight.matmul(&voltaic::Tensor::ones([3, 3], (voltaic::Kind::Float, tch::Device::Cpu)));
            Ok(loss)
        }),
        ..Probe::default()
    });
    let text = error.to_string();
    let is_clean = !text.contains("Exception raised from") && !text.contains("unwrap");
    assert!(
        text.contains("panicked: libtorch: ") && text.contains("cannot be multiplied") && is_clean,
        "{text}"
    );
    assert!(text.contains(" at tests/it/trainer_errors.rs:"), "{text}");
}

#[test]
fn an_error_of_libtorch_names_the_users_line_in_a_backtrace() {
    if !plays("backtrace") {
        let output = own_process("backtrace").env("RUST_BACKTRACE", "1").output().unwrap();
        text_of(&output);
        return;
    }
    let (error, _) =
        failure(Probe { train: Box::new(|net, _, _| Ok(net.weight.f_view([3, 7])?)), ..Probe::default() });
    let text = error.to_string();
    let expected = "on rank 0: tests/it/trainer_errors.rs:";
    assert!(text.contains(expected) && text.contains(": libtorch: "), "{text}");
    assert!(text.contains("shape '[3, 7]' is invalid") && text.lines().count() == 1, "{text}");
}

#[test]
fn mistakes_of_a_step_are_explained() {
    type Step = crate::probe::Step;
    let cases: [(&str, Box<Step>); 5] = [
        (
            "training_step: the loss does not require grad; compute it",
            Box::new(|_, loss, _| Ok(loss.detach())),
        ),
        (
            "training_step: the loss has shape [2]; return a scalar",
            Box::new(|net, _, _| Ok(&*net.weight * 2.0)),
        ),
        (
            "log(x): a tensor of shape [2] is not a scalar; reduce it",
            Box::new(|net, loss, ctx| {
                ctx.log("x", net.weight.tensor());
                Ok(loss)
            }),
        ),
        (
            "log(x): training_step logs `x` twice with different options; use one",
            Box::new(|_, loss, ctx| {
                ctx.log("x", 1.0);
                ctx.log("x", 1.0).on_epoch(true);
                Ok(loss)
            }),
        ),
        (
            "log(x): on_step=false and on_epoch=false log nothing; set one",
            Box::new(|_, loss, ctx| {
                ctx.log("x", 1.0).on_step(false);
                Ok(loss)
            }),
        ),
    ];
    for (expected, train) in cases {
        let (error, events) = failure(Probe { train, ..Probe::default() });
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(events, "x");
    }
}

#[test]
fn mistakes_of_configure_optimizers_are_explained() {
    let plateau = || ReduceLrOnPlateau::new(PlateauMode::Min);
    let cases: [(&str, Box<dyn Fn() -> Optimizers + Send>); 3] = [
        (
            "configure_optimizers: 2 optimizers with automatic optimization; return exactly one",
            Box::new(|| Optimizers::new(Sgd::new(0.1)).and(Adam::new(0.1))),
        ),
        (
            "lr_scheduler.monitor",
            Box::new(move || Optimizers::new(Sgd::new(0.1)).scheduler(LrSchedulerSpec::new(plateau()))),
        ),
        (
            "lr_scheduler.monitor: no metric `val_los` has been logged; log it, or choose one of: val_loss",
            Box::new(move || {
                Optimizers::new(Sgd::new(0.1)).scheduler(LrSchedulerSpec::new(plateau()).monitor("val_los"))
            }),
        ),
    ];
    for (expected, optimizers) in cases {
        let (error, _) = failure(Probe {
            optimizers,
            validate: Some(Box::new(|_, loss, ctx| {
                ctx.log("val_loss", 1.0);
                Ok(loss)
            })),
            ..Probe::default()
        });
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn a_plateau_schedule_waits_for_the_first_validation() {
    for interval in [Interval::Epoch, Interval::Step] {
        let optimizers = move || {
            let spec = LrSchedulerSpec::new(ReduceLrOnPlateau::new(PlateauMode::Min)).monitor("val_loss");
            Optimizers::new(Sgd::new(0.1)).scheduler(spec.interval(interval))
        };
        let validate: Box<Step> = Box::new(|_, loss, ctx| {
            ctx.log("val_loss", 1.0);
            Ok(loss)
        });
        let mut net =
            Probe { optimizers: Box::new(optimizers), validate: Some(validate), ..Probe::default() };
        let builder = silent().max_epochs(3).check_val_every_n_epoch(2).num_sanity_val_steps(0);
        builder.build().unwrap().fit(&mut net, &mut loaders()).unwrap();
    }
}

#[test]
fn missing_steps_and_loaders_are_named_with_the_way_out() {
    let mut trainer = silent().build().unwrap();
    let no_data = &mut Loaders::<voltaic::Tensor>::new();
    let net = &mut Defaults;
    let cases = [
        (
            trainer.validate(net, &mut loaders()).unwrap_err(),
            "validation_step failed in epoch 0 at global_step 0 on rank 0: the module has no validation_step, but there are \
             batches for it; implement validation_step, or set limit_val_batches=0",
        ),
        (trainer.test(net, &mut loaders()).unwrap_err(), "implement test_step, or set limit_test_batches=0"),
        (trainer.predict(net, &mut loaders()).unwrap_err(), "implement predict_step"),
        (
            trainer.fit(&mut Probe::default(), no_data).unwrap_err(),
            "data: there is no training loader; implement",
        ),
        (
            trainer.validate(net, no_data).unwrap_err(),
            "no loader to validate; implement val_dataloader of the data module or of the module",
        ),
        (trainer.test(net, no_data).unwrap_err(), "no loader to test; implement test_dataloader"),
        (trainer.predict(net, no_data).unwrap_err(), "implement predict_dataloader"),
        (trainer.ckpt_path("best").test(net, no_data).unwrap_err(), "ckpt_path: `best` without a callback"),
        (trainer.ckpt_path("/no/such.ckpt").test(net, no_data).unwrap_err(), "/no/such.ckpt"),
    ];
    for (error, expected) in cases {
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn losses_that_are_not_numbers_end_no_run_and_save_no_best() {
    let folder = TempDir::new().unwrap();
    let config = ModelCheckpointConfig {
        dirpath: Some(folder.path().into()),
        monitor: Some("val_loss".to_owned()),
        ..Default::default()
    };
    let mut net = Probe::logging(&[0.5, f64::NAN, f64::NAN]);
    net.train = Box::new(|_, loss, ctx| {
        let loss = loss * if ctx.current_epoch() > 0 { f64::NAN } else { 1.0 };
        ctx.log("train_loss", &loss).on_epoch(true).prog_bar(true);
        Ok(loss)
    });
    let builder = silent().enable_checkpointing(true).max_epochs(3).gradient_clip_val(1.0);
    let mut trainer = builder.callback(ModelCheckpoint::new(config).unwrap()).build().unwrap();
    trainer.fit(&mut net, &mut loaders()).unwrap();
    assert_eq!(trainer.global_step(), 18);
    assert!(trainer.metric("train_loss").unwrap().is_nan() && net.weights()[0].is_nan());
    assert_eq!(names(folder.path()), ["epoch=0-step=6.ckpt"], "NaN is never the best");
}

#[test]
fn a_signal_ends_the_run_after_the_batch() {
    use signal_hook::consts::{SIGINT, SIGTERM};
    if !plays("signal") {
        let output = own_process("signal").output().unwrap();
        text_of(&output);
        return;
    }
    for (signal, name) in [(SIGINT, "SIGINT"), (SIGTERM, "SIGTERM")] {
        let (error, events) = failure(failing(move |step| {
            if step == 2 {
                signal_hook::low_level::raise(signal)?;
            }
            Ok(())
        }));
        assert_eq!(events, "t0* t1* t2* x");
        let Error::Interrupted { signal, global_step } = &error else { panic!("{error}") };
        assert_eq!((*signal, *global_step), (name, 3));
        assert!(error.to_string().contains("; resume with ckpt_path=last"), "{error}");
        // in validation, too
        let (error, events) = failure(Probe {
            validate: Some(Box::new(move |_, loss, _| {
                signal_hook::low_level::raise(if name == "SIGINT" { SIGINT } else { SIGTERM })?;
                Ok(loss)
            })),
            ..Probe::default()
        });
        assert!(matches!(error, Error::Interrupted { global_step: 6, .. }), "{error}");
        assert_eq!(events, "t0* t1* t2* t3* t4* t5* x");
    }
}

#[test]
fn a_second_signal_ends_the_process_at_once() {
    if !plays("second signal") {
        let started = Instant::now();
        let output = own_process("second signal").output().unwrap();
        assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stdout));
        assert!(started.elapsed() < Duration::from_secs(20));
        return;
    }
    let (error, _) = failure(failing(|_| {
        signal_hook::low_level::raise(signal_hook::consts::SIGINT)?;
        signal_hook::low_level::raise(signal_hook::consts::SIGINT)?;
        std::thread::sleep(Duration::from_secs(30));
        Ok(())
    }));
    panic!("still here: {error}");
}

#[test]
fn a_failed_fit_leaves_the_module_usable() {
    let mut net = failing(|step| {
        anyhow::ensure!(step != 1, "once");
        Ok(())
    });
    let mut trainer = silent().max_epochs(1).limit_train_batches(2).build().unwrap();
    assert!(trainer.fit(&mut net, &mut loaders()).is_err());
    net.train = Box::new(|_, loss, _| Ok(loss));
    trainer.fit(&mut net, &mut Loaders::new().train(loader(4))).unwrap();
    assert_eq!(trainer.global_step(), 2);
    assert!(net.parameters()[0].grad().defined());
}

/// Layers of which one does not fit the one before it.
#[derive(Module)]
struct Broken {
    encoder: Sequential,
    head: Linear,
}

lightning_module!(Broken, Tensor, Sgd::new(0.1), |net, batch, _| Ok(net
    .head
    .forward(&net.encoder.forward(batch)?)?
    .f_mean(Kind::Float)?));

#[test]
fn a_layer_that_refuses_its_input_is_named_with_its_place() {
    let _rng = seeded(1);
    let linear = |from, to| Linear::new(from, to).unwrap();
    let (good, bad) = ((linear(3, 5), linear(5, 4)), (linear(3, 5), linear(7, 4)));
    for ((first, second), head, expected) in [
        (bad, linear(4, 1), "on rank 0: encoder.2: Linear(7, 4): input of shape [2, 5] does not fit"),
        (good, linear(9, 1), "on rank 0: head: Linear(9, 1): input of shape [2, 4] does not fit"),
    ] {
        let encoder = Sequential::new().add(first).add(Relu).add(second);
        let data = TensorDataset::new(Tensor::zeros([4, 3], (Kind::Float, tch::Device::Cpu))).unwrap();
        let loader = DataLoader::new(data).batch_size(2).build().unwrap();
        let mut trainer = silent().accelerator("cpu").max_epochs(1).build().unwrap();
        let error =
            trainer.fit(&mut Broken { encoder, head }, &mut Loaders::new().train(loader)).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
}
