//! Real Gaudi cards: which there are, and Habana's plugin, which gives libtorch a back end for them.
//!
//! Written against the documented behaviour of Habana's libraries and tested with stand-ins for them; not yet run on
//! a card (docs/hpu.md).

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::flags::RuntimeFlags;
use crate::device::Device;
use crate::error::{DeviceError, Problem};
use crate::ffi::{self, Hlml, HlmlCard};

/// Where Habana's packages put their libraries.
const INSTALLED: &str = "/usr/lib/habanalabs";
/// Memory of the card that the plugin leaves to HCCL, and to what is exchanged.
const HCCL_MEMORY: &str = "PT_HCCL_MEMORY_ALLOWANCE_MB";
const HCCL_MEMORY_MB: &str = "512";
const SEE: &str = "see what hl-smi says";
const NEEDS: &str = "install the plugin with the other packages of the same release of Habana's software";

/// The Gaudi cards of this machine, and the plugin that drives them.
#[derive(Debug, Clone)]
pub(super) struct Gaudi {
    /// Those that `HABANA_VISIBLE_MODULES` leaves.
    pub cards: Vec<HlmlCard>,
    pub driver: Option<String>,
    hlml: PathBuf,
    flags: RuntimeFlags,
}

/// Habana's plugin for libtorch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plugin {
    pub library: PathBuf,
    /// Version of libtorch that it was built for; none if it does not say.
    pub required: Option<String>,
}

/// The libtorch of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Libtorch {
    pub version: String,
}

impl Gaudi {
    /// The cards that HLML lists.
    ///
    /// # Errors
    /// Why there are none.
    pub fn find(flags: &RuntimeFlags) -> Result<Self, Problem> {
        let hlml_path = hlml_path(flags)?;
        let hlml = Hlml::open(&hlml_path).map_err(|error| {
            let remedy = "install Habana's driver and firmware tools, or name the library in VOLTAIC_HLML";
            Problem::new(format!("no Gaudi cards: Habana's libhlml.so cannot be used: {error}"), remedy)
        })?;
        let count = hlml.device_count().map_err(|error| Problem::new(error, SEE))?;
        let cards = (0..count)
            .map(|index| hlml.card(index))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| Problem::new(format!("the Gaudi cards cannot be listed: {error}"), SEE))?;
        let visible = flags.visible_modules();
        let is_visible = |card: &HlmlCard| match (&visible, card.module_id) {
            (Some(visible), Some(module)) => visible.contains(&module),
            _ => true,
        };
        let all = cards.len();
        let cards: Vec<HlmlCard> = cards.into_iter().filter(is_visible).collect();
        match (all, cards.is_empty()) {
            (0, _) => {
                let remedy = "see what hl-smi says, and in a container, pass the cards to it";
                Err(Problem::new("no Gaudi cards: the driver lists none", remedy))
            }
            (_, true) => Err(Problem::new(
                format!(
                    "HABANA_VISIBLE_MODULES={} leaves none of the {all} Gaudi cards",
                    flags.text("HABANA_VISIBLE_MODULES").unwrap_or_default()
                ),
                "unset it, or name modules that hl-smi lists",
            )),
            _ => Ok(Self { cards, driver: hlml.driver_version(), hlml: hlml_path, flags: flags.clone() }),
        }
    }

    /// What the environment says.
    pub fn flags(&self) -> &RuntimeFlags {
        &self.flags
    }

    /// The cards as they are now.
    pub fn current_cards(&self) -> Vec<HlmlCard> {
        let Ok(hlml) = Hlml::open(&self.hlml) else { return self.cards.clone() };
        self.cards.iter().map(|card| hlml.card(card.index).unwrap_or_else(|_| card.clone())).collect()
    }

    /// The card that this process drives, as it is now.
    pub fn current_card(&self) -> Result<HlmlCard, Problem> {
        let module = self.module()?;
        let card = self.cards.iter().find(|card| module.is_none() || card.module_id == module);
        let card =
            card.ok_or_else(|| Problem::new(format!("no Gaudi card has the module id {module:?}"), SEE))?;
        let read = Hlml::open(&self.hlml).and_then(|hlml| hlml.card(card.index));
        read.map_err(|error| Problem::new(error, SEE))
    }

    /// `gaudi2` and the like, from the name that HLML gives, such as `HL-225`.
    pub fn generation(&self) -> &'static str {
        let name = self.cards.first().map_or("", |card| card.name.as_str()).to_ascii_lowercase();
        if name.contains("gaudi3") || name.contains("hl-3") {
            "gaudi3"
        } else if name.contains("gaudi2") || name.contains("hl-22") || name.contains("hl-288") {
            "gaudi2"
        } else {
            "gaudi"
        }
    }

    /// The plugin that fits this libtorch.
    ///
    /// # Errors
    /// That there is none, or why it does not fit.
    pub fn plugin(&self) -> Result<Plugin, Problem> {
        let libtorch = Libtorch::loaded();
        let plugin = Plugin::find(&self.flags, &libtorch, &plugin_folders())?;
        plugin.check_version(&libtorch)?;
        Ok(plugin)
    }

    /// Loads the plugin. Each process drives one card: that of its local rank.
    pub fn load(&self) -> Result<(), DeviceError> {
        let refuse = |problem| DeviceError::Unavailable { device: "hpu".to_owned(), problem };
        if ffi::backend_is_loaded(Device::Hpu(0)) {
            return Ok(());
        }
        if let Some(mode) = self.flags.text("PT_HPU_LAZY_MODE").filter(|mode| *mode != "0") {
            return Err(DeviceError::Setting {
                name: "PT_HPU_LAZY_MODE".to_owned(),
                value: mode.to_owned(),
                accepted: "0, since Habana's lazy mode needs Python".to_owned(),
            });
        }
        ffi::set_environment("PT_HPU_LAZY_MODE", "0");
        if let Some(module) = self.module().map_err(refuse)? {
            ffi::set_environment("HLS_MODULE_ID", &module.to_string());
        }
        if self.flags.text(HCCL_MEMORY).is_none() {
            ffi::set_environment(HCCL_MEMORY, HCCL_MEMORY_MB); // heeded if there are several ranks
        }
        let kernels = Path::new(INSTALLED).join("libtpc_kernels.so");
        if self.flags.text("GC_KERNEL_PATH").is_none() && kernels.exists() {
            ffi::set_environment("GC_KERNEL_PATH", &kernels.to_string_lossy());
        }
        self.plugin().map_err(refuse)?.load().map_err(refuse)
    }

    /// The module that this process takes; none if any will do.
    fn module(&self) -> Result<Option<u32>, Problem> {
        if let Some(module) = self.flags.number("HLS_MODULE_ID") {
            return Ok(Some(module as u32));
        }
        let number = |names: [&str; 2]| {
            names.iter().find_map(|name| env::var(name).ok()).and_then(|text| text.parse::<usize>().ok())
        };
        let local_rank = number(["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"]).unwrap_or(0);
        let is_alone = number(["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"]).unwrap_or(1) <= 1;
        match self.flags.visible_modules() {
            None if is_alone => Ok(None),
            None => Ok(Some(local_rank as u32)),
            Some(visible) => visible.get(local_rank).copied().map(Some).ok_or_else(|| {
                let what = format!(
                    "local rank {local_rank} has no card: HABANA_VISIBLE_MODULES names {} of them",
                    visible.len()
                );
                Problem::new(what, "start fewer processes on this node")
            }),
        }
    }
}

