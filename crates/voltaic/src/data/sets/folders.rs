//! Where ready-made data sets are looked for.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::Result;
use crate::error::DataError;

/// Environment variable that names a folder laid out like the repository's `data/`.
const VARIABLE: &str = "VOLTAIC_DATA_DIR";

/// Folders laid out like the repository's `data/`, first choice first: that of `VOLTAIC_DATA_DIR`, `data` of the current
/// folder, and that of the source this crate was built from.
///
/// # Errors
/// [`DataError::Missing`] if the folder in `VOLTAIC_DATA_DIR` does not exist. The next place is not tried then: it could hold other
/// data than the user chose.
pub(super) fn data_folders() -> Result<Vec<PathBuf>> {
    folders_with(std::env::var_os(VARIABLE))
}

fn folders_with(variable: Option<OsString>) -> Result<Vec<PathBuf>> {
    let mut folders = Vec::new();
    if let Some(folder) = variable.filter(|folder| !folder.is_empty()).map(PathBuf::from) {
        if !folder.is_dir() {
            let remedy = format!("{VARIABLE} names it; create it, or correct or unset {VARIABLE}");
            return Err(DataError::Missing { path: folder, remedy: remedy.into() }.into());
        }
        folders.push(folder);
    }
    folders.push(PathBuf::from("data"));
    folders.push(Path::new(env!("CARGO_MANIFEST_DIR")).join("data"));
    Ok(folders)
}

/// The first of `candidates` that `holds` accepts.
///
/// # Errors
/// [`DataError::NotFound`], listing the candidates.
pub(super) fn first(
    what: &str,
    candidates: Vec<PathBuf>,
    holds: impl Fn(&Path) -> bool,
    remedy: &'static str,
) -> Result<PathBuf> {
    match candidates.iter().find(|path| holds(path)) {
        // `..` of the crate's source would make messages hard to read
        Some(found) => Ok(if found.is_absolute() {
            found.canonicalize().unwrap_or(found.clone())
        } else {
            found.clone()
        }),
        None => {
            let (what, remedy) = (what.to_owned(), remedy.into());
            Err(DataError::NotFound { what, searched: candidates, remedy }.into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_comes_first_and_must_name_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let folders = folders_with(Some(folder.path().into())).unwrap();
        assert_eq!(folders[0], folder.path());
        assert_eq!(folders.len(), 3);
        assert_eq!(folders_with(None).unwrap().len(), 2);
        assert_eq!(folders_with(Some(OsString::new())).unwrap().len(), 2);
        let error = folders_with(Some(folder.path().join("no").into())).unwrap_err().to_string();
        assert!(error.contains("is missing; VOLTAIC_DATA_DIR names it"), "{error}");
    }

    #[test]
    fn a_failed_search_lists_all_places() {
        let error =
            first("digits", vec!["a/b".into(), "c".into()], |_| false, "run x").unwrap_err().to_string();
        assert_eq!(error, "digits was found in none of a/b, c; run x");
    }
}
