//! `schema` and `completion`: the keys of the configuration for editors and shells.

use std::collections::BTreeSet;

use clap::{Arg, ValueHint};
use clap_complete::Shell;

use crate::cli::outcome::Failure;
use crate::cli::registry::Registry;
use crate::cli::request::Verb;
use crate::config::keys;

/// The JSON schema of the YAML files that `--config` takes.
pub(in crate::cli) fn schema(registry: &Registry) -> Result<String, Failure> {
    let mut schema = registry.schema();
    if let Some(entries) = schema.as_object_mut() {
        entries.shift_insert(0, "$schema".to_owned(), "https://json-schema.org/draft/2020-12/schema".into());
    }
    let text = serde_json::to_string_pretty(&schema).map_err(|error| Failure::run(error.into()))?;
    Ok(text + "\n")
}

/// A script that completes verbs, options and the keys of the configuration.
pub(in crate::cli) fn completion(
    registry: &Registry,
    program: &str,
    command: clap::Command,
    shell: Shell,
) -> String {
    let keys: BTreeSet<String> = keys(&registry.schema()).into_iter().map(|key| key.key).collect();
    let verbs = command.get_subcommands().map(|verb| verb.get_name().to_owned()).collect::<Vec<_>>();
    let verbs = verbs.into_iter().filter(|verb| Verb::parse(verb).is_some());
    let with_keys = |verb: clap::Command| {
        keys.iter().fold(verb, |verb, key| {
            let hint = if key.ends_with("path") { ValueHint::AnyPath } else { ValueHint::Other };
            verb.arg(Arg::new(key.clone()).long(key.clone()).value_hint(hint))
        })
    };
    let mut command = verbs.fold(command, |command, verb| {
        command.mut_subcommand(verb, |verb| {
            // of `graph`, `show` takes them
            if verb.has_subcommands() { verb.mut_subcommands(with_keys) } else { with_keys(verb) }
        })
    });
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, program, &mut script);
    String::from_utf8_lossy(&script).into_owned()
}
