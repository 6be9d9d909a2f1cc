//! Names of checkpoints that are taken before there are files.

use std::path::{Path, PathBuf};

use crate::checkpoint::Claim;

/// Names that a run has taken, but has no files of yet.
#[derive(Debug, Default)]
pub(super) struct Claims(Vec<Claim>);

impl Claims {
    /// The first of these paths that no file and no other run has, or that has the file to be replaced. On the rank that writes, it
    /// is taken until the file is there.
    pub fn take_free(
        &mut self,
        writes: bool,
        paths: impl Iterator<Item = PathBuf>,
        replaced: Option<&Path>,
    ) -> Option<PathBuf> {
        self.release_written();
        for path in paths {
            if Some(path.as_path()) == replaced {
                return Some(path);
            }
            if !writes {
                match path.symlink_metadata() {
                    Ok(_) => continue,
                    Err(_) => return Some(path),
                }
            }
            if let Some(claim) = Claim::new(&path) {
                self.0.push(claim);
                return Some(path);
            }
        }
        None
    }

    /// Releases the names of files that exist, which keep their names themselves.
    pub fn release_written(&mut self) {
        self.0.retain(Claim::is_open);
    }

    /// Releases all claims: none of them will be written any more.
    pub fn release_all(&mut self) {
        self.0.clear();
    }
}
