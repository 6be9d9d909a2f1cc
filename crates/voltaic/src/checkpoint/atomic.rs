//! Files that are either the old one or the new one, whatever happens in between.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File, Permissions, TryLockError};
use std::hash::{DefaultHasher, Hasher};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tempfile::NamedTempFile;

use super::shards::folder::{check_own_folder, exchange, flush_folder, is_own_folder, remove_folder};
use crate::error::{Error, Result};

/// Random characters in the name of a temporary file.
const NUM_RANDOM: usize = 12;
/// Bytes of a file's name in that of its temporary file. With two dots, the random characters and the longest ending
/// (`.tmp.png`, `.tmp.old`) it has 255 bytes, as many as a file system takes.
const MAX_NAME: usize = 255 - 2 - NUM_RANDOM - 8;
/// Extensions of the files that are written through temporary ones: checkpoints, what `convert` writes, tables, profiles.
const EXTENSIONS: [&str; 12] =
    ["ckpt", "safetensors", "pt", "pth", "bin", "csv", "yaml", "png", "json", "html", "txt", "stacks"];
/// A longer extension counts as part of the name.
const MAX_EXTENSION: usize = 16;
/// Links that are tried if another process removes each of them at the same moment.
const MAX_LINKS: usize = 8;

/// Writes a file through `write` so that `path` never holds a partial one: a temporary file beside it, flushed to
/// disk, then renamed, then the folder flushed. Creates the folder.
///
/// # Errors
/// [`Error::Io`]; the temporary file is removed and `path` is as before. What is not a file, such as a device, is not replaced.
pub fn write_atomically(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<()> {
    let temporary = temporary_file(path, ".tmp")?;
    let name = temporary.path().to_path_buf();
    let _unfinished = Unfinished::new(&name);
    let failed = |action| {
        let name = name.clone();
        move |e| Error::io(action, name, e)
    };
    let file = temporary.as_file().try_clone().map_err(failed("write"))?;
    let mut writer = BufWriter::with_capacity(1 << 20, file);
    write(&mut writer).and_then(|()| writer.flush()).map_err(failed("write"))?;
    writer.get_ref().sync_all().map_err(failed("flush to disk"))?;
    drop(writer);
    if is_own_folder(path) {
        let (_, temporary) = temporary.keep().map_err(|e| Error::io("rename to", path, e.error))?;
        exchange(&temporary, path)?;
    } else {
        temporary.persist(path).map_err(|e| Error::io("rename to", path, e.error))?;
    }
    flush_folder(folder_of(path))
}

/// Temporary files that this process is writing.
static UNFINISHED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn unfinished() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file is among the unfinished ones until this is dropped.
struct Unfinished<'a>(&'a Path);

impl<'a> Unfinished<'a> {
    fn new(path: &'a Path) -> Self {
        unfinished().insert(path.to_path_buf());
        Self(path)
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        unfinished().remove(self.0);
    }
}

/// Removes the temporary files that this process is writing, which is about to end.
pub(crate) fn remove_unfinished() {
    for path in &*unfinished() {
        let _ = fs::remove_file(path); // else the next run in the folder does
    }
}

/// Makes `path` a symbolic link to `target`, in place of what is there.
///
/// # Errors
/// [`Error::Io`]; `path` is as before.
pub(super) fn link_atomically(target: &Path, path: &Path) -> Result<()> {
    let mut tries = 0;
    loop {
        let link = temporary_beside(path, ".tmp", |builder, folder| {
            builder.make_in(folder, |link| std::os::unix::fs::symlink(target, link))
        })?;
        tries += 1;
        if is_own_folder(path) {
            let (_, link) = link.keep().map_err(|e| Error::io("rename to", path, e.error))?;
            exchange(&link, path)?;
            return flush_folder(folder_of(path));
        }
        match link.persist(path) {
            Ok(()) => return flush_folder(folder_of(path)),
            // another run took it for a leftover: a link cannot be locked
            Err(e) if e.error.kind() == ErrorKind::NotFound && tries < MAX_LINKS => {}
            Err(e) => return Err(Error::io("rename to", path, e.error)),
        }
    }
}

