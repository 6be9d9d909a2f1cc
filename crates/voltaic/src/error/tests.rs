//! Every error that can be fixed says how, at its end.

use std::io;

use super::*;

/// One of each error; what has no remedy is left out.
#[expect(clippy::too_many_lines, reason = "a list")]
fn errors() -> Vec<Error> {
    let text = || "x".to_owned();
    let path = || PathBuf::from("file");
    let problem = || Problem::new("it is x", "make it y");
    let failure = |timed_out| {
        DistributedError::Collective(Box::new(CollectiveFailure {
            op: "all_reduce",
            rank: 0,
            world_size: 2,
            group: None,
            from: text(),
            missing: vec![1],
            more_missing: 0,
            elsewhere: Vec::new(),
            last_seen: vec![text()],
            record: Some(path()),
            seq: 1,
            bytes: 4,
            timed_out,
            reason: text(),
        }))
    };
    let no_hpu = "Could not run 'aten::empty.memory_format' with arguments from the 'HPU' backend.";
    vec![
        ConfigError::new("key", "x", "use y").into(),
        ConfigError::at("key", problem()).into(),
        DeviceError::Unknown { text: text() }.into(),
        DeviceError::Setting { name: text(), value: text(), accepted: text() }.into(),
        DeviceError::AlreadySetUp { settings: text(), asked: text() }.into(),
        DeviceError::Unavailable { device: text(), problem: problem() }.into(),
        DataError::Corrupt { path: path(), offset: 1, problem: problem() }.into(),
        DataError::Missing { path: path(), remedy: "get it".into() }.into(),
        DataError::NotFound { what: text(), searched: vec![path()], remedy: "get it".into() }.into(),
        DataError::Checksum { path: path(), expected: text(), found: text(), remedy: "get it".into() }.into(),
        DataError::Shape { problem: problem() }.into(),
        DataError::Index { by: text(), index: 3, len: 2 }.into(),
        DataError::Batch {
            loader: text(),
            epoch: 0,
            batch_idx: 0,
            indices: text(),
            source: anyhow::anyhow!("x; y"),
        }
        .into(),
        DataError::Sampler { sampler: text(), epoch: 0, source: anyhow::anyhow!("x; y") }.into(),
        DataError::Worker { worker: 0, problem: problem() }.into(),
        DataError::Range { first_batch: 2, num_batches: 1 }.into(),
        DataError::Text { problem: problem() }.into(),
        ModuleError::Input { layer: text(), problem: problem() }.into(),
        ModuleError::Hook { problem: problem() }.into(),
        ModuleError::Sizes { layer: "Conv2d", problem: problem() }.into(),
        CheckpointError::Unreadable { path: path(), problem: problem() }.into(),
        CheckpointError::Mismatch { module: text(), problem: problem() }.into(),
        DistributedError::Rendezvous { rank: 0, world_size: 2, address: text(), problem: problem() }.into(),
        failure(false).into(),
        failure(true).into(),
        DistributedError::Mismatch { rank: 1, what: text() }.into(),
        DistributedError::Different { rank: 1, what: text() }.into(),
        DistributedError::UnusedParameters { rank: 0, names: vec![text()] }.into(),
        OptimError::Gradient { optimizer: "SGD", fqn: text(), problem: problem() }.into(),
        OptimError::Moved {
            optimizer: "SGD",
            fqn: text(),
            parameter: text(),
            state: text(),
            remedy: "move it".into(),
        }
        .into(),
        OptimError::FirstStepCaptured { optimizer: "SGD" }.into(),
        OptimError::Schedule { scheduler: "StepLR", problem: problem() }.into(),
        GraphError::NotCapturable { op: text(), place: text(), problem: problem() }.into(),
        GraphError::NotStatic { difference: text() }.into(),
        GraphError::MadeInCapture { tensor: text() }.into(),
        GraphError::ShapeChanged { op: text(), place: text(), is_undone: false }.into(),
        GraphError::CaptureInProgress { what: "x" }.into(),
        GraphError::NotCapturing.into(),
        GraphError::NothingCaptured.into(),
        GraphError::Outdated { what: text() }.into(),
        GraphError::InputMismatch { index: 0, given: text(), captured: text() }.into(),
        GraphError::Arguments { problem: problem() }.into(),
        GraphError::TensorGone { tensor: text() }.into(),
        GraphError::Overwritten { module: text() }.into(),
        GraphError::Unavailable { what: text(), problem: problem() }.into(),
        ProfilerError::AlreadyStarted { action: text() }.into(),
        ProfilerError::NeverStarted { action: text() }.into(),
        ProfilerError::NotInnermost { action: text(), inner: text() }.into(),
        SwitchError { name: "V", value: text(), what: "allocator" }.into(),
        SettingError { name: "V", value: text(), accepted: "1" }.into(),
        LibtorchError { compiled: text(), loaded: None, path: path() }.into(),
        TorchError::new("op", TorchErrorKind::Other, no_hpu).into(),
        Error::io("read", "file", io::ErrorKind::NotFound.into()),
        Error::Anomaly { what: text(), operation: Some(text()), epoch: 0, global_step: 0 },
        Error::Interrupted { signal: "SIGINT", global_step: 0 },
        Error::Hook {
            hook: "training_step",
            rank: 0,
            epoch: 0,
            global_step: 0,
            source: Error::from(DataError::Range { first_batch: 2, num_batches: 1 }).into(),
        },
    ]
}

