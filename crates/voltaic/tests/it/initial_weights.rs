//! Fits and evaluations that begin with the weights of a file.

use std::path::Path;
use std::process::Command;

use tempfile::TempDir;
use voltaic::Tensor;
use voltaic::nn::ModuleExt;
use voltaic::trainer::Trainer;

use crate::probe::silent;
use crate::trainer::{Net, loaders};

/// The command by each strategy: a step that changes nothing keeps the file's weights, and is the first one.
#[test]
fn a_fit_of_the_command_begins_with_the_weights_of_a_file() {
    let root = TempDir::new().unwrap();
    let digits = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/digits");
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_voltaic"));
        let output = command.args(arguments).current_dir(root.path()).output().unwrap();
        let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        (output.status.code(), text.concat())
    };
    let data = format!("--data.data_dir={}", digits.display());
    let base = ["--model=Mlp", "--data=MnistData", &data, "--data.batch_size=4", "--trainer.accelerator=cpu"];
    let limits = ["val", "test", "predict"].map(|what| format!("--trainer.limit_{what}_batches=2"));
    let limits = ["--trainer.max_steps=1", &limits[0], &limits[1], &limits[2]];
    let run = |first: &[&str]| {
        let (code, text) = run(&[first, &base[..], &limits[..]].concat());
        (code == Some(0), text)
    };
    let loss = |path: &str| {
        let (is_done, text) = run(&["validate", path]);
        let line = text.lines().find(|line| line.starts_with("val_loss")).map(str::to_owned);
        assert!(is_done && line.is_some(), "{text}");
        line.unwrap()
    };
    let (is_done, text) = run(&["fit", "--seed_everything=1", "--trainer.default_root_dir=a"]);
    assert!(is_done, "{text}");
    let convert = ["convert", "a/lightning_logs/version_0/checkpoints/epoch=0-step=1.ckpt", "a.safetensors"];
    let converted =
        Command::new(env!("CARGO_BIN_EXE_voltaic")).args(convert).current_dir(root.path()).status();
    assert!(converted.unwrap().success());
    let of_file = loss("--ckpt_path=a.safetensors");
    assert_eq!(loss("--weights=a.safetensors"), of_file);
    assert_ne!(loss("--seed_everything=2"), of_file);
    for verb in ["validate", "test", "predict"] {
        let (is_done, text) = run(&[verb, "--weights=a.safetensors"]);
        assert!(
            is_done && text.contains(&format!("{verb} begins with the weights of a.safetensors")),
            "{text}"
        );
        assert!(!text.contains("drawn at random"), "{text}");
        let (is_done, text) = run(&[verb, "--weights=b.safetensors", "--ckpt_path=a.safetensors"]);
        let idle = format!("weights=b.safetensors has no effect: {verb} begins with ckpt_path=a.safetensors");
        assert!(is_done && text.contains(&idle), "{text}");
        let (is_done, text) = run(&[verb, "--weights.strict=false"]);
        assert!(
            !is_done && text.contains("weights.strict") && text.contains("give weights.path=FILE"),
            "{text}"
        );
    }
    let strategies: [(&str, &[&str]); 3] = [
        ("one", &[]),
        ("ddp", &["--trainer.devices=2", "--trainer.strategy=ddp"]),
        ("zero3", &["--trainer.devices=2", "--trainer.strategy=zero3"]),
    ];
    for (name, keys) in strategies {
        let folder = format!("--trainer.default_root_dir={name}");
        let still = ["fit", "--seed_everything=2", "--optimizer=SGD", "--optimizer.lr=1e-30", &folder];
        let (is_done, text) = run(&[&still[..], keys, &["--weights=a.safetensors"]].concat());
        assert!(is_done && text.contains("fit begins with the weights of a.safetensors"), "{name}: {text}");
        let path = format!("--ckpt_path={name}/lightning_logs/version_0/checkpoints/epoch=0-step=1.ckpt");
        assert_eq!(loss(&path), of_file, "{name}");
    }
    let (is_done, text) = run(&["fit", "--weights=b.safetensors"]);
    assert!(!is_done && text.contains("b.safetensors"), "{text}");
}

