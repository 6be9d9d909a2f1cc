//! The variables of the environment that matter to a run, without secrets.

use std::fmt;

use serde::Serialize;

use crate::accelerator::RuntimeFlags;
use crate::cli::request::Verb;
use crate::config::{Key, nearest};

/// Variables of voltaic beside those of [`RuntimeFlags`] and of keys (`VOLTAIC_SECTION__KEY`).
const OWN: [&str; 14] = [
    "VOLTAIC_BIND_CORES",
    "VOLTAIC_CGROUP",
    "VOLTAIC_CPU_KERNELS",
    "VOLTAIC_DATA_DIR",
    "VOLTAIC_GRAPH_OUT",
    "VOLTAIC_HCCL",
    "VOLTAIC_HOST_MEMORY",
    "VOLTAIC_HOST_POOL",
    "VOLTAIC_LAUNCHER",
    "VOLTAIC_LIBTORCH_CUDA",
    "VOLTAIC_NCCL",
    "VOLTAIC_RESTART_COUNT",
    "VOLTAIC_SHARED_MEMORY",
    "VOLTAIC_JOB_SECRET",
];
const PREFIXES: [&str; 22] = [
    "VOLTAIC_",
    "PL_",
    "HABANA_",
    "HABANALABS_",
    "PT_",
    "HLS_",
    "HCCL_",
    "NCCL_",
    "GLOO_",
    "CUDA_",
    "NVIDIA_",
    "OMP_",
    "KMP_",
    "GOMP_",
    "MKL_",
    "DNNL_",
    "ONEDNN_",
    "ATEN_",
    "TORCH_",
    "LIBTORCH",
    "SLURM_",
    "OMPI_COMM_WORLD_",
];
const NAMES: [&str; 19] = [
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "GC_KERNEL_PATH",
    "LOWER_LIST",
    "FP32_LIST",
    "LOG_LEVEL_ALL",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "RUST_LOG",
    "RUST_BACKTRACE",
    "RUST_MIN_STACK",
    "NO_COLOR",
    "MALLOC_ARENA_MAX",
];
/// Words in the names of variables whose values are secret.
const SECRET: [&str; 11] = [
    "SECRET",
    "TOKEN",
    "PASSWORD",
    "PASSWD",
    "PASS",
    "KEY",
    "KEYS",
    "APIKEY",
    "CREDENTIAL",
    "CREDENTIALS",
    "AUTH",
];
/// Begin tokens of well-known services.
const TOKENS: [&str; 8] = ["hf_", "ghp_", "gho_", "github_pat_", "glpat-", "sk-", "xoxb-", "AKIA"];

/// A variable that is set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Variable {
    name: String,
    /// None if it is a secret.
    value: Option<String>,
    /// What it sets, or what is wrong with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    remark: Option<String>,
}

impl fmt::Display for Variable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}=", self.name)?;
        match &self.value {
            Some(value) => f.write_str(&value.chars().map(shown).collect::<String>())?,
            None => f.write_str("(hidden)")?,
        }
        self.remark.iter().try_for_each(|remark| write!(f, "  <- {remark}"))
    }
}

/// A report is one line for each variable.
fn shown(char: char) -> String {
    if char.is_control() { char.escape_default().to_string() } else { char.to_string() }
}