/// The library that `VOLTAIC_HLML` names, else Habana's own, else whatever the loader finds.
fn hlml_path(flags: &RuntimeFlags) -> Result<PathBuf, Problem> {
    if let Some(path) = flags.text("VOLTAIC_HLML") {
        let path = PathBuf::from(path);
        return match path.is_file() {
            true => Ok(path),
            false => {
                let what = format!("VOLTAIC_HLML names {}, which is not a file", path.display());
                Err(Problem::new(what, "fix or unset it"))
            }
        };
    }
    let installed = Path::new(INSTALLED).join("libhlml.so");
    Ok(if installed.exists() { installed } else { PathBuf::from("libhlml.so") })
}

impl Libtorch {
    /// With the version that its folder states; one built by Habana carries a `git` tag.
    pub fn loaded() -> Self {
        let stated = ffi::libtorch_library()
            .as_deref()
            .and_then(Path::parent)
            .and_then(Path::parent)
            .and_then(stated_version);
        Self { version: stated.unwrap_or_else(ffi::libtorch_version) }
    }

    /// Whether Habana built it, which its plugin has a library of its own for.
    fn is_fork(&self) -> bool {
        self.version.split_once('+').is_some_and(|(_, tag)| tag.starts_with("git"))
    }
}

/// The version in a PyTorch package's `version.py`, or a libtorch folder's `build-version`.
fn stated_version(folder: &Path) -> Option<String> {
    if let Ok(text) = fs::read_to_string(folder.join("version.py")) {
        let line = text.lines().find(|line| line.starts_with("__version__"))?;
        return line.split(['\'', '"']).nth(1).map(str::to_owned);
    }
    fs::read_to_string(folder.join("build-version")).ok().map(|text| text.trim().to_owned())
}

