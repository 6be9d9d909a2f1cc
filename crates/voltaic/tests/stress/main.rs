//! Inputs that no honest program wrote, many of them, for each parser: none may panic, hang or make memory grow.
//!
//! A parser has a file here. `make test` runs a short form; `make stress` sets `VOLTAIC_STRESS_INPUTS` (how many for each parser) and
//! `VOLTAIC_STRESS_SECS` (the longest that each may take), and prints the counts. An input depends only on its number, and
//! `VOLTAIC_STRESS_FROM` is that of the first.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that panics has failed")]

mod checkpoint;
mod configuration;
mod deepspeed;
mod event_files;
mod idx;
mod mutate;
mod shards;
mod torch_file;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rand::SeedableRng;
use rand::rngs::StdRng;

/// Inputs of each parser in `make test`.
const SHORT: u64 = 1_500;
/// An input that takes longer hangs.
const HANGS_AFTER: Duration = Duration::from_secs(60);
/// The process may be so much larger after the inputs than after the first of them, and at no time larger than that.
const MAX_GROWTH: u64 = 256 << 20;
const MAX_PEAK: u64 = 2 << 30;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// A folder in memory, if there is one.
fn folder() -> tempfile::TempDir {
    let shared = PathBuf::from("/dev/shm");
    match shared.is_dir() {
        true => tempfile::tempdir_in(shared).unwrap(),
        false => tempfile::tempdir().unwrap(),
    }
}

/// A field of `/proc/self/status`, in bytes.
fn status(field: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_start_matches(':').trim().trim_end_matches("kB").trim().parse::<u64>().unwrap() << 10
}

/// Memory at most counts from now on.
fn forget_peak() {
    let _ = std::fs::write("/proc/self/clear_refs", "5"); // without it, that of earlier tests counts, too
}

/// Names the input if it panics.
struct Names<'a>(&'a str, u64);

impl Drop for Names<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("input {} of {} panicked", self.1, self.0);
        }
    }
}

/// Gives `parse` inputs by their number, with random numbers that belong to it; true from it counts as accepted.
fn stress(name: &str, mut parse: impl FnMut(&mut StdRng) -> bool) {
    let count = number("VOLTAIC_STRESS_INPUTS").unwrap_or(SHORT);
    let most = number("VOLTAIC_STRESS_SECS").map_or(Duration::MAX, Duration::from_secs);
    let from = number("VOLTAIC_STRESS_FROM").unwrap_or(0);
    let (at, is_over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let watchdog = std::thread::spawn({
        let (name, at, is_over) = (name.to_owned(), Arc::clone(&at), Arc::clone(&is_over));
        move || {
            let (mut seen, mut since) = (0, Instant::now());
            while !is_over.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(50));
                let now = at.load(Ordering::Relaxed);
                if now != seen {
                    (seen, since) = (now, Instant::now());
                }
                if since.elapsed() > HANGS_AFTER {
                    eprintln!("input {seen} of {name} takes more than {HANGS_AFTER:?}");
                    std::process::abort();
                }
            }
        }
    });
    forget_peak();
    let (start, mut longest, mut accepted, mut done) = (Instant::now(), (Duration::ZERO, 0), 0_u64, 0_u64);
    let warm = count / 10;
    let mut before = status("VmRSS");
    while done < count && start.elapsed() < most {
        let input = from + done;
        at.store(input, Ordering::Relaxed);
        let begun = Instant::now();
        {
            let _names = Names(name, input);
            accepted += u64::from(parse(&mut StdRng::seed_from_u64(input)));
        }
        longest = longest.max((begun.elapsed(), input));
        if done == warm {
            before = status("VmRSS");
        }
        done += 1;
    }
    is_over.store(true, Ordering::Relaxed);
    watchdog.join().unwrap();
    let (after, peak) = (status("VmRSS"), status("VmHWM"));
    println!(
        "{name}: {done} inputs in {:.1} s, {accepted} accepted, the longest took {:.1} ms (input {}); memory {} MiB after the first \
         {warm}, {} MiB at the end, {} MiB at most",
        start.elapsed().as_secs_f64(),
        longest.0.as_secs_f64() * 1e3,
        longest.1,
        before >> 20,
        after >> 20,
        peak >> 20
    );
    assert!(after < before + MAX_GROWTH, "{name}: memory has grown from {before} to {after} bytes");
    assert!(peak < MAX_PEAK, "{name}: {peak} bytes of memory at a time");
}
