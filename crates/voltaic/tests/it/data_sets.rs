//! MNIST, text and image transforms, on the data that ships and on files made to lie.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flate2::Compression;
use flate2::write::GzEncoder;
use rand::SeedableRng;
use serde_json::Value;
use tempfile::TempDir;
use voltaic::data::transforms::{Normalize, RandomCrop, RandomHorizontalFlip, Transform, Transformed};
use voltaic::data::{
    CharVocabulary, DataLoader, DataModule, Dataset, EpochRange, Mnist, MnistData, MnistDataConfig,
    MnistFiles, MnistSet, MnistSplit, ShakespeareData, ShakespeareDataConfig, SplitSize, Stage, StdRng,
    TensorDataset, TextDataset,
};
use voltaic::{Kind, Tensor};

const IMAGES: &str = "train-images-idx3-ubyte";
const LABELS: &str = "train-labels-idx1-ubyte";

fn shipped(part: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data").join(part)
}

fn rng() -> StdRng {
    StdRng::seed_from_u64(1)
}

fn idx(magic: u32, sizes: &[u32], bytes: &[u8]) -> Vec<u8> {
    let words = std::iter::once(&magic).chain(sizes);
    words.flat_map(|word| word.to_be_bytes()).chain(bytes.iter().copied()).collect()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Three images of 2 x 2 pixels, whose values count from 0, and their labels.
fn images() -> Vec<u8> {
    idx(0x803, &[3, 2, 2], &(0..12).collect::<Vec<u8>>())
}

fn labels() -> Vec<u8> {
    idx(0x801, &[3], &[7, 0, 9])
}

fn folder(files: &[(&str, &[u8])]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in files {
        std::fs::write(folder.path().join(name), content).unwrap();
    }
    folder
}

fn message<T>(result: voltaic::Result<T>) -> String {
    result.err().expect("an error").to_string()
}

fn values<T>(tensor: &Tensor) -> Vec<T>
where
    Vec<T>: for<'a> TryFrom<&'a Tensor, Error: std::fmt::Debug>,
{
    Vec::try_from(&tensor.flatten(0, -1)).unwrap()
}

#[test]
fn plain_and_compressed_files_read_alike() {
    for (images_name, labels_name, pack) in [
        (IMAGES.to_owned(), LABELS.to_owned(), false),
        (format!("{IMAGES}.gz"), format!("{LABELS}.gz"), true),
    ] {
        let packed = |bytes: Vec<u8>| if pack { gzip(&bytes) } else { bytes };
        let folder = folder(&[(&images_name, &packed(images())), (&labels_name, &packed(labels()))]);
        let mnist = Mnist::open(folder.path(), MnistSplit::Train).unwrap().normalize(0.0, 1.0).unwrap();
        assert_eq!((mnist.len(), mnist.size()), (3, 2));
        let (x, y) = mnist.batch(&[2, 0], &mut rng()).unwrap();
        assert_eq!((x.size(), x.kind(), y.kind()), (vec![2, 1, 2, 2], Kind::Float, Kind::Int64));
        let expected: Vec<f32> = [8, 9, 10, 11, 0, 1, 2, 3].map(|byte| byte as f32 / 255.0).to_vec();
        assert_eq!(values::<f32>(&x), expected);
        assert_eq!(values::<i64>(&y), [9, 7]);
    }
}

#[test]
fn a_file_that_lies_is_named_with_the_byte() {
    let (good_images, good_labels) = (images(), labels());
    let mut flipped = gzip(&good_images);
    let crc_at = flipped.len() - 8;
    flipped[crc_at] ^= 1;
    let packed = gzip(&good_images);
    let longer = [good_images.clone(), vec![0]].concat();
    let followed = [packed.clone(), b"junk".to_vec()].concat();
    let huge = idx(0x803, &[u32::MAX; 3], &[]);
    let large = idx(0x803, &[60_000, 28, 28], &[1; 100]);
    let cases: Vec<(&str, Vec<u8>, &str, u64, &str)> = vec![
        (IMAGES, vec![], "file", 0, "ends within its header of 16 bytes"),
        (IMAGES, good_images[..15].to_vec(), "file", 15, "ends within its header"),
        (IMAGES, idx(0x801, &[3, 2, 2], &[0; 12]), "file", 0, "magic number is 0x00000801, not 0x00000803"),
        (IMAGES, idx(0x0d03, &[3, 2, 2], &[0; 12]), "file", 0, "magic number is 0x00000d03"),
        (IMAGES, b"<html>not found</html>".to_vec(), "file", 0, "magic number is 0x3c68746d"),
        (IMAGES, packed.clone(), "file", 0, "gzip data in a file whose name does not end in .gz"),
        (IMAGES, idx(0x803, &[3, 0, 2], &[]), "file", 8, "dimension 1 has size 0"),
        (IMAGES, idx(0x803, &[3, 1, 4], &[0; 12]), "file", 8, "images of 1 x 4 pixels"),
        (
            IMAGES,
            good_images[..27].to_vec(),
            "file",
            27,
            "ends after 11 of the 12 bytes that sizes [3, 2, 2]",
        ),
        (IMAGES, large, "file", 116, "ends after 100 of the 47040000 bytes"),
        (IMAGES, longer, "file", 28, "continues after the 12 bytes"),
        (IMAGES, huge, "file", 4, "promise more than any such file holds"),
        ("images.gz", packed[..packed.len() - 12].to_vec(), "stream", 0, "compressed stream"),
        ("images.gz", packed[..5].to_vec(), "stream", 0, "compressed stream ends here"),
        ("images.gz", flipped, "stream", 28, "compressed stream is damaged"),
        ("images.gz", followed, "stream", 28, "compressed stream"),
        ("images.gz", good_images.clone(), "stream", 0, "compressed stream is damaged"),
        (LABELS, idx(0x801, &[2], &[7, 0]), "file", 4, "2 labels, but 3 images in"),
        (LABELS, idx(0x801, &[3], &[7, 10, 9]), "file", 9, "label 1 is 10"),
        (LABELS, idx(0x801, &[3], &[7, 1]), "file", 10, "ends after 2 of the 3 bytes"),
        (LABELS, good_images.clone(), "file", 0, "magic number is 0x00000803, not 0x00000801"),
    ];
    for (name, content, kind, offset, text) in cases {
        let packed_name = format!("{IMAGES}.gz");
        let name = if name == "images.gz" { &packed_name } else { name };
        let mut files: Vec<(&str, &[u8])> = vec![(name, &content)];
        if name == LABELS {
            files.push((IMAGES, &good_images));
        } else {
            files.push((LABELS, &good_labels));
        }
        let folder = folder(&files);
        let error = message(Mnist::open(folder.path(), MnistSplit::Train));
        let path = folder.path().join(name);
        assert!(error.starts_with(&format!("{}: at byte ", path.display())), "{error}");
        assert!(
            error.contains(text) && error.contains("; get the file again"),
            "expected {text:?} in: {error}"
        );
        if kind == "file" || offset > 0 {
            assert!(error.contains(&format!(": at byte {offset}: ")), "expected byte {offset} in: {error}");
        }
    }
}

#[test]
fn a_missing_file_is_named() {
    let (images, labels) = (images(), labels());
    for (files, missing) in [(vec![(IMAGES, &images[..])], LABELS), (vec![(LABELS, &labels[..])], IMAGES)] {
        let folder = folder(&files);
        let error = message(Mnist::open(folder.path(), MnistSplit::Train));
        assert!(
            error.starts_with(&format!("{} is missing; ", folder.path().join(missing).display())),
            "{error}"
        );
        assert!(error.contains("scripts/data.sh mnist"), "{error}");
    }
    let error = message(Mnist::open("no/such/folder", MnistSplit::Test));
    assert!(error.starts_with("no/such/folder/t10k-images-idx3-ubyte is missing"), "{error}");
}

#[test]
fn the_digits_that_ship_are_balanced_and_are_digits() {
    let train = Mnist::open(shipped("digits"), MnistSplit::Train).unwrap();
    let test = Mnist::open(shipped("digits"), MnistSplit::Test).unwrap();
    assert_eq!((train.len(), test.len(), train.size()), (12_000, 2_000, 28));
    for (set, count) in [(&train, 1200), (&test, 200)] {
        assert_eq!(values::<i64>(&set.labels().bincount(None::<Tensor>, 0)), [count; 10]);
    }
    // The mean image of each digit, as a classifier, tells most digits apart: images and labels belong together.
    let all = |set: &Mnist| set.batch(&(0..set.len()).collect::<Vec<_>>(), &mut rng()).unwrap();
    let ((x, y), (test_x, test_y)) = (all(&train), all(&test));
    let sums = Tensor::zeros([10, 784], (Kind::Float, tch::Device::Cpu)).index_add(0, &y, &x.flatten(1, -1));
    let means = sums / 1200.0;
    let nearest = Tensor::cdist(&test_x.flatten(1, -1), &means, 2.0, None::<i64>).argmin(1, false);
    let accuracy = nearest.eq_tensor(&test_y).to_kind(Kind::Float).mean(Kind::Float).double_value(&[]);
    assert!(accuracy > 0.78, "{accuracy}");
    assert!(x.mean(Kind::Float).double_value(&[]).abs() < 0.02, "normalised by MNIST's mean");
    assert!((x.std(false).double_value(&[]) - 1.0).abs() < 0.02, "and standard deviation");
}

#[test]
fn a_subset_is_not_the_published_set() {
    let error = message(Mnist::verify(shipped("digits")));
    assert_contains!(&error, "train-images-idx3-ubyte.gz: md5 is ", "6bbc9ace898e44ae");
    let files = MnistFiles::of(shipped("digits")).unwrap();
    assert!(!files.is_full());
    assert!(files.to_string().starts_with("a subset of MNIST: 12000 training and 2000 test images from "));
}

#[test]
fn images_are_padded_and_channels_repeated() {
    let plain = Mnist::open(shipped("digits"), MnistSplit::Test).unwrap();
    let (x, _) = plain.batch(&[3, 4], &mut rng()).unwrap();
    let wide = plain.clone().image_size(32).unwrap().channels(3).unwrap();
    let (wide_x, _) = wide.batch(&[3, 4], &mut rng()).unwrap();
    assert_eq!(wide_x.size(), [2, 3, 32, 32]);
    assert!(wide_x.is_contiguous());
    for channel in 0..3 {
        let inner = wide_x.narrow(1, channel, 1).narrow(2, 2, 28).narrow(3, 2, 28);
        assert_eq!(inner, x);
    }
    let black = (0.0_f32 / 255.0 - 0.1307) / 0.3081;
    assert_eq!(wide_x.double_value(&[0, 0, 0, 0]) as f32, black);
    assert!(message(plain.clone().image_size(27)).contains("27 pixels, the images have 28"));
    assert!(message(plain.channels(0)).contains("0 channels"));
}

#[test]
fn normalize_gives_torchvisions_values_to_the_bit() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("../fixtures/data/normalize.json")).unwrap();
    for case in &cases {
        let list = |key: &str| -> Vec<f64> { serde_json::from_value(case[key].clone()).unwrap() };
        let channels = list("mean").len() as i64;
        let bytes = Tensor::arange(256, (Kind::Uint8, tch::Device::Cpu)).view([1, 1, 16, 16]);
        let images = bytes.expand([1, channels, 16, 16], false).contiguous();
        let normalize = Normalize::new(&list("mean"), &list("std")).unwrap();
        let expected: Vec<f32> = list("values").iter().map(|&value| value as f32).collect();
        assert_eq!(values::<f32>(&normalize.apply(images, &mut rng()).unwrap()), expected);
    }
    let two = Normalize::new(&[0.5, 0.5], &[1.0, 1.0]).unwrap();
    let grey = Tensor::zeros([1, 1, 2, 2], (Kind::Float, tch::Device::Cpu));
    assert!(
        two.apply(grey, &mut rng()).unwrap_err().to_string().contains("2 means, the images have 1 channels")
    );
    assert!(Normalize::new(&[0.5], &[0.0]).is_err());
    assert!(Normalize::new(&[], &[]).is_err());
    assert!(Normalize::new(&[0.5], &[1.0, 1.0]).is_err());
}

