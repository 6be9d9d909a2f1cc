//! Folders of DeepSpeed: files that do not fit each other, pickles among them.

use std::fs;
use std::path::Path;

use rand::RngExt;
use voltaic::checkpoint::{DeepSpeedRead, read_deepspeed};

use crate::mutate::mutated;
use crate::torch_file::{WORDS, archive, entries};
use crate::{folder, stress};

#[test]
fn folders_of_deepspeed() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/deepspeed/checkpoints");
    for run in ["stage2_bf16", "stage3"] {
        let folder = folder();
        let mut files = Vec::new();
        for entry in fs::read_dir(fixtures.join(run).join("global_step3")).unwrap() {
            let entry = entry.unwrap();
            let bytes = fs::read(entry.path()).unwrap();
            let path = folder.path().join(entry.file_name());
            fs::write(&path, &bytes).unwrap();
            files.push((path, entries(&bytes), bytes));
        }
        files.sort_by(|a, b| a.0.cmp(&b.0));
        stress(&format!("folders of DeepSpeed, {run}"), |rng| {
            let (path, entries, whole) = &files[rng.random_range(0..files.len())];
            let bytes = match rng.random_range(0..10) {
                0 => mutated(whole, &[], rng),
                _ => {
                    let pickle = &entries.iter().find(|(name, _)| name.ends_with("data.pkl")).unwrap().1;
                    let pickle = mutated(pickle, &WORDS, rng);
                    archive(entries, &pickle, rng)
                }
            };
            fs::write(path, bytes).unwrap();
            let how = DeepSpeedRead { weights_only: rng.random(), ..DeepSpeedRead::default() };
            let is_read = read_deepspeed(folder.path(), &how).is_ok();
            fs::write(path, whole).unwrap();
            is_read
        });
    }
}
