//! Runs under random settings, beside what Lightning was recorded to do under the same (tests/fixtures/contract): hooks,
//! learning rates, losses, rows of metrics.csv, checkpoint files, and what can be asked at the end.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value, json};
use tempfile::TempDir;
use voltaic::checkpoint;
use voltaic::trainer::{Trainer, TrainerConfig};

use crate::contract_module::{Data, Events, Net, Notes, Settings, Watch};

/// Runs in which voltaic does something else on purpose, with what it is and where the documents say so. Each has to differ.
const WANTED: &[(&[u64], &str)] = &[
    (&[0, 142], "rows of validation steps are counted on in a resumed run (docs/logging.md)"),
    (&[8, 57, 64, 124, 166, 212, 222], "validate without a loader is an error (docs/trainer_arguments.md)"),
    (&[39, 157, 180, 207], "a loader without a single batch is refused (docs/trainer_arguments.md)"),
    (
        &[10, 47, 53, 54, 114, 117, 128, 155, 181, 140],
        "loaders are asked for before training, even if they are not used (docs/hooks.md)",
    ),
    (
        &[38, 42, 78, 80, 86, 134],
        "a metric that an epoch cut short has not logged is no error (docs/checkpoints.md)",
    ),
    (
        &[27, 50, 92, 138, 150, 176, 197],
        "a checkpoint by steps waits for the validation that follows (docs/checkpoints.md)",
    ),
    (
        &[52, 105, 174, 196],
        "last.ckpt is written at each turn, whether or not the model is among the best (docs/checkpoints.md)",
    ),
    (
        &[90, 139, 167, 184, 226],
        "a fast_dev_run writes nothing, and LearningRateMonitor has no logger (docs/checkpoints.md)",
    ),
    (
        &[16, 96, 97, 109, 127],
        "running statistics do not train, and a run that is stopped gets the average (docs/callbacks.md)",
    ),
    (&[144, 233], "before its first update the average is not used (docs/callbacks.md)"),
    (&[115, 219], "a row whose step is replaced keeps its epoch (docs/logging.md)"),
    (&[151, 225], "save_top_k=-1 overwrites no checkpoint of the same name (docs/checkpoints.md)"),
    (&[206], "a score that is not finite is not in the state (docs/checkpoints.md)"),
    (&[116], "clipping needs no gradient (docs/trainer_arguments.md)"),
    (&[175], "callbacks know what single batches of an evaluation log (docs/logging.md)"),
];

/// A drawn run and what Lightning did.
#[derive(Deserialize)]
struct Case {
    settings: Settings,
    phases: Vec<Phase>,
}

/// One call: `fit`, `resume`, `validate` or `test`; `build` where the trainer could not be made.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Phase {
    phase: String,
    error: Option<String>,
    /// One letter for each hook, behind `C` of the callback, `M` of the module; without them both in this order.
    hooks: String,
    /// Loss of each training step.
    losses: Vec<f64>,
    /// Learning rates at the start of each epoch, at the end of each batch, and at the end.
    rates: Vec<Vec<f64>>,
    /// Epoch and step of each checkpoint.
    saves: Vec<(u64, u64)>,
    /// Of metrics.csv.
    rows: Option<Vec<BTreeMap<String, Value>>>,
    /// Epoch, step and first weight of each checkpoint file, or where a link leads.
    files: BTreeMap<String, Value>,
    global_step: u64,
    epoch: u64,
    metrics: BTreeMap<String, Value>,
    checkpoints: Vec<Value>,
    stopping: Option<(u64, u64, u64)>,
    weights: Vec<f64>,
}

impl Phase {
    /// Whether this is a fit that goes on from a checkpoint that was written within an epoch.
    fn goes_on_within_epoch(&self) -> bool {
        self.phase == "resume" && !self.hooks.contains(" t e")
    }
}

