//! Largest magnitudes are those of all ranks: DDP and ZeRO have the scales of one process.

use std::path::{Path, PathBuf};

use tch::Tensor;
use voltaic::precision::fp8::DelayedScaling;
use voltaic::trainer::{GraphMode, TrainerBuilder};

use crate::compare::assert_within;
use crate::operators::start_hpu;
use crate::ranks::{assert_same, folder_of_rank, output, silent, sorted_file};
use crate::runs::{Net, left_by, loaders, no_counts, plugin};

/// What a run leaves; what rank 0 has goes to `to`, too.
fn trained(
    builder: TrainerBuilder,
    batch: usize,
    recipe: DelayedScaling,
    to: Option<PathBuf>,
) -> Vec<(String, Tensor)> {
    let mut net = Net::new(false);
    let builder = builder.accelerator("hpu").plugins([plugin(recipe, false)]);
    let mut trainer = builder.build().unwrap();
    trainer.fit(&mut net, &mut loaders(24, batch)).unwrap();
    let left = left_by(&net);
    if let Some(to) = to.filter(|_| trainer.is_global_zero()) {
        Tensor::write_safetensors(&left, to).unwrap();
    }
    left
}

fn of(all: &[(String, Tensor)], is_scale: bool) -> Vec<(String, Tensor)> {
    let own = all
        .iter()
        .filter(|(name, _)| name.contains("/scale") == is_scale && (is_scale || !name.contains('/')));
    own.map(|(name, tensor)| (name.clone(), tensor.copy())).collect()
}

fn recipe(reduce_amax: bool) -> DelayedScaling {
    DelayedScaling { amax_history_len: 2, reduce_amax, ..DelayedScaling::default() }
}

/// On each rank.
fn check(ranks: usize, folder: &Path) {
    start_hpu();
    let on_ranks = |strategy: &str, reduces: bool, name: &str| {
        let to = folder.join(format!("{name}.safetensors"));
        trained(silent(ranks, strategy, folder).max_steps(3), 4, recipe(reduces), Some(to))
    };
    let ddp = on_ranks("ddp", true, "ddp");
    for stage in ["zero1", "zero2", "zero3"] {
        assert_same(stage, &on_ranks(stage, true, stage), &ddp);
    }
    on_ranks("ddp", false, "local");
    // of eight steps four are replayed
    let long = |graph| {
        trained(silent(ranks, "ddp", folder).max_epochs(3).max_steps(8).graph(graph), 4, recipe(true), None)
    };
    assert_same("graphs", &no_counts(long(GraphMode::Modules)), &no_counts(long(GraphMode::Off)));
}

#[test]
fn ranks_have_the_scales_of_one_process() {
    const RANKS: usize = 2;
    if let Some(folder) = folder_of_rank() {
        return check(RANKS, &folder);
    }
    let _alone = crate::alone();
    start_hpu();
    let (test, folder) = (std::thread::current().name().unwrap().to_owned(), tempfile::tempdir().unwrap());
    let output = output(&test, RANKS, folder.path(), &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let [ddp, local] =
        ["ddp", "local"].map(|name| sorted_file(&folder.path().join(format!("{name}.safetensors"))));
    let mut alone = trained(crate::silent::silent().devices(1).max_steps(3), 4 * RANKS, recipe(true), None);
    alone.sort_by(|(a, _), (b, _)| a.cmp(b));
    // the mean over a part of the batch has gradients that are larger by the number of ranks
    let expected = of(&alone, true).into_iter().map(|(name, scale)| {
        let factor = match (name.contains("_bwd"), name.contains("_inv")) {
            (true, true) => RANKS as f64,
            (true, false) => 1.0 / RANKS as f64,
            (false, _) => 1.0,
        };
        (name, scale * factor)
    });
    assert_same("scales", &of(&ddp, true), &expected.collect::<Vec<_>>());
    assert_within("weights", &of(&ddp, false), &of(&alone, false), 1e-3);
    let scale = |all: &[(String, Tensor)]| {
        all.iter().find(|(name, _)| name == "first/scale_fwd").unwrap().1.double_value(&[0])
    };
    // rank 0 has the small samples alone
    assert!(scale(&local) >= 4.0 * scale(&ddp), "{} and {}", scale(&local), scale(&ddp));
}