/// Those of the given variables that matter, by name. `keys` are those of the configuration.
pub(super) fn in_force(variables: Vec<(String, String)>, keys: &[Key]) -> Vec<Variable> {
    let flags = RuntimeFlags::known();
    let matters = |name: &str| {
        PREFIXES.iter().any(|prefix| name.starts_with(prefix))
            || NAMES.contains(&name)
            || flags.contains(&name)
    };
    let mut found: Vec<Variable> = variables
        .into_iter()
        .filter(|(name, _)| matters(name))
        .map(|(name, value)| {
            let own = || name.starts_with("VOLTAIC_").then(|| unknown(&name, keys, &flags)).flatten();
            let remark = of_lightning(&name, keys).or_else(own);
            let value = (!is_secret(&name, &value)).then_some(value);
            Variable { name, value, remark }
        })
        .collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

/// The remark on a variable that voltaic does not read.
fn unknown(name: &str, keys: &[Key], flags: &[&'static str]) -> Option<String> {
    let key = name.trim_start_matches("VOLTAIC_").to_lowercase().replace("__", ".");
    if OWN.contains(&name) || flags.contains(&name) || is_key(&key, keys) {
        return None;
    }
    let of_keys: Vec<String> = match name.contains("__") {
        true => keys.iter().map(|key| variable_of(&key.key)).collect(),
        false => Vec::new(),
    };
    // names are compared without the prefix that all share
    let rest = |name: &'_ str| name.trim_start_matches("VOLTAIC_").to_owned();
    let own = OWN.iter().chain(flags).map(|known| (*known).to_owned()).chain(of_keys);
    let own: Vec<String> = own.filter(|known| known.starts_with("VOLTAIC_")).collect();
    let rests: Vec<String> = own.iter().map(|known| rest(known)).collect();
    Some(match nearest(&rest(name), rests.iter().map(String::as_str)) {
        Some(meant) => format!("voltaic does not read it; did you mean VOLTAIC_{meant}"),
        None => "voltaic does not read it".to_owned(),
    })
}

/// Whether a key, or keys below it, can be set. Those of a class stand below it, with or without `init_args`.
fn is_key(key: &str, keys: &[Key]) -> bool {
    let key = key.replace(".init_args", "");
    let key = key.strip_suffix(".class_path").unwrap_or(&key);
    keys.iter().any(|known| {
        known.key == key
            || known.key.strip_prefix(key).is_some_and(|rest| rest.starts_with('.'))
            || known.expected.contains("anything") && key.starts_with(&format!("{}.", known.key))
    })
}

/// Of a variable of Lightning: the key that it sets, or that it sets none.
fn of_lightning(name: &str, keys: &[Key]) -> Option<String> {
    let rest = name.strip_prefix("PL_").filter(|rest| *rest != "DEEPSPEED_CONFIG_PATH")?;
    let verbs = Verb::ALL.iter().filter(|verb| **verb != Verb::Graph); // takes those of fit
    let of_verb = |verb: &Verb| {
        let prefix = format!("{}__", verb.as_str().to_uppercase());
        Some((verb.as_str(), prefix.clone(), rest.strip_prefix(&prefix)?.to_lowercase().replace("__", ".")))
    };
    Some(match verbs.filter_map(of_verb).next() {
        None => "voltaic does not read it".to_owned(),
        Some((verb, _, key)) if key == "config" => format!("a file with keys of {verb}"),
        Some((verb, _, key)) if is_key(&key, keys) => format!("sets {key} of {verb}"),
        Some((verb, prefix, key)) => match nearest(&key, keys.iter().map(|known| known.key.as_str())) {
            Some(meant) => {
                let meant = meant.replace('.', "__").to_uppercase();
                format!("sets no key, so {verb} fails; did you mean PL_{prefix}{meant}")
            }
            None => format!("sets no key, so {verb} fails"),
        },
    })
}

/// The variable that sets a key.
fn variable_of(key: &str) -> String {
    format!("VOLTAIC_{}", key.replace('.', "__").to_uppercase())
}

fn is_secret(name: &str, value: &str) -> bool {
    let named = name.to_uppercase().split('_').any(|word| SECRET.contains(&word));
    let begins = TOKENS.iter().any(|token| value.starts_with(token));
    let has_login =
        value.split("://").skip(1).any(|rest| rest.split('/').next().unwrap_or_default().contains('@'));
    // letters and digits in one piece; cards are named so, too
    let is_device = name.contains("VISIBLE");
    let is_plain = value.chars().all(|c| c.is_ascii_alphanumeric() || "-_+=".contains(c));
    let is_mixed =
        value.chars().any(|c| c.is_ascii_digit()) && value.chars().any(|c| c.is_ascii_alphabetic());
    named || begins || has_login || (!is_device && value.len() >= 24 && is_plain && is_mixed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_hidden_and_other_values_shown() {
        for (name, value) in [
            ("VOLTAIC_JOB_SECRET", "x"),
            ("NCCL_AUTH", "x"),
            ("TORCH_HUB_TOKEN", "x"),
            ("VOLTAIC_API_KEY", "x"),
            ("TORCH_HOME", "hf_abc"),
            ("TORCH_MIRROR", "https://me:word@host/x"),
            ("VOLTAIC_X", "0123456789abcdef0123456789abcdef"),
        ] {
            assert!(is_secret(name, value), "{name}={value}");
            let one = &in_force(vec![(name.to_owned(), value.to_owned())], &[])[0];
            assert!(one.to_string().contains("=(hidden)") && !one.to_string().contains(&format!("={value}")));
        }
        for (name, value) in [
            ("CUDA_VISIBLE_DEVICES", "GPU-8f6d3c5e-1234-5678-9abc-def012345678"),
            ("LD_LIBRARY_PATH", "/opt/libtorch-2.11.0/lib:/usr/lib/x86_64-linux-gnu"),
            ("OMP_NUM_THREADS", "16"),
            ("MKL_ENABLE_INSTRUCTIONS", "AVX512_E4"),
            ("NCCL_SOCKET_IFNAME", "eth0"),
        ] {
            assert!(!is_secret(name, value), "{name}={value}");
        }
    }

    #[test]
    fn unknown_variables_are_named_with_what_was_meant() {
        let keys = crate::config::keys(&crate::config::schema_of::<crate::trainer::TrainerConfig>());
        let keys: Vec<Key> =
            keys.into_iter().map(|key| Key { key: format!("trainer.{}", key.key), ..key }).collect();
        let remark = |name: &str| in_force(vec![(name.to_owned(), "1".to_owned())], &keys)[0].remark.clone();
        for known in ["VOLTAIC_HPU", "VOLTAIC_CPU_KERNELS", "VOLTAIC_TRAINER__MAX_EPOCHS", "OMP_ANYTHING"] {
            assert_eq!(remark(known), None, "{known}");
        }
        for (name, meant) in [
            ("VOLTAIC_CPU_KERNEL", "VOLTAIC_CPU_KERNELS"),
            ("VOLTAIC_HPU_DEVICE", "VOLTAIC_HPU_DEVICES"),
            ("VOLTAIC_TRAINER__MAX_EPOCH", "VOLTAIC_TRAINER__MAX_EPOCHS"),
        ] {
            let remark = remark(name).unwrap_or_default();
            assert!(remark.ends_with(&format!("did you mean {meant}")), "{name}: {remark}");
        }
        for (name, expected) in [
            ("PL_FIT__TRAINER__MAX_EPOCHS", "sets trainer.max_epochs of fit"),
            ("PL_TEST__TRAINER__LOGGER__CLASS_PATH", "sets trainer.logger.class_path of test"),
            ("PL_FIT__CONFIG", "a file with keys of fit"),
            (
                "PL_FIT__TRAINER__MAX_EPOCH",
                "sets no key, so fit fails; did you mean PL_FIT__TRAINER__MAX_EPOCHS",
            ),
            ("PL_TUNE__TRAINER__MAX_EPOCHS", "voltaic does not read it"),
            ("PL_GLOBAL_SEED", "voltaic does not read it"),
        ] {
            assert_eq!(remark(name).as_deref(), Some(expected), "{name}");
        }
        assert_eq!(remark("PL_DEEPSPEED_CONFIG_PATH"), None);
        assert_eq!(remark("VOLTAIC_QQQQQQQQ").as_deref(), Some("voltaic does not read it"));
        assert!(in_force(vec![("HOME".to_owned(), "/".to_owned())], &keys).is_empty());
    }

    #[test]
    fn a_variable_is_one_line() {
        let one = in_force(vec![("OMP_X".to_owned(), "a\nb\u{1b}[31m".to_owned())], &[]);
        assert_eq!(one[0].to_string(), "OMP_X=a\\nb\\u{1b}[31m");
    }
}
