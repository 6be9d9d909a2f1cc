//! Modules whose weights do not fit on a device together.

use std::path::Path;

use voltaic::checkpoint::{read_weights, write_weights};
use voltaic::nn::{Callable, Linear, ModuleExt};
use voltaic::optim::Sgd;
use voltaic::{Device, Kind, Module};

use crate::models::{Batch, loaders, numbered};
use crate::ranks::{assert_same, folder_of_rank, output, silent, weights};
use crate::shards::sorted;
use crate::stage3::bare;

const WIDTH: i64 = 512;

/// Twenty-four layers of a MiB each.
#[derive(Module)]
struct Deep {
    first: Linear,
    layers: Vec<Linear>,
    last: Linear,
}

impl Deep {
    fn new() -> Self {
        let layers = (0..24).map(|_| Linear::new(WIDTH, WIDTH).unwrap()).collect();
        numbered(Self { first: Linear::new(5, WIDTH).unwrap(), layers, last: Linear::new(WIDTH, 3).unwrap() })
    }
}

lightning_module!(Deep, Batch, Sgd::new(0.05), |net, (x, y), _| {
    let mut hidden = net.first.call(x)?;
    for layer in &net.layers {
        hidden = &hidden + (layer.call(&hidden)? * 0.01).tanh();
    }
    Ok((net.last.call(&hidden)? - y).square().mean(Kind::Float))
});

fn train(ranks: usize, folder: &Path) {
    let is_divided = std::env::var("VOLTAIC_TEST_STRATEGY").unwrap() == "zero3";
    let builder = if is_divided { bare(ranks, folder) } else { silent(ranks, "ddp", folder) };
    let mut net = Deep::new();
    let mut trainer = builder.accelerator("hpu").max_epochs(1).build().unwrap();
    if let Err(error) = trainer.fit(&mut net, &mut loaders(16)) {
        eprintln!("\nerror: {error}");
        std::process::exit(1);
    }
    if trainer.is_global_zero() {
        write_weights(&weights(&net), &folder.join(if is_divided { "zero3" } else { "ddp" })).unwrap();
    }
    if !is_divided {
        return;
    }
    // it comes back whole, where there is room
    for (name, parameter) in net.named_parameters() {
        assert!(!parameter.is_sharded() && !parameter.is_kept(), "{name}");
        assert_eq!(Device::of(parameter.leaf()).unwrap(), Device::Cpu, "{name}");
    }
}

#[test]
fn weights_that_do_not_fit_on_a_card_together_are_trained() {
    const TEST: &str = "beyond::weights_that_do_not_fit_on_a_card_together_are_trained";
    if let Some(folder) = folder_of_rank() {
        return train(4, &folder);
    }
    let folder = tempfile::tempdir().unwrap();
    let run = |strategy: &str, memory: &str| {
        let variables = [("VOLTAIC_TEST_STRATEGY", strategy), ("VOLTAIC_HPU_MEMORY", memory)];
        let output = output(TEST, 4, folder.path(), &variables);
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (is_done, text) = run("ddp", "20MiB");
    assert!(!is_done && text.contains("out of memory"), "{text}");
    for (strategy, memory) in [("zero3", "20MiB"), ("ddp", "1GiB")] {
        let (is_done, text) = run(strategy, memory);
        assert!(is_done, "{text}");
    }
    let read = |name: &str| read_weights(&folder.path().join(name)).unwrap();
    let before: std::collections::HashMap<_, _> = weights(&Deep::new()).into_iter().collect();
    let (own, expected) = (sorted(read("zero3")), sorted(read("ddp")));
    assert_same("beyond", &own, &expected);
    assert!(own.iter().all(|(name, weight)| !weight.equal(&before[name])), "all are trained");
}
