//! The house rules that a compiler does not check: which layer may use which, that files do not use each other in a circle,
//! how long files are, and where unsafe code is.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};

/// The layers of `src/` from the bottom up: folders, and files beside them. Each layer uses lower ones only.
/// ARCHITECTURE.md has the same list. `kernels` is the crate `voltaic-kernels`.
const LAYERS: [&str; 27] = [
    "kernels",
    "error",
    "dtype",
    "device",
    "config",
    "ffi",
    "swap",
    "accelerator",
    "data",
    "distributed",
    "precision",
    "checkpoint",
    "nn",
    "metrics",
    "optim",
    "graph",
    "profiler",
    "strategy",
    "lightning",
    "logger",
    "callback",
    "trainer",
    "generation",
    "models",
    "cli",
    "prelude",
    "bin",
];

/// Names at the root of the crate that stand for something in a layer.
const ROOT_NAMES: [(&str, &str); 5] = [
    ("Result", "error"),
    ("Error", "error"),
    ("Device", "device"),
    ("Module", "nn"),
    ("module", "lightning"),
];

/// Other crates whose files form no circle.
const CRATES: [&str; 7] = [
    "crates/voltaic-kernels",
    "crates/voltaic-sys",
    "crates/voltaic-macros",
    "crates/voltaic-build",
    "bench/runner",
    "bench/measure",
    "bench/voltaic",
];

const MAX_LINES: usize = 900;

/// A folder of the workspace.
fn workspace(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().join(folder)
}

fn src() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

fn level(name: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| *layer == name)
}

/// All `.rs` files below `folder`.
fn sources(folder: &Path) -> Vec<PathBuf> {
    files_with(&["rs"], folder)
}

/// All files below `folder` whose names end so.
fn files_with(extensions: &[&str], folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(files_with(extensions, &path));
        } else if path.extension().is_some_and(|ext| extensions.iter().any(|one| ext == *one)) {
            files.push(path);
        }
    }
    files.sort();
    files
}

/// The lines of a file without its unit tests, which stand at its end.
fn without_tests(text: &str) -> impl Iterator<Item = &str> {
    text.lines().take_while(|line| *line != "#[cfg(test)]" && !line.starts_with("#[cfg(all(test"))
}

/// The code of a file: without comments and unit tests.
fn code(text: &str) -> String {
    without_tests(text).map(|line| line.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n")
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The paths that `text` starts with, such as `a::{b, c::d}`, each as its segments.
fn paths(text: &str) -> Vec<Vec<String>> {
    let text = text.trim_start();
    if let Some(group) = text.strip_prefix('{') {
        return members(group).into_iter().flat_map(paths).collect();
    }
    let head: String = text.chars().take_while(|c| is_word(*c)).collect();
    let rest = text[head.len()..].trim_start();
    if head.is_empty() {
        return if text.starts_with('*') { vec![Vec::new()] } else { Vec::new() };
    }
    let Some(rest) = rest.strip_prefix("::") else { return vec![vec![head]] };
    let tails = paths(rest);
    if tails.is_empty() {
        return vec![vec![head]]; // a turbofish
    }
    tails.into_iter().map(|tail| [vec![head.clone()], tail].concat()).collect()
}

/// The members of a brace group, the text of which begins after its brace.
fn members(group: &str) -> Vec<&str> {
    let (mut depth, mut start, mut found) = (0, 0, Vec::new());
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            ',' | '}' if depth == 0 => {
                found.push(&group[start..at]);
                start = at + 1;
                if c == '}' {
                    break;
                }
            }
            '}' => depth -= 1,
            _ => {}
        }
    }
    found
}

/// A module's place: the names from the crate's root to it.
fn module_of(file: &Path, src: &Path) -> Vec<String> {
    let below = file.strip_prefix(src).unwrap().with_extension("");
    let mut names: Vec<_> = below.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    if matches!(names.last().map(String::as_str), Some("mod" | "lib" | "main")) {
        names.pop();
    }
    names
}

