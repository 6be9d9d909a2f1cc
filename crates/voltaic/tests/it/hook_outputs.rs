//! What hooks are given: the batch, what the step gave, the module's own type.

use std::sync::{Arc, Mutex};

use tempfile::TempDir;
use voltaic::callback::{Callback, LambdaCallback};
use voltaic::data::{Loaders, MnistData};
use voltaic::models::{Classifier, LeNet, LeNetConfig};
use voltaic::module::{Hook, HookContext, StepHook};
use voltaic::nn::Parameter;
use voltaic::optim::Sgd;
use voltaic::trainer::{GraphMode, seed_everything};
use voltaic::{Kind, Module, Tensor};

use crate::ddp::{folder_of_parent, run_ranks};
use crate::probe::{Defaults, plays, silent};
use crate::stages::{Checks, Stages, loader, run};

#[test]
fn hooks_of_all_stages_get_the_batch_and_what_the_step_gave() {
    for (accumulate, is_manual) in [(1, false), (2, false), (1, true)] {
        let (checks, _) =
            run(silent().accelerator("cpu"), &mut Stages { is_manual, ..Stages::new() }, accumulate);
        assert_eq!(checks.count(Hook::OnTrainBatchEnd), 20);
        assert_eq!(checks.count(Hook::OnValidationBatchEnd), 1 + 3 + 3 + 3, "with the sanity check");
        assert_eq!((checks.count(Hook::OnTestBatchEnd), checks.count(Hook::OnPredictBatchEnd)), (2, 2));
    }
}

#[test]
fn what_a_replayed_step_gave_stays_as_it_was() {
    for accumulate in [1, 2] {
        let run = |graph| {
            seed_everything(1).unwrap();
            run(silent().accelerator("cpu").graph(graph), &mut Stages::new(), accumulate)
        };
        let ((eager, _), (graphed, replayed)) = (run(GraphMode::Off), run(GraphMode::Step));
        assert!(replayed > 5, "{replayed} steps were replayed");
        let (eager, graphed) = (eager.seen.lock().unwrap(), graphed.seen.lock().unwrap());
        assert_eq!(eager.len(), graphed.len());
        for (index, ((_, eager), (_, graphed))) in eager.iter().zip(graphed.iter()).enumerate() {
            assert!(eager.equal(graphed), "output {index} was kept, and is {graphed:?} now");
        }
    }
}

#[test]
fn each_rank_gets_what_its_own_step_gave() {
    if plays("rank") {
        let builder =
            silent().default_root_dir(folder_of_parent()).accelerator("cpu").devices(2).strategy("ddp");
        let (checks, _) = run(builder, &mut Stages::new(), 2);
        assert_eq!((checks.count(Hook::OnTrainBatchEnd), checks.count(Hook::OnPredictBatchEnd)), (10, 1));
        return;
    }
    run_ranks("rank", TempDir::new().unwrap().path());
}

/// Gives its batch, and a text that names its size.
#[derive(Module)]
struct Texts(Parameter);

lightning_module!(Texts, Tensor, Sgd::new(0.125), |net, batch, ctx| {
    ctx.output("batch", batch);
    ctx.output_value("text", format!("{:?}", batch.size()));
    Ok(batch.f_mul(net.0.tensor())?.f_mean(Kind::Float)?)
});

fn texts() -> Texts {
    Texts(Parameter::new(Tensor::ones([2], (Kind::Float, tch::Device::Cpu))))
}

#[test]
fn a_value_that_is_no_tensor_is_given_as_it_is_and_refused_by_graphs() {
    let seen = Arc::new(Mutex::new(0));
    let counted = seen.clone();
    let check = LambdaCallback::new().on_train_batch_end(move |ctx, _| {
        let outputs = ctx.outputs();
        assert_eq!(outputs.value::<String>("text")?, "[2, 2]");
        assert!(outputs.tensor("batch")?.equal(ctx.batch::<Tensor>()?));
        let names: Vec<&str> = outputs.named().map(|(name, _)| name).collect();
        assert_eq!(names, ["batch", "text"]);
        assert_error!(outputs.value::<u64>("text"), "`text` is a alloc::string::String, not a u64");
        assert_error!(outputs.tensor("text"), "not a tensor");
        assert_error!(outputs.tensor("logits"), "no output `logits`: the step gave batch, text");
        *counted.lock().unwrap() += 1;
        Ok(())
    });
    let mut trainer = silent().max_epochs(2).graph(GraphMode::Step).callback(check).build().unwrap();
    trainer.fit(&mut texts(), &mut Loaders::new().train(loader(16))).unwrap();
    assert_eq!(*seen.lock().unwrap(), 16);
    assert_contains!(trainer.graph_report().refusal.as_deref().unwrap(), "output_value");
}

