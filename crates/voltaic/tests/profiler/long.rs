//! A long run under a repeating schedule.

use tempfile::TempDir;
use voltaic::profiler::{HpuProfiler, HpuProfilerConfig, ProfilerSchedule};

use crate::{Net, alone, loaders, trainer};

fn resident_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
fn many_steps_leave_resident_memory_flat() {
    let windows = if std::env::var_os("VOLTAIC_TEST_ALL").is_some() { 200 } else { 60 };
    let _alone = alone();
    let folder = TempDir::new().unwrap();
    let schedule = Some(ProfilerSchedule { skip_first: 0, wait: 46, warmup: 1, active: 3, repeat: 0 });
    let config = HpuProfilerConfig {
        dirpath: Some(folder.path().to_owned()),
        filename: Some("long".to_owned()),
        schedule,
        profile_memory: true,
        ..HpuProfilerConfig::default()
    };
    let (sender, receiver) = std::sync::mpsc::channel();
    let profiler = HpuProfiler::new(&config).unwrap().on_trace_ready(move |path| {
        let len = std::fs::metadata(path).unwrap().len();
        std::fs::remove_file(path).unwrap(); // a disk of tests is small
        let page = path.to_str().unwrap().replace(".pt.trace.json", ".html");
        std::fs::remove_file(page).unwrap();
        sender.send((resident_bytes(), len)).unwrap();
    });
    let builder = trainer(folder.path()).accelerator("hpu").devices(1).limit_val_batches(0);
    let mut trainer = builder.with_profiler(profiler).build().unwrap();
    trainer.fit(&mut Net::new(None), &mut loaders(windows * 50)).unwrap();
    let (resident, lens): (Vec<u64>, Vec<u64>) = receiver.try_iter().unzip();
    let last = usize::try_from(windows).unwrap() - 1;
    assert_eq!(resident.len(), last + 1);
    // the allocator needs a while to find its size
    let (early, late) = (resident[last / 5], resident[last]);
    println!(
        "resident: {early} after {} steps, {late} after {}; traces of {} to {} bytes",
        (last / 5 + 1) * 50,
        windows * 50,
        lens[0],
        lens[last]
    );
    assert!(late < early + (4 << 20), "{early} {late}: {resident:?}");
    assert!(lens.iter().all(|&len| len < 2 * lens[0]), "{lens:?}");
}

#[test]
fn a_full_disk_keeps_nothing_half_written_and_is_told_after_the_last_step() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = std::process::Command::new("unshare");
    command.args(["--map-root-user", "--mount", "sh", "-c"]);
    command.arg(r#"mount -t tmpfs -o size=40k tmpfs "$0" && echo mounted && { "$@"; ls -A "$0"; }"#);
    command.arg(folder.path()).arg(env!("CARGO_BIN_EXE_voltaic"));
    command.args(["fit", "--model=Mlp", "--data=MnistData", "--data.batch_size=2"]);
    command.args(["--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.limit_train_batches=6"]);
    command.args(["--trainer.limit_val_batches=0", "--trainer.logger=false"]);
    command.args(["--trainer.enable_checkpointing=false", "--trainer.profiler=PyTorchProfiler"]);
    command.args(
        ["wait=0", "warmup=0", "active=2", "repeat=0"].map(|of| format!("--trainer.profiler.schedule.{of}")),
    );
    command.arg(format!("--trainer.profiler.dirpath={}", folder.path().display()));
    match command.output() {
        Ok(output) if output.stdout.starts_with(b"mounted") => {
            let text = [output.stdout, output.stderr].concat();
            let text = String::from_utf8_lossy(&text);
            assert!(text.contains("6/6") && text.contains("free some disk space"), "{text}");
            assert!(!text.contains(".tmp\n"), "{text}");
        }
        refused => println!("skipped: this system lets nobody mount a small disk: {refused:?}"),
    }
}
