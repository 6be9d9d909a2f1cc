//! A user who reads a backtrace of his step should find his way: few frames of ours between `fit` and the step.

use std::backtrace::Backtrace;
use std::sync::{Arc, Mutex};

use crate::probe::{Probe, loaders, silent};

/// Symbols of a backtrace, innermost first. Lines with a place have no number and a colon in front.
fn symbols(backtrace: &str) -> Vec<&str> {
    backtrace
        .lines()
        .filter_map(|line| {
            let (number, symbol) = line.trim_start().split_once(": ")?;
            number.parse::<usize>().ok().map(|_| symbol)
        })
        .collect()
}

#[test]
fn at_most_eight_frames_lie_between_fit_and_training_step() {
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
    let symbols = symbols(&backtrace);
    let place = |end: &str| symbols.iter().position(|symbol| symbol.ends_with(end)).expect(&backtrace);
    let (step, fit) = (place("LightningModule>::training_step"), place("trainer::Trainer::fit"));
    let between: Vec<&&str> = symbols[step + 1..fit]
        .iter()
        .filter(|symbol| symbol.trim_start_matches('<').starts_with("voltaic::"))
        .collect();
    assert!((3..=8).contains(&between.len()), "{} frames: {between:#?}", between.len());
}