#[test]
fn a_hook_before_the_step_may_change_the_batch() {
    for graph in [GraphMode::Off, GraphMode::Step] {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let kept = seen.clone();
        let callback = LambdaCallback::new()
            .on_train_batch_start(|ctx, _| {
                let batch = ctx.batch_mut::<Tensor>()?;
                *batch = batch.narrow(0, 0, 1) * 10.0;
                Ok(())
            })
            .on_train_batch_end(move |ctx, _| {
                let (size, batch) = (ctx.batch_size(), ctx.batch::<Tensor>()?);
                kept.lock().unwrap().push((size, batch.size(), ctx.outputs().tensor("product")?.size()));
                Ok(())
            });
        let mut trainer = silent().max_epochs(2).graph(graph).callback(callback).build().unwrap();
        trainer.fit(&mut Stages::new(), &mut Loaders::new().train(loader(16))).unwrap();
        let seen = seen.lock().unwrap();
        assert!(seen.len() == 16 && seen.iter().all(|s| *s == (Some(1), vec![1, 2], vec![1, 2])), "{seen:?}");
    }
}

#[test]
fn wrong_types_are_named() {
    let check = LambdaCallback::new()
        .on_train_batch_start(|ctx, module| {
            let error = ctx.batch::<(Tensor, Tensor)>().err().unwrap().to_string();
            assert!(error.contains("the batch is a tch::wrappers::tensor::Tensor, not a ("), "{error}");
            assert_error!(ctx.batch_mut::<Vec<Tensor>>(), "not a alloc::vec::Vec<");
            assert_error!(module.downcast_ref::<Defaults>(), "the module is a Stages, not a ", "Defaults");
            Ok(())
        })
        .on_step(StepHook::OnBeforeBackward, |ctx, module| {
            assert!(ctx.batch::<Tensor>().is_err() && module.downcast_ref::<Stages>().is_ok());
            Ok(())
        });
    let mut trainer = silent().max_epochs(1).callback(check).build().unwrap();
    trainer.fit(&mut Stages::new(), &mut Loaders::new().train(loader(4))).unwrap();
}

/// Keeps the first ten digits that were wrongly classified.
#[derive(Default, Clone)]
struct WrongDigits(Arc<Mutex<Vec<(Tensor, i64, i64)>>>);

impl WrongDigits {
    /// A digit as text, with what it is and what it was taken for.
    fn shown(&self) -> Vec<String> {
        let draw = |(image, label, predicted): &(Tensor, i64, i64)| {
            let pixels = Vec::<f32>::try_from(image.flatten(0, -1)).unwrap();
            let width = image.size()[2] as usize;
            let rows = pixels
                .chunks(width)
                .map(|row| row.iter().map(|x| if *x > 0.5 { '#' } else { '.' }).collect());
            format!("{label} taken for {predicted}\n{}", rows.collect::<Vec<String>>().join("\n"))
        };
        self.0.lock().unwrap().iter().map(draw).collect()
    }
}

impl Callback for WrongDigits {
    fn on_validation_epoch_start(
        &mut self,
        _ctx: &mut HookContext,
        _module: &mut dyn Module,
    ) -> anyhow::Result<()> {
        self.0.lock().unwrap().clear();
        Ok(())
    }

