//! The command line: verbs, keys, help, exit codes.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail the test")]

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use anyhow::bail;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use voltaic::cli::{Console, FromConfig, Registry, RunRequest, run_with};
use voltaic::config::faults;
use voltaic::error::ConfigError;

/// The seam between model and data that the trainer will fill with `dyn DataModule`.
trait Batches<B> {
    fn batch(&self) -> B;
}

/// Keys of the trainer.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct TrainerConfig {
    /// Stop after so many epochs.
    max_epochs: i64,
    /// Kind of hardware.
    accelerator: String,
}

impl Default for TrainerConfig {
    fn default() -> Self {
        Self { max_epochs: 10, accelerator: "auto".to_owned() }
    }
}

/// A net that ends as it is told.
struct Net(NetConfig);

/// A net that ends as it is told.
///
/// It is not a real one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct NetConfig {
    /// Width of the middle.
    width: usize,
    /// How the run ends.
    outcome: Outcome,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Success,
    Failure,
    CtrlC,
    Term,
    Panic,
    Refusal,
}

impl Default for NetConfig {
    fn default() -> Self {
        Self { width: 8, outcome: Outcome::Success }
    }
}

impl FromConfig for Net {
    type Config = NetConfig;

    fn from_config(config: NetConfig) -> anyhow::Result<Self> {
        if config.width == 0 {
            return Err(ConfigError::new("width", "`0` leaves no room", "give at least 1").into());
        }
        if config.width > 1000 {
            bail!("{} is too wide", config.width);
        }
        Ok(Self(config))
    }
}

/// Words, which no net here takes.
#[derive(Default, Serialize, Deserialize, JsonSchema)]
struct WordsConfig {}

struct Words;

impl FromConfig for Words {
    type Config = WordsConfig;

    fn from_config(_: WordsConfig) -> anyhow::Result<Self> {
        Ok(Self)
    }
}

impl Batches<String> for Words {
    fn batch(&self) -> String {
        "word".to_owned()
    }
}

struct Digits(DigitsConfig);

/// Some digits.
// Without `#[serde(default)]`: the registry's default must fill the gap.
#[derive(Serialize, Deserialize, JsonSchema)]
struct DigitsConfig {
    /// Samples per batch.
    batch_size: i64,
}

impl Default for DigitsConfig {
    fn default() -> Self {
        Self { batch_size: 64 }
    }
}

impl FromConfig for Digits {
    type Config = DigitsConfig;

    fn from_config(config: DigitsConfig) -> anyhow::Result<Self> {
        Ok(Self(config))
    }
}

impl Batches<i64> for Digits {
    fn batch(&self) -> i64 {
        self.0.batch_size
    }
}

type Log = Arc<Mutex<Vec<String>>>;

fn train(request: &RunRequest, net: &mut Net, data: &mut dyn Batches<i64>, log: &Log) -> anyhow::Result<()> {
    let trainer: TrainerConfig = request.section("trainer")?;
    let interrupted = |signal| voltaic::Error::Interrupted { signal, global_step: 5 };
    log.lock().unwrap().push(format!(
        "{} width {} batch {} epochs {} ckpt {:?}",
        request.verb().as_str(),
        net.0.width,
        data.batch(),
        trainer.max_epochs,
        request.ckpt_path()
    ));
    log.lock().unwrap().push(request.config_yaml());
    match net.0.outcome {
        Outcome::Success => Ok(()),
        Outcome::Failure => Err(anyhow::anyhow!("disk full").context("cannot save last.ckpt")),
        Outcome::CtrlC => Err(interrupted("SIGINT").into()),
        Outcome::Term => Err(anyhow::Error::new(interrupted("SIGTERM")).context("while saving")),
        Outcome::Panic => panic!("index out of bounds"),
        Outcome::Refusal => {
            let error = ConfigError::new("trainer.max_epochs", "`-5` is below -1", "give -1 for no limit");
            Err(voltaic::Error::from(error).into())
        }
    }
}

