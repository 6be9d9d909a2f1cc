//! The programs of the pages that say how to do something.

use std::fs;
use std::path::Path;

use voltaic::checkpoint::Checkpoint;

use crate::run;

/// Each with the most lines that it may take, without blank ones and comments.
const PROGRAMS: [(&str, usize); 3] = [("own_data", 80), ("several_optimizers", 60), ("fine_tuning", 60)];

#[test]
fn pages_print_their_programs_whole() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (name, limit) in PROGRAMS {
        let program = fs::read_to_string(root.join(format!("examples/{name}.rs"))).unwrap();
        let page = fs::read_to_string(root.join(format!("../../docs/{name}.md"))).unwrap();
        let (_, code) = program.split_once("\n\n").unwrap();
        assert!(page.contains(&format!("```rust\n{code}```\n")), "docs/{name}.md prints another program");
        let is_code = |line: &&str| !line.trim().is_empty() && !line.trim().starts_with("//");
        let lines = program.lines().filter(is_code).count();
        assert!(lines <= limit, "{name} takes {lines} lines, more than {limit}");
    }
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
    assert!(accuracies.last().is_some_and(|accuracy| *accuracy > 0.7), "of ten classes: {accuracies:?}");
}
