//! Folders of any partition of tensors, read by any other: the oracle is slicing of the whole tensors.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tch::{Kind, Tensor};

use super::folder::{INDEX, file_name};
use super::read::{Shards, load, peek_whole};
use super::write::write_ranks;
use crate::checkpoint::budget::ReadLimits;
use crate::checkpoint::checkpoint::{Checkpoint, Shard, TrainingState};
use crate::checkpoint::chunk::{Chunk, ShardSpec, usizes};
use crate::checkpoint::stream::BLOCK;

const KINDS: [Kind; 6] = [Kind::Float, Kind::BFloat16, Kind::Half, Kind::Double, Kind::Int64, Kind::Uint8];

/// Cuts a shard in two parts of one dimension, perhaps again.
fn tensor_parallel(shape: &[i64], ranks: usize, rng: &mut StdRng) -> Vec<ShardSpec> {
    let dim = rng.random_range(0..shape.len().max(1));
    let sizes = usizes(shape);
    let len = sizes.get(dim).copied().unwrap_or(1);
    if shape.is_empty() || len < ranks {
        return vec![ShardSpec::whole(shape)];
    }
    let mut ends: Vec<usize> = (1..ranks).map(|rank| rank * len / ranks).collect();
    ends.push(len);
    let mut start = 0;
    let chunk = |end: usize| {
        let mut chunk = Chunk::whole(&sizes);
        (chunk.offsets[dim], chunk.sizes[dim]) = (start, end - start);
        start = end;
        ShardSpec::of_chunk(shape, chunk)
    };
    ends.into_iter().map(chunk).collect()
}

/// Cuts a shard into ranges of its elements, as ZeRO does.
fn zero(shard: &ShardSpec, ranks: usize, rng: &mut StdRng) -> Vec<ShardSpec> {
    let mut ends: Vec<usize> = (1..ranks).map(|_| rng.random_range(0..=shard.range.len())).collect();
    ends.sort_unstable();
    ends.push(shard.range.len());
    let mut start = 0;
    let range = |end: usize| {
        let range = shard.range.start + start..shard.range.start + end;
        start = end;
        ShardSpec { range, ..shard.clone() }
    };
    ends.into_iter().map(range).collect()
}

/// What each rank of a mesh of tensor parallelism and ZeRO has of a tensor.
fn mesh(shape: &[i64], (tp, dp): (usize, usize), rng: &mut StdRng) -> Vec<ShardSpec> {
    let columns = tensor_parallel(shape, tp, rng);
    columns.iter().flat_map(|columns| zero(columns, dp, rng)).collect()
}

fn numbers(shape: &[i64], kind: Kind, rng: &mut StdRng) -> Tensor {
    let first: i64 = rng.random_range(0..1000);
    let numel = shape.iter().product::<i64>();
    let all = Tensor::arange(numel, (Kind::Int64, tch::Device::Cpu)) * 7 + first;
    all.remainder(if kind == Kind::Uint8 { 251 } else { 1021 }).to_kind(kind).view(shape)
}

fn training() -> TrainingState {
    TrainingState { optimizers: vec![Vec::new()], json: serde_json::json!({}), ..TrainingState::default() }
}

/// Writes a folder of these tensors, of which the ranks of a mesh have what they have.
fn write(tensors: &BTreeMap<String, Tensor>, meshes: (usize, usize), folder: &Path, rng: &mut StdRng) {
    let ranks = meshes.0 * meshes.1;
    let mut all: Vec<Checkpoint> =
        (0..ranks).map(|_| Checkpoint { training: Some(training()), ..Checkpoint::default() }).collect();
    for (name, tensor) in tensors {
        for (rank, spec) in mesh(&tensor.size(), meshes, rng).into_iter().enumerate() {
            let values = spec.of(tensor).unwrap();
            all[rank].shards.push(Shard { name: name.clone(), spec, values });
        }
    }
    fs::create_dir(folder).unwrap();
    fs::write(folder.join(INDEX), write_ranks(&all, folder).unwrap()).unwrap();
}

#[test]
fn any_mesh_reads_what_any_mesh_has_written() {
    let root = tempfile::tempdir().unwrap();
    let mut rng = StdRng::seed_from_u64(3);
    for number in 0..60 {
        let mut tensors = BTreeMap::new();
        for index in 0..rng.random_range(1..4) {
            let mut shape: Vec<i64> = (0..rng.random_range(0..5)).map(|_| rng.random_range(1..9)).collect();
            if rng.random_range(0..10) == 0 {
                shape = vec![rng.random_range(200..400), rng.random_range(200..700)]; // more than a block
            }
            if rng.random_range(0..20) == 0 {
                shape.push(0);
            }
            let kind = KINDS[rng.random_range(0..KINDS.len())];
            let weight = numbers(&shape, kind, &mut rng);
            tensors.insert(
                format!("voltaic:optimizer.0.exp_avg.{index}"),
                numbers(&shape, Kind::Float, &mut rng),
            );
            tensors.insert(index.to_string(), weight);
        }
        let folder = root.path().join(number.to_string());
        let written_by = (rng.random_range(1..4), rng.random_range(1..4));
        write(&tensors, written_by, &folder, &mut rng);
        let shards = Shards::open(&folder).unwrap();
        peek_whole(&folder, (0, 1)).unwrap();
        for (name, tensor) in &tensors {
            let what = format!("{number}: {name} {:?} by {written_by:?}", tensor.size());
            assert!(shards.whole(name).unwrap().equal(tensor), "{what}");
            let read_by = (rng.random_range(1..4), rng.random_range(1..4));
            for shard in mesh(&tensor.size(), read_by, &mut rng) {
                let read = shards.shard(name, &shard).unwrap();
                assert!(
                    read.equal(&shard.of(tensor).unwrap()) && read.kind() == tensor.kind(),
                    "{what}: {shard:?}"
                );
            }
        }
        let whole = load(&folder, ReadLimits::default()).unwrap();
        let states = whole.training.unwrap().optimizers.remove(0);
        assert_eq!(whole.weights.len() + states.len(), tensors.len());
        assert!(whole.weights.iter().all(|(name, weight)| weight.equal(&tensors[name])), "{number}");
    }
}