/// What a file uses, as paths from the crate's root.
fn used_paths(text: &str, module: &[String], src: &Path) -> Vec<Vec<String>> {
    let code = code(text);
    let mut found = Vec::new();
    let folder = module.iter().fold(src.to_owned(), |folder, name| folder.join(name));
    for (at, _) in code.match_indices("::") {
        // the segment at the head of a path, but not of `pub(in crate::..)` or a macro's `$crate::..`
        let before = &code[..at];
        let first = &before[before.trim_end_matches(is_word).len()..];
        let ahead = &before[..before.len() - first.len()];
        if ahead.ends_with("(in ")
            || ahead.ends_with("::")
            || ahead.ends_with('$')
            || ahead.ends_with('.')
            || first.is_empty()
        {
            continue;
        }
        let rest = &code[at + 2..];
        match first {
            "crate" => found.extend(paths(rest)),
            "self" => found.extend(paths(rest).into_iter().map(|path| [module.to_vec(), path].concat())),
            "super" => {
                let above = &module[..module.len().saturating_sub(1)];
                for path in paths(rest) {
                    let ups = path.iter().take_while(|name| *name == "super").count();
                    let base = &above[..above.len().saturating_sub(ups)];
                    found.push([base.to_vec(), path[ups..].to_vec()].concat());
                }
            }
            child if file_of(&folder, child).is_some() => {
                for path in paths(rest) {
                    found.push([module.to_vec(), vec![child.to_owned()], path].concat());
                }
            }
            _ => {}
        }
    }
    found
}

/// The file of a module within the folder of its parent.
fn file_of(folder: &Path, name: &str) -> Option<PathBuf> {
    let places = [folder.join(format!("{name}.rs")), folder.join(name).join("mod.rs")];
    places.into_iter().find(|path| path.exists())
}

/// The file that has what a path names; none for what is at the root.
fn resolve(path: &[String], src: &Path) -> Option<PathBuf> {
    let (mut folder, mut file) = (src.to_owned(), None);
    for name in path {
        let Some(next) = file_of(&folder, name) else { break };
        file = Some(next);
        folder.push(name);
    }
    file
}

/// Which files use which.
type Uses = BTreeMap<PathBuf, BTreeSet<PathBuf>>;

fn uses_of(src: &Path) -> Uses {
    let of = |file: PathBuf| {
        let text = fs::read_to_string(&file).unwrap();
        let paths = used_paths(&text, &module_of(&file, src), src);
        let mut used: BTreeSet<_> = paths.iter().filter_map(|path| resolve(path, src)).collect();
        used.remove(&file); // a module within the file
        (file, used)
    };
    sources(src).into_iter().map(of).collect()
}

/// A shortest way from a file back to itself, if there is one.
fn circle_of(file: &Path, uses: &Uses) -> Option<Vec<PathBuf>> {
    let mut ways = VecDeque::from([vec![file.to_owned()]]);
    let mut seen = BTreeSet::new();
    while let Some(way) = ways.pop_front() {
        for next in way.last().and_then(|last| uses.get(last)).into_iter().flatten() {
            if next == file {
                return Some(way);
            }
            if seen.insert(next.clone()) {
                ways.push_back([way.clone(), vec![next.clone()]].concat());
            }
        }
    }
    None
}

/// The first folder, or the file's name, below `src/`.
fn layer(path: &Path, src: &Path) -> String {
    let below = path.strip_prefix(src).unwrap();
    below.iter().next().unwrap().to_string_lossy().trim_end_matches(".rs").to_owned()
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap()
}

/// What breaks the order of layers in a file of `layer`, as readable lines.
fn layer_problems(file: &str, layer: &str, used: &[Vec<String>]) -> Vec<String> {
    let Some(own) = level(layer) else {
        return vec![format!("{file}: `{layer}` is no layer; add it to LAYERS in tests/it/layers.rs")];
    };
    let mut problems = BTreeSet::new();
    for name in used.iter().filter_map(|path| path.first()) {
        let known = ROOT_NAMES.iter().find(|(root_name, _)| root_name == name);
        let name = known.map_or(name.as_str(), |(_, layer)| layer);
        match level(name) {
            Some(used) if used > own => {
                problems.insert(format!(
                    "{file}: `{layer}` (level {own}) uses crate::{name} (level {used}); a layer may use lower ones only"
                ));
            }
            Some(_) => {}
            None if !name.starts_with(|c: char| c.is_lowercase()) => {} // Tensor and Kind of tch
            None => {
                problems.insert(format!(
                    "{file}: crate::{name} is no layer; add it to LAYERS in tests/it/layers.rs"
                ));
            }
        }
    }
    problems.into_iter().collect()
}

