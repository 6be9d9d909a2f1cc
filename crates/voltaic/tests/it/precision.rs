//! Precision: what operators cast, and what runs make of it.

use std::sync::{Mutex, MutexGuard, PoisonError};

use voltaic::precision::{OpLists, autocast, reset_op_lists, set_op_lists};
use voltaic::{Device, Kind, Tensor};

use crate::ops::{Op, SAMPLES};

const CPU: Device = Device::Cpu;

/// The lists belong to the process.
fn lists() -> MutexGuard<'static, ()> {
    static LISTS: Mutex<()> = Mutex::new(());
    LISTS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn sample(name: &str) -> Op {
    SAMPLES.iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("no sample of {name}")).1
}

fn result(op: Op, kind: Kind, other: Kind) -> Kind {
    let make = |kind| Tensor::rand([4, 4], (Kind::Float, tch::Device::Cpu)).to_kind(kind);
    op(&make(kind), &make(other)).kind()
}

/// Names of Habana's lists that are no operators of libtorch, and one that tch does not offer.
const NO_OPERATORS: [&str; 3] = ["iadd", "truediv", "multi_margin_loss"];

#[test]
fn every_operator_of_every_list_casts_as_its_list_says() {
    let _lists = lists();
    let hpu = OpLists::hpu();
    set_op_lists(CPU, &hpu).unwrap();
    let region = autocast(CPU, Kind::BFloat16).unwrap();
    let mut num_checked = 0;
    for name in hpu.lower.iter().filter(|name| !NO_OPERATORS.contains(&name.as_str())) {
        assert_eq!(
            result(sample(name), Kind::Float, Kind::Float),
            Kind::BFloat16,
            "{name} computes in bfloat16"
        );
        num_checked += 1;
    }
    for name in hpu.fp32.iter().filter(|name| !NO_OPERATORS.contains(&name.as_str())) {
        assert_eq!(
            result(sample(name), Kind::BFloat16, Kind::BFloat16),
            Kind::Float,
            "{name} computes in float32"
        );
        num_checked += 1;
    }
    for name in ["add", "addcmul", "cat", "sub", "stack"] {
        assert_eq!(result(sample(name), Kind::BFloat16, Kind::Float), Kind::Float, "{name} takes the widest");
        assert_eq!(result(sample(name), Kind::BFloat16, Kind::BFloat16), Kind::BFloat16, "{name} stays");
        num_checked += 1;
    }
    drop(region);
    reset_op_lists(CPU).unwrap();
    assert_eq!(num_checked, 27 + 47 + 5, "of the 49 two cannot be called");
}

#[test]
fn integers_and_float64_are_left_alone() {
    let _lists = lists();
    set_op_lists(CPU, &OpLists::hpu()).unwrap();
    let region = autocast(CPU, Kind::BFloat16).unwrap();
    assert_eq!(result(|a, b| a.mm(b), Kind::Int64, Kind::Int64), Kind::Int64);
    assert_eq!(result(|a, b| a + b, Kind::Int64, Kind::Int64), Kind::Int64);
    assert_eq!(result(|a, b| a.mm(b), Kind::Double, Kind::Double), Kind::Double);
    drop(region);
    reset_op_lists(CPU).unwrap();
}

#[test]
fn lists_take_effect_when_they_are_set() {
    let _lists = lists();
    let names = |lower: &[&str], fp32: &[&str]| {
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        OpLists { lower: owned(lower), fp32: owned(fp32), promote: Vec::new() }
    };
    let kinds = || {
        let _region = autocast(CPU, Kind::BFloat16).unwrap();
        (result(|a, b| a.mm(b), Kind::Float, Kind::Float), result(|a, _| a.tan(), Kind::Float, Kind::Float))
    };
    let defaults = kinds();
    assert_eq!(defaults, (Kind::BFloat16, Kind::Float), "libtorch's own lists");
    set_op_lists(CPU, &names(&["tan"], &["mm"])).unwrap();
    assert_eq!(kinds(), (Kind::Float, Kind::BFloat16), "swapped");
    set_op_lists(CPU, &names(&["mm"], &["tan"])).unwrap();
    assert_eq!(kinds(), (Kind::BFloat16, Kind::Float), "and back");
    set_op_lists(CPU, &names(&[], &[])).unwrap();
    assert_eq!(kinds(), (Kind::Float, Kind::Float), "in no list");
    reset_op_lists(CPU).unwrap();
    assert_eq!(kinds(), defaults);
}