/// The shards of a column-parallel layer: its weights, its optimizer's state, and what ZeRO makes of the local columns.
#[test]
fn columns_are_read_as_a_whole_as_rows_and_as_ranges() {
    let root = tempfile::tempdir().unwrap();
    let mut rng = StdRng::seed_from_u64(5);
    let weight = numbers(&[6, 10], Kind::Float, &mut rng);
    let columns = |first, count| Chunk { offsets: vec![0, first], sizes: vec![6, count] };
    let checkpoint = |tp: usize, dp: usize| {
        let mut own = ShardSpec::of_chunk(&[6, 10], columns(5 * tp, 5));
        own.range = 15 * dp..15 * dp + 15; // of the 30 elements of the local columns: the cut is within a row
        let shard =
            |name: &str| Shard { name: name.to_owned(), spec: own.clone(), values: own.of(&weight).unwrap() };
        let training = Some(training());
        let shards = vec![shard("fc.weight"), shard("voltaic:optimizer.0.exp_avg.fc.weight")];
        Checkpoint { shards, training, ..Checkpoint::default() }
    };
    let all = [checkpoint(0, 0), checkpoint(0, 1), checkpoint(1, 0), checkpoint(1, 1)];
    let folder = root.path().join("folder.ckpt");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join(INDEX), write_ranks(&all, &folder).unwrap()).unwrap();
    let shards = Shards::open(&folder).unwrap();
    for name in ["fc.weight", "voltaic:optimizer.0.exp_avg.fc.weight"] {
        assert!(shards.whole(name).unwrap().equal(&weight));
        let rows = Chunk { offsets: vec![2, 0], sizes: vec![2, 10] };
        let rows = shards.shard(name, &ShardSpec::of_chunk(&[6, 10], rows)).unwrap();
        assert!(rows.equal(&weight.narrow(0, 2, 2).reshape([-1])));
        let range = shards.shard(name, &ShardSpec::flat(&[6, 10], 7..53)).unwrap();
        assert!(range.equal(&weight.view(-1).narrow(0, 7, 46)));
        let other = shards.shard(name, &ShardSpec::of_chunk(&[6, 10], columns(3, 4))).unwrap();
        assert!(other.equal(&weight.narrow(1, 3, 4).reshape([-1])));
    }
    let error = shards.shard("fc.weight", &ShardSpec::whole(&[10, 6])).unwrap_err().to_string();
    assert!(error.contains("fc.weight has shape [6, 10], this run has [10, 6]"), "{error}");
    // what does not fit together is not written
    let error = write_ranks(&all[..3], root.path()).unwrap_err();
    assert!(error.what.contains("fc.weight has element [3, 5] in no chunk"), "{}", error.what);
}

#[test]
fn a_changed_byte_is_seen_where_it_is_read() {
    let root = tempfile::tempdir().unwrap();
    let mut rng = StdRng::seed_from_u64(9);
    let rows = 3 * BLOCK as i64 / 400;
    let weight = numbers(&[rows, 100], Kind::Float, &mut rng);
    let folder = root.path().join("folder.ckpt");
    write(&BTreeMap::from([("w".to_owned(), weight.shallow_clone())]), (1, 1), &folder, &mut rng);
    let file = folder.join(file_name(0));
    let whole = fs::read(&file).unwrap();
    let mut changed = whole.clone();
    let last = changed.len() - 1;
    changed[last] ^= 1;
    fs::write(&file, &changed).unwrap();
    let shards = Shards::open(&folder).unwrap();
    let range = |range| shards.shard("w", &ShardSpec::flat(&[rows, 100], range));
    let numel = rows as usize * 100;
    assert!(range(0..1000).unwrap().equal(&weight.view(-1).narrow(0, 0, 1000)), "it is in another block");
    for damaged in [range(numel - 1..numel), range(0..numel), shards.whole("w")] {
        let error = damaged.unwrap_err().to_string();
        assert!(error.contains("rank-0.safetensors") && error.contains("the file is damaged"), "{error}");
    }
    assert!(peek_whole(&folder, (0, 1)).is_err());
    // a change of the header is seen when the file is opened, and so are cut files
    let mut changed = whole.clone();
    changed[20] ^= 1;
    for bytes in [&changed[..], &whole[..last]] {
        fs::write(&file, bytes).unwrap();
        Shards::open(&folder).unwrap().shard("w", &ShardSpec::flat(&[rows, 100], 0..1)).unwrap_err();
    }
}
