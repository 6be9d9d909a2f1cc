//! How the program was built, and which kernels it uses.

use serde::Serialize;

use crate::ffi;
use crate::kernels;

/// Version of the crate `tch`, as in the workspace's manifest.
const TCH: &str = "0.24";

/// Versions.
#[derive(Serialize)]
pub(super) struct Build {
    program: String,
    voltaic: &'static str,
    profile: String,
    target: &'static str,
    rustc: &'static str,
    cxx: &'static str,
    tch: &'static str,
    libtorch: String,
    libtorch_library: Option<String>,
    /// Why the libtorch that is loaded does not fit.
    #[serde(skip_serializing_if = "Option::is_none")]
    libtorch_error: Option<String>,
    threads: i64,
}

impl Build {
    pub fn of_process(program: &str) -> Self {
        Self {
            program: program.to_owned(),
            voltaic: env!("CARGO_PKG_VERSION"),
            profile: format!(
                "{}, opt-level {}",
                env!("VOLTAIC_BUILD_PROFILE"),
                env!("VOLTAIC_BUILD_OPT_LEVEL")
            ),
            target: env!("VOLTAIC_BUILD_TARGET"),
            rustc: env!("VOLTAIC_BUILD_RUSTC"),
            cxx: env!("VOLTAIC_BUILD_CXX"),
            tch: TCH,
            libtorch: ffi::libtorch_version(),
            libtorch_library: ffi::libtorch_library().map(|path| path.display().to_string()),
            libtorch_error: ffi::check_libtorch().err().map(|error| error.to_string()),
            threads: i64::from(tch::get_num_threads()),
        }
    }

    pub fn lines(&self) -> Vec<(String, String)> {
        let library = self.libtorch_library.as_deref().unwrap_or("unknown");
        let mut lines = vec![
            ("voltaic", format!("{} ({}), program {}", self.voltaic, self.profile, self.program)),
            ("rustc", format!("{}, target {}", self.rustc, self.target)),
            ("C++ compiler", self.cxx.to_owned()),
            ("libtorch", format!("{}, {} threads per operator, {library}", self.libtorch, self.threads)),
            ("tch", self.tch.to_owned()),
        ];
        lines.extend(self.libtorch_error.clone().map(|error| ("error", error)));
        lines.into_iter().map(|(label, value)| (label.to_owned(), value)).collect()
    }
}

/// voltaic's kernels for the CPU, and what they compute on this processor.
#[derive(Serialize)]
pub(super) struct Kernels {
    optimized: bool,
    in_use: bool,
    /// Why they are not in use, or cannot be.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    chosen: Vec<Chosen>,
}

/// What computes something here; all else is libtorch's.
#[derive(Serialize)]
struct Chosen {
    what: &'static str,
    dtype: String,
    by: Vec<String>,
}

impl Kernels {
    pub fn of_process() -> Self {
        let installed = ffi::install_kernels();
        let in_use = matches!(installed, Ok(true));
        let reason = match &installed {
            Err(error) => Some(error.to_string()),
            Ok(true) => None,
            Ok(false) if std::env::var_os("VOLTAIC_CPU_KERNELS").is_some() => {
                Some("VOLTAIC_CPU_KERNELS says so".to_owned())
            }
            Ok(false) if !kernels::IS_OPTIMIZED => Some(
                "the crate voltaic-kernels is compiled without optimization; build with --release, or set opt-level = 3 \
                 for it ([profile.dev.package.voltaic-kernels])"
                    .to_owned(),
            ),
            Ok(false) => Some("the processor lacks AVX2".to_owned()),
        };
        let mut chosen: Vec<Chosen> = Vec::new();
        for row in kernels::in_force(&kernels::Machine::here()) {
            let dtype = format!("{:?}", row.dtype).to_lowercase();
            match chosen.iter_mut().find(|known| known.what == row.what && known.dtype == dtype) {
                Some(known) if known.by.contains(&row.kernel) => {}
                Some(known) => known.by.push(row.kernel),
                None => chosen.push(Chosen { what: row.what, dtype, by: vec![row.kernel] }),
            }
        }
        Self { optimized: kernels::IS_OPTIMIZED, in_use, reason, chosen }
    }

    pub fn lines(&self) -> Vec<(String, String)> {
        let state = match (&self.reason, self.in_use) {
            (Some(reason), _) => format!("not in use: {reason}"),
            (None, true) if self.optimized => "in use".to_owned(),
            (None, _) => "in use, but compiled without optimization".to_owned(),
        };
        let mut lines = vec![("voltaic's".to_owned(), state)];
        let rest = if self.in_use { "here" } else { "would be" };
        for Chosen { what, dtype, by } in &self.chosen {
            lines.push((String::new(), format!("{what}, {dtype} ({rest}): {}", by.join(", "))));
        }
        lines
    }
}