fn registry(log: &Log) -> Registry {
    let (for_run, for_seed) = (Arc::clone(log), Arc::clone(log));
    Registry::empty()
        .section::<TrainerConfig>("trainer", "How the run goes.")
        .seed_with(move |seed| {
            for_seed.lock().unwrap().push(format!("seed {seed}"));
            Ok(())
        })
        .model_with::<Net, dyn Batches<i64>>("Net", "i64", move |request, net, data| {
            train(request, net, data, &for_run)
        })
        .data_with::<Digits, dyn Batches<i64>>("Digits", "i64", |data| Box::new(data))
        .data_with::<Words, dyn Batches<String>>("Words", "String", |data| Box::new(data))
}

struct Ended {
    code: u8,
    out: String,
    err: String,
    log: Vec<String>,
}

fn run(arguments: &[&str]) -> Ended {
    run_in(arguments, &[])
}

fn run_in(arguments: &[&str], variables: &[(&str, &str)]) -> Ended {
    let log = Log::default();
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let mut console = Console::new(&mut out, &mut err);
    let arguments = arguments.iter().map(OsString::from).collect();
    let variables = variables.iter().map(|(name, value)| (OsString::from(name), OsString::from(value)));
    let code = run_with(&registry(&log), &OsString::from("/bin/mine"), arguments, variables, &mut console);
    drop(console);
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let log = log.lock().unwrap().clone();
    Ended { code, out: text(out), err: text(err), log }
}

#[test]
fn each_end_of_a_run_has_its_exit_code() {
    // (reason, value of model.outcome, code, text on standard error)
    for (reason, outcome, code, expected) in [
        ("success", "success", 0, ""),
        ("failure with its cause", "failure", 1, "error: cannot save last.ckpt: disk full\n"),
        (
            "Ctrl-C",
            "ctrl_c",
            130,
            "error: interrupted by SIGINT at global_step 5; resume with ckpt_path=last if a checkpoint was saved\n",
        ),
        ("SIGTERM, with a context around it", "term", 143, "error: while saving: interrupted by SIGTERM"),
        ("panic", "panic", 1, "error: voltaic panicked"),
        (
            "configuration refused by the run",
            "refusal",
            2,
            "error: trainer.max_epochs (from command line): `-5` is below -1; give -1 for no limit\n",
        ),
    ] {
        let option = format!("--model.outcome={outcome}");
        let ended = run(&["fit", "--model=Net", "--data=Digits", &option, "--trainer.max_epochs", "-5"]);
        assert_eq!(ended.code, code, "{reason}: {}", ended.err);
        assert!(ended.err.starts_with(expected), "{reason}: {}", ended.err);
        assert_eq!(ended.err.is_empty(), expected.is_empty(), "{reason}: {}", ended.err);
    }
}

#[test]
fn a_run_gets_its_configuration_from_all_layers() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.yaml");
    std::fs::write(
        &file,
        "seed_everything: 7\ntrainer:\n  max_epochs: 2\ndata: Digits\nmodel: {class_path: Net}\n",
    )
    .unwrap();
    let arguments =
        ["validate", "--config", file.to_str().unwrap(), "--data.batch_size", "3", "--ckpt_path=last"];
    let ended = run_in(&arguments, &[("VOLTAIC_MODEL__WIDTH", "5"), ("VOLTAIC_HPU_DEVICES", "2")]);
    assert_eq!((ended.code, ended.err.as_str()), (0, ""));
    assert_eq!(ended.log[0], "seed 7", "the generators are seeded before the model is made");
    assert_eq!(ended.log[1], "validate width 5 batch 3 epochs 2 ckpt Some(\"last\")");

    // The saved configuration alone gives the same run.
    let saved = folder.path().join("config.yaml");
    std::fs::write(&saved, &ended.log[2]).unwrap();
    let again = run(&["validate", "-c", saved.to_str().unwrap()]);
    assert_eq!((again.code, again.log), (0, ended.log));
}