#[test]
fn normalize_leaves_its_input_alone() {
    let images = Tensor::ones([1, 1, 2, 2], (Kind::Float, tch::Device::Cpu));
    let normalize = Normalize::new(&[0.5], &[0.25]).unwrap();
    assert_eq!(values::<f32>(&normalize.apply(images.shallow_clone(), &mut rng()).unwrap()), [2.0; 4]);
    assert_eq!(values::<f32>(&images), [1.0; 4]);
}

#[test]
fn a_random_crop_is_a_window_of_the_padded_image() {
    let images = Tensor::arange(64 * 12, (Kind::Float, tch::Device::Cpu)).view([64, 1, 3, 4]) + 1.0;
    let cropped = RandomCrop::new(1).fill(-1.0).apply(images.shallow_clone(), &mut rng()).unwrap();
    assert_eq!(cropped.size(), images.size());
    let padded = images.pad([1, 1, 1, 1], "constant", -1.0);
    let mut places = std::collections::BTreeSet::new();
    for place in 0..64 {
        let windows = (0..3).flat_map(|top| (0..3).map(move |left| (top, left)));
        let image = cropped.select(0, place);
        let found: Vec<_> = windows
            .filter(|&(top, left)| padded.select(0, place).narrow(1, top, 3).narrow(2, left, 4) == image)
            .collect();
        assert_eq!(found.len(), 1, "image {place} is not a window of its original");
        places.insert(found[0]);
    }
    assert_eq!(places.len(), 9, "all places occur among 64 images");
    let flat = Tensor::zeros([4, 4], (Kind::Float, tch::Device::Cpu));
    let error = RandomCrop::new(1).apply(flat, &mut rng()).unwrap_err().to_string();
    assert!(error.contains("RandomCrop was given a batch of shape [4, 4]; "), "{error}");
}