/// What is not in the file stays, and what the module does not have is named.
#[test]
fn names_may_be_on_one_side_only_unless_strict() {
    let root = TempDir::new().unwrap();
    let file = root.path().join("part.safetensors");
    let given = Tensor::ones([16, 8], (voltaic::Kind::Float, tch::Device::Cpu));
    Tensor::write_safetensors(&[("fc1.weight", &given), ("head.weight", &given)], &file).unwrap();
    let mut net = Net::new();
    let bias = net.state_dict().iter().find(|(name, _)| name == "fc1.bias").unwrap().1.copy();
    let mut fit = |strict: bool| {
        let mut trainer = silent().max_epochs(0).build().unwrap();
        trainer.weights(&file, strict).fit(&mut net, &mut loaders()).map(|()| net.state_dict())
    };
    assert_error!(fit(true), "head.weight", "part.safetensors");
    let has_taken = |state: &[(String, Tensor)]| {
        let tensor = |name: &str| &state.iter().find(|(own, _)| own == name).unwrap().1;
        tensor("fc1.weight").equal(&given) && tensor("fc1.bias").equal(&bias)
    };
    assert!(has_taken(&fit(false).unwrap()));
    let evaluations: [fn(&mut Trainer, &mut Net); 3] = [
        |trainer, net| drop(trainer.validate(net, &mut loaders()).unwrap()),
        |trainer, net| drop(trainer.test(net, &mut loaders()).unwrap()),
        |trainer, net| drop(trainer.predict(net, &mut loaders()).unwrap()),
    ];
    for evaluate in evaluations {
        let mut net = Net::new();
        let own = bias.copy();
        net.load_state_dict(&[("fc1.bias".to_owned(), own)], false).unwrap();
        let mut trainer = silent().build().unwrap();
        evaluate(trainer.weights(&file, false), &mut net);
        assert!(has_taken(&net.state_dict()));
        net.load_state_dict(&[("fc1.weight".to_owned(), given.zeros_like())], false).unwrap();
        evaluate(&mut trainer, &mut net);
        assert!(!has_taken(&net.state_dict()), "they are for one call");
    }
}

/// Names may begin otherwise: the error says how, and what it says to write works.
#[test]
fn a_file_whose_names_begin_otherwise_is_renamed() {
    let root = TempDir::new().unwrap();
    let file = root.path().join("theirs.safetensors");
    let saved = Net::new().state_dict();
    for (from, to) in [("model.net.", ""), ("", "fc"), ("body.fc", "fc")] {
        let theirs: Vec<(String, &Tensor)> =
            saved.iter().map(|(name, tensor)| (name.replacen(to, from, 1), tensor)).collect();
        let theirs: Vec<(&str, &Tensor)> =
            theirs.iter().map(|(name, tensor)| (name.as_str(), *tensor)).collect();
        Tensor::write_safetensors(&theirs, &file).unwrap();
        let mut net = Net::new();
        let mut trainer = silent().max_epochs(0).build().unwrap();
        trainer.weights_renamed(&file, true, [(from, to)]).fit(&mut net, &mut loaders()).unwrap();
        assert_eq!(net.state_dict(), saved, "{from}={to}");
    }
    let error =
        silent().max_epochs(0).build().unwrap().weights(&file, true).fit(&mut Net::new(), &mut loaders());
    assert_error!(error, "take the prefix `body.` off", "weights.rename=[body.=]", "--rename=body.=");
    let refused = |rename: (&str, &str)| {
        let mut trainer = silent().max_epochs(0).build().unwrap();
        trainer.weights_renamed(&file, true, [rename]).fit(&mut Net::new(), &mut loaders())
    };
    assert_error!(
        refused(("none.", "")),
        "weights.rename: no name that is left for none.= begins with none."
    );
    let mut sharded = silent().max_epochs(0).strategy("zero3").build().unwrap();
    let error = sharded.weights_renamed(&file, true, [("body.", "")]).fit(&mut Net::new(), &mut loaders());
    assert_error!(error, "weights.rename", "voltaic convert FILE NEW --rename FROM=TO");
}

/// The error of names that begin otherwise on both sides has what to write.
#[test]
fn the_command_renames_weights() {
    let root = TempDir::new().unwrap();
    let digits = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/digits");
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_voltaic"));
        command.args(["validate", "--model=Mlp", "--data=MnistData", "--trainer.limit_val_batches=1"]);
        command.arg(format!("--data.data_dir={}", digits.display())).arg("--trainer.accelerator=cpu");
        let output = command.args(arguments).current_dir(root.path()).output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    let net = voltaic::models::Mlp::new(voltaic::models::MlpConfig::default()).unwrap();
    let theirs = net.state_dict().into_iter().map(|(name, tensor)| (format!("model.{name}"), tensor));
    let theirs: Vec<(String, Tensor)> = theirs.collect();
    let named: Vec<(&str, &Tensor)> = theirs.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    Tensor::write_safetensors(&named, root.path().join("theirs.safetensors")).unwrap();
    let (is_done, errors) = run(&["--weights=theirs.safetensors"]);
    let told = errors.split("weights.rename=").nth(1).and_then(|rest| rest.split(',').next());
    let told = told.map(|rule| format!("--weights.rename={rule}"));
    assert!(!is_done && told.is_some(), "{errors}");
    let (is_done, errors) = run(&["--weights.path=theirs.safetensors", &told.unwrap()]);
    assert!(is_done, "{errors}");
    let (is_done, errors) = run(&["--weights.rename=[model.=]"]);
    assert!(!is_done && errors.contains("weights.rename"), "{errors}");
    let (is_done, errors) = run(&["--weights.path=theirs.safetensors", "--weights.rename=[model.]"]);
    assert!(!is_done && errors.contains("give FROM=TO"), "{errors}");
}
