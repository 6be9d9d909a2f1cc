//! Tensors in files: both back ends, buffers, names and contents of files, and what goes wrong with disks.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tempfile::TempDir;
use voltaic::Result;
use voltaic::ffi::{
    AlignedBuffer, DIRECT_ALIGN, FileBackend, FileEngine, FileOptions, NamedFile, ReleasableStorage,
};
use voltaic::swap::{SwapFolder, SwapOptions, SwapStore};
use voltaic::{Kind, Tensor};

use crate::probe::{own_process, plays, text_of};

const BACKENDS: [FileBackend; 2] = [FileBackend::IoUring, FileBackend::Threads];
const FOLDER: &str = "VOLTAIC_TEST_FOLDER";
const MIB: usize = 1 << 20;

fn engine(backend: FileBackend, block_size: usize) -> Arc<FileEngine> {
    Arc::new(FileEngine::new(&FileOptions { backend, block_size, ..FileOptions::default() }).unwrap())
}

fn store(path: &Path, engine: &Arc<FileEngine>, buffer_count: usize, buffer_bytes: usize) -> SwapStore {
    let folder = SwapFolder::create(path, "optimizer", 0, engine).unwrap();
    let section = "offload_optimizer";
    SwapStore::new(
        folder,
        engine.clone(),
        SwapOptions {
            section,
            buffer_count,
            buffer_bytes: Some(buffer_bytes),
            min_bytes: None,
            pinned_for: None,
        },
    )
}

fn file(path: &Path) -> Arc<NamedFile> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap();
    Arc::new(NamedFile { file, path: path.to_path_buf() })
}

fn filled(bytes: &[u8]) -> AlignedBuffer {
    let buffer = AlignedBuffer::new(bytes.len(), None).unwrap();
    buffer.bytes(bytes.len()).unwrap().copy_(&Tensor::from_slice(bytes));
    buffer
}

fn bytes_of(buffer: &AlignedBuffer, len: usize) -> Vec<u8> {
    Vec::try_from(buffer.bytes(len).unwrap()).unwrap()
}

fn values(len: usize, seed: u64) -> Tensor {
    let mut rng = StdRng::seed_from_u64(seed);
    Tensor::arange(len as i64, (Kind::Float, tch::Device::Cpu)) * rng.random::<f64>()
}

/// The files that this process has open below a folder: what they were called, and the handle.
fn open_files(folder: &Path) -> Vec<(String, PathBuf)> {
    let handles = fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let named = handles.filter_map(|handle| {
        let target = fs::read_link(&handle).ok()?;
        let below = target.strip_prefix(folder).ok()?.to_str()?.strip_suffix(" (deleted)")?.to_owned();
        Some((below, handle))
    });
    let mut named: Vec<_> = named.collect();
    named.sort();
    named
}

#[test]
fn both_back_ends_move_the_same_bytes() {
    let folder = TempDir::new().unwrap();
    let mut rng = StdRng::seed_from_u64(7);
    for backend in BACKENDS {
        for (block_size, queue_depth, intra_op_parallelism) in
            [(1024, 2, 2), (3 * DIRECT_ALIGN, 1, 1), (MIB, 8, 1), (1 << 15, 3, 4)]
        {
            for (single_submit, overlap_events) in [(false, true), (true, false)] {
                let options = FileOptions {
                    backend,
                    block_size,
                    queue_depth,
                    intra_op_parallelism,
                    single_submit,
                    overlap_events,
                    timeout: Duration::from_secs(60),
                };
                let engine = FileEngine::new(&options).unwrap();
                assert_eq!(engine.backend(), backend);
                let path = folder.path().join("moved");
                let file = file(&path);
                let mut expected = vec![0_u8; 64 * DIRECT_ALIGN];
                fs::write(&path, &expected).unwrap();
                for _ in 0..4 {
                    let pages = rng.random_range(1..16);
                    let at = DIRECT_ALIGN * rng.random_range(0..=64 - pages);
                    let mut bytes = vec![0_u8; pages * DIRECT_ALIGN];
                    rng.fill(&mut bytes[..]);
                    expected[at..at + bytes.len()].copy_from_slice(&bytes);
                    let write = engine.start_write(&file, at as u64, filled(&bytes), bytes.len()).unwrap();
                    write.wait().unwrap();
                }
                assert!(fs::read(&path).unwrap() == expected, "{options:?}");
                // several at a time
                let reads: Vec<_> = (0..4)
                    .map(|part| {
                        let (at, len) = (part << 16, 1 << 16);
                        let buffer = AlignedBuffer::new(len, None).unwrap();
                        engine.start_read(&file, at as u64, buffer, len).unwrap()
                    })
                    .collect();
                let mut read = Vec::new();
                reads.into_iter().for_each(|part| read.extend(bytes_of(&part.wait().unwrap(), 1 << 16)));
                assert!(read == expected, "{options:?}");
            }
        }
    }
}

