//! Checkpoints of one file, which rank 0 reads for all: no rank holds all of it, and the others need not see it.

use std::path::Path;
use std::sync::{Arc, Mutex};

use voltaic::callback::Callback;
use voltaic::checkpoint::Checkpoint;
use voltaic::models::Gpt;
use voltaic::module::HookContext;
use voltaic::nn::init;
use voltaic::{Module, Tensor};

use crate::deferred::{large, peak};
use crate::models::{Small, all_loaders, tokens};
use crate::ranks::{assert_same, folder_of_rank, on_ranks, output, weights};
use crate::shards::{SaveAfter, WholeIo, staged};
use crate::stage3::bare;

/// A checkpoint of the middle of the first epoch in one file, and where the run has ended.
fn saved(ranks: usize, stage: &str, folder: &Path) -> Vec<(String, Tensor)> {
    let path = folder.join("folder.ckpt");
    let mut net = Small::new();
    let builder = staged(ranks, stage, folder).max_epochs(2).callback(SaveAfter(2, path.clone()));
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
    for stage in ["zero1", "zero2", "zero3"] {
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

#[test]
fn other_ranks_do_not_need_the_file() {
    on_ranks("one_file::other_ranks_do_not_need_the_file", 2, without_the_file);
}

#[test]
fn three_ranks_do_not_need_the_file() {
    on_ranks("one_file::three_ranks_do_not_need_the_file", 3, without_the_file);
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
        ("cut", whole[..whole.len() - 5].to_vec(), "its header tells of"),
        ("empty", Vec::new(), "it is not a whole safetensors file"),
        ("flipped", changed(&whole, r#""dtype":"F32""#, r#""dtype":"I32""#, false), "its checksum is"),
        ("no dtype", changed(&whole, r#""dtype":"F32""#, r#""dtype":"F99""#, true), "F99"),
        ("shape", changed(&whole, shape, &shape.replace("[33,5]", "[5,33]"), true), "[5, 33]"),
        ("size", changed(&whole, shape, &shape.replace("[33,5]", "[99,5]"), true), "invalid shape"),
        ("torch", b"PK\x03\x04 and more than eight bytes".to_vec(), "voltaic convert"),
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

#[test]
fn what_is_wrong_with_a_file_ends_all_ranks() {
    on_ranks("one_file::what_is_wrong_with_a_file_ends_all_ranks", 2, refused);
}

/// Notes the most that the process has held before the first step.
struct Peak(Arc<Mutex<usize>>);

impl Callback for Peak {
    fn on_train_start(&mut self, _ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        *self.0.lock().unwrap() = peak();
        Ok(())
    }
}

/// No rank holds as much as the file has, in which there are weights and twice as much of states.
#[test]
fn no_rank_holds_the_file() {
    const GOES_ON: &str = "VOLTAIC_TEST_GOES_ON";
    const WHOLE: &str = "VOLTAIC_TEST_WHOLE";
    const TEST: &str = "one_file::no_rank_holds_the_file";
    let run = |folder: &Path| {
        let is_whole = std::env::var(WHOLE).is_ok();
        let builder = if is_whole { bare(2, folder).checkpoint_io(WholeIo) } else { bare(2, folder) };
        if std::env::var(GOES_ON).is_err() {
            let saver = SaveAfter(0, folder.join("folder.ckpt"));
            let mut trainer = builder.max_steps(1).callback(saver).build().unwrap();
            return trainer.fit(&mut init::deferred(large), &mut tokens(8)).unwrap();
        }
        let at_start = Arc::new(Mutex::new(0));
        let mut trainer = builder.max_steps(2).callback(Peak(at_start.clone())).build().unwrap();
        let mut net: Gpt = init::deferred(large);
        let before = peak();
        trainer.ckpt_path(folder.join("file.ckpt")).fit(&mut net, &mut tokens(8)).unwrap();
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
    let file = folder.path().join("file.ckpt");
    Checkpoint::load(&folder.path().join("folder.ckpt")).unwrap().save(&file).unwrap();
    let size = file.metadata().unwrap().len() as usize;
    assert!(size > 140 << 20, "{size}");
    let own = held(&[(GOES_ON, "1")]);
    // its half, and states for a moment twice
    assert!(own.len() == 2 && own.iter().all(|held| *held < size), "{own:?} of {size}");
    let whole = held(&[(GOES_ON, "1"), (WHOLE, "1")]);
    assert!(whole.iter().all(|held| *held > 2 * size), "{whole:?} of {size}");
    println!("of {size} bytes ranks held {own:?}, and {whole:?} if each reads the file");
}
