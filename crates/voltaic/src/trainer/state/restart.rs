//! Notes on checkpoints for ranks that are started again after a failure.

use std::io::Write;
use std::path::{Path, PathBuf};

use crate::checkpoint::write_atomically;
use crate::error::{Error, Result};
use crate::trainer::config::values::CkptPath;
use crate::trainer::session::run::Run;

/// Where the newest checkpoint of a run is, for ranks that are started again: two paths, one a line, the newest first.
const LAST_CHECKPOINT: &str = "last_checkpoint";

impl Run {
    /// The checkpoint to go on from, for ranks that were started again after a failure; else `ckpt_path`.
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

    /// Notes a checkpoint that a run can go on from.
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

    /// Called when a fit is over: nobody has to go on with it.
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
        let run = self.world().forgetful_run()?;
        let run: String = run.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let name = format!(".{LAST_CHECKPOINT}.{run}.{}", self.fits);
        Some(self.facts.default_root_dir.join(name))
    }
}
