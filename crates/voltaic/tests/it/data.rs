//! Datasets, samplers and loaders. The fixture holds what PyTorch's own samplers choose.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::Duration;

use rand::RngExt;
use serde_json::Value;
use voltaic::data::{
    Batch, DataLoader, DataModule, Dataset, DistributedSampler, EpochRange, Loaders, RandomSampler,
    Remainder, Sampler, SequentialSampler, StdRng, Subset, TensorDataset, WeightedRandomSampler,
    fractional_lengths, random_split,
};
use voltaic::{Kind, Tensor, ffi};

fn orders() -> Value {
    serde_json::from_str(include_str!("../fixtures/data/orders.json")).unwrap()
}

fn numbers(value: &Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap() as usize).collect()
}

fn number(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

/// Fails the test rather than hang it.
fn within<T: Send + 'static>(what: &str, run: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(run()));
    receiver.recv_timeout(Duration::from_secs(20)).unwrap_or_else(|_| panic!("{what} did not end"))
}

/// Each sample is its index and a random number; sample `fails_at` returns an error, `panics_at` panics.
struct Indices {
    len: usize,
    fails_at: Option<usize>,
    panics_at: Option<usize>,
    pause: Duration,
    loaded: Arc<AtomicUsize>,
}

impl Indices {
    fn new(len: usize) -> Self {
        Self { len, fails_at: None, panics_at: None, pause: Duration::ZERO, loaded: Arc::default() }
    }
}

impl Dataset for Indices {
    type Batch = (Tensor, Tensor);

    fn len(&self) -> usize {
        self.len
    }

    fn batch(&self, indices: &[usize], rng: &mut StdRng) -> anyhow::Result<(Tensor, Tensor)> {
        self.loaded.fetch_add(1, Ordering::SeqCst);
        std::thread::sleep(self.pause);
        if let Some(index) = self.fails_at
            && indices.contains(&index)
        {
            anyhow::bail!("sample {index} is rotten");
        }
        if let Some(index) = self.panics_at {
            assert!(!indices.contains(&index), "sample {index} is cursed");
        }
        let ids: Vec<i64> = indices.iter().map(|&index| index as i64).collect();
        let draws: Vec<f64> = indices.iter().map(|_| rng.random()).collect();
        Ok((Tensor::from_slice(&ids), Tensor::from_slice(&draws)))
    }
}

type Samples = Vec<(Vec<i64>, Vec<f64>)>;

fn samples(loader: &DataLoader<(Tensor, Tensor)>, range: EpochRange) -> Samples {
    loader
        .iter(range)
        .unwrap()
        .map(|batch| {
            let (ids, draws) = batch.unwrap();
            (Vec::try_from(&ids).unwrap(), Vec::try_from(&draws).unwrap())
        })
        .collect()
}

fn ids(samples: &Samples) -> Vec<Vec<i64>> {
    samples.iter().map(|(ids, _)| ids.clone()).collect()
}