/// A file per section, a section per verb, values that refer to others, and the words of YAML 1.1.
#[test]
fn files_are_read_as_lightnings_command_line_reads_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let write = |name: &str, text: &str| {
        std::fs::write(path(name), text).unwrap();
        path(name)
    };
    let trainer = write("trainer.yaml", "max_epochs: ${model.init_args.width}\n");
    let model = write("model.yml", "class_path: Net\ninit_args: {width: 1_0}\n");
    let data = write("data.yml", "Digits\n");
    let options = [format!("--trainer={trainer}"), format!("--model={model}"), "--data=Digits".to_owned()];
    let ended = run(&["fit", &options[0], &options[1], &options[2], "--data.batch_size=3"]);
    assert_eq!((ended.code, ended.err.as_str()), (0, ""));
    assert_eq!(ended.log[1], "fit width 10 batch 3 epochs 10 ckpt None");

    let sections = "seed_everything: 3\n\
        validate: {ckpt_path: best, trainer: {max_epochs: 1}}\n\
        fit: {trainer: {max_epochs: '${oc.env:VOLTAIC_NO_SUCH,4}'}, model: Net, data: {class_path: Digits, init_args: {batch_size: 5}}}\n";
    let sections = write("sections.yaml", sections);
    let ended = run(&["--config", &sections, "fit", "--model.width=2"]);
    assert_eq!((ended.code, ended.err.as_str()), (0, ""));
    assert_eq!(ended.log[..2], ["seed 3", "fit width 2 batch 5 epochs 4 ckpt None"]);

    for (arguments, expected) in [
        (vec!["fit", "--trainer=none.yaml"], "trainer (from command line): cannot read none.yaml"),
        (vec!["fit", "--data", &data], "data.yml:1): the top level is not a mapping"),
        (vec!["fit", "--trainer.max_epochs=???"], "trainer.max_epochs (from command line): `???` stands for"),
        (
            vec!["fit", "--model.width=${data.size}"],
            "model.width (from command line): `${data.size}`: there is no key",
        ),
    ] {
        let ended = run(&arguments);
        assert!(ended.code == 2 && ended.err.contains(expected), "{arguments:?}: {}", ended.err);
    }
}

#[test]
fn a_single_registered_model_needs_no_name() {
    let ended = run(&["fit", "--model.width=3", "--data=Digits"]);
    assert_eq!((ended.code, ended.err.as_str()), (0, ""));
    assert_eq!(ended.log[..2], ["seed 0", "fit width 3 batch 64 epochs 10 ckpt None"]);
}

