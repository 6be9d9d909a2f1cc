//! Checkpoints of one file, which rank 0 reads for all: no rank holds all of it, and the others need not see it.

use std::path::Path;
use std::sync::{Arc, Mutex};

use voltaic::Tensor;
use voltaic::callback::Callback;
use voltaic::checkpoint::{Checkpoint, read_torch, write_torch};
use voltaic::models::Gpt;
use voltaic::nn::init;
use voltaic::trainer::{TrainerBuilder, from_lightning, to_lightning};

use crate::deferred::{Peak, large, peak};
use crate::ladder::gpt;
use crate::models::{Small, all_loaders, tokens};
use crate::ranks::{STAGES, assert_same, folder_of_rank, on_ranks, output, weights};
use crate::shards::{SaveAfter, WholeIo, staged};
use crate::stage3::bare;

/// A checkpoint of the middle of the first epoch in one file, and where the run has ended.
fn saved(ranks: usize, stage: &str, folder: &Path) -> Vec<(String, Tensor)> {
    saved_by(staged(ranks, stage, folder), folder)
}

fn saved_by(builder: TrainerBuilder, folder: &Path) -> Vec<(String, Tensor)> {
    let path = folder.join("folder.ckpt");
    let mut net = Small::new();
    let builder = builder.max_epochs(2).callback(SaveAfter(2, path.clone()));
    let mut trainer = builder.build().unwrap();
    trainer.fit(&mut net, &mut all_loaders(24)).unwrap();
    if trainer.is_global_zero() {
        Checkpoint::load(&path).unwrap().save(&folder.join("file.ckpt")).unwrap();
    }
    trainer.world().barrier().unwrap();
    weights(&net)
}

/// Only rank 0 finds it where all are told that it is.
fn without_the_file(ranks: usize, folder: &Path) {
    for stage in STAGES {
        let expected = saved(ranks, stage, folder);
        let mut trainer = staged(ranks, stage, folder).max_epochs(2).build().unwrap();
        let own = folder.join(format!("rank-{}", trainer.world().rank));
        std::fs::create_dir_all(&own).unwrap();
        if trainer.is_global_zero() {
            std::fs::rename(folder.join("file.ckpt"), own.join("here.ckpt")).unwrap();
        }
        std::env::set_current_dir(&own).unwrap();
        let mut net = Small::new();
        let _ = tch::no_grad(|| net.first.weight.tensor().shallow_clone().fill_(7.0));
        trainer.ckpt_path("here.ckpt").fit(&mut net, &mut all_loaders(24)).unwrap();
        assert_same(stage, &weights(&net), &expected);
        let mut net = Small::new();
        trainer.ckpt_path("here.ckpt").test(&mut net, &mut all_loaders(8)).unwrap();
        std::env::set_current_dir(folder).unwrap();
    }
}

on_ranks_tests! {
    other_ranks_do_not_need_the_file: 2, without_the_file;
    three_ranks_do_not_need_the_file: 3, without_the_file;
}

/// Two names of a weight that is tied must have one value, or the later one would win without a word: all ranks are told.
fn two_values_of_one_weight(ranks: usize, folder: &Path) {
    let path = folder.join("two.ckpt");
    let mut trainer =
        staged(ranks, "ddp", folder).max_epochs(1).callback(SaveAfter(1, path.clone())).build().unwrap();
    trainer.fit(&mut gpt(), &mut tokens(24)).unwrap();
    if trainer.is_global_zero() {
        let mut saved = Checkpoint::load(&path).unwrap();
        let (_, head) = saved.weights.iter_mut().find(|(name, _)| name == "lm_head.weight").unwrap();
        *head = &*head + 1.0;
        saved.save(&path).unwrap();
    }
    trainer.world().barrier().unwrap();
    for stage in ["ddp", "zero1", "zero2", "zero3"] {
        let mut trainer = staged(ranks, stage, folder).max_epochs(2).build().unwrap();
        let error = trainer.ckpt_path(&path).fit(&mut gpt(), &mut tokens(24)).unwrap_err().to_string();
        assert!(error.contains("are one parameter, and have different values"), "{stage}: {error}");
    }
}

