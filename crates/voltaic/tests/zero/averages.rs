//! Averages of 16-bit weights whose optimizer keeps float32 copies: the copies are what is averaged, and what training goes on with.

use std::path::Path;
use std::sync::{Arc, Mutex};

use voltaic::callback::{
    Callback, EmaWeightAveragingConfig, EpochStart, LambdaCallback, StochasticWeightAveraging,
    StochasticWeightAveragingConfig, WeightAveraging,
};
use voltaic::module::HookContext;
use voltaic::nn::ModuleExt;
use voltaic::optim::PerGroup;
use voltaic::{Kind, Module, Tensor};

use crate::checkpoints::{full_checkpoint, resumed};
use crate::models::{Small, all_loaders};
use crate::ranks::{assert_same, on_ranks, silent, weights};
use crate::shards::sorted;

type Named = Vec<(String, Tensor)>;

/// Notes the float32 copies after each batch.
#[derive(Clone, Default)]
struct Masters(Arc<Mutex<Vec<Named>>>);

impl Callback for Masters {
    fn on_train_batch_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        self.0.lock().unwrap().push(sorted(ctx.master_weights()?));
        Ok(())
    }
}

const DECAY: f64 = 0.9;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Average {
    None,
    Exponential,
    Stochastic,
}

/// The float32 copies after each batch, and the weights after the fit. Saves after each epoch, and at the end.
fn fit(
    (ranks, strategy, folder): (usize, &str, &Path),
    average: Average,
    epochs: i64,
    ckpt: Option<&Path>,
) -> (Vec<Named>, Named) {
    let masters = Masters::default();
    let mut builder = silent(ranks, strategy, folder).precision("bf16-true").max_epochs(epochs);
    builder = builder.val_check_interval(1).callback(masters.clone());
    builder = match average {
        Average::None => builder,
        Average::Exponential => {
            let config = EmaWeightAveragingConfig { decay: DECAY, ..Default::default() };
            builder.callback(WeightAveraging::ema(config).unwrap())
        }
        Average::Stochastic => {
            let config = StochasticWeightAveragingConfig {
                swa_lrs: PerGroup::All(0.005),
                swa_epoch_start: EpochStart::Epoch(2),
                ..Default::default()
            };
            builder.callback(StochasticWeightAveraging::from_config(config).unwrap())
        }
    };
    let (epoch, end) = (folder.to_path_buf(), folder.join("end.ckpt"));
    let saver = LambdaCallback::new()
        .on_train_epoch_end(move |ctx, _| {
            ctx.request_checkpoint(full_checkpoint(epoch.join(format!("{}.ckpt", ctx.current_epoch()))));
            Ok(())
        })
        .on_train_end(move |ctx, _| {
            ctx.request_checkpoint(full_checkpoint(end.clone()));
            Ok(())
        });
    let mut trainer = resumed(builder.callback(saver), ckpt);
    let mut net = Small::new();
    net.has_masters = strategy == "ddp";
    trainer.fit(&mut net, &mut all_loaders(24)).unwrap();
    let masters = std::mem::take(&mut *masters.0.lock().unwrap());
    (masters, sorted(weights(&net)))
}

/// What an exponential average of the copies is, by hand.
fn averaged(masters: &[Named]) -> Named {
    let mut average: Named = masters[0].iter().map(|(name, first)| (name.clone(), first.copy())).collect();
    for masters in &masters[1..] {
        for ((_, average), (_, now)) in average.iter_mut().zip(masters) {
            *average = average.lerp(now, 1.0 - DECAY);
        }
    }
    average.into_iter().map(|(name, average)| (name, average.to_kind(Kind::BFloat16))).collect()
}

#[test]
fn averages_leave_the_trained_weights_alone_and_are_resumed() {
    on_ranks("averages::averages_leave_the_trained_weights_alone_and_are_resumed", 2, |ranks, folder| {
        for (index, strategy) in ["ddp", "zero1", "zero2", "zero3"].into_iter().enumerate() {
            let place = |name: &str| {
                let path = folder.join(format!("{index}{name}"));
                std::fs::create_dir_all(&path).unwrap();
                path
            };
            let (plain, _) = fit((ranks, strategy, &place("plain")), Average::None, 3, None);
            assert!(plain[0].iter().all(|(_, master)| master.kind() == Kind::Float) && plain[0].len() == 4);
            for average in [Average::Exponential, Average::Stochastic] {
                let what = |text: &str| format!("{strategy}, {average:?}, {text}");
                let (masters, end) = fit((ranks, strategy, &place("whole")), average, 3, None);
                assert_eq!(masters.len(), 18);
                if average == Average::Exponential {
                    for (step, (own, plain)) in masters.iter().zip(&plain).enumerate() {
                        assert_same(&what(&format!("step {step}")), own, plain);
                    }
                    assert_same(&what("the average"), &end, &averaged(&masters));
                }
                let short = place("short");
                fit((ranks, strategy, &short), average, 2, None);
                for name in ["0.ckpt", "1.ckpt", "end.ckpt"] {
                    let ckpt = short.join(name);
                    let (resumed, weights) =
                        fit((ranks, strategy, &place("resumed")), average, 3, Some(&ckpt));
                    let last = &masters[masters.len() - resumed.len()..];
                    for (step, (own, expected)) in resumed.iter().zip(last).enumerate() {
                        assert_same(&what(&format!("batch {step} from {name}")), own, expected);
                    }
                    assert_same(&what(&format!("the end, from {name}")), &weights, &end);
                }
            }
        }
    });
}

/// It has no float32 copy with ZeRO until then.
#[test]
fn a_weight_that_is_thawed_later_is_averaged_alike() {
    on_ranks("averages::a_weight_that_is_thawed_later_is_averaged_alike", 2, |ranks, folder| {
        let mut expected = None;
        for strategy in ["ddp", "zero1", "zero2", "zero3"] {
            let config = EmaWeightAveragingConfig { decay: DECAY, ..Default::default() };
            let builder = silent(ranks, strategy, folder).precision("bf16-true").max_epochs(2);
            let thaw = LambdaCallback::new().on_train_epoch_start(|ctx, module| {
                let _ = module.parameters()[0].set_requires_grad(ctx.current_epoch() > 0);
                Ok(())
            });
            let builder = builder.callback(WeightAveraging::ema(config).unwrap()).callback(thaw);
            let mut net = Small::new();
            net.has_masters = strategy == "ddp";
            let _ = net.first.weight.set_requires_grad(false);
            builder.build().unwrap().fit(&mut net, &mut all_loaders(24)).unwrap();
            let found = sorted(weights(&net));
            assert_same(strategy, &found, expected.get_or_insert_with(|| sorted(weights(&net))));
        }
    });
}