fn cases() -> Vec<Case> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/contract/contract.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn number(value: f64) -> Value {
    match value {
        _ if value.is_nan() => json!("nan"),
        f64::INFINITY => json!("inf"),
        f64::NEG_INFINITY => json!("-inf"),
        value => json!(value),
    }
}

/// One run of voltaic in a folder of its own.
struct Runs<'a> {
    settings: &'a Settings,
    root: &'a Path,
    notes: Notes,
}

impl Runs<'_> {
    fn trainer(&self, changes: &Map<String, Value>, events: Events) -> Result<Trainer, String> {
        let mut config = self.settings.trainer.clone();
        config.extend(changes.clone());
        config.insert("callbacks".to_owned(), json!(self.settings.callbacks));
        config.insert("default_root_dir".to_owned(), json!(self.root));
        let logger = json!({"class_path": "CSVLogger", "init_args": {"save_dir": self.root, "name": "logs"}});
        config.insert("logger".to_owned(), json!([logger]));
        for (key, value) in [
            ("accelerator", json!("cpu")),
            ("enable_progress_bar", json!(false)),
            ("enable_model_summary", json!(false)),
        ] {
            config.insert(key.to_owned(), value);
        }
        let config: TrainerConfig =
            serde_json::from_value(config.into()).map_err(|error| error.to_string())?;
        let watch = Watch { notes: self.notes.clone(), events };
        Trainer::builder().config(config).callback(watch).build().map_err(|error| error.to_string())
    }

    fn phase(&self, name: &str, trainer: &mut Trainer, net: &mut Net) -> Phase {
        self.notes.with(|seen| *seen = Default::default());
        let mut data = Data { settings: self.settings.data.clone(), notes: self.notes.clone() };
        let result = match name {
            "fit" | "resume" => trainer.fit(net, &mut data),
            "validate" => trainer.validate(net, &mut data).map(drop),
            _ => trainer.test(net, &mut data).map(drop),
        };
        let seen = self.notes.with(|seen| seen.clone());
        let is_fit = matches!(name, "fit" | "resume");
        let (checkpoints, stopping) =
            if is_fit && result.is_ok() { self.states(trainer, net, &mut data) } else { Default::default() };
        Phase {
            phase: name.to_owned(),
            error: result.err().map(|error| error.to_string()),
            hooks: merged(&seen.hooks),
            losses: seen.losses,
            rates: seen.rates,
            saves: seen.saves,
            rows: self.rows(),
            files: self.files(),
            global_step: trainer.global_step(),
            epoch: trainer.current_epoch(),
            metrics: trainer
                .metric_names()
                .iter()
                .map(|name| (name.clone(), number(trainer.metric(name).unwrap())))
                .collect(),
            checkpoints,
            stopping,
            weights: [&net.w, &net.v]
                .iter()
                .flat_map(|weight| {
                    Vec::<f64>::try_from(weight.tensor().to_kind(voltaic::Kind::Double)).unwrap()
                })
                .collect(),
        }
    }

    /// What the callbacks say of themselves in a checkpoint of now.
    fn states(
        &self,
        trainer: &mut Trainer,
        net: &mut Net,
        data: &mut Data,
    ) -> (Vec<Value>, Option<(u64, u64, u64)>) {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("now.ckpt");
        trainer.save_checkpoint(net, data, &path, None).unwrap();
        let saved = checkpoint::read(&path).unwrap();
        let states = saved.training.unwrap().json["callbacks"].clone();
        let (mut checkpoints, mut stopping) = (Vec::new(), None);
        for state in states.as_array().unwrap() {
            let (key, state) = (state[0].as_str().unwrap(), &state[1]);
            let relative = |path: &Value| {
                let path = path.as_str().map(|path| Path::new(path).strip_prefix(self.root).unwrap());
                path.map_or(String::new(), |path| path.display().to_string())
            };
            if key.starts_with("ModelCheckpoint") {
                checkpoints.push(json!({
                    "best": relative(&state["best_model_path"]), "last": relative(&state["last_model_path"]),
                    "score": state["best_model_score"],
                }));
            } else if key.starts_with("EarlyStopping") {
                let reason = match state["stopping_reason"].as_str().unwrap() {
                    "NotStopped" => 0,
                    "StoppingThreshold" => 1,
                    "DivergenceThreshold" => 2,
                    "PatienceExhausted" => 3,
                    _ => 4,
                };
                let count = |key: &str| state[key].as_u64().unwrap();
                stopping = Some((count("wait_count"), count("stopped_epoch"), reason));
            }
        }
        (checkpoints, stopping)
    }

    /// Rows of the newest metrics.csv.
    fn rows(&self) -> Option<Vec<BTreeMap<String, Value>>> {
        let paths = (0..9).rev().map(|version| self.root.join(format!("logs/version_{version}/metrics.csv")));
        let text = paths.filter_map(|path| std::fs::read_to_string(path).ok()).next()?;
        let mut lines = text.lines();
        let names: Vec<&str> = lines.next()?.split(',').collect();
        let row = |line: &str| {
            let cells = names.iter().zip(line.split(',')).filter(|(_, cell)| !cell.is_empty());
            cells
                .map(|(name, cell)| (name.to_string(), number(cell.to_lowercase().parse().unwrap())))
                .collect()
        };
        Some(lines.map(row).collect())
    }

    fn files(&self) -> BTreeMap<String, Value> {
        let mut found = BTreeMap::new();
        let mut folders = vec![self.root.to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|end| end == "ckpt") {
                    found.insert(path.strip_prefix(self.root).unwrap().display().to_string(), file(&path));
                }
            }
        }
        found
    }

    /// All phases, as `record.py` does them.
    fn all(&self) -> Vec<Phase> {
        let none = Map::new();
        let mut trainer = match self.trainer(&none, self.settings.events.clone()) {
            Ok(trainer) => trainer,
            Err(error) => {
                return vec![Phase { phase: "build".to_owned(), error: Some(error), ..Phase::default() }];
            }
        };
        let mut net = Net::new(self.settings, &self.notes);
        let mut phases = vec![self.phase("fit", &mut trainer, &mut net)];
        let files: Vec<&String> =
            phases[0].files.iter().filter(|(_, what)| what.is_array()).map(|(name, _)| name).collect();
        if let Some(resume) = &self.settings.resume
            && !files.is_empty()
        {
            let last = files.len() as i64 - 1;
            let pick = if resume.pick < 0 { last } else { resume.pick.min(last) };
            let path = self.root.join(files[pick as usize]);
            let settings = Settings { events: Events::default(), ..self.settings.clone() };
            net = Net::new(&settings, &self.notes);
            trainer = self.trainer(&resume.trainer, Events::default()).unwrap();
            trainer.ckpt_path(path);
            phases.push(self.phase("resume", &mut trainer, &mut net));
        }
        if phases.iter().all(|phase| phase.error.is_none()) {
            for name in &self.settings.then {
                phases.push(self.phase(name, &mut trainer, &mut net));
            }
        }
        phases
    }
}

