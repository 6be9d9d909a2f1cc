//! The variables of the environment that describe HPUs: Habana's runtime flags and voltaic's own, read in this one
//! place.

use std::env;
use std::fmt;

use serde::Serialize;

use crate::config::{nearest, parse_size};
use crate::error::DeviceError;
use crate::ffi::MAX_HPUS;

/// What values a flag takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// One of these words, in any case.
    Word(&'static [&'static str]),
    /// 0 or 1, true or false.
    Switch,
    /// A whole number in this range.
    Number(u64, u64),
    /// A size such as `4GiB`.
    Size,
    /// Numbers of modules with commas between them.
    Modules,
    /// `<folder>,<true or false>,<MB>`.
    RecipeCache,
    /// A path, or other text.
    Text,
}

/// A flag that is known.
struct Flag {
    name: &'static str,
    kind: Kind,
    default: &'static str,
    /// What it does on emulated HPUs, and on cards where that is not Habana's doing.
    effect: &'static str,
}

const DISABLE_TENSOR_CACHE: &str = "PT_HPUGRAPH_DISABLE_TENSOR_CACHE";
const LAZY_MODE: &str = "PT_HPU_LAZY_MODE";
const NO_EFFECT: &str = "none on emulated HPUs";
const HANDED_ON: &str = "none on emulated HPUs; handed to the plugin";

