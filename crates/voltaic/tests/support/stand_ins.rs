//! Stand-ins for Habana's libraries.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::compile::compile;

/// Where the stand-ins are, laid out as Habana's packages are.
pub struct StandIns {
    pub hlml: PathBuf,
    /// HCCL and Synapse.
    pub hccl: PathBuf,
    /// `habana_frameworks/torch/lib`.
    pub plugin: PathBuf,
}

/// Compiles them once.
pub fn stand_ins() -> &'static StandIns {
    static MADE: OnceLock<StandIns> = OnceLock::new();
    MADE.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(env!("CARGO_CRATE_NAME")).join("stand_ins");
        let plugin = folder.join("habana_frameworks/torch/lib");
        fs::create_dir_all(&plugin).unwrap();
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gaudi");
        let hlml = folder.join("libhlml.so");
        compile("cc", &[], &sources.join("hlml.c"), &hlml);
        let hccl = folder.join("libhcl.so");
        compile("cc", &["-DHCCL"], &sources.join("../collectives/library.c"), &hccl);
        let include = Path::new(env!("VOLTAIC_LIBTORCH_LIB")).with_file_name("include");
        let include = format!("-isystem{}", include.display());
        let library = plugin.join("libhabana_pytorch2_plugin.upstream.so");
        compile("c++", &["-std=c++20", "-DNDEBUG", &include], &sources.join("plugin.cpp"), &library);
        fs::write(plugin.join("libbroken.so"), "no library").unwrap();
        StandIns { hlml, hccl, plugin }
    })
}