fn file(path: &Path) -> Value {
    if path.is_symlink() {
        let to = std::fs::canonicalize(path).unwrap();
        return json!(format!("link {}", to.file_name().unwrap().display()));
    }
    let saved = checkpoint::read(path).unwrap();
    let weight = saved.weights.iter().find(|(name, _)| name == "w").unwrap().1.double_value(&[0]);
    json!([saved.meta.epoch, saved.meta.global_step, weight])
}

/// `Cb0 Mb0` is written `b0`.
fn merged(hooks: &[String]) -> String {
    let mut words = Vec::new();
    let mut rest = hooks;
    while let [here, after @ ..] = rest {
        let is_pair =
            here.starts_with('C') && after.first().is_some_and(|a| a.starts_with('M') && a[1..] == here[1..]);
        words.push(if is_pair { &here[1..] } else { here });
        rest = if is_pair { &after[1..] } else { after };
    }
    words.join(" ")
}

/// What is different, as text for people; empty if nothing is. Where the documents say that voltaic does something else on
/// purpose, that is left out.
fn differences(settings: &Settings, expected: &Phase, found: &Phase) -> Vec<String> {
    let mut all = Vec::new();
    if (expected.phase.as_str(), expected.error.is_some()) != (found.phase.as_str(), found.error.is_some()) {
        let tell = |phase: &Phase| format!("{} {:?}", phase.phase, phase.error);
        return vec![format!("result: Lightning {} | voltaic {}", tell(expected), tell(found))];
    }
    let mistaken = expected.error.as_ref().is_some_and(|error| !error.starts_with("Failure"));
    // a mistake is told after the hook or step that made it; a run that goes on within an epoch has its next batches and
    // begins the epoch again (docs/hooks.md, docs/checkpoints.md)
    if mistaken || expected.goes_on_within_epoch() {
        return all;
    }
    let (hooks, found_hooks) = (without_first_loader(&expected.hooks), without_first_loader(&found.hooks));
    if hooks != found_hooks {
        let (a, b): (Vec<&str>, Vec<&str>) = (hooks.split(' ').collect(), found_hooks.split(' ').collect());
        let at = a.iter().zip(&b).take_while(|(a, b)| a == b).count();
        let part = |words: &[&str]| words[at.saturating_sub(6)..words.len().min(at + 12)].join(" ");
        all.push(format!("hooks at {at}: Lightning .. {} | voltaic .. {}", part(&a), part(&b)));
    }
    let mut compare = |what: &str, a: Value, b: Value| {
        let mut path = String::new();
        if let Some(text) = unlike(&a, &b, &mut path) {
            all.push(format!("{what}{text}"));
        }
    };
    if expected.phase == "fit" || expected.phase == "resume" {
        compare("losses", json!(expected.losses), json!(found.losses));
        compare("rates", json!(expected.rates), json!(found.rates));
        // `on_save_checkpoint` is called for an epoch that is cut short, which is then open (docs/checkpoints.md)
        let is_cut_short = expected.epoch == found.epoch + 1;
        if !is_cut_short {
            compare("saves", json!(expected.saves), json!(with_epochs_of(&expected.saves, &found.saves)));
            compare("epoch", json!(expected.epoch), json!(found.epoch));
        }
    }
    compare("rows", json!(expected.rows), json!(found.rows));
    let mut files = found.files.clone();
    for (name, file) in &mut files {
        let lightnings = expected.files.get(name).map_or(&Value::Null, |file| &file[0]);
        if lightnings.as_u64().is_some_and(|epoch| file[0] == epoch.wrapping_sub(1)) {
            file[0] = lightnings.clone();
        }
    }
    compare("files", json!(expected.files), json!(files));
    // values of single batches of an evaluation can be asked for, too (docs/logging.md)
    let mut metrics = found.metrics.clone();
    metrics.retain(|name, _| {
        expected.metrics.contains_key(name) || !settings.logs.iter().any(|log| log.is_of_steps(name))
    });
    compare("metrics", json!(expected.metrics), json!(metrics));
    compare("global_step", json!(expected.global_step), json!(found.global_step));
    compare("weights", json!(expected.weights), json!(found.weights));
    if expected.error.is_none() && (expected.phase == "fit" || expected.phase == "resume") {
        // voltaic also tells the last checkpoint without `save_last` (docs/checkpoints.md)
        let mut checkpoints = found.checkpoints.clone();
        for (own, lightnings) in checkpoints.iter_mut().zip(&expected.checkpoints) {
            if lightnings["last"] == "" {
                own["last"] = json!("");
            }
        }
        compare("checkpoints", json!(expected.checkpoints), json!(checkpoints));
        if expected.epoch == found.epoch {
            compare("stopping", json!(expected.stopping), json!(found.stopping));
        }
    }
    all
}