#[rustfmt::skip]
const FLAGS: [Flag; 48] = [
    Flag { name: "VOLTAIC_HPU", kind: Kind::Word(&["auto", "gaudi", "emulator"]), default: "auto", effect: "what hpu means; auto: Gaudi cards if there are any, else emulated ones" },
    Flag { name: "VOLTAIC_HPU_GENERATION", kind: Kind::Word(&["gaudi", "gaudi2", "gaudi3"]), default: "gaudi2", effect: "generation of the emulated cards: their memory and dtypes" },
    Flag { name: "VOLTAIC_HPU_DEVICES", kind: Kind::Number(1, MAX_HPUS as u64), default: "8", effect: "number of emulated cards" },
    Flag { name: "VOLTAIC_HPU_MEMORY", kind: Kind::Size, default: "the generation's", effect: "memory of each emulated card" },
    Flag { name: "VOLTAIC_HPU_STRICT", kind: Kind::Switch, default: "1", effect: "0: emulated cards allow the dtypes that real ones lack" },
    Flag { name: "VOLTAIC_HPU_PLUGIN", kind: Kind::Text, default: "searched for", effect: "Habana's plugin for libtorch: the library, or the folder it is in" },
    Flag { name: "VOLTAIC_HLML", kind: Kind::Text, default: "searched for", effect: "libhlml.so, which lists the cards" },
    Flag { name: "VOLTAIC_HCCL", kind: Kind::Text, default: "searched for", effect: "libhcl.so, which several cards exchange tensors by" },
    Flag { name: "VOLTAIC_SYNAPSE", kind: Kind::Text, default: "searched for", effect: "libSynapse.so, which copies what is exchanged" },
    Flag { name: "HABANA_VISIBLE_MODULES", kind: Kind::Modules, default: "0,1,2,3,4,5,6,7", effect: "which modules a node's processes take; emulated: how many cards there are" },
    Flag { name: "HLS_MODULE_ID", kind: Kind::Number(0, 7), default: "by local rank", effect: "which module this process takes; set before the plugin is loaded" },
    Flag { name: LAZY_MODE, kind: Kind::Number(0, 2), default: "0", effect: "emulated HPUs compute at once whatever it says; cards: 0 only, as libtorch without Python has no lazy mode" },
    Flag { name: "PT_HABANA_POOL_SIZE", kind: Kind::Number(1, 1024), default: "24", effect: "GiB of the memory pool, 24 means all; emulated: the limit, unless VOLTAIC_HPU_MEMORY is set" },
    Flag { name: "PT_HPU_POOL_MEM_ACQUIRE_PERC", kind: Kind::Number(1, 100), default: "100", effect: "percent of the memory that the pool takes; emulated: the limit, unless VOLTAIC_HPU_MEMORY is set" },
    Flag { name: "PT_HCCL_MEMORY_ALLOWANCE_MB", kind: Kind::Number(0, 65536), default: "512", effect: "MiB of a card that the pool leaves to HCCL; none on emulated HPUs" },
    Flag { name: "PT_HPU_RECIPE_CACHE_CONFIG", kind: Kind::RecipeCache, default: "off", effect: "none on emulated HPUs, where compile takes milliseconds; handed to the plugin" },
    Flag { name: "PT_ENABLE_INT64_SUPPORT", kind: Kind::Switch, default: "1", effect: "none on emulated HPUs, which always compute int64 in 64 bits; handed to the plugin" },
    Flag { name: "PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES", kind: Kind::Switch, default: "0", effect: HANDED_ON },
    Flag { name: "PT_HPU_LAZY_ACC_PAR_MODE", kind: Kind::Switch, default: "1", effect: HANDED_ON },
    Flag { name: "PT_HPU_EAGER_PIPELINE_ENABLE", kind: Kind::Switch, default: "1", effect: HANDED_ON },
    Flag { name: "PT_HPU_PLACE_ON_CPU", kind: Kind::Text, default: "all operators", effect: HANDED_ON },
    Flag { name: "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST", kind: Kind::Text, default: "the 27 default operators", effect: "file with the operators that autocast lets compute in the lower dtype, one a line" },
    Flag { name: "PT_HPU_AUTOCAST_FP32_OPS_LIST", kind: Kind::Text, default: "the 49 default operators", effect: "file with the operators that autocast lets compute in float32, one a line" },
    Flag { name: "LOWER_LIST", kind: Kind::Text, default: "none", effect: "older name of PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST" },
    Flag { name: "FP32_LIST", kind: Kind::Text, default: "none", effect: "older name of PT_HPU_AUTOCAST_FP32_OPS_LIST" },
    Flag { name: "HABANA_LOGS", kind: Kind::Text, default: "~/.habana_logs", effect: "folder of fp8 measurements, unless fp8_data_path names one; emulated HPUs write nothing else there; handed to the plugin" },
    Flag { name: "LOG_LEVEL_ALL", kind: Kind::Number(0, 6), default: "4", effect: HANDED_ON },
    Flag { name: "HABANA_PROFILE", kind: Kind::Text, default: "profile_api_light", effect: HANDED_ON },
    Flag { name: "PT_TE_FORCE_SR_BWD", kind: Kind::Switch, default: "with HYBRID", effect: "whether fp8 rounds gradients at random" },
    Flag { name: "QUANT_CONFIG", kind: Kind::Text, default: "by the plugin's quant", effect: "JSON file with the settings of fp8 inference, unless the plugin's quant is a file or a mapping" },
    Flag { name: DISABLE_TENSOR_CACHE, kind: Kind::Switch, default: "0", effect: "1: calls of a graph give tensors of their own" },
    Flag { name: "PT_HPU_DISABLE_common_subexpressions", kind: Kind::Switch, default: "0", effect: "1: compile computes equal results each for itself" },
    Flag { name: "PT_HPU_DISABLE_concatenations", kind: Kind::Switch, default: "0", effect: "1: compile concatenates gradients of attention after they are computed" },
    Flag { name: "PT_HPU_DISABLE_constant_folding", kind: Kind::Switch, default: "0", effect: "1: compile computes what depends on constants alone in each replay" },
    Flag { name: "PT_HPU_DISABLE_fuse_elementwise", kind: Kind::Switch, default: "0", effect: "1: compile runs operators element by element and row by row one after the other" },
    Flag { name: "PT_HPU_DISABLE_in_place", kind: Kind::Switch, default: "0", effect: "1: compile gives all results memory of their own" },
    Flag { name: "PT_HPU_DISABLE_recomputation", kind: Kind::Switch, default: "1", effect: "0: compile computes cheap results again in backward, which needs less memory" },
    Flag { name: "PT_HPU_COMPILE_USE_RECIPES", kind: Kind::Switch, default: "1", effect: "0: compile replays what was captured as it was recorded" },
    Flag { name: "PT_HPU_COMPILE_GRAPH_FREEZE", kind: Kind::Switch, default: "0", effect: "1: compile computes what depends on weights alone once, where nothing has gradients" },
    Flag { name: "PT_HPU_REINPLACE_ADD", kind: Kind::Switch, default: "1", effect: "0: compile gives all results memory of their own" },
    Flag { name: "PT_HPU_USE_EAGER_FALLBACK", kind: Kind::Switch, default: "1", effect: "0: what compile cannot capture is an error, and does not run as usual" },
    Flag { name: "PT_HPU_METRICS_FILE", kind: Kind::Text, default: "none", effect: "file that counts of graphs are written to" },
    Flag { name: "HABANA_PT_METRICS_FILE", kind: Kind::Text, default: "none", effect: "older name of PT_HPU_METRICS_FILE" },
    Flag { name: "PT_HPU_METRICS_FILE_FORMAT", kind: Kind::Word(&["json", "text"]), default: "json", effect: "how that file is written" },
    Flag { name: "PT_HPU_METRICS_DUMP_TRIGGERS", kind: Kind::Text, default: "process_exit", effect: "when: process_exit, mark_step, metric_change, user, with commas between them" },
    Flag { name: "PT_HPU_METRICS_GC_DETAILS", kind: Kind::Switch, default: "0", effect: "1: graph_compilation lists each graph with its time" },
    Flag { name: "PT_HPU_ENABLE_CACHE_METRICS", kind: Kind::Switch, default: "1", effect: "none on emulated HPUs: recipe_cache is always counted" },
    Flag { name: "GC_KERNEL_PATH", kind: Kind::Text, default: "searched for", effect: "libtpc_kernels.so; set before the plugin is loaded" },
];

