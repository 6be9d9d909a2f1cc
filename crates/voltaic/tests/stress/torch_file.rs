//! Files of PyTorch and Lightning: pickles in zip archives.

use std::io::{Cursor, Write};

use rand::RngExt;
use rand::rngs::StdRng;
use voltaic::checkpoint::pickle::Value;
use voltaic::checkpoint::{from_lightning, read_torch, write_torch};
use voltaic::{Kind, Tensor};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

use crate::mutate::{mutated, of_words};
use crate::{folder, stress};

/// Instructions, and classes that are known.
pub const WORDS: [&[u8]; 50] = [
    b"(",
    b"0",
    b"1",
    b"2",
    b"N",
    b"]",
    b"}",
    b")",
    b"l",
    b"t",
    b"d",
    b"a",
    b"e",
    b"s",
    b"u",
    b"R",
    b"b",
    b"Q",
    b".",
    b"\x85",
    b"\x86",
    b"\x87",
    b"\x88",
    b"\x90",
    b"\x91",
    b"\x93",
    b"\x94",
    b"q\x00",
    b"q\x01",
    b"h\x00",
    b"h\x01",
    b"K\x02",
    b"J\xff\xff\xff\xff",
    b"M\xff\xff",
    b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"X\x01\0\0\0a",
    b"X\xff\xff\xff\x7f",
    b"cargparse\nNamespace\n",
    b"ccollections\nOrderedDict\n",
    b"cbuiltins\nlist\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ctorch\nFloatStorage\n",
    b"cpathlib\nPosixPath\n",
    b"c_codecs\nencode\n",
    b"ctorch\nSize\n",
    b"ctorch._tensor\n_rebuild_from_type_v2\n",
    b"ctorch\nTensor\n",
    b"cdeepspeed.runtime.zero.config\nZeroStageEnum\n",
    b"cdeepspeed.utils.tensor_fragment\nfragment_address\n",
    b"\x81",
];

fn example() -> Value {
    let tensor = |kind| {
        Value::Tensor(Tensor::arange(6, (Kind::Float, tch::Device::Cpu)).reshape([2, 3]).to_kind(kind))
    };
    let group = Value::dict([
        ("lr", Value::Float(0.1)),
        ("betas", Value::Tuple(vec![Value::Float(0.9), Value::Float(0.99)])),
        ("amsgrad", Value::Bool(false)),
        ("params", Value::List(vec![Value::Int(0)])),
    ]);
    let state = Value::Dict(vec![(Value::Int(0), Value::dict([("exp_avg", tensor(Kind::Float))]))]);
    let optimizer = Value::dict([("state", state), ("param_groups", Value::List(vec![group]))]);
    Value::dict([
        ("state_dict", Value::dict([("fc.weight", tensor(Kind::Float))])),
        ("epoch", Value::Int(3)),
        ("loops", Value::dict([("fit_loop", Value::None)])),
        ("optimizer_states", Value::List(vec![optimizer])),
        (
            "hyper_parameters",
            Value::dict([("width", Value::Int(1 << 40)), ("name", Value::Bytes(vec![0, 200]))]),
        ),
    ])
}

pub fn entries(archive: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut zip = ZipArchive::new(Cursor::new(archive)).unwrap();
    let count = zip.len();
    let read = |index: usize| {
        let mut entry = zip.by_index(index).unwrap();
        let mut bytes = Vec::new();
        std::io::copy(&mut entry, &mut bytes).unwrap();
        (entry.name().unwrap().to_string(), bytes)
    };
    (0..count).map(read).collect()
}

pub fn archive(entries: &[(String, Vec<u8>)], pickle: &[u8], rng: &mut StdRng) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    for (name, bytes) in entries {
        if rng.random_range(0..50) == 0 {
            continue;
        }
        zip.start_file(name.as_str(), options).unwrap();
        zip.write_all(if name.ends_with("data.pkl") { pickle } else { bytes }).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

#[test]
fn files_of_torch() {
    let folder = folder();
    let path = folder.path().join("a.ckpt");
    write_torch(&example(), &path).unwrap();
    let whole = std::fs::read(&path).unwrap();
    let entries = entries(&whole);
    let pickle = entries.iter().find(|(name, _)| name.ends_with("data.pkl")).unwrap().1.clone();
    stress("files of torch.save", |rng| {
        let bytes = match rng.random_range(0..10) {
            0 => mutated(&whole, &[], rng),
            1 => {
                let pickle = of_words(&WORDS, 60, rng);
                archive(&entries, &pickle, rng)
            }
            _ => {
                let pickle = mutated(&pickle, &WORDS, rng);
                archive(&entries, &pickle, rng)
            }
        };
        std::fs::write(&path, bytes).unwrap();
        let Ok(value) = read_torch(&path) else { return false };
        from_lightning(&value, None, false).is_ok()
    });
}