#[test]
fn a_random_flip_mirrors_about_half_of_the_images() {
    let images = Tensor::arange(200 * 6, (Kind::Float, tch::Device::Cpu)).view([200, 1, 2, 3]);
    let mirrored = images.flip([3]);
    let flips = |probability: f64| {
        let flip = RandomHorizontalFlip::new(probability).unwrap();
        let out = flip.apply(images.shallow_clone(), &mut rng()).unwrap();
        (0..200)
            .filter(|&place| {
                let is_flipped = out.select(0, place) == mirrored.select(0, place);
                assert!(is_flipped || out.select(0, place) == images.select(0, place));
                is_flipped
            })
            .count()
    };
    assert_eq!((flips(0.0), flips(1.0)), (0, 200));
    assert!((65..=135).contains(&flips(0.5)), "5 standard deviations around 100: {}", flips(0.5));
    assert!(RandomHorizontalFlip::new(1.5).is_err());
}

#[test]
fn transformed_batches_do_not_depend_on_num_workers() {
    let x = Tensor::arange(20 * 16, (Kind::Float, tch::Device::Cpu)).view([20, 1, 4, 4]);
    let y = Tensor::arange(20, (Kind::Int64, tch::Device::Cpu));
    let dataset = Arc::new(TensorDataset::new((x, y)).unwrap());
    let epoch = |num_workers| -> Vec<Vec<f32>> {
        let augmented = Transformed::new(dataset.clone())
            .then(RandomCrop::new(2))
            .then(RandomHorizontalFlip::new(0.5).unwrap());
        let loader =
            DataLoader::new(augmented).batch_size(6).shuffle(true).num_workers(num_workers).build().unwrap();
        loader.iter(EpochRange::epoch(1)).unwrap().map(|batch| values::<f32>(&batch.unwrap().0)).collect()
    };
    assert_eq!(epoch(0), epoch(3));
}