#[test]
fn what_the_system_refuses_is_said_with_the_place() {
    let folder = TempDir::new().unwrap();
    for backend in BACKENDS {
        let engine = engine(backend, DIRECT_ALIGN);
        let buffer = || AlignedBuffer::new(4 * DIRECT_ALIGN, None).unwrap();
        // a full disk
        let full = file(Path::new("/dev/full"));
        let write = engine.start_write(&full, 4096, buffer(), 4 * DIRECT_ALIGN).unwrap();
        let error = write.wait().expect_err("the disk is full").to_string();
        assert!(error.starts_with("cannot write /dev/full: 4096 bytes at offset "), "{error}");
        assert!(error.ends_with("; free some disk space, or choose another folder"), "{error}");
        // a disk that fails: nothing is mapped at the first address
        let memory = File::open("/proc/self/mem").unwrap();
        let broken = Arc::new(NamedFile { file: memory, path: "/proc/self/mem".into() });
        let read = engine.start_read(&broken, 0, buffer(), DIRECT_ALIGN).unwrap();
        let error = read.wait().expect_err("EIO").to_string();
        assert!(error.contains("4096 bytes at offset 0: Input/output error (os error 5)"), "{error}");
        assert!(error.ends_with("; check the disk (dmesg), or name another one in nvme_path"), "{error}");
        // a file that was cut, within a page and at its end
        let path = folder.path().join("cut");
        for len in [6000, 8192] {
            fs::write(&path, vec![1; len]).unwrap();
            let read = engine.start_read(&file(&path), 0, buffer(), 3 * DIRECT_ALIGN).unwrap();
            let error = read.wait().expect_err("it is too short").to_string();
            assert!(error.contains("the file has been cut"), "{error}");
            assert!(error.ends_with("; do not change swap files while a run uses them"), "{error}");
        }
        // what is no whole block
        for (offset, len) in [(0, 100), (7, 4096), (0, 5 * DIRECT_ALIGN)] {
            let error = engine.start_read(&full, offset, buffer(), len).expect_err("no block").to_string();
            assert!(error.contains("move whole blocks of 4096 bytes"), "{error}");
        }
    }
}

#[test]
fn a_disk_that_does_not_answer_is_an_error_in_time() {
    let timeout = Duration::from_millis(100);
    let options = FileOptions { backend: FileBackend::IoUring, timeout, ..FileOptions::default() };
    let engine = FileEngine::new(&options).unwrap();
    let (silent, other) = UnixStream::pair().unwrap();
    let file = Arc::new(NamedFile { file: OwnedFd::from(silent).into(), path: "/slow".into() });
    let read = engine.start_read(&file, 0, AlignedBuffer::new(4096, None).unwrap(), 4096).unwrap();
    assert!(!read.is_done());
    let error = read.wait().expect_err("nothing comes").to_string();
    assert_eq!(
        error,
        "cannot read /slow: 4096 bytes at offset 0: 1 pieces are not done after 0.1 s; check the disk (dmesg), or raise the \
         time-out of the strategy"
    );
    drop(other);
}