    fn on_validation_batch_end(
        &mut self,
        ctx: &mut HookContext,
        _module: &mut dyn Module,
    ) -> anyhow::Result<()> {
        let (images, labels) = ctx.batch::<(Tensor, Tensor)>()?;
        let predicted = ctx.outputs().tensor("logits")?.f_argmax(1, false)?;
        let mut wrong = self.0.lock().unwrap();
        for index in Vec::<i64>::try_from(predicted.f_ne_tensor(labels)?.f_nonzero()?.f_flatten(0, -1)?)? {
            if wrong.len() < 10 {
                wrong.push((
                    images.get(index),
                    labels.int64_value(&[index]),
                    predicted.int64_value(&[index]),
                ));
            }
        }
        Ok(())
    }
}

/// Collects the outputs of an epoch, and logs the accuracy of all of them.
#[derive(Default)]
struct WholeEpoch(Vec<(Tensor, Tensor)>);

impl Callback for WholeEpoch {
    fn on_validation_batch_end(
        &mut self,
        ctx: &mut HookContext,
        _module: &mut dyn Module,
    ) -> anyhow::Result<()> {
        let labels = ctx.batch::<(Tensor, Tensor)>()?.1.shallow_clone();
        self.0.push((ctx.outputs().tensor("logits")?.shallow_clone(), labels));
        Ok(())
    }

    fn on_validation_epoch_end(
        &mut self,
        ctx: &mut HookContext,
        _module: &mut dyn Module,
    ) -> anyhow::Result<()> {
        let (logits, labels): (Vec<Tensor>, Vec<Tensor>) = std::mem::take(&mut self.0).into_iter().unzip();
        let (logits, labels) = (Tensor::f_cat(&logits, 0)?, Tensor::f_cat(&labels, 0)?);
        ctx.log("whole_acc", logits.f_argmax(1, false)?.f_eq_tensor(&labels)?.f_mean(Kind::Float)?);
        ctx.log("samples", labels.size()[0] as f64);
        Ok(())
    }
}

#[test]
fn callbacks_show_wrong_digits_and_collect_the_outputs_of_an_epoch() {
    seed_everything(4).unwrap();
    let wrong = WrongDigits::default();
    let mut trainer = silent()
        .accelerator("cpu")
        .max_epochs(1)
        .limit_train_batches(30)
        .limit_val_batches(6)
        .callback(wrong.clone())
        .callback(WholeEpoch::default())
        .build()
        .unwrap();
    let mut net = Classifier::new(LeNet::new(LeNetConfig::default()).unwrap());
    let mut data = MnistData::default();
    trainer.fit(&mut net, &mut data).unwrap();
    let metrics = trainer.validate(&mut net, &mut data).unwrap();
    let metric = |name: &str| metrics.iter().find(|(known, _)| known == name).unwrap().1;
    assert_eq!(metric("samples"), 6.0 * 64.0);
    assert!((metric("whole_acc") - metric("val_acc")).abs() < 1e-6, "{metrics:?}");
    let count = (6.0 * 64.0 * (1.0 - metric("val_acc"))).round() as usize;
    assert_eq!(wrong.0.lock().unwrap().len(), count.min(10));
    assert!(count > 0, "a network that has seen 30 batches makes mistakes");
    let digits: Vec<_> =
        wrong.0.lock().unwrap().iter().map(|(i, l, p)| (i.shallow_clone(), *l, *p)).collect();
    let _no_grad = tch::no_grad_guard();
    for ((image, label, predicted), text) in digits.iter().zip(wrong.shown()) {
        assert_ne!(label, predicted);
        let again = voltaic::nn::Forward::forward(net.net(), &image.unsqueeze(0)).unwrap().argmax(1, false);
        assert_eq!(again.int64_value(&[0]), *predicted);
        assert!(
            text.starts_with(&format!("{label} taken for {predicted}\n")) && text.contains('#'),
            "{text}"
        );
    }
}

#[test]
fn nothing_is_kept_of_a_batch_once_its_hooks_are_done() {
    let checks = Checks::default();
    let before = LambdaCallback::new().on_train_epoch_end(|ctx, _| {
        assert_eq!(ctx.outputs().named().len(), 0);
        Ok(())
    });
    let mut trainer = silent().max_epochs(1).callback(checks.clone()).callback(before).build().unwrap();
    trainer.fit(&mut Stages::new(), &mut Loaders::new().train(loader(4))).unwrap();
    assert_eq!(checks.count(Hook::OnTrainBatchEnd), 2);
}
