//! README's model, by its text.

use std::path::Path;

use crate::run;

#[test]
fn it_is_what_readme_prints() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = std::fs::read_to_string(root.join("../../README.md")).unwrap();
    let printed = readme.split_once("```no_run\n").unwrap().1.split_once("```").unwrap().0;
    let program = std::fs::read_to_string(root.join("examples/getting_started.rs")).unwrap();
    let (_, code) = program.split_once("\n\n").unwrap();
    assert_eq!(code, printed);
}

/// The first page of rustdoc and of a registry.
#[test]
fn the_crate_has_the_same_readme() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let [own, whole] = ["README.md", "../../README.md"].map(|file| std::fs::read_to_string(root.join(file)));
    assert_eq!(own.unwrap(), whole.unwrap());
}

#[test]
fn it_trains() {
    let ran = run("getting_started", "");
    ran.assert_fell(0, "train_loss", 0.7);
    assert_eq!(ran.checkpoint(0).meta.global_step, 3 * 169);
}
