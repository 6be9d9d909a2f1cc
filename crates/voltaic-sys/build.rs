//! Compiles the shim against the libtorch that torch-sys found and hands its folder on.

mod objects;

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
    let mut compiler = cc::Build::new();
    compiler
        .cpp(true)
        .std("c++20")
        .opt_level(2)
        .debug(false) // of libtorch's headers: it doubles the time
        .define("NDEBUG", None) // as libtorch is: inline functions of its headers differ
        .define("AT_PER_OPERATOR_HEADERS", None) // libtorch's headers then bring few operators, not all
        .define("USE_C10D_GLOO", None) // libtorch's headers then declare the group of processes over Gloo
        .include("csrc")
        .include("csrc/ranks") // for <gloo/..>, which libtorch's headers name
        .flag(format!("-isystem{}", include.display()))
        .flag(format!("-isystem{}", include.join("torch/csrc/api/include").display()))
        .flag("-Wall")
        .flag("-Wextra")
        .flag_if_supported("-Wno-subobject-linkage"); // of structures in files that a unit includes
    let objects = compile(&compiler, &libtorch).expect("csrc/ can be read, and the target folder written to");
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

/// The objects of the shim, of which those are compiled that no build of this user has compiled before: all take minutes.
/// They are kept in the user's cache, under names that tell what they were made from, for all crates and profiles.
fn compile(compiler: &cc::Build, libtorch: &Path) -> io::Result<Vec<PathBuf>> {
    let tool = compiler.get_compiler(); // not as a command, which has variables of each build
    let command = format!("{} {:?} {:?}", compiler_version(compiler), tool.path(), tool.args());
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let cache = objects::Cache::new(&cache_of_user().unwrap_or_else(|| out.clone()));
    let (mut kept, mut missing) = (Vec::new(), Vec::new());
    for (name, text) in objects::units(Path::new("csrc"))? {
        let unit = out.join(format!("{name}.cpp"));
        fs::write(&unit, text)?;
        let made_from = objects::made_from(&unit, Path::new("csrc"), libtorch, &command)?;
        let object = format!("{name}-{made_from}.o");
        match cache.get(&object) {
            Some(path) => kept.push(path),
            None => missing.push((unit, object)),
        }
    }
    let compiled = compiler.clone().files(missing.iter().map(|(unit, _)| unit)).compile_intermediates();
    kept.extend(missing.iter().zip(compiled).map(|((_, object), path)| cache.put(object, path)));
    Ok(kept)
}

/// `~/.cache/voltaic/shim`, beside libtorch; none where it cannot be made.
fn cache_of_user() -> Option<PathBuf> {
    let variable = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let caches = variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")))?;
    let folder = caches.join("voltaic/shim");
    fs::create_dir_all(&folder).ok().map(|()| folder)
}
