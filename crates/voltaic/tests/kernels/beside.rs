//! Voltaic's kernels beside libtorch's own, which another process computes: once they are in, they stay.

use std::collections::HashMap;
use std::process::Command;
use std::{env, fs};

use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

use crate::drawn::calls::Calls;
use crate::drawn::rows::{Group, MACHINES, can_stand_in_for, not_reached, stand_in_for};
use crate::install;

/// Names a file in the process that computes with libtorch's kernels.
const FILE: &str = "VOLTAIC_TEST_BY_LIBTORCH";

/// Keeps voltaic's kernels out, if it is 0.
const KERNELS: &str = "VOLTAIC_CPU_KERNELS";

/// Names the machine that kernels are chosen for in such a process.
const MACHINE: &str = "VOLTAIC_TEST_MACHINE";

/// A result with a name, or the message of an error.
pub type Results = Vec<(String, Result<Tensor, String>)>;

/// What a call gave.
#[derive(Debug)]
pub struct Found {
    pub numbers: Tensor,
    pub strides: Vec<i64>,
}

/// What a call gave by voltaic's kernels, and by libtorch's.
pub struct Both {
    pub name: String,
    pub ours: Result<Found, String>,
    pub theirs: Result<Found, String>,
}

/// Computes with voltaic's kernels and with libtorch's, each in a process of its own; fails with all that `check` complains of.
///
/// `test` is the path of the test that calls this.
pub fn compare(test: &str, compute: fn() -> Results, check: impl Fn(&Both) -> Result<(), String>) {
    if let Some(file) = env::var_os(FILE) {
        if env::var_os(KERNELS).is_none() {
            install();
        }
        let parts: Vec<(String, Tensor)> = compute().into_iter().flat_map(in_parts).collect();
        Tensor::write_safetensors(&parts, file).unwrap();
        return;
    }
    let failures = complaints("", &in_process(test, &[]), &by_libtorch(test), check);
    assert!(failures.is_empty(), "{} differ:\n{}", failures.len(), failures.join("\n"));
}

/// What `check` complains of, result by result of those that libtorch's kernels gave.
fn complaints(
    machine: &str,
    ours: &HashMap<String, Tensor>,
    theirs: &HashMap<String, Tensor>,
    check: impl Fn(&Both) -> Result<(), String>,
) -> Vec<String> {
    let names =
        theirs.keys().filter_map(|part| part.strip_suffix(" numbers").or(part.strip_suffix(" message")));
    names
        .filter_map(|name| {
            let both = Both {
                name: name.to_owned(),
                ours: from_parts(name, ours),
                theirs: from_parts(name, theirs),
            };
            check(&both).err().map(|failure| format!("{machine}{name}: {failure}"))
        })
        .collect()
}

/// Draws calls with voltaic's kernels, chosen as on each machine that this one can stand in for, and with libtorch's, each in a
/// process of its own; fails with all that `check` complains of, and with rows of the tables that no call reached.
pub fn compare_drawn(
    test: &str,
    group: Group,
    draw: fn(&mut Calls),
    seed: u64,
    check: impl Fn(&Both) -> Result<(), String>,
) {
    if let Some(file) = env::var_os(FILE) {
        let mut calls = Calls::new(seed);
        if let Ok(machine) = env::var(MACHINE) {
            assert!(stand_in_for(&machine) && voltaic::ffi::install_kernels().unwrap());
            tch::set_num_threads(2);
        }
        draw(&mut calls);
        let chosen = calls.chosen.into_keys().map(|row| (format!("{row} chosen"), Tensor::from(1)));
        let parts: Vec<(String, Tensor)> =
            calls.results.into_iter().flat_map(in_parts).chain(chosen).collect();
        Tensor::write_safetensors(&parts, file).unwrap();
        return;
    }
    let theirs = by_libtorch(test);
    let mut failures = Vec::new();
    for machine in MACHINES.into_iter().filter(|machine| can_stand_in_for(machine)) {
        let ours = in_process(test, &[(MACHINE, machine)]);
        let chosen = ours.keys().filter_map(|part| part.strip_suffix(" chosen")).map(str::to_owned).collect();
        let missed = not_reached(group, machine, &chosen);
        failures.extend(missed.into_iter().map(|row| format!("no call {machine} is by {row}")));
        failures.extend(complaints(&format!("{machine}: "), &ours, &theirs, &check));
    }
    assert!(failures.is_empty(), "{} differ:\n{}", failures.len(), failures.join("\n"));
}