#[test]
fn the_end_of_main_prints_an_error_once() {
    let user = || anyhow::anyhow!("inner").context("outer");
    let hook = Error::Hook { hook: "training_step", rank: 0, epoch: 0, global_step: 0, source: user() };
    let file = Error::io("read", "a.txt", std::io::Error::other("inner"));
    let batch = DataError::Batch {
        loader: String::new(),
        epoch: 0,
        batch_idx: 0,
        indices: String::new(),
        source: user(),
    };
    for error in [hook, file, batch.into()] {
        let printed = format!("{:?}", anyhow::Error::from(error)); // as `fn main() -> anyhow::Result<()>` does
        let own = printed.split("Stack backtrace").next().unwrap_or_default();
        assert_eq!(own.matches("inner").count(), 1, "{own}");
    }
}

#[test]
fn every_remedy_is_shown_and_is_a_field_or_a_method() {
    for error in errors() {
        let text = error.to_string();
        let remedy = error.remedy().unwrap_or_else(|| panic!("no remedy: {text}")).into_owned();
        assert!(
            !remedy.is_empty() && text.ends_with(&format!("; {remedy}")),
            "{text} does not end with {remedy}"
        );
        let problem = error.into_problem("otherwise");
        assert_eq!((problem.to_string(), problem.remedy), (text, remedy.into()));
    }
}

#[test]
fn errors_without_a_remedy_have_none() {
    let shape = ModuleError::Shape {
        layer: "Linear(2, 3)".to_owned(),
        shape: vec![1],
        expected: "[.., 2]".to_owned(),
    };
    let source = anyhow::anyhow!("the user's own; as it is");
    let hook = Error::Hook { hook: "training_step", rank: 0, epoch: 0, global_step: 0, source };
    for error in [shape.into(), hook, TorchError::new("op", TorchErrorKind::Other, "sizes differ; x").into()]
    {
        assert_eq!(error.remedy(), None, "{error}");
        let text = error.to_string();
        assert_eq!(error.into_problem("do this"), Problem::new(text, "do this"));
    }
    let two =
        ConfigError { problems: vec![ConfigProblem::new("a", "x", "y"), ConfigProblem::new("b", "x", "z")] };
    assert_eq!(two.remedy(), "a: y\nb: z");
}

/// A remedy is never cut out of a message.
#[test]
fn no_remedy_is_looked_for_in_a_text() {
    fn check(folder: &Path) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                check(&path);
            } else if path.extension().is_some_and(|ext| ext == "rs") {
                let cut = [r#"split_once(""#, r#"; ")"#].concat();
                assert!(!std::fs::read_to_string(&path).unwrap().contains(&cut), "{}", path.display());
            }
        }
    }
    check(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src")));
}
