//! Runs with sharded states go on straight from DeepSpeed's folders, whatever ranks these are of.

use std::path::Path;

use voltaic::checkpoint::{Checkpoint, DeepSpeedWrite, write_deepspeed};

use crate::models::{Small, all_loaders};
use crate::ranks::{assert_same, weights};
use crate::shards::{SaveAfter, staged};

/// From within an epoch, from a folder of other stages and numbers of partitions.
fn go_on(ranks: usize, folder: &Path) {
    for (stage, precision) in
        [("zero1", "32-true"), ("zero2", "bf16-true"), ("zero3", "32-true"), ("zero3", "16-true")]
    {
        let what = format!("{stage} in {precision}");
        let builder = || staged(ranks, stage, folder).precision(precision).max_epochs(2);
        let own = folder.join(format!("{what}.ckpt"));
        let mut net = Small::new();
        let mut trainer = builder().callback(SaveAfter(2, own.clone())).build().unwrap();
        trainer.fit(&mut net, &mut all_loaders(24)).unwrap();
        let expected = weights(&net);
        let (first, second) =
            (DeepSpeedWrite { stage: 3, partitions: 5, tag: None, is_universal: false }, ranks);
        for how in [
            DeepSpeedWrite { stage: 1, partitions: second, ..first.clone() },
            DeepSpeedWrite { stage: 2, partitions: 1, tag: Some("checkpoint".to_owned()), ..first.clone() },
            DeepSpeedWrite { stage: 2, is_universal: true, ..first.clone() },
            first,
        ] {
            let path =
                folder.join(format!("{what} from {} of {}, {}", how.stage, how.partitions, how.is_universal));
            if trainer.is_global_zero() {
                write_deepspeed(&Checkpoint::load(&own).unwrap(), &path, &how).unwrap();
            }
            trainer.world().barrier().unwrap();
            let mut net = Small::new();
            let _ = tch::no_grad(|| net.first.weight.tensor().shallow_clone().fill_(7.0));
            let mut resumed = builder().build().unwrap();
            resumed.ckpt_path(&path).fit(&mut net, &mut all_loaders(24)).unwrap();
            assert_same(&format!("{what} from {how:?}"), &weights(&net), &expected);
            assert_eq!(resumed.global_step(), trainer.global_step());
        }
    }
}

on_ranks_tests! {
    two_ranks_go_on_from_deepspeeds_folders: 2, go_on;
    three_ranks_go_on_from_deepspeeds_folders: 3, go_on;
}
