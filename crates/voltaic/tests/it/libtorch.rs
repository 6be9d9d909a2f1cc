//! Another libtorch than the one that voltaic was compiled with is refused. A stand-in for one, which tells another
//! version, is loaded before the real one.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use voltaic::error::Error;

use crate::probe::{own_process, plays, silent, text_of};

/// Compiles a library that says it is libtorch 2.10.3, once.
fn other_libtorch() -> &'static PathBuf {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("other_libtorch");
        std::fs::create_dir_all(&folder).unwrap();
        let (source, library) = (folder.join("version.c"), folder.join("libother.so"));
        let text = "unsigned long long aoti_torch_abi_version(void) { return 0x020a030000000000ull; }\n";
        std::fs::write(&source, text).unwrap();
        let made =
            Command::new("cc").args(["-shared", "-fPIC"]).arg(&source).arg("-o").arg(&library).status();
        assert!(made.unwrap().success());
        library
    })
}

#[test]
fn the_command_names_both_versions_and_the_library() {
    for arguments in [&["--version"][..], &["devices"]] {
        let output = Command::new(env!("CARGO_BIN_EXE_voltaic"))
            .args(arguments)
            .env("LD_PRELOAD", other_libtorch())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.starts_with("error: "), "{said}");
        for part in ["libother.so is libtorch 2.10.3", "compiled with libtorch 2.11.0", "LD_LIBRARY_PATH"] {
            assert!(said.contains(part), "no `{part}` in: {said}");
        }
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn a_trainer_and_the_pool_refuse_another_libtorch() {
    if !plays("refused") {
        text_of(&own_process("refused").env("LD_PRELOAD", other_libtorch()).output().unwrap());
        return;
    }
    let of_trainer = silent().build().err().expect("another libtorch");
    let of_pool = voltaic::ffi::install_host_pool().unwrap_err();
    for error in [of_trainer, of_pool] {
        let Error::Libtorch(error) = error else { panic!("{error}") };
        assert_eq!((error.compiled.as_str(), error.loaded.as_deref()), ("2.11.0", Some("2.10.3")));
        assert!(error.path.ends_with("libother.so"), "{}", error.path.display());
    }
}
