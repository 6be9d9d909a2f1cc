//! Scales of Habana's transformer engine in checkpoints of Lightning: `_extra_state`, which is pickled.

use std::path::{Path, PathBuf};

use tch::{Kind, Tensor};
use voltaic::Module;
use voltaic::checkpoint::pickle::Value;
use voltaic::checkpoint::{
    Checkpoint, DeepSpeedRead, fp8_extra_state, from_lightning, read_deepspeed, read_torch, write_torch,
};
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::functional::mse_loss;
use voltaic::nn::{Callable, te};
use voltaic::optim::{AdamW, Optimizers};

use crate::alone;
use crate::compare::assert_same;
use crate::operators::{CPU, start_hpu};
use crate::runs::{Batch, hybrid, loaders, plugin};
use crate::silent::silent;

#[derive(Module)]
struct Net {
    first: te::Linear,
    second: te::Linear,
    third: te::Linear,
}

impl Net {
    fn new() -> Self {
        let layer = |from, to| te::Linear::new(from, to).unwrap();
        Self { first: layer(5, 16), second: layer(16, 3), third: layer(3, 3) }
    }
}

impl LightningModule for Net {
    type Batch = Batch;

    fn training_step(&self, (x, y): &Batch, _: &mut StepContext) -> anyhow::Result<Tensor> {
        let hidden = self.second.call(&self.first.call(x)?.relu())?;
        Ok(mse_loss(&self.third.call(&hidden)?, y)?)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        AdamW::new(0.01).into()
    }
}

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/fp8/extra_state.ckpt")
}

/// What make_extra_state.py has written, by the names of checkpoints.
fn expected() -> Vec<(String, Tensor)> {
    let mut all = Vec::new();
    let arange = |numel: i64| Tensor::arange(numel, (Kind::Float, CPU));
    for (fqn, first, parts, measured) in [
        ("first", 0.0, &[("fwd", 2, 1, 0.0), ("hybrid", 2, 1, 5.0), ("bwd", 1, 2, 3.0)][..], [1_i64, 0]),
        ("second", 2.0, &[("fwd", 2, 1, 0.0), ("bwd", 1, 2, 3.0)], [0, 1]),
    ] {
        for (part, slots, row, more) in parts {
            let exponents = arange(*slots) + first + *more;
            let mut add = |name: &str, tensor: Tensor| all.push((format!("{fqn}/{name}_{part}"), tensor));
            add("scale", exponents.exp2());
            add("scale_inv", exponents.neg().exp2());
            add("amax_history", arange(3 * slots).reshape([3, *slots]) / 8.0 + first + *more);
            add("amax_history_index", Tensor::from_slice(&[*row]));
        }
        all.push((format!("{fqn}/run_cnt"), Tensor::from_slice(&[10 + first as i64])));
        all.push((format!("{fqn}/update_amax"), Tensor::from_slice(&measured)));
    }
    all
}

#[test]
fn scales_and_histories_are_read_in_both_forms() {
    let checkpoint = Checkpoint::load(file()).unwrap();
    let names: Vec<&str> = checkpoint.weights.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names.len(), 6, "no extra state is a weight: {names:?}");
    assert_same("a checkpoint", &checkpoint.training.as_ref().unwrap().fp8, &expected());
    let found = fp8_extra_state(&read_torch(&file()).unwrap()).unwrap();
    assert_same("a state dict", &found, &expected());
    let net = Net::new();
    te::load_fp8_state_dict(&net, &found).unwrap();
    assert_same("a module", &te::fp8_state_dict(&net).unwrap(), &expected());
    // a state dict alone has no run that goes on
    let weights = from_lightning(&read_torch(&file()).unwrap(), None, true).unwrap();
    assert!(
        weights.value.training.is_none() && weights.notes.iter().any(|note| note.contains("_extra_state"))
    );
}