#[test]
fn mnist_data_splits_and_augments_the_training_part_only() {
    let config = MnistDataConfig {
        data_dir: Some(shipped("digits")),
        val_size: SplitSize::Count(2000),
        random_crop_padding: 2,
        ..MnistDataConfig::default()
    };
    let mut data = MnistData::new(config.clone());
    assert_eq!(data.files().unwrap().num_train, 12_000);
    data.setup(Stage::Fit).unwrap();
    let (train, val) = (data.train_dataloader().unwrap().unwrap(), data.val_dataloader().unwrap().remove(0));
    assert_eq!((train.num_samples(), val.num_samples(), train.batch_size()), (10_000, 2000, Some(64)));
    assert!(train.is_shuffled() && !val.is_shuffled());
    assert!(data.test_dataloader().unwrap().is_empty(), "the test set is opened for testing only");
    data.setup(Stage::Test).unwrap();
    assert_eq!(data.test_dataloader().unwrap()[0].num_samples(), 2000);

    let first =
        |loader: &DataLoader<(Tensor, Tensor)>, epoch| loader.iter(EpochRange::epoch(epoch)).unwrap().next();
    let (val_now, val_later) = (first(&val, 0).unwrap().unwrap(), first(&val, 5).unwrap().unwrap());
    assert_eq!(val_now.0, val_later.0, "validation images never change");
    let mut again = MnistData::new(config);
    again.setup(Stage::Validate).unwrap();
    let val_again = first(&again.val_dataloader().unwrap()[0], 0).unwrap().unwrap();
    assert_eq!(val_now.0, val_again.0, "the split follows its seed");

    let whole = MnistDataConfig {
        data_dir: Some(shipped("digits")),
        val_size: SplitSize::Count(0),
        ..Default::default()
    };
    let mut data = MnistData::new(whole);
    data.setup(Stage::Fit).unwrap();
    assert!(data.val_dataloader().unwrap().is_empty());
}

