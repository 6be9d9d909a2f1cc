//! Each recipe runs, through the real binary, for a batch of everything.

use std::path::Path;
use std::process::Command;

#[test]
fn each_recipe_runs_a_batch_of_everything() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut recipes: Vec<_> =
        std::fs::read_dir(root.join("recipes")).unwrap().map(|e| e.unwrap().path()).collect();
    recipes.sort();
    assert!(recipes.len() >= 7, "{recipes:?}");
    let folder = tempfile::tempdir().unwrap();
    for recipe in recipes {
        let output = Command::new(env!("CARGO_BIN_EXE_voltaic"))
            .args([
                "fit",
                "--trainer.fast_dev_run=true",
                "--data.batch_size=2",
                "--data.num_workers=0",
                "--config",
            ])
            .arg(&recipe)
            .current_dir(folder.path())
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {errors}", recipe.display());
        assert!(errors.contains("1/1"), "{}: {errors}", recipe.display());
    }
    let written = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let written: Vec<_> = written.collect();
    assert_eq!(written, ["rank_logs"], "a trial run writes nothing but what ranks print");
}
