//! DeepSpeed's strategies by their names, on emulated cards of each generation.

use std::path::Path;

use voltaic::accelerator::{Accelerator, HpuAccelerator};

use crate::models::{Small, loaders};
use crate::ranks::{assert_within, folder_of_rank, output, silent, weights};

const GENERATIONS: [&str; 3] = ["gaudi", "gaudi2", "gaudi3"];
const GENERATION: &str = "VOLTAIC_HPU_GENERATION";

/// Trains on two cards with a strategy by its name, beside `hpu_ddp`.
fn train(ranks: usize, folder: &Path, names: &[&str]) {
    let trained = |strategy: &str| {
        let builder = silent(ranks, strategy, folder).accelerator("hpu");
        let mut trainer = builder.max_epochs(1).build().unwrap();
        let mut net = Small::new();
        trainer.fit(&mut net, &mut loaders(12 * ranks as i64)).unwrap();
        (trainer, weights(&net))
    };
    let (_, expected) = trained("hpu_ddp");
    for name in names {
        let (trainer, own) = trained(name);
        assert_eq!((trainer.world().world_size, trainer.global_step()), (ranks, 6), "{name}");
        assert_within(name, &own, &expected, 1e-6);
        if trainer.is_global_zero() {
            let card = HpuAccelerator::from_env().unwrap().cards().remove(0).name;
            println!("\n{name} has trained on {card}");
        }
    }
}

/// Runs a test on two cards of a generation; gives what was printed.
fn on_cards(test: &str, generation: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let ran = output(test, 2, folder.path(), &[(GENERATION, generation)]);
    let text = String::from_utf8_lossy(&ran.stdout).into_owned();
    assert!(ran.status.success(), "{generation}: {text}{}", String::from_utf8_lossy(&ran.stderr));
    text
}

#[test]
fn strategies_are_strings_on_cards() {
    const NAMES: [&str; 4] =
        ["hpu_deepspeed", "hpu_deepspeed_stage_1", "hpu_deepspeed_stage_2", "hpu_deepspeed_stage_3"];
    if let Some(folder) = folder_of_rank() {
        return train(2, &folder, &NAMES);
    }
    let text = on_cards("gaudi::strategies_are_strings_on_cards", "gaudi2");
    for name in NAMES {
        assert!(text.contains(&format!("{name} has trained on emulated gaudi2")), "{name}: {text}");
    }
}

#[test]
fn stage_3_trains_on_cards_of_each_generation() {
    if let Some(folder) = folder_of_rank() {
        return train(2, &folder, &["hpu_deepspeed_stage_3"]);
    }
    for generation in GENERATIONS {
        let text = on_cards("gaudi::stage_3_trains_on_cards_of_each_generation", generation);
        let expected = format!("hpu_deepspeed_stage_3 has trained on emulated {generation}\n");
        assert!(text.contains(&expected), "{generation}: {text}");
    }
}