/// The name of a file that is to be written is taken for as long as this lives, or its process.
#[derive(Debug)]
pub(crate) struct Claim {
    path: PathBuf,
    /// A file beside `path`, locked; none on a file system without locks.
    lock: Option<(File, PathBuf)>,
}

impl Claim {
    /// The name, unless another run has claimed it or there is such a file.
    pub(crate) fn new(path: &Path) -> Option<Self> {
        let folder = folder_of(path);
        let mut hidden = temporary_prefix(path);
        hidden.push(format!("{}.tmp", "0".repeat(NUM_RANDOM))); // a name that `remove_leftovers` recognises
        let hidden = folder.join(hidden);
        let path = path.to_path_buf();
        let mut open = File::options();
        open.write(true).create(true).custom_flags(libc::O_NOFOLLOW);
        for _ in 0..MAX_LINKS {
            let Ok(file) = fs::create_dir_all(folder).and_then(|()| open.open(&hidden)) else { break };
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return None,
                Err(TryLockError::Error(_)) => break,
            }
            let is_there = || Some((file.metadata().ok()?.ino(), hidden.metadata().ok()?.ino()));
            if is_there().is_some_and(|(own, there)| own == there) {
                let is_free = path.symlink_metadata().is_err();
                let claim = Self { path, lock: Some((file, hidden)) };
                return is_free.then_some(claim);
            }
            // another run has removed it in between, and its lock with it
        }
        path.symlink_metadata().is_err().then_some(Self { path, lock: None })
    }

    /// Whether the file is not there yet.
    pub(crate) fn is_open(&self) -> bool {
        self.path.symlink_metadata().is_err()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some((_, hidden)) = &self.lock {
            let _ = fs::remove_file(hidden); // else the next run that begins in the folder does
        }
    }
}

/// A new file beside `path`, to be persisted there; the end of its name is `ending`. It is removed unless that happens.
///
/// # Errors
/// [`Error::Io`] if the folder cannot be written to, or `path` is something other than a file.
pub(crate) fn temporary_file(path: &Path, ending: &str) -> Result<NamedTempFile> {
    let temporary = temporary_beside(path, ending, |builder, folder| builder.tempfile_in(folder))?;
    // the lock shows `remove_leftovers` that the writer lives; without file locks it removes nothing
    let _ = temporary.as_file().try_lock();
    Ok(temporary)
}

/// A new folder beside `path`, its lock, which shows [`remove_leftovers`] that the writer lives, and the random part of its name.
///
/// # Errors
/// [`Error::Io`] if the folder of `path` cannot be written to.
pub(super) fn temporary_folder(path: &Path) -> Result<(PathBuf, File, String)> {
    let parent = folder_of(path);
    fs::create_dir_all(parent).map_err(|e| Error::io("create folder", parent, e))?;
    let prefix = temporary_prefix(path);
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix).suffix(".tmp").rand_bytes(NUM_RANDOM).permissions(Permissions::from_mode(0o777));
    let made = builder.tempdir_in(parent).map_err(|e| Error::io("create a folder in", parent, e))?;
    let lock = File::open(made.path()).map_err(|e| Error::io("open", made.path(), e))?;
    let _ = lock.try_lock(); // as that of a file
    let folder = made.keep();
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let random = name.strip_suffix(".tmp").and_then(|name| name.rsplit_once('.'));
    let random = random.map_or_else(String::new, |(_, random)| random.to_owned());
    Ok((folder, lock, random))
}

/// Something new under the name `.<name>.<random><ending>` beside `path`. No program can guess it, so no planted link is
/// followed; and a leftover of a killed process is never taken for a checkpoint. Creates the folder.
fn temporary_beside<T>(
    path: &Path,
    ending: &str,
    create: impl FnOnce(&tempfile::Builder, &Path) -> io::Result<T>,
) -> Result<T> {
    let folder = folder_of(path);
    fs::create_dir_all(folder).map_err(|e| Error::io("create folder", folder, e))?;
    refuse_other_kinds(path)?;
    let prefix = temporary_prefix(path);
    let mut builder = tempfile::Builder::new();
    // umask takes from the permissions what it takes from those of any new file
    builder.prefix(&prefix).suffix(ending).rand_bytes(NUM_RANDOM).permissions(Permissions::from_mode(0o666));
    create(&builder, folder).map_err(|e| Error::io("create a file in", folder, e))
}

