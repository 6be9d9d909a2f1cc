//! Runs that are started again: by the launcher after a failure, which reads notes on the newest checkpoint, and by Slurm, from
//! `hpc_ckpt_<n>.ckpt` in `default_root_dir`, as in Lightning.

use std::io::Write;
use std::path::{Path, PathBuf};

use crate::checkpoint::{Claim, peek_whole, write_atomically};
use crate::distributed::SlurmJob;
use crate::error::{Error, Result};
use crate::trainer::config::values::CkptPath;
use crate::trainer::session::session::Run;

/// Where the newest checkpoint of a run is, for ranks that are started again: two paths, one a line, the newest first.
const LAST_CHECKPOINT: &str = "last_checkpoint";

impl Run {
    /// The checkpoint to resume, for ranks that were started again after a failure; else `ckpt_path`.
    ///
    /// # Collective
    /// All ranks must call it. Rank 0 decides: a rank that does not find the file says so when it reads it.
    pub(crate) fn after_restart(&mut self, ckpt_path: Option<CkptPath>) -> Result<Option<CkptPath>> {
        self.fits += 1;
        let world = self.world();
        let Some(store) = world.store() else { return Ok(ckpt_path) };
        if world.attempt == 0 {
            return self.forget_note().map(|()| ckpt_path);
        }
        let mut known = store.get(&self.note_key())?;
        if let (None, Some(path)) = (&known, self.note_file()) {
            known = std::fs::read_to_string(path).ok();
        }
        let found = known.as_deref().into_iter().flat_map(str::lines).find(|path| Path::new(path).exists());
        match world.of_rank_zero(found.map(str::to_owned))? {
            Some(path) => Ok(Some(CkptPath::At(PathBuf::from(path)))),
            None => {
                if world.is_global_zero() {
                    tracing::info!(
                        "no checkpoint is known from before the failure: starting from the beginning"
                    );
                }
                Ok(ckpt_path)
            }
        }
    }

    /// Notes a checkpoint that a run can resume.
    pub(crate) fn note_checkpoint(&self, path: &Path) -> Result<()> {
        let Some(store) = self.world().store() else { return Ok(()) };
        let absolute = std::path::absolute(path).unwrap_or_else(|_| PathBuf::from(path));
        let before = store.get(&self.note_key())?.unwrap_or_default();
        let before = before.lines().next().unwrap_or_default();
        let note = format!("{}\n{before}", absolute.display());
        store.set(&self.note_key(), &note)?;
        match self.note_file() {
            Some(path) => write_atomically(&path, |file| file.write_all(note.as_bytes())),
            None => Ok(()),
        }
    }

    /// Called when a fit is over: it need not be resumed.
    pub(crate) fn forget_note(&self) -> Result<()> {
        let Some(path) = self.note_file() else { return Ok(()) };
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::io("remove", path, error))
            }
            _ => Ok(()),
        }
    }

    /// A fit that is started again must not take the checkpoint of a later one of the same trainer.
    fn note_key(&self) -> String {
        format!("{LAST_CHECKPOINT}/{}", self.fits)
    }

    /// Where rank 0 leaves its note if it would be lost in the store.
    fn note_file(&self) -> Option<PathBuf> {
        let run = self.world().hosted_elastic_run()?;
        let run: String = run.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let name = format!(".{LAST_CHECKPOINT}.{run}.{}", self.fits);
        Some(self.facts.default_root_dir.join(name))
    }
}

/// Where a fit of a job that Slurm has started again resumes: from what the job saved before. That is newer than any
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
            None => tracing::info!("this job was queued again: resuming {}", path.display()),
            Some(given) => tracing::warn!(
                "this job was queued again: resuming {} in place of ckpt_path={given:?}",
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
    let mut serving =
        saved.into_iter().rev().map(|(_, path)| path).filter(|path| match peek_whole(path, (0, 1)) {
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
