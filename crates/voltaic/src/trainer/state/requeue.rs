//! Checkpoints for a Slurm job that is queued again: `hpc_ckpt_<n>.ckpt` in `default_root_dir`, as in Lightning.

use std::path::{Path, PathBuf};

use crate::checkpoint::{Claim, peek_whole};
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
    let job = SlurmJob::of_process().filter(|job| job.restarts > 0);
    let Some(job) = job.filter(|_| !run.facts.fast_dev_run && run.fits <= 1) else { return Ok(ckpt_path) };
    let looks = run.world().is_global_zero();
    let found = looks.then(|| newest_of_slurm(&run.facts.default_root_dir, Some(&job.id))).flatten();
    let Some(path) = run.world().of_rank_zero(found)? else { return Ok(ckpt_path) };
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

/// The newest of these files, of a job if one is named. A damaged one is passed over, with a warning.
pub(crate) fn newest_of_slurm(root: &Path, job: Option<&str>) -> Option<PathBuf> {
    let mut saved = saved(root);
    saved.sort();
    let mut serving = saved.into_iter().rev().map(|(_, path)| path).filter(|path| match peek_whole(path) {
        Ok(beginning) => job.is_none_or(|job| {
            beginning.training.is_some_and(|training| training["slurm_job"].as_str() == Some(job))
        }),
        Err(error) => {
            tracing::warn!("{error}; passed over");
            false
        }
    });
    serving.next()
}

/// The file for the next checkpoint of this kind, which no other job takes while the claim lives.
pub(crate) fn next_path(root: &Path) -> (PathBuf, Option<Claim>) {
    let last = saved(root).into_iter().map(|(number, _)| number).max().unwrap_or(0);
    let path = |number: u64| root.join(format!("hpc_ckpt_{number}.ckpt"));
    let claimed = (last + 1..last + 100).find_map(|number| Some((path(number), Claim::new(&path(number))?)));
    claimed.map_or_else(|| (path(last + 1), None), |(path, claim)| (path, Some(claim)))
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
        assert_eq!(next_path(root.path()).0, root.path().join("hpc_ckpt_1.ckpt"));
        for name in ["hpc_ckpt_9.ckpt", "hpc_ckpt_10.ckpt", "hpc_ckpt_x.ckpt", "hpc_ckpt_11.ckpt.tmp"] {
            std::fs::write(root.path().join(name), "").unwrap();
        }
        let (path, _claim) = next_path(root.path());
        assert_eq!(path, root.path().join("hpc_ckpt_11.ckpt"));
        assert_eq!(next_path(root.path()).0, root.path().join("hpc_ckpt_12.ckpt"), "of another job");
    }
}