/// `.<name>.`, the beginning of a temporary file's name. The end of a long name, before its extension, is replaced by a hash of the
/// name.
fn temporary_prefix(path: &Path) -> OsString {
    let name = path.file_name().unwrap_or_default().as_bytes();
    let extension = path.extension().map_or(0, |extension| extension.len() + 1);
    let extension = if extension <= MAX_EXTENSION { extension } else { 0 };
    let (stem, extension) = name.split_at(name.len() - extension);
    let mut prefix = vec![b'.'];
    if name.len() <= MAX_NAME {
        prefix.extend(stem);
    } else {
        let mut hasher = DefaultHasher::new();
        hasher.write(name);
        let number = format!("~{:016x}", hasher.finish());
        let room = MAX_NAME - number.len() - extension.len();
        // not within a character of several bytes
        let end = (0..=room).rev().find(|&at| stem[at] & 0b1100_0000 != 0b1000_0000);
        prefix.extend(&stem[..end.unwrap_or(room)]);
        prefix.extend(number.as_bytes());
    }
    prefix.extend(extension);
    prefix.push(b'.');
    OsString::from_vec(prefix)
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A rename would put a file where a device or socket was. A symbolic link may be replaced: what it leads to stays. So may a
/// checkpoint that is a folder.
fn refuse_other_kinds(path: &Path) -> Result<()> {
    let Ok(metadata) = path.symlink_metadata() else { return Ok(()) };
    let kind = metadata.file_type();
    if kind.is_file() || kind.is_symlink() || is_own_folder(path) {
        return Ok(());
    }
    let what = if kind.is_dir() { "it is a folder" } else { "it is a device, pipe or socket, not a file" };
    Err(Error::io("replace", path, io::Error::new(ErrorKind::InvalidInput, what)))
}

/// Removes temporary files of a run's files in `folder` whose writers were killed, and temporary folders of checkpoints.
///
/// One whose writer lives, in this process or another, is locked and stays. A writer of links, which cannot be locked, makes
/// another.
pub fn remove_leftovers(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let (name, Ok(kind)) = (entry.file_name(), entry.file_type()) else { continue };
        let name = name.to_string_lossy();
        if name.strip_suffix(".old").is_some_and(is_temporary) {
            put_back(&entry.path());
            continue;
        }
        let is_unlocked = || is_unlocked(&entry.path());
        let is_free = || kind.is_symlink() || ((kind.is_file() || kind.is_dir()) && is_unlocked());
        if is_temporary(&name) && is_free() {
            tracing::info!("removing {}, left by a run that was killed", entry.path().display());
            // it only takes space
            let _ = if kind.is_dir() {
                remove_folder(&entry.path()).is_ok()
            } else {
                fs::remove_file(entry.path()).is_ok()
            };
        }
    }
}

fn is_unlocked(path: &Path) -> bool {
    File::open(path).is_ok_and(|file| file.try_lock().is_ok())
}

/// A checkpoint that was out of the way when its run was killed, between two names: gets its name back, or goes if that has another.
fn put_back(aside: &Path) {
    let name = aside.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let own = name.strip_prefix('.').and_then(|name| name.strip_suffix(".tmp.old")?.rsplit_once('.'));
    let Some(path) = own.map(|(own, _)| aside.with_file_name(own)) else { return };
    let is_file = aside.symlink_metadata().is_ok_and(|metadata| !metadata.is_dir());
    let new = aside.with_extension(""); // what was to take its place
    if !(is_file || is_own_folder(aside)) || (new.exists() && !is_unlocked(&new)) {
        return; // not ours, or its run lives
    }
    tracing::info!("{} is what a run that was killed has left of {}", aside.display(), path.display());
    let _ = match path.symlink_metadata() {
        Ok(_) => remove_file(aside).is_ok(),
        Err(_) => fs::rename(aside, &path).is_ok(),
    };
}