#[test]
fn layers_use_lower_layers_only() {
    let src = src();
    let mut problems = Vec::new();
    for file in sources(&src).into_iter().filter(|file| *file != src.join("lib.rs")) {
        let used = used_paths(&read(&file), &module_of(&file, &src), &src);
        problems.extend(layer_problems(&file.display().to_string(), &layer(&file, &src), &used));
    }
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
}

#[test]
fn the_layer_check_sees_what_is_wrong() {
    let src = src();
    for (layer, text, expected) in [
        ("nn", "use crate::trainer::Trainer;", 1),
        ("nn", "use crate::{device::Device, ffi, callback::{Callback, x}};", 1),
        ("nn", "    crate::cli::run();", 1),
        ("nn", "use super::super::metrics::Accuracy;", 1),
        ("nn", "// see crate::trainer", 0),
        ("nn", "pub(in crate::trainer) fn f() {}", 0),
        ("nn", "use crate::error::Result;\nuse crate::Tensor;\nuse crate::Device;", 0),
        ("ffi", "use crate::Module;", 1),
        ("nn", "use crate::no_such_folder::X;", 1),
        ("trainer", "use crate::{\n    nn::Module,\n    data::{\n        Batch,\n    },\n};", 0),
        ("no_such_folder", "", 1),
    ] {
        let used = used_paths(text, &[layer.to_owned(), "x".to_owned()], &src);
        assert_eq!(layer_problems("x.rs", layer, &used).len(), expected, "{layer}: {text}");
    }
}

/// A layer is a folder or a file of `src/`, and ARCHITECTURE.md lists exactly these.
#[test]
fn the_list_of_layers_is_that_of_the_source_and_of_the_page() {
    let entries = fs::read_dir(src()).unwrap().map(|entry| layer(&entry.unwrap().path(), &src()));
    let in_source: BTreeSet<_> = entries.filter(|name| name != "lib").chain(["kernels".to_owned()]).collect();
    assert_eq!(LAYERS.map(str::to_owned).into_iter().collect::<BTreeSet<_>>(), in_source);
    let page = read(&workspace("ARCHITECTURE.md"));
    let rows = page.lines().filter_map(|line| {
        let mut words = line.strip_prefix("    ")?.split_whitespace();
        Some((words.next()?.parse::<usize>().ok()?, words.next()?))
    });
    let mut rows: Vec<_> = rows.collect();
    rows.sort_unstable();
    assert_eq!(rows, LAYERS.into_iter().enumerate().collect::<Vec<_>>());
}

#[test]
fn files_name_their_siblings_by_file() {
    let mut problems = Vec::new();
    let others = CRATES.map(|name| workspace(name).join("src"));
    for src in others.iter().chain([&src()]) {
        for (file, used) in uses_of(src) {
            let faces = used.iter().filter(|used| used.ends_with("mod.rs") || used.ends_with("lib.rs"));
            for face in faces.filter(|face| face.parent().is_some_and(|folder| file.starts_with(folder))) {
                if !file.ends_with("tests.rs") {
                    problems.push(format!("{}: uses what {} shows", file.display(), face.display()));
                }
            }
        }
    }
    assert!(problems.is_empty(), "name the file that has it:\n{}", problems.join("\n"));
}

#[test]
fn files_form_no_circle() {
    let src = src();
    let uses = uses_of(&src);
    assert!(uses.values().map(BTreeSet::len).sum::<usize>() > 500, "the scan has lost its sight: {uses:?}");
    let others = CRATES.map(|name| uses_of(&workspace(name).join("src")));
    for uses in others.iter().chain([&uses]) {
        for file in uses.keys() {
            assert_eq!(circle_of(file, uses), None, "these files use each other");
        }
    }
}

#[test]
fn files_of_the_kernels_are_named_from_the_root() {
    for file in sources(&kernels_src()) {
        for line in without_tests(&read(&file)) {
            assert!(!line.trim_start().starts_with("use super"), "{}: name it from `crate`", file.display());
        }
    }
}

