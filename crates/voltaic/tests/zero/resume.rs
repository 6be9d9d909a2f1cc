//! A run with sharded states is resumed from its checkpoints bit for bit, also within an epoch and an accumulation window.

use std::path::{Path, PathBuf};

use voltaic::Module;
use voltaic::callback::Callback;
use voltaic::module::HookContext;
use voltaic::trainer::TrainerBuilder;

use crate::checkpoints::full_checkpoint;
use crate::models::{Small, all_loaders};
use crate::ranks::{assert_same, silent, weights};
use crate::shards::staged;

/// Asks for a checkpoint after each batch of the second epoch.
pub struct Saver(pub PathBuf);

impl Callback for Saver {
    fn on_train_batch_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        if ctx.current_epoch() == 1 {
            let path = self.0.join(format!("{}.ckpt", ctx.batch_idx()));
            ctx.request_checkpoint(full_checkpoint(path));
        }
        Ok(())
    }
}

fn go_on(ranks: usize, folder: &Path) {
    for (stage, precision) in [
        ("zero1", "32-true"),
        ("zero2", "32-true"),
        ("zero3", "32-true"),
        ("zero1", "bf16-true"),
        ("zero2", "bf16-true"),
        ("zero3", "bf16-true"),
        ("zero1", "16-true"),
        ("zero2", "16-true"),
        ("zero3", "16-true"),
    ] {
        let saved = folder.join(stage).join(precision);
        let builder = || -> TrainerBuilder {
            staged(ranks, stage, folder)
                .max_epochs(3)
                .accumulate_grad_batches(2_u64)
                .gradient_clip_val(0.1)
                .precision(precision)
                .callback(Saver(saved.clone()))
        };
        let samples = 5 * 2 * ranks as i64;
        let mut trainer = builder().build().unwrap();
        let mut net = Small::new();
        trainer.fit(&mut net, &mut all_loaders(samples)).unwrap();
        let (end, loss) = (weights(&net), trainer.metric("train_loss_epoch"));
        // after 0 and 2 a window is open, after 1 none is, 4 ends the epoch
        for batch in [0, 1, 2, 4] {
            let mut resumed = builder().build().unwrap();
            resumed.ckpt_path(saved.join(format!("{batch}.ckpt")));
            let mut net = Small::new();
            let _ = tch::no_grad(|| net.first.weight.tensor().shallow_clone().fill_(7.0));
            resumed.fit(&mut net, &mut all_loaders(samples)).unwrap();
            assert_same(&format!("{stage} from batch {batch}"), &weights(&net), &end);
            assert_eq!(resumed.metric("train_loss_epoch"), loss, "{stage} from batch {batch}");
        }
        // other stages and strategies have the weights
        let mut trainer = silent(ranks, stage, folder).precision(precision).build().unwrap();
        let expected = {
            let mut ddp = silent(ranks, "ddp", folder).precision(precision).build().unwrap();
            ddp.test(&mut net, &mut all_loaders(samples)).unwrap();
            ddp.metric("test_loss")
        };
        trainer.test(&mut net, &mut all_loaders(samples)).unwrap();
        assert_eq!(trainer.metric("test_loss"), expected);
    }
}

on_ranks_tests! {
    two_ranks_go_on_from_within_a_window: 2, go_on;
    #[ignore = "a long form, which make stress runs"]
    three_ranks_go_on_from_within_a_window: 3, go_on;
}