/// What the process that computes with libtorch's kernels wrote.
fn by_libtorch(test: &str) -> HashMap<String, Tensor> {
    in_process(test, &[(KERNELS, "0")])
}

/// What another process wrote, in which a test finds these variables.
fn in_process(test: &str, variables: &[(&str, &str)]) -> HashMap<String, Tensor> {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("results.safetensors");
    let output = Command::new(env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env(FILE, &file)
        .env_remove(KERNELS) // which other tests of this process set
        // by AMX, oneDNN multiplies what lies behind the last row of a tile: a NaN of the next row spoils both
        .env("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
        .env("OMP_WAIT_POLICY", "passive") // threads that spin on busy cores take most of the time
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(fs::exists(&file).unwrap(), "`{test}` is not a path of a test that compares");
    Tensor::read_safetensors(&file).unwrap().into_iter().collect()
}

fn in_parts((name, result): (String, Result<Tensor, String>)) -> Vec<(String, Tensor)> {
    match result {
        Ok(tensor) => vec![
            (format!("{name} strides"), Tensor::from_slice(&tensor.stride())),
            (format!("{name} numbers"), tensor.contiguous()),
        ],
        Err(message) => vec![(format!("{name} message"), Tensor::from_slice(message.as_bytes()))],
    }
}

fn from_parts(name: &str, parts: &HashMap<String, Tensor>) -> Result<Found, String> {
    let get = |part: &str| parts.get(&format!("{name} {part}"));
    if let Some(text) = get("message") {
        return Err(String::from_utf8(Vec::try_from(text).unwrap()).unwrap());
    }
    let (Some(numbers), Some(strides)) = (get("numbers"), get("strides")) else {
        return Err("not computed".to_owned());
    };
    Ok(Found { numbers: numbers.shallow_clone(), strides: Vec::try_from(strides).unwrap() })
}

impl Both {
    /// What both gave; the messages of errors if they are not the same.
    pub fn found(&self) -> Result<Option<(&Found, &Found)>, String> {
        match (&self.ours, &self.theirs) {
            (Ok(ours), Ok(theirs)) => Ok(Some((ours, theirs))),
            (Err(ours), Err(theirs)) if ours == theirs => Ok(None),
            (ours, theirs) => Err(format!("{ours:?} beside {theirs:?}")),
        }
    }

    /// Whether both gave the same strides.
    pub fn lie_alike(&self) -> Result<(), String> {
        match self.found()? {
            Some((ours, theirs)) if ours.strides != theirs.strides => {
                let sizes = ours.numbers.size();
                Err(format!("strides {:?}, not {:?}, of {sizes:?}", ours.strides, theirs.strides))
            }
            _ => Ok(()),
        }
    }

    /// Whether both gave the same bits; in pools any NaN is as good as another, whose bits libtorch makes depend on where in a
    /// vector it stood.
    pub fn are_same(&self) -> Result<(), String> {
        let Some((ours, theirs)) = self.found()? else { return Ok(()) };
        let numbers = |found: &Found| match &found.numbers {
            x if self.name.contains("pool") => x.masked_fill(&x.isnan(), f64::NAN),
            x => x.shallow_clone(),
        };
        let [a, b] = [ours, theirs].map(|found| bits(&numbers(found)));
        if ours.numbers.kind() != theirs.numbers.kind() || a.len() != b.len() {
            return Err("other kinds or sizes".into());
        }
        let differ: Vec<usize> = (0..a.len()).filter(|i| a[*i] != b[*i]).collect();
        match differ.first() {
            Some(i) => Err(format!("number {i} is {:#x}, not {:#x}; {} differ", a[*i], b[*i], differ.len())),
            None => Ok(()),
        }
    }

    /// Whether the same numbers are NaN, or infinite with the same sign, and the others as close as `tolerance` of the
    /// largest, or of `scale` if that is larger.
    pub fn are_close(&self, tolerance: f64, scale: f64) -> Result<(), String> {
        match self.found()? {
            Some((ours, theirs)) => are_close(&ours.numbers, &theirs.numbers, tolerance, scale),
            None => Ok(()),
        }
    }
}

fn bits(tensor: &Tensor) -> Vec<i64> {
    let (kind, mask) = match tensor.kind() {
        Kind::Float => (Kind::Int, 0xffff_ffff_i64),
        Kind::BFloat16 => (Kind::Int16, 0xffff),
        kind => (kind, -1),
    };
    let numbers = tensor.contiguous().flatten(0, -1);
    let numbers = if kind == tensor.kind() { numbers } else { numbers.view_dtype(kind) };
    Vec::try_from(numbers.to_kind(Kind::Int64).bitwise_and(mask)).unwrap()
}

/// See [`Both::are_close`].
pub fn are_close(ours: &Tensor, theirs: &Tensor, tolerance: f64, scale: f64) -> Result<(), String> {
    if (ours.kind(), ours.size()) != (theirs.kind(), theirs.size()) {
        return Err(format!(
            "{:?} {:?}, not {:?} {:?}",
            ours.kind(),
            ours.size(),
            theirs.kind(),
            theirs.size()
        ));
    }
    let numbers =
        |x: &Tensor| Vec::<f64>::try_from(x.to_kind(Kind::Double).contiguous().flatten(0, -1)).unwrap();
    let [a, b] = [ours, theirs].map(numbers);
    let is_same = |a: f64, b: f64| a == b || a.is_nan() && b.is_nan();
    let differ: Vec<usize> =
        (0..a.len()).filter(|i| !(is_same(a[*i], b[*i]) || a[*i].is_finite() && b[*i].is_finite())).collect();
    if let Some(i) = differ.first() {
        return Err(format!(
            "number {i} is {:e}, not {:e}; {} of {} differ",
            a[*i],
            b[*i],
            differ.len(),
            a.len()
        ));
    }
    let finite = || a.iter().zip(&b).filter(|(a, _)| a.is_finite());
    let largest = finite().fold(scale, |largest, (_, b)| b.abs().max(largest));
    let apart = finite().fold(0.0, |apart: f64, (a, b)| apart.max((a - b).abs())) / largest;
    if apart <= tolerance { Ok(()) } else { Err(format!("{apart:e} of {largest:e} apart")) }
}

/// Numbers at the edges of float32: zeros, subnormals, the largest, infinite, NaNs of several payloads.
pub fn edges() -> Tensor {
    let bits: [u32; 28] = [
        0x0000_0000,
        0x8000_0000,
        0x0000_0001,
        0x8000_0001,
        0x0040_0000,
        0x8040_0000,
        0x007f_ffff,
        0x0080_0000,
        0x8080_0000,
        0x3f80_0000,
        0xbf80_0000,
        0x3f80_8000,
        0x3f81_8000,
        0xc020_0000,
        0x477f_e000,
        0x6077_7777,
        0xe077_7777,
        0x7f7f_0000,
        0x7f7f_ffff,
        0xff7f_ffff,
        0x7f80_0000,
        0xff80_0000,
        0x7fc0_0000,
        0xffc0_0000,
        0x7f80_0001,
        0x7fff_ffff,
        0xffff_ffff,
        0x7fc1_2345,
    ];
    let bits = bits.map(u32::cast_signed);
    Tensor::from_slice(&bits).view_dtype(Kind::Float)
}

/// Magnitudes between the edges, both signs.
pub fn magnitudes() -> Tensor {
    let powers = Tensor::arange_start(-40, 39, (Kind::Double, Device::Cpu));
    let numbers = Tensor::cat(
        &[(powers * std::f64::consts::LN_10).exp(), Tensor::arange(200, (Kind::Double, Device::Cpu)) / 8.0],
        0,
    );
    Tensor::cat(&[&numbers, &-&numbers], 0).to_kind(Kind::Float)
}
