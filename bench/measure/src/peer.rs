//! Sides of benchmarks in Python.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, str};

use anyhow::{Context, ensure};

/// What `torch_parts.py` prints for a part: a line for each thing that it measured, split into words.
///
/// # Errors
/// If there is no Python with the packages, or it fails.
pub fn torch_parts(part: &str) -> anyhow::Result<Vec<Vec<String>>> {
    let bench = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let python =
        env::var_os("VOLTAIC_BENCH_PYTHON").map_or_else(|| bench.join(".venv/bin/python"), PathBuf::from);
    let mut command = Command::new(&python);
    command.arg(bench.join("peers/torch_parts.py")).arg(part);
    if let Some(folder) = python.parent() {
        // DeepSpeed compiles its operators when they are first used, with the `ninja` that is beside Python
        let path = env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", folder.display()));
    }
    let output = command.output().with_context(|| {
        format!("run {}; run bench/setup.sh, or set VOLTAIC_BENCH_PYTHON", python.display())
    })?;
    let message = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "torch_parts.py {part}: {}: {message}", output.status);
    let text = str::from_utf8(&output.stdout).context("torch_parts.py prints what is not text")?;
    // libraries print lines of their own, which have no tabs
    let lines = text.lines().filter(|line| line.contains('\t'));
    Ok(lines.map(|line| line.split('\t').map(str::to_owned).collect()).collect())
}
