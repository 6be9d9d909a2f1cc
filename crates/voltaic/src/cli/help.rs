//! `fit --help`: fixed options, then every key with its description and default, from the schema.

use clap::Args;
use serde_json::Value;

use super::request::{GenerateArgs, QuantizeArgs, ShowArgs, Verb};
use crate::config::{Key, Layers, first_paragraph, inline, keys, wrap};

/// Column where descriptions are broken.
const WIDTH: usize = 100;

/// What `graph show` does.
const SHOW_HELP: &str = "Shows what a compiled training step of the first batch consists of, before and after the passes of compile.\n\
     RUN is the folder of a run, RECIPE a YAML file.\n\n";

/// The options of a verb beside those of all, from what the command line is parsed with.
fn own_options(verb: Verb) -> String {
    let options = clap::Command::new("");
    let options = match verb {
        Verb::Generate => GenerateArgs::augment_args(options),
        Verb::Quantize => QuantizeArgs::augment_args(options),
        Verb::Graph => ShowArgs::augment_args(options),
        Verb::Fit | Verb::Validate | Verb::Test | Verb::Predict => options,
    };
    let line = |argument: &clap::Arg| {
        let value = argument.get_value_names().filter(|_| argument.get_action().takes_values());
        let value = value.into_iter().flatten().map(|name| format!(" {name}")).collect::<String>();
        let option = format!("--{}{value}", argument.get_long()?);
        let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
        let indent = format!("\n{:28}", "");
        let begin = format!("{:28}", format!("      {option}"));
        let is_long = begin.trim_end().len() > 26;
        let begin = if is_long { begin.trim_end().to_owned() + &indent } else { begin };
        let text = begin + &wrap(&help, WIDTH - 28).join(&indent);
        Some(text + "\n")
    };
    options.get_arguments().filter_map(line).collect()
}

/// Help of a verb. Classes that the other arguments choose show their keys.
pub(super) fn run_help(program: &str, verb: Verb, layers: &Layers) -> String {
    let own = own_options(verb);
    let (verb, about) = match verb {
        Verb::Graph => ("graph show [RUN|RECIPE]", SHOW_HELP),
        verb => (verb.as_str(), ""),
    };
    let mut text = format!(
        "Usage: {program} {verb} [--config FILE]... [--KEY=VALUE]...\n\n\
         {about}Options:\n\
         {own}\
         \x20 -c, --config FILE       YAML file with the keys below; may be repeated, later files win\n\
         \x20     --print_config[=HOW]  print the whole configuration as YAML and end; HOW is skip_default,\n\
         \x20                           comments, or both with a comma between\n\
         \x20 -h, --help              this help; with --model=NAME also that model's keys\n\n\
         Keys, from weak to strong: defaults, Lightning's variables PL_FIT__SECTION__KEY, files, variables\n\
         VOLTAIC_SECTION__KEY, then --section.key=VALUE.\n\
         A list grows with --KEY+=VALUE; a class is chosen with --KEY=NAME and takes --KEY.ARGUMENT=VALUE.\n"
    );
    let all = keys(layers.schema());
    let chosen = layers.preview();
    for section in sections(&all) {
        text.push('\n');
        let own: Vec<&Key> = all.iter().filter(|key| key.key.split('.').next() == Some(section)).collect();
        text.push_str(&render_section(&own, &chosen));
    }
    text
}

/// Top-level keys in order, each once.
fn sections(all: &[Key]) -> Vec<&str> {
    let mut sections: Vec<&str> = Vec::new();
    for key in all {
        let section = key.key.split('.').next().unwrap_or_default();
        if !sections.contains(&section) {
            sections.push(section);
        }
    }
    sections
}

fn render_section(keys: &[&Key], tree: &Value) -> String {
    let mut text = String::new();
    // Keys at which a class may be chosen, with the classes whose arguments are left out here.
    let mut hidden: Vec<(&str, Vec<&str>)> = Vec::new();
    for key in keys {
        match &key.class {
            Some(class) if !is_chosen(tree, &key.key, class) => {
                let at = chooser(key, keys);
                let known = hidden.iter().position(|(other, _)| *other == at).unwrap_or_else(|| {
                    hidden.push((at, Vec::new()));
                    hidden.len() - 1
                });
                let classes = &mut hidden[known].1;
                if !classes.contains(&class.as_str()) {
                    classes.push(class);
                }
            }
            _ => text.push_str(&render_key(key)),
        }
    }
    // a key of a class that is hidden itself chooses nothing yet
    let is_shown = |at: &str| {
        keys.iter()
            .any(|key| key.key == at && key.class.as_ref().is_none_or(|class| is_chosen(tree, at, class)))
    };
    for (at, classes) in hidden.into_iter().filter(|(at, _)| is_shown(at)) {
        let line = format!("(add --{at}=NAME to see the keys of {})", classes.join(", "));
        for line in wrap(&line, WIDTH - 2) {
            text.push_str(&format!("  {line}\n"));
        }
    }
    text
}

/// The key at which the class of an argument is chosen: the longest other key that it begins with and that is no argument of
/// this class itself.
fn chooser<'k>(key: &'k Key, keys: &[&Key]) -> &'k str {
    let mut at = key.key.as_str();
    while let Some((above, _)) = at.rsplit_once('.') {
        at = above;
        if keys.iter().any(|other| other.key == above && other.class != key.class) {
            break;
        }
    }
    at
}

fn render_key(key: &Key) -> String {
    let default = match &key.default {
        Some(value) => format!("default {}", inline(value).unwrap_or_else(|| value.to_string())),
        None => "required".to_owned(),
    };
    let mut text = format!("  --{}=VALUE  ({default})\n", key.key);
    let description = format!("{} Takes {}.", first_paragraph(&key.description), key.expected);
    for line in wrap(description.trim(), WIDTH - 8) {
        text.push_str(&format!("        {line}\n"));
    }
    text
}

/// Whether the configuration so far has an object of `class` above `key`.
fn is_chosen(tree: &Value, key: &str, class: &str) -> bool {
    let parts: Vec<&str> = key.split('.').collect();
    let Some((_, above)) = parts.split_last() else { return false };
    (1..=above.len()).any(|length| {
        let part = tree.pointer(&format!("/{}", above[..length].join("/")));
        let names = |value: &Value| value.get("class_path").and_then(Value::as_str) == Some(class);
        match part {
            Some(Value::Array(items)) => items.iter().any(names),
            Some(value) => names(value),
            None => false,
        }
    })
}
