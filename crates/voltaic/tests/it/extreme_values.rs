//! Every key that takes a number is given numbers that nobody means: an error that names the key, or a run; never a panic,
//! libtorch's stack, or an allocation without measure.

use std::collections::BTreeSet;
use std::ffi::OsString;

use voltaic::cli::{Console, Registry, run_with};
use voltaic::config::{Key, keys};

const VALUES: [&str; 10] = [
    "0",
    "-1",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "1e308",
    "-1e308",
    ".nan",
    ".inf",
    "-.inf",
];

/// Where a class may stand, the longest first.
const PLACES: [&str; 10] = [
    "trainer.plugins.recipe",
    "trainer.callbacks",
    "trainer.strategy",
    "trainer.profiler",
    "trainer.plugins",
    "trainer.logger",
    "lr_scheduler",
    "optimizer",
    "model",
    "data",
];

/// These start processes of this program; the checks before that are all that can be tried here.
const STARTS_PROCESSES: [&str; 1] = ["trainer.max_restarts"];

fn run(arguments: &[String]) -> (u8, String) {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let mut console = Console::new(&mut out, &mut err);
    let arguments = arguments.iter().map(OsString::from).collect();
    let registry = Registry::builtin();
    let code = run_with(&registry, &OsString::from("/bin/voltaic"), arguments, [], &mut console);
    drop(console);
    (code, String::from_utf8(err).unwrap())
}

/// A short fit in which the class of `key` takes part.
fn arguments(key: &Key) -> Vec<String> {
    let place = PLACES.into_iter().find(|place| key.key.starts_with(&format!("{place}.")));
    let class = key.class.as_deref().unwrap_or_default();
    let model = match (place, class) {
        (Some("model"), class) => class,
        (Some("data"), "ShakespeareData") => "Gpt",
        _ => "Mlp",
    };
    let data = if model == "Gpt" { "ShakespeareData" } else { "MnistData" };
    let fit = format!(
        "fit --model={model} --data={data} --trainer.accelerator=cpu --trainer.fast_dev_run=true --trainer.max_steps=1 \
         --trainer.limit_train_batches=1 --trainer.limit_val_batches=1 --trainer.enable_progress_bar=false"
    );
    let mut words: Vec<String> = fit.split_whitespace().map(str::to_owned).collect();
    // all at once where the number of batches may be what is tried
    let batch_size = if key.key.starts_with("trainer.") { 20_000 } else { 2 };
    words.push(format!("--data.batch_size={batch_size}"));
    let smaller: &[&str] = match model {
        "Gpt" => &["--model.n_layer=1", "--model.n_embd=8", "--model.n_head=1"],
        "ResNet18" => &["--model.width=2", "--data.channels=3"],
        "Mlp" => &["--model.hidden_features=2"],
        _ => &[],
    };
    words.extend(smaller.iter().map(|word| (*word).to_owned()));
    if matches!(place, Some("optimizer" | "lr_scheduler")) {
        let optimizer = if place == Some("optimizer") && !class.is_empty() { class } else { "SGD" };
        words.extend([format!("--optimizer={optimizer}"), "--optimizer.lr=0.1".to_owned()]);
    }
    if place == Some("lr_scheduler") {
        words.push(format!("--lr_scheduler={}", if class.is_empty() { "StepLR" } else { class }));
        let required: &[&str] = match class {
            "StepLR" | "" => &["step_size=1"],
            "MultiStepLR" => &["milestones=[1]"],
            "ExponentialLR" => &["gamma=0.9"],
            "CosineAnnealingLR" => &["T_max=3"],
            "CosineAnnealingWarmRestarts" => &["T_0=3"],
            "OneCycleLR" => &["max_lr=0.1", "total_steps=5", "cycle_momentum=false"],
            "SequentialLR" => {
                &["schedulers=[{class_path: ConstantLR}, {class_path: ConstantLR}]", "milestones=[1]"]
            }
            "LinearWarmupCosine" => &["warmup_iters=2", "total_iters=5"],
            "SWALR" => &["swa_lr=0.1"],
            "ReduceLROnPlateau" => &["monitor=train_loss"],
            _ => &[],
        };
        words.extend(required.iter().map(|word| format!("--lr_scheduler.{word}")));
        words.push("--lr_scheduler.interval=step".to_owned());
    }
    if place == Some("trainer.plugins.recipe") {
        let plugin = [
            "strategy=deepspeed",
            "plugins=DeepSpeedPrecisionPlugin",
            "plugins.precision=fp8",
            "plugins.replace_layers=true",
        ];
        words.extend(plugin.map(|word| format!("--trainer.{word}")));
    }
    if let Some(place) = place.filter(|place| place.starts_with("trainer.")) {
        words.push(format!("--{place}={class}"));
        let required: &[&str] = match class {
            "EarlyStopping" => &["monitor=val_loss"],
            "StochasticWeightAveraging" => &["swa_lrs=0.1"],
            "GradientAccumulationScheduler" => &["scheduling={1: 2}"],
            "BackboneFinetuning" => &["backbone=fc1"],
            _ => &[],
        };
        words.extend(required.iter().map(|word| format!("--{place}.{word}")));
    }
    words
}