/// An epoch is over in `on_train_end`: a checkpoint of then has the number of the next in Lightning, its own in voltaic.
fn with_epochs_of(expected: &[(u64, u64)], found: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut found = found.to_vec();
    for (expected, found) in expected.iter().zip(&mut found) {
        if *expected == (found.0 + 1, found.1) {
            *found = *expected;
        }
    }
    found
}

/// Hooks without the first time that `val_dataloader` is called, and without a sanity check that has no batches: voltaic asks
/// for all loaders before training, and so knows whether there is something to check (docs/hooks.md).
fn without_first_loader(hooks: &str) -> String {
    let mut words: Vec<&str> = hooks.split(' ').collect();
    if let Some(at) = words.iter().position(|&word| word == "k") {
        words.remove(at);
    }
    if let Some(at) = words.windows(2).position(|two| two == ["Cn", "CN"] || two == ["Cn", "Cr"]) {
        words.drain(at..=at + usize::from(words[at + 1] == "CN"));
    }
    words.join(" ")
}

/// Where two values differ by more than rounding.
fn unlike(a: &Value, b: &Value, path: &mut String) -> Option<String> {
    match (a, b) {
        (Value::Array(x), Value::Array(y)) => {
            for (index, (x, y)) in x.iter().zip(y).enumerate() {
                if let Some(text) = unlike(x, y, &mut format!("{path}[{index}]")) {
                    return Some(text);
                }
            }
            let (more, who) = if x.len() > y.len() { (x, "Lightning") } else { (y, "voltaic") };
            let at = x.len().min(y.len());
            (x.len() != y.len()).then(|| format!("{path}: only {who} has [{at}] {}", more[at]))
        }
        (Value::Object(x), Value::Object(y)) => {
            for key in x.keys().chain(y.keys()) {
                let (x, y) = (x.get(key).unwrap_or(&Value::Null), y.get(key).unwrap_or(&Value::Null));
                if let Some(text) = unlike(x, y, &mut format!("{path}.{key}")) {
                    return Some(text);
                }
            }
            None
        }
        (Value::Number(x), Value::Number(y)) => {
            let (x, y) = (x.as_f64().unwrap(), y.as_f64().unwrap());
            ((x - y).abs() > 2e-5 * (x.abs() + y.abs()) + 1e-6)
                .then(|| format!("{path}: Lightning {x} | voltaic {y}"))
        }
        (x, y) => (x != y).then(|| format!("{path}: Lightning {x} | voltaic {y}")),
    }
}

