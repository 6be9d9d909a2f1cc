//! voltaic's own checkpoints: safetensors, and JSON in its header.

use rand::RngExt;
use serde_json::json;
use voltaic::checkpoint::{Checkpoint, RankState, TrainingState};
use voltaic::{Kind, Tensor};

use crate::mutate::mutated;
use crate::{folder, stress};

const WORDS: [&[u8]; 16] = [
    b"[]",
    b"{}",
    b"null",
    b"-1",
    b"18446744073709551615",
    b"9223372036854775807",
    b"1e999",
    b"[[[[[[[[",
    b"\"\"",
    b"\\\"",
    b"voltaic:grad.",
    b"voltaic:optimizer.9.",
    b"voltaic:rank.1.rng.",
    b"\"F32\"",
    b"\"shape\":[9,9]",
    b"__metadata__",
];

fn example() -> Checkpoint {
    let tensor = || Tensor::arange(6, (Kind::Float, tch::Device::Cpu)).reshape([2, 3]);
    Checkpoint {
        weights: vec![("fc.weight".into(), tensor()), ("fc.bias".into(), tensor().to_kind(Kind::BFloat16))],
        training: Some(TrainingState {
            optimizers: vec![vec![("exp_avg.fc.weight".into(), tensor())]],
            grads: vec![("fc.weight".into(), tensor())],
            rng: vec![("cpu".into(), tensor().to_kind(Kind::Uint8))],
            json: json!({"progress": {"global_step": 7, "validation_batches": [1, 2]}, "seed": 42}),
            ranks: vec![RankState { logged: json!({"train": []}), ..RankState::default() }],
            ..TrainingState::default()
        }),
        ..Checkpoint::default()
    }
}

/// A file of version 1, whose changes no checksum gives away, and with the length of its header right if that is asked for.
#[test]
fn own_checkpoints() {
    let folder = folder();
    let path = folder.path().join("a.ckpt");
    example().save(&path).unwrap();
    let sealed = std::fs::read(&path).unwrap();
    let text = |from: &[u8], to: &[u8], bytes: &[u8]| {
        let at = bytes.windows(from.len()).position(|window| window == from).unwrap();
        [&bytes[..at], to, &bytes[at + from.len()..]].concat()
    };
    let unsealed = text(b"voltaic_crc32", b"voltaic_crc33", &sealed);
    let unsealed = text(b"format_version\\\":2", b"format_version\\\":1", &unsealed);
    let length = usize::try_from(u64::from_le_bytes(unsealed[..8].try_into().unwrap())).unwrap();
    let (header, tensors) = (unsealed[8..8 + length].to_vec(), unsealed[8 + length..].to_vec());
    stress("own checkpoints", |rng| {
        let bytes = match rng.random_range(0..10) {
            0 => mutated(&sealed, &WORDS, rng),
            1 => mutated(&unsealed, &WORDS, rng),
            _ => {
                let header = mutated(&header, &WORDS, rng);
                [&(header.len() as u64).to_le_bytes()[..], &header, &tensors].concat()
            }
        };
        std::fs::write(&path, bytes).unwrap();
        Checkpoint::load(&path).is_ok()
    });
}