/// Whether a file is called as [`temporary_beside`] and earlier versions (`.<name>.<pid>-<n>.tmp`) call those of a run.
fn is_temporary(name: &str) -> bool {
    let ends =
        [".tmp", ".tmp.png"].into_iter().find_map(|ending| name.strip_prefix('.')?.strip_suffix(ending));
    let Some((name, unique)) = ends.and_then(|name| name.rsplit_once('.')) else { return false };
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_random = unique.len() == NUM_RANDOM && unique.bytes().all(|byte| byte.is_ascii_alphanumeric());
    let is_of_process = unique.split_once('-').is_some_and(|(pid, n)| is_number(pid) && is_number(n));
    let extension = Path::new(name).extension().and_then(|extension| extension.to_str());
    extension.is_some_and(|extension| EXTENSIONS.contains(&extension)) && (is_random || is_of_process)
}

/// Removes a file, or a checkpoint that is a folder; that it is gone already is not an error.
///
/// # Errors
/// [`Error::Io`] if it is there and cannot be removed, or is a folder that is not a checkpoint.
pub fn remove_file(path: &Path) -> Result<()> {
    if path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir()) {
        check_own_folder(path)?;
        // under a name that `remove_leftovers` recognises: the rest of an interrupted removal is not taken for a checkpoint
        let (temporary, _lock, _) = temporary_folder(path)?;
        return match fs::rename(path, &temporary) {
            Ok(()) => remove_folder(&temporary),
            Err(error) => {
                let _ = fs::remove_dir(&temporary); // the error below is the cause
                match error.kind() {
                    ErrorKind::NotFound => Ok(()),
                    _ => Err(Error::io("remove", path, error)),
                }
            }
        };
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", path, error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftovers_go_unless_their_writer_lives() {
        let folder = tempfile::tempdir().expect("temp folder");
        let path = folder.path().join("a.ckpt");
        let own = [
            ".c.ckpt.aB3dEf7hIj0k.tmp",
            ".c.safetensors.aB3dEf7hIj0k.tmp",
            ".metrics.csv.aB3dEf7hIj0k.tmp",
            ".lr.png.aB3dEf7hIj0k.tmp.png",
        ];
        let foreign = ["b.ckpt", ".other.tmp", ".notes.ckpt.tmp", ".a.doc.aB3dEf7hIj0k.tmp"];
        for name in [".a.ckpt.1-0.tmp", ".b.ckpt.77-3.tmp"].into_iter().chain(own).chain(foreign) {
            File::create(folder.path().join(name)).expect("writable");
        }
        write_atomically(&path, |_| {
            remove_leftovers(folder.path());
            Ok(())
        })
        .expect("its own temporary file was left alone");
        // the process that writes is about to end
        let other = folder.path().join("d.safetensors");
        write_atomically(&other, |_| {
            unfinished().retain(|path| path.starts_with(folder.path())); // of other tests
            remove_unfinished();
            Ok(())
        })
        .expect_err("its temporary file is gone");
        let mut left: Vec<_> = fs::read_dir(folder.path())
            .expect("listable")
            .map(|entry| entry.expect("readable").file_name().into_string().expect("text"))
            .collect();
        left.sort();
        assert_eq!(left, [".a.doc.aB3dEf7hIj0k.tmp", ".notes.ckpt.tmp", ".other.tmp", "a.ckpt", "b.ckpt"]);
    }

    #[test]
    fn a_name_of_any_length_has_a_temporary_name() {
        let root = tempfile::tempdir().expect("temp folder");
        for (stem, extension) in [("a", ".ckpt"), ("\u{e9}", ".ckpt"), ("a", ".png"), ("a", "")] {
            for len in [232, 233, 234, 240, 255] {
                let stem = stem.repeat((len - extension.len()) / stem.len());
                let path = root.path().join(format!("{stem}{extension}"));
                let longest = temporary_file(&path, ".tmp.png").expect("a name that fits");
                let name = longest.path().file_name().expect("has a name").to_str().expect("text");
                assert!(name.len() <= 255 && (is_temporary(name) || extension.is_empty()), "{name}");
                write_atomically(&path, |w| w.write_all(b"new")).expect("writable");
                link_atomically(Path::new("target"), &path).expect("links");
                remove_file(&path).expect("removes");
                let claim = Claim::new(&path).expect("free");
                assert!(Claim::new(&path).is_none());
                let other = path.with_file_name(format!("{}b{extension}", &stem[..stem.len() - 2]));
                assert!(Claim::new(&other).is_some(), "another name");
                drop(claim);
            }
        }
        let path = root.path().join(format!("{}.ckpt", "a".repeat(250)));
        fs::create_dir(&path).expect("writable");
        File::create(path.join("index.json")).expect("writable");
        write_atomically(&path, |w| w.write_all(b"new")).expect("takes the place of a folder");
        assert_eq!(fs::read_dir(root.path()).expect("listable").count(), 1);
    }

    #[test]
    fn a_removal_of_a_folder_that_was_killed_leaves_what_the_next_run_removes() {
        let root = tempfile::tempdir().expect("temp folder");
        let path = root.path().join("a.ckpt");
        let folder = |name: &str, files: &[&str]| {
            let path = root.path().join(name);
            fs::create_dir(&path).expect("writable");
            files.iter().for_each(|file| drop(File::create(path.join(file)).expect("writable")));
            path
        };
        let files: Vec<String> = (0..40).map(|rank| format!("rank-{rank}.safetensors")).collect();
        let files: Vec<&str> = files.iter().map(String::as_str).chain(["index.json"]).collect();
        let (is_made, is_done) = (std::sync::Mutex::new(()), std::sync::atomic::AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(std::sync::atomic::Ordering::Relaxed) {
                    let _nothing_is_made = is_made.lock();
                    let is_cut =
                        !path.join("index.json").exists() && path.join("rank-39.safetensors").exists();
                    assert!(!is_cut, "killed now, it leaves a part of a checkpoint under its name");
                }
            });
            for number in 0..50 {
                let new = folder(&format!("new-{number}"), &files);
                {
                    let _nobody_looks = is_made.lock();
                    fs::rename(new, &path).expect("renames");
                }
                remove_file(&path).expect("removes");
            }
            is_done.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        remove_file(&path).expect("is gone");
        folder(".a.ckpt.aB3dEf7hIj0k.tmp", &["rank-1.safetensors"]);
        remove_leftovers(root.path());
        assert_eq!(fs::read_dir(root.path()).expect("listable").count(), 0);
    }

    #[test]
    fn what_was_out_of_the_way_gets_its_name_back() {
        let root = tempfile::tempdir().expect("temp folder");
        let folder = |name: &str| {
            fs::create_dir(root.path().join(name)).expect("writable");
            File::create(root.path().join(name).join("index.json")).expect("writable");
        };
        let file = |name: &str| drop(File::create(root.path().join(name)).expect("writable"));
        folder(".a.ckpt.aB3dEf7hIj0k.tmp.old"); // killed between two names
        folder(".a.ckpt.aB3dEf7hIj0k.tmp");
        file(".b.ckpt.aB3dEf7hIj0k.tmp.old");
        folder(".c.ckpt.aB3dEf7hIj0k.tmp.old"); // killed before it was removed
        folder("c.ckpt");
        folder(".d.ckpt.aB3dEf7hIj0k.tmp.old"); // the run lives
        folder(".d.ckpt.aB3dEf7hIj0k.tmp");
        let lock = File::open(root.path().join(".d.ckpt.aB3dEf7hIj0k.tmp")).expect("is there");
        lock.try_lock().expect("free");
        remove_leftovers(root.path());
        let mut left: Vec<_> = fs::read_dir(root.path())
            .expect("listable")
            .map(|entry| entry.expect("readable").file_name().into_string().expect("text"))
            .collect();
        left.sort();
        let of_live = [".d.ckpt.aB3dEf7hIj0k.tmp", ".d.ckpt.aB3dEf7hIj0k.tmp.old"];
        assert_eq!(left, [&of_live[..], &["a.ckpt", "b.ckpt", "c.ckpt"]].concat());
        assert!(root.path().join("a.ckpt/index.json").exists(), "the old one, whole");
    }

    #[test]
    fn a_name_is_claimed_once_until_its_file_is_there() {
        let folder = tempfile::tempdir().expect("temp folder");
        let path = folder.path().join("a.ckpt");
        let claim = Claim::new(&path).expect("free");
        remove_leftovers(folder.path());
        assert!(Claim::new(&path).is_none() && claim.is_open(), "by a run that lives");
        drop(claim);
        assert_eq!(fs::read_dir(folder.path()).expect("listable").count(), 0);
        let claim = Claim::new(&path).expect("free again");
        write_atomically(&path, |_| Ok(())).expect("writable");
        assert!(!claim.is_open() && Claim::new(&path).is_none());
        drop(claim);
        assert!(Claim::new(&path).is_none(), "the file is there");
        // of a run that was killed
        File::create(folder.path().join(format!(".b.ckpt.{}.tmp", "0".repeat(12)))).expect("writable");
        assert!(Claim::new(&folder.path().join("b.ckpt")).is_some());
    }

    #[test]
    fn links_replace_each_other_and_survive_those_who_tidy_up() {
        let folder = tempfile::tempdir().expect("temp folder");
        let path = folder.path().join("last.ckpt");
        std::os::unix::fs::symlink("gone", folder.path().join(".last.ckpt.aB3dEf7hIj0k.tmp"))
            .expect("writable");
        std::thread::scope(|scope| {
            for run in 0..4 {
                let path = &path;
                scope.spawn(move || {
                    for step in 0..50 {
                        let target = format!("run={run}-step={step}.ckpt");
                        link_atomically(Path::new(&target), path).expect("links");
                    }
                });
            }
            scope.spawn(|| (0..50).for_each(|_| remove_leftovers(folder.path())));
        });
        let target = fs::read_link(&path).expect("a link").to_string_lossy().into_owned();
        assert!(target.ends_with("step=49.ckpt"), "{target}");
        let left = fs::read_dir(folder.path()).expect("listable").count();
        assert_eq!(left, 1);
    }

    #[test]
    fn planted_links_are_not_followed_and_devices_stay() {
        let folder = tempfile::tempdir().expect("temp folder");
        let (path, victim) = (folder.path().join("a.ckpt"), folder.path().join("victim"));
        fs::write(&victim, "mine").expect("writable");
        let own = std::process::id();
        for n in 0..500 {
            let planted = folder.path().join(format!(".a.ckpt.{own}-{n}.tmp"));
            std::os::unix::fs::symlink(&victim, planted).expect("writable");
        }
        std::os::unix::fs::symlink(&victim, &path).expect("writable");
        std::os::unix::fs::symlink(&victim, path.with_extension("link.tmp")).expect("writable");
        write_atomically(&path, |w| w.write_all(b"new")).expect("writes");
        assert_eq!(fs::read(&path).expect("readable"), b"new");
        link_atomically(Path::new("a.ckpt"), &folder.path().join("last.ckpt")).expect("links");
        assert_eq!(fs::read(&victim).expect("readable"), b"mine");
        let socket = folder.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).expect("binds");
        for (path, expected) in [(socket.as_path(), "device, pipe or socket"), (folder.path(), "a folder")] {
            let error = write_atomically(path, |w| w.write_all(b"new")).expect_err("not a file").to_string();
            assert!(error.contains(expected), "{error}");
        }
        assert!(!socket.symlink_metadata().expect("still there").file_type().is_file());
    }

    #[test]
    fn a_failed_write_leaves_the_old_file_and_no_other() {
        let folder = tempfile::tempdir().expect("temp folder");
        let path = folder.path().join("sub/a.ckpt");
        write_atomically(&path, |w| w.write_all(b"old")).expect("first write");
        let error = write_atomically(&path, |w| {
            w.write_all(b"new")?;
            Err(std::io::Error::from(std::io::ErrorKind::StorageFull))
        })
        .expect_err("the writer failed");
        assert!(error.to_string().contains("free some disk space"), "{error}");
        assert_eq!(fs::read(&path).expect("readable"), b"old");
        assert_eq!(fs::read_dir(path.parent().expect("has a parent")).expect("listable").count(), 1);
    }
}