#[test]
fn a_store_gives_back_what_it_was_given() {
    let folder = TempDir::new().unwrap();
    for backend in BACKENDS {
        let engine = engine(backend, MIB);
        let mut store = store(folder.path(), &engine, 2, 3 * MIB);
        let sizes = [1, 1000, MIB / 4 - 1, MIB / 4, MIB / 4 + 1, 3 * MIB / 4];
        let tensors: Vec<_> = sizes.iter().enumerate().map(|(at, len)| values(*len, at as u64)).collect();
        for (at, tensor) in tensors.iter().enumerate() {
            store.put(&format!("exp_avg-{at}_{at}"), tensor).unwrap();
        }
        for (at, tensor) in tensors.iter().enumerate().rev() {
            let got = store.get(&format!("exp_avg-{at}_{at}"), Kind::Float, tensor.numel()).unwrap();
            assert!(got == *tensor, "{backend}: {at}");
        }
        // the tensors below 1 MiB have no file; files have DeepSpeed's names and format, and are private
        let files = open_files(&fs::canonicalize(folder.path()).unwrap());
        let expected =
            [3, 4, 5].map(|at| format!("zero_stage_3/optimizer/rank0/exp_avg-{at}_{at}.tensor.swp"));
        assert_eq!(files.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>(), expected);
        for ((_, handle), tensor) in files.iter().zip(&tensors[3..]) {
            let bytes = fs::read(handle).unwrap();
            let raw: Vec<f32> = Vec::try_from(tensor.shallow_clone()).unwrap();
            assert!(bytes.len().is_multiple_of(DIRECT_ALIGN) && bytes.len() - 4 * raw.len() < DIRECT_ALIGN);
            for at in [0, 1, raw.len() / 2, raw.len() - 1] {
                assert_eq!(bytes[4 * at..4 * at + 4], raw[at].to_le_bytes(), "{handle:?}");
            }
            assert_eq!(fs::metadata(handle).unwrap().mode() & 0o777, 0o600);
        }
        let rank = folder.path().join("zero_stage_3/optimizer/rank0");
        assert_eq!(fs::metadata(&rank).unwrap().mode() & 0o777, 0o700);
        let stats = store.stats();
        assert!(stats.buffer_bytes <= 2 * 3 * MIB, "{stats:?}");
        assert_eq!(stats.file_bytes as usize, 2 * MIB + DIRECT_ALIGN + 3 * MIB);
        drop(store);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
    }
}

#[test]
fn reads_ahead_and_writes_behind_share_the_buffers() {
    let folder = TempDir::new().unwrap();
    let (len, count) = (MIB / 4, 5_usize);
    for backend in BACKENDS {
        let mut store = store(folder.path(), &engine(backend, MIB / 4), 3, MIB);
        let name = |at: usize| format!("{at}");
        (0..count).for_each(|at| store.put(&name(at), &values(len, at as u64)).unwrap());
        for round in 1..3 {
            for at in 0..count {
                let buffer = store.take(&name(at)).unwrap();
                if at + 1 < count {
                    let _ = store.start_read(&name(at + 1)).unwrap();
                }
                let _ = buffer.tensor(Kind::Float, len).unwrap().g_add_scalar_(1.0);
                store.start_write(&name(at), buffer).unwrap();
            }
            for at in (0..count).rev() {
                let expected = (0..round).fold(values(len, at as u64), |sum, _| sum + 1.0);
                assert!(store.get(&name(at), Kind::Float, len).unwrap() == expected, "{backend}: {at}");
            }
        }
        store.flush().unwrap();
        assert!(
            store.stats().buffer_bytes <= 3 * MIB,
            "a write that was quick leaves its buffer for the next read"
        );
        let held = [0, 1, 2].map(|at| (name(at), store.take(&name(at)).unwrap()));
        assert!(!store.start_read(&name(3)).unwrap(), "{backend}: all buffers are in use");
        held.into_iter().for_each(|(name, buffer)| store.give_back(&name, buffer));
        assert_eq!(store.stats().buffer_bytes, 3 * MIB);
    }
}

/// Buffers are as long as the largest tensor so far, also those that were read ahead into before it came; with `min_bytes` a single element
/// has a file.
#[test]
fn buffers_grow_with_the_tensors() {
    let folder = TempDir::new().unwrap();
    let engine = engine(FileBackend::Auto, DIRECT_ALIGN);
    let mut store = SwapStore::new(
        SwapFolder::create(folder.path(), "optimizer", 0, &engine).unwrap(),
        engine.clone(),
        SwapOptions {
            section: "offload_optimizer",
            buffer_count: 2,
            buffer_bytes: Some(MIB),
            min_bytes: Some(4),
            pinned_for: None,
        },
    );
    assert!(store.swaps(4) && !store.swaps(3));
    ["a", "b"].iter().for_each(|name| store.put(name, &values(1, 1)).unwrap());
    assert_eq!(store.stats().buffer_bytes, DIRECT_ALIGN); // one was enough
    assert!(store.start_read("a").unwrap() && store.start_read("b").unwrap());
    assert!(store.has_buffer(), "what was read ahead can be given up");
    let large = values(MIB / 4, 2);
    store.put("large", &large).unwrap();
    assert!(store.get("large", Kind::Float, MIB / 4).unwrap() == large);
    for name in ["a", "b"] {
        assert!(store.get(name, Kind::Float, 1).unwrap() == values(1, 1));
    }
    let held = [store.take("a").unwrap(), store.take("large").unwrap()];
    assert!(!store.has_buffer());
    let [a, large] = held;
    store.give_back("a", a);
    assert!(store.has_buffer());
    store.give_back("large", large);
    let busy = engine.busy();
    assert!(busy > Duration::ZERO);
    assert_eq!(engine.busy(), busy, "nothing is under way");
}

