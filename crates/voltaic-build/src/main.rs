//! `voltaic-libtorch`: fetches the libtorch that voltaic links, once for all projects of a user, and names it to the crate in the
//! current folder.
//!
//! ```sh
//! cargo new my_net && cd my_net
//! cargo install voltaic-build
//! voltaic-libtorch              # writes .cargo/config.toml
//! cargo add voltaic && cargo add --build voltaic-build
//! ```
//!
//! libtorch is a PyTorch of the right version: that of `LIBTORCH` if it is set, otherwise the wheel that pip installs into
//! `$VOLTAIC_LIBTORCH_DIR`, by default `~/.cache/voltaic/libtorch` (1.2 GB).

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{env, fs, io};

/// Finds or fetches libtorch; also what `make setup` runs.
const SETUP: &str = include_str!("../setup.sh");
const FOLDER: &str = "VOLTAIC_LIBTORCH_DIR";
const CONFIG: &str = ".cargo/config.toml";

fn main() -> ExitCode {
    match run() {
        Ok(message) => {
            println!("{message}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("voltaic-libtorch: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<String, String> {
    if let Some(argument) = env::args().nth(1) {
        return Err(format!("`{argument}` is one argument too many; run it alone in the folder of a crate"));
    }
    let folder = cache(&|name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from))?;
    fs::create_dir_all(&folder).map_err(|error| {
        format!("{} cannot be made: {error}; set {FOLDER} to another folder", folder.display())
    })?;
    let status = Command::new("bash").args(["-c", SETUP]).env(FOLDER, &folder).status();
    let status = status.map_err(|error| format!("bash does not start: {error}; install bash"))?;
    if !status.success() {
        return Err("there is no libtorch; what is missing is said above".to_owned());
    }
    name_to_cargo(Path::new(CONFIG), &folder.join(".libtorch"))
}

/// The folder that all projects share.
fn cache(variable: &dyn Fn(&str) -> Option<PathBuf>) -> Result<PathBuf, String> {
    let default = || {
        let caches =
            variable("XDG_CACHE_HOME").or_else(|| variable("HOME").map(|home| home.join(".cache")))?;
        Some(caches.join("voltaic/libtorch"))
    };
    let folder = variable(FOLDER).or_else(default);
    let folder =
        folder.ok_or_else(|| format!("there is no home folder; set {FOLDER} to a folder for libtorch"))?;
    std::path::absolute(&folder).map_err(|error| format!("{FOLDER}={}: {error}", folder.display()))
}

/// Writes where libtorch is into a configuration of cargo.
fn name_to_cargo(config: &Path, libtorch: &Path) -> Result<String, String> {
    let failed = |error: io::Error| format!("{}: {error}", config.display());
    let place = libtorch.display().to_string().replace('\\', "\\\\").replace('"', "\\\"");
    // forced: a LIBTORCH of the environment may be a PyTorch with CUDA, which would be linked whole
    let line = format!("LIBTORCH = {{ value = \"{place}\", force = true }}");
    let text = match fs::read_to_string(config) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        text => text.map_err(failed)?,
    };
    if text.contains(&line) {
        return Ok(format!("{} names libtorch already", config.display()));
    }
    if text.contains("[env]") || text.contains("LIBTORCH") {
        return Err(format!(
            "{} has variables of its own; write this below its [env] in place of another LIBTORCH:\n{line}",
            config.display()
        ));
    }
    let gap = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
    if let Some(folder) = config.parent() {
        fs::create_dir_all(folder).map_err(failed)?;
    }
    fs::write(config, format!("{text}{gap}# The libtorch of voltaic.\n[env]\n{line}\n")).map_err(failed)?;
    Ok(format!("{} names {}", config.display(), libtorch.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_the_users() {
        let of = |variables: &[(&str, &str)]| {
            cache(&|name| variables.iter().find(|(own, _)| *own == name).map(|(_, value)| value.into()))
        };
        let home = ("HOME", "/home/me");
        assert_eq!(of(&[home]), Ok("/home/me/.cache/voltaic/libtorch".into()));
        assert_eq!(of(&[home, ("XDG_CACHE_HOME", "/caches")]), Ok("/caches/voltaic/libtorch".into()));
        assert_eq!(of(&[home, (FOLDER, "/here")]), Ok("/here".into()));
        assert!(of(&[]).is_err_and(|error| error.contains("set VOLTAIC_LIBTORCH_DIR")));
    }

    #[test]
    fn cargo_is_told_once_and_nothing_is_overwritten() {
        let folder = env::temp_dir().join(format!("voltaic-libtorch-{}", std::process::id()));
        let config = folder.join(CONFIG);
        let libtorch = Path::new("/cache/\"a\"/.libtorch");
        let _ = fs::remove_dir_all(&folder);
        assert!(name_to_cargo(&config, libtorch).is_ok_and(|message| message.contains("names /cache")));
        let text = fs::read_to_string(&config).unwrap_or_default();
        assert!(
            text.contains("[env]\nLIBTORCH = { value = \"/cache/\\\"a\\\"/.libtorch\", force = true }\n"),
            "{text}"
        );
        assert!(name_to_cargo(&config, libtorch).is_ok_and(|message| message.contains("already")));
        let other = name_to_cargo(&config, Path::new("/other"));
        assert!(other.is_err_and(|error| error.contains("write this below its [env]")));
        assert_eq!(fs::read_to_string(&config).unwrap_or_default(), text);
        assert!(fs::write(&config, "[build]\njobs = 1").is_ok());
        assert!(name_to_cargo(&config, libtorch).is_ok());
        let text = fs::read_to_string(&config).unwrap_or_default();
        assert!(text.starts_with("[build]\njobs = 1\n# The libtorch"), "{text}");
        let _ = fs::remove_dir_all(&folder);
    }
}
