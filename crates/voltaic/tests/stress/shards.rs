//! Checkpoints that are folders: the index, and the files of two ranks.

use std::collections::HashMap;
use std::path::Path;

use rand::RngExt;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;
use voltaic::checkpoint::Checkpoint;

use crate::mutate::mutated;
use crate::{folder, stress};

const WORDS: [&[u8]; 20] = [
    b"[]",
    b"{}",
    b"null",
    b"-1",
    b"18446744073709551615",
    b"9223372036854775807",
    b"[[0,[0,0],[2,3]]]",
    b"[[1,[1,0],[1,3]],[0,[0,0],[1,3]]]",
    b"[[0,[0],[6]],[0,[1,1],[1,2]]]",
    b"[[0,0,6]]",
    b"[4294967296,4294967296]",
    b"\"fc.weight\"",
    b"voltaic:grad.",
    b"voltaic:optimizer.9.",
    b"voltaic:own.rng.",
    b"\"F64\"",
    b"\"shards_version\":1",
    b"\"slices\"",
    b"[2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2]",
    b"rank-1.safetensors",
];

fn crc(bytes: &[u8]) -> String {
    let mut crc = crc32fast::Hasher::new();
    crc.update(bytes);
    format!("{:08x}", crc.finalize())
}

/// A rank's file: its half of a weight, of an optimizer's state and of a gradient, and what it has to itself.
fn rank_file(rank: usize) -> Vec<u8> {
    let values: Vec<u8> = (0..3_u8).flat_map(|value| f32::from(value + rank as u8).to_le_bytes()).collect();
    let part = || TensorView::new(Dtype::F32, vec![3], &values).unwrap();
    let names = ["fc.weight", "voltaic:optimizer.0.exp_avg.fc.weight", "voltaic:grad.fc.weight"];
    let mut tensors: Vec<(String, TensorView)> =
        names.iter().map(|name| ((*name).to_owned(), part())).collect();
    tensors.push(("voltaic:own.rng.cpu".into(), TensorView::new(Dtype::U8, vec![12], &values).unwrap()));
    let owner = json!({"id": "an id", "rank": rank, "ranks": 2}).to_string();
    let mut metadata = HashMap::from([("voltaic_shard".to_owned(), owner)]);
    let plain = safetensors::serialize(tensors.clone(), Some(metadata.clone())).unwrap();
    metadata.insert("voltaic_blocks".to_owned(), crc(&plain[header_len(&plain)..])); // one block; of no use in version 1
    safetensors::serialize(tensors, Some(metadata)).unwrap()
}

/// The bytes before the tensors.
fn header_len(file: &[u8]) -> usize {
    let len = file.get(..8).map_or(0, |len| u64::from_le_bytes(len.try_into().unwrap()));
    usize::try_from(len).unwrap_or(usize::MAX).saturating_add(8).min(file.len())
}

/// An index of these files, without its checksum.
fn index(version: u32, files: [&[u8]; 2]) -> String {
    let entry = match version {
        1 => json!({"dtype": "F32", "shape": [2, 3], "slices": [[0, 0, 3], [1, 3, 3]]}),
        _ => json!({"dtype": "F32", "shape": [2, 3], "chunks": [[0, [0, 0], [1, 3]], [1, [1, 0], [1, 3]]]}),
    };
    let checked = |bytes: &[u8]| if version == 1 { bytes.len() } else { header_len(bytes) };
    let meta = json!({"format_version": 2, "voltaic_version": "0.1.0", "epoch": 0, "global_step": 7, "module": "Net",
        "hyper_parameters": null});
    json!({
        "crc32": "00000000", "shards_version": version, "id": "an id", "meta": meta, "saved_at": 7, "num_optimizers": 1,
        "files": files.map(|bytes| json!({"bytes": bytes.len(), "crc32": crc(&bytes[..checked(bytes)])})),
        "tensors": {"fc.weight": entry, "voltaic:optimizer.0.exp_avg.fc.weight": entry, "voltaic:grad.fc.weight": entry},
        "tied": {"again": "fc.weight"}, "had_grad": ["fc.weight"], "ranks": [null],
        "training": {"metrics": null, "progress": {"global_step": 7}},
    })
    .to_string()
}

/// With the checksum that fits, so that changes reach the checks behind it.
fn sealed(index: &[u8]) -> Vec<u8> {
    const AT: usize = "{\"crc32\":\"".len();
    let mut bytes = index.to_vec();
    if bytes.len() >= AT + 8 {
        bytes[AT..AT + 8].copy_from_slice(b"00000000");
        let crc = crc(&bytes);
        bytes[AT..AT + 8].copy_from_slice(crc.as_bytes());
    }
    bytes
}

fn write(folder: &Path, index: &[u8], files: [&[u8]; 2]) {
    std::fs::write(folder.join("index.json"), index).unwrap();
    for (rank, bytes) in files.iter().enumerate() {
        std::fs::write(folder.join(format!("rank-{rank}.safetensors")), bytes).unwrap();
    }
}

/// The folder as it is made here is read; then its index and files change, mostly with checksums that fit.
#[test]
fn folders() {
    stressed("folders", 2);
}

#[test]
fn folders_of_version_1() {
    stressed("folders of version 1", 1);
}

fn stressed(name: &str, version: u32) {
    let folder = folder();
    let path = folder.path().join("a.ckpt");
    std::fs::create_dir(&path).unwrap();
    let files = [rank_file(0), rank_file(1)];
    let whole = index(version, [&files[0], &files[1]]);
    write(&path, &sealed(whole.as_bytes()), [&files[0], &files[1]]);
    let loaded = Checkpoint::load(&path).unwrap();
    let weight = &loaded.weights.iter().find(|(name, _)| name == "again").unwrap().1;
    assert_eq!(Vec::<f32>::try_from(&weight.view(6)).unwrap(), [0.0, 1.0, 2.0, 1.0, 2.0, 3.0]);
    let training = loaded.training.unwrap();
    assert_eq!((training.optimizers[0].len(), training.grads.len(), training.rng.len()), (1, 1, 1));
    assert_eq!(training.ranks[0].grads.len(), 1, "each rank goes on from the mean");
    stress(name, |rng| {
        let mut changed = files.clone();
        let rank = rng.random_range(0..2_usize);
        let text = match rng.random_range(0..4) {
            // a file that its index knows
            0 => {
                changed[rank] = mutated(&files[rank], &WORDS, rng);
                index(version, [&changed[0], &changed[1]]).into_bytes()
            }
            // one that it does not know
            1 => {
                changed[rank] = mutated(&files[rank], &WORDS, rng);
                whole.clone().into_bytes()
            }
            _ => mutated(whole.as_bytes(), &WORDS, rng),
        };
        let text = if rng.random_range(0..10) == 0 { text } else { sealed(&text) };
        write(&path, &text, [&changed[0], &changed[1]]);
        Checkpoint::load(&path).is_ok()
    });
}