#[test]
fn buffers_that_do_not_suffice_are_named() {
    let folder = TempDir::new().unwrap();
    let mut store = store(folder.path(), &engine(FileBackend::Threads, MIB), 2, MIB);
    let error = store.put("3_7", &values(MIB, 0)).expect_err("a buffer is shorter").to_string();
    assert!(
        error.starts_with("zero_optimization.offload_optimizer.buffer_size: 3_7 has 4194304 bytes"),
        "{error}"
    );
    let names = ["a", "b", "c"];
    names.iter().for_each(|name| store.put(name, &values(MIB / 4, 0)).unwrap());
    let held = [store.take("a").unwrap(), store.take("b").unwrap()];
    assert!(!store.start_read("c").unwrap(), "there is no buffer for it");
    let error = store.take("c").expect_err("there is no buffer for it").to_string();
    assert_eq!(
        error,
        "zero_optimization.offload_optimizer.buffer_count: all 2 buffers are in use, and one more is needed; raise buffer_count \
         (optimizer_buffer_count as an argument of DeepSpeedStrategy)"
    );
    let [a, b] = held;
    store.give_back("a", a);
    store.start_write("b", b).unwrap();
    assert!(store.get("c", Kind::Float, MIB / 4).unwrap() == values(MIB / 4, 0));
    assert_contains!(store.take("d").expect_err("it is not there").to_string(), "d is not stored");
}

#[test]
fn a_mapped_file_has_what_was_written_and_gets_what_is_written_there() {
    let folder = TempDir::new().unwrap();
    for backend in BACKENDS {
        let mut store = store(folder.path(), &engine(backend, MIB), 2, 4 * MIB);
        store.put("a", &values(MIB / 4, 1)).unwrap();
        let memory = store.map("a").unwrap().expect("it has a file").view_dtype(Kind::Float);
        for seed in 2..6 {
            assert!(memory == values(MIB / 4, seed - 1), "{backend}");
            let _ = memory.shallow_clone().fill_(0.5);
            assert!(store.get("a", Kind::Float, MIB / 4).unwrap() == memory, "{backend}");
            store.put("a", &values(MIB / 4, seed)).unwrap();
        }
        store.put("small", &values(10, 1)).unwrap();
        assert!(store.map("small").unwrap().is_none());
    }
}

#[test]
fn a_buffer_is_the_memory_of_a_tensor_for_a_while() -> Result<()> {
    let whole = Tensor::arange(4096, (Kind::Float, tch::Device::Cpu));
    let (expected, view) = (whole.copy(), whole.narrow(0, 100, 50));
    let mut storage = ReleasableStorage::of(&whole);
    let buffer = AlignedBuffer::new(1 << 16, None)?;
    buffer.tensor(Kind::Float, 4096)?.copy_(&whole);
    storage.release()?;
    storage.lend(&buffer.bytes(1 << 14)?)?;
    assert!(whole == expected && view == expected.narrow(0, 100, 50));
    let _ = view.shallow_clone().fill_(-1.0);
    assert_eq!(buffer.tensor(Kind::Float, 4096)?.double_value(&[120]), -1.0);
    drop(buffer); // the tensor keeps the memory
    assert_eq!(whole.double_value(&[149]), -1.0);
    storage.release()?;
    let short = AlignedBuffer::new(4096, None)?;
    let error = storage.lend(&short.bytes(4096)?).expect_err("it is too short").to_string();
    assert!(error.contains("4096 bytes are lent to a tensor of 16384"), "{error}");
    storage.restore()?;
    Ok(())
}

/// A child of this test with a folder, as `sh -c script` runs it.
fn child(part: &str, script: &str, folder: &Path) -> Command {
    let test = own_process(part);
    let mut command = Command::new("sh");
    command.args(["-c", script]).arg(folder).arg(test.get_program()).args(test.get_args());
    command.envs(test.get_envs().filter_map(|(key, value)| Some((key, value?)))).env(FOLDER, folder);
    command
}

fn given_folder() -> PathBuf {
    PathBuf::from(std::env::var_os(FOLDER).unwrap())
}

