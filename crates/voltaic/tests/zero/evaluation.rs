//! Evaluation on ranks that have different numbers of batches.

use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::distributed::ReduceOp;
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::{Callable, Linear};
use voltaic::optim::{Optimizers, Sgd};
use voltaic::trainer::{EvalMetrics, TrainerBuilder};
use voltaic::{Kind, Module, Tensor};

use crate::models::{Batch, numbered, numbers};
use crate::ranks::{on_ranks, silent};

/// Logs a value of each step over all ranks, and may sum something itself.
#[derive(Module)]
struct Told {
    layer: Linear,
    #[module(skip)]
    sums: bool,
}

impl LightningModule for Told {
    type Batch = Batch;

    fn training_step(&self, (x, y): &Batch, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        Ok((self.layer.call(x)? - y).square().mean(Kind::Float))
    }

    fn validation_step(&self, batch: &Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        let loss = self.training_step(batch, ctx)?;
        ctx.log("val", &loss).on_step(true).on_epoch(true).sync_dist(true);
        match ctx.process_group().filter(|_| self.sums) {
            Some(group) => Ok(group.all_reduce(&loss.contiguous(), ReduceOp::Sum)?),
            None => Ok(()),
        }
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Sgd::new(0.05).into()
    }
}

fn validate(builder: TrainerBuilder, sums: bool) -> voltaic::Result<EvalMetrics> {
    // 9 and 8 samples: rank 0 has a batch more
    let data = TensorDataset::new((numbers(&[17, 5], 1.0), numbers(&[17, 3], 2.0))).unwrap();
    let loader = DataLoader::new(data).batch_size(8).build().unwrap();
    let mut net = numbered(Told { layer: Linear::new(5, 3).unwrap(), sums });
    builder.build()?.validate(&mut net, &mut Loaders::new().val(loader))
}

/// Each sample counts once, as in one process.
#[test]
fn a_rank_with_one_batch_more_does_not_wait() {
    on_ranks("evaluation::a_rank_with_one_batch_more_does_not_wait", 2, |ranks, folder| {
        let expected = validate(silent(1, "single_device", folder), false).unwrap();
        for strategy in ["ddp", "zero1", "zero2", "zero3"] {
            let found = validate(silent(ranks, strategy, folder), false).unwrap();
            let difference = (found[0].1 - expected[0].1).abs();
            assert!(difference < 1e-6 && found[0].0 == "val_epoch", "{strategy}: {found:?} {expected:?}");
        }
    });
}

/// The other rank does not take part in it.
#[test]
fn a_collective_in_a_batch_that_a_rank_does_not_have_is_refused() {
    let test = "evaluation::a_collective_in_a_batch_that_a_rank_does_not_have_is_refused";
    let begun = std::time::Instant::now();
    let text = on_ranks(test, 2, |ranks, folder| {
        if let Err(error) = validate(silent(ranks, "ddp", folder), true) {
            println!("\nit was refused: {error}");
        }
    });
    if let Some(text) = text {
        let what = "batch 1 of loader 0 (validate): rank 1 has 1 batches and does not take part";
        assert!(text.contains(what) && begun.elapsed().as_secs() < 60, "{text}");
    }
}
