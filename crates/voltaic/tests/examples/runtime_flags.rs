//! Flags of the environment, and what they change.

use voltaic::accelerator::RuntimeFlags;

use crate::{run, run_with};

const PROGRAM: &str = "runtime_flags";

#[test]
fn flags_that_are_read() {
    let ran = run_with(PROGRAM, "flags_that_are_read", &[("HABANA_LOGS", "/logs")]);
    assert!(ran.out.contains("HABANA_LOGS (/logs; default ~/.habana_logs): "), "{}", ran.out);
    assert_eq!(ran.out.lines().count(), RuntimeFlags::from_env().unwrap().report().len());
}

#[test]
fn how_many_cards() {
    assert_eq!(
        run(PROGRAM, "how_many_cards").out,
        "cards: 8 visible, auto takes 1, world_size 1\n\
         HABANA_VISIBLE_MODULES=0,3 cards: 2 visible, auto takes 1, world_size 1\n\
         VOLTAIC_HPU_DEVICES=2 cards: 2 visible, auto takes 2, world_size 2\n"
    );
}

#[test]
fn how_much_memory() {
    let ran = run(PROGRAM, "how_much_memory");
    let limits = ran.out.lines().map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let after =
            |name: &str| words[words.iter().position(|word| *word == name).unwrap() + 1].parse().unwrap();
        let (limit, in_use): (u64, u64) = (after("Limit"), after("MaxInUse"));
        assert!((100..10_000).contains(&in_use), "weights and batches: {line}");
        limit
    });
    assert_eq!(limits.collect::<Vec<_>>(), [96 << 10, 128 << 10, 4 << 10, 48 << 10, 64]);
}

#[test]
fn which_operators_cast() {
    let ran = run(PROGRAM, "which_operators_cast");
    let [default, swapped, given] = ran.out.lines().collect::<Vec<_>>()[..] else { panic!("{}", ran.out) };
    assert_eq!(default, "casts: mm BFloat16, tan Float");
    assert!(swapped.starts_with("LOWER_LIST=ops_fp32.txt ") && swapped.ends_with("mm Float, tan BFloat16"));
    assert!(given.contains("PT_HPU_AUTOCAST_FP32_OPS_LIST") && given.ends_with("mm BFloat16, tan Float"));
}

#[test]
fn tensors_of_a_graph() {
    let ran = run(PROGRAM, "tensors_of_a_graph");
    assert_eq!(
        ran.out,
        "graph_calls: the output of a call is overwritten by the next call\n\
         PT_HPUGRAPH_DISABLE_TENSOR_CACHE=1 graph_calls: the output of a call keeps its values\n"
    );
}

#[test]
fn flags_without_effect() {
    assert_eq!(
        run(PROGRAM, "flags_without_effect").out,
        "without effect on emulated cards: PT_HPU_LAZY_MODE=1, PT_HPU_RECIPE_CACHE_CONFIG=recipes/,true,1024\n"
    );
}

#[test]
fn values_that_are_refused() {
    let ran = run(PROGRAM, "values_that_are_refused");
    for part in [
        "HABANA_VISIBLE_MODULES=`8`",
        "numbers from 0 to 7",
        "PT_HPU_LAZY_MODE=`on`",
        "LOWER_LIST",
        "nowhere.txt",
    ] {
        assert!(ran.out.contains(part), "{part} in {}", ran.out);
    }
}