/// What a store says that has no room, and what it has afterwards.
fn fill_up(expected: &[&str]) {
    let folder = given_folder();
    for backend in BACKENDS {
        let mut store = store(&folder, &engine(backend, MIB), 2, 4 * MIB);
        store.put("small", &values(MIB / 4, 1)).unwrap();
        let error = store.put("large", &values(MIB, 2)).expect_err("it does not fit").to_string();
        let found = expected.iter().all(|text| error.contains(text));
        assert!(found && error.contains("large.tensor.swp"), "{error}");
        assert!(store.get("small", Kind::Float, MIB / 4).unwrap() == values(MIB / 4, 1));
        let room = store.folder().check_room(1 << 60).expect_err("no disk is so large").to_string();
        assert!(room.contains("swap to") && room.contains("name another disk in nvme_path"), "{room}");
    }
    println!("there was no room");
}

#[test]
fn a_full_disk_is_explained_and_what_is_there_stays() {
    if plays("full disk") {
        return fill_up(&["4194304 bytes", "free some disk space"]);
    }
    let folder = TempDir::new().unwrap();
    let script = r#"exec unshare --map-root-user --mount sh -c 'mount -t tmpfs -o size=2m tmpfs "$0" && exec "$@"' "$0" "$@""#;
    let output = child("full disk", script, folder.path()).output().unwrap();
    if String::from_utf8_lossy(&output.stdout).contains("running 1 test") {
        assert!(text_of(&output).contains("there was no room"));
    } else {
        // the next test shows the same with a limit on the size of files
        println!("skipped: this system lets nobody mount a small disk: {output:?}");
    }
}

#[test]
fn a_limit_on_the_size_of_files_is_explained() {
    if plays("size limit") {
        return fill_up(&["4194304 bytes, with a limit of 2097152 bytes for a file", "ulimit -f"]);
    }
    let folder = TempDir::new().unwrap();
    let output = child("size limit", r#"ulimit -f 4096; exec "$@""#, folder.path()).output().unwrap();
    assert!(text_of(&output).contains("there was no room"));
}

#[test]
fn files_vanish_with_a_process_that_is_killed() {
    if plays("killed") {
        let mut store = store(&given_folder(), &engine(FileBackend::Auto, MIB), 2, 8 * MIB);
        (0..4).for_each(|at| store.put(&format!("{at}"), &values(MIB / 4, at)).unwrap());
        println!("stored");
        std::thread::sleep(Duration::from_secs(60));
    }
    let folder = TempDir::new().unwrap();
    let mut child = child("killed", r#"exec "$@""#, folder.path()).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.map_while(std::io::Result::ok).any(|line| line.ends_with("stored")));
    child.kill().unwrap();
    child.wait().unwrap();
    let rank = folder.path().join("zero_stage_3/optimizer/rank0");
    assert_eq!(fs::read_dir(&rank).unwrap().count(), 0, "a killed process leaves no file");
    // a name that a kill between making a file and removing its name has left is no obstacle
    fs::write(rank.join("0.tensor.swp"), "left").unwrap();
    let mut store = store(folder.path(), &engine(FileBackend::Auto, MIB), 2, 4 * MIB);
    store.put("0", &values(MIB / 4, 3)).unwrap();
    assert_eq!(fs::read_dir(&rank).unwrap().count(), 0);
    assert!(store.get("0", Kind::Float, MIB / 4).unwrap() == values(MIB / 4, 3));
}

#[test]
fn two_runs_may_share_a_folder_and_it_may_vanish() {
    let folder = TempDir::new().unwrap();
    let engine = engine(FileBackend::Auto, MIB);
    let mut stores = [0, 1].map(|_| store(folder.path(), &engine, 2, MIB));
    for (seed, store) in (0_u64..).zip(&mut stores) {
        store.put("a", &values(MIB / 4, seed)).unwrap();
    }
    fs::remove_dir_all(folder.path().join("zero_stage_3")).unwrap();
    for (seed, store) in (0_u64..).zip(&mut stores) {
        assert!(store.get("a", Kind::Float, MIB / 4).unwrap() == values(MIB / 4, seed));
        store.put("a", &values(MIB / 4, seed + 7)).unwrap();
        assert!(store.get("a", Kind::Float, MIB / 4).unwrap() == values(MIB / 4, seed + 7));
        let error = store.put("b", &values(MIB / 4, seed)).expect_err("the folder is gone").to_string();
        assert!(error.contains("cannot create") && error.contains("b.tensor.swp"), "{error}");
    }
    let error =
        SwapFolder::create(Path::new("/proc/nothing"), "optimizer", 0, &engine).expect_err("no folder");
    assert!(
        error.to_string().starts_with("cannot create /proc/nothing/zero_stage_3/optimizer/rank0"),
        "{error}"
    );
}