/// Variables of Habana's software that are not supported, whatever they say, and why.
#[rustfmt::skip]
const NOT_SUPPORTED: [(&str, &str); 23] = [
    ("PT_RECIPE_CACHE_PATH", RECIPE_CACHE),
    ("PT_CACHE_FOLDER_DELETE", RECIPE_CACHE),
    ("PT_CACHE_FOLDER_SIZE_MB", RECIPE_CACHE),
    ("PT_HPUGRAPH_ENABLE_DRY_RUN", PYTHON),
    ("PT_HPU_COMPILE_DECOMPOSITION_MODE", COMPILE),
    ("PT_HPU_COMPILE_DISCARD_FROZEN_PARAMS", COMPILE),
    ("PT_HPU_COMPILE_REMOVE_UNNECESSARY_CLONES", COMPILE),
    ("PT_HPU_ENABLE_ALLREDUCE_GRAPH_SPLIT", COMPILE),
    ("PT_HPU_ENABLE_SFG", COMPILE),
    ("PT_HPU_FORCE_STATIC_COMPILE", COMPILE),
    ("PT_HPU_KEEP_INPUT_MUTATIONS", COMPILE),
    ("PT_HPU_REASSIGN_COPY_", COMPILE),
    ("PT_HPU_REASSIGN_FULL_COPY", COMPILE),
    ("PT_HPU_USE_BOXED_INPUT", COMPILE),
    ("PT_HPU_USE_CPP_PARTITIONER", COMPILE),
    ("PT_HPU_USE_INFERENCE_COMPILER", COMPILE),
    ("PT_HPU_USE_INPLACE_COLLECTIVE", COMPILE),
    ("PT_HPU_USE_INPLACE_INDEX_COPY", COMPILE),
    ("PT_HPU_AUTOLOAD", PYTHON),
    ("PT_HPU_GPU_MIGRATION", PYTHON),
    ("PT_HPU_WEIGHT_SHARING", PYTHON),
    ("PT_HPU_EMULATE_DISTRIBUTED", PYTHON),
    ("PT_HPU_EMULATE_DISTRIBUTED_SINGLE_RANK", PYTHON),
];

const RECIPE_CACHE: &str = "PT_HPU_RECIPE_CACHE_CONFIG has taken its place";
const COMPILE: &str = "compile has no such choice";
const PYTHON: &str = "it is for Habana's Python package";

/// Beginnings of names that are Habana's own.
const OF_HABANA: [&str; 4] = ["PT_HPU_", "PT_HPUGRAPH_", "PT_HABANA_", "HABANA_"];

/// Variables of Habana's containers, which say nothing to a framework.
const OF_CONTAINERS: [&str; 3] =
    ["HABANA_VISIBLE_DEVICES", "HABANA_SCAL_BIN_PATH", "HABANA_PLUGINS_LIB_PATH"];

