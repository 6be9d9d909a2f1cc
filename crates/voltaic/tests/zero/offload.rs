//! Offload (ZeRO-Offload, arXiv:2101.06840): a run whose optimizer, or whose shards of the weights, are in host memory is the run
//! without, bit for bit.

use std::path::Path;

use voltaic::callback::Callback;
use voltaic::module::HookContext;
use voltaic::strategy::{
    OffloadDevice, OffloadOptimizer, OffloadParam, Strategy, Zero, ZeroConfig, ZeroStage,
};
use voltaic::trainer::TrainerBuilder;
use voltaic::{Device, Module, Tensor};

use crate::ladder::trained;
use crate::models::{Cnn, Odd, Small, all_loaders, loaders};
use crate::muon::{Mixed, aux};
use crate::ranks::{assert_same, silent, weights};
use crate::resume::Saver;
use crate::values;

const STAGES: [ZeroStage; 3] = [ZeroStage::One, ZeroStage::Two, ZeroStage::Three];

/// What is in host memory: the optimizer's part of the elements, and the shards of the weights.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Offload {
    ratio: f64,
    params: bool,
}

const NONE: Offload = Offload { ratio: 0.0, params: false };

/// A stage with units of a parameter or two, all sharded in stage 3.
fn offloading(ranks: usize, stage: ZeroStage, folder: &Path, offload: Offload) -> TrainerBuilder {
    silent(ranks, "zero1", folder).accelerator("hpu").strategy(move |world| {
        let device = |is_off: bool| if is_off { OffloadDevice::Cpu } else { OffloadDevice::None };
        let config = ZeroConfig {
            reduce_bucket_size: 64,
            param_persistence_threshold: 0,
            offload_optimizer: OffloadOptimizer {
                device: device(offload.ratio > 0.0),
                ratio: offload.ratio,
                ..OffloadOptimizer::default()
            },
            offload_param: OffloadParam { device: device(offload.params), ..OffloadParam::default() },
            ..ZeroConfig::of_stage(stage)
        };
        Ok(Box::new(Zero::new(world, config)) as Box<dyn Strategy>)
    })
}

/// Checks on which device the optimizer works: all of its parts, or some if they are on both.
struct OnDevice(Offload);

impl Callback for OnDevice {
    fn on_train_batch_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        let optimizer = &ctx.optimizers()[0];
        let parts = optimizer.param_groups().iter().flat_map(|group| group.params());
        let mut num_offloaded = [0, 0];
        for (fqn, part) in parts {
            let device = Device::of(part.leaf())?;
            let grad = part.grad();
            assert!(!grad.defined() || Device::of(&grad)? == device, "the gradient of {fqn}");
            for (name, state) in optimizer.state_dict().tensors {
                let is_own = name.split_once('.').is_some_and(|(_, of)| of == fqn) && state.dim() > 0;
                assert!(!is_own || Device::of(&state)? == device, "{name}");
            }
            num_offloaded[usize::from(device == Device::Cpu)] += 1;
        }
        let [beside, offloaded] = num_offloaded.map(|number| number > 0);
        assert_eq!((beside, offloaded), (self.0.ratio < 1.0, self.0.ratio > 0.0), "{:?}", self.0);
        Ok(())
    }
}

fn offloads(stage: ZeroStage) -> Vec<Offload> {
    let host = Offload { ratio: 1.0, params: false };
    match stage {
        ZeroStage::Three => {
            let params = [NONE, host].map(|offload| Offload { params: true, ..offload });
            [host, Offload { ratio: 0.5, ..host }].into_iter().chain(params).collect()
        }
        _ => vec![host],
    }
}

fn climb(ranks: usize, folder: &Path) {
    for (stage, precision) in STAGES.into_iter().flat_map(|stage| [(stage, "32-true"), (stage, "bf16-true")])
    {
        for offload in offloads(stage) {
            let what = format!("{stage:?} in {precision} with {offload:?}");
            let builder = |offload| {
                offloading(ranks, stage, folder, offload).precision(precision).callback(OnDevice(offload))
            };
            let same = |name: &str, run: &dyn Fn(TrainerBuilder) -> Vec<(String, Tensor)>| {
                assert_same(&format!("{what}: {name}"), &run(builder(offload)), &run(builder(NONE)));
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
            let saved = folder.join(format!("{stage:?}-{precision}-{}-{}", offload.ratio, offload.params));
            let resumed = |from: Option<&str>| {
                let builder = builder(offload).accumulate_grad_batches(2_u64).max_epochs(2);
                let mut trainer = builder.callback(Saver(saved.clone())).build().unwrap();
                if let Some(from) = from {
                    trainer.ckpt_path(saved.join(from));
                }
                let mut net = Small::new();
                trainer.fit(&mut net, &mut all_loaders(6 * ranks as i64)).unwrap();
                weights(&net)
            };
            let end = resumed(None);
            // a window is open there
            assert_same(&format!("{what}: resumed"), &resumed(Some("0.ckpt")), &end);
        }
    }
}

on_ranks_tests! {
    an_offload_changes_no_bit: 2, climb;
}
