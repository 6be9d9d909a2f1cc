//! The house rules that a compiler does not check: which folder may use which, file length, where unsafe code is.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Folders and files of `src/` by layer. A module uses its own layer and lower ones only.
const LAYERS: [(&str, u32); 30] = [
    ("device", 10),
    ("dtype", 10),
    ("error", 10),
    ("ffi", 10),
    ("kernels", 10),
    ("accelerator", 20),
    ("config", 20),
    ("distributed", 30),
    ("nn", 40),
    ("precision", 40),
    ("optim", 40),
    ("data", 40),
    ("checkpoint", 40),
    ("graph", 45),
    ("metrics", 40),
    ("lightning", 55),
    ("module", 55), // the public path of `lightning`
    ("strategy", 50),
    ("profiler", 47),
    ("callback", 60),
    ("logger", 60),
    ("trainer", 70),
    ("models", 75),
    ("cli", 80),
    ("prelude", 80),
    ("lib", 90),
    ("bin", 90),
    // re-exports of lib.rs that any layer may name
    ("Result", 10),
    ("Error", 10),
    ("Device", 10),
];
const MAX_LINES: usize = 600;

fn layer(name: &str) -> Option<u32> {
    LAYERS.iter().find(|(known, _)| *known == name).map(|(_, layer)| *layer)
}

/// All `.rs` files below `folder`.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(sources(&path));
        } else if path.extension().is_some_and(|ext| ext == "rs") {
            files.push(path);
        }
    }
    files.sort();
    files
}

/// The first folder, or the file's name, below `src/`.
fn top(path: &Path, src: &Path) -> String {
    let below = path.strip_prefix(src).unwrap();
    below.iter().next().unwrap().to_string_lossy().trim_end_matches(".rs").to_owned()
}

/// The names right behind each `crate::` of a source text, as in `use crate::{device::Device, ffi};`.
fn used_names(text: &str) -> Vec<String> {
    let code: String =
        text.lines().map(|line| line.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n");
    let mut names = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        if code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '$') {
            continue;
        }
        let rest = &code[at + "crate::".len()..];
        match rest.strip_prefix('{') {
            Some(group) => names.extend(group_heads(group)),
            None => names.push(head(rest)),
        }
    }
    names
}

fn head(path: &str) -> String {
    path.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

/// First segments of the paths in a brace group, without those of nested groups.
fn group_heads(group: &str) -> Vec<String> {
    let (mut depth, mut start, mut heads) = (0, 0, Vec::new());
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            ',' | '}' if depth == 0 => {
                heads.push(head(&group[start..at]));
                start = at + 1;
                if c == '}' {
                    break;
                }
            }
            '}' => depth -= 1,
            _ => {}
        }
    }
    heads.retain(|head| !head.is_empty());
    heads
}

/// What breaks the layering in one file, as readable lines.
fn layer_problems(file: &str, folder: &str, text: &str) -> Vec<String> {
    let Some(own) = layer(folder) else {
        return vec![format!("{file}: `{folder}` is in no layer; add it to LAYERS in tests/it/layers.rs")];
    };
    let mut problems = Vec::new();
    for name in used_names(text) {
        match layer(&name) {
            Some(used) if used > own => {
                problems.push(format!("{file}: `{folder}` (layer {own}) uses crate::{name} (layer {used}); a layer may use lower ones only"));
            }
            Some(_) => {}
            // types and macros at the crate root: Tensor, Kind, vt_try
            None if !name.starts_with(|c: char| c.is_lowercase()) => {}
            None => problems.push(format!(
                "{file}: crate::{name} is in no layer; add it to LAYERS in tests/it/layers.rs"
            )),
        }
    }
    problems
}

fn src() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

#[test]
fn lower_layers_do_not_use_higher_ones() {
    let src = src();
    let mut problems = Vec::new();
    for path in sources(&src) {
        let text = fs::read_to_string(&path).unwrap();
        problems.extend(layer_problems(&path.display().to_string(), &top(&path, &src), &text));
    }
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
}

#[test]
fn the_layer_check_sees_what_is_wrong() {
    for (folder, text, expected) in [
        ("nn", "use crate::trainer::Trainer;", 1),
        ("nn", "use crate::{device::Device, ffi, callback::{Callback, x}};", 1),
        ("nn", "    crate::cli::run();", 1),
        ("nn", "// see crate::trainer", 0),
        ("nn", "use crate::error::Result;\nuse crate::Tensor;\nuse crate::Device;", 0),
        ("nn", "use crate::no_such_folder::X;", 1),
        ("trainer", "use crate::{\n    nn::Module,\n    data::{\n        Batch,\n    },\n};", 0),
        ("no_such_folder", "", 1),
    ] {
        assert_eq!(layer_problems("x.rs", folder, text).len(), expected, "{folder}: {text}");
    }
}

/// Lines of a file without its unit tests, which stand at its end.
fn code_lines(text: &str) -> usize {
    text.lines().take_while(|line| *line != "#[cfg(test)]").count()
}

#[test]
fn files_stay_short() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut problems = Vec::new();
    for path in sources(crates) {
        let lines = code_lines(&fs::read_to_string(&path).unwrap());
        if lines > MAX_LINES && !path.components().any(|part| part.as_os_str() == "tests") {
            problems.push(format!("{}: {lines} lines; split it, {MAX_LINES} is the most", path.display()));
        }
    }
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
}