/// (reason, arguments, standard error)
const MISTAKES: &[(&str, &[&str], &str)] = &[
    ("no verb", &[], "error: no verb is given; the verbs are fit, validate, test, predict, generate, models"),
    ("misspelt verb", &["fti"], "error: `fti` is not a verb; did you mean fit\n"),
    (
        "misspelt verb with keys",
        &["trian", "--trainer.max_epochs=1"],
        "error: `trian` is not a verb; the verbs are fit, ",
    ),
    (
        "misspelt option",
        &["fit", "--confg", "x.yaml"],
        "error: confg (from command line): unknown key; did you mean --config\n",
    ),
    (
        "misspelt option with a dash",
        &["fit", "--print-config"],
        "error: print-config (from command line): no value is given; write --print-config=VALUE\n",
    ),
    (
        "misspelt key",
        &["fit", "--trainer.max_epoch=3"],
        "error: trainer.max_epoch (from command line): unknown key; did you mean trainer.max_epochs\n",
    ),
    (
        "misspelt key of a model",
        &["fit", "--model.widht=3"],
        "error: model.widht (from command line): unknown key; did you mean model.width\n",
    ),
    (
        "two problems",
        &["fit", "--trainer.max_epochs=many", "--model.outcome=succes"],
        "error: trainer.max_epochs (from command line): `many` is text; give an integer\n\
             error: model.outcome (from command line): `succes` is not one of the values; did you mean `success`\n",
    ),
    (
        "unknown model",
        &["fit", "--model=Nett"],
        "error: model (from command line): `Nett` is not a known class; did you mean Net\n",
    ),
    ("no data", &["fit"], "error: data: none is chosen; write --data=NAME; `models` lists the names\n"),
    (
        "data of another type",
        &["fit", "--data=Words"],
        "error: data (from command line): Words gives batches of String, but Net takes i64; choose --data=Digits\n",
    ),
    (
        "file without --config",
        &["fit", "run.yaml"],
        "error: unexpected argument `run.yaml`; did you mean --config run.yaml\n",
    ),
    (
        "key without dashes",
        &["fit", "trainer.max_epochs=3"],
        "error: unexpected argument `trainer.max_epochs=3`; did you mean --trainer.max_epochs=3\n",
    ),
    (
        "--config without a file",
        &["fit", "--config"],
        "error: a value is required for '--config <FILE>' but none",
    ),
    (
        "way of printing",
        &["fit", "--print_config=skip"],
        "error: print_config: `skip` is unknown; give skip_default, comments or both\n",
    ),
    (
        "value that the model refuses",
        &["fit", "--data=Digits", "--model.width=0"],
        "error: model.width (from command line): `0` leaves no room; give at least 1\n",
    ),
    (
        "key without a value",
        &["fit", "--model.width"],
        "error: model.width (from command line): no value is given",
    ),
    ("options of `models`", &["models", "--all"], "error: unexpected argument '--all' found; see --help\n"),
];

#[test]
fn mistakes_end_with_code_two_and_a_way_out() {
    for (reason, arguments, expected) in MISTAKES {
        let ended = run(arguments);
        assert_eq!(ended.code, 2, "{reason}: {}", ended.err);
        assert!(ended.err.starts_with(expected), "{reason}:\n  expected {expected}  found    {}", ended.err);
        assert_eq!(ended.out, "", "{reason}");
    }
}

#[test]
fn a_model_that_cannot_be_made_names_itself() {
    let ended = run(&["fit", "--data=Digits", "--model.width=2000"]);
    assert_eq!((ended.code, ended.err.as_str()), (1, "error: cannot make model Net: 2000 is too wide\n"));
}

/// They are weaker than files, and of one verb, as LightningCLI has them.
#[test]
fn variables_of_lightning_set_keys_of_their_verb() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, epochs: i64| {
        let path = folder.path().join(name);
        std::fs::write(&path, format!("trainer: {{max_epochs: {epochs}}}")).unwrap();
        path.display().to_string()
    };
    let (of_variable, of_option) = (file("a.yaml", 4), format!("--config={}", file("b.yaml", 5)));
    let epochs = ("PL_FIT__TRAINER__MAX_EPOCHS", "3");
    let config = ("PL_FIT__CONFIG", of_variable.as_str());
    let own = ("VOLTAIC_TRAINER__MAX_EPOCHS", "6");
    let cases: [(&[&str], &[(&str, &str)], i64); 8] = [
        (&[], &[epochs], 3),
        (&[], &[("PL_TEST__TRAINER__MAX_EPOCHS", "3"), ("PL_GLOBAL_SEED", "3")], 10),
        (&[], &[config], 4),
        (&[], &[config, epochs], 3),
        (&[&of_option], &[config, epochs], 5),
        (&[], &[config, epochs, own], 6),
        (&[&of_option], &[config, epochs, own], 6),
        (&["--trainer.max_epochs=7"], &[config, epochs, own], 7),
    ];
    for (arguments, variables, expected) in cases {
        let ended = run_in(&[&["fit", "--print_config", "--data=Digits"], arguments].concat(), variables);
        assert!(
            ended.out.contains(&format!("max_epochs: {expected}\n")),
            "{arguments:?} {variables:?}: {}",
            ended.out
        );
    }
    for (name, value, expected) in [
        ("PL_FIT__TRAINER__MAX_EPOCHS", "many", "trainer.max_epochs"),
        ("PL_FIT__TRAINER__MAX_EPOCH", "3", "trainer.max_epoch"),
        ("PL_FIT__TRAINERS", "3", "trainers"),
        ("PL_FIT__CONFIG", "none.yaml", "cannot read none.yaml"),
    ] {
        let ended = run_in(&["fit", "--data=Digits"], &[(name, value)]);
        let is_named = ended.err.contains(expected) && ended.err.contains(&format!("(from {name})"));
        assert!(ended.code == 2 && is_named, "{name}: {}", ended.err);
    }
}

