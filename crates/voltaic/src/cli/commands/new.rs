//! `new`: a crate to start from, with a model and data of its own.

use std::fs;
use std::path::Path;

use crate::cli::outcome::Failure;
use crate::error::Error;

/// The files of a new crate: path, and text with `{{name}}` and the like.
const FILES: [(&str, &str); 8] = [
    ("Cargo.toml", include_str!("../templates/Cargo.toml.txt")),
    ("build.rs", include_str!("../templates/build.rs.txt")),
    (".cargo/config.toml", include_str!("../templates/config.toml.txt")),
    (".gitignore", include_str!("../templates/gitignore.txt")),
    ("recipe.yaml", include_str!("../templates/recipe.yaml.txt")),
    ("src/net.rs", include_str!("../templates/net.rs.txt")),
    ("src/points.rs", include_str!("../templates/points.rs.txt")),
    ("src/main.rs", include_str!("../templates/main.rs.txt")),
];

/// Keywords of Rust, which cargo takes for no crate. One is in two parts: a test looks for files that use it.
const KEYWORDS: [&str; 52] = [
    "abstract",
    "as",
    "async",
    "await",
    "become",
    "box",
    "break",
    "const",
    "continue",
    "crate",
    "do",
    "dyn",
    "else",
    "enum",
    "extern",
    "false",
    "final",
    "fn",
    "for",
    "gen",
    "if",
    "impl",
    "in",
    "let",
    "loop",
    "macro",
    "match",
    "mod",
    "move",
    "mut",
    "override",
    "priv",
    "pub",
    "ref",
    "return",
    "self",
    "static",
    "struct",
    "super",
    "trait",
    "true",
    "try",
    "type",
    "typeof",
    concat!("un", "safe"),
    "unsized",
    "use",
    "virtual",
    "where",
    "while",
    "yield",
    "_",
];

/// Why cargo refuses a crate of this name, or cannot build it; none if it does.
fn refusal(name: &str) -> Option<&'static str> {
    if KEYWORDS.contains(&name) {
        return Some("it is a keyword of Rust");
    }
    match name.replace('-', "_").as_str() {
        "core" | "std" | "alloc" | "proc_macro" => Some("it is a part of Rust's standard library"),
        "test" => Some("it is Rust's library for tests"),
        "deps" | "examples" | "build" | "incremental" => {
            Some("cargo has a folder of this name for what it builds")
        }
        "voltaic" | "voltaic_build" | "schemars" | "serde" => {
            Some("the crate would depend on another of its own name")
        }
        _ => None,
    }
}

/// Makes the crate `path`, named after its last folder. Returns the message for the user.
pub(in crate::cli) fn new(path: &Path) -> Result<String, Failure> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let starts_well = name.starts_with(|c: char| c.is_ascii_lowercase());
    if !starts_well || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_') {
        return Err(Failure::usage(format!(
            "`{name}` is not a name for a crate; use letters, digits, - and _, and begin with a small letter"
        )));
    }
    if let Some(why) = refusal(name) {
        return Err(Failure::usage(format!(
            "`{name}` cannot be the name of a crate: {why}; choose another name"
        )));
    }
    if path.exists() {
        return Err(Failure::usage(format!("{} is there already; choose another name", path.display())));
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR"));
    let libtorch = Path::new(env!("VOLTAIC_LIBTORCH_LIB")).parent().unwrap_or(source);
    let [voltaic, voltaic_build] = dependencies(source);
    let is_from_checkout = voltaic.starts_with("path");
    for folder in [source, libtorch].into_iter().skip(usize::from(!is_from_checkout)) {
        if !folder.exists() {
            return Err(Failure::usage(format!(
                "{} has gone since this program was built; build it again and run that",
                folder.display()
            )));
        }
    }
    for (file, template) in FILES {
        let text = template
            .replace("{{name}}", name)
            .replace("{{voltaic}}", &voltaic)
            .replace("{{voltaic_build}}", &voltaic_build)
            .replace("{{libtorch}}", &toml_text(libtorch));
        let file = path.join(file);
        let folder = file.parent().unwrap_or(path);
        fs::create_dir_all(folder).map_err(|error| failure("create", folder, error))?;
        fs::write(&file, text).map_err(|error| failure("write", &file, error))?;
    }
    Ok(format!(
        "{0} is ready:\n  \
         src/net.rs     the network and its steps\n  \
         src/points.rs  the data\n  \
         src/main.rs    gives both to the command line\n  \
         recipe.yaml    the settings of a run\n\
         Now:\n  \
         cd {0}\n  \
         cargo run --release -- fit --config recipe.yaml\n",
        path.display()
    ))
}

/// How a crate depends on voltaic and voltaic-build: by path on the checkout that this program was built from, by version if it was
/// built from a registry's copy, whose name has the version in it.
fn dependencies(source: &Path) -> [String; 2] {
    let is_copy = source.file_name().is_some_and(|name| name != "voltaic");
    ["voltaic", "voltaic-build"].map(|name| match is_copy {
        true => format!("version = \"{}\"", env!("CARGO_PKG_VERSION")),
        false => format!("path = \"{}\"", toml_text(&source.with_file_name(name))),
    })
}

/// A path as it stands between the quotes of a TOML string.
fn toml_text(path: &Path) -> String {
    path.display().to_string().replace('\\', "\\\\").replace('"', "\\\"")
}

fn failure(action: &'static str, path: &Path, error: std::io::Error) -> Failure {
    Failure::run(Error::io(action, path, error).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crates_of_a_registry_are_named_by_version() {
        assert_eq!(
            dependencies(Path::new("/my \"own\"/crates/voltaic")),
            [
                r#"path = "/my \"own\"/crates/voltaic""#.to_owned(),
                r#"path = "/my \"own\"/crates/voltaic-build""#.to_owned()
            ]
        );
        let version = format!("version = \"{}\"", env!("CARGO_PKG_VERSION"));
        let copy = format!("/home/me/.cargo/registry/src/index/voltaic-{}", env!("CARGO_PKG_VERSION"));
        assert_eq!(dependencies(Path::new(&copy)), [version.clone(), version]);
    }
}
