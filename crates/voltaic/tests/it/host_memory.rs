//! When memory runs short pools give back what they keep, and what then does not fit is an error, not the end of the process.
//! Limits are those of a made-up cgroup, or of `ulimit`, in a process of its own.

use std::path::Path;
use std::process::Command;
use std::{fs, thread, time};

use tch::{Kind, Tensor};
use voltaic::error::{Error, TorchErrorKind};
use voltaic::ffi;

use crate::probe::{own_process, plays, text_of};

const MIB: i64 = 1 << 20;

fn bytes(bytes: i64) -> Result<Tensor, tch::TchError> {
    Tensor::f_ones([bytes], (Kind::Uint8, tch::Device::Cpu))
}

/// The message of an allocation that must be refused.
fn refused(bytes_wanted: i64) -> String {
    match Error::from(bytes(bytes_wanted).unwrap_err()) {
        Error::Torch(error) if error.kind == TorchErrorKind::OutOfMemory => error.message,
        other => panic!("{other}"),
    }
}

/// A cgroup of version 2 with a limit, of which little is used.
fn cgroup(folder: &Path, max: i64) {
    fs::write(folder.join("memory.max"), format!("{max}\n")).unwrap();
    fs::write(folder.join("memory.high"), "max\n").unwrap();
    fs::write(folder.join("memory.current"), "1000000\n").unwrap();
}

/// Runs `test` as `part` with a cgroup of `max` bytes.
fn in_cgroup(part: &str, max: i64) {
    let folder = tempfile::tempdir().unwrap();
    cgroup(folder.path(), max);
    let mut child = own_process(part);
    text_of(&child.env("VOLTAIC_CGROUP", folder.path()).env("VOLTAIC_HOST_POOL", "1").output().unwrap());
}

#[test]
fn what_is_kept_goes_back_before_an_allocation_fails() {
    if !plays("cgroup") {
        return in_cgroup("cgroup", 512 * MIB);
    }
    assert!(ffi::install_host_pool().unwrap());
    let pool = ffi::host_pool();
    let _live = bytes(400 * MIB).unwrap();
    drop((0..120).map(|_| bytes(MIB / 2).unwrap()).collect::<Vec<_>>());
    assert!(pool.stats().cached() > 55 << 20, "{}", pool.stats());
    let more = bytes(80 * MIB).expect("the small blocks make room");
    assert!(pool.stats().cached() < 30 << 20, "{}", pool.stats());
    let message = refused(200 * MIB);
    for part in [
        "tried to allocate 209715200 bytes",
        "memory.max is 536870912 bytes, of which",
        "VOLTAIC_HOST_MEMORY",
    ] {
        assert!(message.contains(part), "no `{part}` in: {message}");
    }
    drop(more);
    drop(bytes(90 * MIB).expect("smaller ones still fit"));
}

#[test]
fn near_the_limit_idle_memory_goes_back() {
    if !plays("near") {
        return in_cgroup("near", 512 * MIB);
    }
    assert!(ffi::install_host_pool().unwrap());
    let pool = ffi::host_pool();
    let second = || {
        (0..600).for_each(|_| drop(bytes(100).unwrap()));
        thread::sleep(time::Duration::from_millis(1050));
        (0..600).for_each(|_| drop(bytes(100).unwrap()));
    };
    drop(bytes(40 * MIB).unwrap());
    second();
    assert!(pool.stats().cached() >= 40 << 20, "nothing is short yet: {}", pool.stats());
    let folder = std::env::var_os("VOLTAIC_CGROUP").unwrap();
    fs::write(Path::new(&folder).join("memory.current"), format!("{}\n", 500 * MIB)).unwrap();
    second();
    assert!(pool.stats().cached() < 1 << 20, "{}", pool.stats());
}

#[test]
fn emulated_hpus_share_the_memory_of_the_host() {
    if !plays("hpu") {
        return in_cgroup("hpu", 256 * MIB);
    }
    assert!(ffi::install_host_pool().unwrap());
    let hpu = ffi::hpu_pool(0).unwrap();
    hpu.set_limit(Some(1 << 30));
    drop(hpu.block(150 << 20).unwrap());
    assert_eq!(hpu.stats().cached(), 152 << 20, "kept, in a block of 152 MiB");
    let tensor = bytes(200 * MIB).expect("what the device keeps goes back for the host");
    assert_eq!((hpu.stats().reserved, hpu.stats().in_use, hpu.stats().num_allocs), (0, 0, 1));
    assert!(hpu.block(100 << 20).is_none(), "its limit allows it, the host's memory does not");
    assert_eq!((hpu.stats().in_use, hpu.stats().num_allocs), (0, 1), "a refusal is not an allocation");
    drop(tensor);
    assert!(hpu.block(100 << 20).is_some());
}

#[test]
fn the_environment_has_the_last_word() {
    if plays("bytes") {
        assert!(ffi::install_host_pool().unwrap());
        let _live = bytes(200 * MIB).unwrap();
        assert_contains!(refused(100 * MIB), "VOLTAIC_HOST_MEMORY is 268435456 bytes, of which");
    } else if plays("none") {
        assert!(ffi::install_host_pool().unwrap());
        drop(bytes(200 * MIB).expect("the cgroup has 64 MiB, which does not count"));
    } else if plays("much") {
        let error = ffi::install_host_pool().unwrap_err().to_string();
        assert!(
            error.starts_with("VOLTAIC_HOST_MEMORY=`much` in the environment is invalid; set it to a size"),
            "{error}"
        );
    } else {
        let folder = tempfile::tempdir().unwrap();
        cgroup(folder.path(), 64 * MIB);
        for (part, value) in [("bytes", "256MiB"), ("none", "none"), ("much", "much")] {
            let mut child = own_process(part);
            child.env("VOLTAIC_CGROUP", folder.path()).env("VOLTAIC_HOST_MEMORY", value);
            text_of(&child.env("VOLTAIC_HOST_POOL", "1").output().unwrap());
        }
    }
}

#[test]
fn below_an_ulimit_too_much_is_an_error() {
    if !plays("ulimit") {
        let mut child = own_process("ulimit");
        text_of(&child.env("VOLTAIC_HOST_POOL", "1").env("OMP_NUM_THREADS", "1").output().unwrap());
        return;
    }
    // above what this process has already
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    let kib: i64 = size.trim().trim_end_matches("kB").trim().parse().unwrap();
    let (pid, limit) = (std::process::id(), (kib + (600 << 10)) << 10);
    let prlimit = Command::new("prlimit").arg(format!("--pid={pid}")).arg(format!("--as={limit}")).status();
    assert!(prlimit.unwrap().success());
    assert!(ffi::install_host_pool().unwrap());
    // of other sizes each time, until there is no more
    let mut kept = Vec::new();
    let mut drops = 0;
    let error = loop {
        let wanted = (40 + kept.len() as i64) * MIB;
        match bytes(wanted) {
            Ok(tensor) => kept.push(tensor),
            Err(_) if drops < 3 && kept.len() > 2 => {
                drops += 1;
                kept.truncate(2);
            }
            Err(error) => break Error::from(error).to_string(),
        }
        assert!(kept.len() < 30, "the limit is not kept");
    };
    assert_eq!(drops, 3);
    assert!(error.contains("out of memory: tried to allocate"), "{error}");
    drop(kept);
    drop(bytes(60 * MIB).expect("there is room again"));
}
