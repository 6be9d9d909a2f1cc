//! Checkpoints for a Slurm job that is queued again: `hpc_ckpt_<n>.ckpt` in `default_root_dir`, as in Lightning.

use std::path::{Path, PathBuf};

use crate::distributed::SlurmJob;
use crate::error::Result;
use crate::trainer::config::values::CkptPath;
use crate::trainer::session::run::Run;

/// Where a fit of a job that Slurm has started again goes on: from what the job saved before. That is newer than any
/// `ckpt_path`.
///
/// # Collective
/// Rank 0 looks.
pub(crate) fn or_of_requeued_job(run: &Run, ckpt_path: Option<CkptPath>) -> Result<Option<CkptPath>> {
    let is_again = SlurmJob::of_process().is_some_and(|job| job.restarts > 0);
    if !is_again || run.facts.fast_dev_run || run.fits > 1 {
        return Ok(ckpt_path);
    }
    let found = saved(&run.facts.default_root_dir).into_iter().max_by_key(|(number, _)| *number);
    let Some(path) = run.world().of_rank_zero(found.map(|(_, path)| path))? else { return Ok(ckpt_path) };
    if run.world().is_global_zero() {
        match &ckpt_path {
            None => tracing::info!("this job was queued again: going on from {}", path.display()),
            Some(given) => tracing::warn!(
                "this job was queued again: going on from {} in place of ckpt_path={given:?}",
                path.display()
            ),
        }
    }
    Ok(Some(CkptPath::At(path)))
}

/// The file for the next checkpoint of this kind.
pub(crate) fn next_path(root: &Path) -> PathBuf {
    let last = saved(root).into_iter().map(|(number, _)| number).max().unwrap_or(0);
    root.join(format!("hpc_ckpt_{}.ckpt", last + 1))
}

fn saved(root: &Path) -> Vec<(u64, PathBuf)> {
    let files = std::fs::read_dir(root).into_iter().flatten().flatten();
    let numbered = |path: PathBuf| {
        let number = path.file_name()?.to_str()?.strip_prefix("hpc_ckpt_")?.strip_suffix(".ckpt")?.parse();
        Some((number.ok()?, path))
    };
    files.filter_map(|file| numbered(file.path())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_counted_as_numbers() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(next_path(root.path()), root.path().join("hpc_ckpt_1.ckpt"));
        for name in ["hpc_ckpt_9.ckpt", "hpc_ckpt_10.ckpt", "hpc_ckpt_x.ckpt", "hpc_ckpt_11.ckpt.tmp"] {
            std::fs::write(root.path().join(name), "").unwrap();
        }
        assert_eq!(next_path(root.path()), root.path().join("hpc_ckpt_11.ckpt"));
    }
}
