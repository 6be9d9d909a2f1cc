//! A user who reads a backtrace of his step should find his way: few frames of ours between `fit` and the step.

use std::backtrace::Backtrace;
use std::sync::{Arc, Mutex};

use crate::probe::{Probe, loaders, silent};

/// Symbol and place of each frame, innermost first. Symbols of generic functions have no path, places tell the crate.
fn frames(backtrace: &str) -> Vec<(&str, &str)> {
    let mut frames: Vec<(&str, &str)> = Vec::new();
    for line in backtrace.lines().map(str::trim_start) {
        if let Some(place) = line.strip_prefix("at ") {
            if let Some(frame) = frames.last_mut() {
                frame.1 = place;
            }
        } else if let Some((number, symbol)) = line.split_once(": ")
            && number.parse::<usize>().is_ok()
        {
            frames.push((symbol, ""));
        }
    }
    frames
}

#[test]
fn at_most_eleven_frames_lie_between_fit_and_training_step() {
    let backtrace = Arc::new(Mutex::new(String::new()));
    let seen = backtrace.clone();
    let mut net = Probe {
        train: Box::new(move |_, loss, _| {
            *seen.lock().unwrap() = Backtrace::force_capture().to_string();
            Ok(loss)
        }),
        ..Probe::default()
    };
    silent().max_steps(1).build().unwrap().fit(&mut net, &mut loaders()).unwrap();
    let backtrace = backtrace.lock().unwrap();
    let frames = frames(&backtrace);
    // debug information may name a function without its path
    let is = |symbol: &str, name: &str| {
        symbol.split('<').next() == Some(name) || symbol.ends_with(&format!("::{name}"))
    };
    let find = |name: &str| frames.iter().position(|(symbol, _)| is(symbol, name)).expect(&backtrace);
    // the outermost, which users call
    let fit = frames.iter().rposition(|(symbol, _)| is(symbol, "fit")).expect(&backtrace);
    let step = find("training_step");
    let sources = concat!(env!("CARGO_MANIFEST_DIR"), "/src/");
    let is_ours = |place: &str| place.starts_with("./src/") || place.contains(sources);
    let between: Vec<_> = frames[step + 1..fit].iter().filter(|(_, place)| is_ours(place)).collect();
    let count = between.len();
    assert!(count <= 11, "{count} frames: {between:#?}");
    // without optimization each function has its frame, and a count of 0 would mean that none was recognized
    assert!(count >= 3 || !cfg!(debug_assertions), "{count} frames in {backtrace}");
}