#[test]
fn a_run_goes_on_with_the_scales_of_the_original() {
    let _alone = alone();
    start_hpu();
    let run = |accelerator: &str| {
        let mut net = Net::new();
        let builder =
            silent().accelerator(accelerator).devices(1).max_steps(3).max_epochs(-1).limit_val_batches(0);
        let mut trainer = builder.plugins([plugin(hybrid(), false)]).build().unwrap();
        trainer.ckpt_path(file());
        trainer.fit(&mut net, &mut loaders(16, 4)).unwrap();
        let scales = te::fp8_state_dict(&net).unwrap();
        scales.into_iter().map(|(name, tensor)| (name, tensor.to_device(CPU))).collect::<Vec<_>>()
    };
    let scales = run("hpu");
    let of = |name: &str| &scales.iter().find(|(known, _)| known == name).unwrap().1;
    // two steps after the one of the file
    for (fqn, run_cnt) in [("first", 12), ("second", 14), ("third", 2)] {
        assert_eq!(of(&format!("{fqn}/run_cnt")).int64_value(&[0]), run_cnt, "{fqn}");
    }
    // its row of the file was used for the first scales, and then others were written
    assert_eq!(of("first/amax_history_fwd").double_value(&[1, 0]), 0.25);
    assert_eq!(of("first/amax_history_index_fwd").int64_value(&[0]), 0);
}

fn message(value: Value) -> String {
    fp8_extra_state(&Value::dict([("first._extra_state", value)])).map(drop).unwrap_err().to_string()
}

#[test]
fn nothing_is_executed_and_what_cannot_be_read_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let mark = folder.path().join("executed");
    let command = format!("touch {}", mark.display());
    let length = u8::try_from(command.len()).unwrap();
    let attack = [&b"cos\nsystem\n(X"[..], &[length, 0, 0, 0], command.as_bytes(), b"tR."].concat();
    for (bytes, expected) in [
        (&attack[..], "`os.system` is refused"),
        (b"ctorch.storage\n_load_from_bytes\n(C\x03abctR.", "bytes are no storage"),
        (b"K\x01.", "it is no dictionary"),
        (b"}.", "scale_fwd is missing"),
        (b"PK\x03\x04", "archive is damaged"),
        (b"", "ends in the middle"),
    ] {
        assert_contains!(message(Value::Bytes(bytes.to_vec())), "first._extra_state", expected);
    }
    assert!(!mark.exists());
    // in a file it is an error of the file
    let path = folder.path().join("attack.ckpt");
    write_torch(&Value::dict([("fc._extra_state", Value::Bytes(attack))]), &path).unwrap();
    assert_error!(Checkpoint::load(&path).map(drop), "attack.ckpt", "`os.system` is refused");
}

#[test]
fn parts_of_an_extra_state_are_errors() {
    let file = read_torch(&file()).unwrap();
    let state_dict = file.get("state_dict").unwrap();
    let of_tensor = state_dict.get("first._extra_state").and_then(Value::as_tensor).unwrap();
    let pickled = Vec::<u8>::try_from(of_tensor).unwrap();
    let Some(Value::Bytes(saved)) = state_dict.get("second._extra_state") else { panic!("a buffer") };
    for whole in [&pickled, saved] {
        let read =
            |bytes: &[u8]| fp8_extra_state(&Value::dict([("_extra_state", Value::Bytes(bytes.to_vec()))]));
        assert!(read(whole).unwrap().iter().any(|(name, _)| name == "/scale_fwd"));
        for end in (0..whole.len()).step_by(7) {
            assert!(read(&whole[..end]).is_err(), "{end} of {} bytes", whole.len());
        }
        for at in (0..whole.len()).step_by(11) {
            let mut changed = whole.clone();
            changed[at] ^= 0x55;
            let _ = read(&changed); // an error or other numbers, and no panic
        }
    }
}

/// A folder as DeepSpeed writes it without ZeRO has the same states among its weights.
#[test]
fn folders_of_deepspeed_have_them_in_both_forms() {
    let Value::Dict(entries) = read_torch(&file()).unwrap() else { panic!("no dictionary") };
    let states = entries.into_iter().filter_map(|(key, value)| match (key.as_str()?, value) {
        ("state_dict", state_dict) => Some(("module".to_owned(), state_dict)),
        ("optimizer_states", Value::List(mut optimizers)) => {
            Some(("optimizer".to_owned(), optimizers.remove(0)))
        }
        _ => None,
    });
    let states = Value::dict(states.chain([("global_steps".to_owned(), Value::Int(1))]).collect::<Vec<_>>());
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("step1")).unwrap();
    std::fs::write(folder.path().join("latest"), "step1").unwrap();
    write_torch(&states, &folder.path().join("step1/mp_rank_00_model_states.pt")).unwrap();
    let read = read_deepspeed(folder.path(), &DeepSpeedRead::default()).unwrap();
    assert_eq!(read.value.weights.len(), 6);
    assert_same("a folder", &read.value.training.unwrap().fp8, &expected());
}