/// What is wrong with the end of a run.
fn fault(key: &Key, code: u8, text: &str) -> Option<&'static str> {
    let has = |part: &str| text.contains(part);
    if has("panicked") {
        return Some("a panic");
    }
    if has("frame #") || has("Exception raised from") || text.lines().count() > 6 {
        return Some("a stack");
    }
    // a length of time is named as a whole, not by its minutes; a strategy may be refused before its own keys are looked at
    let is_named = key.key.rsplit('.').filter(|part| *part != "trainer").take(3).any(has);
    (code != 0 && !is_named).then_some("an error that does not name the key")
}

/// Tries the keys of sections that begin with `prefix`.
fn check(prefix: &str) {
    let folder = tempfile::tempdir().unwrap();
    let found = keys(&Registry::builtin().schema());
    let numeric = |key: &&Key| {
        let words: BTreeSet<&str> = key.expected.split(|c: char| !c.is_alphanumeric()).collect();
        key.key.starts_with(prefix)
            && ["number", "numbers", "integer", "integers"].iter().any(|w| words.contains(w))
    };
    let found: Vec<&Key> = found.iter().filter(numeric).collect();
    assert!(!found.is_empty(), "no key of {prefix} takes a number");
    // a fit takes a tenth of a second: each key has one with one of the values, and two other values are only checked;
    // in `make stress` all values have a fit
    let runs_all = std::env::var_os("VOLTAIC_TEST_ALL").is_some();
    let (mut faults, mut tried) = (Vec::new(), 0);
    for (place, key) in found.into_iter().enumerate() {
        for (at, value) in VALUES.into_iter().enumerate() {
            if !runs_all && (at + VALUES.len() - place % VALUES.len()) % VALUES.len() > 2 {
                continue;
            }
            let mut words = arguments(key);
            words.push(format!("--trainer.default_root_dir={}", folder.path().display()));
            words.push(format!("--{}={value}", key.key));
            let runs =
                (runs_all || place % VALUES.len() == at) && !STARTS_PROCESSES.contains(&key.key.as_str());
            if !runs {
                // with a mistake elsewhere everything is checked, and nothing is run
                let mistake: &[&str] = match prefix {
                    "trainer" => &["--optimizer=SGD", "--optimizer.lr=-1"],
                    _ => &["--trainer.max_epochs=-2"],
                };
                words.extend(mistake.iter().map(|word| (*word).to_owned()));
            }
            let (code, text) = run(&words);
            tried += 1;
            if let Some(fault) = fault(key, if runs { code } else { 0 }, &text) {
                let class = key.class.as_deref().unwrap_or("-");
                faults.push(format!("{} of {class} = {value}: {fault}: {text}", key.key));
            }
        }
    }
    assert!(faults.is_empty(), "{} of {tried} runs:\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn numbers_that_nobody_means_of_models() {
    check("model");
}

#[test]
fn numbers_that_nobody_means_of_data() {
    check("data");
}

#[test]
fn numbers_that_nobody_means_of_optimizers() {
    check("optimizer");
}

#[test]
fn numbers_that_nobody_means_of_schedules() {
    check("lr_scheduler");
}

#[test]
fn numbers_that_nobody_means_of_the_trainer() {
    check("trainer");
}