#[test]
fn unit_tests_do_not_count_as_code() {
    assert_eq!(code_lines("a\nb\n#[cfg(test)]\nmod tests {\n}\n"), 2);
    assert_eq!(code_lines("a\n    #[cfg(test)]\nb\n"), 3);
}

/// Where a line has unsafe code.
fn unsafe_lines(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap();
    let is_unsafe = |line: &str| {
        let code = line.split("//").next().unwrap_or("");
        let mut words = code.split(|c: char| !c.is_alphanumeric() && c != '_');
        words.any(|word| word == "unsafe") || code.contains("allow(unsafe_code)")
    };
    let lines = text.lines().enumerate().filter(|(_, line)| is_unsafe(line));
    lines.map(|(number, _)| format!("{}:{}", path.display(), number + 1)).collect()
}

#[test]
fn unsafe_code_is_in_ffi_only() {
    let src = src();
    let files = sources(&src).into_iter().filter(|path| !path.starts_with(src.join("ffi")));
    let problems: Vec<_> = files.flat_map(|path| unsafe_lines(&path)).collect();
    assert!(problems.is_empty(), "unsafe code belongs to ffi/:\n{}", problems.join("\n"));
}

/// Files and folders of the kernels that may have unsafe code: views and threads of memory that is shared, instructions, what
/// is found in the process, and loops over strides.
const UNSAFE_KERNELS: [&str; 7] =
    ["views.rs", "threads.rs", "host.rs", "processor", "product", "convolution", "attention/heads.rs"];

fn kernels_src() -> PathBuf {
    src().join("../../voltaic-kernels/src")
}

#[test]
fn unsafe_code_of_kernels_is_where_memory_is_shared() {
    let src = kernels_src();
    let files = sources(&src).into_iter();
    let others = files.filter(|path| !UNSAFE_KERNELS.iter().any(|may| path.starts_with(src.join(may))));
    let problems: Vec<_> = others.flat_map(|path| unsafe_lines(&path)).collect();
    assert!(problems.is_empty(), "unsafe code is in {UNSAFE_KERNELS:?} only:\n{}", problems.join("\n"));
}

/// The lines before a file's unit tests.
fn without_tests(text: &str) -> impl Iterator<Item = &str> {
    text.lines().take_while(|line| *line != "#[cfg(test)]" && !line.starts_with("#[cfg(all(test"))
}

/// The files that a file of the kernels uses, which it names by their paths from the crate's root.
fn used_files(src: &Path, text: &str) -> Vec<PathBuf> {
    let code =
        without_tests(text).map(|line| line.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n");
    let mut files = Vec::new();
    for (at, _) in code.match_indices("crate::").filter(|(at, _)| !code[..*at].ends_with('$')) {
        let rest = &code[at + "crate::".len()..];
        let first = head(rest);
        let second = rest[first.len()..].strip_prefix("::");
        let seconds = match second.map(|rest| (rest, rest.strip_prefix('{'))) {
            Some((_, Some(group))) => group_heads(group),
            Some((rest, None)) => vec![head(rest)],
            None => Vec::new(),
        };
        let in_folder = seconds.iter().map(|second| src.join(&first).join(format!("{second}.rs")));
        let alone = [src.join(format!("{first}.rs")), src.join(&first).join("mod.rs")];
        let mut found: Vec<_> = in_folder.filter(|path| path.exists()).collect();
        if found.is_empty() {
            found.extend(alone.into_iter().find(|path| path.exists()));
        }
        files.extend(found);
    }
    files.sort();
    files.dedup();
    files
}

/// A way from a file back to itself, if there is one.
fn circle_of(file: &Path, uses: &BTreeMap<PathBuf, Vec<PathBuf>>) -> Option<Vec<PathBuf>> {
    let (mut ways, mut seen) = (vec![vec![file.to_owned()]], BTreeSet::new());
    while let Some(way) = ways.pop() {
        for next in way.last().and_then(|last| uses.get(last)).into_iter().flatten() {
            if next == file {
                return Some(way);
            }
            if seen.insert(next.clone()) {
                ways.push([way.clone(), vec![next.clone()]].concat());
            }
        }
    }
    None
}

#[test]
fn files_of_the_kernels_form_no_circle() {
    let src = kernels_src();
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).unwrap();
        for line in without_tests(&text) {
            assert!(!line.trim_start().starts_with("use super"), "{}: name it from `crate`", path.display());
        }
        let mut used = used_files(&src, &text);
        used.retain(|used| *used != path); // a module within the file
        (path, used)
    };
    let uses: BTreeMap<_, _> = sources(&src).into_iter().map(read).collect();
    assert!(uses.values().flatten().count() > 100, "{uses:?}");
    for file in uses.keys() {
        assert_eq!(circle_of(file, &uses), None, "these files use each other");
    }
}

#[test]
fn the_circle_check_sees_a_circle() {
    let src = kernels_src();
    let product = |name: &str| src.join("product").join(name);
    let text = "use crate::product::{matrix, mkl::takes};\nuse crate::element::Bf16;\n// crate::views::X\n";
    assert_eq!(used_files(&src, text), [src.join("element.rs"), product("matrix.rs"), product("mkl.rs")]);
    let file = |name: &str| PathBuf::from(name);
    let uses = [("a", vec!["b"]), ("b", vec!["c", "d"]), ("c", vec!["b"]), ("d", vec![])];
    let uses = uses.map(|(name, used)| (file(name), used.into_iter().map(file).collect())).into();
    assert_eq!(circle_of(&file("a"), &uses), None);
    assert_eq!(circle_of(&file("b"), &uses), Some(vec![file("b"), file("c")]));
}
