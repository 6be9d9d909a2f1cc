//! Compiles the shim against the libtorch that torch-sys found and hands its folder on.

mod objects;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() {
    for own in ["csrc", "build.rs", "objects.rs"] {
        println!("cargo:rerun-if-changed={own}");
    }
    let lib_dir = env::var("DEP_TCH_LIBTORCH_LIB").expect(
        "torch-sys did not report its libtorch folder (DEP_TCH_LIBTORCH_LIB); run scripts/setup.sh, or set LIBTORCH",
    );
    let libtorch = PathBuf::from(&lib_dir).join("..");
    let include = libtorch.join("include");
    for path in objects::identity_files(&libtorch) {
        println!("cargo:rerun-if-changed={}", path.display());
    }
    let sources = objects::sources(Path::new("csrc")).expect("csrc/ lies beside build.rs");
    let mut compiler = cc::Build::new();
    compiler
        .cpp(true)
        .std("c++20")
        .opt_level(2)
        .debug(false) // of libtorch's headers: it doubles the time
        .define("NDEBUG", None) // as libtorch is: inline functions of its headers differ
        .define("AT_PER_OPERATOR_HEADERS", None) // libtorch's headers then bring few operators, not all
        .include("csrc")
        .include("csrc/ranks") // for <gloo/..>, which libtorch's headers name
        .flag(format!("-isystem{}", include.display()))
        .flag(format!("-isystem{}", include.join("torch/csrc/api/include").display()))
        .flag("-Wall")
        .flag("-Wextra");
    let objects =
        compile(&compiler, &sources, &libtorch).expect("csrc/ can be read, and the target folder written to");
    cc::Build::new().cpp(true).objects(objects).compile("voltaic_shim");
    println!("cargo:rustc-link-search=native={lib_dir}");
    println!("cargo:rustc-link-lib=torch_cpu");
    println!("cargo:rustc-link-lib=c10");
    println!("cargo:rustc-link-arg-tests=-Wl,-rpath,{lib_dir}");
    println!("cargo:libtorch_lib={lib_dir}");
    println!("cargo:cxx={}", compiler_version(&compiler));
}

/// What the C++ compiler says of itself, on one line, for `voltaic env`.
fn compiler_version(compiler: &cc::Build) -> String {
    let tool = compiler.get_compiler();
    let output = tool.to_command().arg("--version").output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    text.lines().next().unwrap_or("unknown").trim().to_owned()
}

/// Compiles what has changed since the last time; all of it takes minutes. Objects lie in the target folder, where debug
/// and release builds share them, each with a stamp that tells what it was made from.
fn compile(compiler: &cc::Build, sources: &[PathBuf], libtorch: &Path) -> io::Result<Vec<PathBuf>> {
    let tool = compiler.get_compiler(); // not as a command, which has variables of each build
    let command = format!("{:?} {:?}", tool.path(), tool.args());
    let folder = objects_folder(&command);
    fs::create_dir_all(&folder)?;
    let mut objects = Vec::new();
    let mut stale = Vec::new();
    for source in sources {
        let made_from = objects::made_from(source, Path::new("csrc"), libtorch)?;
        let object = folder.join(objects::name(source, Path::new("csrc")));
        let stamp = object.with_extension("stamp");
        if !object.exists() || fs::read_to_string(&stamp).ok().as_ref() != Some(&made_from) {
            stale.push((source, object.clone(), stamp, made_from));
        }
        objects.push(object);
    }
    let made = compiler.clone().files(stale.iter().map(|(source, ..)| source)).compile_intermediates();
    for ((_, object, stamp, made_from), compiled) in stale.iter().zip(&made) {
        let _ = fs::remove_file(stamp); // should this be cut off, there is none
        fs::rename(compiled, object)?;
        fs::write(stamp, made_from)?;
    }
    Ok(objects)
}

/// A folder for the objects of this compiler with these arguments.
fn objects_folder(command: &str) -> PathBuf {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")); // target/profile/build/package/out
    let mut hasher = DefaultHasher::new();
    command.hash(&mut hasher);
    out.ancestors().nth(4).unwrap_or(&out).join("voltaic-shim").join(format!("{:016x}", hasher.finish()))
}