fn message<T>(result: voltaic::Result<T>) -> String {
    match result {
        Ok(_) => panic!("no error"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn randperm_is_torchs() {
    for case in orders()["randperm"].as_array().unwrap() {
        let order = ffi::randperm(number(&case["len"]), case["seed"].as_u64().unwrap()).unwrap();
        assert_eq!(order, numbers(&case["order"]), "{case}");
    }
}

#[test]
fn distributed_sampler_gives_torchs_indices() {
    for case in orders()["distributed"].as_array().unwrap() {
        let (len, world_size) = (number(&case["len"]), number(&case["world_size"]));
        let drop_last = case["drop_last"].as_bool().unwrap();
        for rank in 0..world_size {
            let sampler = DistributedSampler::new(len, rank, world_size, case["shuffle"].as_bool().unwrap())
                .unwrap()
                .seed(case["seed"].as_u64().unwrap())
                .remainder(if drop_last { Remainder::Drop } else { Remainder::Repeat });
            let indices = sampler.indices(999, case["epoch"].as_u64().unwrap()).unwrap();
            assert_eq!(indices, numbers(&case["ranks"][rank]), "rank {rank} of {case}");
            assert_eq!(indices.len(), sampler.num_samples());
        }
    }
}

#[test]
fn a_sharded_loader_gives_the_batches_of_torchs_loader() {
    let mut loader = DataLoader::new(Indices::new(7)).batch_size(2).shuffle(true).build().unwrap();
    loader.set_seed(11);
    loader.shard(1, 2, Remainder::Repeat).unwrap();
    assert!(loader.is_distributed() && loader.is_shuffled());
    for (epoch, expected) in orders()["rank1_batches"].as_array().unwrap().iter().enumerate() {
        let batches = ids(&samples(&loader, EpochRange::epoch(epoch as u64)));
        let expected: Vec<Vec<i64>> = serde_json::from_value(expected.clone()).unwrap();
        assert_eq!(batches, expected);
    }
}

#[test]
fn random_split_gives_torchs_parts() {
    for case in orders()["splits"].as_array().unwrap() {
        let len = number(&case["len"]);
        let given = case["lengths"].as_array().unwrap();
        let lengths = if given[0].is_f64() {
            let fractions: Vec<f64> = given.iter().map(|fraction| fraction.as_f64().unwrap()).collect();
            fractional_lengths(len, &fractions).unwrap()
        } else {
            numbers(&case["lengths"])
        };
        let parts = random_split(Indices::new(len), &lengths, case["seed"].as_u64().unwrap()).unwrap();
        let expected = case["parts"].as_array().unwrap();
        assert_eq!(parts.len(), expected.len());
        for (part, expected) in parts.iter().zip(expected) {
            assert_eq!(part.indices(), numbers(expected), "{case}");
        }
    }
    assert!(message(random_split(Indices::new(10), &[7, 4], 0)).contains("add up to 11"));
    assert!(fractional_lengths(10, &[0.7, 0.7]).is_err());
    assert!(fractional_lengths(10, &[1.5, -0.5]).is_err());
}

#[test]
fn ranks_share_out_each_sample_once() {
    for len in 1..40 {
        for world_size in 1..9 {
            for shuffle in [false, true] {
                let parts = |remainder| -> Vec<Vec<usize>> {
                    (0..world_size)
                        .map(|rank| {
                            let sampler = DistributedSampler::new(len, rank, world_size, shuffle).unwrap();
                            let sampler = sampler.remainder(remainder);
                            let indices = sampler.indices(7, 3).unwrap();
                            assert_eq!(indices.len(), sampler.num_samples());
                            indices
                        })
                        .collect()
                };
                let mut exact = parts(Remainder::Exact).concat();
                exact.sort_unstable();
                assert_eq!(exact, (0..len).collect::<Vec<_>>(), "exact, {len} among {world_size}");

                let repeated = parts(Remainder::Repeat);
                assert!(repeated.iter().all(|part| part.len() == len.div_ceil(world_size)));
                let mut all = repeated.concat();
                all.sort_unstable();
                all.dedup();
                assert_eq!(all.len(), len, "repeat, {len} among {world_size}");

                let dropped = parts(Remainder::Drop);
                assert!(dropped.iter().all(|part| part.len() == len / world_size));
                let mut all = dropped.concat();
                let count = all.len();
                all.sort_unstable();
                all.dedup();
                assert_eq!(all.len(), count, "drop, {len} among {world_size}");
            }
        }
    }
}

#[test]
fn order_and_random_numbers_do_not_depend_on_num_workers() {
    for shuffle in [false, true] {
        let epoch = |num_workers, epoch| {
            let loader = DataLoader::new(Indices::new(53)).batch_size(4).shuffle(shuffle).seed(5);
            samples(&loader.num_workers(num_workers).build().unwrap(), EpochRange::epoch(epoch))
        };
        let (first, second) = (epoch(0, 0), epoch(0, 1));
        assert_eq!(first, epoch(0, 0));
        assert_ne!(first, second);
        assert_eq!(ids(&first) == ids(&second), !shuffle);
        for num_workers in [1, 3, 20] {
            assert_eq!(epoch(num_workers, 0), first, "{num_workers} workers");
            assert_eq!(epoch(num_workers, 1), second, "{num_workers} workers");
        }
    }
}

#[test]
fn workers_of_uneven_speed_deliver_in_order() {
    /// Samples of the first worker are there when those behind them are.
    #[derive(Default)]
    struct Uneven {
        begun: Mutex<HashSet<usize>>,
        more: Condvar,
    }
    impl Dataset for Uneven {
        type Batch = Tensor;
        fn len(&self) -> usize {
            24
        }
        fn batch(&self, indices: &[usize], _: &mut StdRng) -> anyhow::Result<Tensor> {
            let (index, patience) = (indices[0], Duration::from_secs(20));
            let mut begun = self.begun.lock().unwrap();
            begun.insert(index);
            self.more.notify_all();
            if index.is_multiple_of(3) {
                let is_first =
                    |begun: &mut HashSet<usize>| !(1..3).all(|more| begun.contains(&(index + more)));
                let (_begun, waited) = self.more.wait_timeout_while(begun, patience, is_first).unwrap();
                anyhow::ensure!(!waited.timed_out(), "the other workers do not go on");
            }
            Ok(Tensor::from(index as i64))
        }
    }
    let loader = DataLoader::new(Uneven::default()).num_workers(3).prefetch(1).build().unwrap();
    let order: Vec<i64> =
        loader.iter(EpochRange::default()).unwrap().map(|batch| batch.unwrap().int64_value(&[])).collect();
    assert_eq!(order, (0..24).collect::<Vec<_>>());
}

#[test]
fn a_range_is_a_piece_of_the_whole_epoch() {
    for num_workers in [0, 3] {
        let loader = DataLoader::new(Indices::new(30)).batch_size(4).shuffle(true).num_workers(num_workers);
        let loader = loader.build().unwrap();
        let whole = samples(&loader, EpochRange::epoch(2));
        assert_eq!(whole.len(), 8);
        for first in 0..=8 {
            let tail = samples(&loader, EpochRange::epoch(2).from_batch(first));
            assert_eq!(tail, whole[first..], "from batch {first}");
        }
        assert_eq!(samples(&loader, EpochRange::epoch(2).from_batch(3).take(2)), whole[3..5]);
        assert_eq!(samples(&loader, EpochRange::epoch(2).from_batch(6).take(100)), whole[6..]);
        assert_eq!(samples(&loader, EpochRange::epoch(2).take(0)), []);
        assert!(
            message(loader.iter(EpochRange::epoch(2).from_batch(9))).contains("beyond the epoch's 8 batches")
        );
    }
}

#[test]
fn skipped_batches_are_not_loaded() {
    let dataset = Indices::new(100);
    let loaded = dataset.loaded.clone();
    let loader = DataLoader::new(dataset).batch_size(10).build().unwrap();
    let mut iter = loader.iter(EpochRange::default().from_batch(7)).unwrap();
    assert_eq!(iter.next_batch_idx(), 7);
    drop(iter.next().unwrap().unwrap());
    assert_eq!(iter.next_batch_idx(), 8);
    assert_eq!(loaded.load(Ordering::SeqCst), 1);
}

#[test]
fn the_last_batch_is_short_or_dropped() {
    let build =
        |drop_last| DataLoader::new(Indices::new(10)).batch_size(4).drop_last(drop_last).build().unwrap();
    let sizes = |loader: &DataLoader<(Tensor, Tensor)>| -> Vec<usize> {
        loader
            .iter(EpochRange::default())
            .unwrap()
            .map(|batch| batch.unwrap().batch_size().unwrap())
            .collect()
    };
    let (kept, dropped) = (build(false), build(true));
    assert_eq!((kept.num_batches(), sizes(&kept)), (3, vec![4, 4, 2]));
    assert_eq!((dropped.num_batches(), sizes(&dropped)), (2, vec![4, 4]));
    let unbatched = DataLoader::new(Indices::new(3)).unbatched().build().unwrap();
    assert_eq!((unbatched.batch_size(), sizes(&unbatched)), (None, vec![1, 1, 1]));
}

#[test]
fn an_error_or_panic_names_the_batch_and_ends_the_iterator() {
    for num_workers in [0, 1, 3] {
        for (fails_at, panics_at, text) in
            [(Some(9), None, "sample 9 is rotten"), (None, Some(9), "panicked: sample 9 is cursed")]
        {
            let dataset = Indices { fails_at, panics_at, ..Indices::new(40) };
            let loader = DataLoader::new(dataset).batch_size(4).num_workers(num_workers).build().unwrap();
            let results = within("a failing epoch", move || {
                loader.iter(EpochRange::epoch(6)).unwrap().map(|batch| batch.map(|_| ())).collect::<Vec<_>>()
            });
            assert_eq!(results.len(), 3, "two good batches, then the error, then the end");
            let error = results[2].as_ref().unwrap_err().to_string();
            assert!(
                error.starts_with("batch 2 of epoch 6 of DataLoader (samples [8, 9, 10, 11])"),
                "{error}"
            );
            assert!(error.contains(text) && error.contains("; fix"), "{error}");
        }
    }
}

#[test]
fn dropping_the_iterator_stops_the_workers() {
    let dataset = Indices { pause: Duration::from_millis(5), ..Indices::new(10_000) };
    let loaded = dataset.loaded.clone();
    let loader = DataLoader::new(dataset).num_workers(3).prefetch(2).build().unwrap();
    within("dropping an iterator", move || {
        let mut iter = loader.iter(EpochRange::default()).unwrap();
        for _ in 0..4 {
            drop(iter.next().unwrap().unwrap());
        }
        drop(iter);
    });
    let after_drop = loaded.load(Ordering::SeqCst);
    assert!(
        after_drop <= 4 + 3 * (2 + 2),
        "loaded {after_drop} batches although at most 2 per worker are held"
    );
    assert_eq!(Arc::strong_count(&loaded), 1, "a worker still has the dataset after the drop");
}

#[test]
fn workers_hold_no_more_than_they_may() {
    let dataset = Indices::new(1000);
    let loaded = dataset.loaded.clone();
    let loader = DataLoader::new(dataset).num_workers(2).prefetch(3).build().unwrap();
    let mut iter = loader.iter(EpochRange::default()).unwrap();
    drop(iter.next().unwrap().unwrap());
    std::thread::sleep(Duration::from_millis(100));
    // what was taken, what the channels hold, and one batch per worker that waits for its place
    assert!(loaded.load(Ordering::SeqCst) <= 1 + 2 * (3 + 1));
}

#[test]
fn settings_that_cannot_be_used_are_reported_together() {
    let error = message(
        DataLoader::new(Indices::new(0))
            .batch_size(0)
            .shuffle(true)
            .sampler(SequentialSampler::new(0))
            .prefetch(2)
            .build(),
    );
    for part in
        ["DataLoader.dataset: ", "DataLoader.batch_size: 0", "DataLoader.shuffle: ", "DataLoader.prefetch: 2"]
    {
        assert!(error.contains(part), "{part} is missing in: {error}");
    }
    assert!(error.lines().count() == 4 && error.lines().all(|line| line.contains("; ")), "{error}");
    let loader = || DataLoader::new(Indices::new(5));
    assert!(message(loader().prefetch(0).num_workers(1).build()).contains("prefetch to 1 or more"));
    assert!(message(loader().batch_size(6).drop_last(true).build()).contains("5 samples do not fill"));
    assert!(message(loader().unbatched().drop_last(true).build()).contains("unbatched"));
    let mut small = loader().batch_size(3).drop_last(true).build().unwrap();
    assert!(message(small.shard(0, 2, Remainder::Drop)).contains("5 samples divided among 2 ranks"));
    assert_eq!(small.num_batches(), 1, "a refused shard leaves the loader as it was");
    assert!(message(small.shard(2, 2, Remainder::Repeat)).contains("rank 2 of world_size 2"));
}

#[test]
fn a_sampler_that_lies_is_found_out() {
    #[derive(Debug)]
    struct Lies(Vec<usize>);
    impl Sampler for Lies {
        fn num_samples(&self) -> usize {
            3
        }
        fn indices(&self, _: u64, _: u64) -> anyhow::Result<Vec<usize>> {
            Ok(self.0.clone())
        }
    }
    let error = |indices: &[usize]| {
        let loader = DataLoader::new(Indices::new(5)).sampler(Lies(indices.to_vec())).build().unwrap();
        message(loader.iter(EpochRange::default()))
    };
    assert!(error(&[0, 1]).contains("indices() gave 2"));
    assert!(error(&[0, 5, 1]).contains("names sample 5 of a dataset of 5"));
}

#[test]
fn ranks_draw_different_random_numbers() {
    let draws = |rank| {
        let mut loader = DataLoader::new(Indices::new(8)).batch_size(4).build().unwrap();
        loader.shard(rank, 2, Remainder::Repeat).unwrap();
        samples(&loader, EpochRange::default())[0].1.clone()
    };
    assert_eq!(draws(0), draws(0));
    assert_ne!(draws(0), draws(1));
}

#[test]
fn a_seed_given_by_the_user_wins() {
    let order = |loader: &DataLoader<_>| ids(&samples(loader, EpochRange::epoch(1))).concat();
    let mut own = DataLoader::new(Indices::new(20)).batch_size(20).shuffle(true).seed(3).build().unwrap();
    let mut open = DataLoader::new(Indices::new(20)).batch_size(20).shuffle(true).build().unwrap();
    own.set_seed(9);
    open.set_seed(9);
    let torch =
        |seed| ffi::randperm(20, seed).unwrap().into_iter().map(|index| index as i64).collect::<Vec<_>>();
    assert_eq!(order(&own), torch(4));
    assert_eq!(order(&open), torch(10));
    let sampler = RandomSampler::new(20).seed(100);
    let sampled = DataLoader::new(Indices::new(20)).batch_size(20).sampler(sampler).seed(3).build().unwrap();
    assert_eq!(order(&sampled), torch(101));
}

#[test]
fn weighted_sampler_follows_the_weights() {
    let sampler = WeightedRandomSampler::new([1.0, 0.0, 3.0], 40_000, true).unwrap();
    let drawn = sampler.indices(1, 0).unwrap();
    let share = |index| drawn.iter().filter(|&&drawn| drawn == index).count() as f64 / 40_000.0;
    assert_eq!(share(1), 0.0);
    // 5 standard deviations of a binomial share of 40,000 draws
    assert!((share(2) - 0.75).abs() < 5.0 * (0.75 * 0.25 / 40_000.0_f64).sqrt(), "{}", share(2));
    assert_ne!(drawn, sampler.indices(1, 1).unwrap());

    let all = WeightedRandomSampler::new([1.0, 0.0, 3.0, 2.0], 3, false).unwrap();
    let (mut first, epochs) = (0, 4000);
    for epoch in 0..epochs {
        let mut drawn = all.indices(0, epoch).unwrap();
        first += usize::from(drawn[0] == 2);
        drawn.sort_unstable();
        assert_eq!(drawn, [0, 2, 3]);
    }
    let share = first as f64 / epochs as f64;
    assert!((share - 0.5).abs() < 5.0 * (0.25 / epochs as f64).sqrt(), "index 2 came first in {share}");

    for (weights, num_samples, replacement, text) in [
        (vec![1.0, -1.0], 1, true, "weight 1 is -1"),
        (vec![f64::NAN], 1, true, "weight 0 is NaN"),
        (vec![0.0], 1, true, "none of the 1 weights"),
        (vec![1.0, 0.0], 2, false, "2 draws"),
        (vec![1.0], 0, true, "0 draws"),
    ] {
        assert_contains!(message(WeightedRandomSampler::new(weights, num_samples, replacement)), text);
    }
}

#[test]
fn tensor_datasets_gather_all_their_tensors() {
    let x = Tensor::arange(12, (Kind::Float, tch::Device::Cpu)).view([6, 2]);
    let y = Tensor::from_slice(&[0_i64, 1, 2, 3, 4, 5]);
    let dataset = Arc::new(TensorDataset::new((x.shallow_clone(), y.shallow_clone())).unwrap());
    let subset = Subset::new(dataset.clone(), vec![5, 0, 3]).unwrap();
    let loader = DataLoader::new(subset).batch_size(2).build().unwrap();
    let batches: Vec<(Tensor, Tensor)> =
        loader.iter(EpochRange::default()).unwrap().map(Result::unwrap).collect();
    assert_eq!(Vec::<i64>::try_from(&batches[0].1).unwrap(), [5, 0]);
    assert_eq!(Vec::<Vec<f32>>::try_from(&batches[0].0).unwrap(), [[10.0, 11.0], [0.0, 1.0]]);
    assert_eq!(Vec::<i64>::try_from(&batches[1].1).unwrap(), [3]);
    assert_eq!(batches[0].batch_size(), Some(2));

    assert_contains!(message(TensorDataset::new((x.shallow_clone(), y.narrow(0, 0, 5)))), "[[6, 2], [5]]");
    assert!(TensorDataset::new(Tensor::from(1.0)).is_err());
    assert!(TensorDataset::new(Vec::<Tensor>::new()).is_err());
    assert!(message(Subset::new(dataset, vec![0, 6])).contains("sample 6 of a dataset of 6"));
}

#[test]
fn loaders_make_a_data_module() {
    let loader = |len| DataLoader::new(Indices::new(len)).build().unwrap();
    let mut data =
        Loaders::new().train(loader(1)).val(loader(2)).val(loader(3)).test(loader(4)).predict(loader(5));
    let sizes = |loaders: Vec<DataLoader<_>>| loaders.iter().map(DataLoader::num_samples).collect::<Vec<_>>();
    assert_eq!(data.train_dataloader().unwrap().unwrap().num_samples(), 1);
    assert_eq!(sizes(data.val_dataloader().unwrap()), [2, 3]);
    assert_eq!(sizes(data.test_dataloader().unwrap()), [4]);
    assert_eq!(sizes(data.predict_dataloader().unwrap()), [5]);
    assert!(Loaders::<Tensor>::new().train_dataloader().unwrap().is_none());
}

#[test]
fn the_prelude_leaves_tch_its_methods() {
    use voltaic::prelude::*;
    let moved = Tensor::zeros([2], (Kind::Float, tch::Device::Cpu)).to_device(tch::Device::Cpu);
    assert_eq!(moved.move_to(Device::Cpu).unwrap().size(), [2]);
}