#[test]
fn mnist_data_refuses_what_it_was_not_asked_for() {
    let digits = Some(shipped("digits"));
    let full =
        MnistDataConfig { data_dir: digits.clone(), set: MnistSet::Full, ..MnistDataConfig::default() };
    let error = message(MnistData::new(full).files().cloned());
    assert!(error.contains("MnistData.set: full asked for, found a subset of MNIST: 12000"), "{error}");
    let too_many =
        MnistDataConfig { data_dir: digits, val_size: SplitSize::Count(12_000), ..Default::default() };
    assert_error!(MnistData::new(too_many).setup(Stage::Fit), "MnistData.val_size: 12000 of 12000 samples");
    let nowhere = MnistDataConfig { data_dir: Some("no/such".into()), ..MnistDataConfig::default() };
    let error = message(MnistData::new(nowhere).files().cloned());
    assert!(error.starts_with("no/such/train-images-idx3-ubyte is missing"), "{error}");
    let unknown: Result<MnistDataConfig, _> = serde_json::from_str(r#"{"batchsize": 3}"#);
    assert!(unknown.unwrap_err().to_string().contains("unknown field `batchsize`"));
    let config: MnistDataConfig = serde_json::from_str(r#"{"val_size": 0.25, "set": "subset"}"#).unwrap();
    assert_eq!((config.val_size, config.set), (SplitSize::Fraction(0.25), MnistSet::Subset));
}

#[test]
fn text_blocks_are_shifted_by_one() {
    let text = "abcdefghijk";
    let vocabulary = Arc::new(CharVocabulary::of(text).unwrap());
    let decode = |tokens: &Tensor| vocabulary.decode(&values::<i64>(tokens)).unwrap();
    let blocks = TextDataset::consecutive(text, vocabulary.clone(), 4).unwrap();
    assert_eq!(blocks.len(), 2);
    let (x, y) = blocks.batch(&[1, 0], &mut rng()).unwrap();
    assert_eq!((x.size(), x.kind()), (vec![2, 4], Kind::Int64));
    assert_eq!((decode(&x), decode(&y)), ("efghabcd".to_owned(), "fghibcde".to_owned()));

    let random = TextDataset::random(text, vocabulary.clone(), 4).unwrap().num_samples(300).unwrap();
    let (x, y) = random.batch(&(0..300).collect::<Vec<_>>(), &mut rng()).unwrap();
    assert_eq!(
        values::<i64>(&(x.shallow_clone() + 1)),
        values::<i64>(&y),
        "letters in order: next is one more"
    );
    let starts: std::collections::BTreeSet<i64> = values::<i64>(&x.select(1, 0)).into_iter().collect();
    assert_eq!(
        starts.into_iter().collect::<Vec<_>>(),
        [0, 1, 2, 3, 4, 5, 6],
        "every place that has a next letter"
    );

    assert!(message(TextDataset::random("abcd", vocabulary.clone(), 4)).contains("a text of 4 characters"));
    assert!(message(TextDataset::random("abcdz", vocabulary.clone(), 4)).contains("'z' at place 4"));
    assert!(message(TextDataset::random("abcd", vocabulary.clone(), 0)).contains("context_length"));
    assert!(
        message(TextDataset::consecutive(text, vocabulary, 4).unwrap().num_samples(3)).contains("3 blocks")
    );
}

#[test]
fn the_play_that_ships_trains_validates_and_tests() {
    let config = ShakespeareDataConfig {
        text_file: Some(shipped("text/hamlet.txt")),
        batch_size: 8,
        context_length: 32,
        ..ShakespeareDataConfig::default()
    };
    let mut data = ShakespeareData::new(config.clone());
    let vocabulary = data.vocabulary().unwrap();
    assert_eq!(vocabulary.len(), 65);
    data.setup(Stage::Fit).unwrap();
    let train = data.train_dataloader().unwrap().unwrap();
    let first =
        |epoch| values::<i64>(&train.iter(EpochRange::epoch(epoch)).unwrap().next().unwrap().unwrap().0);
    assert_eq!(first(0), first(0));
    assert_ne!(first(0), first(1));
    // of 173,918 characters 85 % train, 10 % validate, 5 % test, in blocks of 32
    assert_eq!(train.num_samples(), (173_918 - 17_391 - 7_826 - 1) / 32);
    let (val, test) = (data.val_dataloader().unwrap().remove(0), data.test_dataloader().unwrap().remove(0));
    assert_eq!((val.num_samples(), test.num_samples()), (17_390 / 32, 7_825 / 32));
    let (x, _) = val.iter(EpochRange::default()).unwrap().next().unwrap().unwrap();
    let text = std::fs::read_to_string(shipped("text/hamlet.txt")).unwrap();
    let start = 173_918 - 17_391 - 7_826;
    assert_eq!(vocabulary.decode(&values::<i64>(&x.get(0))).unwrap(), text[start..start + 32]);

    let few =
        ShakespeareDataConfig { samples_per_epoch: Some(100), test_size: SplitSize::Count(0), ..config };
    let mut data = ShakespeareData::new(few);
    data.setup(Stage::Fit).unwrap();
    assert_eq!(data.train_dataloader().unwrap().unwrap().num_samples(), 100);
    assert!(data.test_dataloader().unwrap().is_empty());
}

#[test]
fn a_text_file_that_cannot_be_used_is_named() {
    let folder = folder(&[("latin1.txt", b"caf\xe9 noir"), ("empty.txt", b"")]);
    let error = |path: PathBuf| {
        let config = ShakespeareDataConfig { text_file: Some(path), ..ShakespeareDataConfig::default() };
        message(ShakespeareData::new(config).vocabulary())
    };
    assert!(
        error(folder.path().join("latin1.txt")).contains("latin1.txt: at byte 3: this is not UTF-8; convert")
    );
    assert!(error(folder.path().join("empty.txt")).contains("a vocabulary of no characters; "));
    assert!(error("no.txt".into()).starts_with("no.txt is missing; "));
}