impl Kind {
    fn accepts(self, value: &str) -> bool {
        let value = value.trim();
        match self {
            Self::Word(words) => words.iter().any(|word| word.eq_ignore_ascii_case(value)),
            Self::Switch => switch(value).is_some(),
            Self::Number(low, high) => value.parse().is_ok_and(|number: u64| (low..=high).contains(&number)),
            Self::Size => parse_size(value).is_some(),
            Self::Modules => modules(value).is_some(),
            Self::RecipeCache => is_recipe_cache(value),
            Self::Text => true,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Word(words) => match words.split_last() {
                Some((last, others)) => write!(f, "{} or {last}", others.join(", ")),
                None => Ok(()),
            },
            Self::Switch => f.write_str("0 or 1"),
            Self::Number(low, high) => write!(f, "a number from {low} to {high}"),
            Self::Size => f.write_str("a size such as 4GiB or 512MiB"),
            Self::Modules => {
                f.write_str("numbers from 0 to 7 with commas between them, each once, such as 0,1")
            }
            Self::RecipeCache => {
                f.write_str("<folder>,<delete it first: true or false>,<MB>, such as recipes/,true,1024")
            }
            Self::Text => f.write_str("text"),
        }
    }
}

fn switch(value: &str) -> Option<bool> {
    match value.to_ascii_lowercase().as_str() {
        "1" | "true" => Some(true),
        "0" | "false" => Some(false),
        _ => None,
    }
}

fn modules(value: &str) -> Option<Vec<u32>> {
    let numbers: Option<Vec<u32>> = value.split(',').map(|part| part.trim().parse().ok()).collect();
    let numbers = numbers?;
    let are_good =
        numbers.iter().enumerate().all(|(at, number)| *number < 8 && !numbers[..at].contains(number));
    are_good.then_some(numbers)
}

fn is_recipe_cache(value: &str) -> bool {
    let parts: Vec<&str> = value.split(',').map(str::trim).collect();
    match parts[..] {
        [folder, delete, megabytes] => {
            !folder.is_empty() && switch(delete).is_some() && megabytes.parse::<u64>().is_ok()
        }
        _ => false,
    }
}

/// The flags of an environment, all of them well-formed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuntimeFlags {
    values: Vec<Option<String>>, // in the order of FLAGS
}

/// A flag as `voltaic devices --env` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FlagReport {
    /// Name of the variable.
    pub name: &'static str,
    /// Its value; none if it is not set.
    pub value: Option<String>,
    /// What holds if it is not set.
    pub default: &'static str,
    /// What it may be.
    pub accepted: String,
    /// What it does.
    pub effect: &'static str,
}