#[test]
fn runs_under_random_settings_are_as_lightnings() {
    let every = if std::env::var_os("VOLTAIC_TEST_ALL").is_some() { 1 } else { 12 };
    let mut wrong = Vec::new();
    for case in cases().into_iter().step_by(every) {
        let seed = case.settings.seed;
        let folder = TempDir::new().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let found = Runs { settings: &case.settings, root: &root, notes: Notes::default() }.all();
        let mut all = Vec::new();
        for (index, expected) in case.phases.iter().enumerate() {
            let missing = Phase::default();
            let found = found.get(index).unwrap_or(&missing);
            all = differences(&case.settings, expected, found);
            // the epoch of a fit that was cut short is open, and what follows a failure differs in more than what it was
            if !all.is_empty()
                || expected.error.is_some()
                || expected.epoch != found.epoch
                || expected.goes_on_within_epoch()
            {
                all.iter_mut().for_each(|text| *text = format!("{} {text}", expected.phase));
                break;
            }
        }
        match WANTED.iter().find(|(seeds, _)| seeds.contains(&seed)) {
            Some((_, reason)) if all.is_empty() => {
                wrong.push(format!("seed {seed} does not differ: {reason}"))
            }
            None if !all.is_empty() => wrong.push(format!("seed {seed}:\n    {}", all.join("\n    "))),
            _ => {}
        }
    }
    assert!(wrong.is_empty(), "{} runs\n{}", wrong.len(), wrong.join("\n"));
}
