//! What the compiler says where a program has the wrong type.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The newest library of voltaic among those that this test is linked with.
fn library(folder: &Path) -> PathBuf {
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let is_library = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap();
        name.starts_with("libvoltaic-") && name.ends_with(".rlib")
    };
    files.filter(is_library).max_by_key(|path| path.metadata().unwrap().modified().unwrap()).unwrap()
}

/// What rustc says of a library that is `code`; nothing if there is no mistake.
fn errors_of(code: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("program.rs");
    fs::write(&file, format!("use voltaic::prelude::*;\n{code}")).unwrap();
    let own = std::env::current_exe().unwrap();
    let dependencies = own.parent().unwrap();
    let output = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
        .args(["--edition=2024", "--crate-type=lib", "--emit=metadata", "--color=never", "--cap-lints=allow"])
        .arg(format!("--extern=voltaic={}", library(dependencies).display()))
        .arg(format!("-Ldependency={}", dependencies.display()))
        .arg("--out-dir")
        .args([folder.path(), &file])
        .output()
        .unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.success(), errors.is_empty(), "{errors}");
    errors
}

fn data_set_of(field: &str) -> String {
    format!(
        "struct Rows {{ rows: {field} }}
         impl Dataset for Rows {{
             type Batch = Tensor;
             fn len(&self) -> usize {{ 1 }}
             fn batch(&self, _: &[usize], _: &mut StdRng) -> Result<Tensor> {{ Ok(Tensor::from(1)) }}
         }}"
    )
}

/// rustc alone names `*mut C_tensor`, which is no part of the program.
#[test]
fn a_data_set_with_a_tensor_is_told_of_shared_tensor() {
    assert_eq!(errors_of(&data_set_of("Vec<SharedTensor>")), "");
    for field in ["Tensor", "Vec<Tensor>", "(String, Option<Tensor>)", "std::rc::Rc<u8>"] {
        let errors = errors_of(&data_set_of(field));
        let expected = "error[E0277]: the threads of a loader cannot share `Rows`\n";
        assert!(errors.starts_with(expected), "{field}: {errors}");
        assert_contains!(&errors, "a field that holds a `Tensor` is a `SharedTensor`");
    }
}

#[test]
fn other_types_are_told_what_to_write() {
    for (code, hint) in [
        (
            "fn f(x: Tensor) { let _ = DataLoader::new(x); }",
            "tensors become one by `TensorDataset::new((x, y))?`",
        ),
        (
            "#[derive(Module)] struct Net { x: Tensor }",
            "a `Tensor` is either trained (`Parameter::new(tensor)`)",
        ),
        (
            "fn f(settings: EarlyStoppingConfig) { let _ = Trainer::builder().callback(settings); }",
            "settings become one by `new`",
        ),
    ] {
        assert_contains!(errors_of(code), hint);
    }
}
