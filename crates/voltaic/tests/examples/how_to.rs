//! The programs of the pages that say how to do something.

use std::fs;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;
use voltaic::prelude::*;

use crate::{binary_of, run};

/// Pages with their programs, and the most lines that each may take, without blank ones and comments.
const PROGRAMS: [(&str, &str, usize); 4] = [
    ("own_data", "own_data", 80),
    ("own_data", "csv_regression", 120),
    ("several_optimizers", "several_optimizers", 60),
    ("fine_tuning", "fine_tuning", 75),
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn page(name: &str) -> String {
    fs::read_to_string(root().join(format!("../../docs/{name}.md"))).unwrap()
}

#[test]
fn pages_print_their_programs_whole() {
    for (name, program, limit) in PROGRAMS {
        let text = fs::read_to_string(root().join(format!("examples/{program}.rs"))).unwrap();
        let (_, code) = text.split_once("\n\n").unwrap();
        assert!(
            page(name).contains(&format!("```rust\n{code}```\n")),
            "docs/{name}.md prints another {program}"
        );
        let is_code = |line: &&str| !line.trim().is_empty() && !line.trim().starts_with("//");
        let lines = text.lines().filter(is_code).count();
        assert!(lines <= limit, "{program} takes {lines} lines, more than {limit}");
    }
}

/// What else the pages print stands in a test below.
#[test]
fn parts_of_programs_are_compiled() {
    let whole = |text: &str| text.lines().map(str::trim).collect::<Vec<_>>().join("\n");
    let here = whole(include_str!("how_to.rs"));
    let mut parts = 0;
    for name in ["own_data", "several_optimizers", "fine_tuning"] {
        let page = page(name);
        let blocks = page.split("```rust\n").skip(1).map(|rest| rest.split("```").next().unwrap());
        for block in blocks.filter(|block| !block.contains("fn main()")) {
            assert!(here.contains(&whole(block)), "docs/{name}.md prints what no test runs:\n{block}");
            parts += 1;
        }
    }
    assert!(parts >= 3, "{parts}");
}

#[derive(Module)]
struct Net {
    first: Linear,
    head: Linear,
}

impl Net {
    fn new() -> Result<Self> {
        Ok(Self { first: Linear::new(3, 3)?, head: Linear::new(3, 1)? })
    }
}

fn ones() -> (Tensor, Tensor) {
    let of = |columns| Tensor::ones([100, columns], (Kind::Float, voltaic::tch::Device::Cpu));
    (of(3), of(1))
}

fn trainer(folder: &TempDir) -> Result<Trainer> {
    Ok(Trainer::builder().max_epochs(2).default_root_dir(folder.path()).build()?)
}

impl LightningModule for Net {
    type Batch = (Tensor, Tensor);

    fn training_step(&self, (x, y): &Self::Batch, _ctx: &mut StepContext) -> Result<Tensor> {
        Ok(mse_loss(&self.head.forward(&self.first.forward(x)?)?, y)?)
    }

    fn configure_optimizers(&self) -> Result<Optimizers> {
        Ok(Sgd::new(0.1).into())
    }
}

#[test]
fn tensors_are_a_data_set() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (mut trainer, mut net) = (trainer(&folder)?, Net::new()?);
    let (x, y) = ones();
    let dataset = TensorDataset::new((x, y))?; // [samples, ..] each
    let loader = DataLoader::new(dataset).batch_size(64).shuffle(true).build()?;
    trainer.fit(&mut net, &mut Loaders::new().train(loader))?;
    assert_eq!(trainer.global_step(), 2 * 2);
    Ok(())
}

