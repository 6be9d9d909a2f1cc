//! A model whose states are more than a card has.

use std::path::Path;
use std::process::{Command, Output};

use voltaic::models::{Gpt, GptConfig};
use voltaic::nn::ModuleExt;

/// What a card has.
const LIMIT: usize = 24 << 20;

/// Trains on four emulated cards.
fn fit(strategy: &[&str], folder: &Path) -> Output {
    let fit = "fit --model=Gpt --model.vocab_size=128 --model.block_size=16 --model.n_layer=10 --model.n_head=2 \
        --model.n_embd=128 --data=ShakespeareData --data.context_length=16 --data.batch_size=1 --optimizer=AdamW \
        --trainer.accelerator=hpu --trainer.devices=4 --trainer.max_steps=3 --trainer.limit_val_batches=1 \
        --trainer.enable_progress_bar=false";
    Command::new(env!("CARGO_BIN_EXE_voltaic"))
        .args(fit.split_whitespace())
        .args(strategy)
        .env("VOLTAIC_HPU_MEMORY", LIMIT.to_string())
        .env("OMP_NUM_THREADS", "1")
        .current_dir(folder)
        .output()
        .unwrap()
}

#[test]
fn what_ddp_has_no_memory_for_trains_on_four_cards() {
    let config = GptConfig {
        vocab_size: 128,
        block_size: 16,
        n_layer: 10,
        n_head: 2,
        n_embd: 128,
        ..GptConfig::tiny()
    };
    let parameters = Gpt::new(config).unwrap().num_parameters(false);
    assert!(16 * parameters > LIMIT && 16 * parameters / 4 < LIMIT, "{parameters}");
    let folder = tempfile::tempdir().unwrap();
    let ddp = fit(&["--trainer.strategy=ddp"], folder.path());
    let text = String::from_utf8_lossy(&ddp.stderr);
    assert!(!ddp.status.success() && text.contains("out of memory"), "{text}");
    assert!(text.contains("limit 25165824"), "{text}");
    let settings = r#"{"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000,
        "stage3_max_reuse_distance": 0, "reduce_bucket_size": 100000}}"#;
    std::fs::write(folder.path().join("ds.json"), settings).unwrap();
    let zero = ["--trainer.strategy=DeepSpeedStrategy", "--trainer.strategy.config=ds.json"];
    let zero = fit(&zero, folder.path());
    let text = String::from_utf8_lossy(&zero.stderr);
    assert!(zero.status.success(), "{text}");
}
