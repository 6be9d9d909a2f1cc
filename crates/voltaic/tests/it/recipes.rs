//! Each recipe runs, through the real binary, for a batch of everything.

use std::path::Path;
use std::process::Command;

/// As LightningCLI 2.6.6 prints them, with all of its arguments (tests/fixtures/lightning_cli/record.py).
#[test]
fn recipes_of_lightning_run_as_they_are() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let fixtures = std::fs::read_dir(root.join("tests/fixtures/lightning_cli")).unwrap();
    let is_recipe = |path: &std::path::PathBuf| path.extension().is_some_and(|extension| extension == "yaml");
    let recipes: Vec<_> = fixtures.map(|entry| entry.unwrap().path()).filter(is_recipe).collect();
    assert_eq!(recipes.len(), 9);
    let folder = tempfile::tempdir().unwrap();
    let run = |verb: &str, recipe: &Path, more: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_voltaic"))
            .args([verb, "--trainer.fast_dev_run=true", "--trainer.accelerator=cpu", "--data.batch_size=2"])
            .arg(format!("--data.data_dir={}", root.join("../../data/digits").display()))
            .arg("--config")
            .arg(recipe)
            .args(more)
            .current_dir(folder.path())
            .output()
            .unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    for recipe in &recipes {
        let name = recipe.file_stem().unwrap().to_str().unwrap();
        let verb = name.split('_').next().unwrap();
        let (is_done, errors) = run(verb, recipe, &[]);
        assert!(is_done, "{name}: {errors}");
    }
    let test = recipes.iter().find(|recipe| recipe.ends_with("test.yaml")).unwrap();
    for (argument, expected) in [
        ("--weights_only=true", "weights_only has no effect: files are read as data"),
        ("--verbose=false", "verbose"),
        ("--return_predictions=false", "return_predictions"),
    ] {
        let (is_done, errors) = run("test", test, &[argument]);
        let is_neutral = argument.starts_with("--weights_only");
        assert!(is_done == is_neutral && errors.contains(expected), "{argument}: {errors}");
    }
}

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