#[test]
fn weights_of_a_file_with_a_frozen_layer() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = &folder.path().join("theirs.safetensors");
    let theirs = Net::new()?.state_dict();
    Tensor::write_safetensors(&theirs, file)?;
    let (mut trainer, mut net) = (trainer(&folder)?, Net::new()?);
    let loader = DataLoader::new(TensorDataset::new(ones())?).batch_size(64).build()?;
    let mut data = Loaders::new().train(loader);
    let before = net.head.weight.leaf().copy();
    let mut weights = Checkpoint::load(file)?.weights;
    weights.retain(|(name, _)| !name.starts_with("head.")); // of another shape
    net.load_state_dict(&weights, false)?;
    net.first.set_requires_grad(false);
    trainer.fit(&mut net, &mut data)?;
    assert_eq!(net.first.weight.leaf(), &theirs[0].1, "as in the file");
    assert_ne!(net.head.weight.leaf(), &before, "trained");
    Ok(())
}

#[test]
fn names_of_weights_are_changed() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = &folder.path().join("theirs.safetensors");
    let named = |(name, tensor)| (format!("model.{name}"), tensor);
    let theirs: Vec<_> = Net::new()?.state_dict().into_iter().map(named).collect();
    Tensor::write_safetensors(&theirs, file)?;
    let net = Net::new()?;
    let mut weights = Checkpoint::load(file)?.weights;
    for (name, _) in &mut weights {
        if let Some(rest) = name.strip_prefix("model.") {
            *name = rest.to_owned();
        }
    }
    net.load_state_dict(&weights, true)?;
    assert_eq!(net.first.weight.leaf(), &theirs[0].1);
    Ok(())
}

#[test]
fn csv_regression() {
    let ran = run("csv_regression", "");
    assert!(ran.number("val_loss") < 0.01, "of rents that vary by 0.4: {}", ran.out);
    let flats = fs::read_to_string(ran.folder.path().join("flats.csv")).unwrap();
    let damaged = |row: &str| {
        let folder = tempfile::tempdir().unwrap();
        let lines = flats.lines().take(6).chain([row]).collect::<Vec<_>>().join("\n");
        fs::write(folder.path().join("flats.csv"), lines).unwrap();
        let mut command = Command::new(binary_of("csv_regression"));
        let output = command.current_dir(folder.path()).env("RUST_BACKTRACE", "0").output().unwrap();
        assert!(!output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let text = damaged("70,n/a,4,0.9");
    let printed = "Error: flats.csv:7: `n/a` is no number\n\nCaused by:\n    invalid float literal\n";
    assert!(text.contains(printed) && page("own_data").contains(printed), "{text}");
    let text = damaged("70,4,0.9");
    assert!(text.contains("Error: flats.csv:7: 3 fields, not 4"), "{text}");
}

#[test]
fn own_data() {
    let ran = run("own_data", "");
    assert!(ran.number("val_acc") > 0.7, "of two classes: {}", ran.out);
}

#[test]
fn several_optimizers() {
    let ran = run("several_optimizers", "");
    ran.assert_fell(0, "distance", 0.8);
    assert_eq!(ran.checkpoint(0).meta.global_step, 2 * 3 * 169, "both optimizers, at each batch");
}

#[test]
fn fine_tuning() {
    let ran = run("fine_tuning", "");
    assert!(ran.out.contains("new: head.weight, head.bias; not used: \n"), "{}", ran.out);
    let file = Checkpoint::load(ran.folder.path().join("pretrained.safetensors")).unwrap().weights;
    let tuned = ran.checkpoint(1).weights;
    let same = |name: &str| {
        let of = |weights: &[(String, voltaic::Tensor)]| {
            weights.iter().find(|(known, _)| known == name).unwrap().1.shallow_clone()
        };
        of(&file) == of(&tuned)
    };
    assert!(same("first.weight") && same("first.bias"), "the first layer is frozen");
    assert!(!same("second.weight") && !same("second.bias"), "the second is trained");
    for (group, lr) in [("body", 1e-4), ("head", 1e-3)] {
        let rates = ran.column(1, &format!("lr-AdamW/{group}"));
        assert!(!rates.is_empty() && rates.iter().all(|rate| *rate == lr), "{group}: {rates:?}");
    }
    let accuracies = ran.column(1, "train_acc");
    assert!(accuracies.last().is_some_and(|accuracy| *accuracy > 0.6), "of ten classes: {accuracies:?}");
}
