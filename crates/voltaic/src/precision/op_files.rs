//! Lists of operators in files, and the variables that name such files.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use crate::accelerator::RuntimeFlags;
use crate::config::{nearest, read_text_file};
use crate::error::{ConfigError, Error, Result};
use crate::ffi;

/// libtorch has some thousand operators.
const MAX_FILE: u64 = 1 << 20;

/// A file with operators, and what names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct OpFile {
    pub path: PathBuf,
    /// The variable or the plugin's argument.
    pub key: String,
}

impl OpFile {
    pub fn new(key: impl Into<String>, path: impl AsRef<Path>) -> Self {
        Self { path: path.as_ref().to_path_buf(), key: key.into() }
    }

    /// The names in the file; none if it cannot be read and that is to be ignored.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn read(&self, ignore_unreadable: bool) -> Result<Option<Vec<String>>> {
        let path = self.path.display();
        let text = match read_text_file(&self.path, MAX_FILE) {
            Ok(text) => text,
            Err(error) if ignore_unreadable => {
                tracing::warn!(
                    "the list of operators {path} cannot be read ({error}); the default list is used"
                );
                return Ok(None);
            }
            Err(error) => {
                let error = Error::io("read the list of operators", &self.path, error);
                return Err(ConfigError::at(&self.key, error.into_problem("check the path")).into());
            }
        };
        let mut names = Vec::new();
        let text = text.strip_prefix('\u{feff}').unwrap_or(&text); // a mark that some editors write
        for (number, line) in text.lines().enumerate() {
            let name = line.trim();
            if name.is_empty() {
                continue;
            }
            let name = if name == "cross_entropy" { "cross_entropy_loss" } else { name }; // Python's name of it
            if let Some(remark) = remark(name) {
                tracing::warn!("{path}:{}: {remark}", number + 1);
            }
            names.push(name.to_owned());
        }
        if names.is_empty() {
            tracing::warn!("{path} names no operator; the list that it replaces is empty now");
        }
        Ok(Some(names))
    }
}

/// What is to be said of a name in a list, if anything.
fn remark(name: &str) -> Option<String> {
    static KNOWN: LazyLock<BTreeSet<String>> = LazyLock::new(|| ffi::operator_names().unwrap_or_default());
    if !KNOWN.contains(name) {
        // `aten::add.Tensor` is how libtorch writes it in full
        let bare = name.strip_prefix("aten::").unwrap_or(name);
        let bare = bare.split('.').next().unwrap_or(bare);
        let meant = nearest(bare, KNOWN.iter().map(String::as_str));
        let meant = meant.map_or_else(String::new, |meant| format!("; did you mean {meant}"));
        return Some(format!("libtorch has no operator `{name}`{meant}"));
    }
    let is_in_place = name.ends_with('_') && !name.ends_with("__");
    is_in_place.then(|| format!("`{name}` writes to its argument, so that its arguments are not cast"))
}

/// The files that the environment names, for the lower dtype and for float32.
///
/// # Errors
/// If a variable for HPUs is invalid.
pub(super) fn files_of_env() -> Result<[Option<OpFile>; 2]> {
    let flags = RuntimeFlags::from_env()?;
    let set =
        |name: &str| flags.text(name).filter(|path| !path.is_empty()).map(|path| OpFile::new(name, path));
    let file = |name: &str, old: &str| {
        set(name).or_else(|| {
            let file = set(old)?;
            tracing::warn!("{old} is deprecated; use {name}");
            Some(file)
        })
    };
    Ok([
        file("PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST", "LOWER_LIST"),
        file("PT_HPU_AUTOCAST_FP32_OPS_LIST", "FP32_LIST"),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_have_no_effect_are_remarked_upon() {
        for name in ["mm", "_softmax", "__and__", "cross_entropy_loss"] {
            assert_eq!(remark(name), None);
        }
        for (name, expected) in [
            ("admm", "no operator `admm`; did you mean addmm"),
            ("aten::mm", "`aten::mm`; did you mean mm"),
            ("add.Tensor", "`add.Tensor`; did you mean add"),
            ("# a comment", "no operator `# a comment`"),
            ("add_", "`add_` writes to its argument"),
        ] {
            let remark = remark(name).unwrap();
            assert!(remark.contains(expected), "{remark}");
        }
    }
}