#[test]
fn print_config_prints_everything_and_runs_nothing() {
    let ended = run(&["fit", "--print_config", "--data=Digits", "--model.width=3"]);
    assert_eq!((ended.code, ended.err.as_str()), (0, ""));
    assert_eq!(
        ended.out,
        "seed_everything: true\ntrainer:\n  max_epochs: 10\n  accelerator: auto\nmodel:\n  class_path: Net\n  \
         init_args:\n    width: 3\n    outcome: success\ndata:\n  class_path: Digits\n  init_args:\n    \
         batch_size: 64\nckpt_path: null\nweights: null\n"
    );
    assert!(ended.log.is_empty(), "{:?}", ended.log);
    let short = run(&["fit", "--print_config=skip_default", "--data=Digits", "--model.width=3"]);
    assert_eq!(
        short.out,
        "model:\n  class_path: Net\n  init_args:\n    width: 3\ndata:\n  class_path: Digits\n"
    );
}

#[test]
fn help_comes_from_the_schemas() {
    let plain = run(&["fit", "--help"]);
    assert_eq!((plain.code, plain.err.as_str()), (0, ""));
    for part in [
        "Usage: mine fit",
        "--config FILE",
        "--trainer.max_epochs=VALUE  (default 10)",
        "Stop after so many epochs.",
        "Takes a class (Digits, Words) or null.",
        "--model.width=VALUE  (default 8)",
        "(add --data=NAME to see the keys of Digits)",
    ] {
        assert!(plain.out.contains(part), "{part} in:\n{}", plain.out);
    }
    assert!(!plain.out.contains("--data.batch_size"), "keys of a class that is not chosen:\n{}", plain.out);
    let chosen = run(&["fit", "--data=Digits", "--help"]);
    assert!(chosen.out.contains("--data.batch_size=VALUE  (default 64)"), "{}", chosen.out);
    let wrong = run(&["fit", "--trainer.nonsense=1", "--help"]);
    assert_eq!(wrong.code, 0, "help is given whatever else is wrong");
    for verb in ["--help", "models", "--version"] {
        let ended = run(&[verb]);
        assert_eq!((ended.code, ended.err.as_str()), (0, ""), "{verb}");
        assert!(!ended.out.is_empty(), "{verb}");
    }
}

