//! `~/` at the beginning of a path, which a shell does not expand within `--key=~/folder`, nor anyone in a file.

use std::path::{Path, PathBuf};

/// The path with `$HOME` in place of a leading `~`; as it is without such a beginning or without `HOME`.
pub(crate) fn expand_home(path: impl AsRef<Path>) -> PathBuf {
    let path = path.as_ref();
    let rest = path.strip_prefix("~").ok();
    let home = std::env::var_os("HOME").filter(|home| !home.is_empty());
    match (rest, home) {
        (Some(rest), Some(home)) => Path::new(&home).join(rest),
        _ => path.to_owned(),
    }
}

/// [`expand_home`] for a text that begins with `~/`, and none for any other.
pub(super) fn expand_text(text: &str) -> Option<String> {
    if !text.starts_with("~/") {
        return None;
    }
    expand_home(text).into_os_string().into_string().ok()
}