on_ranks_tests! {
    two_values_of_a_tied_weight_are_refused_by_all_ranks: 2, two_values_of_one_weight;
    two_ranks_go_on_from_a_file_of_lightning: 2, of_lightning;
    what_is_wrong_with_a_file_ends_all_ranks: 2, refused;
    a_file_that_is_cut_meanwhile_ends_all_ranks: 2, cut_meanwhile;
}

/// A file of Lightning, with tensors that are read from where they lie, is what it is converted to.
/// AdamW over all parameters, as `AdamW(model.parameters())`: such files do not name them.
fn plain(builder: TrainerBuilder) -> TrainerBuilder {
    let adamw = serde_json::json!({"class_path": "AdamW", "init_args": {"lr": 0.01}});
    builder.optimizer(serde_json::from_value(adamw).unwrap(), None)
}

/// Writes a file of Lightning, in which tied weights share their memory as Python's do.
fn write_lightning(mut checkpoint: Checkpoint, path: &Path) {
    for at in 0..checkpoint.weights.len() {
        let (before, rest) = checkpoint.weights.split_at_mut(at);
        let own = &mut rest[0].1;
        let is_same =
            |other: &&(String, Tensor)| own.dim() == 2 && other.1.size() == own.size() && other.1.equal(own);
        if let Some((_, first)) = before.iter().find(is_same) {
            *own = first.shallow_clone();
        }
    }
    write_torch(&to_lightning(&checkpoint).unwrap().value, path).unwrap();
}

fn of_lightning(ranks: usize, folder: &Path) {
    let path = folder.join("gpt.ckpt");
    let builder = plain(staged(ranks, "zero3", folder)).max_epochs(2);
    let mut trainer = builder.callback(SaveAfter(1, path.clone())).build().unwrap();
    trainer.fit(&mut gpt(), &mut tokens(24)).unwrap();
    let (lightning, converted) = (folder.join("lightning.ckpt"), folder.join("converted.ckpt"));
    if trainer.is_global_zero() {
        write_lightning(Checkpoint::load(&path).unwrap(), &lightning);
        from_lightning(&read_torch(&lightning).unwrap(), None, false)
            .unwrap()
            .value
            .save(&converted)
            .unwrap();
    }
    trainer.world().barrier().unwrap();
    let run = |stage: &str, path: &Path| {
        let mut net = gpt();
        let builder = staged(ranks, stage, folder);
        let mut trainer = plain(builder).max_epochs(2).build().unwrap();
        trainer.ckpt_path(path).fit(&mut net, &mut tokens(24)).unwrap();
        weights(&net)
    };
    let expected = run("ddp", &converted);
    for stage in ["ddp", "zero1", "zero2", "zero3"] {
        assert_same(stage, &run(stage, &lightning), &expected);
    }
}

/// Weights in bfloat16 with float32 copies, on HPUs.
#[test]
fn hpus_go_on_in_bfloat16() {
    on_ranks("one_file::hpus_go_on_in_bfloat16", 2, |ranks, folder| {
        for stage in ["zero1", "zero3"] {
            let builder = || staged(ranks, stage, folder).accelerator("hpu").precision("bf16-true");
            let expected = saved_by(builder(), folder);
            let mut net = Small::new();
            let mut trainer = builder().max_epochs(2).build().unwrap();
            trainer.ckpt_path(folder.join("file.ckpt")).fit(&mut net, &mut all_loaders(24)).unwrap();
            assert_same(stage, &weights(&net), &expected);
        }
    });
}

/// Replaces the first `from` in the header of a file, and seals it again unless `seals` is false.
fn changed(bytes: &[u8], from: &str, to: &str, seals: bool) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let mut bytes = bytes.to_vec();
    let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).expect(from);
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    if seals {
        let key = b"\"voltaic_crc32\":\"";
        let at = bytes.windows(key.len()).position(|window| window == key).unwrap() + key.len();
        bytes[at..at + 8].copy_from_slice(b"00000000");
        let crc = format!("{:08x}", crc32fast::hash(&bytes));
        bytes[at..at + 8].copy_from_slice(crc.as_bytes());
    }
    bytes
}