impl RuntimeFlags {
    /// The flags of this process's environment.
    ///
    /// # Errors
    /// [`DeviceError::Setting`] for the first flag whose value is invalid.
    pub fn from_env() -> Result<Self, DeviceError> {
        Self::read(|name| env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// The flags that `get` gives by name.
    pub(super) fn read(get: impl Fn(&str) -> Option<String>) -> Result<Self, DeviceError> {
        let read = |flag: &Flag| match get(flag.name) {
            Some(value) if !flag.kind.accepts(&value) => Err(DeviceError::Setting {
                name: flag.name.to_owned(),
                value,
                accepted: flag.kind.to_string(),
            }),
            value => Ok(value),
        };
        Ok(Self { values: FLAGS.iter().map(read).collect::<Result<_, _>>()? })
    }

    /// `PT_HPUGRAPH_DISABLE_TENSOR_CACHE` of this process's environment; none if it is not set.
    ///
    /// # Errors
    /// [`DeviceError::Setting`] if it is not a switch.
    pub(crate) fn disable_tensor_cache() -> Result<Option<bool>, DeviceError> {
        let of_env = |name: &str| env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        let only = |name: &str| (name == DISABLE_TENSOR_CACHE).then(|| of_env(name)).flatten();
        Ok(Self::read(only)?.switch(DISABLE_TENSOR_CACHE))
    }

    /// Whether `PT_HPU_DISABLE_<pass>` of this process's environment leaves out a pass of compile.
    pub(crate) fn disables(pass: &str) -> bool {
        Self::is_on(&format!("PT_HPU_DISABLE_{pass}"))
    }

    /// Whether a switch of this process's environment is on.
    pub(crate) fn is_on(name: &str) -> bool {
        Self::of_env(name).and_then(|value| switch(&value)).unwrap_or(false)
    }

    /// Whether a switch of this process's environment is off though it is on unless set.
    pub(crate) fn is_off(name: &str) -> bool {
        Self::of_env(name).and_then(|value| switch(&value)).is_some_and(|is_on| !is_on)
    }

    /// A flag of this process's environment, without blanks around it; none if it is not set, or is malformed, which a warning says.
    pub(crate) fn of_env(name: &str) -> Option<String> {
        let flag = FLAGS.iter().find(|flag| flag.name == name);
        debug_assert!(flag.is_some(), "{name} is not in the table of flags");
        let value = env::var(name).ok()?.trim().to_owned();
        let kind = flag?.kind;
        if !kind.accepts(&value) {
            tracing::warn!("{name}=`{value}` is not {kind}; it is left out of account");
            return None;
        }
        Some(value)
    }

    /// `NAME=value` of the flags that are set and do nothing on emulated HPUs. They compute at once, as with lazy mode 0.
    pub(super) fn without_effect_when_emulated(&self) -> Vec<String> {
        let set = FLAGS.iter().zip(&self.values).filter_map(|(flag, value)| Some((flag, value.as_deref()?)));
        let idle = set.filter(|(flag, value)| match flag.name {
            LAZY_MODE => value.trim() != "0",
            _ => flag.effect.starts_with(NO_EFFECT) || flag.effect.ends_with(NO_EFFECT),
        });
        idle.map(|(flag, value)| format!("{}={value}", flag.name)).collect()
    }

    /// What is to be said of the variables of these names that look like flags and are none, a part of a sentence each.
    pub(super) fn unknown(names: impl IntoIterator<Item = String>) -> Vec<String> {
        let known = Self::known();
        let mut unknown: Vec<String> = names
            .into_iter()
            .filter(|name| !known.contains(&name.as_str()) && !OF_CONTAINERS.contains(&name.as_str()))
            .filter_map(|name| {
                if let Some((_, why)) = NOT_SUPPORTED.iter().find(|(other, _)| *other == name) {
                    return Some(format!("{name} is not supported: {why}"));
                }
                let is_habanas = OF_HABANA.iter().any(|start| name.starts_with(start));
                is_habanas.then(|| match nearest(&name, known.iter().copied()) {
                    Some(other) => format!("{name} is unknown; did you mean {other}"),
                    None => format!("{name} is unknown"),
                })
            })
            .collect();
        unknown.sort();
        unknown
    }

    /// [`Self::unknown`] of this process's environment.
    pub(super) fn unknown_of_env() -> Vec<String> {
        Self::unknown(env::vars_os().filter_map(|(name, _)| name.into_string().ok()))
    }

    /// Names of all flags that are known.
    pub(crate) fn known() -> Vec<&'static str> {
        FLAGS.iter().map(|flag| flag.name).collect()
    }

    /// All flags that are known, with their values here.
    pub fn report(&self) -> Vec<FlagReport> {
        let flags = FLAGS.iter().zip(&self.values);
        flags
            .map(|(flag, value)| FlagReport {
                name: flag.name,
                value: value.clone(),
                default: flag.default,
                accepted: flag.kind.to_string(),
                effect: flag.effect,
            })
            .collect()
    }

    /// The value of a flag, without blanks around it; none if it is not set.
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        let at = FLAGS.iter().position(|flag| flag.name == name);
        debug_assert!(at.is_some(), "{name} is not in the table of flags");
        self.values[at?].as_deref().map(str::trim)
    }

    /// The value of a flag that is a word, in small letters.
    pub(super) fn word(&self, name: &str) -> Option<String> {
        self.text(name).map(str::to_ascii_lowercase)
    }

    pub(super) fn switch(&self, name: &str) -> Option<bool> {
        self.text(name).and_then(switch)
    }

    pub(super) fn number(&self, name: &str) -> Option<usize> {
        self.text(name).and_then(|value| value.parse().ok())
    }

    pub(super) fn size(&self, name: &str) -> Option<usize> {
        self.text(name).and_then(parse_size)
    }

    /// `HABANA_VISIBLE_MODULES`.
    pub(super) fn visible_modules(&self) -> Option<Vec<u32>> {
        self.text("HABANA_VISIBLE_MODULES").and_then(modules)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &'static str, value: &str) -> Result<RuntimeFlags, DeviceError> {
        RuntimeFlags::read(|asked| (asked == name).then(|| value.to_owned()))
    }

    #[test]
    fn values_that_make_sense_are_taken() {
        for (name, value) in [
            ("VOLTAIC_HPU", "Emulator"),
            ("VOLTAIC_HPU_MEMORY", "512MiB"),
            ("VOLTAIC_HPU_STRICT", "0"),
            ("HABANA_VISIBLE_MODULES", "0, 3,7"),
            ("PT_HPU_LAZY_MODE", "1"),
            ("PT_HPU_RECIPE_CACHE_CONFIG", "recipes/,true,1024"),
            ("PT_ENABLE_INT64_SUPPORT", "True"),
            ("HABANA_LOGS", "/somewhere"),
        ] {
            let flags = read(name, value).unwrap();
            let report = flags.report().into_iter().find(|flag| flag.name == name).unwrap();
            assert_eq!(report.value.as_deref(), Some(value));
        }
    }

