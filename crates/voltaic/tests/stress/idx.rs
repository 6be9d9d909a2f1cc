//! Files of MNIST, plain and compressed.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use rand::RngExt;
use voltaic::data::{Mnist, MnistSplit};

use crate::mutate::mutated;
use crate::{folder, stress};

const WORDS: [&[u8]; 4] = [b"\xff\xff\xff\xff", b"\0\0\0\0", b"\0\0\x08\x01", b"\0\0\x08\x03"];

fn idx(sizes: &[u32], bytes: &[u8]) -> Vec<u8> {
    let sizes: Vec<u8> = sizes.iter().flat_map(|size| size.to_be_bytes()).collect();
    [&[0, 0, 8, (sizes.len() / 4) as u8][..], &sizes, bytes].concat()
}

fn packed(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn digits() {
    let folder = folder();
    let images = idx(&[3, 4, 4], &(0..48).collect::<Vec<u8>>());
    let labels = idx(&[3], &[1, 2, 3]);
    let [image_file, label_file] =
        ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"].map(|name| folder.path().join(name));
    let image_packed = image_file.with_file_name("train-images-idx3-ubyte.gz");
    let whole = packed(&images);
    stress("idx files", |rng| {
        let _ = std::fs::remove_file(&image_file);
        let _ = std::fs::remove_file(&image_packed);
        match rng.random_range(0..4) {
            0 => std::fs::write(&image_packed, mutated(&whole, &WORDS, rng)).unwrap(),
            1 => std::fs::write(&image_packed, packed(&mutated(&images, &WORDS, rng))).unwrap(),
            _ => std::fs::write(&image_file, mutated(&images, &WORDS, rng)).unwrap(),
        }
        let labels = if rng.random_range(0..4) == 0 { mutated(&labels, &WORDS, rng) } else { labels.clone() };
        std::fs::write(&label_file, labels).unwrap();
        Mnist::open(folder.path(), MnistSplit::Train).is_ok()
    });
}
