//! What a rank holds: the formulas of the ZeRO paper (arXiv:1910.02054, section 3), measured by the allocator of emulated HPUs.

use std::path::Path;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use voltaic::accelerator::{max_memory_allocated, reset_peak_memory_stats};
use voltaic::callback::Callback;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::module::HookContext;
use voltaic::nn::{Callable, Linear, ModuleExt};
use voltaic::optim::AdamW;
use voltaic::strategy::DeepSpeedStrategy;
use voltaic::{Device, Kind, Module};

use crate::models::{Batch, numbers};
use crate::ranks::silent;

pub const WIDTH: i64 = 512;
const LAYERS: usize = 8;
/// Elements of a layer's weight, above the default threshold of parameters that stay whole, and of all.
const LAYER: f64 = (WIDTH * WIDTH) as f64;
const PSI: f64 = LAYER * LAYERS as f64;

/// Layers whose activations take next to nothing.
#[derive(Module)]
pub struct Deep {
    layers: Vec<Linear>,
}

impl Deep {
    /// With biases; every other layer in bfloat16 if it is mixed.
    pub fn new(has_biases: bool, is_mixed: bool) -> Self {
        let layer = |index: usize| {
            let layer = Linear::builder(WIDTH, WIDTH).bias(has_biases).build().unwrap();
            if is_mixed && index % 2 == 1 {
                layer.to_dtype(Kind::BFloat16).unwrap();
            }
            layer
        };
        Self { layers: (0..LAYERS).map(layer).collect() }
    }
}

lightning_module!(Deep, Batch, AdamW::new(0.01).master_weights(true), |net, (x, _), _| {
    let mut x = x.shallow_clone();
    for layer in &net.layers {
        x = layer.call(&x.f_to_kind(layer.weight.kind())?)?;
    }
    Ok(x.square().mean(Kind::Float))
});

/// Notes the peak of each batch.
struct Meter(Arc<Mutex<Vec<u64>>>);

impl Callback for Meter {
    fn on_train_batch_start(
        &mut self,
        ctx: &mut HookContext,
        _module: &mut dyn Module,
    ) -> anyhow::Result<()> {
        Ok(reset_peak_memory_stats(device(ctx))?)
    }

    fn on_train_batch_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        self.0.lock().unwrap().push(max_memory_allocated(device(ctx))?);
        Ok(())
    }
}

fn device(ctx: &HookContext) -> Device {
    ctx.device()
}

/// The largest peak of a batch once the optimizer has its states, in bytes per parameter. Biases are below the default threshold of
/// parameters that stay whole.
fn peak(ranks: usize, folder: &Path, stage: u64, (more, mut net): (&Value, Deep)) -> f64 {
    let mut all = json!({
        "zero_allow_untested_optimizer": true,
        "zero_optimization": {
            "stage": stage, "reduce_bucket_size": LAYER as u64,
            "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0,
        },
    });
    all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let peaks = Arc::new(Mutex::new(Vec::new()));
    let builder = silent(ranks, "auto", folder).accelerator("hpu").strategy(DeepSpeedStrategy::settings(all));
    let mut trainer = builder.max_epochs(1).callback(Meter(peaks.clone())).build().unwrap();
    let data = numbers(&[4 * ranks as i64, WIDTH], 1.0);
    let data = TensorDataset::new((data.copy(), data)).unwrap();
    let train = DataLoader::new(data).batch_size(1).build().unwrap();
    trainer.fit(&mut net, &mut Loaders::new().train(train)).unwrap();
    let peaks = peaks.lock().unwrap();
    assert_eq!(peaks.len(), 4);
    peaks[2..].iter().copied().max().unwrap() as f64 / PSI
}

/// Bytes per parameter by the formulas, with `e` bytes per weight and N ranks; AdamW has 12 with masters, which weights of 2 bytes have,
/// and 8 without, 10 where half of the weights have 2 bytes.
fn formula(stage: u64, e: f64, n: f64) -> f64 {
    let states = 16.0 - 2.0 * e;
    match stage {
        1 => 2.0 * e + states / n,
        2 => e + (e + states) / n,
        _ => (12.0 + e) / n, // master weights are all that there is of weights of 2 bytes
    }
}

/// What there is beside it for a while: in backward, the gradients of a layer and two that are on their way with this rank's parts
/// (stage 1: this rank's parts of all), in stage 3 the weights of a layer; in a step, float32 gradients of a layer beside those of 16 bits.
fn buffers(stage: u64, e: f64, n: f64) -> f64 {
    let layer = e / LAYERS as f64;
    let backward = match stage {
        1 => e / n + layer,
        2 => (3.0 + 2.0 / n) * layer,
        _ => (4.0 + 2.0 / n) * layer,
    };
    let step = 4.0 / LAYERS as f64 / n + layer;
    backward.max(step)
}

fn measure(ranks: usize, folder: &Path) {
    // layers of 4 and of 2 bytes have 3 on average
    for (e, more) in [(2.0, json!({"bf16": {"enabled": true}})), (4.0, json!({})), (3.0, json!({}))] {
        for (stage, has_biases) in (1..=3).flat_map(|stage| [(stage, false), (stage, true)]) {
            let net = Deep::new(has_biases, e == 3.0);
            let (found, n) = (peak(ranks, folder, stage, (&more, net)), ranks as f64);
            let (formula, buffers) = (formula(stage, e, n), buffers(stage, e, n));
            let range = 0.98 * formula..=1.02 * formula + buffers;
            let what = format!("{found} bytes per parameter, not {formula} and up to {buffers}");
            assert!(
                range.contains(&found),
                "stage {stage} of {ranks} ranks, biases: {has_biases}, weights of {e} bytes: {what}"
            );
        }
    }
}

on_ranks_tests! {
    one_rank_holds_what_the_formulas_say: 1, measure;
    two_ranks_hold_what_the_formulas_say: 2, measure;
    four_ranks_hold_what_the_formulas_say: 4, measure;
}