#[test]
fn editors_and_shells_know_the_keys() {
    let schema: serde_json::Value = serde_json::from_str(&run(&["schema"]).out).unwrap();
    assert_eq!(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
    let trainer = &schema["properties"]["trainer"];
    assert!(trainer.to_string().contains("max_epochs") || trainer["$ref"].is_string(), "{trainer}");
    for shell in ["bash", "zsh", "fish"] {
        let script = run(&["completion", shell]).out;
        for word in ["generate", "trainer.max_epochs", "ckpt_path", "print_config"] {
            assert!(script.contains(word), "{shell}: no {word}");
        }
    }
    assert_contains!(run(&["completion", "tcl"]).err, "bash", "zsh");
}

#[test]
fn models_lists_what_fits_together() {
    let text = run(&["models"]).out;
    for part in [
        "Net ",
        "A net that ends as it is told.",
        "data: Digits (batches of i64)",
        "Words ",
        "batches of String",
    ] {
        assert!(text.contains(part), "{part} in:\n{text}");
    }
}

/// Images and texts have batches of one type.
#[test]
fn data_of_other_samples_does_not_fit() {
    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_voltaic")).args(arguments).output().unwrap();
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap())
    };
    let [out, _] = run(&["models"]);
    assert_contains!(
        out,
        "data: MnistData (batches of (Tensor, Tensor): images and their classes)",
        "data: ShakespeareData (batches of (Tensor, Tensor): tokens of a text and the next ones)",
    );
    let [_, err] = run(&["fit", "--model=LeNet", "--data=ShakespeareData"]);
    assert_contains!(
        err,
        "but LeNet takes (Tensor, Tensor): images and their classes; choose --data=MnistData"
    );
}

#[test]
fn the_whole_configuration_is_described_and_its_defaults_are_valid() {
    let schema = registry(&Log::default()).schema();
    assert_eq!(faults(&schema), Vec::<String>::new());
    assert_eq!(schema["properties"]["trainer"]["default"]["max_epochs"], json!(10));
}

#[test]
fn the_help_of_the_real_binary_says_things_once() {
    let output = Command::new(env!("CARGO_BIN_EXE_voltaic")).args(["fit", "--help"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(!text.contains("(required)"), "{text}");
    assert!(text.contains("--lr_scheduler.frequency=VALUE  (default 1)"), "{text}");
    for at in ["trainer.callbacks", "trainer.profiler", "lr_scheduler"] {
        assert_eq!(text.matches(&format!("(add --{at}=NAME ")).count(), 1, "{at}: {text}");
        assert!(!text.contains(&format!("(add --{at}.")), "of a class that is not chosen: {text}");
    }
    for part in ["`zero1`, `zero2`", "or `modules` for"] {
        assert!(text.split_whitespace().collect::<Vec<_>>().join(" ").contains(part), "{part}: {text}");
    }
    let chosen = ["fit", "--lr_scheduler=SequentialLR", "--help"];
    let output = Command::new(env!("CARGO_BIN_EXE_voltaic")).args(chosen).output().unwrap();
    assert_contains!(String::from_utf8(output.stdout).unwrap(), "(add --lr_scheduler.schedulers=NAME ");
}

#[test]
fn the_real_binary_keeps_the_same_codes() {
    let binary = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_voltaic")).args(arguments).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let (code, out, err) = binary(&["--version"]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    assert!(out.starts_with("voltaic 0.1.0 (libtorch 2.11.0"), "{out}");
    let (code, _, err) = binary(&["fti"]);
    assert_eq!(code, Some(2));
    assert!(err.starts_with("error: ") && err.contains("did you mean fit"), "{err}");
    let (code, out, err) = binary(&["fit", "--config", "no/such/file.yaml"]);
    assert_eq!((code, out.as_str()), (Some(2), ""));
    assert!(err.starts_with("error: config: cannot read no/such/file.yaml: ") && err.contains("; "), "{err}");
    let (code, out, _) = binary(&["fit", "--print_config"]);
    assert_eq!(code, Some(0));
    assert!(out.starts_with("seed_everything: true\n"), "{out}");
}

#[test]
fn a_closed_pipe_is_no_error() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_voltaic"))
        .args(["fit", "--help"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(0), ""));
}

#[test]
fn a_full_disk_behind_standard_output_is_an_error() {
    if !Path::new("/dev/full").exists() {
        eprintln!("skipped: needs /dev/full");
        return;
    }
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_voltaic")).arg("models").stdout(full).output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(err.starts_with("error: cannot write to standard output: "), "{err}");
}