    #[test]
    fn values_that_make_none_are_named_with_what_is_accepted() {
        for (name, value, accepted) in [
            ("VOLTAIC_HPU", "card", "auto, gaudi or emulator"),
            ("VOLTAIC_HPU_GENERATION", "gaudi4", "gaudi, gaudi2 or gaudi3"),
            ("VOLTAIC_HPU_DEVICES", "9", "a number from 1 to 8"),
            ("VOLTAIC_HPU_MEMORY", "much", "a size such as"),
            ("VOLTAIC_HPU_STRICT", "yes", "0 or 1"),
            ("HABANA_VISIBLE_MODULES", "0,0", "numbers from 0 to 7"),
            ("HABANA_VISIBLE_MODULES", "8", "numbers from 0 to 7"),
            ("HABANA_VISIBLE_MODULES", "", "numbers from 0 to 7"),
            ("HLS_MODULE_ID", "-1", "a number from 0 to 7"),
            ("PT_HPU_LAZY_MODE", "3", "a number from 0 to 2"),
            ("PT_HPU_RECIPE_CACHE_CONFIG", "recipes/,1024", "recipes/,true,1024"),
            ("PT_HPU_RECIPE_CACHE_CONFIG", ",true,1", "recipes/,true,1024"),
            ("PT_HPU_POOL_MEM_ACQUIRE_PERC", "0", "a number from 1 to 100"),
        ] {
            let message = read(name, value).unwrap_err().to_string();
            assert!(
                message.contains(&format!("{name}=`{value}`")) && message.contains(accepted),
                "{message}"
            );
        }
    }

    #[test]
    fn flags_without_effect_on_emulated_cards_are_named() {
        let set = |name: &str| match name {
            "PT_HPU_LAZY_MODE" | "PT_HCCL_MEMORY_ALLOWANCE_MB" => Some("1".to_owned()),
            "HABANA_PROFILE" => Some("profile_api".to_owned()),
            "PT_HPU_RECIPE_CACHE_CONFIG" => Some("recipes/,true,1024".to_owned()),
            "HABANA_LOGS" => Some("/logs".to_owned()), // fp8 measurements
            "VOLTAIC_HPU_MEMORY" => Some("1GiB".to_owned()),
            _ => None,
        };
        let idle = RuntimeFlags::read(set).unwrap().without_effect_when_emulated();
        assert_eq!(
            idle,
            [
                "PT_HPU_LAZY_MODE=1",
                "PT_HCCL_MEMORY_ALLOWANCE_MB=1",
                "PT_HPU_RECIPE_CACHE_CONFIG=recipes/,true,1024",
                "HABANA_PROFILE=profile_api"
            ]
        );
        assert!(read("PT_HPU_LAZY_MODE", "0").unwrap().without_effect_when_emulated().is_empty());
    }

    #[test]
    fn flags_that_are_none_are_named() {
        let names = [
            "PT_HPU_LAZYMODE",
            "PT_HPU_LAZY_MODE",
            "PT_HPU_AUTOLOAD",
            "HABANA_VISIBLE_DEVICES",
            "PT_HPU_WEIGHT_SHARING",
            "HABANA_QX",
            "PATH",
            "HABANALABS",
        ];
        let unknown = RuntimeFlags::unknown(names.map(str::to_owned));
        assert_eq!(unknown.len(), 4, "{unknown:#?}");
        for (found, expected) in unknown.iter().zip([
            "HABANA_QX is unknown",
            "PT_HPU_AUTOLOAD is not supported: it is for Habana's Python package",
            "PT_HPU_LAZYMODE is unknown; did you mean PT_HPU_LAZY_MODE",
            "PT_HPU_WEIGHT_SHARING is not supported: it is for Habana's Python package",
        ]) {
            assert!(found.starts_with(expected), "{found}");
        }
    }

    #[test]
    fn flags_are_listed_once() {
        for (name, _) in NOT_SUPPORTED {
            assert!(FLAGS.iter().all(|flag| flag.name != name), "{name}");
        }
        for (at, flag) in FLAGS.iter().enumerate() {
            assert!(FLAGS[..at].iter().all(|other| other.name != flag.name), "{}", flag.name);
        }
    }
}
