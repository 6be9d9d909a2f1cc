//! A unit's part, its gradients and its optimizer's states may be on another device than its weights.

use std::path::Path;

use voltaic::callback::Callback;
use voltaic::module::HookContext;
use voltaic::strategy::{Strategy, Zero, ZeroConfig, ZeroStage};
use voltaic::trainer::TrainerBuilder;
use voltaic::{Device, Module, Tensor};

use crate::half::own_rank;
use crate::ladder::trained;
use crate::models::{Cnn, Odd, Small, all_loaders, loaders};
use crate::muon::{Mixed, aux};
use crate::ranks::{assert_same, on_ranks, silent, weights};
use crate::resume::Saver;
use crate::values;

const STAGES: [ZeroStage; 3] = [ZeroStage::One, ZeroStage::Two, ZeroStage::Three];

/// A stage with units of a parameter or two, all divided in stage 3, whose parts are on this device.
fn stored(ranks: usize, stage: ZeroStage, folder: &Path, storage: Option<Device>) -> TrainerBuilder {
    silent(ranks, "zero1", folder).strategy(move |world| {
        let config = ZeroConfig {
            reduce_bucket_size: 64,
            param_persistence_threshold: 0,
            storage,
            ..ZeroConfig::of_stage(stage)
        };
        Ok(Box::new(Zero::new(world, config)) as Box<dyn Strategy>)
    })
}

/// Checks that all that an optimizer works on is on this device.
struct OnDevice(Device);

impl Callback for OnDevice {
    fn on_train_batch_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        let optimizer = &ctx.optimizers()[0];
        let parts = optimizer.param_groups().iter().flat_map(|group| group.params());
        for (fqn, part) in parts {
            assert_eq!(Device::of(part.leaf())?, self.0, "{fqn}");
            let grad = part.grad();
            assert!(!grad.defined() || Device::of(&grad)? == self.0, "the gradient of {fqn}");
        }
        for (name, state) in optimizer.state_dict().tensors.iter().filter(|(_, state)| state.dim() > 0) {
            assert_eq!(Device::of(state)?, self.0, "{name}");
        }
        Ok(())
    }
}

/// A run whose parts are elsewhere is the run whose parts are beside the weights.
fn apart(ranks: usize, folder: &Path) {
    let hpu = Device::Hpu(own_rank());
    // the first one starts the emulator
    for (accelerator, own, other) in [("hpu", hpu, Device::Cpu), ("cpu", Device::Cpu, hpu)] {
        for (stage, precision) in
            STAGES.into_iter().flat_map(|stage| [(stage, "32-true"), (stage, "bf16-true")])
        {
            let what = format!("{stage:?} on {accelerator} in {precision}");
            let builder = |storage: Option<Device>| {
                stored(ranks, stage, folder, storage)
                    .accelerator(accelerator)
                    .precision(precision)
                    .callback(OnDevice(storage.unwrap_or(own)))
            };
            let same = |name: &str, run: &dyn Fn(TrainerBuilder) -> Vec<(String, Tensor)>| {
                assert_same(&format!("{what}: {name}"), &run(builder(Some(other))), &run(builder(None)));
            };
            same("window and clip", &|builder| {
                let builder = builder.accumulate_grad_batches(2_u64).gradient_clip_val(0.05);
                trained(builder.max_epochs(2), Cnn::new(), loaders(24))
            });
            same("values", &|builder| {
                let (mut seen, end) = values::seen(builder, true, Small::new());
                seen.extend(end);
                seen
            });
            if precision == "32-true" {
                same("odd", &|builder| trained(builder.max_epochs(2), Odd::new(), loaders(24)));
                same("muon", &|builder| trained(builder.max_epochs(2), Mixed::new(aux()), loaders(24)));
            }
            let resumed = |saved: &Path, from: Option<&str>| {
                let builder = builder(Some(other)).accumulate_grad_batches(2_u64).max_epochs(2);
                let mut trainer = builder.callback(Saver(saved.to_owned())).build().unwrap();
                if let Some(from) = from {
                    trainer.ckpt_path(saved.join(from));
                }
                let mut net = Small::new();
                trainer.fit(&mut net, &mut all_loaders(6 * ranks as i64)).unwrap();
                weights(&net)
            };
            let saved = folder.join(format!("{stage:?}-{accelerator}-{precision}"));
            let end = resumed(&saved, None);
            // a window is open there
            assert_same(&format!("{what}: resumed"), &resumed(&saved, Some("0.ckpt")), &end);
        }
    }
}

#[test]
fn parts_may_be_on_another_device_than_weights() {
    on_ranks("storage::parts_may_be_on_another_device_than_weights", 2, apart);
}
