//! Parameters that take no part in a loss, against PyTorch's `DistributedDataParallel`.

use std::path::Path;

use tempfile::TempDir;
use voltaic::checkpoint::Checkpoint;
use voltaic::nn::{Forward, Linear, ModuleExt};
use voltaic::optim::AdamW;
use voltaic::strategy::DdpConfig;
use voltaic::{Kind, Module, Tensor};

use crate::compare::assert_within;
use crate::ddp::{builder, folder_of_parent, loaders, numbered, run_ranks_by_libtorch, weights};
use crate::probe::{own_process, plays, silent};

/// One layer that all losses need, two of which each loss takes one, and one that none takes.
#[derive(Module)]
struct Branches {
    always: Linear,
    left: Linear,
    right: Linear,
    never: Linear,
    /// Each rank takes its own branch always.
    #[module(skip)]
    is_static: bool,
}

impl Branches {
    fn new(is_static: bool) -> Self {
        let net = Self {
            always: Linear::new(5, 16).unwrap(),
            left: Linear::new(16, 3).unwrap(),
            right: Linear::new(16, 3).unwrap(),
            never: Linear::new(16, 3).unwrap(),
            is_static,
        };
        numbered(&net);
        net
    }
}

lightning_module!(Branches, (Tensor, Tensor), AdamW::new(0.01), |net, (x, y), ctx| {
    let (rank, batch) = (ctx.process_group().map_or(0, |group| group.rank()), ctx.batch_idx());
    let goes_left = match net.is_static {
        true => rank == 0,
        false => batch % 3 == 2 || (batch + rank).is_multiple_of(2), // in every third batch no rank goes right
    };
    let hidden = net.always.forward(x)?.relu();
    let out = if goes_left { net.left.forward(&hidden)? } else { net.right.forward(&hidden)? };
    Ok((out - y).square().mean(Kind::Float))
});

fn train(config: DdpConfig, folder: &Path) {
    let mut net = Branches::new(config.static_graph);
    let mut trainer = builder(folder).limit_val_batches(0).devices(2).strategy(config).build().unwrap();
    trainer.fit(&mut net, &mut loaders(None)).unwrap();
    if trainer.is_global_zero() {
        // never used, so without a gradient, as in PyTorch
        println!("\nnever has a gradient: {}", net.never.weight.grad().defined());
        Checkpoint { weights: net.state_dict(), ..Checkpoint::default() }
            .save(&folder.join("end.ckpt"))
            .unwrap();
    }
}

/// Weights that PyTorch's data parallel training left, sorted by name.
pub fn of_pytorch(name: &str) -> Vec<(String, Tensor)> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/ddp");
    let path = Path::new(folder).join(format!("{name}.safetensors"));
    let mut weights = voltaic::checkpoint::read_weights(&path).unwrap();
    weights.sort_by(|a, b| a.0.cmp(&b.0));
    weights
}

/// Compares with the recorded weights, which are up to 3e-8 other ones on another processor.
pub fn assert_recorded(own: &[(String, Tensor)], name: &str) {
    assert_within(name, own, &of_pytorch(name), 1e-6);
}

#[test]
fn branches_are_trained_as_by_pytorch() {
    let cases = [
        ("unused", DdpConfig { find_unused_parameters: true, ..DdpConfig::default() }),
        ("static_graph", DdpConfig { static_graph: true, ..DdpConfig::default() }),
    ];
    for (part, config) in &cases {
        if plays(part) {
            return train(config.clone(), &folder_of_parent());
        }
    }
    for (part, _) in cases {
        let folder = TempDir::new().unwrap();
        let text = run_ranks_by_libtorch(part, folder.path());
        assert!(text.contains("never has a gradient: false"), "{part}: {text}");
        assert_recorded(&weights(folder.path()), part);
    }
}

#[test]
fn without_the_option_unused_parameters_are_an_error_that_names_them() {
    if plays("refused") {
        let folder = folder_of_parent();
        let builder = silent().limit_val_batches(0).devices(2).default_root_dir(folder);
        let mut trainer = builder.build().unwrap();
        let error = trainer.fit(&mut Branches::new(true), &mut loaders(None)).unwrap_err();
        eprintln!("error: {error}");
        std::process::exit(1);
    }
    let folder = TempDir::new().unwrap();
    let output = own_process("refused").env(crate::ddp::FOLDER, folder.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let own = String::from_utf8_lossy(&output.stderr).into_owned();
    let other = std::fs::read_to_string(folder.path().join("rank_logs/rank_1.log")).unwrap();
    let text = format!("{own}{other}"); // both fail at once
    for expected in [
        "4 of the parameters took no part in the loss on rank 0: right.weight, right.bias, never.weight, never.bias; use \
         all of them, freeze them",
        "4 of the parameters took no part in the loss on rank 1: left.weight, left.bias, never.weight, never.bias; use",
    ] {
        assert!(text.contains(expected), "{text}");
    }
    assert!(text.contains("find_unused_parameters=true"), "{text}");
}