impl Plugin {
    /// The library in the folder or file that `VOLTAIC_HPU_PLUGIN` names, else in the first folder that has it.
    pub fn find(flags: &RuntimeFlags, libtorch: &Libtorch, folders: &[PathBuf]) -> Result<Self, Problem> {
        let name = if libtorch.is_fork() {
            "libhabana_pytorch2_plugin.so"
        } else {
            "libhabana_pytorch2_plugin.upstream.so"
        };
        let given = flags.text("VOLTAIC_HPU_PLUGIN").map(PathBuf::from);
        let library = match &given {
            Some(path) if path.is_file() => Some(path.clone()),
            Some(path) => Some(path.join(name)).filter(|library| library.is_file()),
            None => folders.iter().map(|folder| folder.join(name)).find(|library| library.is_file()),
        };
        let Some(library) = library else {
            return Err(match given {
                Some(path) => Problem::new(
                    format!(
                        "VOLTAIC_HPU_PLUGIN names {}, which is neither a library nor a folder with {name}",
                        path.display()
                    ),
                    "fix or unset it",
                ),
                None => Problem::new(
                    format!("Habana's plugin {name} for libtorch {} is not found", libtorch.version),
                    "install habana_torch_plugin in the Python environment that is active, or name its folder \
                     (habana_frameworks/torch/lib) in VOLTAIC_HPU_PLUGIN; VOLTAIC_HPU=emulator trains without the cards",
                ),
            });
        };
        let required = library.ancestors().skip(1).take(3).find_map(|folder| {
            fs::read_to_string(folder.join("required_version.txt")).ok().map(|text| text.trim().to_owned())
        });
        Ok(Self { library, required })
    }

    /// Habana's rule: major and minor version must be those it was built for.
    pub fn check_version(&self, libtorch: &Libtorch) -> Result<(), Problem> {
        let minor = |version: &str| version.split(['.', '+']).take(2).map(str::to_owned).collect::<Vec<_>>();
        match &self.required {
            Some(required) if minor(required) != minor(&libtorch.version) => Err(Problem::new(
                format!(
                    "Habana's plugin {} needs libtorch {required}, and this program has {}",
                    self.library.display(),
                    libtorch.version
                ),
                format!(
                    "install the plugin for that version, or build voltaic with LIBTORCH set to a PyTorch {required}"
                ),
            )),
            _ => Ok(()),
        }
    }

    fn load(&self) -> Result<(), Problem> {
        // the plugin opens it by its bare name, and finds it if it is loaded already
        let synapse = Path::new(INSTALLED).join("libSynapse.so");
        for library in [self.python(), Some(synapse)].into_iter().flatten().filter(|path| path.is_file()) {
            ffi::load_library(&library).map_err(|error| Problem::new(error, NEEDS))?;
        }
        ffi::load_library(&self.library).map_err(|error| {
            let what = format!("Habana's plugin {} cannot be loaded: {error}", self.library.display());
            let remedy = format!(
                "a library that it misses lies in {INSTALLED} or in the Python installation: add that folder to \
                 LD_LIBRARY_PATH"
            );
            Problem::new(what, remedy)
        })?;
        let adopted = ffi::adopt_hpu_plugin();
        adopted.map_err(|error| Problem::new(format!("{}: {error}", self.library.display()), NEEDS))
    }

    /// The `libpython` of the environment it is installed in, `<prefix>/lib/python3.x/...`, which it needs.
    fn python(&self) -> Option<PathBuf> {
        let is_version = |folder: &&Path| {
            folder.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with("python3."))
        };
        let home = self.library.ancestors().find(is_version)?;
        let name = home.file_name().and_then(OsStr::to_str)?;
        Some(home.parent()?.join(format!("lib{name}.so.1.0")))
    }
}

/// Folders that may hold the plugin: of the active Python environment, of the user's and the system's Python, and
/// where Habana's installer makes its own environment.
fn plugin_folders() -> Vec<PathBuf> {
    let variable = |name| env::var_os(name).filter(|value| !value.is_empty());
    let mut packages: Vec<PathBuf> = variable("PYTHONPATH").iter().flat_map(env::split_paths).collect();
    let mut prefixes: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable).map(PathBuf::from).collect();
    let path = variable("PATH");
    let python =
        path.iter().flat_map(env::split_paths).map(|bin| bin.join("python3")).find(|file| file.exists());
    prefixes.extend(python.as_deref().and_then(Path::parent).and_then(Path::parent).map(Path::to_owned));
    if let Some(home) = variable("HOME").map(PathBuf::from) {
        prefixes.extend([home.join("habanalabs-venv"), home.join(".local")]);
    }
    prefixes.extend(variable("HABANALABS_VIRTUAL_DIR").map(PathBuf::from));
    prefixes.extend(["/usr/local", "/usr"].map(PathBuf::from));
    for prefix in &prefixes {
        packages.extend(python_packages(prefix));
    }
    let mut folders: Vec<PathBuf> =
        packages.into_iter().map(|folder| folder.join("habana_frameworks/torch/lib")).collect();
    folders.push(PathBuf::from(INSTALLED));
    folders
}