/// What is wrong with a file is the same error on all ranks, at once.
fn refused(ranks: usize, folder: &Path) {
    saved(ranks, "zero3", folder);
    let whole = std::fs::read(folder.join("file.ckpt")).unwrap();
    let shape = r#""first.weight":{"dtype":"F32","shape":[33,5]"#;
    let cases: [(&str, Vec<u8>, &str); 8] = [
        ("cut", whole[..whole.len() - 5].to_vec(), "its header says"),
        ("empty", Vec::new(), "it is not a whole safetensors file"),
        ("flipped", changed(&whole, r#""dtype":"F32""#, r#""dtype":"I32""#, false), "its checksum is"),
        ("no dtype", changed(&whole, r#""dtype":"F32""#, r#""dtype":"F99""#, true), "F99"),
        ("shape", changed(&whole, shape, &shape.replace("[33,5]", "[5,33]"), true), "[5, 33]"),
        ("size", changed(&whole, shape, &shape.replace("[33,5]", "[99,5]"), true), "invalid shape"),
        ("torch", b"PK\x03\x04 and more than eight bytes".to_vec(), "its archive is damaged"),
        (
            "later",
            changed(&whole, r#"format_version\":2"#, r#"format_version\":9"#, true),
            "format version 9",
        ),
    ];
    let mut trainer = staged(ranks, "zero3", folder).max_epochs(2).build().unwrap();
    let group = trainer.world().group().unwrap().clone();
    let check = |name: &str, expected: &str| {
        let begun = std::time::Instant::now();
        let mut trainer = staged(ranks, "zero3", folder).max_epochs(2).build().unwrap();
        trainer.ckpt_path(folder.join("bad.ckpt"));
        let error = trainer.fit(&mut Small::new(), &mut all_loaders(24)).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("bad.ckpt"), "{name}: {error}");
        for other in group.all_gather_object(&error).unwrap() {
            assert_eq!(other, error, "{name}");
        }
        assert!(begun.elapsed().as_secs() < 20, "{name}");
    };
    check("missing", "No such file");
    for (name, bytes, expected) in cases {
        if group.rank() == 0 {
            std::fs::write(folder.join("bad.ckpt"), bytes).unwrap();
        }
        check(name, expected);
    }
    // nothing is broken by it
    trainer.ckpt_path(folder.join("file.ckpt")).fit(&mut Small::new(), &mut all_loaders(24)).unwrap();
}

/// Does something with the file, or the rank, when the weights are read, and states of optimizers are not.
struct Within(Box<dyn Fn() + Send>);

impl Callback for Within {
    fn on_load_checkpoint(&mut self, _checkpoint: &Checkpoint) -> anyhow::Result<()> {
        (self.0)();
        Ok(())
    }
}

/// What rank 0 cannot read any more is the same error on all ranks, too.
fn cut_meanwhile(ranks: usize, folder: &Path) {
    saved(ranks, "zero3", folder);
    let path = folder.join("file.ckpt");
    let cut = {
        let path = path.clone();
        move || {
            std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(100).unwrap();
        }
    };
    let builder = staged(ranks, "zero3", folder).max_epochs(2);
    let is_first = std::env::var("LOCAL_RANK").is_ok_and(|rank| rank == "0");
    let within = Within(if is_first { Box::new(cut) } else { Box::new(|| {}) });
    let mut trainer = builder.callback(within).build().unwrap();
    assert_eq!(trainer.is_global_zero(), is_first);
    let error =
        trainer.ckpt_path(&path).fit(&mut Small::new(), &mut all_loaders(24)).unwrap_err().to_string();
    assert!(error.contains("file.ckpt: rank 0: cannot read checkpoint"), "{error}");
    let all = trainer.world().group().unwrap().all_gather_object(&error).unwrap();
    assert!(all.iter().all(|other| *other == error), "{all:?}");
}

/// A rank that dies between weights and states ends the others within the time-out.
#[test]
fn a_rank_that_dies_meanwhile_ends_all() {
    const TEST: &str = "one_file::a_rank_that_dies_meanwhile_ends_all";
    const DIES: &str = "VOLTAIC_TEST_DIES";
    if let Some(folder) = folder_of_rank() {
        if std::env::var(DIES).is_err() {
            saved(2, "zero3", &folder);
            return;
        }
        let dies = std::env::var("LOCAL_RANK").is_ok_and(|rank| rank == "1");
        let within = Within(Box::new(move || {
            if dies {
                std::process::exit(9)
            }
        }));
        let builder = bare(2, &folder).max_epochs(2).callback(within);
        let mut trainer = builder.build().unwrap();
        trainer.ckpt_path(folder.join("file.ckpt"));
        let error = trainer.fit(&mut Small::new(), &mut all_loaders(24)).unwrap_err();
        eprintln!("\nerror of a rank: {error}");
        std::process::exit(1);
    }
    let folder = tempfile::tempdir().unwrap();
    assert!(output(TEST, 2, folder.path(), &[]).status.success());
    let begun = std::time::Instant::now();
    let output = output(TEST, 2, folder.path(), &[(DIES, "1")]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && begun.elapsed().as_secs() < 60, "{text}");
    assert!(text.contains("rank 1 has ended") || text.contains("ended with exit code 9"), "{text}");
}

/// No rank holds as much as the file has, in which there are weights and twice as much of states.
#[test]
fn no_rank_holds_the_file() {
    const GOES_ON: &str = "VOLTAIC_TEST_GOES_ON";
    const WHOLE: &str = "VOLTAIC_TEST_WHOLE";
    const FILES: [&str; 2] = ["file.ckpt", "lightning.ckpt"];
    const TEST: &str = "one_file::no_rank_holds_the_file";
    let run = |folder: &Path| {
        let is_whole = std::env::var(WHOLE).is_ok();
        let builder = plain(bare(2, folder));
        let builder = if is_whole { builder.checkpoint_io(WholeIo) } else { builder };
        if std::env::var(GOES_ON).is_err() {
            let saver = SaveAfter(0, folder.join("folder.ckpt"));
            let mut trainer = builder.max_steps(1).callback(saver).build().unwrap();
            return trainer.fit(&mut init::deferred(large), &mut tokens(8)).unwrap();
        }
        let at_start = Arc::new(Mutex::new(0));
        let mut trainer = builder.max_steps(2).callback(Peak(at_start.clone())).build().unwrap();
        let mut net: Gpt = init::deferred(large);
        let before = peak();
        let file = std::env::var(GOES_ON).unwrap();
        trainer.ckpt_path(folder.join(file)).fit(&mut net, &mut tokens(8)).unwrap();
        let grown = Tensor::from((*at_start.lock().unwrap() - before) as i64);
        for rank in
            Vec::<i64>::try_from(trainer.world().group().unwrap().all_gather(&grown).unwrap()).unwrap()
        {
            println!("held {rank}");
        }
    };
    if let Some(folder) = folder_of_rank() {
        return run(&folder);
    }
    let folder = tempfile::tempdir().unwrap();
    let held = |variables: &[(&str, &str)]| -> Vec<usize> {
        let output = output(TEST, 2, folder.path(), variables);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        let held = text.split("held ").skip(1).map(|held| held.lines().next().unwrap().trim());
        held.map(|held| held.parse().unwrap()).collect()
    };
    held(&[]);
    let saved = Checkpoint::load(folder.path().join("folder.ckpt")).unwrap();
    saved.save(&folder.path().join(FILES[0])).unwrap();
    write_lightning(saved, &folder.path().join(FILES[1]));
    for file in FILES {
        let size = folder.path().join(file).metadata().unwrap().len() as usize;
        assert!(size > 140 << 20, "{size}");
        let own = held(&[(GOES_ON, file)]);
        // its half, and a little more
        assert!(own.len() == 2 && own.iter().all(|held| *held < size), "{file}: {own:?} of {size}");
        let whole = held(&[(GOES_ON, file), (WHOLE, "1")]);
        assert!(whole.iter().all(|held| *held > size), "{file}: {whole:?} of {size}");
        println!("of {size} bytes of {file} ranks held {own:?}, and {whole:?} if each reads the file");
    }
}