#[test]
fn the_circle_check_sees_a_circle() {
    let src = kernels_src();
    let used = |text: &str, module: &[&str]| {
        let module: Vec<_> = module.iter().map(|name| (*name).to_owned()).collect();
        let paths = used_paths(text, &module, &src);
        paths.iter().filter_map(|path| resolve(path, &src)).collect::<Vec<_>>()
    };
    let product = |name: &str| src.join("product").join(name);
    let text = "use crate::product::{matrix, mkl::takes};\nuse crate::element::Bf16;\n// crate::views::X\n";
    assert_eq!(used(text, &["norm"]), [product("matrix.rs"), product("mkl.rs"), src.join("element.rs")]);
    assert_eq!(used("use super::mkl::takes;", &["product", "matrix"]), [product("mkl.rs")]);
    assert_eq!(used("use super::Matrix;", &["product", "matrix"]), [product("mod.rs")], "the face");
    assert_eq!(
        used("pub use mkl::takes;\nfn f() { mkl::g() }", &["product"]),
        [product("mkl.rs"), product("mkl.rs")]
    );
    assert_eq!(used("$crate::element::f(); x.element::<T>()", &["norm"]), [] as [PathBuf; 0]);
    let file = |name: &str| PathBuf::from(name);
    let uses = [("a", vec!["b"]), ("b", vec!["c", "d"]), ("c", vec!["b"]), ("d", vec![])];
    let uses = uses.map(|(name, used)| (file(name), used.into_iter().map(file).collect())).into();
    assert_eq!(circle_of(&file("a"), &uses), None);
    assert_eq!(circle_of(&file("b"), &uses), Some(vec![file("b"), file("c")]));
}

/// Lines of a file without its unit tests, which stand at its end.
fn code_lines(text: &str) -> usize {
    text.lines().take_while(|line| *line != "#[cfg(test)]").count()
}

#[test]
fn files_stay_short() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut problems = Vec::new();
    for path in files_with(&["rs", "cpp", "h"], crates) {
        let lines = code_lines(&fs::read_to_string(&path).unwrap());
        if lines > MAX_LINES {
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
const UNSAFE_KERNELS: [&str; 10] = [
    "views.rs",
    "threads.rs",
    "host.rs",
    "processor",
    "product",
    "convolution",
    "attention/cached.rs",
    "attention/heads.rs",
    "elementwise/chain.rs",
    "float8/halves.rs",
];

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

/// tch 0.24 takes slices of `half::bf16` for float16, so that their numbers are other ones.
#[test]
fn no_code_makes_tensors_of_the_crate_half() {
    let others = CRATES.map(|name| workspace(name).join("src"));
    let files = others.iter().chain([&src()]).flat_map(|src| sources(src)).collect::<Vec<_>>();
    let uses = |file: &&PathBuf| code(&read(file)).contains("half::");
    let problems: Vec<_> = files.iter().filter(uses).collect();
    assert!(files.len() > 300 && problems.is_empty(), "{problems:?} use half");
}

#[test]
fn crates_include_only_what_is_packaged_with_them() {
    let crates = src().join("../..").canonicalize().unwrap();
    let mut problems = Vec::new();
    for folder in std::fs::read_dir(crates).unwrap().map(|entry| entry.unwrap().path()) {
        for path in sources(&folder.join("src")) {
            let text = std::fs::read_to_string(&path).unwrap();
            let includes = text.split("include_").skip(1).filter_map(|rest| {
                let rest = rest.strip_prefix("str!(\"").or_else(|| rest.strip_prefix("bytes!(\""))?;
                rest.split('"').next()
            });
            for include in includes {
                let up = include.split('/').filter(|part| *part == "..").count();
                let depth = path.strip_prefix(&folder).unwrap().components().count() - 1;
                if up > depth || include.contains("tests/") && !text.contains("#[cfg(test)]") {
                    problems.push(format!("{}: {include}", path.display()));
                }
            }
        }
    }
    assert!(problems.is_empty(), "files outside the crate are not packaged:\n{}", problems.join("\n"));
}
