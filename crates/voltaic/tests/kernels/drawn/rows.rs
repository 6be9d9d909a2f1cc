//! Each row of the tables of `choice.rs`, and the machine on which drawn calls must reach it.

use std::collections::{BTreeMap, BTreeSet};

use voltaic::kernels::{Machine, choose_as, rows};

/// Machines that kernels are chosen for.
pub const MACHINES: [&str; 4] = ["this one", "without AVX-512", "with wide units", "with AMX"];

/// The machine of such a name, if this one can stand in for it.
fn machine(name: &str) -> Machine {
    let here = Machine::found();
    match name {
        "without AVX-512" => Machine {
            is_intel: false,
            has_strips: false,
            has_wide_units: false,
            has_bf16_products: false,
            has_tiles: false,
            has_described_amx: false,
            ..here
        },
        "with wide units" => Machine {
            is_intel: false,
            has_strips: true,
            has_wide_units: true,
            has_bf16_products: true,
            has_tiles: false,
            has_described_amx: false,
            ..here
        },
        "with AMX" => Machine {
            is_intel: true,
            has_strips: true,
            has_bf16_products: true,
            has_wide_units: false,
            has_tiles: true,
            has_described_amx: true,
            ..here
        },
        _ => here,
    }
}

/// Chooses kernels as on a machine; false if this one cannot stand in for it.
pub fn stand_in_for(name: &str) -> bool {
    choose_as(machine(name))
}

/// Whether this machine can stand in for another.
pub fn can_stand_in_for(name: &str) -> bool {
    Machine::found().can_stand_in_for(&machine(name))
}

/// The rows, by what they are for, and the number of the row among those of the same name.
pub fn keys() -> Vec<String> {
    let mut seen: BTreeMap<String, u32> = BTreeMap::new();
    let mut key = |name: String| {
        let number = seen.entry(name.clone()).or_default();
        *number += 1;
        format!("{name} #{number}")
    };
    rows()
        .iter()
        .map(|row| key(format!("{} of {:?} by {}", row.entry.what, row.entry.dtype, row.entry.kernel)))
        .collect()
}

/// Calls of one kind, of which each row names those that reach it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    Products,
    Convolutions,
    Attentions,
    Images,
    Elements,
}

use Group::{Attentions, Convolutions, Elements, Images, Products};

/// Of each row the machine on which it is reached, and by which calls.
const ENTRIES: [(&str, &str, Group); 32] = [
    ("products of Float32 by Dots #1", "with wide units", Products),
    ("products of Bfloat16 by Dots #1", "with wide units", Products),
    ("products of Float32 by Strips #1", "with wide units", Products),
    ("products of Float32 by Split #1", "with AMX", Products),
    ("products of Float32 by Gemm #1", "without AVX-512", Products),
    ("products of Float32 by GemmOfTurnedRight #1", "without AVX-512", Products),
    ("products of Float32 by GemmOfTurnedRows #1", "without AVX-512", Products),
    ("products of Bfloat16 by Strips #1", "with wide units", Products),
    ("products of Bfloat16 by Mkl #1", "without AVX-512", Products),
    ("convolutions of Float32 by Tiles #1", "with wide units", Convolutions),
    ("convolutions of Bfloat16 by Tiles #1", "with wide units", Convolutions),
    ("convolutions of Float32 by Taps #1", "without AVX-512", Convolutions),
    ("convolutions of Bfloat16 by Taps #1", "without AVX-512", Convolutions),
    ("convolutions of Bfloat16 by Patches #1", "without AVX-512", Convolutions),
    ("convolutions of Bfloat16 by Patches #2", "with wide units", Convolutions),
    ("convolutions of Bfloat16 by Patches #3", "with AMX", Convolutions),
    ("factors of attention of Float32 by Strips #1", "with wide units", Attentions),
    ("factors of attention of Float32 by Matrix #1", "without AVX-512", Attentions),
    ("factors of attention of Bfloat16 by Strips #1", "with wide units", Attentions),
    ("operators of Float32 by Attention #1", "this one", Attentions),
    ("operators of Bfloat16 by Attention #1", "this one", Attentions),
    ("operators of Float32 by BatchNorm #1", "this one", Images),
    ("operators of Bfloat16 by BatchNorm #1", "this one", Images),
    ("operators of Float32 by MaxPool2d #1", "this one", Images),
    ("operators of Bfloat16 by MaxPool2d #1", "this one", Images),
    ("operators of Float32 by Gelu #1", "this one", Elements),
    ("operators of Bfloat16 by Gelu #1", "this one", Elements),
    ("operators of Bfloat16 by Relu #1", "this one", Elements),
    ("operators of Bfloat16 by Add #1", "this one", Elements),
    ("operators of Bfloat16 by Convert #1", "this one", Elements),
    ("operators of Float32 by Bernoulli #1", "this one", Elements),
    ("operators of Bfloat16 by Bernoulli #1", "this one", Elements),
];

/// Of the rows that calls of a group must reach on a machine, those that they did not.
pub fn not_reached(group: Group, on: &str, chosen: &BTreeSet<String>) -> Vec<&'static str> {
    let entries = ENTRIES.iter().filter(|(_, machine, of)| *machine == on && *of == group);
    entries.map(|(key, ..)| *key).filter(|key| !chosen.contains(*key)).collect()
}

/// A new row needs an entry above, and calls that reach it.
#[test]
fn each_row_of_the_tables_has_calls_that_reach_it() {
    let entries: BTreeSet<String> = ENTRIES.iter().map(|(key, ..)| (*key).to_owned()).collect();
    // steps of optimizers are not drawn: voltaic-kernels tests them, and tests/it/narrow_grads.rs
    let is_drawn = |key: &String| !key.contains(" by Update ");
    assert_eq!(keys().into_iter().filter(is_drawn).collect::<BTreeSet<_>>(), entries);
    assert!(ENTRIES.iter().all(|(_, machine, _)| MACHINES.contains(machine)));
}