/// The folders for packages below a Python installation or environment.
fn python_packages(prefix: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(prefix.join("lib")) else { return Vec::new() };
    let mut homes: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    homes.retain(|home| {
        home.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with("python3"))
    });
    homes.sort();
    homes.iter().flat_map(|home| [home.join("site-packages"), home.join("dist-packages")]).collect()
}

/// The cards, once the plugin is loaded in this process.
pub(super) static LOADED: OnceLock<Gaudi> = OnceLock::new();

/// Total bytes and bytes in use of the card that this process drives, all processes together, as HLML reports them.
pub(in crate::accelerator) fn card_memory() -> Option<(u64, u64)> {
    let card = LOADED.get()?.current_card().ok()?;
    Some((card.memory_total?, card.memory_used?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(values: &'static [(&'static str, &'static str)]) -> RuntimeFlags {
        RuntimeFlags::read(|name| {
            values.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
        .unwrap()
    }

    fn libtorch(version: &str) -> Libtorch {
        Libtorch { version: version.to_owned() }
    }

    /// A Python environment with both plugins, built for 2.11.0.
    fn environment() -> tempfile::TempDir {
        let prefix = tempfile::tempdir().unwrap();
        let lib = prefix.path().join("lib/python3.12/site-packages/habana_frameworks/torch/lib");
        fs::create_dir_all(&lib).unwrap();
        for name in ["libhabana_pytorch2_plugin.so", "libhabana_pytorch2_plugin.upstream.so"] {
            fs::write(lib.join(name), "").unwrap();
        }
        fs::write(lib.with_file_name("required_version.txt"), "2.11.0\n").unwrap();
        prefix
    }

    fn folders(prefix: &Path) -> Vec<PathBuf> {
        python_packages(prefix).into_iter().map(|folder| folder.join("habana_frameworks/torch/lib")).collect()
    }

    #[test]
    fn the_plugin_for_this_libtorch_is_found_in_a_python_environment() {
        let prefix = environment();
        for (version, name) in [
            ("2.11.0+cpu", "libhabana_pytorch2_plugin.upstream.so"),
            ("2.11.0", "libhabana_pytorch2_plugin.upstream.so"),
            ("2.11.0a0+git009b5f6", "libhabana_pytorch2_plugin.so"),
        ] {
            let plugin = Plugin::find(&flags(&[]), &libtorch(version), &folders(prefix.path())).unwrap();
            assert!(plugin.library.ends_with(name), "{version}: {}", plugin.library.display());
            assert_eq!(plugin.required.as_deref(), Some("2.11.0"));
            assert_eq!(plugin.check_version(&libtorch(version)), Ok(()));
            assert_eq!(plugin.python(), Some(prefix.path().join("lib/libpython3.12.so.1.0")));
        }
    }

    #[test]
    fn a_plugin_for_another_libtorch_is_refused_with_both_versions() {
        let prefix = environment();
        let plugin = Plugin::find(&flags(&[]), &libtorch("2.12.0"), &folders(prefix.path())).unwrap();
        let message = plugin.check_version(&libtorch("2.12.0+cpu")).unwrap_err();
        assert!(
            message.what.contains("needs libtorch 2.11.0") && message.what.contains("has 2.12.0+cpu"),
            "{message}"
        );
    }

    #[test]
    fn a_plugin_that_is_not_there_is_described() {
        let message = Plugin::find(&flags(&[]), &libtorch("2.11.0"), &[]).unwrap_err();
        assert!(
            message.what.contains("libhabana_pytorch2_plugin.upstream.so")
                && message.remedy.contains("VOLTAIC_HPU_PLUGIN")
        );
        let given = flags(&[("VOLTAIC_HPU_PLUGIN", "/nowhere")]);
        let message = Plugin::find(&given, &libtorch("2.11.0"), &[]).unwrap_err();
        assert!(message.what.contains("names /nowhere"), "{message}");
    }

    #[test]
    fn versions_are_read_from_either_file() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(stated_version(folder.path()), None);
        fs::write(folder.path().join("build-version"), "2.11.0+cpu\n").unwrap();
        assert_eq!(stated_version(folder.path()).as_deref(), Some("2.11.0+cpu"));
        fs::write(folder.path().join("version.py"), "from x import y\n__version__ = '2.11.0a0+git1'\n")
            .unwrap();
        assert_eq!(stated_version(folder.path()).as_deref(), Some("2.11.0a0+git1"));
        assert!(Libtorch::loaded().version.starts_with(&ffi::libtorch_version()));
    }

    #[test]
    fn a_library_for_the_cards_that_is_named_must_be_there() {
        let message = Gaudi::find(&flags(&[("VOLTAIC_HLML", "/nowhere/libhlml.so")])).unwrap_err();
        assert!(message.what.contains("VOLTAIC_HLML names /nowhere/libhlml.so"), "{message}");
    }
}
